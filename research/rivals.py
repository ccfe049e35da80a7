"""The comparison again, with rivals: constant learning rates without weight decay, and others.

    python research/rivals.py

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
NEW = runpy.run_path(str(RUNS / "run.py"))["LINES"]
POWER = "Power (fitted), averaged"
AVERAGED_LINEAR = "linear to 0 (fitted), averaged"
# difference -> (a line, the line to subtract)
DECISIONS = {
    "constant, weight decay 0, instead of Power": (
        "constant, weight decay 0, averaged",
        POWER,
    ),
    "constant, memory 5, instead of Power": ("constant, memory 5, averaged", POWER),
    "Power instead of constant, both at 0.1": (POWER, "WSD ∝ √batch, averaged"),
    "Power, weight decay 0.3 instead of 0.1": (
        "Power (fitted), weight decay 0.3, averaged",
        POWER,
    ),
    "Power, weight decay 0 instead of 0.1": (
        "Power (fitted), weight decay 0, averaged",
        POWER,
    ),
    "Power instead of constant, both at 0": (
        "Power (fitted), weight decay 0, averaged",
        "constant, weight decay 0, averaged",
    ),
    "linear to 0, averaged or not": (
        AVERAGED_LINEAR,
        "linear to 0 (fitted)",
    ),
    "schedule-free AdamW instead of Power": ("schedule-free", POWER),
}


@cache
def lines() -> dict:
    """{line: {dense cell: {seed: loss}}} of both comparisons."""
    folders = [ROOT / "results/compare-laptop", ROOT / "results/search-laptop"]
    found, _, _ = losses_of_lines(fit.read_records(folders))
    for name, new in NEW.items():
        # read_records would refuse to mix weight decays
        records = [complete(r) for r in records_in(RUNS / name)]
        more, _, runs_of = losses_of_lines(records, new)
        if AVERAGED_LINEAR in more:  # its loss is without the average, which we take here
            for cell, losses in more[AVERAGED_LINEAR].items():
                for seed, run in runs_of(AVERAGED_LINEAR, cell).items():
                    losses[seed] = run["average_val_loss"]
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
    any_time = [name for name in means if needs_T(every[name]) == "never"]
    planned = [name for name in means if needs_T(every[name]) == "from the start"]
    return min(any_time, key=means.get), min(planned, key=means.get)


def seeds_of(name: str) -> int:
    """How many seeds a line has."""
    return min(len(seeds) for seeds in lines()[name].values())


def print_lines() -> None:
    """A row for every new line, in Markdown."""
    every = NEW["adamw"] | NEW["schedule-free"]
    gaps = {name: differences(lines()[name], lines()[POWER], cells()) for name in every}
    late = f"at T = {size(longest())}"
    print(f"| dense, {len(cells())} cells | needs T | seeds | minus {POWER} | {late} |")
    print("|---|---|---|---|---|")
    for name in sorted(every, key=lambda name: gaps[name][0]):
        at_longest = differences(lines()[name], lines()[POWER], cells(longest()))
        row = [name, needs_T(every[name]), str(seeds_of(name))]
        row += [f"{show(rows)} {verdict(rows)}" for rows in (gaps[name], at_longest)]
        print(f"| {' | '.join(row)} |")


def print_decisions() -> None:
    """A row for every decision, in Markdown, and the differences that survive Holm's rule."""
    late = f"T = {size(longest())}"
    print(f"\n| decision | all T | {late} |")
    print("|---|---|---|")
    tests = {}
    for decision in DECISIONS:
        some = {f"{decision}, all T": difference(decision)}
        some[f"{decision}, {late}"] = difference(decision, longest())
        row = [f"{show(rows)} {verdict(rows)}" for rows in some.values()]
        print(f"| {decision} | {' | '.join(row)} |")
        tests |= some
    survivors = "; ".join(holm(tests)) or "none"
    print(f"\nnot 0 after Holm's correction for {len(tests)}: {survivors}")


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("rivals.py", __doc__).parse_args(argv)
    print_lines()
    print_decisions()
    any_time, planned = best_lines()
    rows = differences(lines()[any_time], lines()[planned], cells())
    print(f"{any_time} minus {planned}: {show(rows)} (both chosen after the fact)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
