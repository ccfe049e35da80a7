"""Choose the config and the checkpoint that a resumed run or a branch starts from."""

from pathlib import Path

from tools import runs
from tools.devices import rank_and_world
from tools.records import RUNTIME_FLAGS


def branch_point(path: Path) -> Path:
    """The checkpoint to branch from. For a run folder, it is the newest before the decay."""
    config = runs.read_config(path)
    if not config:
        return path
    if not (paths := runs.before_decay(runs.checkpoints(path), config)):
        raise FileNotFoundError(f"--branch {path}: has no checkpoint before its decay")
    return paths[-1]


def choose(typed: dict, actions) -> tuple[dict, dict | None, Path | str | None]:
    """The config fields, the checkpoint to resume, and the path of the parent to branch from.

    A resumed run keeps its config. Raises ValueError for a flag that would make it a different run.
    """
    saved = runs.read_config(Path(typed["out"])) if actions.resume else None
    if not saved:
        return typed, None, actions.branch
    for name, value in typed.items():
        if name not in RUNTIME_FLAGS and value not in (saved.get(name), "auto"):
            raise ValueError(f"--{name} {value}: the run in {typed['out']} has {saved.get(name)}; "
                             "leave the flag out, or use --branch for a new run")  # fmt: skip
    if rank_and_world()[1] > 1:
        saved["device"] = "auto"  # every process has a GPU of its own, and rank 0 saved its name
    fields = saved | {name: typed[name] for name in RUNTIME_FLAGS & set(typed)}
    if not runs.checkpoints(Path(typed["out"])):
        return fields, None, saved.get("parent")
    return fields, runs.newest_checkpoint(Path(typed["out"]), rename=True), None


def branched_fields(parent: dict, changes: dict, shape: set) -> dict:
    """The config of the parent checkpoint with these changes, but again with the default decay.

    --decay_tokens without --total_tokens starts the decay right here. shape: fields that determine
    the weights. Raises ValueError if one of them changes.
    """
    for name in sorted(shape & set(changes)):
        old = parent["config"].get(name, changes[name])
        if changes[name] != old and (name != "seq_len" or parent["tokens"]):
            raise ValueError(f"--{name} {changes[name]}: the checkpoint has {old}, "
                             "and a branch keeps the shape of its parent")  # fmt: skip
    if "optimizer" not in parent:
        if Path(parent["path"]).is_file():
            raise ValueError(f"--branch {parent['path']}: weights alone; choose one in ckpt/")
        if not {"lr", "power_a"} & set(changes):
            raise ValueError("--branch: released weights carry no learning rate; choose one, "
                             "for example --schedule wsd --lr 1e-4")  # fmt: skip
        return parent["config"] | changes
    fields = parent["config"] | dict(out=None, decay_tokens=None, device="auto", compile=None)
    if changes.get("decay_tokens"):
        fields["total_tokens"] = parent["tokens"] + changes["decay_tokens"]
    return fields | changes


def branch(parent: dict, cfg, planned: bool) -> dict:
    """The checkpoint of a parent as the start of a new run, which may read a different text.

    planned: does the schedule depend on the run length? Raises ValueError if cfg cannot continue.
    """
    old, tokens, total = parent["config"], parent["tokens"], cfg.total_tokens
    if total < tokens + cfg.batch_tokens:
        raise ValueError(f"--total_tokens {total:,}: the checkpoint has seen {tokens:,} already")
    if planned and cfg.schedule == old.get("schedule") and total != old["total_tokens"]:
        raise ValueError(f"--total_tokens {total:,}: this {cfg.schedule} was planned for "
                         f"{old['total_tokens']:,}; branch with --schedule wsd")  # fmt: skip
    if cfg.decay_tokens and cfg.decay_start < tokens:
        raise ValueError(f"--decay_tokens {cfg.decay_tokens:,}: would start at "
                         f"{cfg.decay_start:,}, before the checkpoint at {tokens:,}")  # fmt: skip
    same_text = all(vars(cfg)[name] == old.get(name) for name in ("data", "decay_data"))
    return parent | {
        "parent": parent["path"], "seconds": 0.0,
        "fingerprint": parent["fingerprint"] if same_text else None,
        "stages": runs.stages_of(vars(cfg), parent["stages"], tokens),
    }  # fmt: skip
