"""What fit.py prints. Cells, valleys and laws are those of fit.py."""

import math
import statistics

from tools.flags import size


def show(answer, form: str = ".3f") -> str:
    """(answer, low, high) -> '-0.278 [-0.374, -0.182]'"""
    value, low, high = (format(x, form) for x in answer)
    return value if low == "nan" else f"{value} [{low}, {high}]"


def print_bottoms(found: dict) -> None:
    """Print {cell: (x, why not)}, with T down and batch sizes across."""
    batches = sorted({cell.batch_size for cell in found})
    rows = {}
    for cell in sorted(found, key=lambda cell: (len(cell.shape), cell)):
        x, why_not = found[cell]
        row = rows.setdefault(f"{cell.shape:>10} {size(cell.T):>7}", {})
        row[cell.batch_size] = why_not or f"{2**x:.3g}"
    print(f"\n{'T':>18}", *(f"{f'batch {B:g}':>10}" for B in batches))
    for where, row in rows.items():
        print(where, *(f"{row.get(B, ''):>10}" for B in batches))


def print_edges(valleys: dict, bottom) -> None:
    """Print a flag that adds runs beyond the valleys that are lowest at an edge."""
    for end, i, sign in (("lowest", 0, -1), ("highest", -1, 1)):
        cut = [points for points in valleys.values() if bottom(points)[1] == f"at {end}"]
        if cut:  # from the nearest edge to a factor of 4 beyond the furthest
            edges = [sign * points[i][0] for points in cut]
            ks = range(1, round(2 * (max(edges) - min(edges))) + 5)
            lrs = sorted(2 ** (sign * (min(edges) + k / 2)) for k in ks)
            flag = "--lrs " + ",".join(f"{lr:.4g}" for lr in lrs)
            print(f"{len(cut)} cells are best at the {end} rate: sweep with {flag}")


def print_law(law, numbers: dict, at) -> None:
    """Print a law with its intervals. at: the cell of the learning rate among them."""
    n = "n" if law.schedule == "power" else "T"
    where = f"lr at T = {size(at.T)}, batch {at.batch_size:g}"
    print(f"\nlr = a beta^q {n}^b, with 95% intervals, and {where}")
    for name, answer in numbers.items():
        text = show(answer, ".3f" if name in "bq" else ".3g")
        if name in law.assumed:
            text = f"{getattr(law, name):.3g}  assumed, as in the preset"
        print(f"  {name:<2}  {text}")


def cost(regrets: list[float]) -> str:
    """'0.0010 (0.0030)', mean and worst, with a * if some rates were not tried (NaN)."""
    known = [x for x in regrets if x == x] or [math.nan]
    star = "" if known == regrets else " *"
    return f"{statistics.fmean(known):.4f} ({max(known):.4f}){star}"


def print_worth(T: float, regrets: dict) -> None:
    """Print the mean (and worst) regrets of a law of runs up to T, by longer T."""
    head = f"Nats lost by a law of T <= {size(T)}, mean (worst), * if some were not tried"
    print(f"\n{head}\n{'T':>7}  times  cells  {'law':<18}the rate of {size(T)}, kept")
    for length, both in regrets.items():
        law, same = map(cost, both)
        print(f"{size(length):>7} {length / T:>6.3g} {len(both[0]):>6}  {law:<18}{same}")
