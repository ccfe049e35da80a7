"""The experiments of the paper, at the size of your machine.

    python research/paper.py transfer --scale quick   several widths, with and without muP
    python research/paper.py power --scale quick      a and b of the Power schedule
    python research/paper.py compare --scale quick    cosine, WSD and Power, tuned once

Each trains the runs that its folder lacks, and prints a table. So the same command
resumes, and prints the table again. The paper's sweep of WSD is `python sweep.py wsd`,
and its second stage a branch of train.py with other data. research/tables.py makes the
same tables from our records.
"""

import dataclasses
import itertools
import math
import statistics
import sys
from collections import defaultdict
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

import numpy as np

import fit
import sweep
from config import TrainConfig
from sweep import ON_CLUSTER, ON_GPU, ON_LAPTOP, Grid, doublings, lattice
from tools import engines, stats
from tools.rows import row_of_record
from tools.stats import show


def warm(common: dict, tokens: int) -> dict:
    return common | dict(warmup_tokens=tokens)


def with_flags(grid: Grid, flags: dict) -> Grid:
    return grid._replace(common=grid.common | flags)


def cells_of(grid: Grid) -> list[TrainConfig]:
    """One run of every cell and seed of a grid, at any learning rate."""
    return sweep.runs_of(grid._replace(lrs=[0.01]))


def rows_of(runs: list[TrainConfig], args) -> list[dict]:
    """Train what the folder lacks. Returns the rows of all runs."""
    slurm = dict(args.slurm or [])
    sweep.train_all(runs, args.out, args.workers, slurm, args.dry_run)
    return [row_of(cfg, args.out) for cfg in runs]


def row_of(cfg: TrainConfig, folder: Path) -> dict:
    """The row of a run in a folder, with infinite loss if it is missing."""
    nothing = {"config": vars(cfg), "results": {"val_loss": None}}
    done = sweep.finished(folder / f"{sweep.trunk_name(cfg)}.jsonl")
    return row_of_record({}, done.get(sweep.ending_of(vars(cfg)), nothing))


# -- muP: does the best learning rate transfer to other widths? --------------------------

NARROW = [32, 64, 128, 256]
WIDE = [128, 256, 512, 1024, 2048]
TRANSFER = {  # common flags, widths, batch sizes, seeds, run lengths
    "quick": Grid(warm(ON_LAPTOP, 2_000), NARROW[:3], [4], [0], [80_000]),
    "laptop": Grid(warm(ON_LAPTOP, 2_000), NARROW, [4], [0, 1, 2], [160_000]),
    "gpu": Grid(warm(ON_GPU, 25_000), WIDE, [16], [0], [4 * 10**6], head=64),
    "paper": Grid(warm(ON_CLUSTER, 10**9), WIDE[:4], [128], [0], [4 * 10**9], head=64),
}


def transfer(grid: Grid, args) -> None:
    """WSD under muP, and without its rules and with the usual attention."""
    standard = dict(m_width=1.0, attention_multiplier=grid.head**-0.5)
    runs = sweep.runs_of(grid) + sweep.runs_of(with_flags(grid, standard))
    rows = rows_of(runs, args)
    if not args.dry_run:
        widths = [f"width {width}" for width in grid.widths]
        head = ["", *widths, f"{grid.widths[-1]} over {grid.widths[0]}"]
        print(stats.table(head, transfer_table(rows)))


def has_mup(row: dict) -> bool:
    return row["attention_multiplier"] == row["n_head"] / row["n_embd"]


def transfer_table(rows: list[dict]) -> list[list[str]]:
    """The best learning rate of every width, and the widest's over the narrowest's."""
    shapes = sorted({row["shape"] for row in rows})

    def log2_best(curves: fit.Curves) -> np.ndarray:
        best = {}
        for cell, x in fit.bottoms(fit.valleys_of(curves)).items():
            best[cell.shape] = x
        x = [best.get(shape, math.nan) for shape in shapes]
        return np.array([*x, x[-1] - x[0]])

    table = []
    for words, is_mup in (("with μP", True), ("without μP", False)):
        curves = fit.curves_of([row for row in rows if has_mup(row) == is_mup])
        *best, ratio = np.exp2(fit.intervals(curves, log2_best))
        table.append([words, *(show(lr, ".4f") for lr in best), show(ratio, ".2f")])
    return table


# -- Power: its best a and b -------------------------------------------------------------

# Power is scanned around this. The a of the paper, 4, is too low for our small batches,
# and its ceiling, 0.02, would make runs with different large a equal.
#
# To train Power, we warm up for 40% of the smallest T. A Power run starts at its highest
# learning rate, and after a warmup of a few steps this hurts it for long.
CENTER = dict(schedule="power", power_a=16.0, power_b=-0.51, power_q=1.0, lr_max=1.0)
GPU_CENTER = warm(ON_GPU | CENTER, 400_000)
PAPER_POWER = warm(ON_CLUSTER | dict(preset="36M-power"), 10**9)
PAPER_CENTER = PAPER_POWER | CENTER | dict(power_a=4.0, lr_max=0.02)
POWER = {
    "quick": Grid(
        warm(ON_LAPTOP | CENTER, 16_000), [32], [2, 8], [0], doublings(40_000, 4)
    ),
    "laptop": Grid(
        warm(ON_LAPTOP | CENTER, 32_000), [64], [2, 4, 8], [0, 1], doublings(80_000, 5)
    ),
    "gpu": Grid(GPU_CENTER, [256], [16, 32, 64], [0], doublings(10**6, 5), head=64),
    "paper": Grid(
        PAPER_CENTER, [256], doublings(32, 5), [0], doublings(2 * 10**9, 7), head=64
    ),
}


def power(grid: Grid, args) -> None:
    """Power with several a at the central b, and with several b at the central a."""
    a = grid.common["power_a"]
    b = grid.common["power_b"]
    scan = [(float(f"{a * 2 ** (k / 2):.4g}"), b) for k in range(-4, 5)]
    scan += [(a, round(b + k / 50, 4)) for k in range(-5, 6) if k]
    center = {name: grid.common[name] for name in CENTER}
    runs = []
    for cfg in cells_of(grid):
        for power_a, power_b in scan:
            fields = center | dict(power_a=power_a, power_b=power_b)
            runs.append(dataclasses.replace(cfg, **fields))
    rows = rows_of(runs, args)
    if not args.dry_run:
        head = ["", "mean", "standard deviation", "cost of an error"]
        print(stats.table(head, power_table(rows)))


def log2_a(row: dict) -> float:
    return math.log2(row["power_a"])


def power_table(rows: list[dict]) -> list[list[str]]:
    """The best a and b over all T, batch sizes and seeds, and what an error costs.

    We find the best of every seed and average, instead of averaging losses first.
    """
    table = []
    for name, other, x_of, steps, words in (
        ("a", "power_b", log2_a, 2, "a factor of 2"),
        ("b", "power_a", itemgetter("power_b"), 3, "0.06"),
    ):
        center = statistics.mode(row[other] for row in rows)
        curves = fit.curves_of([row for row in rows if row[other] == center], x_of)
        best = []
        costs = []  # above the lowest loss, so many steps below and above it
        for curve in curves.values():
            points = sorted(curve.items())
            x, why_not = fit.bottom(points)
            if not why_not:
                best.append(2**x if name == "a" else x)
            losses = [loss for _, loss in points]
            lowest = losses.index(min(losses))
            for i in (lowest - steps, lowest + steps):
                if 0 <= i < len(losses) and losses[i] < math.inf:
                    costs.append(losses[i] - losses[lowest])
        spread = f"{statistics.stdev(best):.2f}"
        cost = f"{statistics.fmean(costs):.3f} for {words}"
        table.append([name, f"{statistics.fmean(best):.2f}", spread, cost])
    return table


# -- The comparison ----------------------------------------------------------------------
#
# A *line* of the comparison is a schedule with a rule for its learning rate. Every seed
# repeats the whole experiment. It tunes the learning rates of all lines at one small
# width and batch size, with two other seeds. Then it tests all lines in larger cells,
# without tuning again.

FIVE = [0, 1, 2, 3, 4]
FEW = lattice(10, 18, 2)
MANY = lattice(8, 16)
LONG = doublings(16 * 10**9, 5)
COMPARE = {  # the cells of the tests, and the learning rates of the tuning
    "quick": Grid(
        warm(ON_LAPTOP, 8_000), [32, 64], [2, 8], [0], doublings(20_000, 4), FEW
    ),
    "laptop": Grid(
        warm(ON_LAPTOP, 32_000), [64, 128], [2, 8], FIVE, doublings(80_000, 5), MANY
    ),
    "gpu": Grid(
        warm(ON_GPU, 400_000),
        [256, 512],
        [8, 32],
        FIVE,
        doublings(10**6, 5),
        MANY,
        head=64,
    ),
    "paper": Grid(
        PAPER_POWER, [512, 1024], [128, 512], FIVE[:3], LONG, lattice(4, 14), head=64
    ),
}
TUNING = {  # the cells of the tuning
    "quick": dict(widths=[32], batches=[2], budgets=[20_000, 40_000]),
    "laptop": dict(widths=[32], batches=[2], budgets=[80_000, 320_000]),
    "gpu": dict(widths=[128], batches=[8], budgets=[10**6, 4 * 10**6]),
    "paper": dict(widths=[256], batches=[128], budgets=[4 * 10**9, 16 * 10**9]),
}


class Line(NamedTuple):
    """A schedule whose learning rate grows as batch^q T^b from where we tuned it.

    It is the peak, or under Power the learning rate at n = T. (Power does not read T.)
    """

    fields: dict
    b: float
    q: float


FITTED = dict(schedule="power", power_b=-0.3, power_q=0.5, lr_max=1.0)
# with the ceiling of the paper
AS_PAPER = dict(schedule="power", power_b=-0.51, power_q=1.0, lr_max=0.02)
LINES = {  # "fitted" lines have b and q of our law
    "WSD (fitted)": Line(dict(schedule="wsd"), -0.3, 0.5),
    "WSD": Line(dict(schedule="wsd"), 0.0, 0.5),  # the same learning rate at all T
    "cosine (fitted)": Line(dict(schedule="cosine"), -0.3, 0.5),
    "Power (fitted)": Line(FITTED, -0.3, 0.5),
    "Power (paper)": Line(AS_PAPER, -0.51, 1.0),
}
PAIRS = [
    ("Power (fitted)", "WSD (fitted)"),
    ("Power (fitted)", "WSD"),
    ("Power (fitted)", "cosine (fitted)"),
    ("Power (paper)", "WSD"),
    ("Power (paper)", "cosine (fitted)"),
]


def on_line(line: Line, lr: float, cfg: TrainConfig, tuning: dict) -> TrainConfig:
    """A run with the learning rate of a line, which has lr in the shortest tuned run."""
    lr *= (cfg.batch_size / tuning["batches"][0]) ** line.q
    lr *= (cfg.total_tokens / tuning["budgets"][0]) ** line.b
    cfg = sweep.at_rate(cfg, float(f"{lr:.4g}"))
    return dataclasses.replace(cfg, **line.fields)  # with its ceiling


def tune(grid: Grid, args) -> dict[tuple[str, int], float]:
    """{(line, seed): the best learning rate of a line, in the cells of TUNING}"""
    tuning = TUNING[args.scale]
    keys = []
    runs = []
    for name, line in LINES.items():
        for seed in grid.seeds:
            seeds = [100 + 2 * seed, 101 + 2 * seed]
            small = with_flags(grid._replace(seeds=seeds, **tuning), line.fields)
            for lr, cfg in itertools.product(grid.lrs, cells_of(small)):
                keys.append((name, seed, lr))
                runs.append(on_line(line, lr, cfg, tuning))
    losses = defaultdict(lambda: defaultdict(float))  # {(line, seed): {lr: sum}}
    for (name, seed, lr), row in zip(keys, rows_of(runs, args)):
        losses[name, seed][lr] += row["loss"]
    return {key: min(by_lr, key=by_lr.get) for key, by_lr in losses.items()}


def compare(grid: Grid, args) -> None:
    # 1. Train. A dry run has no losses, and counts the tests at the first learning rate
    lrs = tune(grid, args)
    names = []
    tests = []
    for name, line in LINES.items():
        for cfg in cells_of(with_flags(grid, line.fields)):
            names.append(name)
            lr = lrs[name, cfg.seed]
            tests.append(on_line(line, lr, cfg, TUNING[args.scale]))
    rows = rows_of(tests, args)
    if args.dry_run:
        return

    # 2. Report. A learning rate at the edge of the tries is not tuned
    print(f"tuned learning rates, from {min(grid.lrs):g} to {max(grid.lrs):g}:")
    for name in LINES:
        print(f"  {name:<22}{', '.join(f'{lrs[name, s]:g}' for s in grid.seeds)}")
    rows = [row | {"line": name} for name, row in zip(names, rows)]
    table = []
    for one, other in PAIRS:
        gap = show(difference(rows, one, other))
        table.append([f"{one} minus {other}", gap])
    print(stats.table(["lines", "mean loss, all T"], table))


def difference(rows: list[dict], one: str, other: str) -> np.ndarray:
    """Mean loss of a line minus that of another, with its interval [3]."""
    losses = defaultdict(dict)  # {(cell, seed): {line: loss}}
    for row in rows:
        losses[fit.cell_of(row), row["seed"]][row["line"]] = row["loss"]

    def answer(some: dict) -> np.ndarray:
        return np.array([np.mean([x[one] - x[other] for x in some.values()])])

    return fit.intervals(losses, answer)[0]


# -- The command line --------------------------------------------------------------------

GRIDS = {"transfer": TRANSFER, "power": POWER, "compare": COMPARE}
EXPERIMENTS = {"transfer": transfer, "power": power, "compare": compare}


def main(argv: list[str] | None = None) -> int:
    grid, typed, args = sweep.parse(argv, "paper.py", __doc__, GRIDS)

    def program() -> None:
        EXPERIMENTS[args.experiment](sweep.grid_on_text(grid, typed), args)

    return engines.run_program("paper.py", program)


if __name__ == "__main__":
    sys.exit(main())
