"""Maximal update parametrization (muP): one table that makes a learning rate outlive the width.

The paper's Table 1 lists five changes for a model that is m_width times wider. Two of them, initial
values and learning rates, are one table here, with a row per kind of parameter (and a column for
weight decay). The other three are multiplications in `model.py`: of the embedding, of the residual
branches, of the attention logits. A fourth one there, output logits / m_width, is not in the
paper's table but in IBM's code and in every model that they released.

Standard parametrization is the same table at m_width = 1: there is no "if mup" anywhere.

Read `rules`, `init_weights` and `param_groups`; the rest is the coordinate check.

    python mup.py        coordinate check, standard beside muP: slopes, pass or fail, picture
"""

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn


class Rule(NamedTuple):
    init_std: float | None  # standard deviation at the start; None: a gain, it starts at 1
    lr_scale: float  # share of the schedule's learning rate
    decay: float  # share of weight_decay


def rules(cfg) -> dict[str, Rule]:
    """The table: role of a parameter -> its rule. Table 1 of the paper, for a GPTConfig.

    AdamW moves every weight by about its learning rate, whatever the gradient. What a hidden matrix
    puts out is a sum over m_width times more inputs, so a step would change it m_width times as
    much: these matrices get lr / m_width. Their initial values are random and add up like a random
    walk: std / sqrt(m_width). The embedding's input is one-hot at any width: nothing to divide.
    """
    m = cfg.m_width
    hidden_std = cfg.init_std / math.sqrt(m)
    # Not in the paper's table, but in IBM's code: smaller branches for deeper models (a switch).
    output_std = hidden_std / math.sqrt(2 * cfg.n_layer) if cfg.depth_init else hidden_std
    # How the paper's router was treated is not known. IBM's code first gave it the embedding's row,
    # later the hidden matrices'. It has few outputs at any width, as a readout has, and muP's theory
    # would divide those initial values by m: else, after a few steps, more and more of a wider
    # model's gradient comes through the router (slope +0.4 instead of +0.1; it starts flat).
    router = {
        "hidden":    Rule(hidden_std,       1.0 / m, 1.0),
        "readout":   Rule(cfg.init_std / m, 1.0 / m, 1.0),
        "embedding": Rule(cfg.init_std,     1.0,     1.0),
    }  # fmt: skip
    return {
        #                  init std      lr_scale  decay
        "embedding": Rule(cfg.init_std, 1.0,      1.0),
        "hidden":    Rule(hidden_std,   1.0 / m,  1.0),
        "output":    Rule(output_std,   1.0 / m,  1.0),
        "router":    router[cfg.router_rule],
        "gain":      Rule(None,         1.0,      0.0),
    }  # fmt: skip


# The last part of a parameter's name -> its role. The tied embedding is input and output at
# once: it keeps the input's row, and the output's share of muP is the division of the logits.
ROLES = {
    "embed": "embedding", "head": "embedding",
    "q": "hidden", "k": "hidden", "v": "hidden", "gate": "hidden", "up": "hidden",
    "out": "output", "down": "output",
    "router": "router", "experts_in": "hidden", "experts_out": "output",
    "attn_norm": "gain", "mlp_norm": "gain", "norm": "gain",
}  # fmt: skip


def role(name: str) -> str:
    """'blocks.3.attn.q.weight' -> 'hidden'. Raises KeyError where no rule covers the parameter."""
    part = name.removesuffix(".weight").split(".")[-1]
    if part not in ROLES:
        raise KeyError(f"no rule for {name}: give {part!r} a role in mup.ROLES")
    return ROLES[part]


@torch.no_grad()
def init_weights(model: nn.Module, table: dict[str, Rule]) -> None:
    """Draw every parameter from its rule's normal distribution, in the order of the model."""
    for name, p in model.named_parameters():
        std = table[role(name)].init_std
        p.fill_(1.0) if std is None else p.normal_(0.0, std)


def param_groups(model: nn.Module, table: dict[str, Rule], weight_decay: float) -> list[dict]:
    """One optimizer group per role, each with the `lr_scale` that the training loop applies:

        for group in optimizer.param_groups: group["lr"] = lr * group["lr_scale"]

    A single absolute rate for all groups would silently undo muP. AdamW multiplies the decay by
    the group's rate, so hidden matrices decay at lr / m_width * weight_decay.
    """
    members: dict[str, list] = {r: [] for r in table}
    for name, p in model.named_parameters():
        members[role(name)].append(p)
    return [
        {"role": r, "params": members[r], "lr_scale": rule.lr_scale, "weight_decay": weight_decay * rule.decay}
        for r, rule in table.items()
        if members[r]
    ]


def describe(cfg, groups: list[dict]) -> str:
    """The parameter groups as a table to print."""
    lines = [f"{'role':<10} {'tensors':>7} {'parameters':>13} {'init std':>9} {'lr_scale':>9} {'decay':>6}"]
    for g in groups:
        std = rules(cfg)[g["role"]].init_std
        lines.append(
            f"{g['role']:<10} {len(g['params']):7d} {sum(p.numel() for p in g['params']):13,d} "
            f"{'gain 1' if std is None else format(std, '.4f'):>9} {g['lr_scale']:9.4f} {g['weight_decay']:6.2f}"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------
# The coordinate check: make the model wider and see whether activations still move by the same
# amount in a few optimizer steps. Under muP they do, so the slope of log change against log
# width is 0. (Necessary, not sufficient: flat coordinates do not promise that the best learning
# rate transfers. And with the head size fixed it cannot see a missing 1 / d_head.)

WIDTHS = (32, 64, 128, 256)
HOOKS = ("attention", "MLP", "final norm", "logits")


def check_config(width: int, mup: bool):
    """The check's model at one width: 2 layers, heads of 16, base width 32."""
    from model import GPTConfig

    return GPTConfig(
        n_layer=2, n_embd=width, n_head=width // 16, seq_len=32, vocab_size=64,
        base_width=32 if mup else width, attention_multiplier=None if mup else 16**-0.5,
    )  # fmt: skip


def activations(model: nn.Module, idx: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each of HOOKS puts out for the tokens idx [B, T], all blocks of a kind together."""
    seen: dict[str, list] = {name: [] for name in HOOKS}
    spots = [(b.attn, "attention") for b in model.blocks] + [(b.mlp, "MLP") for b in model.blocks] + [(model.norm, "final norm")]
    if model.cfg.n_expert:
        seen["router"] = []
        spots += [(b.mlp.router, "router") for b in model.blocks]
    handles = [
        module.register_forward_hook(lambda _m, _in, out, name=name: seen[name].append(out[0] if name == "MLP" else out))
        for module, name in spots
    ]
    with torch.no_grad():
        seen["logits"].append(model(idx))
    for handle in handles:
        handle.remove()
    return {name: torch.stack(outs) for name, outs in seen.items()}


def train_a_little(cfg, seed: int, table: dict[str, Rule], lr: float = 2**-7, steps: int = 4):
    """Activations before and after a few AdamW steps on one fixed batch of random tokens, and the model."""
    from model import GPT

    torch.manual_seed(seed)
    model = GPT(cfg)
    init_weights(model, table)  # again, from a table that may be broken on purpose
    idx = torch.randint(cfg.vocab_size, (4, cfg.seq_len + 1))
    groups = param_groups(model, table, weight_decay=0.0)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    before = activations(model, idx[:, :-1])
    for _ in range(steps):
        loss, _ = model(idx[:, :-1], idx[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, activations(model, idx[:, :-1]), model


def coordinate_check(config_at, rules_at=rules, widths=WIDTHS, seeds=(0, 1, 2)):
    """Sizes of activations against width -> (at initialization, change by training).

    config_at: width -> GPTConfig. rules_at: GPTConfig -> table of rules (to break one).
    Both results: {hook: [mean |h| at each width, averaged over the seeds]}.
    """
    start: dict[str, list[float]] = {}
    change: dict[str, list[float]] = {}
    for width in widths:
        cfg = config_at(width)
        runs = [train_a_little(cfg, seed, rules_at(cfg)) for seed in seeds]
        for name in runs[0][0]:
            start.setdefault(name, []).append(sum(h0[name].abs().mean().item() for h0, *_ in runs) / len(runs))
            change.setdefault(name, []).append(sum((h1[name] - h0[name]).abs().mean().item() for h0, h1, _ in runs) / len(runs))
    return start, change


def slope(sizes: list[float], widths=WIDTHS) -> float:
    """Least-squares slope of log2 size against log2 width: 0 flat, 1 doubles with the width."""
    x = [math.log2(w) for w in widths]
    y = [math.log2(s) for s in sizes]
    mean = sum(x) / len(x)
    return sum((a - mean) * b for a, b in zip(x, y)) / sum((a - mean) ** 2 for a in x)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mup.py", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("coordinates.png"), help="where the picture goes")
    args = parser.parse_args(argv)

    from model import GPT
    from tools.figures import draw_coordinates

    cfg = check_config(256, mup=True)
    print(f"width 256, base width 32, m_width {cfg.m_width:g}:")
    print(describe(cfg, param_groups(GPT(cfg), rules(cfg), weight_decay=0.1)), "\n")

    start, mup_change = coordinate_check(lambda width: check_config(width, mup=True))
    mixture = lambda width: dataclasses.replace(check_config(width, mup=True), n_expert=8, n_expert_active=2)
    mixture_start, mixture_change = coordinate_check(mixture)
    _, standard_change = coordinate_check(lambda width: check_config(width, mup=False))
    print(f"slope of log2 |activation| against log2 width, {WIDTHS[0]} ... {WIDTHS[-1]}, 3 seeds, 4 steps of AdamW")
    columns = {
        "muP, change": mup_change, "muP, at start": start, "standard, change": standard_change,
        "mixture, change": mixture_change, "mixture, at start": mixture_start,
    }  # fmt: skip
    print(" " * 10, *(f"{column:>17}" for column in columns))
    for name in mixture_change:  # the router is only there
        print(f"{name:<10}", *(f"{slope(sizes[name]):+17.2f}" if name in sizes else " " * 17 for sizes in columns.values()))

    verdicts = {
        "muP: every change is flat (within 0.25)": all(abs(slope(mup_change[h])) <= 0.25 for h in HOOKS),
        "muP: attention and MLP start flat (within 0.15)": all(abs(slope(start[h])) <= 0.15 for h in HOOKS[:2]),
        # 1/m of a sum of m terms that are random at first: m^-0.5, and the loss starts at ln(vocab)
        "muP: logits start smaller when wider (-0.7 to -0.2)": -0.7 <= slope(start["logits"]) <= -0.2,
        "mixture: the same is flat, the router's scores too": all(abs(slope(sizes)) <= 0.25 for sizes in mixture_change.values())
        and all(abs(slope(mixture_start[h])) <= 0.15 for h in ("attention", "MLP", "router")),
        "standard: changes grow with width (by 0.8 or more)": max(slope(standard_change[h]) for h in HOOKS) >= 0.8,
    }
    print()
    for claim, holds in verdicts.items():
        print(f"{'pass' if holds else 'FAIL'}  {claim}")
    try:
        draw_coordinates(args.out, {"standard": standard_change, "muP": mup_change}, WIDTHS, slope)
    except OSError as error:
        print(f"mup.py: cannot write --out {args.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"\npicture: {args.out}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
