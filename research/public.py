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

The command prints our tables, and compares them with results/public.json, which has none
of their rows. If the file does not exist, the command writes it.
"""

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
from tools.stats import over, show, table

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
# {name: (factor, exponent)} of lr = the pilot's best * factor * ratio^exponent
RUNNERS = {
    "held": (1, 0),
    "half": (1 / 2, 0),
    "ratio^-0.3": (1, -0.3),
    "ratio^-0.5": (1, -0.5),
}
BASELINE = list(RUNNERS).index("ratio^-0.3")
FACTORS, EXPONENTS = np.array(list(RUNNERS.values())).T


class Pair(NamedTuple):
    """A pilot, and a run at least as long."""

    series: tuple[int, int]
    T0: float  # tokens of the pilot
    ratio: float  # of the lengths
    losses: np.ndarray  # above the minimum [runners]
    is_tried: np.ndarray  # is the learning rate among the tried ones? [runners]


def read_valleys(file: Path) -> Series:
    points = defaultdict(list)
    for row in read_csv(file, COLUMNS, ()):
        # we pool the seeds: at 1B, most runs at 0.001 have another seed than the rest
        _, n_parameters = row["shape"]
        cell = n_parameters, row["batch_size"], row["total_tokens"]
        points[cell].append((math.log2(row["lr"]), row["loss"]))
    series = defaultdict(dict)
    for (n_parameters, batch_size, T), of_cell in sorted(points.items()):
        valley = valley_of(of_cell)
        if valley is not None:
            series[n_parameters, batch_size][T] = valley
    return series


def pairs_of(series: Series) -> list[Pair]:
    pairs = []
    for name, valleys in series.items():
        for T0, pilot in valleys.items():
            for T, run in valleys.items():
                if T >= T0:
                    x = pilot.bottom + np.log2(FACTORS * (T / T0) ** EXPONENTS)
                    is_tried = (run.lowest_x <= x) & (x <= run.highest_x)
                    pairs.append(Pair(name, T0, T / T0, run.regret(x), is_tried))
    return pairs


def worst_lengths(pairs: list[Pair], shortest: float) -> list[Pair]:
    """Pairs with each runner's largest loss in runs `shortest` times as long, or longer.

    There is one for each pilot of 6B or 12B tokens that has a run 15 times as long.
    """
    by_pilot = defaultdict(list)
    for pair in pairs:
        if pair.T0 in (6e9, 12e9) and pair.ratio >= shortest:
            by_pilot[pair.series, pair.T0].append(pair)
    worst = []
    for of_pilot in by_pilot.values():
        if max(pair.ratio for pair in of_pilot) >= 15:
            losses = np.max([pair.losses for pair in of_pilot], axis=0)
            worst.append(of_pilot[0]._replace(losses=losses))
    return worst


def summary(name: str, pairs: list[Pair]) -> Rows:
    """Medians over pairs, and means over series, because their pairs share runs."""
    medians = np.median([pair.losses for pair in pairs], axis=0)
    by_series = defaultdict(list)
    for pair in pairs:
        by_series[pair.series].append(pair.losses - pair.losses[BASELINE])
    gaps = np.array([np.mean(of_series, axis=0) for of_series in by_series.values()])
    intervals = [show(over(gap), "z.4f") for gap in gaps.T]
    return [
        [f"{name}, median", str(len(pairs)), *(f"{loss:.4f}" for loss in medians)],
        [f"{name}, minus ratio^-0.3", str(len(gaps)), *intervals],
    ]


def at_scale(pairs: list[Pair]) -> Rows:
    long = [pair for pair in pairs if 15 <= pair.ratio <= 50]
    middle = [pair for pair in pairs if 4 <= pair.ratio <= 10]
    not_tried = sum(~pair.is_tried for pair in long)
    return [
        *summary("15 to 50 times", long),
        ["15 to 50 times, not tried", str(len(long)), *map(str, not_tried)],
        *summary("6B, 4 to 10 times", [pair for pair in middle if pair.T0 == 6e9]),
        *summary("30B, 4 to 10 times", [pair for pair in middle if pair.T0 == 30e9]),
        *summary("worst of 3 to 50 times", worst_lengths(pairs, 3)),
        *summary("worst of 1 to 50 times", worst_lengths(pairs, 1)),
    ]


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
    """By share of the decay: b, and the losses minus those of 20%, at each length."""
    losses = defaultdict(dict)  # {(share, steps): {lr: loss}}
    for file in folder.glob("data/ann124-*_decay_linear_*.json"):
        run = read_log(file)
        losses[run["wsd_fract_decay"], run["iterations"]][run["lr"]] = run["loss"]
    same_lr = set.intersection(*map(set, losses.values()))
    bottoms = defaultdict(dict)  # {share: {log2 of steps: log2 of the best lr}}
    gaps = defaultdict(list)  # {share: losses at the same lr minus those of 20%}
    for (share, T), by_lr in sorted(losses.items()):
        valley = valley_of([(math.log2(lr), by_lr[lr]) for lr in same_lr])
        if valley is not None:
            bottoms[share][math.log2(T)] = valley.bottom
        gaps[share].append(by_lr[0.001] - losses[0.2, T][0.001])
    rows = []
    for share, of_share in bottoms.items():
        b, _ = np.polyfit(list(of_share), list(of_share.values()), 1)
        texts = [f"{gap:.4f}" for gap in gaps[share]]
        rows.append([f"{share:.0%}", f"{b:.2f}", *texts])
    return rows


# -- 4. The tables -----------------------------------------------------------------------

HEADS = {  # their captions are in TABLES.md
    "at scale": ["length", "number", *RUNNERS],
    "extended": ["model and length", *EXTENSIONS],
    "public shares": ["share", "b", "15k steps", "25k", "35k", "50k"],
}


def ask(openeurollm: Path, schaipp: Path) -> dict[str, Rows]:
    """The rows of every table, from folders. Raises UserError."""
    file = openeurollm / "data/loss_all_exps_post_annealing.csv"
    for path in (file, schaipp / "data/horizon_transfer"):
        if not path.exists():
            raise UserError(f"{path} is missing; clone it as --help says")
    return {
        "at scale": at_scale(pairs_of(read_valleys(file))),
        "extended": extended(schaipp),
        "public shares": shares(schaipp),
    }


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("public.py", __doc__)
    for source in ("openeurollm", "schaipp"):
        parser.add_argument(f"--{source}", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    try:
        rows = ask(args.openeurollm, args.schaipp)
    except (UserError, OSError) as error:
        return flags.fail("public.py", error)
    for name, head in HEADS.items():
        print(f"## {name}\n\n{table(head, rows[name])}\n")

    if not COMMITTED.exists():
        files.write_json(COMMITTED, rows)
    committed = files.read_json(COMMITTED)
    differ = [name for name in rows if rows[name] != committed[name]]
    print(f"other than in {COMMITTED.name}: {', '.join(differ) or 'nothing'}")
    return int(bool(differ))


if __name__ == "__main__":
    flags.end_with_reader()
    sys.exit(main())
