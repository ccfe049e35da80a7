"""Print the table of a growing batch size in docs/log.md, from the runs of run.sh.

    python results/ramp-laptop/table.py [FOLDER]

Three seeds of every run. Differences have 95% intervals of Student's t.
"""

import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
import records  # noqa: E402

T_2 = 4.303  # the 97.5% quantile of Student's t with two degrees of freedom


def steps(record: dict) -> int:
    """Optimizer steps of a run; a step that would end after total_tokens is not made."""
    ramp = record.get("batch_ramp") or f"{record['batch_size']}@0"
    stages = [stage.split("@") for stage in ramp.split(",")]
    tokens = count = 0
    while True:
        batch_size = [int(size) for size, start in stages if float(start) <= tokens][-1]
        tokens += batch_size * record["seq_len"]
        if tokens > record["total_tokens"]:
            return count
        count += 1


def minus(runs: dict, others: dict) -> str:
    """The mean difference in loss, with its interval. Both: seed -> record."""
    gaps = [runs[seed]["val_loss"] - others[seed]["val_loss"] for seed in sorted(runs)]
    if not any(gaps):
        return ""
    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5
    return f"{mean:+.3f} [{mean - T_2 * error:.3f}, {mean + T_2 * error:.3f}]"


def table(folder: Path = HERE) -> str:
    runs: dict = {}  # T -> name of the schedule -> the records of its seeds
    for r in map(records.row, records.read_records(folder)):
        if r["seed"] < 100:  # the others tuned
            name = dict(power="Power", wsd="WSD")[r["schedule"]] + ", ramp" * bool(
                r.get("batch_ramp")
            )
            runs.setdefault(r["total_tokens"], {}).setdefault(name, {})[r["seed"]] = r
    head = "| T | schedule | loss | minus Power | minus WSD | steps | seconds |"
    lines = [head, "|---" * 7 + "|"]
    for T, by_name in sorted(runs.items()):
        for name, seeds in sorted(by_name.items()):
            loss = statistics.mean(r["val_loss"] for r in seeds.values())
            gaps = f"{minus(seeds, by_name['Power'])} | {minus(seeds, by_name['WSD'])}"
            seconds = statistics.median(r["seconds"] for r in seeds.values())
            row = f"{T:,} | {name} | {loss:.3f} | {gaps} | {steps(seeds[0]):,} | {seconds:.0f}"
            lines.append(f"| {row} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(*map(Path, sys.argv[1:])))
