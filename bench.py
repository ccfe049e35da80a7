"""What a run would take, and how fast this machine is. All flags of train.py work here, too.

    python bench.py                                    time training steps, measure memory
    python bench.py --preset PowerLM-3B --dry_run      steps, FLOPs, memory, hours: by arithmetic
    python bench.py --profile trace.json               a timeline of a few steps
    torchrun --nproc_per_node 8 bench.py --preset 1B   on eight GPUs
"""

import dataclasses
import math
import statistics
import sys
import time
from pathlib import Path

import tools.threads  # noqa: F401  before torch

import torch

import train
from tools import devices
from tools.config import add_flags, fail, program_parser
from train import FIELDS, GPT, PRESETS, RECIPES, TrainConfig


def memory(cfg: TrainConfig, n_micro: int = 2) -> dict[str, float]:
    """Estimate the bytes that training needs on one device at the start of the backward pass.

    From the shapes of what autograd keeps; allocators add a few percent. Per token, a block keeps
    the residual stream twice in float32 and, in the dtype of matrix products, two normed streams,
    queries, keys, values, attention's output, and 3 hidden vectors of the MLP (4 if not compiled).
    n_micro: micro-batches per step; with only one, no gradient exists yet.
    """
    with torch.device("meta"):
        n_params = GPT(cfg).n_params()
    C, on_cpu, size = cfg.n_embd, cfg.device == "cpu", 2 if cfg.dtype == "bfloat16" else 4
    attention_size = 4 if on_cpu else size  # a CPU computes attention and experts in float32
    if cfg.n_expert:  # input and hidden vectors per token and expert; the router in float32
        pair = C + (3 if cfg.compile and not on_cpu else 5) * cfg.n_ffn
        mlp = attention_size * cfg.n_expert_active * pair + 4 * (C + 4 * cfg.n_expert)
    else:
        mlp = size * (3 if cfg.compile else 4) * cfg.n_ffn
    heads = 2 * C + 2 * cfg.n_kv_head * cfg.d_head  # queries, attention's output, keys, values
    block = 8 * C + size * 2 * C + attention_size * heads + mlp
    if on_cpu and not cfg.compile:
        block += 8 * C  # RMSNorm in several steps
    blocks = cfg.n_layer * 4 * C + block if cfg.recompute else cfg.n_layer * block
    tokens, copies = cfg.micro_batch_size * cfg.seq_len, size == 2 and not (on_cpu and cfg.n_expert)
    return {
        "parameters": 4 * n_params, "AdamW": 8 * n_params, "average": 4 * n_params * cfg.average,
        "gradients": 4 * n_params * (n_micro > 1), "bfloat16 copies": 2 * n_params * copies,
        "blocks": tokens * blocks,
        "logits": tokens * cfg.vocab_size * (size + 4 + 4),  # and their softmax and its gradient
    }  # fmt: skip


def duration(seconds: float) -> str:
    """7200 -> '2.0 hours'."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return "under 2 seconds"


def describe(cfg: TrainConfig) -> str:
    recompute = ", recompute" * cfg.recompute
    return f"{cfg.device}, {cfg.dtype}, {'compiled' if cfg.compile else 'eager'}{recompute}"


def dry_run(cfg: TrainConfig, world: int) -> str:
    """What a run on `world` GPUs would take, from arithmetic alone."""
    on_gpu = cfg.device in ("auto", "cuda")  # which need not be here
    micro = math.gcd(cfg.micro_batch_size, cfg.batch_size // world)
    cfg = dataclasses.replace(
        cfg, device="cuda" if on_gpu else cfg.device, micro_batch_size=micro,
        dtype=("bfloat16" if on_gpu else "float32") if cfg.dtype == "auto" else cfg.dtype,
        compile=on_gpu and cfg.n_embd >= 256 if cfg.compile is None else cfg.compile,
    )  # fmt: skip
    with torch.device("meta"):
        per_token = GPT(cfg).flops_per_token()
    n, n_micro = cfg.total_tokens // cfg.batch_tokens, cfg.batch_size // world // micro
    flops, parts = per_token * n * cfg.batch_tokens, memory(cfg, n_micro)
    gib = lambda size: f"{size / 2**30:.3g} GiB"
    each = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    time_on = lambda gpu: duration(flops / (0.4 * devices.PEAK_FLOPS[gpu]) / world)
    return f"""{cfg.preset} under {cfg.schedule}: {n:,} steps of {cfg.batch_tokens:,} tokens
devices: {world}, each {n_micro} x {micro} sequences in a step
FLOPs:   {flops:.3g}, {per_token:.3g} per token, backward included, causal attention counted once
memory:  {gib(sum(parts.values()))} per device, estimated for {describe(cfg)}
         {each}
time:    {time_on("H200")} on H200, {time_on("A100")} on A100, at 40% of their data sheets"""


def steps(cfg: TrainConfig, corpus, n: int):
    """Train n steps at a learning rate that changes nothing; yield (state, seconds) after each."""
    T = n * cfg.batch_tokens
    cfg = dataclasses.replace(cfg, schedule="constant", lr=1e-9, warmup_tokens=0, total_tokens=T)
    state, began = train.build(cfg), time.perf_counter()
    for step in train.training_steps(cfg, state, corpus, T):
        step.loss.item()  # waits for the device
        yield state, time.perf_counter() - began
        began = time.perf_counter()


def peak_memory(device: str) -> float:
    """The most bytes that this process had at once; on a CPU, with the program itself."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    kilobytes = 1 if sys.platform == "darwin" else 1024  # bytes on a Mac
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes


def benchmark(cfg: TrainConfig, corpus) -> str:
    """Time the training step on real batches."""
    timed = list(steps(cfg, corpus, 3 + 20))
    low, median, high = statistics.quantiles([1e3 * s for _, s in timed[3:]])  # after a warmup
    speed, world = 1e3 * cfg.batch_tokens / median, train.rank_and_world()[1]
    achieved = timed[0][0].model.flops_per_token() * speed / world
    peak = devices.peak_flops(cfg.device)
    mfu = f": MFU {achieved / peak:.1%} of {peak / 1e12:.0f}" if peak else ""
    threads = torch.get_num_threads()
    return f"""{cfg.preset} on {describe(cfg)}; processes: {world}, threads: {threads}
step: median {median:.1f} ms, quartiles {low:.1f} and {high:.1f}, of {cfg.batch_tokens:,} tokens
speed: {speed:,.0f} tokens/s, {achieved / 1e12:.3g} TFLOP/s per process{mfu}
peak memory of a process: {peak_memory(cfg.device) / 2**30:.2f} GiB"""


def profile(cfg: TrainConfig, corpus, file: Path) -> str:
    """Save a timeline of a few steps; return a table of what took longest."""
    trained = steps(cfg, corpus, 3 + 3)
    for _ in range(3):
        next(trained)
    with torch.profiler.profile() as record:
        list(trained)
    if train.rank_and_world()[0] == 0:
        record.export_chrome_trace(str(file))
    by = f"self_{'cuda' if cfg.device.startswith('cuda') else 'cpu'}_time_total"
    table = record.key_averages().table(sort_by=by, row_limit=12, max_name_column_width=50)
    return f"{table}\ntrace: {file}; open it at ui.perfetto.dev"


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("bench.py", __doc__)
    add_flags(parser, TrainConfig, PRESETS["laptop"] | RECIPES["laptop"], "laptop")
    parser.add_argument("--benchmark", action="store_true", help="time steps (the default)")
    parser.add_argument("--dry_run", action="store_true", help="arithmetic only")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="save a trace of a few steps")
    args = parser.parse_args(argv)
    typed = {name: value for name, value in vars(args).items() if name in FIELDS}
    try:
        devices.join(typed.get("device", "auto"))
        cfg, (rank, world) = train.make_config(**typed), train.rank_and_world()
        if args.profile and not args.profile.parent.is_dir():
            folder = args.profile.parent
            raise ValueError(f"--profile {args.profile}: folder {folder} does not exist")
        if not args.dry_run:
            with devices.rank_0_first():
                cfg, corpus = train.load_data(train.resolve_device(cfg), typed, None)
    except (ValueError, OSError) as error:
        return fail("bench.py", error)
    if args.dry_run:
        text = dry_run(cfg, world)
    else:
        text = profile(cfg, corpus, args.profile) if args.profile else benchmark(cfg, corpus)
    if rank == 0:
        print(text)
    return 0


if __name__ == "__main__":
    devices.leave(main())
