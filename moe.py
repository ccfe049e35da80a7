"""A mixture of experts (MoE), in which a layer has many small MLPs and every token uses a
few.

A router scores the experts for every token. The layer computes the k best and adds them
up, weighted by the softmax of their scores. As in the paper's PowerMoE, no token is
dropped and no expert is shared.

Read `one_by_one` first. It is the whole idea, and far too slow. `MoE.forward` computes
the same fast. It sorts the token-expert pairs by expert, because an expert is fast if its
tokens are adjacent in memory. Then it copies the token of every pair (dispatch),
multiplies the copies of an expert by its matrices, and adds up the k results of every
token (combine).

    python moe.py        check the fast version against it
"""

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import devices, flags

# Shapes: N tokens, C = n_embd, E experts of hidden width M, k of them per token, so N*k
# pairs

# -- The obvious version -----------------------------------------------------------------


def one_by_one(layer: "MoE", x: Tensor) -> Tensor:
    """x [N, C] -> [N, C], one token and one of its experts at a time."""
    results = []
    for token in x:  # [C]
        scores = layer.router(token)  # [E]
        best, experts = scores.topk(layer.k)  # both [k]
        weights = best.softmax(-1)  # [k]
        outputs = []
        for weight, e in zip(weights, experts):
            gate, up = (layer.experts_in[e] @ token).chunk(2)  # both [M]
            hidden = F.silu(gate) * up
            outputs.append(weight * (layer.experts_out[e] @ hidden))
        results.append(sum(outputs))  # [C]
    return torch.stack(results)


# -- The same, fast ----------------------------------------------------------------------


class Router(nn.Linear):
    """Score every expert in float32 or better, because rounding would reroute some tokens."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype))


class MoE(nn.Module):
    """The layer of `one_by_one`, for all tokens and experts at once."""

    def __init__(self, cfg):
        super().__init__()
        self.k = cfg.n_expert_active
        self.router = Router(cfg.n_embd, cfg.n_expert, bias=False)
        # [E, 2M, C], with gate in the first half of the 2M rows and up in the second
        w_in = torch.empty(cfg.n_expert, 2 * cfg.n_ffn, cfg.n_embd)
        w_out = torch.empty(cfg.n_expert, cfg.n_embd, cfg.n_ffn)  # [E, C, M]
        self.experts_in = nn.Parameter(w_in)
        self.experts_out = nn.Parameter(w_out)
        # the sizes of its groups vary, and the compiler would make a program for each
        self.loop = torch.compiler.disable(loop)

    def forward(self, x: Tensor, multiply=None) -> "tuple[Tensor, Routing]":
        """x [..., C] -> y [..., C] in x's dtype, Routing.

        multiply: `grouped` or `loop`. By default `grouped` in bfloat16 on an H100 or H200.
        """
        shape = x.shape
        x = x.flatten(0, -2)  # [N, C]
        dtype = devices.matmul_dtype(x)
        if multiply is None:
            # On the next generation, Blackwell, experts without tokens get wrong gradients
            # from `grouped` (PyTorch issue 172439)
            can_group = devices.is_hopper(x) and dtype == torch.bfloat16
            multiply = grouped if can_group else self.loop

        # 1. Route: every token chooses its k best experts
        scores = self.router(x)  # [N, E]
        best, chosen = scores.topk(self.k)  # both [N, k]
        weight = best.softmax(-1)  # [N, k], over the chosen experts only

        # 2. Sort the N*k pairs by expert. Pair i belongs to token i // k
        n_expert = scores.shape[1]
        small = torch.uint8 if n_expert <= 256 else torch.int64  # one byte sorts fastest
        pairs = chosen.flatten().to(small)  # [N*k], the expert of every pair
        expert, order = pairs.sort(stable=True)  # row j holds pair order[j]
        token = order // self.k  # [N*k], the token of every row
        row = torch.arange(len(order), device=x.device)
        back = torch.empty_like(order)
        back[order] = row  # pair i is in row back[i]
        back = back.view(-1, self.k)  # [N, k], the rows of every token
        ids = torch.arange(n_expert, dtype=small, device=x.device)
        # The rows of expert e end before row ends[e] (int32, as grouped_mm needs it)
        ends = torch.searchsorted(expert, ids, right=True, out_int32=True)  # [E]

        # 3. Dispatch: copy the token and the weight of every pair into the pair's row
        rows = Dispatch.apply(x.to(dtype), token, back)  # [N*k, C]
        weight = Dispatch.apply(weight.view(-1, 1), order, back.view(-1, 1))  # [N*k, 1]

        # 4. Multiply the rows of every expert by its matrices, and by their weights
        w_in = self.experts_in.to(dtype)
        w_out = self.experts_out.to(dtype)
        rows = multiply(rows, weight, ends, w_in, w_out)  # [N*k, C]

        # 5. Combine: add up the k rows of every token
        y = Combine.apply(rows, token, back)  # [N, C]
        return y.view(shape).type_as(x), measure_routing(scores, ends)


# Steps 3 and 5 are linear, and each is the transpose of the other. So the backward pass of
# one is the forward pass of the other. (That of plain indexing would use atomic adds,
# which are slow on a GPU and vary in order.) In both, token [N*k] has the token of every
# row, and back [N, k] the rows of every token.


class Dispatch(torch.autograd.Function):
    """Copy every token into its k rows, x [N, C] -> [N*k, C]."""

    @staticmethod
    def forward(ctx, x: Tensor, token: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (back,) = ctx.saved_tensors
        return add_rows(grad, back), None, None


class Combine(torch.autograd.Function):
    """Add up the k rows of every token, rows [N*k, C] -> [N, C]."""

    @staticmethod
    def forward(ctx, rows: Tensor, token: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return add_rows(rows, back)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (token,) = ctx.saved_tensors
        return grad.index_select(0, token), None, None


def add_rows(rows: Tensor, back: Tensor) -> Tensor:
    """rows[back].sum(1) without its k copies of a token. The compiler fuses the loop."""
    nth_rows = back.unbind(1)  # k times [N], the first row of every token, and so on
    total = rows.index_select(0, nth_rows[0])
    for nth in nth_rows[1:]:
        total += rows.index_select(0, nth)
    return total


# Two ways to multiply. Both take rows [N*k, C], weight [N*k, 1], ends [E], w_in
# [E, 2M, C] and w_out [E, C, M], and return [N*k, C]. The weight goes between the two
# products, because autograd would have to keep more for the backward pass if it came
# after them.


def loop(
    rows: Tensor, weight: Tensor, ends: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """One expert after the other, if `grouped` is not faster. A GPU waits for the sizes."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()  # rows of every expert
    groups = zip(rows.split(sizes), weight.split(sizes), w_in, w_out)
    outputs = []
    for x, weight_of_x, expert_in, expert_out in groups:
        gate, up = expert_in.chunk(2)  # both [M, C]
        hidden = F.silu(F.linear(x, gate)) * F.linear(x, up) * weight_of_x
        outputs.append(F.linear(hidden.to(rows.dtype), expert_out))
    return torch.cat(outputs)


def grouped(
    rows: Tensor, weight: Tensor, ends: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """Two matrix products for all experts together. The sizes of the groups stay on the GPU."""
    gate, up = F.grouped_mm(rows, w_in.mT, offs=ends).chunk(2, dim=-1)  # both [N*k, M]
    hidden = F.silu(gate) * up * weight
    return F.grouped_mm(hidden.to(rows.dtype), w_out.mT, offs=ends)


# -- Do the tokens use all experts? ------------------------------------------------------


class Routing(NamedTuple):
    """Statistics of the router of a layer. For a whole model, every field has n_layer in front."""

    aux_loss: Tensor  # added to the training loss with a small weight
    load: Tensor  # [E] share of the pairs that every expert got
    entropy: Tensor  # nats, of the softmax over all experts, mean over the tokens

    def metrics(self) -> dict:
        """Means over the layers of a whole model, and per layer the largest load / mean load."""
        n_expert = self.load.shape[-1]  # so the mean load is 1 / n_expert
        max_load = self.load.amax(-1) * n_expert  # [n_layer]
        return {
            "aux_loss": self.aux_loss.mean().item(),
            "max_load": max_load.tolist(),
            "router_entropy": self.entropy.mean().item(),
        }


def measure_routing(scores: Tensor, ends: Tensor) -> Routing:
    """Auxiliary loss E * sum_e P_e f_e + 0.1 * mean(logsumexp(scores)^2), with statistics.

    The formula is IBM's. The share f of the pairs is a count without gradient, P is the
    mean probability. So the first term lowers the probability of an expert in proportion
    to its load, and is 1 if all loads are equal. The second term keeps scores small.
    """
    # 1. P, the mean probability of every expert
    log_z = scores.logsumexp(-1, keepdim=True)  # [N, 1]
    probability = (scores - log_z).exp()  # [N, E], the softmax over all experts
    P = probability.mean(0)  # [E]

    # 2. f, its share of the pairs of this pass. In training we count over all processes,
    # because then their mean loss is the loss of one process with all their sequences. We
    # cannot count over all passes of a step, because the gradient of the first needs f.
    # So the loss of an MoE depends on micro_batch_size.
    count = ends.diff(prepend=ends.new_zeros(1)).to(P.dtype)  # [E]
    if torch.is_grad_enabled():  # in training
        count = devices.all_sum(count)
    f = count / count.sum()

    n_expert = scores.shape[1]
    aux_loss = n_expert * (P * f).sum() + 0.1 * log_z.square().mean()
    entropy = torch.special.entr(probability.detach()).sum(-1).mean()
    return Routing(aux_loss, load=f, entropy=entropy)


# -- Check the fast version against the obvious one --------------------------------------


def worst_difference(layer: MoE, x: Tensor, multiply) -> float:
    """Largest relative difference from one_by_one, over the output and every gradient."""
    direction = torch.randn_like(x)  # the gradient that arrives at the output
    inputs = [x, *layer.parameters()]

    fast, _ = layer(x, multiply)
    fast_gradients = torch.autograd.grad(fast, inputs, direction)
    slow = one_by_one(layer, x)
    slow_gradients = torch.autograd.grad(slow, inputs, direction)

    differences = []
    for a, b in zip((fast, *fast_gradients), (slow, *slow_gradients)):
        differences.append((a - b).abs().max() / b.abs().max())
    return torch.stack(differences).max().item()


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("moe.py", __doc__).parse_args(argv)
    from config import make_config

    # 1. A layer with random weights and tokens
    torch.manual_seed(0)
    device = devices.pick_device()
    if device.startswith("cuda"):
        preset = "1B-moe"
        dtype = torch.bfloat16
        limit = 0.05
    else:
        preset = "laptop-moe"
        dtype = torch.float32
        limit = 1e-5
    cfg = make_config(preset=preset)
    layer = MoE(cfg).to(device, dtype)
    for p in layer.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    x = torch.randn(100, cfg.n_embd, device=device, dtype=dtype, requires_grad=True)

    # 2. Both ways to multiply, against one_by_one
    print(f"{preset} on {device}: largest relative difference from one_by_one")
    failed = False
    for multiply in (grouped, loop):
        if device == "mps" and multiply is grouped:
            continue  # grouped_mm does not run there
        error = worst_difference(layer, x, multiply)
        passed = error <= limit  # False for NaN, too
        print(f"{'pass' if passed else 'FAIL'}  {multiply.__name__:<8}{error:9.1e}")
        failed = failed or not passed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
