"""Pages: every command parses, quoted code is in the source, and no link is dead."""

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

import config
import train
from tools.flags import program_parser

ROOT = Path(__file__).parent.parent
RESEARCH = ROOT / "research"  # may be deleted, and then its pages and links do not count
FILES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *RESEARCH.glob("*.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
RECIPES = ("docs/elsewhere.md", "docs/mup.md")  # other tests run their Python code


# -- Commands ----------------------------------------------------------------------------

LAUNCHER = r"(?:srun )?(?:torchrun .*?|python3? |python3 -m venv .*/python )"
PROGRAM = r"(?:docs/|research/)?\w+\.py"


class Understood(Exception):
    """Raised in place of all work, with the parsed arguments."""


def shell_blocks(text: str) -> list[str]:
    return re.findall(r"```sh\n(.*?)```", text, re.S)


def commands() -> list[str]:
    """PROGRAM.py and its arguments, from the shell blocks and from code inside the text."""
    lines = []
    for text in PAGES.values():
        for block in shell_blocks(text):
            lines += block.replace("\\\n", " ").splitlines()
        prose = re.sub(r"```.*?```", "", text, flags=re.S)
        lines += re.findall(r"`(python [^`\n]*)`", prose)
    found = []
    for line in lines:
        match = re.match(f"{LAUNCHER}({PROGRAM}.*)", line)
        if match:
            found.append(match[1].partition(" #")[0].rstrip())
    # draw.py is made by docs/exercise.py, and tests/test_exercises.py runs it
    elsewhere = r"--help|^draw\.py"
    return [line for line in dict.fromkeys(found) if not re.search(elsewhere, line)]


def words_of(command: str) -> list[str]:
    """As the shell splits them, with its variables, braces and ~."""
    script = "LIB=lib TORCH=torch; printf '%s\\0' " + command
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True
    )
    return result.stdout.split("\0")[:-1]


@pytest.mark.parametrize("command", commands())
def test_a_command_is_understood(command, monkeypatch):
    parser = type(program_parser("x", ""))
    parse_args = parser.parse_args

    def parse_and_stop(*args):
        raise Understood(parse_args(*args))

    monkeypatch.setattr(parser, "parse_args", parse_and_stop)
    file, *argv = words_of(command)
    assert (ROOT / file).exists()
    if file == "power.py":
        assert argv == []  # it has no flags
        return
    with pytest.raises(Understood) as caught:
        import_module(Path(file).stem).main(argv)
    given = vars(caught.value.args[0])
    if file in ("train.py", "bench.py"):
        fields = {name: given[name] for name in given if name in config.FIELDS}
        train.make_config(**fields)


@pytest.mark.parametrize("page", PAGES)
def test_shell_blocks_are_shell(page):
    for block in shell_blocks(PAGES[page]):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


# -- Code --------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RECIPES])
def test_quoted_code_is_in_the_source(page):
    source = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*.py"))
    code = "".join(re.findall(r"```python\n(.*?)```", PAGES[page], re.S))
    assert [line for line in code.splitlines() if line.strip() not in source] == []


# -- Links -------------------------------------------------------------------------------


def links(path: Path) -> list[tuple[Path, str]]:
    """The files that a page links to or shows, with the anchor of every link or ''."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text("utf-8"), flags=re.S)
    found = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", prose)
    found += [(image, "") for image in re.findall(r'src="(.*?)"', prose)]
    return [
        ((path.parent / file).resolve() if file else path.resolve(), anchor)
        for file, anchor in found
    ]


def anchors(path: Path) -> list[str]:
    """The anchors of all headings: lower case, no punctuation, hyphens for spaces."""
    prose = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.*)", prose, re.M)
    return [re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_file_and_a_heading(page):
    dead = []
    for file, anchor in links(ROOT / page):
        if file.is_relative_to(RESEARCH) and not RESEARCH.exists():
            continue
        if not file.exists() or anchor and anchor not in anchors(file):
            dead.append(f"{file}#{anchor}")
    assert dead == []
