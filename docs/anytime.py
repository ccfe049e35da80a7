"""If you stop here, how good are one Power run, and a longer cosine, cut short?

    python docs/anytime.py results/compare-laptop results/search-laptop

Draws the first figure of README.md, from a comparison (`python sweep.py compare`). All
losses are relative to cosines that were planned for the length at which you stop. Both
follow our law.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools import figures
from compare import differences, losses_of_lines
from tools.flags import UserError, fail, program_parser
from records import read_records
from compare import VERBS, verdict
from fit import point

PLANNED, POWER = "cosine (fitted)", "Power (fitted)"  # the same law for both


def draw(path: Path, records: list[dict]) -> None:
    """The figure for the widest shape and the smallest batch size. Raises UserError."""
    lines, _, runs_of = losses_of_lines(records)
    shapes = [shape for shape, *_ in lines[POWER]]
    shape = max(
        shapes, key=lambda shape: ("experts" not in shape, len(shape), shape)
    )  # the widest
    batch_size = min(B for *_, B in lines[POWER])
    cells = [cell for cell in lines[POWER] if (cell[0], cell[2]) == (shape, batch_size)]
    longest = runs_of(PLANNED, cells[-1]) if cells else {}
    name = {T: f"val_loss_at_{T}" for _, T, _ in cells} | {
        T: "val_loss" for _, T, _ in cells[-1:]
    }
    if not longest or not all(
        r and r.keys() >= {*name.values()} for r in longest.values()
    ):
        raise UserError("the longest cosines are missing; is the sweep still running?")
    loss = lambda r, T: math.inf if r["diverged"] else r[name[T]]
    cut = {
        cell: {seed: loss(r, cell[1]) for seed, r in longest.items()} for cell in cells
    }
    named = {"one Power run": lines[POWER], "planned cosines": lines[PLANNED]}
    named["one cosine, cut short"] = cut
    above = lambda line, some: differences(line, lines[PLANNED], some)
    verb = VERBS[verdict(above(lines[POWER], cells))]
    points = {
        label: [point(cell[1], above(line, [cell])) for cell in cells]
        for label, line in named.items()
    }
    title = f"One Power run {verb} {len(cells)} planned cosines on average"
    xlabel = f"tokens when the run stops ({shape}, batch size {batch_size})"
    figures.draw_points(
        path, points, title, xlabel, ylabel="loss minus planned cosine (nats)"
    )


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("anytime.py", __doc__)
    parser.add_argument(
        "folders", type=Path, nargs="+", help="folders of a comparison's records"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the figure (default: the first)"
    )
    args = parser.parse_args(argv)
    folder = args.folders[0]
    path = (args.out or (folder.parent if folder.is_file() else folder)) / "anytime.png"
    try:
        draw(path, read_records(args.folders))
    except (UserError, OSError) as error:
        return fail("anytime.py", error)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
