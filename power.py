"""The paper Power Scheduler in one file, without muP and MoE.

    pip install torch numpy matplotlib
    python power.py        two to three minutes on a laptop

It prints two tables and draws two figures. docs/power.ipynb has them.
"""

# %% [markdown]
# # A learning rate for a run that may end at any time
#
# After a warmup, a learning rate should be high, and at the end 0. If you know the end,
# draw a straight line. If you do not, train a *trunk*, and decay to 0 when you decide to
# stop. What should the learning rate of the trunk do until then?
#
# - *WSD* (warmup, stable, decay) holds it.
# - *Power* lets it fall as a power of the tokens seen (Shen et al., 2024, arXiv
#   2408.13359). This is the paper that we rebuild here.
# - *WSqD* lets it fall as one over a square root of the tokens (Ma and Chen, 2026, arXiv
#   2607.10959, which we have not read).
#
# Each has one number to tune: a trunk its learning rate at T0 tokens, a line its peak. In
# a long run that is too expensive, so you tune it in a short *pilot* of T0 tokens.
# **Whose number is still good in a run that is 16 times as long?**
#
# To be quick, our pilot has 80 steps of two sequences. Of several batch sizes we took one
# at which the schedules differ much. So this is a demonstration, and the evidence is in
# [claims](../research/claims.md).

# %%
import copy
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)  # more threads do not help a model as small as ours
SEQ_LEN = 128  # tokens per sequence
BATCH_SIZE = 2  # sequences per step
STEP = BATCH_SIZE * SEQ_LEN  # tokens per step
T0 = 80 * STEP  # tokens of the pilot
LENGTHS = (T0, 4 * T0, 16 * T0)  # and of the runs in the race
WARMUP = 16 * STEP  # tokens
DECAY = 0.3  # share of a run


# %% [markdown]
# ## Schedules
#
# A schedule is a function from n, the tokens seen so far, to a learning rate. (Our decays
# are straight lines, and the paper has curves.)


# %%
def constant(lr):
    """The stable phase of WSD (equation 2 of the paper)."""
    return lambda n: lr


def power_law(lr, b, lr_max=math.inf, shift=0):
    """The stable phase of Power, min(lr_max, lr * (n / T0)^b) (equation 7).

    lr is the value at n = T0, in the paper beta * a * T0^b. lr_max is a ceiling for small
    n. WSqD has none, and adds a shift to n, in tokens.
    """
    return lambda n: min(lr_max, lr * ((n + shift) / (T0 + shift)) ** b)


def warmup(schedule):
    """Rise in a straight line from 0 to the schedule."""

    def warmed(n):
        if n < WARMUP:
            return schedule(WARMUP) * (n / WARMUP)
        return schedule(n)

    return warmed


def decay(schedule, start, T):
    """Follow the schedule until `start`, then fall in a straight line to 0 at T."""

    def decayed(n):
        if n < start:
            return schedule(n)
        return schedule(start) * max(0, (T - n) / (T - start))

    return decayed


def linear(lr, T):
    """A straight line from lr, where the warmup ends, to 0 at T. It is all decay."""
    return decay(constant(lr), WARMUP, T)


# %% [markdown]
# ## A small GPT
#
# **Skip the next cell if you know a GPT.** It reads bytes, and has rotary positions,
# RMSNorm, SwiGLU and tied embeddings. `model(idx, targets)` is its mean loss.

# %%
VOCAB, WIDTH, HEADS, LAYERS = 256, 32, 2, 2
D_HEAD = WIDTH // HEADS
HIDDEN = round(2.5 * WIDTH)
INIT_STD = WIDTH**-0.5  # a square matrix keeps the size of its inputs

FREQUENCY = 10000.0 ** -(torch.arange(0, D_HEAD, 2) / D_HEAD)
ANGLE = torch.outer(torch.arange(SEQ_LEN), FREQUENCY)  # [S, d_head / 2]
COS = torch.cat((ANGLE.cos(), ANGLE.cos()), dim=1)  # [S, d_head]
SIN = torch.cat((-ANGLE.sin(), ANGLE.sin()), dim=1)


def rotate(x):  # [B, heads, S, d_head]
    """Turn every pair (x1, x2) of a head by an angle that grows with the position."""
    swapped = x.roll(D_HEAD // 2, dims=-1)  # (x2, x1)
    return x * COS + swapped * SIN  # (x1 cos - x2 sin, x2 cos + x1 sin)


def norm(x):
    return F.rms_norm(x, (WIDTH,), eps=1e-5)


def matrix(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (matrix(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up = matrix(WIDTH, HIDDEN), matrix(WIDTH, HIDDEN)
        self.down = matrix(HIDDEN, WIDTH)

    def attention(self, x):  # [B, S, width]
        heads = (m(x).unflatten(-1, (HEADS, D_HEAD)) for m in (self.q, self.k, self.v))
        q, k, v = (y.transpose(1, 2) for y in heads)  # [B, heads, S, d_head]
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def mlp(self, x):  # [B, S, width]
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x):
        x = x + self.attention(norm(x))
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        for p in self.parameters():
            p.data.normal_(0.0, INIT_STD)

    def forward(self, idx, targets):  # both [B, S]
        """Mean cross-entropy in nats per token."""
        x = self.embed(idx) / INIT_STD  # entries of size 1
        for block in self.blocks:
            x = block(x)
        logits = F.linear(norm(x), self.embed.weight)  # [B, S, VOCAB]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# %% [markdown]
# ## The text: torch's own Python files
#
# Every run reads the sequences of TRAIN in their order. So two runs with the same seed
# differ only in their learning rates. (You may skip how we split the text.)


# %%
def load_text():
    """-> sequences to train on, and others to measure the loss, both [N, S + 1]"""
    files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    np.random.default_rng(0).shuffle(files)  # so both parts are of all folders
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    n = len(text) // (SEQ_LEN + 1)
    rows = text[: n * (SEQ_LEN + 1)].reshape(n, SEQ_LEN + 1)  # a row is a sequence
    first = n // 50  # the first 2% are held out
    rng = np.random.default_rng(1)
    train = first + rng.permutation(n - first)[: max(LENGTHS) // SEQ_LEN]
    held_out = rng.permutation(first)[:128]
    return torch.tensor(rows[train]).long(), torch.tensor(rows[held_out]).long()


TRAIN, HELD_OUT = load_text()


# %% [markdown]
# ## A step, a trunk and its branches
#
# Before its decay, a trunk does not depend on the length of the run. So one trunk serves
# all lengths. Where a decay starts, a *branch* copies the trunk, and decays.


# %%
class Run:
    """A model in training, with its learning rates."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = GPT()
        settings = dict(betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1, fused=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings)
        self.tokens = 0
        self.rates = []  # one per step

    def step(self, lr):
        """Update the weights once."""
        self.optimizer.param_groups[0]["lr"] = lr
        first = self.tokens // SEQ_LEN
        rows = TRAIN[first : first + BATCH_SIZE]  # [B, S + 1]
        self.model(rows[:, :-1], rows[:, 1:]).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tokens += STEP
        self.rates.append(lr)

    def train(self, schedule, until):
        """Train up to `until` tokens. A step has the learning rate of its middle."""
        while self.tokens + STEP <= until:
            self.step(schedule(self.tokens + STEP / 2))
        return self

    def measure(self):
        """Measure the loss on held-out text."""
        with torch.no_grad():
            self.loss = self.model(HELD_OUT[:, :-1], HELD_OUT[:, 1:]).item()

    def branch(self):
        """A copy that trains separately from here."""
        # one deepcopy of both, so that the optimizer's copy updates the model's copy
        return copy.deepcopy(self)


def trunk_and_branches(schedule, lengths, seed):
    """Train one trunk, and a branch for each length T. -> {T: branch with its loss}"""
    trunk = Run(seed)
    branches = {}
    for T in lengths:
        start = T - round(DECAY * T)
        trunk.train(schedule, start)
        branches[T] = trunk.branch()
        branches[T].train(decay(schedule, start, T), T).measure()
    return branches


# functions from the learning rate at T0 to a schedule. Power joins when we know b
TRUNKS = {"WSD": constant, "WSqD": lambda lr: power_law(lr, b=-1 / 2, shift=T0)}


def runs_of(name, lr, lengths, seed):
    """-> {T: run with its loss}. A straight line needs a run for each T."""
    if name != "linear":
        return trunk_and_branches(warmup(TRUNKS[name](lr)), lengths, seed)
    runs = {}
    for T in lengths:
        runs[T] = Run(seed)
        runs[T].train(warmup(linear(lr, T)), T).measure()
    return runs


# %% [markdown]
# ## The pilot
#
# The loss against the learning rate is a *valley*. We try five learning rates, each with
# three seeds. The lowest try may be luck, so we fit a parabola over the logarithm of the
# learning rate, and take its bottom. The pilot of WSD continues to 2 T0 and 4 T0, for the
# law of the paper (equation 6):
#
# > best learning rate = beta * a * T^b
#
# (beta is the batch size. We have only one, so we need only b.)

# %%
RATES = (0.004, 0.008, 0.016, 0.032, 0.064)
PILOT_SEEDS = (0, 1, 2)
# number of seeds -> Student's t for 95%
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}


def estimate(values):  # one per seed
    """-> their mean, and half of its 95% interval by Student's t"""
    seeds = len(values)
    return np.mean(values), STUDENT[seeds] * np.std(values, ddof=1) / seeds**0.5


def vertex(losses):
    """{learning rate: loss} -> the learning rate at the bottom of the valley.

    If the parabola opens downward, or has its bottom outside the tries, the best try.
    """
    x = np.log2(list(losses))
    c2, c1, _ = np.polyfit(x, list(losses.values()), 2)
    bottom = -c1 / (2 * c2)  # where the slope 2 c2 x + c1 is 0
    if c2 > 0 and x.min() <= bottom <= x.max():
        return 2**bottom
    return min(losses, key=losses.get)


def best_rate(valley):  # {learning rate: [loss of a seed]}
    return vertex({lr: np.mean(losses) for lr, losses in valley.items()})


def pilot(name, lengths):
    """Try all learning rates with all seeds. -> {T: {learning rate: [loss of a seed]}}"""
    valleys = {T: {lr: [] for lr in RATES} for T in lengths}
    for lr in RATES:
        for seed in PILOT_SEEDS:
            for T, run in runs_of(name, lr, lengths, seed).items():
                valleys[T][lr].append(run.loss)
    for T, valley in valleys.items():
        shown = "  ".join(f"{np.mean(losses):.3f}" for losses in valley.values())
        print(f"{name:6} {T // T0} T0   {shown}   {best_rate(valley):.4f}", flush=True)
    return valleys


def law(valleys):
    """Fit log(best learning rate) = constant + b log(T) per seed. -> estimate of b"""
    slopes = []
    for i in range(len(PILOT_SEEDS)):
        best = []
        for valley in valleys.values():
            best.append(vertex({lr: losses[i] for lr, losses in valley.items()}))
        slope, _ = np.polyfit(np.log(list(valleys)), np.log(best), 1)
        slopes.append(slope)
    return estimate(slopes)


if __name__ == "__main__":  # also in a notebook, but not if you import this file
    print(f"The pilot, T0 = {T0:,} tokens: mean losses at five learning rates, the best")
    print(" " * 14 + "  ".join(f"{lr:.3f}" for lr in RATES))
    pilots = {"WSD": pilot("WSD", (T0, 2 * T0, 4 * T0))}
    b, error = law(pilots["WSD"])
    print(f"The best learning rate of WSD goes as T^({b:.2f} ± {error:.2f})")

    figure, ax = plt.subplots(figsize=(5, 3.4), layout="constrained")
    grid = np.geomspace(min(RATES), max(RATES))
    for marker, (T, valley) in zip("o^s", pilots["WSD"].items()):
        means = [np.mean(losses) for losses in valley.values()]
        parabola = np.poly1d(np.polyfit(np.log2(RATES), means, 2))
        ax.plot(RATES, means, marker, color="#B34700", label=f"T = {T // T0} T0")
        ax.plot(grid, parabola(np.log2(grid)), color="#B34700")
        bottom = best_rate(valley)
        ax.plot(bottom, parabola(np.log2(bottom)), "k|", markersize=14)
    ax.set(title=f"Best learning rate ~ T^({b:.2f} ± {error:.2f})", xscale="log")
    ax.set(xlabel="learning rate of WSD", ylabel="loss (nats per token)")
    ax.set_xticks(RATES, RATES)
    ax.minorticks_off()
    ax.legend(frameon=False)
    figure.savefig("power-valleys.png", dpi=200)

# %% [markdown]
# ## The idea: put n where T was
#
# If b is negative, a longer WSD run needs a lower learning rate. If you do not know T,
# use at token n the learning rate that is best for a run of n tokens. Then you are always
# ready to stop. (If the interval of b above contains 0, three seeds do not show that b is
# negative.) This is an argument and not a theorem, because in the law the runs *held*
# their learning rates. So we take only b from it, and tune the learning rate at T0 as for
# the others:

# %%
if __name__ == "__main__":
    # no learning rate above the highest try, so this try is WSD
    TRUNKS["Power"] = lambda lr: power_law(lr, b, lr_max=max(RATES))
    pilots |= {name: pilot(name, (T0,)) for name in ("Power", "WSqD", "linear")}

# %% [markdown]
# ## The race
#
# Now every schedule has its number. A trunk gets three branches, which end at T0, 4 T0
# and 16 T0. A loss also depends on the initial weights. So we subtract losses of runs
# with the same initial weights, and repeat this with five new seeds. After ± is half of a
# 95% interval over the seeds.

# %%
SEEDS = (3, 4, 5, 6, 7)
STYLES = {"WSD": ("s-.", "#B34700"), "Power": ("o-", "#0072B2")}
STYLES |= {"WSqD": ("^--", "#00735A"), "linear": ("D:", "#7a3b8f")}

if __name__ == "__main__":
    print("\nThe race: mean losses, and minus WSD")
    print("           T0                     4 T0                    16 T0")
    raced = {}  # name -> [{T: run} of each seed]
    losses = {}  # name -> array [T, seeds]
    minus_wsd = {}  # name -> [(mean, half of its interval) of each T]
    for name in pilots:  # WSD is first
        lr = best_rate(pilots[name][T0])
        raced[name] = [runs_of(name, lr, LENGTHS, seed) for seed in SEEDS]
        losses[name] = np.array([[runs[T].loss for runs in raced[name]] for T in LENGTHS])
        minus_wsd[name] = [estimate(x) for x in losses[name] - losses["WSD"]]
        line = f"{name:6}"
        for of_seeds, (mean, error) in zip(losses[name], minus_wsd[name]):
            line += f"  {of_seeds.mean():.3f} {mean:+.3f} ± {error:.3f}"
        print(line, flush=True)

    at_16 = {name: minus_wsd[name][-1] for name in pilots}
    below = [name for name, (mean, error) in at_16.items() if mean + error < 0]
    print(f"At 16 T0, these are below WSD: {', '.join(below) or 'none'}")

    layout = dict(layout="constrained", width_ratios=(2, 3))
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.4), **layout)
    for k, (name, (style, color)) in enumerate(STYLES.items()):
        for run in raced[name][0].values():
            tokens = np.arange(len(run.rates)) * STEP
            left.plot(tokens / T0, run.rates, style[1:], color=color)
        beside = np.array(LENGTHS) / T0 * 1.06**k  # so that no bar hides another
        means, errors = np.transpose(minus_wsd[name])
        right.errorbar(beside, means, errors, fmt=style, color=color, label=name)
    left.set(title="Learning rates", xlabel="tokens / T0")
    right.set(title=f"Below WSD at 16 T0: {', '.join(below) or 'none'}", xscale="log")
    right.set(xlabel="length of the run / T0", ylabel="loss minus that of WSD")
    right.set_xticks((1, 4, 16), (1, 4, 16))
    right.minorticks_off()
    right.legend(frameon=False, loc="lower left")
    figure.savefig("power.png", dpi=200)

# %% [markdown]
# ## How to read this
#
# **The law.** b took runs of up to 4 T0, so Power has seen more than the others.
#
# **The race.** If the difference to WSD falls from T0 to 16 T0, this number has kept
# better than WSD's. The intervals are blind to the noise of the pilot, to another text,
# and to another model. So repeat the pilot on your text, and do not copy our numbers.
#
# **When not.** If you know T, take the line (as in our [longer
# runs](../research/claims.md)). But tune its peak near T, and not at T0.
