"""Tune the default run under three schedules by one rule, and print the table of docs/train.md.

    python results/laptop/tune.py              the table, from records.jsonl beside this file
    python results/laptop/tune.py runs/tune    make the runs again, in about an hour on two cores

The rule, fixed before the runs: every schedule tries learning rates in steps of sqrt(2), for WSD
and the cosine the peak, for Power (b = -0.3, q = 0.5, our law) the value at the end of the run.
Each learning rate has three seeds. It is judged by the mean loss on 2,048 sequences of the
*training* split, those that come next in the order of the run and that it has not read. We start
with three learning rates around 0.004. While the best is at an edge, we add the next. The
validation split judges nothing, so its losses of the chosen runs are a fair comparison.
"""

import json
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

SEEDS = (0, 1, 2)
SCHEDULES = ("power", "wsd", "cosine")
POWER = dict(power_b=-0.3, power_q=0.5)
T, BETA = 3_200_000, 0.25  # of the preset
UNREAD = 2048  # sequences
T_2 = 4.303  # the 97.5% quantile of Student's t with two degrees of freedom


def nth_lr(j: int) -> float:
    """Learning rate number j, in steps of sqrt(2) from 0.004."""
    return float(f"{0.004 * 2 ** (j / 2):.4g}")


def flags(schedule: str, lr: float) -> dict:
    """The flags of a run. Under Power, lr is the learning rate at the end of the run."""
    if schedule != "power":
        return dict(schedule=schedule, lr=lr)
    a = lr / (BETA ** POWER["power_q"] * T ** POWER["power_b"])
    return dict(schedule=schedule, power_a=float(f"{a:.4g}"), **POWER)


def run(out: Path, schedule: str, lr: float, seed: int) -> dict:
    """Train, or resume, and return the record with the loss on unread training text."""
    import torch

    import data
    import train
    from model import load_model
    import config
    from tools.devices import mixed_precision

    torch.set_num_threads(1)
    folder = out / f"{schedule}-{lr}-{seed}"
    fields = flags(schedule, lr) | dict(seed=seed, data_seed=seed, out=folder)
    argv = [f"--{name}={value}" for name, value in fields.items()]
    assert train.main([*argv, "--resume"]) == 0
    record = json.loads((folder / "record.json").read_text())
    cfg = train.TrainConfig(**{name: record[name] for name in config.FIELDS})
    model, corpus = load_model(folder), data.load_corpus(cfg.data, cfg.tokenizer)
    first, losses = T // cfg.seq_len, []
    for g in range(first, first + UNREAD, 16):
        batch = data.draw(corpus, g + data.np.arange(16), cfg.seq_len, cfg.data_seed)
        with torch.no_grad(), mixed_precision(cfg):
            loss, _ = model(*map(torch.from_numpy, batch))
        losses.append(loss.item())
    return record | {"val_loss_unread": statistics.mean(losses), "tuned_lr": lr}


def make_runs(out: Path) -> None:
    """Make all runs that the rule asks for, two at a time, and write their records."""
    tried = {schedule: [-1, 0, 1] for schedule in SCHEDULES}
    records = {}
    with ProcessPoolExecutor(2) as pool:
        while True:
            wanted = [
                (s, nth_lr(j), seed)
                for s in SCHEDULES
                for j in tried[s]
                for seed in SEEDS
            ]
            new = [job for job in wanted if job not in records]
            for job, record in zip(new, pool.map(run, [out] * len(new), *zip(*new))):
                records[job] = record
                lines = [json.dumps(records[done]) + "\n" for done in sorted(records)]
                (out / "records.jsonl").write_text("".join(lines))
            more = False
            for schedule, numbers in tried.items():
                judge = lambda j: statistics.mean(
                    records[schedule, nth_lr(j), seed]["val_loss_unread"]
                    for seed in SEEDS
                )
                best = min(numbers, key=judge)
                if best in (min(numbers), max(numbers)):
                    numbers.append(best - 1 if best == min(numbers) else best + 1)
                    more = True
            if not more:
                return


def chosen(records: list[dict]) -> dict[str, list[dict]]:
    """{schedule: the runs of its best learning rate, a seed each}."""
    found = {}
    for schedule in SCHEDULES:
        by_lr: dict = {}
        for r in records:
            if r["schedule"] == schedule:
                by_lr.setdefault(r["tuned_lr"], []).append(r)
        judge = lambda runs: statistics.mean(r["val_loss_unread"] for r in runs)
        found[schedule] = sorted(min(by_lr.values(), key=judge), key=lambda r: r["seed"])
    return found


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and its 95% interval of Student's t over three seeds."""
    mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - T_2 * error, mean + T_2 * error


def read(folder: Path = HERE) -> list[dict]:
    return [
        json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()
    ]


def table(folder: Path = HERE) -> str:
    best = chosen(read(folder))
    lines = [
        "| schedule | tuned | seed 0 | seed 1 | seed 2 | mean | minus Power |",
        "|---" * 7 + "|",
    ]
    for schedule, runs in best.items():
        r, losses = runs[0], [r["val_loss"] for r in runs]
        tuned = (
            f"a = {r['power_a']:g}"
            if schedule == "power"
            else f"learning rate {r['lr']:g}"
        )
        gaps = [x - power["val_loss"] for x, power in zip(losses, best["power"])]
        gap = "{:+.4f} [{:.4f}, {:.4f}]".format(*interval(gaps)) if any(gaps) else ""
        cells = [
            schedule,
            tuned,
            *(f"{x:.4f}" for x in losses),
            f"{statistics.mean(losses):.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} | {gap} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
        folder = Path(sys.argv[1])
        folder.mkdir(parents=True, exist_ok=True)
        make_runs(folder)
        print(table(folder))
    else:
        print(table())
