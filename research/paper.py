"""The experiments of the paper, at the size of your machine.

    python research/paper.py transfer --scale quick   several widths, with and without muP
    python research/paper.py power --scale quick      a and b of the Power schedule
    python research/paper.py compare --scale quick    cosine, WSD and Power, all tuned once
    python research/paper.py two-stage --scale quick  other text in the decay

Each trains the runs that its folder lacks, and prints a table. So the same command
resumes, and prints the table again. The paper's sweep of WSD is `python sweep.py wsd`.
research/tables.py makes the same tables from our records. An experiment is a list of runs
for sweep.py, and a table with the method of fit.py.
"""

import dataclasses
import math
import shlex
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

import numpy as np

import fit
import records
import sweep
import train
from config import TrainConfig
from records import row_of, show
from sweep import GPU, LAPTOP, PAPER, Grid, doublings, lattice
from tools import engines, files, flags
from tools.flags import UserError, size


def warm(common: dict, tokens: int) -> dict:
    return common | dict(warmup_tokens=tokens)


def cells_of(grid: Grid, **more) -> list[TrainConfig]:
    """One run of every cell and seed of a grid, at any learning rate."""
    return sweep.runs_of(grid._replace(lrs=[0.01]), **more)


# -- muP: does the best learning rate transfer to other widths? --------------------------

NARROW = [32, 64, 128, 256]
WIDE = [128, 256, 512, 1024, 2048]
TRANSFER = {  # common flags, widths, batch sizes, seeds, run lengths
    "quick": Grid(warm(LAPTOP, 2_000), NARROW[:3], [4], [0], [80_000]),
    "laptop": Grid(warm(LAPTOP, 2_000), NARROW, [4], [0, 1, 2], [160_000]),
    "gpu": Grid(warm(GPU, 25_000), WIDE, [16], [0], [4 * 10**6], head=64),
    "paper": Grid(warm(PAPER, 10**9), WIDE[:4], [128], [0], [4 * 10**9], head=64),
}


def transfer_runs(grid: Grid) -> list[TrainConfig]:
    """WSD runs under muP, then without its rules and with the usual attention."""
    standard = dict(m_width=1.0, attention_multiplier=grid.head**-0.5)
    return sweep.runs_of(grid) + sweep.runs_of(grid, **standard)


def transfer_table(rows: list[dict]) -> list[list[str]]:
    """The best learning rate of every width, and that of the widest over the narrowest."""
    with_mup, without = by_mup(rows)
    table = []
    for words, some in (("with μP", with_mup), ("without μP", without)):
        shapes = sorted({row["shape"] for row in some})

        def log2_best(curves: fit.Curves) -> np.ndarray:
            best = {}
            for cell, x in fit.bottoms(fit.valleys_of(curves)).items():
                best[cell.shape] = x
            x = [best.get(shape, math.nan) for shape in shapes]
            return np.array([*x, x[-1] - x[0]])

        *best, ratio = np.exp2(fit.intervals(fit.curves_of(some), log2_best))
        table.append([words, *(show(lr, ".4f") for lr in best), show(ratio, ".2f")])
    return table


def by_mup(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """The runs with muP, and those without."""
    found = {True: [], False: []}
    for row in rows:
        d_head = row["n_embd"] // row["n_head"]
        found[row["attention_multiplier"] == 1 / d_head].append(row)
    return found[True], found[False]


# -- Power: its best a and b -------------------------------------------------------------

# Power is scanned around this. The a of the paper, 4, is too low for our small batches,
# and its ceiling, 0.02, would make runs with different large a equal.
#
# To train Power, we warm up for 40% of the smallest T. A Power run starts at its highest
# learning rate, and after a warmup of a few steps this hurts it for long.
CENTER = dict(schedule="power", power_a=16.0, power_b=-0.51, power_q=1.0, lr_max=1.0)
PAPER_POWER = warm(PAPER | dict(preset="36M-power"), 10**9)
PAPER_CENTER = PAPER_POWER | CENTER | dict(power_a=4.0, lr_max=0.02)
_quick = warm(LAPTOP | CENTER, 16_000)
_laptop = warm(LAPTOP | CENTER, 32_000)
_gpu = warm(GPU | CENTER, 400_000)
_paper = doublings(2 * 10**9, 7)
POWER = {
    "quick": Grid(_quick, [32], [2, 8], [0], doublings(40_000, 4)),
    "laptop": Grid(_laptop, [64], [2, 4, 8], [0, 1], doublings(80_000, 5)),
    "gpu": Grid(_gpu, [256], [16, 32, 64], [0], doublings(10**6, 5), head=64),
    "paper": Grid(PAPER_CENTER, [256], doublings(32, 5), [0], _paper, head=64),
}


def power_runs(grid: Grid) -> list[TrainConfig]:
    """Power with several a at the central b, and with several b at the central a."""
    center = {name: grid.common[name] for name in CENTER}
    a = center["power_a"]
    b = center["power_b"]
    scan = [(float(f"{a * 2 ** (k / 2):.4g}"), b) for k in range(-4, 5)]
    scan += [(a, round(b + k / 50, 4)) for k in range(-5, 6) if k]
    runs = []
    for cfg in cells_of(grid):
        for power_a, power_b in scan:
            fields = center | dict(power_a=power_a, power_b=power_b)
            runs.append(dataclasses.replace(cfg, **fields))
    return runs


def log2_a(row: dict) -> float:
    return math.log2(row["power_a"])


def b_of(row: dict) -> float:
    return row["power_b"]


def power_table(rows: list[dict]) -> list[list[str]]:
    """The best a and b over all T, batch sizes and seeds, and what an error costs.

    We find the best of every seed and average, instead of averaging losses first.
    """
    table = []
    for name, other, x_of, steps, words in (
        ("a", "power_b", log2_a, 2, "a factor of 2"),
        ("b", "power_a", b_of, 3, "0.06"),
    ):
        center = statistics.mode(row[other] for row in rows)
        some = [row for row in rows if row[other] == center]
        best = []
        costs = []
        for curve in fit.curves_of(some, x_of).values():
            points = sorted(curve.items())
            costs += costs_beside(points, steps)
            x, why_not = fit.bottom(points)
            if not why_not:
                best.append(2**x if name == "a" else x)
        spread = f"{statistics.stdev(best):.2f}"
        cost = f"{statistics.fmean(costs):.3f} for {words}"
        table.append([name, f"{statistics.fmean(best):.2f}", spread, cost])
    return table


def costs_beside(points: fit.Valley, steps: int) -> list[float]:
    """Losses above the lowest of a valley, so many tries below and above it."""
    losses = [loss for _, loss in points]
    lowest = losses.index(min(losses))
    beside = [lowest - steps, lowest + steps]
    tried = [losses[i] for i in beside if 0 <= i < len(losses)]
    return [loss - losses[lowest] for loss in tried if loss < math.inf]


# -- The comparison ----------------------------------------------------------------------
#
# A *line* of the comparison is a schedule with a rule for its learning rate. Every seed
# repeats the whole experiment. It tunes the learning rates of all lines at one small
# width and batch size, with two other seeds. Then it tests all lines in larger cells,
# without tuning again.

FIVE = [0, 1, 2, 3, 4]
_gpu = warm(GPU, 400_000)
_paper = doublings(16 * 10**9, 5)
COMPARE = {
    "quick": Grid(warm(LAPTOP, 8_000), [32, 64], [2, 8], [0], doublings(20_000, 4)),
    "laptop": Grid(warm(LAPTOP, 32_000), [64, 128], [2, 8], FIVE, doublings(80_000, 5)),
    "gpu": Grid(_gpu, [256, 512], [8, 32], FIVE, doublings(10**6, 5), head=64),
    "paper": Grid(PAPER_POWER, [512, 1024], [128, 512], FIVE[:3], _paper, head=64),
}


class Tuning(NamedTuple):
    """Where a comparison tunes its learning rates."""

    widths: list[int]
    batches: list[int]
    budgets: list[int]
    lrs: list[float]


TUNING = {
    "quick": Tuning([32], [2], [20_000, 40_000], lattice(10, 18, 2)),
    "laptop": Tuning([32], [2], [80_000, 320_000], lattice(8, 16)),
    "gpu": Tuning([128], [8], [10**6, 4 * 10**6], lattice(8, 16)),
    "paper": Tuning([256], [128], [4 * 10**9, 16 * 10**9], lattice(4, 14)),
}


class Line(NamedTuple):
    """A schedule whose learning rate grows as batch^q T^b from where we tuned it.

    It is the peak, or under Power the learning rate at n = T. (Power does not read T.)
    """

    fields: dict
    b: float
    q: float


def power_line(b: float, q: float, lr_max: float) -> Line:
    fields = dict(schedule="power", power_b=b, power_q=q, lr_max=lr_max)
    return Line(fields, b, q)


LINES = {  # "fitted" lines have b and q of our law
    "WSD (fitted)": Line(dict(schedule="wsd"), -0.3, 0.5),
    "WSD": Line(dict(schedule="wsd"), 0.0, 0.5),  # the same learning rate at all T
    "cosine (fitted)": Line(dict(schedule="cosine"), -0.3, 0.5),
    "linear to 0 (fitted)": Line(dict(schedule="linear"), -0.3, 0.5),
    "Power (fitted)": power_line(-0.3, 0.5, 1.0),
    "Power (paper)": power_line(-0.51, 1.0, 0.02),  # with the ceiling of the paper
}
PAIRS = [
    ("Power (fitted)", "WSD (fitted)"),
    ("Power (fitted)", "WSD"),
    ("Power (fitted)", "cosine (fitted)"),
    ("Power (fitted)", "linear to 0 (fitted)"),
    ("Power (paper)", "WSD (fitted)"),
    ("Power (paper)", "WSD"),
    ("Power (paper)", "cosine (fitted)"),
]


def candidates(line: Line, grid: Grid, tuning: Tuning, seed: int) -> dict[float, list]:
    """{learning rate of the shortest run: runs} to tune a line for a seed."""
    seeds = [100 + 2 * seed, 101 + 2 * seed]
    cells = cells_of(grid._replace(seeds=seeds, **tuning._asdict()), **line.fields)
    return {lr: [at(line, lr, cfg, tuning) for cfg in cells] for lr in tuning.lrs}


def at(line: Line, lr: float, cfg: TrainConfig, tuning: Tuning) -> TrainConfig:
    """A run with the learning rate of a line, which has lr in the shortest tuned run."""
    lr *= (cfg.batch_size / tuning.batches[0]) ** line.q
    lr *= (cfg.total_tokens / tuning.budgets[0]) ** line.b
    cfg = sweep.at_rate(cfg, float(f"{lr:.4g}"))
    return dataclasses.replace(cfg, **line.fields)  # with its ceiling


def compare(grid: Grid, args) -> str:
    """Tune all lines, then test them, and print the tuned learning rates."""
    # 1. Tune
    tuning = TUNING[args.scale]
    if args.lrs:
        tuning = tuning._replace(lrs=args.lrs)
    tries = {}
    tuning_runs = []
    for name, line in LINES.items():
        for seed in grid.seeds:
            by_lr = candidates(line, grid, tuning, seed)
            tries[name, seed] = by_lr
            for runs in by_lr.values():
                tuning_runs += runs
    train_all(args, tuning_runs)

    # 2. Test. In a dry run, which has no losses, at the first learning rate
    lrs = {}
    for key, by_lr in tries.items():
        losses = {}
        for lr, runs in by_lr.items():
            losses[lr] = sum(row_of(run, args.out)["loss"] for run in runs)
        lrs[key] = min(losses, key=losses.get)
    tests = []
    for name, line in LINES.items():
        for cfg in cells_of(grid, **line.fields):
            tests.append((name, at(line, lrs[name, cfg.seed], cfg, tuning)))
    train_all(args, [run for _, run in tests])
    if args.dry_run:
        return ""

    # 3. Report. A learning rate at the edge of the tries is not tuned
    edges = f"from {min(tuning.lrs):g} to {max(tuning.lrs):g}"
    print(f"tuned learning rates, {edges}:")
    for name in LINES:
        print(f"  {name:<22}{', '.join(f'{lrs[name, s]:g}' for s in grid.seeds)}")
    rows = [row_of(run, args.out) | {"line": name} for name, run in tests]
    T = max(grid.budgets)
    longest = [row for row in rows if row["total_tokens"] == T]
    table = []
    for one, other in PAIRS:
        gaps = [show(difference(some, one, other)) for some in (rows, longest)]
        table.append([f"{one} minus {other}", *gaps])
    return records.table(["lines", "mean loss, all T", f"T = {size(T)}"], table)


def difference(rows: list[dict], one: str, other: str) -> np.ndarray:
    """Mean loss of a line minus that of another, with its interval [3]."""
    losses = defaultdict(dict)  # {(cell, seed): {line: loss}}
    for row in rows:
        losses[fit.cell_of(row), row["seed"]][row["line"]] = row["loss"]

    def answer(some: dict) -> np.ndarray:
        return np.array([np.mean([x[one] - x[other] for x in some.values()])])

    return fit.intervals(losses, answer)[0]


# -- Two stages --------------------------------------------------------------------------

# The paper adds better data in the decay. Here it is another text, of which the first
# stage has a tenth and the decay a half. `bash research/texts.sh` makes it.
OTHER = "data/english"
SHARES = {"one": 0.1, "two": 0.5}  # of the other text, by stages
_two = dict(preset="laptop", schedule="power", seq_len=128, decay_share=0.2)
TWO_STAGE = {
    "quick": Grid(_two, [128], [8], [0], [400_000], head=32),
    "laptop": Grid(_two, [128], [8], [0, 1, 2], [2 * 10**6], head=32),
}


def two_stage(grid: Grid, args) -> str:
    """Train runs with the same text throughout, and end branches with other text."""
    cells = cells_of(grid)
    tokens = sum(cfg.total_tokens + cfg.decay_tokens for cfg in cells)
    print(f"{args.out}: {2 * len(cells)} runs with {tokens:,} tokens")
    if args.dry_run:
        return ""
    if not Path(OTHER).exists():
        raise UserError(f"{OTHER}: the other text; first bash research/texts.sh")
    rows = []
    for cfg in cells:
        fields = grid.common | dict(n_embd=cfg.n_embd, n_head=cfg.n_head)
        fields |= dict(batch_size=cfg.batch_size, total_tokens=cfg.total_tokens)
        fields |= dict(seed=cfg.seed, data_seed=cfg.seed)
        for name in ("fingerprint", "tokenizer", "vocab_size"):  # of one text
            del fields[name]
        for stages, share in SHARES.items():
            out = args.out / f"{stages}-{cfg.seed}"
            fields |= dict(data=f"{cfg.data or 'embedded'}:{1 - share},{OTHER}:{share}")
            if stages == "two":
                fields |= dict(branch=args.out / f"one-{cfg.seed}")
            command = shlex.split(flags.as_flags(fields | dict(out=out)))
            if not (out / "record.json").exists():
                if train.main([*command, "--resume"]):
                    raise UserError(f"{out}: stopped; the same command resumes")
            record = files.read_json(out / "record.json")
            rows.append(dict(stages=stages, seed=cfg.seed) | record["results"])
    texts = [name for name in rows[0] if name.startswith("val_loss_")]
    head = ["validation text", "one stage", "two stages", "difference"]
    return records.table(head, two_stage_table(rows, texts))


def two_stage_table(rows: list[dict], texts: list[str]) -> list[list[str]]:
    """Losses of every validation text, with one text throughout and with two stages."""
    table = []
    for text in texts:
        losses = {"one": [], "two": []}
        for row in sorted(rows, key=lambda row: row["seed"]):
            losses[row["stages"]].append(row[text])
        gaps = np.subtract(losses["two"], losses["one"])
        means = [f"{np.mean(losses[stages]):.3f}" for stages in losses]
        table.append([text.removeprefix("val_loss_"), *means, show(records.over(gaps))])
    return table


# -- The command line --------------------------------------------------------------------


def train_all(args, runs: list[TrainConfig]) -> None:
    slurm = dict(args.slurm or [])
    sweep.train_all(runs, args.out, args.workers, slurm, args.dry_run)


def transfer(grid: Grid, args) -> str:
    runs = transfer_runs(grid)
    train_all(args, runs)
    if args.dry_run:
        return ""
    widths = [f"width {width}" for width in grid.widths]
    head = ["", *widths, f"{grid.widths[-1]} over {grid.widths[0]}"]
    return records.table(head, transfer_table([row_of(cfg, args.out) for cfg in runs]))


def power(grid: Grid, args) -> str:
    runs = power_runs(grid)
    train_all(args, runs)
    if args.dry_run:
        return ""
    head = ["", "mean", "standard deviation", "cost of an error"]
    return records.table(head, power_table([row_of(cfg, args.out) for cfg in runs]))


EXPERIMENTS = {
    "transfer": (transfer, TRANSFER),
    "power": (power, POWER),
    "compare": (compare, COMPARE),
    "two-stage": (two_stage, TWO_STAGE),
}


def main(argv: list[str] | None = None) -> int:
    grids = {name: grids for name, (_, grids) in EXPERIMENTS.items()}
    grid, typed, args = sweep.parse(argv, "paper.py", __doc__, grids)
    experiment, _ = EXPERIMENTS[args.experiment]

    def program() -> None:
        print(experiment(sweep.grid_on_text(grid, typed), args))

    return engines.run_program("paper.py", program)


if __name__ == "__main__":
    sys.exit(main())
