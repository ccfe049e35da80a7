"""What makes the best learning rate fall? The decisions of research/results/why-laptop/rules.md.

    python research/policies.py

A *policy* is a rule for weight decay or norms. For each, this program prints b, the
exponent of the run length T in the best learning rate, and the same exponent for the
relative update |ΔW| / |W| of the best runs. Then it decides as the rules say. Three columns
are not in the rules, because we thought of them after the runs:

- *control*: twice the learning rate makes late relative updates this many times as large
- *growth*: of the norm over the last doubling of the tokens before the learning rate
  decays, at the longest T
- *kept*: what the best learning rate of the shortest T costs at the longest (nats)

It also draws a figure of research/why.md.
"""

import json
import math
import statistics
import sys
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fit
from fit import Cell, Estimate, interval, mean_of, show
from records import read_rows, read_shared
from tables import Table
from tools import flags
from tools.figures import COLORS, figure

RUNS = ROOT / "research/results/why-laptop"
POLICIES = {  # name -> folder
    "weight decay 0": "wd-0",
    "∝ 1/n, memory 5": "memory-5",
    "∝ 1/n, memory 1": "memory-1",
    "∝ 1/n, memory 1/5": "memory-0.2",
    "weight decay ∝ 1/T": "per-T",
    "weight decay 0.1": "wd-0.1",
    "weight decay 0.3": "wd-0.3",
    "hidden norms fixed": "norm-hidden",
    "all norms fixed": "norm-all",
}
# according to the explanation "memory", their best learning rate does not depend on T
FREE_OF_T = ("∝ 1/n, memory 1", "weight decay ∝ 1/T", "weight decay 0")
FIXED = "all norms fixed"


class Series(NamedTuple):
    """The usable cells of one batch size and seed."""

    T: list[int]
    x: list[float]  # log2 of the best learning rate
    update: list[float]  # log2 of the relative update of hidden matrices in the best run
    norm: list[float]  # log2 of their norm


# -- The best runs -----------------------------------------------------------------------


def cells_of(folder: str, by_seed: bool) -> list[Cell]:
    """The cells of a policy, in order of T. The folder per-T has a sweep for every T."""
    found = []
    for file in sorted((RUNS / folder).rglob("records.jsonl")):
        found += fit.cells_of(read_rows([file.parent]), by_seed=by_seed)
    return sorted(found, key=attrgetter("T"))


@cache
def best_runs(folder: str) -> dict:
    """{(batch size, seed): Series} of a policy."""
    found: dict = {}
    late = late_points(folder)
    for cell in cells_of(folder, by_seed=True):
        (seed,) = cell.losses
        series = found.setdefault((cell.batch_size, seed), Series([], [], [], []))
        for _, best in fit.minima([cell]):
            nearest = min(cell.losses[seed], key=lambda x: abs(x - best))
            series.T.append(cell.T)
            series.x.append(best)
            update, norm, _ = late[cell.batch_size, seed, cell.T, nearest]
            series.update.append(update)
            series.norm.append(norm)
    return found


def read_curves(file: Path) -> list[dict]:
    """Records with a `curve` in place of results, from the lines of a curves.jsonl."""
    shared = read_shared(file.with_name("settings.json")).get("config", {})
    records = []
    for line in file.read_text().splitlines():
        record = json.loads(line)
        config = shared | record["config"]
        records.append(
            {"config": config, "results": {}, "origin": {}, "curve": record["curve"]}
        )
    return records


@cache
def late_points(folder: str) -> dict:
    """{(batch size, seed, T, log2 lr): log2 of (relative update, norm, growth of the norm)}.

    Of the hidden matrices, at the last point of every curve before the learning rate
    decays. The growth is from half as many tokens on. NaN if the run diverged.
    """
    found = {}
    for file in sorted((RUNS / folder).rglob("curves.jsonl")):
        for record in read_curves(file):
            run = record["config"]
            curve = record["curve"]
            decay_start = run["total_tokens"] - run["decay_tokens"]
            last = max(i for i, n in enumerate(curve["tokens"]) if n <= decay_start)
            update = math.log2(curve["update_hidden"][last] or math.nan)
            n = np.log2(curve["tokens"][: last + 1])
            norms = np.log2(
                [norm or math.nan for norm in curve["norm_hidden"][: last + 1]]
            )
            growth = norms[-1] - np.interp(n[-1] - 1, n, norms)
            name = (
                run["batch_size"],
                run["seed"],
                run["total_tokens"],
                math.log2(run["lr"]),
            )
            found[name] = update, norms[-1], growth
    return found


def exponents(folder: str, field: str) -> np.ndarray:
    """Exponent of T in x, update or norm, [batch sizes, seeds]. NaN with less than four cells."""
    slopes = {}
    for name, series in best_runs(folder).items():
        slopes[name] = math.nan
        if len(series.T) >= 4:
            y = getattr(series, field)
            slopes[name] = np.polyfit(np.log2(series.T), y, 1)[0]
    return as_table(slopes)


def inside(estimate: Estimate, low: float, high: float) -> bool:
    """Does the whole interval lie between low and high?"""
    below, above = interval(estimate)
    return low < below and above < high


# -- The decisions -----------------------------------------------------------------------


def b_of(name: str) -> Estimate:
    """b of a policy."""
    return mean_of(exponents(POLICIES[name], "x"))


def from_none(name: str) -> Estimate:
    """b of a policy minus b at weight decay 0, in the seeds of both."""
    there, none = [exponents(POLICIES[n], "x") for n in (name, "weight decay 0")]
    seeds = min(there.shape[1], none.shape[1])
    return mean_of(there[:, :seeds] - none[:, :seeds])


def update_exponent(name: str) -> Estimate:
    """The exponent of T in the relative update of the best runs."""
    return mean_of(exponents(POLICIES[name], "update"))


def norm_exponent(name: str) -> Estimate:
    """The exponent of T in the norm of the best runs."""
    return mean_of(exponents(POLICIES[name], "norm"))


def memory() -> str:
    """'memory', 'forgetting by weight decay alone' or 'open'."""
    fixed = b_of(FIXED)
    flat = all(inside(b_of(name), -0.1, 0.1) for name in FREE_OF_T)
    if fixed.answer <= -0.3 and inside(fixed, -math.inf, -0.1) and flat:
        return "memory"
    if inside(fixed, -0.1, 0.1):
        return "forgetting by weight decay alone"
    return "open"


def rises() -> dict:
    """{(batch size, T): [by how much a longer warmup raises log2 of the best rate, per seed]}.

    At weight decay 0.
    """
    long = best_runs("ceiling")
    short = best_runs("wd-0")
    found: dict = {}
    for series in sorted(long):
        before = dict(zip(short[series].T, short[series].x))
        for T, x in zip(long[series].T, long[series].x):
            if T in before:
                found.setdefault((series[0], T), []).append(x - before[T])
    return found


def ceiling() -> tuple[str, float, Estimate]:
    """Was the exponent of 0 a ceiling? Then the mean rise at T <= 1.28M, and b."""
    early = [statistics.mean(rise) for (_, T), rise in rises().items() if T <= 1_280_000]
    rise = statistics.mean(early)
    b = mean_of(exponents("ceiling", "x"))
    if rise > 0.5 and b.answer <= -0.15:
        return "a ceiling", rise, b
    if rise < 0.25 and inside(b, -0.1, 0.1):
        return "no ceiling", rise, b
    return "open", rise, b


def sizes() -> dict:
    """{(low, high) weight decay: {T: mean exponent of the best rate in the weight decay}}.

    At batch size 8.
    """
    found: dict = {}
    values = ("0.01", "0.03", "0.1", "0.3")
    for low, high in zip(values, values[1:]):
        by_T: dict = {}
        before, after = best_runs(f"wd-{low}"), best_runs(f"wd-{high}")
        octaves = math.log2(float(high) / float(low))
        for (batch, seed), series in before.items():
            other = after.get((batch, seed), Series([], [], [], []))
            there = dict(zip(other.T, other.x))
            for T, x in zip(series.T, series.x):
                if batch == 8 and T in there:
                    by_T.setdefault(T, []).append((there[T] - x) / octaves)
        found[low, high] = {T: statistics.mean(some) for T, some in sorted(by_T.items())}
    return found


def one_slope() -> tuple[bool, float, list]:
    """Does one exponent of the relative update serve all policies?

    Then the range of the exponents, and the pairs of policies that differ.
    """
    slopes = {name: exponents(POLICIES[name], "update") for name in POLICIES}
    means = [np.nanmean(some) for some in slopes.values()]
    names = list(slopes)
    differ = []
    for i, one in enumerate(names):
        for two in names[i + 1 :]:
            seeds = min(slopes[one].shape[1], slopes[two].shape[1])
            gap = mean_of(slopes[one][:, :seeds] - slopes[two][:, :seeds])
            low, high = interval(gap)
            if not low <= 0 <= high:
                differ.append((one, two))
    spread = max(means) - min(means)
    return not differ and spread <= 0.1, spread, differ


# -- What is not in the rules ------------------------------------------------------------


def control(name: str) -> Estimate:
    """log2 of the factor by which twice the learning rate raises late relative updates.

    At the longest T, within a factor of 3 of the best learning rate.
    """
    late = late_points(POLICIES[name])
    longest = max(T for _, _, T, _ in late)
    slopes: dict = {}
    for (batch, seed), series in best_runs(POLICIES[name]).items():
        if series.T[-1] != longest:  # left out
            continue
        near = []
        for (B, other, T, x), (update, *_) in late.items():
            here = (B, other, T) == (batch, seed, longest)
            if here and abs(x - series.x[-1]) < math.log2(3) and math.isfinite(update):
                near.append((x, update))
        slopes[batch, seed] = np.polyfit(*zip(*near), 1)[0]
    return mean_of(as_table(slopes))


def growth(name: str, octaves=0.0) -> Estimate:
    """log2 of the growth of the norm over the last doubling of the tokens before the decay.

    At the longest T, with the best learning rate, or one that is octaves above it.
    """
    late = late_points(POLICIES[name])
    longest = max(T for _, _, T, _ in late)
    found: dict = {}
    for (batch, seed), series in best_runs(POLICIES[name]).items():
        if series.T[-1] != longest:  # left out
            continue
        there = [x for B, other, T, x in late if (B, other, T) == (batch, seed, longest)]
        nearest = min(there, key=lambda x: abs(x - series.x[-1] - octaves))
        _, _, found[batch, seed] = late[batch, seed, longest, nearest]
    return mean_of(as_table(found))


def cost_of_keeping(name: str) -> Estimate:
    """Loss at the longest T with the best rate of the shortest, minus that with its own.

    Both learning rates are those of the mean over seeds. In nats, NaN if a run at one of
    them is missing.
    """
    cells = cells_of(POLICIES[name], by_seed=False)
    best = {(cell.batch_size, cell.T): x for cell, x in fit.minima(cells)}
    shortest = cells[0].T
    longest = cells[-1].T
    costs: dict = {}
    for cell in cells_of(POLICIES[name], by_seed=True):
        batch = cell.batch_size
        if cell.T == longest and {(batch, shortest), (batch, longest)} <= best.keys():
            (seed,) = cell.losses
            x, loss = zip(*fit.valley(cell))
            at = [best[batch, shortest], best[batch, longest]]
            kept, lowest = np.interp(at, x, loss, left=math.nan, right=math.nan)
            costs[batch, seed] = kept - lowest
    if not np.isfinite(list(costs.values())).all():
        return Estimate(math.nan, [], [])
    return mean_of(as_table(costs))


def cost_beside(name: str, octaves: float) -> dict[int, float]:
    """{batch size: cost of a learning rate beside the best, at the longest T} in nats."""
    cells = cells_of(POLICIES[name], by_seed=False)
    costs = {}
    for cell in cells:
        if cell.T == cells[-1].T:
            best, _ = fit.bottom(cell)
            x, loss = zip(*fit.valley(cell))
            beside, lowest = np.interp([best + octaves, best], x, loss, right=math.nan)
            costs[cell.batch_size] = beside - lowest
    return costs


def where_norms_grow() -> tuple[np.ndarray, np.ndarray]:
    """b in the mean over the policies whose norms grow with T, and over the others.

    [batch sizes, seeds]. A mean leaves out what a policy lacks.
    """
    grows = {name: norm_exponent(name).answer > 0.1 for name in POLICIES}
    b = {name: exponents(folder, "x") for name, folder in POLICIES.items()}
    some = np.nanmean([b[name] for name in POLICIES if grows[name]], axis=0)
    others = np.nanmean([b[name] for name in POLICIES if not grows[name]], axis=0)
    return some, others


def as_table(values: dict) -> np.ndarray:
    """{(batch size, seed): value} -> [batch sizes, seeds], NaN where one is missing."""
    batches = sorted({batch for batch, _ in values})
    seeds = sorted({seed for _, seed in values})
    rows = [[values.get((batch, seed), math.nan) for seed in seeds] for batch in batches]
    return np.array(rows)


# -- The figure and the report -----------------------------------------------------------


def draw(path: Path) -> None:
    """b with its interval, a row for every policy, and at the right how the norm grows."""
    with figure(path, 3.7) as (ax,):
        right = 0.93
        for y, name in enumerate(POLICIES):
            b = b_of(name)
            growth = norm_exponent(name).answer
            color = COLORS["average"] if growth > 0.1 else COLORS["wsd"]
            low, high = np.clip(interval(b), -0.8, None)
            ax.hlines(y, low, high, color=color)
            if low == -0.8:
                ax.plot(low, y, "<", color=color, markersize=4)
            ax.plot(b.answer, y, "o", color=color)
            words = "fixed" if "fixed" in name else f"T^{growth:.1f}"
            ax.text(right, y, words, color=color, ha="right", va="center")
        ax.text(right, -1, "norm of the\nweights grows as", ha="right", va="center")
        ax.set_yticks(range(len(POLICIES)), list(POLICIES))
        ax.set_ylim(len(POLICIES) - 0.5, -1.6)
        ax.axvline(0, color="black", linewidth=0.6)
        ax.set(xlabel="exponent of T in the best learning rate", ylabel="policy")
        ax.set(xlim=(-0.83, 0.95), xticks=[-0.8, -0.6, -0.4, -0.2, 0, 0.2, 0.4])
        ax.set_title("The best learning rate falls if weights do not grow", loc="right")


def policies_table() -> Table:
    rows = []
    for name, folder in POLICIES.items():
        kept = cost_of_keeping(name)
        row = [name, show(b_of(name), 2)]
        row.append("" if folder == "wd-0" else show(from_none(name), 2))
        row += [show(norm_exponent(name), 2), show(update_exponent(name), 2)]
        row += [show(control(name), 2, log2=True), show(growth(name), 2, log2=True)]
        rows.append([*row, show(kept) if math.isfinite(kept[0]) else "-"])
    grow, others = where_norms_grow()
    for words, b in (("norm grows", grow), ("others", others), ("gap", grow - others)):
        rows.append([words, show(mean_of(b), 2), *[""] * 6])
    return Table(
        "policies",
        "Exponents of T in the best learning rate (b), in the norm of the best runs, and in "
        "the relative update, for rules of weight decay or norms (`why-laptop`: width 32, "
        "batch sizes 2, 8 and 32, T from 320k to 5.12M, three seeds). *Minus none*: b minus "
        "that at weight decay 0. *Control*: twice the learning rate makes late relative "
        "updates this many times as large. *Growth*: of the norm, over the last doubling of "
        "the tokens before the decay. *Kept*: what the best learning rate of T = 320k costs at "
        "5.12M. The last rows are means over the policies whose norms grow with T and over the "
        "others, and their difference.",
        ["policy", "b", "minus none", "norm", "update", "control", "growth", "kept"],
        rows,
    )


def decisions_table() -> Table:
    verdict, rise, b = ceiling()
    same, spread, differ = one_slope()
    answers = {
        "memory, or forgetting by weight decay alone?": memory(),
        "a ceiling at weight decay 0?": verdict,
        "rise of log2 of the best learning rate, warmup 320k, T up to 1.28M": f"{rise:.2f}",
        "b with the warmup of 320k": show(b, 2),
        "one exponent of the relative update?": "yes" if same else "no",
        "largest exponent of the update minus the smallest": f"{spread:.2f}",
        "differences of these exponents that exclude 0": f"{len(differ)} of 36",
    }
    for batch_size in (8, 32):
        early = []
        for (B, T), rise_of_seeds in rises().items():
            if B == batch_size and T <= 1_280_000:
                early.append(np.mean(rise_of_seeds))
        answers[f"rise at batch size {batch_size}"] = f"{np.mean(early):.2f}"
    for (low, high), by_T in sizes().items():
        name = f"exponent in the weight decay, {low} to {high}, batch size 8"
        answers[name] = f"{statistics.mean(by_T.values()):.2f}"
    for name in ("weight decay 0", "weight decay 0.1"):
        for words, octaves in (("half", -1), ("twice", 1)):
            cost = statistics.mean(cost_beside(name, octaves).values())
            answers[f"cost of {words} the best learning rate, {name}"] = f"{cost:.3f}"
    return Table(
        "policies, decisions",
        "By the rules of `why-laptop`. The costs are at T = 5.12M.",
        ["question", "answer"],
        [list(row) for row in answers.items()],
    )


def tables() -> list[Table]:
    return [policies_table(), decisions_table()]


def draw_all() -> None:
    draw(ROOT / "assets/policies.png")


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("policies.py", __doc__).parse_args(argv)
    print(*tables(), sep="\n\n")
    draw_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
