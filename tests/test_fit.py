"""From made-up records with a known law back to the law; what cannot be fitted is refused."""

import itertools
import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest

import fit
import schedules
from test_figures import figures  # noqa: F401  (checks the layout of all figures)
from test_mistakes import one_line
import compare
import train
from config import make_config
from tools.flags import UserError
from records import VARIED, differing, flags_of, rows_of, settings

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


def refused(argv: list, capsys) -> str:
    """The one line with which fit.py refuses a command."""
    return one_line(fit.main, [str(word) for word in argv], capsys)


# -- recovery ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "law", [dict(a=40, b=-0.4, q=0.6), dict(a=4.6, b=-0.51, q=1.0)], ids=str
)
def test_a_clean_law_is_recovered(law):
    records = wsd_records(**law)
    fits = fit.fits_of(records)
    assert (fits.law.b[0], fits.law.q[0]) == pytest.approx((law["b"], law["q"]))
    a = [*fits.law.a.values()]
    assert [draws[0] for draws in a] == pytest.approx([law["a"]] * 3, rel=1e-4)
    for window in (5, 7):
        points = fit.parabolas(records, window)
        joint = fit.fit_law(points, *fit.leave_out(points))
        assert (joint.b[0], joint.q[0]) == pytest.approx((law["b"], law["q"]))
    if law["q"] == 1:
        b, _, a = fit.paper_reading(fits.found)
        assert (b[0], a) == (pytest.approx(law["b"]), pytest.approx(4.6, rel=1e-4))


def test_law_of_plain_rows_is_the_law_of_records():
    rows = [dict(lr=r["lr"], total_tokens=r["total_tokens"], batch_tokens=128 * r["batch_size"],
                 val_loss=r["val_loss"], seed=r["seed"], shape=f"width {r['n_embd']}")
            for r in wsd_records(noise=0.002)]  # fmt: skip
    of_records = fit.law(wsd_records(noise=0.002))
    write(rows, Path("rows"))
    assert fit.main(["rows"]) == 0
    for name, value in fit.law(rows).items():
        if name not in (
            "seq_len",
            "fingerprint",
            "warmup_tokens",
            "rule",
            "flags",
            "decay_share",
            "rows",
        ):
            assert value == pytest.approx(of_records[name])
    with pytest.raises(ValueError, match="no total_tokens"):
        fit.law([{"lr": 0.1}])
    with pytest.raises(ValueError, match="same learning rate and seed"):
        fit.law([row | {"seed": 0} for row in rows])


def test_a_run_that_is_there_twice_is_reported_with_its_losses(capsys):
    runs = wsd_records(noise=0.002)
    again = [r | {"val_loss": r["val_loss"] + 0.5} for r in runs[:7]]
    write(runs + again + runs[7:9], Path("runs"))
    found = fit.read_rows([Path("runs")])
    assert len(found) == len(runs) and found[0]["val_loss"] == again[0]["val_loss"]
    printed = capsys.readouterr().out
    assert "9 runs are repeated" in printed and "0.5000" in printed


def test_repeated_runs_with_equal_losses_are_reported_too(capsys):
    runs = wsd_records(seeds=1, widths=[32])
    write(runs + runs[:3], Path("runs"))
    assert len(fit.read_rows([Path("runs")])) == len(runs)
    assert "3 runs are repeated" in capsys.readouterr().out


def test_runs_that_did_not_finish_are_left_out_and_counted(capsys):
    """A crashed run has a loss in W&B, and it would move the law."""
    runs = [r | {"state": "finished"} for r in wsd_records(seeds=1)]
    for r in runs:
        del r["preset"]  # as a table from elsewhere
    lost = [(0, "crashed"), (200, "running"), (205, "crashed")]
    for i, state in lost:
        runs[i] |= {"state": state, "val_loss": 9.0}
    kept = [r for r in runs if r["state"] == "finished"]
    without_state = [{k: v for k, v in r.items() if k != "state"} for r in kept]
    write(runs, Path("runs"))
    found = fit.read_rows([Path("runs")])
    write(without_state, Path("others"))
    assert "3 runs that did not finish: 2 crashed, 1 running" in capsys.readouterr().out
    assert found == fit.read_rows([Path("others")])
    assert fit.law(runs) == fit.law(without_state)


def test_rows_of_other_schedules_are_refused(capsys):
    rows = wsd_records(seeds=1, widths=[32])
    rows[3] = rows[3] | {"schedule": "cosine"}
    with pytest.raises(UserError, match="rows of schedule cosine"):
        fit.law(rows)
    write(rows, Path("runs"))
    assert "--only schedule=wsd" in refused(["runs"], capsys)
    assert fit.main(["runs", "--only", "schedule=wsd"]) == 0


@pytest.mark.parametrize("row, says", [
    ({"val_loss": 2}, "line 1: a record has no total_tokens"),
    ({"lr": 0.1, "total_tokens": 9, "batch_size": 1}, "runs: no record has a val_loss"),
    ({"lr": 0.1, "total_tokens": 9, "batch_size": 1, "val_loss": None}, "left out"),
    ({"lr": 0.1, "total_tokens": 9, "batch_size": 1, "val_loss": "x"}, "val_loss 'x'"),
    ({"lr": "high", "total_tokens": 9, "batch_size": 1, "val_loss": 2}, "lr high"),
])  # fmt: skip
def test_an_odd_row_is_one_line(row, says, capsys):
    write([row], Path("runs"))
    assert says in refused(["runs"], capsys)


def test_the_papers_grid_of_factors_of_two_gives_the_law():
    """Eight rates for everything, so many minima lie close to an edge."""
    rates = [2**-k for k in range(5, 13)]
    cells = [(2e9 * 2**i, 16 * 2**k) for i in range(8) for k in range(6)]
    loss = lambda T, B, lr: 2 + 0.03 * math.log2(lr / (4.6 * B * T**-0.51)) ** 2
    rows = [dict(lr=lr, total_tokens=T, batch_size=B, val_loss=loss(T, B, lr))
            for T, B in cells for lr in rates]  # fmt: skip
    found = fit.minima(rows_of(rows))
    inside = [
        m for m in found if rates[-2] <= 4.6 * m.batch_size * m.T**-0.51 <= rates[1]
    ]
    assert len(inside) > 24 and not any(m.why_not for m in inside)
    law = fit.law(rows)
    assert (law["b"], law["q"], law["b_paper"]) == pytest.approx((-0.51, 1, -0.51))


def test_least_squares_match_lstsq_on_repeated_points():
    points = fit.usable(fit.minima(wsd_records(noise=0.004, cells=0.1)))
    x, weight = fit.leave_out(points)
    law, T = fit.fit_law(points, x, weight), np.log2([m.T for m in points])
    one_hot = [[m.shape == f"width {width}" for m in points] for width in WIDTHS]
    X = np.array([*one_hot, T, np.log2([m.beta for m in points])], float).T
    for k in range(5):
        repeated = np.repeat(np.arange(len(points)), weight[k].astype(int))
        *_, b, q = solution = np.linalg.lstsq(X[repeated], x[k][repeated])[0]
        assert (law.b[k], law.q[k]) == pytest.approx((b, q)) and weight[k].sum() > 0
        assert law.fitted[k] == pytest.approx(X @ solution)
    one_batch = np.array([[float(m.batch_size == B) for m in points] for B in BATCHES])
    one_T = np.array([[float(m.T == T) for m in points] for T in BUDGETS])
    for weight in (3 * one_batch, one_T, 7 * one_T):  # T and beta do not vary separately
        assert np.isnan(fit.fit_law(points, x[: len(weight)], weight).q).all()


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
    for rows in (one_seed, equal):
        assert (
            fit.show(rows, 1) == f"{rows[0]:.1f}" and compare.verdict(rows) == "undecided"
        )


def test_rows_that_leave_out_nothing_of_the_answer_do_not_count():
    """The slope at two batch sizes is as sure if the sweep has more of them."""
    points = fit.usable(fit.minima(wsd_records(noise=0.004, cells=0.1, widths=[32])))
    small = [m for m in points if m.batch_size in BATCHES[:2]]
    found = []
    for some in (points, small):
        x, weight = fit.leave_out(some)
        weight = weight * np.array([m in small for m in some])
        groups = [m.batch_size for m in some]
        rows = fit.slope(x, weight, np.log2([m.T for m in some]), groups)
        found.append(fit.interval(fit.where_left_out(rows, weight)))
    assert found[0] == pytest.approx(found[1])


def test_an_interval_does_not_depend_on_rounding():
    """Without the middle one of three batch sizes, q is the same but for rounding."""
    records = wsd_records(noise=0.004, cells=0.1, widths=[32])
    records = [r for r in records if r["batch_size"] in (1, 2, 4)]
    points = fit.usable(fit.minima(records))
    assert len(points) == 3 * len(BUDGETS)
    x, weight = fit.leave_out(points)
    expected = fit.interval(fit.fit_law(points, x, weight).q)
    for k in range(10):
        shaken = x + 1e-13 * np.random.default_rng(k).normal(size=x.shape)
        q = fit.fit_law(points, shaken, weight).q
        assert fit.interval(q) == pytest.approx(expected)


def test_a_row_is_the_law_without_one_pair_or_one_seed():
    """A dumb loop deletes the records, and fits the rest."""
    records = wsd_records(noise=0.004, cells=0.1, widths=[32, 64])
    fits = fit.fits_of(records)
    pairs = [(width, batch) for width in (32, 64) for batch in BATCHES]
    kept = [records]
    for pair in pairs:
        kept.append([r for r in records if (r["n_embd"], r["batch_size"]) != pair])
    for seed in range(3):
        kept.append([r for r in records if r["seed"] != seed])
    expected = [fit.fits_of(some) for some in kept]
    for name in ("b", "q"):
        rows = getattr(fits.law, name)
        assert rows[: len(kept)] == pytest.approx(
            [getattr(f.law, name)[0] for f in expected]
        )
        assert len(rows) == 1 + 2 * len(pairs) and np.isnan(rows[len(kept) :]).all()
    paper = [f.paper[0][0] for f in expected]
    step_law = [fit.step_law_reading(f.found)[0] for f in expected]
    for rows, one_by_one in (
        (fits.paper[0], paper),
        (fit.step_law_reading(fits.found), step_law),
    ):
        rows = rows[: len(kept)]
        stays = np.isnan(rows)  # the reading did not use this batch size
        assert np.where(stays, rows[0], rows) == pytest.approx(one_by_one)
        assert not stays.all()
    assert fit.law(records) == fit.law(records)  # nothing is drawn


def test_two_sweeps_leave_out_the_same():
    """The second sweep is the first at twice the learning rates, so that nothing varies."""
    records = wsd_records(noise=0.004, widths=[32])
    doubled = [r | {"lr": 2 * r["lr"]} for r in records]
    points = [m for some in (records, doubled) for m in fit.minima(some)]
    x, weight = fit.leave_out(points)
    one, two = np.split(x, 2, axis=1)
    assert two - one == pytest.approx(np.ones_like(one))
    assert (np.split(weight, 2, axis=1)[0] == np.split(weight, 2, axis=1)[1]).all()


def test_the_papers_reading_takes_the_three_best_batches_and_obeys_its_identity():
    found = fit.minima(wsd_records())
    best = fit.best_batches(found, 3)
    assert {m.batch_size for m in best} == {1, 2, 4} and len(best) == 3 * 5 * 3
    b, s, a = fit.paper_reading(found)  # with q = 1, gamma depends on the batch sizes
    mean_log2_beta = np.mean([math.log2(batch / 32) for batch in (1, 2, 4)])
    assert (b[0], s[0]) == pytest.approx((-0.4, 0), abs=1e-6)
    assert math.log2(a) == pytest.approx(math.log2(40) - 0.4 * mean_log2_beta, abs=1e-3)
    grow = [m for m in found if 0 <= math.log2(m.T / 1e5) - math.log2(m.batch_size) < 3]
    b, s, _ = fit.paper_reading(grow)
    assert s[0] > 0.3 and b[0] == pytest.approx(-0.4 + (0.6 - 1) * s[0], abs=1e-6)
    rise = np.polyfit(*np.log2([(m.T, m.beta) for m in fit.best_batches(grow, 1)]).T, 1)[
        0
    ]
    assert rise > 0.3 and fit.step_law_reading(grow)[0] == pytest.approx(
        -0.4 + 0.6 * rise
    )


# -- single minima -----------------------------------------------------------------------

VALLEY = [
    (x / 2, 1 + (x / 2 - 0.3) ** 2 + 0.1 * (x / 2 - 0.3) ** 3) for x in range(-5, 6)
]
EDGE, FEWER = "at an edge", "fewer than 5 losses"
HILL = [(x, 1 - x * x / 9 if x else 0.7) for x, _ in VALLEY[2:9]]


def diverging(*at: float) -> list[tuple]:
    return [(x, math.inf if x in at else y) for x, y in VALLEY]


def test_a_cubic_is_found_exactly_and_a_parabola_has_its_closed_form():
    bent = [(x, y + 7 * (x < -1)) for x, y in VALLEY]  # outside the window
    assert fit.vertex(VALLEY) == fit.vertex(bent) == (pytest.approx(0.3), "")
    wide = [(2 * x, y) for x, y in VALLEY]  # steps of a factor of 2
    assert fit.vertex(wide) == (pytest.approx(0.6), "")
    # around 0.5: -0.5, 0, 0.5, 1, 1.5
    x, why_not = fit.vertex(VALLEY, degree=2, window=5)
    curve = np.polyfit(*np.array(VALLEY[4:9]).T, 2)
    assert (x, why_not) == (pytest.approx(-curve[1] / 2 / curve[0]), "") and x < 0.29


@pytest.mark.parametrize("points, why", [
    (VALLEY[:4], EDGE), (VALLEY[6:], EDGE), (VALLEY[:1], EDGE), (VALLEY[4:8], FEWER),
    (VALLEY[3:8], ""), (diverging(1.0), ""), (diverging(1.0, 1.5, 2.0), FEWER),
    (HILL, "no valley"), (diverging(*[x for x, _ in VALLEY]), EDGE),
])  # fmt: skip
def test_unusable_minima_are_left_out(points, why):
    x, reason = fit.vertex(points)
    assert reason == why and math.isfinite(x)


def test_a_cell_whose_seeds_share_no_learning_rate_is_counted():
    rates = {0: (0.01, 0.02, 0.04), 1: (0.003, 0.005, 0.007)}
    rows = [
        dict(lr=lr, total_tokens=T, batch_size=B, val_loss=2.0, seed=seed)
        for seed, some in rates.items()
        for lr in some
        for T in (1e5, 2e5)
        for B in (1, 2)
    ]
    found = fit.minima(rows_of(rows))
    assert [m.why_not for m in found] == ["no common learning rate"] * 4
    with pytest.raises(ValueError, match="4 no common"):
        fit.law(rows)


def test_diverged_runs_do_not_move_the_law():
    records = wsd_records()
    # width 128 with batch size 8 diverges right above its best learning rate
    for r in records:
        best = 40 * (r["batch_size"] / 32) ** 0.6 * r["total_tokens"] ** -0.4
        if r["n_embd"] == 128 and r["batch_size"] == 8 and r["lr"] > best:
            r |= dict(diverged=True, val_loss=None)
    found = fit.minima(records)
    assert sum(bool(m.why_not) for m in found) <= 5
    assert {(m.shape, m.batch_size) for m in found if m.why_not} <= {("width 128", 8)}
    assert fit.fits_of(records).law.b[0] == pytest.approx(-0.4, abs=1e-3)


# -- the comparison ----------------------------------------------------------------------


def test_the_error_of_a_difference_is_from_pairs_and_from_seeds():
    """If a gap is the sum of a part of its pair and a part of its seed, the variances add up."""
    pair, seed = {2: 0.1, 4: 0.5, 8: -0.3}, [0.2, 0.0, -0.7, 0.1]
    cells = [("width 64", T, B) for B in pair for T in (100, 200)]
    zero = {cell: dict.fromkeys(range(4), 0.0) for cell in cells}
    line = {cell: {s: pair[cell[2]] + seed[s] for s in range(4)} for cell in cells}
    rows = compare.differences(line, zero, cells)
    assert rows[0] == pytest.approx(np.mean([*pair.values()]) + np.mean(seed))
    variances = np.var([*pair.values()], ddof=1) / 3, np.var(seed, ddof=1) / 4
    error, freedom = fit.error_of(fit.mean_of(np.add.outer([*pair.values()], seed)))
    assert error == pytest.approx(sum(variances) ** 0.5)
    assert fit.error_of(rows) == pytest.approx((error, freedom))
    assert freedom == pytest.approx(
        error**4 / (variances[0] ** 2 / 2 + variances[1] ** 2 / 3)
    )
    # one pair: Student's t over four seeds, whose quantile is 3.182
    one_pair = compare.differences(line, zero, cells[:2])
    low, high = fit.interval(one_pair)
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


def test_equal_lines_are_no_finding():
    same = {"equal": np.zeros(1), "lost": np.full(11, np.nan)}
    assert compare.holm(same) == []


def test_runs_of_power_with_different_settings_are_never_mixed():
    """Also if a run of another schedule comes first, which does not have these settings."""
    wsd, power = (record(32, 2, 80_000, 0, 2.0, schedule=s) for s in ("wsd", "power"))
    power["lr_max"] = 0.02
    other = dict(power, lr_max=0.5)
    some = ([wsd, power, other], [power, wsd, other], [power, other, wsd])
    for i, runs in enumerate(some):
        with pytest.raises(UserError, match="different lr_max"):
            fit.read_rows([write(runs, Path(str(i)))])


def test_holm_asks_more_of_every_difference_the_more_there_are():
    # 1,000 seeds, which are z standard errors from 0
    spread = np.linspace(-1, 1, 1000)
    spread /= spread.std(ddof=1) / 1000**0.5
    rows = {name: fit.mean_of((z + spread)[None]) for name, z in
             {"clear": 6.0, "fair": 2.3, "none": 0.1}.items()}  # fmt: skip
    assert compare.holm(rows) == ["clear", "fair"]
    many = rows | {f"other {i}": rows["none"] for i in range(5)}
    assert compare.holm(many) == ["clear"]


def test_a_best_batch_is_chosen_again_in_every_row():
    """A second batch size is best in one seed of two, and its learning rates grow with T."""

    def row(T, batch, seed, lr, loss):
        return dict(
            total_tokens=T, batch_size=batch, seed=seed, lr=lr, val_loss=loss, seq_len=128
        )

    rows = []
    for T in (1e5, 2e5, 4e5):
        for batch, b in ((2, -0.5), (4, 0.5)):
            for seed in (0, 1):
                best = 0.01 * (T / 1e5) ** b
                bottom = 2 + 0.01 * (seed == (batch == 4))
                for k in range(-4, 5):
                    lr = best * 2 ** (k / 2)
                    rows.append(
                        row(T, batch, seed, lr, bottom + 0.01 * k**2 - 1e-4 * batch)
                    )
    found = fit.minima(rows_of(rows))
    exponents = fit.step_law_reading(found)
    assert exponents[0] == pytest.approx(
        0.5, abs=1e-6
    )  # batch size 4 is best in the mean
    assert {round(b, 3) for b in exponents[1:] if math.isfinite(b)} >= {-0.5, 0.5}


def test_the_search_for_a_seed_is_decided_by_the_others():
    losses = {
        0: [5, 4, 3, 2, 3, 4, 1],
        1: [7, 6, 3, 5, 6, 7, 8],
        2: [7, 6, 6, 3, 5, 6, 9],
    }
    rows = [dict(shape="x", total_tokens=9, batch_size=1, seed=s, lr=i, loss=y, diverged=False)
            | compare.WSD for s, some in losses.items() for i, y in enumerate(some)]  # fmt: skip
    rows.append(rows[0] | dict(seed=3))  # one learning rate is no search
    assert compare.searched(rows) == {("x", 9, 1): {0: 2, 1: 5, 2: 6}}


# -- commands ----------------------------------------------------------------------------


def test_wsd_report(figures, tmp_path, capsys):  # noqa: F811
    records = wsd_records(noise=0.004, cells=0.08, widths=[32, 64, 128, 256, 512, 1024])
    records = [
        r | {"n_expert": 8, "n_expert_active": 2} if r["n_embd"] > 500 else r
        for r in records
    ]
    folder = write(records, tmp_path / "a")
    assert fit.main([str(folder)]) == 0
    out = capsys.readouterr().out
    law = json.loads((folder / "law.json").read_text())
    names = "a b q a_interval b_interval q_interval a_paper b_paper b_paper_interval rule seq_len "
    names += "warmup_tokens fingerprint total_tokens batch_tokens rows "
    assert {*law} == {*(names + "decay_share decay_tokens flags").split()}
    assert law["warmup_tokens"] == 2500
    low, high = law["b_interval"]
    assert low < law["b"] < high and f"{law['b']:.3f} [{low:.3f}, {high:.3f}]" in out
    assert {path.name for path in folder.glob("*.png")} == {"valleys.png", "law.png"}


def test_one_value_of_a_swept_field_is_fitted_by_only(tmp_path, capsys):
    some = dict(widths=[64], seeds=1)
    records = [r | {"weight_decay": 0.0} for r in wsd_records(b=-0.3, **some)]
    records += [r | {"weight_decay": 0.1} for r in wsd_records(b=-0.5, **some)]
    folder = write(records, tmp_path / "a")
    assert "weight_decay" in refused([folder], capsys)
    for value, b in (("0", -0.3), ("0.1", -0.5)):
        assert (
            fit.main([str(folder), "--only", f"weight_decay={value}", "--out", value])
            == 0
        )
        assert json.loads(Path(value, "law.json").read_text())["b"] == pytest.approx(b)
    assert "weight_decay=7: no such" in refused(
        [folder, "--only", "weight_decay=7"], capsys
    )


def test_an_unfinished_sweep_gives_a_law_or_one_line_and_nothing_written(
    tmp_path, capsys
):
    records = wsd_records(seeds=1, widths=[32, 64])
    no_longest = [
        r for r in records if (r["n_embd"], r["total_tokens"]) != (64, BUDGETS[-1])
    ]
    # width 64: at the edge
    narrow = [r for r in records if r["n_embd"] < 64 or r["lr"] < 0.002]
    for name, some in (("a", no_longest), ("b", narrow)):
        assert fit.main([str(write(some, tmp_path / name))]) == 0
        assert Path(name, "law.json").exists()
    folder = write(records[::4], tmp_path / "c")
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


# -- from a law to a run -----------------------------------------------------------------

MINE = dict(
    n_layer=2, n_embd=32, n_head=2, warmup_tokens=3000, dtype="float32", weight_decay=0.05
)  # fmt: skip


def sweep_records(decay=lambda T: {}, **fields) -> list[dict]:
    """wsd_records with all fields of their configs."""
    found = []
    for r in wsd_records(widths=[32], a=3.0, b=-0.3, q=0.5, noise=0.002):
        names = ("total_tokens", "batch_size", "seed", "lr")
        own = {name: r[name] for name in names} | {"schedule": "wsd"}
        own |= {"final_eval_tokens": 2**16} | decay(r["total_tokens"])
        cfg = make_config(**MINE | fields | own)
        results = {name: r[name] for name in ("val_loss", "diverged", "fingerprint")}
        found.append(vars(cfg) | results)
    return rows_of(found)


def pasted(lines: str) -> dict:
    """schedule -> the config of its printed command, as train.py takes it."""
    configs = {}
    for line in lines.splitlines():
        if line.startswith("python train.py"):
            typed, _ = train.parse(shlex.split(line)[2:])
            configs[typed["schedule"]] = make_config(**typed)
    return configs


def test_pasted_commands_follow_the_law(tmp_path, capsys):
    """The learning rates of Power equal the law's to 1% above warmup and ceiling."""
    folder = write(sweep_records(), tmp_path / "a")
    assert fit.main([str(folder)]) == 0
    configs = pasted(capsys.readouterr().out)
    law = json.loads((folder / "law.json").read_text())
    cfg = configs["power"]
    assert cfg.total_tokens == 4 * BUDGETS[-1] and cfg.warmup_tokens == 3000
    beta = cfg.batch_tokens / 4096
    lr = lambda n: law["a"] * beta ** law["q"] * n ** law["b"]
    schedule = schedules.make_schedule(cfg)
    shortest = BUDGETS[0]
    for n in np.geomspace(1.01 * shortest, cfg.decay_start, 50):
        assert schedule(n) == pytest.approx(lr(n), rel=0.01)
    for n in np.linspace(cfg.warmup_tokens, shortest, 50):
        assert schedule(n) == pytest.approx(lr(shortest), rel=0.01)
    assert configs["wsd"].lr == pytest.approx(lr(cfg.total_tokens), rel=0.001)
    free = VARIED | {"final_eval_tokens"}
    of_sweep = {name: sweep_records()[0].get(name) for name in vars(cfg)}
    for one in configs.values():  # nothing else differs from the sweep
        theirs = settings(of_sweep | {"schedule": one.schedule}, free)
        different = differing(settings(vars(one), free), theirs)
        assert set(different) <= {"power_q", "lr_max"}


@pytest.mark.parametrize("fields", [
    {}, {"preset": "laptop-moe", "n_ffn": 40}, {"preset": "12M", "warmup_tokens": 10**9},
    {"m_width": 1.0, "attention_multiplier": 16**-0.5, "tie_embeddings": False},
    {"data": "/my notes/corpus", "tokenizer": "tokenizer.json", "vocab_size": 1024},
    {"data": "embedded:0.5,/a:0.5", "tokenizer": "gpt2"}, {"average": True, "decay_tokens": 0},
    {"n_kv_head": 1, "decay_shape": "linear"},
], ids=str)  # fmt: skip
def test_flags_of_a_record_give_its_settings(fields):
    length = {} if "preset" in fields else dict(total_tokens=10**5)
    length |= dict(schedule="wsd", batch_size=4, lr=0.02)
    cfg = make_config(**MINE | length | fields)
    flags = shlex.split(flags_of(vars(cfg)))
    typed, _ = train.parse([*flags, *(f"--{name}={x}" for name, x in length.items())])
    again = make_config(**typed | {"decay_tokens": cfg.decay_tokens})
    assert settings(vars(again)) == settings(vars(cfg)) and again.data == cfg.data
    has_tokenizer = "tokenizer" in fields and "embedded" in fields["data"]
    assert ("--tokenizer" in flags) == has_tokenizer  # train.py refuses a second one
    assert flags_of({"lr": 0.1, "schedule": "wsd"}) is None


@pytest.mark.parametrize("decay, tokens", [
    (dict(decay_tokens=8000), lambda T: 8000), (dict(decay_share=0.2), lambda T: T // 5),
    (dict(decay_share=1.0), lambda T: T - 3000),
])  # fmt: skip
def test_pasted_commands_decay_as_the_sweep_did(decay, tokens, tmp_path, capsys):
    folder = write(sweep_records(lambda T: decay), tmp_path / "a")
    assert fit.main([str(folder)]) == 0
    for cfg in pasted(capsys.readouterr().out).values():
        assert cfg.decay_tokens == tokens(cfg.total_tokens)


def test_the_band_is_the_interval_of_the_predictions_of_the_rows():
    rows = sweep_records()
    law = json.loads(json.dumps(fit.law(rows), allow_nan=False))
    fits = fit.fits_of(rows_of(rows))
    (a,) = fits.law.a.values()
    for T, batch in ((10**5, 2), (10**8, 64)):
        log2_beta = math.log2(batch * 128 / 4096)
        predicted = np.log2(a) + fits.law.b * math.log2(T) + fits.law.q * log2_beta
        low, high = fit.band(law, T, batch * 128)
        assert np.log2([low, high]) == pytest.approx(fit.interval(predicted), abs=1e-8)
        assert low * high == pytest.approx(fit.predict(law, T, batch * 128) ** 2)


def test_two_batch_sizes_and_one_seed_have_no_interval():
    """Without one of two batch sizes there is no law, and without the seed nothing."""
    records = [r for r in wsd_records(seeds=1, widths=[32]) if r["batch_size"] < 4]
    law = json.loads(json.dumps(fit.law(records), allow_nan=False))
    assert law["b"] == pytest.approx(-0.4) and law["b_interval"] is None
    assert np.isnan(fit.band(law, 1e6, 512)).all()


def test_a_prediction_says_how_far_it_is_from_its_sweep(tmp_path, capsys):
    folder = write(sweep_records(), tmp_path / "a")
    assert fit.main([str(folder)]) == 0
    capsys.readouterr()
    argv = ["--predict", f"--law={folder / 'law.json'}", "--batch_size=2"]
    assert fit.main([*argv, f"--total_tokens={BUDGETS[1]}"]) == 0
    inside = capsys.readouterr()
    assert "factors of two" not in inside.err and float(inside.out) > 0
    assert fit.main([*argv, f"--total_tokens={8 * BUDGETS[-1]}", "--seq_len=4096"]) == 0
    far = capsys.readouterr()
    assert f"{float(far.out):.2g}\n" == far.out  # the bare number
    assert "total_tokens 12.8M is 3.0 factors of two above" in far.err
    # 8,192 tokens, and the sweep had at most 8 * 128
    assert "batch_tokens 8.19k is 3.0 factors of two above" in far.err
    assert "no sequences of 4096 tokens" in far.err and "warmup of 3,000" in far.err
    assert {cfg.seq_len for cfg in pasted(far.err).values()} == {4096}


@pytest.mark.parametrize("law", [dict(b=0.1), dict(q=-0.1)], ids=str)
def test_a_law_that_power_cannot_follow_gives_no_power_run(law):
    made = fit.law(sweep_records()) | law
    assert [*pasted("\n".join(fit.commands(made, 1e6, 8, 128)))] == ["wsd"]


def test_rows_from_elsewhere_give_the_flags_of_schedules_only():
    rows = [dict(lr=r["lr"], total_tokens=r["total_tokens"], batch_size=r["batch_size"],
                 val_loss=r["val_loss"], seed=r["seed"]) for r in sweep_records()]  # fmt: skip
    lines = "\n".join(fit.advice(fit.law(rows), 1e6, 8, 4096))
    assert "--power_q" in lines and "python train.py" not in lines


def test_records_of_single_runs_are_read_once(tmp_path):
    records = wsd_records(widths=[64], seeds=1)
    for i, r in enumerate(records):
        Path(f"runs/{i}").mkdir(parents=True)
        Path(f"runs/{i}/record.json").write_text(json.dumps(r, indent=1))
    Path("runs/torn").mkdir()
    Path("runs/torn/record.json").write_text('{"lr": 0.1')
    folder = write(records, tmp_path / "a")
    text = (folder / "records.jsonl").read_text()
    # double lines and a torn one
    (folder / "records.jsonl").write_text(text + text[:5000])
    assert (
        len(fit.read_rows([Path("runs")])) == len(fit.read_rows([folder])) == len(records)
    )
    assert fit.law(fit.read_rows([Path("runs")])) == fit.law(fit.read_rows([folder]))


APART = ["fingerprint", "warmup_tokens", "dtype", "weight_decay", "optimizer"]


@pytest.mark.parametrize("change, says", [
    *[(lambda r, name=n: {name: str(r["seed"])}, f"different {n};") for n in APART],
    (lambda r: {"decay_tokens": r["total_tokens"] // (9 + r["seed"])}, "decay_tokens"),
    (lambda r: {"n_ffn": 80 + r["seed"]}, "different n_ffn"),
    (lambda r: {"schedule": "power" if r["seed"] else "wsd"}, "no report for schedules"),
    (lambda r: {"total_tokens": 10**5, "decay_tokens": 10**4}, "two run lengths"),
    (lambda r: {"batch_size": 4}, "two batch sizes"), (lambda r: {"lr": None}, "lr None"),
    (lambda r: {"val_loss": r["lr"]}, "60 at an edge"),
    (lambda r: {"diverged": True, "val_loss": None}, "60 at an edge"),
])  # fmt: skip
def test_records_that_cannot_be_fitted_are_refused(change, says, tmp_path, capsys):
    folder = write([r | change(r) for r in wsd_records()], tmp_path / "a")
    assert says in refused([folder], capsys)
    assert [path.name for path in folder.iterdir()] == ["records.jsonl"]


@pytest.mark.parametrize("decay", [lambda T: 8000, lambda T: T // 5, lambda T: 0])
def test_decays_of_equal_tokens_or_equal_share_are_one_setting(decay, tmp_path):
    records = [
        r | {"decay_tokens": decay(r["total_tokens"])} for r in wsd_records(seeds=1)
    ]
    assert fit.read_rows([write(records, tmp_path / "a")])
