"""Compare step speed with nanoGPT on a CPU, at equal shapes.

    git clone https://github.com/karpathy/nanoGPT
    python research/bench_nanogpt.py --nanogpt nanoGPT               tokens per second, a ratio
    python research/bench_nanogpt.py --nanogpt nanoGPT --compile     the same, both compiled
    python research/bench_nanogpt.py --nanogpt nanoGPT --bfloat16    both in bfloat16, too

The models take turns in one process, step by step, so a slow machine slows down all of
them. We print the median over the rounds. A ratio above 1 means that this project is
faster. With --bfloat16, ours runs beside nanoGPT in float32 and in bfloat16. All of them
learn one batch by heart, and if a loss does not fall, we print no ratio.
"""

import contextlib
import importlib.util
import io
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import bench
import train
from tools import flags

SHAPES = [(64, 128), (64, 256), (128, 128), (128, 256)]  # width, tokens of a sequence
LEARNING_RATE = 1e-3


def load_nanogpt(folder: Path):
    """nanoGPT's model.py as a module."""
    spec = importlib.util.spec_from_file_location("nanogpt", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Racer:
    """A model in training, with the seconds and the loss of all its steps."""

    def __init__(self, model, optimizer, dtype: str, loss_at: int):
        self.model = model
        self.optimizer = optimizer
        self.dtype = dtype
        self.loss_at = loss_at  # place of the loss in what the model returns
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, inputs, targets) -> None:
        began = time.perf_counter()
        bfloat16 = self.dtype == "bfloat16"
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = self.model(inputs, targets)[self.loss_at]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(loss.item())


def ours(width: int, seq_len: int, compiled: bool, dtype: str) -> Racer:
    shape = dict(n_layer=4, n_head=4, n_embd=width, seq_len=seq_len, batch_size=16)
    cfg = train.make_config(**shape, device="cpu", compile=compiled, dtype=dtype)
    state = train.build(cfg)
    for group in state.optimizer.param_groups:
        group["lr"] = LEARNING_RATE * group["lr_scale"]
    return Racer(state.model, state.optimizer, dtype, loss_at=0)


def theirs(nanogpt, width: int, seq_len: int, compiled: bool, dtype: str) -> Racer:
    shape = dict(n_layer=4, n_head=4, n_embd=width, block_size=seq_len, vocab_size=256)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
        model = nanogpt.GPT(nanogpt.GPTConfig(**shape, dropout=0.0, bias=False))
        optimizer = model.configure_optimizers(0.1, LEARNING_RATE, (0.9, 0.95), "cpu")
    if compiled:
        model = torch.compile(model)  # as nanoGPT's train.py does
    return Racer(model, optimizer, dtype, loss_at=1)


def compare(nanogpt, shape: tuple[int, int], compiled: bool, dtype: str, rounds: int):
    """Time steps of both on one batch, and print the ratios. Raises UserError if one did
    not learn."""
    torch.manual_seed(0)
    torch.compiler.reset()  # compile for this shape, not for varying shapes
    width, seq_len = shape
    inputs, targets = torch.randint(256, (2, 16, seq_len))
    us = ours(width, seq_len, compiled, dtype)
    them = [theirs(nanogpt, width, seq_len, compiled, "float32")]
    if dtype == "bfloat16":
        them.append(theirs(nanogpt, width, seq_len, compiled, dtype))

    for _ in range(3 + rounds):  # 3 for warming up
        for racer in (us, *them):
            racer.step(inputs, targets)

    sizes = [sum(p.numel() for p in racer.model.parameters()) for racer in (us, them[0])]
    print(f"width {width}, sequence {seq_len}: {sizes[0]:,} and {sizes[1]:,} parameters")
    bench.check_learned("ours", us.losses[0], us.losses[-1])
    for racer in them:
        bench.check_learned("nanoGPT", racer.losses[0], racer.losses[-1])
        ratios = [b / a for a, b in zip(us.seconds[3:], racer.seconds[3:])]
        low, median, high = statistics.quantiles(ratios)
        print(
            f"    ours in {dtype}: {median:.3f} of nanoGPT's tokens per second "
            f"in {racer.dtype} (quartiles {low:.3f} {high:.3f})",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("bench_nanogpt.py", __doc__)
    add = parser.add_argument
    add("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    add("--compile", action="store_true", help="compile both models")
    add("--bfloat16", action="store_true", help="ours in bfloat16")
    add("--rounds", type=int, default=40, help="timed steps of each (default: 40)")
    args = parser.parse_args(argv)
    nanogpt = load_nanogpt(args.nanogpt)
    dtype = "bfloat16" if args.bfloat16 else "float32"
    try:
        for shape in SHAPES:
            compare(nanogpt, shape, args.compile, dtype, args.rounds)
    except flags.UserError as error:
        return flags.fail("bench_nanogpt.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
