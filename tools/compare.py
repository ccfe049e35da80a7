"""Which records belong together, and the comparison of schedules.

A *cell* is (shape, T, batch size). A *line* is a schedule with a rule for its learning rate. Every
seed is an experiment of its own: it tunes all lines in two small cells, with separate runs, and
tests them in larger cells. Losses are in nats per token.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.records import differs, records_in

PAPER_SEQ_LEN = 4096  # the default of a row's seq_len, as in schedules.py
DRAWS = 10_000

# -- The lines -------------------------------------------------------------------------------------

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
    "cosine": Line(COSINE), "cosine ∝ √batch": Line(COSINE, **SQRT),
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
    schedule, average = line.fields["schedule"], line.fields["average"]
    planned = schedule == "cosine" or "decay_share" in line.fields or (schedule == "wsd" and line.b)
    return "never" if average else "from the start" if planned else "when it decays"


# -- Which records may be fitted or compared together ----------------------------------------------

VARIED = (  # settings that an experiment may vary
    "n_embd n_expert total_tokens batch_size seed data_seed schedule lr power_a power_b average "
    "decay_tokens shape standard"
).split()
KIND = "schedule", "average", "decay_shape"  # of a decay
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


def only(records: list[dict], choices: list | tuple) -> list[dict]:
    """The records that agree with every FIELD=V,V,.... Raises ValueError if none does."""
    for choice in choices:
        name, _, text = choice.partition("=")
        values = []
        for word in text.split(","):
            try:
                values.append(json.loads(word))  # 0 then equals 0.0, and null None
            except json.JSONDecodeError:
                values.append(word)
        records = [r for r in records if r.get(name) in values]
        if not records:
            raise ValueError(f"{choice}: no such records; is it FIELD=VALUE,...?")
    return records


def read_records(paths: list[Path], choices: list | tuple = ()) -> list[dict]:
    """Read all runs under these folders that agree with the choices, without duplicates.

    Raises FileNotFoundError if a folder has no records, ValueError if their settings differ.
    """
    found = []
    for path in paths:
        some = records_in(path)
        if not some:
            raise FileNotFoundError(f"{path}: no records; give the folder of a sweep")
        found += some
    found = [complete(r) for r in only(found, choices)]
    # If both scales of attention occur, the sweep is `transfer`, with and without muP
    all_standard = all(is_standard(r) for r in found)
    found = [r | {"standard": is_standard(r) and not all_standard} for r in found]
    found = [r | {"shape": shape_of(r)} for r in found]
    check_same_settings(found)
    names = [*VARIED, "decay_shape", "min_lr_ratio"]  # the other settings are all equal
    return list({tuple(map(r.get, names)): r for r in found}.values())


def check_same_settings(records: list[dict]) -> None:
    """Raise ValueError if records differ in a setting that no experiment varies.

    Decays of one kind must take the same number of tokens, the same share of the run, or all of it
    after the same number of tokens.
    """
    first_of, decays = {}, {}
    compared = len({r["schedule"] for r in records}) > 1
    varied = VARIED + ["decay_shape", "min_lr_ratio"] * compared
    for r in records:
        first = first_of.setdefault(r["shape"], r)
        different = differs(r, first, varied) + differs(r, records[0], varied + OF_A_SHAPE)
        if different:
            raise ValueError(f"runs with different {different[0]}; fit them separately (--only)")
        decay, kind = r.get("decay_tokens", 0), tuple(map(r.get, KIND))
        share, start = round(decay / r["total_tokens"], 3), r["total_tokens"] - decay
        decays.setdefault(kind, []).append((decay, share, start))
    for some in decays.values():
        if all(len(set(values)) > 1 for values in zip(*some)):  # tokens, share, start all vary
            raise ValueError("runs with different decay_tokens; fit them separately (--only)")


def loss_of(record: dict, name: str | None = None) -> float:
    """A loss of a record, infinite if the run diverged.

    By default val_loss, or that of the averaged weights if the average replaces the decay.
    """
    replaced = record.get("average") and not record["decay_tokens"]
    name = name or ("average_val_loss" if replaced else "val_loss")
    return math.inf if record["diverged"] else record[name]


def cell_of(record: dict) -> tuple[str, int, int]:
    return record["shape"], record["total_tokens"], record["batch_size"]


# -- The comparison --------------------------------------------------------------------------------


def key_of(fields: dict) -> tuple:
    """What tells a run from the others of its cell and seed, in a record or in fields_of a line."""
    knobs = ("power_a", "power_b") if fields["schedule"] == "power" else ("lr",)
    names = "schedule", "decay_shape", "min_lr_ratio", "average", *knobs
    return tuple(fields[name] for name in names)


def comparison(records: list[dict]) -> tuple[dict, dict]:
    """Return {line: {cell: {seed: loss}}} and {line: {seed: tuned learning rate}}.

    Only cells that have all their runs. Raises ValueError if there is none.
    """
    losses = {(cell_of(r), r["seed"], key_of(r)): loss_of(r) for r in records}
    tuning = {cell for cell, seed, _ in losses if seed >= TUNING}
    if not tuning:
        raise ValueError(f"no runs tuned the schedules (seeds {TUNING} and up)")
    first = min(tuning, key=lambda cell: cell[1])  # the shortest
    tuned_at = first[2], records[0]["seq_len"], first[1]
    trials = [r for r in records if r["seed"] >= TUNING and cell_of(r) == first]
    rates = {r["lr"] for r in trials if WSD.items() <= r.items()}

    def loss(name: str, lr: float, cell: tuple, seed: int) -> float | None:
        fields = fields_of(LINES[name], lr, cell[2], cell[1], tuned_at)
        return losses.get((cell, seed, key_of(fields)))

    def tuned(name: str, seed: int) -> float:
        cells = [(cell, TUNING + 2 * seed + i) for cell in tuning for i in (0, 1)]
        tried = {lr: [loss(name, lr, *cell) for cell in cells] for lr in sorted(rates)}
        if any(None in some for some in tried.values()):
            raise ValueError(f"{name} lacks trials of seed {seed}; is the sweep still running?")
        return min(tried, key=lambda lr: sum(tried[lr]))

    seeds = sorted({seed for _, seed, _ in losses if seed < TUNING})
    best = {name: {seed: tuned(name, seed) for seed in seeds} for name in LINES}
    at = lambda name, cell: {seed: loss(name, best[name][seed], cell, seed) for seed in seeds}
    cells = {cell for cell, seed, _ in losses if seed < TUNING}
    whole = [cell for cell in sorted(cells, key=lambda cell: (len(cell[0]), cell))
             if all(None not in at(name, cell).values() for name in LINES)]  # fmt: skip
    if not whole:
        raise ValueError("no cell of the comparison has all its runs; is the sweep still running?")
    return {name: {cell: at(name, cell) for cell in whole} for name in LINES}, best


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

    A draw takes the seeds again, with replacement, and the columns (shape and batch size), because
    all runs of a seed share its tuning, and all T of a column share trunks.
    """
    seeds = sorted(set.intersection(*(one[cell].keys() & other[cell].keys() for cell in cells)))
    gap = np.array([[one[cell][seed] - other[cell][seed] for seed in seeds] for cell in cells])
    column_of = [(shape, batch_size) for shape, _, batch_size in cells]
    columns, rng = sorted(set(column_of)), np.random.default_rng(0)
    times = lambda n: rng.multinomial(n, np.full(n, 1 / n), size=DRAWS)
    of_cell = times(len(columns))[:, [columns.index(column) for column in column_of]]
    of_seed = times(len(seeds))
    total = np.einsum("dc,ds,cs->d", of_cell, of_seed, gap)
    return np.append(gap.mean(), total / (of_cell.sum(axis=1) * of_seed.sum(axis=1)))
