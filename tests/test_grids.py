"""Every grid, fed with losses from a formula, gives the formula's law back; no training."""

import json
import math
from pathlib import Path

import pytest

import fit
import sweep
from schedules import paper_batch_size
from tools import compare, figures

SCALES = tuple(sweep.GRIDS["wsd"])


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch):
    for name in vars(figures):
        if name.startswith("draw_"):
            monkeypatch.setattr(figures, name, lambda *_, **__: None)


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
            found |= {f"val_loss_at_{T}": 3.0 for T in grid["budgets"]}
            records.append(vars(cfg) | found)
            known |= sweep.losses_of(records[-1:])
    assert sweep.left(series, grid, known) == []
    Path(experiment).mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (Path(experiment) / "records.jsonl").write_text(lines)
    return fit.read_records([Path(experiment)])


@pytest.mark.parametrize("scale", SCALES)
def test_wsd_gives_the_law_back(scale):
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
def test_power_gives_the_best_a_and_b_back(scale):
    grid = sweep.GRIDS["power"][scale]
    shape, batches, seeds = grid["rows"][0]
    center = sweep.make_config(**grid["common"] | shape, total_tokens=grid["budgets"][-1])
    a, b = center.power_a * 1.1, center.power_b + 0.013
    distance = lambda cfg: 0.1 * math.log2(cfg.power_a / a) ** 2 + 4 * (cfg.power_b - b) ** 2
    records = made_up("power", scale, lambda cfg: 2 + distance(cfg))
    assert fit.main(["power"]) == 0
    for name, fixed, of, best in (
        ("a", "power_b", lambda r: math.log2(r["power_a"]), math.log2(a)),
        ("b", "power_a", lambda r: r["power_b"], b),
    ):
        scan = [r for r in records if r[fixed] == getattr(center, fixed)]
        found = fit.parabolas(scan, of=of)
        assert len(found) == len(batches) * len(grid["budgets"]) * seeds
        assert [m.why_not for m in found] == [""] * len(found), name
        assert [m.x for m in found] == pytest.approx([best] * len(found), abs=1e-3)


@pytest.mark.parametrize("scale", SCALES)
def test_transfer_gives_the_effect_of_width_back(scale):
    """Under muP the best learning rate stays; without it, it is made to fall as 1 / width."""
    standard = lambda cfg: not math.isclose(cfg.attention_multiplier, 1 / cfg.d_head)
    factor = lambda cfg: 64 / cfg.n_embd if standard(cfg) else 1.0
    loss = lambda cfg: 2 + 0.03 * (off(cfg, scale) - math.log2(factor(cfg))) ** 2
    records = made_up("transfer", scale, loss)
    assert fit.main(["transfer"]) == 0
    for is_standard in (False, True):
        some = [r for r in records if r["standard"] == is_standard]
        for n in {r["n_embd"] for r in some}:
            found = fit.parabolas([r for r in some if r["n_embd"] == n])
            assert not any(m.why_not for m in found)
            cfg = sweep.config_of(next(r for r in some if r["n_embd"] == n))
            best = math.log2(best_lr(cfg, scale) * factor(cfg))
            assert [m.x for m in found] == pytest.approx([best] * len(found), abs=1e-3)


@pytest.mark.parametrize("scale", SCALES)
def test_compare_gives_tuning_and_baseline_back(scale, capsys):
    def loss(cfg) -> float:
        if cfg.schedule == "power":  # all lengths and batch sizes like the same a
            return 2.01 + 0.03 * (math.log2(cfg.power_a) - 4) ** 2
        return 2 + 0.03 * off(cfg, scale) ** 2 + 0.02 * (cfg.schedule == "cosine")

    records = made_up("compare", scale, loss)
    assert fit.main(["compare"]) == 0
    wsd = [r for r in records if r["schedule"] == "wsd" and r["seed"] == 0]
    assert not any(m.why_not for m in fit.minima(wsd))
    cfg = next(sweep.config_of(r) for r in records if r["seed"] == 100 and r["schedule"] == "wsd")
    near = min(map(sweep.rate, range(30)), key=lambda lr: abs(math.log2(lr / best_lr(cfg, scale))))
    said = capsys.readouterr().out
    assert f"wsd: lr {near:g}" in said and "power: power_a 16" in said
    cells = {(r["n_embd"], r["n_expert"], r["batch_size"], r["total_tokens"]) for r in wsd}
    lines, _ = compare.comparison(records)  # all lines, with the runs of all cells
    assert {len(by_cell) for by_cell in lines.values()} == {len(cells)}
    assert len(lines) == (12 if "our_b" in sweep.GRIDS["compare"][scale] else 10)
    for cell in cells:  # the baseline of every seed: the best learning rate tried
        of_cell = [r for r in records if r["schedule"] == "wsd" and cell == (
            r["n_embd"], r["n_expert"], r["batch_size"], r["total_tokens"])]  # fmt: skip
        by_seed = {s: min(r["val_loss"] for r in of_cell if r["seed"] == s) for s in range(3)
                   if any(r["seed"] == s for r in of_cell)}  # fmt: skip
        assert max(by_seed.values()) == min(by_seed.values()) <= 2 + 0.03 * 0.26**2
