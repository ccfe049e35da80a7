"""Does research/policies.py find the exponents of made-up sweeps, and decide as its rules say?"""

import itertools
import json
import math

import numpy as np
import pytest

import fit
import policies
from test_fit import record

LENGTHS = [320_000 * 2**k for k in range(5)]
FLAT = dict(b=0.0, update=-0.5, of_lr=0.0)
FALLING = dict(b=-0.4, update=0.0, of_lr=1.0)


def forget() -> None:
    """Read the records again."""
    policies.best_runs.cache_clear()
    policies.late_points.cache_clear()


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A function that writes the runs of a policy, as thin.py keeps them."""
    monkeypatch.setattr(policies, "RUNS", tmp_path)
    forget()

    def write(folder: str, b: float, update: float, of_lr: float, **more) -> None:
        """Best lr ∝ T^b, late relative update ∝ lr^of_lr T^update, norm = lr / update."""
        lengths = more.get("lengths", LENGTHS)
        rise = more.get("rise", 0.0)  # of log2 of the best learning rate
        records, curves = [], []
        for batch, seed, T in itertools.product(
            more.get("batches", (2, 8, 32)), (0, 1), lengths
        ):
            # every batch size and every seed has its own exponent, so intervals have a width
            exponent = b + 0.01 * (seed - 0.5) + 0.01 * (math.log2(batch) - 3)
            best = exponent * math.log2(T / 1_280_000) - 7 + rise
            for j in range(round(8 * best) - 20, round(8 * best) + 21):
                x = j / 8
                run = record(32, batch, T, seed, 2 + 0.03 * (x - best) ** 2, lr=2**x)
                run["weight_decay"] = more.get("weight_decay", 0.1)
                scatter = more.get("scatter", 0.0) * (seed - 0.5)  # of the next exponent
                late = 2 ** (of_lr * x + (update + scatter) * math.log2(T))
                if abs(x - best) > 1.8:  # too far from the best to count
                    late *= 8
                end = T - T // 10
                norm = 2**x / late
                growth = 1.5 * 2 ** (0.2 * (x - best))  # over the last doubling of tokens
                curve = dict(
                    tokens=[end // 4, end // 2, end, T],
                    update_hidden=[1.0, 1.0, late, 1e-9],
                    norm_hidden=[norm / 9, norm / growth, norm, 1.0],
                )
                records.append(run)
                curves.append(dict(config=run, curve=curve))
        out = tmp_path / folder
        out.mkdir(parents=True)
        (out / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
        (out / "curves.jsonl").write_text("\n".join(map(json.dumps, curves)))

    yield write
    forget()


def test_exponents_control_and_cost_of_a_policy(world):
    world("wd-0.3", b=-0.4, update=0.1, of_lr=0.75)
    name = "weight decay 0.3"
    assert policies.b_of(name)[0] == pytest.approx(-0.4, abs=0.01)
    # the best runs have lr ∝ T^b, so the nearest measured learning rate rounds a little
    assert policies.update_exponent(name)[0] == pytest.approx(0.1 - 0.75 * 0.4, abs=0.02)
    assert policies.norm_exponent(name)[0] == pytest.approx(-0.1 - 0.25 * 0.4, abs=0.02)
    assert 2 ** policies.control(name)[0] == pytest.approx(2**0.75, abs=1e-6)
    for cost in policies.cost_beside(name, 1).values():
        assert cost == pytest.approx(0.03, abs=1e-3)
    assert policies.growth(name)[0] == pytest.approx(math.log2(1.5), abs=0.01)
    assert policies.growth(name, 1)[0] == pytest.approx(math.log2(1.5) + 0.2, abs=0.01)
    # four octaves of T move the best learning rate by 1.6, of a valley 0.03 x^2
    assert policies.cost_of_keeping(name)[0] == pytest.approx(0.03 * 1.6**2, abs=0.005)


def test_policies_whose_norms_grow_are_taken_together(world, monkeypatch):
    names = ("weight decay 0", "weight decay 0.1", "weight decay 0.3", "all norms fixed")
    folders = {name: policies.POLICIES[name] for name in names}
    monkeypatch.setattr(policies, "POLICIES", folders)
    world("wd-0", **FLAT)  # the norm grows as T^0.5
    world("wd-0.1", **FLAT | dict(b=-0.1))
    world("wd-0.3", **FALLING)
    world("norm-all", **FALLING | dict(b=-0.2))
    grows, others = policies.where_norms_grow()
    assert np.mean(grows) == pytest.approx(-0.05, abs=0.01)
    assert np.mean(others) == pytest.approx(-0.3, abs=0.01)


def test_a_series_with_less_than_four_minima_is_left_out(world):
    world("wd-0.3", **FLAT, lengths=LENGTHS[:3])
    slopes = policies.exponents("wd-0.3", "x")
    assert slopes.shape == (3, 2) and np.isnan(slopes).all()


def write_all(world, fixed: dict, wd_0: dict) -> None:
    world("norm-all", **fixed)
    world("memory-1", **FLAT)
    world("wd-0", **wd_0)
    for k, T in enumerate(LENGTHS):  # a sweep for every T, each with its weight decay
        world(f"per-T/{T}", **FLAT, lengths=[T], weight_decay=0.4 / 2**k)


@pytest.mark.parametrize(
    "fixed, wd_0, decision",
    [
        (FALLING, FLAT, "memory"),
        (FALLING, FALLING, "open"),
        (FLAT, FLAT, "forgetting by weight decay alone"),
        (FLAT | dict(b=-0.2), FLAT, "open"),
    ],
)
def test_memory_needs_a_fall_with_fixed_norms_and_none_elsewhere(
    world, fixed, wd_0, decision
):
    write_all(world, fixed, wd_0)
    assert policies.memory() == decision


@pytest.mark.parametrize(
    "rise, b, decision",
    [
        (0.7, -0.3, "a ceiling"),
        (0.0, 0.0, "no ceiling"),
        (0.7, 0.0, "open"),
        (0.4, 0.0, "open"),
        (0.4, -0.3, "open"),
    ],
)
def test_a_ceiling_needs_a_rise_and_a_fall_with_T(world, rise, b, decision):
    world("wd-0", **FLAT)
    late = dict(lengths=LENGTHS[1:], batches=(8, 32))
    # the rise at T = 640k and 1.28M, in the mean
    world("ceiling", **FLAT | dict(b=b), rise=rise + 0.5 * b, **late)
    found, measured, slope = policies.ceiling()
    assert found == decision
    assert measured == pytest.approx(rise, abs=0.06) and slope[0] == pytest.approx(
        b, abs=0.02
    )


def test_sizes_are_exponents_in_the_weight_decay(world):
    for k, wd in enumerate(("0.01", "0.03", "0.1", "0.3")):
        rise = -0.5 * math.log2(float(wd) / 0.01)
        world(f"wd-{wd}", **FLAT, rise=rise, weight_decay=float(wd))
    for by_T in policies.sizes().values():
        assert list(by_T) == LENGTHS
        assert list(by_T.values()) == pytest.approx([-0.5] * 5, abs=0.01)


def test_one_slope_is_refuted_by_a_policy_that_differs(world, monkeypatch):
    two = {"weight decay 0": "wd-0", "weight decay 0.1": "wd-0.1"}
    monkeypatch.setattr(policies, "POLICIES", two)
    world("wd-0", **FLAT)
    world("wd-0.1", **FLAT | dict(update=-0.47, scatter=0.2))
    same, spread, differ = policies.one_slope()
    assert spread == pytest.approx(0.03) and not differ and same
    forget()
    monkeypatch.setattr(policies, "POLICIES", two | {"weight decay 0.3": "wd-0.3"})
    world("wd-0.3", **FALLING | dict(b=-0.2))
    same, spread, differ = policies.one_slope()
    assert not same and spread == pytest.approx(0.3, abs=0.05)


def test_a_missing_series_is_left_out_of_a_mean():
    values = np.array([[1.0, 2.0], [3.0, math.nan]])
    assert fit.mean_of(values)[0] == 2.0
    assert fit.mean_of(values)[1:] == ([3.0, 1.5], [2.0, 2.0])
