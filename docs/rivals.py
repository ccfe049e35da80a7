"""The comparison again, with rivals: constant learning rates without weight decay, and others.

    python docs/rivals.py

Prints the table and the decisions of results/rivals-laptop/rules.md, from its records and
those of the comparison.
"""

import runpy
import sys
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fit
from compare import LINES, differences, holm, losses_of_lines, mean_loss, needs_T, verdict
from fit import show
from records import complete, records_in
from tools import flags
from tools.figures import size

RUNS = ROOT / "results/rivals-laptop"
RUN = runpy.run_path(str(RUNS / "run.py"))
NEW = {"adamw": RUN["RIVALS"], "schedule-free": RUN["SCHEDULE_FREE"]}
POWER = "Power (fitted), averaged"
# difference -> (a line, the line to subtract)
DECISIONS = {
    "no weight decay instead of Power": ("constant, weight decay 0, averaged", POWER),
    "memory 5 instead of Power": ("constant, memory 5, averaged", POWER),
    "Power, weight decay 0.1": (POWER, "WSD ∝ √batch, averaged"),
    "Power at 0.3 minus at 0.1": ("Power (fitted), weight decay 0.3, averaged", POWER),
    "Power at 0 minus at 0.1": ("Power (fitted), weight decay 0, averaged", POWER),
    "Power, weight decay 0": (
        "Power (fitted), weight decay 0, averaged",
        "constant, weight decay 0, averaged",
    ),
    "average of linear to 0": ("linear to 0 (fitted), averaged", "linear to 0 (fitted)"),
    "schedule-free": ("schedule-free", POWER),
}


@cache
def lines() -> dict:
    """{line: {dense cell: {seed: loss}}} of both comparisons."""
    folders = [ROOT / "results/compare-laptop", ROOT / "results/search-laptop"]
    found, _, _ = losses_of_lines(fit.read_records(folders))
    for name, new in NEW.items():
        # read_records would refuse to mix weight decays
        records = [complete(r) for r in records_in(RUNS / name)]
        more, _, _ = losses_of_lines(records, new)
        found |= more
    for name, losses in found.items():
        found[name] = {cell: losses[cell] for cell in losses if "experts" not in cell[0]}
    return found


def cells(T: int | None = None) -> list:
    """The cells that all lines have, in the mean over all T or at one."""
    common = set.intersection(*(set(losses) for losses in lines().values()))
    return [cell for cell in lines()[POWER] if cell in common and T in (None, cell[1])]


def difference(decision: str, T: int | None = None) -> np.ndarray:
    """The rows of a difference of DECISIONS."""
    one, other = DECISIONS[decision]
    return differences(lines()[one], lines()[other], cells(T))


def longest() -> int:
    return max(T for _, T, _ in cells())


def best_lines() -> tuple[str, str]:
    """The any-time line and the planned line with the lowest mean loss."""
    every = LINES | NEW["adamw"] | NEW["schedule-free"]
    seeds = set.intersection(
        *(set(some) for losses in lines().values() for some in losses.values())
    )
    means = {}
    for name, losses in lines().items():
        common = {cell: {seed: losses[cell][seed] for seed in seeds} for cell in cells()}
        means[name] = mean_loss(common, cells())
    kinds = ([n for n in means if needs_T(every[n]) == "never"],
             [n for n in means if needs_T(every[n]) == "from the start"])  # fmt: skip
    any_time, planned = (min(names, key=means.get) for names in kinds)
    return any_time, planned


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("rivals.py", __doc__).parse_args(argv)
    every = LINES | NEW["adamw"] | NEW["schedule-free"]
    gaps = {}
    late = {}
    for name, losses in lines().items():
        if name != POWER:
            gaps[name] = differences(losses, lines()[POWER], cells())
            late[name] = differences(losses, lines()[POWER], cells(longest()))
    print(f"| dense, {len(cells())} cells | needs T | minus {POWER} | at T = "
          f"{size(longest())} |")  # fmt: skip
    print("|---|---|---|---|")
    for name in sorted(gaps, key=lambda name: gaps[name][0]):
        row = [f"{show(some)} {verdict(some)}" for some in (gaps[name], late[name])]
        print(f"| {name} | {needs_T(every[name])} | {' | '.join(row)} |")

    print()
    tests = {}
    for decision, (one, other) in DECISIONS.items():
        for T in (None, longest()):
            where = f"T = {size(T)}" if T else "all T"
            tests[f"{decision}, {where}"] = difference(decision, T)
            rows = difference(decision, T)
            print(f"{decision}, {where}: {show(rows)} {verdict(rows)}")
    print(f"not 0 after Holm's correction for {len(tests)}: {holm(tests) or 'none'}")
    any_time, planned = best_lines()
    rows = differences(lines()[any_time], lines()[planned], cells())
    print(f"{any_time} minus {planned}: {show(rows)} (both chosen after the fact)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
