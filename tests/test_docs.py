"""Pages: commands parse, quoted code and numbers are right, links work. And the layout."""

import ast
import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import config
import sweep
import train
from tools.flags import program_parser

ROOT = Path(__file__).parent.parent
PATHS = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("research/*.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PATHS}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.S | re.M)


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```", "", PAGES[page], flags=re.S | re.M)


# -- Commands ----------------------------------------------------------------------------

LAUNCHER = r"(?:.*&& )?(?:srun )?(?:\S*python3?|torchrun .*?)"
PROGRAM = r"(?:-m (tools\.\w+|pytest|venv)|((?:research/)?\w+\.py|-c))"
OTHER = "cp export git HEAD HF_ALLOW_CODE_EVAL pip source".split()
NOT_OURS = ("mine.py", "-c", "pytest", "venv")  # the lesson types mine.py


def commands() -> list[str]:
    """Lines of all shell blocks, and code inside the text that starts with python."""
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line.partition(" #")[0].strip() for line in lines]
        found += re.findall(r"`(python [^`\n]*)`", prose(page))
    found = [line for line in dict.fromkeys(found) if line and line[0] != "#"]
    return [line for line in found if "power_shift" not in line]  # of a fork


class Parsed(Exception):
    """Raised instead of all work, with the parsed arguments."""


@pytest.mark.parametrize("command", commands())
def test_a_command_is_understood(command, monkeypatch):
    match = re.fullmatch(rf"{LAUNCHER} {PROGRAM}(.*)", command)
    if not match:
        assert re.split(r"[ =]", command)[0] in OTHER
        return
    module, file, arguments = match.groups()
    program = module or file
    if program in NOT_OURS:
        return
    assert Path(ROOT, file or module.replace(".", "/") + ".py").exists()
    arguments = shlex.split(arguments.partition(">")[0])
    if arguments in ([], ["--help"]):
        return
    parser = type(program_parser("x", ""))
    parse_args = parser.parse_args

    def parse_and_stop(*args):
        raise Parsed(parse_args(*args))

    monkeypatch.setattr(parser, "parse_args", parse_and_stop)
    with pytest.raises(Parsed) as caught:
        import_module(module or Path(file).stem).main(arguments)
    given = vars(caught.value.args[0])
    if program in ("train.py", "tools.bench"):
        names = given.keys() & config.FIELDS.keys() - {"law"}  # its file
        fields = {name: given[name] for name in names}
        train.make_config(**fields)
    monkeypatch.undo()
    if program in ("sweep.py", "research/paper.py"):
        monkeypatch.setattr(sweep, "train_all", lambda *args, **more: True)
        monkeypatch.setattr(sweep.data, "with_corpus", lambda cfg, typed: cfg)
        assert import_module(Path(file).stem).main([*arguments, "--dry_run"]) == 0
    if program == "fit.py" and arguments[0].startswith("research/"):
        assert Path(ROOT, arguments[0]).is_dir()


# -- Code, numbers, links ----------------------------------------------------------------


RUN_ELSEWHERE = ["README.md"]
RUN_ELSEWHERE += [f"docs/{name}.md" for name in ("elsewhere", "mup", "extend", "lesson")]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RUN_ELSEWHERE])
def test_quoted_code_is_in_the_source(page):
    source = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*.py"))
    lines = "".join(blocks(page, "python")).splitlines()
    assert [line for line in lines if line not in source] == []


def cells_of(page: str) -> dict[tuple, str]:
    """{(table, row, column): text} of the tables of a page."""
    found = {}
    for section in page.split("\n## ")[1:]:
        name, _, rest = section.partition("\n")
        lines = re.findall(r"^\| ?(.*?) ?\|$", rest, re.M)
        head, *rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
        for row in rows:
            found |= {(name, row[0], c): cell for c, cell in zip(head[1:], row[1:])}
    return found


@pytest.mark.parametrize("page", PAGES)
def test_marked_numbers_are_those_of_the_tables(page):
    """In research/ as they are, and elsewhere rounded and perhaps without a sign."""
    cells = cells_of(PAGES["research/TABLES.md"])
    marks = re.findall(
        r"<!--n:(.+?) / (.+?) / (.+?)-->([-\d.]*\d)( \[.*?\])?", PAGES[page]
    )
    assert len(marks) == PAGES[page].count("<!--n:")
    for *place, number, interval in marks:
        answer, _, rest = cells[tuple(place)].partition(" ")
        # a verdict may follow in the table
        assert f" {rest}".startswith(interval), place
        if "research/" in page:
            assert number == answer, place
        digits = len(number.partition(".")[2])
        # a number that ends in 5 may be rounded either way
        assert abs(abs(float(answer)) - abs(float(number))) <= 0.501 * 10**-digits, place


def anchors(path: Path) -> list[str]:
    """The anchors of all headings: lower case, no punctuation, hyphens for spaces."""
    if path.suffix != ".md":
        return [""]
    headings = re.findall(r"^#+ (.*)", prose(str(path.relative_to(ROOT))), re.M)
    return ["", *(re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings)]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_images_exist(page):
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    found = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text)
    found += [(image, "") for image in re.findall(r'src="(.*?)"', text)]
    dead = []
    for file, anchor in found:
        path = Path(ROOT, page).parent.joinpath(file).resolve() if file else ROOT / page
        if not path.exists() or anchor not in anchors(path):
            dead.append(f"{file}#{anchor}")
    assert dead == []


# -- The layout --------------------------------------------------------------------------


ORDER = "power schedules config moe model mup data train eval sweep fit".split()


def imports(file: Path) -> set[str]:
    """The modules that a file imports anywhere, 'tools.flags' of 'from tools import'."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module}
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_a_file_uses_only_files_that_come_before_it():
    """In the order in which one reads them. tools/ uses none, but for its two programs."""
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(ORDER)
    for i, name in enumerate(ORDER):
        assert not imports(ROOT / f"{name}.py") & set(ORDER[i:]), name
    for path in ROOT.glob("tools/*.py"):
        if path.stem not in ("bench", "convert"):
            assert not imports(path) & set(ORDER), path


@pytest.mark.parametrize("name, packages", [("schedules", "torch numpy"), ("mup", "")])
def test_a_file_for_other_projects_runs_alone(name, packages, monkeypatch):
    for missing in ("tools", *ORDER, *packages.split()):
        monkeypatch.setitem(sys.modules, missing, None)  # importing it is an ImportError
    runpy.run_path(str(ROOT / f"{name}.py"))


def test_fit_starts_without_torch():
    code = "import sys, fit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
