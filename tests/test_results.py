"""results/README.md describes every folder and every column of the committed records."""

import json
import re
from collections import Counter
from pathlib import Path

from test_readme import links

RESULTS = Path(__file__).parent.parent / "results"
PAGE = RESULTS / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")
GROWING = "growing"  # in place of the counts of an experiment that still runs


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def all_rows(name: str) -> list[dict]:
    return [row for file in sorted(RESULTS.rglob(name)) for row in rows(file)]


def columns(heading: str) -> set[str]:
    """The names in the first column of the tables below a heading."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.M)
    return set(re.findall(r"`(\w+)`", " ".join(cells)))


def test_every_folder_is_listed_with_its_counts():
    listed = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (\w+) \|", TEXT, re.M)
    folders = {file.relative_to(RESULTS).parts[0] for file in RESULTS.rglob("*.jsonl")}
    assert sorted(name for name, *_ in listed) == sorted(folders)
    for name, *shown in listed:
        found = Counter()
        for file in (RESULTS / name).rglob("*.jsonl"):
            found[file.name] += len(rows(file))
        if shown != [GROWING, GROWING]:
            counts = [found["records.jsonl"], found["curves.jsonl"]]
            assert shown == list(map(str, counts)), name


def test_every_column_of_the_records_is_described():
    found = set().union(*all_rows("records.jsonl"))
    assert columns("Columns of records.jsonl") == found


def test_every_column_of_the_curves_is_described():
    found = all_rows("curves.jsonl")
    lists = set().union(*(row.get("curve", {}) for row in found))
    lone = {"run", "tokens", "val_loss", "average_val_loss"}  # of curves-laptop
    assert columns("Columns of curves.jsonl") == lists | {"curve"}
    settings = set().union(*found) - {"curve"}
    assert settings <= columns("Columns of records.jsonl")
    assert {name for row in found if "curve" not in row for name in row} == lone
    merged = set().union(*all_rows("merged.jsonl"))
    assert merged == {"run", "shape", "val_loss"}
    assert all(f"`{name}`" in TEXT for name in lone | merged)


def test_the_lines_of_the_page_read_the_records(monkeypatch):
    monkeypatch.chdir(RESULTS.parent)
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", TEXT, re.S)[1], names)
    assert names["best"]["val_loss"] == min(r["val_loss"] for r in names["records"])


def test_every_link_leads_to_a_file():
    assert [str(file) for file, _ in links(PAGE) if not file.exists()] == []
