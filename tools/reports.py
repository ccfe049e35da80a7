"""Text that fit.py prints, from plain values. fit.py makes every decision.

An *answer* here is a number and the ends of its interval, which are NaN if it has none.
"""

import math

from tools.plots import size


def show(answer, form: str = ".3f") -> str:
    """(answer, low, high) -> '-0.278 [-0.374, -0.182]'"""
    value, low, high = (format(x, form) for x in answer)
    return value if low == "nan" else f"{value} [{low}, {high}]"


def print_cells(title: str, texts: dict) -> None:
    """Print {cell: text} as a table per shape, with T down and batch sizes across."""
    for shape in dict.fromkeys(cell.shape for cell in texts):
        some = {}
        for cell, text in texts.items():
            if cell.shape == shape:
                some[cell.T, cell.batch_size] = text
        batches = sorted({batch_size for _, batch_size in some})
        print(f"\n{title}, {shape}")
        print(f"{'T':>8}" + "".join(f" {f'batch {B:g}':>11}" for B in batches))
        for T in sorted({T for T, _ in some}):
            row = [some.get((T, B), "") for B in batches]
            print(f"{size(T):>8}" + "".join(f" {text:>11}" for text in row))


def print_regrets(rows: dict[str, tuple[int, list[tuple]]]) -> None:
    """Print {left-out cells: (their number, costs)}; no costs if the rest had no law.

    A cost is how many regrets are outside, and the mean and the worst of the others. There
    is one for the law, for its learning rate in the fitted cells, and for one in
    proportion to the batch size.
    """
    text = """
What does a law lose where it was not fitted? Nats above the lowest loss of a cell,
mean (worst), on a smooth curve, so perhaps below the noise of a seed. Beside it, the
same learning rate as in the fitted cells, and one in proportion to the batch size.
"""
    print(text)
    columns = [f"{name:<20}" for name in ("law", "same learning rate", "in proportion")]
    print(f"{'not fitted':<20}cells  {'  '.join(columns)}".rstrip())
    n_outside = 0
    for label, (n_cells, costs) in rows.items():
        if not costs:
            print(f"{label:<20}no law without it")
            continue
        line = f"{label:<20}{n_cells:>5}"
        before = ""
        for outside, mean, worst in costs:
            n_outside += outside
            text = cost_in_words(outside, mean, worst)
            # a longer T, for example, does not change what is in proportion to the batch
            line += f"  {text if text != before else '':<20}"
            before = text
        print(line.rstrip())
    if n_outside:
        print("out: outside the learning rates that the sweep tried, and in no mean")


def cost_in_words(outside: int, mean: float, worst: float) -> str:
    words = []
    if mean < math.inf:
        words.append(f"{mean:.4f} ({worst:.4f})")
    elif mean == math.inf:
        words.append("diverged")
    if outside:
        words.append(f"{outside} out")
    return ", ".join(words)


def print_edge(
    word: str, n_cells: int, lengths: list, batches: list, lrs: list, command: str
) -> None:
    """Say how many cells are lowest at an edge, "lowest" or "highest", and the runs to add.

    lengths, batches and lrs: of these runs. command: of the sweep, or "".
    """
    where = ", ".join(map(size, lengths))
    print(f"\n{n_cells} cells are left out (T = {where}), because their lowest loss")
    print(f"is at the {word} learning rate that we know. Add these runs:")
    rates = ",".join(f"{lr:.4g}" for lr in lrs)
    budgets = ",".join(f"{T:.0f}" for T in lengths)
    sizes = ",".join(f"{batch_size:g}" for batch_size in batches)
    print(f"{command} --lrs {rates} --budgets {budgets} --batches {sizes}".strip())


def print_verdict(
    T: float, against: list[str], tested: bool, n_seeds: int, reversed_by: list[str]
) -> None:
    """Say whether a law of the runs up to T was worth it in longer runs.

    against: labels of the longer runs in which it was not. tested: was any row known?
    reversed_by: seeds without which the order at the longest T is reversed.
    """
    if against:
        print(
            f"\nKeeping the learning rate of {size(T)} lost less than the law of runs up"
        )
        print(f"to {size(T)} at: {', '.join(against)}.")
    elif tested:
        print(
            f"\nIn longer runs, the law of runs up to {size(T)} lost no more than keeping"
        )
        print("its learning rate.")
    else:
        print("\nNo row above tests the law in longer runs.")
    if n_seeds == 1:
        print("(With one seed, minima are rough. Train three before you rely on this.)")
    for seed in reversed_by:
        print(f"(Without seed {seed}, the order at the longest T is reversed.)")


def print_law(b, last_b, b_paper, q, a, ratios: dict, last_T: tuple, first: str) -> None:
    """Print the answers of a law, leaving out what would repeat b.

    last_b: b between the two longest T, which are last_T. ratios: {shape: its a relative
    to that of the first}.
    """
    print("\nlr = a beta^q T^b of all cells, with 95% intervals")
    print(f"  b  {show(b)}")
    if show(last_b) != show(b):
        before, last = map(size, last_T)
        print(f"     {show(last_b)} from T = {before} to {last} alone")
    if show(b_paper) != show(b):
        print(f"     {show(b_paper)} as the paper fits it, with q = 1")
    print(f"  q  {show(q)}")
    print(f"  a  {show(a, '.3g')}")
    for shape, ratio in ratios.items():
        print(f"     {show(ratio, '.2f')} times as high for {shape} as for {first}")


def print_differences(rows: dict[str, tuple], head: list[str]) -> None:
    """Print {line: its answers} as a table of Markdown."""
    print(f"| {' | '.join(head)} |")
    print("|" + "---|" * len(head))
    for line, answers in rows.items():
        print(f"| {' | '.join([line, *map(show, answers)])} |")
