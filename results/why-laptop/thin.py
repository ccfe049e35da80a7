"""Copy the records of finished sweeps from runs/why, and every eighth point of their curves.

    python results/why-laptop/thin.py [FOLDER]
    python results/why-laptop/thin.py runs/long results/long-laptop

A curve keeps its last point before the decay of the learning rate, where the relative
updates are read off. Curves that we have already stay as they are.
"""

import json
import shutil
import sys
from pathlib import Path

HERE = Path(sys.argv[2]) if sys.argv[2:] else Path(__file__).parent


def thinned(line: str) -> str:
    run = json.loads(line)
    tokens = run["curve"]["tokens"]
    keep = set(range(0, len(tokens), 8)) | {len(tokens) - 1}
    stable = [
        i for i, n in enumerate(tokens) if n <= run["total_tokens"] - run["decay_tokens"]
    ]
    keep |= set(stable[-1:])
    curve = {
        name: [column[i] for i in sorted(keep)] for name, column in run["curve"].items()
    }
    return json.dumps(run | {"curve": curve})


runs = Path(sys.argv[1] if sys.argv[1:] else "runs/why")
for file in sorted(runs.rglob("records.jsonl")):
    sweep = file.parent
    if (sweep / "trunks").exists():  # not finished
        continue
    out = HERE / sweep.relative_to(runs)
    out.mkdir(parents=True, exist_ok=True)
    curves = out / "curves.jsonl"
    ours = set(curves.read_text().splitlines()) if curves.exists() else set()
    lines = []
    for line in (sweep / "curves.jsonl").read_text().splitlines():
        lines.append(line if line in ours else thinned(line))
    curves.write_text("".join(line + "\n" for line in lines))
    shutil.copy(file, out)
    print(out, len(lines))
