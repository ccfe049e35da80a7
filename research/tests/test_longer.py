"""Do research/longer.py and research/rivals.py decide as their rules say?"""

import itertools
import json

import numpy as np
import pytest

import compare
import comparison
import longer
import rivals
from compare import LINEAR, WSD
from test_fit import record
from tools.flags import UserError

LENGTHS = [320_000 * 2**k for k in range(7)]
SCATTER = np.array([-0.0003, 0.0, 0.0003])  # of three seeds


@pytest.fixture
def losses(monkeypatch):
    """A function that sets how far all lines are above linear to 0 at weight decay 0.1."""

    def set_losses(gap=0.0, slope=0.0, scatter=1.0, linear_0=0.0) -> None:
        base = {T: 2 - 0.1 * np.log2(T) + np.array([0.1, 0.2, 0.3]) for T in LENGTHS}
        lines = {}
        for name in longer.ANY_TIME:
            lines[name] = {
                T: base[T] + gap + slope * np.log2(T / LENGTHS[-1]) + scatter * SCATTER
                for T in LENGTHS
            }
        planned = {
            "linear-0.1": base,
            "linear-0": {T: base[T] + linear_0 for T in LENGTHS},
        }
        monkeypatch.setattr(longer, "any_time", lambda: lines)
        monkeypatch.setattr(longer, "planned", lambda: planned)

    return set_losses


@pytest.mark.parametrize(
    "lines", [longer.ANY_TIME, *rivals.NEW.values(), compare.LINES], ids=lambda x: len(x)
)
def test_no_line_is_found_in_the_runs_of_another(lines):
    for name, line in lines.items():
        for other, another in lines.items():
            same = line.fields.items() <= another.fields.items() and line.b == another.b
            assert name == other or not same or line.q != another.q, (name, other)


@pytest.mark.parametrize(
    "gap, scatter, word",
    [(0.0, 1, "free"), (-0.1, 50, "free"), (0.01, 1, "costs"), (0.002, 1, "free"),
     (0.0, 50, "undecided")],
)  # fmt: skip
def test_a_line_is_free_below_the_level_and_costs_above_0(losses, gap, scatter, word):
    losses(gap=gap, scatter=scatter)
    assert longer.verdict("Power (fitted)") == word


def test_a_gap_that_is_small_at_one_length_only_is_undecided(losses):
    losses(gap=0.02, slope=0.02)  # -0.02, 0 and 0.02 at the three longest T
    assert longer.verdict("constant") == "undecided"
    assert longer.trend("constant")[0] == pytest.approx(0.02)


def test_a_line_that_chooses_its_weight_decay_meets_the_better_linear_line(losses):
    losses(linear_0=-0.05)
    assert longer.linear_for("constant, weight decay 0", LENGTHS[0]) == "linear-0"
    assert longer.linear_for("Power (fitted)", LENGTHS[0]) == "linear-0.1"
    assert longer.linear_for("constant", LENGTHS[0]) == "linear-0.1"
    free = longer.gap("constant, memory 5, half the span", LENGTHS[0])
    assert free.mean() == pytest.approx(
        longer.gap("Power (fitted)", LENGTHS[0]).mean() + 0.05
    )
    losses(linear_0=0.05)
    assert longer.linear_for("constant, weight decay 0", LENGTHS[0]) == "linear-0.1"


def test_the_search_for_a_seed_is_decided_by_the_others():
    losses = {
        0: [5, 4, 3, 2, 3, 4, 1],
        1: [7, 6, 3, 5, 6, 7, 8],
        2: [7, 6, 6, 3, 5, 6, 9],
    }
    rows = [dict(shape="x", total_tokens=9, batch_size=1, seed=s, lr=i, loss=y, diverged=False)
            | WSD for s, some in losses.items() for i, y in enumerate(some)]  # fmt: skip
    rows.append(rows[0] | dict(seed=3))  # one learning rate is no search
    assert comparison.searched(rows, WSD) == {("x", 9, 1): {0: 2, 1: 5, 2: 6}}


def test_planned_lines_get_the_learning_rate_of_the_other_seeds(tmp_path, monkeypatch):
    """Best at 2^-7 for seed 0, and a step higher for seed 1."""
    monkeypatch.setattr(longer, "RUNS", tmp_path)
    longer.planned.cache_clear()
    for schedule, fields in (("linear", LINEAR), ("wsd", WSD)):
        for decay in (0.0, 0.1):
            rows = []
            for seed in (0, 1):
                for j in range(-5, 6):
                    loss = 2 + 0.01 * (j - seed) ** 2 + decay
                    settings = dict(fields) | dict(weight_decay=decay)
                    run = record(32, 8, 320_000, seed, loss, lr=2 ** (-7 + j / 2))
                    rows.append(run | settings)
            folder = tmp_path / f"{schedule}-{decay:g}"
            folder.mkdir()
            (folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = longer.planned()
    longer.planned.cache_clear()
    assert found["linear-0"][320_000] == pytest.approx([2.01, 2.01])
    assert found["wsd-0.1"][320_000] == pytest.approx([2.11, 2.11])


def test_the_exponent_is_that_of_made_up_valleys(tmp_path, monkeypatch):
    monkeypatch.setattr(longer, "RUNS", tmp_path)
    rows = []
    for seed, T in itertools.product((0, 1), LENGTHS):
        best = -6.03 - (0.3 + 0.01 * seed) * np.log2(T / LENGTHS[0])
        for j in range(-15, 8):
            loss = 2 + 0.01 * (j / 2 - 6 - best) ** 2
            rows.append(record(32, 8, T, seed, loss, lr=2 ** (j / 2 - 6)))
    (tmp_path / "wsd-0").mkdir()
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "wsd-0/records.jsonl").write_text(text)
    found = longer.exponent("wsd-0")
    assert found[0] == pytest.approx(-0.305, abs=1e-6)
    assert found.without_seeds == pytest.approx([-0.31, -0.30], abs=1e-6)


def test_a_length_that_lacks_a_seed_is_refused():
    """Seeds are compared with each other, so a missing one would shift the rest."""
    complete = {("width 32", T, 8): {0: 1.0, 1: 2.0, 2: 3.0} for T in LENGTHS}
    assert longer.by_T(complete)[LENGTHS[0]].tolist() == [1.0, 2.0, 3.0]
    del complete["width 32", LENGTHS[2], 8][1]
    with pytest.raises(UserError, match="lacks runs of a seed"):
        longer.by_T(complete)


def test_rivals_are_compared_in_the_cells_and_seeds_that_all_have(monkeypatch):
    names = {name for pair in rivals.DECISIONS.values() for name in pair}
    rng = np.random.default_rng(0)
    lines = {}
    for name in names:
        lines[name] = {}
        for batch in (2, 8):
            for T in (80_000, 160_000):
                off = 0.01 if name == "constant, weight decay 0, averaged" else 0.0
                seeds = 5 if name == rivals.AVERAGED_POWER else 2
                losses = {s: 2 + off + 1e-4 * rng.normal() for s in range(seeds)}
                lines[name][("width 64", T, batch)] = losses
    lines[rivals.AVERAGED_POWER][("width 128", 80_000, 2)] = {0: 9.0}
    monkeypatch.setattr(rivals, "lines", lambda: lines)
    assert len(rivals.cells()) == 4 and rivals.longest() == 160_000
    assert len(rivals.cells(160_000)) == 2
    gap = rivals.difference("constant, weight decay 0, instead of Power")
    assert gap[0] == pytest.approx(0.01, abs=5e-4)
    gap = rivals.difference("Power instead of constant, both at 0", 80_000)
    assert gap[0] == pytest.approx(-0.01, abs=5e-4)
