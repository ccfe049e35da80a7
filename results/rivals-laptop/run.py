"""The comparison again, with rivals. The runs for rules.md.

    git apply forks/memory.patch
    python results/rivals-laptop/run.py [SEEDS]    about two hours for five seeds on two cores

    git apply forks/schedule_free.patch            in a different copy of the project
    python results/rivals-laptop/run.py [SEEDS] schedule-free

The same command resumes. The records go to runs/rivals.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import compare
import grids
import sweep
from compare import AVERAGED, LINEAR, POWER, WSD, Line
from tools import flags

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
LINES = {"adamw": RIVALS, "schedule-free": SCHEDULE_FREE}


def main() -> int:
    parser = flags.program_parser("run.py", __doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=5)
    parser.add_argument("lines", nargs="?", default="adamw", choices=tuple(LINES))
    args = parser.parse_args()
    compare.LINES = LINES[args.lines]
    grid = grids.GRIDS["compare"]["laptop"]
    grid["rows"] = [row for row in grid["rows"] if "n_ffn" not in row[0]]  # dense
    out = "runs/rivals/" + args.lines
    settings = ["--scale", "laptop", "--compile", "--workers", "2"]
    for n in range(1, 1 + args.seeds):
        status = sweep.main(["compare", *settings, "--seeds", str(n), "--out", out])
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
