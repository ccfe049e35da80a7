"""The comparison of schedules, as tables. See research/methods.md.

    python research/comparison.py

Prints its tables of TABLES.md, from the committed records, and draws compare.png. `python fit.py
research/results/compare-laptop research/results/search-laptop` prints the first two without their
row for the search.
"""

import contextlib
import io
import sys
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import anytime
import rivals
from compare import LEVEL, LINES, TUNING, best_of, common_cells, differences
from compare import index_runs, losses_of_lines, needs_T, report_differences
from fit import Estimate, mean_of, show
from laws import slope_per_step
from records import cell_of, read_rows
from tables import Table
from tools import flags
from tools.figures import draw_differences, size

FOLDERS = [
    ROOT / "research/results/compare-laptop",
    ROOT / "research/results/search-laptop",
]
POWER, AVERAGED = "Power (fitted)", "Power (fitted), averaged"
WSD, LINEAR, COSINE = "WSD (fitted)", "linear to 0 (fitted)", "cosine (fitted)"
SEARCHED = "WSD, searched in every cell"
ABOUT = {
    "dense": "Mean loss, and its difference from the best planned line, over all T and at the "
    "longest. Widths 64 and 128, batch sizes 2 and 8, T from 80k to 1.28M, five seeds (three "
    "for the search).",
    "MoE": "The same for width 64 with eight experts, batch sizes 2 and 8.",
}
PAIRS = [  # a line, and the line to subtract
    (POWER, WSD),
    (POWER, LINEAR),
    (POWER, "linear to 0 ∝ √batch"),
    (POWER, "WSD ∝ √batch"),
    (POWER, "cosine ∝ √batch"),
    ("Power (paper)", "WSD ∝ √batch"),
    ("Power (paper)", "cosine ∝ √batch"),
    (AVERAGED, WSD),
    (AVERAGED, "WSD (fitted), averaged"),
    ("WSD (fitted), averaged", WSD),
    ("WSD", WSD),
]


@cache
def records() -> list[dict]:
    return read_rows(FOLDERS)


@cache
def lines() -> dict:
    """{line: {cell: {seed: loss}}}"""
    losses, _ = losses_of_lines(index_runs(records()))
    return losses


def searched(records: list[dict], fields: dict) -> dict:
    """{cell: {seed: loss}} of a schedule at the best learning rate of the *other* seeds.

    So no run chooses for itself. In cells where at least two seeds tried seven learning
    rates or more.
    """
    tried: dict = {}  # cell -> seed -> learning rate -> loss
    for r in records:
        if r["seed"] < TUNING and fields.items() <= r.items():
            seeds = tried.setdefault(cell_of(r), {})
            seeds.setdefault(r["seed"], {})[r["lr"]] = r["loss"]

    found: dict = {}
    for cell, seeds in tried.items():
        seeds = {seed: losses for seed, losses in seeds.items() if len(losses) >= 7}
        if len(seeds) < 2:
            continue
        rates = set.intersection(*(set(losses) for losses in seeds.values()))
        found[cell] = {}
        for seed in seeds:
            others = [losses for other, losses in seeds.items() if other != seed]
            tried_by_others = {}
            for lr in sorted(rates):
                tried_by_others[lr] = [losses[lr] for losses in others]
            best = best_of(tried_by_others)
            found[cell][seed] = seeds[seed][best]
    return found


def print_differences() -> list[dict]:
    """Print the tables, with a row for the search, and return the panels of compare.png."""
    with_search = lines() | {SEARCHED: searched(records(), LINES["WSD"].fields)}
    when = {name: needs_T(line) for name, line in LINES.items()}
    when[SEARCHED] = "from the start"
    panels = []
    for kind in ABOUT:
        cells = common_cells(lines(), moe=(kind == "MoE"))
        panels.append(report_differences(with_search, cells, kind, when))
    return panels


def draw_all() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        panels = print_differences()
    draw_differences(ROOT / "assets/compare.png", panels, LEVEL)


def comparison_tables() -> list[Table]:
    """The tables that print_differences prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_differences()
    found = {"dense": [], "MoE": []}
    rows = []
    for line in printed.getvalue().splitlines():
        if not line.startswith("|"):
            continue
        cells = line.strip("| ").split(" | ")
        kind = cells[0].partition(",")[0]  # of "dense, 20 cells", in the head of a table
        if kind in found:
            rows = found[kind]
        rows.append(cells)
    return [
        Table(f"comparison, {kind}", ABOUT[kind], ["line", *head[1:]], rows)
        for kind, (head, _, *rows) in found.items()
    ]


def trend(one: str, other: str) -> Estimate:
    """Nats per doubling of T of a difference between two lines, in the dense cells."""
    first = lines()[one]
    second = lines()[other]
    dense = [cell for cell in first if "experts" not in cell[0]]
    lengths = sorted({T for _, T, _ in dense})
    pairs = sorted({(shape, batch_size) for shape, _, batch_size in dense})
    seeds = sorted(first[dense[0]])

    gap = np.empty((len(lengths), len(pairs), len(seeds)))
    for i, T in enumerate(lengths):
        for j, (shape, batch_size) in enumerate(pairs):
            cell = shape, T, batch_size
            gap[i, j] = [first[cell][seed] - second[cell][seed] for seed in seeds]
    return mean_of(slope_per_step(gap))


def pairs_table() -> Table:
    rows = []
    for one, other in PAIRS:
        first, second = lines()[one], lines()[other]
        shared = [cell for cell in first if cell in second]
        dense = [cell for cell in shared if "experts" not in cell[0]]
        moe = [cell for cell in shared if "experts" in cell[0]]
        row = [f"{one} minus {other}", show(differences(first, second, dense))]
        for length in (160_000, 1_280_000):
            cells = [cell for cell in dense if cell[1] == length]
            row.append(show(differences(first, second, cells)))
        row.append(show(trend(one, other)))
        row.append(show(differences(first, second, moe)) if moe else "")
        rows.append(row)
    return Table(
        "pairs",
        "Other differences of lines of the comparison.",
        [
            "lines",
            "dense, all T",
            "T = 160k",
            "T = 1.28M",
            "per doubling of T",
            "MoE, all T",
        ],
        rows,
    )


def anytime_table() -> Table:
    """The cells of anytime.png."""
    runs = index_runs(records())
    _, best = losses_of_lines(runs)
    power, cosine = lines()[POWER], lines()[COSINE]
    shape, batch_size = "width 128", 2
    cells = [cell for cell in power if cell[::2] == (shape, batch_size)]
    longest = runs.of_seeds(COSINE, best[COSINE], cells[-1])
    cut = anytime.losses_of_cut_cosine(longest, cells)
    rows = []
    for cell in cells:
        gap = show(differences(power, cosine, [cell]))
        gap_of_cut = show(differences(cut, cosine, [cell]))
        rows.append([size(cell[1]), gap, gap_of_cut, "", ""])
    mean = show(differences(power, cosine, cells))
    others = [show(differences(power, lines()[name], cells)) for name in (WSD, LINEAR)]
    rows.append(["mean of all T", mean, "", *others])
    return Table(
        "anytime",
        f"If you stop at T: Power (fitted), and the longest cosine (fitted), cut short, minus "
        f"planned lines ({shape}, batch size {batch_size}, five seeds).",
        [
            "T",
            f"Power minus {COSINE}",
            "cut cosine minus it",
            f"Power minus {WSD}",
            f"Power minus {LINEAR}",
        ],
        rows,
    )


def tables() -> list[Table]:
    return [*comparison_tables(), pairs_table(), anytime_table(), *rivals.tables()]


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("comparison.py", __doc__).parse_args(argv)
    print(*tables(), sep="\n\n")
    draw_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
