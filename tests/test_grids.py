"""Every grid, fed with losses from a formula, gives the formula's law back; no training."""

import math
from pathlib import Path

import pytest
from test_figures import figures  # noqa: F401  (checks the layout of all figures)
from test_fit import refused, write

import fit
import sweep
from schedules import paper_batch_size
from tools import compare
from tools import figures as drawing

SCALES = tuple(sweep.GRIDS["wsd"])


@pytest.fixture
def drawn(scale, request, monkeypatch):
    """Draw the figures of one scale, and check their layout. The others would take minutes."""
    if scale == "laptop":
        request.getfixturevalue("figures")
    for name in vars(drawing) if scale != "laptop" else ():
        if name.startswith("draw_"):
            monkeypatch.setattr(drawing, name, lambda *_, **__: None)


def best_lr(cfg, scale: str) -> float:
    """The paper's law for its own grid, another one for ours."""
    beta = paper_batch_size(cfg.batch_tokens)
    a, b, q = (4.6, -0.51, 1.0) if scale == "paper" else (1.1, -0.3, 0.6)
    return a * beta**q * cfg.total_tokens**b


def off(cfg, scale: str) -> float:
    """log2 of the learning rate over the best one."""
    return math.log2(cfg.lr / best_lr(cfg, scale))


def made_up(experiment: str, scale: str, loss) -> list[dict]:
    """Records of the whole experiment in a folder of that name, as sweep.py would leave them."""
    grid = sweep.GRIDS[experiment][scale]
    series = sweep.series_of(experiment, grid)
    known, records = {}, []
    while missing := sweep.missing(series, known):
        for cfg in missing:
            found = {"val_loss": loss(cfg), "diverged": False, "fingerprint": "0", "tokens": 1}
            found |= {"average_val_loss": found["val_loss"] - 0.01} if cfg.average else {}
            if cfg.total_tokens == grid["budgets"][-1]:
                found |= {f"val_loss_at_{T}": 3.0 for T in grid["budgets"]}
            records.append(vars(cfg) | found)
            known |= sweep.losses_of(records[-1:])
    assert sweep.left(series, grid, known) == []
    return fit.read_records([write(records, Path(experiment))])


@pytest.mark.parametrize("scale", SCALES)
def test_wsd_gives_the_law_back(scale, monkeypatch):
    monkeypatch.setattr(fit, "DRAWS", 10)
    loss = lambda cfg: 2 + 0.03 * off(cfg, scale) ** 2 + 1 / math.log(cfg.total_tokens)
    records = made_up("wsd", scale, loss)
    assert not any(m.why_not for m in fit.minima(records))
    law = fit.law(records)
    b, q = (-0.51, 1.0) if scale == "paper" else (-0.3, 0.6)
    assert law["b"] == pytest.approx(b, abs=1e-3) and law["q"] == pytest.approx(q, abs=1e-3)
    cfg = sweep.config_of(records[0])
    lr = fit.predict(law, cfg.total_tokens, cfg.batch_tokens)
    assert lr == pytest.approx(best_lr(cfg, scale), rel=0.01)


@pytest.mark.parametrize("scale", SCALES)
def test_power_gives_the_best_a_and_b_back(scale, drawn, capsys):
    grid = sweep.GRIDS["power"][scale]
    shape, batches, seeds = grid["rows"][0]
    center = sweep.make_config(**grid["common"] | shape, total_tokens=grid["budgets"][-1])
    a, b = center.power_a * 1.1, center.power_b + 0.013
    distance = lambda cfg: 0.1 * math.log2(cfg.power_a / a) ** 2 + 4 * (cfg.power_b - b) ** 2
    records = made_up("power", scale, lambda cfg: 2 + distance(cfg))
    assert fit.main(["power"]) == 0
    said = capsys.readouterr().out
    assert f"mean {a:.3f}, standard" in said and f"mean {b:.3f}, standard deviation 0.000" in said
    found, _ = fit.scans(records)
    for name, best in (("a", math.log2(a)), ("b", b)):
        assert len(found[name]) == len(batches) * len(grid["budgets"]) * seeds
        assert [m.why_not for m in found[name]] == [""] * len(found[name]), name
        assert [m.x for m in found[name]] == pytest.approx([best] * len(found[name]), abs=1e-3)


@pytest.mark.parametrize("scale", SCALES)
def test_transfer_gives_the_effect_of_width_back(scale, drawn, capsys):
    """Under muP the best learning rate stays; without it, it is made to fall as 1 / width."""
    standard = lambda cfg: not math.isclose(cfg.attention_multiplier, 1 / cfg.d_head)
    factor = lambda cfg: 64 / cfg.n_embd if standard(cfg) else 1.0
    loss = lambda cfg: 2 + 0.03 * (off(cfg, scale) - math.log2(factor(cfg))) ** 2
    records = made_up("transfer", scale, loss)
    assert fit.main(["transfer"]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for shape in {r["shape"] for r in records}:
        some = [r for r in records if r["shape"] == shape]
        found, cfg = fit.parabolas(some), sweep.config_of(some[0])
        best = best_lr(cfg, scale) * factor(cfg)
        assert not any(m.why_not for m in found)
        assert [2**m.x for m in found] == pytest.approx([best] * len(found), rel=1e-3)
        name = "standard" if some[0]["standard"] else "muP"
        assert f"{name} {cfg.n_embd} " + ", ".join(f"{2**m.x:.4f}" for m in found) in said


def compare_loss(cfg, scale: str) -> float:
    """Each seed adds 0.01. Power is best at a = 16, with a fitted b at a = 1."""
    seed = 2 + 0.01 * (cfg.seed % 10)
    if cfg.schedule == "power":
        best, more = (16, 0.004) if cfg.power_b == compare.PAPER_B else (1, 0.001)
        return seed + more + 0.03 * math.log2(cfg.power_a / best) ** 2
    return seed + 0.03 * off(cfg, scale) ** 2 + 0.02 * (cfg.schedule == "cosine")


@pytest.mark.parametrize("scale", SCALES)
def test_compare_gives_tuning_lines_and_baseline_back(scale, drawn, capsys):
    records = made_up("compare", scale, lambda cfg: compare_loss(cfg, scale))
    assert fit.main(["compare"]) == 0
    wsd = [r for r in records if r["schedule"] == "wsd" and r["seed"] == 0]
    assert not any(m.why_not for m in fit.minima(wsd))
    trial = next(r for r in records if r["seed"] == 100 and r["schedule"] == "wsd")
    best = {compare.cell_of(r): best_lr(sweep.config_of(r), scale) for r in [*wsd, trial]}
    off_by = lambda lr, cell: math.log2(lr / best[cell])
    near = lambda cell: min(map(sweep.rate, range(30)), key=lambda lr: abs(off_by(lr, cell)))
    tuned = near(compare.cell_of(trial))
    said = capsys.readouterr().out
    assert f"wsd: lr {tuned:g}" in said and "power: power_a 16, best of 13\n" in said
    seeds = range(1 if scale == "quick" else 3)
    one_seed, three_seeds = "| Power (paper) | 2.004 ± nan |", "| Power (paper) | 2.014 ± 0.010 |"
    assert (one_seed if scale == "quick" else three_seeds) in said
    experts = {cell for cell in best if "experts" in cell[0]}
    assert (f"| MoE, {len(experts)} cells |" in said) == bool(experts)
    lines, _ = compare.comparison(records)  # all lines, with all seeds of all cells
    assert len(lines) == (12 if "our_b" in sweep.GRIDS["compare"][scale] else 10)
    assert {*lines["baseline"]} == {compare.cell_of(r) for r in wsd}
    for cell, seed in [(cell, seed) for cell in lines["baseline"] for seed in seeds]:
        more = math.log2(cell[2] / trial["batch_size"])  # log2 of how often the tuned batch size
        expected = {
            "Power (paper)": 0.004, "Power (paper), averaged": -0.006,
            "Power (paper), learning rate ∝ √batch": 0.004 + 0.03 * (more / 2) ** 2,
            "Power (fitted)": 0.001 + 0.03 * (more / 2) ** 2,
            "Power (fitted), averaged": -0.009 + 0.03 * (more / 2) ** 2,
            "baseline": 0.03 * off_by(near(cell), cell) ** 2,
        }  # fmt: skip
        for p, rule in (0, ""), (0.5, ", learning rate ∝ √batch"), (1, ", learning rate ∝ batch"):
            expected["WSD" + rule] = 0.03 * (off_by(tuned, cell) + p * more) ** 2
            expected["cosine" + rule] = expected["WSD" + rule] + 0.02
        found = {line: lines[line][cell][seed] - 2 - 0.01 * seed for line in lines}
        assert found == pytest.approx({line: expected[line] for line in lines}, abs=1e-3)


def test_an_unfinished_comparison_shows_its_whole_cells_or_says_so(capsys):
    records = made_up("compare", "quick", lambda cfg: compare_loss(cfg, "quick"))
    last = [r for r in records if (r["schedule"], r["total_tokens"]) == ("cosine", 320_000)]
    folder = write([r for r in records if r not in last], Path("a"))
    assert fit.main([str(folder)]) == 0 and "320k" not in capsys.readouterr().out
    assert [path.name for path in folder.glob("*.png")] == ["compare.png"]
    some = [r for r in records if (r["schedule"], r["seed"]) != ("cosine", 0)]
    assert "still running" in refused([write(some, Path("b"))], capsys)
    folder = write([r for r in records if r["seed"] < 100], Path("c"))
    assert "no runs tuned power" in refused([folder], capsys)
