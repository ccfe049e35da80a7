"""Train a GPT under a learning-rate schedule, on one device.

    python train.py --schedule power                     a laptop-sized model in a few minutes
    python train.py --schedule wsd --total_tokens 8e6    any field of TrainConfig is a flag
    python train.py --preset 36M --data data/mine        the paper's sizes
    python train.py --benchmark                          a few steps: tokens per second, memory
    python train.py --out runs/a --resume                continues a run that was stopped
    python train.py --branch runs/a --decay_tokens 3e5   cools a run down from where it is

Read `optimizer_step`, which takes one batch from the file to the weight update, then `train`, the
loop around it. Everything that a run leaves behind is in its folder, runs/NAME: config.json,
metrics.jsonl, checkpoint, curve.png, sample.txt and, last of all, record.json.
"""

import argparse
import contextlib
import dataclasses
import difflib
import itertools
import json
import math
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import typing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import data
import mup
from eval import check_corpus, held_out_loss, sample
from model import GPT, PRESETS, GPTConfig, checkpoints, fill_in, newest_checkpoint, option, pick_device, read_checkpoint
from schedules import COLORS, DECAY_SHAPES, SCHEDULES, STYLE, make_schedule

# ---------------------------------------------------------------------------------------------
# Configuration: a field is a flag


@dataclass(frozen=True, kw_only=True)
class TrainConfig(GPTConfig):
    """Everything that determines a run. Lengths are tokens; batch_size is sequences per update."""

    preset: str = option("laptop", "row of model.PRESETS and train.RECIPES to start from", choices=tuple(PRESETS))
    schedule: str = option("power", "learning-rate schedule", choices=SCHEDULES)
    total_tokens: int = option(help="tokens to train on", above=0)
    batch_size: int = option(help="sequences per optimizer step", above=0)
    micro_batch_size: int | None = option(None, "sequences per forward pass, what fits in memory (default: batch_size)", above=0)

    lr: float = option(0.01, "peak learning rate of wsd, cosine and constant", above=0)
    lr_max: float = option(0.02, "ceiling of the power schedule", above=0)
    power_a: float = option(4.0, "a of the power schedule, beta * a * n^b", above=0)
    power_b: float = option(-0.51, "b of the power schedule", at_most=0)
    warmup_tokens: int = option(10**9, "tokens of linear warm-up", at_least=0)
    decay_tokens: int | None = option(None, "tokens of the final decay (default: 10 %% of total_tokens)", at_least=0)
    decay_shape: str = option("exp", "how power and wsd decay to 0", choices=tuple(DECAY_SHAPES))
    min_lr_ratio: float = option(0.1, "final learning rate of the cosine, as a share of lr", at_least=0, at_most=1)

    router_aux_weight: float = option(0.01, "weight in the training loss of a mixture's auxiliary loss, which evens out its experts' load", at_least=0)
    weight_decay: float = option(0.1, "AdamW's weight decay", at_least=0)
    beta1: float = option(0.9, "AdamW's first beta", at_least=0, below=1)
    beta2: float = option(0.95, "AdamW's second beta", at_least=0, below=1)
    adam_eps: float = option(1e-10, "AdamW's epsilon", at_least=0)
    grad_clip: float = option(1.0, "largest norm of the gradient; 0: no clipping", at_least=0)

    seed: int = option(0, "of the initial weights", at_least=0, at_most=2**63 - 1)
    data_seed: int = option(0, "of the order of the training sequences", at_least=0, at_most=2**63 - 1)
    data: str | None = option(None, "folder of a prepared corpus (default: the embedded one)")
    tokenizer: str = option("bytes", "of the embedded corpus; a prepared one has its own")
    out: str | None = option(None, "folder of the run (default: a new numbered one under runs/)")

    device: str = option("auto", "auto: cuda, else mps, else cpu")
    dtype: str = option("auto", "auto: bfloat16 on GPUs that have it, else float32", choices=("auto", "float32", "bfloat16"))
    compile: bool | None = option(None, "torch.compile the blocks (default: on cuda, from width 256 on)")

    log_every: int = option(50_000_000, "tokens between lines of progress", above=0)
    eval_every: int = option(10**9, "tokens between evaluations on held-out text", above=0)
    eval_tokens: int | None = option(None, "held-out tokens of an evaluation, spread over all of them (default: all)", above=0)
    save_every: int = option(10**10, "tokens between checkpoints; there is one more where the decay begins", above=0)
    keep_checkpoints: int = option(3, "newest checkpoints that stay; the one where the decay begins stays too", above=1)

    def __post_init__(self):
        super().__post_init__()
        if self.schedule in ("cosine", "constant"):
            object.__setattr__(self, "decay_tokens", 0)  # the cosine is its own decay; constant has none
        fill_in(self, decay_tokens=self.total_tokens // 10, micro_batch_size=self.batch_size)
        if self.batch_size % self.micro_batch_size:
            raise ValueError(f"--micro_batch_size {self.micro_batch_size}: must divide batch_size {self.batch_size}")
        if self.total_tokens < self.batch_tokens:
            raise ValueError(f"--total_tokens {self.total_tokens:,}: less than one batch of {self.batch_tokens:,} tokens")
        make_schedule(self)  # raises if warm-up and decay do not fit

    @property
    def batch_tokens(self) -> int:
        return self.batch_size * self.seq_len


# How each preset is trained; what a row does not name is TrainConfig's default. The paper's micro-batches
# are small for the logits' sake, 0.8 GB per sequence in float32; they have not been tried on a GPU yet.
_search = dict(batch_size=128, micro_batch_size=8, total_tokens=32 * 10**9, lr=0.0026)  # a cell of Table 2, lr by the law
_large = dict(batch_size=1024, micro_batch_size=4, lr=0.01)
_laptop = dict(
    batch_size=8, total_tokens=4_200_000, warmup_tokens=100_000, lr=0.004, power_a=16.0, lr_max=0.02,
    log_every=5 * 10**4, eval_every=10**6, eval_tokens=2**17, save_every=10**6,
)  # fmt: skip
RECIPES = {
    "laptop": _laptop, "laptop-moe": _laptop,
    "12M": _search, "36M": _search, "121M": _search, "36M-power": _search,
    "1B": dict(**_large, total_tokens=10**12),
    "1B-moe": dict(**_large, total_tokens=1100 * 10**9, decay_tokens=100 * 10**9),  # as its table says; the text says 1T
    "PowerLM-3B": dict(**_large, total_tokens=1250 * 10**9, decay_tokens=250 * 10**9),
    "PowerMoE-3B": dict(**_large, total_tokens=3000 * 10**9, decay_tokens=500 * 10**9),
}  # fmt: skip


def make_config(**typed) -> TrainConfig:
    """default < preset < typed. Raises ValueError, naming the flag, where a value is impossible."""
    preset = typed.get("preset", "laptop")
    if preset not in PRESETS:
        raise ValueError(f"--preset {preset}: must be one of {', '.join(PRESETS)}")
    fields = {**PRESETS[preset], **RECIPES[preset], **typed}
    if "micro_batch_size" in fields and "micro_batch_size" not in typed:  # a typed batch may be smaller than the row's part
        fields["micro_batch_size"] = math.gcd(fields["micro_batch_size"], max(1, fields["batch_size"]))
    return TrainConfig(**fields)


def whole_number(text: str) -> int:
    """'2e9' and '2000000000' are the same number of tokens."""
    if text.lstrip("+-").isdigit():
        return int(text)
    with contextlib.suppress(ValueError):
        if float(text).is_integer():
            return int(float(text))
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")


def parse(argv: list[str] | None) -> tuple[dict, argparse.Namespace]:
    """Command line -> (the typed config fields, the actions). Exits with status 2 on a wrong flag."""
    parser = argparse.ArgumentParser(
        prog="train.py", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    for f in dataclasses.fields(TrainConfig):
        kind = next(t for t in (typing.get_args(f.type) or (f.type,)) if t is not type(None))
        row = (PRESETS["laptop"] | RECIPES["laptop"]).get(f.name)
        defaults = [str(f.default)] * (f.default not in (None, dataclasses.MISSING)) + [f"laptop: {row}"] * (row is not None)
        default = f" ({', '.join(defaults)})" if defaults else ""
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {
            "type": whole_number if kind is int else kind, "choices": f.metadata.get("choices"), "metavar": kind.__name__.upper(),
        }  # fmt: skip
        parser.add_argument(f"--{f.name}", help=f.metadata["help"] + default, **how)
    actions = parser.add_argument_group("what to do")
    actions.add_argument("--resume", action="store_true", default=False, help="go on with the run in --out, or begin it")
    actions.add_argument("--branch", type=Path, default=None, help="begin at a checkpoint of another run (or at its folder: the last one before its decay)")
    actions.add_argument("--time_limit", type=float, default=None, metavar="SECONDS", help="save and stop after so long, with exit status 3")
    actions.add_argument("--overwrite", action="store_true", default=False, help="replace the run that is in --out")
    actions.add_argument("--benchmark", action="store_true", default=False, help="time a few steps and stop")
    words = list(sys.argv[1:] if argv is None else argv)
    for i in range(len(words) - 1, 0, -1):  # argparse takes the value in "--power_b -5e-1" for a flag
        if re.match(r"-[\d.]", words[i]) and words[i - 1].startswith("--"):
            words[i - 1 : i + 1] = [f"{words[i - 1]}={words[i]}"]
    args, unknown = parser.parse_known_args(words)
    if unknown:
        flags = [o for action in parser._actions for o in action.option_strings]
        near = difflib.get_close_matches(unknown[0].split("=")[0], flags, n=1)
        parser.error(f"unknown argument {unknown[0]}" + (f", did you mean {near[0]}?" if near else ", see --help"))
    fields = {f.name for f in dataclasses.fields(TrainConfig)}
    return {k: v for k, v in vars(args).items() if k in fields}, args


# ---------------------------------------------------------------------------------------------
# Device

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # bf16, dense, datasheets


def resolve_device(cfg: TrainConfig) -> TrainConfig:
    """Replace every "auto" by what it means on this machine; the record says what was used.

    Raises ValueError for a device that is not there.
    """
    device = pick_device(cfg.device)
    kind = device.split(":")[0]
    if kind == "cuda":
        torch.cuda.set_device(device)
    has_bf16 = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = ("bfloat16" if has_bf16 else "float32") if cfg.dtype == "auto" else cfg.dtype
    # The compiler takes half a minute. A CPU gains 10 % by it, and a small model on a GPU is done by then.
    compile = (kind == "cuda" and cfg.n_embd >= 256) if cfg.compile is None else cfg.compile
    return dataclasses.replace(cfg, device=device, dtype=dtype, compile=compile)


def autocast(cfg: TrainConfig):
    """Matrix products in bfloat16 where the run asks for it; parameters stay in float32."""
    return torch.autocast(cfg.device.split(":")[0], torch.bfloat16, enabled=cfg.dtype == "bfloat16")


def to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """Copy to the device; from pinned memory to a GPU, so that the program need not wait for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.startswith("cuda") else tensor.to(device)


# ---------------------------------------------------------------------------------------------
# One step


def optimizer_step(cfg: TrainConfig, model: GPT, optimizer, corpus: data.Corpus, tokens: int, lr: float) -> tuple:
    """One update, with the batch that begins at token position `tokens` of the run.

    Returns the batch's mean loss in nats per token and the gradient's norm before clipping, as
    tensors (reading their values would make a GPU wait), and the last micro-batch's Routing.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]  # muP's share, see mup.rules

    g = tokens // cfg.seq_len + np.arange(cfg.batch_size)  # global numbers of the batch's sequences
    index = data.shuffled(g, data.n_sequences(corpus.train, cfg.seq_len), cfg.data_seed)
    n_micro = cfg.batch_size // cfg.micro_batch_size
    batch_loss = 0.0
    for part in np.split(index, n_micro):
        inputs, targets = data.read_sequences(corpus.train, part, cfg.seq_len)  # [micro_batch_size, seq_len]
        inputs, targets = to_device(inputs, cfg.device), to_device(targets, cfg.device)
        with autocast(cfg):
            loss, routing = model(inputs, targets)
            aux_loss = cfg.router_aux_weight * routing.aux_loss.sum() if routing else 0.0
        # Micro-batches are equal: the mean of their means. Their gradients add up. The auxiliary
        # loss is trained on, but not reported.
        ((loss + aux_loss) / n_micro).backward()
        batch_loss += loss.detach() / n_micro

    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return batch_loss, grad_norm, routing


def build(cfg: TrainConfig) -> tuple[GPT, torch.optim.Optimizer]:
    """The model with its first weights, the same on every device, and its optimizer."""
    torch.manual_seed(cfg.seed)
    model = GPT(cfg).to(cfg.device)
    groups = mup.param_groups(model, mup.rules(cfg), cfg.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
    if cfg.compile:
        # Block by block, one short compilation serves them all. A CPU gains only if the loss, too, is fused.
        for module in [model] if cfg.device == "cpu" else model.blocks:
            module.compile()
    return model, optimizer


# ---------------------------------------------------------------------------------------------
# The run


def train(cfg: TrainConfig, corpus: data.Corpus, out: Path, start: dict | None = None, must_stop=lambda: False) -> dict | None:
    """Train, write the run's folder, return its record; or save, and return None, once must_stop().

    start: a checkpoint to go on from, this run's own or, for a branch, its parent's. A run that is
    stopped and resumed on a CPU is, bit by bit, the run that was not.
    A loss that stops being finite, or that ends above ln(vocab_size), is a result and not an error:
    the record then says diverged, and its val_loss is None.
    """
    began = time.perf_counter()
    model, optimizer = build(cfg)
    progress = restore(start, model, optimizer) if start else NOTHING_DONE
    tokens, step, parent = progress["tokens"], progress["step"], progress["parent"]
    schedule = make_schedule(cfg)
    decay_start = cfg.total_tokens - cfg.decay_tokens
    flops, peak = model.flops_per_token(), peak_flops(cfg)
    provenance = describe_origin(cfg, corpus) | {"parent": parent}
    write_json(out / "config.json", dataclasses.asdict(cfg) | provenance)
    metrics = continue_metrics(out / "metrics.jsonl", tokens, at_the_end=tokens + cfg.batch_tokens > cfg.total_tokens)
    # JSON has no NaN: what a diverged run has to say is null
    finite = lambda x: x if not isinstance(x, float) or math.isfinite(x) else None
    log = lambda **line: metrics.write(json.dumps({key: finite(value) for key, value in line.items()}) + "\n")

    # Seconds of this run's own work, over all its sessions: in all, and in the steps of the loop
    seconds = lambda: progress["seconds"] + time.perf_counter() - began
    training_seconds, trained_tokens = progress["training_seconds"], progress["trained_tokens"]
    window_start, window_tokens = time.perf_counter(), tokens  # since the last line of progress
    diverged = False

    def save():
        done = {"tokens": tokens, "step": step, "parent": parent, "seconds": seconds(),
                "training_seconds": training_seconds, "trained_tokens": trained_tokens}  # fmt: skip
        save_checkpoint(out / "ckpt" / f"{tokens:016d}.pt", cfg, corpus, model, optimizer, done)
        prune_checkpoints(out, cfg.keep_checkpoints, decay_start)

    while tokens + cfg.batch_tokens <= cfg.total_tokens and not diverged:  # whole batches: no step reaches past the end
        lr = schedule(tokens + cfg.batch_tokens / 2)
        loss, grad_norm, routing = optimizer_step(cfg, model, optimizer, corpus, tokens, lr)
        before, tokens, step = tokens, tokens + cfg.batch_tokens, step + 1
        last = tokens + cfg.batch_tokens > cfg.total_tokens
        due = lambda every: tokens // every > before // every

        if due(cfg.log_every) or last:
            loss = loss.item()  # waits for the device: the clock is right only behind it
            window = time.perf_counter() - window_start
            training_seconds, trained_tokens = training_seconds + window, trained_tokens + tokens - window_tokens
            speed = (tokens - window_tokens) / window
            log(step=step, tokens=tokens, loss=loss, lr=lr, grad_norm=grad_norm.item(),
                tokens_per_second=round(speed), seconds=round(seconds(), 2), **(routing.metrics() if routing else {}))  # fmt: skip
            mfu = f"   MFU {flops * speed / peak:.1%}" if peak else ""
            left = clock((cfg.total_tokens - tokens) / speed)
            print(f"{tokens:>14,} tokens   loss {loss:.4f}   lr {lr:.2e}   {speed:,.0f} tokens/s{mfu}   {left} left", flush=True)
            diverged = not math.isfinite(loss)
            window_start, window_tokens = time.perf_counter(), tokens
        pause = time.perf_counter()  # what follows is not training time
        if due(cfg.eval_every) and not last:
            with autocast(cfg):
                held_out = held_out_loss(model, corpus, cfg.eval_tokens)
            log(tokens=tokens, **held_out)
            print(f"{tokens:>14,} tokens   held-out loss {held_out['val_loss']:.4f}", flush=True)
        stopping = must_stop() and not last
        if due(cfg.save_every) or stopping or tokens <= decay_start < tokens + cfg.batch_tokens:
            save()
        if stopping:
            return None
        window_start += time.perf_counter() - pause

    held_out, record = evaluate(cfg, model, corpus)
    log(tokens=tokens, **held_out)
    metrics.close()
    save()
    torch.manual_seed(cfg.seed)
    with torch.compiler.set_stance("force_eager"):  # its growing shapes would compile again and again
        text = "" if record["diverged"] else sample(model, corpus.tokenizer)
    (out / "sample.txt").write_text(text, encoding="utf-8")
    record |= provenance | {"tokens": tokens, "seconds": round(seconds(), 1), "tokens_per_second": round(trained_tokens / training_seconds)}
    draw_curve(out, record)
    write_json(out / "record.json", record)  # last, by rename: where it exists, the run is finished
    return record


def evaluate(cfg: TrainConfig, model: GPT, corpus: data.Corpus) -> tuple[dict, dict]:
    """A run at its end -> (its held-out loss as it is, the part of its record that model and config decide)."""
    with autocast(cfg):
        held_out = held_out_loss(model, corpus, cfg.eval_tokens)
    diverged = not held_out["val_loss"] <= math.log(cfg.vocab_size)  # after a step with a loss that is not finite, neither is this one
    return held_out, dataclasses.asdict(cfg) | (dict.fromkeys(held_out) if diverged else held_out) | {
        "diverged": diverged, "n_params": model.n_params(), "n_active_params": model.n_active_params(),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Checkpoints: stop at any time, go on from any of them

NOTHING_DONE = {"tokens": 0, "step": 0, "parent": None, "seconds": 0.0, "training_seconds": 0.0, "trained_tokens": 0}


def save_checkpoint(path: Path, cfg: TrainConfig, corpus: data.Corpus, model: GPT, optimizer, progress: dict) -> None:
    """Everything that the run is, in one file that appears whole or not at all.

    The schedule and the data order have no state of their own: they follow from the tokens seen.
    """
    state = progress | {
        "config": dataclasses.asdict(cfg), "fingerprint": corpus.meta["fingerprint"], "model": model.state_dict(),
        "optimizer": optimizer.state_dict(), "random_state": torch.get_rng_state(),
    }  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or 'is the disk full?'})") from None


def restore(saved: dict, model: GPT, optimizer) -> dict:
    """Put a checkpoint's state into model and optimizer; return how far it had come."""
    model.load_state_dict(saved["model"])
    ours = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved["optimizer"])
    for group, settings in zip(optimizer.param_groups, ours):
        group.update(settings)  # a branch may have another weight decay than its parent
    torch.set_rng_state(saved["random_state"].cpu())
    return {key: saved[key] for key in NOTHING_DONE}


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


# Flags that may differ when a run is resumed: they say how it is computed, not what
HOW = {"device", "compile", "micro_batch_size", "save_every", "keep_checkpoints"}


def resumed_config(out: Path, typed: dict) -> TrainConfig:
    """The configuration that the run in `out` began with. Raises ValueError where a flag disagrees."""
    try:
        saved = json.loads((out / "config.json").read_text())
    except json.JSONDecodeError:
        raise ValueError(f"--out {out}: its config.json is damaged, --overwrite starts the run again") from None
    saved = {f.name: saved[f.name] for f in dataclasses.fields(TrainConfig) if f.name in saved}
    for name, value in typed.items():
        if name not in HOW | {"out"} and value not in (saved[name], "auto"):
            raise ValueError(f"--{name} {value}: the run in {out} has {saved[name]}; leave the flag out, or use --branch for a new run")
    return TrainConfig(**saved | {name: typed[name] for name in HOW & set(typed)} | {"out": str(out)})


def branch_point(path: Path) -> Path:
    """The checkpoint that a branch begins at; of a run's folder the newest one before its decay."""
    if not path.is_dir():
        return path
    paths = checkpoints(path)
    if not paths:
        raise FileNotFoundError(f"--branch {path}: no checkpoint in {path / 'ckpt'}, is it the folder of a run?")
    cfg = read_checkpoint(paths[-1])["config"]
    before_decay = [p for p in paths if int(p.stem) <= cfg["total_tokens"] - cfg["decay_tokens"]]
    return (before_decay or paths)[-1]


def branch_config(saved: dict, typed: dict) -> TrainConfig:
    """The parent's configuration with the typed fields changed. Raises ValueError where that makes no sense.

    --decay_tokens without --total_tokens lets the decay begin right here.
    """
    tokens, parent = saved["tokens"], saved["config"]
    for f in dataclasses.fields(GPTConfig):
        if f.name in typed and typed[f.name] != parent[f.name]:
            raise ValueError(f"--{f.name} {typed[f.name]}: the checkpoint has {parent[f.name]}, and a branch keeps its parent's shape")
    # what depends on other fields is resolved anew
    fields = {k: v for k, v in parent.items() if k not in {"out", "decay_tokens", "micro_batch_size", "device", "compile", "preset"}}
    if "decay_tokens" in typed and "total_tokens" not in typed:
        fields["total_tokens"] = tokens + typed["decay_tokens"]
    cfg = TrainConfig(**fields | {"preset": parent["preset"]} | typed)
    if cfg.total_tokens < tokens + cfg.batch_tokens:
        raise ValueError(f"--total_tokens {cfg.total_tokens:,}: the checkpoint has seen {tokens:,} already")
    if cfg.schedule == parent["schedule"] == "cosine" and cfg.total_tokens != parent["total_tokens"]:
        raise ValueError(f"--total_tokens {cfg.total_tokens:,}: this cosine was drawn for {parent['total_tokens']:,} from its first step on, "
                         "train a new one or branch with --schedule wsd")  # fmt: skip
    decay_start = cfg.total_tokens - cfg.decay_tokens
    if cfg.schedule in ("power", "wsd") and decay_start < tokens:
        raise ValueError(f"--decay_tokens {cfg.decay_tokens:,}: the decay to {cfg.total_tokens:,} would have begun at {decay_start:,}, "
                         f"and the checkpoint is at {tokens:,}")  # fmt: skip
    return cfg


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
        signal.signal(number, signal.SIG_DFL)  # who asks twice does not want to wait

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


def describe_origin(cfg: TrainConfig, corpus: data.Corpus) -> dict:
    """What one would need to know to repeat this run somewhere else."""

    def git(*words):
        here = Path(__file__).parent
        try:
            return subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):  # no git, or not a clone
            return None

    status = git("status", "--porcelain")
    return {
        "command": shlex.join(["python", *sys.argv]), "git_commit": git("rev-parse", "HEAD"), "git_dirty": status if status is None else bool(status),
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__, "platform": platform.platform(),
        "device_name": torch.cuda.get_device_name() if cfg.device.startswith("cuda") else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(), "fingerprint": corpus.meta["fingerprint"],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }  # fmt: skip


def peak_flops(cfg: TrainConfig) -> float | None:
    """The GPU's bf16 peak by its datasheet, None where we do not know it."""
    if not cfg.device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(cfg.device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def draw_curve(out: Path, record: dict) -> None:
    """curve.png: the loss, and below it the learning rate that made it; of a mixture also how even its experts' load is."""
    import matplotlib
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in open(out / "metrics.jsonl")]
    training = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "val_loss" in line]
    mixture = record["n_expert"] > 0
    color = COLORS[record["schedule"]]
    with matplotlib.rc_context(fname=STYLE):
        fig = Figure(figsize=(5, 6.2 if mixture else 4.6))
        top, bottom, *third = fig.subplots(2 + mixture, 1, sharex=True, height_ratios=(2, 1, 1)[: 2 + mixture])
        millions = lambda some: [line["tokens"] / 1e6 for line in some]
        values = lambda some, key: [math.nan if line[key] is None else line[key] for line in some]
        top.plot(millions(training), values(training, "loss"), color=color, linewidth=0.8, alpha=0.6)
        top.plot(millions(held_out), values(held_out, "val_loss"), color="black", marker="o", markersize=4)
        for y, label, hue in ((0.93, "held-out text", "black"), (0.84, "training batches", color)):
            top.text(0.98, y, label, color=hue, ha="right", va="top", transform=top.transAxes)  # losses fall: this corner is free
        end = "diverged" if record["diverged"] else f"{record['val_loss']:.3f} nats on held-out text"
        top.set_title(f"{record['preset']}, {record['schedule']}: {end}")
        top.set_ylabel("loss (nats per token)")
        bottom.plot(millions(training), [line["lr"] for line in training], color=color, linewidth=2)
        bottom.set_ylabel("learning rate")
        bottom.set_ylim(bottom=0)
        for panel in third:
            for x, key, label, hue in (
                (0.0, "max_load", "max load / mean", "#0072B2"),  # a line for each layer
                (0.37, "aux_loss", "auxiliary loss", "#B34700"),
                (0.68, "router_entropy", "entropy (nats)", "#00735A"),
            ):
                panel.plot(millions(training), values(training, key), color=hue, linewidth=0.8)
                panel.text(x, 1.04, label, color=hue, transform=panel.transAxes)
            panel.set_ylim(bottom=0)
            panel.set_ylabel("experts")
        fig.axes[-1].set_xlabel("tokens seen (millions)")
        fig.savefig(out / "curve.png")


def benchmark(cfg: TrainConfig, corpus: data.Corpus) -> None:
    """Time the training step on real batches."""
    model, optimizer = build(cfg)
    times = []
    for step in range(3 + 20):  # the first ones compile and warm caches
        started = time.perf_counter()
        loss, *_ = optimizer_step(cfg, model, optimizer, corpus, step * cfg.batch_tokens, lr=1e-6)
        loss.item()  # waits for the device
        times.append(time.perf_counter() - started)
    speed = cfg.batch_tokens / sorted(times[3:])[10]  # at the median
    if cfg.device.startswith("cuda"):
        memory = torch.cuda.max_memory_allocated(cfg.device)
    else:  # kilobytes on Linux, bytes on a Mac
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = peak_flops(cfg)
    mfu = f", MFU {model.flops_per_token() * speed / peak:.1%} of {peak / 1e12:.0f} TFLOP/s" if peak else ""
    print(f"{cfg.preset} on {cfg.device}, {cfg.dtype}, {'compiled' if cfg.compile else 'eager'}, {torch.get_num_threads()} threads: "
          f"{speed:,.0f} tokens/s, peak memory {memory / 2**30:.2f} GiB{mfu}")  # fmt: skip


# ---------------------------------------------------------------------------------------------


def is_run(out: Path) -> bool:
    """Is this the folder of a run? Other programs, too, call a file config.json; --overwrite spares theirs."""
    config = out / "config.json"
    return config.exists() and '"total_tokens"' in config.read_text(encoding="utf-8", errors="replace")


def run_folder(cfg: TrainConfig, resume: bool, overwrite: bool):
    """Make the folder that --out names, or the next free runs/PRESET-SCHEDULE-NUMBER -> (folder, its lock).

    Raises OSError where it cannot be made, or something is in the way.
    """
    if cfg.out is None:
        for number in itertools.count(1):
            out = Path("runs") / f"{cfg.preset}-{cfg.schedule}-{number}"
            with contextlib.suppress(FileExistsError):  # also one that another process takes just now
                out.mkdir(parents=True)
                return out, lock(out)
    out = Path(cfg.out)
    has_run = is_run(out)
    if out.is_dir() and not has_run and set(os.listdir(out)) - {".lock"}:
        raise FileExistsError(f"--out {out}: is a folder with other things in it, name another one")
    if has_run and not (resume or overwrite):
        raise FileExistsError(f"--out {out}: holds a run already; --resume continues it, --overwrite replaces it, or name another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = lock(out)
        if has_run and not resume:
            for entry in out.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return out, held
    except BlockingIOError:
        raise
    except OSError as error:
        raise OSError(f"--out {out}: cannot be written ({error.strerror})") from None


def plan(typed: dict, actions: argparse.Namespace) -> tuple[TrainConfig, dict | None]:
    """What to train and the checkpoint to start from, None for a new run.

    Raises ValueError or OSError where flags, run and checkpoint do not fit together.
    """
    if actions.resume and "out" not in typed:
        raise ValueError("--resume needs --out, the folder of the run to go on with")
    out = Path(typed.get("out", ""))
    if actions.resume and is_run(out):
        cfg = resumed_config(out, typed)
        if checkpoints(out):
            return cfg, newest_checkpoint(out)
        parent = json.loads((out / "config.json").read_text()).get("parent")  # stopped before its first checkpoint
        return cfg, branched(Path(parent)) if parent else None
    if actions.branch is not None:
        start = branched(branch_point(actions.branch))
        return branch_config(start, typed), start
    return make_config(**typed), None


def branched(path: Path) -> dict:
    """A parent's checkpoint as the beginning of a new run: its state and place, none of its work."""
    saved = read_checkpoint(path)
    return saved | NOTHING_DONE | {"tokens": saved["tokens"], "step": saved["step"], "parent": str(path)}


def main(argv: list[str] | None = None) -> int:
    typed, actions = parse(argv)
    try:
        if actions.time_limit is not None and not actions.time_limit > 0:
            raise ValueError(f"--time_limit {actions.time_limit}: must be above 0")
        cfg, start = plan(typed, actions)
        cfg = resolve_device(cfg)
        if cfg.data and "tokenizer" in typed:
            raise ValueError(f"--tokenizer {cfg.tokenizer}: --data {cfg.data} has a tokenizer of its own, leave one of them out")
        corpus = data.load_corpus(cfg.data, cfg.tokenizer)
        if cfg.data:
            cfg = dataclasses.replace(cfg, data=str(corpus.path.resolve()), tokenizer=corpus.meta["tokenizer"])
        check_corpus(cfg, corpus)
        new_data = "data" in typed and actions.branch
        if start and start["fingerprint"] != corpus.meta["fingerprint"] and not new_data:
            raise ValueError(f"--data {corpus.path}: fingerprint {corpus.meta['fingerprint']}, but the checkpoint was trained on {start['fingerprint']}")
        if actions.benchmark:
            out = None
        elif cfg.out and actions.resume and (Path(cfg.out) / "record.json").exists():
            print(f"{cfg.out} is finished already")
            return 0
        else:
            out, held = run_folder(cfg, actions.resume, actions.overwrite)  # `held`: the lock, until we end
            cfg = dataclasses.replace(cfg, out=str(out))
    except (ValueError, OSError) as mistake:
        print(f"train.py: {mistake}", file=sys.stderr)
        return 2
    if actions.benchmark:
        benchmark(cfg, corpus)
        return 0

    epochs = cfg.total_tokens / len(corpus.train)
    begin = f"from {start['tokens']:,} " if start else ""
    print(f"{out}: {cfg.preset} under {cfg.schedule}, {begin}to {cfg.total_tokens:,} tokens, {cfg.batch_tokens:,} a step, {epochs:.2f} epochs of {corpus.path}")
    end = f", falling to {cfg.min_lr_ratio:g} of its peak" if cfg.schedule == "cosine" else ""
    print(f"on {cfg.device}, {cfg.dtype}, {'compiled' if cfg.compile else 'eager'}, {torch.get_num_threads()} threads{end}")
    try:
        with stop_request(actions.time_limit) as must_stop:
            record = train(cfg, corpus, out, start, must_stop)
    except OSError as error:  # a full disk, a folder that went away: checkpoints are whole or not there
        print(f"train.py: {error}; the checkpoints in {out} are whole, --resume goes on from the newest", file=sys.stderr)
        return 2
    if record is None:
        print(f"stopped and saved; go on with: python train.py --out {out} --resume")
        return 3
    if not record["diverged"]:
        print(f"\na sample:\n\n{(out / 'sample.txt').read_text(encoding='utf-8')}\n")
    end = "diverged" if record["diverged"] else f"held-out loss {record['val_loss']:.4f} nats per token, {record['val_bpb']:.4f} bits per byte"
    print(f"{end}, after {clock(record['seconds'])}; record and curve.png in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
