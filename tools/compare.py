"""The comparison of schedules.

A *cell* is (shape, T, batch size). A *line* is a schedule with a rule for its learning rate. Every
seed is an experiment of its own: it tunes all lines in two small cells, with separate runs, and
tests them in larger cells. Losses are in nats per token.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tools.records import PAPER_SEQ_LEN, cell_of, knobs_of, loss_of, narrow_first

DRAWS = 10_000
TUNING = 100  # seeds 100 + 2s and 101 + 2s tune the lines of seed s


class Line(NamedTuple):
    """Its learning rate grows as batch^q T^b from the cell of the tuning, under Power as n^b."""

    fields: dict  # of a TrainConfig; decay_share is the decay as a share of T
    b: float = 0.0
    q: float = 0.0


WSD = dict(schedule="wsd", decay_shape="exp", min_lr_ratio=0.1, average=False)
POWER, COSINE = WSD | dict(schedule="power"), WSD | dict(schedule="cosine")
TO_0 = COSINE | dict(min_lr_ratio=0.0)
LINEAR = WSD | dict(decay_shape="linear", decay_share=1.0)  # from the warmup to the end
AVERAGED = dict(average=True, decay_tokens=0, decay_share=None)  # the average replaces the decay
SQRT, FITTED, PAPER = dict(q=0.5), dict(b=-0.3, q=0.5), dict(b=-0.51, q=1.0)  # FITTED: our law
LINES = {
    "Power (fitted), averaged": Line(POWER | AVERAGED, **FITTED),
    "WSD ∝ √batch, averaged": Line(WSD | AVERAGED, **SQRT),
    "Power (paper)": Line(POWER, **PAPER), "Power (fitted)": Line(POWER, **FITTED),
    "WSD": Line(WSD), "WSD ∝ √batch": Line(WSD, **SQRT), "WSD (fitted)": Line(WSD, **FITTED),
    "WSD (fitted), averaged": Line(WSD | AVERAGED, **FITTED),
    "cosine": Line(COSINE), "cosine ∝ √batch": Line(COSINE, **SQRT),
    "cosine (fitted)": Line(COSINE, **FITTED),
    "cosine to 0 ∝ √batch": Line(TO_0, **SQRT), "cosine to 0 (fitted)": Line(TO_0, **FITTED),
    "linear to 0 ∝ √batch": Line(LINEAR, **SQRT), "linear to 0 (fitted)": Line(LINEAR, **FITTED),
}  # fmt: skip


def fields_of(line: Line, lr: float, batch_size: int, T: int, tuned: tuple) -> dict:
    """Fields of a line's run with this batch size and T, if it was tuned to learning rate lr.

    tuned: batch size, seq_len and T of that tuning. Under Power, lr is the learning rate at that T.
    """
    tuned_batch_size, seq_len, tuned_T = tuned
    lr *= (batch_size / tuned_batch_size) ** line.q
    if line.fields["schedule"] == "power":
        a = lr / (batch_size * seq_len / PAPER_SEQ_LEN * tuned_T**line.b)
        return line.fields | dict(power_a=float(f"{a:.4g}"), power_b=line.b)
    lr *= (T / tuned_T) ** line.b
    return line.fields | dict(lr=float(f"{lr:.4g}"))


def needs_T(line: Line) -> str:
    """When must you know the run length?"""
    schedule = line.fields["schedule"]
    if line.fields["average"]:
        return "never"
    lr_of_T = schedule == "wsd" and line.b  # its constant learning rate depends on T
    planned = schedule not in ("power", "wsd") or "decay_share" in line.fields or lr_of_T
    return "from the start" if planned else "when it decays"


# -- The comparison --------------------------------------------------------------------------------


def key_of(fields: dict) -> tuple:
    """What tells a run from the others of its cell and seed, in a record or in fields_of a line."""
    names = "schedule", "decay_shape", "min_lr_ratio", "average", *knobs_of(fields)
    return tuple(fields[name] for name in names)


def tuning_seeds(seed: int) -> tuple[int, int]:
    return TUNING + 2 * seed, TUNING + 2 * seed + 1


def best_of(tried: dict[float, list]) -> float | None:
    """The learning rate with the lowest mean of its losses. None if a loss is missing."""
    whole = not any(None in losses for losses in tried.values())
    return min(tried, key=lambda lr: sum(tried[lr])) if whole else None


def losses_of_lines(records: list[dict]) -> tuple[dict, dict, Callable]:
    """Return {line: {cell: {seed: loss}}} and {line: {seed: tuned learning rate}}.

    Only cells that have all their runs. Raises ValueError if there is none. The third value is a
    function from line and cell to {seed: record}.
    """
    runs = {(cell_of(r), r["seed"], key_of(r)): r for r in records}
    tuning = {cell for cell, seed, _ in runs if seed >= TUNING}
    if not tuning:
        raise ValueError(f"no runs tuned the schedules (seeds {TUNING} and up)")
    first = min(tuning, key=lambda cell: cell[1])  # the shorter one
    tuned_at = first[2], records[0]["seq_len"], first[1]
    trials = [r for r in records if r["seed"] >= TUNING and cell_of(r) == first]
    rates = sorted({r["lr"] for r in trials if WSD.items() <= r.items()})  # of all lines

    def run(name: str, lr: float, cell: tuple, seed: int) -> dict | None:
        fields = fields_of(LINES[name], lr, cell[2], cell[1], tuned_at)
        return runs.get((cell, seed, key_of(fields)))

    def tuned(name: str, seed: int) -> float:
        cells = [(cell, trial) for cell in tuning for trial in tuning_seeds(seed)]
        tried = {lr: [run(name, lr, *cell) for cell in cells] for lr in rates}
        lr = best_of({lr: [r and loss_of(r) for r in some] for lr, some in tried.items()})
        if lr is None:
            raise ValueError(f"{name} lacks trials of seed {seed}; is the sweep still running?")
        return lr

    seeds = sorted({r["seed"] for r in records if r["seed"] < TUNING and r["schedule"] == "power"})
    best = {name: {seed: tuned(name, seed) for seed in seeds} for name in LINES}
    runs_of = lambda name, cell: {seed: run(name, best[name][seed], cell, seed) for seed in seeds}
    losses_of = lambda *at: {seed: loss_of(r) for seed, r in runs_of(*at).items()}
    cells = {cell for cell, seed, _ in runs if seed < TUNING}
    whole = [cell for cell in sorted(cells, key=narrow_first)
             if all(None not in runs_of(name, cell).values() for name in LINES)]  # fmt: skip
    if not whole:
        raise ValueError("no cell of the comparison has all its runs; is the sweep still running?")
    lines = {name: {cell: losses_of(name, cell) for cell in whole} for name in LINES}
    return lines, best, runs_of


def searched(records: list[dict]) -> dict:
    """{cell: {seed: loss}} of WSD at the learning rate that is best for the *other* seeds.

    In cells where at least two seeds tried seven learning rates or more.
    """
    tried: dict = {}
    for r in records:
        if r["seed"] < TUNING and WSD.items() <= r.items():
            seeds = tried.setdefault(cell_of(r), {})
            seeds.setdefault(r["seed"], {})[r["lr"]] = loss_of(r)
    found: dict = {}
    for cell, seeds in tried.items():
        seeds = {seed: losses for seed, losses in seeds.items() if len(losses) >= 7}
        for seed in seeds if len(seeds) > 1 else ():
            others = [losses for other, losses in seeds.items() if other != seed]
            rates = set.intersection(*map(set, seeds.values()))
            best = min(sorted(rates), key=lambda lr: sum(losses[lr] for losses in others))
            found.setdefault(cell, {})[seed] = seeds[seed][best]
    return found


def differences(one: dict, other: dict, cells: list) -> np.ndarray:
    """Mean loss of one line minus another's, followed by its draws.

    A draw takes the seeds again, with replacement, and the pairs of shape and batch size, because
    all runs of a seed share its tuning, and all T of a pair share trunks.
    """
    seeds = sorted(set.intersection(*(one[cell].keys() & other[cell].keys() for cell in cells)))
    gap = np.array([[one[cell][seed] - other[cell][seed] for seed in seeds] for cell in cells])
    pair_of = [(shape, batch_size) for shape, _, batch_size in cells]
    pairs, rng = sorted(set(pair_of)), np.random.default_rng(0)
    times = lambda n: rng.multinomial(n, np.full(n, 1 / n), size=DRAWS)
    of_cell = times(len(pairs))[:, [pairs.index(pair) for pair in pair_of]]
    of_seed = times(len(seeds))
    total = np.einsum("dc,ds,cs->d", of_cell, of_seed, gap)
    return np.append(gap.mean(), total / (of_cell.sum(axis=1) * of_seed.sum(axis=1)))
