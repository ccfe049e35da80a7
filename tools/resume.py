"""Resume and branch: what may differ from the run that was there before, and where it starts."""

import math
from pathlib import Path

from tools import runs


def resumed_fields(out: Path, typed: dict, may_change: set[str]) -> dict:
    """config.json of the run in `out`, with the typed fields that may change.

    Raises ValueError for a flag that would make it a different run.
    """
    saved = runs.read_config(out)
    for name, value in typed.items():
        if name not in may_change | {"out"} and value not in (saved.get(name), "auto"):
            raise ValueError(f"--{name} {value}: the run in {out} has {saved.get(name)}; "
                             "leave the flag out, or use --branch for a new run")  # fmt: skip
    return saved | {name: typed[name] for name in may_change & set(typed)} | {"out": str(out)}


def branch_point(path: Path) -> Path:
    """The checkpoint to branch from; of a run folder the newest one before its decay."""
    if not runs.is_run(path):
        return path
    if not (paths := runs.checkpoints(path)):
        raise FileNotFoundError(f"--branch {path}: this run has no checkpoint yet")
    config = runs.read_config(path)
    decay_start = config["total_tokens"] - config["decay_tokens"]
    return ([p for p in paths if int(p.stem) <= decay_start] or paths)[-1]


def check_shape(saved: dict, typed: dict, shape: set[str]) -> None:
    """Raise ValueError if a typed field would change the shape of the saved model."""
    for name in shape & set(typed):
        if typed[name] != saved["config"][name]:
            raise ValueError(f"--{name} {typed[name]}: the checkpoint has {saved['config'][name]}, "
                             "and a branch keeps the shape of its parent")  # fmt: skip


def branched_fields(saved: dict, typed: dict) -> dict:
    """The parent's config fields, changed by the typed ones; what depends on others is derived.

    --decay_tokens without --total_tokens lets the decay begin right here.
    """
    parent = saved["config"]
    fields = parent | {"out": None, "decay_tokens": None, "device": "auto", "compile": None}
    batch_size = typed.get("batch_size", parent["batch_size"])
    fields["micro_batch_size"] = math.gcd(parent["micro_batch_size"], batch_size)
    if "decay_tokens" in typed:
        fields["total_tokens"] = saved["tokens"] + typed["decay_tokens"]
    return fields | typed


def released(path: Path, config: dict, weights: dict) -> dict:
    """Released weights as a checkpoint to branch from: no optimizer, no tokens, no corpus."""
    return dict(path=str(path), config=config, model=weights, tokens=0, fingerprint=None)


def check_text(start: dict | None, path, fingerprint: str) -> None:
    """Raise ValueError if a checkpoint was trained on other text than that of this corpus."""
    trained_on = start and start["fingerprint"]
    if trained_on not in (None, fingerprint):
        raise ValueError(f"--data {path}: fingerprint {fingerprint}, but the checkpoint was "
                         f"trained on {trained_on}")  # fmt: skip


def plan(typed: dict, actions, may_change: set, shape: set, reads: dict, read, told: dict) -> tuple:
    """--resume, --branch or neither -> (config fields, checkpoint to start from or None).

    reads: schedules.READS. read: path -> checkpoint. told: see train.plan.
    A checkpoint of a parent is marked "branch". Raises ValueError or OSError.
    """
    out = Path(typed.get("out", ""))
    if actions.resume and "out" not in typed:
        raise ValueError("--resume: needs --out, the folder of the run")
    if actions.resume and runs.is_run(out):
        fields = resumed_fields(out, typed, may_change)
        if runs.checkpoints(out):
            return fields, read(Path(told["path"])) if told else runs.newest_checkpoint(out)
        if not fields.get("parent"):  # stopped before its first checkpoint
            return fields, None
        begun = {"branch": True, "fingerprint": fields["fingerprint"]}
        return fields, read(Path(fields["parent"])) | begun
    if actions.branch is None:
        return typed, None
    start = read(branch_point(actions.branch)) | {"branch": True}
    if {"data", "decay_data"} & set(typed):
        start["fingerprint"] = None  # any corpus will do
    if "optimizer" in start:
        check_shape(start, typed, shape | {"preset"})
        fields = branched_fields(start, typed)
        if "decay_tokens" not in reads[fields["schedule"]]:
            fields["decay_data"] = typed.get("decay_data")
        return fields, start
    if Path(start["path"]).is_file():
        raise ValueError(f"--branch {start['path']}: weights alone; choose a checkpoint in ckpt/")
    check_shape(start, typed, shape - {"seq_len"})
    if not {"lr", "power_a"} & set(typed):
        raise ValueError("--branch: released weights carry no learning rate; choose one, "
                         "for example --schedule wsd --lr 1e-4")  # fmt: skip
    return start["config"] | typed, start


def begin(start: dict, cfg, planned: bool) -> dict:
    """The checkpoint that a run starts from, with the stages of its data.

    A branch has none of its parent's time, but what the parent read stays as it was. Raises
    ValueError if cfg cannot continue it. planned: the schedule of cfg knows its end.
    """
    tokens, parent, stages = start["tokens"], start["config"], start.get("stages")
    stages = stages or runs.stages_of({"data": None} | parent)
    if not start.get("branch"):
        return start | {"stages": stages}
    T = f"--total_tokens {cfg.total_tokens:,}"
    if cfg.total_tokens < tokens + cfg.batch_tokens:
        raise ValueError(f"{T}: the checkpoint has seen {tokens:,} already")
    schedule, planned_for = parent.get("schedule"), parent.get("total_tokens")
    if planned and cfg.schedule == schedule and cfg.total_tokens != planned_for:
        raise ValueError(f"{T}: this {schedule} was planned for {planned_for:,}; "
                         "train a new one or branch with --schedule wsd")  # fmt: skip
    decay_start = cfg.total_tokens - cfg.decay_tokens
    if cfg.decay_tokens and decay_start < tokens:
        raise ValueError(f"--decay_tokens {cfg.decay_tokens:,}: would begin at {decay_start:,}, "
                         f"before the checkpoint at {tokens:,}")  # fmt: skip
    past, now = [stage for stage in stages if stage[0] < tokens], cfg.data or "embedded"
    if not past or past[-1][1] != now:
        past.append([tokens, now])
    ours = dict(data=cfg.data, decay_data=cfg.decay_data)
    ours |= dict(total_tokens=cfg.total_tokens, decay_tokens=cfg.decay_tokens)
    stages = runs.stages_of(ours, past)
    return start | {"parent": start["path"], "seconds": 0.0, "stages": stages}
