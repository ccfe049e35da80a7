"""Compute all tables of TABLES.md anew, from the records in results/.

    python research/tables.py

Captions and column names are written by hand there, and this program writes the rows. A
page that quotes a number has <!--n:TABLE / ROW / COLUMN--> before it, and a test compares
the two.
"""

import math
import statistics
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

import numpy as np

import config
import decay
import fit
import paper
import public
import race
import records
import schedules
from records import over, show
from tools import files
from tools.flags import size
from tools.student import student

PAGE = ROOT / "research/TABLES.md"
Rows = list[list[str]]

# -- The race: losses --------------------------------------------------------------------
#
# The rules are in notes.md, "A fair race". A *runner* is a schedule with its number, and
# the share of the run that decays. The unit is the cell, whose replicates we average.

Runner = tuple[str, float]
TRUNKS = ("held", "half", "power")  # the simplest first
LINE = ("line", 1.0)
POWER = ("power", 0.3)  # with which we compare
SEVEN = [(trunk, share) for trunk in TRUNKS for share in race.SHARES] + [LINE]
LIMIT = 0.01  # nats. A smaller difference is a tie

# {length in T0: {cell: {runner: losses [replicates]}}}, in the same order of replicates
Losses = dict[int, dict[str, dict[Runner, np.ndarray]]]


def name_of(runner: Runner) -> str:
    """('held', 0.3) -> 'held, 30%'"""
    name, share = runner
    return name if runner == LINE else f"{name}, {share:.0%}"


def loss_of(line: dict) -> float:
    return math.inf if line["loss"] is None else line["loss"]


def losses_of(lines: list[dict], warmup: int = race.WARMUP_STEPS) -> Losses:
    """The losses of an arm, of the replicates that all cells have. Fewer have 64 T0."""
    found = defaultdict(dict)  # {(length, cell, runner): {replicate: loss}}
    for line in lines:
        if "times" in line and line.get("warmup", race.WARMUP_STEPS) == warmup:
            key = (line["times"], line["cell"], (line["runner"], line["share"]))
            found[key][line["replicate"]] = loss_of(line)
    losses = defaultdict(lambda: defaultdict(dict))
    for lengths in (race.TIMES, (64,)):
        keys = [key for key in found if key[0] in lengths]
        finished = set(race.REPLICATES).intersection(*(found[key] for key in keys))
        for key in keys:
            times, cell, runner = key
            of_key = [found[key][replicate] for replicate in sorted(finished)]
            losses[times][cell][runner] = np.array(of_key)
    return dict(losses)


@cache
def race_losses(warmup: int = race.WARMUP_STEPS) -> Losses:
    return losses_of(files.read_records(race.RESULTS), warmup)


def gaps(losses: Losses, times: int, one: Runner, other: Runner = POWER) -> dict:
    """{cell: loss of a runner minus that of another [replicates]}"""
    found = {}
    for name, runners in losses[times].items():
        if one in runners and other in runners:
            found[name] = runners[one] - runners[other]
    return found


def by_cell(differences: dict) -> np.ndarray:
    """The means over replicates [cells]."""
    return np.array([np.mean(of_cell) for of_cell in differences.values()])


def worst_regrets(losses: Losses, lengths: tuple) -> dict[Runner, np.ndarray]:
    """How far every runner is above the lowest of seven, at its worst length [cells]."""
    cells = losses[max(lengths)]  # not all have the longest
    worst = np.zeros((len(SEVEN), len(cells)))
    for times in lengths:
        for i, cell in enumerate(cells):
            means = np.array([losses[times][cell][runner].mean() for runner in SEVEN])
            worst[:, i] = np.maximum(worst[:, i], means - means.min())
    return dict(zip(SEVEN, worst))


def share_effects(losses: Losses, times: int, one=0.5, other=0.3) -> dict:
    """{trunk: {cell: loss with one share minus another [replicates]}}, and their mean."""
    effects = {}
    for trunk in TRUNKS:
        effects[trunk] = gaps(losses, times, (trunk, one), (trunk, other))
    effects["mean"] = {}
    for name in effects["held"]:
        of_cell = [effects[trunk][name] for trunk in TRUNKS]
        effects["mean"][name] = np.mean(of_cell, axis=0)
    return effects


def percent_longer(losses: Losses, runner: Runner) -> np.ndarray:
    """How many per cent longer a runner must train to reach Power's loss [cells]."""
    percents = []
    for name, gap in gaps(losses, 16, runner).items():
        fall = losses[4][name][POWER].mean() - losses[16][name][POWER].mean()
        slope = fall / math.log(16 / 4)  # of Power's loss in log n
        percents.append(100 * (math.exp(gap.mean() / slope) - 1))
    return np.array(percents)


# -- The race: verdicts ------------------------------------------------------------------


class Verdict(NamedTuple):
    word: str  # tie, decided, or undecided
    n_cells: int  # that would decide it, if undecided


def verdict(values: np.ndarray) -> Verdict:
    """The verdict over a difference [cells], by the rule of notes.md."""
    mean = abs(np.mean(values))
    spread = np.std(values, ddof=1)
    n = len(values)
    while True:
        half = student(n - 1) * spread / math.sqrt(n)
        if mean + half <= LIMIT:
            word = "tie"
        elif half < mean:
            word = "decided"
        else:
            n += 1
            continue
        return Verdict(word if n == len(values) else "undecided", n)


def judged(values: np.ndarray) -> str:
    """'0.028 [0.021, 0.035], decided'"""
    word, n_cells = verdict(values)
    if word == "undecided":
        word += f" ({n_cells} cells)"
    return f"{show(over(values))}, {word}"


def new_cell(values: np.ndarray) -> str:
    """The 95% prediction interval for the difference in a new cell."""
    n = len(values)
    half = student(n - 1) * np.std(values, ddof=1) * math.sqrt(1 + 1 / n)
    return f"[{np.mean(values) - half:.3f}, {np.mean(values) + half:.3f}]"


def lowest_of(values: dict[Runner, np.ndarray]) -> list[Runner]:
    """The runner with the lowest mean, and what ties with it, the simplest first."""
    lowest = min(values, key=lambda runner: values[runner].mean())
    ties = []
    for runner in SEVEN:
        if runner in values:
            difference = values[runner] - values[lowest]
            if runner == lowest or verdict(difference).word == "tie":
                ties.append(runner)
    return ties


def advice_if_known(losses: Losses) -> list[Runner]:
    """(a): the lowest at 16 T0."""
    return lowest_of({runner: by_cell(gaps(losses, 16, runner)) for runner in SEVEN})


def advice_if_unknown(losses: Losses) -> list[Runner]:
    """(b): the lowest at the worst of 4 and 16 T0, without the line, which knows its end."""
    worst = worst_regrets(losses, (4, 16))
    del worst[LINE]
    return lowest_of(worst)


def advised_share(losses: Losses, times: int) -> float:
    """(c): 50% if it is decided better, otherwise 30%."""
    effect = by_cell(share_effects(losses, times)["mean"])
    return 0.5 if verdict(effect).word == "decided" and effect.mean() < 0 else 0.3


# -- The race: tables --------------------------------------------------------------------


def race_verdicts() -> Rows:
    losses = race_losses()
    counts = []
    for times, cells in losses.items():
        n = len(next(iter(cells.values()))[LINE])
        counts.append(f"{n} in {len(cells)} cells at {times} T0")
    shares = [f"{advised_share(losses, times):.0%} at {times} T0" for times in losses]
    return [
        ["replicates", ", ".join(counts)],
        ["(a) a known end", "; ".join(map(name_of, advice_if_known(losses)))],
        ["(b) an unknown end", "; ".join(map(name_of, advice_if_unknown(losses)))],
        ["(c) the share", ", ".join(shares)],
    ]


def race_gaps() -> Rows:
    losses = race_losses()
    rows = []
    for runner in SEVEN:
        if runner != POWER:
            row = [show(over(by_cell(gaps(losses, times, runner)))) for times in (1, 4)]
            at_16 = by_cell(gaps(losses, 16, runner))
            row += [judged(at_16), new_cell(at_16)]
            if 64 in losses:
                row += [show(over(x)) for x in gaps(losses, 64, runner).values()]
            rows.append([name_of(runner), *row])
    return rows


def race_cells() -> Rows:
    losses = race_losses()
    rows = []
    for name in losses[16]:
        means = [gaps(losses, 16, x)[name].mean() for x in SEVEN if x != POWER]
        rows.append([name, *(f"{mean:.3f}" for mean in means)])
    return rows


def race_warmup() -> Rows:
    """The second arm: minus Power in it, and minus the first arm, in its replicates."""
    short = race_losses()
    long = race_losses(race.LONG_WARMUP)
    worst = worst_regrets(long, (4, 16))
    rows = []
    for runner in SEVEN:
        row = [name_of(runner)]
        for times in (4, 16):
            values = by_cell(gaps(long, times, runner))
            row.append(judged(values) if runner != POWER else "")
        row.append(show(over(worst[runner])))
        for times in (4, 16):
            changes = []
            for cell, runners in long[times].items():
                n = len(runners[runner])
                changes.append(np.mean(runners[runner] - short[times][cell][runner][:n]))
            row.append(judged(np.array(changes)))
        rows.append(row)
    return rows


def race_worst() -> Rows:
    losses = race_losses()
    worst = worst_regrets(losses, (4, 16))
    with_short = worst_regrets(losses, (1, 4, 16))
    rows = []
    for runner in sorted(SEVEN, key=lambda runner: worst[runner].mean()):
        minus = judged(worst[runner] - worst[POWER]) if runner != POWER else ""
        row = [show(over(worst[runner])), minus, show(over(with_short[runner]))]
        if 64 in losses:
            row.append(f"{worst_regrets(losses, (4, 16, 64))[runner].mean():.3f}")
        rows.append([name_of(runner), *row])
    return rows


def race_shares() -> Rows:
    losses = race_losses()
    rows = []
    for trunk in (*TRUNKS, "mean"):
        row = [trunk]
        for times in losses:
            values = by_cell(share_effects(losses, times)[trunk])
            row.append(judged(values) if trunk == "mean" else show(over(values)))
        rows.append(row)
    for share in (0.5, 0.15):
        for name, cell in race.CELLS.items():
            if cell.is_long:
                row = [f"{name}, {share:.0%} minus 30%"]
                for times in losses:
                    effects = share_effects(losses, times, share)["mean"]
                    row.append(show(over(effects[name])))
                rows.append(row)
    return rows


def race_tokens() -> Rows:
    rows = []
    for runner in SEVEN:
        if runner != POWER:
            percents = percent_longer(race_losses(), runner)
            rows.append([name_of(runner), show(over(percents), ".1f")])
    return rows


def race_pilots() -> Rows:
    # 1. The number that every pilot tunes
    losses = defaultdict(lambda: defaultdict(list))
    for line in files.read_records(race.RESULTS):
        if "pilot" in line:
            key = (line["cell"], line["pilot"], line["share"], line["replicate"])
            losses[key][math.log2(line["lr"])].append(loss_of(line))
    log2 = defaultdict(list)  # {(cell, schedule, share): log2 of the numbers}
    for (cell, schedule, share, _), by_lr in losses.items():
        points = [(x, statistics.fmean(by_lr[x])) for x in sorted(by_lr)]
        x, why_not = fit.bottom(points)
        log2[cell, schedule, share].append(math.nan if why_not else x)

    # 2. Their spread within a cell, and what a longer decay changes
    rows = [[cell] for cell in race.CELLS] + [["all"]]
    for schedule in ("held", "power"):
        variances = []
        ratios = []
        for cell, row in zip(race.CELLS, rows):
            numbers = np.array(log2[cell, schedule, 0.3])
            variance = np.var(numbers, ddof=1) if len(numbers) > 1 else math.nan
            ratio = np.nanmean(log2[cell, schedule, 0.5] - numbers)
            row.append(", ".join(f"{number:.4f}" for number in 2**numbers))
            row += [f"{math.sqrt(variance):.2f}", f"{2**ratio:.2f}"]
            variances.append(variance)
            ratios.append(ratio)
        spread = math.sqrt(np.mean(variances))
        rows[-1] += ["", f"{spread:.2f}", show(np.exp2(over(ratios)), ".2f")]
    return rows


def gpu_race() -> Rows:
    """The race of gpu_day.py, with one pilot and one seed. None if it did not run."""
    rows = []
    for line in files.read_records(ROOT / "research/gpu.jsonl"):
        if line.get("step") == "race":
            losses = line["losses"]
            for name, loss in losses.items():
                gap = loss - losses[name_of(POWER)]
                rows.append([name, f"{loss:.4f}", f"{gap:.4f}"])
    return rows


# -- Laws --------------------------------------------------------------------------------


@cache
def curves_in(folder: str) -> fit.Curves:
    """The losses in a folder, of the cells that have a best learning rate."""
    curves = fit.curves_of(records.read(folder))
    best = best_in(curves)
    return {key: curve for key, curve in curves.items() if key[0] in best}


def best_in(curves: fit.Curves) -> dict[fit.Cell, float]:
    return fit.bottoms(fit.valleys_of(curves))


def b_and_q(curves: fit.Curves) -> np.ndarray:
    """The answers and intervals of b and q [2, 3]."""

    def answer(some: fit.Curves) -> np.ndarray:
        law = fit.fit_law(best_in(some))
        return np.full(2, np.nan) if law.assumed else np.array([law.b, law.q])

    return fit.intervals(curves, answer)


def b_of_paper(curves: fit.Curves) -> np.ndarray:
    """b of lr = a beta T^b, at the three best batch sizes of every T [1]."""
    valleys = fit.valleys_of(curves)
    best = fit.bottoms(valleys)
    ranking = defaultdict(list)
    for cell in sorted(best, key=lambda cell: fit.lowest(valleys[cell])[1]):
        ranking[cell.shape, cell.T].append(cell)
    three = [cell for cells in ranking.values() for cell in cells[:3]]
    x = [math.log2(cell.T) for cell in three]
    if len(set(x)) < 2:
        return np.array([math.nan])
    b, _ = np.polyfit(x, [best[cell] - math.log2(cell.beta) for cell in three], 1)
    return np.array([b])


def laws() -> Rows:
    folders = {
        "warmup 2,000": "wsd-laptop",
        "weight decay 0": "memory-laptop/0",
        "weight decay 0.1": "memory-laptop/0.1",
    }
    rows = []
    for name, folder in folders.items():
        curves = curves_in(folder)
        answers = [*b_and_q(curves), *fit.intervals(curves, b_of_paper)]
        counts = [f"{len(records.read(folder)):,}", str(len(best_in(curves)))]
        rows.append([name, *counts, *(show(answer, ".2f") for answer in answers)])
    return rows


def widths() -> Rows:
    curves = curves_in("wsd-laptop")
    shapes = [("width", 32), ("width", 64), ("width", 128)]

    def log2_ratios(some: fit.Curves) -> np.ndarray:
        """log2 of a, relative to the first width."""
        law = fit.fit_law(best_in(some))
        log2_a = np.array([law.log2_a.get(shape, math.nan) for shape in shapes])
        return log2_a - log2_a[0]

    rows = []
    for shape, ratio in zip(shapes, fit.intervals(curves, log2_ratios)):
        b, _ = b_and_q({key: x for key, x in curves.items() if key[0].shape == shape})
        a = "1.00" if shape == shapes[0] else show(np.exp2(ratio), ".2f")
        rows.append([str(shape[1]), a, show(b, ".2f")])
    return rows


def worth() -> Rows:
    _, found = fit.worth(fit.valleys_of(curves_in("wsd-laptop")))
    rows = []
    for T, (of_law, kept) in found.items():
        answers = [np.nanmean(of_law), np.nanmax(of_law), np.nanmean(kept)]
        cells = [f"T = {size(T)}", str(len(of_law))]
        rows.append(cells + [f"{answer:.4f}" for answer in answers])
    return rows


# -- The other experiments of the paper --------------------------------------------------


def transfer() -> Rows:
    return paper.transfer_table(records.read("transfer-quick"))


def power() -> Rows:
    return paper.power_table(records.read("power-laptop"))


def pairs() -> Rows:
    dense = [row for row in records.read("compare-laptop") if "line" in row]
    moe = [row for row in records.read("compare-laptop-moe") if "line" in row]
    lines_of_moe = {row["line"] for row in moe}
    rows = []
    for one, other in paper.PAIRS:
        row = [f"{one} minus {other}", show(paper.difference(dense, one, other))]
        for T in (160_000, 1_280_000):
            some = [row for row in dense if row["total_tokens"] == T]
            row.append(show(paper.difference(some, one, other)))
        is_known = other in lines_of_moe
        row.append(show(paper.difference(moe, one, other)) if is_known else "")
        rows.append(row)
    return rows


def two_stages() -> Rows:
    rows = records.read("two-stage")
    for row in rows:
        row["stages"] = "two" if row["decay_data"] else "one"
    texts = ["val_loss_torch", "val_loss_library", "val_loss_clean"]
    return paper.two_stage_table(rows, texts)


# -- How much of a run decays ------------------------------------------------------------


def b_of_decay(ending: str) -> list[float]:
    """b at batch sizes 8 and 32, and its interval by leaving out one seed at a time.

    As in fit.intervals, which would also leave out one of only two batch sizes.
    """
    curves = {}
    for (cell, seed), curve in curves_in(f"decay-laptop/{ending}").items():
        if cell.batch_size in (8, 32):
            curves[cell, seed] = curve

    def b_without(left_out: str | None) -> float:
        some = {key: curve for key, curve in curves.items() if key[1] != left_out}
        return fit.fit_law(best_in(some)).b

    b = b_without(None)
    others = [b_without(seed) for seed in sorted({seed for _, seed in curves})]
    n = len(others)
    half = student(n - 1) * math.sqrt((n - 1) * np.var(others))
    return [b, b - half, b + half]


def b_by_decay() -> Rows:
    names = {"none": "none", "10": "10%", "30": "30%", "linear": "linear to 0"}
    rows = []
    for ending, name in names.items():
        row = [name, show(b_of_decay(ending), ".2f")]
        for cell, x in sorted(best_in(curves_in(f"decay-laptop/{ending}")).items()):
            if cell.batch_size == 8:
                row.append(f"{2**x:.4f}")
        rows.append(row)
    return rows


def best_peaks(folder: str) -> dict[tuple, float]:
    """{(batch size, T): log2 of the best peak}, of a folder at width 32."""
    best = {}
    for cell, x in best_in(curves_in(folder)).items():
        best[cell.batch_size, cell.T] = x
    return best


def power_ratios() -> dict[tuple, float]:
    """{(batch size, T, share): log2 of Power's best rate at n = T over WSD's best peak}

    Of a parabola through three values of a.
    """
    ratios = {}
    for share, ending in ((0.1, "10"), (0.3, "30")):
        rows = records.read("decay-laptop/power")
        rows = [row for row in rows if row["decay_share"] == share]
        wsd = best_peaks(f"decay-laptop/{ending}")
        for cell, points in fit.valleys_of(fit.curves_of(rows)).items():
            c2, c1, _ = np.polyfit(*np.transpose(points), 2)
            if (cell.batch_size, cell.T) in wsd:
                ratio = -c1 / (2 * c2) - wsd[cell.batch_size, cell.T]
                ratios[cell.batch_size, cell.T, share] = ratio
    return ratios


def peak_ratios() -> dict[tuple, dict]:
    """{row of schedules.PEAKS: {cell: log2 of its best peak over the reference's}}"""
    reference = best_peaks("decay-laptop/30")
    endings = {
        ("wsd", 0.0): "none",
        ("wsd", 0.1): "10",
        ("wsd", 0.3): "30",
        ("wsd", 1.0): "linear",
        ("cosine", 0.0): "cosine",
    }
    found = {}
    for row, ending in endings.items():
        best = best_peaks(f"decay-laptop/{ending}")
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


def peaks() -> Rows:
    rows = []
    for row, (c, e) in fitted_peaks().items():
        ratios = peak_ratios()[row]
        by_batch = []
        for batch_size in (2, 8, 32):
            some = [ratios[x] for x in sorted(ratios) if x[0] == batch_size]
            by_batch.append(", ".join(f"{2**ratio:.2f}" for ratio in some))
        schedule, share = row
        rows.append([f"{schedule}, {share:.0%}", f"{c:.2f}", f"{e:.2f}", *by_batch])
    return rows


# -- The law of the presets --------------------------------------------------------------


def laptop_law() -> np.ndarray:
    """log2 a, b and q of WSD with a decay of 30%, from three sweeps with two decays."""
    sweeps = {"decay-laptop/30": 0.3, "decay-laptop/10": 0.1, "memory-laptop/0.1": 0.1}
    design = []
    y = []
    for folder, share in sweeps.items():
        for (batch_size, T), x in best_peaks(folder).items():
            design.append([1.0, math.log2(T), math.log2(batch_size * 128 / 4096)])
            y.append(x - math.log2(schedules.peak("wsd", share, T)))
    return np.linalg.lstsq(np.array(design), np.array(y))[0]


@cache
def preset_valleys() -> dict[tuple, dict[float, float]]:
    """{(schedule, T, batch size): {peak: mean loss}} of runs of the preset `laptop`."""
    losses = defaultdict(lambda: defaultdict(list))
    for row in records.read("presets"):
        if row["seed"] != "0":
            cell = (row["schedule"], row["total_tokens"], row["batch_size"])
            losses[cell][row["lr"]].append(row["loss"])
    valleys = {}
    for cell, by_lr in losses.items():
        valleys[cell] = {lr: statistics.fmean(by_lr[lr]) for lr in sorted(by_lr)}
    return valleys


def laptop_a() -> float:
    """a of the law of the presets, from the bottoms of nine valleys of the preset itself.

    Each is a parabola through five peaks, divided by the peak of the law without a.
    """
    law = config.LAPTOP_LAW._replace(a=1.0)
    log2_a = []
    for cell, valley in preset_valleys().items():
        schedule, T, batch_size = cell
        if T == 400_000:
            _, *searched = decay.preset_peaks(cell)
            losses = [valley[lr] for lr in searched]
            c2, c1, _ = np.polyfit(np.log2(searched), losses, 2)
            beta = schedules.paper_batch_size(batch_size * 128)
            of_law = schedules.peak(schedule, 0.3, T) * schedules.best_lr(T, beta, law)
            log2_a.append(-c1 / (2 * c2) - math.log2(of_law))
    return 2 ** np.mean(log2_a)


def law_of_the_presets() -> Rows:
    log2_a, b, q = laptop_law()
    return [
        ["of sweeps at width 32", f"{2**log2_a:.3f}", f"{b:.4f}", f"{q:.4f}"],
        ["of the preset itself", f"{laptop_a():.3f}", "", ""],
    ]


def presets() -> Rows:
    rows = []
    for cell in decay.PRESET_CELLS:
        schedule, T, batch_size = cell
        valley = preset_valleys()[cell]
        of_law, *_ = decay.preset_peaks(cell)
        best = min(valley, key=valley.get)
        edge = " (edge)" if best in (min(valley), max(valley)) else ""
        losses = [f"{valley[of_law]:.4f}", f"{valley[of_law] - valley[best]:.4f}"]
        where = f"{schedule}, {size(T)}, batch size {batch_size}"
        rows.append([where, f"{of_law:g}", f"{best:g}{edge}", *losses])
    return rows


# -- The default run ---------------------------------------------------------------------


def default_run() -> Rows:
    names = {
        "power-3200000-30": "Power, 30%",
        "power-3200000-10": "Power, 10%",
        "wsd-3200000-30": "WSD, 30%",
        "linear-3200000": "linear to 0",
        "cosine-3200000": "cosine",
    }
    losses = {row["name"]: row["loss"] for row in records.read("laptop-decay")}
    tenth = np.array([losses[f"power-3200000-10-{seed}"] for seed in range(3)])
    rows = []
    for name, words in names.items():
        of_seeds = np.array([losses[f"{name}-{seed}"] for seed in range(3)])
        texts = [f"{loss:.4f}" for loss in (*of_seeds, of_seeds.mean())]
        gap = "" if words == "Power, 10%" else show(over(of_seeds - tenth), ".4f")
        rows.append([words, *texts, gap])
    return rows


# -- The page ----------------------------------------------------------------------------

TABLES = {
    "race verdicts": race_verdicts,
    "race": race_gaps,
    "race warmup": race_warmup,
    "race worst": race_worst,
    "race shares": race_shares,
    "race tokens": race_tokens,
    "race cells": race_cells,
    "race pilots": race_pilots,
    "race on a GPU": gpu_race,
    "laws": laws,
    "widths": widths,
    "worth": worth,
    "transfer": transfer,
    "power": power,
    "pairs": pairs,
    "two stages": two_stages,
    "b by decay": b_by_decay,
    "peaks": peaks,
    "law of the presets": law_of_the_presets,
    "presets": presets,
    "default run": default_run,
}


def filled(page: str) -> str:
    """A page whose tables have the rows that the records give."""
    public_rows = files.read_json(public.COMMITTED)
    lines = []
    name = ""
    below = False  # the names of the columns
    for line in page.splitlines():
        if below and line.startswith("|"):
            continue  # a row of before
        lines.append(line)
        if line.startswith("## "):
            name = line.removeprefix("## ")
        below = line.startswith("|---")
        if below:
            n_columns = line.count("---")
            for row in public_rows.get(name) or TABLES[name]():
                row = row + [""] * (n_columns - len(row))  # 64 T0 comes last
                lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
