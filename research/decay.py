"""How long to decay? The runs of notes.md, "How long to decay", resumable.

    python research/decay.py warmup         question D4
    python research/decay.py batch-8        D2 and D3, with the trunks of D1
    python research/decay.py power-8        Power and cosines of D1
    python research/decay.py batch-32       D2 at another batch size, with Power
    python research/decay.py width-64       D1 at another width
    python research/decay.py weight-decay   D5
    python research/decay.py longer         D1 at 20.48M tokens
    python research/decay.py noise          runs whose learning rates differ by 1%
    python research/decay.py records        put the records into results/decay-laptop

Runs that differ only in their length and in their decay share a trunk, as in sweep.py,
and end bit for bit as in `python train.py --decay_share ...`. Records go to --out.
"""

import math
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import data
import sweep
from config import TrainConfig, make_config
from records import write_results
from tools import engines, files, flags

RESULTS = Path(__file__).parent / "results/decay-laptop"
LENGTHS = [320_000 * 2**k for k in range(5)]  # to 5.12M tokens
SOME = LENGTHS[::2]  # 320k, 1.28M, 5.12M
SHARES = [0.1, 0.3]
WARMUP = 32  # steps of warmup, the answer of D4
LAW = dict(power_a=0.612, power_b=-0.278, power_q=0.531)  # fit.py of wsd-laptop

# Best learning rate at 320k tokens and batch size 8, and b, of a pilot. Around them, we
# try nine learning rates at every T
PILOT = {"none": (0.0063, -0.45), 0.1: (0.0085, -0.25), 0.3: (0.012, -0.25),
         "linear": (0.015, -0.1)}  # fmt: skip


def window(kind, T: int, batch_size: int, n: int = 9) -> list[float]:
    lr, b = PILOT[kind]
    lr *= (T / LENGTHS[0]) ** b * (batch_size / 8) ** 0.5
    middle = round(2 * math.log2(lr / 1e-4))
    return sweep.lattice(middle - n // 2, middle + n // 2)


def run(T: int, batch_size: int, seed: int, width: int = 32, **fields) -> TrainConfig:
    """A run of sweep.py's laptop."""
    fields = dict(batch_size=batch_size, seed=seed, n_embd=width) | fields
    fields = dict(warmup_tokens=WARMUP * batch_size * 128, weight_decay=0.1) | fields
    fields |= dict(n_head=width // 16, data_seed=seed, total_tokens=T, device="cpu")
    return make_config(**sweep.LAPTOP | fields)


def valleys(batch_size: int, seed: int, lengths: list[int]) -> Iterable[TrainConfig]:
    """D2: runs without decay, with two decays, and linear to 0, at nine learning rates."""
    for T in lengths:
        for kind in PILOT:
            for lr in window(kind, T, batch_size):
                fields = dict(schedule="wsd", lr=lr, decay_share=kind)
                if kind == "none":
                    fields["decay_share"] = 0.0
                if kind == "linear":
                    fields = dict(schedule="linear", lr=lr)
                yield run(T, batch_size, seed, **fields)


def shares(lengths: list[int], batch_size: int, seed: int, **fields):
    """D1: a trunk with many decays."""
    for T in lengths:
        for share in (0.1, 0.2, 0.3, 0.5):
            yield run(T, batch_size, seed, decay_share=share, **fields)
        straight = dict(decay_share=0.3, decay_shape="linear")
        yield run(T, batch_size, seed, **straight, **fields)


def power(batch_size: int, steps: int = WARMUP, f: float = 1.0, **fields) -> dict:
    """Power with f times the law's a. Its ceiling is the law's learning rate at 80k."""
    law = LAW | dict(power_a=float(f"{f * LAW['power_a']:.4g}"))
    beta = batch_size * 128 / 4096
    lr_max = law["power_a"] * beta ** law["power_q"] * 80_000 ** law["power_b"]
    warm = dict(warmup_tokens=steps * batch_size * 128)
    return dict(schedule="power", lr_max=float(f"{lr_max:.4g}")) | law | warm | fields


def warmup(seed: int):
    for batch_size in (2, 8, 32):
        for T in (320_000, 1_280_000):
            lines = [power(batch_size, steps) for steps in (2, 8, 32, 128)]
            lines += [power(batch_size, warmup_tokens=T // 100)]
            lines += [power(batch_size, n, f) for n in (2, 32) for f in (0.5, 2.0)]
            for fields in lines:
                if fields["warmup_tokens"] > T / 2:  # 128 steps of batch size 32
                    continue
                for share in SHARES:
                    yield run(T, batch_size, seed, decay_share=share, **fields)


def batch_8(seed: int):
    yield from valleys(8, seed, LENGTHS)
    for lr in sweep.lattice(11, 13):
        yield from shares(SOME, 8, seed, schedule="wsd", lr=lr)


def power_8(seed: int):
    for f in (1.0, 1.41):
        yield from shares(SOME, 8, seed, **power(8, f=f))
    for T in SOME:
        for lr in sweep.lattice(12, 15):
            yield run(T, 8, seed, schedule="cosine", lr=lr)


def batch_32(seed: int):
    yield from valleys(32, seed, LENGTHS[1:4])
    for T in LENGTHS[1:4]:
        for share in SHARES:
            yield run(T, 32, seed, decay_share=share, **power(32))


def width_64(seed: int):
    for T in SOME[1:]:
        for share in SHARES:
            yield run(T, 8, seed, 64, decay_share=share, **power(8))
        for lr in sweep.lattice(13, 15):
            yield run(T, 8, seed, 64, schedule="linear", lr=lr)


def weight_decay(seed: int):
    T = 1_280_000
    for batch_size in (2, 8, 32):
        for decay in (0.0, 0.1):
            for share in SHARES:
                for f in (1.0, 2.0, 4.0):
                    fields = power(batch_size, f=f, weight_decay=decay)
                    yield run(T, batch_size, seed, decay_share=share, **fields)
                for lr in window(0.3, T, batch_size, 7)[2:]:
                    fields = dict(schedule="wsd", lr=lr, weight_decay=decay)
                    yield run(T, batch_size, seed, decay_share=share, **fields)
            for lr in window("linear", T, batch_size, 5):
                fields = dict(schedule="linear", lr=lr, weight_decay=decay)
                yield run(T, batch_size, seed, **fields)


def longer(seed: int):
    T = 20_480_000
    for share in (0.1, 0.3, 0.5):
        yield run(T, 8, seed, decay_share=share, **power(8))
    for lr in sweep.lattice(12, 14):
        yield run(T, 8, seed, schedule="linear", lr=lr)


def noise(seed: int):
    for k in range(-3, 4):
        fields = [dict(schedule="wsd", lr=float(f"{0.009051 * 1.01**k:.4g}"))]
        fields.append(power(8, f=1.01**k))
        for T in SOME[:2]:
            for one in fields:
                yield run(T, 8, seed, decay_share=0.3, **one)


QUESTIONS = {  # name -> runs of a seed, and how many seeds
    "warmup": (warmup, 3),
    "batch-8": (batch_8, 3),
    "power-8": (power_8, 3),
    "batch-32": (batch_32, 3),
    "width-64": (width_64, 3),
    "weight-decay": (weight_decay, 2),
    "longer": (longer, 1),
    "noise": (noise, 3),
}


def folder_of(question: str, config: dict) -> str:
    """The folder of a record. fit.py fits the first four."""
    if question in ("warmup", "weight-decay", "noise"):
        return question
    is_small = config["n_embd"] == 32 and config["total_tokens"] <= LENGTHS[-1]
    if config["schedule"] == "linear" and is_small:
        return "linear"
    if config["schedule"] == "wsd" and config["decay_shape"] == "exp":
        names = {0.0: "none", 0.1: "10", 0.3: "30"}
        return names.get(config["decay_share"], "trunks")
    return "trunks"


def write_records(runs: Path, results: Path) -> None:
    """Write what we trained, a folder for every ending and question."""
    folders = {}
    for question in QUESTIONS:
        for file in sorted((runs / question).glob("*.jsonl")):
            for record in files.read_records(file):
                name = folder_of(question, record["config"])
                folders.setdefault(name, []).append(record)
    command = f"python research/decay.py {' '.join(QUESTIONS)}"
    fingerprint = data.open_corpus("embedded").meta["fingerprint"]
    for name, records in folders.items():
        write_results(results / name, records, command, fingerprint)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("decay.py", __doc__)
    add = parser.add_argument
    add("question", choices=(*QUESTIONS, "records"))
    add("--out", type=Path, default=Path("runs/decay"), help="folder of the records")
    add("--workers", type=int, default=2, help="processes")
    add("--dry_run", action="store_true", help="count runs and tokens, and stop")
    args = parser.parse_args(argv)

    def program() -> None:
        if args.question == "records":
            write_records(args.out, RESULTS)
            return
        runs_of, n_seeds = QUESTIONS[args.question]
        runs = [one for seed in range(n_seeds) for one in runs_of(seed)]
        folder = args.out / args.question
        sweep.train_all(runs, folder, args.workers, dry_run=args.dry_run)

    return engines.run_program("decay.py", program)


if __name__ == "__main__":
    sys.exit(main())
