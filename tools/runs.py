"""Write, resume and branch runs: the folder with config.json, metrics.jsonl, ckpt,
record.json."""

import contextlib
import datetime
import functools
import itertools
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import torch

from tools.flags import UserError, say
from tools.devices import all_sum, rank_and_world
from tools.files import append_to, lock, nan_to_none, read_metrics, replacing, write_json


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first. Their names are the tokens seen."""
    return sorted(path for path in (run / "ckpt").glob("*.pt") if path.stem.isdecimal())


def write_checkpoint(path: Path, content: dict) -> None:
    """Save a dict in a file that appears whole or not at all. Raises OSError if that fails."""
    path.parent.mkdir(exist_ok=True)
    try:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        if not re.search("PytorchStreamWriter|inline_container", str(error)):
            raise
        raise OSError(f"{path}: cannot be written (is the disk full?)") from None


def read_checkpoint(path: Path) -> dict:
    """Read a checkpoint, and add its path (and its stages, which older versions lack).

    weights_only refuses a pickle that would run code. Rank 0 compares checksums first,
    because torch.load would accept a weight with a flipped bit. Raises UserError if it is
    missing or damaged, OSError if the disk cannot be read.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such run or checkpoint")
    for seconds in (1, 5, None):  # a network disk may fail for a moment
        try:
            return load_checkpoint(path)
        except OSError as error:
            if seconds is None:
                reason = error.strerror or error
                raise OSError(f"{path}: cannot be read ({reason}); try again") from None
            time.sleep(seconds)


def load_checkpoint(path: Path) -> dict:
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip() if rank_and_world()[0] == 0 else None
            if broken:
                raise zipfile.BadZipFile(f"wrong checksum in {broken}")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not {"config", "tokens", "model"} <= set(saved):
            raise KeyError("it lacks config, tokens or model")
        return {"stages": stages_of(saved["config"])} | saved | {"path": str(path)}
    except OSError:  # says nothing about the file
        raise
    # damage makes zipfile, pickle and torch raise almost anything
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{path}: not a checkpoint, or a damaged one ({reason})"
        ) from None


def newest_checkpoint(run: Path, rename: bool = False) -> dict:
    """Read the newest whole checkpoint of a run folder. Report and perhaps rename damaged ones.

    Raises UserError if none is whole.
    """
    damaged = []
    for path in reversed(checkpoints(run)):
        try:
            saved = read_checkpoint(path)
        except UserError as damage:
            print(f"{damage}, trying an older checkpoint", file=sys.stderr)
            damaged.append(path)
            continue
        # so that all processes start from the same
        for other in damaged if rename else ():
            other.rename(other.with_suffix(".damaged"))
        return saved
    raise UserError(f"{run}: no whole checkpoint in {run / 'ckpt'}; is it a run folder?")


def before_decay(paths: list[Path], config: dict) -> list[Path]:
    """Select the checkpoints that a run saved before its decay."""
    decay_start = config["total_tokens"] - config["decay_tokens"]
    return [path for path in paths if int(path.stem) <= decay_start]


def read_config(folder: Path) -> dict | None:
    """The config.json of a run; None for other folders, such as released weights.

    If a power cut damaged the file, the newest checkpoint has the config, too.
    """
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        config = newest_checkpoint(folder)["config"] if checkpoints(folder) else None
    is_run = isinstance(config, dict) and "total_tokens" in config
    return config if is_run else None


def stages_of(config: dict, past=(), tokens: int = 0) -> list:
    """List the text of a run as [[token position, corpus or mixture read from there], ...].

    Past stages of its parent, up to `tokens`, come first, then --data, then --decay_data.
    """
    stages = [stage for stage in past if stage[0] < tokens]
    text = config.get("data") or "embedded"
    if not stages or stages[-1][1] != text:
        stages.append([tokens, text])
    if config.get("decay_data"):
        stages.append(
            [config["total_tokens"] - config["decay_tokens"], config["decay_data"]]
        )
    return stages


def make_folder(out: str | None, name: str, resume: bool):
    """Make `out` or the next free runs/NAME-NUMBER. Return it and its lock.

    Raises UserError if `out` cannot become the folder of a new run, or another process
    has it.
    """
    if out is None:
        for number in itertools.count(1):
            folder = Path("runs", f"{name}-{number}")
            # another process may take it first
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder, lock(folder / ".lock")
    folder = Path(out)
    # a run that was killed before it had written config.json leaves only hidden files
    names = os.listdir(folder) if folder.is_dir() else []
    hidden = {
        name
        for name in names
        if name == ".lock" or re.fullmatch(r"\.config.*\.tmp", name)
    }
    if set(names) - hidden:
        if not resume:
            raise UserError(
                f"--out {out}: is not empty; continue a run with --resume, or choose another folder"
            )
        if not read_config(folder):
            raise UserError(
                f"--out {out}: is not the folder of a run; choose another folder"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {out}: cannot be written ({error.strerror})") from None
    held = lock(folder / ".lock")
    if not held:
        raise UserError(f"--out {out}: another process is training there")
    return folder, held


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
        "processes": rank_and_world()[1],
        "fingerprint": fingerprint,
    }


def never() -> bool:
    """Must we stop? No."""
    return False


@contextlib.contextmanager
def stop_request(time_limit: float | None, *more: int):
    """Yield a function that is true after Ctrl-C, SIGTERM, SIGHUP or time_limit seconds.

    more: further signals. SIGHUP comes if the terminal is closed, and from `say` if
    nobody reads our output any more.
    """
    end = time.perf_counter() + (math.inf if time_limit is None else time_limit)
    signals = []

    def note(number, _frame):
        signals.append(number)
        if number == signal.SIGINT:  # a second Ctrl-C kills, but clusters repeat SIGTERM
            signal.signal(number, signal.SIG_DFL)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # started with nohup
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}

    def must_stop() -> bool:
        return bool(signals) or time.perf_counter() > end

    try:
        yield must_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def crossed(every: int, before: int, tokens: int) -> bool:
    """Is there a multiple of `every` above `before` and up to `tokens`?"""
    return tokens // every > before // every


def mean_losses(names: list[str], shares: tuple, losses: list[dict]) -> dict:
    """Average the losses of the sources of a mixture by share, and add the val_loss of sources."""
    if len(losses) == 1:
        return losses[0]
    # per token
    nats = sum(share * each["val_loss"] for share, each in zip(shares, losses))
    size = sum(
        share * each["val_loss"] / each["val_bpb"] for share, each in zip(shares, losses)
    )
    sources = {f"val_loss_{name}": each["val_loss"] for name, each in zip(names, losses)}
    # size: bytes per token * ln 2
    return {
        "val_loss": nats,
        "val_bpb": nats / size,
        **sources,
    }


class Run:
    """The folder and the clock of a run that trains.

    All processes call the methods together. Only rank 0, which has the folder `out`,
    prints and writes. start: a checkpoint of this run or of its parent, or None.
    """

    def __init__(
        self, out: Path | None, config: dict, fingerprint: str, start: dict | None
    ):
        start = start or {"tokens": 0, "stages": stages_of(config)}
        self.out = out
        self.config = config
        self.stages = start["stages"]
        self.began = time.perf_counter() - start.get("seconds", 0.0)
        self.diverged = start.get("diverged", False)
        self.look_at = ()  # no validations but those of --eval_every
        self.logged_tokens = start["tokens"]
        self.logged_at = time.perf_counter()
        if out:
            for leftover in [*out.glob(".*.tmp"), *out.glob("ckpt/.*.tmp")]:
                leftover.unlink()  # of a killed process
            now = origin(config["device"], fingerprint)
            now["parent"] = start.get("parent")
            self.origin = now
            resumed = {}
            saved = read_config(out)
            if saved:  # keep the origin of the start, and list this one
                self.origin = {name: saved.get(name, now[name]) for name in now}
                resumed["resumed"] = [*saved.get("resumed", []), now]
            write_json(out / "config.json", config | self.origin | resumed)
            self.metrics = append_to(out / "metrics.jsonl")

    def seconds(self) -> float:
        """Seconds that the run has taken, in all its sessions."""
        return time.perf_counter() - self.began

    def write(self, text: str, **line) -> None:
        """Print a line for people, and add one to metrics.jsonl."""
        if self.out:
            say(f"{line['tokens']:>14,} tokens   {text}")
            self.metrics.write(json.dumps(nan_to_none(line)) + "\n")

    def after_step(self, state, step, last: bool) -> None:
        """Report progress at every --log_every tokens."""
        tokens = state.tokens
        if not (last or crossed(self.config["log_every"], state.before, tokens)):
            return
        # the mean over all processes, for which we wait for the device
        loss = all_sum(step.loss).item() / rank_and_world()[1]
        speed = (tokens - self.logged_tokens) / (time.perf_counter() - self.logged_at)
        left = datetime.timedelta(
            seconds=round((self.config["total_tokens"] - tokens) / speed)
        )
        self.write(
            f"loss {loss:.4f}   lr {step.lr:.2e}   {speed:,.0f} tokens/s   {left} left",
            tokens=tokens,
            loss=loss,
            lr=step.lr,
            grad_norm=step.grad_norm.item(),
            **(step.routing.metrics() if step.routing else {}),
            tokens_per_second=round(speed),
            seconds=round(self.seconds(), 2),
        )
        self.diverged = not math.isfinite(loss)
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
        content.update(
            parent=self.origin["parent"],
            stages=self.stages,
            seconds=self.seconds(),
            diverged=self.diverged,
        )
        # first, because after the last checkpoint nothing is written again
        if content["average"]:
            averaged = content | {"model": content["average"], "average": None}
            averaged.pop("optimizer")
            write_checkpoint(self.out / "average.pt", averaged)
        write_checkpoint(self.out / "ckpt" / f"{content['tokens']:016d}.pt", content)
        paths = checkpoints(self.out)
        keep = paths[-self.config["keep_checkpoints"] :]
        keep += before_decay(paths, self.config)[-1:]  # branches start there
        for path in set(paths) - set(keep):
            path.unlink()

    def finish(self, results: dict) -> dict:
        """Write record.json, the mark of a finished run, and return the record."""
        self.metrics.close()
        lines = read_metrics(self.out)
        speeds = [
            line["tokens_per_second"] for line in lines if "tokens_per_second" in line
        ]
        # evaluations only slow the line after them
        speed = round(np.median(speeds or [0]))
        results |= {"seconds": round(self.seconds(), 1), "tokens_per_second": speed}
        record = {"config": self.config, "results": results, "origin": self.origin}
        write_json(self.out / "record.json", record)
        return record


# -- Resume and branch -------------------------------------------------------------------


def branch_point(path: Path) -> Path:
    """The checkpoint to branch from. For a run folder, it is the newest before the decay."""
    path = path.resolve()  # so that the branch can resume from any folder
    config = read_config(path)
    if not config:
        return path
    paths = before_decay(checkpoints(path), config)
    if not paths:
        raise UserError(f"--branch {path}: has no checkpoint before its decay")
    return paths[-1]


def choose(
    typed: dict, actions, runtime_fields
) -> tuple[dict, dict | None, Path | str | None]:
    """The config fields, the checkpoint to resume, and the path of the parent to branch from.

    A resumed run keeps its config. runtime_fields: config -> fields that it may change.
    Raises UserError for a flag that would make it a different run.
    """
    saved = read_config(Path(typed["out"])) if actions.resume else None
    if not saved:
        return typed, None, actions.branch
    parent = saved.get("parent")
    if actions.branch:  # typed again, as a cluster does
        branch = actions.branch.resolve()
        if parent is None or not Path(parent).is_relative_to(branch):
            raise UserError(
                f"--branch {actions.branch}: the run in {typed['out']} "
                f"started from {parent or 'nothing'}; leave the flag out"
            )
    runtime = runtime_fields(saved)
    for name, value in typed.items():
        if name not in runtime and value not in (saved.get(name), "auto"):
            raise UserError(
                f"--{name} {value}: the run in {typed['out']} has {saved.get(name)}; "
                "leave the flag out, or use --branch for a new run"
            )
    if rank_and_world()[1] > 1:
        # every process has its GPU, and rank 0 saved the name of that of rank 0
        saved["device"] = "auto"
    fields = saved | {name: typed[name] for name in runtime & set(typed)}
    if not checkpoints(Path(typed["out"])):
        return fields, None, saved.get("parent")
    return fields, newest_checkpoint(Path(typed["out"]), rename=True), None


def branched_fields(parent: dict, changes: dict, shape: set) -> dict:
    """The config of the parent with these changes. Decay, out, device, compile become defaults.

    --decay_tokens without --total_tokens starts the decay right here. shape: fields that
    determine the weights. Raises UserError if one of them changes.
    """
    for name in sorted(shape & set(changes)):
        old = parent["config"].get(name, changes[name])
        if changes[name] != old and (name != "seq_len" or parent["tokens"]):
            raise UserError(
                f"--{name} {changes[name]}: the checkpoint has {old}, "
                "and a branch keeps the shape of its parent"
            )
    if "optimizer" not in parent:
        if parent["tokens"]:
            raise UserError(
                f"--branch {parent['path']}: weights alone; choose one in ckpt/"
            )
        if not {"lr", "power_a"} & set(changes):
            raise UserError(
                "--branch: imported weights carry no learning rate; choose one, "
                "for example --schedule wsd --lr 1e-4"
            )
        return parent["config"] | changes
    fields = parent["config"] | dict(out=None, device="auto", compile=None)
    fields["decay_share"] = None if "decay_tokens" in changes else 0.1
    fields["decay_tokens"] = None
    if changes.get("decay_tokens"):
        fields["total_tokens"] = parent["tokens"] + changes["decay_tokens"]
    return fields | changes


def branch(parent: dict, cfg, planned: bool) -> dict:
    """The checkpoint of a parent as the start of a new run, which may read a different text.

    planned: does the schedule depend on the run length? Raises UserError if cfg cannot
    continue.
    """
    old = parent["config"]
    tokens = parent["tokens"]
    total = cfg.total_tokens
    if parent.get("diverged"):  # released weights do not say
        raise UserError(
            f"--branch {parent['path']}: the run diverged; choose an earlier checkpoint"
        )
    if total < tokens + cfg.batch_tokens:
        raise UserError(
            f"--total_tokens {total:,}: the checkpoint has seen {tokens:,} already"
        )
    if planned and cfg.schedule == old.get("schedule") and total != old["total_tokens"]:
        raise UserError(
            f"--total_tokens {total:,}: this {cfg.schedule} was planned for "
            f"{old['total_tokens']:,}; branch with --schedule wsd"
        )
    if cfg.decay_tokens and cfg.decay_start < tokens:
        raise UserError(
            f"--decay_tokens {cfg.decay_tokens:,}: would start at "
            f"{cfg.decay_start:,}, before the checkpoint at {tokens:,}"
        )
    same_text = all(vars(cfg)[name] == old.get(name) for name in ("data", "decay_data"))
    return parent | {
        "parent": parent["path"],
        "seconds": 0.0,
        "diverged": False,
        "fingerprint": parent["fingerprint"] if same_text else None,
        "stages": stages_of(vars(cfg), parent["stages"], tokens),
    }
