"""Does the judge of docs/exercise.py fail blanks and plausible errors, and pass power.py?"""

import inspect
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import exercise
import mup
import power

ROOT = Path(power.__file__).parent
JUDGE = runpy.run_path(str(ROOT / "docs/exercises/judge.py"))
MODULES = {"rules": mup, "branch": power.Run}  # where a function is, if not in power.py

WRONG = [  # function, what of its source to replace, with what, part of the judge's line
    ("decay", "schedule(start)", "schedule(n)", "hold its last value"),
    ("decay", "min(1.0, ", "(", "beyond T"),
    ("decay", "(math.exp(1 - done) - 1) / (math.e - 1)", "(1 - done)", "1 tenths of the decay"),
    ("decay", "start = T - decay_tokens", "start = T - 2 * decay_tokens", "where it starts"),
    ("power_law", "beta**q * a", "(a * beta)**q", "q = 0.5"),
    ("power_law", "n**b", "n**-b", "the rate at n = 9e+11 is 0.02"),
    ("power_law", "beta**q", "beta", "q = 0.5"),
    ("power_law", "min(lr_max, beta**q * a * n**b)", "beta**q * a * n**b", "the ceiling"),
    ("power_law", " if n > 0 else lr_max", "", "at n = 0"),
    ("power_law", "else lr_max", "else 0.0", "at n = 0"),
    ("rules", "1.0 / m", "1.0", "hidden has the wrong lr_scale"),
    ("rules", "1.0 / m", "1.0 / math.sqrt(m)", "hidden has the wrong lr_scale"),
    ("rules", "std / math.sqrt(m)", "std", "hidden has the wrong init_std"),
    ("rules", "std / math.sqrt(m)", "std / m", "hidden has the wrong init_std"),
    ("rules", "Rule(std,        1.0,  ", "Rule(hidden_std, 1.0,", "adds up nothing"),
    ("rules", "1.0,      0.0", "1.0,      1.0", "decay of gain"),
    ("vertex", "-c1", "c1", "Your bottom"),
    ("vertex", "return", "return min(losses, key=losses.get)  #", "Your bottom"),
    ("vertex", "return", "return max(losses, key=losses.get)  #", "Your bottom"),
    ("vertex", "2 **", "", "undo the logarithm"),
    ("vertex", "np.log2(list(losses))", "list(losses)", "Your bottom"),
    ("vertex", "list(losses.values()), 2", "list(losses.values()), 3", "too many values"),
    ("branch", "copy.deepcopy(self)", "copy.copy(self)", "move the trunk's weights"),
    ("branch", "copy.deepcopy(self)", "self", "yours is the trunk"),
    ("branch", "copy.deepcopy(self)", "Run(self.batch_size)", "the tokens of its trunk"),
    ("branch", "return copy.deepcopy(self)", "branch = copy.deepcopy(self)\n    "
     "branch.optimizer = make_optimizer(branch.model)\n    return branch",
     "copy of the optimizer's state"),
    ("branch", "return copy.deepcopy(self)", "branch = copy.copy(self)\n    "
     "branch.model = copy.deepcopy(self.model)\n    "
     "branch.optimizer = copy.deepcopy(self.optimizer)\n    return branch",
     "the weights of the branch"),
    ("branch", "return copy.deepcopy(self)", "branch = copy.copy(self)\n    "
     "branch.curve = []\n    branch.model = copy.deepcopy(self.model)\n    "
     "branch.optimizer = make_optimizer(branch.model)\n    "
     "branch.optimizer.load_state_dict(self.optimizer.state_dict())\n    return branch",
     "AdamW's moments"),
    ("trunk_and_branches", "T // 10", "T // 5", "T // 10"),
    ("trunk_and_branches", "decay(schedule, T, decay_tokens)", "schedule", "T // 10"),
    ("trunk_and_branches", "    branches[T].look()", "    pass", "end with a look"),
    ("trunk_and_branches", "    decay_tokens =", "    trunk = Run(batch_size)\n"
     "        decay_tokens =", "train the trunk once"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(power, "HELD_OUT", power.HELD_OUT[:16])


def verdicts(name: str) -> list[str]:
    """What the judge says about a function. Empty if it passes."""
    found = []
    for test, function in JUDGE.items():
        if not test.startswith(f"test_{name}_"):
            continue
        cases = [{}]
        if "kind" in inspect.signature(function).parameters:
            cases = [{"kind": "hidden"}, {"kind": "branch_out"}]
        for case in cases:
            with pytest.MonkeyPatch.context() as patch:
                if "monkeypatch" in inspect.signature(function).parameters:
                    case = {"monkeypatch": patch}
                try:
                    function(**case)
                except (pytest.fail.Exception, ValueError) as error:
                    found.append(str(error))
    return found


@pytest.mark.parametrize("name, old, new, line", WRONG)
def test_a_plausible_error_is_found_in_one_line(name, old, new, line, monkeypatch):
    home = MODULES.get(name, power)
    source = textwrap.dedent(inspect.getsource(getattr(home, name)))
    assert old in source
    names = dict(vars(sys.modules[home.__module__] if home is power.Run else home))
    exec(source.replace(old, new), names)
    monkeypatch.setattr(home, name, names[name])
    found = verdicts(name)
    assert any(line in said for said in found), found
    assert not any("\n" in said for said in found)


def judge(folder: Path) -> tuple[int, str]:
    """Run the judge in a folder as a learner does, without stopping at the first fault."""
    command = [sys.executable, "-m", "pytest", "--maxfail=99"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_the_blanks_fail_and_the_originals_pass(tmp_path):
    folder = tmp_path / "exercises"
    assert exercise.main([f"--out={folder}"]) == 0
    status, said = judge(folder)
    assert status == 1 and "passed" not in said
    assert set(re.findall(r"exercise \d: write (\w+)", said)) == exercise.HINTS.keys()
    for name in exercise.HINTS:
        assert verdicts(name) == []


def test_every_picture_of_the_page_is_drawn(tmp_path):
    """Of functions that are written, with shorter runs."""
    folder = tmp_path / "exercises"
    exercise.main([f"--out={folder}"])
    for name in ("power.py", "mup.py"):
        shutil.copy(ROOT / name, folder)
    page = (ROOT / "docs/exercises.md").read_text(encoding="utf-8")
    names = sorted(set(re.findall(r"^python draw\.py (\w+)$", page, re.M)))
    code = f"""
import draw, power
draw.T = 16_384
power.HELD_OUT = power.HELD_OUT[:16]
power.WARMUP = 4_096
draw.LENGTHS = (16_384, 20_480)
assert sorted(draw.PICTURES) == {names}
for name in draw.PICTURES:
    draw.main(name)
"""
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    assert sorted(path.stem for path in folder.glob("*.png")) == names


def test_an_existing_folder_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    assert exercise.main([f"--out={tmp_path / 'mine'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_folder_that_may_not_be_written_is_named_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("a file is no folder, for root neither")
    assert exercise.main([f"--out={tmp_path / 'file/mine'}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "file/mine" in said


def test_only_the_bodies_are_gone():
    """Every other line of power.py is there, with the signatures and docstrings."""
    blanked = exercise.exercise_files()["power.py"]
    rest = (ROOT / "power.py").read_text(encoding="utf-8")
    for name in exercise.HINTS.keys() - {"rules"}:
        function = getattr(MODULES.get(name, power), name)
        source = inspect.getsource(function)
        head = source[: source.rindex('"""') + 4]
        assert head in blanked and source not in blanked
        rest = rest.replace(source, head)
    blanks = r" +# Exercise \d\.(?:.*\n +#)*.*\n +raise NotImplementedError\(.*\n"
    assert re.sub(blanks, "", blanked) == rest
