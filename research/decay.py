"""What learning rate does a schedule need, if more or less of the run decays? Resumable.

    python research/decay.py valleys        no decay, 10%, 30%, and a straight line to 0
    python research/decay.py batch-2        some of them at batch size 2
    python research/decay.py cosine         cosines to a tenth
    python research/decay.py power          Power, at three values of a
    python research/decay.py presets        the default run at the peaks of its law

From these runs come `PEAKS` in schedules.py and `LAPTOP_LAW` in config.py. tables.py
computes both. Runs that differ only in their length and in their decay share a trunk.
"""

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
from tools import engines, flags

LENGTHS = [320_000 * 2**k for k in range(5)]  # to 5.12M tokens
SHARES = [0.1, 0.3]
WARMUP_STEPS = 32
LAW = dict(power_a=0.612, power_b=-0.278, power_q=0.531)  # fit.py of wsd-laptop

# Best learning rate at 320k tokens and batch size 8, and b, of a pilot. Around them, we
# try nine learning rates at every T
PILOT = {
    "none": (0.0063, -0.45),
    "10": (0.0085, -0.25),
    "30": (0.012, -0.25),
    "linear": (0.015, -0.1),
}
ENDINGS = {
    "none": dict(schedule="wsd", decay_share=0.0),
    "10": dict(schedule="wsd", decay_share=0.1),
    "30": dict(schedule="wsd", decay_share=0.3),
    "linear": dict(schedule="linear"),
}


def ending_of(fields: dict) -> str:
    """The name of how a run of WSD, linear or cosine ends, from its settings."""
    if fields["schedule"] != "wsd":
        return fields["schedule"]
    return {0.0: "none", 0.1: "10", 0.3: "30"}[fields["decay_share"]]


def window(ending: str, T: int, batch_size: int, n: int = 9) -> list[float]:
    lr, b = PILOT[ending]
    lr *= (T / LENGTHS[0]) ** b * (batch_size / 8) ** 0.5
    middle = round(2 * math.log2(lr / 1e-4))
    return sweep.lattice(middle - n // 2, middle + n // 2)


def run(T: int, batch_size: int, seed: int, **fields) -> TrainConfig:
    """A run of sweep.py's laptop, of width 32."""
    usual = dict(n_embd=32, n_head=2, batch_size=batch_size, total_tokens=T, device="cpu")
    usual |= dict(warmup_tokens=WARMUP_STEPS * batch_size * 128)
    cfg = make_config(**sweep.LAPTOP | usual | fields, seed=seed, data_seed=seed)
    return data.with_corpus(cfg, fixed=())


def valleys(seed: int) -> Iterable[TrainConfig]:
    for batch_size, lengths in ((8, LENGTHS), (32, LENGTHS[1:4])):
        for T in lengths:
            for name, ending in ENDINGS.items():
                for lr in window(name, T, batch_size):
                    yield run(T, batch_size, seed, lr=lr, **ending)


def cosine(seed: int) -> Iterable[TrainConfig]:
    for T in LENGTHS[::2]:
        for lr in sweep.lattice(12, 15):
            yield run(T, 8, seed, schedule="cosine", lr=lr)


def of_power(batch_size: int, times: float) -> dict:
    """Power with so many times the law's a. Its ceiling is the law's rate at 80k."""
    law = LAW | dict(power_a=float(f"{times * LAW['power_a']:.4g}"))
    beta = batch_size * 128 / 4096
    lr_max = LAW["power_a"] * beta ** LAW["power_q"] * 80_000 ** LAW["power_b"]
    return dict(schedule="power", lr_max=float(f"{lr_max:.4g}")) | law


def power(seed: int) -> Iterable[TrainConfig]:
    for batch_size in (2, 8, 32):
        for T in (320_000, 1_280_000):
            for times in (0.5, 1.0, 2.0):
                for share in SHARES:
                    fields = of_power(batch_size, times)
                    yield run(T, batch_size, seed, decay_share=share, **fields)


def batch_2(seed: int) -> Iterable[TrainConfig]:
    T = 1_280_000
    for lr in window("30", T, 2, 7)[2:]:
        for share in SHARES:
            yield run(T, 2, seed, schedule="wsd", lr=lr, decay_share=share)
    for lr in window("linear", T, 2, 5):
        yield run(T, 2, seed, schedule="linear", lr=lr)


# -- The law of the presets --------------------------------------------------------------
#
# How far is `python train.py --schedule linear`, cosine or wsd, without a learning rate,
# from the best of a searched peak? Rule, written before the runs: the law has a mean
# within 0.02 nats of the lowest mean, in every cell.
#
# First, the law had a = 0.361, from other runs of 400k tokens with seed 0, and failed in
# one of the nine cells of 400k. The five peaks are around that law. From them comes its
# new a. So at 400k the cells also fitted the law, and at 3.2M they did not.

PRESET_SEEDS = {400_000: (1, 2, 3), 3_200_000: (1,)}  # by run length
PRESET_CELLS = []  # schedule, run length, batch size
for _T in PRESET_SEEDS:
    for _batch_size in (2, 8, 32):
        for _schedule in ("linear", "cosine", "wsd"):
            PRESET_CELLS.append((_schedule, _T, _batch_size))
OLD_LAW = config.LAPTOP_LAW._replace(a=0.361)


def preset_peaks(cell: tuple) -> list[float]:
    """The peak of the law, and then five searched peaks, steps of sqrt(2) apart."""
    schedule, T, batch_size = cell
    cfg = make_config(schedule=schedule, total_tokens=T, batch_size=batch_size)
    middle = config.rates(OLD_LAW, cfg)["lr"]
    return [cfg.lr, *(float(f"{middle * 2 ** (k / 2):.4g}") for k in (0, -1, 1, 2, -2))]


def presets(seed: int) -> Iterable[TrainConfig]:
    for cell in PRESET_CELLS:
        schedule, T, batch_size = cell
        if seed in PRESET_SEEDS[T]:
            fields = dict(schedule=schedule, total_tokens=T, batch_size=batch_size)
            for lr in preset_peaks(cell):
                cfg = make_config(**fields, lr=lr, seed=seed, data_seed=seed)
                yield data.with_corpus(cfg, fixed=())


# -- The command line --------------------------------------------------------------------

QUESTIONS = {  # name -> runs of a seed, and the seeds
    "valleys": (valleys, (0, 1, 2)),
    "batch-2": (batch_2, (0, 1)),
    "cosine": (cosine, (0, 1, 2)),
    "power": (power, (0, 1, 2)),
    "presets": (presets, (1, 2, 3)),
}


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("decay.py", __doc__)
    add = parser.add_argument
    add("question", choices=tuple(QUESTIONS))
    add("--out", type=Path, default=Path("runs/decay"), help="folder of the records")
    add("--workers", type=int, help="processes (default: one per GPU, or per core)")
    add("--dry_run", action="store_true", help="count runs and tokens, and stop")
    args = parser.parse_args(argv)

    def program() -> None:
        runs_of, seeds = QUESTIONS[args.question]
        runs = [cfg for seed in seeds for cfg in runs_of(seed)]
        folder = args.out / args.question
        sweep.train_all(runs, folder, args.workers, dry_run=args.dry_run)

    return engines.run_program("decay.py", program)


if __name__ == "__main__":
    sys.exit(main())
