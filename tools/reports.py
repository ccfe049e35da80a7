"""Text that fit.py and research/paper.py print, from plain values.

An *answer* here is a number and the ends of its interval, which are NaN if it has none.
"""

import math

from tools.plots import size


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


def print_edges(reasons: dict) -> None:
    """Print a line for each end of the tried learning rates at which cells are lowest.

    reasons: {cell: why it has no bottom}.
    """
    for end, beyond in (("lowest", "lower"), ("highest", "higher")):
        where = []
        for cell, reason in reasons.items():
            if reason == f"at {end}":
                where.append(f"T = {size(cell.T)} at batch size {cell.batch_size:g}")
        if where:
            cells = ", ".join(where)
            print(f"best at the {end} learning rate: {cells}; add {beyond} --lrs")


def print_law(law, numbers: dict, last_two: list[float]) -> None:
    """Print a law with its intervals. numbers: see fit.intervals. last_two: lengths T."""
    b, last_b, q, a = (numbers[name] for name in ("b", "last b", "q", "a"))
    first, *others = [name for name in numbers if name not in ("b", "last b", "q", "a")]
    print("\nlr = a beta^q T^b of all cells, with 95% intervals")
    print(f"  b  {show(b)}")
    if show(last_b) != show(b):
        print(f"     {show(last_b)} from T = {' to '.join(map(size, last_two))} alone")
    if math.isnan(q[0]):
        print(f"  q  {law.q:g} assumed, because all runs have one batch size")
        print(f"  a  {law.a:.3g} with this q")
    else:
        print(f"  q  {show(q)}")
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


def print_verdict(gains: dict[str, float]) -> None:
    """gains: {longer runs: nats that the same learning rate loses more than the law}."""
    against = [label for label, gain in gains.items() if gain < 0]
    if against:
        print(f"Not worth it: the same learning rate lost less at {', '.join(against)}.")
    elif any(gain >= 0 for gain in gains.values()):
        print("In longer runs, the law lost no more than the same learning rate.")
    else:
        print("No row tests the law in longer runs.")
