"""The law behind a sweep: losses -> best learning rates -> a power law with intervals ->
prediction.

    python fit.py runs/wsd-quick                         the law, law.json, figures
    python fit.py runs/bend --only warmup_tokens=5000    of some of the runs
    python fit.py runs.csv --columns lr=learning_rate,val_loss=val/loss
    python fit.py --predict --total_tokens 10e12 --batch_size 1024
    python fit.py --predict --total_tokens 1e7 --batch_size 8 --law runs/wsd-quick/law.json

The first ends with commands of runs that follow the law. The third reads a table from
elsewhere (docs/elsewhere.md). The fourth prints the best learning rate under the paper's
law. The last does this under your law, and adds the commands.

We fixed this procedure before the runs of bend-laptop (research/methods.md):

1. A *cell* is a shape, a run length T and a batch size. Average its losses over the
   seeds. Fit a cubic in log lr to the 7 learning rates nearest the lowest loss, and take
   its minimum. We leave a cell out, and count it, if this is impossible.
2. The law, log lr = log a + b log T + q log beta, is least squares over all cells, with
   one a per shape.
3. Intervals measure how far the law moves without one batch size, and without one seed.
   The two variances add up, and the interval is 95% of Student's t. An answer that needs
   some batch size or seed has no interval.
4. The paper reads b off the three best batch sizes of every T, with q = 1. Step Law takes
   the best one.

T counts tokens, beta sequences of 4096 tokens, as in schedules.py. An *answer*, such as
b, is a plain function of cells. Its interval comes from calling it again with fewer cells
or seeds. Notebooks call fit.law_of(rows). report.py prints and draws.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from records import narrow_first, read_rows, rows_of
from schedules import PAPER_SEQ_LEN, best_lr, paper_batch_size
from tools import files, flags
from tools.flags import UserError

# -- 1. A valley and its bottom ----------------------------------------------------------
#
# A valley is a tuple of points (x, loss) in order of x, with x = log2 lr. Its bottom is
# the best learning rate. The loss of a diverged run is inf.


def lowest(points: tuple) -> tuple:
    """The point with the lowest loss, the left one of two."""
    return min(points, key=itemgetter(1))


def nearest(points: tuple, n: int) -> list[tuple]:
    """The n points nearest the lowest, in order of x. If two are equally near, the left."""
    middle, _ = lowest(points)

    def distance(point: tuple) -> float:
        return round(abs(point[0] - middle), 2)  # equal for equal steps to both sides

    return sorted(sorted(points, key=distance)[:n])


@lru_cache(maxsize=2**14)  # an answer without one batch size keeps all other valleys
def vertex(points: tuple, degree: int = 3, window: int = 7) -> tuple[float, str]:
    """The x of the minimum, and why it is unusable, or "".

    We fit a cubic, because our valleys are steeper on one side. This biases a parabola
    (degree 2).
    """
    # 1. The lowest point needs neighbors on both sides.
    if not points:
        return math.nan, "no common learning rate"
    x_lowest, loss_lowest = lowest(points)
    if math.isinf(loss_lowest):
        return x_lowest, "all diverged"
    if x_lowest in (points[0][0], points[-1][0]):
        return x_lowest, "at an edge"

    # 2. Fit the curve to the points near it that did not diverge, two more than it needs.
    near = [(x, loss) for x, loss in nearest(points, window) if math.isfinite(loss)]
    if len(near) < degree + 2:
        return x_lowest, f"fewer than {degree + 2} losses"
    x, loss = np.array(near).T
    curve = np.polyfit(x - x_lowest, loss, degree)

    # 3. At a minimum the first derivative of the curve is 0, and the second positive. A
    #    curve that dips far below all its points has its minimum in a gap between them.
    first = np.polyder(curve)
    second = np.polyder(first)
    for root in np.roots(first):
        bottom = x_lowest + root.real
        is_minimum = root.imag == 0 and np.polyval(second, root.real) > 0
        if is_minimum and x[0] <= bottom <= x[-1]:
            dip = loss_lowest - np.polyval(curve, root.real)
            if dip > (loss.max() - loss_lowest) / 4:  # up to 0.15 in all our valleys
                return x_lowest, "curve below its points"
            return bottom, ""
    return x_lowest, "no valley"


# -- 2. Cells ----------------------------------------------------------------------------


class Cell(NamedTuple):
    """All losses at one shape, run length and batch size."""

    shape: str
    T: float
    batch_size: float
    beta: float  # the batch size in sequences of 4096 tokens
    losses: dict  # seed -> {x: loss}
    degree: int = 3  # of the curve through its valley
    window: int = 7  # points that the curve goes through


def cells_of(rows: list[dict], by_seed: bool = False, tuned: str = "lr") -> list[Cell]:
    """The cells of all runs, narrow to wide, or a cell for every seed.

    tuned: the field whose best value we look for. x is its log2, except for power_b.

    The seeds of a cell keep the learning rates that all of them have, so that their mean
    is of the same seeds everywhere. Raises UserError if two runs are equal, or if some
    seeds are words, which a table from elsewhere may have, and some are numbers.
    """
    if len({isinstance(row["seed"], str) for row in rows}) > 1:
        raise UserError("some seeds are words and some are numbers; use only one kind")
    found: dict = {}  # (shape, T, batch size, seed or None) -> its cell
    for row in rows:
        beta = paper_batch_size(row["batch_size"] * row["seq_len"])
        cell = Cell(row["shape"], row["total_tokens"], row["batch_size"], beta, {})
        name = *cell[:3], row["seed"] if by_seed else None
        losses = found.setdefault(name, cell).losses.setdefault(row["seed"], {})
        x = row[tuned]
        if tuned != "power_b":  # an exponent already
            x = math.log2(x)
        if x in losses:
            raise UserError(f"{cell[:3]}: two runs have the same learning rate and seed")
        losses[x] = row["loss"]
    for cell in found.values():
        common = set.intersection(*map(set, cell.losses.values()))
        for seed, losses in cell.losses.items():
            cell.losses[seed] = {x: losses[x] for x in sorted(common)}
    return [found[name] for name in sorted(found, key=narrow_first)]


def valley(cell: Cell) -> tuple:
    """The points (x, mean loss over the seeds), in order of x."""
    seeds = list(cell.losses.values())
    points = []
    for x in seeds[0]:
        total = sum(losses[x] for losses in seeds)
        points.append((x, total / len(seeds)))
    return tuple(points)


def lowest_loss(cell: Cell) -> float:
    """The lowest mean loss of a cell."""
    return min((loss for _, loss in valley(cell)), default=math.inf)


def bottom(cell: Cell) -> tuple[float, str]:
    """log2 of the best learning rate of a cell, and why it is unusable, or ""."""
    return vertex(valley(cell), cell.degree, cell.window)


def minima(cells: list[Cell]) -> list[tuple]:
    """(cell, log2 of its best learning rate) for every cell that has one."""
    found = []
    for cell in cells:
        x, why_not = bottom(cell)
        if not why_not:
            found.append((cell, x))
    return found


def reasons(cells: list[Cell]) -> str:
    """Why cells are left out, with their numbers; "" if none is."""
    why_not = Counter(bottom(cell)[1] for cell in cells)
    return ", ".join(f"{n} {why}" for why, n in why_not.items() if why)


# -- 3. The law, by least squares --------------------------------------------------------


class Law(NamedTuple):
    """log2 lr = log2_a of the shape + b log2 T + q log2 beta."""

    b: float
    q: float
    log2_a: dict[str, float]  # shape -> value


def least_squares(y: list, columns: list[list], groups: list) -> tuple[list, dict]:
    """Fit y by a sum of columns, each times a coefficient, and a constant for every group.

    Returns the coefficients and {group: constant}, all NaN if many fit equally well. y and
    groups have n values, and so has every column.
    """
    names = list(dict.fromkeys(groups))  # without doubles, in order
    design = list(columns)
    for name in names:
        design.append([float(group == name) for group in groups])
    design = np.array(design, float).T  # [n, columns + groups]
    solution, _, rank, _ = np.linalg.lstsq(design, np.array(y, float), rcond=1e-6)
    if rank < design.shape[1]:
        solution[:] = math.nan
    k = len(columns)
    return solution[:k].tolist(), dict(zip(names, solution[k:].tolist()))


def fit_law(cells: list[Cell]) -> Law:
    """The law of all cells. Its values are NaN if T and beta vary together."""
    found = minima(cells)
    best = [x for _, x in found]
    T = [math.log2(cell.T) for cell, _ in found]
    beta = [math.log2(cell.beta) for cell, _ in found]
    shapes = [cell.shape for cell, _ in found]
    (b, q), log2_a = least_squares(best, [T, beta], shapes)
    return Law(b, q, log2_a)


def mean_log2_lr(cells: list[Cell]) -> float:
    """Mean of log2 of the best learning rates of cells; NaN if none has one."""
    best = [x for _, x in minima(cells)]
    return sum(best) / len(best) if best else math.nan


# -- 4. Intervals, by leaving out one thing at a time ------------------------------------
#
# How far does an answer move without one batch size, and how far without one seed? A
# *pair* is a shape and a batch size. All T of a pair share the trunks of their runs, so
# they are left out together.


def pair_of(cell: Cell) -> tuple:
    return cell.shape, cell.batch_size


def without_pair(cells: list[Cell], pair: tuple) -> list[Cell]:
    return [cell for cell in cells if pair_of(cell) != pair]


def without_seed(cells: list[Cell], seed) -> list[Cell]:
    """The cells without the losses of a seed. A cell with no other seed is left out."""
    found = []
    for cell in cells:
        losses = {s: some for s, some in cell.losses.items() if s != seed}
        if losses:
            found.append(cell._replace(losses=losses))
    return found


class Estimate(NamedTuple):
    """An answer, and the same answer without one pair and without one seed at a time."""

    answer: float
    without_pairs: list
    without_seeds: list


def jackknife(
    cells: list[Cell], answer: Callable, used: list[Cell] | None = None
) -> Estimate:
    """Answer a question from all cells, and again without every pair and every seed.

    used: the cells on which the answer depends, if not on all. Without the others, it
    would stay as it is, which looks as if it were certain.
    """
    used = used or cells
    pairs = several({pair_of(cell) for cell in used})
    seeds = several(set().union(*(cell.losses for cell in used)))
    return Estimate(
        answer(cells),
        [answer(without_pair(cells, pair)) for pair in pairs],
        [answer(without_seed(cells, seed)) for seed in seeds],
    )


def several(values) -> list:
    """The values in order, or none of one: without it, nothing is left."""
    return sorted(values) if len(values) > 1 else []


def apply(function: Callable, *estimates: Estimate) -> Estimate:
    """A function of answers that leave out the same things, such as their difference."""
    answers, without_pairs, without_seeds = zip(*estimates)
    return Estimate(
        function(*answers),
        list(map(function, *without_pairs)),
        list(map(function, *without_seeds)),
    )


def mean_of(values: np.ndarray) -> Estimate:
    """The mean of values [pairs, seeds]. NaN is a missing value."""
    pairs, seeds = [several(range(n)) for n in values.shape]
    without_pairs = [np.nanmean(np.delete(values, i, axis=0)) for i in pairs]
    without_seeds = [np.nanmean(np.delete(values, i, axis=1)) for i in seeds]
    return Estimate(np.nanmean(values), without_pairs, without_seeds)


def error_of(estimate: Estimate) -> tuple[float, float]:
    """The standard error of an answer, and the degrees of freedom of this error.

    The variance without one pair at a time, plus the variance without one seed at a time.
    Their sum is a little too large, because both contain the variation with both. An
    answer that cannot do without some pair or seed is NaN there. Then the error is NaN,
    because we cannot see how far the answer would move. Source: Tukey (1958), the
    jackknife. For a mean, both are the usual variance over n.
    """
    variance = 0.0
    below = 0.0
    for without in (estimate.without_pairs, estimate.without_seeds):
        answers = np.array(without, float)
        n = len(answers)
        if not np.isfinite(answers).all():
            return math.nan, 0.0
        if n > 1:
            part = (n - 1) * answers.var()  # as n means of n - 1 values vary little
            variance += part
            below += part**2 / (n - 1)
    freedom = variance**2 / below if below > 0 else 0.0  # Welch, Satterthwaite
    return math.sqrt(variance), freedom


def student(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Many t > 0 in order, and the share of Student's t that lies between -t and t."""
    # With t = sqrt(freedom) tan(angle), the density of the angle is a power of its cosine.
    n = 20_000
    step = math.pi / 2 / n
    middles = step * (np.arange(n) + 0.5)
    share = np.cumsum(np.cos(middles) ** (freedom - 1))
    t = math.sqrt(freedom) * np.tan(middles + step / 2)
    return t, share / share[-1]


def interval(estimate: Estimate) -> tuple[float, float]:
    """95% of Student's t around an answer. NaN if nothing varies, or if we cannot see it."""
    error, freedom = error_of(estimate)
    if freedom == 0:
        return math.nan, math.nan
    t, share = student(freedom)
    half = error * np.interp(0.95, share, t)
    return float(estimate.answer - half), float(estimate.answer + half)


def show(estimate: Estimate, digits: int = 3, log2: bool = False) -> str:
    """An answer and its interval. With log2, the estimate is log2 of the answer.

    We say so if there is no interval because the answer needs some pair or seed. A single
    seed in a single cell simply has none.
    """
    low, high = np.round(interval(estimate), 9)  # without differences of mere rounding
    answer = estimate.answer
    if log2:
        answer, low, high = np.exp2([answer, low, high])
    text = f"{answer:.{digits}f}"
    error, _ = error_of(estimate)
    if math.isnan(error):
        text += " (no interval)"
    elif low < high:
        text += f" [{low:.{digits}f}, {high:.{digits}f}]"
    return text


# -- 5. How the papers read it -----------------------------------------------------------


def best_batches(cells: list[Cell], n: int) -> list[Cell]:
    """The cells with the n lowest losses of every shape and T, among those with a minimum."""
    groups: dict = {}
    for cell, _ in minima(cells):
        groups.setdefault((cell.shape, cell.T), []).append(cell)
    best = []
    for some in groups.values():
        best += sorted(some, key=lowest_loss)[:n]
    return best


def paper_law(cells: list[Cell]) -> tuple[float, float]:
    """b and a of the paper: lr = a beta T^b in the three best batch sizes of every T."""
    found = minima(best_batches(cells, 3))
    log2_ratio = [x - math.log2(cell.beta) for cell, x in found]  # of lr / beta
    T = [math.log2(cell.T) for cell, _ in found]
    (b,), log2_a = least_squares(log2_ratio, [T], ["all shapes"] * len(T))
    return b, 2 ** log2_a.get("all shapes", math.nan)


def paper_b(cells: list[Cell]) -> float:
    b, _ = paper_law(cells)
    return b


def growth(cells: list[Cell]) -> float:
    """s in beta ∝ T^s in the three best batch sizes of every T.

    If lr = a beta^q T^b is exact, the paper's b is b + (q - 1) s.
    """
    best = best_batches(cells, 3)
    beta = [math.log2(cell.beta) for cell in best]
    T = [math.log2(cell.T) for cell in best]
    (s,), _ = least_squares(beta, [T], ["all shapes"] * len(T))
    return s


def step_law_b(cells: list[Cell]) -> float:
    """Exponent of T at the best batch size. If the law is exact, this is b + q s there."""
    found = minima(best_batches(cells, 1))
    best = [x for _, x in found]
    T = [math.log2(cell.T) for cell, _ in found]
    (b,), _ = least_squares(best, [T], [cell.shape for cell, _ in found])
    return b


def reading(cells: list[Cell], answer: Callable, n: int) -> Estimate:
    """The estimate of an answer that uses only the n best batch sizes of every T."""
    return jackknife(cells, answer, used=best_batches(cells, n))


def best_batch(cells: list[Cell], T: float) -> float:
    """log2 of the batch size with the lowest loss at T, also beyond the sweep; NaN if unclear.

    The bottom of a parabola in log2 of the batch size, through the losses of the three
    best of every T. It moves in proportion to log T.
    """
    best = best_batches(cells, 3)
    loss = [lowest_loss(cell) for cell in best]
    batch = np.array([math.log2(cell.batch_size) for cell in best])
    later = np.array([math.log2(cell.T / T) for cell in best])
    (slope, moves, curvature), _ = least_squares(
        loss, [batch, batch * later, batch**2], [(cell.shape, cell.T) for cell in best]
    )
    return -slope / (2 * curvature) if curvature > 0 else math.nan


# -- 6. From rows to law.json ------------------------------------------------------------


def fitted_cells(rows: list[dict]) -> list[Cell]:
    """The cells that have a minimum. Raises UserError if they do not determine a, b and q."""
    cells = cells_of(rows)
    found = [cell for cell, _ in minima(cells)]
    if not math.isfinite(fit_law(found).b):
        if all(math.isinf(lowest_loss(cell)) for cell in cells):
            raise UserError(f"all {len(rows):,} runs diverged; try lower learning rates")
        raise UserError(
            f"{len(found)} of {len(cells)} minima usable, left out: {reasons(cells) or 0}; "
            "a law needs two run lengths and two batch sizes in one shape"
        )
    return found


def law_of(rows: list[dict]) -> dict:
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
    return as_json(fitted_cells(rows), rows[0])


def as_json(cells: list[Cell], row: dict) -> dict:
    """The content of law.json. Its a is the geometric mean over the shapes.

    row: a run of the sweep, for the settings that all have.
    """
    shapes = {cell.shape for cell in cells}

    def numbers(some: list[Cell]) -> list[float]:
        """log2 a, b and q. Without one of the shapes, there is no mean a."""
        found = fit_law(some)
        log2_a = [found.log2_a.get(shape, math.nan) for shape in shapes]
        return [np.mean(log2_a), found.b, found.q]

    laws = jackknife(cells, numbers)
    estimates = {name: apply(itemgetter(i), laws) for i, name in enumerate("abq")}
    estimates["b_paper"] = reading(cells, paper_b, 3)
    content = {name: estimate.answer for name, estimate in estimates.items()}
    for name, estimate in estimates.items():
        low, high = interval(estimate)
        content[f"{name}_interval"] = None if math.isnan(low) else [low, high]
    content["a"] = 2 ** content["a"]
    if content["a_interval"]:
        content["a_interval"] = [2**end for end in content["a_interval"]]
    _, content["a_paper"] = paper_law(cells)
    content["rule"] = "cubic through 7 rates of mean losses"
    for name in ("seq_len", "warmup_tokens", "fingerprint"):
        content[name] = row.get(name)
    # the range of the sweep
    lengths = [cell.T for cell in cells]
    batches = [cell.beta * PAPER_SEQ_LEN for cell in cells]
    content["total_tokens"] = [min(lengths), max(lengths)]
    content["batch_tokens"] = [min(batches), max(batches)]
    # for `band`: log2 a, b and q
    content["without_pairs"] = laws.without_pairs
    content["without_seeds"] = laws.without_seeds
    return files.nan_to_none(content)


# -- 7. Prediction -----------------------------------------------------------------------


def predict(law: dict, total_tokens: float, batch_tokens: float) -> float:
    """Best constant learning rate of a WSD run, equation 6 of the paper with beta^q for beta."""
    return best_lr(total_tokens, paper_batch_size(batch_tokens), law)


def band(law: dict, total_tokens: float, batch_tokens: float) -> tuple[float, float]:
    """The 95% interval of a prediction; NaN if the law has none.

    It widens with the distance from the sweep, but assumes that the law does not bend.
    """

    def log2_lr_of(numbers: list) -> float:
        log2_a, b, q = np.array(numbers, float)  # null becomes NaN
        beta = paper_batch_size(batch_tokens)
        return log2_a + b * math.log2(total_tokens) + q * math.log2(beta)

    ours = [math.log2(law["a"]), law["b"], law["q"]]
    laws = Estimate(ours, law.get("without_pairs", []), law.get("without_seeds", []))
    low, high = np.round(interval(apply(log2_lr_of, laws)), 9)  # as in show
    return 2**low, 2**high


def read_law(path: str) -> dict:
    """The content of a law.json. Raises UserError if it is not one."""
    try:
        law = json.loads(Path(path).read_text())
        predict(law, 1.0, float(law["seq_len"]))  # to see that all is there
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"--law {path}: not a law.json that fit.py wrote") from None
    return law


# -- Command line ------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    import report  # which imports this file

    parser = flags.program_parser("fit.py", __doc__)
    add = parser.add_argument
    add(
        "folders",
        type=Path,
        nargs="*",
        help="folders with the records of sweeps, or a CSV file",
    )
    add(
        "--columns",
        default="",
        metavar="OURS=THEIRS,...",
        help="columns of a CSV file, as in lr=learning_rate,val_loss=val/loss",
    )
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
    size = "sequences per optimizer step, for --predict"
    add("--batch_size", type=flags.whole_number, help=size)
    add(
        "--seq_len",
        type=flags.whole_number,
        help="tokens per sequence, for --predict (default: as in --law; else 4096)",
    )
    add("--law", help="law.json, for --predict (default: the law of the paper)")
    args = parser.parse_args(argv)
    if not (args.folders or args.predict):
        parser.error("name the folder of a sweep, or --predict; see --help")
    of_prediction = ("total_tokens", "batch_size", "seq_len", "law")
    of_report = ("folders", "columns", "out", "only")
    for name in of_report if args.predict else of_prediction:
        if getattr(args, name):
            flag = name if name == "folders" else f"--{name}"
            how = "with" if args.predict else "without"
            parser.error(f"{flag}: has no effect {how} --predict")
    try:
        if args.predict:
            report.report_prediction(args)
        else:
            first = args.folders[0]
            out = args.out or (first.parent if first.is_file() else first)
            rows = read_rows(args.folders, args.only, args.columns)
            report.report(rows, out, report.read_sweep(args.folders))
    except (UserError, OSError) as error:
        return flags.fail("fit.py", error)
    return 0


if __name__ == "__main__":
    flags.end_with_reader()
    sys.exit(main())
