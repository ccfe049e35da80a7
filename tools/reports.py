"""Text that fit.py prints, from plain values. fit.py makes every decision.

An *answer* here is a number and the ends of its interval, which are NaN if it has none.
"""

import math

from tools.flags import as_flags
from tools.plots import size


def show(answer, form: str = ".3f") -> str:
    """(answer, low, high) -> '-0.278 [-0.374, -0.182]'"""
    value, low, high = (format(x, form) for x in answer)
    return value if low == "nan" else f"{value} [{low}, {high}]"


def print_cells(title: str, texts: dict) -> None:
    """Print {cell: text} as a table per shape, with T down and batch sizes across."""
    for shape in dict.fromkeys(cell.shape for cell in texts):
        of_shape = {}
        for cell, text in texts.items():
            if cell.shape == shape:
                of_shape[cell.T, cell.batch_size] = text
        batches = sorted({batch_size for _, batch_size in of_shape})
        print(f"\n{title}, {shape}")
        print(f"{'T':>8}" + "".join(f" {f'batch {B:g}':>11}" for B in batches))
        for T in sorted({T for T, _ in of_shape}):
            row = [of_shape.get((T, B), "") for B in batches]
            print(f"{size(T):>8}" + "".join(f" {text:>11}" for text in row))


def print_regrets(rows: dict[str, tuple[int, list[tuple]]]) -> None:
    """Print {left-out cells: (their number, costs)}; no costs if the rest had no law.

    A cost is how many regrets are outside, and the mean and the worst of the others.
    There is one for the law, for its learning rate in the fitted cells, and for one in
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
    """Say how many cells are lowest at an edge, and print a command for the runs to add.

    word: "lowest" or "highest". lengths, batches and lrs: of these runs. command: of the
    sweep, or "".
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
        print("(With one seed, minima are rough, and intervals too narrow. Train three")
        print("before you rely on this.)")
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


def print_losses(shape: str, T: float, losses: dict[float, float]) -> None:
    """Print {batch size: lowest loss} of a shape and a run length."""
    print(f"\n{shape}, T = {size(T)}, lowest loss by batch size:")
    print(", ".join(f"{loss:.3f} at {batch:g}" for batch, loss in losses.items()))


def print_next_runs(
    runs: dict[str, dict], batch_size: float, law: dict, lrs: dict, is_worth: bool
) -> None:
    """Print commands for runs that are longer than those of the sweep.

    runs: {schedule: flags of train.py}. law: as in law.json. lrs: {tokens: its best
    learning rate} of the longest runs so far, and of the next. is_worth: by the tests.
    """
    (n, lr), (T, last_lr) = lrs.items()
    commands = {}
    for schedule, fields in runs.items():
        commands[schedule] = f"python train.py {as_flags(fields)}"
    print(f"\nNext, {size(T)} tokens at batch size {batch_size:g}.")
    print("No run above was as long, so test the law there.")
    if not commands:
        print(f"(no commands, because these are runs of {law['schedule']})")
        return
    if law["schedule"] != "wsd":
        print(commands[law["schedule"]])
        return
    print("If you know T, a straight line to 0:")
    print(commands["linear"])
    if law["b"] > 0 or law["q"] < 0:
        numbers = f"b is {law['b']:.3f} and q is {law['q']:.3f}"
        print(f"(No Power, which needs b <= 0 and q >= 0, and {numbers}.")
        print("More run lengths or batch sizes may change them.)")
    if "power" in commands:
        fall = f"{lr:.2g} at {size(n)} tokens, and {last_lr:.2g} at {size(T)}"
        print(f"If not, Power, whose learning rate is {fall}:")
        if not is_worth:
            print(
                "(The law was not worth it above, so compare it with the next command.)"
            )
        print(commands["power"])
        print("Or one learning rate:")
    else:
        print("If not, one learning rate:")
    print(commands["wsd"])
    print("To end Power or WSD early, press Ctrl-C, and run the command that it prints.")


def print_power(power: str, baseline: str, gap, held: str, gap_to_held) -> None:
    """Print the answers of Power minus WSD that knows T, and that holds."""
    print(f"\n{power} has the law of {baseline}, but does not know T. Its loss is")
    print(f"{show(gap)} nats from that of {baseline}, and")
    print(f"{show(gap_to_held)} from that of {held}, with one learning rate for all T.")
