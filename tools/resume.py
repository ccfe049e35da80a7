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
    """The parent's config fields, changed by the typed ones; what depends on others is left out.

    --decay_tokens without --total_tokens lets the decay begin right here.
    """
    parent, derived = saved["config"], {"out", "decay_tokens", "device", "compile"}
    fields = {name: value for name, value in parent.items() if name not in derived}
    batch_size = typed.get("batch_size", parent["batch_size"])
    fields["micro_batch_size"] = math.gcd(parent["micro_batch_size"], batch_size)
    if "decay_tokens" in typed:
        fields["total_tokens"] = saved["tokens"] + typed["decay_tokens"]
    return fields | typed


def check_branch(cfg, saved: dict, planned: bool) -> None:
    """Raise ValueError if cfg cannot continue this checkpoint. planned: its schedule knows T."""
    tokens, parent, T = saved["tokens"], saved["config"], f"--total_tokens {cfg.total_tokens:,}"
    if cfg.total_tokens < tokens + cfg.batch_tokens:
        raise ValueError(f"{T}: the checkpoint has seen {tokens:,} already")
    replanned = planned and cfg.total_tokens != parent["total_tokens"]
    if replanned and cfg.schedule == parent["schedule"]:
        raise ValueError(f"{T}: this {cfg.schedule} was planned for {parent['total_tokens']:,}; "
                         "train a new one or branch with --schedule wsd")  # fmt: skip
    decay_start = cfg.total_tokens - cfg.decay_tokens
    if cfg.decay_tokens and decay_start < tokens:
        raise ValueError(f"--decay_tokens {cfg.decay_tokens:,}: the decay to {cfg.total_tokens:,} "
                         f"would begin at {decay_start:,}; the checkpoint is at {tokens:,}")  # fmt: skip


def start_branch(parent: dict, config: dict) -> dict:
    """A parent's checkpoint as the start of a branch: none of its time, its data so far."""
    tokens, now = parent["tokens"], config["data"] or "embedded"
    stages = parent.get("stages") or runs.stages_of(parent["config"])
    past = [stage for stage in stages if stage[0] < tokens]
    if not past or past[-1][1] != now:
        past.append([tokens, now])
    stages = runs.stages_of(config, past)
    return parent | {"parent": parent["path"], "seconds": 0.0, "stages": stages}
