"""Read the records of runs, and compare their settings."""

import contextlib
import csv
import json
import sys
from pathlib import Path

# These fields only change how we compute and report a run. --resume accepts new values
RUNTIME_FLAGS = set("""
    device compile recompute micro_batch_size save_every keep_checkpoints
    log_every eval_every eval_tokens out
""".split())
# A record holds the config of a run, its results and where it was made. Two runs with the same
# settings have the same loss. All fields are settings, except these:
NOT_SETTINGS = RUNTIME_FLAGS | set("""
    preset data tokenizer
    command started parent git_commit git_dirty python torch numpy platform device_name threads
    processes seconds tokens_per_second tokens diverged n_params n_active_params
""".split())  # `fingerprint` stands for the data
RESULT_PREFIXES = ("val_", "average_val_", "epochs_")

# Settings that older records lack. A new config field needs its default here, or fits mix runs
DEFAULTS = dict(average=False, router_rule="hidden", decay_data=None, batch_ramp=None)


def settings(record: dict, without=()) -> dict:
    """The fields of a record, or of vars(config), that determine its loss, `without` some."""
    skip = NOT_SETTINGS.union(without)
    kept = [name for name in record if name not in skip and not name.startswith(RESULT_PREFIXES)]
    return {name: record[name] for name in kept}


def identity(record: dict, without=()) -> frozenset:
    """The settings as one value, equal for equal runs."""
    return frozenset(settings(record, without).items())


def differs(record: dict, other: dict, without=()) -> list[str]:
    """Names of the settings that both records have, with different values."""
    one, two = settings(record, without), settings(other)
    return [name for name in one if name in two and one[name] != two[name]]


def records_in(path: Path) -> list[dict]:
    """All records at or under a path, in records.jsonl of sweeps and record.json of single runs.

    Older records get defaults for newer fields. We report and skip a torn line, which a process
    leaves if killed while writing.
    """
    found = [*path.rglob("records.jsonl"), *path.rglob("record.json")]
    records = []
    for file in [path] if path.is_file() else sorted(found):
        text = file.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines() if file.suffix == ".jsonl" else [text]
        for i, line in enumerate(lines, 1):
            try:
                record = DEFAULTS | json.loads(line)
            except (json.JSONDecodeError, TypeError):
                print(f"{file}: line {i} is not a whole record, so we ignore it", file=sys.stderr)
                continue
            records.append({"final_eval_tokens": record.get("eval_tokens")} | record)
    return records


def read_metrics(run: Path) -> list[dict]:
    """The whole lines of metrics.jsonl by tokens. If a resumed run repeats one, the last counts."""
    found = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
            metrics = json.loads(line)
            found[metrics["tokens"], "val_loss" in metrics] = metrics
    return [found[at] for at in sorted(found)]


def read_table(path: Path, columns: str, seq_len: float | None) -> list[dict]:
    """Rows of a CSV file with our names. columns: 'lr=LR,batch_size=BS,...', ours and theirs.

    An empty loss is that of a diverged run. Raises ValueError for a wrong column or cell.
    """
    names = dict(pair.partition("=")[::2] for pair in columns.split(",") if pair)
    more = {} if seq_len is None else {"seq_len": seq_len}
    rows = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for name, column in names.items():
            if column not in (reader.fieldnames or ()):
                has = ", ".join(reader.fieldnames or ())
                raise ValueError(f"--columns {name}={column}: {path} has only {has}")
        if "val_loss" not in names:
            raise ValueError("--columns: needs lr, total_tokens, batch_size and val_loss")
        for line in reader:
            row = {name: line[column] for name, column in names.items()}
            try:
                numbers = {n: float(row[n] or "nan") for n in row.keys() - {"shape", "schedule"}}
            except (TypeError, ValueError):
                raise ValueError(f"{path}, line {reader.line_num}: not numbers, {row}") from None
            rows.append(row | numbers | more)
    return rows
