"""A mixture of experts (MoE), in which a layer has many small MLPs and every token uses a
few.

A router scores the experts for every token. The layer computes the k best and adds them
up, weighted by the softmax of their scores. As in the paper's PowerMoE, no token is
dropped and no expert is shared. We sort the token-expert pairs by expert, because an
expert is fast if its tokens are adjacent in memory. Then we copy the token of every pair
(dispatch), multiply the copies of an expert by its matrices, and add up the k results of
every token (combine). `one_by_one` is the slow, obvious version of the same layer.

    python moe.py        check the fast version against it
"""

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.flags import program_parser
from tools.devices import all_sum, matmul_dtype, pick_device

# Shapes: N tokens, C = n_embd, E experts of hidden width M, k of them per token, so N*k
# pairs


class Routing(NamedTuple):
    """Statistics of the router of a layer. For a whole model, every field has n_layer in
    front."""

    aux_loss: Tensor  # added to the training loss with a small weight
    load: Tensor  # [E] share of the pairs that each expert got
    entropy: Tensor  # nats, of the softmax over all experts, mean over the tokens

    def metrics(self) -> dict:
        """Means over the layers of a whole model, and per layer the largest load / mean
        load."""
        max_load = (self.load.amax(-1) * self.load.shape[-1]).tolist()  # [n_layer]
        aux_loss, entropy = self.aux_loss.mean().item(), self.entropy.mean().item()
        return {"aux_loss": aux_loss, "max_load": max_load, "router_entropy": entropy}


class Router(nn.Linear):
    """Score every expert in float32 or better, because rounding would reroute some
    tokens."""

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
        self.experts_in = nn.Parameter(
            torch.empty(cfg.n_expert, 2 * cfg.n_ffn, cfg.n_embd)
        )
        self.experts_out = nn.Parameter(torch.empty(cfg.n_expert, cfg.n_embd, cfg.n_ffn))

    def forward(self, x: Tensor, multiply=None) -> tuple[Tensor, Routing]:
        """x [..., C] -> y [..., C] in x's dtype, Routing. multiply: `grouped` or
        `loop`."""
        shape, x = x.shape, x.flatten(0, -2)
        scores = self.router(x)  # [N, E]
        best, expert = scores.topk(self.k)  # both [N, k]
        weight = best.softmax(-1)  # [N, k], over the chosen experts only

        # Sort the pairs by expert. Pair i belongs to token i // k.
        expert, order = expert.flatten().sort(
            stable=True
        )  # both [N*k]; row j holds pair order[j]
        back = order.argsort()  # [N*k], pair i is in row back[i]
        ids = torch.arange(scores.shape[1], device=x.device)  # of the experts
        ends = torch.searchsorted(
            expert, ids, right=True, out_int32=True
        )  # [E], end of their rows

        # Dispatch, multiply, combine. The weight goes between the two products, because
        # autograd would have to keep more for the backward pass if it came after them.
        dtype = matmul_dtype(x)
        multiply = multiply or (
            grouped if x.is_cuda and dtype == torch.bfloat16 else loop
        )
        pairs = x.to(dtype)[:, None].expand(-1, self.k, -1).flatten(0, 1)  # [N*k, C]
        rows = Permute.apply(pairs, order, back)
        weight = Permute.apply(weight.view(-1, 1), order, back)
        rows = multiply(
            rows, weight, ends, self.experts_in.to(dtype), self.experts_out.to(dtype)
        )
        y = Permute.apply(rows, back, order).unflatten(0, (-1, self.k)).sum(1)  # [N, C]
        return y.view(shape).type_as(x), routing(scores, ends)


def routing(scores: Tensor, ends: Tensor) -> Routing:
    """Auxiliary loss E * sum_e P_e f_e + 0.1 * mean(logsumexp(scores)^2), with
    statistics.

    The formula is IBM's. The share f of the pairs is a count without gradient, P is the
    mean probability. So the first term lowers the probability of an expert in proportion
    to its load, and is 1 if all loads are equal. The second term keeps scores small. In
    training we count f over all processes, because then their mean loss is the loss of
    one process with the whole batch.
    """
    log_z = scores.logsumexp(-1, keepdim=True)  # [N, 1]
    p = (scores - log_z).exp()  # [N, E], the softmax over all experts
    load = ends.diff(prepend=ends.new_zeros(1)).to(p.dtype)
    if torch.is_grad_enabled():  # in training
        load = all_sum(load)
    load = load / load.sum()
    aux_loss = scores.shape[1] * (p.mean(0) * load).sum() + 0.1 * log_z.square().mean()
    return Routing(aux_loss, load, torch.special.entr(p.detach()).sum(-1).mean())


class Permute(torch.autograd.Function):
    """rows[order], with a gradient that is a permutation too.

    The gradient of plain indexing uses atomic adds, which are slow on a GPU and vary in
    order.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


# Both: rows [N*k, C], weight [N*k, 1], ends [E], w_in [E, 2M, C], w_out [E, C, M] ->
# [N*k, C]


def grouped(
    rows: Tensor, weight: Tensor, ends: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """Two matrix products for all experts together. The sizes of the groups stay on the
    GPU."""
    gate, up = F.grouped_mm(rows, w_in.mT, offs=ends).chunk(2, dim=-1)  # both [N*k, M]
    h = F.silu(gate) * up * weight
    return F.grouped_mm(h.to(rows.dtype), w_out.mT, offs=ends)


@torch._disable_dynamo  # group sizes vary (torch.compiler.disable takes a second to import)
def loop(
    rows: Tensor, weight: Tensor, ends: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """One expert after the other, where `grouped` is not faster. A GPU waits for the
    sizes."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    groups = zip(
        rows.split(sizes), weight.split(sizes), w_in.unflatten(1, (2, -1)), w_out
    )
    outputs = []
    for x, w, (gate, up), out in groups:
        h = F.silu(F.linear(x, gate)) * F.linear(x, up) * w
        outputs.append(F.linear(h.to(rows.dtype), out))
    return torch.cat(outputs)


def one_by_one(layer: MoE, x: Tensor) -> Tensor:
    """x [N, C] -> [N, C], one token and one of its experts at a time."""
    y = []
    for token in x:
        best, experts = layer.router(token).topk(layer.k)
        outputs = []
        for weight, e in zip(best.softmax(-1), experts):
            gate, up = (layer.experts_in[e] @ token).chunk(2)
            outputs.append(weight * (layer.experts_out[e] @ (F.silu(gate) * up)))
        y.append(sum(outputs))
    return torch.stack(y)


def worst_difference(layer: MoE, x: Tensor, multiply) -> float:
    """Largest relative difference from one_by_one, over the output and every gradient."""
    target, wanted = torch.randn_like(x), [x, *layer.parameters()]
    both = layer(x, multiply)[0], one_by_one(layer, x)
    ours, plain = ([y, *torch.autograd.grad(y, wanted, target)] for y in both)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, plain))


def main(argv: list[str] | None = None) -> int:
    program_parser("moe.py", __doc__).parse_args(argv)
    from config import PRESETS, GPTConfig

    torch.manual_seed(0)
    device = pick_device()
    preset, dtype, limit = "laptop-moe", torch.float32, 1e-5
    if device.startswith("cuda"):
        preset, dtype, limit = "1B-moe", torch.bfloat16, 0.05
    layer = MoE(GPTConfig(**PRESETS[preset])).to(device, dtype)
    for p in layer.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    x = torch.randn(
        100, layer.router.in_features, device=device, dtype=dtype, requires_grad=True
    )

    print(f"{preset} on {device}: largest relative difference from one_by_one")
    ways = (loop,) if device == "mps" else (grouped, loop)
    errors = {way.__name__: worst_difference(layer, x, way) for way in ways}
    for name, error in errors.items():
        print(f"{'pass' if error <= limit else 'FAIL'}  {name:<8}{error:9.1e}")
    return int(not all(error <= limit for error in errors.values()))


if __name__ == "__main__":
    sys.exit(main())
