"""Write the records of results/ anew, once, into research/results/.

    python research/migrate.py

Every record gets three parts with the names and defaults of today, and what all runs of a
folder share goes to its settings.json. Settings that are gone and had one value are left
out, as well as those of forks in folders where no run used them. Curves that no program
reads are left out, the others have five digits.
"""

import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from config import FIELDS
from records import as_record
from schedules import has_decay, is_planned

OLD = ROOT / "results"
NEW = ROOT / "research/results"
READ = ("memory-laptop", "why-laptop", "curves-laptop")  # folders whose curves we read
GONE = {  # with the only value that they had
    "router_rule": "hidden",
    "router_mup": True,
    "depth_init": False,
    "past_data": None,
}
# settings of forks, and their value in a run without the fork
FORKS = {"memory": None, "fixed_norm": "none", "batch_ramp": None, "average_power": 16}
MEASURED = {"tokens", "diverged", "n_params", "n_active_params", "seconds"}
MEASURED |= {"tokens_per_second"}
PREFIXES = ("val_", "average_val_", "epochs_")
OLDER = {  # what the oldest runs do not name, and did
    "power_q": 1.0,
    "average": False,
    "decay_data": None,
    "recompute": False,
    "processes": 1,
}


def nested(flat: dict, used: set[str]) -> dict:
    """A flat record as a record of today, but for decay_share. used: settings of forks."""
    for name, value in GONE.items():
        assert flat.get(name, value) == value
    flat = OLDER | {"final_eval_tokens": flat.get("eval_tokens")} | flat
    for name in used & {"memory", "fixed_norm", "batch_ramp"}:
        flat.setdefault(name, FORKS[name])
    names = [name for name in (*FIELDS, *FORKS) if name in FIELDS or name in used]
    config = {name: flat[name] for name in names if name in flat}
    results = {
        name: x
        for name, x in flat.items()
        if name in MEASURED or name.startswith(PREFIXES)
    }
    averaged = config["average"] and not config["decay_tokens"]
    averaged = averaged and not is_planned(config["schedule"])
    loss = results.get("average_val_loss" if averaged else "val_loss")
    rest = flat.keys() - FIELDS.keys() - results.keys() - GONE.keys() - FORKS.keys()
    origin = {name: x for name, x in flat.items() if name in rest}
    return {"config": config, "results": {"loss": loss} | results, "origin": origin}


def add_shares(records: list[dict]) -> None:
    """Add decay_share: of all runs of a folder with one kind of decay, or None."""
    kinds: dict = {}
    for r in records:
        config = r["config"]
        kind = config["schedule"], config["average"], config["decay_shape"]
        kinds.setdefault(kind, []).append(config)
    for (schedule, *_), configs in kinds.items():
        share = 0.1  # not read
        if has_decay(schedule):
            share = share_of(configs)
        for config in configs:
            config["decay_share"] = share


def share_of(configs: list[dict]) -> float | None:
    for share in (0.1, 0.0, 1.0, 0.2, 0.4):
        for config in configs:
            total = config["total_tokens"]
            tokens = min(int(share * total), total - config["warmup_tokens"])
            if tokens != config["decay_tokens"]:
                break
        else:
            return share
    return None


def ordered(record: dict) -> dict:
    config = record["config"]
    names = [name for name in (*FIELDS, *FORKS) if name in config]
    return record | {"config": {name: config[name] for name in names}}


def shared_parts(records: list[dict]) -> dict:
    """What all these records share, part by part."""
    shared = {}
    for part in ("config", "results", "origin"):
        first = records[0][part]
        same = {}
        for name, value in first.items():
            others = [r[part].get(name, "missing") for r in records]
            if all(type(x) is type(value) and x == value for x in others):
                same[name] = value
        shared[part] = same
    return shared


def without(record: dict, shared: dict) -> dict:
    line = {}
    for part, values in record.items():
        rest = {n: x for n, x in values.items() if n not in shared[part]}
        if rest:
            line[part] = rest
    return line


def five_digits(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write_lines(path: Path, lines: list[dict]) -> None:
    text = [json.dumps(line, separators=(",", ":")) + "\n" for line in lines]
    path.write_text("".join(text), encoding="utf-8")


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def main() -> int:
    counts = Counter()
    for top in sorted(path for path in OLD.iterdir() if path.is_dir()):
        files = sorted(top.rglob("records.jsonl"))
        rows = {file: read_lines(file) for file in files}
        used = {
            name
            for some in rows.values()
            for r in some
            for name, value in FORKS.items()
            if r.get(name, value) != value
        }
        for file in files:
            records = [nested(r, used) for r in rows[file]]
            add_shares(records)
            records = [ordered(r) for r in records]
            shared = shared_parts(records)
            to = NEW / file.parent.relative_to(OLD)
            to.mkdir(parents=True, exist_ok=True)
            text = json.dumps(shared, indent=1)
            (to / "settings.json").write_text(text + "\n", encoding="utf-8")
            lines = [without(r, shared) for r in records]
            write_lines(to / "records.jsonl", lines)

            # what a reader finds is what was there
            for flat, line, record in zip(rows[file], lines, records):
                found = as_record(json.loads(json.dumps(line)), shared)
                assert found == record
                every = found["config"] | found["results"] | found["origin"]
                for name, value in flat.items():
                    if name in every:
                        assert every[name] == value, (file, name)
                    else:
                        assert name in GONE.keys() | FORKS.keys() - used, (file, name)
                        counts[name, str(value)] += 1
                counts["records"] += 1

            curves = file.with_name("curves.jsonl")
            if top.name == "curves-laptop":
                (to / "curves.jsonl").write_text(curves.read_text("utf-8"), "utf-8")
            elif top.name in READ and curves.exists():
                lines = []
                for run in read_lines(curves):
                    config = {
                        name: x
                        for name, x in run.items()
                        if name in FIELDS.keys() | used and name not in shared["config"]
                    }
                    curve = {
                        name: [five_digits(x) for x in values]
                        for name, values in run["curve"].items()
                        if name != "lr"  # follows from the settings
                    }
                    lines.append({"config": config, "curve": curve})
                write_lines(to / "curves.jsonl", lines)
                counts["curves"] += len(lines)
    for name, n in counts.items():
        print(name, n)
    return 0


if __name__ == "__main__":
    sys.exit(main())
