"""Merge checkpoints of a run into about the weights that a decay would leave, without
training.

    python forks/merge.py runs/mine --shape linear --last 0.1    writes runs/mine/merged.pt

A decay multiplies the updates between two checkpoints by a factor w. If it did not change
the gradients, it would end at an average of the checkpoints (WSM, Tian et al., arXiv
2507.17634).
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from schedules import DECAY_SHAPES
from tools import runs
from tools.flags import UserError, fail, program_parser


def shares(tokens: list[int], shape: Callable) -> list[float]:
    """Shares of checkpoints at these token positions, for a decay from the first to the
    last.

    shape: one of schedules.DECAY_SHAPES.
    """
    x = [(n - tokens[0]) / (tokens[-1] - tokens[0]) for n in tokens]
    w = [shape((a + b) / 2) for a, b in pairwise(x)]  # at the middle, as in training
    return [before - after for before, after in pairwise([1.0, *w, 0.0])]  # they sum to 1


def merge(run: Path, shape: Callable, last: float) -> dict:
    """The newest checkpoint before the run's decay, merged over this last share of its
    tokens."""
    config = runs.read_config(run)
    if not config or not 0 < last <= 1:
        raise UserError(f"{run}, --last {last:g}: needs a run folder and a share up to 1")
    paths = runs.before_decay(runs.checkpoints(run), config)
    paths = [path for path in paths if int(path.stem) >= (1 - last) * int(paths[-1].stem)]
    if len(paths) < 2:
        raise UserError(
            f"--last {last:g}: {run} has fewer than 2 checkpoints there; save more"
        )
    saved = [runs.read_checkpoint(path) for path in paths]
    models, c = [x["model"] for x in saved], shares([x["tokens"] for x in saved], shape)
    print(
        "merged.pt =", " + ".join(f"{s:.4f} * {path.name}" for s, path in zip(c, paths))
    )
    mean = lambda name: sum(share * model[name] for share, model in zip(c, models))
    return saved[-1] | {
        "model": {name: mean(name) for name in models[0]},
        "average": None,
    }


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("merge.py", __doc__)
    parser.add_argument("run", type=Path, help="folder of a run, finished or not")
    parser.add_argument(
        "--shape", default="exp", choices=DECAY_SHAPES, help="of the decay (exp)"
    )
    parser.add_argument(
        "--last", type=float, default=0.1, help="share of the tokens (0.1)"
    )
    args = parser.parse_args(argv)
    try:
        merged = merge(args.run, DECAY_SHAPES[args.shape], args.last)
        runs.write_checkpoint(args.run / "merged.pt", merged)
    except (UserError, OSError) as error:
        return fail("merge.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
