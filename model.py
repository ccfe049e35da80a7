"""A GPT under muP, dense or MoE, in the sizes of the paper and in two for laptops.

The block is Llama's, with RMSNorm, rotary positions, grouped-query attention, SwiGLU and
no biases. muP adds four multipliers, marked "muP" in the code. Read `Attention`, then
down to `GPT.forward`.

    python model.py                             list the models with counted parameters
    python model.py --export runs/a --to DIR    write a run in the released models' format
    python model.py --import DIR --to a.pt      make a checkpoint of released weights
"""

import dataclasses
import shlex
import sys
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mup
import runs
from config import PRESETS, GPTConfig, make_config, make_shape, saved_config
from moe import MoE, Routing
from tools import devices, flags, granite

# Shapes in the comments:
#   B  sequences in the batch      H  heads of queries
#   T  tokens of a sequence        G  heads of keys and values, each for H / G heads of q
#   C  n_embd, the width           D  d_head, the width of a head
#   V  vocab_size
# (In laws and schedules, T is the length of a run.)


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose output has the dtype of the matrix products that follow.

    Under mixed precision every product would convert its input separately, so q, k and v
    would convert the same tensor three times.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(devices.matmul_dtype(x))


class Attention(nn.Module):
    """Every token looks at itself and earlier tokens, and adds up their weighted values."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.cfg = cfg
        self.q = nn.Linear(cfg.n_embd, cfg.n_head * cfg.d_head, bias=False)
        self.k = nn.Linear(cfg.n_embd, cfg.n_kv_head * cfg.d_head, bias=False)
        self.v = nn.Linear(cfg.n_embd, cfg.n_kv_head * cfg.d_head, bias=False)
        self.out = nn.Linear(cfg.n_head * cfg.d_head, cfg.n_embd, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        B, T, C = x.shape
        q = self.q(x).view(B, T, self.cfg.n_head, -1)  # [B, T, H, D]
        k = self.k(x).view(B, T, self.cfg.n_kv_head, -1)  # [B, T, G, D]
        v = self.v(x).view(B, T, self.cfg.n_kv_head, -1)  # [B, T, G, D]
        q = rotate(q, rope)
        k = rotate(k, rope)
        # muP: the scale is 1 / d_head instead of 1 / sqrt(d_head)
        y = attend(q, k, v, scale=self.cfg.attention_multiplier)  # [B, T, H, D]
        return self.out(y.reshape(B, T, C))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary position embedding in float32, of x [B, T, heads, D] by rope [2, T, 1, D].

    The product of a rotated query and a rotated key depends on the distance of the two
    tokens, and not on where in the sequence they are.
    """
    cos, sin = rope
    # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). A roll by D/2 gives (x2, x1), and
    # the table has the minus sign.
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin)  # x * cos + swapped * sin


def rope_table(cfg: GPTConfig) -> Tensor:
    """Cosines and signed sines of the rotary angles, [2, seq_len, 1, D] in float32.

    As in Llama, entries i and i + D/2 of a head turn together, by t * theta^(-2i/D) at
    position t.
    """
    exponent = torch.arange(0, cfg.d_head, 2).double() / cfg.d_head  # [D/2], 2i/D
    frequency = cfg.rope_theta**-exponent
    position = torch.arange(cfg.seq_len).double()
    angle = torch.outer(position, frequency)  # [seq_len, D/2]
    cos = torch.cat((angle.cos(), angle.cos()), dim=1)  # [seq_len, D]
    sin = torch.cat((-angle.sin(), angle.sin()), dim=1)
    table = torch.stack((cos, sin)).float()
    return table.unsqueeze(2)  # the same for all heads


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal softmax attention, q [B, T, H, D], k and v [B, T, G, D] -> [B, T, H, D].

    The output has v's dtype, in which the rest of the model computes.
    """
    # 1. One dtype for the three. `rotate` gives float32, and v may be bfloat16, in which
    # the backward pass takes a CPU 4 times as long
    dtype = q.dtype if q.is_cpu else v.dtype
    queries = q.to(dtype).transpose(1, 2)  # [B, H, T, D]
    keys = k.to(dtype).transpose(1, 2)  # [B, G, T, D]
    values = v.to(dtype).transpose(1, 2)  # [B, G, T, D]

    # 2. softmax(scale * q @ k.T) @ v, by a fused kernel, outside of autocast, which would
    # convert the dtype again
    with torch.autocast(q.device.type, enabled=False):
        y = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            is_causal=True,
            enable_gqa=keys.shape[1] < queries.shape[1],
            scale=scale,
        )
    return y.transpose(1, 2).to(v.dtype)


class MLP(nn.Module):
    """SwiGLU, in which a gate decides how much of the other hidden layer passes."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.gate = nn.Linear(cfg.n_embd, cfg.n_ffn, bias=False)
        self.up = nn.Linear(cfg.n_embd, cfg.n_ffn, bias=False)
        self.down = nn.Linear(cfg.n_ffn, cfg.n_embd, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [..., C] -> [..., C], and None where MoE.forward returns its Routing."""
        return self.down(F.silu(self.gate(x)) * self.up(x)), None


class Block(nn.Module):
    """Attention, then an MLP or MoE. Both add their output to the residual stream x."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.m_res = cfg.m_res
        self.attn_norm = RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        self.attn = Attention(cfg)
        self.mlp_norm = RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        self.mlp = MoE(cfg) if cfg.n_expert else MLP(cfg)

    def forward(self, x: Tensor, rope: Tensor):
        """x [B, T, C] -> [B, T, C], and the Routing of an MoE or None."""
        # muP: x + m_res * y, which torch.add computes in one pass over memory
        y = self.attn(self.attn_norm(x), rope)
        x = torch.add(x, y, alpha=self.m_res)
        y, routing = self.mlp(self.mlp_norm(x))
        x = torch.add(x, y, alpha=self.m_res)
        return x, routing


class GPT(nn.Module):
    """gpt(idx) -> logits [B, T, V] for every position of the tokens idx [B, T].

    gpt(idx, targets) -> mean cross-entropy in nats per token, and the Routing of all
    layers, or None for a dense model.
    """

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        if not cfg.tie_embeddings:
            self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        # computed from cfg, so it need not be in checkpoints
        self.register_buffer("rope", rope_table(cfg), persistent=False)
        # True keeps only the inputs of blocks for the backward pass
        self.recompute = False
        mup.init_weights(self, mup.rules(cfg))

    def forward(self, idx: Tensor, targets: Tensor | None = None):
        x, routings = self.hidden(idx)
        if targets is None:
            return self.logits(x)
        routing = None
        if self.cfg.n_expert:  # one Routing for all layers
            routing = Routing(
                aux_loss=torch.stack([r.aux_loss for r in routings]),  # [n_layer]
                load=torch.stack([r.load for r in routings]),  # [n_layer, E]
                entropy=torch.stack([r.entropy for r in routings]),  # [n_layer]
            )
        return self.loss(x, targets), routing

    def hidden(self, idx: Tensor):
        """Tokens idx [B, T] -> the output of the last block [B, T, C], and the Routing of
        every block."""
        T = idx.shape[1]
        if T > self.cfg.seq_len:
            raise ValueError(f"{T} tokens are more than seq_len {self.cfg.seq_len}")
        rope = self.rope[:, :T]
        x = self.embed(idx) * self.cfg.m_emb  # muP
        routings = []
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x, routing = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x, routing = block(x, rope)
            routings.append(routing)
        return x, routings

    def logits(self, x: Tensor) -> Tensor:
        """Output of the last block x [..., C] -> logits [..., V]."""
        # muP: divides the logits by m_width. It is cheaper to divide x, which is smaller.
        x = self.norm(x) / self.cfg.logits_scaling
        head = self.embed if self.cfg.tie_embeddings else self.head
        return F.linear(x, head.weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the targets [B, T], from the last block's x [B, T, C]."""
        logits = self.logits(x).flatten(0, 1)  # [B * T, V]
        # at least float32, because bfloat16 is too coarse for a sum over the vocabulary
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(dtype), targets.flatten())

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, temperature=1.0, top_k=50
    ) -> Tensor:
        """Continue idx [B, T >= 1] to [B, T + max_new_tokens], greedily at temperature 0."""
        for _ in range(max_new_tokens):
            # 1. Read the last seq_len tokens, again for every new token
            x, _ = self.hidden(idx[:, -self.cfg.seq_len :])
            logits = self.logits(x[:, -1]).float()  # [B, V]

            # 2. Choose the next token
            if temperature > 0:
                best, tokens = logits.topk(min(top_k, logits.shape[-1]))  # both [B, k]
                p = (best / temperature).softmax(-1)
                choice = torch.multinomial(p, 1)  # [B, 1], an index into tokens
                new = tokens.gather(1, choice)
            else:
                new = logits.argmax(-1, keepdim=True)  # [B, 1]

            # 3. Append it
            idx = torch.cat((idx, new), dim=1)
        return idx

    def n_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def n_active_params(self) -> int:
        """Parameters that one token uses. A tied embedding counts, since it is the output head."""
        cfg = self.cfg
        expert = 3 * cfg.n_embd * cfg.n_ffn  # gate, up and down
        idle = cfg.n_layer * (cfg.n_expert - cfg.n_expert_active) * expert
        if not cfg.tie_embeddings:
            idle += self.embed.weight.numel()  # a token only looks up one row
        return self.n_params() - idle

    def flops_per_token(self) -> float:
        """Operations to train on one token, at full seq_len.

        A multiply-add counts as 2, and the backward pass costs twice the forward, so a
        weight of a matrix takes 6. In causal attention a query meets seq_len / 2 keys on
        average. With n_embd multiply-adds for its scores and as many for the values, that
        is 6 * n_embd * seq_len in a layer.
        """
        cfg = self.cfg
        gains = sum(p.numel() for p in self.parameters() if p.dim() < 2)
        matrices = self.n_active_params() - gains
        return 6.0 * matrices + 6.0 * cfg.n_layer * cfg.n_embd * cfg.seq_len


def empty_model(cfg: GPTConfig) -> GPT:
    """Shapes only, on the meta device, which takes no memory and no random numbers."""
    with torch.device("meta"):
        return GPT(cfg)


def load_model(
    path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None
) -> GPT:
    """The GPT of a run folder (newest checkpoint), checkpoint file or Granite folder, in eval mode.

    From the folder of a run whose average replaces its decay, it loads the averaged
    weights, and sets `model.averaged`. dtype: of the weights, by default as saved. Raises
    UserError or OSError.
    """
    path = Path(path)

    # 1. Read the config of the run and the weights
    if granite.is_granite(path):
        saved = granite.read_folder(path)
    elif path.is_dir():
        saved = runs.newest_checkpoint(path)
    else:
        saved = runs.read_checkpoint(path)
    run = saved["config"]
    averaged = False
    if "schedule" in run:  # else the weights are released
        averaged = saved_config(run, path).uses_average and path.is_dir()
    weights = saved.pop("average" if averaged else "model")

    # 2. Put the weights into an empty model
    names = {field.name for field in dataclasses.fields(GPTConfig)}
    shape = {name: value for name, value in run.items() if name in names}
    model = empty_model(make_shape(**shape))
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:  # lists missing, unknown or misshapen tensors
        raise flags.UserError(f"{path}: {textwrap.shorten(str(error), 300)}") from None
    del weights  # now `to` frees every tensor after its conversion
    model.to(dtype=dtype)
    model.rope = rope_table(model.cfg)  # stays float32

    # 3. Add the facts that our programs need
    model.run = run  # its config, with the name of its tokenizer
    model.token_hash = saved.get("token_hash")  # of its tokens, if the weights are ours
    model.averaged = averaged
    return model.to(device).eval()


def print_presets() -> None:
    print(f"{'preset':<12}{'parameters':>14}{'per token':>15}{'GFLOP per token':>17}")
    for name in PRESETS:
        model = empty_model(make_config(preset=name))
        active = model.n_active_params()
        gflop = model.flops_per_token() / 1e9
        print(f"{name:<12}{model.n_params():14,}{active:15,}{gflop:17.3g}")


def export(run: Path, to: Path) -> str:
    """Write a run or checkpoint as a Granite folder, and return a line about it.

    Raises UserError or OSError.
    """
    import data  # a file of the project that comes later in the reading order

    model = load_model(run)
    tokenizer = data.tokenizer_of(model.run)
    idx = torch.arange(min(model.cfg.vocab_size, model.cfg.seq_len, 64))[None]
    with torch.no_grad():
        logits = model(idx)
    if not logits.isfinite().all():
        raise flags.UserError(f"--export {run}: its outputs are not numbers; it diverged")
    compared = granite.write_folder(
        to,
        fields=dataclasses.asdict(model.cfg),
        weights=model.state_dict(),
        tokenizer=tokenizer,
        example=(idx, logits),
    )
    text = f"{to}: {model.n_params():,} parameters, tokenizer {tokenizer.name}"
    if model.averaged:
        text += ", averaged weights"
    if compared:
        return f"{text}, same logits in transformers"
    return f"{text}, not compared (transformers is not installed)"


def import_granite(folder: Path, to: Path) -> str:
    """Write released weights as a checkpoint at 0 tokens, from which train.py can branch.

    Returns a line about it. Raises UserError or OSError.
    """
    import data  # a file of the project that comes later in the reading order

    model = load_model(folder)  # checks shapes and names
    if not granite.is_granite(folder):
        raise flags.UserError(f"--import {folder}: is no Granite folder")
    if to.exists():
        raise flags.UserError(f"--to {to}: already exists; choose another file")
    content = {
        "config": dataclasses.asdict(model.cfg) | model.run,
        "model": model.state_dict(),
        "tokens": 0,
        "fingerprint": None,  # of unknown text
        "token_hash": data.token_hash(data.tokenizer_of(model.run)),
    }
    runs.write_checkpoint(to, content)
    branch = f"python train.py --branch {shlex.quote(str(to))} --schedule wsd --lr 1e-4"
    return f"{to}: {model.n_params():,} parameters; train it further, as in {branch}"


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("model.py", __doc__)
    work = parser.add_mutually_exclusive_group()
    add = work.add_argument
    add("--export", type=Path, metavar="RUN", help="run or checkpoint to export")
    add("--import", type=Path, metavar="DIR", help="released weights to import")
    parser.add_argument(
        "--to", type=Path, metavar="PATH", help="new folder, or checkpoint of --import"
    )
    args = parser.parse_args(argv)
    folder = vars(args)["import"]  # a keyword of Python
    try:
        if (args.export or folder) and not args.to:
            raise flags.UserError("--to: is missing; name the new folder or checkpoint")
        if args.export:
            print(export(args.export, args.to))
        elif folder:
            print(import_granite(folder, args.to))
        else:
            print_presets()
    except (flags.UserError, OSError) as error:
        return flags.fail("model.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
