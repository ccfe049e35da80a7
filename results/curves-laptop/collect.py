"""Copy the records and the validation losses of run.sh's runs from runs/curves.

python results/curves-laptop/collect.py [FOLDER]
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(sys.argv[1] if sys.argv[1:] else "runs/curves")

records = []
curves = []
for path in sorted(FOLDER.glob("*/record.json")):
    records.append(path.read_text().replace("\n", " "))
    lines = map(json.loads, (path.parent / "metrics.jsonl").read_text().splitlines())
    points = [line for line in lines if "val_loss" in line]
    curve = {"run": path.parent.name, "tokens": [point["tokens"] for point in points]}
    for name in ("val_loss", "average_val_loss"):
        if name in points[0]:
            curve[name] = [round(point[name], 5) for point in points]
    curves.append(json.dumps(curve))
(HERE / "records.jsonl").write_text("\n".join(records) + "\n")
(HERE / "curves.jsonl").write_text("\n".join(curves) + "\n")
print(len(records), "runs")
