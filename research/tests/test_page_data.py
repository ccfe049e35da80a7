"""The numbers of the page to drag, against the lines of the records and made-up curves."""

import json
from pathlib import Path

import numpy as np
import page_data
import pytest

from records import read_rows

COMMITTED = json.loads((page_data.ROOT / "docs/page_data.json").read_text("utf-8"))


def close(one, other, tolerance: float) -> bool:
    """Are two structures of dicts and lists equal, but for small differences of numbers?"""
    if isinstance(one, dict):
        same = one.keys() == other.keys()
        return same and all(close(one[k], other[k], tolerance) for k in one)
    if isinstance(one, list | tuple):
        same = len(one) == len(other)
        return same and all(close(x, y, tolerance) for x, y in zip(one, other))
    if isinstance(one, str):
        return one == other
    return abs(one - other) <= tolerance


def test_the_committed_numbers_are_those_of_the_records():
    # One unit of the coarsest rounding, the exponents' 0.01, at most. Tokens are exact.
    found = page_data.content()
    for policy, committed in zip(found["policies"], COMMITTED["policies"]):
        assert close(policy.pop("b"), committed["b"], 0.0101)
        committed = {name: value for name, value in committed.items() if name != "b"}
        assert close(policy, committed, 0.00101)
    assert close(found["race"], COMMITTED["race"], 0.000101)


def losses_of(folder: Path, choice: dict) -> list[float]:
    """Validation losses of the runs with these fields."""
    rows = read_rows([folder], [f"{k}={v}" for k, v in choice.items()])
    return [row["val_loss"] for row in rows]


@pytest.mark.parametrize("policy", COMMITTED["policies"], ids=lambda one: one["name"])
def test_step_1_has_the_losses_of_the_records(policy):
    weight_decay = float(policy["name"].split()[-1])
    for batch in policy["batches"]:
        for best, losses, ends in zip(batch["best"], batch["val_loss"], batch["ends"]):
            for lr, loss in zip(batch["rates"], losses):
                run = {"weight_decay": weight_decay, "batch_size": batch["batch"]}
                run |= {"total_tokens": best["T"], "lr": lr}
                seeds = losses_of(page_data.RESULTS / "memory-laptop", run)
                assert len(seeds) == 2
                assert loss == pytest.approx(np.mean(seeds), abs=1e-5)
            # the branches end as far apart as their validation losses
            assert np.diff(ends) == pytest.approx(np.diff(losses), abs=2e-4)


def test_step_2_has_the_losses_of_the_records():
    for run in COMMITTED["race"]["lengths"]:
        for name, schedule in (("power", "power"), ("planned", "cosine")):
            decay = run["T"] // 10 if name == "power" else 0
            choice = {
                "schedule": schedule,
                "total_tokens": run["T"],
                "decay_tokens": decay,
            }
            losses = losses_of(page_data.RESULTS / "curves-laptop", choice)
            assert len(losses) == 3
            assert sorted(run["losses"][name]) == pytest.approx(sorted(losses), abs=1e-4)


def made_up_curves(noise: float) -> dict:
    """Curves of three learning rates that share the noise of the batches."""
    rng = np.random.default_rng(0)
    shared = rng.normal(0, noise, 1 << 20)  # a loss for every 10 tokens
    found = {}
    for T in page_data.LENGTHS:
        tokens = np.linspace(0, T, 201)[1:].round(-1)
        for k, lr in enumerate(page_data.RATES[8]):
            u = np.log2(tokens) - 20
            done = np.clip((tokens - 0.9 * T) / (0.1 * T), 0, 1)
            loss = 2 - 0.2 * u + 0.02 * k * u**2 - 0.1 * done
            found[8, 0, T, lr] = tokens, loss + shared[(tokens / 10).astype(int)]
    return found


def test_removing_the_noise_that_runs_share_gives_known_curves_back():
    x, losses = page_data.trunks(made_up_curves(noise=0.05), 8, 0)
    u = x - 20
    for k in range(3):
        assert losses[k] - losses[0] == pytest.approx(0.02 * k * u**2, abs=1e-9)
    expected = 2 - 0.2 * u + 0.02 * u**2
    assert np.abs(losses.mean(axis=0) - expected).max() < 0.02


def test_the_drop_of_a_decay_is_that_of_made_up_curves():
    curves = made_up_curves(noise=0.005)
    for T in page_data.LENGTHS:
        assert page_data.drop(curves, 8, 0, T) == pytest.approx(0.1, abs=0.01)
