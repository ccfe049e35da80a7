"""What does a setting change in the best learning rates and in their law? See
docs/bend.md.

    python docs/against.py weight_decay=0,0.1,0.3 results/memory-laptop

Compares runs that differ in one field, in the cells where all its values have a minimum.
"""

import math
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import fit
from fit import Fits
from tools import figures
from tools.flags import UserError, fail, program_parser
from records import OF_A_SHAPE, VARIED, differs
from fit import point, show


def same_cells(field: str, sets: dict[str, list[dict]]) -> dict[str, Fits]:
    """{value: records} -> {value: minima in the common cells, and their law}."""
    one, *rest = (some[0] for some in sets.values())
    for other in rest:
        if different := differs(one, other, (field, *VARIED, *OF_A_SHAPE)):
            raise UserError(f"{field}: the runs also differ in {different[0]} (--only)")
    found = [
        {m[:3]: m for m in fit.usable(fit.minima(some))} for some in sets.values()
    ]  # by cell
    common = sorted(set.intersection(*map(set, found)))
    if not common:
        raise UserError(
            f"{field}: no cell has a minimum in all; is the sweep still running?"
        )
    fits = {}
    for rng_seed, (value, by_cell) in enumerate(zip(sets, found)):  # all independent
        points = [by_cell[cell] for cell in common]
        draws = fit.redraw(points, rng_seed)
        fits[value] = Fits(points, points, *draws, fit.fit_law(points, *draws))
    return fits


def report(one: Fits, two: Fits) -> None:
    """Print by how much the minima of the same cells moved, and the law."""
    shift, weight = two.x - one.x, one.weight * two.weight
    loss = np.array([b.loss - a.loss for a, b in zip(one.points, two.points)])
    batch_size = np.array([m.batch_size for m in one.points])
    groups = {"all": batch_size > 0}
    groups |= {f"batch size {B:g}": batch_size == B for B in np.unique(batch_size)}
    print(
        "what changes               cells  log2 of the best learning rate   lowest loss"
    )
    for name, i in groups.items():
        total = weight[:, i].sum(axis=1)
        mean = (weight * shift)[:, i].sum(axis=1) / np.where(total > 0, total, np.nan)
        print(f"{name:<26} {i.sum():5d}  {show(mean):<32} {loss[i].mean():+.4f}")
    if np.isfinite(one.law.b[0]):  # else the cells have a single batch size or T
        for name in ("b", "q"):
            before, after = getattr(one.law, name), getattr(two.law, name)
            print(
                f"{name} {show(before)} -> {show(after)}, change {show(after - before)}"
            )


def draw(path: Path, field: str, sets: dict[str, Fits]) -> None:
    """Best learning rates against T at the middle batch size of the shape with most
    minima.

    A line for every value of the field.
    """
    low, *_, high = sets
    shape = statistics.mode(m.shape for m in sets[low].points)
    batches = sorted({m.batch_size for m in sets[low].points if m.shape == shape})
    cell = shape, batches[len(batches) // 2]
    points, field = {}, field.replace("_", " ")
    for value, fits in sets.items():
        draws = zip(fits.points, fits.x.T, fits.weight.T)
        here = [
            point(m.T, x, weight)
            for m, x, weight in draws
            if (m.shape, m.batch_size) == cell
        ]
        points[f"{field} {value}"] = here
    b, c = (sets[value].law.b[0] for value in (low, high))
    laws = f": T^{b:.2f} to T^{c:.2f} over all cells" if math.isfinite(b) else ""
    xlabel = f"run length T (tokens), {shape}, batch size {cell[1]:g}"
    figures.draw_points(path, points, field.capitalize() + laws, xlabel)


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("against.py", __doc__)
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
    add("--out", type=Path, help="folder for the figure (default: that of the runs)")
    args = parser.parse_args(argv)
    field, _, values = args.setting.partition("=")
    try:
        if len(set(values.split(","))) < 2:
            raise UserError(f"{args.setting}: needs two values, as in seed=0,1")
        read = lambda value: fit.read_records(
            args.folders, [*args.only, f"{field}={value}"]
        )
        fits = same_cells(field, {value: read(value) for value in values.split(",")})
        first, *others = fits
        for value in others:
            print(f"\n{field}: {first} -> {value}")
            report(fits[first], fits[value])
        folder = args.folders[0]
        path = (
            args.out or (folder.parent if folder.is_file() else folder)
        ) / "against.png"
        draw(path, field, fits)
    except (UserError, OSError) as error:
        return fail("against.py", error)
    print(f"\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
