"""A GPT under muP: the paper's models, dense and mixtures of experts, from a laptop's to 3.5 billion parameters.

The block is Llama's (RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases); what
the paper adds is four multipliers, each marked "muP" where it is applied. The sizes of all models
stand in PRESETS, in the order of the paper's tables.

Read `GPTConfig`, then `GPT.forward` downwards from `Attention`.

    python model.py                           the model table with counted parameters beside the paper's
    python model.py --export runs/a --to DIR  writes a run in the format of the released models (Granite)
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mup
from moe import MoE, Routing, matmul_dtype
from tools.config import check_limits, fill_in, option
from tools.runs import newest_checkpoint, read_checkpoint

# ---------------------------------------------------------------------------------------------
# Configuration


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. A None is replaced by the value that its help names."""

    n_layer: int = option(help="transformer blocks", above=0)
    n_embd: int = option(help="width of the residual stream", above=0)
    n_head: int = option(help="attention heads", above=0)
    seq_len: int = option(help="tokens per sequence", above=0)
    vocab_size: int = option(help="rows of the embedding", above=1)
    n_kv_head: int | None = option(None, "heads of keys and values (default: n_head)", above=0)
    n_ffn: int | None = option(None, "hidden width of the MLP, or of each expert (default: 2.5 * n_embd, as in the paper's sweeps)", above=0)
    n_expert: int = option(0, "MLPs to choose from in each block; 0: one for all tokens, a dense model", at_least=0)
    n_expert_active: int = option(0, "experts that each token goes through", at_least=0)

    # muP (the paper's Table 1)
    base_width: int = option(256, "width at which m_width is 1", above=0)
    m_width: float | None = option(None, "width multiplier (default: n_embd / base_width)", above=0)
    m_emb: float = option(1.0, "multiplies the embedding's output", above=0)
    m_res: float = option(1.0, "multiplies each branch before it is added to the residual stream", above=0)
    init_std: float = option(0.02, "standard deviation of the initial weights, at m_width 1", above=0)
    router_rule: str = option("hidden", "how muP treats the router, see mup.rules", choices=("hidden", "readout", "embedding"))
    depth_init: bool = option(False, "also divide the initial output matrices by sqrt(2 * n_layer), as IBM's code does")
    attention_multiplier: float | None = option(None, "factor of the attention logits (default: 1 / d_head)", above=0)
    logits_scaling: float | None = option(None, "divides the output logits (default: m_width)", above=0)

    norm_eps: float = option(1e-5, "added inside RMSNorm's square root", above=0)
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0)
    tie_embeddings: bool = option(True, "one matrix reads tokens in and writes them out")

    def __post_init__(self):
        check_limits(self)
        if self.n_embd % self.n_head:
            raise ValueError(f"--n_head {self.n_head}: must divide n_embd {self.n_embd}")
        if self.d_head % 2:
            raise ValueError(f"--n_head {self.n_head}: n_embd / n_head is {self.d_head}, rotary positions need it even")
        fill_in(self, n_kv_head=self.n_head, n_ffn=round(2.5 * self.n_embd), m_width=self.n_embd / self.base_width)
        fill_in(self, attention_multiplier=1 / self.d_head, logits_scaling=self.m_width)
        if self.n_head % self.n_kv_head:
            raise ValueError(f"--n_kv_head {self.n_kv_head}: must divide n_head {self.n_head}")
        if self.n_expert_active > self.n_expert:
            raise ValueError(f"--n_expert_active {self.n_expert_active}: must be at most n_expert {self.n_expert}")
        if self.n_expert and not self.n_expert_active:
            raise ValueError(f"--n_expert {self.n_expert}: needs n_expert_active too, how many of them each token goes through")
        for name in ("n_embd", "n_ffn") if self.n_expert else ():
            if getattr(self, name) % 8:  # grouped_mm wants rows of whole 16 bytes
                raise ValueError(f"--{name} {getattr(self, name)}: must be a multiple of 8 in a mixture of experts")

    @property
    def d_head(self) -> int:
        return self.n_embd // self.n_head


# The paper's models: Table 2 (WSD search), Table 3 (Power search), Table 4 (1B and 3B). Their
# vocabulary is StarCoder's. The laptop's are ours: bytes instead, and one CPU core's patience.
_bytes = dict(vocab_size=256, seq_len=128, base_width=64)
_paper = dict(vocab_size=49152, seq_len=4096)
_power = dict(init_std=0.1, m_emb=12)  # from Table 3 on
PRESETS = {
    "laptop":      dict(n_layer=3,  n_embd=128,  n_head=4,  init_std=0.1, m_emb=10, **_bytes),
    "laptop-moe":  dict(n_layer=3,  n_embd=128,  n_head=4,  n_ffn=160, n_expert=8, n_expert_active=2, init_std=0.1, m_emb=10, **_bytes),
    "12M":         dict(n_layer=32, n_embd=128,  n_head=2,  n_ffn=320,  **_paper),
    "36M":         dict(n_layer=32, n_embd=256,  n_head=4,  n_ffn=640,  **_paper),
    "121M":        dict(n_layer=32, n_embd=512,  n_head=8,  n_ffn=1280, **_paper),
    "36M-power":   dict(n_layer=32, n_embd=256,  n_head=4,  n_ffn=640,  m_res=0.26, **_power, **_paper),
    "1B":          dict(n_layer=40, n_embd=1536, n_head=24, n_ffn=4096, m_res=0.22, **_power, **_paper),
    "1B-moe":      dict(n_layer=24, n_embd=1024, n_head=16, n_kv_head=8, n_ffn=512, n_expert=32, n_expert_active=8, m_res=0.28, **_power, **_paper),
    # 2304 / 256 is 9, but the paper's table says 8 for this model; the table is what they ran.
    "PowerLM-3B":  dict(n_layer=40, n_embd=2304, n_head=36, n_ffn=9216, m_res=0.22, m_width=8.0, **_power, **_paper),
    "PowerMoE-3B": dict(n_layer=32, n_embd=1536, n_head=24, n_kv_head=8, n_ffn=512, n_expert=40, n_expert_active=8, m_res=0.22, **_power, **_paper),
}  # fmt: skip
PAPER_COUNTS = {
    "12M": "12M", "36M": "36M", "121M": "121M", "36M-power": "36M", "1B": "1.2B", "1B-moe": "1.3B", "PowerLM-3B": "3.5B", "PowerMoE-3B": "3.3B",
}  # fmt: skip

# ---------------------------------------------------------------------------------------------
# The model. B sequences, T tokens each, C = n_embd, H heads (of queries), G of keys and values,
# D = d_head


def rope_table(cfg: GPTConfig) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (RoFormer): cosines and signed sines of the angles, [seq_len, 1, D] each.

    Entry i of a head turns together with entry i + D/2 (the half-rotation layout of GPT-NeoX and
    Llama): the pair's angle at position t is t * theta^(-2i/D).
    """
    frequency = cfg.rope_theta ** (-torch.arange(0, cfg.d_head, 2, dtype=torch.float64) / cfg.d_head)
    angle = torch.outer(torch.arange(cfg.seq_len, dtype=torch.float64), frequency)  # [seq_len, D/2]
    cos = torch.cat((angle.cos(), angle.cos()), dim=-1)
    sin = torch.cat((-angle.sin(), angle.sin()), dim=-1)
    return cos.float()[:, None], sin.float()[:, None]


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of x [B, T, heads, D]; rope: two tables [T, 1 or n_head, D]. In float32, as the angles are."""
    cos, sin = (table[:, : x.shape[2]] for table in rope)  # keys may have fewer heads than queries
    # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin); rolling by D/2 swaps the halves
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class RMSNorm(nn.RMSNorm):
    """Ends in the dtype of the matrix products, so that three of them need not convert it three times (1.07x on a CPU)."""

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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: dict | None = None) -> Tensor:
        B, T, C = x.shape
        cfg = self.cfg
        q = rotate(self.q(x).view(B, T, cfg.n_head, cfg.d_head), rope).transpose(1, 2)     # [B, H, T, D]
        k = rotate(self.k(x).view(B, T, cfg.n_kv_head, cfg.d_head), rope).transpose(1, 2)  # [B, G, T, D]
        v = self.v(x).view(B, T, cfg.n_kv_head, cfg.d_head).transpose(1, 2)                # [B, G, T, D]  # fmt: skip
        # On a CPU the backward pass of bfloat16 attention takes 4 times as long as float32's
        dtype = torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if cache is not None:  # generation: put the new keys and values behind the ones so far
            if cache:
                k, v = torch.cat((cache["k"], k), dim=2), torch.cat((cache["v"], v), dim=2)
            cache["k"], cache["v"] = k, v
        S = k.shape[2]  # T new tokens look back on S
        # `is_causal` means a square lower triangle: right when T == S. One new token sees all.
        mask = None if T in (1, S) else torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        with torch.autocast(x.device.type, enabled=False):  # it would convert them again
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=T == S,
                scale=cfg.attention_multiplier,  # muP: 1 / d_head where others have 1 / sqrt(d_head)
                enable_gqa=cfg.n_kv_head < cfg.n_head,
            )  # fmt: skip
        return self.out(y.transpose(1, 2).reshape(B, T, C).type_as(x))


class MLP(nn.Module):
    """SwiGLU: one hidden layer, the gate, decides how much of the other one passes. Answers as MoE does."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.gate = nn.Linear(cfg.n_embd, cfg.n_ffn, bias=False)
        self.up = nn.Linear(cfg.n_embd, cfg.n_ffn, bias=False)
        self.down = nn.Linear(cfg.n_ffn, cfg.n_embd, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.down(F.silu(self.gate(x)) * self.up(x)), None  # nothing was routed


class Block(nn.Module):
    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.m_res = cfg.m_res
        self.attn_norm = RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        self.attn = Attention(cfg)
        self.mlp_norm = RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        self.mlp = MoE(cfg) if cfg.n_expert else MLP(cfg)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: dict | None = None) -> tuple[Tensor, Routing | None]:
        # muP: x + m_res * branch (`alpha` is the factor, without a pass over memory of its own)
        x = torch.add(x, self.attn(self.attn_norm(x), rope, cache), alpha=self.m_res)
        y, routing = self.mlp(self.mlp_norm(x))
        return torch.add(x, y, alpha=self.m_res), routing


class GPT(nn.Module):
    """A decoder-only language model, initialized by muP's rules.

    gpt(idx) -> logits [B, T, V] for every position of the tokens idx [B, T]
    gpt(idx, targets) -> (mean cross-entropy in nats per token, a scalar; Routing of a mixture, else None)
    """

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        if not cfg.tie_embeddings:
            self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        cos, sin = rope_table(cfg)
        self.register_buffer("cos", cos, persistent=False)  # computed, so not part of a checkpoint
        self.register_buffer("sin", sin, persistent=False)
        self.recompute = False  # in the backward pass, instead of keeping what is inside of the blocks
        mup.init_weights(self, mup.rules(cfg))

    def hidden(self, idx: Tensor, cache: list[dict] | None = None) -> tuple[Tensor, list[Routing | None]]:
        """idx [B, T] -> what the last block puts out, [B, T, C], and each block's Routing."""
        cfg = self.cfg
        start = cache[0]["k"].shape[2] if cache and cache[0] else 0  # position of idx's first token
        if start + idx.shape[1] > cfg.seq_len:
            raise ValueError(f"{start + idx.shape[1]} tokens are more than the model's seq_len {cfg.seq_len}")
        rope = self.cos[start : start + idx.shape[1]], self.sin[start : start + idx.shape[1]]  # [T, 1, D] each
        if idx.device.type == "cpu":  # one copy per head: without broadcasting, heads of 16 rotate 1.5 times as fast
            rope = [table.repeat(1, cfg.n_head, 1) for table in rope]
        x = self.embed(idx) * cfg.m_emb  # [B, T, C]  muP
        routings = []
        for i, block in enumerate(self.blocks):
            if self.recompute and torch.is_grad_enabled():
                x, routing = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x, routing = block(x, rope, cache[i] if cache is not None else None)
            routings.append(routing)
        return x, routings

    def logits(self, x: Tensor) -> Tensor:
        """What the last block puts out, x [..., C] -> [..., V]."""
        x = self.norm(x) / self.cfg.logits_scaling  # muP: logits / m_width, cheaper done before the head
        return F.linear(x, self.embed.weight if self.cfg.tie_embeddings else self.head.weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bfloat16 is too coarse for the softmax
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def forward(self, idx: Tensor, targets: Tensor | None = None, cache: list[dict] | None = None):
        x, routings = self.hidden(idx, cache)
        if targets is None:
            return self.logits(x)
        routing = Routing(*map(torch.stack, zip(*routings))) if self.cfg.n_expert else None  # [n_layer], [n_layer, E], [n_layer]
        return self.loss(x, targets), routing

    # -- counting ------------------------------------------------------------------------------

    def n_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def n_active_params(self) -> int:
        """Parameters that one token passes through; a tied embedding counts, as the output head."""
        cfg = self.cfg
        idle = cfg.n_layer * (cfg.n_expert - cfg.n_expert_active) * 3 * cfg.n_embd * cfg.n_ffn  # experts not chosen
        return self.n_params() - idle - (0 if cfg.tie_embeddings else self.embed.weight.numel())

    def flops_per_token(self) -> float:
        """Floating-point operations of one token's forward and backward pass at full seq_len.

        Backward costs twice the forward, a multiply-add counts 2: 6 per weight of a matrix. Of the
        attention matrix only the causal half is counted (counting all of it flatters by 17 % at
        1B and sequence 4096).
        """
        cfg = self.cfg
        matrices = self.n_active_params() - sum(p.numel() for p in self.parameters() if p.dim() < 2)
        return 6.0 * matrices + 6.0 * cfg.n_layer * cfg.n_embd * cfg.seq_len

    # -- sampling ------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None, use_cache: bool = True
    ) -> Tensor:
        """Continue the tokens idx [B, T], T >= 1 -> [B, T + max_new_tokens].

        temperature 0 takes the most likely token. The model has never seen positions beyond
        seq_len: when the window is full, its older half is forgotten and the rest read again.
        """
        window, cache = idx[:, -self.cfg.seq_len :], None
        for _ in range(max_new_tokens):
            if window.shape[1] > self.cfg.seq_len:
                window, cache = window[:, -(self.cfg.seq_len // 2 + 1) :], None
            if use_cache and cache is not None:
                logits = self(window[:, -1:], cache=cache)[:, -1]  # [B, V]: only the newest token
            else:
                cache = [{} for _ in self.blocks] if use_cache else None
                logits = self(window, cache=cache)[:, -1]
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                logits = logits.float() / temperature
                if top_k is not None:
                    worst = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits = logits.masked_fill(logits < worst, -math.inf)
                new = torch.multinomial(logits.softmax(-1), 1)  # [B, 1]
            idx, window = torch.cat((idx, new), dim=1), torch.cat((window, new), dim=1)
        return idx


# ---------------------------------------------------------------------------------------------
# Loading


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None) -> GPT:
    """The GPT of a run's folder (its newest checkpoint), a checkpoint file or a Granite folder, in eval mode.

    dtype: of the weights (default: as they are saved). They are mapped from the file, never in memory twice.
    Raises FileNotFoundError where there is no checkpoint, ValueError where it cannot be read.
    """
    path = Path(path)
    if is_granite(path):
        cfg, weights = read_granite(path)
    else:
        saved = newest_checkpoint(path) if path.is_dir() else read_checkpoint(path)
        fields = {f.name for f in dataclasses.fields(GPTConfig)}
        cfg, weights = GPTConfig(**{k: v for k, v in saved["config"].items() if k in fields}), saved.pop("model")
    with torch.device("meta"):  # no memory, no random numbers: the weights come from the file
        model = GPT(cfg)
    model.load_state_dict(weights, assign=True)
    del weights  # what follows converts one tensor after the other, and the old one can go
    model.to(dtype=dtype)
    model.cos, model.sin = rope_table(cfg)  # these stay float32
    return model.to(device).eval()


# ---------------------------------------------------------------------------------------------
# Granite: the format of IBM's released models, PowerLM-3B and PowerMoE-3B, which `transformers` opens

GRANITE_NAMES = {  # the last part of our parameters' names -> theirs, inside of a layer or of the model
    "embed": "embed_tokens", "norm": "norm", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "router": "block_sparse_moe.router.layer",
    "experts_in": "block_sparse_moe.input_linear", "experts_out": "block_sparse_moe.output_linear",
}  # fmt: skip
NEWER_NAMES = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight", "moe.router.weight": "moe.router.layer.weight"}


def granite_name(name: str) -> str:
    """'blocks.3.attn.q.weight' -> 'model.layers.3.self_attn.q_proj.weight'."""
    *where, part = name.removesuffix(".weight").split(".")
    if part == "head":
        return "lm_head.weight"
    return f"model.{f'layers.{where[1]}.' if where else ''}{GRANITE_NAMES[part]}.weight"


def is_granite(path: Path) -> bool:
    config = path / "config.json"
    return config.is_file() and '"model_type"' in config.read_text(encoding="utf-8", errors="replace")


def granite_config(path: Path) -> GPTConfig:
    """The shape that a folder's config.json describes; what it leaves out is the default of `transformers`.

    Every multiplier is read, none computed. The file knows no m_width: for training on, it is
    logits_scaling, which it was in the released models. Raises ValueError for a shape that GPT does not have.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if config["model_type"] not in ("granite", "granitemoe"):
            raise ValueError(f"model_type {config['model_type']!r} is neither granite nor granitemoe")
        rope = {"rope_type": "default"} | (config.get("rope_parameters") or config.get("rope_scaling") or {})
        for name, supported in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
            if config.get(name, supported) != supported:
                raise ValueError(f"{name} is {config[name]!r}, this GPT has only {supported!r}")
        if rope["rope_type"] != "default":
            raise ValueError(f"rope_type {rope['rope_type']!r} is not supported")
        if config.get("head_dim") not in (None, config["hidden_size"] // config["num_attention_heads"]):
            raise ValueError(f"head_dim {config['head_dim']} is not hidden_size / num_attention_heads")
        scaling = float(config.get("logits_scaling", 1.0))
        return GPTConfig(
            n_layer=config["num_hidden_layers"], n_embd=config["hidden_size"], n_head=config["num_attention_heads"],
            n_kv_head=config.get("num_key_value_heads"), n_ffn=config["intermediate_size"], vocab_size=config["vocab_size"],
            seq_len=config.get("max_position_embeddings", 2048), n_expert=config.get("num_local_experts", 0),
            n_expert_active=config.get("num_experts_per_tok", 0), m_width=scaling, logits_scaling=scaling,
            m_emb=config.get("embedding_multiplier", 1.0), m_res=config.get("residual_multiplier", 1.0),
            attention_multiplier=config.get("attention_multiplier", 1.0), init_std=config.get("initializer_range", 0.02),
            norm_eps=config.get("rms_norm_eps", 1e-6), rope_theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            tie_embeddings=config.get("tie_word_embeddings", False),
        )  # fmt: skip
    except KeyError as missing:
        raise ValueError(f"{file}: lacks {missing}") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:  # also JSON and Unicode errors
        raise ValueError(f"{file}: not a configuration that can be read ({error})") from None


def read_granite(path: Path) -> tuple[GPTConfig, dict[str, Tensor]]:
    """A Granite folder -> its shape and its weights under our names, mapped from the file and not yet read.

    Raises FileNotFoundError or ValueError where files or tensors are missing, damaged, unknown or misshapen.
    """
    cfg = granite_config(path)
    with torch.device("meta"):
        shapes = {granite_name(name): (name, p.shape) for name, p in GPT(cfg).named_parameters()}
    index, files = path / "model.safetensors.index.json", [path / "model.safetensors"]
    if index.exists():  # a large model, in several files
        try:
            files = sorted({path / file for file in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{index}: damaged, it does not say which file has which tensor") from None
    weights = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file, its checkpoint is not complete")
        try:
            loaded = safetensors.torch.load_file(file)
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a safetensors file, or a damaged one ({error})") from None
        for theirs, tensor in loaded.items():
            for newer, name in NEWER_NAMES.items():
                theirs = theirs.replace(newer, name)
            if theirs == "lm_head.weight" and cfg.tie_embeddings:
                continue  # the embedding once more
            if theirs not in shapes:
                raise ValueError(f"{file}: has a tensor {theirs}, which this shape of model does not")
            name, shape = shapes[theirs]
            if tensor.shape != shape:
                raise ValueError(f"{file}: {theirs} is {list(tensor.shape)}, by config.json it should be {list(shape)}")
            weights[name] = tensor
    if missing := [theirs for theirs, (name, _) in shapes.items() if name not in weights]:
        raise ValueError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return cfg, weights


def export_granite(model: GPT, to: Path, eot: int = 0, tokenizer: dict[str, str] | None = None) -> None:
    """Write a folder that `transformers`, and load_model, open. It appears at the end, by rename, or not at all.

    eot: id of end-of-text. tokenizer: the files of the tokenizer, name -> content.
    Raises FileExistsError if `to` exists, OSError if it cannot be written.
    """
    cfg, kind = model.cfg, "GraniteMoe" if model.cfg.n_expert else "Granite"
    if to.exists():
        raise FileExistsError(f"--to {to}: exists already, name another folder or remove it")
    experts = {"num_local_experts": cfg.n_expert, "num_experts_per_tok": cfg.n_expert_active, "router_aux_loss_coef": 0.01}
    config = {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "torch_dtype": str(model.embed.weight.dtype).removeprefix("torch."),
        "hidden_size": cfg.n_embd, "intermediate_size": cfg.n_ffn, "num_hidden_layers": cfg.n_layer, "num_attention_heads": cfg.n_head,
        "num_key_value_heads": cfg.n_kv_head, "vocab_size": cfg.vocab_size, "max_position_embeddings": cfg.seq_len,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rms_norm_eps": cfg.norm_eps, "rope_theta": cfg.rope_theta,
        "tie_word_embeddings": cfg.tie_embeddings, "embedding_multiplier": cfg.m_emb, "residual_multiplier": cfg.m_res,
        "attention_multiplier": cfg.attention_multiplier, "logits_scaling": cfg.logits_scaling, "initializer_range": cfg.init_std,
        "bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot, **(experts if cfg.n_expert else {}),
    }  # fmt: skip
    building = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        building.mkdir(parents=True)
        for name, content in {"config.json": json.dumps(config, indent=1) + "\n", **(tokenizer or {})}.items():
            (building / name).write_text(content, encoding="utf-8")
        weights = {granite_name(name): p.detach().contiguous() for name, p in model.named_parameters()}
        safetensors.torch.save_file(weights, building / "model.safetensors", metadata={"format": "pt"})
        os.rename(building, to)
    except (OSError, safetensors.SafetensorError) as error:
        raise OSError(f"--to {to}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)


# ---------------------------------------------------------------------------------------------


def export(run: Path | None, to: Path | None) -> None:
    """`--export RUN --to DIR`: the run's newest weights, with its tokenizer."""
    import data  # the one thing that a model does not know of is text

    if run is None or to is None:
        raise ValueError("--export RUN and --to DIR go together")
    model = load_model(run)
    tokenizer = data.tokenizer_of(run)
    export_granite(model, to, tokenizer.eot_token, data.tokenizer_files(tokenizer))
    print(f"{to}: {model.n_params():,} parameters, {model.embed.weight.dtype}, tokenizer {tokenizer.name}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="model.py", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--export", type=Path, metavar="RUN", help="run, checkpoint or Granite folder to write as a Granite folder")
    parser.add_argument("--to", type=Path, metavar="DIR", help="the new folder, with --export")
    args = parser.parse_args(argv)
    if args.export or args.to:
        try:
            export(args.export, args.to)
        except (ValueError, OSError) as mistake:
            print(f"model.py: {mistake}", file=sys.stderr)
            return 2
        return 0
    print(
        f"{'preset':<12}{'layers':>6}{'width':>6}{'heads (kv)':>11}{'ffn':>6}{'experts':>9}{'m_width':>8}{'m_emb':>6}{'m_res':>6}"
        f"{'init':>6}{'parameters':>15}{'paper':>6}{'active':>15}{'GFLOP/token':>12}"
    )
    for name, shape in PRESETS.items():
        cfg = GPTConfig(**shape)
        with torch.device("meta"):  # shapes only: PowerLM-3B costs no memory here
            model = GPT(cfg)
        heads = f"{cfg.n_head} ({cfg.n_kv_head})"
        experts = f"{cfg.n_expert_active} of {cfg.n_expert}" if cfg.n_expert else "-"
        active = model.n_active_params() - model.embed.weight.numel()
        print(
            f"{name:<12}{cfg.n_layer:6d}{cfg.n_embd:6d}{heads:>11}{cfg.n_ffn:6d}{experts:>9}{cfg.m_width:8g}{cfg.m_emb:6g}"
            f"{cfg.m_res:6g}{cfg.init_std:6g}{model.n_params():15,d}{PAPER_COUNTS.get(name, '-'):>6}{active:15,d}"
            f"{model.flops_per_token() / 1e9:12.3g}"
        )
    print("\nactive: what a token passes through, without the embedding (the paper: 377M for 1B-moe, 800M for PowerMoE-3B)")
    print("GFLOP/token: forward and backward at the full sequence length, causal attention counted once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
