"""TABLES.md is what the records give, and pages quote it as it is."""

import re
from pathlib import Path

import pytest

import tables
import train
from schedules import SCHEDULES
from smaller import tuned

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("research/*.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
TABLES = tables.PAGE.read_text(encoding="utf-8")
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"


def numbers(text: str) -> list[tuple[float, float]]:
    """(value, unit of its last digit) of every number in a text."""
    found = []
    for shown in re.findall(NUMBER, text):
        digits = shown.replace(",", "")
        found.append((float(digits), 10.0 ** -len(digits.partition(".")[2])))
    return found


def test_the_committed_tables_are_those_of_the_records():
    """Numbers may differ by one in the last digit, because processors round differently."""
    now = tables.text()
    assert re.split(NUMBER, now) == re.split(NUMBER, TABLES)
    for line, again in zip(TABLES.splitlines(), now.splitlines()):
        for (value, unit), (other, _) in zip(numbers(line), numbers(again), strict=True):
            assert abs(value - other) <= 1.001 * unit, (line, again)


def agree(quoted: str, cell: str) -> bool:
    """Does a text begin with the numbers of a cell, rounded?

    It may leave out the interval, and then also the sign.
    """
    shown, expected = numbers(quoted), numbers(cell)
    alone = not re.match(rf"{NUMBER} \[", quoted)
    if alone:
        expected = expected[:1]
        if quoted[0] not in "+-":
            expected = [(abs(value), unit) for value, unit in expected]
    if not expected or len(shown) < len(expected):
        return False
    for (value, unit), (of_cell, unit_of_cell) in zip(shown, expected):
        rounding = unit / 2 + unit_of_cell / 2 if unit > unit_of_cell else 0
        if unit < unit_of_cell or abs(value - of_cell) > rounding + 1e-9:
            return False
    return True


@pytest.mark.parametrize("page", PAGES)
def test_marked_numbers_are_those_of_the_tables(page):
    cells = tables.cells(TABLES)
    wrong = []
    for mark, rest in re.findall(r"<!--n:(.+?)-->(?=(.*))", PAGES[page]):
        cell = cells.get(tuple(mark.split(" / ")), "no such cell")
        quoted = re.sub(r"<!--.*?-->|\]\(.*?\)", "", rest)
        if not agree(quoted, cell):
            wrong.append(f"{mark} is {cell}, not {quoted[:30]}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_marked_tables_are_those_of_the_tables(page):
    """Row by row, but a page may leave out the last columns."""
    sections = {part.partition("\n")[0]: part for part in TABLES.split("\n## ")[1:]}
    for name, rows in re.findall(
        r"<!--t:(.+?)-->\n.*\n\|---.*\n((?:\|.*\n)+)", PAGES[page]
    ):
        found = [line.removesuffix("|") for line in rows.splitlines()]
        lines = sections[name].splitlines()
        assert [row for row in found if not any(x.startswith(row) for x in lines)] == []


@pytest.mark.parametrize(
    "quoted, is_right",
    [
        ("-0.28 [-0.37, -0.18], and so on", True),
        ("-0.28 in 3 sweeps", True),
        ("0.28 below", True),
        ("-0.3", True),
        ("-0.27", False),
        ("-0.28 [-0.36, -0.18]", False),
        ("-0.278", False),
        ("none", False),
    ],
)
def test_a_quotation_may_round_and_leave_out_the_interval(quoted, is_right):
    assert agree(quoted, "-0.28 [-0.37, -0.18]") == is_right


def test_records_of_the_default_run_have_the_settings_of_its_preset():
    best = tuned()
    for r in (*best["power"], *best["wsd"]):
        cfg = train.make_config(preset="laptop", schedule=r["schedule"])
        names = SCHEDULES[r["schedule"]].reads
        names = names | {"total_tokens", "batch_size", "n_layer", "n_embd", "n_expert"}
        recorded = {name: r[name] for name in names}
        assert recorded == {name: getattr(cfg, name) for name in names}
