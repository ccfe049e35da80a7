"""Tuned short, run long: the runs of notes.md with this title, resumable.

    git apply forks/shifted.patch            for the lines with a shift
    python research/anytime.py code          the pilot and the test of a cell
    python research/anytime.py price         A3, pilots of many lengths, and a valley
    python research/anytime.py travel        A4, numbers of the cell code in other cells
    python research/anytime.py average       A6, averaged weights instead of a decay
    python research/anytime.py records       put the records into results/anytime

Every schedule has one number, its learning rate at n = T0, or its peak. We tune it in
runs of T0 tokens with two seeds. Then the trunk goes on to 4, 16 and 64 T0 with three
other seeds, and decays there. A cell reads the corpus in its `data`; notes.md has the
commands that make them. (We ran all of this at commit f758107, with older names of files.)
"""

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import data
import fit
import sweep
import train
from config import TrainConfig, make_config
from records import write_results
from schedules import paper_batch_size
from tools import devices, engines, files, flags
from tools.flags import UserError

RESULTS = Path(__file__).parent / "results/anytime"
WARMUP = 32  # steps
SHARE = 0.3  # of a run decays
PILOT_SEEDS = (100, 101)
SEEDS = (0, 1, 2)

# lines of the tables -> (schedule, b, shift in T0)
POWER = "n^-0.3"
SHIFTED = "(n + T0)^-0.5"
LINES = {
    "held": ("wsd", 0.0, 0),
    POWER: ("power", -0.3, 0),
    "n^-0.5": ("power", -0.5, 0),
    "(n + T0)^-0.3": ("power", -0.3, 1),
    SHIFTED: ("power", -0.5, 1),
    "(n + T0)^-0.7": ("power", -0.7, 1),
    "line": ("linear", 0.0, 0),
    "cosine": ("cosine", 0.0, 0),
}
TRUNKS = ("held", POWER, SHIFTED)  # that every cell has
MAIN = (*TRUNKS, "line")


class Cell(NamedTuple):
    """A model, a batch size and a text, with the length of a pilot."""

    T0: int  # tokens
    batch_size: int = 8  # sequences of 128 tokens
    model: dict = dict(n_layer=2, n_embd=32, n_head=2)
    data: str | None = None
    times: tuple = (1, 4, 16)  # lengths of the test, in T0
    lines: tuple = MAIN
    shares: tuple = (SHARE,)  # decays of the longest two lengths
    peaks: tuple = (0.71, 1.41)  # of longest lines, over the tuned peak, for the regret


CELLS = {
    # its lines are in results/decay-laptop/linear, at nine peaks
    "code": Cell(320_000, lines=tuple(LINES), peaks=()),
    "manual": Cell(160_000, data="data/manual"),
    "japanese": Cell(160_000, data="data/japanese"),
    "batch-2": Cell(80_000, batch_size=2, peaks=()),
    "batch-32": Cell(320_000, batch_size=32, peaks=()),
    "code-short": Cell(80_000, times=(1, 4, 16, 64), shares=(SHARE, 0.5), peaks=()),
    "width-128": Cell(
        100_000,
        model=dict(n_layer=3, n_embd=128, n_head=4, dtype="bfloat16"),
        peaks=(),
    ),
}


# -- Runs --------------------------------------------------------------------------------


def make_run(
    cell: Cell, line: str, rate: float, seed: int, T: int, share=SHARE, **fields
) -> TrainConfig:
    """rate: learning rate at n = T0, or peak of a line or cosine."""
    schedule, b, shift = LINES[line]
    fields = dict(schedule=schedule, batch_size=cell.batch_size, data=cell.data) | fields
    if schedule == "power":
        beta = paper_batch_size(cell.batch_size * 128)
        a = rate / (beta**0.5 * (cell.T0 + shift * cell.T0) ** b)
        fields |= dict(power_a=float(f"{a:.4g}"), power_b=b, power_q=0.5, lr_max=1.0)
        if shift:
            fields["power_shift"] = float(shift * cell.T0)
    else:
        fields["lr"] = float(f"{rate:.4g}")
    fields |= dict(seed=seed, data_seed=seed, total_tokens=T, decay_share=share)
    fields |= dict(warmup_tokens=WARMUP * cell.batch_size * 128)
    return make_config(**sweep.LAPTOP | fields | cell.model)


def line_of(config: dict) -> str:
    """The line of a record."""
    shift = config.get("power_shift", 0) > 0
    b = config["power_b"] if config["schedule"] == "power" else 0.0
    (line,) = [x for x in LINES if LINES[x] == (config["schedule"], b, shift)]
    return line


def first_guess(cell: Cell) -> int:
    """j of the middle learning rate, 1e-4 * 2^(j / 2), by the law of earlier sweeps."""
    lr = 0.0118 * (cell.T0 / 320_000) ** -0.22 * (cell.batch_size / 8) ** 0.5
    return round(2 * math.log2(lr / 1e-4))


def tune(cell: Cell, folder: Path, runs_at, dry_run: bool, train_all=sweep.train_all):
    """Train a pilot. Returns the tuned learning rate, or None in a dry run.

    runs_at(rate): its runs, with all seeds. We try five learning rates, a factor of 2
    apart, and another one as long as the lowest is at an edge.
    """
    middle = first_guess(cell)
    js = list(range(middle - 4, middle + 5, 2))
    while True:
        runs = {j: runs_at(*sweep.lattice(j, j)) for j in js}
        if not train_all(sum(runs.values(), []), folder, dry_run=dry_run):
            return None
        points = []
        for j in js:
            losses = [sweep.loss_of(cfg, folder) for cfg in runs[j]]
            points.append((math.log2(1e-4) + j / 2, sum(losses) / len(losses)))
        x, why_not = fit.bottom(points)
        if why_not == "at lowest":
            js.insert(0, js[0] - 2)
        elif why_not == "at highest":
            js.append(js[-1] + 2)
        elif why_not:
            raise UserError(f"{folder}: the pilot has no best learning rate, {why_not}")
        else:
            return 2**x


def tuned(name: str, line: str, folder: Path, dry_run: bool) -> float | None:
    """The number of a line from the pilot of a cell."""
    cell = CELLS[name]

    def runs_at(rate: float) -> list[TrainConfig]:
        return [make_run(cell, line, rate, seed, cell.T0) for seed in PILOT_SEEDS]

    return tune(cell, folder, runs_at, dry_run)


def tests(cell: Cell, line: str, rate: float, seeds: Iterable[int]) -> list[TrainConfig]:
    """The runs of a line at its tuned learning rate, and longest lines at others."""
    runs = []
    for seed in seeds:
        for times in cell.times:
            T = times * cell.T0
            is_long = line in TRUNKS and times in cell.times[-2:]
            for share in cell.shares if is_long else (SHARE,):
                runs.append(make_run(cell, line, rate, seed, T, share))
        if line == "line" and seed in SEEDS:
            for peak in cell.peaks:
                runs.append(make_run(cell, line, peak * rate, seed, T))
    return runs


def run_cell(name: str, n_seeds: int, out: Path, dry_run: bool) -> None:
    """Tune all lines of a cell, then test them. More than 3 seeds: only those of MAIN."""
    cell = CELLS[name]
    runs = []
    for line in cell.lines:
        rate = tuned(name, line, out / name, dry_run)
        if rate:
            print(f"{name:12} {line:14} {rate:.4g}", flush=True)
            seeds = range(n_seeds) if line in MAIN else SEEDS
            runs += tests(cell, line, rate, seeds)
    sweep.train_all(runs, out / name, dry_run=dry_run)


# -- A3, A4 and A6 -----------------------------------------------------------------------

PRICE_SEEDS = (100, 101, 102, 103)
PRICE_LENGTHS = [80_000 * 2**k for k in range(4)]  # of pilots, to 640k
PRICE_ENDS = (320_000, 1_280_000, 5_120_000)  # of the valleys, with seeds 0, 1 and 2


def price(out: Path, dry_run: bool) -> None:
    """Pilots of Power at nine learning rates, a factor of √2 apart, and its valleys."""
    cell = CELLS["code"]  # its T0, 320k, is where we give the learning rates
    middle = first_guess(cell) - 1
    runs = []
    for rate in sweep.lattice(middle - 4, middle + 4):
        for seed in PRICE_SEEDS:
            runs += [make_run(cell, POWER, rate, seed, T) for T in PRICE_LENGTHS]
    for rate in sweep.lattice(middle - 3, middle + 2):
        for seed in SEEDS:
            runs += [make_run(cell, POWER, rate, seed, T) for T in PRICE_ENDS]
    sweep.train_all(runs, out / "price", dry_run=dry_run)


def travel(out: Path, dry_run: bool) -> None:
    """Power and the shifted root in other cells, with their a from the pilot of code."""
    code = CELLS["code"]
    for line in (POWER, SHIFTED):
        rate = tuned("code", line, out / "code", dry_run)
        for name in ("batch-32", "batch-2", "width-128"):
            cell = CELLS[name]
            if rate is None or (name == "width-128" and line != POWER):
                continue
            # the same a: scaled by the root of the batch size, and the same shift
            scaled = rate * (cell.batch_size / code.batch_size) ** 0.5
            moved = cell._replace(T0=code.T0)
            runs = []
            for seed in SEEDS:
                for times in cell.times[1:]:
                    runs.append(make_run(moved, line, scaled, seed, times * cell.T0))
            sweep.train_all(runs, out / f"travel-{name}", dry_run=dry_run)


AVERAGE_SHARE = 25  # the half-life of the average is a 25th of the tokens seen


def average(out: Path, dry_run: bool) -> None:
    """A held run without weight decay, whose weights we average."""
    cell = CELLS["code"]

    def runs_at(rate: float, seeds=PILOT_SEEDS, T=cell.T0) -> list[TrainConfig]:
        return [make_run(cell, "held", rate, s, T, 0.0, weight_decay=0.0) for s in seeds]

    rate = tune(cell, out / "average", runs_at, dry_run, average_all)
    if rate:
        print(f"average      held           {rate:.4g}", flush=True)
        runs = [cfg for t in cell.times for cfg in runs_at(rate, SEEDS, t * cell.T0)]
        average_all(runs, out / "average", dry_run)


def average_all(runs: list[TrainConfig], folder: Path, dry_run: bool) -> bool:
    """Train runs as sweep.train_all, but with averaged weights, two at a time."""
    left = sweep.unfinished(runs, folder)
    print(f"{folder}: {len(left)} trunks of averages are left", flush=True)
    if dry_run or not left:
        return not left
    folder.mkdir(parents=True, exist_ok=True)
    with engines.on_this_machine(["cpu"] * 2) as (submit, as_completed):
        jobs = []
        for trunk, of_trunk in left.items():
            jobs.append(submit(train_averaged, of_trunk, sweep.file_of(trunk, folder)))
        for job in as_completed(jobs):
            job.result()
    return True


def train_averaged(runs: list[TrainConfig], file: Path) -> None:
    """Train one run without decay, and record its averaged weights at all lengths."""
    longest = devices.resolve(max(runs, key=lambda cfg: cfg.total_tokens))
    batch = longest.batch_tokens
    ends = {cfg.total_tokens // batch * batch: cfg for cfg in runs}
    mixture = data.load_mixture(longest)
    state = train.build(longest)
    averaged = train.build(longest)  # its model has the average
    records = files.read_records(file)
    for _ in train.training_steps(longest, state, mixture):
        keep = 2 ** (-AVERAGE_SHARE * batch / state.tokens)
        with torch.no_grad():
            pairs = zip(averaged.model.parameters(), state.model.parameters())
            for mean, now in pairs:
                mean.lerp_(now, 1 - keep)
        if state.tokens in ends:
            cfg = devices.resolve(ends[state.tokens])
            averaged.tokens = state.tokens
            losses = train.validate(cfg, averaged.model, mixture, cfg.final_eval_tokens)
            results = train.results_of(cfg, averaged, losses)
            records.append({"config": vars(cfg), "results": results})
    files.write_records(file, records)


# -- The records -------------------------------------------------------------------------


def write_records(out: Path) -> None:
    """Write what we trained, a folder for every cell and question."""
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        records = []
        for file in sorted(folder.glob("*.jsonl")):
            records += files.read_records(file)
        for record in records:
            line = "average" if folder.name == "average" else line_of(record["config"])
            record["config"]["line"] = line
        if records:
            # the newest text of that name, which all runs of a cell read
            cfg = make_config(data=records[0]["config"]["data"])
            fingerprint = data.load_mixture(cfg).meta["fingerprint"]
            command = f"python research/anytime.py {folder.name}"
            write_results(RESULTS / folder.name, records, command, fingerprint)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("anytime.py", __doc__)
    add = parser.add_argument
    add("what", choices=(*CELLS, "price", "travel", "average", "records"))
    add("--out", type=Path, default=Path("runs/anytime"), help="folder of the records")
    add("--seeds", type=int, default=len(SEEDS), help="of the test of a cell")
    add("--dry_run", action="store_true", help="count runs and tokens, and stop")
    args = parser.parse_args(argv)
    programs = dict(price=price, travel=travel, average=average)

    def program() -> None:
        if args.what == "records":
            write_records(args.out)
        elif args.what in CELLS:
            run_cell(args.what, args.seeds, args.out, args.dry_run)
        else:
            programs[args.what](args.out, args.dry_run)

    return engines.run_program("anytime.py", program)


if __name__ == "__main__":
    sys.exit(main())
