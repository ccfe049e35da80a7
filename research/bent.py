"""Is the law of a sweep straight, or does it flatten at large batch sizes? See
research/methods.md.

    python research/bent.py research/results/bend-laptop --only warmup_tokens=80000

The bent law flattens above a critical batch size beta_c = c T^kappa:

    log lr = log a + b0 log T - (q/r) log(1 + (beta_c / beta)^r),  with r = 1, 2, 4 or 8

Far below the bend it is the straight law of fit.py with b = b0 - kappa q, far above it is
flat in beta. The better law is the one that predicts cells better that were left out of
its fit.
"""

import sys
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import fit
from fit import Cell, jackknife, show
from records import read_rows
from schedules import PAPER_SEQ_LEN
from tools import flags
from tools.figures import size
from tools.flags import UserError

# -- The bent law ------------------------------------------------------------------------
#
# Given the bend, that is c, kappa and r, the law is linear in log a, b0 and q. So we try
# many bends at once, solve for these three, and keep the bend with the smallest error. All
# T, beta and x = log lr are log2.


class Bends(NamedTuple):
    """Many bends, and the law as it would be with q = 1, log a = b0 = 0."""

    log_c: np.ndarray  # [bends]
    kappa: np.ndarray
    r: np.ndarray
    h: np.ndarray  # [n, bends]; log beta - log beta_c far below the bend, 0 far above it


class Bent(NamedTuple):
    b0: float
    q: float
    log_c: float  # log2 beta_c = log_c + kappa log2 T
    kappa: float
    r: float  # the larger, the sharper is the bend
    log_a: dict[str, float]  # shape -> log2 a


def bends(T, beta, middle, levels, kappas, rs) -> Bends:
    """All combinations of levels, kappas and rs, at T and beta [n].

    A level is log beta_c at log T = middle.
    """
    grids = np.meshgrid(levels, kappas, rs)
    level, kappa, r = [grid.ravel() for grid in grids]
    log_c = level - kappa * middle
    log_beta_c = log_c + kappa * T[:, None]  # [n, bends]
    h = -np.logaddexp2(0, r * (log_beta_c - beta[:, None])) / r
    return Bends(log_c, kappa, r, h)


def best_bend(x, T, shapes: list[str], grid: Bends) -> Bent:
    """Least squares of x [n] = log a(shape) + b0 T + q h, at the best bend."""
    # 1. Without the mean over its shape, nothing depends on log a.
    same_shape = np.equal.outer(shapes, shapes)  # [n, n]
    averages = same_shape / same_shape.sum(axis=1, keepdims=True)
    t = T - averages @ T  # [n]
    g = grid.h - averages @ grid.h  # [n, bends]
    y = x - averages @ x  # [n]

    # 2. The normal equations of y = b0 t + q g, for all bends
    tt = t @ t
    ty = t @ y
    tg = t @ g
    gg = (g**2).sum(axis=0)
    gy = y @ g
    determinant = tt * gg - tg**2
    determinant[determinant <= 1e-9 + 1e-6 * tt * gg] = np.nan  # T and beta vary together
    b0 = (gg * ty - tg * gy) / determinant
    q = (tt * gy - tg * ty) / determinant

    # 3. The best bend explains most of the variance.
    explained = np.nan_to_num(b0 * ty + q * gy, nan=-1)
    best = explained.argmax()
    log_a = averages @ (x - b0[best] * T - q[best] * grid.h[:, best])
    return Bent(
        b0=b0[best],
        q=q[best],
        log_c=grid.log_c[best],
        kappa=grid.kappa[best],
        r=grid.r[best],
        log_a=dict(zip(shapes, log_a)),
    )


def fit_bent(cells: list[Cell], sweep: list[Cell]) -> Bent:
    """The bent law, from a coarse and a fine grid of bends within the sweep."""
    found = fit.minima(cells)
    x = np.array([best for _, best in found])
    T = np.log2([cell.T for cell, _ in found])
    beta = np.log2([cell.beta for cell, _ in found])
    shapes = [cell.shape for cell, _ in found]

    middle = np.mean([np.log2(cell.T) for cell in sweep])
    every_beta = np.log2([cell.beta for cell in sweep])
    levels = np.arange(every_beta.min() - 2, every_beta.max() + 2.1, 0.5)
    kappas = np.arange(-0.6, 1.61, 0.2)
    coarse = bends(T, beta, middle, levels, kappas, [1.0, 2.0, 4.0, 8.0])
    law = best_bend(x, T, shapes, coarse)
    near_levels = law.log_c + law.kappa * middle + np.arange(-0.5, 0.51, 0.1)
    near_kappas = law.kappa + np.arange(-0.2, 0.21, 0.02)
    fine = bends(T, beta, middle, near_levels, near_kappas, law.r)
    return best_bend(x, T, shapes, fine)


def far_below(law: Bent) -> float:
    """Exponent of T far below the bend."""
    return law.b0 - law.kappa * law.q


# -- Which law is better? ----------------------------------------------------------------


def of_straight(law: fit.Law, cell: Cell) -> float:
    """log2 of the best learning rate of a cell; NaN without its shape in the fit."""
    log_a = law.log2_a.get(cell.shape, np.nan)
    return log_a + law.b * np.log2(cell.T) + law.q * np.log2(cell.beta)


def of_bent(law: Bent, cell: Cell) -> float:
    T = np.log2([cell.T])
    h = (
        -np.logaddexp2(0, law.r * (law.log_c + law.kappa * T - np.log2(cell.beta)))
        / law.r
    )
    (x,) = law.log_a.get(cell.shape, np.nan) + law.b0 * T + law.q * h
    return x


def held_out(cells: list[Cell], fit_law, predict) -> np.ndarray:
    """Squared error, in log2, of every minimum [n]: predicted without its T, and without its batch.

    Returns the mean of the two. NaN if the rest has too few shapes, run lengths or batch
    sizes.
    """
    errors = []
    for name in ("T", "beta"):
        laws = {}
        for value in {getattr(cell, name) for cell in cells}:
            laws[value] = fit_law([c for c in cells if getattr(c, name) != value])
        predicted = [predict(laws[getattr(cell, name)], cell) for cell in cells]
        best = [x for _, x in fit.minima(cells)]
        errors.append((np.array(best) - predicted) ** 2)
    return np.mean(errors, axis=0)


def interaction(cells: list[Cell]) -> float:
    """Coefficient of log T log beta beside the straight law. It is 0 if one b fits all batches."""
    found = fit.minima(cells)
    T = np.log2([cell.T for cell, _ in found])
    beta = np.log2([cell.beta for cell, _ in found])
    product = (T - T.mean()) * (beta - beta.mean())
    shapes = [cell.shape for cell, _ in found]
    best = [x for _, x in found]
    (_, _, coefficient), _ = fit.least_squares(best, [T, beta, product], shapes)
    return coefficient


def gain(cells: list[Cell]) -> fit.Estimate:
    """Mean squared error of held-out cells, straight minus bent. The better law has less."""
    straight = held_out(cells, fit.fit_law, of_straight)
    bent = held_out(cells, partial(fit_bent, sweep=cells), of_bent)
    gains = {cell[:3]: gap for cell, gap in zip(cells, straight - bent)}

    def mean_gain(some: list[Cell]) -> float:
        found = [gains[cell[:3]] for cell, _ in fit.minima(some)]
        return np.nanmean(found) if np.isfinite(found).any() else np.nan

    return jackknife(cells, mean_gain)


# -- Report ------------------------------------------------------------------------------


def slopes_at_ends(cells: list[Cell], end: str, on: str) -> str:
    """Slope of log2 of the best learning rate on log2 of a field, at both ends of another."""

    def slope(some: list[Cell]) -> float:
        found = fit.minima(some)
        best = [x for _, x in found]
        u = np.log2([getattr(cell, on) for cell, _ in found])
        (value,), _ = fit.least_squares(best, [u], [cell.shape for cell, _ in found])
        return value

    values = [getattr(cell, end) for cell in cells]
    texts = []
    for value in (min(values), max(values)):
        here = [cell for cell in cells if getattr(cell, end) == value]
        texts.append(f"{show(jackknife(here, slope), 2)} at {size(value)}")
    return " and ".join(texts)


def report(cells: list[Cell]) -> None:
    """Print b at the smallest and largest batch size, q at both ends of T, and the bent law."""
    print(f"b by batch size: {slopes_at_ends(cells, 'batch_size', on='T')}")
    print(f"q by run length: {slopes_at_ends(cells, 'T', on='beta')}")
    print(f"coefficient of log2 T log2 beta: {show(jackknife(cells, interaction))}")
    T = [cell.T for cell in cells]
    if len(set(T)) < 4 or len({cell.beta for cell in cells}) < 5:
        print("no bent law, because it needs 4 run lengths and 5 batch sizes")
        return

    laws = jackknife(cells, partial(fit_bent, sweep=cells))
    law = laws.answer
    b0, q, kappa = [show(fit.apply(attrgetter(n), laws)) for n in ("b0", "q", "kappa")]
    print(f"bent law: b0 {b0}, q {q}, kappa {kappa}, r {law.r:g}")
    middle = np.log2(T).mean()
    bend = PAPER_SEQ_LEN * 2 ** (law.log_c + law.kappa * middle)
    print(
        f"far below the bend T^{show(fit.apply(far_below, laws))}, bend at "
        f"T = {size(2**middle)}: {size(bend)} tokens"
    )
    print(f"squared error of held-out cells, straight minus bent: {show(gain(cells), 4)}")


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("bent.py", __doc__)
    add = parser.add_argument
    add("folders", type=Path, nargs="+", help="folders of a sweep's records")
    add("--only", action="append", default=[], metavar="FIELD=V,...")
    args = parser.parse_args(argv)
    try:
        report(fit.fitted_cells(read_rows(args.folders, args.only)))
    except (UserError, OSError) as error:
        return flags.fail("bent.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
