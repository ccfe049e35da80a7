"""The mixture of experts against a deliberately dumb loop, against transformers, and under muP."""

import dataclasses
import json
import math
import random

import pytest
import torch
from test_model import TINY, granite_twin
from test_model import tiny as tiny_model

import eval as evaluation
import model as model_file
import moe
import mup
import train
from model import GPT, PRESETS, GPTConfig


def layer_of(n_embd=16, n_ffn=8, n_expert=4, k=2, dtype=torch.float64, seed=0) -> moe.MoE:
    torch.manual_seed(seed)
    layer = moe.MoE(GPTConfig(**TINY | dict(n_embd=n_embd, n_head=1, n_kv_head=1, n_ffn=n_ffn, n_expert=n_expert, n_expert_active=k)))
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return layer.to(dtype)


def gradients(y, *tensors):
    return torch.autograd.grad(y, tensors, torch.ones_like(y) if y.dim() == 0 else torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))


# -- the layer -------------------------------------------------------------------------------------


def dumb(router, experts_in, experts_out, k, x):
    """Token by token, expert by expert, formula by formula."""
    outputs = []
    for token in x:
        scores = [row @ token for row in router]
        chosen = sorted(range(len(scores)), key=lambda e: -scores[e].item())[:k]
        total = sum(scores[e].exp() for e in chosen)
        y = 0
        for e in chosen:
            M = experts_in.shape[1] // 2
            gate, up = experts_in[e, :M] @ token, experts_in[e, M:] @ token
            y = y + scores[e].exp() / total * (experts_out[e] @ (gate / (1 + (-gate).exp()) * up))
        outputs.append(y)
    return torch.stack(outputs)


def compare_with_dumb(layer: moe.MoE, x: torch.Tensor) -> None:
    tensors = [x, layer.router.weight, layer.experts_in, layer.experts_out]
    expected = dumb(*tensors[1:], layer.k, x)
    y, _ = layer(x)
    assert (y - expected).abs().max() <= 1e-12
    for ours, theirs in zip(gradients(y, *tensors), gradients(expected, *tensors)):
        assert (ours - theirs).abs().max() <= 1e-9
    assert torch.allclose(moe.one_by_one(layer, x), expected, atol=1e-12)


@pytest.mark.parametrize("case", range(10))
def test_layer_is_the_dumb_loop(case):
    rng = random.Random(case)
    n_expert = rng.randint(1, 8)
    k = (1, n_expert, rng.randint(1, n_expert))[case % 3]
    layer = layer_of(8 * rng.randint(1, 4), 8 * rng.randint(1, 4), n_expert, k, seed=case)
    compare_with_dumb(layer, torch.randn(rng.choice([1, 2, 17, 40]), layer.router.in_features, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_empty_experts_and_one_that_takes_everything(k):
    layer = layer_of(n_expert=6, k=k)
    x = torch.randn(20, 16, dtype=torch.float64)
    x[:, 0] = 1
    with torch.no_grad():
        layer.router.weight[:k, 0] = torch.tensor([40.0, 30.0, 20.0])[:k]  # so all tokens choose the same k
    compare_with_dumb(layer, x.requires_grad_())
    y, routing = layer(x)
    assert routing.load.tolist() == [1 / k] * k + [0] * (6 - k)
    for grad in gradients(y, layer.experts_in, layer.experts_out):
        assert (grad[k:] == 0).all() and (grad[:k] != 0).any(-1).any(-1).all()


def test_grouped_products_are_the_loop():
    layer = layer_of(n_expert=6, k=3, dtype=torch.float32)
    x = torch.randn(4, 7, 16, requires_grad=True)
    results = [(y, *gradients(y, x, *layer.parameters())) for y in (layer(x, way)[0] for way in (moe.grouped, moe.loop))]
    assert results[0][0].shape == x.shape
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results))


def test_the_router_keeps_float32_where_the_rest_is_bfloat16():
    layer = layer_of(dtype=torch.float32)
    x = torch.randn(50, 16)
    scores, expected = x @ layer.router.weight.T, moe.one_by_one(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.router(x), scores)
        for way in (moe.grouped, moe.loop):
            y, routing = layer(x, way)
            assert y.dtype == torch.float32 == routing.aux_loss.dtype
            assert (y - expected).abs().max() <= 0.02 * expected.abs().max()
    half = layer.bfloat16()
    assert half.router(x.bfloat16()).dtype == torch.float32 and half(x.bfloat16())[0].dtype == torch.bfloat16


def test_repeats_are_bit_identical():
    layer = layer_of(32, 16, 8, 3, dtype=torch.float32)
    x = torch.randn(300, 32, requires_grad=True)
    results = []
    for _ in range(2):
        y, routing = layer(x)
        results.append([y, *routing, *gradients(y, x, *layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_to_one_graph_that_new_routing_does_not_change():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    layer = layer_of(n_expert=5, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: layer(x, moe.grouped), fullgraph=True, backend=counter)
    for scale in (1, 3, 10):
        x = (scale * torch.randn(12, 16) + torch.randn(16)).bfloat16().requires_grad_()
        results = []
        for y, routing in (compiled(x), layer(x, moe.grouped)):
            results.append([y, *routing, *torch.autograd.grad([y, routing.aux_loss], [x, *layer.parameters()], [torch.ones_like(y).clone(), None])])
        assert all(torch.equal(a, b) for a, b in zip(*results))
    assert counter.frame_count == 1

    layer.float()  # on a CPU the loop runs between two graphs, and different groups do not make new ones
    counter = CompileCounterWithBackend("aot_eager")
    compiled, counts = torch.compile(layer, backend=counter), []
    for _ in range(3):
        x = torch.randn(12, 16)
        assert torch.allclose(compiled(x)[0], layer(x)[0], atol=1e-6)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


# -- the auxiliary loss ----------------------------------------------------------------------------


def test_auxiliary_loss_is_its_formula():
    layer = layer_of(n_expert=5, k=2)
    x = torch.randn(30, 16, dtype=torch.float64, requires_grad=True)
    y, routing = layer(x)
    P, f, z, entropy = [0] * 5, [0] * 5, 0, 0
    for token in x:
        scores = [row @ token for row in layer.router.weight]
        Z = sum(s.exp() for s in scores)
        z = z + Z.log() ** 2 / 30
        for e in range(5):
            p = scores[e].exp() / Z
            P[e], entropy = P[e] + p / 30, entropy - (p * p.log()).item() / 30
        for e in sorted(range(5), key=lambda e: -scores[e].item())[:2]:
            f[e] += 1 / 60  # a number: no gradient goes through it
    naive = 5 * sum(p * share for p, share in zip(P, f)) + 0.1 * z
    assert routing.aux_loss.item() == pytest.approx(naive.item(), abs=1e-9)
    assert routing.load.tolist() == pytest.approx(f, abs=1e-9) and routing.entropy.item() == pytest.approx(entropy, abs=1e-9)
    tensors = (x, layer.router.weight)
    for ours, theirs in zip(gradients(routing.aux_loss, *tensors), gradients(naive, *tensors)):
        assert (ours - theirs).abs().max() <= 1e-9
    assert not routing.load.requires_grad and not routing.entropy.requires_grad
    assert torch.autograd.grad(routing.aux_loss, layer.experts_in, allow_unused=True) == (None,)


def test_balanced_routing_costs_one():
    scores = torch.eye(4, dtype=torch.float64).repeat(3, 1) * 2
    scores -= scores.logsumexp(-1, keepdim=True)  # so that the second term is 0
    routing = moe.routing(scores, torch.tensor([3, 6, 9, 12], dtype=torch.int32))
    assert routing.aux_loss.item() == pytest.approx(1, abs=1e-12) and routing.load.tolist() == [0.25] * 4


# -- in the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(4))
def test_logits_equal_transformers_granite_moe(case):
    rng = random.Random(case)
    n_expert = rng.randint(2, 10)
    model = tiny_model(
        n_layer=rng.randint(1, 3), n_ffn=8 * rng.randint(1, 8), n_expert=n_expert, n_expert_active=rng.randint(1, n_expert),
        m_emb=rng.uniform(0.5, 12), m_res=rng.uniform(0.1, 1.3), logits_scaling=rng.uniform(0.5, 9), tie_embeddings=case > 0,
    )  # fmt: skip
    idx = torch.randint(model.cfg.vocab_size, (3, 16))
    with torch.no_grad():
        ours, theirs = model(idx), granite_twin(model)(idx).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize(
    "preset, total, active, gflop", [("1B-moe", 1_334_625_280, 378_323_968, 3.18), ("PowerMoE-3B", 3_298_788_864, 807_372_288, 6.50)]
)
def test_counts(preset, total, active, gflop):
    cfg = GPTConfig(**PRESETS[preset])
    with torch.device("meta"):
        model, untied = GPT(cfg), GPT(dataclasses.replace(cfg, tie_embeddings=False))
    attention = 2 * cfg.n_embd**2 + 2 * cfg.n_embd * cfg.n_kv_head * 64
    layer = lambda experts: attention + experts * 3 * cfg.n_embd * cfg.n_ffn + cfg.n_expert * cfg.n_embd + 2 * cfg.n_embd
    embedding = cfg.vocab_size * cfg.n_embd
    assert model.n_params() == total == cfg.n_layer * layer(cfg.n_expert) + embedding + cfg.n_embd
    assert model.n_active_params() - embedding == active == cfg.n_layer * layer(cfg.n_expert_active) + cfg.n_embd
    assert untied.n_active_params() == model.n_active_params() and untied.flops_per_token() == model.flops_per_token()
    assert model.flops_per_token() / 1e9 == pytest.approx(gflop, abs=0.005)


def test_laptop_moe_is_as_active_as_laptop():
    dense, mixture = (GPT(GPTConfig(**PRESETS[name])) for name in ("laptop", "laptop-moe"))
    assert mixture.flops_per_token() == pytest.approx(dense.flops_per_token(), rel=0.02)
    assert mixture.n_params() > 2 * dense.n_params()


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(n_expert=4, n_expert_active=5), "--n_expert_active 5: must be at most n_expert 4"),
        (dict(n_expert_active=2), "--n_expert_active 2: must be at most n_expert 0"),
        (dict(n_expert=4), "--n_expert 4: needs n_expert_active"), (dict(n_expert=-1), "--n_expert -1: must be at least 0"),
        (dict(n_expert=4, n_expert_active=2, n_ffn=20), "--n_ffn 20: must be a multiple of 8"),
        (dict(n_expert=4, n_expert_active=2, n_embd=36, n_head=2), "--n_embd 36: must be a multiple of 8"),
    ],
)  # fmt: skip
def test_impossible_mixtures_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        GPTConfig(**TINY | dict(n_kv_head=None, n_ffn=32) | wrong)


# -- training --------------------------------------------------------------------------------------

SMALL = dict(
    preset="laptop-moe", n_layer=2, n_embd=32, n_ffn=40, n_head=2, seq_len=32, base_width=32, batch_size=16, total_tokens=60 * 512,
    warmup_tokens=0, device="cpu", log_every=512, init_std=0.02, m_emb=1.0,
)  # fmt: skip


def test_the_auxiliary_loss_is_trained_on_and_not_reported(corpus):
    losses, routers = [], []
    for weight in (0, 1):
        cfg = train.resolve_device(train.make_config(**SMALL, router_aux_weight=weight))
        model = train.build(cfg).model
        before = model.blocks[0].mlp.router.weight.detach().clone()
        sgd = torch.optim.SGD([{"params": list(model.parameters()), "lr_scale": 1.0}])
        losses.append(train.optimizer_step(cfg, model, sgd, corpus, 0, lr=1.0)[0].item())
        routers.append((model.blocks[0].mlp.router.weight - before).norm().item())
    assert losses[0] == losses[1] == pytest.approx(math.log(256), rel=0.02)
    assert routers[1] > 2 * routers[0]


def test_the_auxiliary_loss_evens_out_the_load(corpus):
    late = {}
    for weight in (0, 0.01, 0.1):
        cfg = train.resolve_device(train.make_config(**SMALL, router_aux_weight=weight))
        state = train.build(cfg)
        model, optimizer = state.model, state.optimizer
        loads = []
        for step in range(60):
            *_, routing = train.optimizer_step(cfg, model, optimizer, corpus, step * cfg.batch_tokens, lr=0.01)
            loads += routing.metrics()["max_load"]
        late[weight] = sum(loads[-40:]) / 40  # of the last 20 steps, both layers
    assert late[0.1] < late[0.01] < late[0] and late[0] > 2 and late[0.1] < 1.7


def test_a_run_like_any_other(corpus_path, tmp_path, capsys):
    flags = [f"--{name}={value}" for name, value in (SMALL | {"data": corpus_path}).items()]
    for out in ("a", "b"):
        assert train.main([*flags, f"--out={out}"]) == 0
    assert train.main([*flags, "--out=c", "--time_limit=0.2"]) == 3
    assert train.main([*flags, "--out=c", "--resume"]) == 0
    weights = [torch.load(max((tmp_path / out / "ckpt").iterdir()), weights_only=True)["model"] for out in ("a", "b", "c")]
    assert all(torch.equal(w, other[name]) for other in weights[1:] for name, w in weights[0].items())

    record = json.loads((tmp_path / "a" / "record.json").read_text())
    assert record["n_params"] == sum(w.numel() for w in weights[0].values()) > 2 * record["n_active_params"]
    lines = [line for line in map(json.loads, (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) if "loss" in line]
    assert len(lines) == 60 and lines[-1]["loss"] < lines[0]["loss"] - 1
    for line in lines:
        assert len(line["max_load"]) == 2 and all(1 <= load <= 4 for load in line["max_load"])  # top 2 of 8: 4 at most
        assert line["aux_loss"] > 0.95 and 0 < line["router_entropy"] <= math.log(8) + 1e-6
    assert (tmp_path / "a" / "curve.png").read_bytes()[:4] == b"\x89PNG"
    loaded = model_file.load_model(tmp_path / "a")
    assert evaluation.validation_loss(loaded, evaluation.data.open_corpus(corpus_path))["val_loss"] == pytest.approx(record["val_loss"])
    assert train.main([*flags, "--out=boom", "--schedule=constant", "--lr=1e6", "--grad_clip=0"]) == 0
    assert json.loads((tmp_path / "boom" / "record.json").read_text())["diverged"]
    capsys.readouterr()
    assert train.main([*flags, "--n_expert_active=9"]) == 2
    assert capsys.readouterr().err == "train.py: --n_expert_active 9: must be at most n_expert 8\n"


# -- muP -------------------------------------------------------------------------------------------


def test_which_parameter_is_in_which_group():
    cfg = GPTConfig(**TINY | dict(n_embd=64), n_expert=16, n_expert_active=2)  # m_width 4
    model = GPT(cfg)
    roles = {name.split("mlp.")[1]: mup.role(name) for name, _ in model.named_parameters() if "mlp." in name}
    assert roles == {"router.weight": "router", "experts_in": "hidden", "experts_out": "output"}
    groups = mup.param_groups(model, mup.rules(cfg), weight_decay=0.1)
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in model.parameters())
    for name, p in model.named_parameters():
        if "mlp." in name:
            assert p.std().item() == pytest.approx(0.01, rel=0.1) and mup.rules(cfg)[mup.role(name)] == (0.01, 0.25, 1)
    router = lambda rule: mup.rules(dataclasses.replace(cfg, router_rule=rule))["router"]
    assert router("readout") == (0.005, 0.25, 1) and router("embedding") == (0.02, 1, 1)


def mixture(width, **changed):
    return dataclasses.replace(mup.check_config(width, mup=True), n_expert=8, n_expert_active=2, **changed)


def test_coordinates_are_flat():
    start, change = mup.coordinate_check(mixture)
    assert set(change) == {*mup.HOOKS, "router"}
    assert all(abs(mup.slope(sizes)) <= 0.25 for sizes in change.values()), change
    assert all(abs(mup.slope(start[hook])) <= 0.15 for hook in ("attention", "MLP", "router")), start


def test_without_the_routers_rule_its_scores_are_not():
    start, change = mup.coordinate_check(lambda width: mixture(width, router_rule="embedding"), seeds=(0,))
    assert mup.slope(start["router"]) >= 0.35 and mup.slope(change["router"]) >= 0.5


def router_share(cfg, steps: int, seeds=(0, 1, 2)) -> float:
    """Of the gradient at a layer's input, how much comes through the router, after so many steps of the coordinate check?"""
    shares = []
    for seed in seeds:
        model = mup.train_a_little(cfg, seed, mup.rules(cfg), steps=steps)[2]
        sizes = []  # router, whole layer, router, whole layer
        for block in model.blocks:
            block.mlp.router.register_full_backward_hook(lambda module, into, out: sizes.append(into[0].abs().mean()))
            block.mlp.register_full_backward_hook(lambda module, into, out: sizes.append(into[0].abs().mean()))
        torch.manual_seed(seed)
        idx = torch.randint(cfg.vocab_size, (4, cfg.seq_len + 1))
        model(idx[:, :-1], idx[:, 1:])[0].backward()
        shares.append((sum(sizes[0::2]) / sum(sizes[1::2])).item())
    return sum(shares) / len(shares)


def test_the_gradient_through_the_router():
    slope = lambda steps, rule: mup.slope([router_share(mixture(width, router_rule=rule), steps) for width in mup.WIDTHS])
    assert abs(slope(0, "hidden")) <= 0.2 <= 0.35 <= slope(0, "embedding")
    assert abs(slope(4, "readout")) <= 0.25 < slope(4, "hidden") <= 0.55  # as mup.rules says


# -- the command line ------------------------------------------------------------------------------


def test_main_checks_and_times(capsys, monkeypatch):
    monkeypatch.setattr(moe, "SHAPES", {"cpu": {"small": (32, 16, 4, 2, 64)}})
    assert moe.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("pass  ") == 2 and all(word in out for word in ("grouped", "loop", "dense", "TFLOP/s"))
    monkeypatch.setattr(moe, "one_by_one", lambda layer, x: 1.01 * layer(x)[0])
    assert moe.main(["--device", "cpu"]) == 1 and "FAIL" in capsys.readouterr().out
    assert moe.main(["--device", "tpu"]) == 2
