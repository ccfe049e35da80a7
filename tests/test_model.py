"""The model against transformers' Granite, the paper's counts, and itself without shortcuts."""

import dataclasses
import random

import pytest
import torch

import model as model_file
from model import GPT, PRESETS, GPTConfig, empty_model, new_model

TINY = dict(n_layer=2, n_embd=32, n_head=4, n_kv_head=2, seq_len=16, vocab_size=50, base_width=16)


def tiny(**changed) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY | changed))
    for p in model.parameters():  # far from the first weights, so that no term is negligible
        p.data.add_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    return model.eval()


# -- an independent oracle -------------------------------------------------------------------------

THEIRS = {  # written out here, not taken from tools/granite.py
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "out": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj", "router": "block_sparse_moe.router",
    "experts_in": "block_sparse_moe.experts.gate_up_proj",
    "experts_out": "block_sparse_moe.experts.down_proj",
}  # fmt: skip


def granite_twin(model: GPT):
    """transformers' Granite, or GraniteMoe, with the same weights."""
    import transformers

    cfg = model.cfg
    kind, experts = "Granite", {}
    if cfg.n_expert:
        kind = "GraniteMoe"
        experts = dict(num_local_experts=cfg.n_expert, num_experts_per_tok=cfg.n_expert_active)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=cfg.n_embd, intermediate_size=cfg.n_ffn, num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head, num_key_value_heads=cfg.n_kv_head,
        vocab_size=cfg.vocab_size, max_position_embeddings=cfg.seq_len, rms_norm_eps=cfg.norm_eps,
        rope_parameters={"rope_theta": cfg.rope_theta, "rope_type": "default"},
        tie_word_embeddings=cfg.tie_embeddings, embedding_multiplier=cfg.m_emb,
        residual_multiplier=cfg.m_res, attention_multiplier=cfg.attention_multiplier,
        logits_scaling=cfg.logits_scaling, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        **experts,
    )  # fmt: skip
    state = {}
    for name, p in model.state_dict().items():
        weight = ".weight" * name.endswith(".weight")
        *where, part = name.removesuffix(weight).split(".")
        layer = f"model.layers.{where[1]}." if where else ""
        state[f"{layer}{THEIRS[part]}{weight}"] = p
    twin = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    missing, unexpected = twin.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    twin.tie_weights()
    return twin


@pytest.mark.parametrize("case", range(12))
def test_logits_equal_transformers_granite(case):
    rng = random.Random(case)
    d_head, kv = rng.choice([8, 16, 64]), rng.choice([1, 2, 3])
    heads, n_expert = kv * rng.choice([1, 2, 4]), rng.randint(2, 10) if case % 3 == 2 else 0
    model = tiny(
        n_expert=n_expert, n_expert_active=rng.randint(min(1, n_expert), n_expert),
        n_layer=rng.randint(1, 3), n_head=heads, n_kv_head=kv, n_embd=heads * d_head,
        n_ffn=8 * rng.randint(2, 25), seq_len=40, vocab_size=rng.randint(20, 300),
        m_emb=rng.uniform(0.5, 12), m_res=rng.uniform(0.1, 1.3),
        base_width=rng.choice([16, 48, 100]),
        attention_multiplier=rng.uniform(0.01, 0.3) if case % 2 else None,
        logits_scaling=rng.uniform(0.5, 9) if case % 3 else None,
        norm_eps=rng.choice([1e-5, 1e-6]), rope_theta=rng.choice([10000.0, 500.0]),
        tie_embeddings=case % 4 > 0,
    )  # fmt: skip
    idx = torch.randint(model.cfg.vocab_size, (3, 40))
    with torch.no_grad():
        ours, theirs = model(idx), granite_twin(model)(idx).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


# -- the paper's sizes -----------------------------------------------------------------------------

COUNTS = {  # parameters, active parameters without the embedding, GFLOP per token
    "12M": (12_329_088, 6_037_632, 0.175), "36M": (36_716_800, 24_133_888, 0.422),
    "121M": (121_668_096, 96_502_272, 1.13), "36M-power": (36_716_800, 24_133_888, 0.422),
    "1B": (1_208_083_968, 1_132_586_496, 8.76), "1B-moe": (1_334_625_280, 378_323_968, 3.18),
    "PowerLM-3B": (3_510_819_072, 3_397_572_864, 23.3),
    "PowerMoE-3B": (3_298_788_864, 807_372_288, 6.50),
}  # fmt: skip


@pytest.mark.parametrize("preset", COUNTS)
def test_parameter_counts(preset):
    cfg, (total, active, gflop) = GPTConfig(**PRESETS[preset]), COUNTS[preset]
    model, untied = empty_model(cfg), empty_model(dataclasses.replace(cfg, tie_embeddings=False))
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


def test_presets_are_the_papers_tables():
    m_widths = {"12M": 0.5, "36M": 1, "121M": 2, "36M-power": 1, "1B": 6, "1B-moe": 4}
    m_widths |= {"PowerLM-3B": 8, "PowerMoE-3B": 6}
    assert set(PRESETS) == {"laptop", "laptop-moe", *m_widths}
    for name, m_width in m_widths.items():
        cfg = GPTConfig(**PRESETS[name])
        assert (cfg.d_head, cfg.seq_len, cfg.vocab_size, cfg.norm_eps) == (64, 4096, 49152, 1e-5)
        assert cfg.m_width == cfg.logits_scaling == m_width
        assert cfg.attention_multiplier == 1 / 64


def test_main_prints_the_table(capsys):
    assert model_file.main([]) == 0
    out = capsys.readouterr().out
    assert "3,510,819,072" in out and all(preset in out for preset in PRESETS)


# -- initial weights -------------------------------------------------------------------------------

MOE = dict(n_expert=4, n_expert_active=2, n_ffn=24)
SHAPES = [{}, dict(tie_embeddings=False), MOE, dict(n_embd=8, vocab_size=3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_new_model_has_the_weights_of_gpt(shape):
    """Built on the meta device, with the same numbers drawn and the same ones left to draw."""
    cfg = GPTConfig(**TINY | shape)
    built = []
    for build in (GPT, new_model):
        torch.manual_seed(3)
        model = build(cfg)
        built.append([*model.parameters(), *model.buffers(), torch.rand(5)])
    assert all(torch.equal(a, b) for a, b in zip(*built, strict=True))


def test_an_empty_model_draws_nothing():
    before = torch.get_rng_state()
    model = empty_model(GPTConfig(**PRESETS["12M"]))
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert torch.equal(torch.get_rng_state(), before)


# -- the model against itself ----------------------------------------------------------------------


def test_no_position_sees_the_future():
    model, idx = tiny(), torch.randint(50, (1, 16))
    changed = idx.clone()
    changed[0, 9] = (idx[0, 9] + 1) % 50
    with torch.no_grad():
        before, after = model(idx), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


def test_chunks_after_a_cache_equal_the_whole():
    model, idx = tiny(), torch.randint(50, (2, 16))
    with torch.no_grad():
        whole, cache = model(idx), [{} for _ in model.blocks]
        parts = [model(part, cache=cache) for part in idx.split([5, 1, 7, 3], dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)
    with pytest.raises(ValueError, match="17 tokens"):
        model(idx[:, :1], cache=cache)


@torch.no_grad()
def dumb_generation(model, idx, n, temperature, top_k=None):
    """Without a cache. The last 16 tokens are read again for every token."""
    for _ in range(n):
        logits = model(idx[:, -16:])[:, -1]
        for row in logits if top_k else ():
            row[row < row.sort().values[-top_k]] = -torch.inf
        p = (logits / (temperature or 1e-9)).softmax(-1)
        new = torch.multinomial(p, 1) if temperature else p.argmax(-1, keepdim=True)
        idx = torch.cat((idx, new), dim=1)
    return idx


HOW = [dict(temperature=0), dict(temperature=1.0), dict(temperature=0.7, top_k=5)]


@pytest.mark.parametrize("how", HOW)
def test_generation_is_the_dumb_loop(how):
    model, prompt = tiny(), torch.randint(50, (3, 4))
    outputs = []
    for generate in (model.generate, lambda *a, **k: dumb_generation(model, *a, **k)):
        torch.manual_seed(1)
        outputs.append(generate(prompt, 40, **how))  # far past the window of 16
    assert outputs[0].shape == (3, 44) and torch.equal(*outputs)


WRONG = [
    (dict(n_head=5), "--n_head 5"), (dict(n_kv_head=3), "--n_kv_head 3"),
    (dict(n_embd=12), "--n_head 4: must divide n_embd 12 into even parts"),
    (dict(n_layer=0), "--n_layer 0"), (dict(init_std=float("nan")), "--init_std nan"),
    (dict(n_expert=4, n_expert_active=5), "--n_expert_active 5: must be at most n_expert 4"),
    (dict(n_expert_active=2), "--n_expert_active 2: must be at most n_expert 0"),
    (dict(n_expert=4), "--n_expert 4: needs n_expert_active"),
    (dict(n_expert=4, n_expert_active=2, n_ffn=20), "--n_ffn 20: must be a multiple of 8"),
]  # fmt: skip


@pytest.mark.parametrize("shape, message", WRONG)
def test_impossible_shapes_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**TINY | shape)
