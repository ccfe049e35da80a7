"""The comparison again, with rivals: constant learning rates without weight decay, and others.

    python research/rivals.py

Prints the table and the decisions of research/results/rivals-laptop/rules.md, from its records and
those of the comparison.
"""

import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from compare import AVERAGED, LINEAR, LINES, POWER, WSD, Line
from compare import differences, holm, index_runs, losses_of_lines
from compare import mean_loss, needs_T, verdict
from fit import Estimate, show
from tables import Table
from records import read_records, read_rows, row
from tools import flags
from tools.figures import size

RUNS = ROOT / "research/results/rivals-laptop"
NO_DECAY = dict(weight_decay=0.0, memory=None)
STRONG = dict(weight_decay=0.3, memory=None)
USUAL = dict(weight_decay=0.1, memory=None)
MEMORY_5 = dict(weight_decay=0.1, memory=5.0)
RIVALS = {
    "constant, weight decay 0, averaged": Line(WSD | AVERAGED | NO_DECAY, 0.0, 0.5),
    "constant, weight decay 0": Line(WSD | NO_DECAY, 0.0, 0.5),
    "constant, memory 5, averaged": Line(WSD | AVERAGED | MEMORY_5, 0.0, 0.5),
    "constant, memory 5": Line(WSD | MEMORY_5, 0.0, 0.5),
    "Power (fitted), weight decay 0, averaged": Line(POWER | AVERAGED | NO_DECAY, -0.3, 0.5),
    "Power (fitted), weight decay 0": Line(POWER | NO_DECAY, -0.3, 0.5),
    "Power (fitted), weight decay 0.3, averaged": Line(POWER | AVERAGED | STRONG, -0.3, 0.5),
    "Power (fitted), weight decay 0.3": Line(POWER | STRONG, -0.3, 0.5),
    "linear to 0 (fitted), averaged": Line(LINEAR | USUAL | dict(average=True), -0.3, 0.5),
    "linear to 0 (fitted), weight decay 0": Line(LINEAR | NO_DECAY, -0.3, 0.5),
    "linear to 0 ∝ √batch, weight decay 0": Line(LINEAR | NO_DECAY, 0.0, 0.5),
}  # fmt: skip
SCHEDULE_FREE = {"schedule-free": Line(dict(schedule="constant", average=True), 0.0, 0.5)}
NEW = {"adamw": RIVALS, "schedule-free": SCHEDULE_FREE}  # by folder
AVERAGED_POWER = "Power (fitted), averaged"
AVERAGED_LINEAR = "linear to 0 (fitted), averaged"
# difference -> (a line, the line to subtract)
DECISIONS = {
    "constant, weight decay 0, instead of Power": (
        "constant, weight decay 0, averaged",
        AVERAGED_POWER,
    ),
    "constant, memory 5, instead of Power": (
        "constant, memory 5, averaged",
        AVERAGED_POWER,
    ),
    "Power instead of constant, both at 0.1": (AVERAGED_POWER, "WSD ∝ √batch, averaged"),
    "Power, weight decay 0.3 instead of 0.1": (
        "Power (fitted), weight decay 0.3, averaged",
        AVERAGED_POWER,
    ),
    "Power, weight decay 0 instead of 0.1": (
        "Power (fitted), weight decay 0, averaged",
        AVERAGED_POWER,
    ),
    "Power instead of constant, both at 0": (
        "Power (fitted), weight decay 0, averaged",
        "constant, weight decay 0, averaged",
    ),
    "linear to 0, averaged or not": (
        AVERAGED_LINEAR,
        "linear to 0 (fitted)",
    ),
    "schedule-free AdamW instead of Power": ("schedule-free", AVERAGED_POWER),
}


@cache
def lines() -> dict:
    """{line: {dense cell: {seed: loss}}} of both comparisons."""
    folders = [
        ROOT / "research/results/compare-laptop",
        ROOT / "research/results/search-laptop",
    ]
    found, _ = losses_of_lines(index_runs(read_rows(folders)))
    for name, new in NEW.items():
        # read_rows would refuse to mix weight decays
        records = [row(r) for r in read_records(RUNS / name)]
        runs = index_runs(records, new)
        more, best = losses_of_lines(runs)
        if AVERAGED_LINEAR in more:  # its loss is without the average, which we take here
            rates = best[AVERAGED_LINEAR]
            for cell, losses in more[AVERAGED_LINEAR].items():
                for seed, run in runs.of_seeds(AVERAGED_LINEAR, rates, cell).items():
                    losses[seed] = run["average_val_loss"]
        found |= more
    for name, losses in found.items():
        found[name] = {cell: losses[cell] for cell in losses if "experts" not in cell[0]}
    return found


def cells(T: int | None = None) -> list:
    """The cells that all lines have, in the mean over all T or at one."""
    common = set.intersection(*(set(losses) for losses in lines().values()))
    return [
        cell
        for cell in lines()[AVERAGED_POWER]
        if cell in common and T in (None, cell[1])
    ]


def difference(decision: str, T: int | None = None) -> Estimate:
    """A difference of DECISIONS."""
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


def in_words(gap: Estimate) -> str:
    return f"{show(gap)} {verdict(gap)}"


def lines_table() -> Table:
    """A row for every new line."""
    every = NEW["adamw"] | NEW["schedule-free"]
    gaps = {
        name: differences(lines()[name], lines()[AVERAGED_POWER], cells())
        for name in every
    }
    rows = []
    for name in sorted(every, key=lambda name: gaps[name].answer):
        at_longest = differences(lines()[name], lines()[AVERAGED_POWER], cells(longest()))
        row = [name, needs_T(every[name]), str(seeds_of(name))]
        rows.append([*row, in_words(gaps[name]), in_words(at_longest)])
    head = ["line", "needs T", "seeds", "all T", f"T = {size(longest())}"]
    return Table(
        "rivals",
        f"Loss minus {AVERAGED_POWER}, in the {len(cells())} dense cells of the comparison "
        "(`rivals-laptop`).",
        head,
        rows,
    )


def decisions_table() -> Table:
    """A row for every decision, and the differences that survive Holm's rule."""
    late = f"T = {size(longest())}"
    rows = []
    tests = {}
    for decision in DECISIONS:
        over_all, at_longest = difference(decision), difference(decision, longest())
        rows.append([decision, in_words(over_all), in_words(at_longest)])
        tests |= {f"{decision}, all T": over_all, f"{decision}, {late}": at_longest}
    any_time, planned = best_lines()
    gap = differences(lines()[any_time], lines()[planned], cells())
    rows.append([f"{any_time} instead of {planned}, after the fact", in_words(gap), ""])
    survivors = "; ".join(holm(tests)) or "none"
    return Table(
        "rivals, decisions",
        f"Not 0 after Holm's correction for {len(tests)}: {survivors}.",
        ["decision", "all T", late],
        rows,
    )


def tables() -> list[Table]:
    return [lines_table(), decisions_table()]


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("rivals.py", __doc__).parse_args(argv)
    print(*tables(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
