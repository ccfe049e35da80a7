"""Every command line of a page is one that its program understands."""

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from test_readme import PAGES
from tools.flags import program_parser

import config
import grids
import train

TEXT = "\n".join(PAGES.values())
PROGRAM = r"(?:docs/|research/)?\w+\.py"
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.S)
INLINE = re.findall(
    rf"`(python {PROGRAM}[^`]*)`", re.sub(r"```.*?```", "", TEXT, flags=re.S)
)
LAUNCHER = (
    rf"^(?:python|torchrun .*|srun torchrun .*|python3 -m venv .*/python) (?={PROGRAM})"
)


class Understood(Exception):
    """Raised in place of all work, with the parsed arguments."""


def commands() -> list[str]:
    """FILE.py and its arguments, from lines of shell blocks and from code in the text."""
    lines = "\n".join([*BLOCKS, *INLINE]).replace("\\\n", " ").splitlines()
    found = [re.sub(LAUNCHER, "", line) for line in lines if re.match(LAUNCHER, line)]
    found = [line.partition(" #")[0].rstrip() for line in found]
    # a patch adds the second, and tests/test_exercises.py has the third
    elsewhere = r"--help|batch_ramp|^draw\.py"
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
    if file == "power.py":
        assert argv == []  # it has no flags
        return
    with pytest.raises(Understood) as caught:
        import_module(Path(file).stem).main(argv)
    given = vars(caught.value.args[0])
    if file in ("train.py", "bench.py"):
        train.make_config(
            **{name: given[name] for name in given if name in config.FIELDS}
        )


def test_the_readme_extends_the_run_that_fit_prints():
    (tokens,) = re.findall(
        r"--branch runs/notes --total_tokens (\S+)", PAGES["README.md"]
    )
    longest = grids.GRIDS["wsd"]["quick"]["budgets"][-1]
    assert float(tokens) > 4 * longest  # fit.py prints four times the longest T


def test_shell_blocks_are_shell():
    for block in BLOCKS:
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
