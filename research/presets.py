"""Does every schedule of the preset start from a good learning rate? Resumable.

    python research/presets.py --dry_run    count runs and tokens
    python research/presets.py              train them, then print the table
    python research/presets.py --tokens 400k --batches 8

Question: how far is `python train.py --schedule linear`, cosine or wsd, without a learning
rate, from the best of a searched peak? Grid: 3 schedules, 400k and 3.2M tokens, batch
sizes 2, 8 and 32, the model of the preset `laptop` (width 128) with seed 0, and five peaks,
a factor of sqrt(2) apart, around that of the preset's law. The shortest runs come first.
Rule, written before the runs: every cell is within 0.02 nats of the lowest of its five.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import sweep
from config import TrainConfig, make_config
from tools import engines, flags
from tools.flags import size
from tools.reports import print_table

SCHEDULES = ("linear", "cosine", "wsd")
PEAKS = range(-2, 3)  # in steps of sqrt(2) from the peak of the law


def runs_of(schedule: str, T: int, batch_size: int) -> list[TrainConfig]:
    """The runs of a cell, at rising peaks. The middle one is that of train.py."""
    fields = dict(schedule=schedule, total_tokens=T, batch_size=batch_size)
    lr = make_config(**fields).lr
    return [make_config(**fields, lr=float(f"{lr * 2 ** (k / 2):.4g}")) for k in PEAKS]


def row_of(cell: tuple, folder: Path) -> list[str]:
    """What the peak of the law loses in a cell that is finished."""
    runs = runs_of(*cell)
    losses = [sweep.loss_of(cfg, folder) for cfg in runs]
    middle = len(losses) // 2
    lowest = min(losses)
    schedule, T, batch_size = cell
    best = f"{runs[losses.index(lowest)].lr:g}"
    if losses.index(lowest) in (0, len(losses) - 1):
        best += " (edge)"
    row = [schedule, size(T), str(batch_size), f"{runs[middle].lr:g}", best]
    return [*row, f"{losses[middle]:.4f}", f"{losses[middle] - lowest:.4f}"]


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("presets.py", __doc__)
    add = parser.add_argument
    many = flags.whole_numbers
    add("--tokens", type=many, default=[400_000, 3_200_000], help="run lengths")
    add("--batches", type=many, default=[2, 8, 32], help="batch sizes")
    add("--out", type=Path, default=Path("runs/presets"), help="folder of the records")
    add("--workers", type=int, help="processes (default: one per GPU, or per core)")
    add("--dry_run", action="store_true", help="count runs and tokens, and stop")
    args = parser.parse_args(argv)

    def program() -> None:
        head = ["schedule", "T", "batch size", "law", "best", "loss", "above lowest"]
        rows = []
        for T in args.tokens:
            cells = [(name, T, size) for size in args.batches for name in SCHEDULES]
            runs = [cfg for cell in cells for cfg in runs_of(*cell)]
            sweep.train_all(runs, args.out, args.workers, dry_run=args.dry_run)
            if not args.dry_run:
                rows += [row_of(cell, args.out) for cell in cells]
                print_table(head, rows)

    return engines.run_program("presets.py", program)


if __name__ == "__main__":
    sys.exit(main())
