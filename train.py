"""Train a GPT under a learning-rate schedule, on one device or many.

    python train.py --schedule power                     a laptop-sized model in a few minutes
    python train.py --schedule wsd --total_tokens 8e6    any field of TrainConfig is a flag
    python train.py --preset 36M --data data/mine        the paper's sizes
    torchrun --nproc_per_node 8 train.py --preset 1B     on eight GPUs
    python train.py --preset 1B --dry_run                what it would take: steps, FLOPs, memory, hours
    python train.py --benchmark                          a few steps: tokens per second, memory
    python train.py --out runs/a --resume                continues a run that was stopped
    python train.py --branch runs/a --decay_tokens 3e5   cools a run down from where it is
    python train.py --average --decay_tokens 0           an average of the weights instead of a decay
    python train.py --branch DIR --data data/mine        trains on from released weights, a Granite folder

Read `optimizer_step`, which takes one batch from the file to the weight update, then `train`, the
loop around it. Everything that a run leaves behind is in its folder, runs/NAME: config.json,
metrics.jsonl, checkpoint, curve.png, sample.txt and, last of all, record.json.
"""

import argparse
import contextlib
import copy
import dataclasses
import difflib
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tools.threads  # noqa: F401  before torch

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import data
import mup
from eval import check_corpus, sample, validation_loss
from model import (
    GPT,
    PRESETS,
    GPTConfig,
    Routing,
    is_granite,
    read_granite,
)  # fmt: skip
from schedules import DECAY_SHAPES, SCHEDULES, make_schedule
from tools.config import fill_in, option, whole_number
from tools.devices import (
    PEAK_FLOPS,
    any_process,
    failed,
    first_error,
    is_out_of_memory,
    join,
    mixed_precision,
    peak_flops,
    pick_device,
    rank_and_world,
    to_device,
    total,
)  # fmt: skip
from tools.figures import draw_curve
from tools.runs import (
    checkpoints,
    clock,
    continue_metrics,
    is_run,
    lock,
    newest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    stop_request,
    write_json,
)  # fmt: skip

# ---------------------------------------------------------------------------------------------
# Configuration: a field is a flag


@dataclass(frozen=True, kw_only=True)
class TrainConfig(GPTConfig):
    """Everything that determines a run. Lengths are tokens; batch_size is sequences per update."""

    preset: str = option("laptop", "row of model.PRESETS and train.RECIPES to start from", choices=tuple(PRESETS))
    schedule: str = option("power", "learning-rate schedule", choices=SCHEDULES)
    total_tokens: int = option(help="tokens to train on", above=0)
    batch_size: int = option(help="sequences per optimizer step", above=0)
    micro_batch_size: int | None = option(None, "sequences per forward pass on one device, what fits in memory (default: all)", above=0)

    lr: float = option(0.01, "peak learning rate of wsd, cosine and constant", above=0)
    lr_max: float = option(0.02, "ceiling of the power schedule", above=0)
    power_a: float = option(4.0, "a of the power schedule, beta * a * n^b", above=0)
    power_b: float = option(-0.51, "b of the power schedule", at_most=0)
    warmup_tokens: int = option(10**9, "tokens of linear warm-up", at_least=0)
    decay_tokens: int | None = option(None, "tokens of the final decay (default: 10 %% of total_tokens)", at_least=0)
    decay_shape: str = option("exp", "how power and wsd decay to 0", choices=tuple(DECAY_SHAPES))
    min_lr_ratio: float = option(0.1, "final learning rate of the cosine, as a share of lr", at_least=0, at_most=1)

    average: bool = option(False, "average the weights, over about the last tenth of the tokens seen: to be looked at, at any time, in place of a decay")
    router_aux_weight: float = option(0.01, "weight in the training loss of a mixture's auxiliary loss, which evens out its experts' load", at_least=0)
    weight_decay: float = option(0.1, "AdamW's weight decay", at_least=0)
    beta1: float = option(0.9, "AdamW's first beta", at_least=0, below=1)
    beta2: float = option(0.95, "AdamW's second beta", at_least=0, below=1)
    adam_eps: float = option(1e-10, "AdamW's epsilon", at_least=0)
    grad_clip: float = option(1.0, "largest norm of the gradient; 0: no clipping", at_least=0)

    seed: int = option(0, "of the initial weights", at_least=0, at_most=2**63 - 1)
    data_seed: int = option(0, "of the order of the training sequences", at_least=0, at_most=2**63 - 1)
    data: str | None = option(None, "folder of a prepared corpus, or a mixture: web:0.8,code:0.2 (default: the embedded corpus)")
    decay_data: str | None = option(None, "corpus or mixture from the beginning of the decay on (default: no change)")
    past_data: str | None = option(None, "set by --branch: what the run's parents read, MIXTURE@TOKENS;MIXTURE@TOKENS..., each up to there")
    tokenizer: str = option("bytes", "of the embedded corpus; a prepared one has its own")
    out: str | None = option(None, "folder of the run (default: a new numbered one under runs/)")

    device: str = option("auto", "auto: cuda, else mps, else cpu")
    dtype: str = option("auto", "of matrix products; auto: bfloat16 where the processor has it and gains by it, else float32", choices=("auto", "float32", "bfloat16"))
    compile: bool | None = option(None, "torch.compile the blocks (default: on cuda, from width 256 on)")
    recompute: bool = option(False, "compute the blocks' insides again in the backward pass: less memory, a third more work")

    log_every: int = option(50_000_000, "tokens between lines of progress", above=0)
    eval_every: int = option(10**9, "tokens between evaluations on held-out text", above=0)
    eval_tokens: int | None = option(None, "held-out tokens of an evaluation, of each source, spread over all of them (default: all)", above=0)
    final_eval_tokens: int | None = option(None, "validation tokens of the last evaluation, of each source (default: all)", above=0)
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
        if self.decay_data and not self.decay_tokens:
            raise ValueError(f"--decay_data {self.decay_data}: this run has no decay, --decay_tokens is 0")
        _ = self.data_stages  # raises if past_data is not what it should be
        make_schedule(self)  # raises if warm-up and decay do not fit

    @property
    def batch_tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def data_stages(self) -> list[tuple[int, str | None]]:
        """(token position, mixture that is read from there on), ...; raises ValueError."""
        stages, begin = [], 0
        for past in self.past_data.split(";") if self.past_data is not None else []:
            mixture, _, end = past.rpartition("@")
            if not mixture or not end.isdecimal():
                raise ValueError(f"--past_data {self.past_data}: must be mixtures and where they end, as in web:0.8,code:0.2@1000000")
            stages.append((begin, mixture))
            begin = int(end)
        stages.append((begin, self.data))
        return stages + [(self.total_tokens - self.decay_tokens, self.decay_data)] * (self.decay_data is not None)


# How each preset is trained; what a row does not name is TrainConfig's default. The paper's micro-batches
# are small for the logits' sake, 0.8 GB per sequence in float32; they have not been tried on a GPU yet.
_search = dict(batch_size=128, micro_batch_size=8, total_tokens=32 * 10**9, lr=0.0026)  # a cell of Table 2, lr by the law
_large = dict(batch_size=1024, micro_batch_size=4, lr=0.01)
_laptop = dict(
    batch_size=8, total_tokens=4_200_000, warmup_tokens=100_000, lr=0.004, power_a=16.0, lr_max=0.02,
    log_every=5 * 10**4, eval_every=1_400_000, eval_tokens=2**16, save_every=10**6,
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
    actions.add_argument("--dry_run", action="store_true", default=False, help="print what the run would take, and stop")
    actions.add_argument("--benchmark", action="store_true", default=False, help="time a few steps and stop")
    actions.add_argument("--profile", type=Path, default=None, metavar="FILE", help="save a trace of a few steps as FILE, for ui.perfetto.dev, and stop")
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
# One process or many. torchrun starts this file once for each GPU (or CPU core). All processes
# hold the same weights and take different sequences of every batch; DistributedDataParallel
# averages their gradients. Rank 0 alone prints and writes.


# ---------------------------------------------------------------------------------------------
# Device



def resolve_device(cfg: TrainConfig) -> TrainConfig:
    """Replace every "auto" by what it means on this machine; the record says what was used.

    Raises ValueError for a device that is not there, or a batch that the processes cannot share.
    """
    device = pick_device(cfg.device)
    kind = device.split(":")[0]
    _, world = rank_and_world()
    if world > 1 and kind == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    elif device.startswith("cuda:"):
        torch.cuda.set_device(device)
    if kind == "cuda":
        use_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # 1.4x at the laptop's width of 128, 1.2x at 64, nothing below or for small experts
        can = torch.cpu.get_capabilities() if kind == "cpu" and hasattr(torch.cpu, "get_capabilities") else {}
        use_bf16 = (can.get("avx512_bf16") or can.get("amx_bf16")) and cfg.n_embd >= 64 and not cfg.n_expert
    dtype = ("bfloat16" if use_bf16 else "float32") if cfg.dtype == "auto" else cfg.dtype
    # The compiler takes half a minute. On a GPU, a small model is done by then.
    compile = (kind == "cuda" and cfg.n_embd >= 256) if cfg.compile is None else cfg.compile
    if cfg.batch_size % world:
        raise ValueError(f"--batch_size {cfg.batch_size}: must be a multiple of the {world} processes that share it")
    micro_batch_size = math.gcd(cfg.micro_batch_size, cfg.batch_size // world)
    return dataclasses.replace(cfg, device=device, dtype=dtype, compile=compile, micro_batch_size=micro_batch_size)


# ---------------------------------------------------------------------------------------------
# One step


def optimizer_step(cfg: TrainConfig, model: GPT, optimizer, corpus: data.Corpus | data.Mixture, tokens: int, lr: float) -> tuple:
    """One update, with the batch that begins at token position `tokens` of the run.

    Returns the mean loss of this process's sequences in nats per token and the gradient's norm
    before clipping, as tensors (reading their values would make a GPU wait), and the last
    micro-batch's Routing. model: a GPT, or one in DistributedDataParallel.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]  # muP's share, see mup.rules

    rank, world = rank_and_world()
    g = tokens // cfg.seq_len + np.arange(cfg.batch_size)  # global numbers of the batch's sequences
    mine = g[rank::world]
    n_micro = len(mine) // cfg.micro_batch_size
    batch_loss = 0.0
    for i, part in enumerate(np.split(mine, n_micro)):
        inputs, targets = data.draw(corpus, part, cfg.seq_len, cfg.data_seed)  # [micro_batch_size, seq_len]
        inputs, targets = to_device(inputs, cfg.device), to_device(targets, cfg.device)
        to_be_continued = world > 1 and i < n_micro - 1  # gradients travel once, with the last micro-batch
        with model.no_sync() if to_be_continued else contextlib.nullcontext():
            with mixed_precision(cfg):
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


AVERAGE_POWER = 16  # five sixths of the average are then from the last tenth of the tokens: 1 - 0.9^17 = 0.83


def update_average(average: GPT, model: GPT, before: int, tokens: int) -> None:
    """After a step from `before` tokens to `tokens`: mix the new weights into their average (cfg.average).

    The weights at n tokens count as n^16, so the average covers about the last tenth of the tokens
    seen, however many these are and in steps of any size: like Power itself it asks for no horizon.
    (Polynomial-decay averaging: Shamir and Zhang, 2013.)
    """
    share = 1 - (before / tokens) ** (AVERAGE_POWER + 1)  # of the weights' sum, what the last step adds
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters()):
            mean.lerp_(weight, share)


@dataclass
class State:
    """A run at one moment: everything that training changes."""

    model: GPT
    optimizer: torch.optim.Optimizer
    average: GPT | None  # the averaged weights, with --average
    tokens: int = 0  # seen so far


class Step(NamedTuple):
    """What one optimizer step reports, still on the device; see optimizer_step."""

    lr: float
    loss: torch.Tensor
    grad_norm: torch.Tensor
    routing: Routing | None


def build(cfg: TrainConfig) -> State:
    """The model with its first weights, the same on every device, and its optimizer."""
    torch.manual_seed(cfg.seed)
    model = GPT(cfg).to(cfg.device)
    groups = mup.param_groups(model, mup.rules(cfg), cfg.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
    average = copy.deepcopy(model).requires_grad_(False) if cfg.average else None
    model.recompute = cfg.recompute
    if cfg.compile and cfg.device == "cpu":
        model.compile()
    elif cfg.compile:  # the blocks are alike: one short compilation serves them all, and gradients travel meanwhile
        for block in model.blocks:
            block.compile()
        model.loss = torch.compile(model.loss)
    return State(model, optimizer, average)


def crossed(every: int, tokens: int, batch_tokens: int) -> bool:
    """Did the step that ended at `tokens` reach or pass a multiple of `every`?"""
    return tokens // every > (tokens - batch_tokens) // every


def training_steps(cfg: TrainConfig, state: State, corpus: data.Corpus | data.Mixture, until: int) -> Iterator[Step]:
    """Train in whole batches, to no further than `until` tokens; yield a Step after each, with state.tokens advanced.

    The only training loop of the project: train() and sweep.py both iterate over it. Saving, resuming
    and branching between two steps change nothing.
    """
    replica = state.model
    if rank_and_world()[1] > 1:
        replica = DistributedDataParallel(state.model, gradient_as_bucket_view=True, broadcast_buffers=False)
    schedule = make_schedule(cfg)
    while state.tokens + cfg.batch_tokens <= until:  # whole batches only
        lr = schedule(state.tokens + cfg.batch_tokens / 2)  # the learning rate at the middle of the step
        loss, grad_norm, routing = optimizer_step(cfg, replica, state.optimizer, corpus, state.tokens, lr)
        before, state.tokens = state.tokens, state.tokens + cfg.batch_tokens
        if state.average:
            update_average(state.average, state.model, before, state.tokens)
        yield Step(lr, loss, grad_norm, routing)


# ---------------------------------------------------------------------------------------------
# The run


def validation_losses(cfg: TrainConfig, state: State, corpus: data.Corpus | data.Mixture, max_tokens: int | None) -> dict[str, float]:
    """val_loss and val_bpb; of a mixture, those of held-out text in the shares of --data, and each source's loss.

    The same of the averaged weights, if there are any, as average_val_loss and so on.
    """
    losses = mixture_losses(cfg, state.model, corpus, max_tokens)
    if state.average:
        losses |= {f"average_{name}": loss for name, loss in mixture_losses(cfg, state.average, corpus, max_tokens).items()}
    return losses


def mixture_losses(cfg: TrainConfig, model: GPT, corpus: data.Corpus | data.Mixture, max_tokens: int | None) -> dict[str, float]:
    with mixed_precision(cfg):
        results = {name: validation_loss(model, source, max_tokens) for name, source in corpus.sources.items()}
    if len(results) == 1:
        return next(iter(results.values()))
    mean = lambda of: sum(share * of(result) for share, result in zip(corpus.shares, results.values()))
    loss, bytes_per_token = mean(lambda r: r["val_loss"]), mean(lambda r: r["val_loss"] / r["val_bpb"] / math.log(2))
    each = {f"val_loss_{name}": result["val_loss"] for name, result in results.items()}
    return {"val_loss": loss, "val_bpb": loss / bytes_per_token / math.log(2), **each}


def summary(held_out: dict[str, float]) -> str:
    averaged = f", of the averaged weights {held_out['average_val_loss']:.4f}" if "average_val_loss" in held_out else ""
    return f"held-out loss {held_out['val_loss']:.4f}{averaged}"


def train(cfg: TrainConfig, corpus: data.Corpus | data.Mixture, out: Path, start: dict | None = None, must_stop=lambda: False) -> dict | None:
    """Train, write the run's folder, return its record; or save, and return None, once must_stop().

    start: a checkpoint to go on from, this run's own or, for a branch, its parent's. A run that is
    stopped and resumed on a CPU is, bit by bit, the run that was not. Rank 0's is the record; other
    processes write nothing, and return an empty one.
    A loss that stops being finite, or that ends above ln(vocab_size), is a result and not an error:
    the record then says diverged, and its val_loss is None.
    """
    began = time.perf_counter()
    rank, world = rank_and_world()
    state, progress = build(cfg), FRESH
    if start:
        restore(start, state)
        progress = {key: start[key] for key in FRESH}
    model, average, tokens, step, parent = state.model, state.average, state.tokens, progress["step"], progress["parent"]
    decay_start = cfg.total_tokens - cfg.decay_tokens
    flops, peak = model.flops_per_token(), peak_flops(cfg)
    if rank == 0:
        provenance = describe_origin(cfg, corpus) | {"parent": parent}
        write_json(out / "config.json", dataclasses.asdict(cfg) | provenance)
        metrics = continue_metrics(out / "metrics.jsonl", tokens, at_the_end=tokens + cfg.batch_tokens > cfg.total_tokens)

    def log(text: str, **line):
        """A line for people and one for metrics.jsonl; JSON has no NaN: what is not finite becomes null."""
        finite = lambda x: x if not isinstance(x, float) or math.isfinite(x) else None
        if rank == 0:
            print(text, flush=True)
            metrics.write(json.dumps({key: finite(value) for key, value in line.items()}) + "\n")

    # Seconds of this run's own work, over all its sessions: in all, and in the steps of the loop
    seconds = lambda: progress["seconds"] + time.perf_counter() - began
    training_seconds, trained_tokens = progress["training_seconds"], progress["trained_tokens"]
    window_start, window_tokens = time.perf_counter(), tokens  # since the last line of progress
    diverged = False

    def save():
        if rank > 0:
            return
        done = {"step": step, "parent": parent, "seconds": seconds(),
                "training_seconds": training_seconds, "trained_tokens": trained_tokens}  # fmt: skip
        save_state(out / "ckpt" / f"{tokens:016d}.pt", cfg, corpus, state, **done)
        if average:  # a checkpoint of its own, as if these were the weights
            save_state(out / "average.pt", cfg, corpus, State(average, state.optimizer, None, tokens), **done)
        prune_checkpoints(out, cfg.keep_checkpoints, decay_start)

    for lr, loss, grad_norm, routing in training_steps(cfg, state, corpus, cfg.total_tokens):
        tokens, step = state.tokens, step + 1
        last = tokens + cfg.batch_tokens > cfg.total_tokens
        due = lambda every: crossed(every, tokens, cfg.batch_tokens)

        if due(cfg.log_every) or last:
            loss = total(loss).item() / world  # waits for the device: the clock is right only behind it
            window = time.perf_counter() - window_start
            training_seconds, trained_tokens = training_seconds + window, trained_tokens + tokens - window_tokens
            speed = (tokens - window_tokens) / window
            mfu = f"   MFU {flops * speed / world / peak:.1%}" if peak else ""
            left = clock((cfg.total_tokens - tokens) / speed)
            log(f"{tokens:>14,} tokens   loss {loss:.4f}   lr {lr:.2e}   {speed:,.0f} tokens/s{mfu}   {left} left",
                step=step, tokens=tokens, loss=loss, lr=lr, grad_norm=grad_norm.item(),
                tokens_per_second=round(speed), seconds=round(seconds(), 2), **(routing.metrics() if routing else {}))  # fmt: skip
            diverged = not math.isfinite(loss)
            window_start, window_tokens = time.perf_counter(), tokens
        pause = time.perf_counter()  # what follows is not training time
        if due(cfg.eval_every) and not last:
            held_out = validation_losses(cfg, state, corpus, cfg.eval_tokens)
            log(f"{tokens:>14,} tokens   {summary(held_out)}", tokens=tokens, **held_out)
        stopping = not last and any_process(must_stop())  # many processes must stop at the same step: they ask each other
        if due(cfg.save_every) or stopping or tokens <= decay_start < tokens + cfg.batch_tokens or last or diverged:
            save()
        if stopping:
            return None
        window_start += time.perf_counter() - pause
        if diverged:
            break

    held_out, record = evaluate(cfg, state, corpus)
    if rank > 0:
        return {}
    log(f"{tokens:>14,} tokens   {summary(held_out)}", tokens=tokens, **held_out)
    metrics.close()
    model.eval()
    torch.manual_seed(cfg.seed)
    with torch.compiler.set_stance("force_eager"):  # its growing shapes would compile again and again
        text = "" if record["diverged"] else sample(model, corpus.tokenizer)
    (out / "sample.txt").write_text(text, encoding="utf-8")
    record |= provenance | {"seconds": round(seconds(), 1), "tokens_per_second": round(trained_tokens / training_seconds)}
    draw_curve(out, record)
    write_json(out / "record.json", record)  # last, by rename: where it exists, the run is finished
    return record


def evaluate(cfg: TrainConfig, state: State, corpus: data.Corpus | data.Mixture) -> tuple[dict, dict]:
    """A run that ends here, on final_eval_tokens -> (its held-out loss as it is, the part of its record that follows from model and config)."""
    held_out = validation_losses(cfg, state, corpus, cfg.final_eval_tokens)
    diverged = not held_out["val_loss"] <= math.log(cfg.vocab_size)  # weights that met a loss that is not finite are NaN, and so is this one
    results = dict.fromkeys(held_out) if diverged else held_out
    if len(corpus.sources) > 1:
        epochs = data.epochs(corpus, state.tokens // cfg.seq_len, cfg.seq_len, cfg.data_seed)
        results = results | {f"epochs_{name}": n for name, n in epochs.items()}
    return held_out, dataclasses.asdict(cfg) | results | {
        "tokens": state.tokens, "diverged": diverged, "n_params": state.model.n_params(), "n_active_params": state.model.n_active_params(),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Checkpoints: stop at any time, go on from any of them

FRESH = {"tokens": 0, "step": 0, "parent": None, "seconds": 0.0, "training_seconds": 0.0, "trained_tokens": 0}


def save_state(path: Path, cfg: TrainConfig, corpus: data.Corpus, state: State, **more) -> None:
    """Everything that the run is, and `more`, in one file that appears whole or not at all.

    The schedule and the data order have no state of their own: they follow from the tokens seen.
    """
    content = more | {
        "config": dataclasses.asdict(cfg), "fingerprint": corpus.meta["fingerprint"], "tokens": state.tokens,
        "model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(),
        "average": state.average and state.average.state_dict(),
    }  # fmt: skip
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
        raise OSError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or 'is the disk full?'})") from None


def restore(saved: dict, state: State) -> None:
    """Put what save_state wrote back into a State that build() made."""
    state.tokens = saved["tokens"]
    state.model.load_state_dict(saved["model"])
    if state.average:  # of a parent that had none, it begins with the parent's weights
        state.average.load_state_dict(saved.get("average") or saved["model"])
    if "optimizer" not in saved:  # released weights come alone
        return
    groups = state.optimizer.param_groups
    ours = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    state.optimizer.load_state_dict(saved["optimizer"])
    for group, settings in zip(state.optimizer.param_groups, ours):
        group.update(settings)  # a branch may have another weight decay than its parent


# Flags that may differ when a run is resumed: they say how it is computed, not what
RUNTIME_FLAGS = {"device", "compile", "recompute", "micro_batch_size", "save_every", "keep_checkpoints"}


def resumed_config(out: Path, typed: dict) -> TrainConfig:
    """The configuration that the run in `out` began with. Raises ValueError where a flag disagrees."""
    try:
        saved = json.loads((out / "config.json").read_text())
    except json.JSONDecodeError:
        raise ValueError(f"--out {out}: its config.json is damaged, --overwrite starts the run again") from None
    saved = {f.name: saved[f.name] for f in dataclasses.fields(TrainConfig) if f.name in saved}
    for name, value in typed.items():
        if name not in RUNTIME_FLAGS | {"out"} and value not in (saved.get(name), "auto"):
            raise ValueError(f"--{name} {value}: the run in {out} has {saved.get(name)}; leave the flag out, or use --branch for a new run")
    return TrainConfig(**saved | {name: typed[name] for name in RUNTIME_FLAGS & set(typed)} | {"out": str(out)})


def branch_point(path: Path) -> Path:
    """The checkpoint that a branch begins at; of a run's folder the newest one before its decay."""
    if not path.is_dir() or is_granite(path):
        return path
    paths = checkpoints(path)
    if not paths:
        raise FileNotFoundError(f"--branch {path}: no checkpoint in {path / 'ckpt'}, is it the folder of a run?")
    cfg = json.loads((path / "config.json").read_text())
    before_decay = [p for p in paths if int(p.stem) <= cfg["total_tokens"] - cfg["decay_tokens"]]
    return (before_decay or paths)[-1]


def branch_config(saved: dict, typed: dict) -> TrainConfig:
    """The parent's configuration with the typed fields changed. Raises ValueError where that makes no sense.

    --decay_tokens without --total_tokens lets the decay begin right here.
    """
    tokens, parent = saved["tokens"], saved["config"]
    released = "optimizer" not in saved  # these begin a new run: of theirs, it keeps all but the length of its sequences
    for name in {f.name for f in dataclasses.fields(GPTConfig)} - ({"seq_len"} if released else set()) | ({"preset"} if not released else set()):
        if name in typed and typed[name] != parent[name]:
            raise ValueError(f"--{name} {typed[name]}: the checkpoint has {parent[name]}, and a branch keeps its parent's shape")
    if released and not {"lr", "power_a"} & set(typed):
        raise ValueError("--branch: released weights come without a learning rate to go on with, choose one, as in --schedule wsd --lr 1e-4")
    if released:
        return make_config(**parent | typed)
    # what depends on other fields is resolved anew
    fields = {k: v for k, v in parent.items() if k not in {"out", "decay_tokens", "device", "compile"}}
    fields["micro_batch_size"] = math.gcd(parent["micro_batch_size"], typed.get("batch_size", parent["batch_size"]))
    if typed.get("schedule") in ("cosine", "constant"):
        fields.pop("decay_data", None)  # they have no decay
    if "decay_tokens" in typed and "total_tokens" not in typed:
        fields["total_tokens"] = tokens + typed["decay_tokens"]
    cfg = TrainConfig(**fields | typed)
    if cfg.total_tokens < tokens + cfg.batch_tokens:
        raise ValueError(f"--total_tokens {cfg.total_tokens:,}: the checkpoint has seen {tokens:,} already")
    if cfg.schedule == parent["schedule"] == "cosine" and cfg.total_tokens != parent["total_tokens"]:
        raise ValueError(f"--total_tokens {cfg.total_tokens:,}: this cosine was drawn for {parent['total_tokens']:,} from its first step on, "
                         "train a new one or branch with --schedule wsd")  # fmt: skip
    decay_start = cfg.total_tokens - cfg.decay_tokens
    if cfg.schedule in ("power", "wsd") and decay_start < tokens:
        raise ValueError(f"--decay_tokens {cfg.decay_tokens:,}: the decay to {cfg.total_tokens:,} would have begun at {decay_start:,}, "
                         f"and the checkpoint is at {tokens:,}")  # fmt: skip
    # What was read so far stays as it was, and sources that are read on go on where they are
    stages = [stage for stage in TrainConfig(**parent).data_stages if stage[0] < tokens] if tokens else []
    ends = [begin for begin, _ in stages[1:]] + [tokens]
    past = [f"{mixture or 'embedded'}@{end}" for (_, mixture), end in zip(stages, ends)]
    if stages and stages[-1][1] == cfg.data:
        past.pop()  # no change here
    return dataclasses.replace(cfg, past_data=";".join(past) or None)


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
        "threads": torch.get_num_threads(), "processes": rank_and_world()[1], "fingerprint": corpus.meta["fingerprint"],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }  # fmt: skip


def memory(cfg: TrainConfig, n_micro: int = 2) -> dict[str, float]:
    """Bytes that training needs on one device at its fullest moment, when the backward pass begins.

    By the shapes of what autograd keeps; allocators add a few percent. What a block keeps is counted
    per token: the residual stream twice in float32, in the dtype of the matrix products the two
    normed streams, queries, keys, values, attention's output, and 3 hidden vectors of the MLP (4
    without the compiler). n_micro: micro-batches per step; with one, no gradient is there yet.
    """
    with torch.device("meta"):
        model = GPT(cfg)
    on_cpu, size = cfg.device == "cpu", 2 if cfg.dtype == "bfloat16" else 4
    n_params, tokens = model.n_params(), cfg.micro_batch_size * cfg.seq_len
    heads = 2 * cfg.n_embd + 2 * cfg.n_kv_head * cfg.d_head  # queries, attention's output, keys, values
    if cfg.n_expert:  # the pairs' inputs and hidden vectors; the router's input in float32, and its scores
        pair = cfg.n_embd + (3 if cfg.compile and not on_cpu else 5) * cfg.n_ffn
        mlp = (4 if on_cpu else size) * cfg.n_expert_active * pair + 4 * (cfg.n_embd + 4 * cfg.n_expert)
    else:
        mlp = size * (3 if cfg.compile else 4) * cfg.n_ffn
    block = 8 * cfg.n_embd + size * 2 * cfg.n_embd + (4 if on_cpu else size) * heads + mlp
    if on_cpu and not cfg.compile:
        block += 8 * cfg.n_embd  # RMSNorm in several steps
    blocks = cfg.n_layer * 4 * cfg.n_embd + block if cfg.recompute else cfg.n_layer * block
    return {
        "parameters": 4 * n_params, "AdamW": 8 * n_params, "average": 4 * n_params * cfg.average, "gradients": 4 * n_params if n_micro > 1 else 0,
        "bfloat16 copies": 2 * n_params if size == 2 and not (on_cpu and cfg.n_expert) else 0, "blocks": tokens * blocks,
        "logits": tokens * cfg.vocab_size * (size + 4 + 4),  # themselves, their softmax, and its gradient
    }  # fmt: skip


def dry_run(cfg: TrainConfig, n_devices: int) -> None:
    """What the run would take, from arithmetic alone."""
    cfg = dataclasses.replace(cfg, micro_batch_size=math.gcd(cfg.micro_batch_size, cfg.batch_size // n_devices))
    with torch.device("meta"):
        model = GPT(cfg)
    steps, n_micro = cfg.total_tokens // cfg.batch_tokens, cfg.batch_size // n_devices // cfg.micro_batch_size
    flops = model.flops_per_token() * steps * cfg.batch_tokens
    need = memory(cfg, n_micro)
    gib = lambda n: f"{n / 2**30:.3g} GiB"
    hours = lambda gpu: f"{flops / (0.4 * PEAK_FLOPS[gpu]) / 3600 / n_devices:,.3g} hours on {gpu}s"
    print(f"{cfg.preset} under {cfg.schedule}: {steps * cfg.batch_tokens:,} tokens in {steps:,} steps of {cfg.batch_tokens:,}")
    print(f"devices: {n_devices}, each {n_micro} micro-batch{'es' * (n_micro > 1)} of {cfg.micro_batch_size} sequences in a step")
    print(f"FLOPs:   {flops:.3g}, {model.flops_per_token() / 1e9:.3g}e9 per token (forward and backward, causal attention counted once)")
    print(f"memory:  {gib(sum(need.values()))} per device: " + ", ".join(f"{name} {gib(n)}" for name, n in need.items() if n))
    print(f"         ({cfg.device}, {cfg.dtype}, {'compiled' if cfg.compile else 'eager'}, {'recompute' if cfg.recompute else 'no recompute'}; from shapes, an allocator adds to it)")
    print(f"time:    {hours('H200')}, {hours('A100')}, if they reach 40 % of their data sheet's bfloat16; --benchmark measures the machine at hand")


def a_few_steps(cfg: TrainConfig, corpus: data.Corpus, n: int):
    """Build the model and train it for n steps at a learning rate that changes nothing; yields (model, seconds) of each."""
    cfg = dataclasses.replace(cfg, schedule="constant", lr=1e-9, warmup_tokens=0, total_tokens=n * cfg.batch_tokens)
    state, started = build(cfg), time.perf_counter()
    for step in training_steps(cfg, state, corpus, n * cfg.batch_tokens):
        step.loss.item()  # waits for the device
        yield state.model, time.perf_counter() - started
        started = time.perf_counter()


def benchmark(cfg: TrainConfig, corpus: data.Corpus) -> None:
    """Time the training step on real batches."""
    rank, world = rank_and_world()
    steps = list(a_few_steps(cfg, corpus, 3 + 20))
    model, times = steps[0][0], sorted(seconds for _, seconds in steps[3:])  # the first ones compile and warm caches
    if cfg.device.startswith("cuda"):
        peak_memory = torch.cuda.max_memory_allocated(cfg.device)
    else:
        import resource  # not on Windows

        # kilobytes on Linux, bytes on a Mac
        peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    speed, peak = cfg.batch_tokens / times[10], peak_flops(cfg)  # at the median
    achieved = model.flops_per_token() * speed / world
    if rank == 0:
        print(f"{cfg.preset} on {cfg.device}, {cfg.dtype}, {'compiled' if cfg.compile else 'eager'}, {torch.get_num_threads()} threads, {world} process{'es' * (world > 1)}")
        print(f"step: median {1e3 * times[10]:.1f} ms, quartiles {1e3 * times[5]:.1f} and {1e3 * times[15]:.1f}, of {cfg.batch_tokens:,} tokens: {speed:,.0f} tokens/s")
        print(f"peak memory of a process: {peak_memory / 2**30:.2f} GiB" + ("" if cfg.device.startswith("cuda") else ", the program's own included"))
        print(f"{achieved / 1e12:.3g} TFLOP/s per process, causal attention counted once" +
              (f": MFU {achieved / peak:.1%} of {peak / 1e12:.0f} TFLOP/s, the data sheet's for bfloat16" if peak else ""))  # fmt: skip


def profile(cfg: TrainConfig, corpus: data.Corpus, file: Path) -> None:
    """Record a few steps, on a time line and in a table."""
    steps = a_few_steps(cfg, corpus, 3 + 3)
    for _ in range(3):
        next(steps)
    with torch.profiler.profile() as record:
        for _ in steps:
            pass
    if rank_and_world()[0] == 0:
        record.export_chrome_trace(str(file))
        print(record.key_averages().table(sort_by=f"self_{'cuda' if cfg.device.startswith('cuda') else 'cpu'}_time_total", row_limit=12, max_name_column_width=50))
        print(f"trace: {file}, open it at ui.perfetto.dev or in chrome://tracing")


# ---------------------------------------------------------------------------------------------


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
    except OSError as error:
        raise OSError(f"--out {out}: cannot be written ({error.strerror})") from None
    held = lock(out)
    if has_run and not resume:
        for entry in out.iterdir():
            if entry.name != ".lock":  # that is ours
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return out, held


def plan(typed: dict, actions: argparse.Namespace) -> tuple[TrainConfig, dict | None]:
    """What to train and the checkpoint to start from, None for a new run.

    Raises ValueError or OSError where flags, run and checkpoint do not fit together.
    """
    if actions.resume and "out" not in typed:
        raise ValueError("--resume needs --out, the folder of the run to go on with")
    for flag in {"data", "decay_data"} & set(typed):  # from any folder, the same
        typed[flag] = data.format_mixture(data.parse_mixture(typed[flag], f"--{flag}"))
    out = Path(typed.get("out", ""))
    if actions.resume and is_run(out):
        cfg = resumed_config(out, typed)
        if checkpoints(out):
            return cfg, newest_checkpoint(out)
        begun = json.loads((out / "config.json").read_text())  # stopped before its first checkpoint
        if not begun.get("parent"):
            return cfg, None
        return cfg, branched(Path(begun["parent"])) | {"fingerprint": begun["fingerprint"]}
    if actions.branch is not None:
        start = branched(branch_point(actions.branch))
        return branch_config(start, typed), start
    return make_config(**typed), None


def branched(path: Path) -> dict:
    """A parent's checkpoint as the beginning of a new run: its state and place, none of its work. Of a Granite folder: its weights."""
    if is_granite(path):
        cfg, weights = read_granite(path)
        shape = dataclasses.asdict(cfg) | {"tokenizer": str(path.resolve() / "tokenizer.json")}
        return FRESH | {"model": weights, "config": shape, "parent": str(path), "fingerprint": None}
    saved = read_checkpoint(path)
    return saved | FRESH | {"tokens": saved["tokens"], "step": saved["step"], "parent": str(path)}


def set_up(typed: dict, actions: argparse.Namespace) -> tuple:
    """Command line -> (config, checkpoint or None, corpus, folder or None, its lock).

    Raises ValueError or OSError for what is wrong with it.
    """
    rank, _ = rank_and_world()
    if actions.time_limit is not None and not actions.time_limit > 0:
        raise ValueError(f"--time_limit {actions.time_limit}: must be above 0")
    cfg, start = plan(typed, actions)
    if actions.dry_run:  # for a GPU, which need not be here
        if cfg.device in ("auto", "cuda"):
            dtype = "bfloat16" if cfg.dtype == "auto" else cfg.dtype
            cfg = dataclasses.replace(cfg, device="cuda", dtype=dtype, compile=cfg.n_embd >= 256 if cfg.compile is None else cfg.compile)
        return cfg, None, None, None, None
    cfg = resolve_device(cfg)
    own_tokenizer = cfg.data and "embedded" not in data.parse_mixture(cfg.data)
    if own_tokenizer and "tokenizer" in typed:
        raise ValueError(f"--tokenizer {cfg.tokenizer}: --data {cfg.data} has a tokenizer of its own, leave one of them out")
    if actions.profile and not actions.profile.parent.is_dir():
        raise ValueError(f"--profile {actions.profile}: there is no folder {actions.profile.parent}")
    stages = [(math.ceil(begin / cfg.seq_len), mixture) for begin, mixture in cfg.data_stages]
    corpus = data.load_corpus(cfg.data, cfg.tokenizer, stages)
    if own_tokenizer:
        cfg = dataclasses.replace(cfg, tokenizer=corpus.meta["tokenizer"])
    for source in corpus.sources.values():
        check_corpus(cfg, source)
    new_data = actions.branch is not None and bool({"data", "decay_data"} & set(typed))
    of_released_weights = start is not None and start["fingerprint"] is None
    if start and start["fingerprint"] != corpus.meta["fingerprint"] and not (new_data or of_released_weights):
        raise ValueError(f"--data {corpus.path}: fingerprint {corpus.meta['fingerprint']}, but the checkpoint was trained on {start['fingerprint']}")
    if rank > 0 or actions.benchmark or actions.profile:
        return cfg, start, corpus, None, None
    out, held = run_folder(cfg, actions.resume, actions.overwrite)
    return dataclasses.replace(cfg, out=str(out)), start, corpus, out, held


def main(argv: list[str] | None = None) -> int:
    typed, actions = parse(argv)
    mistake = ready = None
    try:
        join(typed.get("device", "auto"))
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    rank, world = rank_and_world()
    for turn in (True, False):  # rank 0 first: it may have a corpus to prepare
        try:
            if (rank == 0) == turn:
                ready = set_up(typed, actions)
        except (ValueError, OSError) as error:
            mistake = str(error)
        if mistake := first_error(mistake):
            if rank == 0:
                print(f"train.py: {mistake}", file=sys.stderr)
            return 2
    cfg, start, corpus, out, held = ready  # `held`: the folder's lock, until we end
    place = start["tokens"] if start else 0
    if any_process(total(torch.tensor(place)) != world * place):
        print(f"train.py: rank {rank} begins at {place:,} tokens, another one elsewhere: do all machines share the disk of --out?", file=sys.stderr)
        return 2
    if actions.dry_run:
        return dry_run(cfg, world) or 0
    if actions.benchmark:
        return benchmark(cfg, corpus) or 0
    if actions.profile:
        return profile(cfg, corpus, actions.profile) or 0
    if actions.resume and (Path(cfg.out) / "record.json").exists():
        if rank == 0:
            print(f"{cfg.out} is finished already")
        return 0
    if rank == 0:
        read = data.epochs(corpus, cfg.total_tokens // cfg.seq_len, cfg.seq_len, cfg.data_seed)
        epochs = ", ".join(f"{n:.2f} epochs of {name}" for name, n in read.items())
        begin = f"from {start['tokens']:,} " if start else ""
        print(f"{out}: {cfg.preset} under {cfg.schedule}, {begin}to {cfg.total_tokens:,} tokens, {cfg.batch_tokens:,} a step, {epochs}")
        end = f", falling to {cfg.min_lr_ratio:g} of its peak" if cfg.schedule == "cosine" else ""
        many = f", {world} processes" if world > 1 else ""
        print(f"on {cfg.device}, {cfg.dtype}, {'compiled' if cfg.compile else 'eager'}, {torch.get_num_threads()} threads{many}{end}")
    try:
        with stop_request(actions.time_limit) as must_stop:
            record = train(cfg, corpus, out, start, must_stop)
    except OSError as error:  # a full disk, a folder that went away: checkpoints are whole or not there
        print(f"train.py: {error}; the checkpoints in {out} are whole, --resume goes on from the newest", file=sys.stderr)
        return 2
    except Exception as error:
        if world == 1 and not is_out_of_memory(error):
            raise
        return failed(error, rank)
    if record is None:
        if rank == 0:
            print(f"stopped and saved; go on with: python train.py --out {out} --resume")
        return 3
    if rank > 0:
        return 0
    if not record["diverged"]:
        print(f"\na sample:\n\n{(out / 'sample.txt').read_text(encoding='utf-8')}\n")
    end = "diverged" if record["diverged"] else f"{summary(record)} nats per token, {record['val_bpb']:.4f} bits per byte"
    print(f"{end}, after {clock(record['seconds'])}; record and curve.png in {out}")
    return 0


if __name__ == "__main__":
    status = main()
    if dist.is_initialized():  # taking apart what connects processes has been seen to hang, and all is done
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
