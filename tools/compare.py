"""Which records belong together, and the comparison of schedules.

A *cell* is (shape, T, batch size). A *line* is one schedule with one rule for its learning rate,
tuned once in a small cell. The *baseline* is WSD with a learning rate searched in the same cell.
Losses are in nats per token.
"""

import json
import math
from pathlib import Path

import numpy as np

from tools import records as files

PAPER_SEQ_LEN = 4096  # the default of a row's seq_len, as in schedules.py
TUNING = 100  # seeds 100 and up only tune the schedules
PAPER_B = -0.51
KNOBS = {"power": "power_a", "fitted": "power_a", "wsd": "lr", "cosine": "lr"}  # tuned fields
# Line -> (kind, p, averaged). Its value is the tuned one times (batch size / tuned batch size)^p.
# The formula of Power already contains the batch size, and p = -0.5 takes half of that back.
LINES = {
    "Power (paper)": ("power", 0, False), "Power (paper), averaged": ("power", 0, True),
    "Power (paper), learning rate ∝ √batch": ("power", -0.5, False),
    "Power (fitted)": ("fitted", -0.5, False), "Power (fitted), averaged": ("fitted", -0.5, True),
    "WSD": ("wsd", 0, False), "WSD, learning rate ∝ √batch": ("wsd", 0.5, False),
    "WSD, learning rate ∝ batch": ("wsd", 1, False),
    "cosine": ("cosine", 0, False), "cosine, learning rate ∝ √batch": ("cosine", 0.5, False),
    "cosine, learning rate ∝ batch": ("cosine", 1, False),
}  # fmt: skip

# -- Which records may be fitted or compared together ----------------------------------------------

VARIED = (  # settings that an experiment may vary
    "n_embd n_expert total_tokens batch_size seed data_seed schedule lr power_a power_b average "
    "decay_tokens shape standard"
).split()
OF_A_SHAPE = (  # settings that only differ between shapes
    "n_layer n_head n_kv_head n_ffn n_expert_active m_width m_emb m_res init_std logits_scaling "
    "attention_multiplier"
).split()


def complete(row: dict) -> dict:
    """Add defaults to a row, see fit.law. Raises ValueError if a field is missing."""
    row = {"seq_len": PAPER_SEQ_LEN, "seed": 0, "schedule": "wsd"} | row
    if "batch_size" not in row and "batch_tokens" in row:
        row["batch_size"] = row["batch_tokens"] / row["seq_len"]
    knobs = ("power_a", "power_b") if row["schedule"] == "power" else ("lr",)
    for name in ("total_tokens", "batch_size", "seq_len", *knobs):
        value = row.get(name)
        if not isinstance(value, (int, float, np.number)) or not (value > 0 or name == "power_b"):
            raise ValueError(f"a record has {name} {value}; a fit needs a number (see fit.law)")
    loss = row.get("val_loss")
    return row | {"diverged": row.get("diverged") or loss is None or not math.isfinite(loss)}


def shape_of(record: dict) -> str:
    """The name of a shape, made of width, experts and parametrization unless the row has one."""
    if "shape" in record or "n_embd" not in record:
        return record.get("shape", "one shape")
    experts = f", {record['n_expert']} experts" if record.get("n_expert") else ""
    return f"width {record['n_embd']}{experts}" + ", standard" * record.get("standard", False)


def is_standard(record: dict) -> bool:
    """Does attention have a different scale than μP's 1 / d_head?"""
    mup = record.get("n_head", 0) / record.get("n_embd", 1)
    return not math.isclose(record.get("attention_multiplier") or mup, mup)


def only(records: list[dict], choice: str) -> list[dict]:
    """The records that agree with a choice, FIELD=V,V,.... Raises ValueError if none does."""
    name, _, text = choice.partition("=")
    values = []
    for word in text.split(","):
        try:
            values.append(json.loads(word))  # 0 then equals 0.0, and null None
        except json.JSONDecodeError:
            values.append(word)
    chosen = [r for r in records if r.get(name) in values]
    if not chosen:
        raise ValueError(f"{choice}: no such records; is it FIELD=VALUE,...?")
    return chosen


def read_records(paths: list[Path], choices: tuple[str, ...] = ()) -> list[dict]:
    """Read all runs under these folders that agree with the choices, without duplicates.

    Raises FileNotFoundError if a folder has no records, ValueError if their settings differ.
    """
    found = []
    for path in paths:
        some = files.read_records(path)
        if not some:
            raise FileNotFoundError(f"{path}: no records; give the folder of a sweep")
        found += some
    for choice in choices:
        found = only(found, choice)
    found = [complete(r) for r in found]
    # If both scales of attention occur, the sweep is `transfer`, with and without muP
    all_standard = all(is_standard(r) for r in found)
    found = [r | {"standard": is_standard(r) and not all_standard} for r in found]
    found = [r | {"shape": shape_of(r)} for r in found]
    check_same_settings(found)
    names = "shape schedule batch_size total_tokens seed lr power_a power_b average".split()
    return list({tuple(r.get(name, False) for name in names): r for r in found}.values())


def check_same_settings(records: list[dict]) -> None:
    """Raise ValueError if records differ in a setting that no experiment varies.

    Decays of one schedule must take the same number of tokens or the same share of the run.
    """
    first_of: dict = {}
    decays: dict = {}
    for r in records:
        first = first_of.setdefault(r["shape"], r)
        different = files.differs(r, first, VARIED)
        different += files.differs(r, records[0], VARIED + OF_A_SHAPE)
        if different:
            raise ValueError(f"runs with different {different[0]}; fit them separately (--only)")
        decay = r.get("decay_tokens", 0)
        share = round(decay / r["total_tokens"], 3)
        decays.setdefault((r["schedule"], r.get("average")), []).append((decay, share))
    for some in decays.values():
        if all(len(set(values)) > 1 for values in zip(*some)):
            raise ValueError("runs with different decay_tokens; fit them separately (--only)")


def loss_of(record: dict, name: str = "val_loss") -> float:
    """A loss of a record, infinite if the run diverged."""
    return math.inf if record["diverged"] else record[name]


def cell_of(record: dict) -> tuple[str, int, int]:
    return record["shape"], record["total_tokens"], record["batch_size"]


# -- Lines and their baseline ----------------------------------------------------------------------


def kind_of(record: dict) -> str:
    """The schedule; "fitted" for Power with an exponent b that was measured at this scale."""
    fitted = record["schedule"] == "power" and record["power_b"] != PAPER_B
    return "fitted" if fitted else record["schedule"]


def tuned(records: list[dict], kind: str) -> tuple[float, str]:
    """The value with the lowest mean loss in the trials of a kind, and a sentence about it."""
    trials: dict = {}
    for r in records:
        if r["seed"] >= TUNING and kind_of(r) == kind:
            trials.setdefault(r[KNOBS[kind]], []).append(loss_of(r))
    if not trials:
        raise ValueError(f"no runs tuned {kind} (seeds {TUNING} and up); run the sweep's trials")
    best = min(trials, key=lambda value: np.mean(trials[value]))
    edge = ", at the edge of its trials" if best in (min(trials), max(trials)) else ""
    return best, f"{kind}: {KNOBS[kind]} {best:g}, best of {len(trials)}{edge}"


def baseline(records: list[dict]) -> dict:
    """{cell: {seed: loss}} of WSD at the best learning rate that seed 0 found by search."""
    searched: dict = {}
    for r in records:
        if r["schedule"] == "wsd" and not r.get("average"):
            searched.setdefault(cell_of(r), []).append(r)
    found = {}
    for cell, runs in searched.items():
        if tried := [r for r in runs if r["seed"] == 0]:
            best = min(tried, key=loss_of)["lr"]
            found[cell] = {r["seed"]: loss_of(r) for r in runs if r["lr"] == best}
    return found


def comparison(records: list[dict]) -> tuple[dict, list[str]]:
    """Return {line: {cell: {seed: loss}}} with the line "baseline", and the tuned values in words.

    Only cells that have all their runs. Raises ValueError if there is none.
    """
    compared = [r for r in records if r["seed"] < TUNING]
    kinds = {kind_of(r) for r in records}
    choices = {kind: tuned(records, kind) for kind in KNOBS if kind in kinds}
    batch = next(r["batch_size"] for r in records if r["seed"] >= TUNING)
    lines: dict = {line: {} for line, (kind, *_) in LINES.items() if kind in kinds}
    for line, by_cell in lines.items():
        kind, p, averaged = LINES[line]
        for r in compared:
            value = choices[kind][0] * (r["batch_size"] / batch) ** p
            same_kind = (kind_of(r), bool(r.get("average"))) == (kind, averaged)
            if same_kind and math.isclose(r[KNOBS[kind]], value, rel_tol=0.16):
                loss = loss_of(r, "average_val_loss" if averaged else "val_loss")
                by_cell.setdefault(cell_of(r), {})[r["seed"]] = loss
    lines["baseline"] = baseline(compared)
    seeds = {r["seed"] for r in compared}
    is_whole = lambda cell: all(by.get(cell, {}).keys() == seeds for by in lines.values())
    whole = [cell for cell in lines["Power (paper)"] if is_whole(cell)]
    whole.sort(key=lambda cell: (len(cell[0]), cell))  # narrow to wide, MoE last
    if not whole:
        raise ValueError("no cell of the comparison has all its runs; is the sweep still running?")
    by_line = {line: {cell: by_cell[cell] for cell in whole} for line, by_cell in lines.items()}
    return by_line, [said for _, said in choices.values()]


def above(lines: dict, line: str, cells: list | None = None) -> dict[int, np.ndarray]:
    """Return seed -> loss minus the baseline with the same seed, [cells].

    Seed 0 only counts if it is alone, because its noise chose the learning rates of the baseline.
    So its baseline is too low.
    """
    base = lines["baseline"]
    cells = list(base) if cells is None else cells
    seeds = sorted(base[cells[0]])
    minus = lambda cell, seed: lines[line][cell][seed] - base[cell][seed]
    return {seed: np.array([minus(c, seed) for c in cells]) for seed in seeds[1:] or seeds}
