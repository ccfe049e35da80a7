"""Side by side with nanoGPT on a CPU: step speed at equal shapes, and time to equal quality.

    git clone https://github.com/karpathy/nanoGPT
    python forks/bench_nanogpt.py --nanogpt nanoGPT                 ratios of tokens per second
    python forks/bench_nanogpt.py --nanogpt nanoGPT --compile       the same, both compiled
    python forks/bench_nanogpt.py --nanogpt nanoGPT --bfloat16      ours in bfloat16, beside theirs in float32 and bfloat16
    python forks/bench_nanogpt.py --nanogpt nanoGPT --quality       time to nanoGPT's final held-out loss

Both take turns in one process, step by step, so that a machine that slows down slows both; printed
is the median over the pairs. A ratio above 1 says that this project is faster.
"""

import argparse
import contextlib
import importlib.util
import io
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import data
import train


def load_nanogpt(path: Path):
    spec = importlib.util.spec_from_file_location("nanogpt", path / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_nanogpt(nanogpt, lr=1e-3, beta2=0.95, **shape):
    with contextlib.redirect_stdout(io.StringIO()):  # it reports its size
        model = nanogpt.GPT(nanogpt.GPTConfig(vocab_size=256, dropout=0.0, bias=False, **shape))
        return model, model.configure_optimizers(0.1, lr, (0.9, beta2), "cpu")


def nanogpt_step(model, optimizer, x, y, bfloat16=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        _, loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def compare_speed(nanogpt, compiled: bool, bfloat16: bool, pairs: int, widths: list[int]) -> None:
    """Forward, backward and update; the batches are drawn beforehand for both."""
    for width in widths:
        for seq_len in (128, 256):
            torch.manual_seed(0)
            theirs, their_optimizer = build_nanogpt(nanogpt, block_size=seq_len, n_layer=4, n_head=4, n_embd=width)
            cfg = train.resolve_device(train.make_config(
                n_layer=4, n_embd=width, n_head=4, seq_len=seq_len, batch_size=16, device="cpu", compile=compiled,
                dtype="bfloat16" if bfloat16 else "float32",
            ))  # fmt: skip
            ours, our_optimizer = list(vars(train.build(cfg)).values())[:2]
            sizes = ours.n_params(), sum(p.numel() for p in theirs.parameters())
            if compiled:
                torch.compiler.reset()  # else it would compile for varying shapes from the second one on
                theirs = torch.compile(theirs)  # as nanoGPT's train.py does
            x, y = torch.randint(256, (2, 16, seq_len))

            def our_step():
                with train.mixed_precision(cfg):
                    loss, _ = ours(x, y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
                our_optimizer.step()
                our_optimizer.zero_grad()

            steps = {"ours": our_step, "float32": lambda: nanogpt_step(theirs, their_optimizer, x, y)}
            if bfloat16:
                steps["bfloat16"] = lambda: nanogpt_step(theirs, their_optimizer, x, y, bfloat16=True)
            seconds = {name: [] for name in steps}
            for _ in range(3 + pairs):
                for name, step in steps.items():
                    started = time.perf_counter()
                    step()
                    seconds[name].append(time.perf_counter() - started)
            for theirs_in in list(steps)[1:]:
                ratios = sorted(t / o for o, t in zip(seconds["ours"][3:], seconds[theirs_in][3:]))
                print(
                    f"width {width:3d}, sequence {seq_len}, batch 16, {'compiled' if compiled else 'eager'}, {torch.get_num_threads()} threads: "
                    f"{cfg.dtype} {statistics.median(ratios):.3f} of nanoGPT's tokens/s in {theirs_in} "
                    f"(quartiles {ratios[len(ratios) // 4]:.3f} {ratios[3 * len(ratios) // 4]:.3f}); {sizes[0]:,} and {sizes[1]:,} parameters",
                    flush=True,
                )


@torch.no_grad()
def loss_on_held_out(model, corpus, seq_len) -> float:
    """Mean nats per byte over all held-out text in whole sequences, for a model that returns (logits, loss)."""
    index = np.arange(data.n_sequences(corpus.val, seq_len))
    total = 0.0
    for part in np.array_split(index, math.ceil(len(index) * seq_len / 2**14)):
        x, y = (torch.from_numpy(rows).contiguous() for rows in data.read_sequences(corpus.val, part, seq_len))
        total += model(x, y)[1].item() * y.numel()
    return total / (len(index) * seq_len)


def compare_quality(nanogpt, corpus: data.Corpus, total_tokens: int) -> None:
    """nanoGPT with the CPU settings of its README, then a laptop run with a budget of our choice."""
    torch.manual_seed(1337)
    steps, block, batch = 2000, 64, 12
    model, optimizer = build_nanogpt(nanogpt, beta2=0.99, block_size=block, n_layer=4, n_head=4, n_embd=128)
    started = time.perf_counter()
    for step in range(steps):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 100) / (steps - 100)))
        lr = 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + 9e-4 * cosine
        for group in optimizer.param_groups:
            group["lr"] = lr
        rows = corpus.train[torch.randint(len(corpus.train) - block - 1, (batch, 1)).numpy() + np.arange(block + 1)]
        rows = torch.from_numpy(rows.astype(np.int64))
        nanogpt_step(model, optimizer, rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    their_seconds = time.perf_counter() - started
    their_loss = loss_on_held_out(model.eval(), corpus, block)
    print(f"nanoGPT: {their_loss:.4f} nats per byte after {their_seconds:.1f} s", flush=True)

    cfg = train.resolve_device(train.make_config(total_tokens=total_tokens, warmup_tokens=total_tokens // 20, device="cpu"))
    state = train.build(cfg)
    model, optimizer = state.model, state.optimizer
    schedule = train.make_schedule(cfg)
    started = time.perf_counter()
    for step in range(cfg.total_tokens // cfg.batch_tokens):
        tokens = step * cfg.batch_tokens
        train.optimizer_step(cfg, model, optimizer, corpus, tokens, schedule(tokens + cfg.batch_tokens / 2))
    our_seconds = time.perf_counter() - started
    our_loss = train.validation_loss(model, corpus)["val_loss"]
    print(
        f"laptop, power, {total_tokens:,} tokens: {our_loss:.4f} nats per byte after {our_seconds:.1f} s, "
        f"{our_seconds / their_seconds:.2f} of nanoGPT's time, {torch.get_num_threads()} threads"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--compile", action="store_true", help="compile both models")
    parser.add_argument("--bfloat16", action="store_true", help="ours in bfloat16, theirs in float32 and in bfloat16")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128], help="of the models (default: 64 128)")
    parser.add_argument("--pairs", type=int, default=40, help="timed steps of each (default: 40)")
    parser.add_argument("--quality", action="store_true", help="compare the time to nanoGPT's final loss instead")
    parser.add_argument("--total_tokens", type=float, default=520_000, help="budget of our run (default: 5.2e5)")
    args = parser.parse_args()
    nanogpt = load_nanogpt(args.nanogpt)
    if args.quality:
        compare_quality(nanogpt, data.embedded_corpus(), int(args.total_tokens))
    else:
        compare_speed(nanogpt, args.compile, args.bfloat16, args.pairs, args.widths)


if __name__ == "__main__":
    main()
