"""The comparison of schedules: its rules, its tables, and the words for them.

    python compare.py        list the lines, and when a line needs the run length

The rules, in the order of this file:

1. A *line* is a schedule with a rule for its learning rate (`LINES`).
2. Every seed repeats the whole experiment. It tunes all lines in two small cells, with
   separate runs. A *cell* is (shape, T, batch size). The learning rate with the lowest
   mean loss wins (`tune`).
3. It then tests every line in larger cells, where its exponents alone set the learning
   rate (`losses_of_lines`).
4. The difference of two lines is the mean over cells and seeds. Its interval leaves
   out one pair of shape and batch size at a time, and one seed (`differences`).
5. Two lines are level if the interval lies inside ±0.005 nats. One is better or worse if
   the interval excludes 0. Otherwise the result is undecided (`verdict`).

Losses are in nats per token. `python fit.py FOLDER` prints the tables of a comparison.
"""

import math
import sys
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fit import Estimate, error_of, interval, mean_of, show, student
from records import cell_of, narrow_first
from schedules import has_decay, is_planned, paper_batch_size
from tools import figures, flags

# -- 1. The lines ------------------------------------------------------------------------


class Line(NamedTuple):
    """A schedule, and how its learning rate changes from the tuned cell to others.

    It grows as batch^q T^b. Under Power it grows as batch^q, and falls as n^b in the run.
    """

    fields: dict  # of a TrainConfig; decay_share is the decay as a share of T
    b: float
    q: float


WSD = dict(schedule="wsd", decay_shape="exp", min_lr_ratio=0.1, average=False)
POWER = WSD | dict(schedule="power")  # with the q of its line
COSINE = WSD | dict(schedule="cosine")
TO_0 = COSINE | dict(min_lr_ratio=0.0)
LINEAR = WSD | dict(decay_shape="linear", decay_share=1.0)  # from the warmup to the end
# The average of the weights replaces the decay
AVERAGED = dict(average=True, decay_share=0.0)

# "Fitted" is our law, b = -0.3 and q = 0.5. "Paper" is the law of the paper. "∝ √batch"
# has the q of our law, and the same learning rate at every run length.
LINES = {
    # name                           fields              b      q
    "Power (fitted), averaged": Line(POWER | AVERAGED, -0.30, 0.5),
    "WSD ∝ √batch, averaged":   Line(WSD | AVERAGED,    0.0,  0.5),
    "Power (paper)":            Line(POWER,            -0.51, 1.0),
    "Power (fitted)":           Line(POWER,            -0.30, 0.5),
    "WSD":                      Line(WSD,               0.0,  0.0),
    "WSD ∝ √batch":             Line(WSD,               0.0,  0.5),
    "WSD (fitted)":             Line(WSD,              -0.30, 0.5),
    "WSD (fitted), averaged":   Line(WSD | AVERAGED,   -0.30, 0.5),
    "cosine":                   Line(COSINE,            0.0,  0.0),
    "cosine ∝ √batch":          Line(COSINE,            0.0,  0.5),
    "cosine (fitted)":          Line(COSINE,           -0.30, 0.5),
    "cosine to 0 ∝ √batch":     Line(TO_0,              0.0,  0.5),
    "cosine to 0 (fitted)":     Line(TO_0,             -0.30, 0.5),
    "linear to 0 ∝ √batch":     Line(LINEAR,            0.0,  0.5),
    "linear to 0 (fitted)":     Line(LINEAR,           -0.30, 0.5),
}  # fmt: skip


def fields_of(line: Line, lr: float, batch_size: int, T: int, tuned: tuple) -> dict:
    """Fields for a run of a line with this batch size and T, if the tuning found lr.

    tuned: batch size, seq_len and T of that tuning. Under Power, lr is the learning rate
    at that T.
    """
    tuned_batch_size, seq_len, tuned_T = tuned
    if line.fields["schedule"] == "power":
        beta = paper_batch_size(tuned_batch_size * seq_len)
        a = lr / (beta**line.q * tuned_T**line.b)  # from lr = a beta^q n^b at n = tuned_T
        return line.fields | dict(
            power_a=float(f"{a:.4g}"), power_b=line.b, power_q=line.q
        )
    lr *= (batch_size / tuned_batch_size) ** line.q
    lr *= (T / tuned_T) ** line.b
    return line.fields | dict(lr=float(f"{lr:.4g}"))


def needs_T(line: Line) -> str:
    """When do you need the run length?"""
    schedule = line.fields["schedule"]
    lr_depends_on_T = line.b != 0 and schedule != "power"
    decays_over_a_share_of_T = bool(line.fields.get("decay_share"))
    if is_planned(schedule) or decays_over_a_share_of_T or lr_depends_on_T:
        return "from the start"
    if line.fields["average"] or not has_decay(schedule):
        return "never"
    return "when it decays"


# -- 2. How we tune a line ---------------------------------------------------------------

TUNING = 100  # seeds 100 + 2s and 101 + 2s tune the lines of seed s


def tuning_seeds(seed: int) -> tuple[int, int]:
    return TUNING + 2 * seed, TUNING + 2 * seed + 1


def best_of(tried: dict[float, list]) -> float | None:
    """The learning rate with the lowest mean of its losses. None if a loss is missing."""
    totals = {}
    for lr, losses in tried.items():
        if None in losses:
            return None
        totals[lr] = sum(losses)
    return min(totals, key=totals.get)


class Runs(NamedTuple):
    """The records of a comparison, and where we tuned its lines."""

    lines: dict[str, Line]
    records: dict  # (cell, seed) -> records
    tuning_cells: list  # the two cells, the shorter T first
    tuned_at: tuple  # batch size, seq_len and T of the first
    rates: list  # the learning rates that every line tries, in order

    def find(self, name: str, lr: float, cell: tuple, seed: int) -> dict | None:
        """The record of a line tuned to lr. None if it is missing."""
        _, T, batch_size = cell
        fields = fields_of(self.lines[name], lr, batch_size, T, self.tuned_at)
        for record in self.records.get((cell, seed), []):
            if has_fields(record, fields):
                return record
        return None

    def of_seeds(self, name: str, rates: dict[int, float], cell: tuple) -> dict:
        """{seed: record} of a line in a cell, None for a missing run.

        rates: {seed: learning rate of the line}.
        """
        found = {}
        for seed, lr in rates.items():
            found[seed] = self.find(name, lr, cell, seed)
        return found


def has_fields(record: dict, fields: dict) -> bool:
    """Is this the run of a line? Of a and q under Power, only a beta^q counts in a cell."""
    exact = {n: value for n, value in fields.items() if n not in ("power_a", "power_q")}
    if not exact.items() <= record.items():
        return False
    if fields["schedule"] != "power":
        return True
    beta = paper_batch_size(record["batch_size"] * record["seq_len"])
    one, other = [some["power_a"] * beta ** some["power_q"] for some in (record, fields)]
    return math.isclose(one, other, rel_tol=1e-3)  # a has four digits


def index_runs(records: list[dict], lines: dict[str, Line] = LINES) -> Runs:
    """Sort the records by cell and seed, and find where the lines were tuned.

    Raises UserError if no run tuned them.
    """
    by_cell: dict = {}
    for r in records:
        by_cell.setdefault((cell_of(r), r["seed"]), []).append(r)
    tuning_cells = {cell for cell, seed in by_cell if seed >= TUNING}
    if not tuning_cells:
        raise flags.UserError(f"no runs tuned the schedules (seeds {TUNING} and up)")

    tuning_cells = sorted(tuning_cells, key=itemgetter(1))  # by T
    first = tuning_cells[0]
    _, T, batch_size = first
    tuned_at = batch_size, records[0]["seq_len"], T

    rates = set()
    for r in records:
        is_trial = r["seed"] >= TUNING and cell_of(r) == first
        if is_trial and r["schedule"] != "power":  # all lines try the same values
            rates.add(r["lr"])
    return Runs(lines, by_cell, tuning_cells, tuned_at, sorted(rates))


def trials_of(runs: Runs, name: str, seed: int) -> dict[float, list]:
    """{learning rate: losses of a line over two cells and two seeds}, None for a missing run."""
    tried = {}
    for lr in runs.rates:
        tried[lr] = []
        for cell in runs.tuning_cells:
            for trial in tuning_seeds(seed):
                record = runs.find(name, lr, cell, trial)
                tried[lr].append(record["loss"] if record else None)
    return tried


def tune(runs: Runs, name: str, seeds: list[int]) -> dict[int, float]:
    """{seed: the learning rate with the lowest mean loss}, {} if this line has no runs.

    Raises UserError if a run of the tuning is missing.
    """
    trials = {seed: trials_of(runs, name, seed) for seed in seeds}
    losses = []
    for tried in trials.values():
        for some in tried.values():
            losses += some
    if losses.count(None) == len(losses):
        return {}
    best = {seed: best_of(tried) for seed, tried in trials.items()}
    for seed, lr in best.items():
        if lr is None:
            raise flags.UserError(
                f"{name} lacks trials of seed {seed}; is the sweep still running?"
            )
    return best


# -- 3. In which cells we test it --------------------------------------------------------


def losses_of_lines(runs: Runs) -> tuple[dict, dict]:
    """Return {line: {cell: {seed: loss}}} and {line: {seed: tuned learning rate}}.

    Lines without runs are left out. A line has the cells in which no seed lacks its run.
    Raises UserError if all have none.
    """
    # 1. Every seed tunes every line. (Other runs beside them may have other seeds.)
    seeds = sorted({(seed - TUNING) // 2 for _, seed in runs.records if seed >= TUNING})
    tuned = {name: tune(runs, name, seeds) for name in runs.lines}
    best = {name: rates for name, rates in tuned.items() if rates}

    # 2. Look up the test runs with the tuned learning rates.
    tested = {cell for cell, seed in runs.records if seed < TUNING}
    cells = sorted(tested, key=narrow_first)
    losses = {}
    for name, rates in best.items():
        losses[name] = {}
        for cell in cells:
            found = runs.of_seeds(name, rates, cell)
            if None not in found.values():
                losses[name][cell] = {seed: r["loss"] for seed, r in found.items()}
    if not any(losses.values()):
        raise flags.UserError(
            "no cell of the comparison has all its runs; is the sweep still running?"
        )
    return losses, best


# -- 4. A difference and its interval ----------------------------------------------------


def differences(one: dict, other: dict, cells: list) -> Estimate:
    """Mean loss of one line minus another's.

    All runs of a seed share its tuning, and all T of a pair of shape and batch size share
    trunks. So we average over T, and leave out one pair at a time, and one seed. Without
    an interval for a single seed in a single pair.
    """
    seeds = set.intersection(*(one[cell].keys() & other[cell].keys() for cell in cells))
    by_pair: dict = {}
    for cell in cells:
        shape, _, batch_size = cell
        gaps = [one[cell][seed] - other[cell][seed] for seed in sorted(seeds)]
        by_pair.setdefault((shape, batch_size), []).append(gaps)
    over_T = [np.mean(gaps, axis=0) for gaps in by_pair.values()]
    return mean_of(np.array(over_T))  # of [pairs, seeds]


# -- 5. Level, better or worse? ----------------------------------------------------------

LEVEL = 0.005  # nats; two lines are level if the interval of their difference lies inside
VERBS = {"level": "ties", "better": "beats", "worse": "loses to", "undecided": "may tie"}


def verdict(difference: Estimate) -> str:
    """The word for a difference. A lower loss is better."""
    low, high = np.round(interval(difference), 9)  # without differences of mere rounding
    if not low < high:  # one seed in one pair has no interval
        return "undecided"
    if -LEVEL < low and high < LEVEL:
        return "level"
    if high < 0:
        return "better"
    if low > 0:
        return "worse"
    return "undecided"


def holm(differences: dict[str, Estimate], level: float = 0.05) -> list[str]:
    """The names whose difference is not 0 although we looked at all of them (Holm, 1979)."""
    # 1. The chance of a difference at least as far from 0, to either side, if it is 0
    chance = {}
    for name, difference in differences.items():
        error, freedom = error_of(difference)
        chance[name] = 1.0  # undecided
        if freedom > 0:
            t, share = student(freedom)
            chance[name] = 1 - np.interp(abs(difference.answer) / error, t, share)

    # 2. The smallest of n chances may be level / n at most, the next level / (n - 1), ...
    found = []
    for name in sorted(chance, key=chance.get):
        if chance[name] > level / (len(chance) - len(found)):
            break
        found.append(name)
    return found


# -- The tables --------------------------------------------------------------------------


def comparison(records: list[dict], out: Path) -> None:
    """Print the tables, in Markdown, and draw the figure."""
    runs = index_runs(records)
    lines, best = losses_of_lines(runs)
    print_tuning(best, runs.rates)
    when = {name: needs_T(line) for name, line in LINES.items()}
    panels = []
    for kind in ("dense", "MoE"):
        cells = common_cells(lines, moe=(kind == "MoE"))
        if cells:
            panels.append(report_differences(lines, cells, kind, when))
    figures.draw_differences(out / "compare.png", panels, LEVEL)
    print(f"\n{out}: compare.png")


def print_tuning(best: dict, rates: list[float]) -> None:
    """Print the tuned learning rates, and which lines need more trials."""
    print("tuned learning rates of the seeds")
    for name, tuned in best.items():
        row = " ".join(f"{lr:g}" for lr in tuned.values())
        at_edge = {rates[0], rates[-1]} & set(tuned.values())
        print(f"{name:<26} {row}{'  at the edge of its trials' if at_edge else ''}")
    missing = [name for name in LINES if name not in best]
    if missing:
        print(f"without runs: {', '.join(missing)}")


def common_cells(lines: dict, moe: bool) -> list:
    """The cells of one kind that are in all lines with at least one of them."""
    of_kind = []
    for losses in lines.values():
        cells = {cell for cell in losses if ("experts" in cell[0]) == moe}
        if cells:
            of_kind.append(cells)
    return sorted(set.intersection(*of_kind), key=narrow_first) if of_kind else []


def mean_loss(losses: dict, cells: list) -> float:
    return np.mean([list(losses[cell].values()) for cell in cells])


def baseline_of(lines: dict, cells: list) -> str:
    """The best line that decays and needs T from the start, or the best of all without one."""
    means = {name: mean_loss(lines[name], cells) for name in LINES if name in lines}
    planned = []
    for name in means:
        line = LINES[name]
        if needs_T(line) == "from the start" and not line.fields["average"]:
            planned.append(name)
    return min(planned or means, key=means.get)


def report_differences(lines: dict, cells: list, kind: str, when: dict) -> dict:
    """Print all lines minus the best planned line, and return a panel of compare.png.

    when: {line: when it needs T}.
    """
    # 1. Subtract the best planned line, in the mean over all T, and at the longest T.
    whole = {name: some for name, some in lines.items() if some.keys() >= set(cells)}
    other = baseline_of(whole, cells)
    longest = max(T for _, T, _ in cells)
    late_cells = [cell for cell in cells if cell[1] == longest]
    all_T = {}
    late = {}
    for name, losses in whole.items():
        all_T[name] = differences(losses, lines[other], cells)
        late[name] = differences(losses, lines[other], late_cells)

    # 2. Print a table, from the best line to the worst.
    means = {name: gap.answer for name, gap in all_T.items()}
    order = sorted(means, key=means.get)
    baseline = mean_loss(lines[other], cells)
    at_longest = f"T = {figures.size(longest)}"
    against = f"minus {other}, {baseline:.3f} | at {at_longest}"
    print(f"\n| {kind}, {len(cells)} cells | needs T | loss | {against} |")
    print("|---|---|---|---|---|")
    for name in order:
        if name != other:
            # if it has fewer seeds, on the scale of the others
            loss = baseline + means[name]
            row = [name, when[name], f"{loss:.3f}"]
            for gap in (all_T[name], late[name]):
                row.append(f"{show(gap)} {verdict(gap)}")
            print(f"| {' | '.join(row)} |")

    # 3. Print which differences survive so many comparisons, and which lines are missing.
    tests = {}
    for name in order:
        if name != other:
            tests[f"{name}, all T"] = all_T[name]
            tests[f"{name}, {at_longest}"] = late[name]
    survivors = "; ".join(holm(tests)) or "none"
    print(f"\nnot 0 after Holm's correction for {len(tests)}: {survivors}")
    missing = [name for name in LINES if name in lines and name not in whole]
    if missing:
        print(f"not in all of these cells: {', '.join(missing)}")

    # 4. The panel
    rows = {name: (means[name], *interval(all_T[name]), when[name]) for name in order}
    best = next((name for name in order if name != other), other)
    title = f"{kind}: {best} {VERBS[verdict(all_T[best])]} {other}"
    return dict(title=title, other=other, rows=rows)


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("compare.py", __doc__).parse_args(argv)
    for name, line in LINES.items():
        print(f"{name:<26} batch^{line.q:g} T^{line.b:g}   needs T {needs_T(line)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
