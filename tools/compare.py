"""Records that may be compared, the comparison of schedules, and the price of not knowing T.

A *cell* is (shape, T, batch size). A *line* is one schedule with one way to set its learning rate,
tuned once in a small cell. The *baseline* is WSD with a learning rate searched in the very cell.
Losses are in nats per token.
"""

import contextlib
import io
import math
import sys
from pathlib import Path

import numpy as np

from tools import records as files

PAPER_SEQ_LEN = 4096  # the default of a row's seq_len, as in schedules.py
TUNING = 100  # seeds 100 and up only tune the schedules; sweep.py trains them first
PAPER_B = -0.51
KNOBS = {"power": "power_a", "fitted": "power_a", "wsd": "lr", "cosine": "lr"}  # what was tuned
# Line -> (kind, p, averaged): the tuned value times (batch size / tuned batch size)^p. Power is
# proportional to the batch size by itself; p = -0.5 takes half of that back.
LINES = {
    "Power (paper)": ("power", 0, False), "Power (paper), averaged": ("power", 0, True),
    "Power (paper), learning rate ∝ √batch": ("power", -0.5, False),
    "Power (fitted)": ("fitted", -0.5, False), "Power (fitted), averaged": ("fitted", -0.5, True),
    "WSD": ("wsd", 0, False), "WSD, learning rate ∝ √batch": ("wsd", 0.5, False),
    "WSD, learning rate ∝ batch": ("wsd", 1, False),
    "cosine": ("cosine", 0, False), "cosine, learning rate ∝ √batch": ("cosine", 0.5, False),
    "cosine, learning rate ∝ batch": ("cosine", 1, False),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------
# Which records may be fitted or compared together

VARIED = set("n_embd n_expert total_tokens batch_size seed data_seed schedule lr power_a power_b "
             "average decay_tokens shape standard".split())  # fmt: skip
OF_A_SHAPE = set("n_layer n_head n_kv_head n_ffn n_expert_active m_width m_emb m_res init_std "
                 "logits_scaling attention_multiplier".split())  # fmt: skip


def complete(row: dict) -> dict:
    """A row with every field that a fit reads; raises ValueError if one without a default lacks.

    Needed: total_tokens, val_loss (None if the run diverged), batch_size and seq_len (or
    batch_tokens), and lr (for Power: power_a and power_b). Optional: shape, seed, schedule.
    """
    row = {"seq_len": PAPER_SEQ_LEN, "seed": 0, "schedule": "wsd"} | row
    if "batch_size" not in row and "batch_tokens" in row:
        row["batch_size"] = row["batch_tokens"] / row["seq_len"]
    knobs = ("power_a", "power_b") if row["schedule"] == "power" else ("lr",)
    for name in ("total_tokens", "batch_size", "seq_len", *knobs):
        value = row.get(name)
        if not isinstance(value, (int, float)) or not (value > 0 or name == "power_b"):
            raise ValueError(f"a record has {name} {value}; a fit needs a number (docs: fit.law)")
    loss = row.get("val_loss")
    if not isinstance(loss, (int, float, type(None))):
        raise ValueError(f"a record has val_loss {loss!r}; it must be a number, or null (diverged)")
    diverged = bool(row.get("diverged")) or loss is None or not math.isfinite(loss)
    return row | {"diverged": diverged}


def shape_of(record: dict) -> str:
    """The name of a model's shape: its `shape`, or its width, experts and parametrization."""
    if "shape" in record or "n_embd" not in record:
        return record.get("shape", "one shape")
    experts = f", {record['n_expert']} experts" if record.get("n_expert") else ""
    return f"width {record['n_embd']}{experts}" + ", standard" * record.get("standard", False)


def is_standard(record: dict) -> bool:
    """Does attention have another scale than μP's 1 / d_head?"""
    mup = record.get("n_head", 0) / record.get("n_embd", 1)
    return not math.isclose(record.get("attention_multiplier") or mup, mup)


def read_records(paths: list[Path]) -> list[dict]:
    """Each run under these folders once: records.jsonl of sweeps, record.json of single runs.

    Raises FileNotFoundError if there are none, ValueError if they cannot be fitted together.
    """
    found = []
    for path in paths:
        with contextlib.redirect_stderr(io.StringIO()) as notes:  # about torn lines
            some = files.read_records(path)
        if not some:
            why = f"{path}: no records; give the folder of a sweep"
            raise FileNotFoundError(notes.getvalue().split("\n")[0] or why)
        sys.stderr.write(notes.getvalue())
        found += map(complete, some)
    # Where both scales of attention occur, the sweep is `transfer`: each width with and without muP
    standard = list(map(is_standard, found))
    found = [r | {"standard": s and not all(standard)} for r, s in zip(found, standard)]
    found = [r | {"shape": shape_of(r)} for r in found]
    check_same_settings(found, " ".join(map(str, paths)))
    names = "shape schedule batch_size total_tokens seed lr power_a power_b average".split()
    return list({tuple(r.get(name, False) for name in names): r for r in found}.values())


def check_same_settings(records: list[dict], where: str) -> None:
    """Raise ValueError if the records differ in a setting that no experiment varies.

    Fields of the shape may differ between shapes. Decays of one schedule must have the same
    number of tokens or the same share of the run.
    """
    seen: dict = {}
    for r in records:
        for name, value in files.settings(r).items():
            if name not in VARIED:
                shape = f" ({r['shape']})" if name in OF_A_SHAPE else ""
                seen.setdefault(name + shape, set()).add(str(value))
        if "decay_tokens" in r:
            decay = r["decay_tokens"], round(r["decay_tokens"] / r["total_tokens"], 3)
            seen.setdefault((r["schedule"], bool(r.get("average"))), set()).add(decay)
    for name, values in seen.items():
        if isinstance(name, tuple):
            fixed = len({tokens for tokens, _ in values}) == 1
            name, values = "decay_tokens", {f"{share:.1%}" for _, share in values}
            values = set() if fixed else values
        if len(values) > 1:
            values = ", ".join(sorted(values))
            raise ValueError(f"{where}: runs with different {name} ({values}); fit them separately")


def loss_of(record: dict, name: str = "val_loss") -> float:
    """A loss of a record; infinite if the run diverged."""
    return math.inf if record["diverged"] else record[name]


def cell_of(record: dict) -> tuple[str, int, int]:
    return record["shape"], record["total_tokens"], record["batch_size"]


# ---------------------------------------------------------------------------------------------
# Lines and their baseline


def kind_of(record: dict) -> str:
    """The schedule; "fitted" for Power with an exponent b that was measured at this scale."""
    fitted = record["schedule"] == "power" and record["power_b"] != PAPER_B
    return "fitted" if fitted else record["schedule"]


def tuned(records: list[dict], kind: str) -> tuple[float, str]:
    """The value that won the trials of a kind (lowest mean loss), and a sentence about it."""
    trials: dict = {}
    for r in records:
        if r["seed"] >= TUNING and kind_of(r) == kind:
            trials.setdefault(r[KNOBS[kind]], []).append(loss_of(r))
    if not trials:
        raise ValueError(f"no runs tuned {kind} (seeds {TUNING} and up); run the sweep's trials")
    best = min(trials, key=lambda value: np.mean(trials[value]))
    edge = ", at the edge of its trials" if best in (min(trials), max(trials)) else ""
    return best, f"{kind}: {KNOBS[kind]} {best:g}, best of {len(trials)}{edge}"


def line_of(record: dict, chosen: dict, batch: int) -> list[str]:
    """The lines that a run belongs to; chosen: kind -> tuned value, batch: where it was tuned."""
    kind, ratio = kind_of(record), record["batch_size"] / batch
    fits = lambda p: math.isclose(record[KNOBS[kind]], chosen[kind] * ratio**p, rel_tol=0.01)
    asked = kind, bool(record.get("average"))
    return [line for line, (k, p, averaged) in LINES.items() if (k, averaged) == asked and fits(p)]


def comparison(records: list[dict]) -> tuple[dict, list[str]]:
    """Return {line: {cell: {seed: loss}}} with the line "baseline", and what the tuning chose.

    Only cells that have all their runs. Raises ValueError if there is none.
    """
    compared = [r for r in records if r["seed"] < TUNING]
    kinds = set(map(kind_of, records))
    choices = {k: tuned(records, k) for k in KNOBS if k != "fitted" or k in kinds}
    chosen = {kind: value for kind, (value, _) in choices.items()}
    batch = next(r["batch_size"] for r in records if r["seed"] >= TUNING)
    lines: dict = {line: {} for line, (kind, *_) in LINES.items() if kind in chosen}
    searched: dict = {}
    for r in compared:
        for line in line_of(r, chosen, batch):
            loss = loss_of(r, "average_val_loss" if LINES[line][2] else "val_loss")
            lines[line].setdefault(cell_of(r), {})[r["seed"]] = loss
        if r["schedule"] == "wsd" and not r.get("average"):
            searched.setdefault(cell_of(r), []).append(r)
    lines["baseline"] = {}
    for cell, runs in searched.items():  # seed 0 searches, the other seeds repeat its best
        best = min((r for r in runs if r["seed"] == 0), key=loss_of, default={"lr": None})["lr"]
        lines["baseline"][cell] = {r["seed"]: loss_of(r) for r in runs if r["lr"] == best}
    seeds = {r["seed"] for r in compared}
    complete = lambda cell: all(by.get(cell, {}).keys() == seeds for by in lines.values())
    whole = [cell for cell in lines["Power (paper)"] if complete(cell)]
    whole.sort(key=lambda cell: (len(cell[0]), cell))  # narrow to wide, MoE last
    if not whole:
        raise ValueError("no cell of the comparison has all its runs; is the sweep still running?")
    by_line = {line: {cell: by_cell[cell] for cell in whole} for line, by_cell in lines.items()}
    return by_line, [said for _, said in choices.values()]


def above(lines: dict, line: str, cells: list | None = None) -> dict[int, np.ndarray]:
    """Return seed -> loss minus the baseline's with the same seed, for each cell.

    Without seed 0 if there are others: its noise chose the baseline's learning rates, so its
    baseline is too low.
    """
    base = lines["baseline"]
    cells = list(base) if cells is None else cells
    seeds = sorted(base[cells[0]])
    minus = lambda cell, seed: lines[line][cell][seed] - base[cell][seed]
    return {seed: np.array([minus(c, seed) for c in cells]) for seed in seeds[1:] or seeds}


# ---------------------------------------------------------------------------------------------
# The price of not knowing

RULES = {  # the learning rate depends on -> (features of a linear model of log2 lr, q if given)
    "nothing": (lambda m, _: [1], 0),
    "T": (lambda m, every: [m.T == T for T in every["T"]], 0),
    "batch size": (lambda m, every: [m.batch_size == B for B in every["batch_size"]], 0),
    "T and batch size, ∝ batch": (lambda m, _: [1, math.log2(m.T)], 1),
    "T and batch size, ∝ √batch": (lambda m, _: [1, math.log2(m.T)], 0.5),
    "T and batch size, free exponents": (lambda m, _: [1, math.log2(m.T), math.log2(m.beta)], 0),
}


def mean_valleys(minima: list, window: int) -> dict:
    """Cell -> (log2 learning rates that every searched seed tried, mean losses there, seeds)."""
    searched: dict = {}
    for m in minima:
        searched.setdefault((m.shape, m.T, m.batch_size), {})[m.seed] = dict(m.points)
    valleys = {}
    for cell, by_seed in searched.items():
        x = sorted(set.intersection(*map(set, by_seed.values())))
        if len(x) >= window:
            losses = np.mean([[points[at] for at in x] for points in by_seed.values()], axis=0)
            valleys[cell] = x, losses, list(by_seed)
    return valleys


def price(minima: list, lines: dict, window: int = 5) -> tuple[dict[str, np.ndarray], int]:
    """Return {rule: loss above the lowest one measured, for each cell}, and the number of cells.

    Each rule is judged in one cell with constants fitted to all the others. We read the loss at
    the rule's learning rate off the losses measured in that cell (means over the searched seeds),
    interpolating linearly. Outside the measured range, the endpoint's loss is used.
    minima: usable ones of WSD. lines: losses of more rules, {name: {cell: {seed: loss}}}.
    """
    valleys = mean_valleys(minima, window)
    minima = [m for m in minima if (m.shape, m.T, m.batch_size) in valleys]
    every = {name: sorted({getattr(m, name) for m in minima}) for name in ("T", "batch_size")}
    costs: dict = {}
    for rule, (features, q) in RULES.items():
        X = np.array([features(m, every) for m in minima], dtype=float)
        y = np.array([m.x - q * math.log2(m.beta) for m in minima])
        for cell, (x, losses, _) in valleys.items():
            here = np.array([(m.shape, m.T, m.batch_size) == cell for m in minima])
            solution = np.linalg.lstsq(X[~here], y[~here], rcond=None)[0]
            i = here.argmax()
            log2_lr = X[i] @ solution + q * math.log2(minima[i].beta)
            costs.setdefault(rule, []).append(np.interp(log2_lr, x, losses) - min(losses))
    for name, line in lines.items():
        there = [cell for cell, (*_, seeds) in valleys.items() if {*seeds} <= {*line.get(cell, ())}]
        mean = lambda cell: np.mean([line[cell][seed] for seed in valleys[cell][2]])
        costs[name] = [mean(cell) - min(valleys[cell][1]) for cell in there]
    return {rule: np.array(cost) for rule, cost in costs.items() if cost}, len(valleys)
