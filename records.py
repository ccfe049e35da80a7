"""The records of runs: the loss of a record, equal runs, and records that fit together.

A record is a flat dict: the config of a run, its results, and where it was made. train.py
writes one as record.json, sweep.py one per line of records.jsonl.

    python records.py runs    a table of all records below a folder
"""

import contextlib
import dataclasses
import json
import math
import shlex
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import config
from schedules import PAPER_SEQ_LEN, SCHEDULES, is_planned, unread
from tools import flags
from tools.flags import UserError

# -- Equal runs --------------------------------------------------------------------------

RESULTS = set(  # everything in a record except the fields of its config
    """
    command started resumed parent git_commit git_dirty python torch numpy platform device_name
    threads processes seconds tokens_per_second tokens diverged n_params n_active_params
""".split()
)
RESULT_PREFIXES = ("val_", "average_val_", "epochs_")
NOT_SETTINGS = RESULTS | config.names("runtime") | config.names("alias")


def settings(record: dict, without=()) -> dict:
    """The fields of a record, or of vars(config), that determine its loss, `without` some.

    That is all of its config but for fields that its schedule does not read. The name of
    the data is an alias, and the `fingerprint` of a record identifies the text. An
    unknown field is from a fork, and counts unless it is None.
    """
    skip = NOT_SETTINGS | set(without)
    if record.get("schedule") in SCHEDULES:
        skip |= unread(record["schedule"])
    return {
        name: value
        for name, value in record.items()
        if name not in skip
        and not name.startswith(RESULT_PREFIXES)
        and not (value is None and name not in config.FIELDS)
    }


def identity(record: dict, without=()) -> frozenset:
    """The settings as one value, equal for equal runs."""
    return frozenset(settings(record, without).items())


def differs(record: dict, other: dict, without=()) -> list[str]:
    """Names of the settings that both records have, with different values."""
    one = settings(record, without)
    two = settings(other)
    return [name for name in one if name in two and one[name] != two[name]]


# -- Reading a record --------------------------------------------------------------------


def uses_average(record: dict) -> bool:
    """Does the average of the weights replace the decay in this run? Then it is the result.

    A planned schedule, such as a cosine, has no separate decay, because all of it is one.
    """
    if not record.get("average"):
        return False
    return not record["decay_tokens"] and not is_planned(record["schedule"])


def loss_of(record: dict) -> float:
    """Validation loss, of the averaged weights if they replace the decay; inf if it diverged."""
    if record["diverged"]:
        return math.inf
    return record["average_val_loss" if uses_average(record) else "val_loss"]


# in the name of a shape whose scale of attention is not that of μP
STANDARD = ", standard"


def shape_of(record: dict) -> str:
    """The name of a shape, made of width, experts and parametrization unless the row has one."""
    if "shape" in record or "n_embd" not in record:
        return record.get("shape", "one shape")
    name = f"width {record['n_embd']}"
    if record.get("n_expert"):
        name += f", {record['n_expert']} experts"
    # 1 / d_head, the scale of attention under μP
    mup = record.get("n_head", 0) / record["n_embd"]
    if not math.isclose(record.get("attention_multiplier") or mup, mup):
        name += STANDARD
    return name


def cell_of(record: dict) -> tuple[str, int, int]:
    return record["shape"], record["total_tokens"], record["batch_size"]


def narrow_first(cell: tuple) -> tuple:
    """A key that sorts cells by shape, with width 64 before 128."""
    return len(cell[0]), cell


def tuned_fields(schedule: str) -> tuple[str, ...]:
    """The fields that set the learning rate of a schedule."""
    return ("power_a", "power_b") if schedule == "power" else ("lr",)


def finished(rows: list[dict]) -> list[dict]:
    """The rows of finished runs. Tables from elsewhere may have a `state` for every run.

    A crashed run keeps its last loss, which looks like the loss of a poor learning rate.
    """
    others = Counter()
    found = []
    for row in rows:
        row = dict(row)
        state = str(row.pop("state", "finished")).lower()
        if state == "finished":
            found.append(row)
        else:
            others[state] += 1
    if others:
        counts = ", ".join(f"{n:,} {state}" for state, n in others.items())
        print(f"left out {others.total():,} runs that did not finish: {counts}")
    return found


def complete(row: dict) -> dict:
    """Add the defaults of fit.law to a row. Raises UserError if a field is missing."""
    row = {
        "seq_len": PAPER_SEQ_LEN,
        "seed": 0,
        "schedule": "wsd",
        "shape": shape_of(row),
    } | row
    if "batch_size" not in row and "batch_tokens" in row:
        row["batch_size"] = row.pop("batch_tokens") / row["seq_len"]
    for name in ("total_tokens", "batch_size", "seq_len", *tuned_fields(row["schedule"])):
        if name not in row:
            raise UserError(f"a record has no {name}; a fit needs one (see fit.law)")
        value = row[name]
        if not isinstance(value, (int, float, np.number)) or not (
            value > 0 or name == "power_b"
        ):
            raise UserError(
                f"a record has {name} {value}; a fit needs a number (see fit.law)"
            )
    loss = row.get("val_loss")
    if not isinstance(loss, (int, float, np.number, type(None))):
        raise UserError(f"a record has val_loss {loss!r}; a fit needs a number or null")
    row["diverged"] = row.get("diverged") or loss is None or not math.isfinite(loss)
    return row


# -- From a record back to a command -----------------------------------------------------


def flags_of(record: dict) -> str | None:
    """The flags of train.py for the model, the text and the training of a record.

    Values of the preset need no flag. We leave out fields that an experiment varies, except
    for the size of the model, and how much text a run validates on. None for a row from
    elsewhere.
    """
    if "preset" not in record:
        return None
    skip = VARIED - {"n_embd", "n_expert", "average"} | {"preset", "final_eval_tokens"}
    skip |= config.names("runtime") | unread(record["schedule"])
    if record.get("data") and "embedded" not in flags.parse_mixture(record["data"]):
        skip.add("tokenizer")  # the corpus has one

    # first the fields with a fixed default, because others follow from them, as n_ffn
    # from n_embd
    typed = {"preset": record["preset"]}
    for follows in (False, True):
        usual = vars(config.make_config(**typed, total_tokens=10**15))  # any warmup fits
        for field in dataclasses.fields(config.TrainConfig):
            name = field.name
            if name in skip or name not in record or (field.default is None) != follows:
                continue
            if record[name] != usual[name]:
                typed[name] = record[name]
    if record["preset"] == config.TrainConfig.preset:
        del typed["preset"]

    words = []
    for name, value in typed.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


# -- Records that fit together -----------------------------------------------------------

VARIED = set(  # settings that an experiment may vary
    """
    n_embd n_expert total_tokens batch_size seed data_seed schedule lr power_a power_b average
    decay_tokens shape
""".split()
)
OF_A_LINE = {"decay_shape", "min_lr_ratio"}  # settings that only a comparison varies
OF_A_SHAPE = set(  # settings that only differ between shapes
    """
    n_layer n_head n_kv_head n_ffn n_expert_active m_width m_emb m_res init_std logits_scaling
    attention_multiplier
""".split()
)


def records_in(path: Path) -> list[dict]:
    """All records at or under a path, in records.jsonl of sweeps and record.json of single runs.

    We report and skip a torn line, which a process leaves if killed while writing. Raises
    UserError for a CSV file.
    """
    if path.suffix == ".csv":
        raise UserError(
            f"{path}: a CSV file; make a records.jsonl of it, as in docs/elsewhere.md"
        )
    found = [path]
    if not path.is_file():
        found = sorted([*path.rglob("records.jsonl"), *path.rglob("record.json")])
    records = []
    for file in found:
        text = file.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines() if file.suffix == ".jsonl" else [text]
        for i, line in enumerate(lines, 1):
            try:
                records.append(as_record(line))
            except (json.JSONDecodeError, TypeError):
                print(
                    f"{file}: line {i} is not a whole record, so we ignore it",
                    file=sys.stderr,
                )
    return records


def as_record(line: str) -> dict:
    """Parse a record, with defaults for newer fields. Raises JSONDecodeError or TypeError."""
    record = config.LATER | json.loads(line)
    return {"final_eval_tokens": record.get("eval_tokens")} | record


def read_records(paths: list[Path], choices: list | tuple = ()) -> list[dict]:
    """Read all runs under these folders that agree with the choices, without duplicates.

    choices: as in ["weight_decay=0,0.1"]. Raises UserError if a folder has no records, or
    if their settings differ.
    """
    found = []
    for path in paths:
        some = records_in(path)
        if not some:
            raise UserError(f"{path}: no records; give the folder of a sweep")
        found += some
    chosen = finished(only(found, choices))
    names = ", ".join(map(str, paths))
    # a run that diverged may lack its loss, but not all runs
    if not any("val_loss" in r for r in chosen):
        raise UserError(f"{names}: no record has a val_loss; a fit needs it")
    try:
        found = [complete(r) for r in chosen]
    except UserError as error:
        raise UserError(f"{names}: {error}") from None
    if all(STANDARD in r["shape"] for r in found):  # a sweep of them, unlike `transfer`
        found = [r | {"shape": r["shape"].removesuffix(STANDARD)} for r in found]
    check_same_settings(found)
    return without_repeats(found)


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


def check_same_settings(records: list[dict]) -> None:
    """Raise UserError if records differ in a setting that no experiment varies.

    Decays of one kind must take the same number of tokens, the same share of the run, or
    all of it after the same number of tokens.
    """
    schedules = {r["schedule"] for r in records}
    varied = VARIED | OF_A_LINE if len(schedules) > 1 else VARIED
    check_equal(records, varied | OF_A_SHAPE)
    for shape in {r["shape"] for r in records}:
        check_equal([r for r in records if r["shape"] == shape], varied)
    decays: dict = {}
    for r in records:
        decay = r.get("decay_tokens", 0)
        share = round(decay / r["total_tokens"], 3)
        start = r["total_tokens"] - decay
        kind = r["schedule"], r.get("average"), r.get("decay_shape")
        decays.setdefault(kind, []).append((decay, share, start))
    for some in decays.values():
        tokens, shares, starts = map(set, zip(*some))
        if len(tokens) > 1 and len(shares) > 1 and len(starts) > 1:
            raise UserError(
                "runs with different decay_tokens; fit them separately (--only)"
            )


def check_equal(records: list[dict], varied: set[str]) -> None:
    """Raise UserError if a setting outside `varied` has two values in these records."""
    first: dict = {}
    for r in records:
        for name, value in settings(r, varied).items():
            if first.setdefault(name, value) != value:
                raise UserError(
                    f"runs with different {name}; fit them separately (--only)"
                )


def without_repeats(records: list[dict]) -> list[dict]:
    """The records of different runs. Of equal runs the last counts, and we report how many."""
    last: dict = {}
    gaps = []
    for r in records:
        # all else is equal
        run = tuple(r.get(name) for name in sorted(VARIED | OF_A_LINE))
        if run in last:
            equal = loss_of(last[run]) == loss_of(r)  # also if both diverged
            gaps.append(0.0 if equal else abs(loss_of(last[run]) - loss_of(r)))
        last[run] = r
    if gaps:
        print(
            f"{len(gaps):,} runs are repeated, with losses that differ by up to "
            f"{max(gaps):.4f}; the last of each counts"
        )
    return list(last.values())


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("records.py", __doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of runs or sweeps")
    args = parser.parse_args(argv)
    try:
        found = []
        for folder in args.folders:
            found += [complete(record) for record in records_in(folder)]
        if not found:
            raise UserError(f"{args.folders[0]}: no records")
    except (UserError, OSError) as error:
        return flags.fail("records.py", error)
    print("schedule             T  batch   lr or a  seed      loss  shape")
    for r in found:
        lr = r[tuned_fields(r["schedule"])[0]]
        row = (
            f"{r['schedule']:<10}{r['total_tokens']:>12,}{r['batch_size']:>7g}{lr:>10.4g}"
        )
        print(f"{row}{r['seed']:>6}{loss_of(r):>10.4f}  {r['shape']}")
    return 0


if __name__ == "__main__":
    flags.end_with_reader()
    sys.exit(main())
