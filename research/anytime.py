"""If you stop here, how good are one Power run, and a longer cosine, cut short?

    python research/anytime.py research/results/compare-laptop research/results/search-laptop

Draws a figure of research/methods.md, from our comparison. Its records have the losses of the
longest cosines at all shorter T, which sweep.py noted up to commit 500a068. All losses are relative
to cosines that were planned for the length at which you stop. Both follow our law.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import fit
from compare import VERBS, differences, index_runs, losses_of_lines, verdict
from records import read_rows
from tools import figures, flags
from tools.flags import UserError

# the same law for both
PLANNED = "cosine (fitted)"
POWER = "Power (fitted)"


def widest_dense(shapes: set[str]) -> str:
    """'width 128' of 'width 64', 'width 128' and 'width 64, 8 experts'."""

    def rank(shape: str) -> tuple:
        return "experts" not in shape, len(shape), shape

    return max(shapes, key=rank)


def losses_of_cut_cosine(longest: dict, cells: list) -> dict:
    """{cell: {seed: loss}} of the longest cosines, cut short at the T of every cell.

    longest: {seed: record}. Raises UserError if a loss is missing.
    """
    last_T = max(T for _, T, _ in cells)
    cut = {}
    for cell in cells:
        T = cell[1]
        name = "val_loss" if T == last_T else f"val_loss_at_{T}"
        cut[cell] = {}
        for seed, record in longest.items():
            if record is None or name not in record:
                raise UserError(
                    "no losses of the longest cosines at shorter T; see research/methods.md"
                )
            cut[cell][seed] = math.inf if record["diverged"] else record[name]
    return cut


def draw(path: Path, records: list[dict]) -> None:
    """The figure for the widest shape and the smallest batch size. Raises UserError."""
    # 1. The cells of the figure, in order of T
    runs = index_runs(records)
    lines, best = losses_of_lines(runs)
    power = lines[POWER]
    planned = lines[PLANNED]
    shape = widest_dense({shape for shape, _, _ in power})
    batch_size = min(B for name, _, B in power if name == shape)
    cells = [cell for cell in power if (cell[0], cell[2]) == (shape, batch_size)]

    # 2. All lines, minus the planned cosine of the same length
    longest = runs.of_seeds(PLANNED, best[PLANNED], cells[-1])
    cut = losses_of_cut_cosine(longest, cells)
    named = {
        "one Power run": power,
        "planned cosines": planned,
        "one cosine, cut short": cut,
    }
    groups = {}
    for label, losses in named.items():
        groups[label] = []
        for cell in cells:
            above = differences(losses, planned, [cell])
            gap = above.answer
            low, high = fit.interval(above)
            groups[label].append((math.log2(cell[1]), gap, low, high, gap))

    # 3. The figure
    verb = VERBS[verdict(differences(power, planned, cells))]
    title = f"One Power run {verb} {len(cells)} planned cosines on average"
    xlabel = f"tokens when the run stops ({shape}, batch size {batch_size})"
    ylabel = "loss minus planned cosine (nats)"
    blue = figures.COLORS["power"]
    gray = figures.COLORS["cosine"]
    colors = dict(zip(groups, (blue, gray, "#a32020")))
    figures.draw_points(path, groups, colors, title, xlabel, ylabel)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("anytime.py", __doc__)
    add = parser.add_argument
    add("folders", type=Path, nargs="+", help="folders of a comparison's records")
    add("--out", type=Path, help="folder for the figure (default: the first)")
    args = parser.parse_args(argv)
    folder = args.folders[0]
    out = args.out or (folder.parent if folder.is_file() else folder)
    try:
        draw(out / "anytime.png", read_rows(args.folders))
    except (UserError, OSError) as error:
        return flags.fail("anytime.py", error)
    print(out / "anytime.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
