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
2. Schaipp et al. (arXiv 2501.18965) extended runs of 50,000 steps, and varied how much
   of a run decays.

The command prints our tables, and compares them with results/public.json, which has none
of their rows. If there is no such file, it writes it.
"""

import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import config
from tools import files, flags
from tools.flags import UserError, size
from tools.rows import read_csv
from tools.student import student

COMMITTED = ROOT / "research/results/public.json"
Rows = list[list[str]]  # of a table

# -- 1. Valleys --------------------------------------------------------------------------


class Valley(NamedTuple):
    """A parabola through the losses of a cell, over x = log2 of the learning rate."""

    lowest_x: float  # that was tried
    highest_x: float
    bottom: float  # x of the minimum
    loss: float  # at the minimum
    bend: float  # loss(x) = loss + bend (x - bottom)^2

    def tried(self, x: float) -> bool:
        return self.lowest_x <= x <= self.highest_x

    def regret(self, x: float) -> float:
        """The loss at x above the minimum. Beyond the tried x, that of the nearest."""
        nearest = min(max(x, self.lowest_x), self.highest_x)
        return self.bend * (nearest - self.bottom) ** 2


def valley_of(points: list[tuple[float, float]]) -> Valley | None:
    """The valley of points (x, loss), or None if no minimum lies among the tried x.

    OpenEuroLLM, too, puts a parabola through all learning rates. Our minima are those of
    its best_HPs/lr_min_smooth.csv.
    """
    if len(points) < 3:
        return None
    x, loss = np.array(sorted(points)).T
    bend, slope, constant = map(float, np.polyfit(x, loss, 2))
    bottom = -slope / (2 * bend)
    if bend <= 0 or not x[0] <= bottom <= x[-1]:
        return None
    return Valley(float(x[0]), float(x[-1]), bottom, constant - bend * bottom**2, bend)


def exponent(valleys: dict[float, Valley]) -> float:
    """b of the best learning rate ~ T^b, from {T: valley}."""
    log2_T = [math.log2(T) for T in valleys]
    slope, _ = np.polyfit(log2_T, [valley.bottom for valley in valleys.values()], 1)
    return float(slope)


def with_interval(values: list[float], form="z.4f") -> str:
    """The mean of independent values and its 95% interval."""
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(student(len(values) - 1)) * error
    return f"{mean:{form}} [{mean - half:{form}}, {mean + half:{form}}]"


# -- 2. OpenEuroLLM: the number of a pilot in longer runs --------------------------------

COLUMNS = "val_loss=loss,total_tokens=D,batch_size=gbsz,seq_len=4096,shape=N"
RUNNERS = ("held", "half", "ratio^-0.3", "ratio^-0.5")
Series = dict[str, dict[float, Valley]]  # {model and batch size: {T: valley}}


class Pair(NamedTuple):
    """A pilot, and a run at least as long."""

    series: str
    T0: float  # tokens of the pilot
    ratio: float  # of the lengths
    losses: dict[str, float]  # {runner: loss above the minimum}
    beyond: list[str]  # runners whose learning rate is beyond the tried ones


def read_valleys(file: Path) -> Series:
    points = defaultdict(list)
    for row in read_csv(file, COLUMNS, config.FIELDS):
        # we pool the seeds: at 1B, most runs at 0.001 have another seed than the rest
        _, n_parameters = row["shape"]
        cell = n_parameters, row["batch_size"], row["total_tokens"]
        points[cell].append((math.log2(row["lr"]), row["loss"]))
    series = defaultdict(dict)
    for (n_parameters, batch_size, T), of_cell in sorted(points.items()):
        valley = valley_of(of_cell)
        if valley is not None:
            series[f"{size(n_parameters)}, batch {batch_size}"][T] = valley
    return series


def pair_of(name: str, T0: float, pilot: Valley, T: float, run: Valley) -> Pair:
    ratio = T / T0
    factors = {
        "held": 1.0,
        "half": 0.5,
        "ratio^-0.3": ratio**-0.3,
        "ratio^-0.5": ratio**-0.5,
    }
    places = {runner: pilot.bottom + math.log2(f) for runner, f in factors.items()}
    losses = {runner: run.regret(x) for runner, x in places.items()}
    beyond = [runner for runner, x in places.items() if not run.tried(x)]
    return Pair(name, T0, ratio, losses, beyond)


def pairs_of(series: Series) -> list[Pair]:
    pairs = []
    for name, valleys in series.items():
        for T0, pilot in valleys.items():
            for T, run in valleys.items():
                if T >= T0:
                    pairs.append(pair_of(name, T0, pilot, T, run))
    return pairs


def mean_losses(pairs: list[Pair]) -> dict[str, dict[str, float]]:
    """{series: {runner: mean loss}}"""
    of_series = defaultdict(list)
    for pair in pairs:
        of_series[pair.series].append(pair)
    means = defaultdict(dict)
    for name, of_one in of_series.items():
        for runner in RUNNERS:
            means[name][runner] = statistics.fmean(pair.losses[runner] for pair in of_one)
    return means


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
        if max(pair.ratio for pair in of_pilot) < 15:
            continue
        losses = {}
        for runner in RUNNERS:
            losses[runner] = max(pair.losses[runner] for pair in of_pilot)
        worst.append(of_pilot[0]._replace(losses=losses))
    return worst


def at_scale(pairs: list[Pair]) -> Rows:
    """The mean loss of every series, and the median of all pairs."""
    rows = []
    for name, means in mean_losses(pairs).items():
        n = sum(pair.series == name for pair in pairs)
        rows.append([name, str(n), *(f"{loss:.4f}" for loss in means.values())])
    medians = ["median of all pairs", str(len(pairs))]
    beyond = ["pairs beyond the tried learning rates", str(len(pairs))]
    for runner in RUNNERS:
        median = statistics.median(pair.losses[runner] for pair in pairs)
        medians.append(f"{median:.4f}")
        beyond.append(str(sum(runner in pair.beyond for pair in pairs)))
    return [*rows, medians, beyond]


def differences(groups: dict[str, list[Pair]]) -> Rows:
    """Means over series, because the pairs of a series share their runs."""
    rows = []
    for name, of_group in groups.items():
        by_series = list(mean_losses(of_group).values())
        means = [name, str(len(by_series))]
        minus = [f"{name}, minus ratio^-0.3", str(len(by_series))]
        for runner in RUNNERS:
            means.append(with_interval([losses[runner] for losses in by_series]))
            gaps = [losses[runner] - losses["ratio^-0.3"] for losses in by_series]
            minus.append("" if runner == "ratio^-0.3" else with_interval(gaps))
        rows += [means, minus]
    return rows


def slopes(series: Series) -> Rows:
    ranges = {
        "6B to 300B": (6e9, 300e9),
        "6B to 30B": (6e9, 30e9),
        "30B to 300B": (30e9, 300e9),
    }
    rows = []
    for name, (low, high) in ranges.items():
        found = []
        for valleys in series.values():
            inside = {T: valley for T, valley in valleys.items() if low <= T <= high}
            if len(inside) > 2:
                found.append(exponent(inside))
        rows.append([name, str(len(found)), with_interval(found, "z.2f")])
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
    """By share of the decay: b, and the losses minus those of 20%, at each length."""
    losses = defaultdict(dict)  # {(share, steps): {lr: loss}}
    for file in (folder / "data").glob("ann124-*_decay_linear_*.json"):
        run = read_log(file)
        losses[run["wsd_fract_decay"], run["iterations"]][run["lr"]] = run["loss"]
    same_lr = set.intersection(*map(set, losses.values()))
    valleys = defaultdict(dict)  # {share: {steps: valley}}
    for (share, T), by_lr in sorted(losses.items()):
        valley = valley_of([(math.log2(lr), by_lr[lr]) for lr in same_lr])
        if valley is not None:
            valleys[share][T] = valley
    rows = []
    for share, of_share in valleys.items():
        row = [f"{share:.0%}", f"{exponent(of_share):.2f}"]
        for T in valleys[0.2]:
            row.append(f"{losses[share, T][0.001] - losses[0.2, T][0.001]:.4f}")
        for T, usual in valleys[0.2].items():
            tuned = of_share.get(T)
            row.append(f"{tuned.loss - usual.loss:.4f}" if tuned else "")
        rows.append(row)
    return rows


# -- 4. The tables -----------------------------------------------------------------------

ABOUT = {
    "at scale": (
        "WSD of OpenEuroLLM, 15 to 50 times as long as a pilot of 6B to 20B tokens, at "
        "the pilot's best learning rate (*held*), at half of it, or at the same times a "
        "power of the ratio of the two lengths: the loss above the minimum of a "
        "parabola. Batch sizes count sequences of 4096 tokens. A learning rate beyond "
        "those that were tried counts as the nearest of them, and so loses at least what "
        "is printed.",
        ["series", "pairs", *RUNNERS],
    ),
    "at scale, differences": (
        "The same with 95% intervals over series (a model and a batch size), because "
        "nearly all runs have one seed. *Worst length*: the worst of all runs after a "
        "pilot of 6B or 12B tokens. All runs hold their learning rate before the decay, "
        "so *ratio^-0.3* is a run that knew its length, and not a trunk that falls.",
        ["length", "series", *RUNNERS],
    ),
    "at scale, b": (
        "b of the best learning rate in runs of OpenEuroLLM, mean and 95% interval over "
        "series. It falls most from short runs.",
        ["T", "series", "b"],
    ),
    "extended": (
        "Validation loss of runs of Schaipp et al. that are 2 or 4 times as long as "
        "50,000 steps, for which 0.001 is the best learning rate of four at 124M: "
        "*held*, or *lowered once*, after 40,000 steps (times 0.525 for 2 and 0.375 for "
        "4 times), with decays of 20% or 60%. One seed.",
        ["model and length", *EXTENSIONS],
    ),
    "public shares": (
        "Schaipp et al., 124M parameters, 15,000 to 50,000 steps, by the share that "
        "decays: b, and the loss minus that with 20%, with the learning rate *held* at "
        "0.001 or *tuned* for each share and length (of 0.0005 to 0.002). One seed.",
        [
            *("share", "b"),
            *("held, 15k", "held, 25k", "held, 35k", "held, 50k"),
            *("tuned, 15k", "tuned, 25k", "tuned, 35k", "tuned, 50k"),
        ],
    ),
}


def with_captions(rows: dict[str, Rows]) -> list[tuple[str, str, list[str], Rows]]:
    return [(name, *ABOUT[name], rows[name]) for name in ABOUT]


def tables() -> list[tuple[str, str, list[str], Rows]]:
    """(name, caption, head, rows) of every table, from the committed figures."""
    return with_captions(files.read_json(COMMITTED))


def ask(openeurollm: Path, schaipp: Path) -> dict[str, Rows]:
    """The rows of every table, from folders. Raises UserError."""
    file = openeurollm / "data/loss_all_exps_post_annealing.csv"
    for path in (file, schaipp / "data/horizon_transfer"):
        if not path.exists():
            raise UserError(f"{path} is missing; clone it as --help says")
    series = read_valleys(file)
    pairs = pairs_of(series)
    long = [pair for pair in pairs if 15 <= pair.ratio <= 50]
    middle = [pair for pair in pairs if 4 <= pair.ratio <= 10]
    groups = {
        "15 to 50 times": long,
        "4 to 10 times 6B": [pair for pair in middle if pair.T0 == 6e9],
        "4 to 10 times 30B": [pair for pair in middle if pair.T0 == 30e9],
        "worst length, 1 to 50 times": worst_lengths(pairs, 1),
        "worst length, 3 to 50 times": worst_lengths(pairs, 3),
    }
    return {
        "at scale": at_scale(long),
        "at scale, differences": differences(groups),
        "at scale, b": slopes(series),
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
    for name, about, head, of_table in with_captions(rows):
        print(f"## {name}\n\n{about}\n")
        for row in (head, ["---"] * len(head), *of_table):
            print(f"| {' | '.join(row)} |")
        print()

    if not COMMITTED.exists():
        files.write_json(COMMITTED, rows)
    committed = files.read_json(COMMITTED)
    differ = [name for name in rows if rows[name] != committed[name]]
    print(f"other than in {COMMITTED.name}: {', '.join(differ) or 'nothing'}")
    return int(bool(differ))


if __name__ == "__main__":
    flags.end_with_reader()
    sys.exit(main())
