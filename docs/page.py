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
from tools.flags import UserError, fail, program_parser

FOLDER = ROOT / "results/wsd-laptop"


def measured(folder: Path) -> tuple[list[dict], list, dict]:
    """Records, minima and law of a sweep."""
    records = fit.read_records([folder])
    law = json.loads((folder / "law.json").read_text(encoding="utf-8"))
    return records, fit.minima(records), law


def valley(m) -> dict:
    """A cell, with losses [seeds, lr] at the learning rates where no seed lacks one."""
    common = [x for x, loss in m.points if math.isfinite(loss)]
    losses = [[round(m.seeds[seed][x], 7) for x in common] for seed in sorted(m.seeds)]
    rates = [
        float(f"{2**x:.4g}") for x in common
    ]  # a sweep rounds its learning rates like this
    return dict(shape=m.shape, T=m.T, batch=m.batch_size, lr=rates, losses=losses)


def content(folder: Path) -> dict:
    """The data of the page, rounded, so that every machine writes the same bytes."""
    records, found, law = measured(folder)
    cells = [cell for cell in map(valley, found) if len(cell["lr"]) > 1]
    points = [m for m in found if not m.why_not]
    lengths = {cell["T"] for cell in cells}
    middle = round(math.prod(lengths) ** (1 / len(lengths)))
    return {
        "runs": len(records),
        "cells": cells,
        "middle": middle,
        "folder": folder.name,
        "minima": [
            dict(shape=m.shape, T=m.T, beta=m.beta, x=round(float(m.x), 6))
            for m in points
        ],
        "law": {
            name: law.get(name) for name in ("a", "b", "q", "b_interval", "q_interval")
        },
        "seq_len": records[0]["seq_len"],
        "layers": records[0]["n_layer"],
        "seeds": max(len(cell["losses"]) for cell in cells),
        "warmup": sorted({r["warmup_tokens"] for r in records}),
    }


def page(folder: Path = FOLDER) -> str:
    """The page. Raises OSError or UserError if the folder has no records or no law."""
    template = Path(__file__).with_suffix(".template.html").read_text(encoding="utf-8")
    data = json.dumps(
        content(folder), separators=(",", ":")
    )  # pure ASCII, so no U+2028 either
    return template.replace(
        "{{DATA}}", data.replace("<", r"\u003c")
    )  # no </script> from a record


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("page.py", __doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=FOLDER, help="records and law.json"
    )
    try:
        text = page(parser.parse_args(argv).folder)
    except (UserError, OSError) as error:
        return fail("page.py", error)
    (ROOT / "docs/index.html").write_text(text, encoding="utf-8", newline="\n")
    print(f"docs/index.html, {len(text.encode()) / 1000:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
