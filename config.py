"""Everything that determines a run: the shape of the model, the training, and the
presets.

A field of these classes is a flag of train.py with its help, type and limits. A value on
the command line comes before the preset, and the preset before the default here.
The mark `runtime` says that a field changes how we compute or report a run, but not its
loss. A resumed run may change these fields, and two runs that differ only there are equal.
The mark `fixed` says that a branch may not change a field. The shape is fixed, too.

    python config.py        list the presets with all their values
"""

import dataclasses
import sys
from dataclasses import MISSING, dataclass

from schedules import DECAY_SHAPES, SCHEDULES, has_decay, is_planned, make_schedule
from tools import flags
from tools.flags import UserError, option


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. make_shape puts the values that the help names in place of None."""

    n_layer: int = option(help="transformer blocks", above=0)
    n_embd: int = option(help="width of the residual stream", above=0)
    n_head: int = option(help="attention heads", above=0)
    seq_len: int = option(help="tokens per sequence", above=0)
    vocab_size: int = option(
        help="tokens of the vocabulary, by default as in the corpus",
        above=1,
        below=2**31,
    )
    n_kv_head: int | None = option(
        None, "heads of keys and values (default: n_head)", above=0
    )
    n_ffn: int | None = option(
        None, "hidden width, MLP or expert (default: 2.5 n_embd)", above=0
    )
    n_expert: int = option(
        0, "experts in an MoE layer, or 0 for a dense model", at_least=0
    )
    n_expert_active: int = option(0, "experts per token", at_least=0)

    # muP (the paper's Table 1)
    base_width: int = option(256, "width at which m_width is 1", above=0)
    m_width: float | None = option(
        None, "width multiplier (default: n_embd / base_width)", above=0
    )
    m_emb: float = option(1.0, "multiplies the output of the embedding", above=0)
    m_res: float = option(1.0, "multiplies every residual branch", above=0)
    init_std: float = option(
        0.02, "standard deviation of initial weights at m_width 1", above=0
    )
    attention_multiplier: float | None = option(
        None, "in attention (default 1 / d_head)", above=0
    )
    logits_scaling: float | None = option(
        None, "divides the logits (default: m_width)", above=0
    )

    norm_eps: float = option(1e-5, "added inside RMSNorm's square root", above=0)
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0)
    tie_embeddings: bool = option(True, "one matrix reads tokens and predicts them")

    def __post_init__(self):
        if self.n_embd % (2 * self.n_head):
            self.refuse("n_head", f"must divide n_embd {self.n_embd} into even parts")
        if self.n_head % self.n_kv_head:
            self.refuse("n_kv_head", f"must divide n_head {self.n_head}")
        if self.n_expert_active > self.n_expert:
            self.refuse("n_expert_active", f"must be at most n_expert {self.n_expert}")
        if self.n_expert and not self.n_expert_active:
            self.refuse("n_expert", "needs n_expert_active too")
        if self.n_expert and self.n_embd % 8:
            self.refuse("n_embd", "must be a multiple of 8 with experts")
        if self.n_expert and self.n_ffn % 8:
            self.refuse("n_ffn", "must be a multiple of 8 with experts")

    def refuse(self, name: str, rule: str) -> None:
        raise UserError(f"--{name} {getattr(self, name)}: {rule}")

    @property
    def d_head(self) -> int:
        return self.n_embd // self.n_head


# -- Presets -----------------------------------------------------------------------------

# The models of the paper, from Table 2 (WSD search), Table 3 (Power search) and Table 4
# (1.2B, 1.3B, 3.5B and 3.3B parameters), with StarCoder's vocabulary. Batch size, T and
# learning rate of _search are from Table 2. The paper names no micro-batches. Ours of
# _large fit on one H100 for the models of 1B. Those of 3B need --micro_batch_size 2
# --recompute there (docs/train.md). We have not tried those of _search on a GPU.
_wsd = dict(vocab_size=49152, seq_len=4096)
_search = dict(batch_size=128, micro_batch_size=8, total_tokens=32 * 10**9, lr=0.0026)
_power = dict(_wsd, init_std=0.1, m_emb=12)
_moe = dict(_power, n_ffn=512, n_kv_head=8, n_expert_active=8)
_large = dict(batch_size=1024, micro_batch_size=4, lr=0.01)

# The two laptop models are ours, for bytes. They follow our law and not the paper's, with
# learning rates tuned in the runs of research/results/laptop.
_laptop = dict(
    n_layer=3, n_embd=128, n_head=4, init_std=0.1, m_emb=10, vocab_size=256, seq_len=128,
    base_width=64, batch_size=8, total_tokens=3_200_000, warmup_tokens=100_000, lr=0.004,
    power_a=0.5059, power_b=-0.3, power_q=0.5, log_every=50_000, eval_every=10**6,
    eval_tokens=2**16, save_every=10**6,
)  # fmt: skip
PRESETS = {
    "laptop":      dict(_laptop),
    "laptop-moe":  dict(_laptop, n_ffn=160, n_expert=8, n_expert_active=2),
    "12M":         dict(_wsd,   **_search, n_layer=32, n_embd=128,  n_head=2,  n_ffn=320),
    "36M":         dict(_wsd,   **_search, n_layer=32, n_embd=256,  n_head=4,  n_ffn=640),
    "121M":        dict(_wsd,   **_search, n_layer=32, n_embd=512,  n_head=8,  n_ffn=1280),
    "36M-power":   dict(_power, **_search, n_layer=32, n_embd=256,  n_head=4,  n_ffn=640,
                        m_res=0.26),
    "1B":          dict(_power, **_large, n_layer=40, n_embd=1536, n_head=24, n_ffn=4096,
                        m_res=0.22, total_tokens=10**12),
    "1B-moe":      dict(_moe,   **_large, n_layer=24, n_embd=1024, n_head=16, n_expert=32,
                        m_res=0.28, total_tokens=1100 * 10**9,  # 1T in the text
                        decay_tokens=100 * 10**9),
    "PowerLM-3B":  dict(_power, **_large, n_layer=40, n_embd=2304, n_head=36, n_ffn=9216,
                        m_res=0.22, total_tokens=1250 * 10**9, decay_tokens=250 * 10**9,
                        m_width=8.0),  # as in the paper's table, although 2304 / 256 is 9
    "PowerMoE-3B": dict(_moe,   **_large, n_layer=32, n_embd=1536, n_head=24, n_expert=40,
                        m_res=0.22, total_tokens=3000 * 10**9, decay_tokens=500 * 10**9),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainConfig(GPTConfig):
    """Everything that determines a run. Lengths are in tokens, batch sizes in sequences."""

    preset: str = option("laptop", "row of PRESETS", choices=tuple(PRESETS), fixed=True)
    schedule: str = option("power", "learning-rate schedule", choices=tuple(SCHEDULES))
    total_tokens: int = option(help="tokens to train on", above=0, at_most=10**15)
    batch_size: int = option(help="sequences per optimizer step", above=0)
    micro_batch_size: int | None = option(
        None, "most sequences per pass (default: all)", above=0, runtime=True
    )

    # the learning rate. schedules.SCHEDULES lists the fields that a schedule reads
    lr: float = option(0.01, "peak learning rate of wsd, cosine and constant", above=0)
    lr_max: float = option(0.02, "ceiling of the power schedule", above=0)
    power_a: float = option(4.0, "a of the power schedule, beta^q * a * n^b", above=0)
    power_b: float = option(-0.51, "b of the power schedule", at_most=0)
    power_q: float = option(1.0, "q of the power schedule, 1 in the paper", at_least=0)
    warmup_tokens: int = option(10**9, "tokens of linear warmup", at_least=0)
    decay_share: float | None = option(
        None, "the decay as a share of the run (default: 0.1)", at_least=0, at_most=1
    )
    decay_tokens: int | None = option(
        None, "tokens of the decay, in place of decay_share", at_least=0
    )
    decay_shape: str = option(
        "exp", "how power and wsd decay to 0", choices=tuple(DECAY_SHAPES)
    )
    min_lr_ratio: float = option(
        0.1, "the cosine ends at this share of lr", at_least=0, at_most=1
    )

    average: bool = option(
        False, "also average the weights over the last tenth of the tokens"
    )
    router_aux_weight: float = option(
        0.01, "weight of the MoE auxiliary loss", at_least=0
    )
    weight_decay: float = option(0.1, "AdamW's weight decay", at_least=0)
    beta1: float = option(0.9, "AdamW's first beta", at_least=0, below=1)
    beta2: float = option(0.95, "AdamW's second beta", at_least=0, below=1)
    adam_eps: float = option(1e-10, "AdamW's epsilon", at_least=0)
    grad_clip: float = option(
        1.0, "largest norm of the gradient (0: no clipping)", at_least=0
    )

    seed: int = option(
        0, "random seed for the initial weights", at_least=0, at_most=2**63 - 1
    )
    data_seed: int = option(
        0, "random seed for the data order", at_least=0, at_most=2**63 - 1
    )
    data: str | None = option(
        None,
        "corpus, or several with weights, as in web:0.8,code:0.2 (default: embedded)",
    )
    decay_data: str | None = option(
        None, "corpora during the decay, as in --data (default: the same)"
    )
    tokenizer: str = option("bytes", "tokenizer of the embedded corpus")
    out: str | None = option(
        None, "folder of the run (default: a new numbered one in runs/)", runtime=True
    )

    device: str = option(
        "auto", "cuda, mps or cpu (auto: the first available)", runtime=True
    )
    dtype: str = option(
        "auto",
        "dtype of matrix products (auto: bfloat16 if faster)",
        choices=("auto", "float32", "bfloat16"),
    )
    compile: bool | None = option(
        None, "torch.compile (default: on cuda, width 256 and up)", runtime=True
    )
    recompute: bool = option(
        False,
        "recompute activations, for less memory and a third more work",
        runtime=True,
    )

    log_every: int = option(
        50_000_000, "tokens between lines of progress", above=0, runtime=True
    )
    eval_every: int = option(10**9, "tokens between validations", above=0, runtime=True)
    eval_tokens: int | None = option(
        None, "tokens per validation (default: all)", above=0, runtime=True
    )
    final_eval_tokens: int | None = option(
        None, "tokens, last validation (default: all)", above=0
    )
    save_every: int = option(10**10, "tokens between checkpoints", above=0, runtime=True)
    keep_checkpoints: int = option(
        3, "how many to keep, besides the last before decay", above=1, runtime=True
    )

    def __post_init__(self):
        super().__post_init__()
        micro = self.micro_batch_size or self.batch_size
        if self.batch_size % micro and micro % self.batch_size:
            self.refuse(
                "micro_batch_size", f"must divide {self.batch_size}, or be a multiple"
            )
        if self.total_tokens < self.batch_tokens:
            self.refuse("total_tokens", f"a batch has {self.batch_tokens}")
        if self.decay_data and not self.decay_tokens:
            self.refuse("decay_data", "this run has no decay")
        try:
            make_schedule(self)
        except ValueError as error:  # warmup and decay do not fit
            raise UserError(error) from None

    @property
    def batch_tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def decay_start(self) -> int:
        return self.total_tokens - self.decay_tokens

    @property
    def uses_average(self) -> bool:
        """Does the average of the weights replace the decay? Then it is the result of the run.

        A planned schedule, such as a cosine, has no separate decay, because all of it is one.
        """
        return self.average and not self.decay_tokens and not is_planned(self.schedule)


# -- Making a config ---------------------------------------------------------------------

FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
RUNTIME = {name for name, field in FIELDS.items() if field.metadata.get("runtime")}
FIXED = {name for name, field in FIELDS.items() if field.metadata.get("fixed")}
FIXED |= {field.name for field in dataclasses.fields(GPTConfig)}


def runtime_fields(config: dict) -> set[str]:
    """Names of the fields that do not change the loss of a run with this config.

    An MoE balances its experts in every pass (`moe.measure_routing`). So there the loss
    depends on the sequences per pass.
    """
    return RUNTIME - {"micro_batch_size"} if config.get("n_expert") else RUNTIME


def make_config(**typed) -> TrainConfig:
    """The config of a preset with the typed fields. Raises UserError for an impossible value."""
    preset = typed.get("preset", TrainConfig.preset)
    if preset not in PRESETS:
        raise UserError(f"--preset {preset}: must be one of {', '.join(PRESETS)}")
    fields = PRESETS[preset] | typed
    if typed.get("decay_share") is not None:  # instead of the decay_tokens of the preset
        fields["decay_tokens"] = typed.get("decay_tokens")
    fields = with_defaults(TrainConfig, fields)

    # The decay takes decay_tokens, or a share of the run, at most all after the warmup
    share = fields["decay_share"]
    tokens = fields["decay_tokens"]
    if not has_decay(fields["schedule"]):
        fields["decay_tokens"] = 0
    elif share is not None or tokens is None:
        share = 0.1 if share is None else share
        total = fields["total_tokens"]
        longest = max(0, total - fields["warmup_tokens"])
        fields["decay_share"] = share
        fields["decay_tokens"] = min(int(share * total), longest)
        if tokens not in (None, fields["decay_tokens"]):
            raise UserError(
                f"--decay_share {share} --decay_tokens {tokens:,}: give only one of them"
            )
    return TrainConfig(**fields)


def saved_config(fields: dict, where) -> TrainConfig:
    """The config in a file `where`. Raises UserError if a different version wrote it."""
    unknown = sorted(fields.keys() - FIELDS.keys())
    if unknown:
        raise UserError(
            f"{where}: this version has no setting {unknown[0]}; is it of a fork?"
        )
    missing = sorted(FIELDS.keys() - fields.keys())
    if missing:
        raise UserError(f"{where}: made by an older version, without {missing[0]}")
    return make_config(**fields)


def make_shape(**fields) -> GPTConfig:
    """A shape of a model. Raises UserError for an impossible value."""
    return GPTConfig(**with_defaults(GPTConfig, fields))


def with_defaults(kind: type, fields: dict) -> dict:
    """The fields of a config with all defaults, also those that follow from other fields."""
    usual = {f.name: f.default for f in dataclasses.fields(kind)}
    fields = {name: x for name, x in usual.items() if x is not MISSING} | fields
    flags.check_limits(kind, fields)  # first, because we divide by some
    following = {
        "n_kv_head": fields["n_head"],
        "n_ffn": round(2.5 * fields["n_embd"]),
        "m_width": fields["n_embd"] / fields["base_width"],
        "attention_multiplier": fields["n_head"] / fields["n_embd"],
    }
    for name, value in following.items():
        if fields[name] is None:
            fields[name] = value
    if fields["logits_scaling"] is None:
        fields["logits_scaling"] = fields["m_width"]
    return fields


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("config.py", __doc__).parse_args(argv)
    for preset in PRESETS:
        print(preset)
        for name, value in vars(make_config(preset=preset)).items():
            print(f"    {name:<20} {value}")
    return 0


if __name__ == "__main__":
    flags.end_with_reader()
    sys.exit(main())
