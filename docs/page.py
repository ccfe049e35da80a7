"""Build docs/index.html, the page to drag, from page.template.html and the records of a
sweep.

python docs/page.py                     from results/wsd-laptop
python docs/page.py results/my-sweep    from other records, with their law.json
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fit
from tools import flags
from tools.flags import UserError

FOLDER = ROOT / "results/wsd-laptop"


def measured(folder: Path) -> tuple[list[dict], list[fit.Minimum], dict]:
    """Records, minima and law of a sweep."""
    records = fit.read_records([folder])
    law = json.loads((folder / "law.json").read_text(encoding="utf-8"))
    return records, fit.minima(records), law


def valley(m: fit.Minimum) -> dict:
    """A cell, with losses [seeds, lr] at the learning rates where no seed lacks one."""
    common = [x for x, loss in m.points if math.isfinite(loss)]
    # a sweep rounds its learning rates like this
    rates = [float(f"{2**x:.4g}") for x in common]
    losses = []
    for seed in sorted(m.seeds):
        losses.append([round(m.seeds[seed][x], 7) for x in common])
    return dict(shape=m.shape, T=m.T, batch=m.batch_size, lr=rates, losses=losses)


def content(folder: Path) -> dict:
    """The data of the page, rounded, so that every machine writes the same bytes."""
    records, found, law = measured(folder)
    cells = [valley(m) for m in found]
    cells = [cell for cell in cells if len(cell["lr"]) > 1]
    minima = []
    for m in fit.usable(found):
        minima.append(dict(shape=m.shape, T=m.T, beta=m.beta, x=round(float(m.x), 6)))
    lengths = {cell["T"] for cell in cells}
    of_the_law = ("a", "b", "q", "b_interval", "q_interval")
    return {
        "runs": len(records),
        "cells": cells,
        "middle": round(math.prod(lengths) ** (1 / len(lengths))),
        "folder": folder.name,
        "minima": minima,
        "law": {name: law.get(name) for name in of_the_law},
        "seq_len": records[0]["seq_len"],
        "layers": records[0]["n_layer"],
        "seeds": max(len(cell["losses"]) for cell in cells),
        "warmup": sorted({r["warmup_tokens"] for r in records}),
    }


def page(folder: Path = FOLDER) -> str:
    """The page. Raises OSError or UserError if the folder has no records or no law."""
    template = Path(__file__).with_suffix(".template.html").read_text(encoding="utf-8")
    data = json.dumps(content(folder), separators=(",", ":"))
    # Nothing in a record may end the script. The JSON is ASCII, so it has no U+2028 either.
    data = data.replace("<", r"\u003c")
    return template.replace("{{DATA}}", data)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("page.py", __doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=FOLDER, help="records and law.json"
    )
    args = parser.parse_args(argv)
    try:
        text = page(args.folder)
    except (UserError, OSError) as error:
        return flags.fail("page.py", error)
    (ROOT / "docs/index.html").write_text(text, encoding="utf-8", newline="\n")
    print(f"docs/index.html, {len(text.encode()) / 1000:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
