"""What learning rate does a schedule need, if more or less of the run decays? Resumable.

    python research/decay.py valleys        no decay, 10%, 30%, and a straight line to 0
    python research/decay.py batch-2        some of them at batch size 2
    python research/decay.py cosine         cosines to a tenth
    python research/decay.py power          Power, at three values of a
    python research/decay.py presets        the default run around the peaks of its law

From these runs come `PEAKS` in schedules.py and `LAPTOP_LAW` in config.py. tables.py
computes both. Runs that differ only in their length and in their decay share a trunk.
"""

import dataclasses
import math
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

import config
import data
import sweep
from config import TrainConfig, make_config
from schedules import rates
from tools import engines, flags

LENGTHS = sweep.doublings(320_000, 5)  # to 5.12M tokens
WARMUP_STEPS = 32

# Settings of an ending, and its best learning rate at 320k tokens and batch size 8 with
# its b, of a pilot. Around them, we try nine learning rates at every T
ENDINGS = {
    "none": (dict(schedule="wsd", decay_share=0.0), 0.0063, -0.45),
    "10": (dict(schedule="wsd", decay_share=0.1), 0.0085, -0.25),
    "30": (dict(schedule="wsd", decay_share=0.3), 0.012, -0.25),
    "linear": (dict(schedule="linear"), 0.015, -0.1),
}


def run(T: int, batch_size: int, seed: int, **fields) -> TrainConfig:
    """A run of sweep.py's laptop, of width 32."""
    usual = dict(n_embd=32, n_head=2, batch_size=batch_size, total_tokens=T, device="cpu")
    usual |= dict(warmup_tokens=WARMUP_STEPS * batch_size * 128)
    return make_config(**sweep.LAPTOP | usual | fields, seed=seed, data_seed=seed)


def middle_of(ending: str, T: int, batch_size: int) -> int:
    """j of the learning rate 1e-4 * 2^(j / 2) in the middle of those that we try."""
    _, lr, b = ENDINGS[ending]
    lr *= (T / LENGTHS[0]) ** b * (batch_size / 8) ** 0.5
    return round(2 * math.log2(lr / 1e-4))


def valleys(seed: int) -> Iterable[TrainConfig]:
    for batch_size, lengths in ((8, LENGTHS), (32, LENGTHS[1:4])):
        for T in lengths:
            for name, (ending, _, _) in ENDINGS.items():
                middle = middle_of(name, T, batch_size)
                for lr in sweep.lattice(middle - 4, middle + 4):
                    yield run(T, batch_size, seed, lr=lr, **ending)


def batch_2(seed: int) -> Iterable[TrainConfig]:
    T = 1_280_000
    middle = middle_of("30", T, 2)
    for lr in sweep.lattice(middle - 1, middle + 3):
        for share in (0.1, 0.3):
            yield run(T, 2, seed, schedule="wsd", lr=lr, decay_share=share)
    middle = middle_of("linear", T, 2)
    for lr in sweep.lattice(middle - 2, middle + 2):
        yield run(T, 2, seed, schedule="linear", lr=lr)


def cosine(seed: int) -> Iterable[TrainConfig]:
    for T in LENGTHS[::2]:
        for lr in sweep.lattice(12, 15):
            yield run(T, 8, seed, schedule="cosine", lr=lr)


def power(seed: int) -> Iterable[TrainConfig]:
    """Power with a half, one and two times the a of a law, fit.py's of wsd-laptop."""
    law = dict(schedule="power", power_b=-0.278, power_q=0.531)
    for batch_size in (2, 8, 32):
        # the ceiling is the law's learning rate at 80k tokens
        law["lr_max"] = float(
            f"{0.612 * (batch_size / 32) ** 0.531 * 80_000**-0.278:.4g}"
        )
        for T in (320_000, 1_280_000):
            for power_a in (0.306, 0.612, 1.224):
                for share in (0.1, 0.3):
                    fields = law | dict(power_a=power_a, decay_share=share)
                    yield run(T, batch_size, seed, **fields)


def presets(seed: int) -> Iterable[TrainConfig]:
    """The preset `laptop` at five peaks around a first law, which had another a."""
    first_law = config.LAPTOP_LAW._replace(a=0.361)
    for batch_size in (2, 8, 32):
        for schedule in ("linear", "cosine", "wsd"):
            fields = dict(batch_size=batch_size, seed=seed, data_seed=seed)
            cfg = make_config(schedule=schedule, total_tokens=400_000, **fields)
            lr = rates(first_law, cfg)["lr"]
            for k in range(-2, 3):
                yield dataclasses.replace(cfg, lr=float(f"{lr * 2 ** (k / 2):.4g}"))


QUESTIONS = {  # name -> runs of a seed, and the seeds
    "valleys": (valleys, (0, 1, 2)),
    "batch-2": (batch_2, (0, 1)),
    "cosine": (cosine, (0, 1, 2)),
    "power": (power, (0, 1, 2)),
    "presets": (presets, (1, 2, 3)),
}


def runs_of(question: str) -> list[TrainConfig]:
    of_seed, seeds = QUESTIONS[question]
    runs = []
    for seed in seeds:
        runs += [data.with_corpus(cfg, fixed=()) for cfg in of_seed(seed)]
    return runs


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("decay.py", __doc__)
    add = parser.add_argument
    add("question", choices=tuple(QUESTIONS))
    add("--out", type=Path, default=Path("runs/decay"), help="folder of the records")
    add("--workers", type=int, help="processes (default: one per GPU, or per core)")
    add("--dry_run", action="store_true", help="count runs and tokens, and stop")
    args = parser.parse_args(argv)

    def program() -> None:
        folder = args.out / args.question
        runs = runs_of(args.question)
        sweep.train_all(runs, folder, args.workers, dry_run=args.dry_run)

    return engines.run_program("decay.py", program)


if __name__ == "__main__":
    sys.exit(main())
