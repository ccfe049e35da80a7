"""The run folder: records, metrics, checkpoints, lock."""

import contextlib
import datetime
import json
import os
import pickle
import signal
import sys
import time
import zipfile
from pathlib import Path

import torch


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run's folder, oldest first; their names are the tokens seen."""
    return sorted((run / "ckpt").glob("*.pt"))


def read_checkpoint(path: Path) -> dict:
    """What train.save_checkpoint wrote. Raises FileNotFoundError, or ValueError for a damaged file.

    weights_only: a pickle that would run code is refused. The checksums are compared first, since
    torch.load itself would take a flipped bit for a weight.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such run or checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"wrong checksum in {damaged}")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not {"config", "tokens", "model", "optimizer"} <= set(saved):
            raise KeyError("it lacks config, tokens, model or optimizer")
        return saved
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: not a checkpoint, or a damaged one ({reason})") from None


def newest_checkpoint(run: Path) -> dict:
    """The newest checkpoint of a run's folder that can be read; damaged ones are reported.

    Raises FileNotFoundError where there is none, ValueError where none can be read.
    """
    paths = checkpoints(run)
    if not paths:
        raise FileNotFoundError(f"{run}: no checkpoint in {run / 'ckpt'}, is it the folder of a run?")
    for path in reversed(paths):
        try:
            return read_checkpoint(path)
        except ValueError as damage:
            print(f"{damage}, trying the one before it", file=sys.stderr)
    raise ValueError(f"{run}: none of its checkpoints can be read")


def prune_checkpoints(out: Path, keep: int, decay_start: int) -> None:
    """Delete all but the newest, and the last one before the decay: runs go on from there."""
    paths = checkpoints(out)
    stable = [path for path in paths if int(path.stem) <= decay_start][-1:]
    for path in paths[:-keep]:
        if path not in stable:
            path.unlink()


def continue_metrics(path: Path, tokens: int, at_the_end: bool):
    """Open metrics.jsonl behind its last line at or before `tokens`; later and torn lines go.

    at_the_end: all steps are done, the last evaluation comes next; it may be there already.
    """
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
            if entry["tokens"] < tokens or (entry["tokens"] == tokens and not (at_the_end and "val_loss" in entry)):
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError):
            pass  # the process was killed while it wrote this line
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
    return open(path, "a", buffering=1)  # line by line: readable while it grows


def lock(out: Path):
    """Keep other processes out of a run's folder until this one ends, however it ends.

    Raises BlockingIOError if another process is there.
    """
    file = open(out / ".lock", "w")
    try:
        import fcntl  # not on Windows: there, nobody guards the folder
    except ImportError:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"--out {out}: another process is training there") from None
    return file


@contextlib.contextmanager
def stop_request(time_limit: float | None):
    """Yields a function: must we save and stop? After Ctrl-C, SIGTERM or time_limit seconds, yes."""
    began, signals = time.perf_counter(), []

    def note(number, _frame):
        signals.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # who asks twice does not want to wait; a cluster's SIGTERM may come twice by itself

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(signals) or (time_limit is not None and time.perf_counter() - began > time_limit)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_json(path: Path, content: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def clock(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=round(seconds))  # prints as 0:03:20


def is_run(out: Path) -> bool:
    """Is this the folder of a run? Other programs, too, call a file config.json; --overwrite spares theirs."""
    config = out / "config.json"
    return config.exists() and '"total_tokens"' in config.read_text(encoding="utf-8", errors="replace")
