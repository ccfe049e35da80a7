"""The comparison of schedules: its lines, how each is tuned, differences, and words for
them.

    python compare.py        list the lines, and when each must know the run length

A *cell* is (shape, T, batch size). A *line* is a schedule with a rule for its learning
rate. Every seed is an experiment of its own: it tunes all lines in two small cells, with
separate runs, and tests them in larger cells. Losses are in nats per token.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fit import interval, show
from records import cell_of, loss_of, narrow_first, tuned_fields
from schedules import PAPER_SEQ_LEN, has_decay, is_planned
from tools import figures, flags
from tools.figures import size
from tools.flags import UserError

DRAWS = 100_000
TUNING = 100  # seeds 100 + 2s and 101 + 2s tune the lines of seed s


class Line(NamedTuple):
    """Its learning rate grows as batch^q T^b from the cell of the tuning, under Power as
    n^b."""

    fields: dict  # of a TrainConfig; decay_share is the decay as a share of T
    b: float = 0.0
    q: float = 0.0


WSD = dict(schedule="wsd", decay_shape="exp", min_lr_ratio=0.1, average=False)
POWER = WSD | dict(
    schedule="power", power_q=1.0
)  # a includes beta^(q - 1), for each batch size
COSINE = WSD | dict(schedule="cosine")
TO_0 = COSINE | dict(min_lr_ratio=0.0)
LINEAR = WSD | dict(decay_shape="linear", decay_share=1.0)  # from the warmup to the end
AVERAGED = dict(
    average=True, decay_tokens=0, decay_share=None
)  # the average replaces the decay
SQRT, FITTED, PAPER = (
    dict(q=0.5),
    dict(b=-0.3, q=0.5),
    dict(b=-0.51, q=1.0),
)  # FITTED: our law
LINES = {
    "Power (fitted), averaged": Line(POWER | AVERAGED, **FITTED),
    "WSD ∝ √batch, averaged": Line(WSD | AVERAGED, **SQRT),
    "Power (paper)": Line(POWER, **PAPER), "Power (fitted)": Line(POWER, **FITTED),
    "WSD": Line(WSD), "WSD ∝ √batch": Line(WSD, **SQRT), "WSD (fitted)": Line(WSD, **FITTED),
    "WSD (fitted), averaged": Line(WSD | AVERAGED, **FITTED),
    "cosine": Line(COSINE), "cosine ∝ √batch": Line(COSINE, **SQRT),
    "cosine (fitted)": Line(COSINE, **FITTED),
    "cosine to 0 ∝ √batch": Line(TO_0, **SQRT), "cosine to 0 (fitted)": Line(TO_0, **FITTED),
    "linear to 0 ∝ √batch": Line(LINEAR, **SQRT), "linear to 0 (fitted)": Line(LINEAR, **FITTED),
}  # fmt: skip


def fields_of(line: Line, lr: float, batch_size: int, T: int, tuned: tuple) -> dict:
    """Fields of a line's run with this batch size and T, if it was tuned to learning rate
    lr.

    tuned: batch size, seq_len and T of that tuning. Under Power, lr is the learning rate
    at that T.
    """
    tuned_batch_size, seq_len, tuned_T = tuned
    lr *= (batch_size / tuned_batch_size) ** line.q
    if line.fields["schedule"] == "power":
        a = lr / (batch_size * seq_len / PAPER_SEQ_LEN * tuned_T**line.b)
        return line.fields | dict(power_a=float(f"{a:.4g}"), power_b=line.b)
    lr *= (T / tuned_T) ** line.b
    return line.fields | dict(lr=float(f"{lr:.4g}"))


def needs_T(line: Line) -> str:
    """When must you know the run length?"""
    schedule = line.fields["schedule"]
    lr_of_T = line.b != 0 and schedule != "power"  # its learning rate depends on T
    if is_planned(schedule) or line.fields.get("decay_share") or lr_of_T:
        return "from the start"
    if line.fields["average"] or not has_decay(schedule):
        return "never"
    return "when it decays"


# -- The comparison ----------------------------------------------------------------------


def key_of(fields: dict) -> tuple:
    """What tells a run from the others of its cell and seed, in a record or in fields_of
    a line."""
    names = (
        "schedule",
        "decay_shape",
        "min_lr_ratio",
        "average",
        *tuned_fields(fields["schedule"]),
    )
    return tuple(fields[name] for name in names)


def tuning_seeds(seed: int) -> tuple[int, int]:
    return TUNING + 2 * seed, TUNING + 2 * seed + 1


def best_of(tried: dict[float, list]) -> float | None:
    """The learning rate with the lowest mean of its losses. None if a loss is missing."""
    whole = not any(None in losses for losses in tried.values())
    return min(tried, key=lambda lr: sum(tried[lr])) if whole else None


def losses_of_lines(records: list[dict]) -> tuple[dict, dict, Callable]:
    """Return {line: {cell: {seed: loss}}} and {line: {seed: tuned learning rate}}.

    Only cells in which all seeds of WSD are there, and of a line only those in which it
    has all seeds. Raises UserError if there is none. The third value is a function from
    line and cell to {seed: record}.
    """
    runs = {(cell_of(r), r["seed"], key_of(r)): r for r in records}
    tuning = {cell for cell, seed, _ in runs if seed >= TUNING}
    if not tuning:
        raise UserError(f"no runs tuned the schedules (seeds {TUNING} and up)")
    first = min(tuning, key=lambda cell: cell[1])  # the shorter one
    tuned_at = first[2], records[0]["seq_len"], first[1]
    trials = [r for r in records if r["seed"] >= TUNING and cell_of(r) == first]
    rates = sorted({r["lr"] for r in trials if WSD.items() <= r.items()})  # of all lines

    def run(name: str, lr: float, cell: tuple, seed: int) -> dict | None:
        fields = fields_of(LINES[name], lr, cell[2], cell[1], tuned_at)
        return runs.get((cell, seed, key_of(fields)))

    def tuned(name: str, seed: int) -> float:
        cells = [(cell, trial) for cell in tuning for trial in tuning_seeds(seed)]
        tried = {lr: [run(name, lr, *cell) for cell in cells] for lr in rates}
        lr = best_of({lr: [r and loss_of(r) for r in some] for lr, some in tried.items()})
        if lr is None:
            raise UserError(
                f"{name} lacks trials of seed {seed}; is the sweep still running?"
            )
        return lr

    seeds = sorted(
        {r["seed"] for r in records if r["seed"] < TUNING and r["schedule"] == "power"}
    )
    best = {name: {seed: tuned(name, seed) for seed in seeds} for name in LINES}
    runs_of = lambda name, cell: {
        seed: run(name, best[name][seed], cell, seed) for seed in seeds
    }
    losses_of = lambda *at: {seed: loss_of(r) for seed, r in runs_of(*at).items()}
    cells = {cell for cell, seed, _ in runs if seed < TUNING}
    lines = {}
    for name in LINES:
        whole = [cell for cell in cells if None not in runs_of(name, cell).values()]
        lines[name] = {
            cell: losses_of(name, cell) for cell in sorted(whole, key=narrow_first)
        }
    if not lines["WSD"]:
        raise UserError(
            "no cell of the comparison has all its runs; is the sweep still running?"
        )
    return lines, best, runs_of


def searched(records: list[dict]) -> dict:
    """{cell: {seed: loss}} of WSD at the learning rate that is best for the *other*
    seeds.

    In cells where at least two seeds tried seven learning rates or more.
    """
    tried: dict = {}
    for r in records:
        if r["seed"] < TUNING and WSD.items() <= r.items():
            seeds = tried.setdefault(cell_of(r), {})
            seeds.setdefault(r["seed"], {})[r["lr"]] = loss_of(r)
    found: dict = {}
    for cell, seeds in tried.items():
        seeds = {seed: losses for seed, losses in seeds.items() if len(losses) >= 7}
        for seed in seeds if len(seeds) > 1 else ():
            others = [losses for other, losses in seeds.items() if other != seed]
            rates = set.intersection(*map(set, seeds.values()))
            best = min(sorted(rates), key=lambda lr: sum(losses[lr] for losses in others))
            found.setdefault(cell, {})[seed] = seeds[seed][best]
    return found


def differences(one: dict, other: dict, cells: list) -> np.ndarray:
    """Mean loss of one line minus another's, followed by draws of Student's t around it.

    All runs of a seed share its tuning, and all T of a pair of shape and batch size share
    trunks. So we average over T, and count the spread over pairs and the spread over
    seeds, both as random (degrees of freedom as in Welch's test). Without draws for a
    single seed in a single pair.
    """
    seeds = sorted(
        set.intersection(*(one[cell].keys() & other[cell].keys() for cell in cells))
    )
    by_pair: dict = {}
    for cell in cells:
        shape, _, batch_size = cell
        gaps = [one[cell][seed] - other[cell][seed] for seed in seeds]
        by_pair.setdefault((shape, batch_size), []).append(gaps)
    gap = np.array([np.mean(gaps, axis=0) for gaps in by_pair.values()])  # [pairs, seeds]
    return with_t(*mean_and_error(gap))


def with_t(mean: float, error: float, freedom: float) -> np.ndarray:
    """A mean, followed by draws of Student's t around it, none if there is no spread."""
    rng = np.random.default_rng(0)
    return np.append(
        mean, mean + error * rng.standard_t(freedom, size=DRAWS) if freedom else []
    )


def mean_and_error(gap: np.ndarray) -> tuple[float, float, float]:
    """Mean of gap [pairs, seeds], its standard error, and the degrees of freedom of that
    error."""
    parts = []  # the variance of the mean from pairs, and from seeds, with degrees of freedom
    for means in (gap.mean(axis=1), gap.mean(axis=0)):
        if len(means) > 1:
            parts.append((means.var(ddof=1) / len(means), len(means) - 1))
    # a little too wide, because what varies with both is in both parts
    variance = sum(part for part, _ in parts)
    below = sum(part**2 / n for part, n in parts)
    return gap.mean(), math.sqrt(variance), variance**2 / below if below else 0.0


def holm(draws: dict[str, np.ndarray], level: float = 0.05) -> list[str]:
    """The names whose difference is not 0 although we looked at all of them (Holm,
    1979)."""
    chance = {}
    for name, some in draws.items():
        finite = some[1:][np.isfinite(some[1:])]
        above = (
            np.mean(finite > 0) if finite.size else 0.5
        )  # without a spread, we cannot tell
        chance[name] = 2 * min(above, 1 - above)
    found = []
    for i, name in enumerate(sorted(chance, key=chance.get)):
        if chance[name] > level / (len(chance) - i):
            break
        found.append(name)
    return found


# -- In words ----------------------------------------------------------------------------

LEVEL = 0.005  # nats; two lines are level if the interval of their difference lies inside
VERBS = {"level": "ties", "better": "beats", "worse": "loses to", "undecided": "may tie"}


def verdict(draws: np.ndarray) -> str:
    low, high = np.round(interval(draws), 9)
    if (
        -LEVEL < low < high < LEVEL
    ):  # one seed in one pair has no interval, so low == high
        return "level"
    return "better" if low < high < 0 else "worse" if 0 < low < high else "undecided"


def comparison(records: list[dict], out: Path) -> None:
    """Print the tables, in Markdown, and draw the figures."""
    lines, best, _ = losses_of_lines(records)
    print("tuned learning rates of the seeds")
    for name, rates in best.items():
        print(f"{name:<26} " + " ".join(f"{lr:g}" for lr in rates.values()))
    panels = []
    with_search = lines | {"WSD, searched in every cell": searched(records)}
    for kind in ("dense", "MoE"):
        of_kind = [
            cell for cell in lines["WSD"] if ("experts" in cell[0]) == (kind == "MoE")
        ]
        present = [some for some in lines.values() if some.keys() & set(of_kind)]
        cells = [cell for cell in of_kind if all(cell in some for some in present)]
        if cells:
            panels.append(table_of_differences(with_search, cells, kind))
    figures.draw_differences(out / "compare.png", panels, LEVEL)
    print(f"\n{out}: compare.png")


def table_of_differences(lines: dict, cells: list, kind: str) -> dict:
    """Print all lines minus the best planned one, and return them as a panel of
    compare.png.

    The best planned line decays, needs T from the start, and has the lowest mean loss.
    """
    when = {name: "from the start" for name in lines}
    planned = []
    whole = [name for name in lines if lines[name].keys() >= set(cells)]
    for name, line in LINES.items():
        when[name] = needs_T(line)
        if (
            name in whole
            and when[name] == "from the start"
            and not line.fields["average"]
        ):
            planned.append(name)
    mean = lambda name: np.mean([[*lines[name][cell].values()] for cell in cells])
    other = min(planned, key=mean)

    longest = max(T for _, T, _ in cells)
    late_cells = [cell for cell in cells if cell[1] == longest]
    all_T = {name: differences(lines[name], lines[other], cells) for name in whole}
    late = {name: differences(lines[name], lines[other], late_cells) for name in whole}
    order = sorted(whole, key=lambda name: all_T[name][0])
    against = f"minus {other}, {mean(other):.3f} | at T = {size(longest)}"
    print(
        f"\n| {kind}, {len(cells)} cells | needs T | loss | {against} |\n"
        + "|---" * 5
        + "|"
    )
    text = lambda draws: f"{show(draws)} {verdict(draws)}"
    tests = {}
    for name in order:
        if name != other:
            loss = (
                mean(other) + all_T[name][0]
            )  # a line may have fewer seeds than the other
            both = f"{text(all_T[name])} | {text(late[name])}"
            print(f"| {name} | {when[name]} | {loss:.3f} | {both} |")
            tests[f"{name}, all T"] = all_T[name]
            tests[f"{name}, T = {size(longest)}"] = late[name]
    survivors = "; ".join(holm(tests)) or "none"
    print(f"\nnot 0 after Holm's correction for {len(tests)}: {survivors}")
    missing = [name for name in LINES if name not in whole]
    if missing:
        print(f"not in all of these cells: {', '.join(missing)}")

    verb = VERBS[verdict(all_T["Power (fitted), averaged"])]
    rows = {name: (all_T[name][0], *interval(all_T[name]), when[name]) for name in order}
    return dict(title=f"{kind}: averaged Power {verb} {other}", other=other, rows=rows)


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("compare.py", __doc__).parse_args(argv)
    for name, line in LINES.items():
        print(f"{name:<26} batch^{line.q:g} T^{line.b:g}   needs T {needs_T(line)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
