"""muP in one table that keeps the best learning rate the same at every width.

The paper's Table 1 lists five changes for a model that is m_width times wider. Two of them, initial
weights and learning rates, are the table in `rules`, with a row for each kind of parameter. The
other three are multipliers in model.py: of the embedding, of the residual branches, and of the
attention logits, which are divided by d_head instead of sqrt(d_head). IBM's code and released
models have a fourth: the output logits are divided by m_width.

Standard parametrization is the same table at m_width = 1, with 1 / sqrt(d_head) in attention.

    python mup.py        the coordinate check of standard and muP models: slopes, verdicts, figure
"""

import tools.threads  # noqa: F401, before torch starts its threads

import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from tools.config import fail, program_parser

ROUTER_RULES = ("hidden", "readout", "embedding")


class Rule(NamedTuple):
    init_std: float | None  # standard deviation of the initial weights; None: a gain, all 1
    lr_scale: float  # multiplier of the schedule's learning rate
    decay: float  # multiplier of weight_decay


def rules(cfg) -> dict[str, Rule]:
    """The table, role of a parameter -> its rule: Table 1 of the paper, for a GPTConfig.

    AdamW moves every weight by about its learning rate, whatever the gradient. A hidden matrix sums
    over m_width times more inputs, so one step changes its output m_width times as much. We
    therefore divide its learning rate by m_width. Its initial weights are random, and their sum
    grows like a random walk: divide their standard deviation by sqrt(m_width). The input of the
    embedding is one-hot at any width, so nothing is divided.
    """
    m, std = cfg.m_width, cfg.init_std
    hidden_std = std / math.sqrt(m)
    # Not in the paper's table, but in IBM's code: smaller branches in deeper models (a switch)
    output_std = hidden_std / math.sqrt(2 * cfg.n_layer) if cfg.depth_init else hidden_std
    table = {
        #                 init std    lr_scale  decay
        "embedding": Rule(std,        1.0,      1.0),
        "hidden":    Rule(hidden_std, 1.0 / m,  1.0),
        "output":    Rule(output_std, 1.0 / m,  1.0),
        "router":    Rule(std / m,    1.0 / m,  1.0),  # router_rule "readout"; default: see below
        "gain":      Rule(None,       1.0,      0.0),
    }  # fmt: skip
    # The paper does not say how it treated the router; IBM's code used the embedding's row first,
    # that of hidden matrices later. In theory it is a readout: its few outputs do not grow with the
    # width. As "hidden" it starts flat, but after a few steps a wider model gets more of its
    # gradient through the router (slope +0.4 instead of +0.1).
    if cfg.router_rule != "readout":
        table["router"] = table[cfg.router_rule]
    return table


# The last part of a parameter's name -> its role. A tied embedding is both input and output: it
# keeps the input's row, and the output's share of muP is the division of the logits.
ROLES = {
    "embed": "embedding", "head": "embedding",
    "q": "hidden", "k": "hidden", "v": "hidden", "gate": "hidden", "up": "hidden",
    "out": "output", "down": "output",
    "router": "router", "experts_in": "hidden", "experts_out": "output",
    "attn_norm": "gain", "mlp_norm": "gain", "norm": "gain",
}  # fmt: skip


def role(name: str) -> str:
    """'blocks.3.attn.q.weight' -> 'hidden'. Raises KeyError for a parameter without a rule."""
    part = name.removesuffix(".weight").split(".")[-1]
    if part not in ROLES:
        raise KeyError(f"no rule for {name}: give {part!r} a role in mup.ROLES")
    return ROLES[part]


@torch.no_grad()
def init_weights(model: nn.Module, table: dict[str, Rule]) -> None:
    """Draw every parameter by its rule, on the CPU, so that every device gets the same weights."""
    for name, p in model.named_parameters():
        std = table[role(name)].init_std
        p.copy_(torch.ones(p.shape) if std is None else torch.empty(p.shape).normal_(0.0, std))


def param_groups(model: nn.Module, table: dict[str, Rule], weight_decay: float) -> list[dict]:
    """One optimizer group per role, with the `lr_scale` that the training loop applies:

        for group in optimizer.param_groups: group["lr"] = lr * group["lr_scale"]

    One absolute learning rate for all groups would silently undo muP. AdamW multiplies the weight
    decay by the group's learning rate: hidden matrices decay by lr / m_width * weight_decay.
    """
    members: dict[str, list] = {r: [] for r in table}
    for name, p in model.named_parameters():
        members[role(name)].append(p)
    return [
        dict(role=r, params=members[r], lr_scale=lr_scale, weight_decay=weight_decay * decay)
        for r, (_, lr_scale, decay) in table.items() if members[r]
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The coordinate check: how far do activations move in a few optimizer steps? Under muP equally far
# at any width: log change against log width has slope 0. (That is necessary, not sufficient: the
# best learning rate may still move. The head size is fixed: a missing 1 / d_head goes unnoticed.)

WIDTHS = (32, 64, 128, 256)
HOOKS = ("attention", "MLP", "final norm", "logits")


def check_config(width: int, mup: bool, **changed):
    """The check's model at one width: 2 layers, heads of 16, base width 32."""
    from model import GPTConfig

    standard = {} if mup else dict(base_width=width, attention_multiplier=16**-0.5)
    shape = dict(n_layer=2, n_embd=width, n_head=width // 16, seq_len=32, vocab_size=64)
    return GPTConfig(**dict(base_width=32) | shape | standard | changed)


@torch.no_grad()
def activations(model: nn.Module, idx: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs of each of HOOKS, and of MoE routers, in all blocks for the tokens idx [B, T]."""
    spots = {"attention": [b.attn for b in model.blocks], "MLP": [b.mlp for b in model.blocks]}
    spots |= {"final norm": [model.norm], "logits": [model]}
    if model.cfg.n_expert:
        spots["router"] = [b.mlp.router for b in model.blocks]
    seen: dict[str, list] = {name: [] for name in spots}
    keep = lambda name: lambda _m, _in, y: seen[name].append(y[0] if name == "MLP" else y)
    handles = [m.register_forward_hook(keep(name)) for name in spots for m in spots[name]]
    model(idx)
    for handle in handles:
        handle.remove()
    return {name: torch.stack(outputs) for name, outputs in seen.items()}


def train_a_little(cfg, seed: int, table: dict[str, Rule], lr: float = 2**-7, steps: int = 4):
    """Activations before and after a few AdamW steps on one fixed random batch, and the model."""
    from model import GPT

    torch.manual_seed(seed)
    model = GPT(cfg)
    init_weights(model, table)  # again, from a table that may be broken on purpose
    idx = torch.randint(cfg.vocab_size, (4, cfg.seq_len + 1))
    optimizer = torch.optim.AdamW(param_groups(model, table, 0.0), betas=(0.9, 0.95), eps=1e-10)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    before = activations(model, idx[:, :-1])
    for _ in range(steps):
        model(idx[:, :-1], idx[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, activations(model, idx[:, :-1]), model


def coordinate_check(config_at, rules_at=rules, widths=WIDTHS, seeds=(0, 1, 2)):
    """Mean |activation| at initialization, and mean |change| by training: {hook: [at each width]}.

    config_at: width -> GPTConfig. rules_at: GPTConfig -> table of rules (to break one).
    """
    start, change = {}, {}
    for cfg in map(config_at, widths):
        runs = [train_a_little(cfg, seed, rules_at(cfg)) for seed in seeds]
        mean = lambda size: sum(size(h0, h1).abs().mean().item() for h0, h1, _ in runs) / len(runs)
        for hook in runs[0][0]:
            start.setdefault(hook, []).append(mean(lambda h0, h1: h0[hook]))
            change.setdefault(hook, []).append(mean(lambda h0, h1: h1[hook] - h0[hook]))
    return start, change


def slope(sizes: list[float], widths=WIDTHS) -> float:
    """Least-squares slope of log2 size against log2 width: 0 is flat, 1 doubles with the width."""
    x, y = [math.log2(w) for w in widths], [math.log2(size) for size in sizes]
    mean = sum(x) / len(x)
    return sum((a - mean) * b for a, b in zip(x, y)) / sum((a - mean) ** 2 for a in x)


START = {  # where a slope at initialization should be
    "attention": (-0.15, 0.15), "MLP": (-0.15, 0.15), "router": (-0.15, 0.15),
    "logits": (-0.7, -0.2),  # the head adds m times as many random terms, divided by m: m^-0.5
}  # fmt: skip


def is_flat(start: dict, change: dict) -> bool:
    """Do all changes have slope 0 (within 0.25), and do activations start as START says?"""
    starts = all(low <= slope(start[h]) <= high for h, (low, high) in START.items() if h in start)
    return starts and all(abs(slope(sizes)) <= 0.25 for sizes in change.values())


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("mup.py", __doc__)
    parser.add_argument("--out", type=Path, default=Path("coordinates.png"), help="the figure")
    args = parser.parse_args(argv)
    from tools import figures

    moe = dict(n_expert=8, n_expert_active=2)
    checks = {
        "muP": coordinate_check(lambda width: check_config(width, mup=True)),
        "muP MoE": coordinate_check(lambda width: check_config(width, mup=True, **moe)),
        "standard": coordinate_check(lambda width: check_config(width, mup=False)),
    }
    print("slope of log2 |activation| against log2 width, 32 to 256: at the start, after 4 steps")
    for name, (start, change) in checks.items():
        for hook in change:
            print(f"{name:<9} {hook:<11} {slope(start[hook]):+6.2f} {slope(change[hook]):+6.2f}")
    verdicts = {
        "muP: flat at any width": is_flat(*checks["muP"]),
        "muP MoE: flat at any width": is_flat(*checks["muP MoE"]),
        "standard: changes grow": max(map(slope, checks["standard"][1].values())) >= 0.8,
    }
    for claim, holds in verdicts.items():
        print(f"{'pass' if holds else 'FAIL'}  {claim}")
    try:
        changes = {name: checks[name][1] for name in ("standard", "muP")}
        figures.draw_coordinates(args.out, changes, WIDTHS, slope)
    except OSError as error:
        return fail("mup.py", f"--out {args.out}: {error.strerror}; choose another path")
    print(f"\nfigure: {args.out}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
