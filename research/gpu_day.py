"""Measure this project on one GPU, meant for 15 minutes: is it right, and is it fast?

    python research/gpu_day.py > day.jsonl    all steps, each in a new process
    python research/gpu_day.py race           one of them
    python research/gpu_day.py nanogpt --preset laptop --n_layer 3    also on a CPU

It prints a line of JSON for every step. Flags of train.py change the settings of the
steps below. The step nanogpt needs a clone of github.com/karpathy/nanoGPT, whose full
path is in the variable NANOGPT, and fails without it.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

import numpy as np
import torch
from torch.utils.benchmark import Timer

import fit
import paper
import sweep
import train
from config import TrainConfig, make_config, typed_fields
from moe import MoE, one_by_one
from tools import bench, devices, files, flags, run_folder


def config_of(argv: list[str]) -> TrainConfig:
    parser = flags.program_parser("gpu_day.py", __doc__)
    flags.add_flags(parser, TrainConfig, {})
    return make_config(**typed_fields(parser.parse_args(argv)))


# -- Is it right? ------------------------------------------------------------------------


def moe_layer(argv: list[str]) -> dict:
    """Differences of an MoE layer from one_by_one.

    On an H100 or H200, it computes bfloat16 by `grouped`, and float32 by `loop`.
    """
    cfg = devices.resolve(config_of(argv))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        layer = MoE(cfg).to(cfg.device, dtype)
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        x = torch.randn(100, cfg.n_embd, device=cfg.device, dtype=dtype)
        found[str(dtype)] = worst_difference(layer, x.requires_grad_())
    return found


def worst_difference(layer: MoE, x: torch.Tensor) -> float:
    """Largest relative difference from one_by_one, over the output and every gradient."""
    direction = torch.randn_like(x)  # the gradient that arrives at the output
    inputs = [x, *layer.parameters()]
    fast, _ = layer(x)
    fast_gradients = torch.autograd.grad(fast, inputs, direction)
    slow = one_by_one(layer, x)
    slow_gradients = torch.autograd.grad(slow, inputs, direction)
    differences = []
    for a, b in zip((fast, *fast_gradients), (slow, *slow_gradients)):
        differences.append((a - b).abs().max() / b.abs().max())
    return torch.stack(differences).max().item()


def exact(argv: list[str]) -> dict:
    """The largest difference of a weight from a whole run, if it resumed or branched.

    For a sweep, which keeps no weights, it is the difference of the validation loss.
    """
    # 1. The whole run, one that stops after its first step, and a branch at the decay
    train.main([*argv, "--out=whole"])
    train.main([*argv, "--out=resumed", "--time_limit=0"])
    train.main(["--out=resumed", "--resume"])
    train.main(["--branch=whole", "--out=branch"])
    whole = weights("whole")
    found = {}
    for run in ("resumed", "branch"):
        found[run] = (weights(run) - whole).abs().max().item()

    # 2. A sweep, in which the run starts from the trunk of a shorter one
    record = files.read_json(Path("whole/record.json"))
    cfg = make_config(**record["config"])
    shorter = dataclasses.replace(cfg, total_tokens=cfg.total_tokens // 2)
    sweep.train_trunk([shorter, cfg], Path("trunk.jsonl"))
    last = files.read_records(Path("trunk.jsonl"))[-1]
    found["sweep"] = abs(last["results"]["val_loss"] - record["results"]["val_loss"])
    return found


def weights(run: str) -> torch.Tensor:
    """All weights at the end of a run, as a vector."""
    saved = run_folder.read_checkpoint(run_folder.newest_checkpoint(Path(run)))
    return torch.nn.utils.parameters_to_vector(saved["model"].values())


# -- Is it fast? -------------------------------------------------------------------------


def speed(argv: list[str], build=train.build) -> dict:
    """Speed and memory of training, and the memory that `--dry_run` estimates."""
    cfg, mixture, state = bench.prepare(config_of(argv), build)
    parts = bench.memory(cfg, sum(p.numel() for p in state.model.parameters()))
    estimated_gib = sum(parts.values()) / 2**30
    return bench.measure(cfg, mixture, state) | {"estimated_gib": estimated_gib}


def build_nanogpt(cfg: TrainConfig) -> train.State:
    """nanoGPT with the layers, width, heads, vocabulary and seq_len of a config."""
    file = Path(os.environ["NANOGPT"], "model.py")
    spec = importlib.util.spec_from_file_location("nanogpt", file)
    nanogpt = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt"] = nanogpt  # torch.compile looks there
    spec.loader.exec_module(nanogpt)
    shape = dict(n_layer=cfg.n_layer, n_head=cfg.n_head, n_embd=cfg.n_embd)
    shape |= dict(block_size=cfg.seq_len, vocab_size=cfg.vocab_size)
    model = nanogpt.GPT(nanogpt.GPTConfig(**shape, dropout=0.0, bias=False))
    model.to(cfg.device)

    # train.py expects the loss and the routing, and sets each group's learning rate
    forward = model.forward

    def loss_and_routing(inputs, targets):
        _, loss = forward(inputs, targets)
        return loss, None

    model.forward = loss_and_routing
    if cfg.compile:
        model.compile()
    kind = torch.device(cfg.device).type
    betas = (cfg.beta1, cfg.beta2)
    optimizer = model.configure_optimizers(cfg.weight_decay, 0.0, betas, kind)
    for group in optimizer.param_groups:
        group["lr_scale"] = 1.0
    return train.State(model, optimizer)


def speed_of_nanogpt(argv: list[str]) -> dict:
    return speed(argv, build_nanogpt)


def beside_transformers(argv: list[str]) -> dict:
    """Milliseconds of an MoE layer in bfloat16, forward and backward, for a pass."""
    from transformers import GraniteMoeConfig
    from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeMoE

    cfg = devices.resolve(config_of(argv))
    config = GraniteMoeConfig(
        hidden_size=cfg.n_embd,
        intermediate_size=cfg.n_ffn,
        num_local_experts=cfg.n_expert,
        num_experts_per_tok=cfg.n_expert_active,
        experts_implementation="grouped_mm",
    )
    how = dict(device=cfg.device, dtype=torch.bfloat16)
    shape = (cfg.micro_batch_size, cfg.seq_len, cfg.n_embd)
    x = torch.randn(shape, **how, requires_grad=True)
    layers = {"ours": MoE(cfg), "transformers": GraniteMoeMoE(config)}
    found = {}
    for name, layer in layers.items():
        layer.to(**how)
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=0.02)
        if cfg.compile:
            layer.compile(dynamic=False)
        output = "layer(x)[0]" if name == "ours" else "layer(x)"
        timer = Timer(f"{output}.sum().backward()", globals=dict(layer=layer, x=x))
        found[name] = 1e3 * timer.timeit(20).median  # it warms up first
    return found


# -- A race: a pilot, and then a run of 16 times its length ------------------------------


def race(argv: list[str], times: int = 16) -> dict:
    """Losses of a held learning rate, half of it, Power and a line. One seed.

    WSD and Power have a pilot each. Trunks end with decays of 30% and of 50%.
    """

    def losses_of(runs: list[TrainConfig]) -> list[float]:
        folder = Path("race")
        sweep.train_all(runs, folder, workers=8)  # processes on the card
        return [paper.row_of(cfg, folder)["loss"] for cfg in runs]

    # 1. The pilots, at five learning rates. Without a bottom, the best is the lowest
    starts = {x: config_of([*argv, "--schedule", x]) for x in ("wsd", "power")}
    found = {}
    tuned = {}  # {schedule: the pilot at its best learning rate}
    for schedule, cfg in starts.items():
        lrs = sweep.window(cfg, step=2)
        losses = losses_of([sweep.at_rate(cfg, lr) for lr in lrs])
        x, why_not = fit.bottom(list(zip(np.log2(lrs), losses)))
        tuned[schedule] = sweep.at_rate(cfg, 2**x)
        result = dict(lrs=lrs, losses=losses, best=2**x, why_not=why_not)
        found[f"pilot of {schedule}"] = result

    # 2. The long runs. The line has the peak of the preset's law, times what the pilot of
    # WSD has over that law
    held = tuned["wsd"]
    T = times * held.total_tokens
    line = config_of([*argv, "--schedule", "linear", "--total_tokens", str(T)])
    runs = {"line": sweep.at_rate(line, line.lr * held.lr / starts["wsd"].lr)}
    half = sweep.at_rate(held, held.lr / 2)
    for name, cfg in (("held", held), ("half", half), ("power", tuned["power"])):
        for share in (0.3, 0.5):
            run = dataclasses.replace(cfg, total_tokens=T, decay_share=share)
            runs[f"{name}, {share:.0%}"] = run
    return found | dict(zip(runs, losses_of(list(runs.values()))))


# -- The command line --------------------------------------------------------------------

SHORT = "--total_tokens 200k --warmup_tokens 10k --final_eval_tokens 64k"
BFLOAT16 = "--dtype bfloat16 --compile"
AS_NANOGPT = "--preset 1B --n_layer 10 --batch_size 8 --micro_batch_size 4"
RACE = (
    "--preset laptop --n_layer 8 --n_embd 256 --n_head 4 --base_width 256 --seq_len 512 "
    "--batch_size 64 --total_tokens 5M --warmup_tokens 1M --decay_share 0.3"
)
STEPS = {  # name -> function, and the flags of train.py that it starts with
    "moe": (moe_layer, "--preset 1B-moe"),
    "exact": (exact, f"--preset laptop {SHORT} --dtype float32"),
    "exact-bfloat16": (exact, f"--preset laptop {SHORT} {BFLOAT16}"),
    "exact-moe": (exact, f"--preset laptop-moe {SHORT} --dtype float32"),
    "exact-moe-bfloat16": (exact, f"--preset laptop-moe {SHORT} {BFLOAT16}"),
    "1B": (speed, "--preset 1B --batch_size 32 --micro_batch_size 4"),
    "1B-moe": (speed, "--preset 1B-moe --batch_size 32 --micro_batch_size 4"),
    "ours": (speed, AS_NANOGPT),
    "nanogpt": (speed_of_nanogpt, AS_NANOGPT),
    "transformers": (beside_transformers, "--preset 1B-moe --micro_batch_size 4"),
    "race": (race, RACE),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in STEPS:
        config_of(argv)  # refuses other words, and prints the help
        for step in STEPS:
            command = [sys.executable, __file__, step, *argv]
            try:
                subprocess.run(command, timeout=500, check=True)
            except subprocess.SubprocessError as error:  # it failed, or took too long
                print(json.dumps({"step": step, "error": str(error)}), flush=True)
        return 0

    step = argv[0]
    function, usual = STEPS[step]
    flags_of_step = [*usual.split(), *argv[1:]]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        with contextlib.redirect_stdout(sys.stderr):
            found = function(flags_of_step)
    line = {
        "step": step,
        "flags": " ".join(flags_of_step),
        "device": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": run_folder.git_commit(),
        "seconds": time.perf_counter() - begin,
    }
    if torch.cuda.is_available():
        line["device"] = torch.cuda.get_device_name()
    print(json.dumps(line | found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
