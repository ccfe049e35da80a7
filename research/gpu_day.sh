#!/bin/bash
# Measure on one GPU what docs/train.md says is not measured. Needs no network. Every step has a
# time limit and needs no other step. OUT gets results.jsonl, log.txt and two timelines.
#
#   bash research/gpu_day.sh OUT                     steps 1 to 13 (14 is for more time), about 20 minutes on an H100
#   bash research/gpu_day.sh OUT 1-5                 steps by number or name, as in 1-4,parts,e1
#   bash research/gpu_day.sh OUT --tiny              tiny models on any machine, to test this script
#   bash research/gpu_day.sh OUT 1-5 --wheels DIR    unpack packages from DIR first, if any is missing
#
# PYTHON names the interpreter (default: python3). To fill DIR on a machine with a network:
#   pip download -d DIR --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#     --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
#     --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 \
#     numpy tiktoken regex requests charset-normalizer idna urllib3 certifi tqdm safetensors \
#     matplotlib contourpy cycler fonttools kiwisolver packaging pillow pyparsing \
#     python-dateutil six pytest iniconfig pluggy pygments

STEPS="env:40 train:120 1B:200 1B-moe:200 loss:90 PowerLM-3B:150 PowerMoE-3B:150
profile:120 exact:150 parts:60 side:200 two:120 tests:300 e1:540"  # name:seconds
[[ $1 && $1 != -* ]] || { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" && OUT=$(realpath "$1") && shift && cd "$(dirname "$0")/.." || exit
PYTHON=${PYTHON:-python3} WANTED=1-13 TINY="" WORK=$(mktemp -d)
while [[ $1 ]]; do
    case $1 in
        --tiny) TINY=1 ;;
        --wheels) WHEELS=$(realpath "$2"); shift ;;
        *) WANTED=$1 ;;
    esac
    shift
done
export OUT WORK TINY PYTHON PYTHONUNBUFFERED=1

needed='import matplotlib, numpy, pytest, safetensors, tiktoken, torch, tqdm'
if ! "$PYTHON" -c "$needed" && [[ $WHEELS ]]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --target "$WORK/site" "$WHEELS"/*.whl
    export PYTHONPATH=$WORK/site
fi

two() {  # two processes on one card, where NCCL should refuse and gloo should train
    export WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29411
    for backend in nccl gloo; do
        RANK=1 timeout 55 "$PYTHON" "$WORK/measure.py" $backend &
        RANK=0 timeout 55 "$PYTHON" "$WORK/measure.py" $backend
        wait
    done
}

e1() {  # a part of the sweep of research/methods.md at a larger scale, until its time is over
    local grid=(--scale gpu --widths 256 --batches 4,16,64,128 --budgets 2560k,5120k,10240k)
    [[ $TINY ]] && grid=(--scale quick --widths 32 --batches 4 --budgets 10k --n_layer 1)
    timeout -s INT 500 "$PYTHON" sweep.py wsd "${grid[@]}" --workers "${WORKERS:-8}" \
        --out "$OUT/e1"
    rm -rf "$OUT/e1/trunks"
}

step() {
    case $1 in
        two | e1) $1 ;;
        exact) CUBLAS_WORKSPACE_CONFIG=:4096:8 "$PYTHON" "$WORK/measure.py" exact ;;
        tests) # in several processes, if pytest-xdist is there
            "$PYTHON" -c 'import xdist' && parallel=(-n 8 --dist worksteal)
            "$PYTHON" -m pytest -q "${parallel[@]}" ${TINY:+tests/test_moe.py} ;;
        *) "$PYTHON" "$WORK/measure.py" "$1" ;;
    esac
}
export -f step two e1

cat > "$WORK/measure.py" <<'PY'
import gc, json, os, statistics, sys, time  # noqa: E401
from pathlib import Path

sys.path.insert(0, os.getcwd())
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch, see train.py
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench, model, moe, train  # noqa: E401
import runs
from tools import devices, files

OUT, WORK, TINY = Path(os.environ["OUT"]), Path(os.environ["WORK"]), bool(os.environ["TINY"])
DEVICE, STEP = devices.pick_device(), sys.argv[1]
CUDA = DEVICE == "cuda"
wait = torch.cuda.synchronize if CUDA else lambda: None

def say(**result):
    with open(OUT / "results.jsonl", "a") as file:
        file.write(json.dumps({"step": STEP, "device": DEVICE} | result) + "\n")

def attempt(work, **about):
    """Report what work() returns or why it failed, and free its memory."""
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

def fast_model(cfg):
    """In place of a model with weights drawn on the CPU."""
    with torch.device(cfg.device):
        return model.GPT(cfg)

def configure(**fields):
    if TINY:
        fields |= dict(n_layer=2, n_embd=64, n_head=2, n_kv_head=1, n_ffn=64, seq_len=64)
        fields |= dict(vocab_size=256, compile=False)
    typed = {"device": DEVICE} | fields
    return train.load_data(devices.resolve_device(train.make_config(**typed)), typed, None)

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
    return {"ms": statistics.median(times[3:])}

def env():
    say(**runs.origin(DEVICE, ""), cuda=torch.version.cuda, cores=os.cpu_count())

def first_run():
    short = "--total_tokens=20480", "--warmup_tokens=1024", "--final_eval_tokens=4096"
    record = json.loads((run("power", *(short if TINY else ())) / "record.json").read_text())
    results = {n: record["results"][n] for n in ("loss", "seconds", "tokens_per_second")}
    say(**results, dtype=record["config"]["dtype"])
    say(moe_status=moe.main([]))

# Micro-batches, the most useful ones first; e is eager, r recomputes
TRIES = {"1B": "4 4e 16r 2 1 8 16", "1B-moe": "4 4e 8r 2 1 8",
         "PowerLM-3B": "1 1e 2 4r", "PowerMoE-3B": "1 1e 2 4r"}  # fmt: skip

def speed(preset):
    def work():
        began = time.perf_counter()
        # several passes, as in a real step, which then has gradients beside the activations
        cfg, corpus = configure(preset=preset, batch_size=max(8, 2 * n), micro_batch_size=n,
                                recompute="r" in word, compile="e" not in word)  # fmt: skip
        lines = bench.benchmark(cfg, corpus).splitlines()
        lines += ["estimated " + bench.dry_run(cfg, 1).splitlines()[3]]
        reserved = torch.cuda.max_memory_reserved() / 2**30 if CUDA else 0
        return dict(lines=lines, reserved_gib=reserved, seconds=time.perf_counter() - began)

    for word in TRIES[preset].split():
        n = int(word.strip("er"))
        attempt(work, preset=preset, micro_batch_size=word)

def loss():
    """200 steps on the CPU in float32, and here in float32 and bfloat16."""
    n = 12 if TINY else 200
    fixed = f"--total_tokens={n * 1024}", "--warmup_tokens=10240", "--log_every=1024"
    for preset in ("laptop", "laptop-moe"):
        losses = []
        for device, dtype in (("cpu", "float32"), (DEVICE, "float32"), (DEVICE, "bfloat16")):
            own = f"--preset={preset}", f"--dtype={dtype}", "--final_eval_tokens=4096"
            lines = files.read_metrics(run(f"{preset}-{len(losses)}", *fixed, *own, device=device))
            losses.append([line["loss"] for line in lines if "loss" in line])
        for dtype, some in zip(("float32", "bfloat16"), losses[1:]):
            apart = [abs(a / b - 1) for a, b in zip(some, losses[0])]
            say(preset=preset, dtype=dtype, first=apart[0], mean=statistics.mean(apart),
                largest=max(apart), last=apart[-1])  # fmt: skip

def profile():
    """Kernels of a step. A step must not wait for the GPU, and validation must not compile."""
    def work():
        cfg, corpus = configure(preset=preset, batch_size=8, micro_batch_size=4, compile=CUDA)
        steps = train.training_steps(cfg, train.build(cfg), corpus)
        bench.step_times(steps, 3)
        with torch.profiler.profile() as record:
            times = bench.step_times(steps, 2)
        record.export_chrome_trace(str(OUT / f"trace-{preset}.json.gz"))
        kind = "self_device_time_total" if CUDA else "self_cpu_time_total"
        on_device = lambda e: e.device_type.name == "CUDA" and not e.is_user_annotation
        kernels = [e for e in record.key_averages() if not CUDA or on_device(e)]
        ms = {e.key[:120]: getattr(e, kind) / 2e3 for e in kernels}  # per step
        largest = dict(sorted(ms.items(), key=lambda item: -item[1])[:25])
        say(preset=preset, step_ms=500 * sum(times), kernels_ms=sum(ms.values()), largest=largest)
        check = torch.cuda.set_sync_debug_mode if CUDA else str
        check("error")
        next(steps)
        next(steps)
        check("default")
        return dict(waits=False)

    for preset in ("1B", "1B-moe"):
        attempt(work, preset=preset)

def exact():
    """Largest difference in weights from a run, if it is repeated, resumed or branched."""
    T = 20480 if TINY else 307200
    fixed = f"--total_tokens={T}", f"--decay_tokens={T // 10}", "--final_eval_tokens=4096"
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
    """Times of a large product and of attention, forwards and backwards."""
    new = lambda *shape: torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    T, a = (64, new(256, 256)) if TINY else (4096, new(8192, 8192))
    attempt(lambda: milliseconds(lambda: a @ a), part=f"3 products {tuple(a.shape)}")
    for heads, groups in ((24, 24), (16, 8)):  # 1B and 1B-moe
        q, k = new(4, heads, T, 64), new(4, groups, T, 64)
        attend = lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        for backend in SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH:
            with sdpa_kernel(backend):
                attempt(lambda: milliseconds(attend), heads=heads, part=backend.name)

LONG = dict(warmup_tokens=0, total_tokens=10**11)

def side_worker(i, width, counts, barrier, results):
    torch.set_num_threads(1)
    shape = dict(n_embd=width, n_head=width // 64, n_layer=8, seq_len=512, base_width=256)
    cfg, corpus = configure(**shape, batch_size=16, seed=i, **LONG)
    state = train.build(cfg)
    bench.step_times(train.training_steps(cfg, state, corpus), 3)
    for count in counts:
        barrier.wait()
        began, before = time.perf_counter(), state.tokens
        while i < count and time.perf_counter() - began < 5:
            next(train.training_steps(cfg, state, corpus))
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
        speeds = [results.get(timeout=90) for _ in range(len(counts) * counts[-1])]
        workers.join()
        for count in counts:
            together = sum(speed for n, speed in speeds if n == count)
            say(width=width, processes=count, tokens_per_second=together)

def one_of_two(backend):
    """Train a compiled MoE with another process on this card."""
    device = "cuda:0" if CUDA else DEVICE  # of both processes
    meet, devices.pick_device = devices.dist.init_process_group, lambda name="auto": device
    if backend == "gloo":
        devices.dist.init_process_group = lambda _: meet("gloo")
    length = ("--total_tokens=10240",) if TINY else ("--total_tokens=102400", "--compile")
    fixed = "--preset=laptop-moe", "--warmup_tokens=1024", "--final_eval_tokens=4096"

    def work():
        out = run(f"two-{backend}", *fixed, *length)
        record = json.loads((out / "record.json").read_text())
        return dict(val_loss=record["results"]["val_loss"])

    if os.environ["RANK"] == "0":
        attempt(work, backend=backend)
    else:
        run(f"two-{backend}", *fixed, *length)
    devices.leave(0)

if __name__ == "__main__":
    train.GPT = fast_model if STEP in (*TRIES, "profile") else train.GPT
    if STEP in TRIES:
        speed(STEP)
    elif STEP in ("nccl", "gloo"):
        one_of_two(STEP)
    else:
        globals()["first_run" if STEP == "train" else STEP]()
PY

number=0
for entry in $STEPS; do
    name=${entry%:*} number=$((number + 1)) began=$SECONDS chosen=""
    for part in ${WANTED//,/ }; do
        [[ $part = "$name" || $part = "$number" ]] && chosen=1
        [[ $part =~ ^([0-9]+)-([0-9]+)$ ]] &&
            ((BASH_REMATCH[1] <= number && number <= BASH_REMATCH[2])) && chosen=1
    done
    [[ $chosen ]] || continue
    limit=$((${entry#*:} * (TINY ? 4 : 1)))
    timeout -k 5 $limit bash -c 'step "$1"' _ "$name" >> "$OUT/log.txt" 2>&1
    echo "{\"step\": \"$name\", \"status\": $?, \"seconds\": $((SECONDS - began))}" |
        tee -a "$OUT/results.jsonl"
done
rm -rf "$WORK"
