"""Rules of the house, read off the source: who imports whom, how long files and functions are."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {  # story file -> the story files at its top
    "schedules": set(), "mup": set(), "moe": set(), "data": set(), "model": {"mup", "moe"},
    "eval": {"model", "data"}, "train": {"schedules", "mup", "model", "data", "eval"},
    "sweep": {"train"}, "fit": {"schedules"}, "bench": {"model", "train"},
}  # fmt: skip
read = lambda pattern: {path: path.read_text(encoding="utf-8") for path in ROOT.glob(pattern)}
STORY, TOOLS, TESTS = map(read, ("*.py", "tools/*.py", "tests/*.py"))
PROGRAMS = read("docs/*.py") | read("forks/*.py")
CODE = {p.relative_to(ROOT).as_posix(): ast.parse(t) for p, t in (STORY | TOOLS | PROGRAMS).items()}


def imports(nodes) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def test_imports_follow_the_reading_order():
    used = {name: imports(tree.body) & MAY_IMPORT.keys() for name, tree in CODE.items()}
    assert {f"{name}.py" for name in MAY_IMPORT} == {name for name in CODE if "/" not in name}
    allowed = {f"{name}.py": files for name, files in MAY_IMPORT.items()}
    assert [(name, used[name]) for name in allowed if used[name] - allowed[name]] == []


def test_tools_import_no_story_file_and_only_figures_imports_matplotlib():
    used = {name: imports(ast.walk(tree)) for name, tree in CODE.items()}
    assert [name for name in used if "tools/" in name and used[name] & MAY_IMPORT.keys()] == []
    assert [name for name in used if "matplotlib" in used[name]] == ["tools/figures.py"]
    listed = re.findall(r"^(\w+)==", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.M)
    others = {*sys.stdlib_module_names, *MAY_IMPORT, "tools"}
    assert set().union(*used.values()) - others == set(listed)


@pytest.mark.parametrize("name", ["schedules", "fit"])
def test_it_starts_without_torch(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_every_story_file_runs_and_says_how(name):
    tree = CODE[f"{name}.py"]
    (main,) = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "main"]
    assert ast.unparse(main.args).startswith("argv") and ast.unparse(main.returns) == "int"
    assert f"python {name}.py" in ast.get_docstring(tree)


# Lines. PROGRAMS belong to single pages of docs and to forks.
LIMITS = [(STORY, 2700), (TOOLS, 2500), (TESTS, 4652), (PROGRAMS, 555)]


@pytest.mark.parametrize("files, limit", LIMITS, ids=["story", "tools", "tests", "programs"])
def test_files_are_no_longer_than_their_limit(files, limit):
    lines = {path.name: text.splitlines() for path, text in files.items()}
    wide = [(name, x) for name, some in lines.items() for x in some if len(x) > 100]
    assert wide == [] and sum(map(len, lines.values())) <= limit


def test_functions_are_short_and_the_heart_of_a_file_comes_early():
    nodes = [node for tree in CODE.values() for node in ast.walk(tree)]
    length = {f: f.end_lineno - f.lineno + 1 for f in nodes if isinstance(f, ast.FunctionDef)}
    assert [f.name for f in length if length[f] > 60] == []
    assert sum(n <= 25 for n in length.values()) >= 0.9 * len(length)
    line = {x.name: x.lineno for x in nodes if isinstance(x, (ast.FunctionDef, ast.ClassDef))}
    assert line["optimizer_step"] < 160 and line["Attention"] < 130
