"""Measure this project on one GPU, in about 15 minutes.

    python research/gpu_day.py > day.jsonl    all steps, each in a new process
    python research/gpu_day.py exact          one of them
    python research/gpu_day.py --tiny         in small, on a CPU

It prints a line of JSON for every step. The step nanogpt is skipped unless the variable
NANOGPT has the full path of a clone of nanoGPT. The law of a sweep takes longer:

    python sweep.py wsd --scale gpu --widths 256 --batches 16,64 --seeds 1 \\
        --budgets 5M,10M,20M,40M,80M --weight_decay 0.1 --out runs/law
    python fit.py runs/law
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

PROJECT = Path(__file__).resolve().parent.parent
BENCH = "-m tools.bench --json --preset"
LARGE = "--batch_size 32 --micro_batch_size 4 --kernels"
LARGER = "--batch_size 8 --micro_batch_size 2 --recompute"
AS_NANOGPT = "--n_layer 10 --batch_size 8 --micro_batch_size 4"
SHORT = "--total_tokens 300k --warmup_tokens 10k --final_eval_tokens 64k"
STEPS = {  # name -> command, without "python"
    "moe": "-m moe",
    "default": "-m train --schedule power --out run",
    "1B": f"{BENCH} 1B {LARGE}",
    "1B-moe": f"{BENCH} 1B-moe {LARGE}",
    "PowerLM-3B": f"{BENCH} PowerLM-3B {LARGER}",
    "PowerMoE-3B": f"{BENCH} PowerMoE-3B {LARGER}",
    "ours": f"{BENCH} 1B {AS_NANOGPT}",
    "nanogpt": f"{BENCH} 1B {AS_NANOGPT} --nanogpt $NANOGPT",
    "layer": f"{BENCH} 1B-moe --micro_batch_size 4 --layer",
    "exact": f"-m research.exact --preset laptop {SHORT}",
    "exact-moe": f"-m research.exact --preset laptop-moe {SHORT}",
    # on one GPU, which "cuda:0" names for both processes
    "two": "-m torch.distributed.run --standalone --nproc_per_node 2 -m train "
    f"--preset laptop-moe {SHORT} --device cuda:0 --out run",
}
SMALL = (
    "--n_layer 1 --n_embd 64 --n_head 2 --n_kv_head 1 --n_ffn 64 --vocab_size 256 "
    "--seq_len 32 --batch_size 8 --micro_batch_size 4 --total_tokens 8k "
    "--warmup_tokens 1k --final_eval_tokens 1k --device cpu"
)


def run(command: str) -> dict:
    """Run a command in a new process and a temporary folder. Returns its results."""
    if "$NANOGPT" in command and "NANOGPT" not in os.environ:
        return {"skipped": "NANOGPT is not set"}
    words = [sys.executable, *os.path.expandvars(command).split()]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])}
    with tempfile.TemporaryDirectory() as folder:
        how = dict(cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
        try:
            done = subprocess.run(words, **how, timeout=300, check=True)
        except subprocess.SubprocessError as error:  # it failed, or took too long
            return {"error": str(error)}
        record = Path(folder, "run", "record.json")  # of train.py
        if record.exists():
            return json.loads(record.read_text())["results"]
    *_, last = done.stdout.splitlines()
    return json.loads(last) if last.startswith("{") else {"output": done.stdout}


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("step", nargs="?", choices=STEPS, help="(default: all)")
    parser.add_argument("--tiny", action="store_true", help="in small, on a CPU")
    args = parser.parse_args(argv)

    gpu = torch.cuda.is_available() and not args.tiny
    describe = f"git -C {PROJECT} describe --always --dirty --exclude '*'"
    status, commit = subprocess.getstatusoutput(describe)
    origin = {
        "device": torch.cuda.get_device_name() if gpu else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": None if status else commit,
    }
    for step in [args.step] if args.step else STEPS:
        command = STEPS[step]
        if args.tiny and step != "moe":
            command += f" {SMALL}"
        line = {"step": step, "command": f"python {command}"} | origin | run(command)
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
