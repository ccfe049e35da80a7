"""From made-up records with a known law back to the law; what cannot be fitted is refused."""

import itertools
import json
import math
import shlex
from operator import attrgetter, sub
from pathlib import Path

import numpy as np
import pytest

import compare
import fit
import report
import schedules
import train
from config import FIELDS, make_config
from records import read_rows, rows_of, settings
from schedules import make_schedule
from test_figures import figures  # noqa: F401  (checks the layout of all figures)
from test_mistakes import one_line
from tools.flags import UserError

BUDGETS, BATCHES, WIDTHS = [100_000 * 2**k for k in range(5)], [1, 2, 4, 8], [32, 64, 128]


def record(width, batch, T, seed, loss, lr=0.01, a=16.0, b=-0.51, **more) -> dict:
    return dict(
        n_embd=width, n_layer=2, n_head=width // 16, n_expert=0, seq_len=128, batch_size=batch,
        total_tokens=T, decay_tokens=T // 10, seed=seed, lr=lr, power_a=a, power_b=b, val_loss=loss,
        diverged=loss is None, schedule="wsd", warmup_tokens=2500, fingerprint="0123",
        preset="laptop", dtype="float32",
    ) | more  # fmt: skip


def wsd_records(
    a=40, b=-0.4, q=0.6, noise=0.0, cells=0.0, seeds=3, widths=WIDTHS
) -> list[dict]:
    """Records as sweep.py leaves them, with valleys around lr = a beta^q T^b.

    noise: of a loss (nats), half of it common to the branches of a trunk. cells: how far a cell's
    valley lies off the law (standard deviation, octaves). With noise, valleys are skewed.
    """
    rng, found = np.random.default_rng(0), []
    for width, batch in itertools.product(widths, BATCHES):
        off = {T: rng.normal(0, cells) for T in BUDGETS}
        for seed in range(seeds):
            trunk = {j: rng.normal(0, noise / 2) for j in range(-40, 60)}
            for T in BUDGETS:
                best = (
                    math.log2(a) + q * math.log2(batch / 32) + b * math.log2(T) + off[T]
                )
                middle = round(2 * (best + math.log2(1e4)))
                for j in range(middle - 4, middle + 5):
                    x = j / 2 - math.log2(1e4)
                    loss = 2 + 0.03 * (x - best) ** 2 + trunk[j] + rng.normal(0, noise)
                    # 2 and 4 are the best batches
                    loss += 0.02 * abs(math.log2(batch) - 1.4)
                    loss += 0.003 * max(0, x - best) ** 3 if noise else 0
                    found.append(record(width, batch, T, seed, loss, lr=2**x))
    return rows_of(found)


def as_record(row: dict) -> dict:
    """A row as sweep.py writes it. Its val_loss counts, unless it has an average."""
    prefixes = ("val_loss", "average_val_loss", "loss", "diverged", "tokens")
    results = {name: x for name, x in row.items() if name.startswith(prefixes)}
    if "average_val_loss" not in row:
        results["loss"] = row["val_loss"]
    origin = {"fingerprint": row["fingerprint"]}
    skip = results.keys() | origin
    config = {name: x for name, x in row.items() if name not in skip}
    return {"config": config, "results": results, "origin": origin}


def write(rows: list[dict], path: Path) -> Path:
    """A folder with the records of these rows, or rows as they are without a preset."""
    path.mkdir(parents=True)
    with open(path / "records.jsonl", "w") as file:
        for row in rows:
            line = as_record(row) if "preset" in row else row
            file.write(json.dumps(line) + "\n")
    return path


def cells_of(records: list[dict]) -> list[fit.Cell]:
    return fit.fitted_cells(rows_of(records))


def refused(argv: list, capsys) -> str:
    """The one line with which fit.py refuses a command."""
    return one_line(fit.main, [str(word) for word in argv], capsys)


# -- A valley ----------------------------------------------------------------------------

VALLEY = tuple(
    (x / 2, 1 + (x / 2 - 0.3) ** 2 + 0.1 * (x / 2 - 0.3) ** 3) for x in range(-5, 6)
)
EDGE, FEWER, GAP = "at an edge", "fewer than 5 losses", "curve below its points"
HILL = tuple((x, 1 - x * x / 9 if x else 0.7) for x, _ in VALLEY[2:9])
# the runs around the bottom are missing, and the slopes to both sides are steep
HOLE = tuple((x, abs(x) + 0.01 * x) for x in (-2.5, -2.0, -1.5, 1.5, 2.0, 2.5))


def diverging(*at: float) -> tuple:
    return tuple((x, math.inf if x in at else y) for x, y in VALLEY)


def test_a_cubic_is_found_exactly_and_a_parabola_has_its_closed_form():
    bent = tuple((x, y + 7 * (x < -1)) for x, y in VALLEY)  # outside the window
    assert fit.vertex(VALLEY) == fit.vertex(bent) == (pytest.approx(0.3), "")
    wide = tuple((2 * x, y) for x, y in VALLEY)  # steps of a factor of 2
    assert fit.vertex(wide) == (pytest.approx(0.6), "")
    # around 0.5: -0.5, 0, 0.5, 1, 1.5
    x, why_not = fit.vertex(VALLEY, degree=2, window=5)
    curve = np.polyfit(*np.array(VALLEY[4:9]).T, 2)
    assert (x, why_not) == (pytest.approx(-curve[1] / 2 / curve[0]), "") and x < 0.29


@pytest.mark.parametrize("points, why", [
    (VALLEY[:4], EDGE), (VALLEY[6:], EDGE), (VALLEY[:1], EDGE), (VALLEY[4:8], FEWER),
    (VALLEY[3:8], ""), (diverging(1.0), ""), (diverging(1.0, 1.5, 2.0), FEWER), (HOLE, GAP),
    (HILL, "no valley"), (diverging(*[x for x, _ in VALLEY]), "all diverged"),
    ((), "no common learning rate"),
])  # fmt: skip
def test_unusable_minima_are_left_out(points, why):
    _, reason = fit.vertex(points)
    assert reason == why


def test_the_seeds_of_a_cell_keep_their_common_learning_rates():
    losses = {0: {1: 5.0, 2: 4.0, 4: 6.0}, 1: {2: 2.0, 4: 3.0, 8: 1.0}}
    rows = []
    for seed, some in losses.items():
        for lr, loss in some.items():
            row = dict(lr=lr, total_tokens=1e6, batch_size=2, val_loss=loss, seed=seed)
            rows += rows_of([row])
    (cell,) = fit.cells_of(rows)
    assert fit.valley(cell) == ((1.0, 3.0), (2.0, 4.5))
    assert [fit.valley(c)[0] for c in fit.cells_of(rows, by_seed=True)] == [
        (0.0, 5.0),
        (1.0, 2.0),
    ]
    with pytest.raises(UserError, match="same learning rate and seed"):
        fit.cells_of([*rows, rows[0]])


# -- The law -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "law", [dict(a=40, b=-0.4, q=0.6), dict(a=4.6, b=-0.51, q=1.0)], ids=str
)
def test_a_clean_law_is_recovered(law):
    records = wsd_records(**law)
    found = fit.fit_law(cells_of(records))
    assert (found.b, found.q) == pytest.approx((law["b"], law["q"]))
    assert 2 ** np.array([*found.log2_a.values()]) == pytest.approx(
        [law["a"]] * 3, rel=1e-4
    )
    by_seed = fit.cells_of(rows_of(records), by_seed=True)
    for window in (5, 7):
        cells = [cell._replace(degree=2, window=window) for cell in by_seed]
        parabolas = fit.fit_law(cells)
        assert (parabolas.b, parabolas.q) == pytest.approx((law["b"], law["q"]))
    if law["q"] == 1:
        assert fit.paper_law(cells_of(records)) == pytest.approx(
            (law["b"], 4.6), rel=1e-4
        )


def test_law_of_plain_rows_is_the_law_of_records():
    rows = [dict(lr=r["lr"], total_tokens=r["total_tokens"], batch_tokens=128 * r["batch_size"],
                 val_loss=r["val_loss"], seed=r["seed"], shape=f"width {r['n_embd']}")
            for r in wsd_records(noise=0.002)]  # fmt: skip
    of_records = fit.law_of(wsd_records(noise=0.002))
    write(rows, Path("rows"))
    assert fit.main(["rows"]) == 0
    of_rows = fit.law_of(rows)
    for name in ("a", "b", "q", "b_paper", "b_interval", "a_interval", "batch_tokens"):
        assert of_rows[name] == pytest.approx(of_records[name])
    with pytest.raises(ValueError, match="no total_tokens"):
        fit.law_of([{"lr": 0.1}])


def test_the_papers_grid_of_factors_of_two_gives_the_law():
    """Eight rates for everything, so many minima lie close to an edge."""
    rates = [2**-k for k in range(5, 13)]
    cells = [(2e9 * 2**i, 16 * 2**k) for i in range(8) for k in range(6)]
    loss = lambda T, B, lr: 2 + 0.03 * math.log2(lr / (4.6 * B * T**-0.51)) ** 2
    rows = [dict(lr=lr, total_tokens=T, batch_size=B, val_loss=loss(T, B, lr))
            for T, B in cells for lr in rates]  # fmt: skip
    usable = {(c.T, c.batch_size) for c in cells_of(rows)}
    inside = {(T, B) for T, B in cells if rates[-2] <= 4.6 * B * T**-0.51 <= rates[1]}
    assert len(inside) > 24 and inside <= usable
    law = fit.law_of(rows)
    assert (law["b"], law["q"], law["b_paper"]) == pytest.approx((-0.51, 1, -0.51))


def test_least_squares_is_that_of_numpy_and_nan_if_undetermined():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 12))
    groups = list("abc") * 4
    one_hot = np.array([[group == name for name in "abc"] for group in groups], float)
    expected = np.linalg.lstsq(np.column_stack([x, one_hot]), y)[0]
    (slope,), constants = fit.least_squares(y, [x], groups)
    assert [slope, *constants.values()] == pytest.approx(expected)
    (one, two), constants = fit.least_squares(y, [x, 3 * x + 1], groups)
    assert np.isnan([one, two, *constants.values()]).all()
    assert np.isnan(fit.fit_law([]).b)


def test_diverged_runs_do_not_move_the_law():
    records = wsd_records()
    # width 128 with batch size 8 diverges right above its best learning rate
    for r in records:
        best = 40 * (r["batch_size"] / 32) ** 0.6 * r["total_tokens"] ** -0.4
        if r["n_embd"] == 128 and r["batch_size"] == 8 and r["lr"] > best:
            r |= dict(diverged=True, val_loss=None)
    usable = cells_of(records)
    assert len(usable) >= len(WIDTHS) * len(BATCHES) * len(BUDGETS) - 5
    assert fit.fit_law(usable).b == pytest.approx(-0.4, abs=1e-3)


# -- Intervals ---------------------------------------------------------------------------

T_QUANTILES = {1: 12.706, 2: 4.303, 4: 2.776, 2.5: 3.575, 30: 2.042, 1e6: 1.960}


@pytest.mark.parametrize("freedom", T_QUANTILES)
def test_quantiles_of_student_are_those_of_the_tables(freedom):
    t, share = fit.student(freedom)
    assert np.interp(0.95, share, t) == pytest.approx(T_QUANTILES[freedom], abs=1e-3)


@pytest.mark.parametrize(
    "values", [[0.1, 0.4], [0.3, 0.0, -0.7], [1.0, 2.5, 4.0, 9.0, 3.3]]
)
def test_an_interval_from_seeds_only_is_students(values):
    n = len(values)
    half = T_QUANTILES[n - 1] * np.std(values, ddof=1) / n**0.5
    for table in (np.array([values]), np.array([values]).T):  # seeds, or pairs
        low, high = fit.interval(fit.mean_of(table))
        assert (low + high) / 2 == pytest.approx(np.mean(values))
        assert (high - low) / 2 == pytest.approx(half, rel=1e-3)


def test_no_interval_where_nothing_varies():
    one_seed = fit.mean_of(np.array([[0.3]]))
    equal = fit.mean_of(np.full((3, 2), 0.1))
    for estimate in (one_seed, equal):
        assert fit.show(estimate, 1) == f"{estimate.answer:.1f}"
        assert compare.verdict(estimate) == "undecided"


def test_an_answer_that_needs_a_pair_or_a_seed_has_no_interval():
    """Although leaving out others would give one."""
    for pairs, seeds in (
        ([1.0, 1.2, math.nan], [1.1, 1.3]),
        ([1.0, 1.2], [math.nan, 1.3]),
    ):
        estimate = fit.Estimate(1.1, pairs, seeds)
        assert np.isnan(fit.interval(estimate)).all()
        assert fit.show(estimate, 1) == "1.1 (no interval)"
    # without one of two batch sizes there is no law
    records = [r for r in wsd_records(widths=[32], noise=0.002) if r["batch_size"] < 4]
    assert fit.law_of(records)["b_interval"] is None


def test_a_jackknife_is_a_dumb_loop_that_deletes_records():
    records = wsd_records(noise=0.004, cells=0.1, widths=[32, 64])
    cells = cells_of(records)
    without_pairs = []
    for width, batch in itertools.product((32, 64), BATCHES):
        pair = (width, batch)
        without_pairs.append(
            [r for r in records if (r["n_embd"], r["batch_size"]) != pair]
        )
    without_seeds = [[r for r in records if r["seed"] != seed] for seed in range(3)]
    answers = [
        lambda cells: fit.fit_law(cells).b,
        lambda cells: fit.fit_law(cells).q,
        fit.paper_b,
        fit.step_law_b,
    ]
    for answer in answers:
        found = fit.jackknife(cells, answer)
        assert found.answer == answer(cells)
        expected = [answer(cells_of(some)) for some in without_pairs]
        assert found.without_pairs == pytest.approx(expected)
        expected = [answer(cells_of(some)) for some in without_seeds]
        assert found.without_seeds == pytest.approx(expected)


def test_what_an_answer_does_not_use_makes_it_no_surer():
    """Step Law's reading of two batch sizes, also if the sweep has worse ones."""
    records = wsd_records(noise=0.002, cells=0.1, widths=[32])
    for r in records:  # batch size 2 is best up to 400k, and 4 from 800k on
        r["val_loss"] += 0.5 * (r["batch_size"] not in (2, 4))
        r["val_loss"] += 0.1 * ((r["batch_size"] == 2) == (r["total_tokens"] > 500_000))
    few = [r for r in records if r["batch_size"] in (2, 4)]
    every, two = [
        fit.reading(cells_of(some), fit.step_law_b, 1) for some in (records, few)
    ]
    assert every == two and len(every.without_pairs) == 2
    assert len(fit.jackknife(cells_of(records), fit.step_law_b).without_pairs) == 4


def test_an_interval_does_not_depend_on_rounding():
    """Without the middle one of three batch sizes, q is the same but for rounding."""
    records = wsd_records(noise=0.004, cells=0.1, widths=[32])
    records = [r for r in records if r["batch_size"] in (1, 2, 4)]
    q_of = lambda cells: fit.fit_law(cells).q
    expected = fit.interval(fit.jackknife(cells_of(records), q_of))
    rng = np.random.default_rng(0)
    for _ in range(5):
        shaken = [r | {"val_loss": r["val_loss"] + 1e-13 * rng.normal()} for r in records]
        found = fit.interval(fit.jackknife(cells_of(shaken), q_of))
        assert found == pytest.approx(expected, rel=1e-6)


def test_the_difference_of_equal_sweeps_is_certain():
    """The second sweep is the first at twice the learning rates, so that b does not change."""
    records = wsd_records(noise=0.004, widths=[32])
    doubled = [r | {"lr": 2 * r["lr"]} for r in records]
    laws = [fit.jackknife(cells_of(some), fit.fit_law) for some in (records, doubled)]
    b, other = [fit.apply(attrgetter("b"), some) for some in laws]
    change = fit.apply(sub, other, b)
    low, high = fit.interval(change)
    assert abs(change.answer) < 1e-9 and not high - low > 1e-9


# -- How the papers read it --------------------------------------------------------------


def test_the_papers_reading_takes_the_three_best_batches_and_obeys_its_identity():
    cells = cells_of(wsd_records())
    best = fit.best_batches(cells, 3)
    assert {cell.batch_size for cell in best} == {1, 2, 4} and len(best) == 3 * 5 * 3
    b, a = fit.paper_law(cells)  # with q = 1, lr / beta depends on the batch sizes
    mean_log2_beta = np.mean([math.log2(batch / 32) for batch in (1, 2, 4)])
    assert (b, fit.growth(cells)) == pytest.approx((-0.4, 0), abs=1e-6)
    assert math.log2(a) == pytest.approx(math.log2(40) - 0.4 * mean_log2_beta, abs=1e-3)
    grow = []
    for cell in cells:
        if 0 <= math.log2(cell.T / 1e5) - math.log2(cell.batch_size) < 3:
            grow.append(cell)
    s = fit.growth(grow)
    assert s > 0.3 and fit.paper_b(grow) == pytest.approx(-0.4 + (0.6 - 1) * s, abs=1e-6)
    best = [(c.T, c.beta) for c in fit.best_batches(grow, 1)]
    rise = np.polyfit(*np.log2(best).T, 1)[0]
    assert rise > 0.3 and fit.step_law_b(grow) == pytest.approx(-0.4 + 0.6 * rise)


def test_a_best_batch_is_chosen_again_without_a_seed():
    """A second batch size is best in one seed of two, and its learning rates grow with T."""
    rows = []
    for T, (batch, b), seed in itertools.product(
        (1e5, 2e5, 4e5), ((2, -0.5), (4, 0.5)), (0, 1)
    ):
        for k in range(-4, 5):
            loss = 2 + 0.01 * (seed == (batch == 4)) + 0.01 * k**2 - 1e-4 * batch
            row = dict(total_tokens=T, batch_size=batch, seed=seed, val_loss=loss)
            rows.append(row | dict(lr=0.01 * (T / 1e5) ** b * 2 ** (k / 2), seq_len=128))
    exponent = fit.reading(cells_of_any(rows), fit.step_law_b, 1)
    assert exponent.answer == pytest.approx(0.5)  # batch size 4 is best in the mean
    assert sorted(exponent.without_seeds) == pytest.approx([-0.5, 0.5])


def cells_of_any(rows: list[dict]) -> list[fit.Cell]:
    """Also of rows that determine no law."""
    return fit.cells_of(rows_of(rows))


def batch_cells(best_at, T=BUDGETS, batches=(1, 2, 4, 8, 16)) -> list[fit.Cell]:
    """Cells whose lowest losses are a parabola around best_at(T), in log2 of the batch size."""
    cells = []
    for t, batch in itertools.product(T, batches):
        deep = 0.01 * (math.log2(batch) - best_at(t)) ** 2 - 0.1 * math.log2(t)
        losses = {x / 2: 5 + deep + 0.03 * (x / 2) ** 2 for x in range(-4, 5)}
        cells.append(fit.Cell("one", t, batch, batch / 32, {0: losses}))
    return cells


def test_the_best_batch_size_grows_as_it_was_made_to():
    best_at = lambda T: 1.5 + 0.6 * math.log2(T / BUDGETS[2])
    cells = batch_cells(best_at)
    for T in (BUDGETS[0], BUDGETS[-1], 16 * BUDGETS[-1]):
        assert fit.best_batch(cells, T) == pytest.approx(best_at(T), abs=1e-6)
    # 1.5 + 0.6 * 4 = 3.9 at the fourfold longest T, which is 2^3.9 = 14.9
    batch_size, why = report.advised_batch_size(cells, 4 * BUDGETS[-1])
    assert batch_size == 16 and "the largest of the sweep" in why
    assert report.advised_batch_size(cells, 64 * BUDGETS[-1])[0] == 16
    batch_size, why = report.advised_batch_size(cells, BUDGETS[2])
    assert batch_size == 4 and "of the sweep" not in why
    two = batch_cells(best_at, batches=(4, 8))  # no parabola through two
    batch_size, why = report.advised_batch_size(two, 4 * BUDGETS[-1])
    assert batch_size == 8 and "lowest loss at the longest T" in why


# -- The comparison ----------------------------------------------------------------------


def test_the_error_of_a_difference_is_from_pairs_and_from_seeds():
    """If a gap is the sum of a part of its pair and a part of its seed, the variances add up."""
    pair, seed = {2: 0.1, 4: 0.5, 8: -0.3}, [0.2, 0.0, -0.7, 0.1]
    cells = [("width 64", T, B) for B in pair for T in (100, 200)]
    zero = {cell: dict.fromkeys(range(4), 0.0) for cell in cells}
    line = {cell: {s: pair[cell[2]] + seed[s] for s in range(4)} for cell in cells}
    gap = compare.differences(line, zero, cells)
    assert gap.answer == pytest.approx(np.mean([*pair.values()]) + np.mean(seed))
    variances = np.var([*pair.values()], ddof=1) / 3, np.var(seed, ddof=1) / 4
    error, freedom = fit.error_of(gap)
    assert error == pytest.approx(sum(variances) ** 0.5)
    assert freedom == pytest.approx(
        error**4 / (variances[0] ** 2 / 2 + variances[1] ** 2 / 3)
    )
    # one pair: Student's t over four seeds, whose quantile is 3.182
    low, high = fit.interval(compare.differences(line, zero, cells[:2]))
    assert (high - low) / 2 == pytest.approx(3.182 * np.std(seed, ddof=1) / 2, rel=0.02)
    alone = {cell: {0: losses[0]} for cell, losses in line.items()}
    assert np.isnan(fit.interval(compare.differences(alone, zero, cells[:2]))).all()


@pytest.mark.parametrize("pairs, seeds", [(4, 5), (4, 3), (1, 5)])
@pytest.mark.parametrize(
    "spread", [(1, 1, 1), (0, 1, 0.5), (1, 0, 0.5), (0, 0, 1)], ids=str
)
def test_intervals_of_differences_hold_the_truth(pairs, seeds, spread):
    """Of pairs, of seeds, and of both. A single pair has no spread of pairs."""
    rng, held = np.random.default_rng(0), 0
    of_pair, of_seed, rest = spread
    for _ in range(500):
        gap = of_seed * rng.normal(size=seeds) + rest * rng.normal(size=(pairs, seeds))
        gap += of_pair * rng.normal(size=(pairs, 1)) if pairs > 1 else 0
        low, high = fit.interval(fit.mean_of(gap))
        held += low <= 0 <= high
    assert held / 500 >= 0.92


def test_holm_asks_more_of_every_difference_the_more_there_are():
    # 1,000 seeds, which are z standard errors from 0
    spread = np.linspace(-1, 1, 1000)
    spread /= spread.std(ddof=1) / 1000**0.5
    gaps = {name: fit.mean_of((z + spread)[None]) for name, z in
            {"clear": 6.0, "fair": 2.3, "none": 0.1}.items()}  # fmt: skip
    assert compare.holm(gaps) == ["clear", "fair"]
    many = gaps | {f"other {i}": gaps["none"] for i in range(5)}
    assert compare.holm(many) == ["clear"]
    assert compare.holm({"equal": fit.Estimate(0.0, [], [])}) == []


def test_a_line_of_power_has_its_own_q_and_the_tuned_learning_rate():
    line = compare.LINES["Power (fitted)"]
    for batch_size, T in ((2, 80_000), (8, 80_000), (8, 1_280_000)):
        fields = compare.fields_of(line, 0.01, batch_size, T, (2, 128, 80_000))
        assert (fields["power_q"], fields["power_b"]) == (0.5, -0.3)
        run = {"total_tokens": T, "batch_size": batch_size, "seq_len": 128, "lr_max": 1}
        schedule = make_schedule(
            make_config(**fields | run, warmup_tokens=100, n_layer=2)
        )
        assert schedule(80_000 * 0.8) == pytest.approx(
            0.01 * (batch_size / 2) ** 0.5 * 0.8**-0.3, rel=1e-3
        )
        # a run whose a has another q inside is the same run
        beta = batch_size / 32
        other = {"power_a": fields["power_a"] * beta**-0.5, "power_q": 1.0}
        assert compare.has_fields(fields | run | other, fields)
        assert not compare.has_fields(fields | run | {"power_q": 1.0}, fields)


def test_a_tuned_learning_rate_at_the_edge_of_its_trials_is_named(capsys):
    compare.print_tuning({"WSD": {0: 0.2, 1: 0.4}, "cosine": {0: 0.2}}, [0.1, 0.2, 0.4])
    wsd, cosine, rest = capsys.readouterr().out.splitlines()[1:]
    assert wsd.endswith("0.2 0.4  at the edge of its trials") and cosine.endswith("0.2")
    assert "without runs: Power" in rest


# -- Records that fit together -----------------------------------------------------------


def test_a_run_that_is_there_twice_is_reported_with_its_losses(capsys):
    runs = wsd_records(noise=0.002)
    again = [r | {"val_loss": r["val_loss"] + 0.5} for r in runs[:7]]
    write(runs + again + runs[7:9], Path("runs"))
    found = read_rows([Path("runs")])
    assert len(found) == len(runs) and found[0]["val_loss"] == again[0]["val_loss"]
    printed = capsys.readouterr().out
    assert "9 runs are repeated" in printed and "0.5000" in printed


def test_runs_that_did_not_finish_are_left_out_and_counted(capsys):
    """A crashed run has a loss in W&B, and it would move the law."""
    runs = [r | {"state": "finished"} for r in wsd_records(seeds=1)]
    lost = [(0, "crashed"), (200, "running"), (205, "crashed")]
    for i, state in lost:
        runs[i] |= {"state": state, "val_loss": 9.0}
    for r in runs:
        del r["preset"]  # as a table from elsewhere
    kept = [r for r in runs if r["state"] == "finished"]
    without_state = [{k: v for k, v in r.items() if k != "state"} for r in kept]
    write(runs, Path("runs"))
    found = read_rows([Path("runs")])
    write(without_state, Path("others"))
    assert "3 runs that did not finish: 2 crashed, 1 running" in capsys.readouterr().out
    assert found == read_rows([Path("others")])
    assert fit.law_of(runs) == fit.law_of(without_state)


def test_rows_of_other_schedules_are_refused(capsys):
    rows = wsd_records(seeds=1, widths=[32])
    rows[3] = rows[3] | {"schedule": "cosine"}
    with pytest.raises(UserError, match="rows of schedule cosine"):
        fit.law_of(rows)
    write(rows, Path("runs"))
    assert "--only schedule=wsd" in refused(["runs"], capsys)
    assert fit.main(["runs", "--only", "schedule=wsd"]) == 0


@pytest.mark.parametrize("row, says", [
    ({"val_loss": 2}, "line 1: a record has no total_tokens"),
    ({"lr": 0.1, "total_tokens": 9, "batch_size": 1}, "runs: no record has a val_loss"),
    ({"lr": 0.1, "total_tokens": 9, "batch_size": 1, "val_loss": None}, "all 1 runs diverged"),
    ({"lr": 0.1, "total_tokens": 9, "batch_size": 1, "val_loss": "x"}, "val_loss 'x'"),
    ({"lr": "high", "total_tokens": 9, "batch_size": 1, "val_loss": 2}, "lr 'high'"),
])  # fmt: skip
def test_an_odd_row_is_one_line(row, says, capsys):
    write([row], Path("runs"))
    assert says in refused(["runs"], capsys)


def test_runs_of_power_with_different_settings_are_never_mixed():
    """Also if a run of another schedule comes first, which does not have these settings."""
    wsd, power = (record(32, 2, 80_000, 0, 2.0, schedule=s) for s in ("wsd", "power"))
    power["lr_max"] = 0.02
    other = dict(power, lr_max=0.5)
    some = ([wsd, power, other], [power, wsd, other], [power, other, wsd])
    for i, runs in enumerate(some):
        with pytest.raises(UserError, match="different lr_max"):
            read_rows([write(runs, Path(str(i)))])


def test_records_of_single_runs_are_read_once(tmp_path):
    records = wsd_records(widths=[64], seeds=1)
    for i, r in enumerate(records):
        Path(f"runs/{i}").mkdir(parents=True)
        Path(f"runs/{i}/record.json").write_text(json.dumps(r, indent=1))
    Path("runs/torn").mkdir()
    Path("runs/torn/record.json").write_text('{"lr": 0.1')
    folder = write(records, tmp_path / "a")
    text = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(text + text[:5000])  # doubles and a torn line
    single, sweep = read_rows([Path("runs")]), read_rows([folder])
    assert len(single) == len(sweep) == len(records)
    assert fit.law_of(single) == fit.law_of(sweep)


APART = ["fingerprint", "warmup_tokens", "dtype", "weight_decay", "optimizer"]


@pytest.mark.parametrize("change, says", [
    *[(lambda r, name=n: {name: str(r["seed"])}, f"different {n};") for n in APART],
    (lambda r: {"decay_tokens": r["total_tokens"] // (9 + r["seed"])}, "decay_tokens"),
    (lambda r: {"n_ffn": 80 + r["seed"]}, "different n_ffn"),
    (lambda r: {"schedule": "power" if r["seed"] else "wsd"}, "no report for schedules"),
    (lambda r: {"total_tokens": 10**5, "decay_tokens": 10**4}, "two run lengths"),
    (lambda r: {"batch_size": 4}, "two batch sizes"), (lambda r: {"lr": None}, "lr None"),
    (lambda r: {"val_loss": r["lr"]}, "60 at an edge"),
    (lambda r: {"diverged": True, "val_loss": None}, "all 1,620 runs diverged"),
])  # fmt: skip
def test_records_that_cannot_be_fitted_are_refused(change, says, tmp_path, capsys):
    folder = write([r | change(r) for r in wsd_records()], tmp_path / "a")
    assert says in refused([folder], capsys)
    assert [path.name for path in folder.iterdir()] == ["records.jsonl"]


def test_without_a_law_it_prints_the_best_learning_rates(tmp_path, capsys):
    """At one batch size, a sweep still finds them."""
    records = [r for r in wsd_records(a=16, b=-0.5, widths=[64]) if r["batch_size"] == 4]
    assert "two batch sizes" in refused([write(records, tmp_path / "a")], capsys)
    fit.main([str(tmp_path / "a")])
    lines = capsys.readouterr().out.splitlines()
    for T in BUDGETS:
        best = 16 * (4 * 128 / 4096) ** 0.6 * T**-0.5
        where = f"T = {report.figures.size(T)}, batch size 4"
        assert f"width 64, {where}: best learning rate {best:.3g}" in lines


@pytest.mark.parametrize("decay", [lambda T: 8000, lambda T: T // 5, lambda T: 0])
def test_decays_of_equal_tokens_or_equal_share_are_one_setting(decay, tmp_path):
    records = [
        r | {"decay_tokens": decay(r["total_tokens"])} for r in wsd_records(seeds=1)
    ]
    assert read_rows([write(records, tmp_path / "a")])


# -- The report --------------------------------------------------------------------------


def test_wsd_report(figures, tmp_path, capsys):  # noqa: F811
    records = wsd_records(noise=0.004, cells=0.08, widths=[32, 64, 128, 256, 512, 1024])
    records = [
        r | {"n_expert": 8, "n_expert_active": 2} if r["n_embd"] > 500 else r
        for r in records
    ]
    folder = write(records, tmp_path / "a")
    assert fit.main([str(folder)]) == 0
    out = capsys.readouterr().out
    n = len({(r["n_embd"], r["total_tokens"], r["batch_size"]) for r in records})
    assert f"{n} of {n} cells used; left out: none" in out
    assert "finished?" not in out and "diverged" not in out
    law = json.loads((folder / "law.json").read_text())
    names = "a b q a_interval b_interval q_interval a_paper b_paper b_paper_interval rule seq_len "
    names += "warmup_tokens fingerprint total_tokens batch_tokens without_pairs without_seeds flags"
    assert {*law} == {*names.split()}
    assert law["warmup_tokens"] == 2500
    low, high = law["b_interval"]
    assert low < law["b"] < high and f"{law['b']:.3f} [{low:.3f}, {high:.3f}]" in out
    assert {path.name for path in folder.glob("*.png")} == {"valleys.png", "law.png"}


def test_a_report_is_of_the_experiment_that_sweep_json_names(tmp_path, capsys):
    """Otherwise a sweep of WSD with two scales of attention looks like one over widths."""
    records = wsd_records(widths=[32, 64])
    for r in records:
        if r["n_embd"] == 64:
            r["shape"] = "width 64, standard"
    folder = write(records, tmp_path / "a")
    assert "several T or batch sizes" in refused([folder], capsys)
    (folder / "sweep.json").write_text(json.dumps({"experiment": "wsd"}))
    assert fit.main([str(folder)]) == 0 and (folder / "law.json").exists()
    capsys.readouterr()
    (folder / "sweep.json").write_text(json.dumps({"experiment": "transfer"}))
    only = [folder, "--only", "n_embd=32"]
    assert "is --only too narrow?" in refused(only, capsys)


def test_one_value_of_a_swept_field_is_fitted_by_only(tmp_path, capsys):
    some = dict(widths=[64], seeds=1)
    records = [r | {"weight_decay": 0.0} for r in wsd_records(b=-0.3, **some)]
    records += [r | {"weight_decay": 0.1} for r in wsd_records(b=-0.5, **some)]
    folder = write(records, tmp_path / "a")
    assert "weight_decay" in refused([folder], capsys)
    for value, b in (("0", -0.3), ("0.1", -0.5)):
        only = ["--only", f"weight_decay={value}", "--out", value]
        assert fit.main([str(folder), *only]) == 0
        assert json.loads(Path(value, "law.json").read_text())["b"] == pytest.approx(b)
    no_such = [folder, "--only", "weight_decay=7"]
    assert "weight_decay=7: no such" in refused(no_such, capsys)


def test_an_unfinished_sweep_says_so_or_is_one_line_with_nothing_written(
    tmp_path, capsys
):
    records = wsd_records(seeds=1, widths=[32, 64])
    cells = itertools.groupby(records, lambda r: (r["n_embd"], r["total_tokens"]))
    assert len(list(cells)) > 10
    # two runs are missing at the upper end of a valley, which then lacks a neighbor
    last = max(r["lr"] for r in records[:9])
    short = [r for r in records[:9] if r["lr"] < last / 1.5] + records[9:]
    assert fit.main([str(write(short, tmp_path / "a"))]) == 0
    assert "1 valleys have fewer than three" in capsys.readouterr().out
    folder = write(records[::4], tmp_path / "b")
    assert "usable" in refused([folder], capsys)
    assert [path.name for path in folder.iterdir()] == ["records.jsonl"]


@pytest.mark.parametrize(
    "T, batch, says", [("10e12", "1024", "0.0011"), ("2e9", "128", "0.011")]
)
def test_predict(T, batch, says, tmp_path, capsys):
    argv = ["--predict", "--total_tokens", T, "--batch_size", batch]
    assert fit.main(argv) == 0 and capsys.readouterr().out == says + "\n"
    assert float(says) == pytest.approx(
        schedules.best_lr(float(T), float(batch)), rel=0.05
    )
    # twice a, half of beta
    law = json.dumps({"a": 2 * 4.6, "b": -0.51, "q": 1.0, "seq_len": 2048})
    Path("law.json").write_text(law)
    assert (
        fit.main([*argv, "--law", "law.json"]) == 0
        and capsys.readouterr().out == says + "\n"
    )


# -- From a law to a run -----------------------------------------------------------------

FLAGS = dict(n_layer=2, n_embd=32, n_head=2, warmup_tokens=3000, weight_decay=0.05)


def complete(row: dict, **fields) -> dict:
    """A row with all fields of a config, as those of train.py have."""
    names = ("total_tokens", "batch_size", "seed", "lr", "schedule", "dtype")
    own = {name: row[name] for name in names}
    result = {name: row[name] for name in ("val_loss", "diverged", "fingerprint")}
    return vars(make_config(**own | fields)) | result


def swept(path: Path) -> Path:
    """The folder of a sweep around a law."""
    rows = wsd_records(widths=[32], a=3.0, b=-0.3, q=0.5, noise=0.002)
    return write([complete(row, **FLAGS) for row in rows], path)


def pasted(lines: str) -> list:
    """The configs of the printed commands, as train.py takes them."""
    configs = []
    for line in lines.splitlines():
        if line.startswith("python train.py"):
            typed, _ = train.parse(shlex.split(line)[2:])
            configs.append(make_config(**typed))
    return configs


def test_pasted_commands_follow_the_law(tmp_path, capsys):
    """The learning rates of Power equal the law's to 1% above warmup and ceiling."""
    folder = swept(tmp_path / "a")
    assert fit.main([str(folder)]) == 0
    power, wsd, linear = pasted(capsys.readouterr().out)
    law = json.loads((folder / "law.json").read_text())
    T = 4 * BUDGETS[-1]
    for cfg in (power, wsd, linear):
        assert cfg.total_tokens == T and vars(cfg).items() >= FLAGS.items()
    beta = power.batch_tokens / 4096
    lr = lambda n: law["a"] * beta ** law["q"] * n ** law["b"]
    schedule = make_schedule(power)
    shortest = BUDGETS[0]
    for n in np.geomspace(1.01 * shortest, power.decay_start, 50):
        assert schedule(n) == pytest.approx(lr(n), rel=0.01)
    for n in np.linspace(power.warmup_tokens, shortest, 50):
        assert schedule(n) == pytest.approx(lr(shortest), rel=0.01)
    assert (power.schedule, wsd.schedule) == ("power", "wsd")
    assert wsd.lr == pytest.approx(lr(T), rel=0.001) and wsd.decay_tokens == T // 10
    # down to 0 from the end of the warmup, at twice the learning rate
    falls = make_schedule(linear)
    for n in np.linspace(3000, T, 20):
        expected = 2 * lr(T) * (T - n) / (T - 3000)
        assert falls(n) == pytest.approx(expected, rel=0.001, abs=1e-12)


@pytest.mark.parametrize("fields", [
    {}, {"decay_share": 0.2}, {"decay_tokens": 5000}, {"preset": "36M", "n_ffn": 64},
    {"n_expert": 4, "n_expert_active": 2, "n_ffn": 16}, {"n_kv_head": 1, "m_width": 3.0},
    {"data": "/there", "tokenizer": "a.json", "vocab_size": 300}, {"tie_embeddings": False},
], ids=str)  # fmt: skip
def test_pasted_commands_have_the_settings_of_the_widest_shape(fields, tmp_path, capsys):
    """And of the runs that --only chose."""
    rows = []
    for row in wsd_records(widths=[32, 64], seeds=1):
        shape = dict(n_embd=row["n_embd"], n_head=2, n_layer=1, seq_len=128)
        for weight_decay in (0.0, 0.3):
            more = shape | {"warmup_tokens": 3000, "weight_decay": weight_decay} | fields
            rows.append(complete(row, **more))
    folder = write(rows, tmp_path / "a")
    assert fit.main([str(folder), "--only", "weight_decay=0"]) == 0
    power, wsd, linear = pasted(capsys.readouterr().out)
    like = next(r for r in rows if r["weight_decay"] == 0 and r["n_embd"] == 64)
    like = {name: like[name] for name in FIELDS}
    tuned = "total_tokens batch_size lr power_a power_b power_q lr_max schedule".split()
    free = [*tuned, "decay_tokens", "decay_shape"]
    for cfg in (power, wsd, linear):
        assert settings(vars(cfg), free) == settings(like, free)
        assert (cfg.data, cfg.preset) == (like["data"], like["preset"])
    for cfg in (power, wsd):
        assert cfg.decay_share == like["decay_share"]
        assert cfg.decay_share or cfg.decay_tokens == like["decay_tokens"]


def test_rows_without_all_settings_give_the_flags_of_schedules_only(tmp_path, capsys):
    assert fit.main([str(write(wsd_records(widths=[32]), tmp_path / "a"))]) == 0
    said = capsys.readouterr().out
    assert "--power_q" in said and "python train.py" not in said


def test_the_band_is_the_interval_of_the_predictions():
    records = wsd_records(widths=[32], noise=0.002)
    law = json.loads(json.dumps(fit.law_of(records), allow_nan=False))
    for T, batch in ((10**5, 2), (10**8, 64)):

        def prediction(cells) -> float:
            found = fit.fit_law(cells)
            log2_beta = math.log2(batch * 128 / 4096)
            return found.log2_a["width 32"] + found.b * math.log2(T) + found.q * log2_beta

        expected = fit.interval(fit.jackknife(cells_of(records), prediction))
        low, high = fit.band(law, T, batch * 128)
        assert np.log2([low, high]) == pytest.approx(expected, abs=1e-8)
        assert low * high == pytest.approx(fit.predict(law, T, batch * 128) ** 2)


def test_two_batch_sizes_and_one_seed_have_no_interval():
    """Without one of two batch sizes there is no law, and without the seed nothing."""
    records = [r for r in wsd_records(seeds=1, widths=[32]) if r["batch_size"] < 4]
    law = json.loads(json.dumps(fit.law_of(records), allow_nan=False))
    assert law["b"] == pytest.approx(-0.4) and law["b_interval"] is None
    assert np.isnan(fit.band(law, 1e6, 512)).all()
    assert "no 95% band" in report.advice(law, 1e6, 4, 128)[0]


def test_a_prediction_says_that_it_is_outside_its_sweep(tmp_path, capsys):
    folder = swept(tmp_path / "a")
    assert fit.main([str(folder)]) == 0
    capsys.readouterr()
    argv = ["--predict", f"--law={folder / 'law.json'}", "--batch_size=2"]
    assert fit.main([*argv, f"--total_tokens={BUDGETS[1]}"]) == 0
    inside = capsys.readouterr()
    assert "outside the sweep" not in inside.err and float(inside.out) > 0
    assert fit.main([*argv, f"--total_tokens={8 * BUDGETS[-1]}", "--seq_len=4096"]) == 0
    far = capsys.readouterr()
    assert f"{float(far.out):.2g}\n" == far.out  # the bare number
    assert "total_tokens 12.8M is outside the sweep (100k to 1.6M)" in far.err
    # 8,192 tokens, and the sweep had at most 8 * 128
    assert "batch_tokens 8.19k is outside the sweep (128 to 1.02k)" in far.err
    assert "no sequences of 4096 tokens" in far.err and "warmup of 3,000" in far.err
    assert {cfg.seq_len for cfg in pasted(far.err)} == {4096}


@pytest.mark.parametrize("law", [dict(b=0.1), dict(q=-0.1)], ids=str)
def test_a_law_that_power_cannot_follow_gives_no_power_run(law):
    made = fit.law_of(wsd_records(widths=[32])) | law
    assert [one["schedule"] for one in report.schedules_of(made, 1e6, 1024).values()] == [
        "wsd",
        "wsd",
    ]
