"""The run folder: config.json, metrics.jsonl, checkpoints, record.json, and who may change them."""

import contextlib
import datetime
import itertools
import json
import math
import os
import pickle
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import torch

from tools.devices import any_process, peak_flops, rank_and_world, total
from tools.records import read_metrics

# ---------------------------------------------------------------------------------------------
# Files


def write_json(path: Path, content: dict) -> None:
    """The file appears whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first; their names are the tokens seen."""
    return sorted((run / "ckpt").glob("*.pt"))


def write_checkpoint(path: Path, content: dict) -> None:
    """Save a dict; the file appears whole or not at all. Raises OSError if it cannot be written."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or "is the disk full?"
        raise OSError(f"{path}: cannot be written ({reason})") from None


def read_checkpoint(path: Path, verify: bool = True) -> dict:
    """What write_checkpoint saved, and its "path".

    weights_only: a pickle that would run code is refused. verify: compare checksums first, because
    torch.load itself would take a flipped bit for a weight.
    Raises FileNotFoundError, or ValueError for a damaged file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such run or checkpoint")
    damage = zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError
    try:
        with zipfile.ZipFile(path) as archive:
            if verify and (broken := archive.testzip()):
                raise zipfile.BadZipFile(f"wrong checksum in {broken}")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not {"config", "tokens", "model"} <= set(saved):
            raise KeyError("it lacks config, tokens or model")
        return saved | {"path": str(path)}
    except (*damage, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: not a checkpoint, or a damaged one ({reason})") from None


def newest_checkpoint(run: Path) -> dict:
    """The newest readable checkpoint of a run folder; damaged ones are reported.

    Raises FileNotFoundError if there is none, ValueError if none can be read.
    """
    if not checkpoints(run):
        raise FileNotFoundError(f"{run}: no checkpoint in {run / 'ckpt'}; is this a run folder?")
    for path in reversed(checkpoints(run)):
        try:
            return read_checkpoint(path)
        except ValueError as damage:
            print(f"{damage}, trying the one before it", file=sys.stderr)
    raise ValueError(f"{run}: none of its checkpoints can be read")


# ---------------------------------------------------------------------------------------------
# The folder


def is_run(out: Path) -> bool:
    """Is this a run folder? --overwrite spares a config.json of any other program."""
    config = out / "config.json"
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    return '"total_tokens"' in text


def read_config(out: Path) -> dict:
    """config.json of a run folder. Raises ValueError if it is damaged."""
    try:
        return json.loads((out / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"--out {out}: config.json is damaged; --overwrite starts again") from None


def stages_of(config: dict, past: list | None = None) -> list:
    """[[token position, corpus or mixture read from there on], ...]: past, --data, --decay_data.

    Checkpoints without stages, which older versions wrote, have the past in past_data.
    """
    stages, begin = list(past or []), 0
    if past is None:
        for text in filter(None, (config.get("past_data") or "").split(";")):
            mixture, _, end = text.rpartition("@")
            stages, begin = [*stages, [begin, mixture]], int(end)
        stages.append([begin, config["data"] or "embedded"])
    if config.get("decay_data"):
        stages.append([config["total_tokens"] - config["decay_tokens"], config["decay_data"]])
    return stages


def lock(folder: Path):
    """Return a file that keeps other processes out of the folder until it is closed.

    Raises BlockingIOError if another process is there.
    """
    file = open(folder / ".lock", "w")
    try:
        import fcntl  # not on Windows; there the folder is not guarded

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except BlockingIOError:
        raise BlockingIOError(f"--out {folder}: another process is training there") from None
    return file


def make_folder(out: str | None, name: str, resume: bool, overwrite: bool):
    """Make the folder `out`, or the next free runs/NAME-NUMBER; -> (folder, its lock).

    Raises OSError if it cannot be made, or if something is in the way.
    """
    if out is None:
        for number in itertools.count(1):
            folder = Path("runs") / f"{name}-{number}"
            with contextlib.suppress(FileExistsError):  # another process may take it first
                folder.mkdir(parents=True)
                return folder, lock(folder)
    out, has_run = Path(out), is_run(Path(out))
    if out.is_dir() and not has_run and set(os.listdir(out)) - {".lock"}:
        raise FileExistsError(f"--out {out}: has other things in it; choose another folder")
    if has_run and not (resume or overwrite):
        raise FileExistsError(f"--out {out}: holds a run; --resume continues it, --overwrite "
                              "replaces it, or choose another folder")  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {out}: cannot be written ({error.strerror})") from None
    held = lock(out)
    for entry in out.iterdir() if has_run and not resume else ():
        if entry.name != ".lock":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return out, held


def origin(device: str, fingerprint: str) -> dict:
    """Everything needed to reproduce a run, besides its config."""

    def git(*words):
        command = ["git", "-C", Path(__file__).parent, *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return done.stdout.strip()
        except (OSError, subprocess.CalledProcessError):  # no git, or not a clone
            return None

    changes, on_gpu = git("status", "--porcelain"), device.startswith("cuda")
    processor = platform.processor() or platform.machine()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": None if changes is None else bool(changes),
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
        "platform": platform.platform(),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else processor,
        "threads": torch.get_num_threads(), "processes": rank_and_world()[1],
        "fingerprint": fingerprint,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------
# A run while it trains


@contextlib.contextmanager
def stop_request(time_limit: float | None):
    """Yield a function: time to save and stop? After Ctrl-C, SIGTERM or time_limit seconds."""
    began, signals = time.perf_counter(), []

    def note(number, _frame):
        signals.append(number)
        if number == signal.SIGINT:  # a second Ctrl-C kills immediately; a cluster repeats SIGTERM
            signal.signal(number, signal.SIG_DFL)

    over = lambda: time_limit is not None and time.perf_counter() - began > time_limit
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(signals) or over()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def clock(seconds: float) -> datetime.timedelta:
    """A duration that prints as 0:03:20."""
    return datetime.timedelta(seconds=round(seconds))


def append_to(path: Path):
    """Open a file to append whole lines; a half-written last line ends here."""
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    file = open(path, "a", buffering=1, encoding="utf-8")  # line by line: readable while it grows
    file.write("\n" if torn else "")
    return file


def summary(losses: dict) -> str:
    """Validation losses as one phrase."""
    average = losses.get("average_val_loss")
    averaged = "" if average is None else f", of the averaged weights {average:.4f}"
    return f"validation loss {losses['val_loss']:.4f}{averaged}"


def mean_losses(names: list[str], shares: tuple, losses: list[dict]) -> dict:
    """Validation losses of several sources -> of their mixture, and the val_loss of each."""
    if len(losses) == 1:
        return losses[0]
    mean = lambda value: sum(share * value(each) for share, each in zip(shares, losses))
    loss = mean(lambda each: each["val_loss"])
    bytes_per_token = mean(lambda each: each["val_loss"] / each["val_bpb"] / math.log(2))
    sources = {f"val_loss_{name}": each["val_loss"] for name, each in zip(names, losses)}
    return {"val_loss": loss, "val_bpb": loss / bytes_per_token / math.log(2), **sources}


def announce(config: dict, start: dict | None, batch_tokens: int, epochs: dict) -> str:
    """What a run is going to do, in two lines."""
    read = ", ".join(f"{n:.2f} epochs of {name}" for name, n in epochs.items())
    begin = f"from {start['tokens']:,} " if start else ""
    compiled, (_, world) = "compiled" if config["compile"] else "eager", rank_and_world()
    many = f"{torch.get_num_threads()} threads" + f", {world} processes" * (world > 1)
    return (
        f"{config['out']}: {config['preset']} under {config['schedule']}, {begin}to "
        f"{config['total_tokens']:,} tokens, {batch_tokens:,} a step, {read}\n"
        f"on {config['device']}, {config['dtype']}, {compiled}, {many}"
    )


def last_words(record: dict | None, out: str) -> str:
    """How a run ended; None: it was stopped."""
    if record is None:
        command = shlex.join(["python", "train.py", "--out", out, "--resume"])
        return f"stopped and saved; continue with: {command}"
    if not record:  # another rank's
        return ""
    took = f"after {clock(record['seconds'])}; record and curve.png in {out}"
    if record["diverged"]:
        return f"diverged, {took}"
    text = (Path(out) / "sample.txt").read_text(encoding="utf-8")
    losses = f"{summary(record)} nats per token, {record['val_bpb']:.4f} bits per byte"
    return f"\na sample:\n\n{text}\n\n{losses}, {took}"


class Run:
    """The run folder of a run that trains, its clock, and the wish to stop.

    All processes call the methods together. Only rank 0, which has the folder `out`, prints and
    writes. start: the checkpoint of this run, or of its parent, or None. flops: per token.
    """

    def __init__(self, out: Path | None, config: dict, origin: dict, start: dict | None,
                 must_stop, flops: float):  # fmt: skip
        start, (_, world) = start or {}, rank_and_world()
        self.out, self.config, self.wish = out, config, must_stop
        self.peak = world * (peak_flops(config["device"]) or 0.0) / flops  # tokens per second
        self.parent, self.stages = start.get("parent"), start.get("stages") or stages_of(config)
        self.began = time.perf_counter() - start.get("seconds", 0.0)
        self.diverged = False
        self.restart_window(start.get("tokens", 0))
        if out:
            self.origin = self.note_origin(origin | {"parent": self.parent})
            self.metrics = append_to(out / "metrics.jsonl")

    def note_origin(self, origin: dict) -> dict:
        """Write config.json, to which resuming only adds; return the origin of the run's start."""
        file, resumed = self.out / "config.json", {}
        if file.exists():
            saved = read_config(self.out)
            resumed = {"resumed": [*saved.pop("resumed", []), origin | {"tokens": self.tokens}]}
            origin = {name: value for name, value in saved.items() if name not in self.config}
        write_json(file, self.config | origin | resumed)
        return origin

    def restart_window(self, tokens: int) -> None:
        """Measure speed from here on: evaluations and saves are not training time."""
        self.window, self.tokens = time.perf_counter(), tokens

    def must_stop(self) -> bool:
        return any_process(self.wish())  # many processes must stop after the same step

    def seconds(self) -> float:
        """Seconds that the run has taken, in all its sessions."""
        return time.perf_counter() - self.began

    def write(self, text: str, **line) -> None:
        """Print a line for people; add a line to metrics.jsonl, with null for NaN and infinity."""
        finite = lambda x: x if not isinstance(x, float) or math.isfinite(x) else None
        if self.out:
            print(text, flush=True)
            line = {name: finite(value) for name, value in line.items()}
            self.metrics.write(json.dumps(line) + "\n")

    def log(self, tokens: int, lr: float, loss: torch.Tensor, **more) -> None:
        """A line of progress. loss: of this process, a tensor."""
        loss = total(loss).item() / rank_and_world()[1]  # waits for the device; then read the clock
        speed = (tokens - self.tokens) / (time.perf_counter() - self.window)
        mfu = f"   MFU {speed / self.peak:.1%}" if self.peak else ""
        left = clock((self.config["total_tokens"] - tokens) / speed)
        text = f"loss {loss:.4f}   lr {lr:.2e}   {speed:,.0f} tokens/s{mfu}   {left} left"
        self.write(f"{tokens:>14,} tokens   {text}", tokens=tokens, loss=loss, lr=lr, **more,
                   tokens_per_second=round(speed), seconds=round(self.seconds(), 2))  # fmt: skip
        self.diverged = not math.isfinite(loss)
        self.restart_window(tokens)

    def log_validation(self, tokens: int, losses: dict, note: str = "") -> None:
        self.write(f"{tokens:>14,} tokens   {summary(losses)}{note}", tokens=tokens, **losses)
        self.restart_window(tokens)

    def save(self, content: dict) -> None:
        """Write a checkpoint, and average.pt without the optimizer; delete old checkpoints."""
        more = {"parent": self.parent, "stages": self.stages, "seconds": self.seconds()}
        content, config = content | more, self.config
        if self.out:
            write_checkpoint(self.out / "ckpt" / f"{content['tokens']:016d}.pt", content)
            if weights := content["average"]:
                averaged = content | {"model": weights, "average": None}
                averaged.pop("optimizer")
                write_checkpoint(self.out / "average.pt", averaged)
            paths = checkpoints(self.out)
            decay_start = config["total_tokens"] - config["decay_tokens"]
            before_decay = [path for path in paths if int(path.stem) <= decay_start]
            for path in set(paths[: -config["keep_checkpoints"]]) - set(before_decay[-1:]):
                path.unlink()  # branches start from the last one before the decay
        self.restart_window(content["tokens"])

    def finish(self, record: dict) -> dict:
        """Complete the record and write record.json: where it exists, the run is finished."""
        self.metrics.close()
        lines = read_metrics(self.out)
        speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
        speed = round(statistics.median(speeds or [0]))
        seconds = round(self.seconds(), 1)
        record = record | self.origin | {"seconds": seconds, "tokens_per_second": speed}
        write_json(self.out / "record.json", record)
        return record
