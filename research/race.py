"""A fair race: a short pilot, then a run of 1 to 64 times its length (see notes.md).

    bash research/texts.sh      the five texts (Debian 12)
    python research/race.py     train 2,860 runs, and write runs/race.jsonl

The same command resumes. A *replicate* is a pilot and the runs that follow it. The pilot
tunes one number of a schedule, the learning rate at n = T0. Power has it there, and a
held learning rate everywhere. The pilot tries five values in runs of T0 tokens with three
seeds, and takes the bottom of a cubic through their means. The seed of the long runs is
another one, and the same for all runners. Every trunk ends at several lengths, with
several decays.
"""

import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

import data
import fit
import paper
import sweep
from config import TrainConfig, make_config
from schedules import paper_batch_size
from tools import engines, files, flags
from tools.flags import UserError

SEQ_LEN = 128
PILOT_STEPS = 160
WARMUP_STEPS = 32  # of a pilot, and of the first arm
LONG_WARMUP = 98  # steps in the second arm, 100k tokens at batch size 8
REPLICATES = range(4)
TIMES = (1, 4, 16)  # lengths of the runs, in T0
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

# j of the middle learning rate of a pilot, 1e-4 * 2^(j / 2), near what the preset of
# that time advised
MIDDLE = {
    ("held", 8): 14,
    ("power", 8): 13,
    ("held", 2): 13,
    ("power", 2): 12,
}


# -- Runs --------------------------------------------------------------------------------


class Run(NamedTuple):
    line: dict  # what race.jsonl says of it, without its loss
    cfg: TrainConfig


def config_of(
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

    This is what the law of that pilot gave: T^-0.3, and a line's best peak over Power's,
    which drifts with T (research/TABLES.md, peaks).
    """
    times = 1.67 / 0.75 * (max(T, 320_000) / 1.28e6) ** 0.16
    return times * number * (T / T0) ** B


def pilot_runs(name: str, replicate: int, schedule: str, lrs: list[float]) -> list[Run]:
    """The runs of a pilot, with a decay of 30%, and of 50% from the same trunks."""
    cell = CELLS[name]
    runs = []
    for lr in lrs:
        for seed in range(100 + 3 * replicate, 103 + 3 * replicate):
            for share in SHARES:
                line = dict(cell=name, replicate=replicate, pilot=schedule)
                line |= dict(lr=lr, seed=seed, share=share)
                cfg = config_of(cell, schedule, lr, cell.T0, share, seed)
                runs.append(Run(line, cfg))
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
        of_length = dict(cell=name, replicate=replicate, times=k)
        if warmup != WARMUP_STEPS:
            of_length["warmup"] = warmup
        for runner, (schedule, lr) in trunks.items():
            for share in cell.shares:
                line = of_length | dict(runner=runner, share=share, lr=lr)
                cfg = config_of(cell, schedule, lr, T, share, replicate, warmup)
                runs.append(Run(line, cfg))
        lr = line_peak(numbers["power"], cell.T0, T)
        line = of_length | dict(runner="line", share=1.0, lr=lr)
        cfg = config_of(cell, "line", lr, T, 0.0, replicate, warmup)
        runs.append(Run(line, cfg))
    return runs


# -- Training ----------------------------------------------------------------------------


def train(runs: list[Run], folder: Path) -> list[dict]:
    """Train the runs that a folder lacks. Returns the lines of all, with their losses."""
    sweep.train_all([run.cfg for run in runs], folder)
    lines = []
    for line, cfg in runs:
        loss = paper.row_of(cfg, folder)["loss"]
        lines.append(files.nan_to_none(line | dict(loss=loss)))
    return lines


def loss_of(line: dict) -> float:
    """The loss of a line of race.jsonl, infinite if the run diverged."""
    return math.inf if line["loss"] is None else line["loss"]


def bottom_of(lines: list[dict]) -> tuple[float, str]:
    """Log2 of the best learning rate of a pilot, and why it is unusable, or ""."""
    losses = defaultdict(list)  # {lr: those of its seeds}
    for line in lines:
        losses[line["lr"]].append(loss_of(line))
    points = [(math.log2(lr), statistics.fmean(losses[lr])) for lr in sorted(losses)]
    return fit.bottom(points)


def tune(name: str, replicate: int, schedule: str, folder: Path) -> tuple:
    """Train a pilot. Returns its number, and the lines of its runs."""
    middle = MIDDLE[schedule, CELLS[name].batch_size]
    lrs = sweep.lattice(middle - 4, middle + 4, step=2)
    lines = train(pilot_runs(name, replicate, schedule, lrs), folder)
    x, why_not = bottom_of([line for line in lines if line["share"] == SHARES[0]])
    if why_not:  # no pilot of ours had its lowest loss at an edge
        raise UserError(f"{name}, {schedule}, replicate {replicate}: {why_not}")
    return float(2**x), lines


def run_replicate(name: str, replicate: int, folder: Path) -> list[dict]:
    """Train the pilots of a cell, and all runs that follow. Returns their lines."""
    numbers = {}
    lines = []
    for schedule in ("held", "power"):
        numbers[schedule], of_pilot = tune(name, replicate, schedule, folder)
        lines += of_pilot
    runs = long_runs(name, replicate, numbers, TIMES)
    runs += long_runs(name, replicate, numbers, TIMES[1:], LONG_WARMUP)
    if CELLS[name].is_long:
        runs += long_runs(name, replicate, numbers, (64,))
    return lines + train(runs, folder)


def run_race(folder: Path) -> None:
    lines = []
    for replicate in REPLICATES:
        for name in CELLS:
            lines += run_replicate(name, replicate, folder)
    files.write_records(folder.with_suffix(".jsonl"), lines)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("race.py", __doc__)
    text = "folder of the runs [runs/race]"
    parser.add_argument("--out", type=Path, default=Path("runs/race"), help=text)
    out = parser.parse_args(argv).out
    return engines.run_program("race.py", run_race, out)


if __name__ == "__main__":
    sys.exit(main())
