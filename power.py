"""The paper Power Scheduler in one file, without muP and MoE.

    pip install torch numpy matplotlib
    python power.py        about five minutes on a laptop

It has no flags, and draws four figures. docs/power.ipynb has its output.
"""

# %% [markdown]
# # Power Scheduler in one file
#
# A cosine schedule must know, before its first step, when you will stop. Power need
# not. This file rebuilds the paper (Shen et al., 2024, arXiv 2408.13359) small enough
# for a laptop. It finds the law of the best learning rate in short runs, puts it into a
# schedule, and ends one longer Power run at three lengths. It races this run against
# runs planned for these lengths, and against a run that held its learning rate.

# %%
import copy
import math
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

IN_NOTEBOOK = "ipykernel" in sys.modules
if not IN_NOTEBOOK:
    os.environ["MPLBACKEND"] = "Agg"  # a program draws into files
import matplotlib.pyplot as plt  # noqa: E402

if __name__ == "__main__" and "--help" in sys.argv:
    print(__doc__)
    sys.exit()

torch.set_num_threads(1)  # more threads do not help a model as small as ours
SEQ_LEN = 128  # tokens per sequence
WARMUP = 32_000  # tokens, 125 steps at batch size 2 and 31 at 8
# Decays take this share of a run. The paper's searches take a tenth, its 3B models 17 and
# 20%. In our runs from 1.28M tokens, 30% ends 0.01 to 0.02 lower than a tenth.
DECAY = 0.3
SWEEP_LENGTHS = (80_000, 160_000, 320_000)  # run lengths T of the sweep, in tokens
LENGTHS = (320_000, 640_000, 1_280_000)  # and of the race


# %% [markdown]
# ## Schedules
#
# A schedule maps n, the tokens seen so far, to a learning rate. WSD (warmup, stable,
# decay) and Power are one line and differ in one word: `constant` or `power_law`. Only
# `decay` depends on the end. A cosine and a straight line do so from the first step.


# %%
def constant(lr):
    """Equation 2 of the paper, its stable phase."""
    return lambda n: lr


def power_law(a, b, beta, lr_max, q=1):
    """Equation 7, with beta^q where the paper has beta.

    beta: batch size in sequences of 4096 tokens, as in the paper. a, b, q: constants of
    the law that we fit below. As b is negative, the law rises without limit towards
    n = 0. lr_max is its ceiling.
    """
    return lambda n: min(lr_max, beta**q * a * n**b) if n > 0 else lr_max


def warmup(schedule, warmup_tokens):
    """Rise linearly to the schedule."""
    target = schedule(warmup_tokens)
    return lambda n: target * n / warmup_tokens if n < warmup_tokens else schedule(n)


def decay(schedule, T, decay_tokens):
    """Follow the schedule, then fall to 0 over the last tokens (equations 2 and 8)."""
    start = T - decay_tokens

    def decayed(n):
        if n <= start:
            return schedule(n)
        done = min(1.0, (n - start) / decay_tokens)
        # from 1 to 0 along the curve of IBM's code. The paper has no formula
        return schedule(start) * (math.exp(1 - done) - 1) / (math.e - 1)

    return decayed


def share_done(n, start, T):
    """How much of the run from start to T is over, from 0 to 1."""
    return min(max((n - start) / (T - start), 0.0), 1.0)


def cosine(lr, warmup_tokens, T):
    """Half a cosine, from lr after the warmup to a tenth of it."""

    def schedule(n):
        done = share_done(n, warmup_tokens, T)
        return lr * (0.55 + 0.45 * math.cos(math.pi * done))

    return schedule


def linear(lr, warmup_tokens, T):
    """A straight line, from lr after the warmup to 0."""

    def schedule(n):
        return lr * (1 - share_done(n, warmup_tokens, T))

    return schedule


# %%
LOOKS = {
    "Power": dict(color="#0072B2", linestyle="-"),
    "WSD": dict(color="#B34700", linestyle="-."),
    "cosine": dict(color="#6b6b6b", linestyle="--"),
    "linear": dict(color="#7a3b8f", linestyle=":"),
}
plt.rc("figure", figsize=(5, 3.4), dpi=120)
plt.rc("figure.constrained_layout", use=True)
plt.rc("savefig", dpi=200)
plt.rc("axes", grid=True, titlelocation="left", titleweight="bold", titlesize=10)
plt.rc("axes.spines", top=False, right=False)
plt.rc("grid", color="#e6e6e6")
plt.rc("legend", frameon=False)


def finish(name):
    """Show the figure in a notebook. A program saves it."""
    if IN_NOTEBOOK:
        plt.show()
        return
    try:
        plt.savefig(name)
    except OSError as error:
        print(f"power.py: {error}; choose another working folder", file=sys.stderr)
        sys.exit(2)
    plt.close()
    print(f"figure: {name}\n", flush=True)


if __name__ == "__main__":  # also in a notebook, but not if you import this file
    T = 1_280_000
    stable = {"WSD": constant(0.006), "Power": power_law(0.6, -0.3, 0.25, 0.064, q=0.5)}
    examples = {
        name: decay(warmup(schedule, WARMUP), T, round(DECAY * T))
        for name, schedule in stable.items()
    }
    examples["cosine"] = warmup(cosine(0.01, WARMUP, T), WARMUP)
    examples["linear"] = warmup(linear(0.01, WARMUP, T), WARMUP)
    n = np.linspace(0, T, 1281)
    _, ax = plt.subplots()
    for name, schedule in examples.items():
        ax.plot(n / 1e6, [schedule(x) for x in n], label=name, **LOOKS[name])
    ax.set_title("WSD and Power can end anywhere")
    ax.set(xlabel="tokens seen (millions)", ylabel="learning rate", ylim=(0, None))
    ax.legend()
    finish("power-schedules.png")


# %% [markdown]
# ## A small GPT
#
# It has rotary positions, RMSNorm, SwiGLU, and one matrix that reads and writes tokens.
# The paper also has muP, which carries a learning rate from a small model to a wide
# one. We train one width, so muP would do nothing here. `mup.py` has it.

# %%
VOCAB, WIDTH, HEADS, LAYERS = 256, 32, 2, 2
INIT_STD = WIDTH**-0.5  # a square matrix keeps the size of its inputs
M_EMB = WIDTH**0.5  # multiplies the embedding, whose entries then have size 1


def rotary_table():
    """Cosines and signed sines by which a position turns pairs of entries of a head."""
    d_head = WIDTH // HEADS
    position = torch.arange(SEQ_LEN).double()
    frequency = 10000.0 ** -(torch.arange(0, d_head, 2).double() / d_head)
    angle = torch.outer(position, frequency)  # [S, d_head / 2]
    cos = torch.cat((angle.cos(), angle.cos()), dim=1)
    sin = torch.cat((-angle.sin(), angle.sin()), dim=1)
    table = torch.stack((cos, sin)).float()
    return table.unsqueeze(2)  # [2, S, 1, d_head], the same for all heads


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("rotary", rotary_table(), persistent=False)

    def rotate(self, x):  # x [B, S, heads, d_head]
        """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), the halves of a head."""
        cos, sin = self.rotary
        swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (x2, x1)
        return x * cos + swapped * sin

    def forward(self, x):  # x [B, S, width]
        B, S, _ = x.shape
        q = self.rotate(self.q(x).view(B, S, HEADS, -1)).transpose(1, 2)
        k = self.rotate(self.k(x).view(B, S, HEADS, -1)).transpose(1, 2)
        v = self.v(x).view(B, S, HEADS, -1).transpose(1, 2)  # [B, heads, S, d_head]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, S, WIDTH))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = round(2.5 * WIDTH)
        self.gate = nn.Linear(WIDTH, hidden, bias=False)
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))  # SwiGLU


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.attn = Attention()
        self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        for p in self.parameters():
            if p.dim() == 2:  # gains stay 1
                p.data.normal_(0.0, INIT_STD)

    def forward(self, idx, targets):  # both [B, S]
        """Mean cross-entropy in nats per token."""
        x = self.embed(idx) * M_EMB
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)  # [B, S, VOCAB]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model):
    """AdamW, which decays matrices and no gains."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=True)


# %% [markdown]
# ## The text: torch's own Python files, as bytes
#
# Every run reads the same sequences in the same order. So two runs differ in what we
# compare, and in nothing else.


# %%
def load_text():
    """-> sequences to train on, their order, and 256 sequences from other files"""
    files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    np.random.default_rng(0).shuffle(files)
    text = b"".join(path.read_bytes() for path in files)
    tokens = np.frombuffer(text, np.uint8)
    n = len(tokens) // (SEQ_LEN + 1)
    rows = tokens[: n * (SEQ_LEN + 1)].reshape(n, SEQ_LEN + 1)  # a row is a sequence
    held_out = rows[: n // 50]  # the first 2% of the text
    held_out = held_out[:: len(held_out) // 256][:256]
    train = rows[n // 50 :]
    order = np.random.default_rng(1).permutation(len(train))
    return train, order, torch.from_numpy(held_out.astype(np.int64))


TRAIN, ORDER, HELD_OUT = load_text()


def batch_at(tokens, batch_size):
    """The batch that starts at this position of a run. [batch_size, SEQ_LEN + 1]"""
    first = tokens // SEQ_LEN
    rows = TRAIN[ORDER[first : first + batch_size]]
    return torch.from_numpy(rows.astype(np.int64))


@torch.no_grad()
def held_out_loss(model):
    return model(HELD_OUT[:, :-1], HELD_OUT[:, 1:]).item()


# %% [markdown]
# ## A step, a trunk and its branches
#
# Before its decay, a run does not depend on its length. So the runs of one learning
# rate share a *trunk*. At each T, a copy leaves it and decays: a *branch*.


# %%
class Run:
    """A model in training.

    curve: (tokens, loss on held-out text). rates: (tokens, learning rate).
    """

    def __init__(self, batch_size, seed=0):
        torch.manual_seed(seed)
        self.model = GPT()
        self.optimizer = make_optimizer(self.model)
        self.batch_size = batch_size
        self.tokens = 0
        self.curve = []
        self.rates = []

    def step(self, lr):
        """Update the weights once. Returns the loss of the batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.rates.append((self.tokens, lr))
        rows = batch_at(self.tokens, self.batch_size)
        loss = self.model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tokens += self.batch_size * SEQ_LEN
        return loss.detach()

    def train(self, schedule, until, look_every=None):
        """Train to `until` tokens. A step has the learning rate of its middle."""
        step_tokens = self.batch_size * SEQ_LEN
        while self.tokens + step_tokens <= until:
            middle = self.tokens + step_tokens / 2
            self.step(schedule(middle))
            # a smaller remainder means that this step has passed a multiple
            if look_every and self.tokens % look_every < step_tokens:
                self.look()
        return self

    def look(self):
        """Add a point to the curve."""
        self.curve.append((self.tokens, held_out_loss(self.model)))

    @property
    def loss(self):
        """Loss at the last look."""
        return self.curve[-1][1]

    def branch(self):
        """A copy that trains separately from here."""
        # one deepcopy of both, so that the optimizer's copy updates the model's copy
        return copy.deepcopy(self)


def trunk_and_branches(schedule, batch_size, lengths, look_every=None, seed=0):
    """Train one trunk, and a branch for each length T. -> trunk, {T: branch}

    A branch looks at its end and, with look_every, also at its start.
    """
    trunk = Run(batch_size, seed)
    branches = {}
    for T in lengths:
        decay_tokens = round(DECAY * T)
        trunk.train(schedule, T - decay_tokens, look_every)
        branches[T] = trunk.branch()
        if look_every:
            branches[T].look()
        branches[T].train(decay(schedule, T, decay_tokens), T, look_every)
        branches[T].look()
    return trunk, branches


# %% [markdown]
# ## A sweep: the best learning rate of every T and batch size
#
# The loss against the learning rate is a *valley*. We try five learning rates, and take
# the lowest point of a parabola near their losses, because the lowest try may be luck.
# (A real sweep needs more: fit.py takes a cubic and several seeds.)

# %%
BATCHES = (2, 8)  # sequences per step


def vertex(losses):
    """{learning rate: loss} -> the learning rate at the bottom of the valley.

    If the parabola opens downward, or has its bottom outside the tries, the best try.
    """
    x = np.log2(list(losses))
    c2, c1, _ = np.polyfit(x, list(losses.values()), 2)
    if c2 > 0:
        bottom = -c1 / (2 * c2)  # where the slope 2 c2 x + c1 is 0
        if min(x) <= bottom <= max(x):
            return 2**bottom
    best = min(losses, key=losses.get)
    tries = f"{min(losses):g} to {max(losses):g}"
    print(f"  the parabola has no bottom from {tries}, so we take the best try, {best:g}")
    return best


def wsd_losses(lr, batch_size):
    """Train WSD, and print its losses. -> {T: loss}"""
    schedule = warmup(constant(lr), WARMUP)
    _, branches = trunk_and_branches(schedule, batch_size, SWEEP_LENGTHS)
    losses = {T: branch.loss for T, branch in branches.items()}
    shown = ", ".join(f"{loss:.3f}" for loss in losses.values())
    print(f"  batch {batch_size}, lr {lr:.4f}: {shown}", flush=True)
    return losses


def sweep():
    """-> {(batch size, T): {learning rate: loss}}"""
    valleys = {}
    for batch_size in BATCHES:
        for T in SWEEP_LENGTHS:
            valleys[batch_size, T] = {}
        middle = 0.016 * math.sqrt(batch_size / 8)  # a guess, which the fit corrects
        for lr in (middle / 4, middle / 2, middle, middle * 2, middle * 4):
            for T, loss in wsd_losses(lr, batch_size).items():
                valleys[batch_size, T][lr] = loss
    return valleys


# %%
if __name__ == "__main__":
    print("loss of WSD at T =", SWEEP_LENGTHS)
    valleys = sweep()
    bottoms = {cell: vertex(losses) for cell, losses in valleys.items()}
    _, axes = plt.subplots(len(BATCHES), figsize=(5, 5.6), sharex=True)
    shades = dict(zip(SWEEP_LENGTHS, ("#e0559a", "#963768", "#3d0a24")))
    for (batch_size, T), losses in valleys.items():
        ax = axes[BATCHES.index(batch_size)]
        x = np.log2(list(losses))
        parabola = np.polyfit(x, list(losses.values()), 2)
        along = np.linspace(x[0], x[-1])
        ax.plot(2**along, np.polyval(parabola, along), color=shades[T])
        ax.plot(losses.keys(), losses.values(), "o", color=shades[T], markersize=4)
        bottom = bottoms[batch_size, T]
        ax.plot(bottom, np.polyval(parabola, np.log2(bottom)), "v", color=shades[T])
        first = min(losses)
        ax.text(first, losses[first], f"T = {T // 1000}k  ", color=shades[T], ha="right")
        ax.set(title=f"WSD at batch size {batch_size}", ylabel="loss (nats per token)")
        ax.set(xscale="log", xlim=(0.0008, 0.08))
    rates = [0.002 * 2**k for k in range(6)]
    axes[-1].set_xticks(rates, [f"{lr:.3f}" for lr in rates])
    axes[-1].minorticks_off()
    axes[-1].set_xlabel("learning rate")
    finish("power-valleys.png")


# %% [markdown]
# ## The law
#
# log lr = log a + b log T + q log beta (equation 6 of the paper, where q is 1). beta is
# the batch size in sequences of 4096 tokens. So 8 of our sequences are a beta of 0.25.


# %%
def beta_of(batch_size):
    return batch_size * SEQ_LEN / 4096


def fit_law(minima):
    """[(T, beta, best learning rate)] -> a, b, q by least squares"""
    T, beta, lr = np.array(minima).T
    design = np.stack((np.ones_like(T), np.log(T), np.log(beta)), axis=1)
    (log_a, b, q), *_ = np.linalg.lstsq(design, np.log(lr), rcond=None)
    return math.exp(log_a), b, q


def law_at(law, T, batch_size):
    """The best learning rate of a WSD run of T tokens. `power_law` puts n where T is."""
    a, b, q = law
    beta = beta_of(batch_size)
    return beta**q * a * T**b


# %%
if __name__ == "__main__":
    minima = [(T, beta_of(B), bottom) for (B, T), bottom in bottoms.items()]
    law = fit_law(minima)
    a, b, q = law
    print(f"best learning rate = {a:.3g} * beta^{q:.2f} * T^{b:.2f}")
    _, ax = plt.subplots()
    ends = np.array((SWEEP_LENGTHS[0], LENGTHS[-1]))
    for batch_size, marker in zip(BATCHES, "os"):
        found = [lr for _, beta, lr in minima if beta == beta_of(batch_size)]
        line = law_at(law, ends, batch_size)
        ax.plot(SWEEP_LENGTHS, found, marker, color=LOOKS["WSD"]["color"])
        ax.plot(ends, line, color=LOOKS["WSD"]["color"])
        ax.text(ends[1], line[1], f" batch size {batch_size}", va="center")
    ax.set(xscale="log", yscale="log", xlabel="run length T (tokens)")
    ax.set(ylabel="best learning rate", title=f"The best learning rate goes as T^{b:.2f}")
    ax.set_xticks([80e3, 160e3, 320e3, 1.28e6], ["80k", "160k", "320k", "1.28M"])
    ax.set_yticks([0.005, 0.01, 0.02], ["0.005", "0.01", "0.02"])
    ax.minorticks_off()
    finish("power-law.png")


# %% [markdown]
# ## The worth of the law
#
# We fit the law without the longest T, and try its learning rate there. Without a law, we
# would keep the best learning rate of a shorter T.


# %%
def regret(losses, bottom, lr):
    """Nats above the bottom of a valley, on the parabola through its losses."""
    parabola = np.polyfit(np.log2(list(losses)), list(losses.values()), 2)
    loss, lowest = np.polyval(parabola, np.log2([lr, bottom]))
    return loss - lowest


if __name__ == "__main__":
    before, T = SWEEP_LENGTHS[-2:]
    short_law = fit_law([minimum for minimum in minima if minimum[0] < T])
    of_law = []
    of_old = []
    for B in BATCHES:
        losses = valleys[B, T]
        of_law.append(regret(losses, bottoms[B, T], law_at(short_law, T, B)))
        of_old.append(regret(losses, bottoms[B, T], bottoms[B, before]))
    print(f"A law from runs of up to {before:,} tokens, asked for {T:,}, ends")
    print(f"{np.mean(of_law):.4f} nats above the best learning rate that we found there.")
    print(f"The best learning rate of {before:,} ends {np.mean(of_old):.4f} above it.")


# %% [markdown]
# ## The idea: put n where T was
#
# b is negative, so a longer run needs a lower learning rate. If you know T, hold the
# learning rate that the law gives for T. If you do not, use at every moment n the
# learning rate that the law gives for n, which is about right for a run that ends soon.
#
# This is an argument and not a theorem, because the law describes runs that *held*
# their learning rate. So we test it.
#
# ## The race
#
# One Power run ends at three lengths. So does one WSD run, with one learning rate for all
# of them. Their difference is the worth of the fall of Power. Every cosine and every
# straight line is planned for one length.
#
# How high should they start? The runs of the law held their learning rate. Power comes
# from a higher learning rate, and the planned runs stay below their peaks after the
# warmup. So we scale the learning rate of the law by a factor. For each schedule we try
# three factors at the first length, and again take the lowest point of a parabola.

# %%
BATCH_SIZE = 8  # sequences per step in the race
FACTORS = (1 / 2, 1, 2)  # tries, as multiples of the law's learning rate
LR_MAX = 0.064  # the highest learning rate of the sweep; above it, the law is a guess
LOOK_EVERY = 160_000  # tokens


def falling(law, factor):
    """The stable phase of Power."""
    a, b, q = law
    return power_law(factor * a, b, beta_of(BATCH_SIZE), LR_MAX, q)


def held(law, factor):
    """The stable phase of WSD, at the law's learning rate for the first length."""
    return constant(factor * law_at(law, LENGTHS[0], BATCH_SIZE))


def train_branches(stable, law, factor, lengths, look_every=None, seed=0):
    """One run that ends at every length. stable: `falling` or `held`. -> {T: branch}"""
    schedule = warmup(stable(law, factor), WARMUP)
    _, branches = trunk_and_branches(schedule, BATCH_SIZE, lengths, look_every, seed)
    return branches


def train_planned(shape, law, factor, lengths, look_every=None):
    """A run for every length. shape: `cosine` or `linear`. -> {T: run}"""
    runs = {}
    for T in lengths:
        peak = factor * law_at(law, T, BATCH_SIZE)
        schedule = warmup(shape(peak, WARMUP, T), WARMUP)
        runs[T] = Run(BATCH_SIZE).train(schedule, T, look_every)
        runs[T].look()
    return runs


RACERS = {  # name -> function of (law, factor, lengths, look_every)
    "Power": partial(train_branches, falling),
    "WSD": partial(train_branches, held),
    "cosine": partial(train_planned, cosine),
    "linear": partial(train_planned, linear),
}


def tune(name, law):
    """The best factor at the first length."""
    T = LENGTHS[0]
    losses = {}
    for factor in FACTORS:
        runs = RACERS[name](law, factor, [T])
        losses[factor] = runs[T].loss
    best = vertex(losses)
    shown = ", ".join(f"{loss:.3f} with {factor:g}" for factor, loss in losses.items())
    print(f"  {name:6} {shown}; so we take {best:.2f}", flush=True)
    return best


# %%
if __name__ == "__main__":
    print(f"loss at T = {LENGTHS[0]:,} with three factors")
    factors = {name: tune(name, law) for name in RACERS}
    runs = {}
    for name in RACERS:
        runs[name] = RACERS[name](law, factors[name], LENGTHS, LOOK_EVERY)

    print("\n        T   Power    WSD      cosine   linear   longest cosine, cut short")
    longest = runs["cosine"][LENGTHS[-1]]
    for T in LENGTHS:
        ends = [runs[name][T].loss for name in RACERS]
        tokens, losses = zip(*longest.curve)
        ends.append(np.interp(T, tokens, losses))
        print(f"{T:9,}   " + "    ".join(f"{loss:.3f}" for loss in ends))

    T = LENGTHS[0]
    print(f"\nloss at T = {T:,} from three seeds")
    for name in ("Power", "WSD"):
        ends = [runs[name][T].loss]
        for seed in (1, 2):
            again = RACERS[name](law, factors[name], [T], seed=seed)
            ends.append(again[T].loss)
        print(f"  {name:6} " + ", ".join(f"{loss:.3f}" for loss in ends))

    _, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.4))
    for name in ("cosine", "linear", "WSD", "Power"):
        for T, run in runs[name].items():
            left.plot(*zip(*run.rates), **LOOKS[name])
        behind = [runs[name][T].loss - runs["Power"][T].loss for T in LENGTHS]
        right.plot(LENGTHS, behind, marker="o", **LOOKS[name])
        at_its_end = (LENGTHS[-1], behind[-1])
        right.annotate(f"  {name}", at_its_end, va="center", color=LOOKS[name]["color"])
    left.set(title="Power and WSD end anywhere", ylabel="learning rate")
    right.set(title="Loss minus that of Power, one seed", ylabel="nats per token")
    for ax, label in ((left, "tokens seen"), (right, "run length T (tokens)")):
        ax.set_xlabel(label)
        ax.set_xticks(LENGTHS, ["320k", "640k", "1.28M"])
    finish("power.png")


# %% [markdown]
# ## How to read this
#
# **The tries.** A wrong factor costs up to 0.2 nats, and the tuned schedules differ by at
# most 0.04. So tune the learning rate before you compare schedules.
#
# **The noise.** Other initial weights move a loss by up to 0.06. Differences of two runs
# that share them spread over 0.02. From one seed, believe no difference below 0.03.
#
# **The worth of the law.** 0.0008 nats at twice the length is nothing. At eight times the
# length, a larger sweep found 0.0155 ([notes](../research/notes.md)).
#
# **Does the fall help?** Not here. At 320k, where we tuned both, WSD is ahead in all three
# seeds, by 0.022 on average (undecided). WSD then keeps that learning rate, which is
# against it, but one seed decides nothing. Perhaps a long decay replaces the fall
# ([README](../README.md)).
#
# **Power and cosine.** One run that may end anywhere is about as good as three cosines,
# each planned for its length, with a peak that follows the law of WSD.
#
# **The last column** shows what a wrong plan costs: 0.04 here. A cosine that stops early
# still has a high learning rate.
#
# **When not.** If you know T, plan for it. At 5.12M tokens, a well-tuned straight line to
# 0 ends 0.010 (undecided) and, at width 64, 0.015 lower than Power
# ([README](../README.md)). Here it does not.
#
# **The law** has one seed, and another would move b by about 0.1. Never copy `a`. It
# changes with the text, the model and the units.
