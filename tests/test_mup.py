"""muP: every parameter has its rule, each rule is needed, and the best learning rate transfers."""

import math

import pytest
import torch

import mup
from config import GPTConfig, make_config
from model import GPT

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


def test_parameters_without_a_role_are_refused_and_all_named():
    model = GPT(GPTConfig(**TINY))
    model.blocks[0].attn.q_norm = torch.nn.RMSNorm(16)
    table = mup.rules(model.cfg)
    misspelled = mup.ROLES | {"q_norm": "gain", "norm": "gian", "up": "hiden"}
    for roles, parts in ((mup.ROLES, "q_norm"), (misspelled, "up, norm")):
        with pytest.raises(KeyError, match=f"map: {parts};"):
            mup.init_weights(model, table, roles)
        with pytest.raises(KeyError, match=f"map: {parts};"):
            mup.param_groups(model, table, 0, roles)


# -- The coordinate check ----------------------------------------------------------------

BLOCKS = ("attn", "mlp")


def check(spots=BLOCKS, widths=(32, 128), **changed):
    """Slopes of the sizes at the start, and of the changes, with one seed."""

    def model_at(width):
        return mup.our_model(width, **changed)

    slopes = mup.coordinate_check(model_at, spots, widths, seeds=(0,))
    start = {spot: s.start for spot, s in slopes.items()}
    change = {spot: s.change for spot, s in slopes.items()}
    return start, change


@pytest.mark.parametrize("shape", [{}, MOE], ids=["dense", "MoE"])
def test_mup_is_flat(shape):
    spots = (*BLOCKS, "router") if shape else BLOCKS
    start, change = check(spots, mup.WIDTHS, **shape)
    assert set(change) == {*spots, "logits"}
    assert all(abs(slope) <= 0.25 for slope in change.values()), change
    assert all(abs(start[spot]) <= 0.15 for spot in spots), start
    assert -0.7 <= start["logits"] <= -0.2


@pytest.mark.parametrize("base_width", [32, 64])
def test_mup_is_flat_with_the_experts_of_the_laptop_preset(base_width):
    """They are 1.25 times as wide as the model. With one width at all, they would not be."""

    def slope(**fixed) -> float:
        def model_at(width):
            shape = dict(n_layer=2, n_embd=width, n_head=width // 16, **fixed)
            shape |= dict(seq_len=mup.SEQ_LEN, vocab_size=mup.VOCAB_SIZE)
            shape |= dict(base_width=base_width, init_std=0.02, m_emb=1.0)
            cfg = make_config(preset="laptop-moe", total_tokens=10**6, **shape)
            model = GPT(cfg)
            mup.init_weights(model, mup.rules(cfg))
            return model, mup.param_groups(model, mup.rules(cfg), 0.0)

        slopes = mup.coordinate_check(model_at, ["mlp"], (32, 128, 256), seeds=(0,))
        return slopes["mlp"].change

    assert abs(slope()) <= 0.25
    assert slope(n_ffn=160) <= -0.5


def test_standard_parametrization_is_not():
    _, change = check(under_mup=False)
    assert min(change[spot] for spot in BLOCKS) >= 1.5 and change["logits"] >= 0.6


def test_each_rule_is_needed(monkeypatch):
    right = mup.rules

    def check_with(spots, roles, column, **shape):
        """The check, with the rule of the embedding in one column of these roles."""

        def wrong(cfg):
            table = right(cfg)
            value = {column: getattr(table["embedding"], column)}
            return table | {role: table[role]._replace(**value) for role in roles}

        monkeypatch.setattr(mup, "rules", wrong)
        return check(spots, **shape)

    matrices = ("hidden", "branch_out")
    _, change = check_with(BLOCKS, matrices, "lr_scale")
    assert min(change[spot] for spot in BLOCKS) >= 0.7
    start, _ = check_with(BLOCKS, matrices, "init_std")
    assert min(start[spot] for spot in BLOCKS) >= 0.7
    _, change = check_with(["router"], ["router"], "lr_scale", **MOE)
    assert change["router"] >= 0.5
    start, _ = check_with(["router"], ["router"], "init_std", **MOE)
    assert start["router"] >= 0.35
    monkeypatch.setattr(mup, "rules", right)
    _, change = check(logits_scaling=1.0)
    assert change["logits"] >= 0.6


def test_a_model_that_does_not_train_fails_the_check(capsys):
    def frozen(width):
        model, groups = mup.our_model(width)
        return model, [group | {"lr": 0.0} for group in groups]

    slopes = mup.coordinate_check(frozen, BLOCKS, widths=(32, 64), seeds=(0,))
    assert not mup.report("frozen", slopes)
    assert "in attn, mlp, logits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "of_mup, of_standard, status", [(0.1, 2, 0), (-0.3, 2, 1), (0.1, 0.2, 1)]
)
def test_main_expects_that_mup_passes_and_standard_fails(
    of_mup, of_standard, status, monkeypatch
):
    left = [of_mup, of_mup, of_standard]  # dense, MoE, and standard parametrization

    def found(_model_at, spots):
        return {"mlp": mup.Slopes(start=0.0, change=left.pop(0))}

    monkeypatch.setattr(mup, "coordinate_check", found)
    assert mup.main([]) == status
