"""The caveats of the pages as numbers: trends with T, what weight decay costs, a
jackknife.

    python docs/checks.py

Reads the committed records. Intervals are 95%, of Student's t. If several seeds and
several series go into a mean, both count as random (`mean_and_error` in compare.py).
"""

import math
import sys
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fit
from compare import losses_of_lines, mean_and_error, with_t
from tools.flags import program_parser
from tools.figures import size
from fit import show

LONG = ("Power (fitted)", "linear to 0 (fitted)")


def slope(y: np.ndarray) -> np.ndarray:
    """Change per step along the first axis, by least squares. y [steps, ...]"""
    step = np.arange(len(y)) - (len(y) - 1) / 2
    return np.tensordot(step, y, axes=1) / (step**2).sum()


@cache
def lines() -> dict:
    folders = [ROOT / "results/compare-laptop", ROOT / "results/search-laptop"]
    return losses_of_lines(fit.read_records(folders))[0]


def trend(one: str, other: str) -> np.ndarray:
    """Nats per doubling of T of a difference between two lines, in the dense cells."""
    some = {
        cell: losses for cell, losses in lines()[one].items() if "experts" not in cell[0]
    }
    lengths = sorted({T for _, T, _ in some})
    pairs = sorted({(shape, batch_size) for shape, _, batch_size in some})
    seeds = sorted(next(iter(some.values())))
    gap = [
        [
            [some[shape, T, B][s] - lines()[other][shape, T, B][s] for s in seeds]
            for shape, B in pairs
        ]
        for T in lengths
    ]
    return with_t(*mean_and_error(slope(np.array(gap))))


@cache
def minima(weight_decay: str) -> dict:
    """(T, batch size, seed) -> the minimum of this seed, at a weight decay."""
    records = fit.read_records(
        [ROOT / "results/memory-laptop"], [f"weight_decay={weight_decay}"]
    )
    found = fit.minima(records, by_seed=True)
    assert len(fit.usable(found)) == len(found)
    return {(m.T, m.batch_size, *m.seeds): m for m in found}


def change(low: str, high: str, of) -> np.ndarray:
    """of(minimum) at the higher weight decay minus the lower, [T, batch sizes, seeds]."""
    one, two = minima(low), minima(high)
    axes = [sorted({cell[i] for cell in one}) for i in range(3)]
    return np.array(
        [
            [[of(two[T, B, s]) - of(one[T, B, s]) for s in axes[2]] for B in axes[1]]
            for T in axes[0]
        ]
    )


def cost_of_weight_decay() -> tuple[list[float], np.ndarray]:
    """Lowest loss at weight decay 0.1 minus 0: the mean at every T, and its trend per
    doubling."""
    cost = change("0", "0.1", lambda m: m.loss)
    return cost.mean(axis=(1, 2)).tolist(), with_t(*mean_and_error(slope(cost)))


def exponent_of_weight_decay() -> np.ndarray:
    """Exponent of the best learning rate in the weight decay, from 0.1 to 0.3. A memory
    says -1."""
    moved = change("0.1", "0.3", lambda m: m.x) / math.log2(3)
    return with_t(*mean_and_error(moved.mean(axis=0)))


def jackknife() -> np.ndarray:
    """b at width 32, with an interval that leaves out one batch size at a time.

    Unlike the bootstrap, it does not count the two seeds of a batch size as independent.
    """
    choices = ["warmup_tokens=80000", "n_embd=32"]
    records = fit.read_records([ROOT / "results/bend-laptop"], choices)
    points = fit.usable(fit.minima(records))
    x, weight = np.array([[m.x for m in points]]), np.ones((1, len(points)))
    batch_size = np.array([m.batch_size for m in points])
    b = fit.fit_law(points, x, weight).b[0]
    without = [
        fit.fit_law(points, x, weight * (batch_size != B)).b[0] for B in set(batch_size)
    ]
    n = len(without)
    return with_t(b, math.sqrt((n - 1) ** 2 / n * np.var(without, ddof=1)), n - 1)


def main(argv: list[str] | None = None) -> int:
    program_parser("checks.py", __doc__).parse_args(argv)
    one, other = LONG
    print(f"{one} minus {other}, nats per doubling of T: {show(trend(one, other))}")
    by_T, doubling = cost_of_weight_decay()
    lengths = sorted({T for T, *_ in minima("0")})
    costs = ", ".join(f"{cost:.3f} at {size(T)}" for T, cost in zip(lengths, by_T))
    print(
        f"lowest loss, weight decay 0.1 minus 0: {costs}; per doubling {show(doubling)}"
    )
    print(
        f"best learning rate ∝ weight decay^{show(exponent_of_weight_decay())} from 0.1 to 0.3"
    )
    print(f"b at width 32, without one batch size at a time: {show(jackknife())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
