"""A fair race: a short pilot, then a run of 1 to 64 times its length (see notes.md).

    bash research/texts.sh               the five texts (Debian 12)
    python research/race.py --dry_run    count what is left
    python research/race.py              train it, and write results/race.jsonl

The same command resumes. A *replicate* is a pilot and the runs that follow it. The pilot
tunes one number of a schedule, the learning rate at n = T0. Power has it there, and a
held learning rate everywhere. The pilot tries five values in runs of T0 tokens with three
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
import sweep
from config import TrainConfig, make_config
from schedules import paper_batch_size
from tools import engines, flags

RESULTS = Path(__file__).parent / "results/race.jsonl"
SEQ_LEN = 128
PILOT_STEPS = 160
WARMUP_STEPS = 32  # of a pilot, and of the first arm
LONG_WARMUP = 98  # steps in the second arm, 100k tokens at batch size 8
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
    cell: Cell,
    schedule: str,
    lr: float,
    T: int,
    share: float,
    seed: int,
    warmup: int = WARMUP_STEPS,
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
        warmup_tokens=warmup * cell.batch_size * SEQ_LEN,
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
    name: str,
    replicate: int,
    numbers: dict[str, float],
    times: tuple,
    warmup: int = WARMUP_STEPS,
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
        if warmup != WARMUP_STEPS:
            place["warmup"] = warmup
        for runner, (schedule, lr) in trunks.items():
            for share in cell.shares:
                cfg = make_run(cell, schedule, lr, T, share, replicate, warmup)
                mine = dict(place, runner=runner, share=share, lr=lr)
                runs.append(Run(mine, cfg))
        lr = line_peak(numbers["power"], cell.T0, T)
        cfg = make_run(cell, "line", lr, T, 0.0, replicate, warmup)
        runs.append(Run(dict(place, runner="line", share=1.0, lr=lr), cfg))
    return runs


# -- Training ----------------------------------------------------------------------------

Losses = dict[tuple, float | None]  # {key of a run: its loss, None if it diverged}


def key_of(line: dict) -> tuple:
    """The place of a run without its learning rate, which follows from its pilot."""
    if "pilot" in line:
        return tuple(
            line[x] for x in ("cell", "replicate", "pilot", "lr", "seed", "share")
        )
    names = ("cell", "replicate", "times", "runner", "share")
    return *(line[x] for x in names), line.get("warmup", WARMUP_STEPS)


def read_losses() -> Losses:
    """The losses of the committed records. So a race also resumes without its folder."""
    if not RESULTS.exists():
        return {}
    lines = map(json.loads, RESULTS.read_text().splitlines())
    return {key_of(line): line["loss"] for line in lines}


def train(runs: list[Run], losses: Losses, folder: Path, dry_run: bool) -> bool:
    """Train the runs without a loss, and add it. Returns whether all have one."""
    left = [run for run in runs if key_of(run.place) not in losses]
    if not sweep.train_all([run.cfg for run in left], folder, dry_run=dry_run):
        return False
    with RESULTS.open("a") as file:
        for run in left:
            loss = sweep.row_of(run.cfg, folder)["loss"]
            loss = loss if math.isfinite(loss) else None
            losses[key_of(run.place)] = loss
            file.write(json.dumps(run.place | {"loss": loss}) + "\n")
    return True


def bottom(runs: list[Run], losses: Losses) -> tuple[float, str]:
    """Log2 of the best learning rate of a pilot's runs with a decay of 30%."""
    by_lr = {}
    for run in runs:
        if run.place["share"] == SHARES[0]:
            loss = losses[key_of(run.place)]
            by_lr.setdefault(run.place["lr"], []).append(
                math.inf if loss is None else loss
            )
    points = [(math.log2(lr), statistics.fmean(by_lr[lr])) for lr in sorted(by_lr)]
    return fit.bottom(points)


def tune(
    names: list[str], replicate: int, losses: Losses, folder: Path, dry_run: bool
) -> dict[str, dict[str, float]]:
    """Train the pilots of some cells. Returns {cell: {schedule: number}}, {} if dry.

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
        if not train(everything, losses, folder, dry_run):
            return {}
        numbers = {name: {} for name in names}
        for key, of_key in runs.items():
            x, why_not = bottom(of_key, losses)
            if why_not == "at lowest":
                js[key].insert(0, js[key][0] - 2)
            elif why_not == "at highest":
                js[key].append(js[key][-1] + 2)
            elif why_not:
                raise SystemExit(f"{key}, replicate {replicate}: {why_not}")
            else:
                numbers[key[0]][key[1]] = float(2**x)
        if all(len(of_cell) == 2 for of_cell in numbers.values()):
            return numbers


# -- The race ----------------------------------------------------------------------------

# (replicates, lengths in T0, warmup), in the order in which we train them. The second arm
# has the warmup of the preset
STAGES = (
    ((0, 1), TIMES, WARMUP_STEPS),
    ((0, 1), TIMES[1:], LONG_WARMUP),
    ((2, 3), TIMES, WARMUP_STEPS),
    ((2, 3), TIMES[1:], LONG_WARMUP),
    (REPLICATES, (64,), WARMUP_STEPS),  # in the two long cells
)


def train_race(folder: Path, dry_run: bool) -> None:
    """Train all stages, one replicate of all cells after another."""
    losses = read_losses()
    for replicates, times, warmup in STAGES:
        names = [name for name, cell in CELLS.items() if cell.is_long or 64 not in times]
        for replicate in replicates:
            numbers = tune(names, replicate, losses, folder, dry_run)
            runs = []
            for name in numbers:
                runs += long_runs(name, replicate, numbers[name], times, warmup)
                print(f"replicate {replicate}, {name}: {numbers[name]}", flush=True)
            train(runs, losses, folder, dry_run)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("race.py", __doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/race"), help="folder of the runs")
    add("--dry_run", action="store_true", help="count runs and tokens, and stop")
    args = parser.parse_args(argv)
    return engines.run_program("race.py", lambda: train_race(args.out, args.dry_run))


if __name__ == "__main__":
    sys.exit(main())
