"""Text and figures of fit.py and research/paper.py, from plain values. They decide.

An *answer* here is a number and the ends of its interval, which are NaN if it has none.
"""

import math
from pathlib import Path

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


def print_runs(rows: list[dict], n_kept: int, n_best: int, n_cells: int) -> None:
    """Print what was fitted. n_kept: runs that count. n_best: cells with a minimum."""
    runs = f"{len(rows):,} runs of {rows[0]['schedule']}"
    if rows[0]["decay_share"]:
        runs += f" with a decay of {rows[0]['decay_share']:.0%}"
    print(f"{runs}; {n_best} of {n_cells} cells have a minimum")
    if n_kept < len(rows):
        print(f"left out {len(rows) - n_kept} runs that not all seeds have, or twice")


def print_edge(end: str, cells: list, lrs: list[float]) -> None:
    """Print that cells have their lowest loss at an end, and the flag that mends it."""
    where = [f"T = {size(cell.T)} at batch size {cell.batch_size:g}" for cell in cells]
    print(f"best at the {end} learning rate: {', '.join(dict.fromkeys(where))}")
    print(f"  run the sweep again with --lrs {','.join(f'{lr:g}' for lr in lrs)}")


def print_seeds(texts: list[str]) -> None:
    """Print the best learning rate of every seed, for a law of one cell."""
    print(f"  of each seed alone: {', '.join(texts)}")


ONE = {"b": "run length", "q": "batch size"}  # what does not determine an exponent


def print_law(law, numbers: dict, last_two: list[float]) -> None:
    """Print a law with its intervals. numbers: see fit.intervals. last_two: lengths T."""
    b, last_b, q, a = (numbers[name] for name in ("b", "last b", "q", "a"))
    first, *others = [name for name in numbers if name not in ("b", "last b", "q", "a")]
    n = "n" if law.schedule == "power" else "T"
    print(f"\nlr = a beta^q {n}^b, with 95% intervals")
    for name in ("b", "q"):
        if name in law.assumed:
            why = f"assumed, as in the preset, because the runs have one {ONE[name]}"
            print(f"  {name}  {getattr(law, name):.3g}  ({why})")
        else:
            print(f"  {name}  {show(numbers[name])}")
        if name == "b" and "b" not in law.assumed and show(last_b) != show(b):
            print(
                f"     {show(last_b)} from T = {' to '.join(map(size, last_two))} alone"
            )
    print(f"  a  {show(a, '.3g')}")
    for shape in others:
        ratio = show(numbers[shape], ".2f")
        print(f"     {ratio} times as high for {shape} as for {first}")


def print_regrets(costs: dict[str, tuple[int, list[tuple]]]) -> None:
    """Print {cells that were not fitted: (their number, costs)}, 0 if they had no law.

    A cost is how many regrets are outside, and the mean and the worst of the others.
    There is one for the law, for its learning rate in the fitted cells, and for one in
    proportion to the batch size.
    """
    rows = []
    for label, (n_cells, of_label) in costs.items():
        law, same, in_proportion = (cost_in_words(*cost) for cost in of_label)
        if n_cells == 0:
            law = "no law without it"
        if in_proportion == same:  # no batch size is larger than the fitted ones
            in_proportion = ""
        rows.append([label, str(n_cells), law, same, in_proportion])
    text = """
What does a law lose where it was not fitted? Nats above the lowest loss of a cell,
mean (worst), and beside it the same learning rate as in the fitted cells."""
    print(text)
    head = ["not fitted", "cells", "law", "same learning rate", "in proportion to batch"]
    print_table(head, rows)


def cost_in_words(outside: int, mean: float, worst: float) -> str:
    """'0.0010 (0.0030), 1 out', where out is outside of the tried learning rates."""
    words = []
    if mean < math.inf:
        words.append(f"{mean:.4f} ({worst:.4f})")
    elif mean == math.inf:
        words.append("diverged")
    if outside:
        words.append(f"{outside} out")
    return ", ".join(words)


def print_verdict(T: float, gains: dict[str, float], n_seeds: int) -> None:
    """Say whether a law of the runs up to T was worth it in longer runs.

    gains: {longer runs: nats that the same learning rate loses more than the law}.
    """
    against = [label for label, gain in gains.items() if gain < 0]
    if against:
        print(
            f"Not worth it: the learning rate of {size(T)}, kept, lost less than the law"
        )
        print(f"of runs up to {size(T)} at {', '.join(against)}.")
    elif any(gain >= 0 for gain in gains.values()):
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


def draw_all(
    out: Path, at, curves: dict, best: dict, lengths: dict, T: float, losses: dict
) -> list[str]:
    """Draw valleys beside a cell, and the law if it has several. Returns file names.

    at: the cell. curves: see fit.with_curves. best: {cell: (best learning rate, that of
    the law)}. lengths, T, losses: of a law of the runs up to T, see plots.draw_regret.
    """
    plots.draw_valleys(out / "valleys.png", [panel(curves, at, "T")])
    if len(best) == 1:
        return ["valleys.png"]
    plots.draw_valleys(out / "batches.png", [panel(curves, at, "batch_size")])
    lines = {}  # {T: [(batch size, best learning rate, that of the law)]}
    for cell, lrs in best.items():
        if cell.shape == at.shape:
            lines.setdefault(f"T = {size(cell.T)}", []).append((cell.batch_size, *lrs))
    plots.draw_law(out / "law.png", lines, f"batch size (sequences), {at.shape}")
    if len(losses) < 2:
        return ["valleys.png", "batches.png", "law.png"]
    where = f"{at.shape}, batch size {at.batch_size:g}"
    plots.draw_regret(out / "regret.png", T, lengths, losses, where)
    return ["valleys.png", "batches.png", "law.png", "regret.png"]
