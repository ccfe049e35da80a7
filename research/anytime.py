"""Tuned short, run long: the runs of notes.md with this title, resumable.

    python research/anytime.py code          the pilot and the test of a cell
    python research/anytime.py price         A3, pilots of many lengths, and a valley
    python research/anytime.py travel        A4, numbers of the cell code in other cells
    python research/anytime.py average       A6, averaged weights instead of a decay
    python research/anytime.py records       put the records into results/anytime

Every schedule has one number, its learning rate at n = T0, or its peak. We tune it in
runs of T0 tokens with two seeds. Then the trunk goes on to 4, 16 and 64 T0 with three
other seeds, and decays there. Runs that differ only in their end share a trunk, as in
sweep.py. A cell reads the corpus in its `data`; notes.md has the commands that make them.
"""

import json
import math
import platform
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
from schedules import PLANNED, paper_batch_size
from tools import devices, engines, files, flags

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


class Run(NamedTuple):
    cfg: TrainConfig
    trunk: str  # name of the trunk
    line: str


def make_run(
    cell: Cell, line: str, rate: float, seed: int, T: int, share=SHARE, **fields
) -> Run:
    """rate: learning rate at n = T0, or peak of a line or cosine."""
    schedule, b, shift = LINES[line]
    beta = paper_batch_size(cell.batch_size * 128)
    fields = dict(schedule=schedule, batch_size=cell.batch_size) | fields
    if schedule == "power":
        shift *= cell.T0
        a = rate / (beta**0.5 * (cell.T0 + shift) ** b)
        fields |= dict(power_a=float(f"{a:.4g}"), power_b=b, power_q=0.5)
        fields |= dict(power_shift=float(shift), lr_max=1.0)
    else:
        fields |= dict(lr=float(f"{rate:.4g}"))
    fields |= dict(seed=seed)
    name = ",".join(f"{x}={value}" for x, value in fields.items())
    if schedule in PLANNED:
        name += f",T={T}"
    fields |= dict(data_seed=seed, total_tokens=T, decay_share=share)
    fields |= dict(data=cell.data, warmup_tokens=WARMUP * cell.batch_size * 128)
    fields |= cell.model
    return Run(make_config(**sweep.LAPTOP | fields), name, line)


def first_guess(cell: Cell, T0: int) -> int:
    """j of the middle learning rate, 1e-4 * 2^(j / 2), by the law of earlier sweeps."""
    lr = 0.0118 * (T0 / 320_000) ** -0.22 * (cell.batch_size / 8) ** 0.5
    return round(2 * math.log2(lr / 1e-4))


def losses_at(folder: Path, runs: list[Run]) -> list[float]:
    """The losses of finished runs. Raises KeyError if one is not finished."""
    losses = []
    for run in runs:
        done = {}
        for record in files.read_records(folder / f"{run.trunk}.jsonl"):
            done[end_of(record["config"])] = files.loss_of(record)
        losses.append(done[end_of(vars(run.cfg))])
    return losses


def pilot(cell: Cell, line: str, js: Iterable[int]) -> dict[int, list[Run]]:
    """{j: the runs of the pilot at learning rate 1e-4 * 2^(j / 2)}"""
    runs = {}
    for j in js:
        (rate,) = sweep.rates(j, j)
        runs[j] = [make_run(cell, line, rate, s, cell.T0) for s in PILOT_SEEDS]
    return runs


def tune(cell: Cell, line: str, folder: Path, out: dict) -> float | None:
    """The tuned learning rate, or None and the runs that it needs in `out`.

    Five learning rates, a factor of 2 apart. While the lowest is at an edge, one more.
    """
    middle = first_guess(cell, cell.T0)
    js = list(range(middle - 4, middle + 5, 2))
    while True:
        runs = pilot(cell, line, js)
        try:
            points = []
            for j in js:
                losses = losses_at(folder, runs[j])
                points.append((j / 2 + math.log2(1e-4), sum(losses) / len(losses)))
        except KeyError:
            out[line] = [run for of_j in runs.values() for run in of_j]
            return None
        x, why_not = fit.vertex(points)
        if why_not == "at lowest":
            js.insert(0, js[0] - 2)
        elif why_not == "at highest":
            js.append(js[-1] + 2)
        elif why_not:
            raise RuntimeError(f"{line}: {why_not}, {points}")
        else:
            return 2**x


def tests(cell: Cell, line: str, rate: float, seeds: Iterable[int]) -> list[Run]:
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
    folder = out / name
    while True:
        missing = {}
        rates = {line: tune(cell, line, folder, missing) for line in cell.lines}
        if not missing:
            break
        if train_all(sum(missing.values(), []), folder, dry_run):
            return
    for line, rate in rates.items():
        print(f"{name:12} {line:14} {rate:.4g}", flush=True)
    runs = []
    for line, rate in rates.items():
        seeds = range(n_seeds) if line in MAIN else SEEDS
        runs += tests(cell, line, rate, seeds)
    train_all(runs, folder, dry_run)


# -- A3, A4 and A6 -----------------------------------------------------------------------

PRICE_SEEDS = (100, 101, 102, 103)
PRICE_LENGTHS = [80_000 * 2**k for k in range(4)]  # of pilots, to 640k
PRICE_ENDS = (320_000, 1_280_000, 5_120_000)  # of the valleys, with seeds 0, 1 and 2


def price(out: Path, dry_run: bool) -> None:
    """Pilots of Power at nine learning rates, a factor of √2 apart, and its valleys."""
    cell = CELLS["code"]  # its T0, 320k, is where we give the learning rates
    middle = first_guess(cell, cell.T0) - 1
    runs = []
    for rate in sweep.rates(middle - 4, middle + 4):
        for seed in PRICE_SEEDS:
            runs += [make_run(cell, POWER, rate, seed, T) for T in PRICE_LENGTHS]
    for rate in sweep.rates(middle - 3, middle + 2):
        for seed in SEEDS:
            runs += [make_run(cell, POWER, rate, seed, T) for T in PRICE_ENDS]
    train_all(runs, out / "price", dry_run)


def travel(out: Path, dry_run: bool) -> None:
    """Power and the shifted root in other cells, with their a from the pilot of code."""
    code = CELLS["code"]
    for line in (POWER, SHIFTED):
        rate = tune(code, line, out / "code", {})
        for name in ("batch-32", "batch-2", "width-128"):
            cell = CELLS[name]
            if name == "width-128" and line != POWER:
                continue
            # the same a: scaled by the root of the batch size, and the same shift
            scaled = rate * (cell.batch_size / code.batch_size) ** 0.5
            moved = cell._replace(T0=code.T0)
            runs = []
            for seed in SEEDS:
                for times in cell.times[1:]:
                    runs.append(make_run(moved, line, scaled, seed, times * cell.T0))
            if train_all(runs, out / f"travel-{name}", dry_run):
                return


AVERAGE_SHARE = 25  # the half-life of the average is a 25th of the tokens seen


def average(out: Path, dry_run: bool) -> None:
    """A held run without weight decay, whose weights we average."""
    cell = CELLS["code"]._replace(times=(1, 4, 16))
    folder = out / "average"
    middle = first_guess(cell, cell.T0)
    js = list(range(middle - 4, middle + 5, 2))

    def runs_at(rate: float, seeds: tuple, T: int) -> list[Run]:
        return [make_run(cell, "held", rate, s, T, 0.0, weight_decay=0.0) for s in seeds]

    while True:
        runs = {j: runs_at(*sweep.rates(j, j), PILOT_SEEDS, cell.T0) for j in js}
        if train_all(sum(runs.values(), []), folder, dry_run, train_averaged):
            return
        points = []
        for j in js:
            losses = losses_at(folder, runs[j])
            points.append((j / 2 + math.log2(1e-4), sum(losses) / len(losses)))
        x, why_not = fit.vertex(points)
        if not why_not:
            break
        js = [js[0] - 2, *js] if why_not == "at lowest" else [*js, js[-1] + 2]
    print(f"average      held           {2**x:.4g}", flush=True)
    ends = [times * cell.T0 for times in cell.times]
    runs = [run for T in ends for run in runs_at(2**x, SEEDS, T)]
    train_all(runs, folder, dry_run, train_averaged)


def train_averaged(runs: list[Run], file: Path) -> None:
    """Train one run without decay, and record its averaged weights at all lengths."""
    runs = sorted(runs, key=lambda run: run.cfg.total_tokens)
    cfg = devices.resolve(runs[-1].cfg)
    mixture = data.load_mixture(cfg)
    state = train.build(cfg)
    averaged = train.build(cfg)  # its model has the average
    ends = {
        run.cfg.total_tokens // cfg.batch_tokens * cfg.batch_tokens: run for run in runs
    }
    records = []
    for _ in train.training_steps(cfg, state, mixture):
        keep = 2 ** (-AVERAGE_SHARE * cfg.batch_tokens / state.tokens)
        with torch.no_grad():
            pairs = zip(averaged.model.parameters(), state.model.parameters())
            for mean, now in pairs:
                mean.lerp_(now, 1 - keep)
        if state.tokens in ends:
            run = ends[state.tokens]
            averaged.tokens = state.tokens
            cfg_of_run = devices.resolve(run.cfg)
            losses = train.final_losses(cfg_of_run, averaged, mixture)
            results = train.results_of(cfg_of_run, averaged, losses)
            settings = vars(cfg_of_run) | {"line": "average"}
            records.append({"config": settings, "results": results})
    write_lines(file, records)


# -- Training ----------------------------------------------------------------------------


def end_of(config: dict) -> tuple:
    """What differs between the runs of a trunk."""
    return config["total_tokens"], config["decay_tokens"]


def write_lines(file: Path, records: list[dict]) -> None:
    with files.replacing(file) as temporary:
        temporary.write_text("".join(json.dumps(record) + "\n" for record in records))


def train_trunk(runs: list[Run], file: Path) -> None:
    """Train the runs of a trunk in the order of their decays, and record them."""
    records = files.read_records(file)
    trunk = file.with_suffix(".pt")
    for run in sorted(runs, key=lambda run: run.cfg.decay_start):
        cfg = devices.resolve(run.cfg)
        results = sweep.train_from(trunk, cfg)
        settings = vars(cfg) | {"line": run.line}
        records.append({"config": settings, "results": results})
        write_lines(file, records)
    trunk.unlink(missing_ok=True)


def train_all(runs: list[Run], folder: Path, dry_run: bool, train=train_trunk) -> bool:
    """Train the runs that have no record. Returns whether some are left, in a dry run."""
    trunks = {}
    for run in runs:
        trunks.setdefault(run.trunk, {})[end_of(vars(run.cfg))] = run
    left = {}
    for trunk, by_end in trunks.items():
        for record in files.read_records(folder / f"{trunk}.jsonl"):
            by_end.pop(end_of(record["config"]), None)
        if by_end:
            left[trunk] = list(by_end.values())
    n_runs = sum(map(len, left.values()))
    tokens = sum(map(tokens_of, left.values()))
    print(f"{folder}: {n_runs} runs in {len(left)} trunks, {tokens:,} tokens", flush=True)
    if dry_run or not left:
        return bool(left)
    folder.mkdir(parents=True, exist_ok=True)
    with engines.on_this_machine(["cpu"] * 2) as (submit, as_completed):
        jobs = []
        for trunk in sorted(left, key=lambda trunk: -tokens_of(left[trunk])):
            jobs.append(submit(train, left[trunk], folder / f"{trunk}.jsonl"))
        for job in as_completed(jobs):
            job.result()
    return False


def tokens_of(runs: list[Run]) -> int:
    """The tokens of a trunk and of all its decays."""
    last = max(run.cfg.decay_start for run in runs)
    return last + sum(run.cfg.decay_tokens for run in runs)


# -- The records -------------------------------------------------------------------------


def write_records(out: Path) -> None:
    """Write what we trained, with the settings that all runs of a folder share."""
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        records = []
        for file in sorted(folder.glob("*.jsonl")):
            for record in files.read_records(file):
                for field in ("val_bpb", "tokens"):
                    del record["results"][field]
                records.append(record)
        if not records:
            continue
        # the newest text of that name, which all runs of a cell read
        cfg = make_config(
            **{x: y for x, y in records[0]["config"].items() if x != "line"}
        )
        settings = {
            "origin": {
                "command": f"python research/anytime.py {folder.name}",
                "torch": torch.__version__,
                "device_name": platform.machine(),
                "threads": 1,
                "fingerprint": data.load_mixture(cfg).meta["fingerprint"],
            }
        }
        for part in ("config", "results"):
            settings[part] = {}
            for field, value in records[0][part].items():
                if all(record[part][field] == value for record in records):
                    settings[part][field] = value
            for record in records:
                for field in settings[part]:
                    del record[part][field]
        results = RESULTS / folder.name
        results.mkdir(parents=True, exist_ok=True)
        files.write_json(results / "settings.json", settings)
        write_lines(results / "records.jsonl", records)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("anytime.py", __doc__)
    add = parser.add_argument
    add("what", choices=(*CELLS, "price", "travel", "average", "records"))
    add("--out", type=Path, default=Path("runs/anytime"), help="folder of the records")
    add("--seeds", type=int, default=len(SEEDS), help="of the test of a cell")
    add("--dry_run", action="store_true", help="count runs and tokens, and stop")
    args = parser.parse_args(argv)
    if args.what == "records":
        write_records(args.out)
    elif args.what in CELLS:
        run_cell(args.what, args.seeds, args.out, args.dry_run)
    else:
        programs = dict(price=price, travel=travel, average=average)
        programs[args.what](args.out, args.dry_run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
