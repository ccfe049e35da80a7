# %% [markdown]
# # Power Scheduler in one file
#
# A cosine schedule must know, before its first step, when you will stop. Power need not.
# This file rebuilds the paper (Shen et al., 2024, arXiv 2408.13359) small enough for a
# laptop. It finds the law of the best learning rate, puts it into a schedule, ends one
# Power run at five lengths, and races it against five cosines that knew their length.
#
#     pip install torch numpy matplotlib
#     python power.py        two or three minutes on a laptop; draws power.png

# %%
import copy
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)  # more threads do not help a model as small as ours
SEQ_LEN = 128  # tokens per sequence
WARMUP = 32_000  # tokens
LENGTHS = (80_000, 160_000, 320_000, 640_000, 1_280_000)  # run lengths T, in tokens


# %% [markdown]
# ## Schedules
#
# A schedule maps n, the tokens seen so far, to a learning rate. WSD (warmup, stable,
# decay) and Power are one line and differ in one word: `constant` or `power_law`. Only
# `decay` knows the end.


# %%
def constant(lr):
    """Equation 2 of the paper, its stable phase."""
    return lambda n: lr


def power_law(a, b, beta, lr_max, q=1):
    """Equation 7, with beta^q where the paper has beta.

    beta: batch size in sequences of 4096 tokens. a, b, q: constants of the law below.
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
        return schedule(start) * (math.exp(1 - done) - 1) / (math.e - 1)

    return decayed


def cosine(lr, T):
    """Half a cosine from lr to a tenth of it. It needs T from the first step."""

    def schedule(n):
        done = min(max((n - WARMUP) / (T - WARMUP), 0.0), 1.0)
        return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))

    return schedule


# %% [markdown]
# ## A small GPT under muP
#
# muP keeps the best learning rate when the width changes (Table 1 of the paper). At
# m_width times the base width, the initial weights of hidden matrices are divided by
# sqrt(m_width), and their learning rate by m_width. Attention divides by d_head, and the
# logits are divided by m_width. We train one width here, half of the base width, so here
# muP only sets the units of the learning rate.

# %%
VOCAB, WIDTH, HEADS, LAYERS = 256, 32, 2, 2
BASE_WIDTH = 64
M_WIDTH = WIDTH / BASE_WIDTH
M_EMB = 10  # multiplies the embedding
INIT_STD = 0.1


def rotary_table():
    d_head = WIDTH // HEADS
    frequency = 10000.0 ** -(torch.arange(0, d_head, 2).double() / d_head)
    angle = torch.outer(torch.arange(SEQ_LEN).double(), frequency)  # [T, d_head / 2]
    cos = torch.cat((angle.cos(), angle.cos()), dim=1)
    sin = torch.cat((-angle.sin(), angle.sin()), dim=1)
    return torch.stack((cos, sin)).float()[:, :, None]  # [2, T, 1, d_head]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("rotary", rotary_table(), persistent=False)

    def rotate(self, x):  # x [B, T, heads, d_head]
        cos, sin = self.rotary
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin

    def forward(self, x):  # x [B, T, width]
        B, T, _ = x.shape
        q = self.rotate(self.q(x).view(B, T, HEADS, -1)).transpose(1, 2)
        k = self.rotate(self.k(x).view(B, T, HEADS, -1)).transpose(1, 2)
        v = self.v(x).view(B, T, HEADS, -1).transpose(1, 2)  # [B, heads, T, d_head]
        scale = HEADS / WIDTH  # muP: 1 / d_head instead of 1 / sqrt(d_head)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return self.out(y.transpose(1, 2).reshape(B, T, WIDTH))


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
        for name, p in self.named_parameters():
            if p.dim() == 2:  # gains stay 1
                hidden = "embed" not in name
                p.data.normal_(0.0, INIT_STD / math.sqrt(M_WIDTH) if hidden else INIT_STD)

    def forward(self, idx, targets):  # both [B, T]
        """Mean cross-entropy in nats per token."""
        x = self.embed(idx) * M_EMB
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x) / M_WIDTH, self.embed.weight)  # [B, T, V]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model):
    """AdamW with a group for each learning rate of muP."""
    matrices = [
        p for name, p in model.named_parameters() if "blocks" in name and p.dim() == 2
    ]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": [model.embed.weight], "lr_scale": 1.0, "weight_decay": 0.1},
        {"params": matrices, "lr_scale": 1.0 / M_WIDTH, "weight_decay": 0.1},
        {"params": gains, "lr_scale": 1.0, "weight_decay": 0.0},
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
    held_out = rows[: n // 50]  # the first 2% of the files
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
# Before its decay, a run does not depend on its length. So the runs of one learning rate
# share a *trunk*. At each T, a copy leaves it and decays: a *branch*.


# %%
class Run:
    """A model in training. curve: (tokens, loss on held-out text)."""

    def __init__(self, batch_size):
        torch.manual_seed(0)
        self.model = GPT()
        self.optimizer = make_optimizer(self.model)
        self.batch_size = batch_size
        self.tokens = 0
        self.curve = []

    def step(self, lr):
        """Update the weights once. Returns the loss of the batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        rows = batch_at(self.tokens, self.batch_size)
        loss = self.model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tokens += self.batch_size * SEQ_LEN
        return loss.detach()

    def train(self, schedule, until, look_every=None):
        """Train to `until` tokens. The learning rate is that of the middle of a step."""
        step_tokens = self.batch_size * SEQ_LEN
        while self.tokens + step_tokens <= until:
            before = self.tokens
            self.step(schedule(before + step_tokens / 2))
            if look_every and self.tokens // look_every > before // look_every:
                self.look()
        return self

    def look(self):
        """Add a point to the curve."""
        self.curve.append((self.tokens, held_out_loss(self.model)))

    def branch(self):
        """A copy that goes its own way. Its curve begins here."""
        branch = copy.deepcopy(self)
        branch.curve = []
        branch.look()
        return branch


def trunk_and_branches(schedule, batch_size, lengths, look_every=None):
    """Train one trunk, and a branch for each length T. -> trunk, {T: branch}"""
    trunk = Run(batch_size)
    branches = {}
    for T in lengths:
        decay_tokens = T // 10
        trunk.train(schedule, T - decay_tokens, look_every)
        branches[T] = trunk.branch()
        branches[T].train(decay(schedule, T, decay_tokens), T, look_every)
        branches[T].look()
    return trunk, branches


# %% [markdown]
# ## A sweep: the best learning rate of every T and batch size
#
# The loss against the learning rate is a *valley*. We try five learning rates, and take
# the lowest point of a parabola through their losses. (A real sweep needs more: fit.py
# takes a cubic and several seeds.)

# %%
BATCHES = (2, 8)  # sequences per step
SWEEP_LENGTHS = LENGTHS[:3]


def vertex(losses):
    """{learning rate: loss} -> the learning rate at the bottom of the valley."""
    x = np.log2(list(losses))
    c2, c1, _ = np.polyfit(x, list(losses.values()), 2)
    return 2 ** (-c1 / (2 * c2))  # where the slope 2 c2 x + c1 is 0


def sweep():
    """-> [(T, beta, best learning rate)], beta in sequences of 4096 tokens"""
    minima = []
    for batch_size in BATCHES:
        losses = {T: {} for T in SWEEP_LENGTHS}
        middle = 0.008 * math.sqrt(batch_size / 8)  # a guess, which the fit corrects
        for lr in (middle / 4, middle / 2, middle, middle * 2, middle * 4):
            schedule = warmup(constant(lr), WARMUP)
            _, branches = trunk_and_branches(schedule, batch_size, SWEEP_LENGTHS)
            for T, branch in branches.items():
                losses[T][lr] = branch.curve[-1][1]
            shown = ", ".join(f"{losses[T][lr]:.3f}" for T in SWEEP_LENGTHS)
            print(f"  batch {batch_size:2d}, lr {lr:.4f}: {shown}", flush=True)
        for T in SWEEP_LENGTHS:
            minima.append((T, batch_size * SEQ_LEN / 4096, vertex(losses[T])))
    return minima


# %% [markdown]
# ## The law
#
# log lr = log a + b log T + q log beta (equation 6 of the paper, where q is 1).


# %%
def fit_law(minima):
    """Least squares -> a, b, q."""
    T, beta, lr = np.array(minima).T
    design = np.stack((np.ones_like(T), np.log(T), np.log(beta)), axis=1)
    (log_a, b, q), *_ = np.linalg.lstsq(design, np.log(lr), rcond=None)
    return math.exp(log_a), b, q


# %% [markdown]
# ## The race
#
# Power puts n where the law has T, so one Power run can end at any length. Every cosine
# is planned for one length. A cosine is below its peak for most of the run, so its peak
# is the learning rate of the law times a factor, which we tune at one length.

# %%
BATCH_SIZE = 8  # of the race


def power_runs(a, b, q):
    """One Power run, and where it ends at all lengths."""
    beta = BATCH_SIZE * SEQ_LEN / 4096
    schedule = warmup(power_law(a, b, beta, lr_max=0.02, q=q), WARMUP)
    return trunk_and_branches(schedule, BATCH_SIZE, LENGTHS, look_every=16_000)


def cosine_run(a, b, q, T, factor):
    """A cosine that knows T."""
    beta = BATCH_SIZE * SEQ_LEN / 4096
    schedule = warmup(cosine(factor * beta**q * a * T**b, T), WARMUP)
    run = Run(BATCH_SIZE).train(schedule, T, look_every=16_000)
    run.look()
    return run


def race(a, b, q):
    trunk, branches = power_runs(a, b, q)
    tried = {}
    for factor in (1, 2, 4):
        tried[factor] = cosine_run(a, b, q, LENGTHS[1], factor).curve[-1][1]
    factor = min(tried, key=tried.get)
    print(f"the best cosine at T = 160k has {factor} times the learning rate of the law")
    cosines = {T: cosine_run(a, b, q, T, factor) for T in LENGTHS}
    return trunk, branches, cosines


def draw(path, trunk, branches, cosines):
    import matplotlib.pyplot as plt

    gray = "#6b6b6b"
    blue = "#0072B2"
    _, ax = plt.subplots(figsize=(6, 4), dpi=150)
    for run in cosines.values():
        ax.plot(*zip(*run.curve), color=gray, linewidth=1, linestyle="--")
        ax.plot(*run.curve[-1], "s", color=gray, markersize=4)
    ax.plot(*zip(*trunk.curve), color=blue, linewidth=1.5)
    for run in branches.values():
        ax.plot(*zip(*run.curve), color=blue, linewidth=2.5)
        ax.plot(*run.curve[-1], "o", color=blue, markersize=5)
    end = branches[LENGTHS[-1]].curve[-1][1]
    ax.set(xlim=(0, 1.07 * LENGTHS[-1]), ylim=(end - 0.1, end + 0.95))
    ax.text(
        LENGTHS[2], end + 0.6, "one Power run (thin)\nand its five decays", color=blue
    )
    ax.text(0, end - 0.08, "  five cosines, planned for five lengths", color=gray)
    ax.set_xticks(LENGTHS[1:], ["160k", "320k", "640k", "1.28M"])
    ax.set(xlabel="tokens", ylabel="loss on held-out text (nats per token)")
    ax.set_title("One Power run can end anywhere", loc="left")
    plt.savefig(path, bbox_inches="tight")


# %%
def main():
    began = time.perf_counter()
    lengths = ", ".join(f"{T // 1000}k" for T in SWEEP_LENGTHS)
    print(f"loss at T = {lengths} tokens")
    a, b, q = fit_law(sweep())
    print(f"the law: best learning rate = {a:.3g} * beta^{q:.2f} * T^{b:.2f}\n")
    trunk, branches, cosines = race(a, b, q)
    cut = cosines[LENGTHS[-1]].curve
    print(f"{'T':>9}   Power   cosine   longest cosine, cut short")
    for T in LENGTHS:
        power_end = branches[T].curve[-1][1]
        cosine_end = cosines[T].curve[-1][1]
        stopped = np.interp(T, *zip(*cut))
        print(f"{T:9,}   {power_end:.3f}   {cosine_end:.3f}    {stopped:.3f}")
    draw("power.png", trunk, branches, cosines)
    print(f"\n{time.perf_counter() - began:.0f} seconds; power.png")


if __name__ == "__main__":
    main()
