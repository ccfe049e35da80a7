"""What does a setting change in the best learning rates and in their law? See
research/methods.md.

    python research/against.py weight_decay=0,0.1,0.3 results/memory-laptop

Compares runs that differ in one field, in the cells where all its values have a minimum.
"""

import math
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import fit
from fit import Fits, show
from config import FIELDS
from records import OF_A_SHAPE, VARIED, differing, settings
from tools import figures, flags
from tools.flags import UserError


def same_cells(field: str, sets: dict[str, list[dict]]) -> dict[str, Fits]:
    """{value: records} -> {value: minima in the common cells, and their law}."""

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
    found = {}  # value -> cell -> minimum
    for value, records in sets.items():
        points = fit.usable(fit.minima(records))
        found[value] = {(m.shape, m.T, m.batch_size): m for m in points}
    common = sorted(set.intersection(*(set(by_cell) for by_cell in found.values())))
    if not common:
        raise UserError(
            f"{field}: no cell has a minimum in all; is the sweep still running?"
        )

    # 3. Fit every value. A row leaves out the same pair or seed of all of them.
    points = [by_cell[cell] for by_cell in found.values() for cell in common]
    every_x, every_weight = fit.leave_out(points)
    fits = {}
    for k, value in enumerate(found):
        here = slice(k * len(common), (k + 1) * len(common))
        x = every_x[:, here]
        weight = every_weight[:, here]
        law = fit.fit_law(points[here], x, weight)
        fits[value] = Fits(points[here], points[here], x, weight, law)
    return fits


def moved(one: Fits, two: Fits, here: np.ndarray) -> np.ndarray:
    """Mean change of log2 of the best learning rate in some cells, with the rows of fit.py.

    A cell counts in a row if both have it there.
    """
    weight = (one.weight * two.weight)[:, here]
    shift = (two.x - one.x)[:, here]
    total = weight.sum(axis=1)
    mean = (weight * shift).sum(axis=1) / np.where(total > 0, total, math.nan)
    return fit.where_left_out(mean, weight)


def report(one: Fits, two: Fits) -> None:
    """Print by how much the minima of the same cells moved, and the law."""
    # 1. The groups of cells: all, and those of every batch size
    batch_size = np.array([m.batch_size for m in one.points])
    groups = {"all": np.full(len(one.points), True)}
    for B in np.unique(batch_size):
        groups[f"batch size {B:g}"] = batch_size == B

    # 2. How far they moved
    loss = np.array([b.loss - a.loss for a, b in zip(one.points, two.points)])
    print(
        "what changes               cells  log2 of the best learning rate   lowest loss"
    )
    for name, here in groups.items():
        mean = show(moved(one, two, here))
        print(f"{name:<26} {here.sum():5d}  {mean:<32} {loss[here].mean():+.4f}")

    # 3. The law, unless the cells have a single batch size or T
    if math.isfinite(one.law.b[0]):
        for name in ("b", "q"):
            before = getattr(one.law, name)
            after = getattr(two.law, name)
            change = show(after - before)
            print(f"{name} {show(before)} -> {show(after)}, change {change}")


def draw(path: Path, field: str, sets: dict[str, Fits]) -> None:
    """Best learning rates against T at the middle batch size of the shape with most minima.

    A line for every value of the field.
    """
    values = list(sets)
    first = sets[values[0]]
    last = sets[values[-1]]
    shape = statistics.mode(m.shape for m in first.points)
    batches = sorted({m.batch_size for m in first.points if m.shape == shape})
    batch_size = batches[len(batches) // 2]

    name = field.replace("_", " ")
    groups = {}
    for value, fits in sets.items():
        points = []
        for i, m in enumerate(fits.points):
            if m.shape == shape and m.batch_size == batch_size:
                points.append(fit.point(m.T, fits.x[:, i], fits.weight[:, i]))
        groups[f"{name} {value}"] = points

    title = name.capitalize()
    if math.isfinite(first.law.b[0]):
        title += f": T^{first.law.b[0]:.2f} to T^{last.law.b[0]:.2f} over all cells"
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
            sets[value] = fit.read_rows(args.folders, only)
        fits = same_cells(field, sets)
        first, *others = fits
        for other in others:
            print(f"\n{field}: {first} -> {other}")
            report(fits[first], fits[other])
        draw(out / "against.png", field, fits)
    except (UserError, OSError) as error:
        return flags.fail("against.py", error)
    print(f"\n{out / 'against.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
