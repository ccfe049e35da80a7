"""Read the records of runs, and decide which of them belong together."""

import contextlib
import json
import math
import sys
from pathlib import Path

import numpy as np

from tools.config import UserError

PAPER_SEQ_LEN = 4096  # the default of a row's seq_len, as in schedules.py

# These fields only change how we compute and report a run. --resume accepts new values
RUNTIME_FLAGS = set(
    """
    device compile recompute micro_batch_size save_every keep_checkpoints
    log_every eval_every eval_tokens out
""".split()
)
# A record holds the config of a run, its results and where it was made. Two runs with the same
# settings have the same loss. All fields are settings, except these:
NOT_SETTINGS = RUNTIME_FLAGS | set(
    """
    preset data tokenizer
    command started parent git_commit git_dirty python torch numpy platform device_name threads
    processes seconds tokens_per_second tokens diverged n_params n_active_params
""".split()
)  # `fingerprint` stands for the data
RESULT_PREFIXES = ("val_", "average_val_", "epochs_")

# Settings that older records lack. A new config field needs its default here, or fits mix runs
DEFAULTS = dict(average=False, router_rule="hidden", decay_data=None, batch_ramp=None, power_q=1.0)


# Power reads no lr, and only Power reads its fields, so presets may change what others do not read
OF_POWER = {"power_a", "power_b", "power_q", "lr_max"}


def settings(record: dict, without=()) -> dict:
    """The fields of a record, or of vars(config), that determine its loss, `without` some."""
    unread = {"lr"} if record.get("schedule") == "power" else OF_POWER
    skip = NOT_SETTINGS | unread | set(without)
    return {
        name: value
        for name, value in record.items()
        if name not in skip and not name.startswith(RESULT_PREFIXES)
    }


def identity(record: dict, without=()) -> frozenset:
    """The settings as one value, equal for equal runs."""
    return frozenset(settings(record, without).items())


def differs(record: dict, other: dict, without=()) -> list[str]:
    """Names of the settings that both records have, with different values."""
    one, two = settings(record, without), settings(other)
    return [name for name in one if name in two and one[name] != two[name]]


# -- Files -----------------------------------------------------------------------------------------


def records_in(path: Path) -> list[dict]:
    """All records at or under a path, in records.jsonl of sweeps and record.json of single runs.

    We report and skip a torn line, which a process leaves if killed while writing.
    """
    found = [*path.rglob("records.jsonl"), *path.rglob("record.json")]
    records = []
    for file in [path] if path.is_file() else sorted(found):
        text = file.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines() if file.suffix == ".jsonl" else [text]
        for i, line in enumerate(lines, 1):
            try:
                records.append(as_record(line))
            except (json.JSONDecodeError, TypeError):
                print(f"{file}: line {i} is not a whole record, so we ignore it", file=sys.stderr)
    return records


def as_record(line: str) -> dict:
    """Parse a record, with defaults for newer fields. Raises JSONDecodeError or TypeError."""
    record = DEFAULTS | json.loads(line)
    return {"final_eval_tokens": record.get("eval_tokens")} | record


def read_metrics(run: Path) -> list[dict]:
    """The whole lines of metrics.jsonl by tokens. If a resumed run repeats one, the last counts."""
    found = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
            metrics = json.loads(line)
            found[metrics["tokens"], "val_loss" in metrics] = metrics
    return [found[at] for at in sorted(found)]


# -- Which records may be fitted or compared together ----------------------------------------------

VARIED = (  # settings that an experiment may vary
    "n_embd n_expert total_tokens batch_size seed data_seed schedule lr power_a power_b average "
    "decay_tokens shape"
).split()
OF_A_LINE = ["decay_shape", "min_lr_ratio"]  # settings that only a comparison varies
OF_A_SHAPE = (  # settings that only differ between shapes
    "n_layer n_head n_kv_head n_ffn n_expert_active m_width m_emb m_res init_std logits_scaling "
    "attention_multiplier"
).split()
STANDARD = ", standard"  # in the name of a shape whose scale of attention is not that of μP


def knobs_of(fields: dict) -> tuple[str, ...]:
    """The fields that set the learning rate of a schedule."""
    return ("power_a", "power_b") if fields["schedule"] == "power" else ("lr",)


def complete(row: dict) -> dict:
    """Add defaults to a row, see fit.law. Raises UserError if a field is missing."""
    row = {"seq_len": PAPER_SEQ_LEN, "seed": 0, "schedule": "wsd", "shape": shape_of(row)} | row
    if "batch_size" not in row and "batch_tokens" in row:
        row["batch_size"] = row.pop("batch_tokens") / row["seq_len"]
    for name in ("total_tokens", "batch_size", "seq_len", *knobs_of(row)):
        value = row.get(name)
        if not isinstance(value, (int, float, np.number)) or not (value > 0 or name == "power_b"):
            raise UserError(f"a record has {name} {value}; a fit needs a number (see fit.law)")
    loss = row.get("val_loss")
    if not isinstance(loss, (int, float, np.number, type(None))):
        raise UserError(f"a record has val_loss {loss!r}; a fit needs a number or null")
    return row | {"diverged": row.get("diverged") or loss is None or not math.isfinite(loss)}


def shape_of(record: dict) -> str:
    """The name of a shape, made of width, experts and parametrization unless the row has one."""
    if "shape" in record or "n_embd" not in record:
        return record.get("shape", "one shape")
    experts = f", {record['n_expert']} experts" if record.get("n_expert") else ""
    mup = record.get("n_head", 0) / record["n_embd"]  # 1 / d_head, the scale of attention under μP
    standard = not math.isclose(record.get("attention_multiplier") or mup, mup)
    return f"width {record['n_embd']}{experts}" + STANDARD * standard


def only(records: list[dict], choices: list | tuple) -> list[dict]:
    """The records that agree with every FIELD=V,V,.... Raises UserError if none does."""
    for choice in choices:
        name, _, text = choice.partition("=")
        values = [text, *text.split(",")]  # a mixture contains commas itself
        for word in text.split(","):
            with contextlib.suppress(json.JSONDecodeError):
                values.append(json.loads(word))  # 0 then equals 0.0, and null None
        records = [r for r in records if r.get(name) in values]
        if not records:
            raise UserError(f"{choice}: no such records; is it FIELD=VALUE,...?")
    return records


def read_records(paths: list[Path], choices: list | tuple = ()) -> list[dict]:
    """Read all runs under these folders that agree with the choices, without duplicates.

    Raises UserError if a folder has no records, or if their settings differ.
    """
    some = {path: records_in(path) for path in paths}
    if empty := [path for path in paths if not some[path]]:
        raise UserError(f"{empty[0]}: no records; give the folder of a sweep")
    found = [complete(r) for r in only(sum(some.values(), []), choices)]
    if all(STANDARD in r["shape"] for r in found):  # a sweep of them, unlike `transfer`
        found = [r | {"shape": r["shape"].removesuffix(STANDARD)} for r in found]
    check_same_settings(found)
    return without_repeats(found)


def without_repeats(records: list[dict]) -> list[dict]:
    """The records of different runs. Of equal runs the last counts, and we report their losses."""
    last, gaps = {}, []
    for r in records:
        run = tuple(map(r.get, VARIED + OF_A_LINE))  # all other settings are equal
        if run in last and loss_of(last[run]) != loss_of(r):
            gaps.append(abs(loss_of(last[run]) - loss_of(r)))
        last[run] = r
    if gaps:
        print(
            f"{len(gaps):,} runs are there twice, with losses that differ by up to "
            f"{max(gaps):.4f}; the last one counts"
        )
    return list(last.values())


def check_same_settings(records: list[dict]) -> None:
    """Raise UserError if records differ in a setting that no experiment varies.

    Decays of one kind must take the same number of tokens, the same share of the run, or all of it
    after the same number of tokens.
    """
    first_of, decays = {}, {}  # first_of: kind of record -> the first of its kind
    varied = VARIED + OF_A_LINE * (len({r["schedule"] for r in records}) > 1)
    for r in records:
        shape, schedule = r["shape"], r["schedule"]
        different = []
        for kind in ((shape,), (shape, schedule)):
            different += differs(r, first_of.setdefault(kind, r), varied)
        for kind in ((), ("any shape", schedule)):
            different += differs(r, first_of.setdefault(kind, r), varied + OF_A_SHAPE)
        if different:
            raise UserError(f"runs with different {different[0]}; fit them separately (--only)")
        decay = r.get("decay_tokens", 0)
        kind = r["schedule"], r.get("average"), r.get("decay_shape")
        share, start = round(decay / r["total_tokens"], 3), r["total_tokens"] - decay
        decays.setdefault(kind, []).append((decay, share, start))
    for some in decays.values():
        if all(len(set(values)) > 1 for values in zip(*some)):  # tokens, share, start all vary
            raise UserError("runs with different decay_tokens; fit them separately (--only)")


def uses_average(config: dict) -> bool:
    """Does the average of the weights replace the decay in this run? Then it is the result.

    A cosine has no separate decay, because all of it is one.
    """
    if not config.get("average"):
        return False
    return not config["decay_tokens"] and config["schedule"] != "cosine"


def loss_of(record: dict) -> float:
    """Validation loss, of the averaged weights if they replace the decay; inf if it diverged."""
    name = "average_val_loss" if uses_average(record) else "val_loss"
    return math.inf if record["diverged"] else record[name]


narrow_first = lambda cell: (len(cell[0]), cell)  # an order of cells: width 64 before 128


def cell_of(record: dict) -> tuple[str, int, int]:
    return record["shape"], record["total_tokens"], record["batch_size"]
