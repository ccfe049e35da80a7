"""What the programs of this folder share: runs, intervals, and tables."""

import math
from pathlib import Path

import numpy as np

import sweep
from config import TrainConfig
from tools import files, rows
from tools.student import student

RESULTS = Path(__file__).parent / "results"


def read(folder: str) -> list[dict]:
    """The runs of a folder of results/, as rows for fit.py with their results.

    It has records.jsonl, with a line for every run, and settings.json, with what all of
    its runs share.
    """
    shared = {}
    for part in files.read_json(RESULTS / folder / "settings.json").values():
        shared |= part
    runs = []
    for record in files.read_records(RESULTS / folder / "records.jsonl"):
        runs.append(rows.row_of_record(shared, record) | record["results"])
    return runs


def row_of(cfg: TrainConfig, folder: Path) -> dict:
    """The row of a run in the folder of a sweep, with infinite loss if it is missing."""
    finished = sweep.finished(folder / f"{sweep.trunk_of(cfg)}.jsonl")
    nothing = {"config": vars(cfg), "results": {"val_loss": None}}
    record = finished.get(sweep.ending_of(vars(cfg)), nothing)
    return rows.row_of_record({}, record)


def over(values) -> list[float]:
    """The mean of some values, and the ends of its 95% interval by Student's t."""
    n = len(values)
    mean = float(np.mean(values))
    if n == 1:
        return [mean, math.nan, math.nan]
    half = student(n - 1) * np.std(values, ddof=1) / math.sqrt(n)
    return [mean, mean - half, mean + half]


def show(answer, form: str = ".3f") -> str:
    """(answer, low, high) -> '-0.278 [-0.374, -0.182]'"""
    value, low, high = (format(x, form) for x in answer)
    return value if low == "nan" else f"{value} [{low}, {high}]"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)
