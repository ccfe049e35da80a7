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
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
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

    # "output" is not the output head of the model. It is the last matrix of attention or
    # of an MLP, whose result is added to the residual stream. Under Table 1 it is hidden.
    # It has a row because many models also shrink its initial weights with depth, which
    # you would write here.

    # The paper has no rule for the router. IBM's code first trained it as an embedding,
    # and later as a hidden matrix. In theory it is a readout and starts with std / m,
    # because its few outputs do not grow with the width. As hidden, its share of the
    # gradient after a few steps grows as m^0.4, as a readout as m^0.1 (our measurement).
    return {
        #                 init std    lr_scale  decay
        "embedding": Rule(std,        1.0,      1.0),
        "hidden":    Rule(hidden_std, 1.0 / m,  1.0),
        "output":    Rule(hidden_std, 1.0 / m,  1.0),
        "router":    Rule(hidden_std, 1.0 / m,  1.0),
        "gain":      Rule(None,       1.0,      0.0),
    }  # fmt: skip


# Last part of a parameter name -> role. A tied embedding is both input and output. It
# keeps the row of an input, and for the output we divide the logits. docs/mup.md has such
# a map for models of transformers.
ROLES = {
    "embed": "embedding", "head": "embedding",
    "q": "hidden", "k": "hidden", "v": "hidden", "gate": "hidden", "up": "hidden",
    "out": "output", "down": "output",
    "router": "router", "experts_in": "hidden", "experts_out": "output",
    "attn_norm": "gain", "mlp_norm": "gain", "norm": "gain",
}  # fmt: skip


def roles_in(model: nn.Module, table: dict[str, Rule], roles=ROLES) -> dict[str, str]:
    """Role of every parameter, as {'blocks.3.attn.q.weight': 'hidden', ...}.

    The last part of the name of a bias is "bias". Raises KeyError if parameters have no
    role, or one that is not in the table.
    """
    found = {}
    missing = []
    for name, _ in model.named_parameters():
        part = name.removesuffix(".weight").split(".")[-1]
        if roles.get(part) in table:
            found[name] = roles[part]
        elif part not in missing:
            missing.append(part)
    if missing:
        raise KeyError(
            f"parameters without a role in mup.ROLES or your map: {', '.join(missing)}; "
            f"choose from {', '.join(table)}"
        )
    return found


@torch.no_grad()
def init_weights(model: nn.Module, table: dict[str, Rule], roles=ROLES) -> None:
    """Draw every parameter by its rule, except for gains, which are 1 already."""
    role_of = roles_in(model, table, roles)
    for name, p in model.named_parameters():
        std = table[role_of[name]].init_std
        if std is not None:
            p.normal_(0.0, std)


def param_groups(
    model: nn.Module, table: dict[str, Rule], weight_decay: float, roles=ROLES
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
    role_of = roles_in(model, table, roles)
    for name, p in model.named_parameters():
        groups[role_of[name]]["params"].append(p)
    return [group for group in groups.values() if group["params"]]  # no router, if dense


# ----------------------------------------------------------------------------------------
# The coordinate check. How far do activations move in four steps of AdamW? Under muP
# equally far at any width, so log change against log width has slope 0. This is necessary
# but not sufficient, since the best learning rate may still move. A missing 1 / d_head
# passes, because d_head is fixed.
#
# It takes any model, as a function that makes one of a given width. docs/mup.md checks
# models of transformers.

WIDTHS = (32, 64, 128, 256)
VOCAB_SIZE = 64
SEQ_LEN = 32
STEEPEST = 0.25  # slope that still counts as flat


def logits_of(model: nn.Module, idx: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] for the tokens idx [B, T]."""
    output = model(idx)
    return getattr(output, "logits", output)  # a model of transformers returns an object


@torch.no_grad()
def activations(model: nn.Module, idx: torch.Tensor, spots) -> dict[str, torch.Tensor]:
    """The logits for the tokens idx [B, T], and the outputs of the modules called `spots`.

    A module is called by the last part of its name, and we stack the outputs of all blocks.
    """
    names = {module: name.split(".")[-1] for name, module in model.named_modules()}
    seen = {spot: [] for spot in spots}

    def keep(module, _inputs, output):
        if names.get(module) in seen:
            if isinstance(output, tuple):  # with the routing, or with attention weights
                output = output[0]
            seen[names[module]].append(output)

    with nn.modules.module.register_module_forward_hook(keep):
        logits = logits_of(model, idx)
    for spot, outputs in seen.items():
        if not outputs:
            raise ValueError(f"no module is called {spot!r}; see model.named_modules()")
    stacked = {spot: torch.stack(outputs) for spot, outputs in seen.items()}
    return stacked | {"logits": logits}


def train_a_little(model_at, width: int, spots, seed: int, steps: int = 4):
    """Activations before and after a few AdamW steps on one fixed random batch, and the model."""
    torch.manual_seed(seed)
    model, groups = model_at(width)
    model.eval()  # without dropout
    tokens = torch.randint(VOCAB_SIZE, (4, SEQ_LEN + 1))
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-10)
    for group in optimizer.param_groups:
        group["lr"] *= 2**-7  # about the best at base width

    before = activations(model, inputs, spots)
    for _ in range(steps):
        logits = logits_of(model, inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = activations(model, inputs, spots)
    return before, after, model


class Slopes(NamedTuple):
    """How a size depends on the width: not at all if 0, in proportion if 1."""

    start: float  # of the mean |activation| before training
    change: float  # of the mean |change|


def coordinate_check(
    model_at, spots, widths=WIDTHS, seeds=(0, 1, 2)
) -> dict[str, Slopes]:
    """How activations and their changes depend on the width, as spot -> Slopes.

    model_at: width -> a model, and its groups as `param_groups` makes them. The model maps
    tokens [4, 32] from a vocabulary of 64 to logits, or to an object with `logits`.
    spots: last parts of names of modules, whose outputs we compare besides the logits.
    Raises ValueError for a spot that names no module, and for a single width.
    """
    if len(set(widths)) < 2:
        raise ValueError(f"widths {widths}: a slope needs at least two")
    start = defaultdict(list)  # spot -> mean size at every width
    change = defaultdict(list)
    for width in widths:
        starts = defaultdict(list)  # spot -> one tensor per seed
        changes = defaultdict(list)
        for seed in seeds:
            before, after, _model = train_a_little(model_at, width, spots, seed)
            for spot in before:
                starts[spot].append(before[spot])
                changes[spot].append(after[spot] - before[spot])
        for spot in starts:
            start[spot].append(mean_size(starts[spot]))
            change[spot].append(mean_size(changes[spot]))
    return {
        spot: Slopes(slope(start[spot], widths), slope(change[spot], widths))
        for spot in start
    }


def mean_size(tensors: list[torch.Tensor]) -> float:
    """Mean absolute value over all entries of all tensors."""
    return torch.stack(tensors).abs().mean().item()


def slope(sizes: list[float], widths=WIDTHS) -> float:
    """Slope of log2 size against log2 width, by least squares.

    NaN if a size is 0, as at the start of a readout whose initial weights are 0.
    """
    if not all(0 < size < math.inf for size in sizes):
        return math.nan
    log_widths = [math.log2(width) for width in widths]
    log_sizes = [math.log2(size) for size in sizes]
    return statistics.linear_regression(log_widths, log_sizes).slope


def report(name: str, slopes: dict[str, Slopes]) -> bool:
    """Print the slopes, and which changes are not flat. Return True if all are flat."""
    steep = []
    print(f"{name + ' slopes':<24} {'start':>6} {'change':>6}")
    for spot, (start, change) in slopes.items():
        print(f"  {spot:<22} {start:+6.2f} {change:+6.2f}")
        if not abs(change) <= STEEPEST:  # so NaN fails, too
            steep.append(spot)
    if steep:
        print(f"FAIL  {name}: changes depend on the width in {', '.join(steep)}")
    else:
        print(f"pass  {name}: changes are flat")
    return not steep


def config_at(width: int, mup: bool, **changed):
    """Our model of the check at one width, with 2 layers and heads of 16. `changed`
    replaces fields."""
    from config import make_shape

    shape = dict(n_layer=2, n_embd=width, n_head=width // 16)
    shape |= dict(seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    if mup:
        shape["base_width"] = 32
    else:  # standard parametrization: m_width is 1, and attention has 1 / sqrt(d_head)
        shape["base_width"] = width
        shape["attention_multiplier"] = 16**-0.5
    return make_shape(**shape | changed)


def our_model(width: int, mup: bool = True, **changed):
    """Our model at one width, and its groups."""
    from model import GPT

    model = GPT(config_at(width, mup, **changed))
    return model, param_groups(model, rules(model.cfg), weight_decay=0.0)


def main(argv: list[str] | None = None) -> int:
    from tools import flags

    flags.program_parser("mup.py", __doc__).parse_args(argv)
    experts = dict(n_expert=8, n_expert_active=2)
    models = [  # name, spots, under muP?, fields of its config
        ("muP", ["attn", "mlp"], True, {}),
        ("muP MoE", ["attn", "router", "mlp"], True, experts),
        ("standard", ["attn", "mlp"], False, {}),
    ]
    wrong = []
    for name, spots, mup, fields in models:
        model_at = partial(our_model, mup=mup, **fields)
        flat = report(name, coordinate_check(model_at, spots))
        if flat != mup:
            wrong.append(name)
    if wrong:
        print(f"unexpected: {', '.join(wrong)}")
    else:  # if standard passed, the check could not see a missing rule
        print("as expected: muP passes, and standard fails")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
