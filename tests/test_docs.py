"""Pages: commands parse, quoted code and numbers are right, links work. The layout."""

import ast
import re
import runpy
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest

import config
import sweep
from conftest import cells_of
from tools.flags import program_parser

ROOT = Path(__file__).parent.parent
PATHS = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("research/*.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PATHS}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.S | re.M)


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```", "", PAGES[page], flags=re.S | re.M)


# -- Commands ----------------------------------------------------------------------------

OURS = r"(?:python3?|torchrun .*?) (?:-m (tools\.\w+)|((?:research/)?\w+)\.py)(.*)"


def commands() -> list[tuple[str, str]]:
    """(program, arguments) in shell blocks, and in code inside the text."""
    found = {}
    for page in PAGES:
        lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
        lines += re.findall(r"`(python [^`\n]*)`", prose(page))
        for line in lines:
            match = re.search(OURS, line.partition(" #")[0])
            # the lesson types mine.py, and power_shift is of a fork
            if match and match[2] != "mine" and "power_shift" not in line:
                found[match[1] or match[2], match[3].partition(">")[0].strip()] = None
    return list(found)


class Parsed(Exception):
    """Raised instead of all work, with the parsed arguments."""


@pytest.mark.parametrize("program, arguments", commands())
def test_a_command_is_understood(program, arguments, monkeypatch):
    assert Path(ROOT, program.replace(".", "/") + ".py").exists()
    words = shlex.split(arguments)
    if words in ([], ["--help"]):
        return
    main = import_module(program.removeprefix("research/")).main
    parser = type(program_parser("x", ""))
    parse_args = parser.parse_args

    def parse_and_stop(*args):
        raise Parsed(parse_args(*args))

    with monkeypatch.context() as patch, pytest.raises(Parsed) as caught:
        patch.setattr(parser, "parse_args", parse_and_stop)
        main(words)
    if program in ("train", "tools.bench"):
        given = vars(caught.value.args[0])
        names = given.keys() & config.FIELDS.keys() - {"law"}  # its file
        config.make_config(**{name: given[name] for name in names})
    if program in ("sweep", "research/paper"):
        monkeypatch.setattr(sweep, "train_all", lambda *args, **more: True)
        monkeypatch.setattr(sweep.data, "with_corpus", lambda cfg, typed: cfg)
        assert main([*words, "--dry_run"]) == 0
    if program == "fit" and words[0].startswith("research/"):
        assert Path(ROOT, words[0]).is_dir()


# -- Code, numbers, links ----------------------------------------------------------------


RUN_ELSEWHERE = ["README.md"]
RUN_ELSEWHERE += [f"docs/{name}.md" for name in ("elsewhere", "mup", "extend", "lesson")]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RUN_ELSEWHERE])
def test_quoted_code_is_in_the_source(page):
    source = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*.py"))
    lines = "".join(blocks(page, "python")).splitlines()
    assert [line for line in lines if line not in source] == []


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
    headings = re.findall(r"^#+ (.*)", prose(str(path.relative_to(ROOT))), re.M)
    return [re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_images_exist(page):
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    found = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text)
    found += [(image, "") for image in re.findall(r'src="(.*?)"', text)]
    dead = []
    for file, anchor in found:
        path = Path(ROOT, page).parent.joinpath(file).resolve() if file else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
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
    """In the order in which one reads them. tools/ uses none, but in two programs."""
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
