"""Does the judge fail blanks and plausible errors, and pass the solutions?"""

import inspect
import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

import exercise
import mup
import power

ROOT = Path(power.__file__).parent
FOLDER = ROOT / "docs/exercises"
sys.path.insert(0, str(FOLDER))
import average  # noqa: E402
import draw  # noqa: E402

JUDGE = runpy.run_path(str(FOLDER / "judge.py"))
MODULES = {  # function -> where it is, if not in power.py
    "rules": mup,
    "branch": power.Run,
    "update_mean": average,
}
WRONG = [  # function, what of its source to replace, with what, part of the judge's line
    ("decay", "schedule(start)", "schedule(n)", "hold its last value"),
    ("decay", "min(1.0, ", "(", "beyond T"),
    ("decay", "(math.exp(1 - done) - 1) / (math.e - 1)", "(1 - done)", "of the decay"),
    ("power_law", "beta**q * a", "(a * beta)**q", "q = 0.5"),
    ("power_law", "min(lr_max, beta**q * a * n**b)", "beta**q * a * n**b", "ceiling"),
    ("power_law", " if n > 0 else lr_max", "", "at n = 0"),
    ("rules", "1.0 / m", "1.0 / math.sqrt(m)", "hidden has the wrong lr_scale"),
    ("rules", "std / math.sqrt(m)", "std / m", "hidden has the wrong init_std"),
    ("rules", "1.0,      0.0", "1.0,      1.0", "decay of gain"),
    ("vertex", "return", "return min(losses, key=losses.get)  #", "Your bottom"),
    ("vertex", "2 **", "", "undo the logarithm"),
    ("vertex", "np.log2(list(losses))", "list(losses)", "Your bottom"),
    ("branch", "copy.deepcopy(self)", "copy.copy(self)", "move the trunk's weights"),
    ("branch", "copy.deepcopy(self)", "Run(self.batch_size)", "tokens of its trunk"),
    ("trunk_and_branches", "    branches[T].look()", "    pass", "end with a look"),
    ("update_mean", "/ steps", "/ (steps + 1)", "that of all of them"),
    ("update_mean", "(weights - mean) / steps", "0.1 * (weights - mean)", "all of them"),
]
FUNCTIONS = list(exercise.HINTS)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(power, "HELD_OUT", power.HELD_OUT[:16])


def verdicts(name: str, judge: dict = JUDGE) -> list[str]:
    """What the judge says about a function. Empty if it passes."""
    found = []
    for test, function in judge.items():
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
    assert verdicts(name) == []


@pytest.mark.parametrize("name, old, new, line", WRONG)
def test_a_plausible_error_is_found_in_one_line(name, old, new, line, monkeypatch):
    home = MODULES.get(name, power)
    source = textwrap.dedent(inspect.getsource(getattr(home, name)))
    assert old in source
    names = dict(vars(power if home is power.Run else home))
    exec(source.replace(old, new), names)
    monkeypatch.setattr(home, name, names[name])
    found = verdicts(name)
    assert any(line in said for said in found), found
    assert not any("\n" in said for said in found)


def test_every_blank_fails(tmp_path, monkeypatch):
    folder = tmp_path / "exercises"
    assert exercise.main([f"--out={folder}"]) == 0
    monkeypatch.syspath_prepend(folder)
    for name in ("power", "mup", "average"):
        monkeypatch.delitem(sys.modules, name)
    judge = runpy.run_path(str(folder / "judge.py"))
    for name in FUNCTIONS:
        said = verdicts(name, judge)
        assert any(f"write {name}" in line for line in said), name
    assert not verdicts("decay", JUDGE)  # that of the written functions


def test_blanks_are_the_only_difference():
    """Every other line is there, with the signatures and docstrings."""
    blanked = exercise.exercise_files()
    blanks = r" +# Exercise \d\.(?:.*\n +#)*.*\n +raise NotImplementedError\(.*\n"
    for file, path in (
        ("power.py", ROOT / "power.py"),
        ("average.py", FOLDER / "average.py"),
    ):
        rest = path.read_text(encoding="utf-8")
        for name in FUNCTIONS:
            source = inspect.getsource(getattr(MODULES.get(name, power), name))
            head = source[: source.rindex('"""') + 4]
            rest = rest.replace(source.partition("def")[2], head.partition("def")[2])
        assert re.sub(blanks, "", blanked[file]) == rest


def test_every_figure_of_the_page_is_drawn(monkeypatch, capsys):
    """Of functions that are written, with shorter runs."""
    page = (ROOT / "docs/exercises.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^python draw\.py (\w+)$", page, re.M))
    assert names == set(draw.PICTURES)
    monkeypatch.setattr(draw, "T", 8_192)
    monkeypatch.setattr(draw, "LENGTHS", (12_288,))
    monkeypatch.setattr(power, "WARMUP", 4_096)
    for name in names:
        draw.main(name)
        assert Path(f"{name}.png").stat().st_size > 5_000
    assert re.search(r"held \d.*, decay \d.*, mean \d", capsys.readouterr().out)
