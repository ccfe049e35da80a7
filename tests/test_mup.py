"""muP: every parameter has its rule, each rule is needed, and the best learning rate transfers."""

import math
import re

import numpy as np
import pytest
import torch

import data
import mup
import train
from config import make_shape
from model import GPT

TINY = dict(n_layer=2, n_embd=32, n_head=2, seq_len=16, vocab_size=64, base_width=8)
MOE = dict(n_expert=8, n_expert_active=2)


@pytest.mark.parametrize("shape", [{}, dict(tie_embeddings=False), MOE])
def test_the_groups_are_the_model(shape):
    model = GPT(make_shape(**TINY, **shape))
    groups = mup.param_groups(model, mup.rules(model.cfg), weight_decay=0.1)
    grouped = [id(p) for g in groups for p in g["params"]]
    # all, and none twice
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    golden = [
        ("embedding", 1, 0.1),
        ("hidden", 1 / 4, 0.1),
        ("output", 1 / 4, 0.1),
        ("gain", 1, 0),
    ]
    # in this order: a checkpoint numbers the optimizer's parameters by it
    if shape == MOE:
        golden.insert(3, ("router", 1 / 4, 0.1))
    assert [(g["role"], g["lr_scale"], g["weight_decay"]) for g in groups] == golden


@pytest.mark.parametrize("experts", [{}, MOE])
def test_initial_weights_follow_the_table(experts):
    shape = dict(n_layer=8, n_embd=256, n_head=4, n_ffn=64, seq_len=8, vocab_size=999)
    cfg = make_shape(
        **shape, **experts, tie_embeddings=False, base_width=64, init_std=0.1
    )
    torch.manual_seed(0)
    for name, p in GPT(cfg).named_parameters():
        if p.dim() == 1:
            assert (p == 1).all()
            continue
        std = 0.1 if name in ("embed.weight", "head.weight") else 0.05
        assert p.std().item() == pytest.approx(std, rel=0.05)
        assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel())


def test_parameters_without_a_rule_are_refused_and_all_named():
    model = GPT(make_shape(**TINY))
    model.blocks[0].attn.q_norm = torch.nn.RMSNorm(16)
    table = mup.rules(model.cfg)
    misspelt = mup.ROLES | {"q_norm": "gain", "norm": "gian", "up": "hiden"}
    for roles, parts in ((mup.ROLES, "q_norm"), (misspelt, "up, norm")):
        for use in (
            lambda: mup.init_weights(model, table, roles),
            lambda: mup.param_groups(model, table, 0, roles),
        ):
            with pytest.raises(
                KeyError, match=f"map: {parts}; choose from embedding, hidden"
            ):
                use()


BLOCKS = ("attn", "mlp")


def check(**changed):
    """Slopes of the sizes at the start, and of the changes, with one seed."""
    spots = [*BLOCKS, *(["router"] if "n_expert" in changed else [])]
    model_at = lambda width: mup.our_model(width, **changed)
    slopes = mup.coordinate_check(model_at, spots, seeds=(0,))
    start = {spot: s.start for spot, s in slopes.items()}
    change = {spot: s.change for spot, s in slopes.items()}
    return start, change


@pytest.mark.parametrize("shape", [{}, MOE], ids=["dense", "MoE"])
def test_mup_is_flat(shape):
    start, change = check(**shape)
    assert set(change) == {*BLOCKS, "logits", *(["router"] if shape else [])}
    assert all(abs(slope) <= 0.25 for slope in change.values()), change
    assert all(abs(start[spot]) <= 0.15 for spot in start if spot != "logits"), start
    assert -0.7 <= start["logits"] <= -0.2


def change_rules(monkeypatch, change) -> None:
    """From here on, the table has the rows of change(table) in place of its own."""
    rules = mup.rules
    monkeypatch.setattr(mup, "rules", lambda cfg: rules(cfg) | change(cfg, rules(cfg)))


def test_each_rule_is_needed(monkeypatch):
    _, change = check(logits_scaling=1.0)
    assert change["logits"] >= 0.6, change
    with monkeypatch.context() as patch:
        change_rules(patch, lambda cfg, table: {"router": table["embedding"]})
        start, change = check(**MOE)
    assert start["router"] >= 0.35 and change["router"] >= 0.5
    for column in (dict(lr_scale=1.0), dict(init_std=0.02)):  # of the hidden matrices
        roles = ("hidden", "output")
        with monkeypatch.context() as patch:
            change_rules(
                patch, lambda cfg, table: {r: table[r]._replace(**column) for r in roles}
            )
            start, change = check()
        sizes = change if "lr_scale" in column else start
        assert min(sizes[spot] for spot in BLOCKS) >= 0.7, (column, sizes)


def test_a_readout_may_start_at_0(capsys):
    """Then its output has no slope before training, but its change has."""

    def from_0(width):
        model, groups = mup.our_model(width, tie_embeddings=False)
        torch.nn.init.zeros_(model.head.weight)
        return model, groups

    slopes = mup.coordinate_check(from_0, BLOCKS, seeds=(0,))
    assert math.isnan(slopes["logits"].start) and math.isfinite(slopes["logits"].change)
    mup.report("muP", slopes)
    assert "logits                   +nan" in capsys.readouterr().out


def test_a_part_that_does_not_train_fails_the_check(capsys):
    def frozen(width):
        model, groups = mup.our_model(width)
        return model, [group | {"lr": 0.0} for group in groups]

    assert not mup.report("frozen", mup.coordinate_check(frozen, BLOCKS, seeds=(0,)))
    assert "in attn, mlp, logits" in capsys.readouterr().out


def test_a_single_width_has_no_slope():
    with pytest.raises(ValueError, match="at least two"):
        mup.coordinate_check(mup.our_model, BLOCKS, widths=(32,))


def router_share(width: int, steps: int) -> float:
    """Share of the gradient at a layer's input that comes through the router, after some steps."""
    model_at = lambda width: mup.our_model(width, **MOE)
    *_, model = mup.train_a_little(model_at, width, (), 0, steps)
    layer, sizes = model.blocks[0].mlp, []  # of the router, then of the whole layer
    for module in (layer.router, layer):
        module.register_full_backward_hook(
            lambda _m, x, _y: sizes.append(x[0].abs().mean())
        )
    torch.manual_seed(0)
    idx = torch.randint(mup.VOCAB_SIZE, (4, mup.SEQ_LEN + 1))
    model(idx[:, :-1], idx[:, 1:])[0].backward()
    return (sizes[0] / sizes[1]).item()


def test_the_gradient_through_the_router(monkeypatch):
    """The claim in mup.rules: flat at the start as hidden, and after some steps as a readout."""
    slope = lambda steps: mup.slope([router_share(w, steps) for w in mup.WIDTHS])
    assert abs(slope(0)) <= 0.2
    assert 0.25 < slope(4) <= 0.55
    readout = lambda cfg, table: {
        "router": mup.Rule(cfg.init_std / cfg.m_width, 1 / cfg.m_width, 1.0)
    }
    change_rules(monkeypatch, readout)
    assert abs(slope(4)) <= 0.25


def test_main_passes_and_fails_without_mup(capsys, monkeypatch):
    # one seed of three
    monkeypatch.setattr(mup.coordinate_check, "__defaults__", (mup.WIDTHS, (0,)))
    assert mup.main([]) == 0
    verdicts = re.findall(
        r"^(pass|FAIL)  (.*?): .*?( in .*)?$", capsys.readouterr().out, re.M
    )
    assert verdicts == [
        ("pass", "muP", ""),
        ("pass", "muP MoE", ""),
        ("FAIL", "standard", " in attn, mlp, logits"),
    ]
    # a slope of 1, which is right only for the last of the three, and a flat one
    for slope, names in (
        (1.0, "muP, muP MoE"),
        (-0.3, "muP, muP MoE"),
        (0.2, "standard"),
    ):
        slopes = {"mlp": mup.Slopes(start=0.0, change=slope)}
        monkeypatch.setattr(mup, "coordinate_check", lambda *_: slopes)
        assert mup.main([]) == 1
        assert capsys.readouterr().out.endswith(f"unexpected: {names}\n")


# -- What muP is for: the best learning rate of a narrow model is best for a wide model, too

RATES = [2.0**-e for e in (6, 5, 4, 3)]


@pytest.fixture(scope="module")
def short(documents, tmp_path_factory) -> data.Corpus:
    """A corpus of 16 sequences, two batches."""
    folder = tmp_path_factory.mktemp("data") / "short"
    data.prepare(["".join(documents)[:600]], "bytes", folder, val_fraction=0.1)
    return data.open_corpus(folder)


def final_loss(
    corpus: data.Corpus, width: int, lr: float, use_mup=True, **experts
) -> float:
    """Loss after 40 steps of learning the corpus by heart, low at any width if lr is good."""
    changed = dict(vocab_size=256, init_std=0.1, m_emb=10.0) | experts
    shape = vars(mup.config_at(width, use_mup, **changed))
    how = dict(
        schedule="wsd", lr=lr, batch_size=8, total_tokens=40 * 256, warmup_tokens=0, device="cpu",
        decay_tokens=40 * 256, decay_shape="linear", weight_decay=0.0, dtype="float32",
    )  # fmt: skip
    losses = []
    for seed in (0, 1):
        cfg = train.make_config(**shape, **how, seed=seed, data_seed=seed)
        steps = train.training_steps(cfg, train.build(cfg), corpus)
        losses += [loss.item() for _, loss, *_ in steps][-2:]
    return sum(losses) / len(losses)


def best_log2_lr(losses: list[float]) -> float:
    """Vertex of the parabola through the lowest point and its neighbors, in log2."""
    i = int(np.argmin(losses))
    assert 0 < i < len(losses) - 1, (
        f"the best learning rate is at the edge of the grid: {losses}"
    )
    c, b, _ = np.polyfit([-1, 0, 1], losses[i - 1 : i + 2], 2)
    return float(math.log2(RATES[i]) - b / (2 * c))


@pytest.mark.parametrize("widths, n_expert", [((32, 128), 0), ((32, 128), 4)])
def test_the_best_learning_rate_transfers_to_a_wider_model(widths, n_expert, short):
    experts = lambda width: (
        dict(n_expert=4, n_expert_active=2, n_ffn=width) if n_expert else {}
    )
    narrow, wide = ([final_loss(short, width, lr, **experts(width)) for lr in RATES]
                    for width in widths)  # fmt: skip
    assert abs(best_log2_lr(narrow) - best_log2_lr(wide)) < 1
    assert wide[int(np.argmin(narrow))] <= 1.01 * min(wide)
    assert min(wide) <= min(narrow)  # and wider is not worse


def test_under_standard_parametrization_it_does_not_transfer(short):
    narrow = [final_loss(short, 32, lr, use_mup=False) for lr in RATES]
    best = RATES[int(np.argmin(narrow))]
    wide = {lr: final_loss(short, 128, lr, use_mup=False) for lr in (RATES[0], best)}
    assert wide[best] > 2 * wide[RATES[0]]
