"""Train a GPT under a learning-rate schedule, on one device or many.

    python train.py --schedule power                     a laptop-sized model in a few minutes
    python train.py --schedule wsd --total_tokens 8e6    any field of TrainConfig is a flag
    torchrun --nproc_per_node 8 train.py --preset 1B --data data/mine    on eight GPUs
    python train.py --out runs/a --resume                continue a stopped run
    python train.py --branch runs/a --decay_tokens 3e5   end a copy of a run with a decay
    python train.py --average --decay_tokens 0           average the weights instead of a decay

Read `optimizer_step`, from one batch to the weight update, then `training_steps`, the
loop around it, then `train_run`, which logs, evaluates and saves. All flags are in
config.py. A run leaves a folder in runs/.
"""

import signal

if __name__ == "__main__":  # until main() starts, Ctrl-C ends us without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import copy
import dataclasses
import json
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Torch reads this when we import it. By default, threads that wait for others spin, and
# beside a second busy process a step then takes much longer (research/log.md).
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import config
import data
import mup
import runs
from config import TrainConfig, make_config  # noqa: F401  for programs that import us
from eval import sample, validation_loss
from model import GPT, empty_model, load_model
from moe import Routing
from schedules import make_schedule
from tools import devices, figures, flags, signals

# -- One step ----------------------------------------------------------------------------


class Step(NamedTuple):
    """Results of a step, as tensors, because reading a value would make a GPU wait."""

    lr: float
    loss: torch.Tensor  # mean over the sequences of this process, in nats per token
    grad_norm: torch.Tensor  # before clipping
    routing: Routing | None  # of an MoE, in the last micro-batch


def optimizer_step(
    cfg: TrainConfig, model, optimizer, corpus, parts: list[np.ndarray], lr: float
) -> Step:
    """One update, with a batch whose parts pass through the model one after another.

    parts: where in the run their sequences are, see micro_batches. model: a GPT, or one
    in DistributedDataParallel.
    """
    # 1. Set the learning rate
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]  # muP's multiplier, see mup.rules

    # 2. Add up the gradients of the micro-batches
    batch_loss = 0.0
    for i, part in enumerate(parts):
        inputs, targets = corpus.draw(part, cfg.seq_len, cfg.data_seed)
        inputs = devices.to_device(inputs, cfg.device)  # [sequences, seq_len]
        targets = devices.to_device(targets, cfg.device)
        # DDP averages the gradients of all processes once, in the last backward pass
        model.require_backward_grad_sync = i == len(parts) - 1
        with devices.mixed_precision(cfg):
            loss, routing = model(inputs, targets)
            aux_loss = cfg.router_aux_weight * routing.aux_loss.sum() if routing else 0.0
        ((loss + aux_loss) / len(parts)).backward()
        batch_loss += loss.detach() / len(parts)  # without the auxiliary loss

    # 3. Clip them, and update the weights
    grad_norm = torch.nn.utils.clip_grad_norm_(
        model.parameters(), cfg.grad_clip or math.inf
    )
    optimizer.step()
    # DDP keeps the gradients in its buffers, and new ones would need memory beside them
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
    return Step(lr, batch_loss, grad_norm, routing)


def micro_batches(
    cfg: TrainConfig, tokens: int, rank: int, world: int
) -> list[np.ndarray]:
    """Divide the step after `tokens` into as few equal parts as micro_batch_size allows.

    Returns where in the run the sequences of every part are, for process number `rank` of
    `world`.
    """
    batch = tokens // cfg.seq_len + np.arange(cfg.batch_size)
    mine = batch[rank::world]
    n_parts = math.ceil(len(mine) / (cfg.micro_batch_size or len(mine)))
    while len(mine) % n_parts:
        n_parts += 1
    return np.split(mine, n_parts)


# -- The loop ----------------------------------------------------------------------------

# n^16 sums to about n^17 / 17, so the last tenth weighs 1 - 0.9^17, about 5/6
AVERAGE_POWER = 16


def update_average(average: GPT, model: GPT, before: int, tokens: int) -> None:
    """Mix the weights after a step from `before` tokens to `tokens` into their average.

    Weights at n tokens count in proportion to n^16, so the average always covers about
    the last tenth of the tokens seen. Like Power, this needs neither the end of the run
    nor the size of a step. (Polynomial-decay averaging, Shamir and Zhang, 2013.)
    """
    # the share of this step in the average
    share = 1 - (before / tokens) ** (AVERAGE_POWER + 1)
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters()):
            mean.lerp_(weight, share)


@dataclass
class State:
    """Everything that training changes."""

    model: GPT
    optimizer: torch.optim.Optimizer
    average: GPT | None  # the averaged weights, with --average
    tokens: int = 0  # seen so far
    diverged: bool = False  # a loss was not a number


def build(cfg: TrainConfig) -> State:
    """The model with its initial weights, and its optimizer."""
    torch.manual_seed(cfg.seed)
    # drawn on the CPU, so every device gets the same weights
    model = GPT(cfg).to(cfg.device)
    groups = mup.param_groups(model, mup.rules(cfg), cfg.weight_decay)
    adam = dict(betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
    optimizer = torch.optim.AdamW(groups, **adam)
    average = copy.deepcopy(model).requires_grad_(False) if cfg.average else None
    model.recompute = cfg.recompute
    # one program per shape, because one for all shapes of a sweep would be slower
    if cfg.compile:
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.optimize_ddp = False  # would split every block again
        if cfg.device == "cpu":
            model.compile(dynamic=False)
        else:  # block by block, so that one program serves all, and DDP sends gradients in between
            model.loss = torch.compile(model.loss, dynamic=False)
            for block in model.blocks:
                block.compile(dynamic=False)
    return State(model, optimizer, average)


def training_steps(cfg: TrainConfig, state: State, corpus) -> Iterator[Step]:
    """Train to the end of the run, and yield a Step after every step.

    Saving and restoring the state between two steps changes nothing.
    """
    schedule = make_schedule(cfg)
    model = state.model
    rank, world = devices.rank_and_world()
    if world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # the rotary tables never change. (As an argument, newer versions of torch warn.)
        model.broadcast_buffers = False
    # whole batches only, and no step after a lost run
    while state.tokens + cfg.batch_tokens <= cfg.total_tokens and not state.diverged:
        before = state.tokens
        lr = schedule(before + cfg.batch_tokens / 2)  # at the middle of the step
        parts = micro_batches(cfg, before, rank, world)
        step = optimizer_step(cfg, model, state.optimizer, corpus, parts, lr)
        state.tokens += cfg.batch_tokens
        if state.average:
            update_average(state.average, state.model, before, state.tokens)
        yield step


def train_run(
    cfg: TrainConfig,
    corpus,
    out: Path | None,
    start: dict | None = None,
    must_stop=signals.never,
) -> bool:
    """Train a run and write its folder `out`, which only rank 0 has. -> is it finished?

    Once must_stop(), we save and return False. start: see runs.plan, by default a new run.
    """
    start = start or runs.new_start(cfg)
    state = build(cfg)
    restore(start, state)
    run = runs.Run(out, cfg, corpus.meta["fingerprint"], start)
    for step in training_steps(cfg, state, corpus):
        tokens = state.tokens
        # a step passes a multiple of N if tokens % N < batch
        batch = cfg.batch_tokens
        last = tokens + batch > cfg.total_tokens

        # 1. Log the mean loss over all processes. Here we wait for the device
        if last or tokens % cfg.log_every < batch:
            loss = devices.all_sum(step.loss).item() / devices.rank_and_world()[1]
            more = step.routing.metrics() if step.routing else {}
            run.log_step(tokens, step.lr, loss, grad_norm=step.grad_norm.item(), **more)
            state.diverged = not math.isfinite(loss)

        # 2. Validate
        if tokens % cfg.eval_every < batch and not last:
            losses = validation_losses(cfg, state, corpus, cfg.eval_tokens)
            run.log_validation(tokens, losses)

        # 3. Save, also where the decay begins, because branches start there
        decay_begins = tokens <= cfg.decay_start < tokens + batch
        due = decay_begins or tokens % cfg.save_every < batch
        stop = devices.any_process(must_stop()) and not last  # all after the same step
        if due or stop or last or state.diverged:
            run.save(checkpoint(cfg, corpus, state))
        if stop:
            return False

    # 4. Evaluate, and write the record
    losses, results = evaluate(cfg, state, corpus)
    run.log_validation(state.tokens, losses, f" on {results['val_tokens']:,} tokens")
    run.finish(results)
    return True


def checkpoint(cfg: TrainConfig, corpus, state: State) -> dict:
    """All state of a run. Learning rate and data order have none, as they follow from tokens."""
    return {
        "config": dataclasses.asdict(cfg),
        "fingerprint": corpus.meta["fingerprint"],
        "token_hash": data.token_hash(corpus.tokenizer),
        "tokens": state.tokens,
        "diverged": state.diverged,
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "average": state.average.state_dict() if state.average else None,
    }


def restore(saved: dict, state: State) -> None:
    """Put a checkpoint back into a State that build() made."""
    state.tokens = saved["tokens"]
    state.diverged = saved.get("diverged", False)
    if "model" in saved:  # a new run keeps its initial weights
        state.model.load_state_dict(saved["model"])
        if state.average:  # if the parent kept no average, start from its weights
            state.average.load_state_dict(saved.get("average") or saved["model"])
    if "optimizer" in saved:  # imported weights have none
        groups = saved["optimizer"]["param_groups"]
        for group, ours in zip(groups, state.optimizer.param_groups):
            # our settings, such as weight decay
            group |= dict(ours, params=group["params"])
        state.optimizer.load_state_dict(saved["optimizer"])  # raises if its groups differ


# -- The results of a run ----------------------------------------------------------------


def validation_losses(
    cfg: TrainConfig, state: State, corpus, max_tokens: int | None
) -> dict:
    """Compute val_loss and val_bpb, for a data mixture weighted by --data, and by source.

    With --average, add average_val_loss and so on for the averaged weights.
    """
    losses = losses_of(state.model, cfg, corpus, max_tokens)
    if state.average:
        averaged = losses_of(state.average, cfg, corpus, max_tokens)
        losses |= {f"average_{name}": loss for name, loss in averaged.items()}
    return losses


def losses_of(model: GPT, cfg: TrainConfig, corpus, max_tokens: int | None) -> dict:
    """Validation losses, averaged over the sources of a mixture.

    Not compiled, and in the precision of training, so that eval.py finds the same.
    """
    with devices.mixed_precision(cfg), torch.compiler.set_stance("force_eager"):
        losses = [validation_loss(model, s, max_tokens) for s in corpus.sources.values()]
    if len(losses) == 1:
        return losses[0]
    averages = dict.fromkeys(losses[0], 0.0)  # per token of the mixture
    size = 0.0  # its bytes per token, times ln 2
    for share, loss in zip(corpus.shares, losses):
        for name in averages:
            averages[name] += share * loss[name]
        size += share * loss["val_loss"] / loss["val_bpb"]
    averages["val_bpb"] = averages["val_loss"] / size
    for name, loss in zip(corpus.sources, losses):
        averages[f"val_loss_{name}"] = loss["val_loss"]
    return averages


def evaluate(cfg: TrainConfig, state: State, corpus) -> tuple[dict, dict]:
    """Return the validation losses of a run that ends here, and its results for the record.

    `loss` is the validation loss that counts, None if the run diverged.
    """
    losses = validation_losses(cfg, state, corpus, cfg.final_eval_tokens)
    diverged = not losses["val_loss"] <= math.log(cfg.vocab_size)  # also if it is NaN
    results = dict.fromkeys(losses) if diverged else losses  # all None if diverged
    if len(corpus.sources) > 1:
        epochs = corpus.epochs(state.tokens // cfg.seq_len, cfg.seq_len, cfg.data_seed)
        results = results | {f"epochs_{name}": n for name, n in epochs.items()}
    n = sum(
        data.n_sequences(source.val, cfg.seq_len, cfg.final_eval_tokens)
        for source in corpus.sources.values()
    )
    loss = results["average_val_loss" if cfg.uses_average else "val_loss"]
    return losses, {"loss": loss} | results | {
        "val_tokens": cfg.seq_len * n,
        "tokens": state.tokens,
        "diverged": diverged,
        "n_params": state.model.n_params(),
        "n_active_params": state.model.n_active_params(),
    }


def show(cfg: TrainConfig, out: Path, tokenizer) -> None:
    """Write a sample and draw the curve of a finished run, and say where they are."""
    record = json.loads((out / "record.json").read_text(encoding="utf-8"))
    results = record["results"]
    text = "(no sample, because the run diverged)"
    if not results["diverged"]:
        torch.manual_seed(cfg.seed)
        text = sample(load_model(out, cfg.device), tokenizer)
        text = text or "(empty, because the model ended the text at once)"
    (out / "sample.txt").write_text(text, encoding="utf-8")
    try:
        figures.draw_curve(out, record)
    except Exception as error:  # the run is complete without its picture
        flags.say(f"{out}: no curve.png ({error})")
    if results["diverged"]:
        flags.say("diverged")
    else:
        flags.say(f"\na sample:\n\n{text}\n")
    flags.say(f"{results['seconds']:,.0f} seconds; record and curve.png in {out}")


# -- The command line --------------------------------------------------------------------


def parse(argv: list[str] | None) -> tuple[dict, Namespace]:
    """Split a command line into typed config fields and actions, or exit with status 2."""
    parser = flags.program_parser("train.py", __doc__)
    flags.add_flags(parser, TrainConfig, config.PRESETS["laptop"])
    add = parser.add_argument_group("actions").add_argument
    add("--resume", action="store_true", help="continue the run in --out, or start it")
    add(
        "--branch",
        type=Path,
        help="start from a checkpoint, or from a run before its decay",
    )
    limit = flags.at_least(0, float)
    add("--time_limit", type=limit, help="seconds until it saves and exits with 3")
    args = parser.parse_args(argv)
    if args.resume and "out" not in args:
        parser.error("--resume: needs --out, the folder of the run")
    return {
        name: value for name, value in vars(args).items() if name in config.FIELDS
    }, args


def load_data(
    cfg: TrainConfig, typed: dict, start: dict | None = None
) -> tuple[TrainConfig, data.Corpus]:
    """Open the corpus, and put its tokenizer into the config. Raises UserError or OSError."""
    start = start or runs.new_start(cfg)
    if "tokenizer" in typed and data.is_prepared(cfg.data):
        cfg.refuse("tokenizer", f"--data {cfg.data} already has a tokenizer")
    # the data of the parents and of this run, with their first sequences
    sequences = [
        (math.ceil(position / cfg.seq_len), mixture)
        for position, mixture in start["stages"]
    ]
    corpus = data.load_corpus(cfg.data, cfg.tokenizer, sequences)
    for source in corpus.sources.values():
        data.check_corpus(cfg, source)
    check_text(cfg, corpus, start)
    return dataclasses.replace(cfg, tokenizer=data.tokenizer_name(cfg, corpus)), corpus


def check_text(cfg: TrainConfig, corpus, start: dict) -> None:
    """Raise UserError if the tokenizer or the text is not that of the start."""
    if "model" not in start:  # a new run
        return
    data.check_tokenizer(corpus, start["token_hash"], start["path"])
    found = corpus.meta["fingerprint"]
    if start["fingerprint"] not in (None, found):
        raise flags.UserError(
            f"--data {corpus.path}: fingerprint {found}, "
            f"but the run trained on {start['fingerprint']}"
        )


def main(argv: list[str] | None = None) -> int:
    try:
        typed, actions = parse(argv)
        devices.join(typed.get("device", "auto"))
        rank, _ = devices.rank_and_world()
        with devices.rank_0_first():
            cfg, start = runs.plan(typed, actions.resume, actions.branch)
            if start is None:
                if rank == 0:
                    flags.say(f"{cfg.out} is finished already")
                return 0
            cfg = devices.resolve_device(cfg)
            devices.check_memory(cfg, empty_model(cfg).n_params())
            cfg, corpus = load_data(cfg, typed, start)
            out = None
            if rank == 0:  # only rank 0 writes
                name = f"{cfg.preset}-{cfg.schedule}"
                out, lock = runs.make_folder(cfg.out, name, actions.resume)  # noqa: F841, held
                cfg = dataclasses.replace(cfg, out=str(out))
    except (flags.UserError, OSError) as error:
        return flags.fail("train.py", error)
    except KeyboardInterrupt:
        return flags.fail("train.py", "interrupted before the first step", status=130)

    def tell(text: str) -> None:  # on rank 0 only
        if out:
            flags.say(text)

    where = f"on {cfg.device} in {cfg.dtype}, from {start['tokens']:,} tokens"
    tell(f"{cfg.out}: {cfg.preset} under {cfg.schedule}, {where}")
    finished = actions.resume and Path(cfg.out, "record.json").exists()
    try:
        with signals.stop_request(actions.time_limit) as must_stop:
            if not finished:  # or else only its sample and curve are missing
                finished = train_run(cfg, corpus, out, start, must_stop)
            if finished and out:
                show(cfg, out, corpus.tokenizer)
    except Exception as error:
        reason = devices.reason_of(error)
        if reason is None:
            raise
        hint = "; --resume starts from the newest checkpoint"
        return flags.fail(
            "train.py", reason + (hint if isinstance(error, OSError) else "")
        )
    if not finished:
        again = f"python train.py --out={shlex.quote(cfg.out)} --resume"
        tell(f"stopped and saved; continue: {again}")
        return 3
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    devices.leave(main())
