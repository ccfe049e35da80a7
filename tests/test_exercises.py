"""Does the judge fail blanks and plausible errors, and pass the solutions?"""

import inspect
import re
import runpy
import sys
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import exercise
import mup
import power

ROOT = Path(power.__file__).parent
sys.path.insert(0, str(ROOT / "docs/exercises"))
import average  # noqa: E402
import draw  # noqa: E402
import judge  # noqa: E402

# where the functions are that are not in power.py
MODULES = {"rules": mup, "branch": power.Run, "update_mean": average}
WRONG = [  # function, what of its source to replace, with what, part of the judge's line
    ("decay", "schedule(start)", "schedule(n)", "hold its last value"),
    ("decay", "max(0, ", "max(-9, ", "beyond T"),
    ("decay", "(T - start))", "(T - start)) ** 2", "tenths of the decay"),
    ("power_law", "(T0 + shift)", "T0", "at n = T0"),
    ("power_law", "min(lr_max, ", "(", "under the ceiling"),
    ("power_law", "(n + shift) / (T0 + shift)", "n / T0", "shift = T0"),
    ("power_law", "** b", "** (b / 2)", "b = -0.51"),
    ("rules", "1.0 / m", "1.0 / math.sqrt(m)", "hidden has the wrong lr_scale"),
    ("rules", "std / math.sqrt(m)", "std / m", "hidden has the wrong init_std"),
    ("vertex", "return", "return min(losses, key=losses.get)  #", "Your bottom"),
    ("vertex", "2**bottom", "bottom", "undo the logarithm"),
    ("vertex", "c2 > 0", "True", "opens downward"),
    ("vertex", "x.min() <= bottom <= x.max()", "True", "its bottom above the tries"),
    ("branch", "copy.deepcopy(self)", "copy.copy(self)", "move the trunk's weights"),
    ("trunk_and_branches", ", T).measure()", ", T)", "at its end"),
    ("trunk_and_branches", "Run(seed)", "Run(0)", "Has it the seed"),
    (
        "trunk_and_branches",
        "trunk.branch()",
        "Run(seed).train(schedule, start)",
        "train the trunk once",
    ),
    ("update_mean", "(weights - mean) / steps", "0.1 * (weights - mean)", "all of them"),
]
FUNCTIONS = list(exercise.HINTS)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(power, "HELD_OUT", power.HELD_OUT[:4])
    monkeypatch.setattr(judge, "LENGTHS", (5_120, 10_240))
    monkeypatch.setattr(judge, "BASE_WIDTH", 16)


def verdicts(name: str, tests: dict) -> list[str]:
    """What the judge says about a function. Empty if it passes."""
    found = []
    for test, function in tests.items():
        if not test.startswith(f"test_{name}_"):
            continue
        parameters = inspect.signature(function).parameters
        with pytest.MonkeyPatch.context() as patch:
            values = {"kind": "hidden", "monkeypatch": patch}
            try:
                function(**{key: values[key] for key in parameters})
            except (pytest.fail.Exception, ValueError, NotImplementedError) as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_solution_passes(name):
    assert verdicts(name, vars(judge)) == []


@pytest.mark.parametrize("name, old, new, line", WRONG)
def test_a_plausible_error_is_found_in_one_line(name, old, new, line, monkeypatch):
    home = MODULES.get(name, power)
    source = textwrap.dedent(inspect.getsource(getattr(home, name)))
    assert old in source
    names = dict(vars(power if home is power.Run else home))
    exec(source.replace(old, new), names)
    monkeypatch.setattr(home, name, names[name])
    found = verdicts(name, vars(judge))
    assert any(line in said for said in found), found
    assert not any("\n" in said for said in found)


def test_every_blank_fails(tmp_path, monkeypatch):
    folder = tmp_path / "exercises"
    assert exercise.main([f"--out={folder}"]) == 0
    monkeypatch.syspath_prepend(folder)
    for name in ("power", "mup", "average"):
        monkeypatch.delitem(sys.modules, name)
    blank = runpy.run_path(str(folder / "judge.py"))
    for name in FUNCTIONS:
        said = verdicts(name, blank)
        assert any(f"write {name}" in line for line in said), name


def test_every_figure_of_the_page_is_drawn(monkeypatch):
    """Of functions that are written, with shorter runs."""
    page = (ROOT / "docs/exercises.md").read_text(encoding="utf-8")
    names = re.findall(r"^python draw\.py (\w+)$", page, re.M)
    assert set(names) == set(draw.PICTURES)
    monkeypatch.setattr(draw, "T", 8_192)
    monkeypatch.setattr(draw, "LENGTHS", (10_240,))
    for picture in draw.PICTURES.values():
        picture()
    plt.close("all")
