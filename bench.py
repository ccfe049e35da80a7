"""Estimate a run, or measure how fast this machine trains. It takes the config flags of
train.py.

python bench.py                                    time training steps
python bench.py --preset PowerLM-3B --dry_run      steps, FLOPs, memory and hours
torchrun --nproc_per_node 8 bench.py --preset 1B   on eight GPUs
"""

import dataclasses
import itertools
import statistics
import time

import tools.threads  # noqa: F401  before torch

import torch

import train
from config import FIELDS, TrainConfig, preset_fields
from model import empty_model
from tools import devices
from tools.flags import UserError, add_flags, fail, program_parser


def memory(cfg: TrainConfig, n_params: int) -> dict[str, float]:
    """Estimate the bytes that training needs on a GPU at the start of a backward pass.

    Activations are the tensors that autograd keeps. For every token, a block keeps the
    residual stream twice in float32 and, in the dtype of matrix products, two normed
    streams, queries, keys, values, the attention output and 3 hidden vectors of the MLP.
    The allocator adds a few percent.
    """
    C, F = cfg.n_embd, cfg.n_ffn
    size = 2 if cfg.dtype == "bfloat16" else 4
    heads = 2 * C + 2 * cfg.n_kv_head * cfg.d_head  # queries and output, keys and values
    hidden = 3 if cfg.compile else 4
    mlp = size * hidden * F
    if cfg.n_expert:  # every expert also keeps its input and its weighted output
        mlp = (
            size * cfg.n_expert_active * (C + (hidden + 1) * F) + 4 * C
        )  # router in float32
    norms = 0 if cfg.compile else 8 * C  # intermediate results
    block = 8 * C + size * (2 * C + heads) + mlp + norms
    blocks = cfg.n_layer * 4 * C + block if cfg.recompute else cfg.n_layer * block
    tokens = (cfg.micro_batch_size or cfg.batch_size) * cfg.seq_len
    return {
        "parameters": 4 * n_params,
        "gradients": 4 * n_params,
        "AdamW": 8 * n_params,
        "average": 4 * n_params * cfg.average,
        "bfloat16 copies": 2 * n_params * (size == 2),
        "blocks": tokens * blocks,
        "logits": tokens
        * cfg.vocab_size
        * (size + 4 + 4),  # and their softmax and its gradient
    }


def dry_run(cfg: TrainConfig, world: int) -> str:
    """Estimate a run on `world` GPUs. The arithmetic runs on any machine."""
    if cfg.batch_size % world:
        raise UserError(
            f"--batch_size {cfg.batch_size}: must be a multiple of {world} processes"
        )
    each = cfg.batch_size // world  # sequences of a GPU in a step
    n_micro = train.n_passes(each, cfg.micro_batch_size)
    micro = each // n_micro
    dtype = "bfloat16" if cfg.dtype == "auto" else cfg.dtype
    compile = cfg.compile is not False
    cfg = dataclasses.replace(cfg, micro_batch_size=micro, dtype=dtype, compile=compile)
    model = empty_model(cfg)
    n = cfg.total_tokens // cfg.batch_tokens
    flops = model.flops_per_token() * n * cfg.batch_tokens
    hours = flops / world / (0.4 * devices.PEAK_FLOPS["NVIDIA H200"]) / 3600
    gib = {
        name: size / 2**30 for name, size in memory(cfg, model.n_params()).items() if size
    }
    return f"""{cfg.preset} under {cfg.schedule}: {n:,} steps of {cfg.batch_tokens:,} tokens
GPUs:   {world}, with {n_micro} x {micro} sequences per GPU and step
FLOPs:  {flops:.3g}, backward included, causal attention counted once
memory: {sum(gib.values()):.3g} GiB per GPU in {dtype}{", compiled" * compile}
        {", ".join(f"{name} {part:.3g}" for name, part in gib.items())}
time:   {hours:,.1f} hours on H200 at 40% of the datasheet's FLOP/s"""


def steps(cfg: TrainConfig, state: train.State, corpus, n: int) -> list[float]:
    """Train until step n and return the seconds that every step took."""
    times = [time.perf_counter()]
    for _, loss, _, _ in itertools.islice(train.training_steps(cfg, state, corpus), n):
        loss.item()  # waits for the device
        times.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(times)]


def benchmark(cfg: TrainConfig, corpus) -> str:
    """Time 20 training steps on real batches, after 3 for warming up."""
    state, (_, world) = train.build(cfg), devices.rank_and_world()
    low, median, high = statistics.quantiles(steps(cfg, state, corpus, 3 + 20)[3:])
    speed = cfg.batch_tokens / median
    achieved = state.model.flops_per_token() * speed / world
    text = f"""{cfg.preset} on {cfg.device}, {cfg.dtype}{", compiled" * cfg.compile}
processes: {world}, threads: {torch.get_num_threads()}
step: median {1e3 * median:.1f} ms, quartiles {1e3 * low:.1f} and {1e3 * high:.1f}
speed: {speed:,.0f} tokens/s, {achieved / 1e12:.3g} TFLOP/s per process"""
    if cfg.device.startswith("cuda"):
        if peak := devices.PEAK_FLOPS.get(torch.cuda.get_device_name(cfg.device)):
            text += f", MFU {achieved / peak:.1%}"
        text += f"\npeak memory: {torch.cuda.max_memory_allocated(cfg.device) / 2**30:.2f} GiB"
    return text


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("bench.py", __doc__)
    add_flags(parser, TrainConfig, preset_fields("laptop"))
    parser.add_argument("--dry_run", action="store_true", help="arithmetic only")
    args = parser.parse_args(argv)
    typed = {name: value for name, value in vars(args).items() if name in FIELDS}
    try:
        devices.join(typed.get("device", "auto"))
        cfg, (rank, world) = train.make_config(**typed), devices.rank_and_world()
        if args.dry_run:
            text = dry_run(cfg, world)
        else:
            with devices.rank_0_first():
                cfg, corpus = train.load_data(devices.resolve_device(cfg), typed, None)
            text = benchmark(cfg, corpus)
    except torch.OutOfMemoryError as error:
        return fail("bench.py", devices.reason_of(error))
    except (UserError, OSError) as error:
        return fail("bench.py", error)
    if rank == 0:
        print(text)
    return 0


if __name__ == "__main__":
    devices.leave(main())
