"""The page to drag: its numbers are those of the tables, its lines those of schedules.py.

This reads the file, without a browser.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from conftest import cells_of
from schedules import Schedule, constant, cosine, decay, power_law, warmup

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/index.html").read_text(encoding="utf-8")


def block(name: str) -> str:
    """The text of a <script> with this id, which the page reads."""
    (text,) = re.findall(rf'<script type="\S+" id="{name}">\n(.*?)</script>', PAGE, re.S)
    return text


NUMBERS = json.loads(block("numbers"))
ROWS = {"Power, 50%": "power, 50%", "linear": "line"}  # others have the same name


def shown(row: dict) -> list[float]:
    return [row["difference"], row["low"], row["high"]]


def test_the_numbers_of_the_page_are_those_of_the_tables():
    page = (ROOT / "research/TABLES.md").read_text(encoding="utf-8")
    cells = {}
    for place, text in cells_of(page).items():
        cells[place] = [float(x) for x in re.findall(r"-?\d+\.\d+", text)]
    rows = {(row["line"], row["times"]): shown(row) for row in NUMBERS["rows"]}
    assert len(rows) == 3 * 6
    for (line, times), numbers in rows.items():
        column = f"{times} T0".removeprefix("1 ")
        assert numbers == cells["race", ROWS.get(line, line), column], (line, times)
    numbers = cells["b by decay", "linear to 0", "b"]
    assert shown(NUMBERS["b of a line"]) == numbers
    assert NUMBERS["b"]["linear"] == numbers[0]


def fill(name: str, **values) -> str:
    """The lines as the page fills them in."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values[match[1]]), block(name))


def rates(lines: str, steps: int) -> list[float]:
    """The learning rates of an optimizer that follows the lines by a LambdaLR."""
    names = {"optimizer": SGD([torch.zeros(1)], lr=1.0)}
    exec(lines + fill("lambda-lines"), names)
    (factor,) = names["scheduler"].lr_lambdas
    return [factor(step) for step in range(steps)]


def middles(schedule: Schedule, batch: int, steps: int) -> list[float]:
    return [schedule(batch * (step + 0.5)) for step in range(steps)]


SETTINGS = [  # lr, T0, batch, warm, T, share
    (0.0108, 164_000, 1_024, 33_000, 500_000, 0.3),
    (6e-4, 500_000_000, 491_520 * 16, 50_000_000, 5_000_000_000, 0.5),
    (0.003, 70_001, 2_001, 1, 150_003, 0.1),
]


@pytest.mark.parametrize("lr, T0, batch, warm, T, share", SETTINGS)
@pytest.mark.parametrize("b", [-0.3, 0])
def test_lines_for_a_trunk_are_power_and_wsd(lr, T0, batch, warm, T, share, b):
    trunk = warmup(power_law(lr * T0**-b, b, 1.0, lr_max=math.inf), warm)
    steps = T // batch
    values = dict(schedule="", lr=lr, T0=T0, b=b, batch=batch, warm=warm, trunk=1 - share)
    known = rates(fill("trunk-lines", T=T, **values), steps)
    expected = middles(decay(trunk, T, share * T, "linear"), batch, steps)
    assert known == pytest.approx(expected, rel=1e-12, abs=1e-12 * lr)
    unknown = rates(fill("trunk-lines", T='float("inf")', **values), steps)
    assert unknown == pytest.approx(middles(trunk, batch, steps), rel=1e-12)


@pytest.mark.parametrize("lr, T0, batch, warm, T, share", SETTINGS)
def test_lines_for_a_planned_schedule_are_linear_and_cosine(
    lr, T0, batch, warm, T, share
):
    steps = T // batch
    shapes = {  # as the page has them
        "left": decay(warmup(constant(lr), warm), T, T - warm, "linear"),
        "(1 - math.cos(math.pi * left)) / 2": warmup(cosine(lr, warm, T, 0.0), warm),
    }
    for shape, schedule in shapes.items():
        assert f'"{shape}"' in PAGE
        values = dict(schedule="", lr=lr, batch=batch, warm=warm, T=T, shape=shape)
        found = rates(fill("planned-lines", **values), steps)
        expected = middles(schedule, batch, steps)
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12 * lr)
