"""Our records, and the two programs that print and draw them."""

import json
import re

import numpy as np
import pytest

import config
import figures
import fit
import presets
import schedules
import tables

RESEARCH = tables.ROOT / "research"
FOLDERS = [file.parent for file in sorted(RESEARCH.glob("results/**/records.jsonl"))]
NUMBER = re.compile(r"-?\d+\.\d+")


def check_same(text: str, other: str) -> None:
    """The same words, and numbers that differ by at most one in their last digit."""
    assert NUMBER.sub("#", text) == NUMBER.sub("#", other)
    for one, two in zip(NUMBER.findall(text), NUMBER.findall(other)):
        last_digit = 10.0 ** -len(one.partition(".")[2])
        assert abs(float(one) - float(two)) < 1.5 * last_digit, (one, two)


def test_the_page_of_tables_is_what_the_records_give():
    check_same((RESEARCH / "TABLES.md").read_text(), tables.page() + "\n")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_fit_reads_every_folder(folder):
    rows = fit.read_sweep(folder)
    shared = json.loads((folder / "settings.json").read_text())
    assert shared["origin"].keys() >= {"torch"}
    assert {fit.cell_of(row).T for row in rows} == {row["total_tokens"] for row in rows}
    assert all(row["loss"] > 1 for row in rows)  # infinite if it diverged


def test_the_readme_counts_the_runs():
    lines = (RESEARCH / "README.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    named = []
    for row in rows:
        _, names, count, *_ = row.split("|")
        folders = [RESEARCH / "results" / name for name in re.findall("`(.+?)`", names)]
        named += folders
        files = [file for folder in folders for file in folder.rglob("records.jsonl")]
        n = sum(len(file.read_text().splitlines()) for file in files)
        assert n == int(count.replace(",", "")), names
    folders = {path for path in (RESEARCH / "results").iterdir() if path.is_dir()}
    assert set(named) == folders


def test_a_difference_of_schedules_is_that_of_a_dumb_loop():
    losses = {"Power (fitted)": {}, "WSD": {}}
    records = (tables.RESULTS / "compare-laptop/records.jsonl").read_text()
    for line in records.splitlines():
        record = json.loads(line)
        config = record["config"]
        if config.get("line") in losses:
            names = ("n_embd", "batch_size", "total_tokens", "seed")
            run = tuple(config[name] for name in names)
            losses[config["line"]][run] = record["results"]["val_loss"]
    power, wsd = losses.values()
    assert power.keys() == wsd.keys() and len(power) == 4 * 5 * 5  # pairs, T, seeds
    mean = np.mean([power[run] - wsd[run] for run in power])
    shown = tables.difference("Power (fitted)", "WSD", "dense")
    check_same(shown.partition(" ")[0], f"{mean:.3f}")


def test_no_searched_run_chooses_its_own_learning_rate(monkeypatch):
    # the seeds have their minima at 1, 2 and 3, but the others choose 2, 1 and 1 for them
    losses = {1: [0.0, 5.0, 6.0], 2: [5.5, 0.0, 4.0], 3: [6.5, 4.5, 0.0]}
    rows = []
    for lr, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds):
            row = dict(line="WSD", weight_decay=0.1, total_tokens=7, lr=lr, seed=seed)
            rows.append(row | {"val_loss": loss})
    rows.append(
        rows[0] | {"lr": 4, "val_loss": -1.0}
    )  # which the other seeds did not try
    monkeypatch.setattr(tables, "rows_in", lambda folder: rows)
    assert tables.losses_at("WSD", 0.1, 7).tolist() == [5.5, 5.0, 6.0]


def test_an_interval_over_seeds_is_students():
    values = np.array([1.0, 2.0, 6.0])
    half = 4.303 * values.std(ddof=1) / 3**0.5
    assert tables.over_seeds(values) == pytest.approx([3, 3 - half, 3 + half], rel=1e-3)


def test_peaks_and_the_law_of_the_presets_are_those_of_the_committed_sweeps():
    fitted = tables.fitted_peaks()
    assert fitted.keys() == schedules.PEAKS.keys()
    for row, values in fitted.items():
        assert schedules.PEAKS[row] == pytest.approx(values, abs=0.0051), row
    _, b, q = tables.laptop_law()
    law = config.LAPTOP_LAW
    found = tables.laptop_a(), b, q  # its a is of the preset itself
    assert (law.a, law.b, law.q) == pytest.approx(found, rel=2e-3)


@pytest.mark.parametrize("draw", [figures.draw_anytime, figures.draw_longer])
def test_figures_are_drawn(draw, tmp_path):
    draw(tmp_path / "a.png")


def test_the_check_of_the_presets_has_the_runs_of_train(capsys):
    for T, seeds in presets.SEEDS.items():
        for schedule in presets.SCHEDULES:
            cell = schedule, T, 2
            of_law, *searched = presets.peaks_of(cell)
            at = dict(schedule=schedule, total_tokens=T, batch_size=2)
            for seed, cfg in zip(seeds, presets.runs_at(cell, of_law), strict=True):
                assert cfg == config.make_config(**at, seed=seed, data_seed=seed)
            assert max(searched) / min(searched) == pytest.approx(4, rel=2e-3)
    argv = ["--dry_run", "--tokens=400k", "--batches=8"]
    assert presets.main(argv) == 0
    assert "54 runs with 21,600,000 tokens" in capsys.readouterr().out


def test_a_row_of_the_presets_is_above_its_lowest():
    cell = "linear", 400_000, 8
    of_law, *searched = presets.peaks_of(cell)
    valley = {lr: 2.5 for lr in searched} | {of_law: 2.25}
    name = f"{of_law:g}"
    row = presets.row_of(cell, valley)
    assert row == ["linear", "400k", "8", name, name, "2.2500", "0.0000"]
    valley[max(searched)] = 2.0
    row = presets.row_of(cell, valley)
    assert row[4:] == [f"{max(searched):g} (edge)", "2.2500", "0.2500"]
