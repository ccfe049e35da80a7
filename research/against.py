"""What does a setting change in the best learning rates and in their law? See
research/methods.md.

    python research/against.py weight_decay=0,0.1,0.3 research/results/memory-laptop

Compares runs that differ in one field, in the cells where all its values have a minimum.
"""

import math
import operator
import statistics
import sys
from operator import attrgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import fit
import report
from fit import Cell, Estimate, apply, jackknife, show
from config import FIELDS
from records import OF_A_SHAPE, VARIED, differing, read_rows, settings
from tools import figures, flags
from tools.flags import UserError


def same_cells(field: str, sets: dict[str, list[dict]]) -> dict[str, list[Cell]]:
    """{value: rows} -> {value: cells}, of the cells that have a minimum at every value."""

    # 1. The runs may differ in the field only, and in what every sweep varies.
    def compared(row: dict) -> dict:
        config = {name: row[name] for name in FIELDS if name in row}
        text = {"fingerprint": row["fingerprint"]}
        return settings(config, (field, *VARIED, *OF_A_SHAPE)) | text

    first, *others = [compared(rows[0]) for rows in sets.values()]
    for other in others:
        different = differing(first, other)
        if different:
            raise UserError(f"{field}: the runs also differ in {different[0]} (--only)")

    # 2. Find the cells that have a minimum at every value.
    found = {}  # value -> {name of a cell: the cell}
    for value, rows in sets.items():
        found[value] = {cell[:3]: cell for cell, _ in fit.minima(fit.cells_of(rows))}
    common = sorted(set.intersection(*map(set, found.values())))
    if not common:
        raise UserError(
            f"{field}: no cell has a minimum in all; is the sweep still running?"
        )
    return {value: [cells[name] for name in common] for value, cells in found.items()}


def best_of(cells: list[Cell]) -> dict:
    """{name of a cell: log2 of its best learning rate}"""
    return {cell[:3]: x for cell, x in fit.minima(cells)}


def mean_shift(one: dict, two: dict) -> float:
    """By how much best_of differs, in the mean over the cells of both."""
    shifts = [two[name] - one[name] for name in one if name in two]
    return statistics.mean(shifts) if shifts else math.nan


def moved(one: list[Cell], two: list[Cell]) -> Estimate:
    """Mean change of log2 of the best learning rate in the same cells."""
    return apply(mean_shift, jackknife(one, best_of), jackknife(two, best_of))


def mean_loss(cells: list[Cell]) -> float:
    return statistics.mean(map(fit.lowest_loss, cells))


def change_of(name: str, one: list[Cell], two: list[Cell]) -> Estimate:
    """Change of b or q between two sweeps of the same cells."""
    before, after = [
        apply(attrgetter(name), jackknife(c, fit.fit_law)) for c in (one, two)
    ]
    return apply(operator.sub, after, before)


def print_changes(one: list[Cell], two: list[Cell]) -> None:
    """Print by how much the minima of the same cells moved, and the law."""
    # 1. All cells, and those of every batch size
    print(
        "what changes               cells  log2 of the best learning rate   lowest loss"
    )
    batches = sorted({cell.batch_size for cell in one})
    groups = {"all": batches} | {f"batch size {B:g}": [B] for B in batches}
    for name, only in groups.items():
        before = [cell for cell in one if cell.batch_size in only]
        after = [cell for cell in two if cell.batch_size in only]
        deeper = mean_loss(after) - mean_loss(before)
        shift = show(moved(before, after))
        print(f"{name:<26} {len(before):5d}  {shift:<32} {deeper:+.4f}")

    # 2. The law, unless the cells have a single batch size or T
    if math.isfinite(fit.fit_law(one).b):
        for name in ("b", "q"):
            answers = []
            for cells in (one, two):
                answers.append(
                    show(apply(attrgetter(name), jackknife(cells, fit.fit_law)))
                )
            change = show(change_of(name, one, two))
            print(f"{name} {answers[0]} -> {answers[1]}, change {change}")


def draw(path: Path, field: str, sets: dict[str, list[Cell]]) -> None:
    """Best learning rates against T at the middle batch size of the shape with most minima.

    A line for every value of the field.
    """
    first, *_, last = sets.values()
    shape = statistics.mode(cell.shape for cell in first)
    batches = sorted({cell.batch_size for cell in first if cell.shape == shape})
    batch_size = batches[len(batches) // 2]

    name = field.replace("_", " ")
    groups = {}
    for value, cells in sets.items():
        here = [cell for cell in cells if fit.pair_of(cell) == (shape, batch_size)]
        groups[f"{name} {value}"] = [report.point(cell.T, cell) for cell in here]

    title = name.capitalize()
    if math.isfinite(fit.fit_law(first).b):
        title += f": T^{fit.fit_law(first).b:.2f} to T^{fit.fit_law(last).b:.2f} over all cells"
    xlabel = f"run length T (tokens), {shape}, batch size {batch_size:g}"
    colors = figures.shades(groups, "other")
    figures.draw_points(path, groups, colors, title, xlabel)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("against.py", __doc__)
    add = parser.add_argument
    add(
        "setting",
        metavar="FIELD=V,V,...",
        help="the values to compare, the first with the others",
    )
    add("folders", type=Path, nargs="+", help="folders of a sweep's records")
    add(
        "--only",
        action="append",
        default=[],
        metavar="FIELD=V,...",
        help="leave out other runs",
    )
    add("--out", type=Path, help="folder for the figure (default: folder of the runs)")
    args = parser.parse_args(argv)
    field, _, text = args.setting.partition("=")
    values = text.split(",")
    folder = args.folders[0]
    out = args.out or (folder.parent if folder.is_file() else folder)
    try:
        if len(set(values)) < 2:
            raise UserError(f"{args.setting}: needs two values, as in seed=0,1")
        sets = {}
        for value in values:
            only = [*args.only, f"{field}={value}"]
            sets[value] = read_rows(args.folders, only)
        cells = same_cells(field, sets)
        first, *others = cells
        for other in others:
            print(f"\n{field}: {first} -> {other}")
            print_changes(cells[first], cells[other])
        draw(out / "against.png", field, cells)
    except (UserError, OSError) as error:
        return flags.fail("against.py", error)
    print(f"\n{out / 'against.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
