"""Make docs/power.ipynb from power.py, with the outputs of its cells.

    python docs/notebook.py        about two minutes

A line `# %%` begins a cell of code, and `# %% [markdown]` one of text.
"""

import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools.flags import program_parser


def cells_of(text: str) -> list[tuple[str, str]]:
    """power.py -> [("markdown" or "code", source of the cell), ...]"""
    cells = []
    for part in text.split("# %%")[1:]:
        head, _, body = part.partition("\n")
        body = body.strip("\n")
        if "[markdown]" in head:
            lines = [
                line.removeprefix("#").removeprefix(" ") for line in body.split("\n")
            ]
            cells.append(("markdown", "\n".join(lines)))
        else:
            cells.append(("code", body))
    return cells


def run(source: str, names: dict, folder: Path) -> list[dict]:
    """Run a cell of code -> its outputs, what it prints and the figure that it saves."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.chdir(folder):
        exec(compile(source, "power.py", "exec"), names)
    outputs = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    for figure in folder.glob("*.png"):
        image = base64.b64encode(figure.read_bytes()).decode()
        data = {"image/png": image}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
        figure.unlink()
    return outputs


def main(argv: list[str] | None = None) -> int:
    program_parser("notebook.py", __doc__).parse_args(argv)
    os.environ["MPLBACKEND"] = "Agg"  # draw without a screen
    names = {"__name__": "__main__"}
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (kind, source) in enumerate(cells_of((ROOT / "power.py").read_text())):
            cell = {"cell_type": kind, "id": f"cell-{i}", "metadata": {}}
            cell["source"] = source.splitlines(keepends=True)
            if kind == "code":
                cell["execution_count"] = None
                cell["outputs"] = run(source, names, Path(folder))
            cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = ROOT / "docs" / "power.ipynb"
    path.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(cells)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
