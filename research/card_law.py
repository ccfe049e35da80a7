"""The best learning rate at width 256, where runs are short for their model, on one GPU.

    python research/card_law.py OUT --seconds 440    train, then print the answers
    python research/card_law.py OUT --show           print the answers of the runs in OUT
    python research/card_law.py OUT --tiny           tiny models, on any machine

rules/card.md was written before any run, and says what we conclude from which answer. Part
1 trains 14 trunks side by side, of seven learning rates with weight decay 0.1 and 0. At
every T a branch decays, and the average of the weights is evaluated. Part 2 trains, for
the longest T that all trunks reached, the runs that need part 1 or know T.
"""

import argparse
import copy
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch, see train.py

import numpy as np
import torch

import train
from tools import devices

FIELDS = dict(
    preset="laptop",
    n_layer=8,
    n_embd=256,
    n_head=4,
    base_width=256,
    seq_len=512,
    batch_size=16,
    warmup_tokens=2**17,
    average=True,
)
EVALUATED = 2**18  # tokens of the validation split
T = [5 * 2**20 * 2**k for k in range(5)]  # 0.9 to 14 tokens per parameter
LRS = [2.0**-k for k in range(5, 12)]
DECAYS = (0.1, 0.0)  # weight decays
if "--tiny" in sys.argv:
    sizes = dict(n_layer=1, n_embd=32, n_head=2, base_width=32, seq_len=32)
    FIELDS |= sizes | dict(batch_size=2, warmup_tokens=128)
    EVALUATED = 2**12
    T = [640 * 2**k for k in range(5)]
    LRS = [0.08, 0.02, 0.005, 0.001]


# -- Runs --------------------------------------------------------------------------------


class Job(NamedTuple):
    """What a process trains: a trunk with its branches, or a run that knows its T."""

    line: str
    weight_decay: float
    lr: float
    fields: dict  # of the schedule
    T: int | None = None  # None for a trunk


def open_run(job: Job, **fields):
    fields = FIELDS | dict(weight_decay=job.weight_decay, lr=job.lr) | fields
    fields["device"] = devices.pick_device()
    cfg = devices.resolve_device(train.make_config(**fields))
    return train.load_data(cfg, fields, None)


def train_to_the_end(cfg, corpus, state) -> None:
    for _ in train.training_steps(cfg, state, corpus):
        pass


def note(out: Path, job: Job, cfg, corpus, state, T: int, line: str, which: str) -> bool:
    """Append the validation loss of a run of length T. Return False if it diverged."""
    losses = train.validation_losses(cfg, state, corpus, EVALUATED)
    loss = losses[which]
    if not loss <= math.log(cfg.vocab_size):  # also if it is NaN
        loss = None
    row = dict(line=line, weight_decay=job.weight_decay, lr=job.lr, T=T, loss=loss)
    with open(out / "runs.jsonl", "a") as file:
        file.write(json.dumps(row | dict(time=time.time())) + "\n")
    return loss is not None


def train_trunk(job: Job, out: Path, end: float) -> None:
    cfg, corpus = open_run(job, schedule="constant", total_tokens=T[0])
    state = train.build(cfg)
    for n in T:
        # 1. The trunk, to the start of the decay
        start = n - n // 10
        cfg, _ = open_run(job, schedule="constant", total_tokens=start)
        for _ in train.training_steps(cfg, state, corpus):
            if time.time() > end:
                return
        saved = copy.deepcopy(train.checkpoint(cfg, corpus, state))

        # 2. The branch
        cfg, _ = open_run(job, schedule="wsd", total_tokens=n, decay_tokens=n // 10)
        train_to_the_end(cfg, corpus, state)
        learned = note(out, job, cfg, corpus, state, n, "wsd", "val_loss")

        # 3. The trunk again, to T, and its average
        train.restore(saved, state)
        cfg, _ = open_run(job, schedule="constant", total_tokens=n)
        train_to_the_end(cfg, corpus, state)
        line = "constant, averaged"
        note(out, job, cfg, corpus, state, n, line, "average_val_loss")
        if not learned:
            return


def train_job(i: int, jobs: list[Job], out: Path, end: float) -> None:
    torch.set_num_threads(1)
    job = jobs[i]
    if job.T is None:
        train_trunk(job, out, end)
        return
    cfg, corpus = open_run(job, total_tokens=job.T, **job.fields)
    state = train.build(cfg)
    for _ in train.training_steps(cfg, state, corpus):
        if time.time() > end:
            return
    note(out, job, cfg, corpus, state, job.T, job.line, "val_loss")


def side_by_side(jobs: list[Job], out: Path, end: float) -> None:
    torch.multiprocessing.spawn(train_job, (jobs, out, end), len(jobs))


def warm_up() -> None:
    """Compile once, so that all processes find their programs in the cache of the compiler."""
    job = Job("", 0.1, 1e-3, {})
    batch = FIELDS["batch_size"] * FIELDS["seq_len"]
    cfg, corpus = open_run(
        job, schedule="constant", warmup_tokens=0, total_tokens=2 * batch
    )
    train_to_the_end(cfg, corpus, train.build(cfg))


# -- Answers -----------------------------------------------------------------------------


def read(out: Path) -> list[dict]:
    lines = (out / "runs.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(rows: list[dict], line: str, weight_decay: float, n: int) -> dict:
    """lr -> loss, inf if the run diverged."""
    found = {}
    for row in rows:
        if (row["line"], row["weight_decay"], row["T"]) == (line, weight_decay, n):
            found[row["lr"]] = math.inf if row["loss"] is None else row["loss"]
    return found


def lengths(rows: list[dict]) -> list[int]:
    """The T for which no learning rate is missing. One that diverged has no longer runs."""
    whole = []
    for n in T:
        known = 0
        for decay in DECAYS:
            alive = [lr for lr in LRS if math.inf not in history(rows, decay, lr, n)]
            known += all(lr in losses(rows, "wsd", decay, n) for lr in alive)
        if known == len(DECAYS):
            whole.append(n)
    return whole


def history(rows: list[dict], weight_decay: float, lr: float, n: int) -> list[float]:
    """Losses of the branches of a trunk that are shorter than n."""
    earlier = [losses(rows, "wsd", weight_decay, m) for m in T if m < n]
    return [found[lr] for found in earlier if lr in found]


def vertex(of_lr: dict) -> float:
    """log2 of the best learning rate, by the parabola through the lowest loss and its
    neighbors. NaN if it is at an edge."""
    lrs = sorted(of_lr)
    i = min(range(len(lrs)), key=lambda i: of_lr[lrs[i]])
    if i in (0, len(lrs) - 1):
        return math.nan
    three = [of_lr[lr] for lr in lrs[i - 1 : i + 2]]
    if math.inf in three:
        return math.nan
    c, b, _ = np.polyfit([math.log2(lr) for lr in lrs[i - 1 : i + 2]], three, 2)
    return float(-b / (2 * c))


def law(rows: list[dict], weight_decay: float, longest: int) -> tuple[float, float]:
    """a and b of the best learning rate a * T^b, for T up to `longest`."""
    points = []
    for n in lengths(rows):
        best = vertex(losses(rows, "wsd", weight_decay, n))
        if n <= longest and not math.isnan(best):
            points.append((math.log(n), best * math.log(2)))
    if len(points) < 2:
        return math.nan, math.nan
    b, log_a = np.polyfit(*zip(*points), 1)
    return math.exp(log_a), float(b)


def best_lr(rows: list[dict], line: str, weight_decay: float, n: int) -> float:
    found = losses(rows, line, weight_decay, n)
    return min(found, key=found.get)


def jobs_of_part_2(rows: list[dict]) -> list[Job]:
    last = lengths(rows)[-1]
    jobs = []
    for decay in DECAYS:
        center = best_lr(rows, "wsd", decay, last)
        linear = dict(schedule="wsd", decay_shape="linear")
        linear["decay_tokens"] = last - FIELDS["warmup_tokens"]
        for factor in (1, 2, 4):
            jobs.append(Job("linear to 0", decay, factor * center, linear, last))
    a, b = law(rows, 0.1, last // 4)
    if not math.isnan(b):
        power = dict(schedule="power", power_a=a, power_b=min(b, 0.0), power_q=0.0)
        power["decay_tokens"] = last // 10
        jobs.append(
            Job("Power (fitted)", 0.1, best_lr(rows, "wsd", 0.1, last), power, last)
        )
    return jobs


def show(out: Path) -> None:
    """Print the losses, the two laws, and the lines at the last T."""
    rows = read(out)
    known = lengths(rows)
    if not known:
        print("no T was reached by all trunks")
        return
    for decay in DECAYS:
        print(f"weight decay {decay}: loss of WSD, and log2 of the best learning rate")
        print(f"{'lr':>12}", *(f"{lr:9.5f}" for lr in LRS))
        for n in known:
            found = losses(rows, "wsd", decay, n)
            shown = (f"{found.get(lr, math.inf):9.4f}" for lr in LRS)
            print(f"{n:12,}", *shown, f"{vertex(found):8.2f}")
        _, b = law(rows, decay, known[-1])
        print(f"b = {b:.3f}\n")
    last = known[-1]
    early = known[max(0, len(known) - 3)]  # a quarter of the last T
    ends = {}
    for decay in DECAYS:
        for line in ("wsd", "linear to 0", "Power (fitted)"):
            found = losses(rows, line, decay, last)
            if found:
                ends[f"{line}, weight decay {decay}, best of {len(found)}"] = min(
                    found.values()
                )
    for line in ("wsd", "constant, averaged"):
        lr = best_lr(rows, line, 0.0, early)
        name = f"{line}, weight decay 0, learning rate that was best at {early:,}"
        ends[name] = losses(rows, line, 0.0, last)[lr]
    print(f"T = {last:,}")
    for name, loss in sorted(ends.items(), key=lambda item: item[1]):
        print(f"{loss:9.4f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=440)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.show:
        args.out.mkdir(parents=True)
        began = time.time()
        warm_up()
        trunks = [Job("", decay, lr, {}) for decay in DECAYS for lr in LRS]
        side_by_side(trunks, args.out, began + 0.65 * args.seconds)
        rows = read(args.out)
        if lengths(rows):
            side_by_side(jobs_of_part_2(rows), args.out, began + args.seconds)
    show(args.out)


if __name__ == "__main__":
    main()
