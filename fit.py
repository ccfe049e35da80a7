"""The law behind a sweep: losses -> best learning rates -> power law with intervals -> prediction.

    python fit.py runs/wsd-quick                             the law, law.json, figures
    python fit.py runs/wsd-quick --beyond runs/beyond-quick  does it hold at 4 times the longest T?
    python fit.py runs/wsd-a --against runs/wsd-b            how much b and q of two sweeps differ
    python fit.py runs/compare-quick                         also power-quick, transfer-quick
    python fit.py --predict --total_tokens 10e12 --batch_size 1024         the paper's learning rate
    python fit.py --curves runs/laptop-power-1 runs/laptop-wsd-1           losses of any runs

We fixed this procedure before the runs in results/:

1. A *cell* is a shape, a run length T and a batch size. A minimum is the vertex of a parabola
   through loss against log lr, for one cell and seed. It takes 5 learning rates in steps of
   sqrt(2), with the best one in the middle, or 3 in steps of 2. We leave a minimum out, and count
   it, if this is impossible, if one of them diverged, or if the vertex falls outside them.
2. The joint fit is least squares for log lr = log a(shape) + b log T + q log beta, on all minima.
3. The paper's fit has q = 1, so it explains gamma = lr / beta by log gamma = log a + b log T. It
   uses the three batch sizes with the lowest loss, per shape and T.
4. Intervals hold 95% of 2,000 bootstrap draws, each with new seeds and new cells.

T counts tokens, beta sequences of 4096 tokens, as in schedules.py. Notebooks call fit.law(rows).
"""

import contextlib
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from schedules import PAPER_SEQ_LEN, paper_batch_size
from tools import figures, report
from tools.compare import TUNING, check_same_settings, complete, loss_of, read_records, shape_of
from tools.config import fail, program_parser
from tools.records import read_metrics
from tools.report import reasons

PAPER = {"a": 4.6, "b": -0.51, "q": 1.0, "seq_len": PAPER_SEQ_LEN}  # equation 6 of the paper
WINDOW = 5


class Minimum(NamedTuple):
    shape: str
    T: int
    batch_size: int
    beta: float
    seed: int
    loss: float  # the lowest one measured
    x: float  # log2 of the best learning rate (of a, or b itself, in a scan of Power)
    why_not: str  # why it is left out, or nothing
    points: list  # all (x, loss) of the valley, in order
    near: list  # the points around the lowest


def around_lowest(points: list[tuple], window: int) -> tuple[int, list[tuple]]:
    """Index of the lowest point, and `window` points around it (fewer in steps above sqrt(2))."""
    best = min(range(len(points)), key=lambda i: points[i][1])
    step = min((q[0] - p[0] for p, q in zip(points, points[1:])), default=0.5)
    side = math.ceil(window // 2 * 0.5 / max(step, 0.5) - 0.05)  # neighbors on each side
    return best, points[max(0, best - side) : best + side + 1]


def parabola(points: list[tuple], window: int = WINDOW) -> tuple[float, str]:
    """Points (x, loss), loss inf if diverged -> (x of the minimum, why it is unusable, or "")."""
    points = sorted(points)
    best, near = around_lowest(points, window)
    if best in (0, len(points) - 1):
        return points[best][0], "at an edge"
    if math.isinf(max(points[best - 1][1], points[best + 1][1])):
        return points[best][0], "beside a diverged run"
    x, y = np.array(near).T
    centered = len(points) >= window and len(near) == 2 * near.index(points[best]) + 1
    if not centered or np.ptp(np.diff(x)) > 0.01 or np.isinf(y).any():
        return points[best][0], f"fewer than {window} rates in equal steps"
    curvature, slope, _ = np.polyfit(x - points[best][0], y, 2)
    vertex = points[best][0] - slope / (2 * curvature) if curvature > 0 else math.inf
    return (vertex, "") if x[0] <= vertex <= x[-1] else (points[best][0], "no valley")


def minima(records: list[dict], window: int = WINDOW, of=None) -> list[Minimum]:
    """The best learning rates by cell and seed, or the best x, if `of` maps a record to x."""
    of, groups = of or (lambda r: math.log2(r["lr"])), {}
    for r in records:
        beta = paper_batch_size(r["batch_size"] * r["seq_len"])
        cell = shape_of(r), r["total_tokens"], r["batch_size"], beta, r["seed"]
        groups.setdefault(cell, []).append((of(r), loss_of(r)))
    found = []
    for cell in sorted(groups, key=lambda cell: (len(cell[0]), cell)):  # narrow to wide
        points = sorted(groups[cell])
        best, near = around_lowest(points, window)
        found.append(Minimum(*cell, points[best][1], *parabola(points, window), points, near))
    return found


def bootstrap(points: list[Minimum], draws: int = 2000) -> np.ndarray:
    """Weights of the points, [1 + draws, n]: 1, then draws of its seed times draws of its cell."""
    rng = np.random.default_rng(0)
    weights = np.ones((draws, len(points)))
    for part in (lambda p: p.seed, lambda p: (p.shape, p.T, p.batch_size)):
        names, index = np.unique([str(part(p)) for p in points], return_inverse=True)
        share = np.full(len(names), 1 / len(names))
        weights *= rng.multinomial(len(names), share, size=draws)[:, index]
    return np.vstack([np.ones(len(points)), weights])


def regress(points: list[Minimum], weights: np.ndarray, shapes: list, free_q: bool) -> np.ndarray:
    """Fit log2 lr = log2 a + b log2 T + q log2 beta by least squares, once per row of weights.

    The shapes in a group share an a. Returns [rows, len(shapes) + 2] with the values of log2 a, b
    and q (1 unless free). A row that does not determine them is NaN.
    """
    T, beta, y = np.array([(math.log2(p.T), math.log2(p.beta), p.x) for p in points]).T
    one_hot = [[p.shape in group for p in points] for group in shapes]
    X = np.array([*one_hot, T] + [beta] * free_q, dtype=float).T  # [n, k]
    y = y if free_q else y - beta
    A = np.einsum("rn,ni,nj->rij", weights, X, X)  # normal equations, X'WX and X'Wy
    good = np.linalg.matrix_rank(A) == X.shape[1]
    solved = np.full(A.shape[:2], math.nan)
    right = np.einsum("rn,ni,n->ri", weights, X, y)[good][..., None]
    solved[good] = np.linalg.solve(A[good], right)[..., 0]
    return solved if free_q else np.column_stack([solved, np.where(good, 1.0, math.nan)])


class Law(NamedTuple):
    """lr = a * beta^q * T^b. Estimates, followed by all bootstrap draws, [1 + draws]."""

    a: np.ndarray
    b: np.ndarray
    q: np.ndarray
    a_of: dict  # shape -> draws of its a


def joint_law(found: list[Minimum]) -> Law:
    """One regression for all minima. a is the geometric mean of the shapes. Raises ValueError."""
    points = usable(found)
    shapes = [*dict.fromkeys(m.shape for m in points)]
    solved = regress(points, bootstrap(points), [[shape] for shape in shapes], free_q=True)
    if not np.isfinite(solved[0]).all():
        why = f"{reasons(found)}; is the sweep still running?"
        raise ValueError(f"{len(points)} usable minima do not determine a, b and q ({why})")
    log_a, b, q = solved[:, :-2], solved[:, -2], solved[:, -1]
    return Law(2 ** log_a.mean(axis=1), b, q, dict(zip(shapes, 2**log_a.T)))


def slopes(found: list[Minimum]) -> dict[str, np.ndarray]:
    """shape -> draws of its separate b, all from the same draws, so they can be subtracted."""
    points = usable(found)
    weights, own = bootstrap(points), {}
    for shape in dict.fromkeys(m.shape for m in points):
        mine = [i for i, m in enumerate(points) if m.shape == shape]
        own[shape] = regress([points[i] for i in mine], weights[:, mine], [[shape]], True)[:, -2]
    return own


def paper_law(found: list[Minimum]) -> Law:
    """Fit the three best batch sizes per shape and T, with q = 1 and one a for all shapes."""
    points = best_three(usable(found))
    log_a, b, q = regress(points, bootstrap(points), [{m.shape for m in points}], free_q=False).T
    return Law(2**log_a, b, q, {})


def usable(found: list[Minimum]) -> list[Minimum]:
    """The minima that are not left out. Raises ValueError if they cannot give a law."""
    points = [m for m in found if not m.why_not]
    if min(len({m.T for m in points}), len({m.beta for m in points})) < 2:
        why = f"{len(points)} of {len(found)} minima are usable; left out: {reasons(found)}"
        raise ValueError(f"a law needs two run lengths and two batch sizes; {why}")
    return points


def best_three(points: list[Minimum]) -> list[Minimum]:
    """Minima of the three batch sizes with the lowest mean loss, per shape and T."""
    losses: dict = {}
    for m in points:
        losses.setdefault((m.shape, m.T), {}).setdefault(m.batch_size, []).append(m.loss)
    best = {cell: sorted(of, key=lambda B: np.mean(of[B]))[:3] for cell, of in losses.items()}
    return [m for m in points if m.batch_size in best[m.shape, m.T]]


def interval(draws: np.ndarray) -> tuple[float, float]:
    """The middle 95% of the draws. The first entry is the estimate and does not count."""
    draws = draws[1:][np.isfinite(draws[1:])]
    return tuple(np.percentile(draws, [2.5, 97.5]).tolist()) if draws.size else (math.nan, math.nan)


def show(draws: np.ndarray, digits: int = 3) -> str:
    low, high = interval(draws)
    return f"{draws[0]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def law(rows: list[dict]) -> dict:
    """Fit lr = a beta^q T^b to plain rows. Returns the content of law.json.

    A row needs lr, total_tokens, val_loss (None if diverged), and batch_tokens or batch_size and
    seq_len. Optional: shape and seed, else all rows have the same. Raises ValueError.
    """
    rows = [complete(row) for row in rows]
    found = minima(rows)
    joint, paper = joint_law(found), paper_law(found)
    estimates = {name: getattr(joint, name)[0] for name in "abq"}
    intervals = {f"{name}_interval": interval(getattr(joint, name)) for name in "abq"}
    return estimates | intervals | {
        "a_paper": paper.a[0], "b_paper": paper.b[0], "b_paper_interval": interval(paper.b),
        "rule": f"parabola through {WINDOW} rates, 2000 draws of seeds and cells",
        "seq_len": rows[0]["seq_len"], "warmup_tokens": rows[0].get("warmup_tokens"),
        "fingerprint": rows[0].get("fingerprint"),
    }  # fmt: skip


def predict(law: dict, total_tokens: float, batch_tokens: float) -> float:
    """Best constant learning rate of a WSD run, equation 6 of the paper with beta^q for beta."""
    return law["a"] * paper_batch_size(batch_tokens) ** law["q"] * total_tokens ** law["b"]


def report_prediction(args) -> None:
    """Print the learning rate for --predict. Raises OSError or ValueError."""
    law = read_law(args.law)
    seq_len = law["seq_len"] if args.seq_len is None else args.seq_len
    numbers = {"total_tokens": args.total_tokens, "batch_size": args.batch_size, "seq_len": seq_len}
    for name, value in numbers.items():
        if not 0 < (value or 0) < math.inf:
            raise ValueError(f"--{name} {value}: --predict needs a number above 0")
    print(f"{predict(law, args.total_tokens, args.batch_size * seq_len):.2g}")


def read_law(name: str) -> dict:
    """The paper's law, or a law.json. Raises OSError or ValueError."""
    if name == "paper":
        return PAPER
    try:
        law = json.loads(Path(name).read_text())
        return {key: float(law[key]) for key in PAPER}
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        raise ValueError(f"--law {name}: not a law.json that fit.py wrote") from None


def report_wsd(records: list[dict], out: Path, beyond: list[dict]) -> None:
    """Print the law and draw the figures, then write law.json. `beyond` is not fitted."""
    found, values, outside = minima(records), law(records), minima(beyond)
    print(f"{len(records):,} runs, {len(found)} minima; left out: {reasons(found) or 'none'}")
    print_fits(records)
    for m in outside:
        report.beyond(m, predict(values, m.T, m.beta * PAPER_SEQ_LEN))
    points, stars = usable(found), [m for m in outside if not m.why_not]
    report.price(points)
    report.draw_valleys(out / "valleys.png", found)
    figures.draw_batches(out / "batch.png", report.middle_shape(points), values)
    line = band(joint_law(found), points, stars)
    figures.draw_law(out / "law.png", points, values, line, stars)
    (out / "law.json").write_text(json.dumps(values, indent=1) + "\n")
    print(f"\n{out}: law.json, valleys.png, batch.png, law.png")


def print_fits(records: list[dict]) -> None:
    """Print both fits, with three widths of the parabolas, and the law of the separate shapes."""
    print("\nlr = a beta^q T^b, 95% intervals over seeds and cells")
    print(f"{'rates':>7}  {'joint fit: b':<25} {'q':<22} paper's fit (q = 1): b")
    for window in (3, WINDOW, 7):
        with contextlib.suppress(ValueError):  # too few rates for this window
            found = minima(records, window)
            joint, paper = joint_law(found), paper_law(found)
            print(f"{window:7d}  {show(joint.b):<25} {show(joint.q):<22} {show(paper.b)}")
    joint, own = joint_law(minima(records)), slopes(minima(records))
    first = next(iter(own))
    for shape, a in joint.a_of.items():
        print(f"{shape}: a = {a[0]:.3g}, its b {show(own[shape], 2)}")
        if shape != first:
            print(f"    a {show(a / joint.a_of[first], 2)} times that of {first}, "
                  f"difference of b {show(own[shape] - own[first], 2)}")  # fmt: skip


def band(joint: Law, points: list[Minimum], beyond: list[Minimum]) -> tuple:
    """The law's line and its interval over log2 T, at the middle batch size of the points.

    At beta = 1, far from the data, the different q of the draws would widen the band.
    """
    T = np.log2([m.T for m in points + beyond])
    T = np.linspace(T.min(), T.max(), 50)
    middle = np.mean([math.log2(m.beta) for m in points])
    height = np.log2(joint.a) + (joint.q - joint.q[0]) * middle
    lines = height[:, None] + joint.b[:, None] * T
    return T, lines[0], *np.nanpercentile(lines[1:], [2.5, 97.5], axis=0)


def report_difference(records: list[dict], others: list[dict]) -> None:
    """Print b and q of two sweeps in the cells and seeds that both have, and their differences."""
    cell = lambda m: (m.shape, m.T, m.batch_size, m.seed)
    ours = {cell(m): m for m in minima(records) if not m.why_not}
    theirs = {cell(m): m for m in minima(others) if not m.why_not}
    common = sorted(ours.keys() & theirs.keys())
    one = joint_law([ours[cell] for cell in common])
    other = joint_law([theirs[cell] for cell in common])
    print(f"{len(common)} cells and seeds in both")
    for name, x, y in (("b", one.b, other.b), ("q", one.q, other.q)):
        print(f"{name}: {show(x)} against {show(y)}, difference {show(x - y)}")


def scans(records: list[dict]) -> tuple[dict[str, list[Minimum]], dict]:
    """Minima of the runs of Power that only differ in a or in b, and the common a and b."""
    most_common = lambda name: Counter(r[name] for r in records).most_common(1)[0][0]
    a, b = most_common("power_a"), most_common("power_b")
    over_a = minima([r for r in records if r["power_b"] == b], of=lambda r: math.log2(r["power_a"]))
    over_b = minima([r for r in records if r["power_a"] == a], of=lambda r: r["power_b"])
    return {"a": over_a, "b": over_b}, {"power_a": a, "power_b": b}


def report_records(records: list[dict], out: Path, beyond: list[dict]) -> None:
    """Recognize the experiment by its schedules, and report it."""
    schedules = {r["schedule"] for r in records}
    wsd = [r for r in records if r["schedule"] == "wsd" and r["seed"] < TUNING]
    if schedules == {"cosine", "power", "wsd"}:
        report.comparison(records, usable(minima(wsd)), out)
    elif schedules == {"power"}:
        report.power(*scans(records), out)
    elif schedules != {"wsd"}:
        raise ValueError(f"runs with different schedules {sorted(schedules)}; fit them separately")
    elif any(r["standard"] for r in records):
        report.transfer(minima(records), out)
    else:
        report_wsd(records, out, beyond)


def report_curves(runs: list[Path], out: Path) -> None:
    """Draw the losses of these runs. Raises OSError or ValueError."""
    curves = {run.name: read_metrics(run) for run in runs}
    for name, lines in curves.items():
        if not lines:
            raise ValueError(f"--curves {name}: no metrics there; give the folder of a run")
    figures.draw_curves(out / "curves.png", curves)
    print(out / "curves.png")


def run(args) -> None:
    """Do one of the jobs of the command line. Raises OSError or ValueError."""
    if args.predict:
        return report_prediction(args)
    if args.curves:
        return report_curves(args.curves, args.out or Path("."))
    if not args.folders:
        raise ValueError("name the folder of a sweep, or --predict, or --curves; see --help")
    records, beyond = read_records(args.folders, args.only), []
    if args.against:
        return report_difference(records, read_records([args.against], args.only))
    if args.beyond:
        beyond = read_records([args.beyond], args.only)
        check_same_settings(records + beyond)
        if {(r["schedule"], r["standard"]) for r in records + beyond} != {("wsd", False)}:
            raise ValueError(f"--beyond {args.beyond}: needs runs of WSD here and in the sweep")
    out = args.out or args.folders[0]
    out.mkdir(parents=True, exist_ok=True)
    report_records(records, out, beyond)


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("fit.py", __doc__)
    add = parser.add_argument
    add("folders", type=Path, nargs="*", help="folders of a sweep's records")
    add("--out", type=Path, help="folder for law.json and figures (default: the first folder)")
    add("--only", action="append", default=[], metavar="FIELD=VALUE", help="leave out other runs")
    add("--against", type=Path, help="another sweep, to compare b and q with")
    add("--beyond", type=Path, help="a search outside the grid, to test the law on")
    add("--curves", type=Path, nargs="+", metavar="RUN", help="draw losses of runs, curves.png")
    add("--predict", action="store_true", help="print the best learning rate for T and batch size")
    add("--total_tokens", type=float, help="run length T, for --predict")
    add("--batch_size", type=float, help="sequences per optimizer step, for --predict")
    add("--seq_len", type=float, help="tokens per sequence (default: as in --law; the paper: 4096)")
    add("--law", default="paper", help="for --predict, paper or a law.json (default: paper)")
    try:
        run(parser.parse_args(argv))
    except (ValueError, OSError) as error:
        return fail("fit.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
