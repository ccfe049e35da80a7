"""muP: every parameter has its rule, and each rule is needed."""

import math

import pytest
import torch
import torch.nn.functional as F

import mup
from model import GPT, GPTConfig

TINY = dict(n_layer=2, n_embd=32, n_head=2, seq_len=16, vocab_size=64, base_width=8)


def test_which_parameter_is_in_which_group():
    block = {
        "attn_norm.weight": "gain", "attn.q.weight": "hidden", "attn.k.weight": "hidden", "attn.v.weight": "hidden",
        "attn.out.weight": "output", "mlp_norm.weight": "gain", "mlp.gate.weight": "hidden", "mlp.up.weight": "hidden",
        "mlp.down.weight": "output",
    }  # fmt: skip
    golden = {"embed.weight": "embedding", "norm.weight": "gain", "head.weight": "embedding"}
    golden |= {f"blocks.{i}.{name}": role for i in (0, 1) for name, role in block.items()}
    model = GPT(GPTConfig(**TINY, tie_embeddings=False))
    assert {name: mup.role(name) for name, _ in model.named_parameters()} == golden


def test_the_groups_are_the_model():
    for tied in (True, False):
        model = GPT(GPTConfig(**TINY, tie_embeddings=tied))
        groups = mup.param_groups(model, mup.rules(model.cfg), weight_decay=0.1)
        grouped = [id(p) for g in groups for p in g["params"]]
        assert sorted(grouped) == sorted(id(p) for p in model.parameters())  # all, and none twice
        assert {g["role"]: (g["lr_scale"], g["weight_decay"]) for g in groups} == {
            "embedding": (1, 0.1), "hidden": (1 / 4, 0.1), "output": (1 / 4, 0.1), "gain": (1, 0),
        }  # fmt: skip


def test_initial_weights_follow_the_table():
    for depth_init in (False, True):
        cfg = GPTConfig(n_layer=8, n_embd=256, n_head=4, seq_len=8, vocab_size=1000, base_width=64, init_std=0.1, depth_init=depth_init)
        torch.manual_seed(0)
        for name, p in GPT(cfg).named_parameters():
            if p.dim() == 1:
                assert (p == 1).all()
                continue
            std = {"embedding": 0.1, "hidden": 0.05, "output": 0.05 / (4 if depth_init else 1)}[mup.role(name)]
            assert p.std().item() == pytest.approx(std, rel=0.02)
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel())


def test_a_parameter_without_a_rule_is_refused():
    model = GPT(GPTConfig(**TINY))
    model.blocks[0].attn.q_norm = torch.nn.RMSNorm(16)
    for use in (lambda: mup.init_weights(model, mup.rules(model.cfg)), lambda: mup.param_groups(model, mup.rules(model.cfg), 0)):
        with pytest.raises(KeyError, match="no rule for blocks.0.attn.q_norm.weight"):
            use()


def test_standard_parametrization_is_the_table_at_width_one():
    for rule in mup.rules(GPTConfig(**TINY | {"base_width": 32})).values():
        assert rule.lr_scale == 1 and rule.init_std in (None, 0.02)


# -- the coordinate check, and each rule removed --------------------------------------------------

BLOCKS = ("attention", "MLP")


def check(mup_config=True, rules_at=mup.rules, **changed):
    def config_at(width):
        cfg = mup.check_config(width, mup_config)
        return GPTConfig(**{f: getattr(cfg, f) for f in cfg.__dataclass_fields__} | changed)

    start, change = mup.coordinate_check(config_at, rules_at)
    return {h: mup.slope(s) for h, s in start.items()}, {h: mup.slope(s) for h, s in change.items()}


def without(field, value):
    """The table with one column overwritten for the hidden matrices."""
    return lambda cfg: {
        role: rule._replace(**{field: value}) if role in ("hidden", "output") else rule for role, rule in mup.rules(cfg).items()
    }


def test_mup_is_flat():
    start, change = check()
    assert all(abs(slope) <= 0.25 for slope in change.values()), change
    assert all(abs(start[hook]) <= 0.15 for hook in BLOCKS), start
    assert -0.7 <= start["logits"] <= -0.2


def test_standard_parametrization_is_not():
    _, change = check(mup_config=False)
    assert max(change.values()) >= 0.8, change


def test_without_dividing_the_logits():
    _, change = check(logits_scaling=1.0)
    assert change["logits"] >= 0.6, change


def test_without_dividing_the_learning_rate():
    _, change = check(rules_at=without("lr_scale", 1.0))
    assert max(change[hook] for hook in BLOCKS) >= 0.6, change


def test_without_dividing_the_initial_weights():
    start, _ = check(rules_at=without("init_std", 0.02))
    assert min(start[hook] for hook in BLOCKS) >= 0.7, start


def test_attention_logits_are_divided_by_the_head_size():
    """The coordinate check cannot see this rule at a fixed head size: softmax written out instead."""
    cfg = GPTConfig(**TINY)
    torch.manual_seed(0)
    model = GPT(cfg).double()
    attn, x = model.blocks[0].attn, torch.randn(1, 5, 32, dtype=torch.float64)
    plain = torch.ones(5, 1, 16, dtype=torch.float64), torch.zeros(5, 1, 16, dtype=torch.float64)  # no rotation
    for p in attn.parameters():
        p.data.mul_(20)  # so that the softmax is far from flat
    heads = []
    for h in range(2):
        q, k, v = (F.linear(x[0], w.weight[16 * h : 16 * h + 16]) for w in (attn.q, attn.k, attn.v))
        rows = [torch.softmax(torch.stack([q[t] @ k[s] / 16 for s in range(t + 1)]), 0) @ v[: t + 1] for t in range(5)]
        heads.append(torch.stack(rows))
    expected = F.linear(torch.cat(heads, dim=-1), attn.out.weight)
    assert torch.allclose(attn(x, plain)[0], expected, rtol=1e-12)
    # aligned queries and keys grow like d_head: with 1 / d_head their product stays put
    for d_head in (4, 16, 64):
        wide = GPTConfig(**TINY | {"n_embd": 2 * d_head})
        aligned = torch.ones(d_head, dtype=torch.float64)
        assert wide.attention_multiplier * (aligned @ aligned) == 1


def test_main_passes_and_draws(tmp_path, capsys, monkeypatch):
    assert mup.main(["--out", str(tmp_path / "c.png")]) == 0
    out = capsys.readouterr().out
    assert out.count("pass  ") == 5 and "FAIL" not in out and (tmp_path / "c.png").stat().st_size > 10_000
    monkeypatch.setattr(mup, "check_config", lambda width, mup: check_config(width, False))  # muP switched off
    assert mup.main(["--out", str(tmp_path / "c.png")]) == 1
    assert "FAIL" in capsys.readouterr().out


check_config = mup.check_config
