"""Compute all tables of TABLES.md anew, from the records in results/.

    python research/tables.py

Captions and column names are written by hand there, and this program writes the rows. A
page that quotes a number has <!--n:TABLE / ROW / COLUMN--> before it, and a test compares
the two.
"""

import itertools
import math
import sys
from collections import defaultdict
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

import numpy as np

import config
import fit
import paper
import public
import race
import schedules
from tools import files
from tools.rows import read_sweep
from tools.stats import over, show

PAGE = ROOT / "research/TABLES.md"
RESULTS = ROOT / "research/results"
Rows = list[list[str]]


def read(folder: str) -> list[dict]:
    """The rows of a folder of results/."""
    return read_sweep(RESULTS / folder)


# -- The race ----------------------------------------------------------------------------
#
# The rules are in notes.md, "A fair race". The unit is the cell: we average the
# replicates of a cell first, and an interval is over cells.


class Runner(NamedTuple):
    name: str  # held, half, power or line
    share: float  # of the run decays
    warmup: int = race.WARMUP_STEPS  # steps. The second arm has more


TRUNKS = ("held", "half", "power")
LINE = Runner("line", 1.0)
POWER = Runner("power", 0.3)  # with which we compare
SEVEN = [Runner(*trunk) for trunk in itertools.product(TRUNKS, race.SHARES)] + [LINE]
SECOND_ARM = [runner._replace(warmup=race.LONG_WARMUP) for runner in SEVEN]
TIE = 0.01  # nats

# {(runner, length in T0): losses [cells, replicates]}
Losses = dict[tuple[Runner, int], np.ndarray]


def losses_of(lines: list[dict]) -> Losses:
    """The losses of the long runs of a race, in the order in which race.py wrote them."""
    by_cell = defaultdict(list)  # {(runner, length, cell): losses of its replicates}
    for line in lines:
        if "times" in line:
            warmup = line.get("warmup", race.WARMUP_STEPS)
            runner = Runner(line["runner"], line["share"], warmup)
            key = runner, line["times"], line["cell"]
            by_cell[key].append(race.loss_of(line))
    losses = defaultdict(list)
    for (runner, times, _), of_cell in by_cell.items():
        losses[runner, times].append(of_cell)
    return {key: np.array(cells) for key, cells in losses.items()}


@cache
def race_lines() -> list[dict]:
    return files.read_records(RESULTS / "race.jsonl")


@cache
def race_losses() -> Losses:
    return losses_of(race_lines())


def gap(losses: Losses, runner: Runner, times: int) -> np.ndarray:
    """Loss of a runner minus that of Power with 30% in the same arm [cells]."""
    power = POWER._replace(warmup=runner.warmup)
    return np.mean(losses[runner, times] - losses[power, times], axis=1)


def worst_regrets(losses: Losses, runners: list, lengths) -> dict[Runner, np.ndarray]:
    """How far every runner is above the lowest of them, at its worst length [cells]."""
    regrets = []
    for times in lengths:
        means = np.array([losses[runner, times].mean(axis=1) for runner in runners])
        regrets.append(means - means.min(axis=0))  # [runners, cells]
    return dict(zip(runners, np.max(regrets, axis=0)))


def share_effects(losses: Losses, times: int) -> dict[str, np.ndarray]:
    """{trunk: its loss with a decay of 50% minus with 30% [cells]}, and their mean."""
    effects = {}
    for trunk in TRUNKS:
        effect = losses[Runner(trunk, 0.5), times] - losses[Runner(trunk, 0.3), times]
        effects[trunk] = effect.mean(axis=1)
    return effects | {"mean": np.mean(list(effects.values()), axis=0)}


def verdict(values: np.ndarray) -> str:
    """tie, decided or undecided, over a difference [cells]."""
    _, low, high = over(values)
    if -TIE <= low and high <= TIE:
        return "tie"
    return "undecided" if low <= 0 <= high else "decided"


def judged(values: np.ndarray) -> str:
    """'0.028 [0.021, 0.035], decided'"""
    return f"{show(over(values))}, {verdict(values)}"


# -- The race: tables --------------------------------------------------------------------


def name_of(runner: Runner) -> str:
    """'held, 30%', and in the second arm 'held, 30%, 98 steps'"""
    name = "line" if runner.name == "line" else f"{runner.name}, {runner.share:.0%}"
    if runner.warmup != race.WARMUP_STEPS:
        name += f", {runner.warmup} steps"
    return name


def race_gaps() -> Rows:
    losses = race_losses()
    rows = []
    for runner in SEVEN:
        if runner != POWER:
            at_1, at_4, at_16 = (gap(losses, runner, times) for times in race.TIMES)
            row = [name_of(runner), show(over(at_1)), show(over(at_4)), judged(at_16)]
            rows.append(row)
    return rows


def worst_rows(runners: list[Runner]) -> Rows:
    worst = worst_regrets(race_losses(), runners, (4, 16))
    rows = []
    for runner in sorted(runners, key=lambda runner: worst[runner].mean()):
        minus = judged(worst[runner] - worst[POWER]) if runner != POWER else ""
        rows.append([name_of(runner), show(over(worst[runner])), minus])
    return rows


def race_worst() -> Rows:
    with_short = {}
    for runner, worst in worst_regrets(race_losses(), SEVEN, race.TIMES).items():
        with_short[name_of(runner)] = show(over(worst))
    return [[*row, with_short[row[0]]] for row in worst_rows(SEVEN)]


def race_worst_of_both() -> Rows:
    return worst_rows(SEVEN + SECOND_ARM)


def race_warmup() -> Rows:
    """The second arm: minus Power in it, and minus the first arm."""
    losses = race_losses()
    worst = worst_regrets(losses, SECOND_ARM, (4, 16))
    rows = []
    for runner, first in zip(SECOND_ARM, SEVEN):
        gaps = []
        changes = []
        for times in (4, 16):
            gaps.append("" if first == POWER else judged(gap(losses, runner, times)))
            change = losses[runner, times] - losses[first, times]
            changes.append(judged(change.mean(axis=1)))
        rows.append([name_of(first), *gaps, show(over(worst[runner])), *changes])
    return rows


def race_shares() -> Rows:
    effects = [share_effects(race_losses(), times) for times in race.TIMES]
    rows = []
    for trunk in TRUNKS:
        rows.append([trunk, *(show(over(x[trunk])) for x in effects)])
    rows.append(["mean", *(judged(x["mean"]) for x in effects)])
    return rows


def race_long() -> Rows:
    """64 T0, in two cells, with intervals over replicates."""
    losses = race_losses()
    rows = []
    for runner in SEVEN:
        gaps = losses[runner, 64] - losses[POWER, 64]  # [cells, replicates]
        rows.append([name_of(runner), *(show(over(x)) for x in gaps)])
    return rows


# -- Laws --------------------------------------------------------------------------------


@cache
def curves_in(folder: str) -> fit.Curves:
    """The losses in a folder, of the cells that have a best learning rate."""
    curves = fit.curves_of(read(folder))
    best = best_in(curves)
    return {key: curve for key, curve in curves.items() if key[0] in best}


def best_in(curves: fit.Curves) -> dict[fit.Cell, float]:
    return fit.bottoms(fit.valleys_of(curves))


def numbers_of(curves: fit.Curves) -> np.ndarray:
    """b and q of a law, and b as the paper reads it [3]."""
    law = fit.fit_law(best_in(curves))
    b_and_q = [math.nan, math.nan] if law.assumed else [law.b, law.q]
    return np.array([*b_and_q, b_of_paper(curves)])


def b_of_paper(curves: fit.Curves) -> float:
    """b of lr = a beta T^b, at the three best batch sizes of every T."""
    valleys = fit.valleys_of(curves)
    best = fit.bottoms(valleys)
    ranking = defaultdict(list)
    for cell in sorted(best, key=lambda cell: fit.lowest(valleys[cell])[1]):
        ranking[cell.shape, cell.T].append(cell)
    x = []
    y = []
    for cells in ranking.values():
        for cell in cells[:3]:
            x.append(math.log2(cell.T))
            y.append(best[cell] - math.log2(cell.beta))
    b, _ = np.polyfit(x, y, 1)
    return b


def laws() -> Rows:
    folders = {
        "warmup 2,000": "wsd-laptop",
        "weight decay 0": "memory-laptop/0",
        "weight decay 0.1": "memory-laptop/0.1",
    }
    rows = []
    for name, folder in folders.items():
        curves = curves_in(folder)
        counts = [f"{len(read(folder)):,}", str(len(best_in(curves)))]
        answers = fit.intervals(curves, numbers_of)
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
        of_width = {key: x for key, x in curves.items() if key[0].shape == shape}
        b, _, _ = fit.intervals(of_width, numbers_of)
        a = "1.00" if shape == shapes[0] else show(np.exp2(ratio), ".2f")
        rows.append([str(shape[1]), a, show(b, ".2f")])
    return rows


# -- The other experiments of the paper --------------------------------------------------


def transfer() -> Rows:
    return paper.transfer_table(read("transfer-quick"))


def power() -> Rows:
    return paper.power_table(read("power-laptop"))


def pairs() -> Rows:
    dense = [row for row in read("compare-laptop") if "line" in row]
    moe = [row for row in read("compare-laptop-moe") if "line" in row]
    lines_of_moe = {row["line"] for row in moe}
    rows = []
    for one, other in paper.PAIRS:
        row = [f"{one} minus {other}", show(paper.difference(dense, one, other))]
        is_known = other in lines_of_moe
        row.append(show(paper.difference(moe, one, other)) if is_known else "")
        rows.append(row)
    return rows


# -- How much of a run decays ------------------------------------------------------------


def b_of_decay(ending: str) -> list[float]:
    """b at batch sizes 8 and 32, and its interval by leaving out one seed at a time.

    fit.intervals would also leave out one of only two batch sizes.
    """
    curves = {}
    for (cell, seed), curve in curves_in(f"decay-laptop/{ending}").items():
        if cell.batch_size in (8, 32):
            curves[cell, seed] = curve

    def b_of(some: fit.Curves) -> float:
        return fit.fit_law(best_in(some)).b

    seeds = {(cell, seed): seed for cell, seed in curves}
    b = b_of(curves)
    half = fit.half_interval(curves, b_of, seeds)
    return [b, b - half, b + half]


def b_by_decay() -> Rows:
    names = {"none": "none", "10": "10%", "30": "30%", "linear": "linear to 0"}
    return [[name, show(b_of_decay(x), ".2f")] for x, name in names.items()]


def peak_ratios() -> dict[tuple, list[tuple[fit.Cell, float]]]:
    """{(schedule, share): (cell, log2 of its best peak over that of WSD, 30%)}

    For Power, it is the best learning rate at n = T over the peak of WSD with the same
    decay.
    """
    endings = {
        ("wsd", 0.0): "none",
        ("wsd", 0.1): "10",
        ("wsd", 0.3): "30",
        ("wsd", 1.0): "linear",
        ("cosine", 0.0): "cosine",
    }
    best = {}
    for row, ending in endings.items():
        best[row] = best_in(curves_in(f"decay-laptop/{ending}"))
    ratios = defaultdict(list)
    for row, peaks in best.items():
        for cell, x in peaks.items():
            if cell in best["wsd", 0.3]:
                ratios[row].append((cell, x - best["wsd", 0.3][cell]))
    for share in (0.1, 0.3):
        runs = [x for x in read("decay-laptop/power") if x["decay_share"] == share]
        for cell, points in fit.valleys_of(fit.curves_of(runs)).items():
            if cell in best["wsd", share]:
                x = public.valley_of(points).bottom  # of a parabola through three points
                ratios["power", 0.3].append((cell, x - best["wsd", share][cell]))
    return ratios


def ratio_of_shares(schedule: str) -> float:
    """The number of a pilot of the race with a decay of 50% over that with 30%."""
    pilots = defaultdict(list)  # {(share, cell, replicate): its runs}
    for line in race_lines():
        if line.get("pilot") == schedule:
            pilots[line["share"], line["cell"], line["replicate"]].append(line)
    log2_ratios = []
    for cell, i in itertools.product(race.CELLS, race.REPLICATES):
        x, _ = race.bottom_of(pilots[0.3, cell, i])
        longer, _ = race.bottom_of(pilots[0.5, cell, i])
        log2_ratios.append(longer - x)
    return 2 ** np.mean(log2_ratios)


PEAKS_AT = 1.28e6  # tokens


@cache
def fitted_peaks() -> dict[tuple, tuple[float, float]]:
    """{(schedule, share): (c, e)} of c (T / 1.28M)^e, by least squares, to two digits.

    schedules.py has c, and ignores the drift e. Power has none. The rows of 50% are those
    of 30%, times what the pilots of the race say.
    """
    fitted = {}
    for row, ratios in peak_ratios().items():
        x = [math.log2(cell.T / PEAKS_AT) for cell, _ in ratios]
        y = [ratio for _, ratio in ratios]
        e, c = (0.0, np.mean(y)) if row[0] == "power" else np.polyfit(x, y, 1)
        fitted[row] = (2**c, e)
    for schedule, runner in (("wsd", "held"), ("power", "power")):
        c, e = fitted[schedule, 0.3]
        fitted[schedule, 0.5] = (c * ratio_of_shares(runner), e)
    return {row: (round(c, 2), round(e, 2)) for row, (c, e) in fitted.items()}


def fitted_peak(row: tuple[str, float], T: float) -> float:
    c, e = fitted_peaks()[row]
    return c * (T / PEAKS_AT) ** e


def peaks() -> Rows:
    rows = []
    for (schedule, share), (c, e) in fitted_peaks().items():
        rows.append([f"{schedule}, {share:.0%}", f"{c:.2f}", f"{e:.2f}"])
    return rows


# -- The law of the presets, and the default run -----------------------------------------


def laptop_law() -> np.ndarray:
    """log2 a, b and q of WSD with a decay of 30%, from three sweeps with two decays."""
    sweeps = {"decay-laptop/30": 0.3, "decay-laptop/10": 0.1, "memory-laptop/0.1": 0.1}
    design = []
    y = []
    for folder, share in sweeps.items():
        for cell, x in best_in(curves_in(folder)).items():
            design.append([1.0, math.log2(cell.T), math.log2(cell.beta)])
            y.append(x - math.log2(fitted_peak(("wsd", share), cell.T)))
    return np.linalg.lstsq(np.array(design), np.array(y))[0]


def laptop_a() -> float:
    """a of the law of the presets, from the bottoms of nine valleys of the preset itself.

    Each is divided by the peak of the law without a.
    """
    law = config.LAPTOP_LAW._replace(a=1.0)
    rows = read("presets")
    log2_a = []
    peaks_of = {"linear": ("wsd", 1.0), "cosine": ("cosine", 0.0), "wsd": ("wsd", 0.3)}
    for schedule, row in peaks_of.items():
        some = [run for run in rows if run["schedule"] == schedule]
        for cell, points in fit.valleys_of(fit.curves_of(some)).items():
            of_law = fitted_peak(row, cell.T) * schedules.best_lr(cell.T, cell.beta, law)
            bottom = public.valley_of(points).bottom
            log2_a.append(bottom - math.log2(of_law))
    return 2 ** np.mean(log2_a)


def law_of_the_presets() -> Rows:
    log2_a, b, q = laptop_law()
    return [
        ["of sweeps at width 32", f"{2**log2_a:.3f}", f"{b:.4f}", f"{q:.4f}"],
        ["of the preset itself", f"{laptop_a():.3f}", "", ""],
    ]


def default_run() -> Rows:
    losses = {0.3: [], 0.1: []}  # by share of the decay
    for row in sorted(read("laptop-decay"), key=itemgetter("seed")):
        losses[row["decay_share"]].append(row["loss"])
    rows = []
    for share, of_seeds in losses.items():
        rows.append([f"Power, {share:.0%}", *(f"{loss:.4f}" for loss in of_seeds)])
    gaps = np.subtract(losses[0.3], losses[0.1])
    rows[0].append(show(over(gaps), ".4f"))
    rows[1].append("")
    return rows


# -- The page ----------------------------------------------------------------------------

TABLES = {
    "race": race_gaps,
    "race worst": race_worst,
    "race warmup": race_warmup,
    "race worst of both": race_worst_of_both,
    "race shares": race_shares,
    "race at 64 T0": race_long,
    "laws": laws,
    "widths": widths,
    "transfer": transfer,
    "power": power,
    "pairs": pairs,
    "b by decay": b_by_decay,
    "peaks": peaks,
    "law of the presets": law_of_the_presets,
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
            for row in public_rows.get(name) or TABLES[name]():
                lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
