#!/bin/bash
# Measure on one GPU what docs/scale.md says is not measured. Needs no network. Every step has a
# time limit and needs no other step. OUT gets results.jsonl, log.txt and two timelines.
#
#   bash tests/gpu_day.sh OUT                     steps 1 to 13, about 20 minutes on an H100
#   bash tests/gpu_day.sh OUT 1-5                 steps by number or name, as in 1-4,parts,e1
#   bash tests/gpu_day.sh OUT --tiny              tiny models on any machine, to test this script
#   bash tests/gpu_day.sh OUT 1-5 --wheels DIR    unpack packages from DIR first, if any is missing
#
# PYTHON names the interpreter (default: python3). To fill DIR on a machine with a network:
#   pip download -d DIR --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#     --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
#     --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 \
#     numpy tiktoken regex requests charset-normalizer idna urllib3 certifi tqdm safetensors \
#     matplotlib contourpy cycler fonttools kiwisolver packaging pillow pyparsing \
#     python-dateutil six pytest iniconfig pluggy pygments

NAMES=(env train 1B 1B-moe loss PowerLM-3B PowerMoE-3B profile exact parts side two tests e1)
LIMITS=(40 120 170 170 90 150 150 120 100 60 150 80 300 540)  # seconds
[[ $1 && $1 != -* ]] || { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" && OUT=$(realpath "$1") && shift && cd "$(dirname "$0")/.." || exit
PYTHON=${PYTHON:-python3} STEPS=1-13 TINY="" WORK=$(mktemp -d)
while [[ $1 ]]; do
    case $1 in
        --tiny) TINY=1 ;;
        --wheels) WHEELS=$(realpath "$2"); shift ;;
        *) STEPS=$1 ;;
    esac
    shift
done
export OUT WORK TINY PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8

packages() {
    "$PYTHON" -c 'import matplotlib, numpy, pytest, safetensors, tiktoken, torch, tqdm'
}
if ! packages && [[ $WHEELS ]]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --target "$WORK/site" "$WHEELS"/*.whl
    export PYTHONPATH=$WORK/site
    packages
fi

two() {  # two processes on one card, where NCCL should refuse and gloo should train
    export WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29411
    for backend in nccl gloo; do
        RANK=1 timeout 35 "$PYTHON" "$WORK/measure.py" $backend &
        RANK=0 timeout 35 "$PYTHON" "$WORK/measure.py" $backend
        wait
    done
}

e1() {  # a part of the sweep of docs/bend.md at a larger scale, until its time is over
    local grid=(--scale gpu --widths 256 --batches 4,16,64,256,512 --budgets 2560k,5120k,10240k)
    [[ $TINY ]] && grid=(--scale quick --widths 32 --batches 4 --budgets 10k --n_layer 1)
    timeout -s INT 500 "$PYTHON" sweep.py wsd "${grid[@]}" --workers "${WORKERS:-8}" --out "$WORK/e1"
    cp "$WORK"/e1/*.jsonl "$OUT"
}

step() {
    case $1 in
        two | e1) $1 ;;
        tests) "$PYTHON" -m pytest -q ${TINY:+tests/test_moe.py} ;;
        *) "$PYTHON" "$WORK/measure.py" "$1" ;;
    esac
}
export -f step two e1
export PYTHON

cat > "$WORK/measure.py" <<'PY'
"""One step of gpu_day.sh: python measure.py STEP, in the root of the repository."""

import gc
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, os.getcwd())
import tools.threads  # noqa: F401  before torch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench
import model
import moe
import train
from tools import devices, runs

OUT, WORK, TINY = Path(os.environ["OUT"]), Path(os.environ["WORK"]), bool(os.environ["TINY"])
DEVICE, STEP, GIB = devices.pick_device(), sys.argv[1], 2**30
CUDA = DEVICE == "cuda"
wait = torch.cuda.synchronize if CUDA else lambda: None
programs = lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]


def say(**result):
    line = {"step": STEP, "device": DEVICE} | result
    with open(OUT / "results.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    print(line)


def attempt(work, **about):
    """Report what work() returns or why it failed, and free its memory."""
    try:
        say(**about, **work())
    except Exception as error:
        say(**about, error=f"{type(error).__name__}: {error}"[:500])
    gc.collect()
    torch.compiler.reset()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def fast_model(cfg, device):
    """In place of new_model, which draws on the CPU to be exact."""
    with torch.device(device):
        return model.GPT(cfg)


def configure(**fields):
    if TINY:
        fields |= dict(n_layer=2, n_embd=64, n_head=2, n_ffn=64, seq_len=64)
    if TINY and "moe" in fields.get("preset", "").lower():
        fields |= dict(n_kv_head=1, n_expert=4, n_expert_active=2)
    typed = {"device": DEVICE} | fields
    return train.load_data(train.resolve_device(train.make_config(**typed)), typed, None)


def run(name, *argv, device=DEVICE):
    """Run train.py in this process. Return its folder."""
    train.main([*argv, f"--device={device}", f"--out={WORK / name}"])
    return WORK / name


def milliseconds(work, n=10):
    """Median time of work(), with a backward pass if it returns a tensor."""
    times = []
    for _ in range(3 + n):
        wait()
        began = time.perf_counter()
        if (y := work()) is not None:
            y.sum().backward()
        wait()
        times.append(1e3 * (time.perf_counter() - began))
    return {"ms": statistics.median(times[3:]), "ms_range": [min(times[3:]), max(times[3:])]}


def first_run():
    short = "--total_tokens=20480", "--warmup_tokens=1024", "--final_eval_tokens=4096"
    record = json.loads((run("power", *(short if TINY else ())) / "record.json").read_text())
    say(**{name: record[name] for name in ("val_loss", "seconds", "tokens_per_second", "dtype")})
    say(moe_status=moe.main([]))


def speed(preset):
    """Micro-batches from the most useful to those that may not fit."""
    sizes = {"1B": (4, 8, 2, 1, 16), "1B-moe": (4, 8, 2, 1)}.get(preset, (1, 2))
    tries = [(sizes[0], True, False), (sizes[0], False, False)]
    tries += [(n, True, False) for n in sizes[1:]]
    tries += [(n, True, True) for n in ((16,) if preset == "1B" else (4, 8))]
    for n, compiled, recompute in tries:
        about = dict(preset=preset, micro_batch_size=n, compile=compiled, recompute=recompute)
        attempt(lambda: speed_of(**about), **about)


def speed_of(**fields):
    cfg, corpus = configure(batch_size=2 * fields["micro_batch_size"], **fields)
    state = train.build(cfg)
    times = bench.steps(cfg, state, corpus, 3 + 6)
    low, median, high = statistics.quantiles(times[3:])
    rate = state.model.flops_per_token() * cfg.batch_tokens / median
    peak = devices.peak_flops(DEVICE) or math.inf
    memory = torch.cuda.memory_stats() if CUDA else {}
    return dict(
        tokens_per_second=cfg.batch_tokens / median, tflops=rate / 1e12, mfu=rate / peak,
        seconds=[low, median, high], first_step=times[0],
        gib={x: memory.get(f"{x}_bytes.all.peak", 0) / GIB for x in ("allocated", "reserved")},
        estimate=sum(bench.memory(cfg, state.model.n_params()).values()) / GIB,
    )  # fmt: skip


def loss():
    """200 steps on the CPU in float32, and here in float32 and bfloat16."""
    n = 20 if TINY else 200
    fixed = f"--total_tokens={n * 1024}", "--warmup_tokens=10240", "--log_every=1024"
    for preset in ("laptop", "laptop-moe"):
        losses = []
        for device, dtype in (("cpu", "float32"), (DEVICE, "float32"), (DEVICE, "bfloat16")):
            own = f"--preset={preset}", f"--dtype={dtype}", "--final_eval_tokens=4096"
            lines = runs.read_metrics(run(f"{preset}-{len(losses)}", *fixed, *own, device=device))
            losses.append([line["loss"] for line in lines if "loss" in line])
        for dtype, some in zip(("float32", "bfloat16"), losses[1:]):
            apart = [abs(a / b - 1) for a, b in zip(some, losses[0])]
            say(preset=preset, dtype=dtype, first=apart[0], mean=statistics.mean(apart),
                largest=max(apart), last=apart[-1])  # fmt: skip


def profile(preset):
    """Kernels of a step; a step must not wait for the GPU, and validation must not compile."""
    cfg, corpus = configure(preset=preset, batch_size=8, micro_batch_size=4, compile=CUDA)
    state = train.build(cfg)
    bench.steps(cfg, state, corpus, 3)
    with torch.profiler.profile() as record:
        times = bench.steps(cfg, state, corpus, 3 + 2)
    record.export_chrome_trace(str(OUT / f"trace-{preset}.json.gz"))
    kind = "self_device_time_total" if CUDA else "self_cpu_time_total"
    kernels = [e for e in record.key_averages() if not CUDA or e.device_type.name == "CUDA"]
    ms = {e.key[:120]: getattr(e, kind) / 2e3 for e in kernels}  # per step
    largest = dict(sorted(ms.items(), key=lambda item: -item[1])[:25])
    say(preset=preset, step_ms=500 * sum(times), kernels_ms=sum(ms.values()), largest=largest)
    if CUDA:
        torch.cuda.set_sync_debug_mode("error")
    for _ in zip(range(2), train.training_steps(cfg, state, corpus, 10**12)):
        pass
    torch.cuda.set_sync_debug_mode("default")
    before, began = programs(), time.perf_counter()
    train.validation_losses(cfg, state, corpus, 65 * cfg.seq_len)
    return dict(validation_s=time.perf_counter() - began, compiled=programs() - before)


def exact():
    """Largest difference in weights from a run, if it is repeated, resumed or branched."""
    fixed = "--total_tokens=307200", "--decay_tokens=30720", "--final_eval_tokens=4096"
    if TINY:
        fixed = "--total_tokens=20480", "--decay_tokens=2048", "--final_eval_tokens=4096"
    weights = lambda folder: runs.newest_checkpoint(folder)["model"]

    def work():
        argv = *fixed, f"--preset={preset}", "--warmup_tokens=10240"
        name = f"{preset}-{strict}-"
        first, again = run(name + "first", *argv), run(name + "again", *argv)
        run(name + "resumed", *argv, "--time_limit=0.5")
        resumed = run(name + "resumed", "--resume")
        branch = run(name + "branch", *fixed, f"--branch={first}")
        one, others = weights(first), dict(again=again, resumed=resumed, branch=branch)
        apart = lambda two: max((one[k] - two[k]).abs().max().item() for k in one)
        return {kind: apart(weights(folder)) for kind, folder in others.items()}

    for strict in (False, True):
        torch.use_deterministic_algorithms(strict)
        for preset in ("laptop", "laptop-moe"):
            attempt(work, preset=preset, deterministic=strict)


def parts():
    """Times of single operations, forwards and backwards, at the shapes of 1B and 1B-moe."""
    n = 256 if TINY else 8192
    a = torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    attempt(lambda: milliseconds(lambda: a @ a), part=f"3 products of size {n}")
    for preset in ("1B", "1B-moe"):
        cfg, corpus = configure(preset=preset, batch_size=4, dtype="bfloat16", compile=False)
        gpt = fast_model(cfg, DEVICE)
        ids, targets = train.data.draw(corpus, torch.arange(4).numpy(), cfg.seq_len, 0)
        y, (block, *_) = torch.from_numpy(targets).to(DEVICE), gpt.blocks
        new = lambda *shape: torch.randn(shape, device=DEVICE, requires_grad=True)
        x = new(4, cfg.seq_len, cfg.n_embd)
        for compiled in (False, True):
            make = torch.compile if compiled and not TINY else lambda f: f
            for part, f in dict(loss=lambda: gpt.loss(x, y), mlp=lambda: block.mlp(x)[0],
                                block=lambda: block(x, gpt.rope)[0]).items():  # fmt: skip
                with devices.mixed_precision(cfg):
                    attempt(lambda: milliseconds(make(f)), preset=preset, part=part, compile=compiled)
        q, k = (new(4, h, cfg.seq_len, cfg.d_head).bfloat16() for h in (cfg.n_head, cfg.n_kv_head))
        attend = lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        for backend in SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH:
            with sdpa_kernel(backend):
                attempt(lambda: milliseconds(attend), preset=preset, part=backend.name)
        attempt(lambda: milliseconds(lambda: devices.to_device(ids, DEVICE) and None), part="copy")
        for p in gpt.parameters():
            p.grad = torch.zeros_like(p)
        for fused in (True, False):
            adam = torch.optim.AdamW(gpt.parameters(), fused=fused)
            attempt(lambda: milliseconds(adam.step), preset=preset, part="AdamW", fused=fused)


def side_worker(i, width, counts, barrier, results):
    torch.set_num_threads(1)
    shape = dict(n_embd=width, n_head=width // 64, n_layer=8, seq_len=512, base_width=256)
    cfg, corpus = configure(**shape, batch_size=16, warmup_tokens=0, seed=i)
    state = train.build(cfg)
    bench.steps(cfg, state, corpus, 3)
    for count in counts:
        barrier.wait()
        began, before = time.perf_counter(), state.tokens
        while i < count and time.perf_counter() - began < 5:
            for _ in train.training_steps(cfg, state, corpus, state.tokens + cfg.batch_tokens):
                pass
        wait()
        results.put((count, (state.tokens - before) / (time.perf_counter() - began)))


def side():
    """Tokens per second of all processes together, which train small models on one card."""
    counts = (1, 2) if TINY else (1, 2, 4, 8, 16)
    for width in (128, 512):
        context = torch.multiprocessing.get_context("spawn")
        barrier, results = context.Barrier(counts[-1]), context.Queue()
        work = width, counts, barrier, results
        workers = torch.multiprocessing.spawn(side_worker, work, counts[-1], join=False)
        speeds = [results.get(timeout=70) for _ in range(len(counts) * counts[-1])]
        workers.join()
        for count in counts:
            together = sum(speed for n, speed in speeds if n == count)
            say(width=width, processes=count, tokens_per_second=together)


def one_of_two(backend):
    """Train a compiled MoE with another process on this card."""
    meet, devices.pick_device = devices.dist.init_process_group, lambda name="auto": DEVICE
    devices.dist.init_process_group = lambda _: meet(backend)
    argv = "--preset=laptop-moe", "--total_tokens=102400", "--warmup_tokens=1024", "--compile"
    out = run(f"two-{backend}", *(argv[:-1] if TINY else argv), "--final_eval_tokens=65536")
    if os.environ["RANK"] == "0":
        say(backend=backend, val_loss=json.loads((out / "record.json").read_text())["val_loss"])
    devices.leave(0)


if __name__ == "__main__":
    steps = dict(train=first_run, loss=loss, exact=exact, parts=parts, side=side)
    if STEP == "env":
        say(**runs.origin(DEVICE, ""), cuda=torch.version.cuda, cores=os.cpu_count())
    elif STEP in steps:
        steps[STEP]()
    elif STEP in ("nccl", "gloo"):
        one_of_two(STEP)
    else:
        train.new_model = fast_model
        for preset in ("1B", "1B-moe") if STEP == "profile" else ():
            attempt(lambda: profile(preset), preset=preset)
        if STEP in train.PRESETS:
            speed(STEP)
PY

for i in "${!NAMES[@]}"; do
    name=${NAMES[i]} number=$((i + 1)) wanted=
    for part in ${STEPS//,/ }; do
        first=${part%-*} last=${part#*-}
        [[ $part =~ ^[0-9]+(-[0-9]+)?$ && $number -ge $first && $number -le $last ]] && wanted=1
        [[ $part = "$name" ]] && wanted=1
    done
    [[ $wanted ]] || continue
    began=$SECONDS
    timeout -k 5 "${LIMITS[i]}" bash -c 'step "$1"' _ "$name" >> "$OUT/log.txt" 2>&1
    echo "{\"step\": \"$name\", \"status\": $?, \"seconds\": $((SECONDS - began))}" |
        tee -a "$OUT/results.jsonl"
done
rm -rf "$WORK"
