"""Build docs/index.html, the page to drag: one file that loads nothing.

    python docs/page.py              docs/index.html
    python docs/page.py --picture    and assets/page.png, by a headless Chromium

page.template.html has the words, page.css the looks, page.js all that moves, and
page_data.json the numbers. We only put them together, so every machine writes the same bytes.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools import figures, flags
from tools.flags import UserError


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


def take_picture(path: Path) -> None:
    """A picture of step 1, 600 pixels wide, twice as sharp. Raises UserError without a Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        raise UserError("--picture needs chromium or google-chrome")
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, "--headless", "--no-sandbox", "--hide-scrollbars"]
        command += ["--force-device-scale-factor=2", "--window-size=600,850"]
        command += [f"--user-data-dir={profile}", f"--screenshot={path}"]
        address = (ROOT / "docs/index.html").as_uri() + "#stop=4&seen=0"
        subprocess.run([*command, address], check=True, capture_output=True)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("page.py", __doc__)
    parser.add_argument(
        "--picture", action="store_true", help="also draw assets/page.png"
    )
    args = parser.parse_args(argv)
    try:
        text = page()
        (ROOT / "docs/index.html").write_text(text, encoding="utf-8", newline="\n")
        print(f"docs/index.html, {len(text.encode()) / 1000:.0f} KB")
        if args.picture:
            take_picture(ROOT / "assets/page.png")
            print("assets/page.png")
    except (UserError, OSError) as error:
        return flags.fail("page.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
