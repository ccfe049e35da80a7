"""Tables and figure titles for fit.py: what minima and comparisons say, in words.

`found` is a list of minima as fit.minima returns them (shape, T, batch_size, seed, loss, x, ...).
"""

import math
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tools import compare, figures
from tools.compare import above, loss_of
from tools.figures import short, size


def group(found: list, label: Callable) -> dict:
    groups: dict = {}
    for m in sorted(found, key=lambda m: (m.T, m.batch_size)):
        groups.setdefault(label(m), []).append(m)
    return groups


def middle_shape(found: list) -> list:
    """The minima of one shape, in the middle between narrow and wide."""
    shapes = list(dict.fromkeys(m.shape for m in found))
    return [m for m in found if m.shape == shapes[len(shapes) // 2]]


def moved(groups: dict) -> float:
    """The best learning rate of the last group as a multiple of the first group's."""
    first, *_, last = [*groups.values(), *groups.values()]
    return 2 ** (mean_x(last) - mean_x(first))


def reasons(found: list) -> str:
    """Why minima are left out: how many for each reason."""
    why_not = Counter(m.why_not for m in found if m.why_not)
    return ", ".join(f"{n} {why}" for why, n in why_not.items())


def mean_x(found: list) -> float:
    x = [m.x for m in found if not m.why_not]
    return float(np.mean(x)) if x else math.nan


def cost_beside(found: list, step: float) -> tuple[float, float]:
    """Mean loss above the lowest, of runs a step below the best value and a step above (nats)."""
    costs: dict = {-1: [], 1: []}
    for m in found:
        best = min(m.points, key=lambda point: point[1])[0]
        for side, some in costs.items():
            there = lambda x: abs(x - best - side * step) < 0.01 * step
            some += [y - m.loss for x, y in m.points if math.isfinite(y) and there(x)]
    return tuple(float(np.mean(some)) if some else math.nan for some in costs.values())


# ---------------------------------------------------------------------------------------------
# WSD


def draw_valleys(path: Path, found: list) -> None:
    """The middle shape: valleys for each T, and for each batch size at the longest T."""
    some = middle_shape(found)
    longest = [m for m in some if m.T == max(m.T for m in some)]
    batch, T = min(longest, key=lambda m: m.loss).batch_size, longest[0].T
    by_T = group([m for m in some if m.batch_size == batch], lambda m: size(m.T))
    by_batch = group(longest, lambda m: f"batch size {m.batch_size:g}")
    tokens = T / min(m.T for found in by_T.values() for m in found)
    batches = max(m.batch_size for m in longest) / min(m.batch_size for m in longest)
    rates = "learning rate ({}, {})".format
    upper = dict(groups=by_T, xlabel=rates(some[0].shape, f"batch size {batch:g}"), log=True)
    upper["title"] = f"{tokens:.0f}× the tokens, {moved(by_T):.2f}× the best learning rate"
    lower = dict(groups=by_batch, xlabel=rates(some[0].shape, f"T = {size(T)}"), log=True)
    lower["title"] = f"{batches:.0f}× the batch size, {moved(by_batch):.1f}× the best learning rate"
    figures.draw_valleys(path, [upper, lower], sharex=True)


def draw_batches(path: Path, found: list, law: dict) -> None:
    """Figure 3 of the paper, for the middle shape; found: usable minima."""
    some = middle_shape(found)
    lines = lines_of(some, "T", "batch_size", "T = {}")
    xlabel = f"batch size (sequences of {law['seq_len']} tokens), {some[0].shape}"
    title = f"The best learning rate grows as beta^{law['q']:.2f}"
    figures.draw_minima(path, lines, title, xlabel, "best learning rate", "{:.3g}".format, short)


def lines_of(found: list, by: str, x: str, label: str) -> dict:
    """{label: {log2 of x: best values of the seeds}}"""
    lines: dict = {}
    for m in sorted(found, key=lambda m: (getattr(m, by), getattr(m, x))):
        name = label.format(size(m.T) if by == "T" else f"{m.batch_size:g}")
        lines.setdefault(name, {}).setdefault(math.log2(getattr(m, x)), []).append(m.x)
    return lines


def beyond(m, lr: float) -> None:
    """Print what the law's learning rate costs in a cell that a search has covered."""
    cost = np.interp(math.log2(lr), *zip(*m.points)) - m.loss
    why_not = f" ({m.why_not})" if m.why_not else ""
    print(f"\nbeyond the grid: {m.shape}, T = {size(m.T)}, batch size {m.batch_size:g}: the law "
          f"says {lr:.4f}, a search finds {2**m.x:.4f}{why_not}; loss {m.loss + cost:.4f} there, "
          f"{m.loss:.4f} at its best, {cost / m.loss:+.2%}")  # fmt: skip


NEXT = ("preset data tokenizer n_layer n_embd n_head n_ffn seq_len base_width warmup_tokens dtype "
        "batch_size weight_decay").split()  # fmt: skip
CHOSEN = {"out", "schedule", "lr", "total_tokens", "decay_tokens", "power_a", "power_b", "seed"}


def next_commands(records: list[dict], lr: Callable, law: dict) -> str:
    """Commands that train the best run with 4 times its tokens; lr: (T, batch_tokens) -> rate."""
    best = min(records, key=loss_of)
    typed = [w[2:].split("=")[0] for w in shlex.split(best.get("command") or "") if w[:2] == "--"]
    words = []
    for name in dict.fromkeys(NEXT + [name.removeprefix("no-") for name in typed]):
        value = best.get(name)
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None and name not in CHOSEN:
            words += [f"--{name}", str(value)]
    T, batch_tokens = 4 * best["total_tokens"], best["batch_size"] * best["seq_len"]
    command = f"python train.py {shlex.join(words)} --total_tokens {T:.0f} --schedule"
    power = f"--power_a {law['a_paper']:.3g} --power_b {law['b_paper']:.3g}"
    return (f"\nthe best run, with 4 times its tokens, under WSD and under Power:\n{command} wsd "
            f"--lr {lr(T, batch_tokens):.3g}\n{command} power {power}\n")  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Transfer across widths, and Power's a and b


def transfer(found: list, out: Path) -> None:
    """Print and draw the best learning rate of every width, with and without muP."""
    print(f"T = {size(found[0].T)}, batch size {found[0].batch_size:g}; cost: loss at the best "
          "learning rate of the narrowest width, above the lowest\n")  # fmt: skip
    print(f"{'':<10}{'width':>6}  {'best learning rate, each seed':<32}{'cost':>8}")
    panels = []
    for name, title in (("muP", "With μP"), ("standard", "Without μP")):
        some = [m for m in found if m.shape.endswith(", standard") == (name == "standard")]
        groups, at = group(some, lambda m: m.shape.removesuffix(", standard")), None
        widths = [shape.removeprefix("width ") for shape in groups]
        for width, minima in zip(widths, groups.values()):
            ((x, loss, _),) = compare.mean_valleys(minima, 1).values()
            at = x[np.argmin(loss)] if at is None else at
            beyond = "" if x[0] <= at <= x[-1] else " or more"
            best = ", ".join(f"{2**m.x:.4f}" for m in minima if not m.why_not)
            cost = np.interp(at, x, loss) - min(loss)
            print(f"{name:<10}{width:>6}  {best:<32}{cost:8.4f}{beyond}")
        wider = float(widths[-1].split(",")[0]) / float(widths[0].split(",")[0])
        title = f"{title}: {wider:.0f}× the width, {moved(groups):.2f}× the learning rate"
        xlabel = "learning rate (triangle: minimum of a seed)"
        panels.append(dict(groups=groups, title=title, xlabel=xlabel, log=True))
    figures.draw_valleys(out / "transfer.png", panels[::-1], sharex=True)
    print(f"\n{out}: transfer.png")


def power(scans: dict[str, list], center: dict, out: Path) -> None:
    """Print and draw the best a and b for every T and batch size. scans: minima over a, over b."""
    good = {name: [m for m in found if not m.why_not] for name, found in scans.items()}
    if not any(good.values()):
        raise ValueError(f"no best a or b: {reasons(scans['a'] + scans['b'])}")
    for name, found in scans.items():
        table_of_best(name, found, good[name])
    figures.draw_valleys(out / "power.png", [power_panel(n, scans[n], center) for n in scans])
    if good["b"]:
        x = np.array([m.x for m in good["b"]])
        title = f"The best b is {x.mean():.2f} ± {x.std():.2f} (standard deviation)"
        lines = lines_of(good["b"], "batch_size", "T", "batch size {}")
        figures.draw_minima(out / "best_b.png", lines, title, "run length T (tokens)", "b", size)
    print(f"{out}: power.png" + ", best_b.png" * bool(good["b"]))


def table_of_best(name: str, found: list, good: list) -> None:
    value = (lambda m: 2**m.x) if name == "a" else (lambda m: m.x)
    left_out = f" ({reasons(found)})" * (len(good) < len(found))
    if not good:
        return print(f"no best {name}{left_out}\n")
    print(f"best {name}, mean over seeds{left_out}")
    batches = sorted({m.batch_size for m in found})
    print(f"{'T':>8} " + "".join(f"{f'batch {B:g}':>11}" for B in batches))
    for T in sorted({m.T for m in found}):
        at = lambda B: [value(m) for m in good if (m.T, m.batch_size) == (T, B)] or math.nan
        print(f"{size(T):>8} " + "".join(f"{np.mean(at(B)):11.3f}" for B in batches))
    x = np.array(list(map(value, good)))
    print(f"all: mean {x.mean():.3f}, standard deviation {x.std():.3f}, "
          f"from {x.min():.3f} to {x.max():.3f}, {len(x)} minima")  # fmt: skip
    step, text = (1, "a factor of 2") if name == "a" else (0.06, "0.06")
    low, high = cost_beside(found, step)
    print(f"{text} below the best {name} costs {low:.3f} nats, above it {high:.3f}\n")


def power_panel(name: str, found: list, center: dict) -> dict:
    """Valleys of the middle shape at the longest T, one for each batch size."""
    some, T = middle_shape(found), max(m.T for m in found)
    groups = group([m for m in some if m.T == T], lambda m: f"batch size {m.batch_size:g}")
    best = [2**x if name == "a" else x for x in map(mean_x, groups.values()) if math.isfinite(x)]
    title = f"The best {name} is {min(best):.2g} to {max(best):.2g}" if best else f"No best {name}"
    other = "b" if name == "a" else "a"
    xlabel = f"{name} ({other} = {center['power_' + other]:g}, T = {size(T)}, {some[0].shape})"
    return dict(groups=groups, title=title, xlabel=xlabel, log=name == "a")


# ---------------------------------------------------------------------------------------------
# The comparison


def comparison(records: list[dict], found: list, out: Path) -> None:
    """Print the tables, in Markdown, and draw the figures. found: usable minima of WSD."""
    lines, said = compare.comparison(records)
    first = next(r for r in records if r["seed"] >= compare.TUNING)
    batch, cells = first["batch_size"], list(lines["baseline"])
    print(f"tuned at {first['shape']}, T = {size(first['total_tokens'])}, batch size {batch}:")
    print(*said, sep="\n")
    print("\nvalidation loss in nats, mean ± standard deviation over seeds; bold: lowest schedule")
    for shape, B in dict.fromkeys((shape, B) for shape, _, B in cells):
        table_of_losses(lines, shape, B, batch)
    for kind in ("dense", "MoE"):
        some = [cell for cell in cells if ("experts" in cell[0]) == (kind == "MoE")]
        if some:
            table_above(lines, some, kind)
    print("above the baseline: without seed 0, if there are others; it chose the baseline's rates")
    print("\none run, stopped anywhere, against a √batch cosine for each T: mean, worst cell")
    mean = lambda line, cell: np.mean(list(lines[line][cell].values()))
    for line in (line for line in lines if line.startswith("Power")):
        cosine = "cosine, learning rate ∝ √batch"
        ratios = [mean(line, cell) / mean(cosine, cell) - 1 for cell in cells]
        print(f"{line:<38}{np.mean(ratios):+8.2%}{max(ratios):+8.2%}")
    print()
    draw_compare(out / "compare.png", lines, batch)
    draw_anytime(out / "anytime.png", lines, records, batch)
    rules = [line for line in ("WSD", "Power (paper)", "Power (fitted)") if line in lines]
    price(found, {f"{line}, tuned in one cell": lines[line] for line in rules}, out)
    print(f"\n{out}: compare.png, anytime.png, price.png")


def table_of_losses(lines: dict, shape: str, B: int, tuned_batch: int) -> None:
    budgets = sorted(T for s, T, b in lines["baseline"] if (s, b) == (shape, B))
    print(f"\n| {shape}, batch size {B}: T = | {' | '.join(map(size, budgets))} |")
    print("|---" * (1 + len(budgets)) + "|")
    shown = [line for line in lines if B != tuned_batch or "∝" not in line]
    losses = {line: [list(lines[line][shape, T, B].values()) for T in budgets] for line in shown}
    means = {line: np.mean(by_T, axis=1) for line, by_T in losses.items()}
    lowest = np.min([means[line] for line in shown if line != "baseline"], axis=0)
    for line, by_T in losses.items():
        cells = []
        for some, mean, low in zip(by_T, means[line], lowest):
            text = f"{mean:.3f}" + (f" ± {np.std(some, ddof=1):.3f}" if len(some) > 1 else "")
            cells.append(f"**{text}**" if line != "baseline" and mean == low else text)
        print(f"| {line} | {' | '.join(cells)} |")


def table_above(lines: dict, cells: list, kind: str) -> None:
    print(f"\n| {kind}, {len(cells)} cells | loss | perplexity | above the baseline, mean "
          "(each seed) | of the baseline | worst cell |\n|---|---|---|---|---|---|")  # fmt: skip
    mean = lambda line: np.mean([np.mean(list(lines[line][cell].values())) for cell in cells])
    for line in lines:
        by_seed, loss = above(lines, line, cells), mean(line)
        cost = np.mean(list(by_seed.values()), axis=0)
        each = ", ".join(f"{d.mean():+.3f}" for d in by_seed.values())
        shape, T, B = cells[int(cost.argmax())]
        where = f"{cost.max():+.3f} ({shape}, T = {size(T)}, batch size {B})"
        share = cost.mean() / mean("baseline")
        print(f"| {line} | {loss:.3f} | {math.exp(loss):.3f} | {cost.mean():+.4f} ({each}) | "
              f"{share:+.2%} | {where if line != 'baseline' else ''} |")  # fmt: skip


def points_above(lines: dict, line: str, shapes: list, B: int) -> dict:
    """{log2 T: loss above the baseline of each seed}, mean over shapes."""
    points = {}
    for T in sorted({T for _, T, b in lines["baseline"] if b == B}):
        cells = [cell for cell in lines["baseline"] if cell[0] in shapes and cell[1:] == (T, B)]
        if cells:
            points[math.log2(T)] = [d.mean() for d in above(lines, line, cells).values()]
    return points


def draw_compare(path: Path, lines: dict, tuned_batch: int) -> None:
    """Every schedule above the baseline: at the batch size of the tuning, and at others."""
    shapes = list(dict.fromkeys(shape for shape, *_ in lines["baseline"]))
    distance = lambda B: abs(math.log(B / tuned_batch))
    panels = []
    for B in sorted({B for *_, B in lines["baseline"]}, key=distance):
        cells = [cell for cell in lines["baseline"] if cell[2] == B]
        plain = ["WSD", "cosine", "Power (paper)", "Power (fitted)"]
        scaled = [f"{line}, learning rate ∝ √batch" for line in ("WSD", "cosine")]
        names = [name for name in plain + scaled * (B != tuned_batch) if name in lines]
        shown = {n.replace(" rate", "\nrate"): points_above(lines, n, shapes, B) for n in names}
        cost = {name: np.mean(list(above(lines, name, cells).values())) for name in names}
        where = f"{B / tuned_batch:g}× the" if B != tuned_batch else "At the"
        power, wsd = (round(cost[name], 3) + 0.0 for name in ("Power (paper)", "WSD"))  # no -0.000
        said = f"Power {power:+.3f}, WSD {wsd:+.3f}"
        panels.append(dict(title=f"{where} tuned batch size: {said}", lines=shown))
    over = "mean over shapes" if len(shapes) > 1 else shapes[0]
    figures.draw_above(path, panels, f"run length T (tokens); {over}, dots: seeds")


def draw_anytime(path: Path, lines: dict, records: list[dict], B: int) -> None:
    """If you stop here: one Power run, cosines planned for each length, and the longest one cut."""
    dense = [shape for shape, *_ in lines["baseline"] if "experts" not in shape]
    shape = max(dense, key=lambda s: (len(s), s))  # the widest
    planned = points_above(lines, "cosine", [shape], B)
    budgets = sorted(T for s, T, b in lines["baseline"] if (s, b) == (shape, B))
    name = {T: f"val_loss_at_{T}" for T in budgets[:-1]} | {budgets[-1]: "val_loss"}
    cell, seeds = (shape, budgets[-1], B), above(lines, "cosine")
    longest = [r for r in records if r["schedule"] == "cosine" and compare.cell_of(r) == cell]
    longest = [r for r in longest if r["seed"] in seeds]
    if not all(name[T] in r for r in longest for T in budgets):
        return  # some are still in training
    baseline = lambda r, T: lines["baseline"][shape, T, B][r["seed"]]
    cut = {math.log2(T): [loss_of(r, name[T]) - baseline(r, T) for r in longest] for T in budgets}
    run = points_above(lines, "Power (paper)", [shape], B)
    mean = lambda points: np.mean([np.mean(y) for y in points.values()])
    apart = mean(run) - mean(planned)
    verb = "ties with" if abs(apart) < 0.005 else "beats" if apart < 0 else "loses to"
    stopped = "the longest cosine, stopped early"
    shown = {"one Power run,\ndecayed here": run, "a cosine planned\nfor this length": planned,
             "baseline": {x: [0.0] for x in planned}, stopped: cut}  # fmt: skip
    title = f"One Power run {verb} {len(budgets)} planned cosines"
    panel = dict(title=title, lines=shown, peak=stopped)
    figures.draw_above(path, [panel], f"tokens when the run stops ({shape}, batch size {B})")


def price(found: list, lines: dict, out: Path) -> None:
    """Print and draw the price of not knowing. found: usable minima of WSD."""
    costs, n = compare.price(found, lines)
    print(f"the price of not knowing, in nats above the best measured loss; {n} cells")
    print(f"{'the learning rate depends on':<40}{'mean':>8}{'worst':>8}")
    for rule, cost in costs.items():
        cells = f"   ({len(cost)} cells)" if len(cost) != n else ""
        print(f"{rule:<40}{cost.mean():8.4f}{cost.max():8.4f}{cells}")
    if costs:
        figures.draw_price(out / "price.png", costs)
