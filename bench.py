"""Estimate a run, or measure how fast this machine trains. It takes the config flags of
train.py.

    python bench.py                                    time training steps
    python bench.py --preset PowerLM-3B --dry_run      steps, FLOPs, memory and hours
    torchrun --nproc_per_node 8 bench.py --preset 1B   on eight GPUs
"""

import dataclasses
import math
import statistics
import time

import train  # before torch, for which it sets a variable

import torch
from tqdm import tqdm

import runs
from config import FIELDS, PRESETS, TrainConfig
from model import empty_model
from tools import devices, flags

# -- Estimate, without a GPU -------------------------------------------------------------


def memory(cfg: TrainConfig, n_params: int) -> dict[str, float]:
    """Bytes that compiled training needs on a GPU, by what they are for.

    The peak is at the start of a backward pass, and not in the first pass of a step, so
    that the gradients of earlier passes are there too. On one H100, the sum came within a
    tenth of the peak for eight models and batches (docs/train.md).
    """
    # 1. What autograd keeps of a block for every token
    size = 2 if cfg.dtype == "bfloat16" else 4  # bytes of a number in a matrix product
    # input of the products, queries, output of attention, and its projection
    attention = 4 * cfg.n_embd + 2 * cfg.n_kv_head * cfg.d_head  # keys and values
    # input of the products, gate, up and their product, of every expert of the token
    mlp = max(1, cfg.n_expert_active) * (cfg.n_embd + 3 * cfg.n_ffn)
    residual = 4 * cfg.n_embd  # the input of the block, in float32
    block = residual + size * (attention + mlp)

    # 2. Of all blocks, with their weights in bfloat16
    blocks = cfg.n_layer * block
    copies = 2 * n_params if cfg.dtype == "bfloat16" else 0
    if cfg.recompute:  # only the inputs of all blocks, and everything of one block
        blocks = cfg.n_layer * residual + block
        copies /= cfg.n_layer

    tokens = (cfg.micro_batch_size or cfg.batch_size) * cfg.seq_len  # of a pass
    return {
        "parameters": 4 * n_params,
        "gradients": 4 * n_params,
        "AdamW": 8 * n_params,
        "average": 4 * n_params if cfg.average else 0,
        "bfloat16 copies": copies,
        "blocks": tokens * blocks,
        "logits": tokens * cfg.vocab_size * 2 * size,  # and their gradient
    }


def expected_speed(cfg: TrainConfig) -> float:
    """FLOP/s on an H100 or H200, from what one H100 reached (docs/train.md)."""
    share = 0.28 if cfg.n_expert else 0.44  # of the datasheet's
    if cfg.recompute:
        share *= 3 / 4  # the fourth forward pass is no progress
    return share * devices.PEAK_FLOPS["NVIDIA H100 80GB HBM3"]


def dry_run(cfg: TrainConfig, world: int) -> str:
    """Estimate a run on `world` GPUs. The arithmetic runs on any machine."""
    # 1. Divide a batch among the GPUs, and the share of a GPU into passes
    if cfg.batch_size % world:
        raise flags.UserError(
            f"--batch_size {cfg.batch_size}: must be a multiple of {world} processes"
        )
    passes = train.micro_batches(cfg, 0, 0, world)  # of the first GPU, in a step
    per_pass = len(passes[0])

    # 2. A GPU computes in bfloat16, unless a flag sets this
    dtype = "bfloat16" if cfg.dtype == "auto" else cfg.dtype
    cfg = dataclasses.replace(cfg, micro_batch_size=per_pass, dtype=dtype)

    # 3. Work and time
    model = empty_model(cfg)
    n_steps = cfg.total_tokens // cfg.batch_tokens
    flops = model.flops_per_token() * n_steps * cfg.batch_tokens
    hours = flops / world / expected_speed(cfg) / 3600

    # 4. Memory
    gib = {name: n / 2**30 for name, n in memory(cfg, model.n_params()).items() if n}
    parts = ", ".join(f"{name} {part:.3g}" for name, part in gib.items())

    steps = f"{n_steps:,} steps of {cfg.batch_tokens:,} tokens"
    lines = [
        f"{cfg.preset} under {cfg.schedule}: {steps}",
        f"GPUs:   {world}, with {len(passes)} x {per_pass} sequences per GPU and step",
        f"FLOPs:  {flops:.3g}, backward included, causal attention counted once",
        f"memory: {sum(gib.values()):.3g} GiB per GPU in {dtype}, compiled",
        f"        {parts}",
        f"time:   {hours:,.1f} hours on H100 or H200, as fast as one H100 was for us",
    ]
    return "\n".join(lines)


# -- Measure -----------------------------------------------------------------------------


def step_times(steps, n: int) -> list[float]:
    """Take n of train.training_steps, and return the seconds that every step took."""
    times = []
    for _ in tqdm(range(n), leave=False, disable=None):
        began = time.perf_counter()
        next(steps).loss.item()  # waits for the device
        times.append(time.perf_counter() - began)
    return times


def check_learned(name: str, first: float, last: float) -> None:
    """Raise UserError unless the loss fell. Without learning, speed means nothing."""
    if not last < first < math.inf:  # so NaN fails, too
        raise flags.UserError(
            f"{name} did not learn: its loss went from {first:.4g} to {last:.4g}; "
            "we print no speed"
        )


def benchmark(cfg: TrainConfig, corpus) -> str:
    """Time 20 training steps on real batches, after 3 for warming up.

    Raises UserError if the model did not learn.
    """
    n_steps = 3 + 20
    if cfg.total_tokens < n_steps * cfg.batch_tokens:
        least = f"{n_steps} steps take {n_steps * cfg.batch_tokens:,}"
        raise flags.UserError(f"--total_tokens {cfg.total_tokens:,}: {least}")
    state = train.build(cfg)
    steps = train.training_steps(cfg, state, corpus)
    first = next(steps).loss.item()  # on the first batch, before the first update
    step_times(steps, 2)
    low, median, high = statistics.quantiles(step_times(steps, 20))
    state.tokens = 0  # so the next step reads the first batch again
    check_learned("the model", first, next(steps).loss.item())

    _, world = devices.rank_and_world()
    tokens_per_s = cfg.batch_tokens / median
    flops_per_s = state.model.flops_per_token() * tokens_per_s / world
    kind = f"{cfg.dtype}, compiled" if cfg.compile else cfg.dtype
    quartiles = f"quartiles {1e3 * low:.1f} and {1e3 * high:.1f}"
    speed = f"{tokens_per_s:,.0f} tokens/s, {flops_per_s / 1e12:.3g} TFLOP/s per process"
    if cfg.device.startswith("cuda"):
        peak = devices.PEAK_FLOPS.get(torch.cuda.get_device_name(cfg.device))
        if peak is not None:
            speed += f", MFU {flops_per_s / peak:.1%}"  # model FLOPs utilization
    lines = [
        f"{cfg.preset} on {cfg.device}, {kind}",
        f"processes: {world}, threads: {torch.get_num_threads()}",
        f"step: median {1e3 * median:.1f} ms, {quartiles}",
        f"speed: {speed}",
    ]
    if cfg.device.startswith("cuda"):
        gib = torch.cuda.max_memory_allocated(cfg.device) / 2**30
        lines.append(f"peak memory: {gib:.2f} GiB")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("bench.py", __doc__)
    flags.add_flags(parser, TrainConfig, PRESETS["laptop"])
    parser.add_argument("--dry_run", action="store_true", help="arithmetic only")
    args = parser.parse_args(argv)
    typed = {name: value for name, value in vars(args).items() if name in FIELDS}
    try:
        devices.join(typed.get("device", "auto"))
        if "data" in typed or "tokenizer" in typed:  # else as in the preset
            typed = runs.with_vocabulary(typed)
        cfg = train.make_config(**typed)
        rank, world = devices.rank_and_world()
        if args.dry_run:
            text = dry_run(cfg, world)
        else:
            with devices.rank_0_first():
                cfg = devices.resolve_device(cfg)
                devices.check_memory(cfg, empty_model(cfg).n_params())
                cfg, corpus = train.load_data(cfg, typed, None)
            text = benchmark(cfg, corpus)
    except flags.UserError as error:
        return flags.fail("bench.py", error)
    except Exception as error:
        reason = devices.reason_of(error)
        if reason is None:
            raise
        return flags.fail("bench.py", reason)
    if rank == 0:
        print(text)
    return 0


if __name__ == "__main__":
    devices.leave(main())
