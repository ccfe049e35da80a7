"""A fair race: a short pilot, then a run of 1 to 64 times its length (notes.md, the race).

    bash research/texts.sh               the five texts (Debian 12)
    python research/race.py --dry_run    count what is left
    python research/race.py              train it, and write results/race.jsonl

The same command resumes. A *replicate* is a pilot and the runs that follow it. The pilot
tunes one number of a schedule, the learning rate at n = T0. Power has it there, and a held
learning rate everywhere. The pilot tries five values in runs of T0 tokens with three
seeds, and takes the bottom of a cubic through their means. The seed of the long runs is
another one, and the same for all runners. Every trunk ends at several lengths, with
several decays.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

import data
import fit
import records
import sweep
from config import TrainConfig, make_config
from schedules import paper_batch_size
from tools import engines, flags

RESULTS = Path(__file__).parent / "results/race.jsonl"
SEQ_LEN = 128
PILOT_STEPS = 160
WARMUP_STEPS = 32  # in all runs
REPLICATES = range(4)
SHARES = (0.3, 0.5)  # of a run decay
B = -0.3  # Power's exponent


class Cell(NamedTuple):
    text: str
    batch_size: int = 8  # sequences
    width: int = 32
    shares: tuple = SHARES
    is_long: bool = False  # also trains for 64 T0

    @property
    def T0(self) -> int:
        return PILOT_STEPS * self.batch_size * SEQ_LEN  # tokens


CELLS = {
    "C": Cell("c"),
    "HTML": Cell("html", shares=(0.15, *SHARES), is_long=True),
    "English": Cell("english"),
    "Russian": Cell("russian"),
    "tables": Cell("tables"),
    "batch size 2": Cell("english", 2, shares=(0.15, *SHARES), is_long=True),
    "width 64": Cell("c", width=64),
}
TIMES = (1, 4, 16)  # lengths of the runs, in T0

# j of the middle learning rate of a pilot, 1e-4 * 2^(j / 2): what the preset advises
MIDDLE = {
    ("held", 8): 14,
    ("power", 8): 13,
    ("held", 2): 13,
    ("power", 2): 12,
}


# -- Runs --------------------------------------------------------------------------------


def make_run(
    cell: Cell, schedule: str, lr: float, T: int, share: float, seed: int
) -> TrainConfig:
    """lr: peak learning rate, or for Power the learning rate at n = T0."""
    fields = dict(
        preset="laptop",
        n_layer=2,
        n_embd=cell.width,
        n_head=cell.width // 16,
        seq_len=SEQ_LEN,
        dtype="float32",
        data=f"data/{cell.text}",
        batch_size=cell.batch_size,
        total_tokens=T,
        warmup_tokens=WARMUP_STEPS * cell.batch_size * SEQ_LEN,
        decay_share=share,
        final_eval_tokens=2**16,
        seed=seed,
        data_seed=seed,
    )
    if schedule == "power":
        beta = paper_batch_size(cell.batch_size * SEQ_LEN)
        a = lr / (beta**0.5 * cell.T0**B)
        # no ceiling: after its warmup, Power falls from the first step
        fields |= dict(power_a=float(f"{a:.6g}"), power_b=B, power_q=0.5, lr_max=1.0)
    else:
        fields["lr"] = float(f"{lr:.6g}")
    names = {"held": "wsd", "power": "power", "line": "linear"}
    cfg = make_config(schedule=names[schedule], **fields)
    return data.with_corpus(cfg, fixed=())


def line_peak(number: float, T0: int, T: int) -> float:
    """The peak of a line to 0 over T tokens, from the number of Power's pilot.

    This is what the law of that pilot gives: T^-0.3, and a line's best peak over that of
    a run with a decay of 30% (research/TABLES.md, peaks).
    """
    times = 1.67 / 0.75 * (max(T, 320_000) / 1.28e6) ** 0.16
    return times * number * (T / T0) ** B


class Run(NamedTuple):
    """A run and its place in the tables."""

    place: dict
    cfg: TrainConfig


def pilot(name: str, replicate: int, schedule: str, js: list[int]) -> list[Run]:
    """The runs of a pilot, with a decay of 30%, and of 50% from the same trunks."""
    cell = CELLS[name]
    runs = []
    for j in js:
        (lr,) = sweep.lattice(j, j)
        for seed in range(100 + 3 * replicate, 103 + 3 * replicate):
            for share in SHARES:
                place = dict(cell=name, replicate=replicate, pilot=schedule)
                place |= dict(lr=lr, seed=seed, share=share)
                cfg = make_run(cell, schedule, lr, cell.T0, share, seed)
                runs.append(Run(place, cfg))
    return runs


def long_runs(
    name: str, replicate: int, numbers: dict[str, float], times: tuple
) -> list[Run]:
    """All runners of a replicate at some lengths. numbers: {schedule: tuned number}."""
    cell = CELLS[name]
    trunks = {
        "held": ("held", numbers["held"]),
        "half": ("held", numbers["held"] / 2),
        "power": ("power", numbers["power"]),
    }
    runs = []
    for k in times:
        T = k * cell.T0
        place = dict(cell=name, replicate=replicate, times=k)
        for runner, (schedule, lr) in trunks.items():
            for share in cell.shares:
                cfg = make_run(cell, schedule, lr, T, share, replicate)
                mine = dict(place, runner=runner, share=share, lr=lr)
                runs.append(Run(mine, cfg))
        lr = line_peak(numbers["power"], cell.T0, T)
        cfg = make_run(cell, "line", lr, T, 0.0, replicate)
        runs.append(Run(dict(place, runner="line", share=1.0, lr=lr), cfg))
    return runs


# -- Tuning ------------------------------------------------------------------------------


def bottom(runs: list[Run], folder: Path) -> tuple[float, str]:
    """Log2 of the best learning rate of a pilot's runs with a decay of 30%."""
    losses = {}
    for run in runs:
        if run.place["share"] == SHARES[0]:
            loss = records.row_of(run.cfg, folder)["loss"]
            losses.setdefault(run.place["lr"], []).append(loss)
    points = [(math.log2(lr), statistics.fmean(losses[lr])) for lr in sorted(losses)]
    return fit.bottom(points)


def tune(
    names: list[str], replicate: int, folder: Path, dry_run: bool
) -> tuple[dict, list[Run]]:
    """Train the pilots of some cells. Returns {cell: {schedule: number}} and the runs.

    A pilot whose lowest loss is at an edge tries another learning rate there.
    """
    js = {}
    for name in names:
        for schedule in ("held", "power"):
            middle = MIDDLE[schedule, CELLS[name].batch_size]
            js[name, schedule] = list(range(middle - 4, middle + 5, 2))
    while True:
        runs = {key: pilot(key[0], replicate, key[1], js[key]) for key in js}
        everything = [run for of_key in runs.values() for run in of_key]
        cfgs = [run.cfg for run in everything]
        if not sweep.train_all(cfgs, folder, dry_run=dry_run):
            return {}, everything
        numbers = {name: {} for name in names}
        for key, of_key in runs.items():
            x, why_not = bottom(of_key, folder)
            if why_not == "at lowest":
                js[key].insert(0, js[key][0] - 2)
            elif why_not == "at highest":
                js[key].append(js[key][-1] + 2)
            elif why_not:
                raise SystemExit(f"{key}, replicate {replicate}: {why_not}")
            else:
                numbers[key[0]][key[1]] = 2**x
        if all(len(of_cell) == 2 for of_cell in numbers.values()):
            return numbers, everything


# -- The race ----------------------------------------------------------------------------


def write_records(runs: list[Run], folder: Path) -> None:
    """Write a line for every run: its place, and its loss (null: diverged)."""
    lines = []
    for run in runs:
        loss = records.row_of(run.cfg, folder)["loss"]
        lines.append(run.place | {"loss": loss if math.isfinite(loss) else None})
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))


def train_race(folder: Path, dry_run: bool) -> None:
    """Train what the folder lacks, one replicate of all cells after another."""
    long = [name for name, cell in CELLS.items() if cell.is_long]
    finished = []
    for names, times in ((list(CELLS), TIMES), (long, (64,))):
        for replicate in REPLICATES:
            numbers, runs = tune(names, replicate, folder, dry_run)
            if times == TIMES:
                finished += runs
            if not numbers:  # a dry run, whose pilots are not trained
                continue
            runs = []
            for name in names:
                runs += long_runs(name, replicate, numbers[name], times)
                print(f"replicate {replicate}, {name}: {numbers[name]}", flush=True)
            cfgs = [run.cfg for run in runs]
            if sweep.train_all(cfgs, folder, dry_run=dry_run):
                finished += runs
                write_records(finished, folder)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("race.py", __doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/race"), help="folder of the runs")
    add("--dry_run", action="store_true", help="count runs and tokens, and stop")
    args = parser.parse_args(argv)
    return engines.run_program("race.py", lambda: train_race(args.out, args.dry_run))


if __name__ == "__main__":
    sys.exit(main())
