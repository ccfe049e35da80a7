"""A mixture of experts: many small MLPs in each layer, of which every token goes through a few.

A router scores the experts for each token. The k best are computed and added up, weighted by the
softmax of their scores; no token is dropped and no expert is shared (the paper's PowerMoE). An
expert is fast when its tokens lie next to each other, so the layer does four things:

    sort        the token-expert pairs by expert
    group       the tokens in that order
    multiply    every group by its expert's matrices
    put back    undo the order, add up the k results of each token

Read `MoE.forward`; `one_by_one` is the same layer as one would explain it.

    python moe.py        checks the first against the second and times it beside a dense MLP
"""

import argparse
import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# N tokens, C = n_embd, E experts of hidden width M, k of them per token: N*k pairs


class Routing(NamedTuple):
    """What a layer's router did. That of a whole model has n_layer as first dimension."""

    aux_loss: Tensor  # to be added to the training loss with a small weight; all else is for looking at
    load: Tensor      # [E] share of the pairs that each expert got  # fmt: skip
    entropy: Tensor   # of the softmax over all experts in nats, mean over the tokens  # fmt: skip

    def metrics(self) -> dict:
        """A whole model's, as numbers: means over the layers, and of each layer its busiest expert's load over the mean load."""
        max_load = self.load.amax(-1) * self.load.shape[-1]  # [n_layer]
        return {"aux_loss": self.aux_loss.mean().item(), "max_load": max_load.tolist(), "router_entropy": self.entropy.mean().item()}


class Router(nn.Linear):
    """The experts' scores, in float32 at least: rounded, they would send tokens elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype))


class MoE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.k = cfg.n_expert_active
        self.router = Router(cfg.n_embd, cfg.n_expert, bias=False)
        self.experts_in = nn.Parameter(torch.empty(cfg.n_expert, 2 * cfg.n_ffn, cfg.n_embd))  # gate above, up below
        self.experts_out = nn.Parameter(torch.empty(cfg.n_expert, cfg.n_embd, cfg.n_ffn))

    def forward(self, x: Tensor, multiply=None) -> tuple[Tensor, Routing]:
        """x [..., C] -> (y [..., C] in x's dtype, Routing). multiply: `grouped` or `loop` (default: whichever suits x)."""
        shape, x = x.shape, x.flatten(0, -2)
        scores = self.router(x)            # [N, E]
        best, expert = scores.topk(self.k)  # [N, k] each
        weight = best.softmax(-1)          # [N, k], over the chosen experts only  # fmt: skip

        # Sort. Pair i is of token i // k. The GPU is never waited for: every shape here is known beforehand.
        expert, order = expert.flatten().sort(stable=True)  # [N*k]: place j has pair order[j]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))  # [N*k]: pair i is in place back[i]
        each = torch.arange(scores.shape[1], device=x.device)
        ends = torch.searchsorted(expert, each, right=True, out_int32=True)  # [E]: where each expert's group ends

        # Group, multiply, put back. The weight goes in between the two products: behind them would be
        # the same mathematics, but with more to keep for the backward pass.
        dtype = matmul_dtype(x)
        multiply = multiply or (grouped if x.is_cuda and dtype == torch.bfloat16 else loop)
        if x.device.type == "cpu" and multiply is loop:  # its bfloat16 kernels are built anew for every size of a group
            dtype = torch.promote_types(dtype, torch.float32)
        rows = Dispatch.apply(x.to(dtype), order, back, self.k)         # [N*k, C]
        weight = Dispatch.apply(weight.view(-1, 1), order, back, 1)     # [N*k, 1]
        rows = multiply(rows, weight, ends, self.experts_in.to(dtype), self.experts_out.to(dtype))
        y = Combine.apply(rows, order, back, self.k).view(shape).type_as(x)  # fmt: skip

        return y, routing(scores, ends, over_processes=self.training)


def routing(scores: Tensor, ends: Tensor, over_processes: bool = False) -> Routing:
    """Statistics of one layer. Auxiliary loss: E * sum_e P_e f_e + 0.1 * mean(logsumexp(scores)^2), as in IBM's code.

    f, the share of the pairs, is counted and has no gradient; P, the mean probability, has. So the
    first term pushes an expert's probability down in proportion to its load; it is 1 when all loads
    are equal. The second one keeps the scores from growing.

    Where several processes train together, f is counted over all of them and P is each one's own.
    P enters linearly: the mean over the processes is the loss that one process would find for the
    whole batch. (Micro-batches do not see each other, each has an f of its own.)
    """
    log_z = scores.logsumexp(-1, keepdim=True)  # [N, 1]
    p = (scores - log_z).exp()                  # [N, E], the softmax over all experts
    load = ends.diff(prepend=ends.new_zeros(1)).to(p.dtype)  # fmt: skip
    if over_processes and dist.is_initialized():
        dist.all_reduce(load)
    load = load / load.sum()
    aux_loss = scores.shape[1] * (p.mean(0) * load).sum() + 0.1 * log_z.square().mean()
    return Routing(aux_loss, load, torch.special.entr(p.detach()).sum(-1).mean())


def matmul_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer would compute in. (grouped_mm does not ask autocast.)"""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


# Autograd would send the gradient of x[index] back by adding it up at the index, in the order in
# which a GPU's threads happen to arrive. Here the way back is known: these two are each other's
# gradient, both only read, and two runs agree to the last bit.


class Dispatch(torch.autograd.Function):
    """[N, C] -> [N*k, C]: every token once per pair, in the order of the experts."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, back)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx, grad: Tensor):
        order, back = ctx.saved_tensors
        return Combine.apply(grad, order, back, ctx.k), None, None, None


class Combine(torch.autograd.Function):
    """[N*k, C] -> [N, C]: the sum over the pairs of every token."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, back)
        ctx.k = k
        return rows.index_select(0, back).unflatten(0, (-1, k)).sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        order, back = ctx.saved_tensors
        return Dispatch.apply(grad, order, back, ctx.k), None, None, None


# Both of these: rows [N*k, C], weight [N*k, 1], ends [E], w_in [E, 2M, C], w_out [E, C, M] -> [N*k, C]


def grouped(rows: Tensor, weight: Tensor, ends: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Two matrix products for all experts together; the CPU need not know where the groups end."""
    gate, up = F.grouped_mm(rows, w_in.mT, offs=ends).chunk(2, dim=-1)  # [N*k, M] each
    h = F.silu(gate) * up * weight
    return F.grouped_mm(h.to(rows.dtype), w_out.mT, offs=ends)


@torch.compiler.disable  # the groups' sizes change with every batch: nothing to compile
def loop(rows: Tensor, weight: Tensor, ends: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """One expert after the other: for CPUs, and dtypes that grouped_mm does not take."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    outputs = []
    for x, w, (gate, up), out in zip(rows.split(sizes), weight.split(sizes), w_in.unflatten(1, (2, -1)), w_out):
        h = F.silu(F.linear(x, gate)) * F.linear(x, up) * w
        outputs.append(F.linear(h.to(rows.dtype), out))
    return torch.cat(outputs)


def one_by_one(layer: MoE, x: Tensor) -> Tensor:
    """The layer as one would explain it: x [N, C], a token and one of its experts at a time -> [N, C]."""
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


SHAPES = {  # what to time: n_embd, n_ffn, n_expert, n_expert_active, tokens
    "cpu": {"laptop-moe": (128, 160, 8, 2, 4096), "smaller experts": (128, 128, 8, 2, 4096)},
    "cuda": {"1B-moe": (1024, 512, 32, 8, 32768), "PowerMoE-3B": (1536, 512, 40, 8, 32768)},
}


def worst_difference(layer: MoE, x: Tensor, multiply) -> float:
    """Of outputs and all gradients between the layer and one_by_one, relative to the largest of each."""
    target, wanted = torch.randn_like(x), [x, *layer.parameters()]
    results = []
    for y in (layer(x, multiply)[0], one_by_one(layer, x)):
        results.append([y, *torch.autograd.grad(y, wanted, target)])
    return max(((ours - plain).abs().max() / plain.abs().max()).item() for ours, plain in zip(*results))


def seconds(layer: nn.Module, x: Tensor, *args) -> float:
    """Median time of a forward and backward pass, in bfloat16 on a GPU."""
    grad, times = torch.randn_like(x), []
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    for _ in range(15):
        wait()
        start = time.perf_counter()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            y, _ = layer(x, *args)
        y.backward(grad.to(y.dtype))
        wait()
        times.append(time.perf_counter() - start)
    return sorted(times[5:])[5]  # the first ones compile and warm caches


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="moe.py", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto: cuda, else mps, else cpu")
    args = parser.parse_args(argv)

    from model import MLP, GPTConfig
    from tools.devices import pick_device

    try:
        device = pick_device(args.device)
    except ValueError as mistake:
        print(f"moe.py: {mistake}", file=sys.stderr)
        return 2
    cuda, ways = device.startswith("cuda"), {"loop": loop} if device == "mps" else {"grouped": grouped, "loop": loop}
    torch.manual_seed(0)

    def build(kind, n_embd, n_ffn, **experts):
        layer = kind(GPTConfig(n_layer=1, n_embd=n_embd, n_head=1, seq_len=1, vocab_size=2, n_ffn=n_ffn, **experts))
        for p in layer.parameters():
            nn.init.normal_(p, std=n_embd**-0.5)
        return layer.to(device)

    print(f"{device}, {torch.get_num_threads()} threads: largest difference from one token and one expert at a time")
    layer = build(MoE, 64, 80, n_expert=8, n_expert_active=2).to(torch.bfloat16 if cuda else torch.float32)
    x = torch.randn(100, 64, device=device, dtype=layer.experts_in.dtype, requires_grad=True)
    limit, passed = (0.05 if cuda else 1e-5), True  # bfloat16 has 8 bits
    for name, multiply in ways.items():
        difference = worst_difference(layer, x, multiply)
        passed &= difference <= limit
        print(f"{'pass' if difference <= limit else 'FAIL'}  {name:<8} {difference:.1e}")

    for name, (n_embd, n_ffn, n_expert, k, tokens) in SHAPES["cuda" if cuda else "cpu"].items():
        layer = build(MoE, n_embd, n_ffn, n_expert=n_expert, n_expert_active=k)
        dense = build(MLP, n_embd, k * n_ffn)
        x = torch.randn(tokens, n_embd, device=device, requires_grad=True)
        if cuda:
            layer.compile()
            dense.compile()
        times = {way: seconds(layer, x, multiply) for way, multiply in ways.items()} | {"dense": seconds(dense, x)}
        print(f"\n{name}, forward and backward of {tokens:,} tokens: width {n_embd}, {k} of {n_expert} experts of {n_ffn}, or one MLP of {k * n_ffn}")
        for way, t in times.items():
            print(f"{way:<8} {1e3 * t:8.2f} ms {18e-12 * tokens * n_embd * k * n_ffn / t:8.3f} TFLOP/s {t / times['dense']:6.2f}x dense")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
