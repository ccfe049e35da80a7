"""From made-up records with a known law back to the law; and what cannot be fitted is refused."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fit
import schedules
from test_figures import check_layout, figures  # noqa: F401  (a fixture)
from test_mistakes import one_line

ROOT = Path(__file__).parent.parent
BUDGETS, BATCHES, WIDTHS = [100_000 * 2**k for k in range(5)], [1, 2, 4, 8], [32, 64, 128]


def wsd_records(seed=0, a=40.0, b=-0.40, q=0.6, noise=0.0, cells=0.0, seeds=3, budgets=BUDGETS, batches=BATCHES, widths=WIDTHS, reach=4, shift=0.0) -> list[dict]:
    """Records as sweep.py leaves them, with valleys around lr = a beta^q T^b.

    noise: of a loss (nats), half of it common to the branches of a trunk. cells: how far a cell's
    valley lies off the law (standard deviation in octaves). The valleys are a little steeper to the right.
    """
    rng, found = np.random.default_rng(seed), []
    for width in widths:
        for batch in batches:
            off = {T: rng.normal(0, cells) if cells else 0.0 for T in budgets}
            for number in range(seeds):
                trunk = {j: rng.normal(0, noise / 2) if noise else 0.0 for j in range(-40, 60)}
                for T in budgets:
                    best = math.log2(a) + q * math.log2(batch * 128 / 4096) + b * math.log2(T) + off[T] + shift
                    middle = round(2 * (best + math.log2(1e4)))
                    for j in range(middle - reach, middle + reach + 1):
                        x = j / 2 - math.log2(1e4)
                        loss = 2 + 0.03 * (x - best) ** 2 + (0.003 * max(0, x - best) ** 3 + trunk[j] + rng.normal(0, noise) if noise else 0.0)
                        loss += 0.02 * abs(math.log2(batch) - 1.4)  # batch sizes 2 and 4 are the best
                        found.append(record(width, batch, T, number, loss, lr=2**x))
    return found


def record(width, batch, T, seed, loss, lr=0.01, a=16.0, b=-0.51, **more) -> dict:
    return dict(
        n_embd=width, n_layer=2, n_head=width // 16, n_expert=0, seq_len=128, batch_size=batch, total_tokens=T, seed=seed, lr=lr, power_a=a, power_b=b,
        val_loss=loss, diverged=loss is None, schedule="wsd", warmup_tokens=2500, fingerprint="0123", preset="laptop",
    ) | more  # fmt: skip


def power_records(best_b=-0.5, best_log2_a=5.0, seeds=2) -> list[dict]:
    found = []
    for batch in BATCHES[:3]:
        for T in BUDGETS:
            for seed in range(seeds):
                settings = {(32.0, -0.51 + k / 50) for k in range(-5, 6)} | {(32.0 * 2 ** (k / 2), -0.51) for k in range(-4, 5)}
                for a, b in sorted(settings):
                    loss = 2 + (4 * (b - best_b) ** 2 if a == 32.0 else 0) + (0.01 * (math.log2(a) - best_log2_a) ** 2 if b == -0.51 else 0)
                    found.append(record(64, batch, T, seed, loss + 0.002 * seed, a=a, b=b, schedule="power"))
    return found


def write(records, path) -> Path:
    path.mkdir()
    (path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


# -- recovery --------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [dict(a=40, b=-0.4, q=0.6), dict(a=4.6, b=-0.51, q=1.0), dict(a=3.0, b=-0.2, q=0.4)], ids=str)
def test_a_clean_law_is_recovered(law):
    found = fit.minima(wsd_records(**law))
    joint = fit.joint_law(found)
    assert abs(joint.b[0] - law["b"]) < 1e-6 and abs(joint.q[0] - law["q"]) < 1e-6 and joint.a[0] == pytest.approx(law["a"], rel=1e-4)
    assert all(a[0] == pytest.approx(law["a"], rel=1e-4) for a in joint.a_of.values())
    paper = fit.paper_law(found)
    if law["q"] == 1:
        assert abs(paper.b[0] - law["b"]) < 1e-6 and paper.a[0] == pytest.approx(law["a"], rel=1e-4)


def test_with_a_little_noise_b_is_recovered_to_two_hundredths():
    for window in (3, 5, 7):
        joint = fit.joint_law(fit.minima(wsd_records(noise=0.001), window))
        assert abs(joint.b[0] + 0.4) < 0.02 and abs(joint.q[0] - 0.6) < 0.02


def test_least_squares_against_numpy():
    """One row of weights against lstsq on the points, each repeated as often as its weight says."""
    points = fit.usable(fit.minima(wsd_records(noise=0.004, cells=0.1)))
    weights = fit.bootstrap(points, draws=5)
    ours = fit.regress(points, weights, [["width 32"], ["width 64"], ["width 128"]], free_q=True)
    for row, w in zip(ours, weights):
        repeated = [p for p, n in zip(points, w) for _ in range(int(n))]
        X = [[*(p.shape == f"width {width}" for width in WIDTHS), math.log2(p.T), math.log2(p.batch_size * 128 / 4096)] for p in repeated]
        assert np.allclose(row, np.linalg.lstsq(np.array(X, dtype=float), [p.x for p in repeated])[0], atol=1e-8)


def test_the_bootstrap_draws_seeds_and_cells():
    points = fit.usable(fit.minima(wsd_records(noise=0.004)))
    weights = fit.bootstrap(points, draws=300)
    assert (weights[0] == 1).all() and weights.shape == (301, len(points)) and abs(weights.mean() - 1) < 0.05
    for row in weights[1:20]:  # a product: what a seed was drawn times what a cell was drawn
        table = {(p.seed, p.shape, p.T, p.batch_size): w for p, w in zip(points, row)}
        matrix = np.array([[table[seed, p.shape, p.T, p.batch_size] for p in points if p.seed == 0] for seed in range(3)])
        assert np.linalg.matrix_rank(matrix) <= 1 and matrix.sum() > 0


def test_the_papers_reading_takes_the_three_best_batches():
    best = fit.best_three(fit.usable(fit.minima(wsd_records())))
    assert {p.batch_size for p in best} == {1, 2, 4} and len(best) == 3 * 5 * 3 * 3
    records = wsd_records(q=0.5)  # the law has another q: gamma then depends on the batch sizes that are taken
    one = fit.paper_law(fit.minima(records))
    mean_log2_beta = np.mean([math.log2(batch * 128 / 4096) for batch in (1, 2, 4)])
    assert one.b[0] == pytest.approx(-0.4, abs=1e-6) and math.log2(one.a[0]) == pytest.approx(math.log2(40) - 0.5 * mean_log2_beta, abs=1e-3)


@pytest.mark.slow
def test_intervals_cover_the_truth():
    """Of 200 noisy draws 90 to 99 % have the true b, and q, inside their intervals."""
    hits = {"b": 0, "q": 0}
    for seed in range(200):
        joint = fit.joint_law(fit.minima(wsd_records(seed, noise=0.006, cells=0.08)))
        for name, truth in (("b", -0.4), ("q", 0.6)):
            low, high = fit.interval(getattr(joint, name))
            hits[name] += low <= truth <= high
    print(hits)
    assert all(180 <= n <= 198 for n in hits.values()), hits


# -- a comparison ----------------------------------------------------------------------------------


def compare_records(power=0.004, average=0.002, ours=0.001, b=-0.4, q=0.6, seeds=3) -> list[dict]:
    """A comparison as sweep.py leaves it: valleys of WSD and cosine with the law 40 beta^q T^b, Power a constant above them."""
    rate = lambda j: float(f"{1e-4 * 2 ** (j / 2):.4g}")
    best = lambda T, batch: math.log2(40 * (batch * 128 / 4096) ** q * T**b)
    base = lambda T, seed: 3 - 0.1 * math.log2(T / 100_000) + 0.01 * (seed % 10)
    valley = lambda T, batch, seed, lr: base(T, seed) + 0.03 * (math.log2(lr) - best(T, batch)) ** 2
    found = []
    tuned = min(range(4, 30), key=lambda j: valley(BUDGETS[0], 2, 0, rate(j)))
    for seed in (100, 101, 102):
        for j in range(tuned - 3, tuned + 4):
            for schedule in ("wsd", "cosine"):
                found.append(record(32, 2, BUDGETS[0], seed, valley(BUDGETS[0], 2, seed, rate(j)), lr=rate(j), schedule=schedule, average=False))
        found += [record(32, 2, BUDGETS[0], seed, base(BUDGETS[0], seed) + 0.01 * abs(a - 8), a=a, schedule="power", average=False) for a in (2, 4, 8, 16, 32)]
        found += [record(32, 2, BUDGETS[0], seed, base(BUDGETS[0], seed) + 0.01 * abs(a - 1), a=a, b=-0.25, schedule="power", average=False) for a in (0.5, 1, 2)]
    for width in (64, 128):
        for batch, steps in ((2, {0}), (8, {0, 2, 4})):
            for T in BUDGETS:
                middle = round(2 * math.log2(2 ** best(T, batch) / 1e-4))
                floor = min(range(middle - 4, middle + 5), key=lambda j: valley(T, batch, 0, rate(j)))
                for seed in range(seeds):
                    rates = {tuned + step for step in steps}
                    for j in rates | ({floor} if seed else set(range(floor - 4, floor + 5))):
                        found.append(record(width, batch, T, seed, valley(T, batch, seed, rate(j)), lr=rate(j), average=False))
                    looks = {f"val_loss_at_{t}": base(t, seed) + 0.2 for t in BUDGETS[:-1]} if T == BUDGETS[-1] else {}
                    found += [record(width, batch, T, seed, valley(T, batch, seed, rate(j)), lr=rate(j), schedule="cosine", average=False, **looks) for j in rates]
                    found.append(record(width, batch, T, seed, base(T, seed) + power, a=8.0, schedule="power", average=False))
                    found.append(record(width, batch, T, seed, 9.0, a=8.0, schedule="power", average=True, average_val_loss=base(T, seed) + average))
                    half = (batch / 2) ** -0.5
                    if half < 1:
                        found.append(record(width, batch, T, seed, base(T, seed) + power / 2, a=8 * half, schedule="power", average=False))
                    found.append(record(width, batch, T, seed, base(T, seed) + ours, a=half, b=-0.25, schedule="power", average=False))
                    found.append(record(width, batch, T, seed, 9.0, a=half, b=-0.25, schedule="power", average=True, average_val_loss=base(T, seed) + ours / 2))
    return found


def test_lines_and_floor_of_a_comparison():
    records = compare_records()
    lines, said = fit.comparison(records)
    assert len(lines["floor"]) == 2 * 2 * 5 and all(set(by_seed) == {0, 1, 2} for by_cell in lines.values() for by_seed in by_cell.values())
    assert "power: power_a 8, best of 5" in said
    law = lambda T, batch: math.log2(40 * (batch * 128 / 4096) ** 0.6 * T**-0.4)
    offset = lambda T, batch, lr: 0.03 * (math.log2(lr) - law(T, batch)) ** 2
    tuned = next(r["lr"] for r in records if r["seed"] == 1 and r["batch_size"] == 2 and r["schedule"] == "cosine")
    for cell in lines["floor"]:
        _, T, batch = cell
        lowest = min(offset(T, batch, 1e-4 * 2 ** (j / 2)) for j in range(40))
        for seed in range(3):
            here = lines["floor"][cell][seed]
            assert here == pytest.approx(3 - 0.1 * math.log2(T / 100_000) + 0.01 * seed + lowest, abs=1e-3)
            expected = {"Power": 0.004, "Power, averaged": 0.002, "Power, rate ∝ √batch": 0.004 if cell[2] == 2 else 0.002, "Power, our law": 0.001, "Power, our law, averaged": 0.0005}
            for name, cost in expected.items():
                assert lines[name][cell][seed] - here == pytest.approx(cost - lowest, abs=1e-4)  # rates are rounded
            for name in ("WSD", "cosine"):
                for scaled, power in (("", 0), (", rate ∝ √batch", 0.5), (", rate ∝ batch", 1)):
                    assert lines[name + scaled][cell][seed] - here == pytest.approx(offset(T, batch, tuned * (batch / 2) ** power) - lowest, abs=1e-3)


def test_compare_report(figures, tmp_path, capsys):  # noqa: F811
    folder = write(compare_records(), tmp_path / "a")
    assert fit.main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "| **2.9" in out and "| dense, 20 cells |" in out and "experts" not in out and "Power, tuned in one cell" in out
    losses: dict = {}  # the planned cosines, at the tuned rate times sqrt(batch / 2), each with what it is measured from
    tuned = min(r["lr"] for r in compare_records() if r["schedule"] == "cosine" and r["seed"] < 100)
    for r in compare_records():
        if r["schedule"] == "cosine" and r["seed"] < 100 and math.isclose(r["lr"], tuned * (r["batch_size"] / 2) ** 0.5, rel_tol=0.01):
            losses.setdefault((r["n_embd"], r["total_tokens"], r["batch_size"]), []).append((r["val_loss"], 3 - 0.1 * math.log2(r["total_tokens"] / 100_000) + 0.01 * r["seed"]))
    ratios = [sum(base + 0.0005 for _, base in some) / sum(loss for loss, _ in some) - 1 for some in losses.values()]
    assert len(ratios) == 20 and f"Power, our law, averaged    {np.mean(ratios):+8.2%}{max(ratios):+8.2%}\n" in out
    assert {path.name for path in folder.glob("*.png")} == {"compare.png", "anytime.png", "price.png"}
    for figure in figures:
        check_layout(figure)
    mixed = [r | {"n_expert": 8} if r["n_embd"] == 64 else r for r in compare_records()]
    assert fit.main([str(write(mixed, tmp_path / "b"))]) == 0
    out = capsys.readouterr().out
    assert "| dense, 10 cells |" in out and "| mixture of experts, 10 cells |" in out


def test_a_comparison_that_is_still_running(tmp_path, capsys):
    """Only cells with all their runs are shown; without any, one line says so."""
    records = compare_records()
    longest = [r for r in records if not (r["schedule"] == "cosine" and r["total_tokens"] == BUDGETS[-1] and r["seed"] == 2)]
    folder = write(longest, tmp_path / "a")
    assert fit.main([str(folder)]) == 0 and "1.6M" not in capsys.readouterr().out
    assert {path.name for path in folder.glob("*.png")} == {"compare.png", "price.png"}
    rng = np.random.default_rng(0)
    for i in range(8):  # any runs may be missing
        some = [r for r in records if r["seed"] >= 100 or rng.random() < 0.99 - 0.07 * i]
        status = fit.main([str(write(some, tmp_path / f"b{i}"))])
        out, err = capsys.readouterr()
        assert (status == 0 and "| floor |" in out) or (status == 2 and err.count("\n") == 1 and "still running" in err), (status, err)


def transfer_records() -> list[dict]:
    """Without muP the best rate halves with every doubling of the width, with it it stays."""
    records = []
    for width in (32, 64, 128):
        for standard, best in ((False, -6.0), (True, -6.0 - math.log2(width / 32))):
            for seed in (0, 1):
                for k in range(-4, 5):
                    loss = 3 - 0.1 * math.log2(width) + 0.03 * (k / 2) ** 2 + 0.01 * seed
                    records.append(record(width, 4, 10**5, seed, loss, lr=2 ** (best + k / 2), attention_multiplier=0.25 if standard else 1 / 16))
    return records


def test_transfer_report(figures, tmp_path, capsys):  # noqa: F811
    folder = write(transfer_records(), tmp_path / "a")
    assert fit.main([str(folder)]) == 0
    lines = {tuple(line.split()[:2]): line.split()[2:] for line in capsys.readouterr().out.splitlines() if line.startswith(("muP", "standard"))}
    assert [lines["muP", str(n)] for n in (32, 64, 128)] == [["0.0156,", "0.0156", "0.0000"]] * 3
    assert lines["standard", "64"] == ["0.0078,", "0.0078", "0.0300"] and lines["standard", "128"] == ["0.0039,", "0.0039", "0.1200"]
    check_layout(figures[0])


def test_a_comparison_without_its_tuning_is_refused(tmp_path, capsys):
    folder = write([r for r in compare_records() if r["seed"] < 100], tmp_path / "a")
    assert "no runs that tuned power" in one_line(fit.main, [str(folder)], capsys)


@pytest.mark.parametrize("q", [0.4, 1.0])
def test_the_price_of_not_knowing(q):
    """Against closed forms: a rate that is off by x octaves costs 0.03 x^2, whatever else is known."""
    costs, n = fit.price(wsd_records(b=-0.4, q=q), {})
    assert n == 3 * 5 * 4
    lowest = lambda T, batch: 0.03 * min(abs(x - round(2 * x) / 2) for x in [math.log2(40) + q * math.log2(batch / 32) - 0.4 * math.log2(T) + math.log2(1e4)]) ** 2
    T, B = np.meshgrid(np.log2(BUDGETS), np.log2(BATCHES))
    x = -0.4 * T + q * B
    # what is left of a least-squares fit, over 1 - leverage: each cell is judged by a fit without it
    line = 1 - (1 / 60 + (T - T.mean()) ** 2 / (3 * ((T - T.mean()) ** 2).sum()))
    off = {"nothing": (x - x.mean()) / (1 - 1 / 60), "the batch size": -0.4 * (T - T.mean()) / (1 - 1 / 15), "T: a rate": q * (B - B.mean()) / (1 - 1 / 12),
           "both, rate ∝ batch": (q - 1) * (B - B.mean()) / line, "both, rate ∝ √": (q - 0.5) * (B - B.mean()) / line}  # fmt: skip
    floor = np.array([[lowest(t, b) for t in BUDGETS] for b in BATCHES])
    for name, octaves in off.items():
        (cost,) = [cost for rule, cost in costs.items() if rule.startswith(name)]
        inside = np.abs(octaves) < 1.7  # beyond, the outermost rate counts
        expected = 0.03 * octaves**2 - floor
        if inside.all():
            assert cost.mean() == pytest.approx(expected.mean(), abs=0.0022)  # straight lines between points lie above a parabola
    assert costs["both, free exponents"].mean() < 0.002 and min(cost.min() for cost in costs.values()) >= 0
    line = {("width 64", T, 2): {0: 2.5, 1: 2.5, 2: 2.5} for T in BUDGETS}
    with_power, _ = fit.price(wsd_records(b=-0.4, q=q), {"Power": line, "elsewhere": {}})
    assert with_power["Power"].shape == (5,) and with_power["Power"].mean() > 0.4 and "elsewhere" not in with_power


def test_a_rule_is_judged_where_it_was_not_fitted():
    """One cell whose valley lies elsewhere: it cannot have moved the rule's rate there."""
    records = wsd_records(widths=[64], seeds=1)
    for r in records:
        if (r["total_tokens"], r["batch_size"]) == (BUDGETS[2], 2):
            r["lr"] *= 2  # an octave off the law
    costs, n = fit.price(records, {})
    assert n == 20 and costs["both, free exponents"].max() == pytest.approx(0.03, rel=0.1)


def test_only_searched_valleys_are_fitted():
    """A few rates far apart, as a comparison leaves them for some seeds, are no valley."""
    records, found = wsd_records(widths=[64]), fit.minima(wsd_records(widths=[64]))
    some = [r for r in records if r["seed"] < 2 or round(2 * math.log2(r["lr"] / min(q["lr"] for q in records))) % 3]
    kept = [m for m in fit.minima(some) if not m.why_not]
    assert [m for m in found if m.seed < 2] == [m for m in kept if m.seed < 2] and not any(m.seed == 2 for m in kept)
    assert fit.price(some, {})[0].keys() == fit.price(records, {})[0].keys()


# -- single minima ---------------------------------------------------------------------------------

VALLEY = [(x, 1 + (x - 0.3) ** 2) for x in range(-4, 5)]


@pytest.mark.parametrize("window", [3, 5, 7])
def test_a_parabola_is_found_exactly(window):
    assert fit.parabola(VALLEY, window) == (pytest.approx(0.3), "")


def test_only_the_window_counts():
    bent = [(x, y + (7 if abs(x) > 2 else 0)) for x, y in VALLEY]
    assert fit.parabola(bent, 5)[0] == pytest.approx(0.3) != fit.parabola(bent, 7)[0]


@pytest.mark.parametrize(
    "points, why",
    [
        (VALLEY[:3], "at an edge"), (VALLEY[4:], "at an edge"), (VALLEY[:1], "at an edge"), (VALLEY[3:6], "fewer than 5"),
        ([(x, math.inf if x == 1 else y) for x, y in VALLEY], "beside a diverged"), ([(x, math.inf if x == 2 else y) for x, y in VALLEY], "fewer than 5"),
        ([(2 * x if x > 0 else x, y) for x, y in VALLEY], "equal steps"), ([(x, math.inf if x == 3 else y) for x, y in VALLEY], ""),
        ([(x, math.inf) for x, _ in VALLEY], "at an edge"), ([(x, 0 if x == 0 else 1 - x * x / 99) for x, _ in VALLEY], ""),
    ],
)  # fmt: skip
def test_what_is_left_out(points, why):
    x, reason = fit.parabola(points)
    assert (why in reason if why else reason == "") and math.isfinite(x)
    if not why and len(points) == 9 and points[4][1] > 1:
        assert x == pytest.approx(0.3)


def test_diverged_runs_are_left_out_and_do_not_move_the_law():
    records = wsd_records()
    for r in records:  # width 128 with batch size 8 diverges right above its best rate
        if r["n_embd"] == 128 and r["batch_size"] == 8 and r["lr"] > 40 * (8 / 32) ** 0.6 * r["total_tokens"] ** -0.4:
            r |= dict(diverged=True, val_loss=None)
    found = fit.minima(records)
    assert {m.why_not for m in found if (m.shape, m.batch_size) == ("width 128", 8)} == {"beside a diverged run"} and sum(bool(m.why_not) for m in found) == 15
    assert abs(fit.joint_law(found).b[0] + 0.4) < 1e-6 and fit.reasons(found) == "15 beside a diverged run"


def test_a_shape_without_minima_is_left_out(tmp_path, capsys):
    """A sweep that is still running: nothing of the widest model can be used yet."""
    records = [r for r in wsd_records() if r["n_embd"] < 128 or r["lr"] <= 40 * (r["batch_size"] / 32) ** 0.6 * r["total_tokens"] ** -0.4]
    found = fit.minima(records)
    assert {m.why_not for m in found if m.shape == "width 128"} == {"at an edge"}
    joint = fit.joint_law(found)
    assert abs(joint.b[0] + 0.4) < 1e-6 and list(joint.a_of) == ["width 32", "width 64"]
    assert fit.main([str(write(records, tmp_path / "a"))]) == 0 and "width 128: " not in capsys.readouterr().out
    one_cell = [r for r in records if r["n_embd"] == 32 or (r["n_embd"], r["total_tokens"], r["batch_size"]) == (64, BUDGETS[0], 2)]
    one_row = [r for r in one_cell if r["n_embd"] == 64 or (r["total_tokens"] > BUDGETS[0]) == (r["batch_size"] == 4) and r["total_tokens"] <= BUDGETS[1]]
    with pytest.raises(ValueError, match="do not determine"):  # T and batch size change together
        fit.joint_law(fit.minima([r for r in one_row if r["batch_size"] in (2, 4)]))


# -- commands --------------------------------------------------------------------------------------


def test_wsd_report(figures, tmp_path, capsys):  # noqa: F811
    folder = write(wsd_records(noise=0.004, cells=0.08), tmp_path / "a")
    assert fit.main([str(folder)]) == 0
    out = capsys.readouterr().out
    law = json.loads((folder / "law.json").read_text())
    assert {"a", "b", "q", "a_interval", "b_interval", "q_interval", "a_paper", "b_paper", "rule", "warmup_tokens", "fingerprint"} <= set(law)
    assert law["b_interval"][0] < law["b"] < law["b_interval"][1] and law["warmup_tokens"] == 2500
    assert f"{law['b']:.3f} [{law['b_interval'][0]:.3f}, {law['b_interval'][1]:.3f}]" in out
    assert "-0.51 lies outside" in out and "0.5 lies outside" in out
    for figure in figures:
        check_layout(figure)
    assert {path.name for path in folder.glob("*.png")} == {"valleys.png", "batch.png", "gamma.png", "law.png", "price.png"}
    # the commands that it prints are ones that train.py understands, with the law's rate
    import train

    wsd, power = ([*line.split()[2:]] for line in out.splitlines() if line.startswith("python train.py"))
    cfg = train.make_config(**train.parse(wsd)[0])
    assert cfg.lr == pytest.approx(law["a"] * (cfg.batch_tokens / 4096) ** law["q"] * cfg.total_tokens ** law["b"], rel=0.01) and cfg.n_layer == 2
    assert train.make_config(**train.parse(power)[0]).power_b == pytest.approx(law["b_paper"], abs=0.01)


def test_power_report(figures, tmp_path, capsys):  # noqa: F811
    folder = write(power_records(), tmp_path / "a")
    assert fit.main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "best b" in out and "mean -0.500, standard deviation 0.000" in out and "mean 32.000" in out
    for figure in figures:
        check_layout(figure)
    assert {path.name for path in folder.iterdir()} == {"power.png", "best_b.png", "records.jsonl"}


def test_beyond_the_grid(figures, tmp_path, capsys):  # noqa: F811
    write(wsd_records(), tmp_path / "a")
    write(wsd_records(budgets=[6_400_000], batches=[4], widths=[64], seeds=1, shift=0.5), tmp_path / "b")  # there, the best rate is sqrt(2) times the law's
    assert fit.main(["a", "--beyond", "b"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("beyond the grid")]
    says, finds, at, best, cost = (float(number) for number in re.findall(r"says ([\d.]+), a search finds ([\d.]+); loss ([\d.]+) there, ([\d.]+) at its best, ([+\-\d.]+)%", line)[0])
    assert says == pytest.approx(40 * (4 / 32) ** 0.6 * 6.4e6**-0.4, rel=0.01) and finds / says == pytest.approx(2**0.5, rel=0.02)
    assert at - best == pytest.approx(0.03 * 0.25, abs=0.002) and cost == pytest.approx(100 * (at - best) / best, abs=0.01)
    check_layout(figures[3])
    (tmp_path / "b" / "records.jsonl").write_text(json.dumps(record(64, 4, 10**6, 0, 2.0, schedule="cosine")) + "\n")
    assert "--beyond b" in one_line(fit.main, ["a", "--beyond", "b"], capsys)
    write(transfer_records(), tmp_path / "c")  # also widths without muP, which the law was not made for
    assert "--beyond c" in one_line(fit.main, ["a", "--beyond", "c"], capsys)


def test_two_sweeps_against_each_other(tmp_path, capsys):
    one, other = wsd_records(noise=0.003, b=-0.5), [r | {"warmup_tokens": 50_000} for r in wsd_records(noise=0.003, b=-0.3, seed=1, widths=[32, 64])]
    assert fit.main([str(write(one, tmp_path / "a")), "--against", str(write(other, tmp_path / "b"))]) == 0
    out = capsys.readouterr().out
    assert "120 cells and seeds" in out and "2,500 against 50,000" in out
    Path("b/records.jsonl").write_text("".join(json.dumps(r | {"fingerprint": "9"}) + "\n" for r in other))
    assert "another corpus" in one_line(fit.main, ["a", "--against", "b"], capsys)
    difference, low, high = map(float, out.split("difference ")[1].split("\n")[0].replace("[", "").replace("]", "").replace(",", "").split())
    assert low < -0.2 < high and abs(difference + 0.2) < 0.03


@pytest.mark.parametrize("total_tokens, batch, says", [("10e12", "1024", "0.0011"), ("32e9", "128", "0.0026"), ("2e9", "128", "0.011")])
def test_predict(total_tokens, batch, says, tmp_path, capsys):
    argv = ["--predict", "--total_tokens", total_tokens, "--batch_size", batch]
    assert fit.main(argv) == 0
    assert capsys.readouterr().out == says + "\n"
    assert float(says) == pytest.approx(schedules.best_lr(float(total_tokens), float(batch)), rel=0.05)
    (tmp_path / "law.json").write_text(json.dumps({"a": 2 * 4.6, "b": -0.51, "q": 1.0, "seq_len": 2048}))
    assert fit.main([*argv, "--law", str(tmp_path / "law.json")]) == 0  # twice the a, half the beta
    assert capsys.readouterr().out == says + "\n"


def test_curves_of_any_runs(figures, tmp_path):  # noqa: F811
    for name, end in (("power-1", 1.2), ("wsd-1", 1.21), ("cosine-1", 1.5)):
        (tmp_path / name).mkdir()
        lines = [dict(tokens=i * 10**5, loss=end + 40 / (i + 9)) for i in range(1, 41)] + [dict(tokens=i * 10**6, val_loss=end + 3 / i) for i in range(1, 5)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert fit.main(["--curves", "power-1", "wsd-1", "cosine-1"]) == 0
    assert Path("curves.png").exists()
    check_layout(figures[0])


def test_runs_of_train_can_be_fitted_too():
    records = wsd_records(widths=[64], seeds=1)
    for i, r in enumerate(records):
        Path(f"runs/{i}").mkdir(parents=True)
        Path(f"runs/{i}/record.json").write_text(json.dumps(r, indent=1))
    assert sorted(fit.read_records([Path("runs")]), key=str) == sorted((r | {"standard": False} for r in records), key=str)


def test_torn_and_double_lines(tmp_path):
    records = wsd_records(widths=[64], seeds=1)
    folder = write(records, tmp_path / "a")
    text = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(text + text[:5000])
    assert len(fit.read_records([folder])) == len(records)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda r: r.update(fingerprint=str(r["batch_size"])), "different fingerprint (1, 2, 4, 8)"), (lambda r: r.update(warmup_tokens=r["seed"]), "different warmup_tokens"),
        (lambda r: r.update(n_layer=r["seed"]), "different n_layer"),
        (lambda r: r.update(schedule="power" if r["seed"] else "wsd"), "different schedules"), (lambda r: r.update(total_tokens=100_000), "one budget T only"),
        (lambda r: r.update(batch_size=4), "one batch size only"), (lambda r: r.update(val_loss=r["lr"]), "180 at an edge"), (lambda r: r.update(diverged=True, val_loss=None), "180 at an edge"),
    ],
)  # fmt: skip
def test_what_cannot_be_fitted_is_refused(change, says, tmp_path, capsys):
    records = wsd_records()
    for r in records:
        change(r)
    folder = write(records, tmp_path / "a")
    assert says in one_line(fit.main, [str(folder)], capsys)
    assert [path.name for path in folder.iterdir()] == ["records.jsonl"]


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "name the folder"), (["nowhere"], "nowhere"), (["--predict"], "--total_tokens"), (["--predict", "--total_tokens", "0", "--batch_size", "1"], "--total_tokens 0"),
        (["--predict", "--total_tokens", "x"], "--total_tokens"), (["--predict", "--total_tokens", "1e9", "--batch_size", "nan"], "--batch_size nan"),
        (["--predict", "--total_tokens", "1e9", "--batch_size", "8", "--law", "nowhere.json"], "nowhere.json"),
        (["--predict", "--total_tokens", "1e9", "--batch_size", "8", "--law", __file__], "--law"), (["--curves", "nowhere"], "--curves nowhere"),
        (["--against"], "--against"), (["--curvse", "x"], "--curvse"), (["--curves", "RUN", "--out", "/proc/no"], "/proc/no"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(argv, says, tmp_path, tmp_path_factory, capsys):
    run = tmp_path_factory.mktemp("run")
    (run / "metrics.jsonl").write_text('{"tokens": 1, "loss": 1, "val_loss": 1}\n')
    assert says in one_line(fit.main, [str(run) if word == "RUN" else word for word in argv], capsys)
    assert not list(tmp_path.iterdir())


def test_it_starts_quickly_and_without_torch():
    code = "import sys, time; t = time.perf_counter(); import fit; fit.main(['--predict', '--total_tokens', '1e9', '--batch_size', '8']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
