"""Make docs/power.ipynb from power.py, with what its cells print and draw.

    python docs/notebook.py        about three minutes

A line `# %%` starts a cell of code, and `# %% [markdown]` a cell of text. The first cell
installs the libraries that a hosted notebook lacks.
"""

import base64
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools.flags import program_parser

INSTALL = "%pip install -q torch numpy matplotlib"


def cells_of(text: str) -> list[tuple[str, str]]:
    """power.py -> [("markdown" or "code", source of the cell), ...]"""
    cells = [("code", INSTALL)]
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


def outputs_of(source: str, names: dict) -> list[dict]:
    """Run a cell with the names of earlier cells. -> its text, and the figures it saves"""
    old = set(Path().glob("*.png"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(source, names)
    outputs = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    for path in sorted(set(Path().glob("*.png")) - old):
        data = {"image/png": base64.b64encode(path.read_bytes()).decode()}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def notebook_of(text: str) -> dict:
    """power.py -> the notebook, with outputs. It runs in the current folder."""
    names = {"__name__": "__main__"}
    cells = []
    for i, (kind, source) in enumerate(cells_of(text)):
        cell = {"cell_type": kind, "id": f"cell-{i}", "metadata": {}, "source": source}
        if kind == "code":
            outputs = [] if source == INSTALL else outputs_of(source, names)
            cell |= {"execution_count": None, "outputs": outputs}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main(argv: list[str] | None = None) -> int:
    program_parser("notebook.py", __doc__).parse_args(argv)
    text = (ROOT / "power.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        notebook = notebook_of(text)
    path = ROOT / "docs/power.ipynb"
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    print(f"{path}: {len(notebook['cells'])} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
