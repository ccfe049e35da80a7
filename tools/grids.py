"""The grids of sweep.py: experiment -> scale -> common fields, rows, run lengths. And its flags.

A row is (shape, batch sizes in sequences, seeds); fields that it does not list come from the
preset. `budgets` are the run lengths T in tokens. `guess` is where a search for the learning rate
starts, at the smallest T and 1,024 tokens per batch.
"""

import argparse
import itertools
import re
from pathlib import Path

from tools.config import whole_number
from tools.records import differs, identity


def width(n: int, head: int = 16) -> dict:
    return dict(n_embd=n, n_head=n // head)


def doublings(first: int, number: int) -> list[int]:
    return [first * 2**k for k in range(number)]


def grid(common: dict, shapes: list, batches: list, seeds: int, budgets: list, **more) -> dict:
    return dict(common=common, rows=[(s, batches, seeds) for s in shapes], budgets=budgets) | more


def _mup(widths: tuple, head: int) -> list[dict]:
    """Shapes: each width under muP, and without muP's rules, with the usual scale of attention."""
    standard = dict(m_width=1.0, attention_multiplier=head**-0.5)
    shape = lambda n: width(n, head) | dict(n_ffn=5 * n // 2)
    return [shape(n) | rules for rules in ({}, standard) for n in widths]


# The warmup: the paper's is a billion tokens for every T, half of its smallest. Where Power is
# trained, ours is 40% of the smallest T, because a Power run starts at its ceiling, and with a
# warmup of a few steps that hurts it for long. Elsewhere it is 5% (quick) or 2.5% (laptop, gpu).
_laptop = dict(
    preset="laptop", n_layer=2, warmup_tokens=2_000, dtype="float32",
    eval_tokens=2**16, final_eval_tokens=2**16,
)  # fmt: skip
_8k, _16k, _32k = (_laptop | dict(warmup_tokens=n) for n in (8_000, 16_000, 32_000))
_gpu = dict(
    preset="laptop", n_layer=8, seq_len=512, base_width=256, warmup_tokens=25_000,
    dtype="bfloat16", eval_tokens=2**19, final_eval_tokens=2**19,
)  # fmt: skip
_400k = _gpu | dict(warmup_tokens=400_000)
_32, _64, _128 = (width(n) for n in (32, 64, 128))
_g128, _g256, _g512 = (width(n, 64) for n in (128, 256, 512))
_wide = [_64, _128, dict(preset="laptop-moe", **_64, n_ffn=80)]
_gpu_wide = [_g256, _g512, dict(preset="laptop-moe", **_g256, n_ffn=320)]
_bf16 = dict(dtype="bfloat16")
_36M = _bf16 | dict(preset="36M")
_paper = [dict(preset=name) for name in ("12M", "36M", "121M")]
_power = [dict(preset="36M-power")]
_1B = [dict(preset=name) for name in ("121M", "1B", "1B-moe")]
_brief, _quick, _longer = doublings(20_000, 5), doublings(40_000, 4), doublings(80_000, 5)
_million, _billions = doublings(10**6, 5), doublings(2 * 10**9, 8)
# Factors of a and steps of b, around the preset's. The paper's Table 3: a in [3, 5], b in
# [-0.6, -0.4], in steps that it does not give; a scan has to be in equal steps to have a minimum.
_scan = dict(a=[2 ** (k / 2) for k in range(-4, 5)], b=[k / 50 for k in range(-5, 6) if k])
_finer = _scan | dict(a=[2 ** (k / 8) for k in range(-4, 5)])
# A comparison: `tune` is the cell in which `trials` are made, in steps of sqrt(2): of the learning
# rate from 0.0008 to 0.0512, of a from 2 to 128; with our b from 0.25 to 16, for about the same
# learning rates. `ours`: b and q of results/wsd-laptop-long, measured with this warmup.
_trials = dict(cosine=range(6, 19), wsd=range(6, 19), power=range(2, 15), ours=range(-4, 9))
_ours = dict(trials=_trials, ours=(-0.3, 0.5), guess=0.01)
_paper_trials = dict(
    tune=(*_power, 128, 4 * 10**9), guess=2e-4,
    trials=dict(cosine=range(4, 17), wsd=range(4, 17), power=range(-2, 11)),
)  # fmt: skip
_own_decay = _bf16 | dict(decay_tokens=None)  # a tenth of T, not that of 1B-moe

GRIDS = {
    "wsd": {
        "quick": grid(_laptop, [_32, _64], [2, 4, 8], 1, _quick, guess=0.01),
        "laptop": grid(_laptop, [_32, _64], [1, 2, 4, 8], 3, _longer, guess=0.01),
        "gpu": grid(_gpu, [_g128, _g256, _g512], [8, 16, 32, 64], 1, _million, guess=0.01),
        # The paper's Table 2 tries the same eight learning rates in every cell, 0.0002 to 0.0256 by
        # factors of 2. Many minima lie too close to an edge to be fitted then; we search instead.
        "paper": grid(_bf16, _paper, doublings(16, 6), 1, _billions, guess=5e-4),
    },
    # one cell outside the grid of `wsd`, at 4 times its longest T (fit.py --beyond)
    "beyond": {
        "quick": grid(_laptop, [_64], [4], 1, [1_280_000], guess=0.007),
        "laptop": grid(_laptop, [_64], [4], 1, [5_120_000], guess=0.005),
        "gpu": grid(_gpu, [_g256], [32], 1, [64 * 10**6], guess=0.005),
        "paper": grid(_bf16, _paper[1:2], [128], 1, [1024 * 10**9], guess=2e-5),
    },
    "power": {
        "quick": grid(_16k, [_32], [2, 8], 1, _quick, **_scan),
        "laptop": grid(_32k, [_64], [2, 4, 8], 2, _longer, **_scan),
        "gpu": grid(_400k, [_g256], [16, 32, 64], 1, _million, **_scan),
        "paper": grid(_bf16, _power, doublings(32, 5), 1, _billions[:7], **_finer),
    },
    "transfer": {
        "quick": grid(_laptop, _mup((32, 64, 128), 16), [4], 1, [80_000], guess=0.01),
        "laptop": grid(_laptop, _mup((32, 64, 128, 256), 16), [4], 3, [160_000], guess=0.01),
        "gpu": grid(_gpu, _mup((128, 256, 512, 1024, 2048), 64), [16], 1, [4 * 10**6], guess=0.01),
        "paper": grid(_36M, _mup((128, 256, 512, 1024), 64), [128], 1, [4 * 10**9], guess=5e-4),
    },
    "compare": {
        "quick": grid(_8k, [_32, _64], [2, 8], 1, _brief, tune=(_32, 2, 40_000), **_ours),
        "laptop": grid(_32k, _wide, [2, 8], 3, _longer, tune=(_32, 2, 80_000), **_ours),
        "gpu": grid(_400k, _gpu_wide, [8, 32], 3, _million, tune=(_g128, 8, 10**6), **_ours),
        "paper": grid(_own_decay, _1B, [128, 512], 3, doublings(16 * 10**9, 5), **_paper_trials),
    },
}  # fmt: skip
# batch size 1 at width 128 would take as long as all of width 32
GRIDS["wsd"]["laptop"]["rows"].append((_128, [2, 4, 8], 3))

# -- Grids from the command line -------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """'320k,1.28M' -> [320000, 1280000]"""
    for suffix, exponent in dict(k="e3", M="e6", B="e9").items():
        text = text.replace(suffix, exponent)
    return [whole_number(part) for part in text.split(",")]


def resized(shape: dict, n: int) -> dict:
    """A shape at width n, with heads of the same size."""
    grow = {"n_embd", "n_head", "n_ffn"} & shape.keys()
    return shape | {name: shape[name] * n // shape["n_embd"] for name in grow}


def change(grid: dict, widths=None, batches=None, budgets=None, seeds=None, sweep=()) -> dict:
    """A grid with these axes in place of its own. sweep: (field, values), ... for all combinations.

    A width that the grid lacks gets the rows of the grid's first width, resized.
    """
    rows = grid["rows"]
    if widths:
        if not all("n_embd" in shape for shape, *_ in rows):
            raise ValueError(f"--widths {widths[0]}: this scale has presets; leave it out")
        first, there = rows[0][0]["n_embd"], {shape["n_embd"] for shape, *_ in rows}
        at = lambda n: [row for row in rows if row[0]["n_embd"] == (n if n in there else first)]
        rows = [(resized(shape, n), *rest) for n in widths for shape, *rest in at(n)]
    choices = [[(name, value) for value in values] for name, values in sweep]
    swept = [dict(pairs) for pairs in itertools.product(*choices)]
    rows = [(s | more, batches or b, seeds or n) for s, b, n in rows for more in swept]
    return grid | dict(rows=rows, budgets=sorted(budgets or grid["budgets"]))


AXES = {  # flags that a sweep replaces -> the axis to type
    "n_embd": "widths", "batch_size": "batches", "total_tokens": "budgets", "seed": "seeds",
    "data_seed": "seeds",
}  # fmt: skip
UNUSED = {"preset", "schedule", "decay_data", "eval_every", "eval_tokens", "save_every"}
UNUSED |= {"keep_checkpoints"}
EXPERIMENTS = {  # -> the schedules that it trains, the fields that it chooses
    "wsd": ({"wsd"}, {"lr"}),
    "beyond": ({"wsd"}, {"lr"}),
    "transfer": ({"wsd"}, {"lr"}),
    "power": ({"power"}, set()),
    "compare": (
        {"cosine", "wsd", "power"}, {"lr", "power_a", "power_b", "average", "decay_tokens"},
    ),
}  # fmt: skip


def check_typed(experiment: str, grid: dict, typed: dict, reads: dict[str, set]) -> None:
    """Raise ValueError for a typed field that can change no run, or that the experiment chooses.

    reads: schedule -> the fields that depend on it.
    """
    schedules, chosen = EXPERIMENTS[experiment]
    chosen = chosen.union(*(shape for shape, *_ in grid["rows"]))
    read = set().union(*(reads[schedule] for schedule in schedules))
    unused = UNUSED | set().union(*reads.values()) - read
    for name, value in typed.items():
        if name in AXES:
            raise ValueError(f"--{name} {value}: in a sweep, use --{AXES[name]}")
        if name in chosen:
            raise ValueError(f"--{name} {value}: the experiment chooses it; leave it out")
        if name in unused:
            raise ValueError(f"--{name} {value}: `{experiment}` does not use it; leave it out")


def shard(text: str) -> tuple[int, int]:
    """'1/4' -> (1, 4)"""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text}: must be I/N, with I from 1 to N")
    return int(match[1]), int(match[2])


def at_least_one(text: str) -> int:
    if whole_number(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return whole_number(text)


def add_sweep_flags(parser, parse_field) -> None:
    """The flags of sweep.py. parse_field(name, text) -> the value of a swept field."""

    def swept(text: str) -> tuple[str, list]:
        name, _, values = text.partition("=")
        return name, [parse_field(name, value) for value in values.split(",")]

    add = parser.add_argument
    add("experiment", choices=tuple(GRIDS))
    add("--scale", choices=tuple(GRIDS["wsd"]), default="quick", help="the grid (default: quick)")
    add("--workers", type=at_least_one, help="processes (default: one per GPU, or per CPU core)")
    add("--shard", type=shard, default=(1, 1), metavar="I/N", help="series I, I + N, ... only")
    add("--dry_run", action="store_true", help="print the number of runs and tokens, and stop")
    for name in ("widths", "batches", "budgets"):
        help = f"{name} in place of the grid's, as in 320k,1.28M"
        add(f"--{name}", type=numbers, metavar="N,N,...", help=help)
    add("--seeds", type=at_least_one, metavar="N", help="seeds 0 to N-1 in place of the grid's")
    add("--sweep", type=swept, action="append", default=[], metavar="FIELD=V,V,...",
        help="a field with several values; may be repeated")  # fmt: skip
    add("--decay_share", type=float, help="decay tokens as a share of T (default: 0.1)")


def check_belongs(records: list[dict], own: list[tuple[dict, tuple]], out: Path) -> None:
    """Raise ValueError for a record that a sweep would not make, whichever setting differs.

    own: a config of every kind of run in the sweep, with the fields that may differ from it.
    """
    possible = {(free, identity(config, free)) for config, free in own}
    choices = {free for _, free in own}
    for record in records:
        if possible.isdisjoint((free, identity(record, free)) for free in choices):
            different = [(differs(record, config, free), config) for config, free in own]
            (name, *_), config = min(different, key=lambda pair: len(pair[0]))
            raise ValueError(
                f"--out {out}: has records with {name} {record[name]}, and this sweep has "
                f"{config[name]}; choose another folder"
            )
