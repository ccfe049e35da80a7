"""Does a schedule without a plan cost anything in long runs?

    python research/longer.py

Prints the tables and the decisions of research/results/long-laptop/rules.md, from its records, and
draws a figure of research/why.md.
"""

import sys
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fit
from compare import AVERAGED, LINEAR, POWER, WSD, Line
from compare import index_runs, losses_of_lines
from comparison import searched
from fit import Estimate, mean_of, show
from records import cell_of, read_records, read_rows, row
from tables import Table
from tools import flags
from tools.figures import COLORS, draw_points, size
from tools.flags import UserError

RUNS = ROOT / "research/results/long-laptop"
# Every line names its weight decay and memory, so that it finds its runs and no others.
CONSTANT = WSD | AVERAGED
USUAL = dict(weight_decay=0.1, memory=None)
NONE = dict(weight_decay=0.0, memory=None)
LINES = {  # all average their weights over about the last tenth of the tokens
    "constant, weight decay 0": Line(CONSTANT | NONE, 0.0, 0.5),
    "constant, memory 5": Line(CONSTANT | USUAL | dict(memory=5.0), 0.0, 0.5),
    "constant": Line(CONSTANT | USUAL, 0.0, 0.5),
    "Power (fitted)": Line(POWER | AVERAGED | USUAL, -0.3, 0.5),
    "constant, memory 1": Line(CONSTANT | USUAL | dict(memory=1.0), 0.0, 0.5),
}
SPANS = {"": 16.0, ", half the span": 32.0, ", a quarter of it": 64.0}  # of the averages
SPANNED = ("constant, weight decay 0", "constant, memory 5", "Power (fitted)")
# not in the rules, but added after the any-time runs of seed 0
ADDED = {
    "Power (fitted), decayed": Line(POWER | USUAL, -0.3, 0.5),
    "Power (fitted), weight decay 0": Line(POWER | AVERAGED | NONE, -0.3, 0.5),
}
# in the second part of the rules, after seeds 0 and 1 of the other lines
FREE = dict(schedule="constant", average=True)
SCHEDULE_FREE = {
    "schedule-free": Line(FREE | dict(weight_decay=0.1), 0.0, 0.5),
    "schedule-free, weight decay 0": Line(FREE | dict(weight_decay=0.0), 0.0, 0.5),
}


def any_time_lines() -> dict[str, Line]:
    """The lines that need no T, some with averages over shorter spans, too."""
    found = {}
    for name, (fields, b, q) in LINES.items():
        for words, power in SPANS.items():
            if words == "" or name in SPANNED:
                found[name + words] = Line(fields | dict(average_power=power), b, q)
    return found


ANY_TIME = any_time_lines() | ADDED | SCHEDULE_FREE
NO_DECAY = "constant, weight decay 0"
PLANNED = {"linear": LINEAR, "wsd": WSD}
DECIDE = (5_120_000, 10_240_000, 20_480_000)
LEVEL = 0.005  # nats
INSTEAD = (NO_DECAY, "constant, memory 5", "constant, memory 1")


# -- The losses --------------------------------------------------------------------------


def by_T(losses: dict) -> dict:
    """{cell: {seed: loss}} -> {T: losses [seeds]}, for a single shape and batch size.

    Raises UserError if a seed is missing at some T.
    """
    if len({frozenset(seeds) for seeds in losses.values()}) != 1:
        raise UserError("a line lacks runs of a seed; is its sweep still running?")
    found = {}
    for (_, T, _), seeds in losses.items():
        found[T] = np.array([seeds[seed] for seed in sorted(seeds)])
    return dict(sorted(found.items()))


@cache
def any_time() -> dict:
    """{line: {T: losses [seeds]}}

    One more line is not in the rules. At the learning rate of the constant line without
    weight decay, the runs of wsd-0 end with a decay in place of the average.
    """
    folders = [RUNS / name for name in ("any-time", "added", "schedule-free")]
    # read_rows would refuse to mix weight decays
    records = [row(r) for folder in folders for r in read_records(folder)]
    losses, tuned = losses_of_lines(index_runs(records, ANY_TIME))
    decayed: dict = {}
    for r in read_rows([RUNS / "wsd-0"]):
        if r["lr"] == tuned[NO_DECAY].get(r["seed"]):
            decayed.setdefault(cell_of(r), {})[r["seed"]] = r["loss"]
    losses[NO_DECAY + ", decayed"] = decayed
    return {name: by_T(cells) for name, cells in losses.items()}


@cache
def planned() -> dict:
    """{"linear-0" and so on: {T: losses [seeds]}}, with learning rates of other seeds.

    A single seed chooses for itself.
    """
    found = {}
    for schedule, fields in PLANNED.items():
        for decay in ("0", "0.1"):
            name = f"{schedule}-{decay}"
            records = read_rows([RUNS / name])
            if len({r["seed"] for r in records}) > 1:
                found[name] = by_T(searched(records, fields))
            else:
                lowest: dict = {}
                for r in records:
                    T = r["total_tokens"]
                    lowest[T] = min(r["loss"], lowest.get(T, np.inf))
                found[name] = {T: np.array([loss]) for T, loss in sorted(lowest.items())}
    return found


def linear_for(name: str, T: int) -> str:
    """The linear line that another line is compared with at T."""
    chooses = "weight decay 0" in name or "memory" in name or name == "wsd-0"
    if not chooses:  # its weight decay is given
        return "linear-0.1"
    return min(("linear-0", "linear-0.1"), key=lambda line: planned()[line][T].mean())


def gap(name: str, T: int) -> np.ndarray:
    """Loss of a line minus linear to 0, [seeds]."""
    losses = any_time() | planned()
    return losses[name][T] - planned()[linear_for(name, T)][T]


# -- The decisions -----------------------------------------------------------------------


def over_seeds(gaps: np.ndarray) -> Estimate:
    """The mean of gaps [seeds]."""
    return mean_of(gaps[None])


def decide(gaps: list[np.ndarray], words: tuple[str, str]) -> str:
    """The first word if all intervals lie below +LEVEL, the second if all are above 0."""
    intervals = [fit.interval(over_seeds(some)) for some in gaps]
    if all(high < LEVEL for _, high in intervals):
        return words[0]
    if all(low > 0 for low, _ in intervals):
        return words[1]
    return "undecided"


def verdict(name: str) -> str:
    return decide([gap(name, T) for T in DECIDE], ("free", "costs"))


def instead_of_power(name: str) -> list[np.ndarray]:
    """Loss of a line minus Power at the three longest T, each [seeds]."""
    return [any_time()[name][T] - any_time()["Power (fitted)"][T] for T in DECIDE]


def trend(name: str) -> Estimate:
    """Change of the gap per doubling of T from 1.28M on."""
    late = [T for T in planned()["linear-0"] if T >= 1_280_000]
    gaps = np.array([gap(name, T) for T in late])  # [T, seeds]
    slopes = np.polyfit(np.log2(late), gaps, 1)[0]
    return over_seeds(slopes)


def exponent(name: str) -> Estimate:
    """Exponent of T in the best learning rate of a planned line, in the mean over seeds.

    From the minima of all T that are not at an edge. This is not in the rules.
    """
    series: dict = {}
    for cell, x in fit.minima(fit.cells_of(read_rows([RUNS / name]), by_seed=True)):
        (seed,) = cell.losses
        series.setdefault(seed, []).append((np.log2(cell.T), x))
    slopes = [np.polyfit(*zip(*points), 1)[0] for points in series.values()]
    return over_seeds(np.array(slopes))


# -- The figure and the report -----------------------------------------------------------


def draw(path: Path) -> None:
    """The gap of the lines to linear to 0 against T."""
    shown = {
        "Power (fitted)": ("Power, averaged", COLORS["power"]),
        "wsd-0.1": ("WSD, searched at every T", COLORS["wsd"]),
        "Power (fitted), decayed": ("Power", COLORS["other"]),
        NO_DECAY + ", decayed": ("constant, weight decay 0", COLORS["average"]),
    }
    lengths = [T for T in planned()["linear-0"] if T >= 1_280_000]
    colors = dict(shown.values())
    groups = {}
    for name, (label, _) in shown.items():
        points = []
        for T in lengths:
            mean = gap(name, T).mean()
            error, _ = fit.error_of(over_seeds(gap(name, T)))
            points.append((np.log2(T), mean, mean - error, mean + error, mean))
        groups[label] = points
    draw_points(
        path,
        groups,
        colors,
        title="In longer runs, linear to 0 is ahead",
        xlabel="run length T (tokens)",
        ylabel="loss minus linear to 0 (nats)",
    )


def draw_all() -> None:
    draw(ROOT / "assets/longer.png")


def losses_table() -> Table:
    losses = any_time() | planned()
    lengths = list(losses["linear-0"])
    rows = []
    for name in sorted(losses, key=lambda name: losses[name][5_120_000].mean()):
        by_T = losses[name]
        rows.append(
            [name, *(f"{by_T[T].mean():.4f}" if T in by_T else "" for T in lengths)]
        )
    return Table(
        "longer, losses",
        "Mean loss over three seeds, in the order of 5.12M tokens (`long-laptop`: width 32, "
        "batch size 8). Lines that need no T average their weights, unless they are decayed. "
        "linear-0 and so on know T, and were searched at every T.",
        ["line", *map(size, lengths)],
        rows,
    )


def longer_table() -> Table:
    rows = []
    for name in (*any_time(), "wsd-0", "wsd-0.1"):
        gaps = [over_seeds(gap(name, T)) for T in (1_280_000, *DECIDE)] + [trend(name)]
        rows.append([name, *(show(some, 4) for some in gaps), verdict(name)])
    return Table(
        "longer",
        "Loss minus that of a linear decay to 0, which was searched at every T. Lines that "
        "name no weight decay and no memory have a weight decay of 0.1, and we subtract linear "
        "to 0 at 0.1. From the others we subtract the lower of linear to 0 at 0 and at 0.1.",
        ["line", *map(size, (1_280_000, *DECIDE)), "per doubling", "by the rules"],
        rows,
    )


def instead_table() -> Table:
    rows = []
    for name in (*INSTEAD, NO_DECAY + ", decayed", *ADDED, *SCHEDULE_FREE):
        gaps = instead_of_power(name)
        word = decide(gaps, ("serves as well", "no substitute"))
        rows.append([name, *(show(over_seeds(some), 4) for some in gaps), word])
    return Table(
        "longer, instead of Power",
        "Loss minus that of Power (fitted), averaged, at a weight decay of 0.1.",
        ["line", *map(size, DECIDE), "by the rules"],
        rows,
    )


def pairs_table() -> Table:
    losses = any_time() | planned()
    decayed = "Power (fitted), decayed"
    pairs = [
        (NO_DECAY + ", decayed", decayed),
        (NO_DECAY, "Power (fitted), weight decay 0"),
        (NO_DECAY + ", decayed", NO_DECAY),
        ("wsd-0.1", decayed),
        ("wsd-0.1", "wsd-0"),
        ("linear-0.1", "linear-0"),
        ("constant", "Power (fitted)"),
        ("schedule-free", decayed),
    ]
    rows = []
    for one, other in pairs:
        gaps = [losses[one][T] - losses[other][T] for T in (320_000, 1_280_000, *DECIDE)]
        rows.append(
            [f"{one} minus {other}", *(show(over_seeds(some), 4) for some in gaps)]
        )
    return Table(
        "longer, pairs",
        "Other differences of these lines.",
        ["lines", *map(size, (320_000, 1_280_000, *DECIDE))],
        rows,
    )


def exponents_table() -> Table:
    return Table(
        "longer, exponents",
        "Exponent of T in the best learning rate, T from 320k to 20.48M.",
        ["line", "b"],
        [[name, show(exponent(name), 2)] for name in planned()],
    )


def tables() -> list[Table]:
    return [
        longer_table(),
        losses_table(),
        instead_table(),
        pairs_table(),
        exponents_table(),
    ]


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("longer.py", __doc__).parse_args(argv)
    try:
        print(*tables(), sep="\n\n")
    except UserError as error:  # the sweeps are not finished
        return flags.fail("longer.py", error)
    draw_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
