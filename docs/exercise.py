"""Make a folder of exercises, power.py without the functions that you will write.

    python docs/exercise.py
    cd runs/exercises
    python -m pytest        judges what you wrote, and stops at the first fault
    python draw.py steps    draws what you wrote, see draw.py

We read the functions from power.py, mup.py and docs/exercises/average.py, and keep their
signatures and docstrings. docs/exercises.md has the steps and the answers.
"""

import ast
import shutil
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools import flags

HINTS = {  # function -> the number of its exercise, and a hint
    "decay": (
        1,
        "Return a function of n, as `warmup` does. Until `start` it follows the schedule. "
        "From there on, the schedule keeps its value of `start`, and a factor takes it "
        "down, from 1 at `start` to 0 at T. What should happen beyond T?",
    ),
    "power_law": (
        2,
        "Return a function of n. By which factor does it fall if n + shift doubles? The "
        "shift may not change its value at n = T0.",
    ),
    "rules": (
        3,
        "cfg has m_width and init_std. Return a dict with a Rule for each of five "
        'kinds of parameter: "embedding", "hidden", "branch_out" (the last matrix of '
        'attention or of the MLP), "router" (both treated as hidden) and "gain" (the '
        "scale of a norm). Only matrices have weight decay.",
    ),
    "vertex": (
        4,
        "np.polyfit fits a parabola. On which axis are the learning rates evenly spaced?",
    ),
    "branch": (
        5,
        "What must the copy have so that it trains on as the trunk would? What may it "
        "share with the trunk?",
    ),
    "trunk_and_branches": (
        5,
        "A decay takes the last round(DECAY * T) tokens. Train every token of the trunk "
        "only once. Measure every branch at its end.",
    ),
    "update_mean": (
        6,
        "For every parameter, how far must the mean of steps - 1 tensors move towards "
        "one more? += changes a parameter in place.",
    ),
}


def lines_of(source: str, name: str) -> tuple[ast.AST, list[str]]:
    """A function, method or class, and its lines."""
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = ast.walk(ast.parse(source))
    (found,) = [node for node in nodes if isinstance(node, kinds) and node.name == name]
    return found, source.splitlines()[found.lineno - 1 : found.end_lineno]


def blank(source: str, name: str) -> str:
    """Replace the body of a function, after its docstring, with the hint and an error."""
    number, hint = HINTS[name]
    function, lines = lines_of(source, name)
    docstring = function.body[0]
    indent = docstring.col_offset * " "
    kept = lines[: docstring.end_lineno - function.lineno + 1]
    hint = textwrap.fill(
        f"Exercise {number}. {hint}",
        width=90,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
    )
    error = f'{indent}raise NotImplementedError("exercise {number}: write {name}")'
    return source.replace("\n".join(lines), "\n".join([*kept, hint, error]))


def source(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def exercise_files() -> dict[str, str]:
    """power.py, average.py and, of mup.py, only the table, all with blanks."""
    mup = blank(source("mup.py"), "rules")
    imports = "import math\nfrom typing import NamedTuple"
    pieces = [f'"""The table of muP, from mup.py."""\n\n{imports}']
    for name in ("Rule", "rules"):
        _, lines = lines_of(mup, name)
        pieces.append("\n".join(lines))
    power = source("power.py")
    for name in ("decay", "power_law", "vertex", "branch", "trunk_and_branches"):
        power = blank(power, name)
    average = blank(source("docs/exercises/average.py"), "update_mean")
    mup = "\n\n\n".join(pieces) + "\n"
    return {"power.py": power, "mup.py": mup, "average.py": average}


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("exercise.py", __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/exercises"))
    out = parser.parse_args(argv).out
    if out.exists():
        message = f"--out {out}: already exists; choose another folder"
        return flags.fail("exercise.py", message)
    try:
        shutil.copytree(ROOT / "docs/exercises", out)
        for name, text in exercise_files().items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        return flags.fail("exercise.py", error)
    print(f"{out}: now cd {out}, write `decay` in power.py, and run python -m pytest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
