"""What muP is for: the best learning rate of a narrow model is the best one of a wide model."""

import argparse
import math
import subprocess
import tarfile

import numpy as np
import pytest
import torch

import mup
from model import GPT, GPTConfig

WIDTHS = (32, 64, 128, 256)
SEEDS = (0, 1, 2)
STEPS, BATCH, SEQ_LEN = 60, 8, 32
RATES = [2.0**-e for e in (9, 8, 7, 6, 5, 4)]


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    """Some Python source that every Python has, as bytes."""
    source = b"".join(open(module.__file__, "rb").read() for module in (argparse, subprocess, tarfile))
    return torch.from_numpy(np.frombuffer(source, dtype=np.uint8).astype(np.int64))


def final_loss(width: int, lr: float, seed: int, use_mup: bool, text: torch.Tensor) -> float:
    """Train a little at a constant rate; mean loss of the last quarter."""
    cfg = GPTConfig(
        n_layer=2, n_embd=width, n_head=width // 16, seq_len=SEQ_LEN, vocab_size=256,
        base_width=32 if use_mup else width, attention_multiplier=None if use_mup else 16**-0.5,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = GPT(cfg)
    optimizer = torch.optim.AdamW(mup.param_groups(model, mup.rules(cfg), 0.0), betas=(0.9, 0.95), eps=1e-10, fused=True)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    batches, losses = torch.Generator().manual_seed(seed), []
    for _ in range(STEPS):
        start = torch.randint(len(text) - SEQ_LEN - 1, (BATCH, 1), generator=batches)
        rows = text[start + torch.arange(SEQ_LEN + 1)]
        loss, _ = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-STEPS // 4 :]) / (STEPS // 4)


def best_log2_lr(losses: list[float]) -> float:
    """Vertex of the parabola through the lowest point and its neighbours, in log2 of the rate."""
    i = min(max(int(np.argmin(losses)), 1), len(losses) - 2)
    c, b, _ = np.polyfit([-1, 0, 1], losses[i - 1 : i + 2], 2)
    return math.log2(RATES[i]) + float(np.clip(-b / (2 * c), -1, 1))


def curves(use_mup: bool, text) -> dict[int, list[float]]:
    """Loss at each of RATES, averaged over the seeds, for each width."""
    return {
        width: [sum(final_loss(width, lr, seed, use_mup, text) for seed in SEEDS) / len(SEEDS) for lr in RATES] for width in WIDTHS
    }


def test_the_best_learning_rate_transfers_over_8x_in_width(text):
    transferred = curves(True, text)
    best = {width: best_log2_lr(losses) for width, losses in transferred.items()}
    print("muP", best, transferred)
    assert max(best.values()) - min(best.values()) < 1, best
    at_narrow_best = transferred[256][int(np.argmin(transferred[32]))]
    assert at_narrow_best <= 1.01 * min(transferred[256])
    assert min(transferred[256]) <= min(transferred[32])  # and wider is not worse

    standard = curves(False, text)
    print("standard", {w: best_log2_lr(l) for w, l in standard.items()}, standard)
    assert standard[256][int(np.argmin(standard[32]))] > 1.01 * min(standard[256])
    assert best_log2_lr(standard[32]) - best_log2_lr(standard[256]) > 1
