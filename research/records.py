"""How we commit the records of an experiment: what all runs share, and a line for each."""

import platform
from pathlib import Path

import torch

from tools import files


def write_results(
    folder: Path, records: list[dict], command: str, fingerprint: str
) -> None:
    """Write settings.json and records.jsonl of runs that one command made on one text."""
    settings = {
        "origin": {
            "command": command,
            "torch": torch.__version__,
            "device_name": platform.machine(),
            "threads": 1,
            "fingerprint": fingerprint,
        }
    }
    for record in records:
        for field in ("val_bpb", "tokens"):  # which follow from others
            record["results"].pop(field, None)
    for part in ("config", "results"):
        settings[part] = {}
        for field, value in records[0][part].items():
            if all(record[part][field] == value for record in records):
                settings[part][field] = value
        for record in records:
            for field in settings[part]:
                del record[part][field]
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / "settings.json", settings)
    files.write_records(folder / "records.jsonl", records)
