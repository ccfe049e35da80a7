"""muP, the rules that keep the best learning rate the same at every width.

The paper's Table 1 lists five changes for a model that is m_width times wider. Two of
them, initial weights and learning rates, are the table in `rules`, with a row for each
kind of parameter. The other three are multipliers in model.py, for the embedding, the
residual branches and the attention logits, which we divide by d_head instead of
sqrt(d_head). IBM's code and released models also divide the output logits by m_width.

Standard parametrization is the same table at m_width = 1, with 1 / sqrt(d_head) in
attention.

    python mup.py        run the coordinate check on muP and standard models
"""

import math
import statistics
import sys
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import nn


class Rule(NamedTuple):
    """How to start and train one kind of parameter."""

    init_std: float | None  # standard deviation of initial weights; None for gains, all 1
    lr_scale: float  # multiplier of the schedule's learning rate
    decay: float  # multiplier of weight_decay


def rules(cfg) -> dict[str, Rule]:
    """Table 1 of the paper for a GPTConfig, as role of a parameter -> rule.

    AdamW moves every weight by about its learning rate, whatever the gradient. A hidden
    matrix sums over m_width times more inputs, so one step changes its output m_width
    times as much. We therefore divide its learning rate by m_width. Its initial weights
    are random, and their sum grows like a random walk, so we divide their standard
    deviation by sqrt(m_width). The input of the embedding is one-hot at any width, so we
    divide nothing.
    """
    m = cfg.m_width
    std = cfg.init_std
    hidden_std = std / math.sqrt(m)
    table = {
        #                 init std    lr_scale  decay
        "embedding": Rule(std,        1.0,      1.0),
        "hidden":    Rule(hidden_std, 1.0 / m,  1.0),
        "output":    Rule(hidden_std, 1.0 / m,  1.0),
        "router":    Rule(std / m,    1.0 / m,  1.0),  # as a readout, see below
        "gain":      Rule(None,       1.0,      0.0),
    }  # fmt: skip
    # "output" is not the output head of the model. It is the last matrix of attention or
    # of an MLP, whose result is added to the residual stream. Under Table 1 it is hidden.
    # It has a row because many models also shrink its initial weights with depth, which
    # you would write here.

    # The paper has no rule for the router. IBM's code first used the row "embedding", and
    # later "hidden". In theory it is a readout, as its few outputs do not grow with the
    # width. As hidden, its share of the gradient after a few steps grows with the width m
    # as m^0.4, else as m^0.1 (our measurement).
    if cfg.router_rule != "readout":
        table["router"] = table[cfg.router_rule]
    return table


# Last part of a parameter name -> role. A tied embedding is both input and output. It
# keeps the row of an input, and for the output we divide the logits.
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
    """Draw every parameter by its rule, except for gains, which are 1 already."""
    for name, p in model.named_parameters():
        std = table[role(name)].init_std
        if std is not None:
            p.normal_(0.0, std)


def param_groups(
    model: nn.Module, table: dict[str, Rule], weight_decay: float
) -> list[dict]:
    """One optimizer group per role. Every step multiplies the learning rate by its `lr_scale`.

    A group also has this multiplier as its `lr`. So a scheduler of torch, which multiplies
    the `lr` of every group by one factor, is right if its factor is the learning rate.

    AdamW multiplies the weight decay by the learning rate of the group, so hidden
    matrices decay by lr / m_width * weight_decay.
    """
    groups = {}
    for kind, rule in table.items():
        groups[kind] = {
            "role": kind,
            "params": [],
            "lr": rule.lr_scale,
            "lr_scale": rule.lr_scale,
            "weight_decay": weight_decay * rule.decay,
        }
    for name, p in model.named_parameters():
        groups[role(name)]["params"].append(p)
    return [group for group in groups.values() if group["params"]]  # no router, if dense


# ----------------------------------------------------------------------------------------
# The coordinate check. How far do activations move in four steps of AdamW? Under muP
# equally far at any width, so log change against log width has slope 0. This is necessary
# but not sufficient, since the best learning rate may still move. A missing 1 / d_head
# passes, because d_head is fixed.

WIDTHS = (32, 64, 128, 256)
SPOTS = {  # class of a module -> what we call its output
    "Attention": "attention",
    "MLP": "MLP",
    "MoE": "MLP",
    "Router": "router",
    "GPT": "logits",
}


def config_at(width: int, mup: bool, **changed):
    """The model of the check at one width, with 2 layers and heads of 16. `changed`
    replaces fields."""
    from config import GPTConfig

    shape = dict(n_layer=2, n_embd=width, n_head=width // 16, seq_len=32, vocab_size=64)
    if mup:
        shape["base_width"] = 32
    else:  # standard parametrization: m_width is 1, and attention has 1 / sqrt(d_head)
        shape["base_width"] = width
        shape["attention_multiplier"] = 16**-0.5
    return GPTConfig(**shape | changed)


@torch.no_grad()
def activations(model: nn.Module, idx: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs of the parts in SPOTS, in all blocks, for the tokens idx [B, T]."""
    seen = defaultdict(list)

    def keep(module, _inputs, output):
        spot = SPOTS.get(type(module).__name__)
        if spot == "MLP":
            output, _routing = output
        if spot is not None:
            seen[spot].append(output)

    with nn.modules.module.register_module_forward_hook(keep):
        model(idx)
    return {spot: torch.stack(outputs) for spot, outputs in seen.items()}


def train_a_little(cfg, seed: int, steps: int = 4):
    """Activations before and after a few AdamW steps on one fixed random batch, and the model."""
    from model import GPT

    torch.manual_seed(seed)
    model = GPT(cfg)
    tokens = torch.randint(cfg.vocab_size, (4, cfg.seq_len + 1))
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    groups = param_groups(model, rules(cfg), weight_decay=0.0)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10)
    for group in optimizer.param_groups:
        group["lr"] = 2**-7 * group["lr_scale"]  # about the best at base width

    before = activations(model, inputs)
    for _ in range(steps):
        loss, _routing = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = activations(model, inputs)
    return before, after, model


def coordinate_check(configs: list, seeds=(0, 1, 2)) -> tuple[dict, dict]:
    """Mean |activation| before training, and mean |change|, both {spot: [one per config]}."""
    start = defaultdict(list)
    change = defaultdict(list)
    for cfg in configs:
        starts = defaultdict(list)  # spot -> one tensor per seed
        changes = defaultdict(list)
        for seed in seeds:
            before, after, _model = train_a_little(cfg, seed)
            for spot in before:
                starts[spot].append(before[spot])
                changes[spot].append(after[spot] - before[spot])
        for spot in starts:
            start[spot].append(mean_size(starts[spot]))
            change[spot].append(mean_size(changes[spot]))
    return start, change


def mean_size(tensors: list[torch.Tensor]) -> float:
    """Mean absolute value over all entries of all tensors."""
    return torch.stack(tensors).abs().mean().item()


def slope(sizes: list[float]) -> float:
    """Slope of log2 size against log2 width. 0 is flat, at 1 the size doubles with the width."""
    log_widths = [math.log2(width) for width in WIDTHS]
    log_sizes = [math.log2(size) for size in sizes]
    return statistics.linear_regression(log_widths, log_sizes).slope


def main(argv: list[str] | None = None) -> int:
    from tools import flags

    flags.program_parser("mup.py", __doc__).parse_args(argv)
    experts = dict(n_expert=8, n_expert_active=2)
    models = [  # name, under muP?, fields of its config
        ("muP", True, {}),
        ("muP MoE", True, experts),
        ("standard", False, {}),
    ]
    failed = False
    print(f"{'slope against width':<20} {'start':>6} {'change':>6}")
    for name, mup, fields in models:
        # 1. Measure, at every width
        configs = [config_at(width, mup, **fields) for width in WIDTHS]
        start, change = coordinate_check(configs)
        slopes = []
        for spot in change:
            slopes.append(slope(change[spot]))
            print(f"{name:<9} {spot:<10} {slope(start[spot]):+6.2f} {slopes[-1]:+6.2f}")

        # 2. Compare with what we expect
        if mup:
            claim = "changes are flat"
            holds = all(abs(x) <= 0.25 for x in slopes)
        else:  # or the check could not see a missing rule
            claim = "changes grow with the width"
            holds = max(slopes) >= 0.8
        print(f"{'pass' if holds else 'FAIL'}  {name}: {claim}")
        failed = failed or not holds
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
