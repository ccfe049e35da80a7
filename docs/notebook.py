"""Make docs/power.ipynb from power.py, with the outputs of its cells.

    pip install nbclient ipykernel
    python docs/notebook.py        about three minutes

A line `# %%` starts a cell of code, and `# %% [markdown]` a cell of text. The first cell
installs the libraries that a hosted notebook lacks.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools.flags import fail, program_parser

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


def main(argv: list[str] | None = None) -> int:
    program_parser("notebook.py", __doc__).parse_args(argv)
    try:
        from nbclient import NotebookClient
        from nbformat import v4, write
    except ImportError as error:
        return fail("notebook.py", f"{error}; pip install nbclient ipykernel")
    notebook = v4.new_notebook()
    new = {"code": v4.new_code_cell, "markdown": v4.new_markdown_cell}
    for i, (kind, source) in enumerate(cells_of((ROOT / "power.py").read_text())):
        notebook.cells.append(new[kind](source, id=f"cell-{i}"))
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook, resources=place, record_timing=False, coalesce_streams=True
        )
        client.execute()
    notebook.cells[0].outputs = []  # what pip says about this machine
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    path = ROOT / "docs/power.ipynb"
    write(notebook, path)
    print(f"{path}: {len(notebook.cells)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
