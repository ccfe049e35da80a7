"""Train a GPT under a learning-rate schedule, on one device or many.

    python train.py --schedule power                     a laptop-sized model in a few minutes
    python train.py --schedule wsd --total_tokens 8e6    any field of TrainConfig is a flag
    torchrun --nproc_per_node 8 train.py --preset 1B --data data/mine    on eight GPUs
    python train.py --out runs/a --resume                continue a stopped run
    python train.py --branch runs/a --decay_tokens 3e5   decay a copy of an unfinished run
    python train.py --average --decay_tokens 0           average the weights instead of a decay

Read `optimizer_step`, from one batch to the weight update, then `training_steps`, the loop around
it, then `train`, which logs, evaluates and saves. A run leaves a folder in runs/.
"""

import copy
import dataclasses
import math
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tools.threads  # noqa: F401  before torch

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import data
import mup
from eval import check_corpus, check_tokenizer, sample, validation_loss
from model import GPT, PRESETS, GPTConfig, empty_model, is_granite, load_model
from schedules import DECAY_SHAPES, PLANNED, READS, SCHEDULES, make_schedule
from tools import devices, runs
from tools.config import UserError, add_flags, at_least, check_effect, fail, fill_in
from tools.config import format_mixture, option, parse_mixture, program_parser, say
from tools.devices import mixed_precision, rank_and_world, resolve_device, to_device
from tools.figures import draw_curve
from tools.records import uses_average


@dataclass(frozen=True, kw_only=True)
class TrainConfig(GPTConfig):
    """Everything that determines a run. Lengths are in tokens, batch sizes in sequences."""

    preset: str = option("laptop", "row of PRESETS and RECIPES", choices=tuple(PRESETS))
    schedule: str = option("power", "learning-rate schedule", choices=SCHEDULES)
    total_tokens: int = option(help="tokens to train on", above=0, at_most=10**15)
    batch_size: int = option(help="sequences per optimizer step", above=0)
    micro_batch_size: int | None = option(None, "most sequences per pass (default: all)", above=0)

    lr: float = option(0.01, "peak learning rate of wsd, cosine and constant", above=0)
    lr_max: float = option(0.02, "ceiling of the power schedule", above=0)
    power_a: float = option(4.0, "a of the power schedule, beta^q * a * n^b", above=0)
    power_b: float = option(-0.51, "b of the power schedule", at_most=0)
    power_q: float = option(1.0, "q of the power schedule, 1 in the paper", at_least=0)
    warmup_tokens: int = option(10**9, "tokens of linear warmup", at_least=0)
    decay_tokens: int | None = option(None, "tokens of the decay (default: 10%%)", at_least=0)
    decay_shape: str = option("exp", "how power and wsd decay to 0", choices=tuple(DECAY_SHAPES))
    min_lr_ratio: float = option(0.1, "the cosine ends at this share of lr", at_least=0, at_most=1)

    average: bool = option(False, "also average the weights over the last tenth of the tokens")
    router_aux_weight: float = option(0.01, "weight of the MoE auxiliary loss", at_least=0)
    weight_decay: float = option(0.1, "AdamW's weight decay", at_least=0)
    beta1: float = option(0.9, "AdamW's first beta", at_least=0, below=1)
    beta2: float = option(0.95, "AdamW's second beta", at_least=0, below=1)
    adam_eps: float = option(1e-10, "AdamW's epsilon", at_least=0)
    grad_clip: float = option(1.0, "largest norm of the gradient (0: no clipping)", at_least=0)

    seed: int = option(0, "random seed for the initial weights", at_least=0, at_most=2**63 - 1)
    data_seed: int = option(0, "random seed for the data order", at_least=0, at_most=2**63 - 1)
    data: str | None = option(None, "corpus or mixture, as in web:0.8,code:0.2 (default: embedded)")
    decay_data: str | None = option(None, "corpus or mixture during the decay (default: the same)")
    tokenizer: str = option("bytes", "tokenizer of the embedded corpus")
    out: str | None = option(None, "folder of the run (default: a new numbered one in runs/)")

    device: str = option("auto", "cuda, mps or cpu (auto: the first available)")
    dtype: str = option(
        "auto",
        "dtype of matrix products (auto: bfloat16 if faster)",
        choices=("auto", "float32", "bfloat16"),
    )
    compile: bool | None = option(None, "torch.compile (default: on cuda, width 256 and up)")
    recompute: bool = option(False, "recompute activations, for less memory and a third more work")

    log_every: int = option(50_000_000, "tokens between lines of progress", above=0)
    eval_every: int = option(10**9, "tokens between validations", above=0)
    eval_tokens: int | None = option(None, "tokens per validation (default: all)", above=0)
    final_eval_tokens: int | None = option(None, "tokens, last validation (default: all)", above=0)
    save_every: int = option(10**10, "tokens between checkpoints", above=0)
    keep_checkpoints: int = option(3, "how many to keep, besides the last before decay", above=1)

    def __post_init__(self):
        super().__post_init__()
        if "decay_tokens" not in READS[self.schedule]:
            object.__setattr__(self, "decay_tokens", 0)  # the class is frozen
        fill_in(self, decay_tokens=self.total_tokens // 10)
        micro = self.micro_batch_size or self.batch_size
        if self.batch_size % micro and micro % self.batch_size:
            raise UserError(f"--micro_batch_size {micro}: must divide {self.batch_size}")
        if self.total_tokens < self.batch_tokens:
            raise UserError(f"--total_tokens {self.total_tokens}: a batch has {self.batch_tokens}")
        if self.decay_data and not self.decay_tokens:
            raise UserError(f"--decay_data {self.decay_data}: this run has no decay")
        try:
            make_schedule(self)
        except ValueError as error:  # warmup and decay do not fit
            raise UserError(error) from None

    @property
    def batch_tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def decay_start(self) -> int:
        return self.total_tokens - self.decay_tokens


FIELDS = {f.name for f in dataclasses.fields(TrainConfig)}
SHAPE = {f.name for f in dataclasses.fields(GPTConfig)} | {"preset"}

# -- One step, and the loop -------------------------------------------------------------------


def optimizer_step(cfg: TrainConfig, model, optimizer, corpus, tokens: int, lr: float) -> tuple:
    """One update, with the batch that starts at token position `tokens` of the run.

    model: a GPT, or one in DistributedDataParallel. Returns the mean loss of the sequences of this
    process in nats per token, the norm of the gradient before clipping, and the statistics of an
    MoE in the last micro-batch. They are tensors, because reading a value would make a GPU wait.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]  # muP's multiplier, see mup.rules

    rank, world = rank_and_world()  # this is process number `rank` of `world`
    g = tokens // cfg.seq_len + np.arange(cfg.batch_size)  # positions of the sequences in the run
    mine = g[rank::world]
    n_micro = n_passes(len(mine), cfg.micro_batch_size)
    batch_loss = 0.0
    for i, part in enumerate(np.split(mine, n_micro)):
        batch = data.draw(corpus, part, cfg.seq_len, cfg.data_seed)
        inputs, targets = (to_device(x, cfg.device) for x in batch)  # both [len(part), seq_len]
        if world > 1:  # DDP averages the gradients once, in the last backward pass
            model.require_backward_grad_sync = i == n_micro - 1
        with mixed_precision(cfg):
            loss, routing = model(inputs, targets)
            aux_loss = cfg.router_aux_weight * routing.aux_loss.sum() if routing else 0.0
        ((loss + aux_loss) / n_micro).backward()  # the gradients of micro-batches add up
        batch_loss += loss.detach() / n_micro  # without the auxiliary loss

    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return batch_loss, grad_norm, routing


def n_passes(n: int, most: int | None) -> int:
    """The smallest number of equal passes over n sequences, with at most `most` in each."""
    k = math.ceil(n / (most or n))
    while n % k:
        k += 1
    return k


AVERAGE_POWER = 16  # n^16 sums to about n^17 / 17, so the last tenth weighs 1 - 0.9^17, about 5/6


def update_average(average: GPT, model: GPT, before: int, tokens: int) -> None:
    """Mix the weights after a step from `before` tokens to `tokens` into their average.

    Weights at n tokens count in proportion to n^16, so the average always covers about the last
    tenth of the tokens seen. Like Power, this needs neither the end of the run nor the size
    of a step. (Polynomial-decay averaging, Shamir and Zhang, 2013.)
    """
    share = 1 - (before / tokens) ** (AVERAGE_POWER + 1)  # the share of this step in the average
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
    before: int = 0  # tokens seen before the last step


def build(cfg: TrainConfig) -> State:
    """The model with its initial weights, and its optimizer."""
    torch.manual_seed(cfg.seed)
    model = GPT(cfg).to(cfg.device)  # drawn on the CPU, so every device gets the same weights
    groups = mup.param_groups(model, mup.rules(cfg), cfg.weight_decay)
    adam = dict(betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
    optimizer = torch.optim.AdamW(groups, **adam)
    average = copy.deepcopy(model).requires_grad_(False) if cfg.average else None
    model.recompute = cfg.recompute
    if cfg.compile:  # one program per shape, because one for all shapes of a sweep would be slower
        torch._dynamo.config.recompile_limit = 64
        if cfg.device == "cpu":
            model.compile(dynamic=False)
        else:  # block by block, so that one program serves all, and DDP sends gradients in between
            model.loss = torch.compile(model.loss, dynamic=False)
            for block in model.blocks:
                block.compile(dynamic=False)
    return State(model, optimizer, average)


def training_steps(cfg: TrainConfig, state: State, corpus, until: int) -> Iterator[tuple]:
    """Train to at most `until` tokens, and yield (lr, loss, grad_norm, routing) after every step.

    `train` and sweep.py share this loop. Saving and restoring between two steps changes nothing.
    """
    schedule, replica = make_schedule(cfg), state.model
    if rank_and_world()[1] > 1:
        replica = DistributedDataParallel(state.model, gradient_as_bucket_view=True)
        replica.broadcast_buffers = False  # the rotary tables never change
    while state.tokens + cfg.batch_tokens <= until:  # whole batches only
        lr = schedule(state.tokens + cfg.batch_tokens / 2)  # at the middle of the step
        results = optimizer_step(cfg, replica, state.optimizer, corpus, state.tokens, lr)
        state.before, state.tokens = state.tokens, state.tokens + cfg.batch_tokens
        if state.average:
            update_average(state.average, state.model, state.before, state.tokens)
        yield lr, *results


def crossed(every: int, state: State) -> bool:
    """Did the last step reach or pass a multiple of `every` tokens?"""
    return state.tokens // every > state.before // every


# -- A run ------------------------------------------------------------------------------------


def train(
    cfg: TrainConfig, corpus, out: Path | None, start: dict | None = None, must_stop=lambda: False
) -> dict | None:
    """Train, write the run folder, return the record. Once must_stop(), save and return None.

    start: a checkpoint of this run or, for a branch, of its parent. out: the folder on rank 0,
    which alone writes, else None. The other ranks return {}. A loss that is not finite, or ends
    above ln(vocab_size) (a uniform guess), gives a record with diverged = true and no val_loss.
    """
    state = build(cfg)
    if start:
        restore(start, state)
    run = runs.Run(out, dataclasses.asdict(cfg), corpus.meta["fingerprint"], start)

    until = state.tokens if run.diverged else cfg.total_tokens  # no step after a lost run
    for lr, loss, grad_norm, routing in training_steps(cfg, state, corpus, until):
        tokens, next_tokens = state.tokens, state.tokens + cfg.batch_tokens
        last = next_tokens > cfg.total_tokens
        if crossed(cfg.log_every, state) or last:
            more = routing.metrics() if routing else {}
            run.log(tokens, lr, loss, grad_norm=grad_norm.item(), **more)
        if crossed(cfg.eval_every, state) and not last:
            run.log_validation(tokens, validation_losses(cfg, state, corpus, cfg.eval_tokens))
        stop = devices.any_process(must_stop()) and not last  # all stop after the same step
        before_decay = tokens <= cfg.decay_start < next_tokens
        if crossed(cfg.save_every, state) or before_decay or stop or last:
            run.save(checkpoint(cfg, corpus, state))
        if stop:
            return None
        if run.diverged:
            break
    return finish(cfg, corpus, state, run)


def finish(cfg: TrainConfig, corpus, state: State, run: runs.Run) -> dict:
    """Evaluate, complete the record, write a sample and draw the curve."""
    losses, record = evaluate(cfg, state, corpus)
    run.log_validation(state.tokens, losses, f" on {record['val_tokens']:,} tokens")
    if run.out is None:
        return {}
    record = run.finish(record)  # before anything else can fail
    model = (state.average if uses_average(record) else state.model).eval()
    torch.manual_seed(cfg.seed)
    with torch.compiler.set_stance("force_eager"):  # growing shapes would compile again and again
        text = "" if record["diverged"] else sample(model, corpus.tokenizer)
    (run.out / "sample.txt").write_text(text, encoding="utf-8")
    draw_curve(run.out, record)
    written = text or "(the model ended the text at once)"
    say("diverged" if record["diverged"] else f"\na sample:\n\n{written}\n")
    say(f"{record['seconds']:,.0f} seconds; record and curve.png in {run.out}")
    return record


def validation_losses(cfg: TrainConfig, state: State, corpus, max_tokens: int | None) -> dict:
    """Compute val_loss and val_bpb, for a data mixture weighted by --data, and by source.

    With --average, add average_val_loss and so on for the averaged weights.
    """
    losses = {}
    for prefix, model in (("", state.model), ("average_", state.average)):
        if model:
            with mixed_precision(cfg), torch.compiler.set_stance("force_eager"):  # like eval.py
                each = [validation_loss(model, s, max_tokens) for s in corpus.sources.values()]
            mean = runs.mean_losses(list(corpus.sources), corpus.shares, each)
            losses |= {prefix + name: loss for name, loss in mean.items()}
    return losses


def evaluate(cfg: TrainConfig, state: State, corpus) -> tuple[dict, dict]:
    """Return the validation losses of a run that ends here, and its record so far."""
    losses = validation_losses(cfg, state, corpus, cfg.final_eval_tokens)
    diverged = not losses["val_loss"] <= math.log(cfg.vocab_size)  # also if it is NaN
    results = dict.fromkeys(losses) if diverged else losses  # all None if diverged
    if len(corpus.sources) > 1:
        epochs = data.epochs(corpus, state.tokens // cfg.seq_len, cfg.seq_len, cfg.data_seed)
        results = results | {f"epochs_{name}": n for name, n in epochs.items()}
    limits = cfg.seq_len, cfg.final_eval_tokens
    sizes = [data.n_sequences(source.val, *limits) for source in corpus.sources.values()]
    return losses, dataclasses.asdict(cfg) | results | {
        "val_tokens": cfg.seq_len * sum(sizes),
        "tokens": state.tokens,
        "diverged": diverged,
        "n_params": state.model.n_params(),
        "n_active_params": state.model.n_active_params(),
    }


def checkpoint(cfg: TrainConfig, corpus, state: State) -> dict:
    """All state of a run. Learning rate and data order have none, as they follow from tokens."""
    return {
        "config": dataclasses.asdict(cfg),
        "fingerprint": corpus.meta["fingerprint"],
        "tokens": state.tokens,
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "average": state.average.state_dict() if state.average else None,
    }


def restore(saved: dict, state: State) -> None:
    """Put a checkpoint back into a State that build() made."""
    state.tokens = saved["tokens"]
    state.model.load_state_dict(saved["model"])
    if state.average:  # if the parent kept no average, start from its weights
        state.average.load_state_dict(saved.get("average") or saved["model"])
    if "optimizer" in saved:  # released weights have none
        for group, ours in zip(saved["optimizer"]["param_groups"], state.optimizer.param_groups):
            group |= dict(ours, params=group["params"])  # our settings, such as weight decay
        state.optimizer.load_state_dict(saved["optimizer"])  # raises if its groups differ


# -- From the command line to a run -----------------------------------------------------------

# Training of the presets. The paper names no micro-batches, and we tried ours on no GPU. The laptop
# models follow our law and not the paper's, with learning rates tuned by results/laptop/tune.py.
_search = dict(batch_size=128, micro_batch_size=8, total_tokens=32 * 10**9, lr=0.0026)  # Table 2
_large = dict(batch_size=1024, micro_batch_size=4, lr=0.01)
_laptop = dict(
    batch_size=8,
    total_tokens=3_200_000,
    warmup_tokens=100_000,
    lr=0.004,
    power_a=0.5059,
    power_b=-0.3,
    power_q=0.5,
    log_every=50_000,
    eval_every=10**6,
    eval_tokens=2**16,
    save_every=10**6,
)
RECIPES = {
    "laptop": _laptop, "laptop-moe": _laptop,
    "12M": _search, "36M": _search, "121M": _search, "36M-power": _search,
    "1B": dict(**_large, total_tokens=10**12),
    "1B-moe": dict(**_large, total_tokens=1100 * 10**9, decay_tokens=100 * 10**9),  # text says 1T
    "PowerLM-3B": dict(**_large, total_tokens=1250 * 10**9, decay_tokens=250 * 10**9),
    "PowerMoE-3B": dict(**_large, total_tokens=3000 * 10**9, decay_tokens=500 * 10**9),
}  # fmt: skip


def make_config(**typed) -> TrainConfig:
    """The config of a preset with the typed fields. Raises UserError for an impossible value."""
    preset = typed.get("preset", "laptop")
    return TrainConfig(**PRESETS[preset] | RECIPES[preset] | typed)


def parse(argv: list[str] | None) -> tuple[dict, Namespace]:
    """Split a command line into typed config fields and actions, or exit with status 2."""
    parser = program_parser("train.py", __doc__)
    add_flags(parser, TrainConfig, PRESETS["laptop"] | RECIPES["laptop"])
    add = parser.add_argument_group("actions").add_argument
    add("--resume", action="store_true", help="continue the run in --out, or start it")
    add("--branch", type=Path, help="start from a checkpoint, or from a run before its decay")
    add("--time_limit", type=at_least(0, float), help="seconds until it saves and exits with 3")
    add("--dry_run", "--benchmark", "--profile", dest="bench", nargs="*", help="see bench.py")
    args = parser.parse_args(argv)
    if args.bench is not None:
        parser.error("--dry_run, --benchmark: use python bench.py; --profile: see docs/speed.md")
    if args.resume and "out" not in args:
        parser.error("--resume: needs --out, the folder of the run")
    return {name: value for name, value in vars(args).items() if name in FIELDS}, args


def open_parent(path: Path) -> dict:
    """The checkpoint that a branch starts from. Released weights become one at 0 tokens."""
    if not is_granite(path):
        return runs.read_checkpoint(runs.branch_point(path))
    model = load_model(path)
    config = dataclasses.asdict(model.cfg) | {"tokenizer": str(path.resolve() / "tokenizer.json")}
    path = str(path.resolve())
    return dict(
        path=path, config=config, model=model.state_dict(), tokens=0, stages=[], fingerprint=None
    )


def plan(typed: dict, actions: Namespace) -> tuple[TrainConfig, dict | None]:
    """Config, and checkpoint of this run or its parent, or None. Raises UserError, OSError."""
    for flag in ("data", "decay_data"):
        if flag in typed:  # absolute paths are valid from any folder
            typed[flag] = format_mixture(parse_mixture(typed[flag], f"--{flag}"))
    if data.tokenizer_file(typed.get("tokenizer", "")):
        typed["tokenizer"] = str(Path(typed["tokenizer"]).resolve())
    fields, start, path = runs.choose(typed, actions)
    parent = open_parent(Path(path)) if path else None
    if parent:
        fields = runs.branched_fields(parent, fields, SHAPE)
    if fields.get("batch_ramp") and "batch_ramp" not in FIELDS:
        raise UserError(f"--batch_ramp {fields['batch_ramp']}: apply forks/batch_ramp.patch")
    cfg = make_config(**{name: value for name, value in fields.items() if name in FIELDS})
    check_effect(typed, cfg.schedule, READS)
    if parent:
        start = runs.branch(parent, cfg, cfg.schedule in PLANNED)
    return cfg, start


def load_data(cfg: TrainConfig, typed: dict, start: dict | None) -> tuple[TrainConfig, data.Corpus]:
    """Open the corpus, and put its tokenizer into the config. Raises UserError or OSError."""
    devices.check_memory(cfg, empty_model(cfg).n_params())
    if "tokenizer" in typed and is_prepared(cfg.data):
        raise UserError(f"--tokenizer {cfg.tokenizer}: --data {cfg.data} already has a tokenizer")
    # the mixtures that the parents read and that this run reads, with their first tokens
    stages = start["stages"] if start else runs.stages_of(vars(cfg))
    sequences = [(math.ceil(position / cfg.seq_len), mixture) for position, mixture in stages]
    corpus = data.load_corpus(cfg.data, cfg.tokenizer, sequences)
    for source in corpus.sources.values():
        check_corpus(cfg, source)
    if start:
        check_tokenizer(start["path"], start["config"], corpus)
    old, found = start and start["fingerprint"], corpus.meta["fingerprint"]
    if old not in (None, found):
        raise UserError(f"--data {corpus.path}: fingerprint {found}, but the run trained on {old}")
    return dataclasses.replace(cfg, tokenizer=tokenizer_of(cfg, corpus)), corpus


def is_prepared(data_flag: str | None) -> bool:
    """Does --data name folders of data.py, which have a tokenizer already?"""
    return bool(data_flag) and "embedded" not in parse_mixture(data_flag)


def tokenizer_of(cfg: TrainConfig, corpus: data.Corpus) -> str:
    return corpus.meta["tokenizer"] if is_prepared(cfg.data) else cfg.tokenizer


def main(argv: list[str] | None = None) -> int:
    typed, actions = parse(argv)
    try:
        devices.join(typed.get("device", "auto"))
        with devices.rank_0_first():
            cfg, start = plan(typed, actions)
            cfg, corpus = load_data(resolve_device(cfg), typed, start)
            out = None
            if rank_and_world()[0] == 0:  # only rank 0 writes
                name = f"{cfg.preset}-{cfg.schedule}"
                out, lock = runs.make_folder(cfg.out, name, actions.resume)  # noqa: F841, held
                cfg = dataclasses.replace(cfg, out=str(out))
    except (UserError, OSError) as error:
        return fail("train.py", error)
    tell = say if out else lambda _: None
    if actions.resume and all(Path(cfg.out, x).exists() for x in ("record.json", "curve.png")):
        tell(f"{cfg.out} is finished already")
        return 0
    tell(f"{cfg.out}: {cfg.preset} under {cfg.schedule}, on {cfg.device} in {cfg.dtype}")
    try:
        with runs.stop_request(actions.time_limit) as must_stop:
            record = train(cfg, corpus, out, start, must_stop)
    except Exception as error:
        reason = devices.reason_of(error)
        if reason is None:
            raise
        hint = "; --resume starts from the newest checkpoint" if isinstance(error, OSError) else ""
        return fail("train.py", reason + hint)
    if record is None:
        tell(f"stopped and saved; continue: python train.py --out {shlex.quote(cfg.out)} --resume")
        return 3
    return 0


if __name__ == "__main__":
    devices.leave(main())
