"""Build docs/index.html, the page to drag: one file that loads nothing.

    python docs/page.py

page.template.html has the words, page.css the looks, page.js all that moves, and
page_data.json the numbers. We only put them together, so every machine writes the same bytes.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools import figures, flags


def colors() -> str:
    """The colors of all figures of the project, as custom properties of CSS."""
    rows = [f"--{name}: {color};" for name, color in figures.COLORS.items()]
    for name, (low, high) in figures.HUES.items():
        name = name.replace(" ", "-")
        rows += [f"--{name}-low: {low};", f"--{name}-high: {high};"]
    return " ".join(rows)


def source(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def page() -> str:
    style = source("page.css").replace("{{COLORS}}", colors())
    html = source("page.template.html").replace("{{STYLE}}", style)
    html = html.replace("{{SCRIPT}}", source("page.js"))
    return html.replace("{{DATA}}", source("page_data.json").strip())


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("page.py", __doc__).parse_args(argv)
    try:
        text = page()
        (ROOT / "docs/index.html").write_text(text, encoding="utf-8", newline="\n")
        print(f"docs/index.html, {len(text.encode()) / 1000:.0f} KB")
    except OSError as error:
        return flags.fail("page.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
