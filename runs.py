"""Where a run starts, and the folder that it leaves.

    config.json      its settings, and when, where and with which code it started
    metrics.jsonl    a line for every --log_every, and for every validation
    ckpt/TOKENS.pt   checkpoints, named after the tokens seen
    record.json      settings, results and origin. If it exists, the run is finished

A run is new, or continues from its newest checkpoint (--resume), or starts from a
checkpoint of a different run (--branch). Read `plan` first, which tells these cases apart.

    python runs.py runs    list the runs in a folder, finished or not
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import torch

import data
from config import FIXED, TrainConfig, make_config, runtime_fields, saved_config
from schedules import SCHEDULES, has_decay, is_planned, unread
from tools import devices, files, flags, tokenizers
from tools.flags import UserError

# -- Where a run starts ------------------------------------------------------------------
# The start of a run is a dict. It is a checkpoint of the run, or of its parent with other
# `stages` and so on, or, at 0 tokens, a checkpoint without weights.


def plan(
    typed: dict, resume: bool, branch: Path | None
) -> tuple[TrainConfig, dict | None]:
    """The config of a run, and its start, None if the run is finished.

    typed: fields from the command line. Raises UserError or OSError.
    """
    typed = with_absolute_paths(typed)
    saved = read_run(Path(typed["out"])) if resume else None
    if saved:
        cfg, start = resumed_run(saved, typed, branch)
    elif branch:
        cfg, start = branched_run(read_checkpoint(branch_point(branch)), typed)
    else:
        cfg = make_config(**with_vocabulary(typed))
        start = new_start(cfg)
    for name in typed.keys() & unread(cfg.schedule):
        readers = [other for other in SCHEDULES if name in SCHEDULES[other].reads]
        raise UserError(
            f"--{name} {typed[name]}: has no effect with --schedule {cfg.schedule}, "
            f"only with {', '.join(readers)}"
        )
    return cfg, start


def new_start(cfg: TrainConfig) -> dict:
    """The start of a run with initial weights."""
    stages = stages_of(cfg)
    return dict(tokens=0, seconds=0.0, diverged=False, parent=None, stages=stages)


def resumed_run(
    saved: dict, typed: dict, branch: Path | None
) -> tuple[TrainConfig, dict | None]:
    """Continue the run in --out. It keeps its settings, except for those marked `runtime`.

    saved: its config.json. typed and branch may repeat the flags that started the run,
    because a cluster types the same command again.
    """
    # 1. Refuse flags that would make it a different run
    out = Path(typed["out"])
    fields = dict(saved["config"])
    runtime = runtime_fields(fields)
    parent = saved["origin"]["parent"]
    if branch and not (parent and Path(parent).is_relative_to(branch.resolve())):
        raise UserError(
            f"--branch {branch}: the run in {out} started from {parent or 'nothing'}; "
            "leave the flag out"
        )
    for name, value in typed.items():
        if name not in runtime and value not in (fields.get(name), "auto"):
            raise UserError(
                f"--{name} {value}: the run in {out} has {fields.get(name)}; "
                "leave the flag out, or use --branch for a new run"
            )

    # 2. Its settings. Rank 0 saved the number of its GPU, and other ranks have others
    if devices.rank_and_world()[1] > 1:
        fields["device"] = fields["device"].partition(":")[0]
    fields |= {name: typed[name] for name in typed.keys() & runtime}
    cfg = saved_config(fields, out / "config.json")

    # 3. Its newest checkpoint. A run without one starts as it did the first time
    if (out / "record.json").exists() and (out / "curve.png").exists():
        return cfg, None
    paths = checkpoints(out)
    if paths:
        start = read_checkpoint(paths[-1])
        for name, value in start["config"].items():
            if name not in runtime and value != fields[name]:
                raise UserError(
                    f"{out / 'config.json'}: {name} is {fields[name]}, but it is "
                    f"{value} in {paths[-1]}; correct the file"
                )
    elif parent:
        start = start_from(read_checkpoint(Path(parent)), cfg)
    else:
        start = new_start(cfg)
    return cfg, start


def branched_run(parent: dict, typed: dict) -> tuple[TrainConfig, dict]:
    """A new run from a checkpoint of its parent, whose settings it keeps unless typed.

    Its decay takes the share of the run that it has in the parent. --decay_tokens without
    --total_tokens starts the decay right here.
    """
    old = parent["config"]
    tokens = parent["tokens"]
    for name in sorted(FIXED & typed.keys() & old.keys()):
        if typed[name] != old[name] and (name != "seq_len" or tokens > 0):
            raise UserError(
                f"--{name} {typed[name]}: the checkpoint has {old[name]}, "
                "and a branch cannot change it"
            )
    if "optimizer" not in parent and tokens > 0:
        raise UserError(f"--branch {parent['path']}: weights alone; choose one in ckpt/")
    if "lr" not in old and not {"lr", "power_a"} & typed.keys():
        raise UserError(
            "--branch: imported weights carry no learning rate; choose one, "
            "for example --schedule wsd --lr 1e-4"
        )
    fields = old | dict(out=None, device="auto", compile=None, decay_tokens=None)
    decays = "schedule" in old and has_decay(
        old["schedule"]
    )  # imported weights have none
    if "decay_tokens" in typed:
        fields["decay_share"] = None
    elif decays and old["decay_share"] is None:
        fields["decay_share"] = old["decay_tokens"] / old["total_tokens"]
    schedule = (old | typed).get("schedule", TrainConfig.schedule)
    if typed.get("decay_tokens") == 0 or not has_decay(schedule):
        fields["decay_data"] = None  # of the decay that this branch does not have
    if typed.get("decay_tokens"):
        fields["total_tokens"] = tokens + typed["decay_tokens"]
    cfg = make_config(**fields | typed)
    return cfg, start_from(parent, cfg)


def start_from(parent: dict, cfg: TrainConfig) -> dict:
    """The start of a branch. Raises UserError if it cannot continue this checkpoint."""
    path = parent["path"]
    old = parent["config"]
    tokens = parent["tokens"]
    total = cfg.total_tokens
    if parent.get("diverged"):  # imported weights do not say
        raise UserError(
            f"--branch {path}: the run diverged; choose an earlier checkpoint"
        )
    if total < tokens + cfg.batch_tokens:
        raise UserError(
            f"--total_tokens {total:,}: the checkpoint has seen {tokens:,} already, "
            f"and a batch has {cfg.batch_tokens:,}"
        )
    same_schedule = cfg.schedule == old.get("schedule")
    if same_schedule and is_planned(cfg.schedule) and total != old["total_tokens"]:
        raise UserError(
            f"--total_tokens {total:,}: this {cfg.schedule} was planned for "
            f"{old['total_tokens']:,}; branch with --schedule wsd"
        )
    if cfg.decay_tokens and cfg.decay_start < tokens:
        raise UserError(
            f"--decay_tokens {cfg.decay_tokens:,}: would start at "
            f"{cfg.decay_start:,}, before the checkpoint at {tokens:,}"
        )
    same_text = (cfg.data, cfg.decay_data) == (old.get("data"), old.get("decay_data"))
    return parent | {
        "parent": path,
        "seconds": 0.0,
        "diverged": False,
        "fingerprint": parent["fingerprint"] if same_text else None,
        "stages": stages_of(cfg, parent.get("stages", ()), tokens),
    }


def branch_point(path: Path) -> Path:
    """The checkpoint to branch from. For a run folder, it is the newest before the decay."""
    path = path.resolve()  # so that the branch can resume from any folder
    saved = read_run(path)
    if not saved:
        return path
    paths = before_decay(checkpoints(path), saved["config"])
    if not paths:
        raise UserError(f"--branch {path}: has no checkpoint before its decay")
    return paths[-1]


def stages_of(cfg: TrainConfig, past=(), tokens: int = 0) -> list:
    """List the text of a run as [[token position, corpus or mixture read from there], ...].

    Past stages of its parent, up to `tokens`, come first, then --data, then --decay_data.
    """
    stages = [stage for stage in past if stage[0] < tokens]
    text = cfg.data or "embedded"
    if not stages or stages[-1][1] != text:
        stages.append([tokens, text])
    if cfg.decay_data:
        stages.append([cfg.decay_start, cfg.decay_data])
    return stages


def with_absolute_paths(typed: dict) -> dict:
    """The same fields, with absolute paths, valid from any folder."""
    typed = dict(typed)
    for name in ("data", "decay_data"):
        if name in typed:
            shares = data.parse_mixture(typed[name], f"--{name}")
            typed[name] = data.format_mixture(shares)
    if tokenizers.tokenizer_file(typed.get("tokenizer", "")):
        typed["tokenizer"] = str(Path(typed["tokenizer"]).resolve())
    return typed


def with_vocabulary(typed: dict) -> dict:
    """The same fields, with the vocabulary of their corpus unless they have one."""
    if "vocab_size" in typed:
        return typed
    # all folders of a mixture have one tokenizer
    folder = next(iter(data.parse_mixture(typed.get("data", "embedded"))))
    if folder == "embedded":  # not prepared yet, perhaps
        size = tokenizers.load_tokenizer(typed.get("tokenizer", "bytes")).n_vocab
    else:
        size = data.open_corpus(folder).meta["vocab_size"]
    return typed | {"vocab_size": size}


# -- Checkpoints -------------------------------------------------------------------------


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first."""
    return sorted(path for path in (run / "ckpt").glob("*.pt") if path.stem.isdecimal())


def before_decay(paths: list[Path], config: dict) -> list[Path]:
    """Select the checkpoints that a run saved before its decay."""
    decay_start = config["total_tokens"] - config["decay_tokens"]
    return [path for path in paths if int(path.stem) <= decay_start]


def newest_checkpoint(run: Path) -> dict:
    paths = checkpoints(run)
    if not paths:
        raise UserError(f"{run}: no checkpoint in {run / 'ckpt'}; is it a run folder?")
    return read_checkpoint(paths[-1])


def read_checkpoint(path: Path) -> dict:
    """Read a checkpoint, and add its `path`.

    weights_only refuses a pickle that would run code. Rank 0 compares checksums first,
    because torch.load would accept a weight with a flipped bit. Raises UserError if the
    file is missing or damaged, or comes from a different version.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such run or checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip() if devices.rank_and_world()[0] == 0 else None
            if broken:
                raise zipfile.BadZipFile(f"wrong checksum in {broken}")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not {"config", "tokens", "model"} <= set(saved):
            raise KeyError("it lacks config, tokens or model")
    # damage makes zipfile, pickle and torch raise almost anything
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{path}: not a checkpoint, or a damaged one ({reason}); "
            "if it is damaged, delete it and resume"
        ) from None
    if saved["tokens"]:  # not imported weights
        saved_config(saved["config"], path)  # refuses that of a different version
    return saved | {"path": str(path)}


def write_checkpoint(path: Path, content: dict) -> None:
    """Save a dict in a file that appears whole or not at all. Raises OSError if that fails."""
    path.parent.mkdir(exist_ok=True)
    try:
        with files.replacing(path) as temporary, open(temporary, "wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        if not re.search("PytorchStreamWriter|inline_container", str(error)):
            raise
        raise OSError(f"{path}: cannot be written (is the disk full?)") from None


# -- The folder of a run -----------------------------------------------------------------


def read_run(folder: Path) -> dict | None:
    """The config.json of a run folder, or None if this is no run folder."""
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return saved if isinstance(saved, dict) and "config" in saved else None


def make_folder(out: str | None, name: str, resume: bool):
    """Make `out` or the next free runs/NAME-NUMBER. Return it and its lock.

    Raises UserError if `out` cannot become the folder of a run, or another process has it.
    """
    if out is None:
        for number in itertools.count(1):
            folder = Path("runs", f"{name}-{number}")
            # another process may take it first
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder, files.lock(folder / ".lock")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = os.listdir(folder)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
    # a run that was killed before it had written config.json leaves only hidden files
    if any(not name.startswith(".") for name in names):
        if not resume:
            raise UserError(
                f"--out {out}: is not empty; continue a run with --resume, or choose another folder"
            )
        if not read_run(folder):
            raise UserError(
                f"--out {out}: is not the folder of a run; choose another folder"
            )
    return folder, lock(folder)


def lock(folder: Path):
    """Lock the folder of a run until what we return is closed. Raises UserError."""
    held = files.lock(folder / ".lock")
    if not held:
        raise UserError(f"--out {folder}: another process is training there")
    for leftover in folder.rglob(".*.tmp"):
        leftover.unlink()  # of a killed process
    return held


@functools.cache  # the code that we loaded, even if it changes during a sweep
def git_version() -> str | None:
    """Commit of our source, with -dirty if it has changed; None without git or outside a clone."""
    words = "git describe --always --dirty --abbrev=40 --exclude=*".split()
    try:
        git = subprocess.run(
            words, cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError:
        return None
    return git.stdout.strip() or None


def origin(device: str, fingerprint: str) -> dict:
    """Everything needed to reproduce a run, besides its config."""
    version = git_version()
    device_name = platform.machine()
    if device.startswith("cuda"):
        device_name = torch.cuda.get_device_name(device)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git_commit": version and version.removesuffix("-dirty"),
        "git_dirty": version and version.endswith("-dirty"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device_name": device_name,
        "threads": torch.get_num_threads(),
        "processes": devices.rank_and_world()[1],
        "fingerprint": fingerprint,
    }


class Run:
    """The folder of a run that trains, and its clock.

    All processes call the methods together. Only rank 0, which has the folder `out`,
    prints and writes.
    """

    def __init__(self, out: Path | None, cfg: TrainConfig, fingerprint: str, start: dict):
        self.out = out
        self.cfg = cfg
        self.stages = start["stages"]
        self.began = time.perf_counter() - start["seconds"]
        self.logged_tokens = start["tokens"]
        self.logged_at = time.perf_counter()
        if out is None:
            return
        now = origin(cfg.device, fingerprint) | {"parent": start["parent"]}
        saved = read_run(out) or {"origin": now}
        self.origin = saved["origin"]  # of the first start
        content = {"config": dataclasses.asdict(cfg), "origin": self.origin}
        content["resumed"] = saved.get("resumed", [])
        if self.origin is not now:
            content["resumed"].append(now)
        files.write_json(out / "config.json", content)

    def seconds(self) -> float:
        """Seconds that the run has taken, in all its sessions."""
        return time.perf_counter() - self.began

    def write(self, text: str, **line) -> None:
        """Print a line for people, and add one to metrics.jsonl."""
        if self.out:
            flags.say(f"{line['tokens']:>14,} tokens   {text}")
            files.append_line(
                self.out / "metrics.jsonl", json.dumps(files.nan_to_none(line))
            )

    def log_step(self, tokens: int, lr: float, loss: float, **more) -> None:
        now = time.perf_counter()
        speed = (tokens - self.logged_tokens) / (now - self.logged_at)
        left = duration((self.cfg.total_tokens - tokens) / speed)
        self.write(
            f"loss {loss:.4f}   lr {lr:.2e}   {speed:,.0f} tokens/s   {left} left",
            tokens=tokens,
            loss=loss,
            lr=lr,
            **more,
            tokens_per_second=round(speed),
            seconds=round(self.seconds(), 2),
        )
        self.logged_tokens = tokens
        self.logged_at = time.perf_counter()

    def log_validation(self, tokens: int, losses: dict, note: str = "") -> None:
        average = losses.get("average_val_loss")
        averaged = "" if average is None else f", of the averaged weights {average:.4f}"
        text = f"validation loss {losses['val_loss']:.4f}{averaged}{note}"
        self.write(text, tokens=tokens, **losses)

    def save(self, content: dict) -> None:
        """Write average.pt without the optimizer, and a checkpoint. Delete old checkpoints."""
        if self.out is None:
            return
        content |= {
            "parent": self.origin["parent"],
            "stages": self.stages,
            "seconds": self.seconds(),
        }
        # first, because after the last checkpoint nothing is written again
        if content["average"]:
            averaged = content | {"model": content["average"], "average": None}
            averaged.pop("optimizer")
            write_checkpoint(self.out / "average.pt", averaged)
        write_checkpoint(self.out / "ckpt" / f"{content['tokens']:016d}.pt", content)
        paths = checkpoints(self.out)
        keep = paths[-self.cfg.keep_checkpoints :]
        keep += before_decay(paths, vars(self.cfg))[-1:]  # branches start there
        for path in set(paths) - set(keep):
            path.unlink()

    def finish(self, results: dict) -> None:
        """Write record.json, the mark of a finished run."""
        if self.out is None:
            return
        lines = files.read_metrics(self.out)
        speeds = [
            line["tokens_per_second"] for line in lines if "tokens_per_second" in line
        ]
        results = results | {
            "seconds": round(self.seconds(), 1),
            # evaluations only slow the line after them
            "tokens_per_second": round(np.median(speeds or [0])),
        }
        config = dataclasses.asdict(self.cfg)
        record = {"config": config, "results": results, "origin": self.origin}
        files.write_json(self.out / "record.json", record)


def duration(seconds: float) -> str:
    """3723.4 -> '1:02:03'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{seconds:02}"


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("runs.py", __doc__)
    parser.add_argument("folder", type=Path, help="folder of runs, such as runs")
    args = parser.parse_args(argv)
    folders = [file.parent for file in sorted(args.folder.rglob("config.json"))]
    found = {folder: read_run(folder) for folder in folders if read_run(folder)}
    if not found:
        return flags.fail("runs.py", f"{args.folder}: no runs below this folder")
    for folder, saved in found.items():
        total = saved["config"]["total_tokens"]
        lines = files.read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
        seen = lines[-1]["tokens"] if lines else 0
        # a sweep moves the records of its runs
        batch = saved["config"]["batch_size"] * saved["config"]["seq_len"]
        is_finished = (folder / "record.json").exists() or seen + batch > total
        finished = "finished" if is_finished else ""
        print(f"{seen:>18,} of {total:,} tokens {finished:>9}   {folder}")
    return 0


if __name__ == "__main__":
    flags.end_with_reader()
    sys.exit(main())
