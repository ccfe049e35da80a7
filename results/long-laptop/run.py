"""Does a schedule without a plan cost anything in long runs? The runs for rules.md.

    git apply forks/memory.patch
    python results/long-laptop/run.py [SEEDS]    hours on two cores

    git apply forks/schedule_free.patch          in a different copy of the project
    python results/long-laptop/run.py [SEEDS] schedule-free

The same command resumes. The records go to runs/long.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import compare
import grids
import sweep
from compare import AVERAGED, POWER, WSD, Line
from tools import flags

SHAPE = dict(n_embd=32, n_head=2)
LENGTHS = grids.doublings(320_000, 7)  # to 20.48M, less than half of the corpus
SETTINGS = ["--scale", "laptop", "--compile", "--workers", "2", "--batches", "8"]
OUT = "runs/long"
FOLDERS = {
    "adamw": ("any-time", "linear-0", "linear-0.1", "wsd-0", "wsd-0.1", "added"),
    "schedule-free": ("schedule-free",),
}

# Nobody has to know T. Every line names its weight decay and memory, so that docs/longer.py
# finds its runs and not those of another line.
CONSTANT = WSD | AVERAGED
USUAL = dict(weight_decay=0.1, memory=None)
ANY_TIME = {
    "constant, weight decay 0": Line(CONSTANT | USUAL | dict(weight_decay=0.0), 0.0, 0.5),
    "constant, memory 5": Line(CONSTANT | USUAL | dict(memory=5.0), 0.0, 0.5),
    "constant": Line(CONSTANT | USUAL, 0.0, 0.5),
    "Power (fitted)": Line(POWER | AVERAGED | USUAL, -0.3, 0.5),
    "constant, memory 1": Line(CONSTANT | USUAL | dict(memory=1.0), 0.0, 0.5),
}
# Not in the rules, but added after the any-time runs of seed 0
ADDED = {
    "Power (fitted), decayed": Line(POWER | USUAL, -0.3, 0.5),
    "Power (fitted), weight decay 0": Line(
        POWER | AVERAGED | USUAL | dict(weight_decay=0.0), -0.3, 0.5
    ),
}
# In the second part of the rules, after seeds 0 and 1 of the other lines
SCHEDULE_FREE = {
    "schedule-free": Line(
        dict(schedule="constant", average=True, weight_decay=0.1), 0.0, 0.5
    ),
    "schedule-free, weight decay 0": Line(
        dict(schedule="constant", average=True, weight_decay=0.0), 0.0, 0.5
    ),
}
# averages over about the last tenth, twentieth and fortieth of the tokens
SPANS = {"": 16.0, ", half the span": 32.0, ", a quarter of it": 64.0}


def any_time_lines() -> dict[str, Line]:
    lines = {}
    for name, (fields, b, q) in ANY_TIME.items():
        spans = SPANS if name not in ("constant", "constant, memory 1") else {"": 16.0}
        for words, power in spans.items():
            lines[name + words] = Line(fields | dict(average_power=power), b, q)
    return lines


def main() -> int:
    parser = flags.program_parser("run.py", __doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=3)
    parser.add_argument("lines", nargs="?", default="adamw", choices=tuple(FOLDERS))
    args = parser.parse_args()
    lines = {"any-time": any_time_lines(), "added": ADDED, "schedule-free": SCHEDULE_FREE}
    grids.GRIDS["compare"]["laptop"] = grids.grid(
        grids.LAPTOP,
        80_000,  # warmup
        [SHAPE],
        [8],
        3,
        LENGTHS,
        tune=(SHAPE, 8, LENGTHS[:2]),
        trials=range(10, 20),
    )
    lengths = ["--budgets", ",".join(map(str, LENGTHS)), "--warmup_tokens", "80000"]
    linear = ["--decay_share", "1", "--decay_shape", "linear"]
    for seeds in range(1, 1 + args.seeds):
        common = [*SETTINGS, "--seeds", str(seeds)]
        planned = ["wsd", *common, "--widths", "32", *lengths]
        sweeps = {folder: ["compare", *common] for folder in lines}
        for decay in ("0", "0.1"):
            fixed = ["--weight_decay", decay]
            sweeps[f"linear-{decay}"] = [*planned, *linear, *fixed]
            sweeps[f"wsd-{decay}"] = [*planned, *fixed]
        for folder in FOLDERS[args.lines]:
            compare.LINES = lines.get(folder, {})
            status = sweep.main([*sweeps[folder], "--out", f"{OUT}/{folder}"])
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
