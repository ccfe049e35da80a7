"""Tables and figures of fit.py, with titles that state what was found.

`found` is a list of minima as fit.minima returns them (shape, T, batch_size, loss, x, ...).
"""

import math
import statistics
from collections import Counter
from itertools import groupby
from pathlib import Path

import numpy as np

from tools import compare, figures
from tools.config import UserError
from tools.figures import size
from tools.records import STANDARD


def label(m, field: str) -> str:
    return f"T = {size(m.T)}" if field == "T" else f"batch size {m.batch_size:g}"


def middle_shape(found: list) -> list:
    """The minima of one shape, in the middle between narrow and wide."""
    shapes = list(dict.fromkeys(m.shape for m in found))
    return [m for m in found if m.shape == shapes[len(shapes) // 2]]


def reasons(found: list) -> str:
    """Why minima are left out, with their numbers."""
    why_not = Counter(m.why_not for m in found if m.why_not)
    return ", ".join(f"{n} {why}" for why, n in why_not.items())


def interval(draws: np.ndarray) -> tuple[float, float]:
    """The middle 95% of the draws. The first entry is the estimate and does not count."""
    draws = draws[1:][np.isfinite(draws[1:])]
    return tuple(np.percentile(draws, [2.5, 97.5]).tolist()) if draws.size else (math.nan, math.nan)


def show(draws: np.ndarray, digits: int = 3) -> str:
    """The estimate and its interval, if it has one. A single seed has none."""
    low, high = np.round(interval(draws), 9)  # without differences of mere rounding
    spread = f" [{low:.{digits}f}, {high:.{digits}f}]" if low < high else ""
    return f"{draws[0]:.{digits}f}{spread}"


def law(readings: dict, paper: tuple, step_law: np.ndarray) -> None:
    """Print the law as several readings of the same runs give it. The first one is ours."""
    print("lr = a beta^q T^b, 95% intervals")
    for name, law in readings.items():
        print(f"{name:<29} b {show(law.b)}  q {show(law.q)}")
    (b_paper, s, _), ours = paper, next(iter(readings.values()))
    same = ours.b[0] + (ours.q[0] - 1) * s[0]
    print(f"{'paper, three best batches':<29} b {show(b_paper)}  q 1")
    print(f"    beta grows as T^{s[0]:.2f} there, and b + (q - 1) {s[0]:.2f} = {same:.3f}")
    print(f"{'Step Law, best batch':<29} b {show(step_law)}")
    first = next(iter(ours.a.values()))
    for shape, a in ours.a.items():
        print(f"{shape}: a {a[0]:.3g}, {show(a / first, 2)} times the first")


def draw_law(path: Path, fits, content: dict, chosen: list) -> None:
    """The law of the shape with most minima. Filled are those that the paper would choose."""
    shape = statistics.mode(m.shape for m in fits.points)
    points: dict = {}
    for m, x, weight, fitted in zip(fits.points, fits.x.T, fits.weight.T, fits.law.fitted[0]):
        if m.shape == shape:
            here = point(m.batch_size, x, weight, fitted, m in chosen)
            points.setdefault(label(m, "T"), []).append(here)
    title = f"Best learning rate ∝ T^{fits.law.b[0]:.2f} beta^{fits.law.q[0]:.2f}"
    xlabel = f"batch size (sequences of {content['seq_len']:g} tokens), {shape}"
    figures.draw_points(path, points, title, xlabel)


def point(at: float, x: np.ndarray, weight=1, line: float | None = None, filled=True) -> tuple:
    """For a figure: log2 at, the estimate in x, its 95% interval, the line (else through x)."""
    low, high = interval(np.where(weight > 0, x, np.nan))
    return math.log2(at), x[0], low, high, x[0] if line is None else line, filled


def draw_valleys(path: Path, found: list) -> None:
    """Valleys of the middle shape by T, and by batch size at the longest T."""
    some, panels = middle_shape(found), []  # in order of T, then of batch size
    best = min((m for m in some if m.T == some[-1].T), key=lambda m: m.loss)
    for words, field, fixed in (("tokens", "T", "batch_size"), ("batch size", "batch_size", "T")):
        row = [m for m in some if getattr(m, fixed) == getattr(best, fixed)]
        longer = getattr(row[-1], field) / getattr(row[0], field)
        moved = 2 ** (row[-1].x - row[0].x)
        title = f"{longer:.0f}× the {words}, {moved:.2g}× the best learning rate"
        xlabel = f"learning rate ({best.shape}, {label(best, fixed)})"
        groups = {label(m, field): [m] for m in row}
        panels.append(dict(groups=groups, title=title, xlabel=xlabel, log=True))
    figures.draw_valleys(path, panels)


# -- Transfer across widths, and Power's a and b ---------------------------------------------------


def transfer(found: list, x: np.ndarray, weight: np.ndarray, out: Path) -> None:
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
        panels.append(dict(groups=groups, title=title, xlabel=f"learning rate ({where})", log=True))
    figures.draw_valleys(out / "transfer.png", panels)
    print(f"\n{out}: transfer.png")


def power(scans: dict[str, list], center: dict, out: Path) -> None:
    """Print and draw the best a and b. scans: minima over a, minima over b."""
    panels = [table_of_best(name, found, center) for name, found in scans.items()]
    figures.draw_valleys(out / "power.png", panels)
    print(f"{out}: power.png")


def table_of_best(name: str, found: list, center: dict) -> dict:
    """Print the best a or b, and return the middle shape's valleys at the longest T as a panel."""
    good = [m for m in found if not m.why_not]
    if not good:
        raise UserError(f"no best {name}: {reasons(found)}")
    value = (lambda x: 2**x) if name == "a" else (lambda x: x)
    print(f"best {name}, mean over seeds; left out: {reasons(found) or 'none'}")
    batches, lengths = sorted({m.batch_size for m in found}), sorted({m.T for m in found})
    print(f"{'T':>8} " + "".join(f"{f'batch {B:g}':>11}" for B in batches))
    for T in lengths:
        at = lambda B: [value(m.x) for m in good if (m.T, m.batch_size) == (T, B)] or math.nan
        print(f"{size(T):>8} " + "".join(f"{np.mean(at(B)):11.3f}" for B in batches))
    x = [value(m.x) for m in good]
    print(f"all {len(x)}: mean {np.mean(x):.3f}, standard deviation {np.std(x):.3f}\n")
    some = [m for m in middle_shape(found) if m.T == lengths[-1]]
    by_batch = groupby(some, lambda m: label(m, "batch_size"))  # some is in order of batch size
    groups = {batch: list(seeds) for batch, seeds in by_batch}
    mean_x = lambda seeds: np.mean([m.x for m in seeds if not m.why_not] or math.nan)
    best = [value(mean_x(seeds)) for seeds in groups.values()]
    title = f"The best {name} is {np.nanmin(best):.2g} to {np.nanmax(best):.2g}"
    other = "b" if name == "a" else "a"
    where = f"{other} = {center[other]:g}, T = {size(lengths[-1])}, {some[0].shape}"
    return dict(groups=groups, title=title, xlabel=f"{name} ({where})", log=name == "a")


# -- The comparison --------------------------------------------------------------------------------

LEVEL = 0.005  # nats; two lines are level if the interval of their difference lies inside
VERBS = {"level": "ties", "better": "beats", "worse": "loses to", "undecided": "may tie"}


def verdict(draws: np.ndarray) -> str:
    low, high = np.round(interval(draws), 9)
    if -LEVEL < low < high < LEVEL:  # one seed in one pair has no interval, so low == high
        return "level"
    return "better" if low < high < 0 else "worse" if 0 < low < high else "undecided"


def comparison(records: list[dict], out: Path) -> None:
    """Print the tables, in Markdown, and draw the figures."""
    lines, best, _ = compare.losses_of_lines(records)
    print("tuned learning rates of the seeds")
    for name, rates in best.items():
        print(f"{name:<26} " + " ".join(f"{lr:g}" for lr in rates.values()))
    panels, searched = [], compare.searched(records)
    for kind in ("dense", "MoE"):
        of_kind = [cell for cell in lines["WSD"] if ("experts" in cell[0]) == (kind == "MoE")]
        present = [some for some in lines.values() if some.keys() & set(of_kind)]
        cells = [cell for cell in of_kind if all(cell in some for some in present)]
        if cells:
            with_search = lines | {"WSD, searched in every cell": searched}
            panels.append(table_of_differences(with_search, cells, kind))
    figures.draw_differences(out / "compare.png", panels, LEVEL)
    print(f"\n{out}: compare.png")


def table_of_differences(lines: dict, cells: list, kind: str) -> dict:
    """Print all lines minus the best planned one, and return them as a panel of compare.png.

    The best planned line decays, needs T from the start, and has the lowest mean loss.
    """
    when = {name: "from the start" for name in lines}
    planned = []
    whole = [name for name in lines if lines[name].keys() >= set(cells)]
    for name, line in compare.LINES.items():
        when[name] = compare.needs_T(line)
        if name in whole and when[name] == "from the start" and not line.fields["average"]:
            planned.append(name)
    mean = lambda name: np.mean([[*lines[name][cell].values()] for cell in cells])
    other = min(planned, key=mean)

    longest = max(T for _, T, _ in cells)
    late_cells = [cell for cell in cells if cell[1] == longest]
    all_T = {name: compare.differences(lines[name], lines[other], cells) for name in whole}
    late = {name: compare.differences(lines[name], lines[other], late_cells) for name in whole}
    order = sorted(whole, key=lambda name: all_T[name][0])
    against = f"minus {other}, {mean(other):.3f} | at T = {size(longest)}"
    print(f"\n| {kind}, {len(cells)} cells | needs T | loss | {against} |\n" + "|---" * 5 + "|")
    text = lambda draws: f"{show(draws)} {verdict(draws)}"
    tests = {}
    for name in order:
        if name != other:
            loss = mean(other) + all_T[name][0]  # a line may have fewer seeds than the other
            both = f"{text(all_T[name])} | {text(late[name])}"
            print(f"| {name} | {when[name]} | {loss:.3f} | {both} |")
            tests[f"{name}, all T"] = all_T[name]
            tests[f"{name}, T = {size(longest)}"] = late[name]
    survivors = "; ".join(compare.holm(tests)) or "none"
    print(f"\nnot 0 after Holm's correction for {len(tests)}: {survivors}")
    missing = [name for name in compare.LINES if name not in whole]
    if missing:
        print(f"not in all of these cells: {', '.join(missing)}")

    verb = VERBS[verdict(all_T["Power (fitted), averaged"])]
    rows = {name: (all_T[name][0], *interval(all_T[name]), when[name]) for name in order}
    return dict(title=f"{kind}: averaged Power {verb} {other}", other=other, rows=rows)
