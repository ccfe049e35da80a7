"""What fit.py prints and draws. research/paper.py uses some of it.

An *answer* here is a number and the ends of its interval, which are NaN if it has none.
Cells, trials, valleys, fits and regrets are those of fit.py.
"""

import itertools
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from tools import plots
from tools.flags import size


def show(answer, form: str = ".3f") -> str:
    """(answer, low, high) -> '-0.278 [-0.374, -0.182]'"""
    value, low, high = (format(x, form) for x in answer)
    return value if low == "nan" else f"{value} [{low}, {high}]"


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Print a table whose columns are as wide as their longest text."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *rows):
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths))
        print(line.rstrip())


def print_cells(title: str, texts: dict) -> None:
    """Print {cell: text} as a table per shape, with T down and batch sizes across."""
    for shape in dict.fromkeys(cell.shape for cell in texts):
        of_shape = {(x.T, x.batch_size): texts[x] for x in texts if x.shape == shape}
        batches = sorted({batch_size for _, batch_size in of_shape})
        rows = []
        for T in sorted({T for T, _ in of_shape}):
            rows.append([size(T), *(of_shape.get((T, B), "") for B in batches)])
        print(f"\n{title}, {shape}")
        print_table(["T", *(f"batch {B:g}" for B in batches)], rows)


def print_runs(rows: list[dict], trials: list, n_best: int) -> None:
    """Print what was fitted. trials: runs that count. n_best: cells with a minimum."""
    cells = {trial.cell for trial in trials}
    runs = f"{len(rows):,} runs of {rows[0]['schedule']}"
    if rows[0]["decay_share"]:
        runs += f" with a decay of {rows[0]['decay_share']:.0%}"
    print(f"{runs}; {n_best} of {len(cells)} cells have a minimum")
    n_left_out = len(rows) - len(trials)
    if n_left_out:
        print(f"left out {n_left_out} runs that not all seeds have, or twice")


def print_edges(bottoms: dict, valleys: dict) -> None:
    """Print which valleys are lowest at an end, and the flag that adds runs beyond it."""
    for end in ("lowest", "highest"):
        cells = [cell for cell, (_, why_not) in bottoms.items() if why_not == f"at {end}"]
        if cells:
            where = [f"T = {size(x.T)} at batch size {x.batch_size:g}" for x in cells]
            print(f"best at the {end} learning rate: {', '.join(dict.fromkeys(where))}")
            log2_lrs = beyond(end, [valleys[cell] for cell in cells])
            lrs = ",".join(f"{2**x:.4g}" for x in log2_lrs)
            print(f"  run the sweep again with --lrs {lrs}")


def beyond(end: str, valleys: list) -> list[float]:
    """Choose x from one step beyond the nearest end of valleys to 2 beyond the furthest.

    As x is log2 of a learning rate, 2 is a factor of 4.
    """
    tried = [[x for x, _ in points] for points in valleys]
    steps = [high - low for low, high in itertools.pairwise(tried[0])]
    step = max(0.5, statistics.median(steps)) if steps else 1.0
    ends = [x[0] if end == "lowest" else x[-1] for x in tried]
    n = round((max(ends) - min(ends) + 2) / step)
    if end == "lowest":
        return [max(ends) - k * step for k in range(n, 0, -1)]
    return [min(ends) + k * step for k in range(1, n + 1)]


def bottom_in_words(bottom: tuple[float, str]) -> str:
    """(-7, "") -> '0.00781', or why a valley has no bottom"""
    x, why_not = bottom
    return why_not or f"{2**x:.3g}"


def print_bottoms(bottoms: dict) -> None:
    """Print the best learning rate of every cell, or why it has none."""
    texts = {cell: bottom_in_words(bottom) for cell, bottom in bottoms.items()}
    print_cells("best learning rate", texts)


def print_seeds(bottoms: list[tuple[float, str]]) -> None:
    """Print the best learning rate of every seed, for a law of one cell."""
    print(f"  of each seed alone: {', '.join(map(bottom_in_words, bottoms))}")


ONE = {"b": "run length", "q": "batch size"}  # what does not determine an exponent


def print_law(law, numbers: dict, ratios: dict) -> None:
    """Print a law with its intervals. numbers, ratios: see fit.intervals."""
    n = "n" if law.schedule == "power" else "T"
    print(f"\nlr = a beta^q {n}^b, with 95% intervals")
    for name in ("b", "q"):
        if name in law.assumed:
            why = f"assumed, as in the preset, because the runs have one {ONE[name]}"
            print(f"  {name}  {getattr(law, name):.3g}  ({why})")
        else:
            print(f"  {name}  {show(numbers[name])}")
    print(f"  a  {show(numbers['a'], '.3g')}")
    first = next(iter(ratios))
    for shape, ratio in ratios.items():
        if shape != first:
            times = show(ratio, ".2f")
            print(f"     {times} times as high for {shape} as for {first}")


class Cost(NamedTuple):
    outside: int  # regrets that are NaN, because nobody tried the learning rate
    mean: float  # of the other regrets, NaN if there are none
    worst: float


def cost(regrets: list[float]) -> Cost:
    known = [x for x in regrets if not math.isnan(x)]
    if not known:
        return Cost(len(regrets), math.nan, math.nan)
    return Cost(len(regrets) - len(known), statistics.fmean(known), max(known))


def cost_in_words(regrets: list[float]) -> str:
    """'0.0010 (0.0030), 1 out', where out is outside of the tried learning rates."""
    outside, mean, worst = cost(regrets)
    words = []
    if mean < math.inf:
        words.append(f"{mean:.4f} ({worst:.4f})")
    elif mean == math.inf:
        words.append("diverged")
    if outside:
        words.append(f"{outside} out")
    return ", ".join(words)


def gain(regrets) -> float:
    """Mean nats by which the same learning rate loses more than the law, or NaN.

    The mean is over cells that tried both.
    """
    pairs = zip(regrets.law, regrets.same)
    tried = [(law, same) for law, same in pairs if not math.isnan(law + same)]
    if not tried:
        return math.nan
    law, same = (statistics.fmean(losses) for losses in zip(*tried))
    return same - law


def print_worth(T: float, longer: dict, larger: dict, n_seeds: int) -> None:
    """Print what laws lose in cells that they were not fitted to, and a verdict.

    longer, larger: of fit.longer_runs and fit.larger_runs at T.
    """
    # 1. A table of all regrets
    tests = {}
    for times, regrets in longer.items():
        if times > 1:  # at 1 are the longest runs of the fit
            tests[f"T about {times} x {size(T)}"] = regrets
    rows = []
    for label, regrets in (tests | larger).items():
        law, same, in_proportion = map(cost_in_words, regrets)
        if not regrets.law:
            law = "no law without it"
        if in_proportion == same:  # no batch size is larger than the fitted ones
            in_proportion = ""
        rows.append([label, str(len(regrets.law)), law, same, in_proportion])
    text = """
What does a law lose where it was not fitted? Nats above the lowest loss of a cell,
mean (worst), and beside it the same learning rate as in the fitted cells."""
    print(text)
    head = ["not fitted", "cells", "law", "same learning rate", "in proportion to batch"]
    print_table(head, rows)

    # 2. Was the law of the runs up to T worth it in longer runs?
    gains = {label: gain(regrets) for label, regrets in tests.items()}
    against = ", ".join(label for label in gains if gains[label] < 0)
    if against:
        kept = f"the learning rate of {size(T)}, kept, lost less than the law"
        print(f"Not worth it: {kept}\nof runs up to {size(T)} at {against}.")
    elif any(nats >= 0 for nats in gains.values()):
        print("In longer runs, the law lost no more than the same learning rate.")
    else:
        print("No row tests the law in longer runs.")
    if n_seeds == 1:
        print("With one seed, minima are rough, and intervals too narrow. Train three.")


# -- Figures -----------------------------------------------------------------------------


def panel(curves: dict, at, field: str, name="learning rate") -> dict:
    """The valleys of cells that differ from `at` only in a field, for plots.py.

    curves: see fit.with_curves. name: of the setting that the runs vary.
    """

    def in_words(cell) -> dict[str, str]:
        words = {"shape": cell.shape, "T": f"T = {size(cell.T)}"}
        return words | {"batch_size": f"batch size {cell.batch_size:g}"}

    shared = in_words(at)
    del shared[field]
    drawn = {}
    for cell, curve in curves.items():
        words = in_words(cell)
        label = words.pop(field).removesuffix(", standard")
        if words == shared:
            drawn[label] = curve
    xlabel = f"{name}\n{', '.join(shared.values())}"
    return dict(xlabel=xlabel, log=name != "b", valleys=drawn)


def draw_law(out: Path, at, curves: dict, best: dict, law) -> list[str]:
    """Draw the valleys beside a cell, and the law of several cells. Returns file names.

    at: the cell. curves: see fit.with_curves. best: {cell: log2 of the best learning
    rate}. law: their fit.Fit.
    """
    plots.draw_valleys(out / "valleys.png", [panel(curves, at, "T")])
    if len(best) == 1:
        return ["valleys.png"]
    plots.draw_valleys(out / "batches.png", [panel(curves, at, "batch_size")])
    lines = {}  # {T: [(batch size, best learning rate, that of the law)]}
    for cell, x in best.items():
        if cell.shape == at.shape:
            point = cell.batch_size, 2**x, 2 ** law.log2_lr(cell)
            lines.setdefault(f"T = {size(cell.T)}", []).append(point)
    plots.draw_law(out / "law.png", lines, f"batch size (sequences), {at.shape}")
    return ["valleys.png", "batches.png", "law.png"]


def draw_longer(out: Path, at, best: dict, law, T: float, longer: dict) -> list[str]:
    """Draw a law in runs longer than its fit, if some test it. Returns file names.

    law: the fit.Fit of the runs up to T. longer: see fit.longer_runs. at, best: see
    draw_law.
    """
    losses = {}  # {times: mean regrets of the law, and of its learning rate at T}
    for times, regrets in longer.items():
        if not math.isnan(gain(regrets)):
            losses[times] = cost(regrets.law).mean, cost(regrets.same).mean
    if len(losses) < 2:
        return []
    lrs = {}  # {run length: (best learning rate, that of the law)}
    for length in sorted({cell.T for cell in best}):
        cell = at._replace(T=length)
        lrs[length] = 2 ** best.get(cell, math.nan), 2 ** law.log2_lr(cell)
    where = f"{at.shape}, batch size {at.batch_size:g}"
    plots.draw_regret(out / "regret.png", T, lrs, losses, where)
    return ["regret.png"]
