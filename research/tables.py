"""All tables of our runs, from the records in results/.

    python research/tables.py > research/TABLES.md

A page that quotes a number has <!--n:TABLE / ROW / COLUMN--> before it, and a test compares
the two.
"""

import itertools
import math
import statistics
import sys
from collections import defaultdict
from functools import cache
from operator import itemgetter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

import config
import fit
import paper
import presets
import schedules
from schedules import best_lr
from tools import files
from tools.flags import size
from tools.reports import cost, show
from tools.student import student

RESULTS = ROOT / "research/results"
HEAD = """# All tables

`python research/tables.py` prints this page from the records in results/. Losses are in nats
per token, and brackets are 95% intervals ([how](notes.md#how-we-fit-and-compare))."""


def table(name: str, about: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join([f"## {name}\n\n{about}\n", *lines])


# -- The records -------------------------------------------------------------------------


@cache
def rows_in(folder: str) -> list[dict]:
    """The runs of a folder of results/ as flat dicts of settings, results and origin."""
    shared = files.read_json(RESULTS / folder / "settings.json")
    rows = []
    for record in files.read_records(RESULTS / folder / "records.jsonl"):
        row = {"loss": files.loss_of(record)}
        for part in ("config", "results", "origin"):
            row |= shared[part] | record.get(part, {})
        rows.append(row)
    return rows


@cache
def loss_curves() -> dict:
    """{"power-trunk-0": {"tokens": [...], "val_loss": [...]}} of the default run."""
    return files.read_json(RESULTS / "curves-laptop/curves.json")


def over_seeds(values) -> list[float]:
    """The mean of values [seeds], and the ends of its interval by Student's t."""
    n = len(values)
    half = student(n - 1) * np.std(values, ddof=1) / math.sqrt(n)
    mean = np.mean(values)
    return [mean, mean - half, mean + half]


# -- Laws --------------------------------------------------------------------------------

SWEEPS = {
    "warmup 2,000": "wsd-laptop",
    "warmup 32,000": "wsd-laptop-long",
    "weight decay 0": "memory-laptop/0",
    "weight decay 0.1": "memory-laptop/0.1",
    "weight decay 0.3": "memory-laptop/0.3",
    "recipe": "recipe/sweep",
}


def minima(runs: list[fit.Trial], **curve) -> dict[fit.Cell, float]:
    """The x of the minimum of every cell that has one."""
    return fit.bottoms(fit.valleys_of(runs), **curve)


@cache
def runs_with_minima(folder: str) -> list[fit.Trial]:
    """The runs of the cells that have a best learning rate."""
    runs = fit.trials_of(rows_in(folder))
    best = minima(runs)
    return [run for run in runs if run.cell in best]


def b_and_q(runs: list[fit.Trial]) -> np.ndarray:
    """The answers and intervals of b and q [2, 3]."""

    def answer(some: list[fit.Trial]) -> np.ndarray:
        law = fit.fit_law(minima(some))
        return np.full(2, np.nan) if law.assumed else np.array([law.b, law.q])

    return fit.jackknife(runs, answer)


def laws() -> str:
    rows = []
    for name, folder in SWEEPS.items():
        runs = runs_with_minima(folder)
        b, q = b_and_q(runs)
        b_paper, _ = fit.jackknife(runs, paper.fit_paper_law)
        n_cells = len({run.cell for run in runs})
        answers = [show(answer, ".2f") for answer in (b, q, b_paper)]
        rows.append([name, f"{len(rows_in(folder)):,}", str(n_cells), *answers])
    about = (
        "lr = a beta^q T^b in our sweeps of WSD. *Warmup*: batch sizes 1 to 8, T from 80k to "
        "1.28M, three seeds (`wsd-laptop`, `wsd-laptop-long`). *Weight decay*: width 32, batch "
        "sizes 2, 8 and 32, T from 320k to 5.12M, a warmup of 80,000 tokens, two seeds "
        "(`memory-laptop`). *Recipe*: manual pages, T from 40k to 640k, a decay of 30%, three "
        "seeds (`recipe/sweep`). The others have a weight decay of 0.1. *Paper*: q = 1, at the "
        "three best batch sizes of every T."
    )
    return table("laws", about, ["sweep", "runs", "cells", "b", "q", "b, paper"], rows)


def widths() -> str:
    runs = runs_with_minima("wsd-laptop")
    shapes = fit.shapes_of([run.cell for run in runs])

    def log2_ratios(some: list[fit.Trial]) -> np.ndarray:
        """log2 of a, relative to the first width."""
        log2_a = fit.fit_law(minima(some)).log2_a
        return np.array([log2_a[shape] - log2_a[shapes[0]] for shape in shapes])

    rows = []
    for shape, ratio in zip(shapes, fit.jackknife(runs, log2_ratios)):
        b, _ = b_and_q([run for run in runs if run.cell.shape == shape])
        a = "1.00" if shape == shapes[0] else show(2**ratio, ".2f")
        rows.append([shape.removeprefix("width "), a, show(b, ".2f")])
    about = "`a` relative to width 32, and b of every width (`wsd-laptop`)."
    return table("widths", about, ["width", "a", "b"], rows)


def cost_beside(runs: list[fit.Trial], step: float) -> float:
    """Mean loss above the lowest, a step beside the best x that we tried, over all cells."""
    costs = []
    for points in fit.valleys_of(runs).values():
        best, lowest = fit.lowest(points)
        for x, loss in points:
            if math.isclose(x - best, step, rel_tol=0.01) and loss < math.inf:
                costs.append(loss - lowest)
    return statistics.fmean(costs)


def valleys() -> str:
    runs = runs_with_minima("wsd-laptop")
    best = {}
    for cell, x in minima(runs).items():
        if cell.shape == "width 64":
            best[cell.T, cell.batch_size] = 2**x
    rows = [
        ["16 times T", f"{best[1_280_000, 2] / best[80_000, 2]:.2f}"],
        ["8 times the batch size", f"{best[1_280_000, 8] / best[1_280_000, 1]:.1f}"],
        ["half the best learning rate costs", f"{cost_beside(runs, -1):.3f}"],
        ["twice the best learning rate costs", f"{cost_beside(runs, 1):.3f}"],
    ]
    about = (
        "By how much the best learning rate changes (width 64; from T = 80k to 1.28M at batch "
        "size 2, and from batch size 1 to 8 at T = 1.28M), and what a learning rate beside it "
        "costs on average over all cells (`wsd-laptop`)."
    )
    return table("valleys", about, ["", "answer"], rows)


def longer_than(T: int, folder: str, words: str = "") -> dict[str, fit.Regrets]:
    """{"T = 320k": what the law of the runs up to T loses in longer ones}, see fit.py."""
    valleys = fit.valleys_of(runs_with_minima(folder))
    by_times = fit.longer_runs(valleys, T)
    return {f"T = {size(n * T)}{words}": found for n, found in by_times.items() if n > 1}


def worth() -> str:
    T = 160_000
    regrets = longer_than(T, "wsd-laptop")
    valleys = fit.valleys_of(runs_with_minima("wsd-laptop"))
    regrets |= fit.larger_runs(valleys, T)
    regrets |= longer_than(T, "wsd-laptop-long", ", warmup 32,000")
    rows = []
    for name, of_cells in regrets.items():
        law, kept, in_proportion = map(cost, of_cells)
        others = [f"{kept.mean:.4f}", f"{in_proportion.mean:.4f}"]
        if in_proportion == kept:  # no batch size is larger than the fitted ones
            others[1] = ""
        n_cells = str(len(of_cells.law))
        rows.append([name, n_cells, f"{law.mean:.4f}", f"{law.worst:.4f}", *others])
    about = (
        f"What a law of the cells up to T = {size(T)}, or without the largest batch size or "
        "the widest model, loses in the cells that it was not fitted to, in nats above the "
        "minimum of their valleys. As valleys are smooth, this can be below the noise of a seed. "
        "*Kept*: the law's learning rate at the longest T and the "
        "largest batch size that were fitted. *In proportion*: the same, in proportion to the "
        "batch size."
    )
    head = ["not fitted", "cells", "law", "its worst cell", "kept", "in proportion"]
    return table("worth", about, head, rows)


def transfer() -> str:
    runs = fit.trials_of(rows_in("transfer-quick"))
    rows = []
    for name, suffix in (("with μP", ""), ("without μP", fit.STANDARD)):
        shapes = [f"width {width}{suffix}" for width in (32, 64, 128)]

        def log2_best(some: list[fit.Trial]) -> np.ndarray:
            """log2 of the best learning rate of every width, and of the last / the first."""
            best = {cell.shape: x for cell, x in minima(some).items()}
            x = [best[shape] for shape in shapes]
            return np.array([*x, x[-1] - x[0]])

        some = [run for run in runs if run.cell.shape in shapes]
        *best, ratio = 2 ** fit.jackknife(some, log2_best, [fit.seed_of])
        rows.append([name, *(show(lr, ".4f") for lr in best), show(ratio, ".2f")])
    about = "Best learning rate by width, T = 80k, batch size 4, six seeds (`transfer-quick`)."
    return table("transfer", about, ["", "width 32", "64", "128", "128 over 32"], rows)


def power() -> str:
    rows = []
    scans = (
        # varied, at this value of the other, and an error
        ("a", "power_b", -0.51, 1, "a factor of 2"),
        ("b", "power_a", 16.0, 0.06, "0.06"),
    )
    for name, other, center, step, words in scans:

        def x(row: dict) -> float:
            return math.log2(row["power_a"]) if name == "a" else row["power_b"]

        runs = fit.trials_of(
            [r for r in rows_in("power-laptop") if r[other] == center], x
        )
        best = []  # of every seed, by the parabola of fit.py
        costs = []
        for seed in sorted({run.seed for run in runs}):
            some = [run for run in runs if run.seed == seed]
            found = minima(some, degree=2, window=5).values()
            best += [2**bottom if name == "a" else bottom for bottom in found]
            costs += [cost_beside(some, -step), cost_beside(some, step)]
        row = [name, f"{statistics.mean(best):.2f}", f"{statistics.stdev(best):.2f}"]
        rows.append([*row, f"{statistics.mean(costs):.3f} for {words}"])
    about = (
        "The best a at b = -0.51 and the best b at a = 16, over all T, batch sizes and seeds, "
        "and what an error costs (`power-laptop`, width 64)."
    )
    head = ["", "mean", "standard deviation", "cost of an error"]
    return table("power", about, head, rows)


# -- The comparison ----------------------------------------------------------------------

KINDS = {"dense": "compare-laptop", "MoE": "compare-laptop-moe"}


@cache
def tested(folder: str) -> list[fit.Trial]:
    """The runs that test the lines of a comparison, without those that tuned them.

    The x of a run is its line.
    """
    rows = [row for row in rows_in(folder) if "line" in row]
    return fit.trials_of(rows, itemgetter("line"))


def difference(one: str, other: str, kind: str, T: int | None = None) -> str:
    """Mean loss of a line minus another's, at all T or one."""
    runs = [run for run in tested(KINDS[kind]) if T in (None, run.cell.T)]
    if other not in {run.setting for run in runs}:
        return ""

    def answer(some: list[fit.Trial]) -> np.ndarray:
        of_line = defaultdict(list)
        for run in some:
            of_line[run.setting].append(run.loss)
        return np.array([np.mean(of_line[one]) - np.mean(of_line[other])])

    return show(fit.jackknife(runs, answer)[0])


def comparison() -> str:
    losses = defaultdict(list)
    for run in tested("compare-laptop"):
        losses[run.setting].append(run.loss)
    rows = []
    for line in sorted(losses, key=lambda line: np.mean(losses[line])):
        row = [line, f"{np.mean(losses[line]):.3f}"]
        gaps = ["", ""]
        if line != paper.BASELINE:
            gaps = [
                difference(line, paper.BASELINE, "dense"),
                difference(line, paper.BASELINE, "dense", 1_280_000),
            ]
        rows.append(row + gaps)
    about = (
        "Mean loss, and its difference from a WSD that knew T, over all T and at the longest. "
        "Widths 64 and 128, batch sizes 2 and 8, T from 80k to 1.28M, five seeds, of which "
        "each tuned every schedule for itself (`compare-laptop`). *WSD* holds one learning "
        "rate for all T, scaled by the root of the batch size. *Fitted*: ∝ T^-0.3, or n^-0.3 "
        "for Power. *Paper*: the exponents of the paper, and its ceiling of 0.02, which at "
        "batch size 8 holds until up to 130,000 tokens."
    )
    head = ["line", "loss", f"minus {paper.BASELINE}", "at T = 1.28M"]
    return table("comparison", about, head, rows)


def pairs() -> str:
    rows = []
    for one, other in (
        ("Power (fitted)", "WSD (fitted)"),
        ("Power (fitted)", "WSD"),
        ("Power (fitted)", "cosine (fitted)"),
        ("Power (fitted)", "linear to 0 (fitted)"),
        ("Power (paper)", "WSD (fitted)"),
        ("Power (paper)", "WSD"),
        ("Power (paper)", "cosine (fitted)"),
    ):
        row = [f"{one} minus {other}", difference(one, other, "dense")]
        row += [difference(one, other, "dense", T) for T in (160_000, 1_280_000)]
        rows.append([*row, difference(one, other, "MoE")])
    about = (
        "Differences of these lines. MoE: width 64 with eight experts, batch sizes 2 and 8, "
        "five seeds (`compare-laptop-moe`)."
    )
    head = ["lines", "dense, all T", "T = 160k", "T = 1.28M", "MoE, all T"]
    return table("pairs", about, head, rows)


# -- Longer runs -------------------------------------------------------------------------

LENGTHS = [320_000 * 2**k for k in range(7)]
LONGER = {  # name -> (line, weight decay)
    "WSD at one learning rate, weight decay 0": ("constant", 0.0),
    "Power (fitted)": ("Power (fitted)", 0.1),
    "WSD that knows T": ("WSD", 0.1),
    "Power (fitted), averaged": ("Power (fitted), averaged", 0.1),
}


def losses_at(line: str, weight_decay: float, T: int) -> np.ndarray:
    """The losses of a line of long-laptop [seeds].

    If we searched its learning rate at every T, a seed gets the best of the other seeds, so
    that no run chooses for itself.
    """
    tried = defaultdict(dict)  # learning rate -> seed -> loss
    for row in rows_in("long-laptop"):
        if (row["line"], row["weight_decay"], row["total_tokens"]) == (
            line,
            weight_decay,
            T,
        ):
            loss = row["average_val_loss" if "averaged" in line else "val_loss"]
            lr = row["lr"] if line in ("linear to 0", "WSD") else "tuned"
            tried[lr][row["seed"]] = math.inf if loss is None else loss
    found = []
    for seed in range(3):
        by_others = {}
        for lr, losses in tried.items():
            if len(losses) == 3:
                by_others[lr] = sum(losses[other] for other in range(3) if other != seed)
        found.append(tried[min(by_others, key=by_others.get)][seed])
    return np.array(found)


def gap(name: str, T: int) -> np.ndarray:
    """Loss minus linear to 0 [seeds], at 0.1, or at its best weight decay for a line at 0."""
    line, weight_decay = LONGER[name]
    linear = [losses_at("linear to 0", 0.1, T)]
    if weight_decay == 0:
        linear.append(losses_at("linear to 0", 0.0, T))
    return losses_at(line, weight_decay, T) - min(linear, key=np.mean)


def longer() -> str:
    lengths = LENGTHS[2:]
    rows = [[name, *(show(over_seeds(gap(name, T))) for T in lengths)] for name in LONGER]
    about = (
        "Loss minus a linear decay to 0, whose learning rate we searched at every T "
        "(`long-laptop`: width 32, batch size 8, three seeds). Weight decay is 0.1 in both, "
        "but from the line at 0 we subtract the better of linear to 0 at 0 and at 0.1. "
        "*Averaged* has an average of the weights in place of the decay over the last tenth. "
        "We tuned Power and WSD at one learning rate once, at T = 320k and 640k, and searched "
        "WSD that knows T at every T."
    )
    return table("longer", about, ["line", *map(size, lengths)], rows)


# -- How long to decay -------------------------------------------------------------------

DECAY = "decay-laptop"  # its folders have the decays none, 10 and 30, and linear
SOME = (320_000, 1_280_000, 5_120_000)
DECAYS = {"none": "none", "10": "WSD, 10%", "30": "WSD, 30%", "linear": "linear to 0"}


def tried(folder: str, **wanted) -> dict[float, np.ndarray]:
    """{learning rate, or a of Power: losses [seeds]} of the runs with these settings."""
    found = defaultdict(dict)
    for row in rows_in(f"{DECAY}/{folder}"):
        if all(row[name] == value for name, value in wanted.items()):
            x = row["power_a" if row["schedule"] == "power" else "lr"]
            found[x][row["seed"]] = row["loss"]
    return {
        x: np.array([by_seed[s] for s in sorted(by_seed)]) for x, by_seed in found.items()
    }


def lowest(losses: dict[float, np.ndarray]) -> np.ndarray:
    """The losses [seeds] at the setting with the lowest mean."""
    return min(losses.values(), key=np.mean)


def of_power(share: float, a=0.612, **wanted) -> np.ndarray | None:
    """Power, by default at the law's a, with a decay of this share [seeds]."""
    fields = dict(batch_size=8, n_embd=32, decay_shape="exp") | wanted
    return tried("trunks", schedule="power", decay_share=share, **fields).get(a)


def of_linear(T: int, batch_size=8, n_embd=32) -> np.ndarray:
    """Linear to 0 at the best of its learning rates [seeds]."""
    is_small = n_embd == 32 and T <= SOME[-1]
    fields = dict(batch_size=batch_size, n_embd=n_embd, total_tokens=T)
    return lowest(tried("linear" if is_small else "trunks", schedule="linear", **fields))


def of_wsd(share: float, T: int, batch_size=8) -> dict[float, np.ndarray]:
    """{learning rate: losses [seeds]} of WSD."""
    folder = {0.1: "10", 0.3: "30"}.get(share, "trunks")
    fields = dict(schedule="wsd", decay_share=share, decay_shape="exp")
    return tried(folder, batch_size=batch_size, total_tokens=T, **fields)


def held_lr(share: float) -> float:
    """The one learning rate of WSD with the lowest mean loss over SOME lengths."""
    by_T = [of_wsd(share, T) for T in SOME]
    common = set.intersection(*(set(losses) for losses in by_T))
    return min(common, key=lambda lr: sum(losses[lr].mean() for losses in by_T))


def of_line(schedule: str, share: float, T: int) -> np.ndarray:
    """The losses [seeds] of a line of the table `how long`, at width 32, batch size 8."""
    if schedule == "power":
        return of_power(share, total_tokens=T)
    if schedule == "wsd":
        return of_wsd(share, T)[held_lr(share)]
    return lowest(tried("trunks", schedule="cosine", total_tokens=T))


def how_long() -> str:
    lines = {}  # name -> losses by T
    for share in (0.1, 0.2, 0.3, 0.5):
        lines[f"Power, {share:.0%}"] = [of_line("power", share, T) for T in SOME]
    straight = dict(decay_shape="linear")
    lines["Power, 30%, straight"] = [
        of_power(0.3, total_tokens=T, **straight) for T in SOME
    ]
    for share in (0.1, 0.3):
        name = f"Power, {share:.0%}, 1.41 times the law's a"
        lines[name] = [of_power(share, a=0.8629, total_tokens=T) for T in SOME]
    for share in (0.1, 0.2, 0.3, 0.5):
        name = f"WSD at {held_lr(share):.4f}, {share:.0%}"
        lines[name] = [of_line("wsd", share, T) for T in SOME]
    lines["cosine"] = [of_line("cosine", 0, T) for T in SOME]
    rows = []
    for name, losses in lines.items():
        if losses[0] is None:  # not run yet
            continue
        gaps = [x - of_linear(T) for x, T in zip(losses, SOME)]
        rows.append([name, *(show(over_seeds(gap)) for gap in gaps)])
    about = (
        "Loss minus linear to 0, at the best of nine peaks for every T, by how much of the run "
        f"decays (`{DECAY}`: width 32, batch size 8, weight decay 0.1, three seeds). Power has "
        "the law of `wsd-laptop`, WSD the one learning rate with the lowest mean over the three "
        "T (of three at 20% and 50%), and the cosine the best of four peaks for every T."
    )
    return table("how long", about, ["line", *(f"T = {size(T)}" for T in SOME)], rows)


PLACES = [  # (what differs from width 32 and batch size 8, its settings)
    *(("", dict(total_tokens=T)) for T in (*SOME, 20_480_000)),
    *((", batch size 32", dict(batch_size=32, total_tokens=T)) for T in LENGTHS[1:4]),
    *((", width 64", dict(n_embd=64, total_tokens=T)) for T in SOME[1:]),
]


def difference_of(one: np.ndarray | None, other: np.ndarray | None) -> str:
    """One minus another [seeds], with an interval if there are several seeds."""
    if one is None or other is None:
        return ""
    gaps = one - other
    return show(over_seeds(gaps)) if len(gaps) > 1 else f"{gaps[0]:.3f}"


def shares() -> str:
    rows = []
    for what, place in PLACES:
        tenth, third, half = (of_power(share, **place) for share in (0.1, 0.3, 0.5))
        if third is None:
            continue
        T = place["total_tokens"]
        linear = of_linear(T, place.get("batch_size", 8), place.get("n_embd", 32))
        pairs = ((third, tenth), (half, third), (third, linear))
        texts = [difference_of(one, other) for one, other in pairs]
        rows.append([f"T = {size(T)}{what}", *texts])
    late, early = (
        of_power(0.5, total_tokens=T) - of_power(0.3, total_tokens=T)
        for T in (SOME[-1], SOME[0])
    )
    rows.append(["T = 5.12M minus T = 320k", "", show(over_seeds(late - early)), ""])
    about = (
        "Power with a decay of 30% minus the same with 10%, of 50% minus 30%, and of 30% minus "
        f"linear to 0 at the best of its peaks (`{DECAY}`). Width 32 and batch size 8, if a row "
        "does not say otherwise, three seeds (one at 20.5M)."
    )
    head = ["where", "30% minus 10%", "50% minus 30%", "30% minus linear"]
    return table("shares", about, head, rows)


def common_slope(runs: list[fit.Trial]) -> np.ndarray:
    """b of runs with one shape, with its own a for every batch size [1]."""
    best = minima(runs)
    batches = sorted({cell.batch_size for cell in best})
    design = []
    for cell in best:
        is_batch = [float(cell.batch_size == batch_size) for batch_size in batches]
        design.append([math.log2(cell.T), *is_batch])
    return paper.least_squares(design, list(best.values()))[:1]


def b_of_decay(folder: str, batches=(8, 32)) -> np.ndarray:
    """b at these batch sizes, with its interval over the seeds [3]."""
    runs = runs_with_minima(f"{DECAY}/{folder}")
    runs = [run for run in runs if run.cell.batch_size in batches]
    return fit.jackknife(runs, common_slope, [fit.seed_of])[0]


def b_by_decay() -> str:
    rows = []
    for folder, name in DECAYS.items():
        best = {}
        for cell, x in minima(runs_with_minima(f"{DECAY}/{folder}")).items():
            best[cell.batch_size, cell.T] = f"{2**x:.4f}"
        answers = [b_of_decay(folder), b_of_decay(folder, [8]), b_of_decay(folder, [32])]
        lrs = [best.get((8, T), "") for T in LENGTHS[:5]]
        lrs_32 = [best.get((32, T), "") for T in LENGTHS[1:4]]
        rows.append([name, *(show(b, ".2f") for b in answers), *lrs, ", ".join(lrs_32)])
    about = (
        "b in best learning rate = a T^b by how much of the run decays, and these learning "
        f"rates (`{DECAY}`: width 32, weight decay 0.1, three seeds, over which the intervals "
        "are). *b* is of both batch sizes, each with its own a, and T from 320k to 5.12M at "
        "batch size 8, and from 640k to 2.56M at 32, whose learning rates are in the last "
        "column. The others are at batch size 8."
    )
    head = ["decay", "b", "b at 8", "b at 32", *(size(T) for T in LENGTHS[:5]), "at 32"]
    return table("b by decay", about, head, rows)


PEAKS_OF = {  # row of schedules.PEAKS: where its best peaks are
    ("wsd", 0.0): "none",
    ("wsd", 0.1): "10",
    ("wsd", 0.3): "30",
    ("wsd", 1.0): "linear",
}


@cache
def best_peaks(schedule: str, share: float) -> dict[tuple, float]:
    """{(batch size, T): log2 of the best peak of an ending at width 32}"""
    curve = {}
    if schedule == "cosine":  # four peaks, so a parabola
        rows = [r for r in rows_in(f"{DECAY}/trunks") if r["schedule"] == "cosine"]
        curve = dict(degree=2, window=4)
    else:
        rows = list(rows_in(f"{DECAY}/{PEAKS_OF[schedule, share]}"))
        for row in rows_in(f"{DECAY}/weight-decay"):  # for batch size 2
            of_share = row["decay_share"] if row["schedule"] == "wsd" else 1.0
            is_power = row["schedule"] == "power"
            place = (is_power, of_share, row["batch_size"], row["weight_decay"])
            if place == (False, share, 2, 0.1):
                rows.append(row)
    best = minima(fit.trials_of(rows), **curve)
    return {(cell.batch_size, cell.T): x for cell, x in best.items()}


def power_ratios() -> dict[tuple, float]:
    """{(batch size, T, share): log2 of Power's best rate at n = T over WSD's best peak}

    Of a parabola through three values of a.
    """
    ratios = {}
    for share in (0.1, 0.3):
        rows = []
        for row in rows_in(f"{DECAY}/warmup"):
            warmup = 32 * row["batch_size"] * row["seq_len"]
            if (row["decay_share"], row["warmup_tokens"]) == (share, warmup):
                rows.append(row)
        wsd = best_peaks("wsd", share)
        for cell, points in fit.valleys_of(fit.trials_of(rows)).items():
            c2, c1, _ = np.polyfit(*np.array(points).T, 2)
            if (cell.batch_size, cell.T) in wsd:
                ratio = -c1 / (2 * c2) - wsd[cell.batch_size, cell.T]
                ratios[cell.batch_size, cell.T, share] = ratio
    return ratios


def peak_ratios() -> dict[tuple, dict]:
    """{row of schedules.PEAKS: {cell: log2 of its best peak over the reference's}}"""
    reference = best_peaks("wsd", 0.3)
    found = {}
    for row in schedules.PEAKS:
        if row[0] != "power":
            best = best_peaks(*row)
            found[row] = {x: best[x] - reference[x] for x in best if x in reference}
    return found | {("power", 0.3): power_ratios()}


def fitted_peaks() -> dict[tuple, tuple[float, float]]:
    """{row of schedules.PEAKS: (c, e)}, by least squares. Power has no e."""
    fitted = {}
    for row, ratios in peak_ratios().items():
        x = [math.log2(cell[1] / schedules.PEAKS_AT) for cell in ratios]
        y = list(ratios.values())
        e, c = (0.0, np.mean(y)) if row[0] == "power" else np.polyfit(x, y, 1)
        fitted[row] = (2**c, e)
    return fitted


def laptop_law() -> np.ndarray:
    """log2 a, b and q of WSD with a decay of 30%, from three sweeps with two decays."""
    design = []
    y = []
    memory = {}
    for cell, x in minima(runs_with_minima("memory-laptop/0.1")).items():
        memory[cell.batch_size, cell.T] = x
    sweeps = [(0.3, best_peaks("wsd", 0.3)), (0.1, best_peaks("wsd", 0.1)), (0.1, memory)]
    for share, best in sweeps:
        for (batch_size, T), x in best.items():
            design.append([1.0, math.log2(T), math.log2(batch_size * 128 / 4096)])
            y.append(x - math.log2(schedules.peak("wsd", share, T)))
    return np.linalg.lstsq(np.array(design), np.array(y))[0]


def laptop_a() -> float:
    """a of the law of the presets, from the bottoms of nine valleys of the preset itself.

    Each is a parabola through five peaks, divided by the peak of the law without a.
    """
    law = config.LAPTOP_LAW._replace(a=1.0)
    log2_a = []
    for cell, valley in preset_valleys().items():
        schedule, T, batch_size = cell
        if T == 400_000:
            _, *searched = presets.peaks_of(cell)
            losses = [valley[lr] for lr in searched]
            c2, c1, _ = np.polyfit(np.log2(searched), losses, 2)
            times = schedules.peak(schedule, 0.3, T)
            beta = schedules.paper_batch_size(batch_size * 128)
            log2_a.append(-c1 / (2 * c2) - math.log2(times * best_lr(T, beta, law)))
    return 2 ** np.mean(log2_a)


def preset_valleys() -> dict[tuple, dict[float, float]]:
    """{(schedule, T, batch size): {peak: mean loss}} of runs of the preset `laptop`."""
    losses = {}
    for row in rows_in("presets"):
        if row["seed"] > 0:
            cell = row["schedule"], row["total_tokens"], row["batch_size"]
            losses.setdefault(cell, {}).setdefault(row["lr"], []).append(row["loss"])
    valleys = {}
    for cell, by_lr in losses.items():
        valleys[cell] = {lr: np.mean(by_lr[lr]) for lr in sorted(by_lr)}
    return valleys


def of_presets() -> str:
    rows = []
    valleys = preset_valleys()
    for T in presets.SEEDS:
        for batch_size in (2, 8, 32):
            for schedule in presets.SCHEDULES:
                cell = schedule, T, batch_size
                rows.append(presets.row_of(cell, valleys[cell]))
    about = (
        "The preset `laptop` (width 128) under other schedules than its own, without `--lr`: "
        "its peak by the law, the lowest of this and five other peaks, a factor of √2 apart, "
        "its loss, and by how much it is above the lowest (`presets`: three seeds at 400k, one "
        f"at 3.2M). The law has a = {laptop_a():.3f}, from the nine cells at 400k: the mean of "
        "log a, with a parabola through the five other peaks. An earlier a, 0.361, from runs "
        "with seed 0, was up to 0.028 above the lowest there."
    )
    return table("presets", about, presets.HEAD, rows)


def peaks() -> str:
    rows = []
    for (schedule, share), (c, e) in fitted_peaks().items():
        name = {0.0: "none", 1.0: "linear to 0"}.get(share, f"WSD, {share:.0%}")
        name = {"cosine": "cosine to a tenth", "power": "Power"}.get(schedule, name)
        ratios = peak_ratios()[schedule, share]
        by_batch = []
        for batch_size in (2, 8, 32):
            some = [ratios[x] for x in sorted(ratios) if x[0] == batch_size]
            by_batch.append(", ".join(f"{2**ratio:.2f}" for ratio in some))
        rows.append([name, f"{c:.2f}", f"{e:.2f}", *by_batch])
    log2_a, b, q = laptop_law()
    about = (
        "The best peak of an ending over that of WSD with a decay of 30%, as c (T / 1.28M)^e, "
        "which is `schedules.PEAKS`, and the ratios in the order of T (`decay-laptop`: width "
        "32, T from 320k to 5.12M; batch size 2 only at 1.28M, cosines without 320k, where "
        "the lowest was at an edge). Power is its learning rate at n = T, over the peak of WSD "
        "with the same decay, 10% before 30%. Turned with these, the best peaks of WSD here "
        f"and in `memory-laptop/0.1` have a = {2**log2_a:.3f}, b = {b:.4f}, q = {q:.4f}. The law "
        "of the laptop presets has these b and q, and a lower a (*presets*)."
    )
    head = ["decay", "c", "e", "batch size 2", "8", "32"]
    return table("peaks", about, head, rows)


def laptop_law_costs() -> str:
    """What the law of the presets loses in all sweeps with its weight decay."""
    law = config.LAPTOP_LAW
    sweeps = {
        "WSD, 30%": (f"{DECAY}/30", "wsd", 0.3),
        "WSD, 10%": (f"{DECAY}/10", "wsd", 0.1),
        "linear to 0": (f"{DECAY}/linear", "linear", 0.0),
        "no decay": (f"{DECAY}/none", "constant", 0.0),
        "WSD, 10%, memory-laptop": ("memory-laptop/0.1", "wsd", 0.1),
        "WSD, 10%, wsd-laptop": ("wsd-laptop", "wsd", 0.1),
        "WSD, 10%, wsd-laptop-long": ("wsd-laptop-long", "wsd", 0.1),
    }
    rows = []
    for name, (folder, schedule, share) in sweeps.items():
        regrets = []
        for cell, points in fit.valleys_of(runs_with_minima(folder)).items():
            if cell.T < 300_000:
                continue
            lr = schedules.peak(schedule, share, cell.T) * best_lr(cell.T, cell.beta, law)
            regrets.append(fit.regret(points, math.log2(lr)))
        outside, mean, worst = cost(regrets)
        assert outside == 0
        rows.append([name, str(len(regrets)), f"{mean:.4f}", f"{worst:.4f}"])
    about = (
        "Loss of the law of the laptop presets above the minimum of a valley, in our sweeps "
        "with its weight decay, at T of 320k and more (widths 32, 64 and 128; batch sizes 1 "
        "to 32). Its a is from wider and deeper models (*presets*), its b and q from the first two "
        "and `memory-laptop`."
    )
    head = ["sweep", "cells", "mean", "worst"]
    return table("law of the presets", about, head, rows)


def fall() -> str:
    rows = []
    for share in (0.1, 0.3):
        held = []
        planned = []
        for T in SOME:
            power = of_line("power", share, T)
            held.append(power - of_line("wsd", share, T))
            planned.append(power - lowest(of_wsd(share, T)))
        at = f"held at {held_lr(share):.4f}"
        for name, gaps in ((at, held), ("that knows T", planned)):
            row = [show(over_seeds(x)) for x in (*gaps, np.mean(gaps, axis=0))]
            rows.append([f"{share:.0%}, WSD {name}", *row])
    about = (
        "Power at the law's a minus WSD with the same decay (as in `how long`). *Held*: at the "
        "one learning rate with the lowest mean. *That knows T*: at the best of nine for every "
        "T. We chose both afterwards, in favor of WSD."
    )
    head = ["decay and WSD", *(f"T = {size(T)}" for T in SOME), "mean"]
    return table("fall", about, head, rows)


def noise() -> str:
    rows = []
    for T in SOME[:2]:
        losses = {}
        for schedule in ("wsd", "power"):
            by_lr = tried("noise", schedule=schedule, total_tokens=T)
            losses[schedule] = np.array([by_lr[x] for x in sorted(by_lr)])  # [7, seeds]
        row = [f"T = {size(T)}"]
        for gaps in (losses["wsd"], losses["power"], losses["power"] - losses["wsd"]):
            within = math.sqrt(gaps.var(axis=0, ddof=1).mean())
            row.append(f"{within:.4f}")
        between = losses["power"].mean(axis=0).std(ddof=1)
        rows.append([*row, f"{between:.4f}"])
    about = (
        "Standard deviation of losses whose learning rates (`a` for Power) differ by 1%, within "
        f"a seed (`{DECAY}/noise`: seven runs, width 32, batch size 8, three seeds, a decay of "
        "30%). *Difference*: Power minus WSD with the same seed. *Between seeds*: of the mean "
        "of the seven."
    )
    head = ["", "WSD", "Power", "difference", "Power, between seeds"]
    return table("noise", about, head, rows)


def warmup() -> str:
    def losses_of(batch_size: int, T: int, share: float) -> dict[tuple, np.ndarray]:
        found = defaultdict(dict)
        for row in rows_in(f"{DECAY}/warmup"):
            at = (row["batch_size"], row["total_tokens"], row["decay_share"])
            if at == (batch_size, T, share):
                steps = row["warmup_tokens"] / (batch_size * 128)
                if row["warmup_tokens"] == T // 100:
                    steps = "1%"
                found[steps, row["power_a"]][row["seed"]] = row["loss"]
        return {
            x: np.array([by_seed[s] for s in sorted(by_seed)])
            for x, by_seed in found.items()
        }

    lines = {f"{n} steps": (n, 0.612) for n in (2, 8, 32, 128)} | {
        "1% of T": ("1%", 0.612)
    }
    lines |= {"32 steps, half of a": (32, 0.306), "32 steps, twice a": (32, 1.224)}
    lines |= {"2 steps, half of a": (2, 0.306)}
    rows = []
    for name, line in lines.items():
        row = [name]
        for batch_size in (2, 8, 32):
            gaps = []
            for T in (320_000, 1_280_000):
                for share in (0.1, 0.3):
                    losses = losses_of(batch_size, T, share)
                    if line in losses:
                        gaps.append(losses[line] - losses[32, 0.612])
            row.append(
                show(over_seeds(np.mean(gaps, axis=0))) if name != "32 steps" else "0"
            )
        rows.append(row)
    about = (
        "Loss of Power minus that with a warmup of 32 steps and the law's a, the mean over "
        f"T = 320k and 1.28M and over decays of 10% and 30% (`{DECAY}/warmup`: width 32, three "
        "seeds; at batch size 32, 128 steps only at 1.28M)."
    )
    return table("warmup", about, ["", "batch size 2", "8", "32"], rows)


def weight_decay() -> str:
    rows = []
    for T in (1_280_000, 5_120_000):
        for weight_decay in ("0", "0.1", "0.3"):
            row = [f"T = {size(T)}, weight decay {weight_decay}"]
            for batch_size in (2, 8, 32):
                losses = defaultdict(list)
                for run in rows_in(f"memory-laptop/{weight_decay}"):
                    if (run["total_tokens"], run["batch_size"]) == (T, batch_size):
                        losses[run["lr"]].append(run["loss"])
                full = [np.mean(x) for x in losses.values() if len(x) == 2]
                row.append(f"{min(full):.3f}")
            rows.append(row)
    about = (
        "Lowest loss of WSD with a decay of a tenth, over all learning rates, by weight decay "
        "(`memory-laptop`: width 32, two seeds)."
    )
    return table("weight decay", about, ["", "batch size 2", "8", "32"], rows)


def weight_decay_0() -> str:
    rows = []
    best = {}  # {(line, weight decay, batch size): loss}
    lines = []
    for share in (0.1, 0.3):
        for schedule, name in (("power", "Power"), ("wsd", "WSD")):
            line = dict(schedule=schedule, decay_share=share)
            lines.append((f"{name}, {share:.0%}", line))
    lines.append(("linear to 0", dict(schedule="linear")))
    for name, line in lines:
        for decay in (0.0, 0.1):
            row = [f"{name}, weight decay {decay:g}"]
            for batch_size in (2, 8, 32):
                wanted = line | dict(batch_size=batch_size, weight_decay=decay)
                loss = lowest(tried("weight-decay", **wanted)).mean()
                best[name, decay, batch_size] = loss
                row.append(f"{loss:.3f}")
            rows.append(row)
    pairs = {f"{name}, 0 minus 0.1": (name, name) for name, _ in lines}
    pairs["WSD at 0 minus Power at 0.1, 30%"] = ("WSD, 30%", "Power, 30%")
    for name, (without, with_decay) in pairs.items():
        row = [name]
        for batch_size in (2, 8, 32):
            gap = best[without, 0.0, batch_size] - best[with_decay, 0.1, batch_size]
            row.append(f"{gap:.3f}")
        rows.append(row)
    about = (
        "Loss at the best of its tries, three a of Power, or five peaks of WSD and linear "
        f"(`{DECAY}/weight-decay`: width 32, T = 1.28M, two seeds). Five of the 18 best of "
        "WSD and linear are at an edge of their peaks. *weight decay* has another sweep, with "
        "more learning rates and another warmup."
    )
    return table("weight decay 0", about, ["", "batch size 2", "8", "32"], rows)


# -- Tuned short, run long ---------------------------------------------------------------

SHORT = {  # cell of anytime.py -> T0, and what it is
    "code": (320_000, "torch, batch size 8, T0 = 320k (312 steps)"),
    "code-short": (80_000, "torch, batch size 8, T0 = 80k (78 steps)"),
    "batch-2": (80_000, "torch, batch size 2, T0 = 80k (312 steps)"),
    "batch-32": (320_000, "torch, batch size 32, T0 = 320k (78 steps)"),
    "width-128": (100_000, "torch, width 128, T0 = 100k (98 steps)"),
    "manual": (160_000, "manual pages, T0 = 160k (156 steps)"),
    "japanese": (160_000, "Japanese manual pages, T0 = 160k (156 steps)"),
}
HELD, FALL, SHIFTED, LINE = "held", "n^-0.3", "(n + T0)^-0.5", "line"
Losses = dict[int, float]  # seed -> loss


@cache
def long_runs(folder: str, pilot=False) -> dict[tuple, Losses]:
    """{(line, T, share of the decay, number): losses} of a folder of anytime.py.

    number: the learning rate, or a of Power. The seeds of pilots are 100 and more.
    """
    found = defaultdict(dict)
    for row in rows_in(f"anytime/{folder}"):
        if pilot == (row["seed"] >= 100):
            number = row["power_a" if row["schedule"] == "power" else "lr"]
            share = round(row["decay_share"], 2) if row["decay_tokens"] else 0
            found[row["line"], row["total_tokens"], share, number][row["seed"]] = row[
                "loss"
            ]
    return dict(found)


def tuned_short(cell: str, line: str, times: int, share=0.3) -> Losses | None:
    """The losses at T = times * T0, with the number that the pilot chose."""
    T0, _ = SHORT[cell]
    runs = long_runs(cell)
    if line in (LINE, "cosine"):
        share = 0
    # the one with which we trained T0, too. Lines have others at the longest T
    (number,) = {n for name, T, _, n in runs if (name, T) == (line, T0)}
    return runs.get((line, times * T0, share, number))


def best_line(cell: str, times: int) -> Losses:
    """The losses of the line to 0 at the best of its peaks, also in earlier sweeps."""
    T0, _ = SHORT[cell]
    T = times * T0
    runs = [x for (line, t, *_), x in long_runs(cell).items() if (line, t) == (LINE, T)]
    batch_size = {"batch-2": 2, "batch-32": 32}.get(cell, 8)
    if cell in ("code", "code-short", "batch-2", "batch-32"):
        line = dict(schedule="linear", batch_size=batch_size, total_tokens=T)
        searched = tried("linear", **line)
        searched |= tried("weight-decay", weight_decay=0.1, **line)  # with two seeds
        runs += [dict(enumerate(losses)) for losses in searched.values()]
    return min(runs, key=lambda losses: mean_of(losses, range(2)))


def mean_of(losses: Losses, seeds=range(3)) -> float:
    return np.mean([losses[seed] for seed in seeds])


def minus(one: Losses | None, other: Losses | None) -> np.ndarray | None:
    """Differences [seeds] of two lines, with the seeds that both have."""
    if one is None or other is None:
        return None
    return np.array(
        [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
    )


def shown(gaps: np.ndarray | None) -> str:
    return "" if gaps is None else show(over_seeds(gaps))


def lines_of(cell: str) -> list[str]:
    return sorted({line for line, *_ in long_runs(cell)})


TIMES = (1, 4, 16, 64)  # lengths of the runs, in T0


def in_cells(name: str, about: str, one: str, other: str) -> str:
    """A table of one line minus another, for all cells and lengths."""
    rows = []
    for cell, (_, words) in SHORT.items():
        ends = [(tuned_short(cell, one, t), tuned_short(cell, other, t)) for t in TIMES]
        rows.append([words, *(shown(minus(*pair)) for pair in ends)])
    if one == SHIFTED:
        gaps = [minus(tuned_short(x, one, 16), tuned_short(x, other, 16)) for x in SHORT]
        mean = show(over_seeds([np.mean(x) for x in gaps]))
        rows.append(["mean of the cells, interval over cells", "", "", mean, ""])
    return table(name, about, ["cell", "T0", "4 T0", "16 T0", "64 T0"], rows)


def held_and_fall() -> str:
    about = (
        "A held learning rate minus n^-0.3, both with the number of their own pilot of T0 "
        "tokens, and with decays of 30%. The columns are the lengths of the runs (`anytime`, "
        "three seeds, and five in the second row)."
    )
    return in_cells("tuned short", about, HELD, FALL)


def shifted() -> str:
    about = "The trunk of WSqD, (n + T0)^-0.5, minus n^-0.3, as in `tuned short`."
    return in_cells("shifted", about, SHIFTED, FALL)


def any_length() -> str:
    rows = []
    for cell, (_, words) in SHORT.items():
        times = 64 if cell == "code-short" else 16
        power = tuned_short(cell, FALL, times)
        line = tuned_short(cell, LINE, times)
        gaps = [minus(power, line), minus(power, best_line(cell, times))]
        rows.append([f"{words}, {times} T0", *map(shown, gaps)])
    about = (
        "n^-0.3 minus a line to 0 that knew its length. *Tuned short*: its peak is from a pilot "
        "of T0 tokens, too. *Best*: at the best peak for this length, chosen afterwards, of nine "
        "in the first two cells, five at batch size 2 (with two seeds), and three on manual "
        "pages. At batch size 32 and width 128 we tried only one."
    )
    head = ["cell", "minus line, tuned short", "minus best"]
    return table("any length", about, head, rows)


def regrets() -> str:
    """Mean losses above the lowest mean at a cell and length."""
    regret = defaultdict(dict)
    for cell in SHORT:
        for times in TIMES[1:]:
            if tuned_short(cell, FALL, times) is None:
                continue
            means = {x: mean_of(tuned_short(cell, x, times)) for x in lines_of(cell)}
            # a line of an earlier sweep may have two seeds, so we compare it with Power
            power = tuned_short(cell, FALL, times)
            best = mean_of(power) + np.mean(minus(best_line(cell, times), power))
            lowest_mean = min(*means.values(), best)
            for line, mean in means.items():
                regret[line][cell, times] = mean - lowest_mean
    columns = [(cell, 16) for cell in SHORT] + [("code-short", 64)]
    rows = []
    for line in sorted(regret, key=lambda line: max(regret[line].values())):
        texts = []
        for column in columns:
            texts.append(f"{regret[line][column]:.3f}" if column in regret[line] else "")
        rows.append([line, *texts, f"{max(regret[line].values()):.3f}"])
    about = (
        "Mean loss of three seeds at 16 T0 minus the lowest mean at this cell and length, and "
        "the worst of such differences at 4, 16 and 64 T0. Lines at all their peaks count as "
        "lowest, too."
    )
    head = ["line", *SHORT, "code-short, 64 T0", "worst"]
    return table("regret", about, head, rows)


TRAVELS = {  # folder -> the cell to compare with, and what differs
    "travel-batch-2": ("batch-2", "batch size 2"),
    "travel-batch-32": ("batch-32", "batch size 32"),
    "travel-width-128": ("width-128", "width 128"),
}


def travel() -> str:
    rows = []
    for folder, (cell, words) in TRAVELS.items():
        T0, _ = SHORT[cell]
        for name in (FALL, SHIFTED):
            texts = []
            for times in (4, 16):
                for (line, T, *_), losses in long_runs(folder).items():
                    if (line, T) == (name, times * T0):
                        texts.append(shown(minus(losses, tuned_short(cell, name, times))))
            if texts:
                rows.append([f"{name}, {words}", *texts])
    about = (
        "Runs with the number of the cell code (width 32, batch size 8, T0 = 320k), minus runs "
        "with the number of a pilot of their own, at 4 and 16 T0 of that pilot (`anytime`). "
        "Across batch sizes, the learning rate grows as the root of the batch size."
    )
    return table("travel", about, ["line", "4 T0", "16 T0"], rows)


def long_shares() -> str:
    rows = []
    for line in (HELD, FALL, SHIFTED):
        texts = []
        for times in (16, 64):
            half = tuned_short("code-short", line, times, 0.5)
            texts.append(shown(minus(half, tuned_short("code-short", line, times))))
        rows.append([line, *texts])
    about = "A decay of 50% minus one of 30%, from the same trunk (`anytime/code-short`)."
    return table("half", about, ["line", "16 T0", "64 T0"], rows)


def averaged() -> str:
    T0, _ = SHORT["code"]
    ends = {T: losses for (_, T, *_), losses in long_runs("average").items()}
    rows = []
    for line in lines_of("code"):
        gaps = [minus(ends[t * T0], tuned_short("code", line, t)) for t in (1, 4, 16)]
        rows.append([line, *map(shown, gaps)])
    about = (
        "A held learning rate at weight decay 0, whose weights we average with a half-life of a "
        "25th of the tokens seen (`anytime/average`), minus the lines of the cell code, which "
        "decay. All are tuned at T0 = 320k."
    )
    return table("averaged", about, ["minus", "T0", "4 T0", "16 T0"], rows)


# -- The price of tuning -----------------------------------------------------------------

TRIES = {  # learning rates of a pilot -> their places in our grid of nine, in steps of √2
    "3, a factor of 2 apart": range(2, 7, 2),
    "5, a factor of 2 apart": range(0, 9, 2),
    "7, a factor of √2 apart": range(1, 8),
    "9, a factor of √2 apart": range(9),
}


def valley_of(T: int, seeds, pilot: bool) -> list[tuple]:
    """Points (log2 of the learning rate at n = 320k, mean loss), of n^-0.3."""
    points = []
    for (_, tokens, _, a), losses in long_runs("price", pilot).items():
        if tokens == T:
            rate = a * 0.25**0.5 * 320_000**-0.3  # at batch size 8
            points.append((math.log2(rate), mean_of(losses, seeds)))
    return sorted(points)


def cost_of(T0: int, places, seeds, degree: int, T: int = 5_120_000) -> float:
    """What the choice of a pilot costs at T, NaN if it finds no minimum.

    The pilot takes the bottom of a curve of this degree through all its tries.
    """
    tries = [valley_of(T0, seeds, pilot=True)[i] for i in places]
    degree = min(degree, len(tries) - 1)
    x, loss = np.transpose(tries)
    if np.argmin(loss) in (0, len(loss) - 1):
        return math.nan
    curve = np.polynomial.Polynomial.fit(x, loss, degree)
    grid = np.linspace(x[0], x[-1], 1001)
    return fit.regret(valley_of(T, range(3), pilot=False), grid[np.argmin(curve(grid))])


def price() -> str:
    rows = []
    for T0 in (80_000, 160_000, 320_000, 640_000):
        for words, places in TRIES.items():
            texts = []
            for n_seeds, degree in ((1, 3), (2, 3), (4, 3), (2, 2)):
                subsets = itertools.combinations(range(100, 104), n_seeds)
                costs = [cost_of(T0, places, x, degree) for x in subsets]
                n_lost, mean, worst = cost(costs)
                text = f"{mean:.4f} ({worst:.4f})"
                texts.append(f"{text}, {n_lost} without" if n_lost else text)
            name = f"{T0 // 1024} steps: {words}"
            rows.append([name, size(T0 * len(places)), *texts])
    T = 5_120_000
    searched = of_power(0.3, total_tokens=T)
    tuned = tuned_short("code", FALL, 16)
    gap = show(over_seeds(np.array([tuned[seed] for seed in range(3)]) - searched))
    about = (
        "Pilots of n^-0.3 in the cell code, and what their choice costs at 5.12M tokens: the "
        "mean over choices of seeds, and in parentheses the worst, in nats above the minimum of "
        "a valley of six learning rates and three other seeds (`anytime/price`). *Without*: "
        "choices of seeds without a minimum inside the tries, or outside the valley. *Tokens* "
        "are of one seed. The run of the cell code at 5.12M, after a pilot of 3.2M tokens, "
        "minus Power with the law of `wsd-laptop`, a sweep of 1,444 runs with 659M tokens, is "
        f"{gap}."
    )
    head = ["pilot", "tokens", "1 seed", "2 seeds", "4 seeds", "2 seeds, parabola"]
    return table("price", about, head, rows)


# -- The default run ---------------------------------------------------------------------

ENDS = (400_000, 800_000, 1_600_000, 3_200_000)  # where one Power run ends


def curve_at(name: str, T: int) -> np.ndarray:
    """The losses where runs of the default pass T tokens [seeds]."""
    curves = [loss_curves()[f"{name}-{seed}"] for seed in range(3)]
    return np.array([np.interp(T, c["tokens"], c["val_loss"]) for c in curves])


def end_of_run(name: str) -> np.ndarray:
    """The last losses of the default run as "linear-400000" or "power-400000-30" [seeds]."""
    losses = {row["name"]: row["val_loss"] for row in rows_in("laptop-decay")}
    return np.array([losses[f"{name}-{seed}"] for seed in range(3)])


def loss_at(name: str, T: int) -> np.ndarray:
    """The losses on the curves of default runs where they pass T tokens [seeds]."""
    curves = files.read_json(RESULTS / "laptop-decay/curves.json")
    of_seeds = [curves[f"{name}-{seed}"] for seed in range(3)]
    return np.array([np.interp(T, x["tokens"], x["val_loss"]) for x in of_seeds])


def minus_power(T: int) -> dict[str, np.ndarray]:
    """{line: losses [seeds] minus those of the Power run that decays to end at T}."""
    power = f"power-{T}-30"
    names = {"WSD": f"wsd-{T}-30", "linear": f"linear-{T}", "cosine": f"cosine-{T}"}
    gaps = {}
    for line, name in names.items():
        gaps[line] = end_of_run(name) - end_of_run(power)
    if T < ENDS[-1]:
        for line in ("linear", "cosine"):  # on the text of the curves
            longest = loss_at(f"{line}-{ENDS[-1]}", T)
            gaps[f"longest {line}"] = longest - loss_at(power, T)
    return gaps


def curves() -> str:
    lines = list(minus_power(ENDS[0]))
    rows = []
    for T in ENDS:
        gaps = minus_power(T)
        texts = [show(over_seeds(gaps[line])) if line in gaps else "" for line in lines]
        rows.append([size(T), f"{end_of_run(f'power-{T}-30').mean():.3f}", *texts])
    about = (
        "The default run (`laptop-decay`, three seeds). *Power*: the loss of one run that "
        "decays for 30% to end at T. The other columns are losses minus that of Power. *WSD*: "
        "one run at 0.004, decayed in the same way. *Linear* to 0 from 0.0085, and *cosine* to "
        "a tenth, from peaks that fall as T^-0.3: planned for T. *Longest*: planned for 3.2M "
        "and stopped at T."
    )
    return table("curves", about, ["T", "Power", *lines], rows)


def decay() -> str:
    T = ENDS[2]
    drop = curve_at(f"power-{T}", T) - curve_at("power-trunk", T)
    about = (
        "Loss of a Power run after a decay of a tenth, minus the loss of the run that "
        "continues (`curves-laptop`, other runs than above)."
    )
    rows = [[f"T = {size(T)}", show(over_seeds(drop))]]
    return table("decay", about, ["", "difference"], rows)


def default_run() -> str:
    names = {
        "power-3200000-30": "Power, 30%",
        "power-3200000-10": "Power, 10%",
        "wsd-3200000-30": "WSD, 30%",
        "linear-3200000": "linear to 0",
        "cosine-3200000": "cosine",
    }
    rows = []
    power = end_of_run("power-3200000-10")
    for name, words in names.items():
        losses = end_of_run(name)
        texts = [f"{loss:.4f}" for loss in (*losses, np.mean(losses))]
        minus = show(over_seeds(losses - power), ".4f") if words != "Power, 10%" else ""
        rows.append([words, *texts, minus])
    older = defaultdict(list)  # schedule -> losses [seeds]
    for row in sorted(rows_in("laptop"), key=itemgetter("seed")):
        older[row["schedule"]].append(row["val_loss"])
    for schedule, losses in older.items():
        texts = [f"{loss:.4f}" for loss in (*losses, np.mean(losses))]
        minus = np.subtract(losses, older["power"])
        gap = "" if schedule == "power" else show(over_seeds(minus), ".4f")
        rows.append([f"{schedule}, older", *texts, gap])
    about = (
        "The preset `laptop`, 3.2M tokens, on the whole validation split, with the peaks 0.004 "
        "for WSD, 0.0085 for linear, and 0.008 for the cosine (`laptop-decay`). The "
        "*older* rows have decays of 10%, an older version, and another machine (`laptop`)."
    )
    head = ["schedule", "seed 0", "seed 1", "seed 2", "mean", "minus Power, 10%"]
    return table("default run", about, head, rows)


# -- The recipe, and two stages ----------------------------------------------------------

RECIPE = {  # names of the runs in their origin
    "linear-0.67": "linear to 0 at the learning rate of the longest runs",
    "linear-printed": "linear to 0, as printed (1.5 times as high)",
    "power-half": "Power with half of the law's a",
    "power-printed": "Power, as printed",
    "power-10": "Power, as printed, but a decay of 10%",
    "power-double": "Power with twice the law's a",
    "wsd-printed": "WSD at the learning rate of the longest runs, as printed",
}


def recipe() -> str:
    losses = {row["run"]: row["val_loss"] for row in rows_in("recipe") if "run" in row}
    rows = []
    for name, words in RECIPE.items():
        seeds = [losses[f"{name}-{seed}"] for seed in range(3)]
        rows.append([words, *(f"{x:.3f}" for x in (*seeds, np.mean(seeds)))])
    for name in RECIPE:
        if name in ("linear-0.67", "power-10"):  # not run again
            continue
        seeds = [losses[f"640k-{name}-{seed}"] for seed in range(3)]
        words = f"to 640k: {RECIPE[name]}"
        rows.append([words, *(f"{x:.3f}" for x in (*seeds, np.mean(seeds)))])
    about = (
        "Runs of docs/recipe.md at T = 1.28M, four times as long as the longest of the sweep, "
        "with decays of 30% (`recipe`). *To 640k*: after a sweep up to 640k tokens, runs of "
        "2.56M at batch size 8."
    )
    return table("recipe", about, ["run", "seed 0", "seed 1", "seed 2", "mean"], rows)


def two_stages() -> str:
    by_stages = defaultdict(dict)
    for row in rows_in("two-stage"):
        stages = "two" if row["decay_data"] else "one"
        by_stages[stages][row["seed"]] = row
    rows = []
    for text in ("torch", "library", "clean"):
        losses = {}
        for stages, seeds in by_stages.items():
            losses[stages] = np.array([seeds[s][f"val_loss_{text}"] for s in range(3)])
        row = [text, *(f"{losses[stages].mean():.3f}" for stages in ("one", "two"))]
        rows.append([*row, show(over_seeds(losses["two"] - losses["one"]))])
    about = (
        "Validation loss with the same data throughout, and with other data in the decay, of "
        "which half is *clean*, a text that the stable phase has not seen (`two-stage`, three "
        "seeds)."
    )
    head = ["validation text", "one stage", "two stages", "difference"]
    return table("two stages", about, head, rows)


def page() -> str:
    """TABLES.md."""
    tables = [
        laws(),
        widths(),
        valleys(),
        worth(),
        transfer(),
        power(),
        comparison(),
        pairs(),
        longer(),
        how_long(),
        shares(),
        b_by_decay(),
        peaks(),
        of_presets(),
        laptop_law_costs(),
        fall(),
        held_and_fall(),
        shifted(),
        any_length(),
        regrets(),
        travel(),
        long_shares(),
        averaged(),
        price(),
        noise(),
        warmup(),
        weight_decay(),
        weight_decay_0(),
        curves(),
        decay(),
        default_run(),
        recipe(),
        two_stages(),
    ]
    return "\n\n".join([HEAD, *tables])


if __name__ == "__main__":
    print(page())
