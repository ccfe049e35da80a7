"""Rules of the house, read off the source: who imports whom, how long files and functions are."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STORY = {  # file -> the story files that it may import at its top
    "schedules": set(), "mup": set(), "moe": set(), "data": set(), "model": {"mup", "moe"},
    "eval": {"model", "data"}, "train": {"schedules", "mup", "model", "data", "eval"},
    "sweep": {"train"}, "fit": {"schedules"}, "bench": {"train"},
}  # fmt: skip
FOLDERS = {"story": "*.py", "tools": "tools/*.py", "tests": "tests/*.py"}
FILES = {folder: sorted(ROOT.glob(pattern)) for folder, pattern in FOLDERS.items()}
SOURCE = {path: path.read_text(encoding="utf-8") for paths in FILES.values() for path in paths}
CODE = {path: ast.parse(SOURCE[path]) for path in FILES["story"] + FILES["tools"]}


def imports(nodes) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def test_story_files_import_only_what_the_reader_has_read():
    assert {path.stem for path in FILES["story"]} == set(STORY)
    for path in FILES["story"]:
        assert imports(CODE[path].body) & set(STORY) <= STORY[path.stem], path.name


def test_tools_import_no_story_file():
    for path in FILES["tools"]:
        assert not imports(ast.walk(CODE[path])) & set(STORY), path.name


def test_only_figures_imports_matplotlib():
    assert [p.name for p in CODE if "matplotlib" in imports(ast.walk(CODE[p]))] == ["figures.py"]


def test_requirements_list_what_is_imported():
    used = set().union(*(imports(ast.walk(tree)) for tree in CODE.values()))
    used -= {*sys.stdlib_module_names, *STORY, "tools", "datasets"}  # datasets is optional
    listed = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert used == set(re.findall(r"^(\w+)==", listed, re.M))


@pytest.mark.parametrize("name", ["schedules", "fit"])
def test_it_starts_without_torch(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("path", FILES["story"], ids=lambda path: path.name)
def test_every_story_file_runs_and_says_how(path):
    (main,) = [f for f in CODE[path].body if isinstance(f, ast.FunctionDef) and f.name == "main"]
    assert ast.unparse(main.args).startswith("argv") and ast.unparse(main.returns) == "int"
    assert f"python {path.name}" in ast.get_docstring(CODE[path])


@pytest.mark.parametrize("folder, limit", [("story", 2700), ("tools", 2500), ("tests", 5000)])
def test_a_folder_is_no_longer_than_its_limit(folder, limit):
    lines = {path: SOURCE[path].splitlines() for path in FILES[folder]}
    wide = [f"{p.name}:{i}" for p in lines for i, line in enumerate(lines[p], 1) if len(line) > 100]
    assert wide == []
    assert sum(map(len, lines.values())) <= limit


def test_functions_are_short():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [f for tree in CODE.values() for f in ast.walk(tree) if isinstance(f, kinds)]
    length = {f: f.end_lineno - f.lineno + 1 for f in found}
    assert [f.name for f in found if length[f] > 60] == []
    assert sum(n <= 25 for n in length.values()) >= 0.9 * len(found)


HEARTS = [("train", "optimizer_step", 160), ("model", "Attention", 130)]


@pytest.mark.parametrize("name, definition, line", HEARTS)
def test_the_heart_of_a_file_comes_early(name, definition, line):
    (node,) = [x for x in CODE[ROOT / f"{name}.py"].body if getattr(x, "name", "") == definition]
    assert node.lineno < line
