"""How often do intervals hold the truth? Made-up sweeps with a known law and noise like ours.

    python research/coverage.py                 all tables; some minutes on one core
    python research/coverage.py --sweeps 50     a rough answer

First it measures how b scatters in our sweeps, then in the made-up ones. A *series* is a
shape, a batch size and a seed. All its T share trunks, so they share noise. All series of
a batch size share how far the law misses it, and all batch sizes share the seed. We split
the variance of b of single series into these three.

Then it counts how often the 95% intervals hold the truth, and prints their median width:

- *pairs* or *seeds*: leave out one at a time, with Student's t.
- *both*: fit.interval, which adds the two variances.
"""

import itertools
import math
import sys
from functools import cache
from operator import attrgetter, sub
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fit
from fit import Estimate, jackknife
from records import read_rows, rows_of
from tools import flags

B = -0.3
Q = 0.5
GROWTH = 0.6  # the best batch size grows as T to this
SEEDS = (2, 3, 5)


# -- A made-up sweep ---------------------------------------------------------------------

LEVEL_OF_PAIR = 0.10  # standard deviation of log2 of the best learning rate
LEVEL_OF_SEED = 0.09
SLOPE_OF_SEED = 0.02  # standard deviation of b
NOISE = 0.014  # of a loss (nats)
AS_BEFORE = 0.6  # correlation of the noise of a trunk at T and at 2T
NOISE_OF_SERIES = (
    0.01  # nats, the same at all learning rates; it decides which batch is best
)
RATES = np.arange(-6, 7) / 2  # octaves around the best learning rate of the law


def pairs_of(widths: tuple, batches: tuple) -> list[tuple]:
    return [(f"width {n}", batch) for n in widths for batch in batches]


def lengths(first: int, n: int) -> list[int]:
    return [first * 2**i for i in range(n)]


# name -> pairs, run lengths, and the standard deviation of b over the pairs
SWEEPS = {
    "11 pairs": (  # of three widths
        pairs_of((32, 64, 128), (2, 4, 8)) + pairs_of((32, 64), (1,)),
        lengths(80_000, 5),
        0.04,
    ),
    "8 batch sizes": (
        pairs_of((32,), (1, 2, 4, 8, 16, 32, 64, 128)),
        lengths(640_000, 4),
        0.2,
    ),
    "3 batch sizes": (pairs_of((32,), (2, 8, 32)), lengths(320_000, 5), 0.08),
}


def misses(name: str, seeds: int, rng) -> dict:
    """How far the law misses every pair and seed: (level, slope) in log2 of the best rate."""
    some, _, slope_of_pair = SWEEPS[name]
    found = {}
    for pair in some:
        found[pair] = rng.normal(0, LEVEL_OF_PAIR), rng.normal(0, slope_of_pair)
    for seed in range(seeds):
        found[seed] = rng.normal(0, LEVEL_OF_SEED), rng.normal(0, SLOPE_OF_SEED)
    return found


def half_shared(one: dict, two: dict) -> dict:
    """Misses of a second sweep. It shares the seeds and half the variance of the pairs."""
    found = {}
    for key, miss in one.items():
        if isinstance(key, tuple):  # a pair
            miss = tuple((np.array(miss) + two[key]) / math.sqrt(2))
        found[key] = miss
    return found


def made_up(name: str, missed: dict, phase: float, rng, noise: float = 1.0) -> list[dict]:
    """The rows of a sweep around the law. Its best batch size is 2^phase times the usual."""
    some, every_T, _ = SWEEPS[name]
    seeds = [key for key in missed if not isinstance(key, tuple)]
    middle = np.log2(every_T).mean()
    rows = []
    for (shape, batch), seed in itertools.product(some, seeds):
        of_series = noise * rng.normal(0, NOISE_OF_SERIES)
        of_rate: dict = {}  # learning rate -> noise of its trunk at the last T
        for T in every_T:
            t = math.log2(T) - middle
            law = -7.5 + B * t + Q * math.log2(batch / 8)
            best = law
            for level, slope in (missed[shape, batch], missed[seed]):
                best += level + slope * t
            from_best_batch = math.log2(batch) - (3 + phase + GROWTH * t)
            for x in round(2 * law) / 2 + RATES:
                new = rng.normal()
                if x in of_rate:
                    new = AS_BEFORE * of_rate[x] + math.sqrt(1 - AS_BEFORE**2) * new
                of_rate[x] = new
                u = x - best
                loss = 1.7 + 0.03 * u**2 + 0.004 * max(0, u) ** 3
                loss += 0.008 * from_best_batch**2 + of_series + noise * NOISE * new
                row = dict(shape=shape, batch_size=batch, seq_len=128, seed=seed)
                rows.append(row | dict(total_tokens=T, lr=2**x, val_loss=loss))
    return rows_of(rows)


# -- How b scatters ----------------------------------------------------------------------


def b_of_series(rows: list[dict]) -> np.ndarray:
    """b of every pair and seed, at the T that all its seeds have. [pairs, seeds]"""
    by_pair: dict = {}  # pair -> seed -> T -> x
    for cell, x in fit.minima(fit.cells_of(rows, by_seed=True)):
        (seed,) = cell.losses
        by_pair.setdefault(fit.pair_of(cell), {}).setdefault(seed, {})[cell.T] = x
    n_seeds = max(len(seeds) for seeds in by_pair.values())
    slopes = []
    for seeds in by_pair.values():
        common = set.intersection(*(set(x) for x in seeds.values()))
        if len(seeds) == n_seeds and len(common) > 2:
            T = sorted(common)
            row = [
                np.polyfit(np.log2(T), [x[t] for t in T], 1)[0] for x in seeds.values()
            ]
            slopes.append(row)
    return np.array(slopes)


def components(values: np.ndarray) -> np.ndarray:
    """Variances of values [pairs, seeds] between pairs, between seeds, and the rest."""
    n, seeds = values.shape
    by_pair = values.mean(axis=1)
    by_seed = values.mean(axis=0)
    rest = values - by_pair[:, None] - by_seed + values.mean()
    of_rest = (rest**2).sum() / ((n - 1) * (seeds - 1))
    of_pairs = by_pair.var(ddof=1) - of_rest / seeds
    of_seeds = by_seed.var(ddof=1) - of_rest / n
    return np.array([of_pairs, of_seeds, of_rest])


OURS = {
    "wsd-laptop": (),
    "wsd-laptop-long": (),
    "bend-laptop": ("warmup_tokens=80000", "n_embd=32"),
    "memory-laptop, 0": ("weight_decay=0",),
    "memory-laptop, 0.1": ("weight_decay=0.1",),
    "memory-laptop, 0.3": ("weight_decay=0.3",),
}


def print_components(sweeps: int) -> None:
    print(
        "b of a series, standard deviation:   pairs  seeds   rest   (-: variance below 0)"
    )
    for name, only in OURS.items():
        folder = ROOT / "research/results" / name.partition(",")[0]
        print_roots(name, components(b_of_series(read_rows([folder], list(only)))))
    for name in SWEEPS:
        some = []
        for k in range(sweeps):
            rng = np.random.default_rng([k, 0])
            rows = made_up(name, misses(name, 3, rng), 0, rng)
            some.append(components(b_of_series(rows)))
        print_roots(f"made up, {name}", np.mean(some, axis=0))


def print_roots(name: str, variances: np.ndarray) -> None:
    roots = [f"{math.sqrt(v):7.3f}" if v > 0 else "      -" for v in variances]
    print(f"{name:<33}", *roots)


# -- Counting ----------------------------------------------------------------------------


def answers(rows: list[dict]) -> dict[str, Estimate]:
    """All answers of a sweep."""
    cells = fit.fitted_cells(rows)
    law = jackknife(cells, fit.fit_law)
    return {
        "b": fit.apply(attrgetter("b"), law),
        "q": fit.apply(attrgetter("q"), law),
        "three best": fit.reading(cells, fit.paper_b, 3),
        "best batch": fit.reading(cells, fit.step_law_b, 1),
    }


def by_leaving_out(estimate: Estimate) -> dict:
    """{method: interval} from pairs only, from seeds only, and from both."""
    return {
        "pairs": fit.interval(estimate._replace(without_seeds=[])),
        "seeds": fit.interval(estimate._replace(without_pairs=[])),
        "both": fit.interval(estimate),
    }


@cache
def truths(name: str, phase: float) -> dict:
    """The answers of a sweep without noise, which the law fits."""
    rng = np.random.default_rng(0)
    exact = {key: (0.0, 0.0) for key in misses(name, 1, rng)}
    found = answers(made_up(name, exact, phase, rng, noise=0.0))
    return {key: estimate.answer for key, estimate in found.items()} | {
        "change of b": 0.0
    }


def count(name: str, seeds: int, sweeps: int) -> dict:
    """{answer: {method: (share of intervals that hold the truth, median width)}}"""
    ends: dict = {}  # answer -> method -> [(low, high, truth)]
    for k in range(sweeps):
        rng = np.random.default_rng([k, seeds])
        phase = rng.choice([-0.4, -0.2, 0.0, 0.2, 0.4])
        missed = misses(name, seeds, rng)
        found = answers(made_up(name, missed, phase, rng))
        if name == "3 batch sizes":  # as for two weight decays
            other = half_shared(missed, misses(name, seeds, rng))
            other = answers(made_up(name, other, phase, rng))
            found["change of b"] = fit.apply(sub, other["b"], found["b"])
        truth = truths(name, phase)
        for answer, estimate in found.items():
            for method, (low, high) in by_leaving_out(estimate).items():
                some = ends.setdefault(answer, {}).setdefault(method, [])
                some.append((low, high, truth[answer]))
    return {
        answer: {method: held(some) for method, some in methods.items()}
        for answer, methods in ends.items()
    }


def held(ends: list[tuple]) -> tuple[float, float]:
    """How many hold the truth, and the median width. An interval of NaN holds nothing."""
    low, high, truth = np.array(ends).T
    return np.mean((low <= truth) & (truth <= high)), np.nanmedian(high - low)


# -- The comparison ----------------------------------------------------------------------

# standard deviations of a difference of two lines over pairs, over seeds, and of the rest:
# typical values of research/results/compare-laptop (nats), and two extremes
GAPS = {
    "as measured": (0.005, 0.008, 0.010),
    "mostly pairs": (0.020, 0.004, 0.004),
    "mostly seeds": (0.002, 0.015, 0.004),
}


def count_gaps(spread: tuple, pairs: int, seeds: int, sweeps: int) -> dict:
    """As `count`, for the mean of a difference [pairs, seeds]."""
    rng = np.random.default_rng(seeds)
    of_pair, of_seed, of_rest = spread
    ends: dict = {}
    for _ in range(sweeps):
        gap = rng.normal(0, of_pair, (pairs, 1)) + rng.normal(0, of_seed, seeds)
        gap = gap + rng.normal(0, of_rest, (pairs, seeds))
        for method, (low, high) in by_leaving_out(fit.mean_of(gap)).items():
            ends.setdefault(method, []).append((low, high, 0.0))
    return {method: held(some) for method, some in ends.items()}


# -- Tables ------------------------------------------------------------------------------


def print_row(name: str, seeds: int, methods: dict) -> None:
    cells = [f"{100 * share:.1f} ({width:.3g})" for share, width in methods.values()]
    print(f"| {name} | {seeds} | {' | '.join(cells)} |", flush=True)


def print_head(title: str, methods: list[str]) -> None:
    print(f"\n| {title} | seeds | {' | '.join(methods)} |")
    print("|---" * (2 + len(methods)) + "|")


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("coverage.py", __doc__)
    parser.add_argument(
        "--sweeps",
        type=flags.at_least(1),
        default=500,
        help="made-up sweeps for every row (default: 500)",
    )
    args = parser.parse_args(argv)
    print_components(min(args.sweeps, 100))

    methods = ["pairs", "seeds", "both"]
    for name in SWEEPS:
        print_head(f"{name}: % that hold the truth (median width)", methods)
        for seeds in SEEDS:
            for answer, row in count(name, seeds, args.sweeps).items():
                print_row(answer, seeds, row)

    print_head("mean difference of two lines, 4 pairs", methods)
    for name, spread in GAPS.items():
        for seeds in SEEDS:
            print_row(name, seeds, count_gaps(spread, 4, seeds, 4 * args.sweeps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
