"""The records of runs: what they hold, which runs are equal, and which fit together.

A record is a dict of three dicts:

- `config`: all settings of the run, the fields of config.TrainConfig,
- `results`: its losses, size and speed. `loss` is the validation loss that counts,
- `origin`: where, when and with which code and text it was made.

train.py writes a record as record.json, and sweep.py writes one per line of
records.jsonl. A settings.json beside it has the same parts, and holds what all lines
share. To analyze runs, use `read_rows`, which gives every run as one flat dict.

    python records.py runs    a table of all records below a folder
"""

import contextlib
import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from config import runtime_fields
from schedules import PAPER_SEQ_LEN, READ_BY_SOME, unread
from tools import files, flags, tables
from tools.flags import UserError

# -- Equal runs --------------------------------------------------------------------------

# Fields that only name what other fields say, or the fingerprint of the text
NAMES = {"preset", "decay_share", "data", "tokenizer"}


def settings(config: dict, without=()) -> dict:
    """The fields of a config that determine the loss of a run on a given text.

    All but those that its schedule does not read, and those in `without`. A field of a
    fork counts, too.
    """
    skip = runtime_fields(config) | NAMES | set(without) | unread(config["schedule"])
    return {name: value for name, value in config.items() if name not in skip}


def identity(config: dict, without=()) -> frozenset:
    """The settings as one value, equal for equal runs on one text."""
    return frozenset(settings(config, without).items())


def differing(one: dict, other: dict) -> list[str]:
    """Names of the settings that differ, or that only one side has."""
    names = [*one, *(name for name in other if name not in one)]
    return [
        name
        for name in names
        if (name in one) != (name in other) or one.get(name) != other.get(name)
    ]


# -- Reading records ---------------------------------------------------------------------

PARTS = ("config", "results", "origin")


def read_records(path: Path, columns: dict | None = None) -> list[dict]:
    """All records at or below a path, in records.jsonl of sweeps and record.json of runs.

    [] if nothing is there. columns: of a CSV file, see read_table. Raises UserError for
    a line that is not a record.
    """
    if is_table(path):
        return read_table(path, columns or {})
    if path.is_file():
        return read_file(path)
    below = files.all_files(path) if path.exists() else []
    single = []
    for file in below:
        if file.name == "record.json":
            single += read_file(file)
    records = list(single)
    for file in below:
        if file.name == "records.jsonl":
            # a sweep may have moved a record into its file since we read it
            records += [record for record in read_file(file) if record not in single]
    return records


def read_file(file: Path) -> list[dict]:
    """The records in a file, one per line in records.jsonl.

    We report and skip a torn line, which a process leaves if killed while writing. Raises
    UserError for a line that is not a record.
    """
    shared = read_shared(file.with_name("settings.json"))
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:  # a sweep has moved it since we listed it
        return []
    records = []
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    for i, line in enumerate(lines, 1):
        try:
            records.append(as_record(json.loads(line), shared))
        except json.JSONDecodeError:
            warning = f"{file}: line {i} is not a whole record, so we ignore it"
            print(warning, file=sys.stderr)
        except ValueError as error:
            raise UserError(f"{file}: line {i}: {error}") from None
    return records


def read_shared(file: Path) -> dict:
    """What all lines beside a settings.json share, {} without one."""
    if not file.exists():
        return {}
    try:
        return as_parts(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{file}: damaged ({error})") from None


def as_record(line: dict, shared: dict) -> dict:
    """A record from a line of records.jsonl, with the settings that all its lines share.

    A flat line is a row of a table from elsewhere. Raises UserError if it is neither.
    """
    if isinstance(line, dict) and not any(part in line for part in PARTS):
        return record_of_row(line)
    own = as_parts(line)
    record = {part: shared.get(part, {}) | own[part] for part in PARTS}
    check_numbers(record["config"])
    check_results(record["results"])
    return record


def as_parts(content: dict) -> dict[str, dict]:
    """The three parts of a record, perhaps empty. Raises UserError if they are not dicts."""
    if isinstance(content, dict):
        parts = {part: content.get(part, {}) for part in PARTS}
        if all(isinstance(values, dict) for values in parts.values()):
            return parts
    raise UserError("not a record, which has config, results and origin")


def check_results(results: dict) -> None:
    """Raise UserError if the results of a record lack its loss."""
    for name in ("loss", "diverged"):
        if name not in results:
            raise UserError(f"a record has no {name}")
    loss = results["loss"]
    is_lost = loss is None and results["diverged"]
    if not isinstance(loss, (int, float)) and not is_lost:
        raise UserError(f"a record has loss {loss!r}, but did not diverge")


def record_of_row(row: dict) -> dict:
    """A row of a table from elsewhere as a record. Columns without a value do not count.

    All columns are settings, but for the loss, the fingerprint of the text, and `state`.
    """
    # 1. Its results
    loss = row.get("val_loss", row.get("loss"))
    if not isinstance(loss, (int, float, np.number, type(None))):
        raise UserError(f"a record has val_loss {loss!r}; a fit needs a number or null")
    diverged = row.get("diverged", False) or loss is None or not math.isfinite(loss)
    results = {"loss": loss, "diverged": diverged}
    if "val_loss" in row:
        results["val_loss"] = loss

    # 2. Its origin, and everything else as settings
    skip = {"loss", "val_loss", "diverged"}
    row = {name: x for name, x in row.items() if x is not None and name not in skip}
    origin = {name: row.pop(name) for name in ("fingerprint", "state") if name in row}
    config = {"seq_len": PAPER_SEQ_LEN, "seed": 0, "schedule": "wsd"} | row
    if "batch_size" not in config and "batch_tokens" in config:
        config["batch_size"] = config.pop("batch_tokens") / config["seq_len"]
    check_numbers(config)
    return {"config": config, "results": results, "origin": origin}


def is_table(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


# columns of a table from elsewhere. Others need --columns
NEEDED = ("lr", "total_tokens", "val_loss")
NUMBERS = ("lr", "total_tokens", "val_loss", "batch_size", "batch_tokens", "seq_len")
WORDS = ("seed", "shape", "state")
NO_LOSS = ("", "nan", "none", "null", "inf", "-inf", "infinity", "-infinity")


def read_table(path: Path, columns: dict[str, str]) -> list[dict]:
    """The records of the runs in a CSV file. columns: our names -> theirs.

    A run without a finite loss has diverged. Raises UserError, naming the row.
    """
    records = []
    seen: dict = {}  # the settings of a run -> its row
    for i, texts in tables.read_csv(path, columns, NUMBERS + WORDS, NEEDED):
        state = texts.pop("state", "finished").lower()
        if state != "finished":  # perhaps without its numbers
            records.append({"config": {}, "results": {}, "origin": {"state": state}})
            continue
        if "batch_size" in texts:
            texts.pop("batch_tokens", None)
        try:
            record = record_of_row({name: value_of(name, x) for name, x in texts.items()})
        except UserError as error:
            raise UserError(f"{path}: row {i}: {error}") from None
        run = identity(record["config"])
        if run in seen:
            raise UserError(
                f"{path}: rows {seen[run]} and {i} are the same run; keep one, or name "
                "the column of their seed, as in --columns seed=run_seed"
            )
        seen[run] = i
        records.append(record)
    return records


def value_of(name: str, text: str) -> float | str | None:
    """The value of a cell, None for a loss that is not finite. Raises UserError."""
    if name == "val_loss" and text.lower() in NO_LOSS:
        return None
    if name == "seed" and text.isdecimal():
        return int(text)  # the same seed as in a folder of ours
    if name in WORDS:
        return text
    try:
        return float(text)
    except ValueError:
        if name in NUMBERS:
            raise UserError(f"{name} is {text!r}, not a plain number") from None
        return text


def check_numbers(config: dict) -> None:
    """Raise UserError if a config lacks a number that a fit needs."""
    numbers = ["total_tokens", "batch_size", "seq_len"]
    numbers += tuned_fields(config.get("schedule"))
    for name, value in config.items():
        if isinstance(value, (dict, list)):
            raise UserError(f"a record has {name} {value!r}, not a number or a word")
    for name in ("seed", "decay_tokens"):
        if config.get(name, 0) is None:
            raise UserError(f"a record has {name} null")
    for name in numbers:
        if name not in config:
            raise UserError(f"a record has no {name}; a fit needs one (see fit.law_of)")
        value = config[name]
        is_number = isinstance(value, (int, float, np.number)) and math.isfinite(value)
        if not is_number or (value <= 0 and name != "power_b"):
            raise UserError(
                f"a record has {name} {value!r}; a fit needs a number (see fit.law_of)"
            )


def tuned_fields(schedule: str) -> tuple[str, ...]:
    """The fields that set the learning rate of a schedule."""
    return ("power_a", "power_b") if schedule == "power" else ("lr",)


# -- Rows for analysis -------------------------------------------------------------------

# in the name of a shape whose scale of attention is not that of μP
STANDARD = ", standard"


def shape_of(config: dict) -> str:
    """The name of a shape, made of width, experts and parametrization unless it has one."""
    if "shape" in config or "n_embd" not in config:
        return config.get("shape", "one shape")
    name = f"width {config['n_embd']}"
    if config.get("n_expert"):
        name += f", {config['n_expert']} experts"
    # 1 / d_head, the scale of attention under μP
    mup = config.get("n_head", 0) / config["n_embd"]
    if not math.isclose(config.get("attention_multiplier") or mup, mup):
        name += STANDARD
    return name


def row(record: dict) -> dict:
    """A run as one flat dict: its settings, results, shape and the fingerprint of its text.

    `loss` is infinite if the run diverged.
    """
    flat = record["config"] | record["results"]
    flat["shape"] = shape_of(record["config"])
    flat["fingerprint"] = record["origin"].get("fingerprint")
    if flat.get("diverged"):
        flat["loss"] = math.inf
    return flat


def rows_of(table: list[dict]) -> list[dict]:
    """The rows of finished runs in a table from elsewhere, with the columns that ours have."""
    records = [record_of_row(r) for r in table]
    return [row(record) for record in finished(records)]


def cell_of(row: dict) -> tuple[str, int, int]:
    return row["shape"], row["total_tokens"], row["batch_size"]


def narrow_first(cell: tuple) -> tuple:
    """A key that sorts cells by shape, with width 64 before 128."""
    return len(cell[0]), cell


def read_rows(
    paths: list[Path], choices: list | tuple = (), columns: str = ""
) -> list[dict]:
    """Rows of all runs under these folders that agree with the choices, without duplicates.

    choices: as in ["weight_decay=0,0.1"]. columns: of a CSV file, as in "lr=rate". Raises
    UserError if a folder has no records, or if their settings differ.
    """
    theirs = tables.parse_columns(columns)
    if theirs and not any(map(is_table, paths)):
        raise UserError(f"--columns {columns}: only for a CSV file")
    records = []
    for path in paths:
        some = read_records(path, theirs)
        if not some:
            raise UserError(f"{path}: no records; give the folder of a sweep")
        records += some
    records = finished(only(records, choices))
    # a run that diverged lacks its loss, but not all runs
    if not any("val_loss" in r["results"] for r in records):
        names = ", ".join(map(str, paths))
        raise UserError(f"{names}: no record has a val_loss; a fit needs it")
    check_same_settings(records)
    rows = [row(r) for r in without_repeats(records)]
    if all(STANDARD in r["shape"] for r in rows):  # a sweep of them, unlike `transfer`
        rows = [r | {"shape": r["shape"].removesuffix(STANDARD)} for r in rows]
    return rows


def only(records: list[dict], choices: list | tuple) -> list[dict]:
    """The records that agree with every FIELD=V,V,.... Raises UserError if none does."""
    for choice in choices:
        name, _, text = choice.partition("=")
        values = [text, *text.split(",")]  # a mixture contains commas itself
        for word in text.split(","):
            with contextlib.suppress(json.JSONDecodeError):
                values.append(json.loads(word))  # 0 then equals 0.0, and null None
        records = [r for r in records if row(r).get(name) in values]
        if not records:
            raise UserError(f"{choice}: no such records; is it FIELD=VALUE,...?")
    return records


def finished(records: list[dict]) -> list[dict]:
    """The records of finished runs. Tables from elsewhere may have a `state` for every run.

    A crashed run keeps its last loss, which looks like the loss of a poor learning rate.
    """
    others = Counter()
    found = []
    for record in records:
        state = str(record["origin"].get("state", "finished")).lower()
        if state == "finished":
            found.append(record)
        else:
            others[state] += 1
    if others:
        counts = ", ".join(f"{n:,} {state}" for state, n in others.items())
        print(f"left out {others.total():,} runs that did not finish: {counts}")
    return found


# -- Records that fit together -----------------------------------------------------------

# settings that an experiment may vary
VARIED = set(
    "n_embd n_expert total_tokens batch_size seed data_seed schedule lr power_a power_b "
    "average decay_tokens shape".split()
)
# settings that only a comparison varies
OF_A_LINE = {"decay_shape", "min_lr_ratio", "power_q"}
# settings that only differ between shapes
OF_A_SHAPE = set(
    "n_layer n_head n_kv_head n_ffn n_expert_active m_width m_emb m_res init_std "
    "logits_scaling attention_multiplier micro_batch_size".split()
)


def check_same_settings(records: list[dict]) -> None:
    """Raise UserError if records differ in a setting that no experiment varies.

    We compare every record with the first of all, of its shape, and of its schedule.
    Decays of one kind must take the same share of the run, or the same number of tokens.
    """
    n_schedules = len({r["config"]["schedule"] for r in records})
    varied = VARIED | OF_A_LINE if n_schedules > 1 else VARIED
    first: dict = {}  # group of records -> its first
    by_decay: dict = {}
    for r in records:
        config = r["config"]
        schedule = config["schedule"]
        for group in ("all", ("shape", shape_of(config)), ("schedule", schedule)):
            check_pair(first.setdefault(group, r), r, varied)
        decay = schedule, config.get("average"), config.get("decay_shape")
        by_decay.setdefault(decay, []).append(r)
    for some in by_decay.values():
        check_decays(some)


def check_pair(one: dict, other: dict, varied: set[str]) -> None:
    """Raise UserError if two records differ in their text, or a setting outside `varied`.

    Two shapes may differ in what makes a shape, and two schedules in what one of them
    does not read.
    """
    pair = one, other
    varied = varied.union(*(unread(r["config"]["schedule"]) for r in pair))
    if shape_of(one["config"]) != shape_of(other["config"]):
        varied |= OF_A_SHAPE
    compared = []
    for r in pair:
        text = {"fingerprint": r["origin"].get("fingerprint")}
        compared.append(settings(r["config"], varied) | text)
    names = differing(*compared)
    if names:
        raise UserError(f"runs with different {names[0]}; fit them separately (--only)")


def check_decays(records: list[dict]) -> None:
    """Raise UserError if decays differ in their tokens and in their share of the run."""
    tokens = set()
    shares = set()
    for r in records:
        decay = r["config"].get("decay_tokens", 0)
        tokens.add(decay)
        share = r["config"].get("decay_share")
        if share is None:
            share = round(decay / r["config"]["total_tokens"], 3)
        shares.add(share)
    if len(tokens) > 1 and len(shares) > 1:
        raise UserError("runs with different decay_tokens; fit them separately (--only)")


def without_repeats(records: list[dict]) -> list[dict]:
    """The records of different runs. Of equal runs the last counts, and we report how many."""
    last: dict = {}
    gaps = []
    for r in records:
        run = identity(r["config"])
        if run in last:
            one = row(last[run])["loss"]
            other = row(r)["loss"]
            gaps.append(0.0 if one == other else abs(one - other))  # also if both are inf
        last[run] = r
    if gaps:
        print(
            f"{len(gaps):,} runs are repeated, with losses that differ by up to "
            f"{max(gaps):.4f}; the last of each counts"
        )
    return list(last.values())


# -- A table of runs ---------------------------------------------------------------------


def varying(records: list[dict]) -> list[str]:
    """Names of the settings in which runs differ, besides size and what every table has."""
    skip = OF_A_SHAPE | {"schedule", "total_tokens", "batch_size", "lr", "power_a"}
    skip |= {"n_embd", "n_expert", "seed", "data_seed", "shape"}
    columns: dict = {}
    for r in records:
        shown = settings(r["config"], skip)
        if r["config"].get("decay_share") is not None and "decay_tokens" in shown:
            shown["decay_share"] = r["config"]["decay_share"]
            del shown["decay_tokens"]  # they follow
        for name, value in shown.items():
            columns.setdefault(name, []).append(str(value))
    found = []
    for name, values in columns.items():
        some_lack_it = len(values) < len(records) and name not in READ_BY_SOME
        if len(set(values)) > 1 or some_lack_it:
            found.append(name)
    return found


def print_table(records: list[dict]) -> None:
    """Print a line for every run, with a column for every setting that varies."""
    names = varying(records)
    table = [["schedule", "T", "batch", "lr or a", "seed", "loss", *names, "shape"]]
    for r in map(row, records):
        lr = r[tuned_fields(r["schedule"])[0]]
        cells = [r["schedule"], f"{r['total_tokens']:,.0f}", f"{r['batch_size']:g}"]
        cells += [f"{lr:.4g}", str(r["seed"]), f"{r['loss']:.4f}"]
        cells += [str(r.get(name, "")) for name in names]
        table.append([*cells, r["shape"]])
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(line, widths)]
        print("  ".join(cells[:-1]) + f"  {line[-1]}")


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("records.py", __doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of runs or sweeps")
    args = parser.parse_args(argv)
    try:
        records = []
        for folder in args.folders:
            records += finished(read_records(folder))
        if not records:
            raise UserError(f"{args.folders[0]}: no records")
    except (UserError, OSError) as error:
        return flags.fail("records.py", error)
    print_table(records)
    return 0


if __name__ == "__main__":
    flags.end_with_reader()
    sys.exit(main())
