"""The MoE layer against a deliberately dumb loop, and the MoE model against transformers."""

import math
import random
from pathlib import Path

import pytest
import torch
from test_model import TINY
from test_train import MOE, flags, metrics, one_step, same, weights

import moe
import records
import train
from config import make_shape


def layer_of(n_embd=16, n_ffn=8, n_expert=4, k=2, dtype=torch.float64, seed=0) -> moe.MoE:
    torch.manual_seed(seed)
    shape = dict(n_embd=n_embd, n_head=1, n_kv_head=1, n_ffn=n_ffn, n_expert=n_expert)
    layer = moe.MoE(make_shape(**TINY | shape, n_expert_active=k))
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return layer.to(dtype)


def gradients(y, *tensors):
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return torch.autograd.grad(y, tensors, weights if y.dim() else None)


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
            y = y + scores[e].exp() / total * (
                experts_out[e] @ (gate / (1 + (-gate).exp()) * up)
            )
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
    size = rng.choice([1, 2, 17, 40]), layer.router.in_features
    compare_with_dumb(layer, torch.randn(size, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("n_expert", [256, 257, 300])
def test_layers_of_more_experts_than_a_byte_counts(n_expert):
    layer = layer_of(8, 8, n_expert, k=3)
    compare_with_dumb(layer, torch.randn(30, 8, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_empty_experts_and_one_that_takes_everything(k):
    layer = layer_of(n_expert=6, k=k)
    x = torch.randn(20, 16, dtype=torch.float64)
    x[:, 0] = 1
    with torch.no_grad():
        # all choose the same k
        layer.router.weight[:k, 0] = torch.tensor([40.0, 30.0, 20.0])[:k]
    compare_with_dumb(layer, x.requires_grad_())
    y, routing = layer(x)
    assert routing.load.tolist() == [1 / k] * k + [0] * (6 - k)
    for grad in gradients(y, layer.experts_in, layer.experts_out):
        assert (grad[k:] == 0).all() and (grad[:k] != 0).any(-1).any(-1).all()


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
    assert half.router(x.bfloat16()).dtype == torch.float32
    assert half(x.bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_to_one_graph_for_any_routing():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    layer = layer_of(n_expert=5, dtype=torch.bfloat16)
    compiled = torch.compile(
        lambda x: layer(x, moe.grouped), fullgraph=True, backend=counter
    )
    for scale in (1, 3, 10):
        x = (scale * torch.randn(12, 16) + torch.randn(16)).bfloat16().requires_grad_()
        results = []
        for y, routing in (compiled(x), layer(x, moe.grouped)):
            grads = gradients(y.sum() + routing.aux_loss, x, *layer.parameters())
            results.append([y, *routing, *grads])
        assert all(torch.equal(a, b) for a, b in zip(*results))
    assert counter.frame_count == 1


def test_the_loop_over_experts_breaks_the_graph_and_is_not_compiled():
    """Its group sizes vary, so a compiled loop would be another program in every step."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    layer = layer_of(n_expert=5)
    compiled = torch.compile(layer.forward, dynamic=False, backend=counter)
    for scale in (1, 3, 10):
        x = scale * torch.randn(12, 16, dtype=torch.float64) + torch.randn(16).double()
        assert torch.equal(compiled(x)[0], layer(x)[0])
    assert counter.frame_count == 2  # before the loop, and after it


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
    assert routing.load.tolist() == pytest.approx(f, abs=1e-9)
    assert routing.entropy.item() == pytest.approx(entropy, abs=1e-9)
    tensors = (x, layer.router.weight)
    for ours, theirs in zip(
        gradients(routing.aux_loss, *tensors), gradients(naive, *tensors)
    ):
        assert (ours - theirs).abs().max() <= 1e-9
    assert not routing.load.requires_grad and not routing.entropy.requires_grad
    assert torch.autograd.grad(routing.aux_loss, layer.experts_in, allow_unused=True) == (
        None,
    )


def test_the_auxiliary_loss_is_trained_on_and_not_reported(corpus):
    without, step = one_step(corpus, **MOE, router_aux_weight=0.0)
    gradients, trained_on_it = one_step(corpus, **MOE, router_aux_weight=1.0)
    assert step.loss == trained_on_it.loss
    assert step.loss.item() == pytest.approx(math.log(256), rel=0.02)
    router = "blocks.0.mlp.router.weight"
    assert gradients[router].norm() > 2 * without[router].norm()


def test_the_passes_of_a_step_are_a_setting_of_an_moe_but_not_of_a_dense_model(corpus):
    """An MoE balances its experts in every pass, so with other passes it is another run."""

    def change(**fields) -> float:
        """Largest change of a gradient if a step takes four passes instead of one."""
        one, _ = one_step(corpus, **fields, micro_batch_size=8)
        four, _ = one_step(corpus, **fields, micro_batch_size=2)
        sizes = [
            (one[name] - four[name]).abs().max() / one[name].abs().max() for name in one
        ]
        return max(sizes).item()

    assert change() < 1e-9 and change(**MOE, router_aux_weight=0) < 1e-9
    assert change(**MOE, router_aux_weight=1) > 1e-3

    def is_one_run(**fields) -> bool:
        one, other = (train.make_config(**fields, micro_batch_size=n) for n in (8, 2))
        return records.identity(vars(one)) == records.identity(vars(other))

    assert is_one_run() and not is_one_run(**MOE)


@pytest.mark.parametrize("shape, status", [({}, 3), (MOE, 2)])
def test_a_resumed_moe_keeps_the_sequences_of_a_pass(shape, status, corpus_path, capsys):
    run = flags(corpus_path, out="run", micro_batch_size=4, **shape)
    assert train.main([*run, "--time_limit=0"]) == 3
    capsys.readouterr()
    again = ["--out=run", "--resume", "--micro_batch_size=2", "--time_limit=0"]
    assert train.main(again) == status
    assert ("--micro_batch_size 2" in capsys.readouterr().err) == (status == 2)


def test_a_run_logs_its_routing_and_repeats_bit_for_bit(corpus_path):
    one, other = Path("one"), Path("other")
    for out in (one, other):
        assert train.main(flags(corpus_path, out=out, **MOE)) == 0
    assert same(weights(one), weights(other))
    lines = metrics(one)
    assert len(lines) == 40 and lines[-1]["loss"] < lines[0]["loss"] - 1
    for line in lines:  # top 2 of 8: the load is at most 4 times the mean
        assert len(line["max_load"]) == 2 and all(
            1 <= load <= 4 for load in line["max_load"]
        )
        assert (
            line["aux_loss"] > 0.95 and 0 < line["router_entropy"] <= math.log(8) + 1e-6
        )


def test_main_passes_and_fails_on_a_difference(capsys, monkeypatch):
    monkeypatch.setattr(moe.devices, "pick_device", lambda: "cpu")
    assert moe.main([]) == 0
    out = capsys.readouterr().out
    assert out.count("pass  ") == 2
    monkeypatch.setattr(moe, "one_by_one", lambda layer, x: 1.01 * layer(x)[0])
    assert moe.main([]) == 1 and capsys.readouterr().out.count("FAIL") == 2
