"""Every grid, fed with losses from a formula, gives the formula's law back; no training."""

import json
import math
from pathlib import Path

import pytest
from test_figures import figures  # noqa: F401  (checks the layout of all figures)
from test_fit import refused, write

import fit
import report
import sweep
from config import FIELDS, TrainConfig
from schedules import paper_batch_size
import compare
from tools import figures as drawing
from records import STANDARD, cell_of, read_rows

SCALES = tuple(sweep.grids.GRIDS["wsd"])


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
    grid = sweep.grids.GRIDS[experiment][scale]
    plan = sweep.Plan(grid, sweep.series_of(experiment, grid), {})
    records = []
    while missing := plan.missing():
        for cfg in missing:
            found = {"loss": loss(cfg), "diverged": False, "tokens": 1}
            found["val_loss"] = found["loss"]
            if cfg.average:  # without it, another learning rate would be the best
                found["loss"] = found["average_val_loss"] = found["loss"] - 0.01
                found["val_loss"] = 2 + cfg.lr
            origin = {"fingerprint": "0"}
            records.append({"config": vars(cfg), "results": found, "origin": origin})
            plan.learn(records[-1])
    assert plan.left() == []
    folder = Path(experiment)
    folder.mkdir()
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    return read_rows([folder])


def config_of(row: dict) -> TrainConfig:
    return TrainConfig(**{name: row[name] for name in FIELDS})


@pytest.mark.parametrize("scale", SCALES)
def test_wsd_gives_the_law_back(scale, monkeypatch):
    loss = lambda cfg: 2 + 0.03 * off(cfg, scale) ** 2 + 1 / math.log(cfg.total_tokens)
    records = made_up("wsd", scale, loss)
    assert fit.reasons(fit.cells_of(records)) == ""
    law = fit.law_of(records)
    b, q = (-0.51, 1.0) if scale == "paper" else (-0.3, 0.6)
    assert law["b"] == pytest.approx(b, abs=1e-3) and law["q"] == pytest.approx(
        q, abs=1e-3
    )
    cfg = config_of(records[0])
    lr = fit.predict(law, cfg.total_tokens, cfg.batch_tokens)
    assert lr == pytest.approx(best_lr(cfg, scale), rel=0.01)


@pytest.mark.parametrize("scale", SCALES)
def test_power_gives_the_best_a_and_b_back(scale, drawn, capsys):
    grid = sweep.grids.GRIDS["power"][scale]
    shape, batches, seeds = grid["rows"][0]
    center = sweep.make_config(**grid["common"] | shape, total_tokens=grid["budgets"][-1])
    a, b = center.power_a * 1.1, center.power_b + 0.013
    distance = lambda cfg: (
        0.1 * math.log2(cfg.power_a / a) ** 2 + 4 * (cfg.power_b - b) ** 2
    )
    records = made_up("power", scale, lambda cfg: 2 + distance(cfg))
    assert fit.main(["power"]) == 0
    said = capsys.readouterr().out
    assert (
        f"mean {a:.3f}, standard" in said
        and f"mean {b:.3f}, standard deviation 0.000" in said
    )
    cells, _ = report.scans(records)
    for name, best in (("a", math.log2(a)), ("b", b)):
        found = [x for _, x in fit.minima(cells[name])]
        number = len(batches) * len(grid["budgets"]) * seeds
        assert found == pytest.approx([best] * number, abs=1e-3)


@pytest.mark.parametrize("scale", SCALES)
def test_transfer_gives_the_effect_of_width_back(scale, drawn, capsys):
    """Under muP the best learning rate stays; without it, it is made to fall as 1 / width."""
    standard = lambda cfg: not math.isclose(cfg.attention_multiplier, 1 / cfg.d_head)
    factor = lambda cfg: 64 / cfg.n_embd if standard(cfg) else 1.0
    loss = lambda cfg: 2 + 0.03 * (off(cfg, scale) - math.log2(factor(cfg))) ** 2
    records = made_up("transfer", scale, loss)
    assert fit.main(["transfer"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    after = lambda label: float(said.partition(f" {label} ")[2].split()[0])
    for shape in {r["shape"] for r in records}:
        some = [r for r in records if r["shape"] == shape]
        ((_, x),), cfg = fit.minima(fit.cells_of(some)), config_of(some[0])
        assert 2**x == pytest.approx(best_lr(cfg, scale) * factor(cfg), 1e-3)
        name = "Without μP" if STANDARD in some[0]["shape"] else "With μP"
        assert after(f"{name} width {cfg.n_embd}") == pytest.approx(2**x, abs=6e-5)
    low, *_, high = sorted({r["n_embd"] for r in records})
    for name, ratio in (("With μP", 1.0), ("Without μP", low / high)):
        assert after(f"{name} width {high} / width {low}:") == pytest.approx(
            ratio, abs=0.006
        )
    with pytest.raises(ValueError, match="several T"):
        two = [*records, records[0] | {"batch_size": 99}]
        report.report(two, Path("transfer"), {})


# of a schedule or a decay shape
EXTRA = {
    "cosine": 0.002,
    "linear": 0.003,
    "power": 0.001,
}


def compare_loss(cfg, scale: str) -> float:
    """Every seed adds 0.01. Power's learning rate is that at its end."""
    lr = cfg.lr
    if cfg.schedule == "power":
        lr = (
            cfg.power_a
            * paper_batch_size(cfg.batch_tokens) ** cfg.power_q
            * cfg.total_tokens**cfg.power_b
        )
    extra = (
        EXTRA.get(cfg.schedule, 0)
        + EXTRA.get(cfg.decay_shape, 0)
        + 0.005 * cfg.min_lr_ratio
    )
    distance = math.log2(lr / best_lr(cfg, scale))
    return 2 + 0.01 * (cfg.seed % 50) + extra + 0.03 * distance**2


def expected_loss(
    line: compare.Line, cell: tuple, tune: tuple, rates: list, scale: str
) -> tuple:
    """Loss and tuned learning rate of a line, from its exponents alone."""
    a, b, q = (4.6, -0.51, 1.0) if scale == "paper" else (1.1, -0.3, 0.6)
    (batch_size, first, second, seq_len), (_, T, B) = tune, cell
    wrong = lambda lr, B, T: math.log2(  # distance of the line from the best learning rate
        lr * (B / batch_size) ** line.q * (T / first) ** line.b
        / (a * paper_batch_size(B * seq_len) ** q * T**b))  # fmt: skip
    lr = min(
        rates, key=lambda lr: sum(wrong(lr, batch_size, T) ** 2 for T in (first, second))
    )
    extra = EXTRA.get(line.fields["schedule"], 0) + EXTRA.get(
        line.fields["decay_shape"], 0
    )
    extra += 0.005 * line.fields["min_lr_ratio"] - 0.01 * line.fields["average"]
    return lr, 2 + extra + 0.03 * wrong(lr, B, T) ** 2


@pytest.mark.parametrize("scale", SCALES)
def test_compare_gives_tuning_and_lines_back(scale, drawn, capsys):
    records = made_up("compare", scale, lambda cfg: compare_loss(cfg, scale))
    assert fit.main(["compare"]) == 0
    grid = sweep.grids.GRIDS["compare"][scale]
    seeds = range(grid["rows"][0][2])
    other = next(r for r in records if r["seed"] >= 100 and r["schedule"] == "wsd")
    of_a_search = other | dict(seed=0, lr=1e-6)
    runs = compare.index_runs([*records, of_a_search])
    lines, best = compare.losses_of_lines(runs)
    cells = {cell_of(r) for r in records if r["seed"] < compare.TUNING}
    _, batch_size, lengths = grid["tune"]
    tune = batch_size, *lengths, records[0]["seq_len"]
    rates = list(map(sweep.nth_lr, grid["trials"]))
    for name, line in compare.LINES.items():
        assert lines[name].keys() == cells
        for cell in cells:
            lr, loss = expected_loss(line, cell, tune, rates, scale)
            found = [x - 0.01 * seed for seed, x in lines[name][cell].items()]
            assert found == pytest.approx([loss] * len(seeds), abs=1e-3)
            assert list(best[name].values()) == [lr] * len(seeds)
    said = capsys.readouterr().out
    assert ("| MoE, " in said) == any("experts" in cell[0] for cell in cells)
    assert sum(said.count(f"] {word} |") for word in ("level", "better", "worse")) > 5


def test_an_unfinished_comparison_shows_its_whole_cells_or_says_so(capsys):
    records = made_up("compare", "quick", lambda cfg: compare_loss(cfg, "quick"))
    last = [
        r for r in records if (r["schedule"], r["total_tokens"]) == ("cosine", 160_000)
    ]
    folder = write([r for r in records if r not in last], Path("a"))
    assert (
        fit.main([str(folder)]) == 0 and "| dense, 12 cells |" in capsys.readouterr().out
    )
    some = [r for r in records if (r["schedule"], r["seed"]) != ("cosine", 0)]
    # without the lines that have no cell
    assert fit.main([str(write(some, Path("b")))]) == 0
    assert "not in all of these cells: cosine, cosine ∝ √batch" in capsys.readouterr().out
    # a few lines, as if nobody had run the others
    few = write([r for r in records if r["schedule"] != "cosine"], Path("few"))
    (few / "sweep.json").write_text('{"experiment": "compare"}')
    assert fit.main([str(few)]) == 0
    said = capsys.readouterr().out
    assert "without runs: cosine, cosine ∝ √batch" in said and "| Power (paper) |" in said
    folder = write([r for r in records if r["seed"] < 100], Path("c"))
    assert "no runs tuned" in refused([folder], capsys)
