"""Does every schedule of the preset start from a good learning rate? Resumable.

    python research/presets.py --dry_run    count runs and tokens
    python research/presets.py              train them, then print the table
    python research/presets.py --tokens 400k --batches 8

Question: how far is `python train.py --schedule linear`, cosine or wsd, without a learning
rate, from the best of a searched peak? Grid: 3 schedules, 400k and 3.2M tokens, batch
sizes 2, 8 and 32, the model of the preset `laptop` (width 128), and five peaks, a factor
of sqrt(2) apart, around that of the preset's law. The runs of 400k tokens have three
seeds, because their losses differ by more than 0.01, and the others have one. None of
these seeds was in the runs that fitted the law. Rule, written before the runs: the peak of
the law has a mean within 0.02 nats of the lowest of the five means, in every cell.
"""

import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent.parent))

import data
import sweep
from config import TrainConfig, make_config
from records import write_results
from tools import engines, files, flags
from tools.flags import size
from tools.reports import print_table

RESULTS = Path(__file__).parent / "results/presets"
SCHEDULES = ("linear", "cosine", "wsd")
SEEDS = {400_000: (1, 2, 3), 3_200_000: (1,)}  # by run length
PEAKS = range(-2, 3)  # in steps of sqrt(2) from the peak of the law
HEAD = ["schedule", "T", "batch size", "law", "best", "loss", "above lowest"]


def runs_of(schedule: str, T: int, batch_size: int) -> list[list[TrainConfig]]:
    """The runs of a cell, a list for every peak, with a run for every seed.

    The peaks rise, and the middle one is that of train.py.
    """
    fields = dict(schedule=schedule, total_tokens=T, batch_size=batch_size)
    lr = make_config(**fields).lr
    runs = []
    for k in PEAKS:
        fields["lr"] = float(f"{lr * 2 ** (k / 2):.4g}")
        runs.append([make_config(**fields, seed=x, data_seed=x) for x in SEEDS[T]])
    return runs


def row_of(cell: tuple, valley: dict[float, float]) -> list[str]:
    """How much the peak of the law loses in a cell.

    cell: its schedule, run length and batch size. valley: {peak: mean loss}, with the peak
    of the law in the middle.
    """
    peaks = sorted(valley)
    of_law = peaks[len(peaks) // 2]
    lowest = min(valley, key=valley.get)
    schedule, T, batch_size = cell
    best = f"{lowest:g}"
    if lowest in (peaks[0], peaks[-1]):
        best += " (edge)"
    losses = [f"{valley[of_law]:.4f}", f"{valley[of_law] - valley[lowest]:.4f}"]
    return [schedule, size(T), str(batch_size), f"{of_law:g}", best, *losses]


def valley_of(cell: tuple, folder: Path) -> dict[float, float]:
    """{peak: mean loss} of a cell that is finished."""
    valley = {}
    for seeds in runs_of(*cell):
        valley[seeds[0].lr] = fmean(sweep.loss_of(cfg, folder) for cfg in seeds)
    return valley


def write_records(folder: Path) -> None:
    runs = [
        r for file in sorted(folder.glob("*.jsonl")) for r in files.read_records(file)
    ]
    fingerprint = data.open_corpus("embedded").meta["fingerprint"]
    write_results(RESULTS, runs, "python research/presets.py", fingerprint)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("presets.py", __doc__)
    add = parser.add_argument
    many = flags.whole_numbers
    add("--tokens", type=many, default=list(SEEDS), help="run lengths")
    add("--batches", type=many, default=[2, 8, 32], help="batch sizes")
    add("--out", type=Path, default=Path("runs/presets"), help="folder of the records")
    add("--workers", type=int, help="processes (default: one per GPU, or per core)")
    add("--records", action="store_true", help="write results/presets, and stop")
    add("--dry_run", action="store_true", help="count runs and tokens, and stop")
    args = parser.parse_args(argv)

    def program() -> None:
        if args.records:
            return write_records(args.out)
        rows = []
        for T in args.tokens:
            cells = [(name, T, size) for size in args.batches for name in SCHEDULES]
            runs = [cfg for cell in cells for seeds in runs_of(*cell) for cfg in seeds]
            sweep.train_all(runs, args.out, args.workers, dry_run=args.dry_run)
            if not args.dry_run:
                rows += [row_of(cell, valley_of(cell, args.out)) for cell in cells]
                print_table(HEAD, rows)

    return engines.run_program("presets.py", program)


if __name__ == "__main__":
    sys.exit(main())
