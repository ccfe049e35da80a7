"""The MoE layer against one_by_one, and its auxiliary loss against the formula.

test_model.py compares the layer with transformers, and so one_by_one, too.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import moe
from config import GPTConfig
from gpu_day import worst_difference


@pytest.fixture(params=["loop", "grouped"])
def multiply(request, monkeypatch):
    """Every test with this argument runs twice, with both ways to multiply."""
    monkeypatch.setattr(moe, "can_group", lambda x: request.param == "grouped")


def layer_of(n_embd=16, n_ffn=8, n_expert=4, k=2, dtype=torch.float64) -> moe.MoE:
    torch.manual_seed(0)
    shape = dict(n_layer=1, n_head=1, seq_len=8, vocab_size=9, n_embd=n_embd, n_ffn=n_ffn)
    layer = moe.MoE(GPTConfig(**shape, n_expert=n_expert, n_expert_active=k))
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return layer.to(dtype)


@pytest.mark.parametrize("n_expert, k, n_tokens", [(4, 2, 17), (5, 3, 2), (4, 4, 9)])
def test_outputs_and_gradients_are_those_of_one_by_one(n_expert, k, n_tokens, multiply):
    layer = layer_of(n_embd=8, n_ffn=24, n_expert=n_expert, k=k, dtype=torch.float32)
    x = torch.randn(n_tokens, 8, requires_grad=True)
    assert worst_difference(layer, x) < 1e-5


def test_one_expert_per_token_is_enough():
    layer = layer_of(k=1)
    x = torch.randn(17, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], moe.one_by_one(layer, x))


def test_experts_without_tokens_get_no_gradient(multiply):
    layer = layer_of(n_expert=6, dtype=torch.float32)
    x = torch.randn(20, 16)
    x[:, 0] = 1
    with torch.no_grad():  # all tokens choose the same experts
        layer.router.weight[:2, 0] = torch.tensor([40.0, 30.0])
    assert worst_difference(layer, x.requires_grad_()) < 1e-5
    y, routing = layer(x)
    assert routing.load.tolist() == pytest.approx([1 / 2] * 2 + [0] * 4)
    experts = [layer.experts_in, layer.experts_out]
    for grad in torch.autograd.grad(y, experts, torch.randn_like(y)):
        assert (grad[2:] == 0).all() and (grad[:2] != 0).any(-1).any(-1).all()


def test_in_bfloat16_the_router_stays_in_float32(multiply):
    layer = layer_of(dtype=torch.float32)
    x = torch.randn(50, 16)
    scores = x @ layer.router.weight.T
    expected = moe.one_by_one(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.router(x), scores)
        y, routing = layer(x.bfloat16())  # as RMSNorm converts it
    assert (y.dtype, routing.aux_loss.dtype) == (torch.bfloat16, torch.float32)
    assert (y - expected).abs().max() <= 0.02 * expected.abs().max()
    half = layer.bfloat16()
    assert half.router(x.bfloat16()).dtype == torch.float32
    assert half(x.bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_grouped_compiles_to_one_graph_for_any_load(monkeypatch):
    monkeypatch.setattr(moe, "can_group", lambda x: True)
    counter = CompileCounterWithBackend("aot_eager")
    layer = layer_of(n_expert=5, dtype=torch.bfloat16)
    compiled = torch.compile(layer.forward, fullgraph=True, backend=counter)
    for scale in (1, 5):
        torch.manual_seed(scale)
        x = scale * torch.randn(12, 16) + torch.randn(16)
        x = x.bfloat16().requires_grad_()
        results = []
        for forward in (layer, compiled):
            y, routing = forward(x)
            loss = y.square().sum() + routing.aux_loss
            gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
            results.append([y, *routing, *gradients])
        assert all(map(torch.equal, *results))
    assert counter.frame_count == 1


def test_the_auxiliary_loss_is_its_formula():
    layer = layer_of(n_expert=5, k=2)
    x = torch.randn(30, 16, dtype=torch.float64, requires_grad=True)
    _, routing = layer(x)
    P = [0] * 5
    f = [0] * 5
    z = 0
    for token in x:
        scores = [row @ token for row in layer.router.weight]
        Z = sum(score.exp() for score in scores)
        z = z + Z.log() ** 2 / 30
        for e in range(5):
            p = scores[e].exp() / Z
            P[e] = P[e] + p / 30
        for e in sorted(range(5), key=lambda e: -scores[e].item())[:2]:
            f[e] += 1 / 60  # a number, so no gradient goes through it
    expected = 5 * sum(p * share for p, share in zip(P, f)) + 0.1 * z
    assert routing.aux_loss.item() == pytest.approx(expected.item(), abs=1e-9)
    assert routing.load.tolist() == pytest.approx(f, abs=1e-9)
    inputs = [x, layer.router.weight]
    ours = torch.autograd.grad(routing.aux_loss, inputs)
    for a, b in zip(ours, torch.autograd.grad(expected, inputs)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_metrics_are_the_sum_over_layers_and_the_largest_load_of_every_layer():
    routing = moe.Routing(
        aux_loss=torch.tensor([1.0, 3.0]),
        load=torch.tensor([[0.5, 0.25, 0.25, 0], [0.25] * 4]),
    )
    assert routing.metrics() == {"aux_loss": 4, "max_load": [2, 1]}
