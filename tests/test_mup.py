"""muP: every parameter has its rule, each rule is needed, and docs/mup.md is right."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

import mup
from config import GPTConfig
from model import GPT

PAGE = (Path(__file__).parent.parent / "docs/mup.md").read_text(encoding="utf-8")
TINY = dict(n_layer=2, n_embd=32, n_head=2, seq_len=16, vocab_size=64, base_width=8)
MOE = dict(n_expert=8, n_expert_active=2)

# -- The table ---------------------------------------------------------------------------


def test_the_groups_have_every_parameter_once_with_its_role():
    model = GPT(GPTConfig(**TINY | dict(n_layer=1), **MOE))
    left = {id(p): name.removesuffix(".weight") for name, p in model.named_parameters()}
    found = []
    for group in mup.param_groups(model, mup.rules(model.cfg), weight_decay=0.1):
        names = [left.pop(id(p)).split(".")[-1] for p in group["params"]]
        rule = (group["role"], group["lr_scale"], group["weight_decay"])
        found.append((*rule, " ".join(names)))
    assert left == {}
    # in this order, because a checkpoint numbers the optimizer's parameters by it
    assert found == [
        ("embedding", 1, 0.1, "embed"),
        ("hidden", 1 / 4, 0.1, "q k v experts_in"),
        ("branch_out", 1 / 4, 0.1, "out experts_out"),
        ("router", 1 / 4, 0.1, "router"),
        ("gain", 1, 0, "attn_norm mlp_norm norm"),
    ]


def test_initial_weights_follow_the_table():
    shape = dict(n_layer=4, n_embd=256, n_head=4, n_ffn=64, seq_len=8, vocab_size=999)
    shape |= dict(tie_embeddings=False, base_width=64, init_std=0.1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape, **MOE))
    mup.init_weights(model, mup.rules(model.cfg))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == 1).all()
            continue
        std = 0.1 if name in ("embed.weight", "head.weight") else 0.05
        assert p.std().item() == pytest.approx(std, rel=0.05)
        assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel())


def test_parameters_without_a_rule_are_refused():
    model = GPT(GPTConfig(**TINY))
    model.blocks[0].attn.q_norm = torch.nn.RMSNorm(16)
    table = mup.rules(model.cfg)
    with pytest.raises(KeyError, match="q_norm"):
        mup.init_weights(model, table)
    with pytest.raises(KeyError, match="q_norm"):
        mup.param_groups(model, table, weight_decay=0)


# -- The coordinate check ----------------------------------------------------------------

BLOCKS = ["attn", "mlp"]


def test_an_moe_is_flat():
    model_at = partial(mup.our_model, **MOE)
    assert mup.coordinate_check("muP", model_at, [*BLOCKS, "router"], widths=(32, 128))


@pytest.mark.parametrize("column", ["lr_scale", "init_std"])
@pytest.mark.parametrize("roles, spots, shape", [
    (["hidden", "branch_out"], BLOCKS, {}), (["router"], ["router"], MOE),
])  # fmt: skip
def test_each_rule_is_needed(column, roles, spots, shape, monkeypatch, capsys):
    """With the rule of the embedding in a column of these roles."""
    right = mup.rules

    def wrong(cfg):
        table = right(cfg)
        value = {column: getattr(table["embedding"], column)}
        return table | {role: table[role]._replace(**value) for role in roles}

    monkeypatch.setattr(mup, "rules", wrong)
    model_at = partial(mup.our_model, **shape)
    assert not mup.coordinate_check("wrong", model_at, spots, widths=(32, 256))
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if "NOT FLAT" in line} >= set(spots)


def test_logits_need_their_divisor():
    model_at = partial(mup.our_model, logits_scaling=1.0)
    assert not mup.coordinate_check("wrong", model_at, [], widths=(32, 256))


def test_main_passes_and_fails_if_a_rule_is_missing(monkeypatch):
    short = partial(mup.coordinate_check, widths=(32, 128))
    monkeypatch.setattr(mup, "coordinate_check", short)
    assert mup.main() == 0
    right = mup.rules
    missing = {"hidden": mup.Rule(0.02, 1.0, 1.0)}
    monkeypatch.setattr(mup, "rules", lambda cfg: right(cfg) | missing)
    assert mup.main() == 1


# -- docs/mup.md -------------------------------------------------------------------------


@torch.no_grad()
def test_the_page_runs_and_shows_what_it_prints(monkeypatch, capsys):
    # 1. Its blocks, with fewer widths, which change the numbers a little
    short = partial(mup.coordinate_check, widths=(32, 128))
    monkeypatch.setattr(mup, "coordinate_check", torch.enable_grad()(short))
    names = {}
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)), names)
    shown = "".join(re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S))
    printed = capsys.readouterr().out
    number = r"[+-]\d\.\d\d"
    assert re.sub(number, "N", printed) == re.sub(number, "N", shown)

    # 2. A Llama with the multipliers is a Granite
    shape = names["shape"](64)
    granite = transformers.GraniteForCausalLM(
        transformers.GraniteConfig(
            **shape,
            attention_multiplier=1 / 16,
            logits_scaling=3.0,
            embedding_multiplier=5.0,
            residual_multiplier=0.3,
        )
    )
    for p in granite.parameters():
        p.add_(0.2 * torch.randn_like(p))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    llama.load_state_dict(granite.state_dict())  # the same names
    names["add_multipliers"](llama, m_width=3.0, m_emb=5.0, m_res=0.3)
    idx = torch.arange(40).view(2, 20)
    expected = granite.eval()(idx).logits
    torch.testing.assert_close(llama.eval()(idx).logits, expected, rtol=1e-4, atol=1e-5)
