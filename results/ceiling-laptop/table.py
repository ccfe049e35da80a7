"""Print two tables of docs/log.md, from the runs of run.sh.

    python results/ceiling-laptop/table.py [FOLDER]

Means of four cells and three seeds. Differences have 95% intervals of Student's t, over seeds.
"""

import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
import records  # noqa: E402

T_2 = 4.303  # the 97.5% quantile of Student's t with two degrees of freedom


def by_seed(losses: dict) -> list[float]:
    """{(batch size, T, seed): loss} -> the mean loss of every seed."""
    seeds = sorted({seed for *_, seed in losses})
    return [
        statistics.mean(losses[key] for key in losses if key[2] == seed) for seed in seeds
    ]


def minus(one: dict, other: dict) -> str:
    gaps = by_seed({key: loss - other[key] for key, loss in one.items()})
    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5
    return (
        f"{mean:+.3f} [{mean - T_2 * error:.3f}, {mean + T_2 * error:.3f}]"
        if any(gaps)
        else ""
    )


def table(folder: Path = HERE) -> str:
    decayed: dict = {}  # (warmup, lr_max) -> {(batch size, T, seed): loss}
    averaged, held = {}, {}
    for r in map(records.row, records.read_records(folder)):
        cell = r["batch_size"], r["total_tokens"], r["seed"]
        if r["average"]:
            averaged[cell], held[cell] = r["average_val_loss"], r["val_loss"]
        else:
            decayed.setdefault((r["warmup_tokens"], r["lr_max"]), {})[cell] = r[
                "val_loss"
            ]
    merged: dict = {}
    for line in (folder / "merged.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        cell = tuple(map(int, found["run"].split("-")))
        merged.setdefault(found["shape"], {})[cell] = found["val_loss"]

    ceilings = sorted({lr_max for _, lr_max in decayed})
    lines = ["| warmup | " + " | ".join(f"`lr_max` {x:g}" for x in ceilings) + " |"]
    lines.append("|---" * (1 + len(ceilings)) + "|")
    usual = decayed[32_000, 0.02]
    for warmup in sorted({warmup for warmup, _ in decayed}):
        gaps = [minus(decayed[warmup, x], usual) or "0" for x in ceilings]
        lines.append(f"| {warmup:,} | {' | '.join(gaps)} |")
    lines += ["", "| in the last tenth | loss | minus the decay |", "|---|---|---|"]
    rows = {"decay": usual, "running average": averaged, "no decay": held}
    rows |= {f"merged as {shape}": losses for shape, losses in merged.items()}
    for name, losses in rows.items():
        loss = statistics.mean(losses.values())
        lines.append(f"| {name} | {loss:.3f} | {minus(losses, usual)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(*map(Path, sys.argv[1:])))
