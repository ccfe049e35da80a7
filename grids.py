"""The grids of the experiments in sweep.py.

A row is (shape, batch sizes in sequences, number of seeds). The preset has all other
fields. `budgets` are the run lengths T in tokens. A search for the learning rate starts
at `guess`, for the smallest T and 1,024 tokens per batch.

    python grids.py        list the grids
"""

import sys
from pathlib import Path

from config import saved_config
from records import differing, identity, settings
from schedules import unread
from tools import flags
from tools.flags import UserError


def grid(
    common: dict,
    warmup_tokens: int,
    shapes: list[dict],
    batches: list[int],
    seeds: int,
    budgets: list[int],
    guess: float = 0.01,
    **more,
) -> dict:
    rows = [(shape, batches, seeds) for shape in shapes]
    common = common | dict(warmup_tokens=warmup_tokens)
    return dict(common=common, rows=rows, budgets=budgets, guess=guess) | more


def doublings(first: int, number: int) -> list[int]:
    return [first * 2**k for k in range(number)]


def width(n: int, head: int = 16, **more) -> dict:
    """The fields of a shape. head: dimensions of a head."""
    return dict(n_embd=n, n_head=n // head) | more


def widths(*sizes: int, head: int = 16, **more) -> list[dict]:
    return [width(n, head, **more) for n in sizes]


def mup(*sizes: int, head: int = 16, **more) -> list[dict]:
    """Every width under muP, then without its rules and with the usual attention."""
    standard = dict(m_width=1.0, attention_multiplier=head**-0.5)
    with_mup = widths(*sizes, head=head, **more)
    without = widths(*sizes, head=head, **more, **standard)
    return with_mup + without


# The paper warms up for a billion tokens at every T, half of its smallest. If we train
# Power, we warm up for 40% of the smallest T, because a Power run starts at its ceiling,
# and after a warmup of a few steps that hurts it for long. Searches for the learning rate
# of WSD take 0.6 to 2.5%.

LAPTOP = dict(preset="laptop", n_layer=2, dtype="float32", final_eval_tokens=2**16)
GPU = dict(
    preset="laptop",
    n_layer=8,
    seq_len=512,
    base_width=256,
    dtype="bfloat16",
    final_eval_tokens=2**19,
)
PAPER = dict(dtype="bfloat16")
MOE = widths(64, preset="laptop-moe", n_ffn=80)
MOE_GPU = widths(256, head=64, preset="laptop-moe", n_ffn=320)
# The scans of Power: factors of a and steps of b around a center. The paper scans a in
# [3, 5], b in [-0.6, -0.4]. The center has the paper's b and q. Its a of 4 would be too
# low for our small batches.
CENTER = dict(power_a=16.0, power_b=-0.51, power_q=1.0)
SCAN = dict(a=[2 ** (k / 2) for k in range(-4, 5)], b=[k / 50 for k in range(-5, 6) if k])
FINER_SCAN = SCAN | dict(a=[2 ** (k / 8) for k in range(-4, 5)])
# A comparison tunes in the cells `tune` (shape, batch size, two T), with the learning
# rates 1e-4 * sqrt(2)^j for all j in `trials`.

GRIDS = {
    "wsd": {
        "quick": grid(LAPTOP, 2_000, widths(32), [2, 4, 8], 1, doublings(80_000, 4)),
        "laptop": grid(LAPTOP, 2_000, widths(32, 64), [1, 2, 4, 8], 3, doublings(80_000, 5)),
        "gpu": grid(GPU, 25_000, widths(128, 256, 512, head=64), doublings(8, 4), 1,
                    doublings(10**6, 5)),
        # In Table 2 the paper tries eight learning rates in every cell. We search
        # instead, because many minima would be too close to an edge.
        "paper": grid(PAPER, 10**9, [dict(preset=name) for name in ("12M", "36M", "121M")],
                      doublings(16, 6), 1, doublings(2 * 10**9, 8), guess=5e-4),
    },
    "power": {
        "quick": grid(LAPTOP | CENTER, 16_000, widths(32), [2, 8], 1, doublings(40_000, 4),
                      **SCAN),
        "laptop": grid(LAPTOP | CENTER, 32_000, widths(64), [2, 4, 8], 2, doublings(80_000, 5),
                       **SCAN),
        "gpu": grid(GPU | CENTER, 400_000, widths(256, head=64), [16, 32, 64], 1,
                    doublings(10**6, 5), **SCAN),
        "paper": grid(PAPER, 10**9, [dict(preset="36M-power")], doublings(32, 5), 1,
                      doublings(2 * 10**9, 7), **FINER_SCAN),
    },
    "transfer": {
        "quick": grid(LAPTOP, 2_000, mup(32, 64, 128), [4], 1, [80_000]),
        "laptop": grid(LAPTOP, 2_000, mup(32, 64, 128, 256), [4], 3, [160_000]),
        "gpu": grid(GPU, 25_000, mup(128, 256, 512, 1024, 2048, head=64), [16], 1, [4 * 10**6]),
        "paper": grid(PAPER, 10**9, mup(128, 256, 512, 1024, head=64, preset="36M", n_ffn=None),
                      [128], 1, [4 * 10**9], guess=5e-4),
    },
    "compare": {
        "quick": grid(LAPTOP | dict(final_eval_tokens=2**15), 8_000, widths(32, 64), [2, 8], 1,
                      doublings(20_000, 4), trials=range(10, 19, 2),
                      tune=(width(32), 2, [20_000, 40_000])),
        "laptop": grid(LAPTOP, 32_000, widths(64, 128) + MOE, [2, 8], 5, doublings(80_000, 5),
                       tune=(width(32), 2, [80_000, 320_000]), trials=range(8, 17)),
        "gpu": grid(GPU, 400_000, widths(256, 512, head=64) + MOE_GPU, [8, 32], 5,
                    doublings(10**6, 5), trials=range(8, 17),
                    tune=(width(128, head=64), 8, [10**6, 4 * 10**6])),
        # decay over a tenth of T, not over the 100 billion tokens of preset 1B-moe
        "paper": grid(PAPER | dict(decay_share=0.1), 10**9,
                      [dict(preset=name) for name in ("121M", "1B", "1B-moe")], [128, 512], 3,
                      doublings(16 * 10**9, 5), trials=range(4, 15),
                      tune=(dict(preset="36M-power"), 128, [4 * 10**9, 16 * 10**9])),
    },
}  # fmt: skip
# batch size 1 at width 128 would take as long as all of width 32
GRIDS["wsd"]["laptop"]["rows"].append((width(128), [2, 4, 8], 3))


def base_of(grid: dict, shape: dict, batch_size: int, seed: int) -> dict:
    """The fields that all runs of a series (one shape, batch size and seed) have."""
    return grid["common"] | shape | dict(batch_size=batch_size, seed=seed, data_seed=seed)


def bases_of(grid: dict) -> list[dict]:
    bases = []
    for shape, batches, seeds in grid["rows"]:
        for batch_size in batches:
            for seed in range(seeds):
                bases.append(base_of(grid, shape, batch_size, seed))
    return bases


def changed(grid: dict, args, typed: dict) -> dict:
    """Put typed fields and axes from the command line into a grid.

    A new width gets the rows of the first width, resized, with heads of the same size.
    """
    rows = grid["rows"]
    first_width = rows[0][0].get("n_embd")
    if args.sweep and "tune" in grid:
        raise UserError(
            "--sweep: a comparison tunes for only one value; give it as a flag"
        )
    if args.widths:
        if first_width is None:
            raise UserError(
                f"--widths {args.widths[0]}: this scale has presets; leave it out"
            )
        first_rows = [row for row in rows if row[0]["n_embd"] == first_width]
        rows = []
        for width in args.widths:
            for shape, batches, seeds in first_rows:
                rows.append((shape | resized(shape, width), batches, seeds))
    for name, values in args.sweep:
        swept = []
        for shape, batches, seeds in rows:
            swept += [(shape | {name: value}, batches, seeds) for value in values]
        rows = swept
    rows = [(shape, args.batches or own, args.seeds or n) for shape, own, n in rows]
    budgets = sorted(args.budgets or grid["budgets"])
    common = grid["common"] | typed
    return grid | dict(common=common, rows=rows, budgets=budgets)


def resized(shape: dict, width: int) -> dict:
    """The sizes of a shape at another width, with heads of the same size."""
    head = shape["n_embd"] // shape["n_head"]
    if width % head:
        raise UserError(f"--widths {width}: heads of {head} do not fit")
    sizes = {"n_embd": width, "n_head": width // head}
    if shape.get("n_ffn"):
        sizes["n_ffn"] = shape["n_ffn"] * width // shape["n_embd"]
    return sizes


# flags of train.py that a sweep chooses or ignores
UNUSED = "preset decay_data eval_every eval_tokens".split()


def check_fields(asked: dict[str, list], configs: list) -> None:
    """Raise UserError for a field on the command line unless the runs have exactly these values.

    asked: field -> the list of its values.
    """
    for name, values in asked.items():
        reading = [cfg for cfg in configs if name not in unread(cfg.schedule)]
        found = {getattr(cfg, name, None) for cfg in reading}
        if name in UNUSED or "auto" in values or found != set(values):
            why = "the experiment chooses or ignores this; leave it out, or see --widths, --sweep"
            raise UserError(f"--{name} {values[0]}: {why}")
    if len({identity(vars(cfg)) for cfg in configs}) < len(configs):
        raise UserError(
            "--sweep: two values make the same run; sweep a field that changes runs"
        )


def check_belongs(
    found: list[dict], configs: list[dict], fingerprint: str, free: tuple, out: Path
) -> None:
    """Raise UserError for a record unlike all configs of a sweep, but for `free` fields.

    fingerprint: of the text of the sweep.
    """
    possible = {identity(config, free) for config in configs}
    for record in found:
        saved_config(record["config"], f"--out {out}")
        text = record["origin"].get("fingerprint")
        if text != fingerprint:
            raise UserError(
                f"--out {out}: has records with fingerprint {text}, and this sweep has "
                f"{fingerprint}; choose another folder"
            )
        if identity(record["config"], free) in possible:
            continue
        theirs = settings(record["config"], free)
        nearest = min(
            (settings(config, free) for config in configs),
            key=lambda ours: len(differing(theirs, ours)),
        )
        name = differing(theirs, nearest)[0]
        raise UserError(
            f"--out {out}: has records with {name} {theirs.get(name)}, and this sweep "
            f"has {nearest.get(name)}; choose another folder"
        )


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("grids.py", __doc__).parse_args(argv)
    for experiment, scales in GRIDS.items():
        for scale, some in scales.items():
            series = len(bases_of(some))
            lengths = f"{some['budgets'][0]:.3g} to {some['budgets'][-1]:.3g}"
            print(
                f"{experiment:<10}{scale:<8}{series:>4} series, T from {lengths} tokens"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
