"""The law behind a sweep: losses -> best learning rates -> a power law with intervals ->
prediction.

    python fit.py runs/wsd-quick                         the law, law.json, figures
    python fit.py runs/bend --only warmup_tokens=5000    of some of the runs
    python fit.py --predict --total_tokens 10e12 --batch_size 1024
    python fit.py --predict --total_tokens 1e7 --batch_size 8 --law runs/wsd-quick/law.json

The first ends with the commands of a WSD run and of a Power run that follow the law. The
third prints the best learning rate under the paper's law. The last does this under your
law, and adds the commands.

We fixed this procedure before the runs of results/bend-laptop (research/methods.md):

1. A *cell* is a shape, a run length T and a batch size. Average its losses over the
   seeds. Fit a cubic in log lr to the 7 learning rates nearest the lowest loss, and take
   its minimum. We leave a cell out, and count it, if this is impossible.
2. The law, log lr = log a + b log T + q log beta, is least squares over all cells, with
   one a per shape. (research/bent.py tests whether a law that flattens at large batch sizes
   is better.)
3. Intervals measure how far the law moves without one batch size, and without one seed.
   The two variances add up, and the interval is 95% of Student's t. (research/coverage.py
   shows why it is not a bootstrap.)
4. The paper reads b off the three best batch sizes of every T, with q = 1. Step Law takes
   the best one.

T counts tokens, beta sequences of 4096 tokens, as in schedules.py. The file follows these
steps. Start with `vertex`, and then read `minima`, `fit_law` and `leave_out`. Notebooks call
fit.law(rows).
"""

import json
import math
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from records import STANDARD, flags_of, narrow_first, read_rows, rows_of
from schedules import PAPER_LAW, PAPER_SEQ_LEN, best_lr, paper_batch_size
from tools import figures, files, flags
from tools.flags import UserError

# -- A valley and its bottom -------------------------------------------------------------
#
# A valley is a list of points (x, loss) in order of x, with x = log2 lr. Its bottom is
# the best learning rate. The loss of a diverged run is inf.


def lowest_x(points: list[tuple]) -> float:
    """The x with the lowest loss, the left one of two."""
    losses = [loss for _, loss in points]
    return points[losses.index(min(losses))][0]


def nearest(points: list[tuple], n: int) -> list[tuple]:
    """The n points nearest the lowest, in order of x. If two are equally near, the left."""
    if not points:
        return []
    middle = lowest_x(points)

    def distance(point: tuple) -> float:
        return round(abs(point[0] - middle), 2)  # equal for equal steps to both sides

    return sorted(sorted(points, key=distance)[:n])


def vertex(points: list[tuple], degree: int = 3, window: int = 7) -> tuple[float, str]:
    """The x of the minimum, and why it is unusable, or "".

    We fit a cubic, because our valleys are steeper on one side. This biases a parabola
    (degree 2).
    """
    # 1. The lowest point needs neighbors on both sides.
    if not points:
        return math.nan, "no common learning rate"
    lowest = lowest_x(points)
    if lowest == points[0][0] or lowest == points[-1][0]:
        return lowest, "at an edge"

    # 2. Fit the curve to the points near it that did not diverge, two more than it needs.
    near = [(x, loss) for x, loss in nearest(points, window) if math.isfinite(loss)]
    if len(near) < degree + 2:
        return lowest, f"fewer than {degree + 2} losses"
    x, loss = np.array(near).T
    curve = np.polyfit(x - lowest, loss, degree)

    # 3. At a minimum the first derivative of the curve is 0, and the second positive.
    first = np.polyder(curve)
    second = np.polyder(first)
    for root in np.roots(first):
        bottom = lowest + root.real
        is_minimum = root.imag == 0 and np.polyval(second, root.real) > 0
        if is_minimum and x[0] <= bottom <= x[-1]:
            return bottom, ""
    return lowest, "no valley"


def mean_valley(seeds: dict, counts: list | tuple) -> list[tuple]:
    """The points (x, mean loss) at the learning rates that all seeds have.

    seeds: seed -> {x: loss}. counts: how often every seed counts.
    """
    common = set.intersection(*(set(losses) for losses in seeds.values()))
    points = []
    for x in sorted(common):
        total = 0.0
        for losses, count in zip(seeds.values(), counts):
            if count > 0:  # 0 * inf would be NaN
                total += count * losses[x]
        points.append((x, total / sum(counts)))
    return points


# -- The minima of all cells -------------------------------------------------------------


class Minimum(NamedTuple):
    """A cell, its valley, and the bottom of the valley."""

    shape: str
    T: int
    batch_size: float
    beta: float
    seeds: dict  # seed -> {x: loss}, with x = log2 lr (in a scan of Power: log2 a, or b)
    points: list  # the mean valley
    near: list  # its points nearest the lowest. We fit the curve to the finite points
    rule: tuple[int, int]  # degree of the curve, and through how many points at most
    loss: float  # the lowest mean loss
    x: float  # the bottom
    why_not: str  # why it is left out, or ""
    again: dict  # how often the seeds count -> the minimum then. See leave_out


def log2_lr(record: dict) -> float:
    return math.log2(record["lr"])


def minima(
    records: list[dict],
    degree: int = 3,
    window: int = 7,
    by_seed: bool = False,
    x_of: Callable[[dict], float] = log2_lr,
) -> list[Minimum]:
    """The minimum of every cell, or of every cell and seed, narrow to wide.

    Raises UserError if two runs are equal.
    """
    # 1. Sort the losses into cells.
    cells: dict = {}
    for r in records:
        beta = paper_batch_size(r["batch_size"] * r["seq_len"])
        only_seed = r["seed"] if by_seed else 0
        cell = (r["shape"], r["total_tokens"], r["batch_size"], beta, only_seed)
        losses = cells.setdefault(cell, {}).setdefault(r["seed"], {})
        x = x_of(r)
        if x in losses:
            raise UserError(f"{cell[:3]}: two runs have the same learning rate and seed")
        losses[x] = r["loss"]

    # 2. Average over the seeds, and find the bottom.
    found = []
    for cell in sorted(cells, key=narrow_first):
        shape, T, batch_size, beta, _ = cell
        seeds = cells[cell]
        points = mean_valley(seeds, [1] * len(seeds))
        x, why_not = vertex(points, degree, window)
        minimum = Minimum(
            shape=shape,
            T=T,
            batch_size=batch_size,
            beta=beta,
            seeds=seeds,
            points=points,
            near=nearest(points, window),
            rule=(degree, window),
            loss=min((loss for _, loss in points), default=math.inf),
            x=x,
            why_not=why_not,
            again={},
        )
        found.append(minimum)
    return found


def parabolas(
    records: list[dict], window: int = 5, x_of: Callable[[dict], float] = log2_lr
) -> list[Minimum]:
    """Vertices of parabolas, for every cell and seed."""
    return minima(records, degree=2, window=window, by_seed=True, x_of=x_of)


def usable(found: list[Minimum]) -> list[Minimum]:
    """The minima that we do not leave out."""
    return [m for m in found if not m.why_not]


def reasons(found: list[Minimum]) -> str:
    """Why minima are left out, with their numbers."""
    why_not = Counter(m.why_not for m in found if m.why_not)
    return ", ".join(f"{n} {why}" for why, n in why_not.items())


# -- The law, by least squares -----------------------------------------------------------


class Law(NamedTuple):
    """log2 lr = log2 a(shape) + b log2 T + q log2 beta.

    Every field has the rows of leave_out. The first is the law itself.
    """

    b: np.ndarray  # [rows]
    q: np.ndarray  # [rows]
    a: dict[str, np.ndarray]  # shape -> [rows]
    fitted: np.ndarray  # log2 lr of the law at every minimum, [rows, n]


def fit_law(found: list[Minimum], x: np.ndarray, weight: np.ndarray) -> Law:
    """Weighted least squares in every row, x and weight [rows, n].

    In a row without a shape, its a is NaN. If T and beta vary together, all values are
    NaN.
    """
    # 1. The columns of the problem: log2 T for b, log2 beta for q, and one column per
    #    shape, which is 1 at the minima of this shape, for its log2 a.
    shapes = list(dict.fromkeys(m.shape for m in found))  # without doubles, in order
    columns = [[math.log2(m.T) for m in found], [math.log2(m.beta) for m in found]]
    for shape in shapes:
        columns.append([float(m.shape == shape) for m in found])
    design = np.column_stack(columns)  # [n, 2 + shapes]

    # 2. Solve it in every row. lstsq minimizes the sum of squares, so we multiply an
    #    error with weight w by the root of w.
    solutions = []
    for x_of_row, w in zip(x, weight):
        root = np.sqrt(w)
        target = np.where(w > 0, x_of_row, 0)  # 0 * NaN would be NaN
        solution, _, rank, _ = np.linalg.lstsq(
            root[:, None] * design, root * target, rcond=1e-6
        )
        in_row = w @ design[:, 2:] > 0  # [shapes]
        log_a = solution[2:]  # a view, so this changes the solution
        log_a[~in_row] = math.nan
        if rank < 2 + in_row.sum():  # many laws fit equally well
            solution[:] = math.nan
        solutions.append(solution)

    # 3. Name the values.
    solutions = np.array(solutions)  # [rows, 2 + shapes]
    a = {shape: np.exp2(solutions[:, 2 + i]) for i, shape in enumerate(shapes)}
    return Law(b=solutions[:, 0], q=solutions[:, 1], a=a, fitted=solutions @ design.T)


# -- Intervals, by leaving out one thing at a time ---------------------------------------
#
# How far does an answer move without one batch size, and how far without one seed? A
# *pair* is a shape and a batch size. An answer, such as b, is an array of rows:
#
#     [the answer, a half without one pair at a time, a half without one seed at a time]
#
# The shorter half ends with NaN. You can subtract answers row by row, because the same
# row leaves out the same thing of both. An answer that needs two batch sizes is NaN without
# one of two. Then only the seeds give its interval, and it is too narrow.


def leave_out(found: list[Minimum]) -> tuple[np.ndarray, np.ndarray]:
    """x of all minima and their weights, both [rows, n].

    The weight of a minimum counts its seeds. It is 0 if the row leaves out the pair. Give
    the minima of two sweeps at once to compare them.
    """
    x, weight, _ = leave_out_with_losses(found)
    return x, weight


def leave_out_with_losses(found: list[Minimum]) -> tuple:
    """`leave_out`, and the lowest mean loss of every cell, [rows, n]."""
    # 1. A row leaves out a pair (shape, batch size) or a seed, but never the only pair or
    #    seed.
    pairs = sorted({(m.shape, m.batch_size) for m in found})
    seeds = sorted({seed for m in found for seed in m.seeds})
    ways = [some if len(some) > 1 else [] for some in (pairs, seeds)]
    rows = [None, *in_halves(*ways, "everything")]

    # 2. Find the minimum of every cell again in every row. Many rows have the same seeds
    #    of a cell, so `again` keeps the results.
    x = np.empty((len(rows), len(found)))
    weight = np.empty_like(x)
    loss = np.empty_like(x)
    for i, m in enumerate(found):
        pair = m.shape, m.batch_size
        for k, out in enumerate(rows):
            gone = out in (pair, "everything")
            counts = tuple(int(not gone and seed != out) for seed in m.seeds)
            if counts not in m.again:
                m.again[counts] = minimum_again(m, counts)
            x[k, i], weight[k, i], loss[k, i] = m.again[counts]
    return x, weight, loss


def in_halves(first: list, second: list, nothing) -> list:
    """Both lists, one after the other, the shorter one filled up with nothing."""
    half = max(len(first), len(second))
    rows = []
    for some in (first, second):
        rows += some + [nothing] * (half - len(some))
    return rows


def minimum_again(m: Minimum, counts: tuple[int, ...]) -> tuple[float, float, float]:
    """x, weight and lowest mean loss of a cell if its seeds count so often."""
    if not any(counts):  # nothing is left of it
        return m.x, 0, math.inf
    points = mean_valley(m.seeds, counts)
    x, why_not = vertex(points, *m.rule)
    weight = 0 if why_not else sum(counts)
    return x, weight, min((loss for _, loss in points), default=math.inf)


def where_left_out(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The rows, but NaN where a row left out nothing of the answer.

    weight [rows, n] has a 0 for minima that the answer does not use. Without one of these,
    the answer stays, which would look as if it were certain.
    """
    nothing = (weight == weight[0]).all(axis=1)
    nothing[0] = False  # the answer
    return np.where(nothing, math.nan, rows)


def mean_of(values: np.ndarray) -> np.ndarray:
    """The rows of the mean of values [pairs, seeds]. NaN is a missing value."""
    ways = []
    for axis, n in enumerate(values.shape):
        without = []
        if n > 1:
            without = [np.nanmean(np.delete(values, i, axis)) for i in range(n)]
        ways.append(without)
    return np.array([np.nanmean(values), *in_halves(*ways, math.nan)])


def error_of(rows: np.ndarray) -> tuple[float, float]:
    """The standard error of an answer, and the degrees of freedom of this error.

    The variance without one pair at a time, plus the variance without one seed at a time.
    Their sum is a little too large, because both contain the variation with both. Source:
    Tukey (1958), the jackknife. For a mean, both are the usual variance over n.
    """
    variance = 0.0
    below = 0.0
    for half in np.split(rows[1:], 2):
        answers = half[np.isfinite(half)]
        n = len(answers)
        if n > 1:
            part = (n - 1) * answers.var()  # as n means of n - 1 values vary little
            variance += part
            below += part**2 / (n - 1)
    freedom = variance**2 / below if below > 0 else 0.0  # Welch, Satterthwaite
    return math.sqrt(variance), freedom


@cache
def student(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Many t > 0 in order, and the share of Student's t that lies between -t and t."""
    # With t = sqrt(freedom) tan(angle), the density of the angle is a power of its cosine.
    n = 20_000
    step = math.pi / 2 / n
    middles = step * (np.arange(n) + 0.5)
    share = np.cumsum(np.cos(middles) ** (freedom - 1))
    t = math.sqrt(freedom) * np.tan(middles + step / 2)
    return t, share / share[-1]


def interval(rows: np.ndarray) -> tuple[float, float]:
    """95% of Student's t around an answer. NaN if nothing varies."""
    error, freedom = error_of(rows)
    if freedom == 0:
        return math.nan, math.nan
    t, share = student(freedom)
    half = error * np.interp(0.95, share, t)
    return float(rows[0] - half), float(rows[0] + half)


def show(rows: np.ndarray, digits: int = 3, log2: bool = False) -> str:
    """An answer and its interval, if it has one. A single seed in a single cell has none.

    With log2, the rows are log2 of the answer.
    """
    low, high = np.round(interval(rows), 9)  # without differences of mere rounding
    answer = rows[0]
    if log2:
        answer, low, high = np.exp2([answer, low, high])
    text = f"{answer:.{digits}f}"
    if low < high:
        text += f" [{low:.{digits}f}, {high:.{digits}f}]"
    return text


# -- How the papers read it --------------------------------------------------------------


def slope(x, weight, u, groups: list) -> np.ndarray:
    """Slope of x on u [n] within groups, for every row, [rows].

    weight [rows, n]; x the same, or [n]. It is NaN if u does not vary in any group.
    """
    # 1. u without the weighted mean of its group
    u = np.asarray(u, float)
    centered = np.empty_like(weight, float)
    for group in set(groups):
        here = np.array([other == group for other in groups])
        w = weight[:, here]
        mean = (w * u[here]).sum(axis=1) / np.maximum(w.sum(axis=1), 1e-9)
        centered[:, here] = u[here] - mean[:, None]

    # 2. The covariance of x and u over the variance of u
    covariance = (weight * centered * x).sum(axis=1)
    variance = (weight * centered**2).sum(axis=1)
    return covariance / np.where(variance > 1e-9, variance, math.nan)


def by_shape_and_T(points: list[Minimum]) -> dict[tuple, list[int]]:
    """(shape, T) -> the indices of its minima, one for every batch size."""
    cells: dict = {}
    for i, m in enumerate(points):
        cells.setdefault((m.shape, m.T), []).append(i)
    return cells


def best_batches(found: list[Minimum], n: int) -> list[Minimum]:
    """Minima of the n batch sizes with the lowest loss, for every shape and T."""
    points = usable(found)
    best = []
    for here in by_shape_and_T(points).values():
        batches = sorted([points[i] for i in here], key=attrgetter("loss"))
        best += batches[:n]
    return best


def only_best(points: list[Minimum], weight, loss, n: int) -> np.ndarray:
    """Weights, 0 outside the n best batch sizes. Every row chooses these again."""
    weight = weight.copy()
    loss = loss.copy()
    loss[weight == 0] = math.inf  # such a minimum cannot be among the best
    for here in by_shape_and_T(points).values():
        losses = loss[:, here]  # [rows, batch sizes]
        last = min(n, len(here)) - 1
        limit = np.sort(losses, axis=1)[:, [last]]  # the n-th lowest, of every row
        weight[:, here] *= losses <= limit
    return weight


def paper_reading(
    found: list[Minimum], rows_of: Callable = leave_out_with_losses
) -> tuple[np.ndarray, np.ndarray, float]:
    """The reading of the paper, b with q = 1 in the three best batch sizes, and s and a.

    s is the slope of log beta on log T there. If lr = a beta^q T^b is exact, the
    paper's b is b + (q - 1) s. (research/coverage.py tries other rows.)
    """
    points = usable(found)
    x, weight, loss = rows_of(points)
    weight = only_best(points, weight, loss, 3)
    T = np.log2([m.T for m in points])
    beta = np.log2([m.beta for m in points])
    all_shapes = ["one group"] * len(points)  # one a for all shapes
    gamma = x - beta  # log2 (lr / beta), which the paper plots against T
    b = where_left_out(slope(gamma, weight, T, all_shapes), weight)
    s = where_left_out(slope(beta, weight, T, all_shapes), weight)
    log2_a = np.average(gamma[0] - b[0] * T, weights=weight[0])
    return b, s, 2**log2_a


def step_law_reading(
    found: list[Minimum], rows_of: Callable = leave_out_with_losses
) -> np.ndarray:
    """Exponent of T at the best batch size. If the law is exact, this is b + q s."""
    points = usable(found)
    x, weight, loss = rows_of(points)
    weight = only_best(points, weight, loss, 1)
    T = np.log2([m.T for m in points])
    b = slope(x, weight, T, [m.shape for m in points])
    return where_left_out(b, weight)


# -- The law of a sweep ------------------------------------------------------------------


class Fits(NamedTuple):
    """What `fits_of` finds in a sweep. A row leaves out one batch size or one seed."""

    found: list[Minimum]  # all minima
    points: list[Minimum]  # the usable minima
    x: np.ndarray  # of the points, in all rows of leave_out
    weight: np.ndarray
    law: Law
    paper: tuple | None = None  # see paper_reading


def fits_of(rows: list[dict]) -> Fits:
    """All minima, rows and laws of a sweep.

    Raises UserError if the usable minima do not determine a, b and q.
    """
    found = minima(rows)
    points = usable(found)
    fitted = None
    if points:
        x, weight = leave_out(points)
        fitted = fit_law(points, x, weight)
    if fitted is None or not math.isfinite(fitted.b[0]):
        left_out = reasons(found) or 0
        raise UserError(
            f"{len(points)} of {len(found)} minima usable, left out: {left_out}; "
            "a law needs two run lengths and two batch sizes in one shape"
        )
    return Fits(found, points, x, weight, fitted, paper_reading(found))


def law(rows: list[dict]) -> dict:
    """Fit lr = a beta^q T^b to plain rows. Returns the content of law.json.

    A row needs lr, total_tokens, val_loss (None if diverged), and batch_tokens or
    batch_size. Optional: seq_len (else 4096), shape and seed (else all have the same),
    and state, with which we leave out runs that are not "finished". Raises UserError.
    """
    rows = rows_of(rows)
    others = {row["schedule"] for row in rows} - {"wsd"}
    if others:
        raise UserError(
            f"rows of schedule {min(others)}: a law is of WSD; leave them out"
        )
    return as_json(fits_of(rows), rows)


def as_json(fits: Fits, rows: list[dict]) -> dict:
    """The content of law.json. Its a is the geometric mean over the shapes.

    A command takes the settings of the last shape, which is the widest.
    """
    row = max(rows, key=lambda row: narrow_first((row["shape"],)))
    log_a = np.mean([np.log2(a) for a in fits.law.a.values()], axis=0)  # [rows]
    b_paper, _, a_paper = fits.paper
    answers = {"a": log_a, "b": fits.law.b, "q": fits.law.q, "b_paper": b_paper}
    content = {name: answer[0] for name, answer in answers.items()}
    for name, answer in answers.items():
        low, high = interval(answer)
        content[f"{name}_interval"] = None if math.isnan(low) else (low, high)
    content["a"] = 2 ** content["a"]
    if content["a_interval"]:
        content["a_interval"] = tuple(2**end for end in content["a_interval"])
    content["a_paper"] = a_paper
    content["rule"] = "cubic through 7 rates of mean losses"
    content["seq_len"] = row["seq_len"]
    content["warmup_tokens"] = row.get("warmup_tokens")
    content["fingerprint"] = row.get("fingerprint")
    # the range of the sweep
    lengths = [m.T for m in fits.points]
    batches = [m.beta * PAPER_SEQ_LEN for m in fits.points]
    content["total_tokens"] = [min(lengths), max(lengths)]
    content["batch_tokens"] = [min(batches), max(batches)]
    # for `band`: log2 a, b and q. JSON has no NaN
    rows_of_law = np.array([log_a, fits.law.b, fits.law.q])
    content["rows"] = np.where(np.isnan(rows_of_law), None, rows_of_law).tolist()
    content["decay_share"], content["decay_tokens"] = decay_of(rows)
    content["flags"] = flags_of(row)
    return content


def decay_of(rows: list[dict]) -> tuple[float, int]:
    """The share s of T and the tokens t of the decay of a run, which takes s * T + t tokens.

    It is an equal share of all runs, equal tokens, or all but equal tokens.
    """
    lengths = [(row["total_tokens"], row.get("decay_tokens") or 0) for row in rows]
    if len({round(decay / T, 3) for T, decay in lengths}) == 1:
        T, decay = max(lengths)
        return round(decay / T, 3), 0
    if len({decay for _, decay in lengths}) == 1:
        return 0.0, lengths[0][1]
    return 1.0, lengths[0][1] - lengths[0][0]


# -- Prediction --------------------------------------------------------------------------


def predict(law: dict, total_tokens: float, batch_tokens: float) -> float:
    """Best constant learning rate of a WSD run, equation 6 of the paper with beta^q for beta."""
    return best_lr(total_tokens, paper_batch_size(batch_tokens), law)


def read_law(path: str) -> dict:
    """The content of a law.json. Raises UserError if it is not one."""
    try:
        law = json.loads(Path(path).read_text())
        predict(law, 1.0, float(law["seq_len"]))  # to see that all is there
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"--law {path}: not a law.json that fit.py wrote") from None
    return law


def band(law: dict, total_tokens: float, batch_tokens: float) -> tuple[float, float]:
    """The 95% interval of a prediction, from the rows of the law; NaN if it has none.

    It widens with the distance from the sweep, but assumes that the law does not bend.
    """
    if "rows" not in law:
        return math.nan, math.nan
    log2_a, b, q = np.array(law["rows"], float)  # null becomes NaN
    beta = paper_batch_size(batch_tokens)
    log2_lr_of_rows = log2_a + b * math.log2(total_tokens) + q * math.log2(beta)
    low, high = np.round(interval(log2_lr_of_rows), 9)  # as in show
    return 2**low, 2**high


def outside(name: str, value: float, span: list[float]) -> str:
    """How far a value is outside the span of the sweep, in factors of two; "" inside."""
    low, high = span
    if low <= value <= high:
        return ""
    factors = math.log2(value / high) if value > high else math.log2(low / value)
    where = "above" if value > high else "below"
    asked = f"{name} {figures.size(value)} is {factors:.1f} factors of two {where}"
    return f"{asked} the sweep ({figures.size(low)} to {figures.size(high)})"


# -- From a law to a run -----------------------------------------------------------------


def ceiling(law: dict, batch_tokens: float) -> float:
    """lr_max of a Power run, the learning rate of the law at the shortest T of its sweep.

    The sweep measured nothing below this T, and a much higher ceiling costs loss
    (docs/recipe.md).
    """
    return predict(law, law["total_tokens"][0], batch_tokens)


def schedules_of(law: dict, T: float, batch_tokens: float) -> list[str]:
    """The flags of WSD and of Power, if they follow a law."""
    wsd = f"--schedule wsd --lr {predict(law, T, batch_tokens):.4g}"
    power = f"--schedule power --power_a {law['a']:.6g} --power_b {law['b']:.5f}"
    power += f" --power_q {law['q']:.5f} --lr_max {ceiling(law, batch_tokens):.4g}"
    # train.py has no Power that rises with n, or falls with the batch size
    return [wsd, power] if law["b"] <= 0 <= law["q"] else [wsd]


def commands(law: dict, T: float, batch_size: float, seq_len: float) -> list[str]:
    """Commands of a WSD run and a Power run under a law, with the settings of its sweep."""
    common = f"--total_tokens {T:.15g} --batch_size {batch_size:g} {law['flags']}"
    if law["decay_share"] != 0.1 or law["decay_tokens"]:  # else the default
        decay = round(law["decay_share"] * T + law["decay_tokens"])
        common += f" --decay_tokens {decay}"
    if seq_len != law["seq_len"]:
        common += f" --seq_len {seq_len:g}"  # train.py takes the last value
    return [
        f"python train.py {schedule} {common}"
        for schedule in schedules_of(law, T, batch_size * seq_len)
    ]


def advice(law: dict, T: float, batch_size: float, seq_len: float) -> list[str]:
    """Lines to read before a run follows a law, and its commands."""
    lines = []
    batch_tokens = batch_size * seq_len

    # 1. How sure is it?
    low, high = band(law, T, batch_tokens)
    if low < high:
        lines.append(f"95% band of this learning rate: {low:.2g} to {high:.2g}")
    for name, value in (("total_tokens", T), ("batch_tokens", batch_tokens)):
        if name in law and outside(name, value, law[name]):
            lines.append(outside(name, value, law[name]))

    # 2. Which settings did the sweep have?
    had = [f"sequences of {law['seq_len']:g} tokens"]
    if law.get("warmup_tokens") is not None:
        had.append(f"a warmup of {law['warmup_tokens']:,} tokens")
    if law.get("fingerprint"):
        had.append(f"a text with fingerprint {law['fingerprint']}")
    lines.append(f"the sweep had {', '.join(had)}")
    if seq_len != law["seq_len"]:
        lines.append(f"it has no sequences of {seq_len:g} tokens; its beta counts tokens")

    # 3. Which runs follow it?
    if law.get("flags") is not None:
        lines.append("runs with all its settings that are not defaults of train.py:")
        lines += commands(law, T, batch_size, seq_len)
    elif "total_tokens" in law:  # its rows come from elsewhere, without settings
        lines.append("schedules in the flags of train.py:")
        lines += schedules_of(law, T, batch_tokens)
    return lines


def report_prediction(args) -> None:
    """Print the learning rate for --predict, and the rest to standard error. Raises UserError."""
    if args.law == "paper":
        law = PAPER_LAW | {"seq_len": PAPER_SEQ_LEN}
    else:
        law = read_law(args.law)
    seq_len = law["seq_len"] if args.seq_len is None else args.seq_len
    numbers = {
        "total_tokens": args.total_tokens,
        "batch_size": args.batch_size,
        "seq_len": seq_len,
    }
    for name, value in numbers.items():
        if value is None or not 0 < value < math.inf:
            raise UserError(f"--{name} {value}: --predict needs a number above 0")
    # alone on standard output, so that lr=$(python fit.py --predict ...) works
    print(f"{predict(law, args.total_tokens, args.batch_size * seq_len):.2g}")
    if args.law != "paper":
        for line in advice(law, args.total_tokens, args.batch_size, seq_len):
            print(line, file=sys.stderr)


# -- The report of a sweep of WSD: the law -----------------------------------------------


def label(m: Minimum, field: str) -> str:
    """T or the batch size of a minimum, in words."""
    if field == "T":
        return f"T = {figures.size(m.T)}"
    return f"batch size {m.batch_size:g}"


def middle_shape(found: list[Minimum]) -> list[Minimum]:
    """The minima of one shape, in the middle between narrow and wide."""
    shapes = list(dict.fromkeys(m.shape for m in found))
    middle = shapes[len(shapes) // 2]
    return [m for m in found if m.shape == middle]


def print_law(readings: dict[str, Law], paper: tuple, step_law: np.ndarray) -> None:
    """Print the law as several readings of the same runs give it. The first is ours."""
    print("lr = a beta^q T^b, 95% intervals")
    for name, law in readings.items():
        print(f"{name:<29} b {show(law.b)}  q {show(law.q)}")

    ours = next(iter(readings.values()))
    b_paper, s, _ = paper
    expected = ours.b[0] + (ours.q[0] - 1) * s[0]
    print(f"{'paper, three best batches':<29} b {show(b_paper)}  q 1")
    print(
        f"    beta grows as T^{s[0]:.2f} there, "
        f"and b + (q - 1) {s[0]:.2f} = {expected:.3f}"
    )
    print(f"{'Step Law, best batch':<29} b {show(step_law)}")

    first = next(iter(ours.a.values()))
    for shape, a in ours.a.items():
        ratio = show(np.log2(a / first), 2, log2=True)
        print(f"{shape}: a {a[0]:.3g}, {ratio} times the first")


def point(
    at: float,
    x: np.ndarray,
    weight: np.ndarray,
    line: float | None = None,
) -> tuple:
    """A point for figures.draw_points: the x of a minimum with its standard error.

    x and weight are its rows. For two seeds, the error reaches about as far as their
    separate minima. (95% of Student's t would be 13 times as much.) Without a line, the
    line goes through the point.
    """
    rows = rows_of_minimum(x, weight)
    error, _ = error_of(rows)
    if line is None:
        line = x[0]
    return math.log2(at), x[0], x[0] - error, x[0] + error, line


def rows_of_minimum(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [rows] of one minimum, NaN without all of it, or nothing of it."""
    return where_left_out(np.where(weight > 0, x, math.nan), weight[:, None])


def draw_law(path: Path, fits: Fits, seq_len: float) -> None:
    """The law of the shape with most minima, with a ring at the best batch sizes of every T."""
    shape = statistics.mode(m.shape for m in fits.points)
    groups: dict = {}
    for i, m in enumerate(fits.points):
        if m.shape == shape:
            fitted = fits.law.fitted[0, i]
            here = point(m.batch_size, fits.x[:, i], fits.weight[:, i], fitted)
            groups.setdefault(label(m, "T"), []).append(here)
    three_best: dict = {}  # label of T -> (log2 of the batch size, x) of the three best
    for m in best_batches(fits.points, 3):
        if m.shape == shape:
            best = math.log2(m.batch_size), m.x
            three_best.setdefault(label(m, "T"), []).append(best)
    figures.draw_points(
        path,
        groups,
        figures.shades(groups, "tokens"),
        title="Rings: mean of the three best batch sizes for each T",
        xlabel=f"batch size (sequences of {seq_len:g} tokens), {shape}",
        best={name: np.mean(three, axis=0) for name, three in three_best.items()},
    )


def draw_valleys(path: Path, found: list[Minimum]) -> None:
    """Valleys of the middle shape by T, and by batch size at the longest T."""
    some = middle_shape(found)  # in order of T, then of batch size
    longest = [m for m in some if m.T == some[-1].T]
    best = min(longest, key=attrgetter("loss"))
    by_T = [m for m in some if m.batch_size == best.batch_size]
    panels = [
        panel_of_valleys(by_T, "T", "tokens", fixed="batch_size"),
        panel_of_valleys(longest, "batch_size", "batch size", fixed="T"),
    ]
    figures.draw_valleys(path, panels)


def panel_of_valleys(row: list[Minimum], field: str, words: str, fixed: str) -> dict:
    """A panel of minima that differ only in `field`. The axis label has `fixed`.

    words: the name of `field` in the title.
    """
    first = row[0]
    last = row[-1]
    longer = getattr(last, field) / getattr(first, field)
    moved = 2 ** (last.x - first.x)
    return dict(
        groups={label(m, field): [m] for m in row},
        title=f"{longer:.0f}× the {words}, {moved:.2g}× the best learning rate",
        xlabel=f"learning rate ({first.shape}, {label(first, fixed)})",
        hue="tokens" if field == "T" else "batch size",
        log=True,
    )


def report_wsd(records: list[dict], out: Path) -> None:
    """Print the law, write law.json, draw the figures, and print advice for a run."""
    fits = fits_of(records)
    content = as_json(fits, records)
    readings = {"cubic through 7 rates": fits.law}
    for window in (5, 7):
        points = usable(parabolas(records, window))
        if points:
            x, weight = leave_out(points)
            readings[f"parabola through {window} rates"] = fit_law(points, x, weight)

    left_out = reasons(fits.found) or "none"
    print(f"{len(records):,} runs, {len(fits.found)} cells; left out: {left_out}\n")
    print_law(readings, fits.paper, step_law_reading(fits.found))

    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "law.json", content)
    draw_valleys(out / "valleys.png", fits.points)
    draw_law(out / "law.png", fits, records[0]["seq_len"])
    print(f"\n{out}: law.json, valleys.png, law.png")
    print_advice(content, fits.points, out)


def print_advice(law: dict, points: list[Minimum], out: Path) -> None:
    """Print the commands of runs four times as long as the longest, at the best batch size."""
    longest = [m for m in points if m.T == law["total_tokens"][1]]
    batch_size = min(longest, key=attrgetter("loss")).batch_size
    T = 4 * longest[0].T
    lr = predict(law, T, batch_size * law["seq_len"])
    where = f"T = {figures.size(T)} and batch size {batch_size:g}"
    print(f"\nFor {where}, the law has learning rate {lr:.2g}.")
    for line in advice(law, T, batch_size, law["seq_len"]):
        print(line)
    file = shlex.quote(str(out / "law.json"))
    print(
        "for other values: python fit.py --predict --total_tokens T --batch_size B "
        f"--law {file}"
    )


# -- The report of a sweep over widths, with and without muP -----------------------------


def width_of(shape: str) -> int:
    """'width 128, 8 experts' -> 128"""
    return int(shape.split()[1].strip(","))


def report_transfer(
    found: list[Minimum], x: np.ndarray, weight: np.ndarray, out: Path
) -> None:
    """Print and draw the best learning rate of every width, with and without muP.

    x and weight: all rows of the minima, from leave_out.
    """
    best = {}  # shape -> log2 of the best learning rate, in all rows
    for i, m in enumerate(found):
        best[m.shape] = rows_of_minimum(x[:, i], weight[:, i])
    if len(best) < len(found):
        raise UserError("several T or batch sizes; choose one with --only")

    where = f"{label(found[0], 'T')}, {label(found[0], 'batch_size')}"
    print(f"{where}; best learning rates")
    panels = []
    for title, standard in (("Without μP", True), ("With μP", False)):
        some = [m for m in found if (STANDARD in m.shape) == standard]
        names = [m.shape.removesuffix(STANDARD) for m in some]
        for name, m in zip(names, some):
            print(f"{title:<11}{name:<10} {show(best[m.shape], 4, log2=True)}")
        ratio = best[some[-1].shape] - best[some[0].shape]
        print(f"{title:<11}{names[-1]} / {names[0]}: {show(ratio, 2, log2=True)}")

        wider = width_of(names[-1]) / width_of(names[0])
        panel = dict(
            groups={name: [m] for name, m in zip(names, some)},
            title=f"{title}: {wider:g}× width, {2 ** ratio[0]:.2f}× the best learning rate",
            xlabel=f"learning rate ({where})",
            hue="width",
            log=True,
        )
        panels.append(panel)
    figures.draw_valleys(out / "transfer.png", panels)
    print(f"\n{out}: transfer.png")


# -- The report of a sweep of Power: its best a and b ------------------------------------


def scans(records: list[dict]) -> tuple[dict[str, list[Minimum]], dict]:
    """Minima of the runs of Power that only differ in a or in b, and the common a and b."""
    a = statistics.mode(r["power_a"] for r in records)
    b = statistics.mode(r["power_b"] for r in records)

    def log2_a_of(record: dict) -> float:
        return math.log2(record["power_a"])

    def b_of(record: dict) -> float:
        return record["power_b"]

    over_a = parabolas([r for r in records if r["power_b"] == b], x_of=log2_a_of)
    over_b = parabolas([r for r in records if r["power_a"] == a], x_of=b_of)
    return {"a": over_a, "b": over_b}, {"a": a, "b": b}


def report_power(records: list[dict], out: Path) -> None:
    """Print and draw the best a and b."""
    found, center = scans(records)
    panels = []
    for name in ("a", "b"):
        if not usable(found[name]):
            raise UserError(f"no best {name}: {reasons(found[name])}")
        print_best(name, found[name])
        panels.append(panel_of_best(name, found[name], center))
    figures.draw_valleys(out / "power.png", panels)
    print(f"{out}: power.png")


def value_at(name: str, x: float) -> float:
    """a or b from the x of a minimum, which is log2 a, or b."""
    return 2**x if name == "a" else x


def print_best(name: str, found: list[Minimum]) -> None:
    """Print the best a or b, a row for every T and a column for every batch size."""
    best: dict = {}  # (T, batch size) -> the best values, of all shapes and seeds
    for m in usable(found):
        best.setdefault((m.T, m.batch_size), []).append(value_at(name, m.x))
    batches = sorted({m.batch_size for m in found})

    print(f"best {name}, mean over seeds; left out: {reasons(found) or 'none'}")
    print(f"{'T':>8} " + "".join(f"{f'batch {B:g}':>11}" for B in batches))
    for T in sorted({m.T for m in found}):
        means = [np.mean(best.get((T, B), math.nan)) for B in batches]
        print(f"{figures.size(T):>8} " + "".join(f"{mean:11.3f}" for mean in means))
    every = [value_at(name, m.x) for m in usable(found)]
    mean = np.mean(every)
    print(f"all {len(every)}: mean {mean:.3f}, standard deviation {np.std(every):.3f}\n")


def panel_of_best(name: str, found: list[Minimum], center: dict) -> dict:
    """A panel with the valleys of the middle shape at the longest T."""
    longest = max(m.T for m in found)
    some = [m for m in middle_shape(found) if m.T == longest]
    groups: dict = {}
    for m in some:  # in order of batch size
        groups.setdefault(label(m, "batch_size"), []).append(m)

    best = []
    for seeds in groups.values():
        x = [m.x for m in usable(seeds)]
        best.append(value_at(name, np.mean(x)) if x else math.nan)
    other = "b" if name == "a" else "a"
    where = f"{other} = {center[other]:g}, T = {figures.size(longest)}, {some[0].shape}"
    return dict(
        groups=groups,
        title=f"The best {name} is {np.nanmin(best):.2g} to {np.nanmax(best):.2g}",
        xlabel=f"{name} ({where})",
        hue="batch size",
        log=name == "a",
        unit=1,
    )


# -- Command line ------------------------------------------------------------------------


def report_records(records: list[dict], out: Path) -> None:
    """Recognize the experiment by its schedules, and report it."""
    schedules = {r["schedule"] for r in records}
    standard = {STANDARD in r["shape"] for r in records}
    if schedules >= {"cosine", "power", "wsd"}:
        from compare import comparison  # which imports this file

        comparison(records, out)
    elif schedules == {"power"}:
        report_power(records, out)
    elif schedules != {"wsd"}:
        raise UserError(
            f"no report for schedules {sorted(schedules)}; is the sweep running? "
            "Or choose one, as in --only schedule=wsd"
        )
    elif standard == {True, False}:  # with and without muP
        found = minima(records)
        x, weight = leave_out(found)
        report_transfer(found, x, weight, out)
    else:
        report_wsd(records, out)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("fit.py", __doc__)
    add = parser.add_argument
    add("folders", type=Path, nargs="*", help="folders with the records of a sweep")
    add(
        "--out",
        type=Path,
        help="folder for law.json and figures (default: folder of the runs)",
    )
    add(
        "--only",
        action="append",
        default=[],
        metavar="FIELD=V,...",
        help="leave out other runs",
    )
    add(
        "--predict",
        action="store_true",
        help="print the best learning rate for T and batch size",
    )
    add("--total_tokens", type=flags.whole_number, help="run length T, for --predict")
    add("--batch_size", type=float, help="sequences per optimizer step, for --predict")
    add(
        "--seq_len",
        type=float,
        help="tokens per sequence (default: as in --law; else 4096)",
    )
    add(
        "--law",
        default="paper",
        help="for --predict, paper or a law.json (default: paper)",
    )
    args = parser.parse_args(argv)
    if not (args.folders or args.predict):
        parser.error("name the folder of a sweep, or --predict; see --help")
    try:
        if args.predict:
            report_prediction(args)
        else:
            first = args.folders[0]
            out = args.out or (first.parent if first.is_file() else first)
            report_records(read_rows(args.folders, args.only), out)
    except (UserError, OSError) as error:
        return flags.fail("fit.py", error)
    return 0


if __name__ == "__main__":
    flags.end_with_reader()
    sys.exit(main())
