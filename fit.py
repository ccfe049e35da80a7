"""The law behind a sweep: losses -> best learning rates -> power law with intervals ->
prediction.

    python fit.py runs/wsd-quick                     the law, law.json, figures
    python fit.py runs/bend --only warmup_tokens=5000                    of some of the runs
    python fit.py --predict --total_tokens 10e12 --batch_size 1024       the paper's learning rate

We fixed this procedure before the runs of results/bend-laptop (docs/bend.md):

1. A *cell* is a shape, a run length T and a batch size. Average its losses over the
   seeds. Its minimum is that of a cubic in log lr, fitted to the 7 learning rates nearest
   the lowest loss. We leave a cell out, and count it, if this is impossible.
2. The law, log lr = log a + b log T + q log beta, is least squares over all cells, with
   one a per shape. (docs/bent.py asks whether a law that flattens at large batch sizes is
   better.)
3. The paper reads b off the three best batch sizes of every T, with q = 1. Step Law takes
   one.
4. Intervals hold 95% of 2,000 draws. A draw takes whole series again, with replacement. A
   *series* is a shape, a batch size and a seed, because its runs share trunks.

T counts tokens, beta sequences of 4096 tokens, as in schedules.py. Notebooks call
fit.law(rows).
"""

import json
import math
import statistics
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from records import STANDARD, complete, loss_of, narrow_first, read_records, shape_of
from schedules import PAPER_LAW, PAPER_SEQ_LEN, best_lr, paper_batch_size
from tools import figures, flags
from tools.figures import size
from tools.flags import UserError

DRAWS = 2000

# -- From losses to a minimum ------------------------------------------------------------


class Minimum(NamedTuple):
    shape: str
    T: int
    batch_size: float
    beta: float
    seeds: dict  # seed -> {x: loss}, with x = log2 lr (in a scan of Power: log2 a, or b)
    points: list  # all (x, mean loss over the seeds) of the valley, in order of x
    near: list  # those nearest the lowest. The curve was fitted to the finite ones
    rule: tuple[int, int]  # degree of the curve, and through how many points at most
    loss: float  # the lowest one measured
    x: float  # the minimum
    why_not: str  # why it is left out, or nothing


def nearest(points: list[tuple], n: int) -> list[tuple]:
    """The n points nearest the lowest one, in order of x. Of two at equal distance, the
    left."""
    lowest = min(points, key=lambda p: p[1], default=(0, 0))[
        0
    ]  # without points, any number
    return sorted(sorted(points, key=lambda p: round(abs(p[0] - lowest), 2))[:n])


def vertex(points: list[tuple], degree: int = 3, window: int = 7) -> tuple[float, str]:
    """Points (x, loss), loss inf if diverged -> (x of the minimum, why it is unusable, or
    "").

    A parabola (degree 2) is biased, because our valleys are steeper on one side.
    """
    if not points:
        return math.nan, "no common learning rate"
    lowest = min(points, key=lambda p: p[1])[0]
    if lowest in (min(points)[0], max(points)[0]):
        return lowest, "at an edge"
    near = [p for p in nearest(points, window) if math.isfinite(p[1])]
    if len(near) < degree + 2:
        return lowest, f"fewer than {degree + 2} losses"
    x, y = np.array(near).T
    _, c1, c2, c3 = [*np.polyfit(x - lowest, y, degree)[::-1], 0.0][
        :4
    ]  # a parabola has c3 = 0
    # the slope c1 + 2 c2 u + 3 c3 u^2 is 0, and rises, at u = -c1 / (c2 + sqrt(c2^2 - 3
    # c3 c1))
    root = c2**2 - 3 * c3 * c1
    below = c2 + math.sqrt(root) if root >= 0 else 0.0
    at = lowest - c1 / below if below else math.inf
    return (at, "") if x[0] <= at <= x[-1] else (lowest, "no valley")


def mean_valley(seeds: dict, times: list | np.ndarray) -> list[tuple]:
    """Points (x, mean loss over the seeds) at the learning rates that all seeds have.

    times: how often every seed counts.
    """
    drawn = [
        (n, losses) for n, losses in zip(times, seeds.values()) if n
    ]  # 0 * inf would be NaN
    mean = lambda x: sum(n * losses[x] for n, losses in drawn) / sum(times)
    return [(x, mean(x)) for x in sorted(set.intersection(*map(set, seeds.values())))]


def minima(
    records: list[dict], degree: int = 3, window: int = 7, by_seed=False, of=None
) -> list:
    """The best learning rate of every cell, or of every cell and seed, narrow to wide.

    `of` maps a record to x, by default log2 of the learning rate. Raises UserError for
    equal runs.
    """
    of = of or (lambda r: math.log2(r["lr"]))
    cells: dict = {}
    for r in records:
        beta = paper_batch_size(r["batch_size"] * r["seq_len"])
        cell = (
            shape_of(r),
            r["total_tokens"],
            r["batch_size"],
            beta,
            r["seed"] if by_seed else 0,
        )
        losses = cells.setdefault(cell, {}).setdefault(r["seed"], {})
        if of(r) in losses:
            raise UserError(f"{cell[:3]}: two runs have the same learning rate and seed")
        losses[of(r)] = loss_of(r)
    found = []
    for cell in sorted(cells, key=narrow_first):
        points = mean_valley(cells[cell], [1] * len(cells[cell]))
        near, at = nearest(points, window), vertex(points, degree, window)
        lowest = min((loss for _, loss in points), default=math.inf)
        found.append(
            Minimum(*cell[:4], cells[cell], points, near, (degree, window), lowest, *at)
        )
    return found


def parabolas(records: list[dict], window: int = 5, of=None) -> list[Minimum]:
    """Vertices of parabolas, for every cell and seed."""
    return minima(records, 2, window, by_seed=True, of=of)


def usable(found: list[Minimum]) -> list[Minimum]:
    """The minima that are not left out."""
    return [m for m in found if not m.why_not]


def reasons(found: list) -> str:
    """Why minima are left out, with their numbers."""
    why_not = Counter(m.why_not for m in found if m.why_not)
    return ", ".join(f"{n} {why}" for why, n in why_not.items())


# -- From minima to a law ----------------------------------------------------------------


def redraw(found: list[Minimum], rng_seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw series again -> x of all minima and their weights, both [1 + draws, n].

    The first row is the measurement itself. The weight of a minimum counts its seeds.
    """
    return redraw_with_losses(found, rng_seed)[:2]


def redraw_with_losses(found: list[Minimum], rng_seed: int = 0) -> tuple:
    """`redraw`, and the lowest mean loss of every cell, [1 + draws, n]."""
    series = sorted({(m.shape, m.batch_size, seed) for m in found for seed in m.seeds})
    rng, share = np.random.default_rng(rng_seed), np.full(len(series), 1 / len(series))
    times = rng.multinomial(len(series), share, size=DRAWS)
    times = np.vstack([np.ones_like(times[:1]), times])  # [1 + draws, series]
    x = np.tile([m.x for m in found], (len(times), 1))
    weight, loss = np.zeros(x.shape), np.full(x.shape, np.inf)
    for i, m in enumerate(found):
        mine = times[:, [series.index((m.shape, m.batch_size, seed)) for seed in m.seeds]]
        # draws with equal proportions of the seeds have equal valleys, so fit each of
        # these once
        ratios = mine // np.maximum(1, np.gcd.reduce(mine, axis=1))[:, None]
        ratios, index = np.unique(ratios, axis=0, return_inverse=True)
        for k in np.flatnonzero(ratios.any(axis=1)):
            points = mean_valley(m.seeds, ratios[k])
            at, why_not = vertex(points, *m.rule)
            x[index == k, i] = at
            weight[index == k, i] = 0 if why_not else mine[index == k].sum(axis=1)
            loss[index == k, i] = min(y for _, y in points) if points else np.inf
    return x, weight, loss


class Law(NamedTuple):
    """log2 lr = log2 a(shape) + b log2 T + q log2 beta. The estimate is followed by all
    draws."""

    b: np.ndarray  # [1 + draws]
    q: np.ndarray  # [1 + draws]
    a: dict[str, np.ndarray]  # shape -> [1 + draws]
    fitted: np.ndarray  # log2 lr of the law at every minimum, [1 + draws, n]


def fit_law(found: list[Minimum], x: np.ndarray, weight: np.ndarray) -> Law:
    """Weighted least squares in every draw, x and weight [1 + draws, n].

    In a draw without a shape, its a is NaN. If T and beta vary together, all values are
    NaN.
    """
    shapes = list(dict.fromkeys(m.shape for m in found))
    rows = [
        [math.log2(m.T), math.log2(m.beta), *(m.shape == s for s in shapes)]
        for m in found
    ]
    design, solutions = np.array(rows), []  # [n, 2 + shapes]
    for at, w in zip(x, weight):
        root, y = np.sqrt(w), np.where(w > 0, at, 0)
        solution, _, rank, _ = np.linalg.lstsq(
            root[:, None] * design, root * y, rcond=1e-6
        )
        drawn = w @ design[:, 2:] > 0  # shapes
        solution[2:][~drawn] = np.nan
        solutions.append(solution if rank == 2 + drawn.sum() else np.nan * solution)
    b, q, *log_a = np.transpose(solutions)
    return Law(b, q, dict(zip(shapes, np.exp2(log_a))), solutions @ design.T)


def interval(draws: np.ndarray) -> tuple[float, float]:
    """The middle 95% of the draws. The first entry is the estimate and does not count."""
    draws = draws[1:][np.isfinite(draws[1:])]
    return (
        tuple(np.percentile(draws, [2.5, 97.5]).tolist())
        if draws.size
        else (math.nan, math.nan)
    )


def show(draws: np.ndarray, digits: int = 3) -> str:
    """The estimate and its interval, if it has one. A single seed has none."""
    low, high = np.round(interval(draws), 9)  # without differences of mere rounding
    spread = f" [{low:.{digits}f}, {high:.{digits}f}]" if low < high else ""
    return f"{draws[0]:.{digits}f}{spread}"


# -- How the papers read it --------------------------------------------------------------


def slope(x, weight, u, groups: list) -> np.ndarray:
    """Slope of x on u [n] within groups, for every draw. x, weight [1 + draws, n]."""
    same = np.array([[group == other for other in groups] for group in groups])
    v = u - (weight * u) @ same / np.maximum(
        weight @ same, 1e-9
    )  # without the mean of its group
    below = (weight * v**2).sum(axis=1)
    return (weight * v * x).sum(axis=1) / np.where(below > 1e-9, below, np.nan)


def best_batches(found: list[Minimum], n: int) -> list[Minimum]:
    """Minima of the n batch sizes with the lowest loss, for every shape and T."""
    cells = groupby(sorted(usable(found), key=lambda m: m.T), lambda m: (m.shape, m.T))
    return [m for _, cell in cells for m in sorted(cell, key=lambda m: m.loss)[:n]]


def redraw_best_batches(points: list[Minimum], n: int) -> tuple[np.ndarray, np.ndarray]:
    """`redraw`, with weight 0 outside the n best batch sizes, which every draw chooses
    anew."""
    x, weight, loss = redraw_with_losses(points)
    loss = np.where(weight > 0, loss, np.inf)
    for cell in {(m.shape, m.T) for m in points}:
        here = [i for i, m in enumerate(points) if (m.shape, m.T) == cell]
        order = (
            loss[:, here].argsort(axis=1, kind="stable").argsort(axis=1)
        )  # ranks, from 0
        weight[:, here] *= order < n
    return x, weight


def paper_reading(found: list[Minimum]) -> tuple[np.ndarray, np.ndarray, float]:
    """b with q = 1 in the three best batch sizes, s, and a.

    s is the slope of log beta on log T there. Where lr = a beta^q T^b is exact, the
    paper's b is b + (q - 1) s.
    """
    points = usable(found)
    x, weight = redraw_best_batches(points, 3)
    T, beta = np.log2([(m.T, m.beta) for m in points]).T
    one = [0] * len(points)
    b, s = slope(x - beta, weight, T, one), slope(beta + 0 * x, weight, T, one)
    return b, s, 2 ** np.average(x[0] - beta - b[0] * T, weights=weight[0])


def step_law_reading(found: list[Minimum]) -> np.ndarray:
    """Exponent of T at the best batch size. Where the law is exact, it is b + q s."""
    points = usable(found)
    x, weight = redraw_best_batches(points, 1)
    return slope(x, weight, np.log2([m.T for m in points]), [m.shape for m in points])


# -- All of a sweep ----------------------------------------------------------------------


class Fits(NamedTuple):
    found: list[Minimum]  # all minima
    points: list[Minimum]  # the usable ones
    x: np.ndarray  # of the points, in all draws
    weight: np.ndarray
    law: Law
    paper: tuple | None = None  # see paper_reading


def fits_of(rows: list[dict]) -> Fits:
    """Raises UserError if the usable minima do not determine a, b and q."""
    found = minima(rows)
    points = usable(found)
    x, weight = redraw(points) if points else (None, None)
    law = fit_law(points, x, weight) if points else None
    if law is None or not math.isfinite(law.b[0]):
        few = f"{len(points)} of {len(found)} minima usable, left out: {reasons(found) or 0}"
        raise UserError(
            f"{few}; a law needs two run lengths and two batch sizes in one shape"
        )
    return Fits(found, points, x, weight, law, paper_reading(found))


def law(rows: list[dict]) -> dict:
    """Fit lr = a beta^q T^b to plain rows. Returns the content of law.json.

    A row needs lr, total_tokens, val_loss (None if diverged), and batch_tokens or
    batch_size. Optional: seq_len (else 4096), shape and seed (else all have the same).
    Raises UserError.
    """
    rows = [complete(row) for row in rows]
    return as_json(fits_of(rows), rows[0])


def as_json(fits: Fits, row: dict) -> dict:
    """The content of law.json. Its a is the geometric mean over the shapes."""
    a = np.exp2(np.mean(np.log2([*fits.law.a.values()]), axis=0))
    b_paper, _, a_paper = fits.paper
    draws = {"a": a, "b": fits.law.b, "q": fits.law.q, "b_paper": b_paper}
    intervals = {f"{name}_interval": interval(some) for name, some in draws.items()}
    rule = f"cubic through 7 rates of mean losses, {DRAWS} draws of series"
    return (
        {name: some[0] for name, some in draws.items()}
        | intervals
        | {
            "a_paper": a_paper,
            "rule": rule,
            "seq_len": row["seq_len"],
            "warmup_tokens": row.get("warmup_tokens"),
            "fingerprint": row.get("fingerprint"),
        }
    )


def predict(law: dict, total_tokens: float, batch_tokens: float) -> float:
    """Best constant learning rate of a WSD run, equation 6 of the paper with beta^q for
    beta."""
    return best_lr(total_tokens, paper_batch_size(batch_tokens), law)


def report_prediction(args) -> None:
    """Print the learning rate for --predict. Raises OSError or UserError."""
    law = PAPER_LAW | {"seq_len": PAPER_SEQ_LEN}
    if args.law != "paper":
        try:
            law = json.loads(Path(args.law).read_text())
            predict(law, 1.0, float(law["seq_len"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"--law {args.law}: not a law.json that fit.py wrote"
            ) from None
    seq_len = law["seq_len"] if args.seq_len is None else args.seq_len
    numbers = {
        "total_tokens": args.total_tokens,
        "batch_size": args.batch_size,
        "seq_len": seq_len,
    }
    for name, value in numbers.items():
        if not 0 < (value or 0) < math.inf:
            raise UserError(f"--{name} {value}: --predict needs a number above 0")
    print(f"{predict(law, args.total_tokens, args.batch_size * seq_len):.2g}")


# -- Reports -----------------------------------------------------------------------------


def label(m, field: str) -> str:
    return f"T = {size(m.T)}" if field == "T" else f"batch size {m.batch_size:g}"


def middle_shape(found: list) -> list:
    """The minima of one shape, in the middle between narrow and wide."""
    shapes = list(dict.fromkeys(m.shape for m in found))
    return [m for m in found if m.shape == shapes[len(shapes) // 2]]


def print_law(readings: dict, paper: tuple, step_law: np.ndarray) -> None:
    """Print the law as several readings of the same runs give it. The first one is
    ours."""
    print("lr = a beta^q T^b, 95% intervals")
    for name, law in readings.items():
        print(f"{name:<29} b {show(law.b)}  q {show(law.q)}")
    (b_paper, s, _), ours = paper, next(iter(readings.values()))
    same = ours.b[0] + (ours.q[0] - 1) * s[0]
    print(f"{'paper, three best batches':<29} b {show(b_paper)}  q 1")
    print(
        f"    beta grows as T^{s[0]:.2f} there, and b + (q - 1) {s[0]:.2f} = {same:.3f}"
    )
    print(f"{'Step Law, best batch':<29} b {show(step_law)}")
    first = next(iter(ours.a.values()))
    for shape, a in ours.a.items():
        print(f"{shape}: a {a[0]:.3g}, {show(a / first, 2)} times the first")


def draw_law(path: Path, fits, content: dict, chosen: list) -> None:
    """The law of the shape with most minima. Filled are those that the paper would
    choose."""
    shape = statistics.mode(m.shape for m in fits.points)
    points: dict = {}
    for m, x, weight, fitted in zip(
        fits.points, fits.x.T, fits.weight.T, fits.law.fitted[0]
    ):
        if m.shape == shape:
            here = point(m.batch_size, x, weight, fitted, m in chosen)
            points.setdefault(label(m, "T"), []).append(here)
    title = f"Best learning rate ∝ T^{fits.law.b[0]:.2f} beta^{fits.law.q[0]:.2f}"
    xlabel = f"batch size (sequences of {content['seq_len']:g} tokens), {shape}"
    figures.draw_points(path, points, title, xlabel)


def point(
    at: float, x: np.ndarray, weight=1, line: float | None = None, filled=True
) -> tuple:
    """For a figure: log2 at, the estimate in x, its 95% interval, the line (else through
    x)."""
    low, high = interval(np.where(weight > 0, x, np.nan))
    return math.log2(at), x[0], low, high, x[0] if line is None else line, filled


def draw_valleys(path: Path, found: list) -> None:
    """Valleys of the middle shape by T, and by batch size at the longest T."""
    some, panels = middle_shape(found), []  # in order of T, then of batch size
    best = min((m for m in some if m.T == some[-1].T), key=lambda m: m.loss)
    for words, field, fixed in (
        ("tokens", "T", "batch_size"),
        ("batch size", "batch_size", "T"),
    ):
        row = [m for m in some if getattr(m, fixed) == getattr(best, fixed)]
        longer = getattr(row[-1], field) / getattr(row[0], field)
        moved = 2 ** (row[-1].x - row[0].x)
        title = f"{longer:.0f}× the {words}, {moved:.2g}× the best learning rate"
        xlabel = f"learning rate ({best.shape}, {label(best, fixed)})"
        groups = {label(m, field): [m] for m in row}
        panels.append(dict(groups=groups, title=title, xlabel=xlabel, log=True))
    figures.draw_valleys(path, panels)


def report_wsd(records: list[dict], out: Path) -> None:
    """Print the law, write law.json, and draw the figures."""
    fits = fits_of(records)
    content = as_json(fits, records[0])
    readings = {"cubic through 7 rates": fits.law}
    for window in (5, 7):
        if points := usable(parabolas(records, window)):
            readings[f"parabola through {window} rates"] = fit_law(
                points, *redraw(points)
            )
    left_out = reasons(fits.found) or "none"
    print(f"{len(records):,} runs, {len(fits.found)} cells; left out: {left_out}\n")
    print_law(readings, fits.paper, step_law_reading(fits.found))
    out.mkdir(parents=True, exist_ok=True)
    (out / "law.json").write_text(json.dumps(content, indent=1) + "\n")
    draw_valleys(out / "valleys.png", fits.points)
    draw_law(out / "law.png", fits, content, best_batches(fits.found, 3))
    print(f"\n{out}: law.json, valleys.png, law.png")


def report_transfer(found: list, x: np.ndarray, weight: np.ndarray, out: Path) -> None:
    """Print and draw the best learning rate of every width, with and without muP.

    x and weight: all draws of the minima, from fit.redraw.
    """
    draws = np.where(weight > 0, x, np.nan).T
    best = {m.shape: 2**some for m, some in zip(found, draws)}
    if len(best) < len(found):
        raise UserError("several T or batch sizes; choose one with --only")
    where, panels = f"{label(found[0], 'T')}, {label(found[0], 'batch_size')}", []
    print(f"{where}; best learning rates")
    for title, kind in (("Without μP", STANDARD), ("With μP", "")):
        some = [m for m in found if (STANDARD in m.shape) == bool(kind)]
        groups = {m.shape.removesuffix(kind): [m] for m in some}
        for shape in groups:
            print(f"{title:<11}{shape:<10} {show(best[shape + kind], 4)}")
        first, last = [*groups][0], [*groups][-1]
        ratio = best[last + kind] / best[first + kind]
        print(f"{title:<11}{last} / {first}: {show(ratio, 2)}")
        wider = int(last.split()[1].strip(",")) / int(first.split()[1].strip(","))
        title += f": {wider:g}× width, {ratio[0]:.2f}× the best learning rate"
        panels.append(
            dict(groups=groups, title=title, xlabel=f"learning rate ({where})", log=True)
        )
    figures.draw_valleys(out / "transfer.png", panels)
    print(f"\n{out}: transfer.png")


def report_power(scans: dict[str, list], center: dict, out: Path) -> None:
    """Print and draw the best a and b. scans: minima over a, minima over b."""
    panels = [table_of_best(name, found, center) for name, found in scans.items()]
    figures.draw_valleys(out / "power.png", panels)
    print(f"{out}: power.png")


def table_of_best(name: str, found: list, center: dict) -> dict:
    """Print the best a or b, and return the middle shape's valleys at the longest T as a
    panel."""
    good = [m for m in found if not m.why_not]
    if not good:
        raise UserError(f"no best {name}: {reasons(found)}")
    value = (lambda x: 2**x) if name == "a" else (lambda x: x)
    print(f"best {name}, mean over seeds; left out: {reasons(found) or 'none'}")
    batches, lengths = sorted({m.batch_size for m in found}), sorted({m.T for m in found})
    print(f"{'T':>8} " + "".join(f"{f'batch {B:g}':>11}" for B in batches))
    for T in lengths:
        at = lambda B: (
            [value(m.x) for m in good if (m.T, m.batch_size) == (T, B)] or math.nan
        )
        print(f"{size(T):>8} " + "".join(f"{np.mean(at(B)):11.3f}" for B in batches))
    x = [value(m.x) for m in good]
    print(f"all {len(x)}: mean {np.mean(x):.3f}, standard deviation {np.std(x):.3f}\n")
    some = [m for m in middle_shape(found) if m.T == lengths[-1]]
    by_batch = groupby(
        some, lambda m: label(m, "batch_size")
    )  # some is in order of batch size
    groups = {batch: list(seeds) for batch, seeds in by_batch}
    mean_x = lambda seeds: np.mean([m.x for m in seeds if not m.why_not] or math.nan)
    best = [value(mean_x(seeds)) for seeds in groups.values()]
    title = f"The best {name} is {np.nanmin(best):.2g} to {np.nanmax(best):.2g}"
    other = "b" if name == "a" else "a"
    where = f"{other} = {center[other]:g}, T = {size(lengths[-1])}, {some[0].shape}"
    return dict(groups=groups, title=title, xlabel=f"{name} ({where})", log=name == "a")


def scans(records: list[dict]) -> tuple[dict[str, list[Minimum]], dict]:
    """Minima of the runs of Power that only differ in a or in b, and the common a and
    b."""
    a, b = (statistics.mode(r[name] for r in records) for name in ("power_a", "power_b"))
    some_a = [r for r in records if r["power_b"] == b]
    some_b = [r for r in records if r["power_a"] == a]
    over_a = parabolas(some_a, of=lambda r: math.log2(r["power_a"]))
    over_b = parabolas(some_b, of=lambda r: r["power_b"])
    return {"a": over_a, "b": over_b}, {"a": a, "b": b}


def report_records(records: list[dict], out: Path) -> None:
    """Recognize the experiment by its schedules, and report it."""
    schedules = {r["schedule"] for r in records}
    if schedules >= {"cosine", "power", "wsd"}:
        from compare import comparison  # which imports this file

        comparison(records, out)
    elif schedules == {"power"}:
        report_power(*scans(records), out)
    elif schedules != {"wsd"}:
        raise UserError(
            f"no report for schedules {sorted(schedules)}; is the sweep running?"
        )
    elif {STANDARD in r["shape"] for r in records} == {
        True,
        False,
    }:  # with and without muP
        found = minima(records)
        report_transfer(found, *redraw(found), out)
    else:
        report_wsd(records, out)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("fit.py", __doc__)
    add = parser.add_argument
    add("folders", type=Path, nargs="*", help="folders of a sweep's records")
    add(
        "--out",
        type=Path,
        help="folder for law.json and figures (default: that of the runs)",
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
            report_records(read_records(args.folders, args.only), out)
    except (UserError, OSError) as error:
        return flags.fail("fit.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
