"""A mixture of experts (MoE): many small MLPs in each layer, of which every token uses a few.

A router scores the experts for each token. The layer computes the k best and adds them up, weighted
by the softmax of their scores; no token is dropped and no expert is shared (the paper's PowerMoE).
An expert is fast if its tokens are adjacent in memory. So we sort the token-expert pairs by expert,
dispatch a copy of the token to each pair, multiply each group by its expert's matrices, and combine
the k results of every token. `one_by_one` is the slow, obvious version of the same layer.

    python moe.py        checks the first against the second and times it beside a dense MLP
"""

import tools.threads  # noqa: F401, before torch starts its threads

import copy
import statistics
import sys
import timeit
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.config import fail, program_parser
from tools.devices import pick_device, total
from tools.precision import cpu_dtype, matmul_dtype

# Shapes: N tokens, C = n_embd, E experts of hidden width M, k of them per token, so N*k pairs


class Routing(NamedTuple):
    """What the router of a layer did. For a whole model, every field has n_layer in front."""

    aux_loss: Tensor  # added to the training loss with a small weight; the rest is for monitoring
    load: Tensor      # [E] share of the pairs that each expert got  # fmt: skip
    entropy: Tensor   # nats, of the softmax over all experts, mean over the tokens  # fmt: skip

    def metrics(self) -> dict:
        """Numbers for a whole model: means over the layers; per layer, the largest load / mean."""
        max_load = (self.load.amax(-1) * self.load.shape[-1]).tolist()  # [n_layer]
        aux_loss, entropy = self.aux_loss.mean().item(), self.entropy.mean().item()
        return {"aux_loss": aux_loss, "max_load": max_load, "router_entropy": entropy}


class Router(nn.Linear):
    """Score every expert in float32 or better; rounding would route some tokens differently."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype))


class MoE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.k = cfg.n_expert_active
        self.router = Router(cfg.n_embd, cfg.n_expert, bias=False)
        # gate in the first half of the rows, up in the second
        self.experts_in = nn.Parameter(torch.empty(cfg.n_expert, 2 * cfg.n_ffn, cfg.n_embd))
        self.experts_out = nn.Parameter(torch.empty(cfg.n_expert, cfg.n_embd, cfg.n_ffn))

    def forward(self, x: Tensor, multiply=None) -> tuple[Tensor, Routing]:
        """x [..., C] -> y [..., C] in x's dtype, Routing. multiply: `grouped` or `loop`."""
        shape, x = x.shape, x.flatten(0, -2)
        scores = self.router(x)             # [N, E]
        best, expert = scores.topk(self.k)  # both [N, k]
        weight = best.softmax(-1)           # [N, k], over the chosen experts only  # fmt: skip

        # Sort; pair i is of token i // k. All shapes are known here, so nothing waits for a GPU
        expert, order = expert.flatten().sort(stable=True)  # [N*k]: pair order[j] goes to place j
        count = lambda n: torch.arange(n, device=x.device)
        back = torch.empty_like(order).scatter_(0, order, count(len(order)))  # pair i: back[i]
        ends = torch.searchsorted(expert, count(scores.shape[1]), right=True, out_int32=True)  # [E]

        # Dispatch, multiply, combine. The weight goes in between the two products: after them would
        # be the same mathematics, but more to keep for the backward pass
        dtype = matmul_dtype(x)
        multiply = multiply or (grouped if x.is_cuda and dtype == torch.bfloat16 else loop)
        dtype = cpu_dtype(x, dtype) if multiply is loop else dtype
        rows = Dispatch.apply(x.to(dtype), order, back, self.k)      # [N*k, C]
        weight = Dispatch.apply(weight.view(-1, 1), order, back, 1)  # [N*k, 1]
        rows = multiply(rows, weight, ends, self.experts_in.to(dtype), self.experts_out.to(dtype))
        y = Combine.apply(rows, order, back, self.k)                 # [N, C]  # fmt: skip
        return y.view(shape).type_as(x), routing(scores, ends, over_processes=self.training)


def routing(scores: Tensor, ends: Tensor, over_processes: bool = False) -> Routing:
    """Statistics of a layer; auxiliary loss E * sum_e P_e f_e + 0.1 * mean(logsumexp(scores)^2).

    The formula is IBM's. f, the share of the pairs, is counted and has no gradient; P,
    the mean probability, has one. So the first term pushes an expert's probability down in
    proportion to its load; it is 1 if all loads are equal. The second term keeps scores small.
    f is counted over all processes, P in each: since the loss is linear in P, its mean over the
    processes is the loss of one process with the whole batch. (Each micro-batch has its own f.)
    """
    log_z = scores.logsumexp(-1, keepdim=True)  # [N, 1]
    p = (scores - log_z).exp()                  # [N, E], the softmax over all experts  # fmt: skip
    load = ends.diff(prepend=ends.new_zeros(1)).to(p.dtype)
    if over_processes:
        load = total(load)
    load = load / load.sum()
    aux_loss = scores.shape[1] * (p.mean(0) * load).sum() + 0.1 * log_z.square().mean()
    return Routing(aux_loss, load, torch.special.entr(p.detach()).sum(-1).mean())


# Autograd computes the gradient of x[index] with atomic adds, and on a GPU their order varies from
# run to run. We know the inverse index, so dispatch and combine can each be the other's gradient.
# Both only read, so repeated runs are bit-identical.


class Dispatch(torch.autograd.Function):
    """[N, C] -> [N*k, C]: every token once per pair, in the order of the experts."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, back)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return Combine.apply(grad, *ctx.saved_tensors, ctx.k), None, None, None


class Combine(torch.autograd.Function):
    """[N*k, C] -> [N, C]: the sum over the pairs of every token."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, back)
        ctx.k = k
        return rows.index_select(0, back).unflatten(0, (-1, k)).sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return Dispatch.apply(grad, *ctx.saved_tensors, ctx.k), None, None, None


# Both: rows [N*k, C], weight [N*k, 1], ends [E], w_in [E, 2M, C], w_out [E, C, M] -> [N*k, C]


def grouped(rows: Tensor, weight: Tensor, ends: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Two matrix products for all experts together; the sizes of the groups stay on the GPU."""
    gate, up = F.grouped_mm(rows, w_in.mT, offs=ends).chunk(2, dim=-1)  # both [N*k, M]
    h = F.silu(gate) * up * weight
    return F.grouped_mm(h.to(rows.dtype), w_out.mT, offs=ends)


@torch.compiler.disable  # group sizes change with every batch: nothing to compile
def loop(rows: Tensor, weight: Tensor, ends: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """One expert after the other, for CPUs and dtypes that grouped_mm lacks; waits for a GPU."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    groups = zip(rows.split(sizes), weight.split(sizes), w_in.unflatten(1, (2, -1)), w_out)
    outputs = []
    for x, w, (gate, up), out in groups:
        h = F.silu(F.linear(x, gate)) * F.linear(x, up) * w
        outputs.append(F.linear(h.to(rows.dtype), out))
    return torch.cat(outputs)


def one_by_one(layer: MoE, x: Tensor) -> Tensor:
    """The slow, obvious version: x [N, C], one token and one of its experts at a time -> [N, C]."""
    y = []
    for token in x:
        best, experts = layer.router(token).topk(layer.k)
        outputs = []
        for weight, e in zip(best.softmax(-1), experts):
            gate, up = (layer.experts_in[e] @ token).chunk(2)
            outputs.append(weight * (layer.experts_out[e] @ (F.silu(gate) * up)))
        y.append(sum(outputs))
    return torch.stack(y)


# ---------------------------------------------------------------------------------------------


def worst_difference(layer: MoE, x: Tensor, multiply) -> float:
    """Largest relative difference from one_by_one, over the output and every gradient."""
    target, wanted = torch.randn_like(x), [x, *layer.parameters()]
    both = layer(x, multiply)[0], one_by_one(layer, x)
    ours, plain = ([y, *torch.autograd.grad(y, wanted, target)] for y in both)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, plain))


def seconds(layer: nn.Module, x: Tensor, *args) -> float:
    """Median time of a forward and backward pass, in bfloat16 on a GPU."""
    grad = torch.randn_like(x)

    def step():
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            y, _ = layer(x, *args)
        y.backward(grad.to(y.dtype))
        if x.is_cuda:
            torch.cuda.synchronize()

    return statistics.median(timeit.repeat(step, number=1, repeat=15)[5:])  # the first 5 warm up


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("moe.py", __doc__)
    parser.add_argument("--device", default="auto", help="auto: cuda, else mps, else cpu")
    try:
        device = pick_device(parser.parse_args(argv).device)
    except ValueError as error:
        return fail("moe.py", error)
    from model import MLP, PRESETS, GPTConfig

    torch.manual_seed(0)
    cuda = device.startswith("cuda")
    preset, tokens = ("1B-moe", 32768) if cuda else ("laptop-moe", 4096)
    cfg = GPTConfig(**PRESETS[preset])
    as_wide = PRESETS[preset] | {"n_ffn": cfg.n_expert_active * cfg.n_ffn}
    layer, dense = MoE(cfg).to(device), MLP(GPTConfig(**as_wide)).to(device)
    for p in (*layer.parameters(), *dense.parameters()):
        nn.init.normal_(p, std=cfg.n_embd**-0.5)
    x = torch.randn(tokens, cfg.n_embd, device=device, requires_grad=True)

    dtype, limit = (torch.bfloat16, 0.05) if cuda else (torch.float32, 1e-5)  # bfloat16: 8 bits
    exact, few = copy.deepcopy(layer).to(dtype), x[:100].detach().to(dtype).requires_grad_()
    for module in (layer, dense) if cuda else ():
        module.compile()

    print(f"{device}, {preset}: error against one_by_one, time of {tokens:,} tokens there and back")
    failed = 0
    for way in (loop,) if device == "mps" else (grouped, loop):
        error, t = worst_difference(exact, few, way), seconds(layer, x, way)
        verdict = "pass" if error <= limit else "FAIL"
        failed += error > limit
        print(f"{verdict}  {way.__name__:<8}{error:9.1e}{1e3 * t:10.2f} ms")
    print(f"{'a dense MLP as wide':<23}{1e3 * seconds(dense, x):10.2f} ms")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
