"""The laws of our sweeps: what b and q are, and what changes them. See research/methods.md.

    python research/laws.py

Prints its tables of TABLES.md, from the committed records.
"""

import math
import statistics
import sys
from functools import cache, partial
from operator import attrgetter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import bent
import fit
import report
from against import change_of, moved, same_cells
from fit import Cell, Estimate, apply, jackknife, mean_of, reading, show
from records import read_rows
from tables import Table
from tools import flags
from tools.figures import size

RESULTS = ROOT / "research/results"
SWEEPS = {  # name -> folder, runs in it
    "warmup 2,000": ("wsd-laptop",),
    "warmup 32,000": ("wsd-laptop-long",),
    "to 128": ("bend-laptop", "warmup_tokens=80000"),
    "to 128, width 32": ("bend-laptop", "warmup_tokens=80000", "n_embd=32"),
    "weight decay 0": ("memory-laptop", "weight_decay=0"),
    "weight decay 0.1": ("memory-laptop", "weight_decay=0.1"),
    "weight decay 0.3": ("memory-laptop", "weight_decay=0.3"),
    "recipe": ("recipe/sweep",),
}
LARGE = "batch_size=16,32,64,128"


@cache
def records(folder: str, *choices: str) -> list[dict]:
    return read_rows([RESULTS / folder], choices)


@cache
def cells_of(folder: str, *choices: str) -> list[Cell]:
    return fit.fitted_cells(records(folder, *choices))


def of_law(cells: list[Cell], name: str) -> Estimate:
    """b or q."""
    return apply(attrgetter(name), jackknife(cells, fit.fit_law))


# -- The law of every sweep --------------------------------------------------------------


def laws_table() -> Table:
    rows = []
    for name, sweep in SWEEPS.items():
        cells = cells_of(*sweep)
        answers = [of_law(cells, "b"), of_law(cells, "q"), reading(cells, fit.paper_b, 3)]
        answers += [reading(cells, fit.step_law_b, 1), reading(cells, fit.growth, 3)]
        row = [name, f"{len(records(*sweep)):,}", str(len(cells))]
        rows.append(row + [show(answer, 2) for answer in answers])
    return Table(
        "laws",
        "lr = a beta^q T^b in every sweep of WSD. *Warmup*: batch sizes 1 to 8, three seeds. "
        "*To 128*: batch sizes 1 to 128, a warmup of 80,000 tokens, two seeds. *Weight decay*: "
        "width 32, batch sizes 2, 8 and 32, the same warmup, two seeds. *Recipe*: the sweep of "
        "docs/recipe.md. All others have a weight decay of 0.1. *Paper*: q = 1, at the three "
        "best batch sizes of every T, which grow as T^s. *Step Law*: at the best batch size.",
        ["sweep", "runs", "cells", "b", "q", "b, paper", "b, Step Law", "s"],
        rows,
    )


def warmups_table() -> Table:
    rows = []
    for warmup in (5_000, 80_000, 320_000):
        cells = cells_of("bend-laptop", f"warmup_tokens={warmup}", LARGE)
        answers = [show(of_law(cells, name), 2) for name in "bq"]
        rows.append([f"{warmup:,}", *answers])
    for warmup in (5_000, 320_000):
        late = "total_tokens=1280000,2560000,5120000"
        cells = cells_of("bend-laptop", f"warmup_tokens={warmup}", LARGE, late)
        answers = [show(of_law(cells, name), 2) for name in "bq"]
        rows.append([f"{warmup:,}, from T = 1.28M", *answers])
    return Table(
        "warmups",
        "The law at batch sizes 16 to 128, for warmups in tokens (`bend-laptop`).",
        ["warmup", "b", "q"],
        rows,
    )


def changes_table() -> Table:
    """What a setting changes in the same cells."""
    settings = {  # row -> folder, field, the two values, other choices
        "warmup 5,000 to 80,000": ("bend-laptop", "warmup_tokens", 5000, 80000, LARGE),
        "warmup 80,000 to 320,000": ("bend-laptop", "warmup_tokens", 80000, 320000, LARGE),
        "the same, from batch size 32": (
            "bend-laptop", "warmup_tokens", 80000, 320000, "batch_size=32,64,128",
        ),
        "warmup 5,000 to 320,000": ("bend-laptop", "warmup_tokens", 5000, 320000, LARGE),
        "weight decay 0 to 0.1": ("memory-laptop", "weight_decay", 0, 0.1),
        "weight decay 0 to 0.3": ("memory-laptop", "weight_decay", 0, 0.3),
    }  # fmt: skip
    rows = []
    for name, (folder, field, before, after, *only) in settings.items():
        sets = {v: records(folder, f"{field}={v}", *only) for v in (before, after)}
        one, two = same_cells(field, sets).values()
        answers = [change_of("b", one, two), change_of("q", one, two), moved(one, two)]
        rows.append([name, str(len(one)), *(show(answer, 2) for answer in answers)])
    return Table(
        "changes",
        "What a setting changes in cells that have a minimum at both of its values: the "
        "exponents, and log2 of the best learning rate, on average over the cells.",
        ["change", "cells", "b", "q", "log2 of the best learning rate"],
        rows,
    )


def widths_table() -> Table:
    cells = cells_of(*SWEEPS["warmup 2,000"])
    laws = jackknife(cells, fit.fit_law)
    by_width = {}
    rows = []
    for width in (32, 64, 128):

        def log2_a(law: fit.Law) -> float:
            """Relative to width 32."""
            return law.log2_a[f"width {width}"] - law.log2_a["width 32"]

        by_width[width] = [cell for cell in cells if cell.shape == f"width {width}"]
        b = show(jackknife(by_width[width], exponent_of_T), 2)
        rows.append([str(width), show(apply(log2_a, laws), 2, log2=True), b])

    def gap(cells: list[Cell]) -> float:
        wide = [cell for cell in cells if cell.shape == "width 128"]
        narrow = [cell for cell in cells if cell.shape == "width 32"]
        return exponent_of_T(wide) - exponent_of_T(narrow)

    both = by_width[32] + by_width[128]
    rows.append(["128 minus 32", "", show(jackknife(both, gap), 2)])
    return Table(
        "widths",
        "`a` relative to width 32, and b of every width (`wsd-laptop`).",
        ["width", "a", "b"],
        rows,
    )


def exponent_of_T(cells: list[Cell]) -> float:
    """b, as one slope at every shape and batch size."""
    found = fit.minima(cells)
    best = [x for _, x in found]
    T = [math.log2(cell.T) for cell, _ in found]
    (b,), _ = fit.least_squares(best, [T], [fit.pair_of(cell) for cell, _ in found])
    return b


# -- How far to trust it -----------------------------------------------------------------


def valleys_table() -> Table:
    found = cells_of(*SWEEPS["warmup 2,000"])
    best = {}
    for cell, x in fit.minima(found):
        if cell.shape == "width 64":
            best[cell.T, cell.batch_size] = 2**x
    rows = [
        ["16 times T", f"{best[1_280_000, 2] / best[80_000, 2]:.2f}"],
        ["8 times the batch size", f"{best[1_280_000, 8] / best[1_280_000, 1]:.1f}"],
        ["half the best learning rate costs", f"{cost_beside(found, -1):.3f}"],
        ["twice the best learning rate costs", f"{cost_beside(found, 1):.3f}"],
    ]
    return Table(
        "valleys",
        "By how much the best learning rate changes (width 64; from T = 80k to 1.28M at batch "
        "size 2, and from batch size 1 to 8 at T = 1.28M), and what a learning rate beside it "
        "costs, in nats, on average over all cells (`wsd-laptop`).",
        ["", "answer"],
        rows,
    )


def parabolas_table() -> Table:
    rows = []
    for name in ("warmup 2,000", "warmup 32,000"):
        for window in (5, 7):
            cells = fit.cells_of(records(*SWEEPS[name]), by_seed=True)
            cells = [cell._replace(degree=2, window=window) for cell in cells]
            cells = [cell for cell, _ in fit.minima(cells)]
            laws = jackknife(cells, fit.fit_law)
            answers = [show(apply(attrgetter(answer), laws), 2) for answer in "bq"]
            rows.append([f"{name}, {window}", *answers])
    return Table(
        "parabolas",
        "The law from parabolas through the 5 or 7 learning rates nearest the best, one for "
        "every seed, in place of cubics through 7.",
        ["sweep, learning rates", "b", "q"],
        rows,
    )


def interactions_table() -> Table:
    late = "total_tokens=320000,640000,1280000"
    sweeps = {name: SWEEPS[name] for name in list(SWEEPS)[:4]}
    sweeps["warmup 32,000, from T = 320k"] = (*SWEEPS["warmup 32,000"], late)
    rows = []
    for name, sweep in sweeps.items():
        cells = cells_of(*sweep)
        row = [name, show(jackknife(cells, bent.interaction))]
        for batches in ((1, 2), (4, 8)):
            b = ""
            if name.startswith("warmup"):
                some = [cell for cell in cells if cell.batch_size in batches]
                b = show(jackknife(some, exponent_of_T), 2)
            row.append(b)
        rows.append(row)
    return Table(
        "one b",
        "Does one b fit all batch sizes? The coefficient of log2 T · log2 beta beside the "
        "law is 0 if it does.",
        ["sweep", "coefficient", "b at batch sizes 1, 2", "b at batch sizes 4, 8"],
        rows,
    )


def bend_table() -> Table:
    """The straight and the bent law, by the cells that were left out of their fit."""
    cells = cells_of(*SWEEPS["to 128"])
    laws = jackknife(cells, partial(bent.fit_bent, sweep=cells))
    rows = {
        "exponent of T below the bend": show(apply(bent.far_below, laws), 2),
        "exponent of beta below the bend": show(apply(attrgetter("q"), laws), 2),
        "exponent of T above the bend": show(apply(attrgetter("b0"), laws), 2),
        "exponent of T in the batch size at the bend": show(
            apply(attrgetter("kappa"), laws), 2
        ),
        "sharpness r": f"{laws.answer.r:g}",
        "squared error of cells left out, straight minus bent": show(bent.gain(cells)),
    }
    return Table(
        "bend",
        "Does the law bend at a critical batch size? At batch sizes 1 to 128, all widths, "
        "with a warmup of 80,000 tokens. The errors are in log2 of the learning rate.",
        ["bent law", "answer"],
        [list(row) for row in rows.items()],
    )


# -- Weight decay, width, and the a and b of Power ---------------------------------------


@cache
def minima_at(weight_decay: str) -> dict:
    """(T, batch size, seed) -> lowest loss, and x of the best learning rate, of this seed."""
    found = {}
    rows = records(*SWEEPS[f"weight decay {weight_decay}"])
    for cell, x in fit.minima(fit.cells_of(rows, by_seed=True)):
        (seed,) = cell.losses
        found[cell.T, cell.batch_size, seed] = {"loss": fit.lowest_loss(cell), "x": x}
    return found


def change(low: str, high: str, name: str) -> np.ndarray:
    """The loss or the x of all minima at the higher weight decay minus the lower.

    Returns [T, batch sizes, seeds].
    """
    one = minima_at(low)
    two = minima_at(high)
    lengths = sorted({T for T, _, _ in one})
    batches = sorted({batch_size for _, batch_size, _ in one})
    seeds = sorted({seed for _, _, seed in one})

    changed = np.empty((len(lengths), len(batches), len(seeds)))
    for i, T in enumerate(lengths):
        for j, batch_size in enumerate(batches):
            for k, seed in enumerate(seeds):
                before = one[T, batch_size, seed]
                after = two[T, batch_size, seed]
                changed[i, j, k] = after[name] - before[name]
    return changed


def weight_decay_table() -> Table:
    cost = change("0", "0.1", "loss")
    lengths = sorted({T for T, _, _ in minima_at("0")})
    rows = []
    for T, mean in zip(lengths, cost.mean(axis=(1, 2))):
        rows.append([f"0.1, T = {size(T)}", f"{mean:.3f}"])
    rows.append(["0.1, per doubling of T", show(mean_of(slope_per_step(cost)))])
    for batch_size, mean in zip((2, 8, 32), cost.mean(axis=(0, 2))):
        rows.append([f"0.1, batch size {batch_size}", f"{mean:.3f}"])
    for weight_decay in ("0.1", "0.3"):
        mean = change("0", weight_decay, "loss").mean()
        rows.append([f"{weight_decay}, mean over T", f"{mean:.3f}"])
    exponent = change("0.1", "0.3", "x") / math.log2(
        3
    )  # of the best rate in the weight decay
    answer = show(mean_of(exponent.mean(axis=0)), 2)
    rows.append(["exponent of the best learning rate in it, 0.1 to 0.3", answer])
    return Table(
        "weight decay",
        "Lowest loss of a cell minus that at weight decay 0, in nats, under WSD "
        "(`memory-laptop`: width 32, batch sizes 2, 8 and 32, two seeds).",
        ["weight decay", "cost"],
        rows,
    )


def transfer_table() -> Table:
    cells = {cell.shape: cell for cell in fit.cells_of(records("transfer-quick"))}
    rows = []
    for words, suffix in (("with μP", ""), ("without μP", ", standard")):
        some = [cells[f"width {width}{suffix}"] for width in (32, 64, 128)]
        best = [show(jackknife([cell], fit.mean_log2_lr), 4, log2=True) for cell in some]
        ratio = report.ratio_of(some[2], some[0])
        rows.append([words, *best, show(ratio, 2, log2=True)])
    return Table(
        "transfer",
        "Best learning rate by width, T = 80k, batch size 4, six seeds (`transfer-quick`).",
        ["", "width 32", "64", "128", "128 over 32"],
        rows,
    )


def power_table() -> Table:
    scans, center = report.scans(records("power-laptop"))
    rows = []
    for name, step, words in (("a", 1, "a factor of 2"), ("b", 0.06, "0.06")):
        found = fit.minima(scans[name])
        best = [report.value_at(name, x) for _, x in found]
        costs = [cost_beside(scans[name], step * side) for side in (-1, 1)]
        row = [name, f"{statistics.mean(best):.2f}", f"{statistics.stdev(best):.2f}"]
        rows.append([*row, f"{np.mean(costs):.3f} for {words}"])
    for T in (80_000, 1_280_000):  # of b, the last
        at_8 = [x for cell, x in found if (cell.T, cell.batch_size) == (T, 8)]
        rows.append([f"b, batch size 8, T = {size(T)}", f"{np.mean(at_8):.2f}", "", ""])
    return Table(
        "power",
        f"The best a at b = {center['b']:g} and the best b at a = {center['a']:g}, over all T, "
        "batch sizes and seeds, and what an error costs in nats (`power-laptop`, width 64).",
        ["", "mean", "standard deviation", "cost of an error"],
        rows,
    )


def cost_beside(cells: list[Cell], step: float) -> float:
    """Mean loss above the lowest measured one, a step to the right of the best value."""
    costs = []
    for cell in cells:
        points = fit.valley(cell)
        best, lowest = fit.lowest(points)
        for x, loss in points:
            if abs(x - best - step) < 0.01 * abs(step) and math.isfinite(loss):
                costs.append(loss - lowest)
    return np.mean(costs)


def slope_per_step(y: np.ndarray) -> np.ndarray:
    """Change per step along the first axis, by least squares. y [steps, ...]"""
    step = np.arange(len(y)) - (len(y) - 1) / 2
    return np.tensordot(step, y, axes=1) / (step**2).sum()


def tables() -> list[Table]:
    return [
        laws_table(),
        widths_table(),
        warmups_table(),
        changes_table(),
        valleys_table(),
        parabolas_table(),
        interactions_table(),
        bend_table(),
        weight_decay_table(),
        transfer_table(),
        power_table(),
    ]


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("laws.py", __doc__).parse_args(argv)
    print(*tables(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
