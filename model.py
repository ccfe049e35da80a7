"""A GPT under muP, dense or MoE, in the sizes of the paper and in two for laptops.

The block is Llama's, with RMSNorm, rotary positions, grouped-query attention, SwiGLU and
no biases. muP adds four multipliers, marked "muP" in the code. Read `Attention`, then
down to `GPT.forward`.

    python model.py                           list the models with counted parameters
    python model.py --export runs/a --to DIR  write a run as Granite, the released models' format
"""

import dataclasses
import sys
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mup
from config import PRESETS, GPTConfig
from moe import MoE, Routing
from records import uses_average
from tools import flags, granite, runs, tokenizers
from tools.devices import attention_dtype, matmul_dtype
from tools.flags import UserError


# Shapes: B sequences of T tokens (in laws and schedules, T is a run length), C = n_embd,
# H heads of queries, G of keys and values, D = d_head, V = vocab_size


def rope_table(cfg: GPTConfig) -> Tensor:
    """Cosines and signed sines of the rotary angles, [2, seq_len, 1, D] in float32. As in
    Llama, entries i and i + D/2 of a head turn together, by t * theta^(-2i/D) at position
    t."""
    frequency = cfg.rope_theta ** -(torch.arange(0, cfg.d_head, 2).double() / cfg.d_head)
    angle = torch.outer(torch.arange(cfg.seq_len).double(), frequency)  # [seq_len, D/2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))).float()[
        :, :, None
    ]


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary position embedding in float32, of x [B, T, heads, D] by rope [2, T, 1,
    D]."""
    cos, sin = rope
    # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). A roll by D/2 gives (x2, x1).
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class RMSNorm(nn.RMSNorm):
    """Convert once to the dtype of the matrix products that follow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(matmul_dtype(x))


class Attention(nn.Module):
    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.cfg = cfg
        self.q = nn.Linear(cfg.n_embd, cfg.n_head * cfg.d_head, bias=False)
        self.k = nn.Linear(cfg.n_embd, cfg.n_kv_head * cfg.d_head, bias=False)
        self.v = nn.Linear(cfg.n_embd, cfg.n_kv_head * cfg.d_head, bias=False)
        self.out = nn.Linear(cfg.n_head * cfg.d_head, cfg.n_embd, bias=False)

    def forward(self, x: Tensor, rope: Tensor, cache: dict | None = None) -> Tensor:
        """x [B, T, C] -> [B, T, C]. cache: keys and values of earlier tokens; x's are
        appended."""
        (B, T, C), D = x.shape, self.cfg.d_head
        q = rotate(self.q(x).view(B, T, -1, D), rope).transpose(1, 2)  # [B, H, T, D]
        k = rotate(self.k(x).view(B, T, -1, D), rope).transpose(1, 2)  # [B, G, T, D]
        v = self.v(x).view(B, T, -1, D).transpose(1, 2)  # [B, G, T, D]
        dtype = attention_dtype(x)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if cache is not None:
            if cache:  # it is empty at first
                k, v = (
                    torch.cat((cache["k"], k), dim=2),
                    torch.cat((cache["v"], v), dim=2),
                )
            cache.update(k=k, v=v)
        S = k.shape[
            2
        ]  # T new tokens attend to S. One needs no mask, all (T == S) a causal one
        mask = None if T in (1, S) else x.new_ones(T, S, dtype=torch.bool).tril(S - T)
        with torch.autocast(
            x.device.type, enabled=False
        ):  # it would convert q, k and v again
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=T == S,
                enable_gqa=k.shape[1] < q.shape[1],
                scale=self.cfg.attention_multiplier,  # muP: 1 / d_head instead of 1 / sqrt(d_head)
            )
        return self.out(y.transpose(1, 2).reshape(B, T, C).type_as(x))


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
    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.m_res = cfg.m_res
        self.attn_norm = RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        self.attn = Attention(cfg)
        self.mlp_norm = RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        self.mlp = MoE(cfg) if cfg.n_expert else MLP(cfg)

    def forward(self, x: Tensor, rope: Tensor, cache: dict | None = None):
        """x [B, T, C] -> [B, T, C], and the Routing of an MoE or None."""
        # muP: x + m_res * branch, in one pass over memory
        x = torch.add(x, self.attn(self.attn_norm(x), rope, cache), alpha=self.m_res)
        y, routing = self.mlp(self.mlp_norm(x))
        return torch.add(x, y, alpha=self.m_res), routing


class GPT(nn.Module):
    """gpt(idx) -> logits [B, T, V] for every position of the tokens idx [B, T]. gpt(idx,
    targets) -> mean cross-entropy in nats per token, Routing of all layers or None."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        if not cfg.tie_embeddings:
            self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.register_buffer(
            "rope", rope_table(cfg), persistent=False
        )  # not in checkpoints
        self.recompute = (
            False  # True keeps only the inputs of blocks for the backward pass
        )
        mup.init_weights(self, mup.rules(cfg))

    def hidden(self, idx: Tensor, cache: list[dict] | None = None) -> tuple[Tensor, list]:
        """idx [B, T] -> the output of the last block [B, T, C], and the Routing of every
        block."""
        start = cache[0]["k"].shape[2] if cache and cache[0] else 0  # tokens in the cache
        end = start + idx.shape[1]  # idx holds positions start to end - 1
        if end > self.cfg.seq_len:
            raise ValueError(f"{end} tokens are more than seq_len {self.cfg.seq_len}")
        x = self.embed(idx) * self.cfg.m_emb  # muP
        rope, routings = self.rope[:, start:end], []
        for block, past in zip(self.blocks, cache or [None] * self.cfg.n_layer):
            if self.recompute and torch.is_grad_enabled():
                x, routing = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x, routing = block(x, rope, past)
            routings.append(routing)
        return x, routings

    def logits(self, x: Tensor) -> Tensor:
        """Output of the last block x [..., C] -> logits [..., V]."""
        x = (
            self.norm(x) / self.cfg.logits_scaling
        )  # muP: logits / m_width, cheaper before the head
        return F.linear(
            x, self.embed.weight if self.cfg.tie_embeddings else self.head.weight
        )

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(x).flatten(0, 1)
        dtype = torch.promote_types(
            logits.dtype, torch.float32
        )  # bfloat16 is too coarse here
        return F.cross_entropy(logits.to(dtype), targets.flatten())

    def forward(self, idx: Tensor, targets: Tensor | None = None):
        x, routings = self.hidden(idx)
        if targets is None:
            return self.logits(x)
        # one Routing for all layers, with aux_loss and entropy [n_layer], load [n_layer,
        # E]
        routing = (
            Routing(*map(torch.stack, zip(*routings))) if self.cfg.n_expert else None
        )
        return self.loss(x, targets), routing

    def n_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def n_active_params(self) -> int:
        """Parameters that one token uses. A tied embedding counts, since it is the output
        head."""
        cfg = self.cfg
        idle = (
            cfg.n_layer
            * (cfg.n_expert - cfg.n_expert_active)
            * 3
            * cfg.n_embd
            * cfg.n_ffn
        )
        return (
            self.n_params()
            - idle
            - (0 if cfg.tie_embeddings else self.embed.weight.numel())
        )

    def flops_per_token(self) -> float:
        """Operations per token at full seq_len, with the causal half of attention. A
        weight of a matrix takes 6, as a multiply-add counts as 2 and backward costs twice
        the forward."""
        cfg = self.cfg
        matrices = self.n_active_params() - sum(
            p.numel() for p in self.parameters() if p.dim() < 2
        )
        return 6.0 * matrices + 6.0 * cfg.n_layer * cfg.n_embd * cfg.seq_len

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, temperature=1.0, top_k=50
    ) -> Tensor:
        """Continue idx [B, T >= 1] to [B, T + max_new_tokens], greedily at temperature
        0."""
        cache: list[dict] = [{} for _ in self.blocks]
        unread = idx  # tokens that are not in the cache
        for _ in range(max_new_tokens):
            if idx.shape[1] <= self.cfg.seq_len:
                x, _ = self.hidden(unread, cache)
            else:  # the window slides and all positions change, so read it again
                x, _ = self.hidden(idx[:, -self.cfg.seq_len :])
            logits = self.logits(x[:, -1]).float()  # [B, V]
            new = logits.argmax(-1, keepdim=True)  # [B, 1]
            if temperature > 0:
                best, tokens = logits.topk(min(top_k, logits.shape[-1]))  # both [B, k]
                new = tokens.gather(
                    1, torch.multinomial((best / temperature).softmax(-1), 1)
                )
            idx = torch.cat((idx, new), dim=1)
            unread = new
        return idx


def empty_model(cfg: GPTConfig) -> GPT:
    """Shapes only, on the meta device, which takes no memory and no random numbers."""
    with torch.device("meta"):
        return GPT(cfg)


def load_model(
    path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None
) -> GPT:
    """The GPT of a run folder (newest checkpoint), checkpoint file or Granite folder, in
    eval mode.

    From the folder of a run whose average replaces its decay, it loads the averaged
    weights, and sets `model.averaged`. dtype: of the weights, by default as saved. Raises
    UserError or OSError.
    """
    path, averaged = Path(path), False
    if granite.is_granite(path):
        run = granite.read_json(path / "config.json") | {
            "tokenizer": str(path / "tokenizer.json")
        }
        model = empty_model(GPTConfig(**granite.read_config(path)))
        weights = granite.read_weights(path, names=model.state_dict())
    else:
        saved = (
            runs.newest_checkpoint(path) if path.is_dir() else runs.read_checkpoint(path)
        )
        averaged = path.is_dir() and uses_average(saved["config"])
        run, weights = saved["config"], saved.pop("average" if averaged else "model")
        shape = {f.name for f in dataclasses.fields(GPTConfig)} & run.keys()
        model = empty_model(GPTConfig(**{name: run[name] for name in shape}))
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:  # lists tensors that are missing, unknown or misshapen
        raise UserError(f"{path}: {textwrap.shorten(str(error), 300)}") from None
    del weights  # now `to` frees every tensor after its conversion
    model.to(dtype=dtype)
    model.rope = rope_table(model.cfg)  # stays float32
    model.run = run  # its config, with the name of its tokenizer
    model.averaged = averaged
    return model.to(device).eval()


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("model.py", __doc__)
    parser.add_argument(
        "--export", type=Path, metavar="RUN", help="run or checkpoint to export"
    )
    parser.add_argument(
        "--to", type=Path, metavar="DIR", default="exported", help="new folder"
    )
    args = parser.parse_args(argv)
    if args.export is None:
        print(f"{'preset':<12}{'parameters':>14}{'per token':>15}{'GFLOP per token':>17}")
        for name, shape in PRESETS.items():
            model = empty_model(GPTConfig(**shape))
            active, gflop = model.n_active_params(), model.flops_per_token() / 1e9
            print(f"{name:<12}{model.n_params():14,}{active:15,}{gflop:17.3g}")
        return 0
    import data

    try:
        model = load_model(args.export)
        tokenizer = data.tokenizer_of(model.run)
        fields, files = (
            dataclasses.asdict(model.cfg),
            tokenizers.tokenizer_files(tokenizer),
        )
        granite.write_folder(
            args.to, fields, model.state_dict(), tokenizer.eot_token, files
        )
    except (UserError, OSError) as error:
        return flags.fail("model.py", error)
    which = ", averaged weights" if model.averaged else ""
    print(
        f"{args.to}: {model.n_params():,} parameters, tokenizer {tokenizer.name}{which}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
