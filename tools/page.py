"""Build docs/index.html, the page to drag, from the records of a sweep over learning rates.

    python tools/page.py                     from results/wsd-laptop
    python tools/page.py results/my-sweep    from other records, with their law.json

The page holds its data, and needs no network. tools/page.html is its template.
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "results/wsd-laptop"


def measured(folder: Path) -> tuple[list[dict], list, dict]:
    """Records, usable minima and law of a sweep. All that this file knows about fit.py."""
    import fit

    records = fit.read_records([folder])
    law = json.loads((folder / "law.json").read_text(encoding="utf-8"))
    return records, fit.usable(fit.minima(records)), law


def valleys(records: list[dict]) -> list[dict]:
    """The cells, each with the learning rates that all its seeds have, and losses [seeds, rates].

    A diverged run has no loss, so its learning rate is left out.
    """
    cells: dict = {}
    for r in records:
        seeds = cells.setdefault((r["shape"], r["total_tokens"], r["batch_size"]), {})
        rates = seeds.setdefault(r["seed"], {})
        if not r["diverged"]:
            rates[r["lr"]] = round(r["val_loss"], 7)
    found = []
    for (shape, T, batch_size), seeds in sorted(cells.items(), key=lambda c: (len(c[0][0]), c[0])):
        common = sorted(set.intersection(*map(set, seeds.values())))
        losses = [[seeds[seed][lr] for lr in common] for seed in sorted(seeds)]
        found.append(dict(shape=shape, T=T, batch=batch_size, lr=common, losses=losses))
    return [cell for cell in found if len(cell["lr"]) > 1]


def bend(law: dict, T: float) -> dict | None:
    """The bent law of docs/bend.md, with the critical batch size beta_c at T in place of c."""
    if "bent" not in law:
        return None
    bent = law["bent"]
    beta_c = math.exp(bent["c"] + bent["kappa"] * math.log(T))
    return {name: bent[name] for name in ("a", "b0", "q", "kappa")} | {"beta_c": beta_c}


def content(folder: Path) -> dict:
    """All numbers of the page. Rounded, so that any machine writes the same bytes."""
    records, minima, law = measured(folder)
    cells, first = valleys(records), records[0]
    middle = lambda values: 2 ** (sum(map(math.log2, values)) / len(values))
    T = round(middle({cell["T"] for cell in cells}))
    return {
        "runs": len(records), "cells": cells, "middle": T,
        "minima": [(m.shape, m.T, m.beta, round(float(m.x), 6)) for m in minima],
        "law": {name: law.get(name) for name in ("a", "b", "q", "b_interval", "q_interval")},
        "bent": bend(law, T), "seq_len": first["seq_len"], "layers": first["n_layer"],
        "warmup": sorted({r["warmup_tokens"] for r in records}), "folder": folder.name,
    }  # fmt: skip


def page(folder: Path = FOLDER) -> str:
    """The whole HTML file. Raises OSError or ValueError if the folder has no records or law."""
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return template.replace("{{DATA}}", json.dumps(content(folder), separators=(",", ":")))


def main(argv: list[str] | None = None) -> int:
    from tools.config import fail, program_parser

    parser = program_parser("page.py", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="records and law.json")
    try:
        text = page(parser.parse_args(argv).folder)
    except (OSError, ValueError) as error:
        return fail("page.py", error)
    (ROOT / "docs/index.html").write_text(text, encoding="utf-8", newline="\n")
    print(f"docs/index.html, {len(text.encode()) / 1000:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of tools/
    sys.exit(main())
