"""Is the law of a sweep straight, or does it flatten at large batch sizes? See
research/methods.md.

    python research/bent.py results/bend-laptop --only warmup_tokens=80000

The bent law flattens above a critical batch size beta_c = c T^kappa:

    log lr = log a + b0 log T - (q/r) log(1 + (beta_c / beta)^r),  with r = 1, 2, 4 or 8

Far below the bend it is the straight law of fit.py with b = b0 - kappa q, far above it is
flat in beta. The better law is the one that predicts cells better that were left out of
its fit.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import fit
from fit import Fits, Minimum, show, slope, where_left_out
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
    """Every field has rows, see fit.leave_out."""

    b0: np.ndarray
    q: np.ndarray
    log_c: np.ndarray  # log2 beta_c = log_c + kappa log2 T
    kappa: np.ndarray
    r: np.ndarray  # the larger, the sharper is the bend
    fitted: np.ndarray  # log2 lr of the law at every minimum, [rows, n]


def bends(T, beta, levels, kappas, rs) -> Bends:
    """All combinations of levels, kappas and rs, at T and beta [n].

    A level is log beta_c at the mean log T.
    """
    grids = np.meshgrid(levels, kappas, rs)
    level, kappa, r = [grid.ravel() for grid in grids]
    log_c = level - kappa * T.mean()
    log_beta_c = log_c + kappa * T[:, None]  # [n, bends]
    h = -np.logaddexp2(0, r * (log_beta_c - beta[:, None])) / r
    return Bends(log_c, kappa, r, h)


def best_bend(x, weight, T, grid: Bends, same_shape) -> Bent:
    """Least squares of x [n] = log a(shape) + b0 T + q h with weights [n], at the best bend.

    same_shape [n, n] is True for two minima of one shape. Returns single values.
    """
    # 1. Without the mean over its shape, nothing depends on log a.
    total = same_shape @ weight  # weight of the shape of every minimum
    averages = same_shape * weight / np.maximum(total, 1e-9)[:, None]
    t = T - averages @ T  # [n]
    g = grid.h - averages @ grid.h  # [n, bends]
    y = x - averages @ x  # [n]

    # 2. The normal equations of y = b0 t + q g, for all bends
    tt = weight * t @ t
    ty = weight * t @ y
    tg = weight * t @ g
    gg = weight @ g**2
    gy = weight * y @ g
    determinant = tt * gg - tg**2
    determinant[determinant <= 1e-9 + 1e-6 * tt * gg] = np.nan  # T and beta vary together
    b0 = (gg * ty - tg * gy) / determinant
    q = (tt * gy - tg * ty) / determinant

    # 3. The best bend explains most of the variance.
    explained = np.nan_to_num(b0 * ty + q * gy, nan=-1)
    best = explained.argmax()
    line = b0[best] * T + q[best] * grid.h[:, best]
    log_a = np.where(total > 0, averages @ (x - line), np.nan)
    return Bent(
        b0=b0[best],
        q=q[best],
        log_c=grid.log_c[best],
        kappa=grid.kappa[best],
        r=grid.r[best],
        fitted=log_a + line,
    )


def fit_bent(found: list[Minimum], x, weight) -> Bent:
    """The bent law of every row, x and weight [rows, n], from a coarse and a fine grid."""
    T = np.log2([m.T for m in found])
    beta = np.log2([m.beta for m in found])
    shapes = np.array([m.shape for m in found])
    same_shape = shapes[:, None] == shapes

    levels = np.arange(beta.min() - 2, beta.max() + 2.1, 0.5)
    kappas = np.arange(-0.6, 1.61, 0.2)
    coarse = bends(T, beta, levels, kappas, [1.0, 2.0, 4.0, 8.0])
    laws = []
    for x_of_row, w in zip(x, weight):
        law = best_bend(x_of_row, w, T, coarse, same_shape)
        near_levels = law.log_c + law.kappa * T.mean() + np.arange(-0.5, 0.51, 0.1)
        near_kappas = law.kappa + np.arange(-0.2, 0.21, 0.02)
        fine = bends(T, beta, near_levels, near_kappas, law.r)
        laws.append(best_bend(x_of_row, w, T, fine, same_shape))
    columns = [np.array(column) for column in zip(*laws)]  # a field of all laws
    return Bent(*columns)


# -- Which law is better? ----------------------------------------------------------------


def held_out(found: list[Minimum], x, weight, fit_law) -> np.ndarray:
    """Squared error, in log2, of every minimum [n]: predicted without its T, and without its batch.

    Returns the mean of the two. NaN if the rest has too few shapes, run lengths or batch
    sizes.
    """
    every_T = np.array([m.T for m in found])
    every_beta = np.array([m.beta for m in found])
    errors = []
    for values in (every_T, every_beta):
        error = np.empty(len(found))
        for value in set(values):
            out = values == value
            law = fit_law(found, x[:1], weight[:1] * ~out)
            error[out] = (x[0] - law.fitted[0])[out] ** 2
        errors.append(error)
    return np.mean(errors, axis=0)


def interaction(found: list[Minimum], x, weight) -> np.ndarray:
    """Coefficient of log T log beta beside the straight law. It is 0 if one b fits all batches."""
    T = np.log2([m.T for m in found])
    beta = np.log2([m.beta for m in found])
    product = (T - T.mean()) * (beta - beta.mean())
    product = np.broadcast_to(product, x.shape)  # the same in every row
    # what the straight law cannot explain of the product; NaN if the row lacks a shape
    rest = product - fit.fit_law(found, product, weight).fitted
    rest = np.where(weight > 0, rest, 0)
    variance = (weight * rest**2).sum(axis=1)
    return (weight * rest * x).sum(axis=1) / np.where(variance > 0, variance, np.nan)


def gain(fits: Fits) -> np.ndarray:
    """Mean squared error of held-out cells, straight minus bent. The better law has less."""
    straight = held_out(fits.points, fits.x, fits.weight, fit.fit_law)
    bent = held_out(fits.points, fits.x, fits.weight, fit_bent)
    both = np.isfinite(straight) & np.isfinite(bent)
    weight = fits.weight[:, both]
    total = weight.sum(axis=1)
    return weight @ (straight - bent)[both] / np.where(total > 0, total, np.nan)


# -- Report ------------------------------------------------------------------------------


def slopes_at_ends(fits: Fits, at: np.ndarray, u: np.ndarray) -> str:
    """Slope of x on log2 u at the smallest and the largest value in `at` [n]."""
    shapes = [m.shape for m in fits.points]
    texts = []
    for end in (at.min(), at.max()):
        weight = fits.weight * (at == end)
        rows = where_left_out(slope(fits.x, weight, np.log2(u), shapes), weight)
        texts.append(f"{show(rows, 2)} at {size(end)}")
    return " and ".join(texts)


def report(fits: Fits) -> None:
    """Print b at the smallest and largest batch size, q at both ends of T, and the bent law."""
    points = fits.points
    T = np.array([m.T for m in points], float)
    batch_size = np.array([m.batch_size for m in points], float)
    beta = np.array([m.beta for m in points])
    print(f"b by batch size: {slopes_at_ends(fits, batch_size, T)}")
    print(f"q by run length: {slopes_at_ends(fits, T, beta)}")
    product = interaction(points, fits.x, fits.weight)
    print(f"coefficient of log2 T log2 beta: {show(product)}")
    if len(set(T)) < 4 or len(set(beta)) < 5:
        print("no bent law, because it needs 4 run lengths and 5 batch sizes")
        return

    law = fit_bent(points, fits.x, fits.weight)
    middle = np.log2(T).mean()
    log_beta_c = law.log_c + law.kappa * middle
    middle_tokens = PAPER_SEQ_LEN * 2 ** log_beta_c[0]
    print(
        f"bent law: b0 {show(law.b0)}, q {show(law.q)}, kappa {show(law.kappa)}, "
        f"r {law.r[0]:g}"
    )
    print(
        f"far below the bend T^{show(law.b0 - law.kappa * law.q)}, bend at "
        f"T = {size(2**middle)}: {size(middle_tokens)} tokens"
    )
    print(f"squared error of held-out cells, straight minus bent: {show(gain(fits), 4)}")


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("bent.py", __doc__)
    add = parser.add_argument
    add("folders", type=Path, nargs="+", help="folders of a sweep's records")
    add("--only", action="append", default=[], metavar="FIELD=V,...")
    args = parser.parse_args(argv)
    try:
        report(fit.fits_of(fit.read_rows(args.folders, args.only)))
    except (UserError, OSError) as error:
        return flags.fail("bent.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
