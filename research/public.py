"""Ask our questions of public runs with 48M to 1.7B parameters.

    python research/public.py --openeurollm FOLDER --schaipp FOLDER

The folders are checkouts of other people's repositories, which we do not ship:

    git clone https://github.com/OpenEuroLLM/dense_english_scaling_laws
    git -C dense_english_scaling_laws checkout 781af43
    git clone https://github.com/fabian-sp/lr-scheduling
    git -C lr-scheduling checkout 8ace3a3

1. OpenEuroLLM (arXiv 2608.28308) trained WSD at several learning rates for 6B to 300B
   tokens. We take the best learning rate of a short run, the *pilot*, and look up what it
   loses in longer runs: held, halved, or lowered by a power of the ratio of the lengths.
   The powers must know the length: all runs hold their learning rate before the decay.
2. Schaipp et al. (arXiv 2501.18965) extended runs of 50,000 steps, and varied how much
   of a run decays.

The command writes the rows of our tables to results/public.json, which has none of
theirs. Then `git diff` shows whether they agree with ours, and `python
research/tables.py` puts them into TABLES.md.
"""

import itertools
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

from tools import files, flags
from tools.flags import UserError
from tools.rows import read_csv
from tools.stats import over, show

COMMITTED = ROOT / "research/results/public.json"
Rows = list[list[str]]  # of a table

# -- 1. Valleys --------------------------------------------------------------------------


class Valley(NamedTuple):
    """A parabola through the losses of a cell, over x = log2 of the learning rate."""

    lowest_x: float  # that was tried
    highest_x: float
    bottom: float  # x of the minimum
    bend: float  # loss(x) = lowest loss + bend (x - bottom)^2

    def regret(self, x: np.ndarray) -> np.ndarray:
        """The loss at x above the minimum. Beyond the tried x, that of the nearest."""
        nearest = np.clip(x, self.lowest_x, self.highest_x)
        return self.bend * (nearest - self.bottom) ** 2


def valley_of(points: list[tuple[float, float]]) -> Valley | None:
    """The valley of points (x, loss), or None if no minimum lies among the tried x.

    OpenEuroLLM, too, puts a parabola through all learning rates. Our minima are those of
    its best_HPs/lr_min_smooth.csv.
    """
    if len(points) < 3:
        return None
    x, loss = np.array(sorted(points)).T
    bend, slope, _ = np.polyfit(x, loss, 2)
    bottom = -slope / (2 * bend)
    if bend <= 0 or not x[0] <= bottom <= x[-1]:
        return None
    return Valley(x[0], x[-1], bottom, bend)


# -- 2. OpenEuroLLM: the number of a pilot in longer runs --------------------------------

Series = dict[tuple, dict[float, Valley]]  # {(parameters, batch size): {T: valley}}
COLUMNS = "val_loss=loss,total_tokens=D,batch_size=gbsz,seq_len=4096,shape=N"
# A runner has the learning rate of the pilot, times factor * ratio^exponent. These are
# held, half, ratio^-0.5, and ratio^-0.3, with which we compare
FACTORS = np.array([1, 1 / 2, 1, 1])
EXPONENTS = np.array([0, 0, -0.5, -0.3])
# (row of the table, shortest and longest run in pilots, tokens of the pilot if not all)
RATIOS = [
    ("15 to 50 times", 15, 50, None),
    ("6B, 4 to 10 times", 4, 10, 6e9),
    ("30B, 4 to 10 times", 4, 10, 30e9),
]


def read_valleys(file: Path) -> Series:
    points = defaultdict(list)
    for row in read_csv(file, COLUMNS, ()):
        # we pool the seeds: at 1B, most runs at 0.001 have another seed than the rest
        _, n_parameters = row["shape"]
        cell = n_parameters, row["batch_size"], row["total_tokens"]
        points[cell].append((math.log2(row["lr"]), row["loss"]))
    series = defaultdict(dict)
    for (n_parameters, batch_size, T), of_cell in points.items():
        valley = valley_of(of_cell)
        if valley is not None:
            series[n_parameters, batch_size][T] = valley
    return series


def gaps(pilot: Valley, run: Valley, ratio: float) -> np.ndarray:
    """Losses of the runners in a longer run, minus that of ratio^-0.3 [runners]."""
    losses = run.regret(pilot.bottom + np.log2(FACTORS * ratio**EXPONENTS))
    return losses - losses[-1]


def at_scale(series: Series) -> Rows:
    """Means over series, because the runs of a series are in several of its pairs."""
    rows = []
    for name, shortest, longest, only in RATIOS:
        means = []
        for valleys in series.values():
            of_pairs = []
            for T0, T in itertools.product(valleys, repeat=2):
                if shortest <= T / T0 <= longest and only in (None, T0):
                    of_pairs.append(gaps(valleys[T0], valleys[T], T / T0))
            if of_pairs:
                means.append(np.mean(of_pairs, axis=0))
        held, half, steep, _ = np.transpose(means)  # [series]
        texts = [show(over(x), "z.4f") for x in (held, half, steep)]
        rows.append([f"{name}, minus ratio^-0.3", str(len(means)), *texts])
    return rows


# -- 3. Schaipp et al.: extended runs, and the share of the decay ------------------------

EXTENSIONS = ("held, 20%", "lowered once, 20%", "held, 60%")


def read_log(file: Path) -> dict:
    run = files.read_json(file)
    return run["config"] | {"loss": run["summary"]["final-val/loss"]}


def extended(folder: Path) -> Rows:
    losses = defaultdict(dict)
    for file in sorted((folder / "data/horizon_transfer").glob("extend-50k*.json")):
        run = read_log(file)
        model = {12: "124M", 24: "210M"}[run["n_layer"]]
        trunk = {"wsd": "held", "wsd_twostage": "lowered once"}[run["scheduler"]]
        name = f"{model}, {run['iterations'] // 50_000} times"
        losses[name][f"{trunk}, {run['wsd_fract_decay']:.0%}"] = f"{run['loss']:.4f}"
    rows = []
    for name, of_length in losses.items():
        rows.append([name, *(of_length.get(way, "") for way in EXTENSIONS)])
    return rows


def shares(folder: Path) -> Rows:
    """b by share of the decay, at the learning rates that all shares and lengths have."""
    losses = defaultdict(dict)  # {(share, steps): {lr: loss}}
    for file in folder.glob("data/ann124-*_decay_linear_*.json"):
        run = read_log(file)
        losses[run["wsd_fract_decay"], run["iterations"]][run["lr"]] = run["loss"]
    same_lr = set.intersection(*map(set, losses.values()))
    bottoms = defaultdict(dict)  # {share: {log2 of steps: log2 of the best lr}}
    for (share, T), by_lr in sorted(losses.items()):
        valley = valley_of([(math.log2(lr), by_lr[lr]) for lr in same_lr])
        if valley is not None:
            bottoms[share][math.log2(T)] = valley.bottom
    rows = []
    for share, of_share in bottoms.items():
        b, _ = np.polyfit(list(of_share), list(of_share.values()), 1)
        rows.append([f"{share:.0%}", f"{b:.2f}"])
    return rows


# -- 4. The tables -----------------------------------------------------------------------


def write_tables(openeurollm: Path, schaipp: Path) -> None:
    losses = openeurollm / "data/loss_all_exps_post_annealing.csv"
    for path in (losses, schaipp / "data/horizon_transfer"):
        if not path.exists():
            raise UserError(f"{path} is missing; clone it as --help says")
    rows = {
        "at scale": at_scale(read_valleys(losses)),
        "extended": extended(schaipp),
        "public shares": shares(schaipp),
    }
    files.write_json(COMMITTED, rows)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("public.py", __doc__)
    for source in ("openeurollm", "schaipp"):
        parser.add_argument(f"--{source}", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    try:
        write_tables(args.openeurollm, args.schaipp)
    except (UserError, OSError) as error:
        return flags.fail("public.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
