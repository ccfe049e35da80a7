"""Compare step speed with nanoGPT on a CPU, at equal shapes.

    git clone https://github.com/karpathy/nanoGPT
    python forks/bench_nanogpt.py --nanogpt nanoGPT                 ratios of tokens per second
    python forks/bench_nanogpt.py --nanogpt nanoGPT --compile       the same, both compiled
    python forks/bench_nanogpt.py --nanogpt nanoGPT --bfloat16      ours in bfloat16

Both take turns in one process, step by step, so a slow machine slows down both. We print the median
over the pairs. A ratio above 1 means that this project is faster. With --bfloat16, ours runs beside
nanoGPT in float32 and in bfloat16.
"""

import argparse
import contextlib
import importlib.util
import io
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import train


def load_nanogpt(folder: Path):
    spec = importlib.util.spec_from_file_location("nanogpt", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_their_step(nanogpt, shape: dict, x, y, compiled: bool):
    """A function of the dtype that takes one step of nanoGPT, and its number of parameters."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
        model = nanogpt.GPT(nanogpt.GPTConfig(vocab_size=256, dropout=0.0, bias=False, **shape))
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    n_params = sum(p.numel() for p in model.parameters())
    if compiled:
        model = torch.compile(model)  # as nanoGPT's train.py does

    def step(dtype):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, n_params


def make_our_step(cfg, x, y):
    state = train.build(cfg)

    def step():
        with train.mixed_precision(cfg):
            loss, _ = state.model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.optimizer.step()
        state.optimizer.zero_grad()

    return step, state.model.n_params()


def compare(nanogpt, width: int, seq_len: int, compiled: bool, bfloat16: bool, pairs: int) -> None:
    """Time forward pass, backward pass and update of both, on the same batch; print the ratios."""
    torch.manual_seed(0)
    torch.compiler.reset()  # compile for this shape, not for varying shapes
    x, y = torch.randint(256, (2, 16, seq_len))
    shape = dict(block_size=seq_len, n_layer=4, n_head=4, n_embd=width)
    their_step, their_size = make_their_step(nanogpt, shape, x, y, compiled)
    cfg = train.make_config(
        n_layer=4, n_embd=width, n_head=4, seq_len=seq_len, batch_size=16, device="cpu",
        compile=compiled, dtype="bfloat16" if bfloat16 else "float32",
    )  # fmt: skip
    our_step, our_size = make_our_step(train.resolve_device(cfg), x, y)

    steps = {"ours": our_step, "float32": lambda: their_step(torch.float32)}
    if bfloat16:
        steps["bfloat16"] = lambda: their_step(torch.bfloat16)
    seconds = {name: [] for name in steps}
    for _ in range(3 + pairs):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    print(f"width {width}, sequence {seq_len}: {our_size:,} and {their_size:,} parameters")
    for name in list(steps)[1:]:
        ratios = [theirs / ours for ours, theirs in zip(seconds["ours"][3:], seconds[name][3:])]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"    ours in {cfg.dtype}: {median:.3f} of nanoGPT's tokens per second in {name} "
              f"(quartiles {low:.3f} {high:.3f})", flush=True)  # fmt: skip


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    add = parser.add_argument
    add("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    add("--compile", action="store_true", help="compile both models")
    add("--bfloat16", action="store_true", help="ours in bfloat16")
    add("--widths", type=int, nargs="+", default=[64, 128], help="of the models (default: 64 128)")
    add("--pairs", type=int, default=40, help="timed steps of each (default: 40)")
    args = parser.parse_args()
    nanogpt = load_nanogpt(args.nanogpt)
    for width in args.widths:
        for seq_len in (128, 256):
            compare(nanogpt, width, seq_len, args.compile, args.bfloat16, args.pairs)


if __name__ == "__main__":
    main()
