"""Measurements on one GPU. gpu_day.sh runs them in order, each with a time limit.

    python research/gpu.py profile OUT          append results to OUT/results.jsonl
    python research/gpu.py profile OUT --tiny   the same with tiny models, on any machine

NAME is a function below that takes no argument, or a preset, for its speed.
"""

import argparse
import gc
import importlib.util
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch, see train.py

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench
import bench_nanogpt
import model
import moe
import runs
import train
from tools import devices

OUT = Path(".")
WORK = Path(tempfile.gettempdir())
STEP = ""  # its name
TINY = False
DEVICE = devices.pick_device()
CUDA = DEVICE == "cuda"
SIZES_OF_TINY = dict(
    n_layer=2, n_embd=64, n_head=2, n_kv_head=1, n_ffn=64, seq_len=64, vocab_size=256,
    compile=False,
)  # fmt: skip


# -- Tools -------------------------------------------------------------------------------


def say(**result) -> None:
    """Append a line to the results."""
    line = {"step": STEP, "device": DEVICE} | result
    with open(OUT / "results.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def attempt(work, **about) -> None:
    """Report what work() returns, or why it failed, and free its memory."""
    try:
        say(**about, **work())
    except Exception as error:
        say(**about, error=f"{type(error).__name__}: {error}"[:500])
    gc.collect()
    torch.compiler.reset()
    if CUDA:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def configure(**fields):
    """Config and corpus for this device, with a warmup of 100 steps."""
    fields = {"device": DEVICE} | fields
    if TINY:
        fields |= SIZES_OF_TINY
    cfg = train.make_config(**fields)
    fields["warmup_tokens"] = 100 * cfg.batch_tokens
    fields["total_tokens"] = 2000 * cfg.batch_tokens
    cfg = train.make_config(**fields | {"decay_share": 0.1})
    return train.load_data(devices.resolve_device(cfg), fields, None)


def draw_weights_here() -> None:
    """Let models draw their weights on the GPU, because for large ones a CPU takes minutes."""

    def model_on_the_gpu(cfg):
        with torch.device(cfg.device):
            return model.GPT(cfg)

    train.GPT = model_on_the_gpu


def speed(cfg, corpus, n: int = 5) -> dict:
    """Median speed of n steps, and peak memory. Raises UserError if the model did not learn."""
    state = train.build(cfg)
    steps = train.training_steps(cfg, state, corpus)
    began = time.perf_counter()
    first = next(steps).loss.item()
    first_step = time.perf_counter() - began
    bench.step_times(steps, 2)
    seconds = statistics.median(bench.step_times(steps, n))
    state.tokens = 0  # so the next step reads the first batch again
    bench.check_learned("the model", first, next(steps).loss.item())
    return speed_of(cfg, state.model, seconds) | dict(first_step_seconds=first_step)


def speed_of(cfg, a_model, seconds: float) -> dict:
    """Tokens and FLOPs of a second in steps that take `seconds`, and peak memory."""
    tokens_per_second = cfg.batch_tokens / seconds
    flops_per_second = a_model.flops_per_token() * tokens_per_second
    found = dict(tokens_per_second=tokens_per_second, tflops=flops_per_second / 1e12)
    if CUDA:
        peak = devices.PEAK_FLOPS.get(torch.cuda.get_device_name())
        if peak:
            found["mfu"] = flops_per_second / peak
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return found


def run(name: str, *argv: str, device: str = DEVICE) -> Path:
    """Run train.py in this process. Return its folder."""
    train.main([*argv, f"--device={device}", f"--out={WORK / name}"])
    return WORK / name


def results_of(folder: Path) -> dict:
    return json.loads((folder / "record.json").read_text())["results"]


def milliseconds(work, n: int = 10) -> dict:
    """Median time of work(), with a backward pass if it returns a tensor."""
    times = []
    for _ in range(3 + n):
        wait()
        began = time.perf_counter()
        y = work()
        if y is not None:
            y.sum().backward()
        wait()
        times.append(1e3 * (time.perf_counter() - began))
    return {"ms": statistics.median(times[3:])}


# -- Does it work, and is it right? ------------------------------------------------------


def env() -> None:
    say(**runs.origin(DEVICE, ""), cuda=torch.version.cuda, cores=os.cpu_count())


def first_run() -> None:
    """The default run, and the check of the MoE."""
    short = "--total_tokens=20480", "--warmup_tokens=1024", "--final_eval_tokens=4096"
    results = results_of(run("power", *(short if TINY else ())))
    say(**{name: results[name] for name in ("val_loss", "seconds", "tokens_per_second")})
    say(moe_status=moe.main([]))


def loss() -> None:
    """200 steps on the CPU in float32, and here in float32 and bfloat16."""
    n = 12 if TINY else 200
    fixed = f"--total_tokens={n * 1024}", "--warmup_tokens=10240", "--log_every=1024"
    for preset in ("laptop", "laptop-moe"):
        losses = []
        for device, dtype in (
            ("cpu", "float32"),
            (DEVICE, "float32"),
            (DEVICE, "bfloat16"),
        ):
            own = f"--preset={preset}", f"--dtype={dtype}", "--final_eval_tokens=4096"
            folder = run(f"{preset}-{len(losses)}", *fixed, *own, device=device)
            lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            losses.append([line["loss"] for line in lines if "loss" in line])
        for dtype, some in zip(("float32", "bfloat16"), losses[1:]):
            apart = [abs(a / b - 1) for a, b in zip(some, losses[0])]
            say(
                preset=preset,
                dtype=dtype,
                first=apart[0],
                mean=statistics.mean(apart),
                largest=max(apart),
            )


def exact() -> None:
    """Largest difference in weights from a run, if it is repeated, resumed or branched."""
    T = 20480 if TINY else 307200
    fixed = f"--total_tokens={T}", f"--decay_tokens={T // 10}", "--final_eval_tokens=4096"

    def weights(folder: Path) -> dict:
        return runs.newest_checkpoint(folder)["model"]

    def differences(preset: str, name: str) -> dict:
        argv = *fixed, f"--preset={preset}", "--warmup_tokens=10240"
        first = run(name + "first", *argv)
        again = run(name + "again", *argv)
        run(name + "resumed", *argv, "--time_limit=0.5")
        resumed = run(name + "resumed", "--resume")
        branch = run(name + "branch", *fixed, f"--branch={first}")
        one = weights(first)
        found = {}
        for kind, folder in dict(again=again, resumed=resumed, branch=branch).items():
            two = weights(folder)
            found[kind] = max((one[k] - two[k]).abs().max().item() for k in one)
        return found

    for strict in (False, True):
        torch.use_deterministic_algorithms(strict)
        for preset in ("laptop", "laptop-moe"):
            work = lambda: differences(preset, f"{preset}-{strict}-")
            attempt(work, preset=preset, deterministic=strict)


def one_of_two(backend: str) -> None:
    """Train a compiled MoE with another process on this card."""
    device = "cuda:0" if CUDA else DEVICE  # of both processes
    devices.pick_device = lambda name="auto": device
    if backend == "gloo":
        meet = devices.dist.init_process_group
        devices.dist.init_process_group = lambda _: meet("gloo")
    length = ["--total_tokens=10240"] if TINY else ["--total_tokens=102400", "--compile"]
    fixed = "--preset=laptop-moe", "--warmup_tokens=1024", "--final_eval_tokens=4096"

    def work() -> dict:
        return dict(
            val_loss=results_of(run(f"two-{backend}", *fixed, *length))["val_loss"]
        )

    if os.environ["RANK"] == "0":
        attempt(work, backend=backend)
    else:
        run(f"two-{backend}", *fixed, *length)
    devices.leave(0)


def nccl() -> None:
    one_of_two("nccl")


def gloo() -> None:
    one_of_two("gloo")


# -- How fast is it, and what does it need? ----------------------------------------------

TRIES = {  # sequences of a pass, the most useful first. e: eager, r: recompute
    "1B": "4 2 4e 8r",
    "1B-moe": "4 2 4e 8r",
    "PowerLM-3B": "2r 1 4r",
    "PowerMoE-3B": "2r 1 4r",
}


def speed_of_preset(preset: str) -> None:
    """Steps of 8 passes, as in a real step, where gradients lie beside the activations."""
    draw_weights_here()
    for word in TRIES[preset].split():
        n = int(word.strip("er"))
        how = dict(recompute="r" in word, compile="e" not in word)

        def work() -> dict:
            sizes = dict(batch_size=8 * n, micro_batch_size=n)
            cfg, corpus = configure(preset=preset, **sizes, **how)
            estimate = sum(bench.memory(cfg, model.empty_model(cfg).n_params()).values())
            return speed(cfg, corpus) | dict(estimated_gib=estimate / 2**30)

        attempt(work, preset=preset, micro_batch_size=n, passes=8, **how)


KINDS = {  # of kernels, by the first of these expressions that their names contain
    "grouped products": r"grouped|group_?gemm|GroupProblem",
    "attention": r"sdpa|fmha|flash|attention",
    "products": r"gemm|nvjet|cutlass|matmul|::(add|b|ba)?mm\b",
    "optimizer": r"adam|multi_tensor|lpnorm|_foreach",
    "sorting": r"radix|sort|topk|cub::",
    "pointwise": r"triton|elementwise|reduce|index|copy|fill|Mem(cpy|set)|aten::",
}


def kind_of(kernel: str) -> str:
    for kind, expression in KINDS.items():
        if re.search(expression, kernel, re.IGNORECASE):
            return kind
    return "rest"


def profile() -> None:
    """Kernels of a step. A step must not wait for the GPU, and validation must not compile."""
    draw_weights_here()

    def work(preset: str) -> dict:
        cfg, corpus = configure(
            preset=preset, batch_size=8, micro_batch_size=4, compile=CUDA
        )
        steps = train.training_steps(cfg, train.build(cfg), corpus)
        bench.step_times(steps, 3)
        with torch.profiler.profile() as record:
            times = bench.step_times(steps, 2)
        record.export_chrome_trace(str(OUT / f"trace-{preset}.json.gz"))
        kernels = kernels_of(record)  # of two steps
        ms_of_kind = Counter()
        for name, ms in kernels.items():
            ms_of_kind[kind_of(name)] += ms / 2
        say(
            preset=preset,
            step_ms=500 * sum(times),
            kernels_ms=ms_of_kind.total(),
            ms_of_kind=dict(ms_of_kind.most_common()),
            largest={name: ms / 2 for name, ms in kernels.most_common(25)},
        )
        if CUDA:
            torch.cuda.set_sync_debug_mode("error")
        next(steps)
        next(steps)
        return dict(preset=preset, waits=False)

    for preset in ("1B", "1B-moe"):
        attempt(lambda: work(preset))


def kernels_of(record) -> Counter:
    """Whole name of a kernel -> its milliseconds. On a CPU, operations in place of kernels."""
    found = Counter()
    for event in record.key_averages():
        if not CUDA:
            found[event.key] += event.self_cpu_time_total / 1e3
        elif event.device_type.name == "CUDA" and not event.is_user_annotation:
            found[event.key] += event.self_device_time_total / 1e3
    return found


def parts() -> None:
    """Times of a large product and of attention, forwards and backwards."""

    def new(*shape: int):
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    T = 64 if TINY else 4096
    a = new(256, 256) if TINY else new(8192, 8192)
    attempt(lambda: milliseconds(lambda: a @ a), part=f"3 products {tuple(a.shape)}")
    for heads, groups in ((24, 24), (16, 8)):  # 1B and 1B-moe
        q = new(4, heads, T, 64)
        k = new(4, groups, T, 64)
        attend = lambda: F.scaled_dot_product_attention(
            q, k, k, is_causal=True, enable_gqa=True
        )
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                attempt(lambda: milliseconds(attend), heads=heads, part=backend.name)


# -- Beside others -----------------------------------------------------------------------


def peers() -> None:
    """nanoGPT with as many parameters, if its folder is in NANOGPT, and transformers."""
    draw_weights_here()
    sizes = dict(n_layer=10, batch_size=8, micro_batch_size=4, compile=CUDA)
    cfg, corpus = configure(preset="1B", **sizes)
    attempt(lambda: speed(cfg, corpus), model="ours")
    attempt(lambda: speed_of_nanogpt(cfg, corpus), model="nanoGPT")
    for compiled in (True, False):
        attempt(lambda: time_of_our_layer(compiled), model="ours, MoE", compiled=compiled)
        for way in ("grouped_mm", "eager"):
            work = lambda: time_of_their_layer(way, compiled)
            attempt(work, model=f"transformers, {way}", compiled=compiled)


def speed_of_nanogpt(cfg, corpus, n: int = 5) -> dict:
    """Steps of nanoGPT as in its train.py, on our batches."""
    nanogpt = bench_nanogpt.load_nanogpt(Path(os.environ["NANOGPT"]))
    shape = dict(n_layer=cfg.n_layer, n_head=cfg.n_head, n_embd=cfg.n_embd)
    shape |= dict(block_size=cfg.seq_len, vocab_size=cfg.vocab_size)
    kind = torch.device(DEVICE).type
    gpt = nanogpt.GPT(nanogpt.GPTConfig(**shape, dropout=0.0, bias=False)).to(DEVICE)
    optimizer = gpt.configure_optimizers(0.1, 1e-4, (0.9, 0.95), kind)
    compiled = torch.compile(gpt) if cfg.compile else gpt
    losses = []

    def step(tokens: int) -> None:
        passes = train.micro_batches(cfg, tokens)
        total = 0.0
        for sequences in passes:
            inputs, targets = corpus.draw(sequences, cfg.seq_len, cfg.data_seed)
            inputs = devices.to_device(inputs, cfg.device)
            targets = devices.to_device(targets, cfg.device)
            with devices.mixed_precision(cfg):
                _, loss = compiled(inputs, targets)
            (loss / len(passes)).backward()
            total += loss.detach() / len(passes)
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())

    times = []
    for i in range(3 + n):
        began = time.perf_counter()
        step(i * cfg.batch_tokens)
        times.append(time.perf_counter() - began)
    step(0)  # the first batch again
    bench.check_learned("nanoGPT", losses[0], losses[-1])
    found = speed_of(cfg, model.empty_model(cfg), statistics.median(times[3:]))
    return found | dict(first_step_seconds=times[0], n_params=gpt.get_num_params())


def layer_input(cfg):
    n = 256 if TINY else 16384
    dtype = torch.bfloat16
    return torch.randn(1, n, cfg.n_embd, device=DEVICE, dtype=dtype, requires_grad=True)


def shape_of_layer():
    return train.make_config(preset="laptop-moe" if TINY else "1B-moe")


def time_of_our_layer(compiled: bool) -> dict:
    cfg = shape_of_layer()
    with torch.device(DEVICE):
        layer = moe.MoE(cfg).bfloat16()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.02)
    if compiled:
        layer.compile(dynamic=False)
    x = layer_input(cfg)
    return milliseconds(lambda: layer(x)[0])


def time_of_their_layer(way: str, compiled: bool) -> dict:
    from transformers import GraniteMoeConfig, __version__
    from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeMoE

    cfg = shape_of_layer()
    config = GraniteMoeConfig(
        hidden_size=cfg.n_embd,
        intermediate_size=cfg.n_ffn,
        num_local_experts=cfg.n_expert,
        num_experts_per_tok=cfg.n_expert_active,
        experts_implementation=way,
    )
    with torch.device(DEVICE):
        layer = GraniteMoeMoE(config).bfloat16()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.02)
    if compiled:
        layer.compile(dynamic=False)
    x = layer_input(cfg)
    output = lambda: layer(x)
    if isinstance(output(), tuple):  # some versions return the router's scores, too
        output = lambda: layer(x)[0]
    return milliseconds(output) | dict(transformers=__version__)


def before() -> None:
    """The MoE beside that of commit 81f0289, and the dense model, in one process."""
    draw_weights_here()
    spec = importlib.util.spec_from_file_location("moe_before", os.environ["MOE_BEFORE"])
    old = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(old)
    now = moe.MoE
    sizes = dict(batch_size=32, micro_batch_size=4, compile=CUDA)
    for version, layer in (("now", now), ("81f0289", old.MoE), ("now, again", now)):
        model.MoE = layer
        work = lambda: speed(*configure(preset="1B-moe", **sizes))
        attempt(work, preset="1B-moe", version=version)
    model.MoE = now
    attempt(lambda: speed(*configure(preset="1B", **sizes)), preset="1B", version="now")


def main() -> None:
    global OUT, WORK, STEP, TINY
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    OUT, STEP, TINY = args.out.resolve(), args.name, args.tiny
    with tempfile.TemporaryDirectory() as work:
        WORK = Path(work)
        if STEP in TRIES:
            speed_of_preset(STEP)
        else:
            globals()[STEP]()


if __name__ == "__main__":
    main()
