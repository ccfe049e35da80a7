"""Every number of a page is the number in the records, and quoted code is in the source.

A page has <!--n:NAME--> before a number and <!--t:NAME--> before a table. NUMBERS and TABLES have
a number, a list for the next numbers of the line, or draws. Pages may round.
"""

import json
import math
import re
import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import compare

import bent
import checks
import curves
import fit
import longer
import policies
import rivals
import train
from schedules import SCHEDULES

ROOT = Path(__file__).parents[2]
FILES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("research/*.md")),
]
PAGES = {
    p.name: p.read_text(encoding="utf-8")
    for p in FILES
    if "research/README" not in str(p)
}
# warmup of 2,000 and of 32,000 tokens
SHORT, LONG = (
    ("wsd-laptop",),
    ("wsd-laptop-long",),
)
PLANNED, WSD, COSINE = "WSD (fitted)", "WSD ∝ √batch", "cosine ∝ √batch"
FITTED_COSINE, FITTED_AVERAGED = "cosine (fitted)", "WSD (fitted), averaged"
PAPER, FITTED, AVERAGED = "Power (paper)", "Power (fitted)", "Power (fitted), averaged"
LINEAR = "linear to 0 (fitted)", "linear to 0 ∝ √batch"
DECAYED = "Power (fitted), decayed"  # in the longer runs
W80K, LATE_LONG = "warmup_tokens=80000", "total_tokens=320000,640000,1280000"
LARGE, LATE = "batch_size=16,32,64,128", "total_tokens=1280000,2560000,5120000"


TUNE = runpy.run_path(str(ROOT / "results/laptop/tune.py"))


def tuned(schedule: str) -> list[float]:
    """Validation losses of the default run, tuned, seeds 0 to 2."""
    return [r["val_loss"] for r in TUNE["chosen"](TUNE["read"]())[schedule]]


def minus_power(schedule: str) -> list[float]:
    """Mean difference, and its interval over the seeds."""
    gaps = [x - power for x, power in zip(tuned(schedule), tuned("power"))]
    return [*TUNE["interval"](gaps)]


@cache
def records(*folders: str) -> list[dict]:
    return fit.read_records([ROOT / "results" / folder for folder in folders])


def values(folder: str, name: str = "val_loss") -> list[float]:
    """One field of all records, in the order of the file."""
    lines = (
        (ROOT / f"results/{folder}/records.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    return [json.loads(line)[name] for line in lines]


@cache
def fits(folders: tuple, *choices: str) -> fit.Fits:
    return fit.fits_of(fit.read_records([ROOT / "results" / f for f in folders], choices))


paper_lr = lambda beta, T: 4.6 * beta * T**-0.51  # equations 5 and 6
bend = lambda *choices: fits(("bend-laptop",), *choices)
memory = lambda weight_decay: fits(("memory-laptop",), "weight_decay=" + weight_decay)
warmups = lambda *late: [
    bend(LARGE, f"warmup_tokens={n}", *late) for n in (5000, 320_000)
]


@cache
def law_row(label: str) -> list[np.ndarray]:
    warmup, _, window = label.partition(", ")  # as in "2,000, 5"
    folders = LONG if warmup == "32,000" else SHORT
    if not window:
        law = fits(folders).law
        return [law.b, law.q, fits(folders).paper[0]]
    points = fit.usable(fit.parabolas(records(*folders), int(window)))
    parabolas = fit.fit_law(points, *fit.leave_out(points))
    return [parabolas.b, parabolas.q]


def slope_of(folders: tuple, name: str, **where) -> np.ndarray:
    """b or q of the minima with these fields, a per shape."""
    rows, weight = slope_and_weight(folders, name, **where)
    return fit.where_left_out(rows, weight)


def slope_and_weight(folders: tuple, name: str, **where) -> tuple:
    points, x, weight = fits(folders)[1:4]
    i = np.array(
        [all(getattr(m, field) in where[field] for field in where) for m in points]
    )
    u = np.log2([m.T if name == "b" else m.beta for m in points])
    groups = [(m.shape, m.batch_size if name == "b" else m.T) for m in points]
    return fit.slope(x, weight * i, u, groups), weight * i


def b_by_width() -> np.ndarray:
    """b of width 128 minus b of width 32."""
    wide, of_wide = slope_and_weight(SHORT, "b", shape=["width 128"])
    narrow, of_narrow = slope_and_weight(SHORT, "b", shape=["width 32"])
    return fit.where_left_out(wide - narrow, of_wide + of_narrow)


def question_row(label: str) -> list[np.ndarray]:
    at_32 = bend(W80K, "n_embd=32")
    if "three" in label:
        return [at_32.paper[0]]
    return [at_32.law.b if "fixed" in label else fit.step_law_reading(at_32.found)]


def apart() -> list[float]:
    """How close two answers come if a row leaves out one batch size or one seed.

    At a fixed batch size minus divided by beta, and at the best batch size minus fixed.
    """
    sweep = bend(W80K, "n_embd=32")
    fixed = sweep.law.b
    answers = [fixed, sweep.paper[0], fit.step_law_reading(sweep.found)]
    fixed, paper, best = [np.where(np.isnan(rows), rows[0], rows) for rows in answers]
    return [min(fixed - paper), min(best - fixed)]


def change_of(name: str, *sweeps: fit.Fits) -> np.ndarray:
    """Change of b or q between two sweeps with the same cells, as against.py computes it."""
    laws = [fit.fit_law(f.points, *fit.leave_out(f.points)) for f in sweeps]
    return getattr(laws[1], name) - getattr(laws[0], name)


def power_of_two(rows: np.ndarray) -> list[float]:
    """The answer and its interval, from rows of log2."""
    return [2**x for x in (rows[0], *fit.interval(rows))]


def a_ratio(width: int) -> list[float]:
    a = fits(SHORT).law.a
    return power_of_two(np.log2(a[f"width {width}"] / a["width 32"]))


def best_lr(T: int, batch_size: int) -> float:
    cell = "width 64", T, batch_size
    (m,) = [m for m in fits(SHORT).points if (m.shape, m.T, m.batch_size) == cell]
    return 2**m.x


def cost_beside(found: list, step: float) -> float:
    """Mean loss above the lowest measured one, a step to the right of the best value."""
    costs = []
    for m in found:
        best = min(m.points, key=lambda point: point[1])[0]
        costs += [
            y - m.loss for x, y in m.points if abs(x - best - step) < 0.01 * abs(step)
        ]
    return np.mean([cost for cost in costs if math.isfinite(cost)])


@cache
def choices() -> dict[str, float]:
    """b of the same losses, fitted as in the last exercise."""
    late = fits(SHORT, "total_tokens=160000,320000,640000,1280000").law.b[0]
    paper = fits(SHORT).paper[0][0]
    parabolas = {str(n): law_row(f"2,000, {n}")[0][0] for n in (5, 7)}
    return parabolas | {"late": late, "paper": paper}


@cache
def transfer(kind: str) -> list[float]:
    """Best learning rate at width 128 as a multiple of the one at width 32."""
    found = fit.minima(records("transfer-quick"))
    rows = [
        fit.rows_of_minimum(x, w)
        for x, w in zip(*map(np.transpose, fit.leave_out(found)))
    ]
    best = dict(zip([m.shape for m in found], rows))
    return power_of_two(best["width 128" + kind] - best["width 32" + kind])


@cache
def scan(name: str) -> list:
    return fit.scans(records("power-laptop"))[0][name]


def best_b(keep=lambda m: True) -> np.ndarray:
    return np.array([m.x for m in scan("b") if not m.why_not and keep(m)])


@cache
def lines() -> dict:
    """{line: {(shape, T, batch size): {seed: loss}}}"""
    return compare.losses_of_lines(records("compare-laptop", "search-laptop"))[0]


def difference(
    one: str, other: str, moe: bool = False, T: int | None = None
) -> np.ndarray:
    cells = [c for c in lines()[one] if ("experts" in c[0]) == moe and T in (None, c[1])]
    return compare.differences(lines()[one], lines()[other], cells)


def stopped(T: int | None = None) -> np.ndarray:
    """Power (fitted), or the longest cosine stopped at T, minus planned cosines (anytime.png)."""
    planned = lines()[FITTED_COSINE]
    cells = [c for c in planned if c[::2] == ("width 128", 2) and T in (None, c[1])]
    if not T:
        return compare.differences(lines()[FITTED], planned, cells)
    *_, runs_of = compare.losses_of_lines(records("compare-laptop", "search-laptop"))
    longest = runs_of(FITTED_COSINE, ("width 128", 1_280_000, 2))
    cut = {seed: r[f"val_loss_at_{T}"] for seed, r in longest.items()}
    return compare.differences({cells[0]: cut}, planned, cells)


def beside(other: str, T: int | None = None) -> np.ndarray:
    """Power (fitted) minus another line, in the cells of anytime.png."""
    cells = [
        c for c in lines()[FITTED] if c[::2] == ("width 128", 2) and T in (None, c[1])
    ]
    return compare.differences(lines()[FITTED], lines()[other], cells)


def stages(source: str) -> list[float]:
    """Validation loss with one stage, with two, and the differences of three seeds."""
    one, two = np.split(np.array(values("two-stage", f"val_loss_{source}")), 2)
    return [one.mean(), two.mean(), *(two - one)]


def drop_of_decay() -> float:
    """The loss of the trunk minus that of the branch, at the end of the branch (decay.png)."""
    T = curves.LENGTHS[2]
    return (curves.losses("power-trunk", T) - curves.losses(f"power-{T}", T)).mean()


CEILING_LENGTHS = (1_280_000, 5_120_000)
RECIPE = {  # row of docs/recipe.md -> its runs in results/recipe
    "Power with our law": "power", "Power with the defaults of train.py": "default",
    "WSD at the learning rate of our law": "wsd", "WSD with the defaults of train.py": "wsddefault",
    "WSD at √2 times the learning rate of our law": "wsdhigh",
}  # fmt: skip


def recipe_row(label: str) -> list[float]:
    """Validation losses of three seeds, and their mean."""
    names = values("recipe", "run")
    losses = dict(zip(names, values("recipe")))
    by_seed = [losses[f"{RECIPE[label]}-{seed}"] for seed in range(3)]
    return [*by_seed, np.mean(by_seed)]


@cache
def ceiling_losses(kind: str, T: int) -> np.ndarray:
    """Validation losses of five seeds."""
    losses = dict(zip(values("ceiling-rule", "run"), values("ceiling-rule")))
    return np.array([losses[f"{kind}-{T}-{seed}"] for seed in range(5)])


def ceiling_gap(kind: str, other: str) -> list[np.ndarray]:
    """Mean difference at both run lengths, with an interval over the seeds."""
    gaps = [ceiling_losses(kind, T) - ceiling_losses(other, T) for T in CEILING_LENGTHS]
    return [fit.mean_of(gap[None]) for gap in gaps]


def ceiling_row(label: str) -> list[float]:
    """Mean losses at both run lengths, of the Power runs with a ceiling or of WSD."""
    kind = "wsd" if "WSD" in label else label.split()[0].replace(",", "")
    return [ceiling_losses(kind, T).mean() for T in CEILING_LENGTHS]


CONTROLS = ("weight decay 0", "weight decay 0.1", "all norms fixed")


def policy_row(name: str) -> list:
    """b, the exponents of norm and relative update, and the cost of an old learning rate."""
    middle = [policies.norm_exponent(name)[0], policies.update_exponent(name)[0]]
    cost = policies.cost_of_keeping(name)
    costs = [] if math.isnan(cost[0]) else [cost]  # "-"
    return [policies.b_of(name), *middle, *costs]


def policy_row_with_intervals(name: str) -> list:
    norm = policies.norm_exponent(name)
    norm = norm[0] if "fixed" in name else norm  # nothing varies
    control = power_of_two(policies.control(name))
    growth = power_of_two(policies.growth(name))
    growth = growth[:1] if "fixed" in name else growth
    return [norm, policies.update_exponent(name), *control, *growth]


def beside_best(name: str) -> list[float]:
    """Cost of half and of twice the best learning rate, in the mean over batch sizes."""
    return [np.mean([*policies.cost_beside(name, step).values()]) for step in (-1, 1)]


def repeats() -> list[float]:
    """How far losses near the best differ between why-laptop and memory-laptop."""
    name_of = lambda r: (r["batch_size"], r["total_tokens"], r["seed"], r["lr"])
    found = []
    for decay in ("0", "0.1", "0.3"):
        folder = ROOT / f"results/why-laptop/wd-{decay}"
        again = {name_of(r): r["val_loss"] for r in fit.read_records([folder])}
        first = fit.read_records(
            [ROOT / "results/memory-laptop"], [f"weight_decay={decay}"]
        )
        best = {(m.batch_size, m.T): m.x for m in fit.minima(first)}
        gaps = []
        for r in first:
            off = fit.log2_lr(r) - best[r["batch_size"], r["total_tokens"]]
            if abs(off) < 1 and name_of(r) in again:
                gaps.append(r["val_loss"] - again[name_of(r)])
        found.append(np.sqrt(np.mean(np.square(gaps))))
    return found


def longer_gaps(label: str) -> list[np.ndarray]:
    """Minus linear to 0, at three T, each [seeds]."""
    names = {"WSD, weight decay 0": "wsd-0", "WSD": "wsd-0.1"}
    lengths = (1_280_000, 5_120_000, 20_480_000)
    return [longer.gap(names.get(label, label), T) for T in lengths]


def longer_row(label: str) -> list:
    """Minus linear to 0, at three T, with an interval at the last."""
    if label.startswith("*"):  # a title
        return []
    short, middle, long = longer_gaps(label)
    return [short.mean(), middle.mean(), longer.over_seeds(long)]


def longer_end(label: str) -> float:
    """Minus linear to 0, at the longest T."""
    return longer_gaps(label)[2].mean()


LONGER_ENDS = {  # row of README.md -> weight decay, line
    "linear to 0, searched at this T": (0, 0.1, None),
    "WSD, searched at this T": (0.1, "WSD"),
    "WSD without weight decay, searched at this T": (0, "WSD, weight decay 0"),
    "schedule-free AdamW": (0.1, "schedule-free"),
    "constant": (0, longer.NO_DECAY + ", decayed"),
    "constant, averaged": (0, longer.NO_DECAY),
    "Power (fitted)": (0.1, DECAYED),
    "Power (fitted), averaged": (0.1, FITTED),
}


def longer_end_row(label: str) -> list[float]:
    *weight_decay, line = LONGER_ENDS[label]
    return [*weight_decay, longer_end(line) if line else 0]


def longer_costs() -> list:
    """Of a weight decay of 0.1, in WSD at the longest T, and in linear to 0 at all T."""
    losses = longer.planned()
    with_it, without = losses["linear-0.1"], losses["linear-0"]
    costs = [(with_it[T] - without[T]).mean() for T in without]
    return [below("wsd-0", "wsd-0.1"), 20.48, 0, min(costs), max(costs)]


def below(name: str, other: str, T: int = 20_480_000) -> np.ndarray:
    """How far the loss of a line is below that of another, with rows over seeds."""
    losses = longer.any_time() | longer.planned()
    return longer.over_seeds(losses[other][T] - losses[name][T])


def longer_ends() -> list[float]:
    """Above linear to 0, and what the sentence has between these numbers."""
    none = longer.NO_DECAY
    ends = [longer_end(none + ", decayed"), longer_end(none)]
    return [ends[0], 0, ends[1], 0.1, longer_end(DECAYED)]


def longer_both() -> list:
    """Power below the constant line in short runs, and above it in long ones, at weight decay 0."""
    none, power = longer.NO_DECAY, f"{FITTED}, weight decay 0"
    return [below(power, none, 320_000)[0], 320, below(none, power)]


def tokens_per_parameter(T: int) -> float:
    return round(T / values("long-laptop/wsd-0", "n_params")[0], -1)


def longer_free() -> list[float]:
    """Schedule-free AdamW below linear to 0, then above it, and what is between the numbers."""
    short, middle, long = (gap.mean() for gap in longer_gaps("schedule-free"))
    return [-short, 0, 1.28, middle, 5.12, long]


def best_rivals() -> np.ndarray:
    any_time, planned = rivals.best_lines()
    assert f"{any_time}, {planned}" == "schedule-free, WSD (fitted), averaged"
    return rivals.differences(
        rivals.lines()[any_time], rivals.lines()[planned], rivals.cells()
    )


def control_numbers() -> list[float]:
    """The factors of CONTROLS, with the weight decays between them."""
    none, usual, fixed = [2 ** policies.control(name)[0] for name in CONTROLS]
    return [none, 0, usual, 0.1, fixed]


def ceiling_numbers() -> list:
    """b with a longer warmup, and the rise up to T = 1.28M by batch size."""
    rises = {}
    for (batch_size, T), rise in policies.rises().items():
        if T <= 1_280_000:
            rises.setdefault(batch_size, []).append(np.mean(rise))
    found = [policies.ceiling()[2]]
    for batch_size in (8, 32):
        found += [batch_size, np.mean(rises[batch_size])]
    return found


def against_none(weight_decay: str) -> np.ndarray:
    return policies.from_none(f"weight decay {weight_decay}")


def memory_means() -> list[float]:
    """Mean cost of a weight decay, from 0, with the weight decays."""
    costs = [checks.change("0", high, "loss").mean() for high in ("0.1", "0.3")]
    return [costs[0], 0.1, 0, costs[1], 0.3]


def size_numbers() -> list[float]:
    """Mean exponents of the best learning rate in the weight decay, with the weight decays."""
    found = []
    for (low, high), by_T in policies.sizes().items():
        found += [np.mean(list(by_T.values())), float(low), float(high)]
    return found


FREE = "schedule-free AdamW instead of Power"


def rival(decision: str) -> list[np.ndarray]:
    """Its difference over all T, and at the longest."""
    return [rivals.difference(decision, T) for T in (None, 1_280_000)]


def schedule_free_cells() -> list[int]:
    """In how many cells it has the lowest mean loss of all lines, in the same seeds."""
    lowest = 0
    for cell in rivals.cells():
        seeds = set.intersection(*(set(some[cell]) for some in rivals.lines().values()))
        means = {
            n: np.mean([some[cell][s] for s in seeds])
            for n, some in rivals.lines().items()
        }
        lowest += min(means, key=means.get) == "schedule-free"
    return [lowest, len(rivals.cells())]


NUMBERS = {
    "curves": lambda: curves.over_seeds(curves.ends("power") - curves.ends("cosine")),
    "curves.cut": lambda: (curves.cut_short() - curves.ends("cosine")).mean(axis=1).max(),
    "decay.drop": drop_of_decay,
    "ceiling.none": lambda: ceiling_gap("2000", "80000"),
    "ceiling.wsd": lambda: ceiling_gap("80000", "wsd"),
    "recipe": lambda: [recipe_row(list(RECIPE)[i])[-1] for i in (0, 2)],
    "recipe.b": lambda: fits(("recipe/sweep",)).law.b,
    "recipe.q": lambda: fits(("recipe/sweep",)).law.q,
    "laptop.power": lambda: tuned("power")[0], "laptop.cosine.0": lambda: tuned("cosine")[0],
    "laptop.moe": lambda: values("laptop-moe"),
    "moe.params": lambda: values("laptop-moe", "n_params")[0] / values("laptop", "n_params")[0],
    "float32": lambda: values("dtype")[:3], "bfloat16": lambda: values("dtype")[3:],
    "beta": lambda: 8 * 128 / 4096, "quadruple.paper": lambda: 4**-0.51,
    "quadruple.ours": lambda: 4 ** round(fits(SHORT).law.b[0], 2),
    "valleys.T": lambda: best_lr(1_280_000, 2) / best_lr(80_000, 2),
    "valleys.batch": lambda: best_lr(1_280_000, 8) / best_lr(1_280_000, 1),
    "factor.2": lambda: [cost_beside(fits(SHORT).points, step) for step in (-1, 1)],
    "transfer.mup": lambda: transfer(""), "transfer.standard": lambda: transfer(", standard"),
    "transfer.without": lambda: transfer(", standard")[0],
    "page.b": lambda: [policies.b_of("weight decay 0.1")[0], bend(W80K, "n_embd=32").law.b[0]],
    "law.b": lambda: law_row("2,000")[0], "law.q": lambda: law_row("2,000")[1],
    "long.b": lambda: law_row("32,000")[0], "both": lambda: bent.interaction(*fits(SHORT)[1:4]),
    "law.runs": lambda: [len(fits(SHORT).points), len(records(*SHORT))],
    "long.runs": lambda: [len(fits(LONG).points), len(records(*LONG))],
    "small.b": lambda: slope_of(SHORT, "b", batch_size=[1, 2]),
    "large.b": lambda: slope_of(SHORT, "b", batch_size=[4, 8]),
    "long.small.b": lambda: slope_of(LONG, "b", batch_size=[1, 2]),
    "long.large.b": lambda: slope_of(LONG, "b", batch_size=[4, 8]),
    "long.first.q": lambda: slope_of(LONG, "q", T=[80_000]),
    "long.last.q": lambda: slope_of(LONG, "q", T=[1_280_000]),
    "long.both": lambda: bent.interaction(*fits(LONG)[1:4]),
    "late.b": lambda: slope_of(SHORT, "b", T=[320_000, 640_000, 1_280_000]),
    "long.late.b": lambda: slope_of(LONG, "b", T=[320_000, 640_000, 1_280_000]),
    "s": lambda: fits(SHORT).paper[1][0], "long.s": lambda: fits(LONG).paper[1][0],
    "bend.s": lambda: bend(W80K, "n_embd=32").paper[1],
    "bend.paper": lambda: bend(W80K, "n_embd=32").paper[0],
    "bend.both": lambda: bent.interaction(*bend(W80K, "n_embd=32")[1:4]),
    "bend.all.both": lambda: bent.interaction(*bend(W80K)[1:4]),
    "warmup.late": lambda: [sweep.law.b for sweep in warmups(LATE)[::-1]],
    "long.late.both": lambda: bent.interaction(*fits(LONG, LATE_LONG)[1:4]),
    "apart": apart,
    "bend.seed.0": lambda: fit.step_law_reading(bend(W80K, "n_embd=32", "seed=0").found),
    "coarse": lambda: fit.step_law_reading(memory("0.1").found),
    "bend.all": lambda: bend(W80K).law.q, "bend.b": lambda: bend(W80K).law.b,
    "warmup.short": lambda: warmups()[0].law.b, "warmup.long": lambda: warmups()[1].law.b,
    "memory.b": lambda: change_of("b", memory("0"), memory("0.3")),
    "memory.q": lambda: change_of("q", memory("0"), memory("0.3")),
    "memory.q.0": lambda: memory("0").law.q, "memory.q.0.3": lambda: memory("0.3").law.q,
    "share": lambda: -1 - law_row("2,000")[0],  # of the run, that AdamW remembers: 1 / (lr T)
    "memory.0": lambda: memory("0").law.b, "memory.0.3": lambda: memory("0.3").law.b,
    "a.64": lambda: a_ratio(64), "a.128": lambda: a_ratio(128),
    "b.widths": lambda: [slope_of(SHORT, "b", shape=[f"width {n}"])[0] for n in (32, 64, 128)],
    "b.128-32": b_by_width,
    "choice.5": lambda: [choices()["5"], choices()["7"]], "choice.late": lambda: choices()["late"],
    "choice.paper": lambda: fits(SHORT).paper[0],
    "choice.range": lambda: max(choices().values()) - min(choices().values()),
    "choice.width": lambda: np.diff(fit.interval(fits(SHORT).law.b))[0],
    "choice.factor": lambda: (1e13 / 1.28e6) ** (max(choices().values())
                                                 - min(choices().values())),
    "unit.sequences": lambda: paper_lr(1024, 1e13),
    "unit.tokens": lambda: paper_lr(1024 * 4096, 1e13),
    "unit.steps": lambda: paper_lr(1024, 1e13 / 1024 / 4096),
    "doublings": lambda: math.log2(1e13 / 1e6) * (0.51 - 0.32),
    "anytime": stopped, "anytime.cut": lambda: max(stopped(80_000 * 2**i)[0] for i in range(4)),
    "wsd": lambda: difference("WSD", PLANNED), "power": lambda: difference(FITTED, PLANNED),
    "power.linear": lambda: difference(FITTED, LINEAR[0], T=1_280_000),
    "power.linear.2": lambda: difference(FITTED, LINEAR[1], T=1_280_000),
    "power.short": lambda: difference(FITTED, LINEAR[0], T=160_000),
    "power.trend": lambda: checks.trend(*checks.LONG),
    "anytime.wsd": lambda: beside(PLANNED), "anytime.linear": lambda: beside(LINEAR[0]),
    "averaged": lambda: difference(AVERAGED, FITTED_AVERAGED),
    "averaged.wsd": lambda: difference(FITTED_AVERAGED, PLANNED),
    "averaged.T": lambda: [difference(AVERAGED, PLANNED, T=T)[0] for T in (160_000, 1_280_000)],
    "averaged.late": lambda: -difference(AVERAGED, PLANNED, T=1_280_000)[0],
    "memory.cost": lambda: checks.cost_of_weight_decay()[0][:: 4],
    "memory.costs": lambda: checks.cost_of_weight_decay()[0],
    "memory.trend": lambda: checks.cost_of_weight_decay()[1],
    "memory.exponent": checks.exponent_of_weight_decay,
    "fixed": lambda: policies.b_of("all norms fixed"),
    "kept.0": lambda: policies.cost_of_keeping("weight decay 0"),
    "kept.0.1": lambda: policies.cost_of_keeping("weight decay 0.1"),
    "kept": lambda: [policies.cost_of_keeping(name)[0] for name in CONTROLS],
    "beside.0": lambda: [*beside_best("weight decay 0"),
                         *policies.cost_beside("weight decay 0", 1).values()],
    "beside.0.1": lambda: beside_best("weight decay 0.1"),
    "rivals.none.rows": lambda: rival("constant, weight decay 0, instead of Power")[0],
    "rivals.none.both": lambda: rival("constant, weight decay 0, instead of Power"),
    "rivals.power": lambda: -rival("Power instead of constant, both at 0.1")[0][0],
    "rivals.power.both": lambda: rival("Power instead of constant, both at 0.1"),
    "rivals.free": lambda: -rival(FREE)[1][0],
    "rivals.free.rows": lambda: rival(FREE)[0],
    "schedule.free.cells": schedule_free_cells,
    "schedule.free.T": lambda: [-rivals.difference(FREE, T)[0] for T in (80_000, 1_280_000)],
    "growth": lambda: [2 ** policies.growth("weight decay 0", k)[0] for k in (0, 1, -1, -2)],
    "growing": lambda: fit.mean_of(policies.where_norms_grow()[0]),
    "others": lambda: fit.mean_of(policies.where_norms_grow()[1]),
    "growing.others": lambda: fit.mean_of(np.subtract(*policies.where_norms_grow())),
    "longer.b": lambda: [longer.exponent(n)
                         for n in ("linear-0", "wsd-0", "linear-0.1", "wsd-0.1")],
    "longer.costs": longer_costs,
    "longer.linear": lambda: [longer.exponent(n) for n in ("linear-0", "linear-0.1")],
    "longer.losses": lambda: [longer.planned()[f"linear-{decay}"][20_480_000].mean()
                              for decay in ("0", "0.1")],
    "longer.fading": lambda: max(abs(below(f"constant, memory {m}", longer.NO_DECAY)[0])
                                 for m in (5, 1)),
    "longer.free": lambda: below(FITTED, "schedule-free"),
    "longer.free.decayed": lambda: below(DECAYED, "schedule-free"),
    "longer.free.0": lambda: longer_end("schedule-free, weight decay 0"),
    "longer.free.T": longer_free,
    "longer.instead": lambda: below(longer.NO_DECAY, FITTED),
    "longer.instead.decayed": lambda: below(longer.NO_DECAY + ", decayed", DECAYED),
    "longer.span": lambda: abs(below(FITTED + ", a quarter of it", FITTED)[0]),
    "longer.per": lambda: [tokens_per_parameter(1_280_000), 20.48,
                           tokens_per_parameter(20_480_000)],
    "longer.both": longer_both, "longer.ends": longer_ends,
    "longer.power": lambda: [longer_end(DECAYED), longer_end(FITTED)],
    "longer.constant": lambda: below(FITTED, "constant"),
    "longer.decayed": lambda: below(DECAYED, FITTED),
    "longer.wsd": lambda: below(DECAYED, "wsd-0.1"),
    "repeats": repeats, "rivals.best": best_rivals,
    "growth.per.T": lambda: 2 ** policies.growth("weight decay ∝ 1/T")[0],
    "control": control_numbers,
    "from.none": lambda: [x for n in ("0.1", "0.3") for x in (against_none(n), float(n))]
                         + [policies.from_none("all norms fixed")],
    "rises.batch": lambda: [x for i in (2, 4) for x in (2 ** ceiling_numbers()[i],
                                                     ceiling_numbers()[i - 1])],
    "memory.means": lambda: memory_means(),
    "spread": lambda: policies.one_slope()[1],
    "differ": lambda: [len(policies.one_slope()[2]), 36],
    "rises": lambda: policies.ceiling()[1], "ceiling.b": ceiling_numbers,
    "sizes": size_numbers,
    "paper": lambda: [difference(PAPER, line) for line in (WSD, COSINE)],
    "fitted": lambda: [difference(FITTED, line) for line in (WSD, COSINE)],
    "moe": lambda: [difference(line, PLANNED, True) for line in (FITTED, AVERAGED, PAPER)],
    "moe.paper": lambda: [difference(PAPER, line, moe=True) for line in (WSD, COSINE)],
    "moe.wsd": lambda: difference(FITTED, WSD, moe=True),
    "power.b": lambda: [best_b().mean(), best_b().std(ddof=1)],
    "power.b.8": lambda: [best_b(lambda m: (m.T, m.batch_size) == (T, 8)).mean()
                          for T in (80_000, 1_280_000)],
    "power.a.cost": lambda: np.mean([cost_beside(scan("a"), step) for step in (-1, 1)]),
    "power.b.cost": lambda: np.mean([cost_beside(scan("b"), step) for step in (-0.06, 0.06)]),
}  # fmt: skip
b_and_q = lambda fits: [fits.law.b, fits.law.q]
TABLES = {  # name -> (first column -> the numbers of that row)
    "bend": lambda tokens: b_and_q(bend(LARGE, "warmup_tokens=" + tokens.replace(",", ""))),
    "law": law_row, "questions": question_row, "two-stage": stages,
    "memory": lambda weight_decay: b_and_q(memory(weight_decay)), "recipe": recipe_row,
    "ceiling": ceiling_row, "policies": policy_row, "policies.all": policy_row_with_intervals,
    "longer": longer_row, "longer.ends": longer_end_row,
}  # fmt: skip


def as_numbers(value) -> list[float]:
    """Rows become an answer and its 95% interval; lists of them one long list."""
    if isinstance(value, np.ndarray):
        return [value[0], *fit.interval(value)]
    return sum(map(as_numbers, value), []) if isinstance(value, list) else [value]


def wrong(text: str, value) -> list[str]:
    """The first numbers of a text that differ from the value, each with what it should be."""
    text = re.sub(r"<!--.*?-->|\]\(.*?\)", "", text)
    shown = [
        s.rstrip(",").replace(",", "")
        for s in re.findall(r"[+-]?\d[\d,]*(?:\.\d+)?", text)
    ]
    expected = as_numbers(value)
    if isinstance(value, np.ndarray) and not re.match(r"\S+ \[", text):
        expected = expected[:1]  # the page leaves out the interval
    if len(shown) < len(expected):
        return [f"needs {expected}"]
    digits = [len(s.partition(".")[2]) for s in shown]
    pairs = zip(shown, expected, digits)
    return [f"{s} is {v:.5g}" for s, v, d in pairs if abs(float(s) - v) > 0.501 / 10**d]


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_the_records(page):
    found = []
    for name, text in re.findall(r"<!--n:(.+?)-->(?=(.*))", PAGES[page]):
        found += [f"{name}: {error}" for error in wrong(text, NUMBERS[name]())]
    for name, rows in re.findall(
        r"<!--t:(.+?)-->\n.*\n\|---.*\n((?:\|.*\n)+)", PAGES[page]
    ):
        for label, numbers in re.findall(r"^\| (.+?) \|(.+)\|$", rows, re.M):
            if label != "the paper":
                found += [
                    f"{label}: {error}" for error in wrong(numbers, TABLES[name](label))
                ]
    assert "\n".join(found) == ""


def test_every_number_has_its_place():
    marks = re.findall(r"<!--([nt]):(.+?)-->", "".join(PAGES.values()))
    assert set(marks) == {("n", name) for name in NUMBERS} | {
        ("t", name) for name in TABLES
    }
    assert (
        runpy.run_path(str(ROOT / "results/ramp-laptop/table.py"))["table"]()
        in PAGES["log.md"]
    )
    assert TUNE["table"]() in PAGES["train.md"]


def test_the_comparison_is_what_fit_prints(tmp_path, capsys):
    folders = [
        str(ROOT / "results" / name) for name in ("compare-laptop", "search-laptop")
    ]
    assert fit.main([*folders, f"--out={tmp_path}"]) == 0
    row = r"^\| .+ (?:better|worse|level|undecided) \|$"
    printed = re.findall(row, capsys.readouterr().out, re.M)
    ours, rest = PAGES["methods.md"].split("### With rivals")
    assert re.findall(row, ours, re.M) == printed
    shown = re.findall(row, PAGES["README.md"], re.M)
    shorter = {line.rpartition(" | ")[0] + " |" for line in printed}  # not the longest T
    assert len(shown) > 5 and set(shown) <= shorter
    rivals.main([])
    again = re.findall(row, capsys.readouterr().out, re.M)
    assert re.findall(row, rest.split("\n## ")[0], re.M) == again and len(again) > 15
    ceiling = runpy.run_path(str(ROOT / "results/ceiling-laptop/table.py"))["table"]()
    assert all(part in PAGES["log.md"] for part in ceiling.split("\n\n"))


def test_records_of_the_default_run_have_the_presets_settings():
    best = TUNE["chosen"](TUNE["read"]())
    moe = (ROOT / "results/laptop-moe/records.jsonl").read_text("utf-8").splitlines()
    found = [*best["power"], *best["wsd"], *map(json.loads, moe)]
    assert len(found) == 9
    for r in found:
        cfg = train.make_config(preset=r["preset"], schedule=r["schedule"])
        names = SCHEDULES[r["schedule"]].reads | {
            "total_tokens",
            "batch_size",
            "n_layer",
            "n_embd",
            "n_expert",
        }
        assert {name: r[name] for name in names} == {
            name: getattr(cfg, name) for name in names
        }
