"""Is the law of a sweep straight, or does it flatten at large batch sizes? See
docs/bend.md.

    python docs/bent.py results/bend-laptop --only warmup_tokens=80000

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
from fit import Fits, Minimum, slope
from tools.flags import UserError, fail, program_parser
from tools.figures import size
from schedules import PAPER_SEQ_LEN
from fit import interval, show


class Bent(NamedTuple):
    """Every field has the estimate, followed by all draws."""

    b0: np.ndarray
    q: np.ndarray
    log_c: np.ndarray  # log2 beta_c = log_c + kappa log2 T
    kappa: np.ndarray
    r: np.ndarray  # the larger, the sharper is the bend
    fitted: np.ndarray  # log2 lr of the law at every minimum, [1 + draws, n]


def bends(T, beta, levels, kappas, rs) -> tuple:
    """(log_c, kappa, r, h [n, bends]) of all levels, log2 beta_c at the mean log2 T,
    kappas, rs.

    h is log2 beta - log2 beta_c far below the bend, 0 far above it. T and beta [n] are
    log2, too.
    """
    level, kappa, r = (grid.ravel() for grid in np.meshgrid(levels, kappas, rs))
    log_c = level - kappa * T.mean()
    log_beta_c = log_c + kappa * T[:, None]
    return log_c, kappa, r, -np.logaddexp2(0, r * (log_beta_c - beta[:, None])) / r


def best_bend(x, weight, T, grid: tuple, same_shape) -> Bent:
    """Least squares of x [n] = log a(shape) + b0 T + q h with weights [n], at the best
    bend."""
    log_c, kappa, r, h = grid
    total = same_shape @ weight
    mean = (
        same_shape * weight / np.maximum(total, 1e-9)[:, None]
    )  # mean @ v averages over a shape
    t, g, y = (v - mean @ v for v in (T, h, x))  # without its mean, a shape needs no a
    tt, tg, gg = weight * t @ t, weight * t @ g, weight @ g**2
    ty, gy = weight * t @ y, weight * y @ g
    determinant = tt * gg - tg**2
    determinant[determinant <= 1e-9 + 1e-6 * tt * gg] = np.nan  # T and beta vary together
    b0, q = (gg * ty - tg * gy) / determinant, (tt * gy - tg * ty) / determinant
    best = np.nan_to_num(
        b0 * ty + q * gy, nan=-1
    ).argmax()  # explains most of the variance
    b0, q, log_c, kappa, r, h = (v[..., best] for v in (b0, q, log_c, kappa, r, h))
    log_a = np.where(total > 0, mean @ (x - b0 * T - q * h), np.nan)
    return Bent(b0, q, log_c, kappa, r, log_a + b0 * T + q * h)


def fit_bent(found: list[Minimum], x, weight) -> Bent:
    """The bent law of every draw, x and weight [1 + draws, n], from a coarse and a fine
    grid."""
    T, beta = np.log2([(m.T, m.beta) for m in found]).T
    same_shape = np.array([[m.shape == other.shape for other in found] for m in found])
    levels, kappas = (
        np.arange(beta.min() - 2, beta.max() + 2.1, 0.5),
        np.arange(-0.6, 1.61, 0.2),
    )
    coarse, laws = bends(T, beta, levels, kappas, [1.0, 2.0, 4.0, 8.0]), []
    for at, w in zip(x, weight):
        law = best_bend(at, w, T, coarse, same_shape)
        levels = law.log_c + law.kappa * T.mean() + np.arange(-0.5, 0.51, 0.1)
        fine = bends(T, beta, levels, law.kappa + np.arange(-0.2, 0.21, 0.02), law.r)
        laws.append(best_bend(at, w, T, fine, same_shape))
    return Bent(*map(np.array, zip(*laws)))


def held_out(found: list[Minimum], x, weight, fit_law) -> np.ndarray:
    """Squared error, in log2, of every minimum [n]: predicted without its T, and without
    its batch.

    Returns the mean of the two. NaN if the rest has too few shapes, run lengths or batch
    sizes.
    """
    errors = np.empty((2, len(found)))
    for error, values in zip(errors, np.array([(m.T, m.beta) for m in found]).T):
        for value in set(values):
            out = values == value
            law = fit_law(found, x[:1], weight[:1] * ~out)
            error[out] = (x[0] - law.fitted[0])[out] ** 2
    return errors.mean(axis=0)


def interaction(found: list[Minimum], x, weight) -> np.ndarray:
    """Coefficient of log T log beta beside the straight law. It is 0 if one b fits all
    batches."""
    T, beta = np.log2([(m.T, m.beta) for m in found]).T
    product = (T - T.mean()) * (beta - beta.mean()) + 0 * x
    rest = (
        product - fit.fit_law(found, product, weight).fitted
    )  # what the law cannot explain of it
    rest = np.where(weight > 0, rest, 0)  # it is NaN if the draw lacks a shape
    return (weight * rest * x).sum(axis=1) / (weight * rest**2).sum(axis=1)


def gain(fits: Fits) -> np.ndarray:
    """Mean squared error of held-out cells, straight minus bent. The better law has
    less."""
    points, x, weight, *_ = fits[1:]
    errors = [held_out(points, x, weight, law) for law in (fit.fit_law, fit_bent)]
    both = np.isfinite(errors).all(axis=0)
    return weight[:, both] @ (errors[0] - errors[1])[both] / weight[:, both].sum(axis=1)


def report(fits: Fits) -> None:
    """Print b at the smallest and largest batch size, q at both ends of T, and the bent
    law."""
    points, x, weight, *_ = fits[1:]
    T, batch_size, beta = np.array([(m.T, m.batch_size, m.beta) for m in points]).T
    shapes = [m.shape for m in points]
    for name, at, u in (("b by batch size", batch_size, T), ("q by run length", T, beta)):
        draws = lambda end: slope(x, weight * (at == end), np.log2(u), shapes)
        low, high = (
            f"{show(draws(end), 2)} at {size(end)}" for end in (at.min(), at.max())
        )
        print(f"{name}: {low} and {high}")
    print(f"coefficient of log2 T log2 beta: {show(interaction(points, x, weight))}")
    if len(set(T)) < 4 or len(set(beta)) < 5:
        print("no bent law, because it needs 4 run lengths and 5 batch sizes")
        return
    law, middle = fit_bent(points, x, weight), np.log2(T).mean()
    beta_c = PAPER_SEQ_LEN * 2 ** (law.log_c + law.kappa * middle)
    low, high = map(size, interval(beta_c))
    print(
        f"bent law: b0 {show(law.b0)}, q {show(law.q)}, kappa {show(law.kappa)}, r {law.r[0]:g}"
    )
    print(
        f"far below the bend T^{show(law.b0 - law.kappa * law.q)}, bend at "
        f"T = {size(2**middle)}: {size(beta_c[0])} tokens [{low}, {high}]"
    )
    print(f"squared error of held-out cells, straight minus bent: {show(gain(fits), 4)}")


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("bent.py", __doc__)
    parser.add_argument(
        "folders", type=Path, nargs="+", help="folders of a sweep's records"
    )
    parser.add_argument("--only", action="append", default=[], metavar="FIELD=V,...")
    args = parser.parse_args(argv)
    try:
        report(fit.fits_of(fit.read_records(args.folders, args.only)))
    except (UserError, OSError) as error:
        return fail("bent.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
