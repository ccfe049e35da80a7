"""The model against the paper's counts, and itself without shortcuts. See also test_granite.py."""

import dataclasses

import pytest
import torch

from config import make_config, make_shape
from model import GPT, empty_model

TINY = dict(
    n_layer=2, n_embd=32, n_head=4, n_kv_head=2, seq_len=16, vocab_size=50, base_width=16
)


def tiny(**changed) -> GPT:
    torch.manual_seed(0)
    model = GPT(make_shape(**TINY | changed))
    for (
        p
    ) in model.parameters():  # far from the first weights, so that no term is negligible
        p.data.add_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    return model.eval()


PAPER = {  # m_width, parameters, active parameters without the embedding, GFLOP per token
    "12M": (0.5, 12_329_088, 6_037_632, 0.175), "36M": (1, 36_716_800, 24_133_888, 0.422),
    "121M": (2, 121_668_096, 96_502_272, 1.13), "36M-power": (1, 36_716_800, 24_133_888, 0.422),
    "1B": (6, 1_208_083_968, 1_132_586_496, 8.76),
    "1B-moe": (4, 1_334_625_280, 378_323_968, 3.18),
    "PowerLM-3B": (8, 3_510_819_072, 3_397_572_864, 23.3),
    "PowerMoE-3B": (6, 3_298_788_864, 807_372_288, 6.50),
}  # fmt: skip


@pytest.mark.parametrize("preset", PAPER)
def test_presets_are_the_papers_tables(preset):
    cfg, (m_width, total, active, gflop) = make_config(preset=preset), PAPER[preset]
    assert (cfg.d_head, cfg.seq_len, cfg.vocab_size, cfg.norm_eps) == (
        64,
        4096,
        49152,
        1e-5,
    )
    assert (
        cfg.m_width == cfg.logits_scaling == m_width
        and cfg.attention_multiplier == 1 / 64
    )
    model, untied = (
        empty_model(cfg),
        empty_model(dataclasses.replace(cfg, tie_embeddings=False)),
    )
    attention = 2 * cfg.n_embd**2 + 2 * cfg.n_embd * cfg.n_kv_head * 64
    rest = attention + cfg.n_expert * cfg.n_embd + 2 * cfg.n_embd  # router and norms
    layer = lambda experts: rest + experts * 3 * cfg.n_embd * cfg.n_ffn
    embedding = cfg.vocab_size * cfg.n_embd
    layers = cfg.n_layer * layer(cfg.n_expert or 1)
    assert model.n_params() == total == layers + embedding + cfg.n_embd
    assert active == cfg.n_layer * layer(cfg.n_expert_active or 1) + cfg.n_embd
    assert model.n_active_params() == untied.n_active_params() == active + embedding
    assert model.flops_per_token() == untied.flops_per_token()
    assert model.flops_per_token() / 1e9 == pytest.approx(gflop, rel=0.005)


def test_samples_are_among_the_top_k():
    model, idx = tiny(), torch.randint(50, (64, 9))
    with torch.no_grad():
        likeliest = model(idx)[:, -1].topk(3).indices
        new = torch.stack(
            [model.generate(idx, 1, top_k=3)[:, -1] for _ in range(20)], dim=1
        )
    assert all(
        set(some.tolist()) <= set(top.tolist()) for some, top in zip(new, likeliest)
    )
    assert (new != likeliest[:, :1]).any() and (new != new[:, :1]).any()


@torch.no_grad()
def test_a_text_slides_through_the_window():
    """Greedy text that ends below, at and beyond seq_len, which is 16."""
    model = tiny(tie_embeddings=False)  # tied, it repeats one token
    for start, n in ((1, 0), (9, 7), (1, 40), (20, 5)):
        text = torch.randint(50, (3, start))
        idx = text
        for _ in range(n):
            window = idx if idx.shape[1] <= 16 else idx[:, -16:]
            idx = torch.cat((idx, model(window)[:, -1:].argmax(-1)), dim=1)
        assert torch.equal(model.generate(text, n, temperature=0), idx), (start, n)


def test_more_tokens_than_seq_len_are_refused():
    with pytest.raises(ValueError, match="17 tokens"):
        tiny()(torch.zeros(1, 17, dtype=torch.long))
