"""Do fit.py and research/bent.py give a known law back, straight or bent, from runs like ours?"""

import itertools
import math
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

import against
import bent
import fit
import sweep
from test_figures import figures  # noqa: F401
from test_fit import record, write, wsd_records
from test_mistakes import one_line
from records import rows_of

# Loss above the lowest (nats) at 1/4, 1/2.8, ... 4 times the best learning rate, at T = 80k, 160k,
# ..., 1.28M: means over the cells of wsd-laptop, smoothed. Then the noise of one run.
VALLEYS = {
    80_000: ([0.105, 0.070, 0.034, 0.008, 0, 0.010, 0.051, 0.137, 0.274], 0.035),
    160_000: ([0.212, 0.136, 0.061, 0.015, 0, 0.011, 0.050, 0.140, 0.234], 0.034),
    320_000: ([0.218, 0.123, 0.052, 0.012, 0, 0.009, 0.040, 0.110, 0.238], 0.0215),
    640_000: ([0.179, 0.099, 0.042, 0.010, 0, 0.008, 0.028, 0.065, 0.124], 0.015),
    1_280_000: ([0.127, 0.070, 0.028, 0.006, 0, 0.006, 0.024, 0.050, 0.092], 0.0086),
}
B, Q = -0.29, 0.5
AS_BEFORE = 0.75  # correlation of the noise of two branches that leave one trunk in a row


def valley(T: int):
    """The valley as a function of the distance from its bottom, in octaves."""
    curve = np.polynomial.Polynomial.fit(np.arange(-2, 2.1, 0.5), VALLEYS[T][0], 8)
    return lambda u: curve(np.clip(u, -2, 2)) + 0.3 * max(0, abs(u) - 2)


BOTTOM = {T: valley(T) for T in VALLEYS}


def world(seed: int, widths, batches=(1, 2, 4, 8)) -> list[dict]:
    """Records of a sweep that searches as sweep.py does, around lr = 2 beta^Q T^B."""
    rng, found = np.random.default_rng(seed), []
    for width, batch, number in itertools.product(widths, batches, range(3)):
        best = lambda T: 1 + Q * math.log2(batch / 32) + B * math.log2(T)
        noise, losses = {}, {}

        def loss(j: int, T: int) -> float:
            if j not in noise:
                noise[j], last = {}, rng.normal()
                for t, (_, size) in VALLEYS.items():
                    noise[j][t] = size * last
                    last = AS_BEFORE * last + math.sqrt(1 - AS_BEFORE**2) * rng.normal()
            off = math.log2(sweep.nth_lr(j)) - best(T)
            return losses.setdefault((j, T), 2 + float(BOTTOM[T](off)) + noise[j][T])

        middle = {T: 2 * round(best(T) + math.log2(1e4)) for T in VALLEYS}
        sweep.search(loss, middle)
        found += [record(width, batch, T, number, y, lr=sweep.nth_lr(j))
                  for (j, T), y in losses.items()]  # fmt: skip
    return found


MANY = pytest.param(200, [32, 64, 128], 0.93, marks=pytest.mark.slow)


@pytest.mark.parametrize("worlds, widths, least", [(40, [32], 0.88), MANY])
def test_b_and_q_are_unbiased_and_covered(worlds, widths, least):
    off, hit = [], []
    for seed in range(worlds):
        laws = fit.jackknife(fit.fitted_cells(rows_of(world(seed, widths))), fit.fit_law)
        b, q = [fit.apply(attrgetter(name), laws) for name in "bq"]
        off.append([b.answer - B, q.answer - Q])
        ends = fit.interval(b), fit.interval(q)
        hit.append([low <= truth <= high for truth, (low, high) in zip((B, Q), ends)])
    bias, covered = np.mean(off, axis=0), np.mean(hit, axis=0)
    print("bias", bias, "spread", np.std(off, axis=0), "covered", covered)
    assert (abs(bias) < [0.015 if worlds == 40 else 0.01, 0.02]).all()
    assert (least <= covered).all()


# -- The bent law ------------------------------------------------------------------------

TRUE = dict(a=0.002, b0=0.2, q=0.8, c=2e-4, kappa=0.6, r=4.0)


def bent_rows(noise: float, law: dict = TRUE) -> list[dict]:
    """Plain rows around lr = a T^b0 (1 + (beta_c / beta)^r)^(-q / r)."""
    rng, rows = np.random.default_rng(0), []
    for T, batch in [(5e5 * 2**k, 2**n) for k in range(5) for n in range(8)]:
        beta_c = law["c"] * T ** law["kappa"]
        best = law["a"] * T ** law["b0"]
        best *= (1 + (beta_c / (batch / 32)) ** law["r"]) ** (-law["q"] / law["r"])
        for k in range(-4, 5):
            loss = 2 + 0.03 * (k / 2) ** 2 + rng.normal(0, noise)
            row = dict(
                lr=best * 2 ** (k / 2), total_tokens=T, batch_size=batch, val_loss=loss
            )
            rows.append(row | {"seq_len": 128})
    return rows


def cells_of(rows: list[dict]) -> list[fit.Cell]:
    return fit.fitted_cells(rows_of(rows))


def test_a_clean_bent_law_is_recovered():
    cells = cells_of(bent_rows(0))
    law = bent.fit_bent(cells, cells)
    assert law.r == 4 and law.q == pytest.approx(0.8, abs=0.02)
    assert (law.b0, law.kappa) == pytest.approx((0.2, 0.6), abs=0.02)
    # the middle of every valley
    best = np.log2([row["lr"] for row in bent_rows(0)[4::9]])
    fitted = [bent.of_bent(law, cell) for cell in cells]
    assert sorted(fitted) == pytest.approx(sorted(best), abs=0.03)
    assert bent.gain(cells).answer > 0.05


def test_noise_without_a_bend_is_no_gain():
    gains = lambda rows: fit.interval(bent.gain(cells_of(rows)))
    worlds = [world(seed, [32], batches=[1, 4, 8, 32, 128]) for seed in range(3)]
    assert all(gains(rows)[0] < 0 for rows in worlds)
    assert gains(bent_rows(0.003, law=TRUE | {"c": 1e-4}))[0] > 0


def test_held_out_error_is_that_of_a_dumb_loop():
    cells = cells_of(bent_rows(0.004))
    errors = bent.held_out(cells, fit.fit_law, bent.of_straight)
    best = dict(zip(cells_names(cells), [x for _, x in fit.minima(cells)]))
    for (_, T, batch), error in zip(best, errors):
        squares = []
        for out in ({"T": T}, {"batch": batch}):
            kept = [name for name in best if out.get("T") != name[1]]
            kept = [name for name in kept if out.get("batch") != name[2]]
            X = np.array([(1, math.log2(t), math.log2(B / 32)) for _, t, B in kept])
            log_a, b, q = np.linalg.lstsq(X, [best[name] for name in kept])[0]
            predicted = log_a + b * math.log2(T) + q * math.log2(batch / 32)
            squares.append((best["one shape", T, batch] - predicted) ** 2)
        assert error == pytest.approx(np.mean(squares))


def cells_names(cells: list[fit.Cell]) -> list[tuple]:
    return [cell[:3] for cell in cells]


# -- Two sets of runs --------------------------------------------------------------------


def test_what_changes_with_a_longer_warmup(figures, capsys):  # noqa: F811
    """At a long warmup, batch sizes 4 and 8 have half the best learning rate, and 0.1 more loss."""
    records = wsd_records(noise=0.002, widths=[32])
    for r in records[:]:
        half = r["batch_size"] >= 4
        more = dict(lr=r["lr"] / (1 + half), val_loss=r["val_loss"] + 0.1 * half)
        records.append(r | more | dict(warmup_tokens=50_000))
    write(records, Path("a"))
    only = ["a", "--only", "batch_size=2,4,8"]
    assert (
        against.main(["warmup_tokens=2500,50000", *only]) == 0
        and Path("a/against.png").exists()
    )
    lines = {
        line[:26].strip(): line[26:].split()
        for line in capsys.readouterr().out.splitlines()
    }
    for name, cells, moved, deeper in (("batch size 2", 5, 0, 0), ("batch size 8", 5, -1, 0.1),
                                       ("all", 15, -2 / 3, 0.2 / 3)):  # fmt: skip
        words = lines[name]
        assert int(words[0]) == cells and float(words[1]) == pytest.approx(
            moved, abs=0.02
        )
        assert float(words[-1]) == pytest.approx(deeper, abs=1e-4)
    refused = lambda *argv: one_line(against.main, [*argv, *only], capsys)
    assert "warmup_tokens=7" in refused("warmup_tokens=2500,7")
    assert "two values" in refused("warmup_tokens=2500")
    write([r | {"dtype": str(r["warmup_tokens"])} for r in records], Path("b"))
    only[0] = "b"
    assert "differ in dtype" in refused("warmup_tokens=2500,50000")
