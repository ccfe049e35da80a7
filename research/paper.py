"""The other experiments of the paper, at the size of your machine.

    python research/paper.py transfer --scale quick   several widths, with and without muP
    python research/paper.py power --scale quick      a and b of the Power schedule
    python research/paper.py compare --scale quick    cosine, WSD and Power, all tuned once
    python research/paper.py compare --report research/results/compare-laptop

Each trains the runs that its folder lacks, and then reports all of them. The last line
only reports. An experiment is a list of runs for sweep.py, and a report with the method
of fit.py.
"""

import math
import statistics
import sys
from collections import Counter, defaultdict
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import fit
import sweep
from config import TrainConfig
from fit import STANDARD, Cell, Trial
from schedules import fields_without_effect, paper_batch_size
from sweep import GPU, LAPTOP, PAPER, TWO_LAYERS, Grid, doublings, lattice, make_run, warm
from tools import engines, flags, plots
from tools.flags import UserError
from tools.flags import size
from tools.reports import panel, print_cells, show

# Power is scanned around this. The a of the paper, 4, is too low for our small batches,
# and its ceiling, 0.02, would make runs with different large a equal
NO_CEILING = dict(lr_max=1.0)
CENTER = NO_CEILING | dict(power_a=16.0, power_b=-0.51, power_q=1.0)
PAPER_POWER = PAPER | CENTER | dict(preset="36M-power", power_a=4.0, lr_max=0.02)

ON_GPU = dict(times=1.7, head=64)

# -- muP: does the best learning rate transfer to other widths? --------------------------

TRANSFER = {
    "quick": Grid(warm(LAPTOP, 2_000), [32, 64, 128], [4], [0], [80_000],
                  times=TWO_LAYERS),
    "laptop": Grid(warm(LAPTOP, 2_000), [32, 64, 128, 256], [4], [0, 1, 2], [160_000],
                   times=TWO_LAYERS),
    "gpu": Grid(warm(GPU, 25_000), [128, 256, 512, 1024, 2048], [16], [0], [4 * 10**6],
                **ON_GPU),
    "paper": Grid(warm(PAPER, 10**9), [128, 256, 512, 1024], [128], [0], [4 * 10**9],
                  head=64),
}  # fmt: skip


def transfer_runs(grid: Grid) -> list[TrainConfig]:
    """WSD runs under muP, then without its rules and with the usual attention."""
    standard = dict(m_width=1.0, attention_multiplier=grid.head**-0.5)
    return sweep.runs_of(grid) + sweep.runs_of(grid, **standard)


def report_transfer(rows: list[dict], out: Path) -> None:
    """Report the best learning rates of a sweep over widths, with and without muP."""
    trials = fit.trials_of(rows)
    print_bottoms(fit.valleys_of(trials))
    groups = {"with muP": [], "without muP": []}
    for trial in trials:
        is_standard = STANDARD in trial.cell.shape
        groups["without muP" if is_standard else "with muP"].append(trial)
    panels = []
    for title, group in groups.items():
        if group:
            print_widths(title, group)
            curves = fit.with_curves(fit.valleys_of(group))
            drawn = panel(curves, group[-1].cell, "shape")
            panels.append(drawn | {"title": title})
    plots.draw_valleys(out / "transfer.png", panels)
    print(f"\n{out}: transfer.png")


def print_bottoms(valleys: dict[Cell, fit.Valley]) -> None:
    texts = {}
    for cell, points in valleys.items():
        x, why_not = fit.bottom(points)
        texts[cell] = why_not or f"{2**x:.3g}"
    print_cells("best learning rate", texts)


def print_widths(title: str, trials: list[Trial]) -> None:
    """Print the best learning rate of the widest shape over that of the narrowest."""
    narrow = trials[0].cell
    wide = trials[-1].cell

    def answer(some: list[Trial]) -> np.ndarray:
        """log2 of the ratio, the mean over T and batch sizes that both have."""
        best = fit.bottoms(fit.valleys_of(some))
        ratios = []
        for cell, x in best.items():
            narrowest = cell._replace(width=narrow.width, shape=narrow.shape)
            if cell.shape == wide.shape and narrowest in best:
                ratios.append(x - best[narrowest])
        return np.array([np.mean(ratios) if ratios else math.nan])

    (ratio,) = fit.jackknife(trials, answer, [fit.seed_of])
    print(f"\n{title}, {wide.shape} over {narrow.shape}: {show(2**ratio, '.2f')}")


# -- WSD: the law as the paper fits it ---------------------------------------------------


def fit_paper_law(trials: list[Trial]) -> np.ndarray:
    """Return b and log2 a of lr = a beta T^b in the three best batch sizes of every T."""
    valleys = fit.valleys_of(trials)
    best = fit.bottoms(valleys)
    if not best:
        return np.full(2, math.nan)
    ranking = defaultdict(list)
    for cell in sorted(best, key=lambda cell: fit.lowest(valleys[cell])[1]):
        ranking[cell.shape, cell.T].append(cell)
    design = []
    ratios = []
    for cells in ranking.values():
        for cell in cells[:3]:
            design.append([math.log2(cell.T), 1.0])
            ratios.append(best[cell] - math.log2(cell.beta))  # lr / beta
    return least_squares(design, ratios)


def least_squares(design: list[list], y: list) -> np.ndarray:
    """Return the coefficients [k] of a design [n, k], NaN if many fit equally well."""
    solution, _, rank, _ = np.linalg.lstsq(np.array(design), np.array(y), rcond=1e-6)
    return solution if rank == len(solution) else np.full(len(solution), math.nan)


# -- Power: its best a and b -------------------------------------------------------------

# To train Power, we warm up for 40% of the smallest T. A Power run starts at its highest
# learning rate, and after a warmup of a few steps this hurts it for long.
POWER = {
    "quick": Grid(warm(LAPTOP | CENTER, 16_000), [32], [2, 8], [0], doublings(40_000, 4)),
    "laptop": Grid(warm(LAPTOP | CENTER, 32_000), [64], [2, 4, 8], [0, 1],
                   doublings(80_000, 5)),
    "gpu": Grid(warm(GPU | CENTER, 400_000), [256], [16, 32, 64], [0],
                doublings(10**6, 5), **ON_GPU),
    "paper": Grid(warm(PAPER_POWER, 10**9), [256], doublings(32, 5), [0],
                  doublings(2 * 10**9, 7), head=64),
}  # fmt: skip


def power_runs(grid: Grid) -> list[TrainConfig]:
    """Power with several a at the central b, and with several b at the central a."""
    a = grid.common["power_a"]
    b = grid.common["power_b"]
    scan = [(float(f"{a * 2 ** (k / 2):.4g}"), b) for k in range(-4, 5)]
    scan += [(a, round(b + k / 50, 4)) for k in range(-5, 6) if k]
    runs = []
    for cell in sweep.all_cells(grid):
        for power_a, power_b in scan:
            fields = dict(schedule="power", power_a=power_a, power_b=power_b)
            runs.append(make_run(grid, cell, **fields))
    return runs


def report_power(rows: list[dict], out: Path) -> None:
    """Report the best a and the best b of a sweep of Power."""
    report_scan(rows, "a", "b", out / "power-a.png")
    report_scan(rows, "b", "a", out / "power-b.png")
    print(f"\n{out}: power-a.png, power-b.png")


def report_scan(rows: list[dict], name: str, fixed: str, figure: Path) -> None:
    """Report the best a, or the best b, of the runs that vary it.

    It is the bottom of a parabola through 5 points. We find it for every seed and
    average, instead of averaging losses first.
    """

    def setting(row: dict) -> float:
        value = row[f"power_{name}"]
        return math.log2(value) if name == "a" else value

    # 1. The best of every cell and seed
    center = statistics.mode(row[f"power_{fixed}"] for row in rows)
    scan = [row for row in rows if row[f"power_{fixed}"] == center]
    trials = fit.trials_of(scan, setting)
    curve = dict(degree=2, window=5)
    best = {trial.cell: [] for trial in trials}
    seeds = sorted({trial.seed for trial in trials})
    for seed in seeds:
        valleys = fit.valleys_of([trial for trial in trials if trial.seed == seed])
        for cell, x in fit.bottoms(valleys, **curve).items():
            best[cell].append(2**x if name == "a" else x)

    # 2. A table, the mean, and a figure
    texts = {}
    for cell, values in best.items():
        texts[cell] = f"{np.mean(values):.3f}" if values else "none"
    print_cells(f"best {name}, mean over seeds", texts)
    of_all = sum(best.values(), [])
    if of_all:
        n_valleys = f"{len(of_all)} of {len(best) * len(seeds)} valleys"
        spread = f"standard deviation {np.std(of_all):.3f}"
        print(f"{n_valleys}: mean {np.mean(of_all):.3f}, {spread}")
    at = trials[-1].cell
    curves = fit.with_curves(fit.valleys_of(trials), **curve)
    drawn = panel(curves, at, "batch_size", name)
    plots.draw_valleys(figure, [drawn])


# -- The comparison ----------------------------------------------------------------------
#
# A *line* of the comparison is a schedule with a rule for its learning rate. Every seed
# repeats the whole experiment. It tunes the learning rates of all lines at one small
# width and batch size, with two other seeds. Then it tests all lines in larger cells,
# without tuning again.


class Tuning(NamedTuple):
    """Where a comparison tunes its learning rates."""

    width: int
    batch_size: int
    budgets: list[int]


FIVE = [0, 1, 2, 3, 4]
COMPARE = {
    "quick": Grid(warm(LAPTOP, 8_000), [32, 64], [2, 8], [0], doublings(20_000, 4),
                  lrs=lattice(10, 18, 2)),
    "laptop": Grid(warm(LAPTOP, 32_000), [64, 128], [2, 8], FIVE, doublings(80_000, 5),
                   lrs=lattice(8, 16)),
    "gpu": Grid(warm(GPU, 400_000), [256, 512], [8, 32], FIVE, doublings(10**6, 5),
                lrs=lattice(8, 16), **ON_GPU),
    "paper": Grid(warm(PAPER_POWER, 10**9), [512, 1024], [128, 512], [0, 1, 2],
                  doublings(16 * 10**9, 5), lrs=lattice(4, 14), head=64),
}  # fmt: skip
TUNING = {
    "quick": Tuning(32, 2, [20_000, 40_000]),
    "laptop": Tuning(32, 2, [80_000, 320_000]),
    "gpu": Tuning(128, 8, [10**6, 4 * 10**6]),
    "paper": Tuning(256, 128, [4 * 10**9, 16 * 10**9]),
}


class Line(NamedTuple):
    """A schedule whose peak learning rate grows as batch^q T^b from where we tuned it.

    Power does not read T. Its learning rate falls as n^b, to the same value at n = T.
    """

    fields: dict
    b: float
    q: float


LINES = {  # "fitted" lines have b and q of our law. We compare with WSD (fitted)
    "WSD (fitted)": Line(dict(schedule="wsd"), -0.3, 0.5),
    "WSD": Line(dict(schedule="wsd"), 0.0, 0.5),  # the same learning rate at all T
    "cosine (fitted)": Line(dict(schedule="cosine"), -0.3, 0.5),
    "linear to 0 (fitted)": Line(dict(schedule="linear"), -0.3, 0.5),
    "Power (fitted)": Line(dict(schedule="power") | NO_CEILING, -0.3, 0.5),
    # its ceiling is 0.02, as in the paper
    "Power (paper)": Line(dict(schedule="power", lr_max=0.02), -0.51, 1.0),
}


class Comparison:
    """The runs that tune the lines, and those that test them, in a folder of records."""

    def __init__(self, grid: Grid, tuning: Tuning, folder: Path):
        self.grid = grid
        self.tuning = tuning
        self.folder = folder

    def fields_of(self, line: Line, lr: float, batch_size: int, T: int) -> dict:
        """The flags of a line. lr: its learning rate at the first tuned T."""
        batch_0, T_0 = self.tuning.batch_size, self.tuning.budgets[0]
        if line.fields["schedule"] == "power":
            beta = paper_batch_size(batch_0 * self.grid.common["seq_len"])
            a = lr / (beta**line.q * T_0**line.b)  # from lr = a beta^q n^b
            rate = dict(power_a=float(f"{a:.4g}"), power_b=line.b, power_q=line.q)
            return line.fields | rate
        lr *= (batch_size / batch_0) ** line.q * (T / T_0) ** line.b
        return line.fields | dict(lr=float(f"{lr:.4g}"))

    def candidates(self, line: Line, seed: int) -> dict[float, list[TrainConfig]]:
        """{learning rate: runs} to tune a line for a seed."""
        width, batch_size, budgets = self.tuning
        runs = defaultdict(list)
        for lr in self.grid.lrs:
            for tuning_seed in (100 + 2 * seed, 101 + 2 * seed):
                for T in budgets:
                    cell = (width, batch_size, tuning_seed, T)
                    fields = self.fields_of(line, lr, batch_size, T)
                    runs[lr].append(make_run(self.grid, cell, **fields))
        return runs

    def tuning_runs(self) -> list[TrainConfig]:
        runs = []
        for line in LINES.values():
            for seed in self.grid.seeds:
                for of_lr in self.candidates(line, seed).values():
                    runs += of_lr
        return runs

    def tuned_lr(self, line: Line, seed: int) -> float:
        """The candidate with the lowest mean loss, of those that are finished."""
        totals = {}
        for lr, runs in self.candidates(line, seed).items():
            totals[lr] = sum(self.row_of(cfg)["loss"] for cfg in runs)
        return min(totals, key=totals.get)

    def row_of(self, cfg: TrainConfig) -> dict:
        """The row of a run, with an infinite loss if it is not finished."""
        loss = sweep.loss_of(cfg, self.folder)
        return vars(cfg) | {"loss": math.inf if loss is None else loss}

    def testing_runs(self) -> dict[str, list[TrainConfig]]:
        """{line: its runs at the tuned learning rates, in all cells and budgets}"""
        runs = defaultdict(list)
        for name, line in LINES.items():
            lrs = {seed: self.tuned_lr(line, seed) for seed in self.grid.seeds}
            for cell in sweep.all_cells(self.grid):
                _, batch_size, seed, T = cell
                fields = self.fields_of(line, lrs[seed], batch_size, T)
                runs[name].append(make_run(self.grid, cell, **fields))
        return runs

    def print_tuned(self) -> None:
        """Print the tuned learning rates. One at the edge is not tuned."""
        lrs = self.grid.lrs
        print(f"tuned learning rates, from {min(lrs):g} to {max(lrs):g}:")
        for name, line in LINES.items():
            tuned = [self.tuned_lr(line, seed) for seed in self.grid.seeds]
            print(f"  {name:<22}{', '.join(f'{lr:g}' for lr in tuned)}")


BASELINE = "WSD (fitted)"  # has the learning rate of the law, which needs T
HELD = "WSD"  # has the same learning rate at every T


def report_compare(rows: list[dict], out: Path) -> None:
    """Report the mean loss of every line of a comparison, minus two others.

    Raises UserError if no cell has a run of every line and seed.
    """
    # 1. The cells that have all runs
    tested = [row for row in rows if "line" in row]  # without the tuning
    trials = fit.trials_of(tested, itemgetter("line")) if tested else []
    lines = sorted({row["line"] for row in tested})
    n_runs = len(lines) * len({trial.seed for trial in trials})
    counts = Counter(trial.cell for trial in trials)
    trials = [trial for trial in trials if counts[trial.cell] == n_runs]
    if BASELINE not in lines or not trials:
        raise UserError("no cell has all its runs; is the sweep still running?")
    longest = max(trial.cell.T for trial in trials)
    at_longest = [trial for trial in trials if trial.cell.T == longest]

    # 2. Every line minus the baseline, the lowest first
    gaps = differences(trials, BASELINE)
    gaps_at_longest = differences(at_longest, BASELINE)
    print(f"{len(trials) // n_runs} cells; loss minus {BASELINE}, with 95% intervals")
    print(f"| line | mean | at T = {size(longest)} |\n|---|---|---|")
    for line in sorted(lines, key=lambda line: gaps[line][0]):
        print(f"| {line} | {show(gaps[line])} | {show(gaps_at_longest[line])} |")
    dots = {line: gaps[line] for line in gaps if line != BASELINE}
    dots = dict(sorted(dots.items(), key=lambda dot: dot[1][0]))
    plots.draw_differences(out / "compare.png", dots, f"loss minus {BASELINE} (nats)")

    # 3. What Power loses and gains, if it uses the law of the baseline
    power = "Power (fitted)"
    if power in lines and HELD in lines:
        gap_to_held = show(differences(trials, HELD)[power])
        print(f"\n{power} has the law of {BASELINE}, but does not know T. Its loss is")
        print(f"{show(gaps[power])} nats from that of {BASELINE}, and")
        print(f"{gap_to_held} from that of {HELD}, with one learning rate for all T.")
    print(f"\n{out}: compare.png")


def differences(trials: list[Trial], baseline: str) -> dict[str, np.ndarray]:
    """Return {line: its mean loss minus that of the baseline, with the interval}."""
    lines = sorted({trial.setting for trial in trials})

    def answer(some: list[Trial]) -> np.ndarray:
        losses = defaultdict(list)
        for trial in some:
            losses[trial.setting].append(trial.loss)
        means = np.array([np.mean(losses[line]) for line in lines])
        return means - np.mean(losses[baseline])

    return dict(zip(lines, fit.jackknife(trials, answer)))


# -- The command line --------------------------------------------------------------------


def compare(grid: Grid, args) -> list[dict]:
    """Tune all lines, then test them. Returns the rows of the tests, none in a dry run."""
    comparison = Comparison(grid, TUNING[args.scale], args.out)
    # make all runs before we train any, because a flag may not suit the last
    comparison.testing_runs()
    sweep.train_sweep(args, comparison.tuning_runs())
    by_line = comparison.testing_runs()
    sweep.train_sweep(args, sum(by_line.values(), []))
    if args.dry_run:
        return []
    comparison.print_tuned()
    rows = []
    for line, runs in by_line.items():
        rows += [comparison.row_of(cfg) | {"line": line} for cfg in runs]
    return rows


GRIDS = {"transfer": TRANSFER, "power": POWER, "compare": COMPARE}
REPORTS = {"transfer": report_transfer, "power": report_power, "compare": report_compare}


def run_experiment(grid: Grid, args) -> None:
    """Train what the folder lacks, and report all of it."""
    if args.experiment == "compare":
        rows = compare(grid, args)
    else:
        runs_of = {"transfer": transfer_runs, "power": power_runs}[args.experiment]
        sweep.train_sweep(args, runs_of(grid))
        rows = [] if args.dry_run else fit.read_sweep(args.out)
    if rows:
        REPORTS[args.experiment](rows, args.out)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("paper.py", __doc__)
    parser.add_argument("experiment", choices=tuple(GRIDS))
    parser.add_argument("--report", type=Path, help="report this folder, train nothing")
    args = sweep.parse(parser, argv)
    if args.report:

        def program() -> None:
            REPORTS[args.experiment](fit.read_sweep(args.report), args.out)

        return engines.run_program("paper.py", program)

    ignored = sweep.OURS | {"schedule"}
    if args.experiment == "compare":
        ignored |= {"power_b", "power_q"}
    else:
        schedule = "power" if args.experiment == "power" else "wsd"
        ignored = ignored - {"power_a", "lr_max"} | fields_without_effect(schedule)
    sweep.refuse(parser, args.typed, ignored)
    if args.experiment == "power" and args.lrs:
        parser.error("--lrs: this experiment varies --power_a and --power_b")

    def program() -> None:
        grid = sweep.grid_of(args, GRIDS[args.experiment][args.scale])
        run_experiment(grid, args)

    return engines.run_program("paper.py", program)


if __name__ == "__main__":
    flags.end_with_reader()
    sys.exit(main())
