"""What muP is for: the best learning rate of a narrow model is best for a wide model, too."""

import argparse
import math
import subprocess
import tarfile

import numpy as np
import pytest
import torch

import mup
from model import GPT, GPTConfig

SEEDS, STEPS = (0, 1), 40
RATES = [2.0**-e for e in (7, 6, 5, 4)]


def final_loss(width: int, lr: float, use_mup: bool, **experts) -> float:
    """Loss on two batches of Python source after learning them by heart, mean over the seeds.

    The learning rate falls linearly. A model of any width gets far in 40 steps, but only at a good
    learning rate.
    """
    modules = (argparse, subprocess, tarfile)
    source = b"".join(open(module.__file__, "rb").read() for module in modules)
    text = torch.from_numpy(np.frombuffer(source, dtype=np.uint8).astype(np.int64))
    cfg = GPTConfig(
        n_layer=2, n_embd=width, n_head=width // 16, seq_len=32, vocab_size=256, init_std=0.1,
        m_emb=10.0, base_width=32 if use_mup else width,
        attention_multiplier=None if use_mup else 16**-0.5, **experts,
    )  # fmt: skip
    losses = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = GPT(cfg)
        groups = mup.param_groups(model, mup.rules(cfg), 0.0)
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=True)
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(len(text) - 33, (2, 8, 1), generator=generator)
        batches = text[start + torch.arange(33)]  # [2, 8 sequences, 33], the same for every width
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"] * (1 - step / STEPS)
            batch = batches[step % 2]
            loss, routing = model(batch[:, :-1], batch[:, 1:])
            (loss + (0.01 * routing.aux_loss.sum() if routing else 0)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses += [model(batch[:, :-1], batch[:, 1:])[0].item() for batch in batches]
    return sum(losses) / len(losses)


def best_log2_lr(losses: list[float]) -> float:
    """Vertex of the parabola through the lowest point and its neighbors, in log2."""
    i = int(np.argmin(losses))
    assert 0 < i < len(losses) - 1, f"the best learning rate is at the edge of the grid: {losses}"
    c, b, _ = np.polyfit([-1, 0, 1], losses[i - 1 : i + 2], 2)
    return float(math.log2(RATES[i]) - b / (2 * c))


@pytest.mark.parametrize("widths, n_expert", [((32, 256), 0), ((32, 128), 4)])
def test_the_best_learning_rate_transfers_to_a_wider_model(widths, n_expert):
    experts = lambda width: dict(n_expert=4, n_expert_active=2, n_ffn=width) if n_expert else {}
    narrow, wide = ([final_loss(width, lr, True, **experts(width)) for lr in RATES]
                    for width in widths)  # fmt: skip
    assert abs(best_log2_lr(narrow) - best_log2_lr(wide)) < 1
    assert wide[int(np.argmin(narrow))] <= 1.01 * min(wide)
    assert min(wide) <= min(narrow)  # and wider is not worse


def test_under_standard_parametrization_it_does_not_transfer():
    narrow = [final_loss(32, lr, use_mup=False) for lr in RATES]
    best = RATES[int(np.argmin(narrow))]
    wide = {lr: final_loss(128, lr, use_mup=False) for lr in (RATES[0], best)}
    assert wide[best] > 2 * wide[RATES[0]]
