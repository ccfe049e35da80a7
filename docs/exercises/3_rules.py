"""Exercise 3, the table of muP: write `rules`.

A Rule has init_std, lr_scale and wd_scale (the share of the weight decay). "branch_out" is
the last matrix of attention or of the MLP, and hidden, as the router is. "gain" is the
scale of a norm: it starts at 1, so its init_std is None. Only matrices have weight decay.
"""

from types import SimpleNamespace

import torch
from pytest import approx
from torch import nn

from mup import Rule

BASE_WIDTH = 64


def rules(cfg):
    """-> {role: Rule} of "embedding", "hidden", "branch_out", "router" and "gain".

    cfg.m_width is the width over the base width, where the initial standard deviation of
    all matrices is cfg.init_std.
    """
    example = Rule(init_std=cfg.init_std, lr_scale=1.0, wd_scale=1.0)
    raise NotImplementedError(f"write rules, each of them as {example}")


def rules_at(m_width):
    return rules(SimpleNamespace(m_width=m_width, init_std=0.1))


def start_and_change(rule, width):
    """The size of a matrix's outputs, and how far one step of AdamW moves them."""
    torch.manual_seed(0)
    matrix = nn.Linear(width, width, bias=False)
    nn.init.normal_(matrix.weight, std=rule.init_std)
    optimizer = torch.optim.AdamW(matrix.parameters(), lr=0.01 * rule.lr_scale)
    inputs = torch.randn(256, width).sign()
    start = matrix(inputs)
    start[0].sum().backward()
    optimizer.step()
    change = matrix(inputs[0]) - start[0]
    return start.std().item(), change.abs().mean().item()


def test_nothing_changes_at_the_base_width():
    table = rules_at(1)
    for role in ("embedding", "hidden", "branch_out", "router"):
        assert table[role] == Rule(approx(0.1), approx(1.0), 1.0), role


def test_outputs_start_and_change_alike_at_every_width():
    """And the weight decay stays, because AdamW multiplies it by the learning rate."""
    for role in ("hidden", "branch_out", "router"):
        start, change = start_and_change(rules_at(1)[role], BASE_WIDTH)
        for m in (4, 16):
            wide = start_and_change(rules_at(m)[role], m * BASE_WIDTH)
            assert wide[0] / start == approx(1, rel=0.25), f"init_std of {role}"
            assert wide[1] / change == approx(1, rel=0.25), f"lr_scale of {role}"
        assert rules_at(16)[role].wd_scale == 1.0, f"wd_scale of {role}"


def test_the_embedding_and_the_gains_do_not_depend_on_the_width():
    """An embedding reads one token, so it adds up nothing."""
    table = rules_at(8)
    assert table["embedding"] == Rule(0.1, 1.0, 1.0)
    assert table["gain"] == Rule(None, 1.0, 0.0)
