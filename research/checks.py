"""The caveats of the pages as numbers: trends with T, and what weight decay costs.

    python research/checks.py

Reads the committed records. Intervals are 95%, of Student's t, without one pair of
width and batch size at a time, and without one seed (`error_of` in fit.py).
"""

import math
import sys
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fit
from compare import losses_of_lines
from fit import mean_of, show
from tools import flags
from tools.figures import size

LONG = ("Power (fitted)", "linear to 0 (fitted)")


def slope(y: np.ndarray) -> np.ndarray:
    """Change per step along the first axis, by least squares. y [steps, ...]"""
    step = np.arange(len(y)) - (len(y) - 1) / 2
    return np.tensordot(step, y, axes=1) / (step**2).sum()


# -- Trends with T -----------------------------------------------------------------------


@cache
def lines() -> dict:
    folders = [ROOT / "results/compare-laptop", ROOT / "results/search-laptop"]
    losses, _, _ = losses_of_lines(fit.read_records(folders))
    return losses


def trend(one: str, other: str) -> np.ndarray:
    """Nats per doubling of T of a difference between two lines, in the dense cells."""
    first = lines()[one]
    second = lines()[other]
    dense = [cell for cell in first if "experts" not in cell[0]]
    lengths = sorted({T for _, T, _ in dense})
    pairs = sorted({(shape, batch_size) for shape, _, batch_size in dense})
    seeds = sorted(first[dense[0]])

    gap = np.empty((len(lengths), len(pairs), len(seeds)))
    for i, T in enumerate(lengths):
        for j, (shape, batch_size) in enumerate(pairs):
            cell = shape, T, batch_size
            gap[i, j] = [first[cell][seed] - second[cell][seed] for seed in seeds]
    return mean_of(slope(gap))


# -- Weight decay ------------------------------------------------------------------------


@cache
def minima(weight_decay: str) -> dict:
    """(T, batch size, seed) -> the minimum of this seed, at a weight decay."""
    folder = ROOT / "results/memory-laptop"
    records = fit.read_records([folder], [f"weight_decay={weight_decay}"])
    found = {}
    for m in fit.minima(records, by_seed=True):
        assert not m.why_not
        (seed,) = m.seeds
        found[m.T, m.batch_size, seed] = m
    return found


def change(low: str, high: str, name: str) -> np.ndarray:
    """The loss or the x of all minima at the higher weight decay minus the lower.

    Returns [T, batch sizes, seeds].
    """
    one = minima(low)
    two = minima(high)
    lengths = sorted({T for T, _, _ in one})
    batches = sorted({batch_size for _, batch_size, _ in one})
    seeds = sorted({seed for _, _, seed in one})

    changed = np.empty((len(lengths), len(batches), len(seeds)))
    for i, T in enumerate(lengths):
        for j, batch_size in enumerate(batches):
            for k, seed in enumerate(seeds):
                before = one[T, batch_size, seed]
                after = two[T, batch_size, seed]
                changed[i, j, k] = getattr(after, name) - getattr(before, name)
    return changed


def cost_of_weight_decay() -> tuple[list[float], np.ndarray]:
    """Lowest loss at weight decay 0.1 minus 0: the mean at every T, and its trend per doubling."""
    cost = change("0", "0.1", "loss")
    return cost.mean(axis=(1, 2)).tolist(), mean_of(slope(cost))


def exponent_of_weight_decay() -> np.ndarray:
    """Exponent of the best learning rate in the weight decay, from 0.1 to 0.3. A memory says -1."""
    exponent = change("0.1", "0.3", "x") / math.log2(3)
    return mean_of(exponent.mean(axis=0))


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("checks.py", __doc__).parse_args(argv)

    one, other = LONG
    print(f"{one} minus {other}, nats per doubling of T: {show(trend(one, other))}")

    by_T, doubling = cost_of_weight_decay()
    lengths = sorted({T for T, _, _ in minima("0")})
    costs = ", ".join(f"{cost:.3f} at {size(T)}" for T, cost in zip(lengths, by_T))
    print(
        f"lowest loss, weight decay 0.1 minus 0: {costs}; per doubling {show(doubling)}"
    )

    exponent = show(exponent_of_weight_decay())
    print(f"best learning rate ∝ weight decay^{exponent} from 0.1 to 0.3")
    return 0


if __name__ == "__main__":
    sys.exit(main())
