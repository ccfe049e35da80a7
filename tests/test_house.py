"""Rules of the house, read off the source: who imports whom, and how wide the lines are."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {  # story file -> the story files at its top
    "schedules": set(), "config": {"schedules"}, "records": {"schedules", "config"},
    "mup": set(), "moe": set(), "data": set(), "mixture": {"data"},
    "runs": {"schedules", "config", "data"}, "model": {"mup", "moe", "config", "runs"},
    "tasks": set(), "eval": {"model", "data", "tasks"},
    "train": {"schedules", "config", "mup", "moe", "model", "data", "runs", "eval"},
    "fit": {"schedules", "records"}, "compare": {"schedules", "records", "fit"},
    "report": {"schedules", "config", "records", "fit", "compare"},
    "grids": {"schedules", "config", "records"},
    "sweep": {"schedules", "config", "records", "data", "runs", "model", "train", "compare",
              "grids"},
    "bench": {"config", "model", "runs", "train"},
}  # fmt: skip
ALONE = "power.py"  # imports nothing of the project, so it has no place in this order
read = lambda pattern: {
    path: path.read_text(encoding="utf-8") for path in ROOT.glob(pattern)
}
STORY, TOOLS, TESTS = map(read, ("*.py", "tools/*.py", "tests/*.py"))
PROGRAMS = read("docs/*.py")
RESEARCH = read("research/**/*.py")
CODE = {
    p.relative_to(ROOT).as_posix(): ast.parse(t)
    for p, t in (STORY | TOOLS | PROGRAMS).items()
}


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
    story = {name for name in CODE if "/" not in name} - {ALONE}
    assert story == {f"{name}.py" for name in MAY_IMPORT}
    allowed = {f"{name}.py": files for name, files in MAY_IMPORT.items()}
    assert [(name, used[name]) for name in allowed if used[name] - allowed[name]] == []


def test_tools_import_no_story_file_and_only_figures_imports_matplotlib():
    used = {name: imports(ast.walk(tree)) for name, tree in CODE.items()}
    assert [
        name for name in used if "tools/" in name and used[name] & MAY_IMPORT.keys()
    ] == []
    drawing = [name for name in used if "matplotlib" in used[name]]
    assert drawing == [ALONE, "tools/figures.py"]
    assert used[ALONE] <= {*sys.stdlib_module_names, "torch", "numpy", "matplotlib"}
    listed = re.findall(
        r"^(\w+)==", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.M
    )
    others = {*sys.stdlib_module_names, *MAY_IMPORT, "tools"}
    others |= {Path(name).stem for name in CODE if name.startswith("docs/")}
    # imported where they are used
    others |= {"submitit", "tokenizers", "transformers", "nbclient", "nbformat"}
    assert set().union(*used.values()) - others == set(listed)


def test_nothing_outside_research_imports_it():
    """So that the folder may be deleted."""
    programs = {path.stem for path in ROOT.glob("research/**/*.py")} - {"conftest"}
    outside = STORY | TOOLS | PROGRAMS | TESTS | read("docs/exercises/*.py")
    found = []
    for path, text in outside.items():
        names = imports(ast.walk(ast.parse(text)))
        found += [(path.name, name) for name in names & {*programs, "research"}]
    assert found == []


def test_pyproject_names_the_packages_of_the_requirements_files():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    needed, dev = (
        (ROOT / name).read_text(encoding="utf-8").splitlines()
        for name in ("requirements.txt", "requirements-dev.txt")
    )
    assert project["dependencies"] == needed
    assert ["-r requirements.txt", *project["optional-dependencies"]["dev"]] == dev


@pytest.mark.parametrize("name", ["schedules", "fit"])
def test_it_starts_without_torch(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("name", ["schedules", "mup"])
def test_it_can_be_copied_alone(name, tmp_path):
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    code = f"import {name}"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("name", sorted(MAY_IMPORT.keys() - {"report"}))  # fit.py runs it
def test_every_story_file_runs_and_says_how(name):
    tree = CODE[f"{name}.py"]
    (main,) = [
        f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "main"
    ]
    assert (
        ast.unparse(main.args).startswith("argv") and ast.unparse(main.returns) == "int"
    )
    assert f"python {name}.py" in ast.get_docstring(tree)


def test_no_line_is_longer_than_100_columns():
    texts = STORY | TOOLS | TESTS | PROGRAMS | RESEARCH | read("docs/exercises/*.py")
    long = [
        (p.name, x)
        for p, text in texts.items()
        for x in text.splitlines()
        if len(x) > 100
    ]
    assert long == []
