"""Compare step speed with nanoGPT on a CPU, at equal shapes.

    git clone https://github.com/karpathy/nanoGPT
    python forks/bench_nanogpt.py --nanogpt nanoGPT               tokens per second, a ratio
    python forks/bench_nanogpt.py --nanogpt nanoGPT --compile     the same, both compiled
    python forks/bench_nanogpt.py --nanogpt nanoGPT --bfloat16    ours in bfloat16

Both take turns in one process, step by step, so a slow machine slows down both. We print
the median over the pairs. A ratio above 1 means that this project is faster. With
--bfloat16, ours runs beside nanoGPT in float32 and in bfloat16.
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

import train
from tools.flags import program_parser


def load_nanogpt(folder: Path):
    spec = importlib.util.spec_from_file_location("nanogpt", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_theirs(nanogpt, shape: dict, compiled: bool) -> tuple:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
        model = nanogpt.GPT(
            nanogpt.GPTConfig(vocab_size=256, dropout=0.0, bias=False, **shape)
        )
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    return torch.compile(
        model
    ) if compiled else model, optimizer  # as nanoGPT's train.py does


def take_step(model, optimizer, batch, dtype: str, loss_at: int) -> None:
    """One training step. loss_at: place of the loss in what the model returns."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        loss = model(*batch)[loss_at]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def compare(
    nanogpt, width: int, seq_len: int, compiled: bool, bfloat16: bool, pairs: int
) -> None:
    """Time forward pass, backward pass and update of both, on the same batch; print the
    ratios."""
    torch.manual_seed(0)
    torch.compiler.reset()  # compile for this shape, not for varying shapes
    batch = torch.randint(256, (2, 16, seq_len)).unbind()  # inputs and targets
    shape = dict(block_size=seq_len, n_layer=4, n_head=4, n_embd=width)
    model, optimizer = build_theirs(nanogpt, shape, compiled)
    cfg = train.make_config(
        n_layer=4,
        n_embd=width,
        n_head=4,
        seq_len=seq_len,
        batch_size=16,
        device="cpu",
        compile=compiled,
        dtype="bfloat16" if bfloat16 else "float32",
    )
    state = train.build(cfg)

    steps = {"ours": (state.model, state.optimizer, batch, cfg.dtype, 0)}
    for dtype in dict.fromkeys(["float32", cfg.dtype]):
        steps[dtype] = (model, optimizer, batch, dtype, 1)
    seconds = {name: [] for name in steps}
    for _ in range(3 + pairs):
        for name, step in steps.items():
            started = time.perf_counter()
            take_step(*step)
            seconds[name].append(time.perf_counter() - started)
    ours, theirs = (sum(p.numel() for p in m.parameters()) for m in (state.model, model))
    print(f"width {width}, sequence {seq_len}: {ours:,} and {theirs:,} parameters")
    for name in list(steps)[1:]:
        ratios = [
            theirs / ours for ours, theirs in zip(seconds["ours"][3:], seconds[name][3:])
        ]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(
            f"    ours in {cfg.dtype}: {median:.3f} of nanoGPT's tokens per second in {name} "
            f"(quartiles {low:.3f} {high:.3f})",
            flush=True,
        )


def main() -> None:
    parser = program_parser("bench_nanogpt.py", __doc__)
    add = parser.add_argument
    add("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    add("--compile", action="store_true", help="compile both models")
    add("--bfloat16", action="store_true", help="ours in bfloat16")
    add(
        "--widths",
        type=int,
        nargs="+",
        default=[64, 128],
        help="of the models (default: 64 128)",
    )
    add("--pairs", type=int, default=40, help="timed steps of each (default: 40)")
    args = parser.parse_args()
    nanogpt = load_nanogpt(args.nanogpt)
    for width in args.widths:
        for seq_len in (128, 256):
            compare(nanogpt, width, seq_len, args.compile, args.bfloat16, args.pairs)


if __name__ == "__main__":
    main()
