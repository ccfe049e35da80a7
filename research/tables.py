"""Every table of our runs: write TABLES.md, and draw the figures of assets/.

    python research/tables.py              in a minute or two, from the committed records
    python research/tables.py --no_draw    only TABLES.md

A page may quote a number of a table. It then has <!--n:TABLE / ROW / COLUMN--> before the
number, and tests/test_tables.py compares the two.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from tools import flags

PAGE = ROOT / "research/TABLES.md"
HEAD = """# All tables

`python research/tables.py` writes this page from the committed records. Losses are in nats
per token, and brackets are 95% intervals ([methods.md](methods.md#1-how-a-law-is-fitted))."""
PROGRAMS = ("laws", "policies", "comparison", "longer", "curves", "smaller")
FIGURES = {  # figure of assets/ -> the command that draws it, with the name that it gives
    "valleys.png": "fit.py research/results/wsd-laptop",
    "law.png": "fit.py research/results/bend-laptop --only warmup_tokens=80000 --only n_embd=32",
    "transfer.png": "fit.py research/results/transfer-quick",
    "power-scan.png": "fit.py research/results/power-laptop",
    "anytime.png": "research/anytime.py research/results/compare-laptop",
    "against.png": "research/against.py weight_decay=0,0.1,0.3 research/results/memory-laptop",
    "warmup.png": "research/against.py warmup_tokens=5000,80000,320000 "
    "research/results/bend-laptop --only batch_size=16,32,64,128",
}


class Table(NamedTuple):
    name: str
    about: str  # its runs and its units
    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        """In Markdown, under a heading."""
        rows = [f"| {' | '.join(row)} |" for row in (self.head, *self.rows)]
        rows.insert(1, "|---" * len(self.head) + "|")
        return "\n".join([f"## {self.name}\n\n{self.about}\n", *rows])


def cells(text: str) -> dict[tuple[str, str, str], str]:
    """{(table, row, column): cell} of the tables in a page."""
    found = {}
    for section in text.split("\n## ")[1:]:
        name, _, rest = section.partition("\n")
        lines = re.findall(r"^\| ?(.*?) ?\|$", rest, re.M)
        head, *rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
        for row in rows[1:]:  # the first is the line below the head
            for column, cell in zip(head[1:], row[1:]):
                found[name, row[0], column] = cell
    return found


def text() -> str:
    """TABLES.md as the records have it now."""
    tables = [table for name in PROGRAMS for table in import_module(name).tables()]
    return "\n\n".join([HEAD, *map(str, tables)]) + "\n"


def draw() -> None:
    """All figures of assets/ that come from our runs."""
    for name in ("curves", "exponents", "policies", "comparison", "longer"):
        import_module(name).draw_all()
    for name, command in FIGURES.items():
        with tempfile.TemporaryDirectory() as out:
            argv = [sys.executable, *command.split(), "--out", out]
            subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            drawn = "against.png" if "against.py" in command else name
            shutil.copy(Path(out, drawn), ROOT / "assets" / name)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("tables.py", __doc__)
    parser.add_argument("--no_draw", action="store_true", help="leave assets/ as it is")
    args = parser.parse_args(argv)
    PAGE.write_text(text(), encoding="utf-8")
    print(PAGE)
    if not args.no_draw:
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
