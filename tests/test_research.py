"""Our records, and the programs that make tables of them."""

import math
import re

import numpy as np
import pytest

import config
import paper
import race
import schedules
import sweep
import tables
from tools import rows

NUMBER = re.compile(r"-?\d+\.\d+")


def test_the_committed_tables_have_the_numbers_of_the_records():
    committed = tables.PAGE.read_text()
    computed = tables.filled(committed)
    assert NUMBER.sub("#", committed) == NUMBER.sub("#", computed)
    for one, two in zip(NUMBER.findall(committed), NUMBER.findall(computed)):
        last_digit = 10.0 ** -len(one.partition(".")[2])
        assert abs(float(one) - float(two)) < 1.5 * last_digit, (one, two)


# -- The race ----------------------------------------------------------------------------


def made_up_loss(cell: str, runner: tables.Runner, times: int) -> float:
    """Power falls by 0.1 with every doubling. Held is above it by more in longer runs.
    A longer warmup helps Power."""
    above = {
        "held": 0.01 * math.log2(times) - 0.01,
        "half": 0.05 - 0.0125 * math.log2(times),
        "power": 0.0,
        "line": 0.02 if cell == "tables" else -0.02,
    }
    shares = {0.15: 0.0, 0.3: 0.0, 0.5: 0.02 - 0.01 * math.log2(times), 1.0: 0.0}
    loss = 3 - 0.1 * math.log2(times) + above[runner.name] + shares[runner.share]
    if runner.warmup == race.LONG_WARMUP:
        loss += -0.02 if runner.name == "power" else 0.02
    return loss


@pytest.fixture
def lines(monkeypatch) -> list[dict]:
    """The long runs of a race with four replicates."""
    monkeypatch.setattr(race.data, "with_corpus", lambda cfg, fixed: cfg)
    lines = []
    for lengths, warmup in ((race.TIMES, 32), ((4, 16), 98), ((64,), 32)):
        for cell in tables.LONG_CELLS if 64 in lengths else race.CELLS:
            numbers = {"held": 0.02, "power": 0.01}
            for line, _ in race.long_runs(cell, 0, numbers, lengths, warmup):
                runner = tables.Runner(line["runner"], line["share"], warmup)
                for replicate, noise in enumerate((-0.3, 0.1, 0.4, -0.2)):
                    loss = made_up_loss(cell, runner, line["times"]) + noise
                    lines.append(line | dict(replicate=replicate, loss=loss))
    monkeypatch.setattr(tables, "race_lines", lambda: lines)
    return lines


def test_a_race_with_known_answers(lines):
    losses = tables.first_arm()
    held = tables.Runner("held", 0.3)
    half_50 = tables.Runner("half", 0.5)

    # (a) at 16 T0, 50% is 0.02 below 30%, and half meets Power
    assert tables.gap(losses, held, 16) == pytest.approx([0.03] * 7)
    assert tables.gap(losses, half_50, 16) == pytest.approx([-0.02] * 7)

    # (b) the line is lowest, but not in the fifth cell. Power is as high at 4 as at 16 T0
    worst = tables.worst_regrets(losses, tables.SEVEN, (4, 16))
    assert worst[tables.LINE] == pytest.approx([0, 0, 0, 0, 0.04, 0, 0])
    assert worst[tables.POWER] == pytest.approx([0.02] * 7)
    assert worst[held] == pytest.approx([0.05] * 7)
    assert worst[half_50] == pytest.approx([0.045] * 4 + [0.025] + [0.045] * 2)

    # (c) and (d): at 0.1 a doubling, a loss of 0.03 needs 2^0.3 times the tokens
    for times, effect in ((1, 0.02), (4, 0.0), (16, -0.02)):
        effects = tables.share_effects(losses, times)
        assert effects["mean"] == pytest.approx([effect] * 7), times
    percents = tables.percent_longer(losses, held)
    assert percents == pytest.approx([100 * (2**0.3 - 1)] * 7)


def test_both_arms_together(lines):
    """Power with the long warmup is as low as the line at 4 T0, and lowest at 16."""
    losses = tables.both_arms()
    late = tables.Runner("power", 0.5, race.LONG_WARMUP)
    worst = tables.worst_regrets(losses, tables.FOURTEEN, (4, 16))
    assert worst[late] == pytest.approx([0] * 7)
    assert worst[tables.POWER] == pytest.approx([0.04] * 7)
    rows = {name: cells for name, *cells in tables.race_warmup()}
    assert rows["held, 30%"][-1] == "0.020 [0.020, 0.020], decided"


def test_the_worst_of_three_lengths_in_the_long_cells(lines):
    rows = {name: cells for name, *cells in tables.race_long()}
    assert rows["held, 30%"] == 2 * ["0.050 [0.050, 0.050]"] + 2 * ["0.115"]
    assert rows["half, 30%"][-1] == "0.045"  # at 4 T0


def test_a_replicate_counts_only_if_all_its_cells_are_finished(lines):
    lines.remove(next(line for line in lines if line["times"] == 16))
    assert tables.first_arm()[tables.POWER, 16].shape == (7, 3)


def test_the_pilots_of_the_committed_race_lead_to_its_runs(monkeypatch):
    """race.py asks for the committed runs, if it gets their losses without training."""

    def key_of(line: dict) -> tuple:
        # the learning rate of a long run follows from its pilot
        ignored = {"loss", "lr"} if "times" in line else {"loss"}
        return tuple((x, line[x]) for x in sorted(line.keys() - ignored))

    def train(runs, folder):
        lines = []
        for line, cfg in runs:
            lines.append(committed[key_of(line)])
            lr = lines[-1]["lr"]
            if line.get("runner") == "power":  # lr is for n = T0
                lr *= line["times"] ** -0.3
            assert sweep.tuned_lr(vars(cfg)) == pytest.approx(lr, rel=1e-4)
        return lines

    committed = {key_of(line): line for line in tables.race_lines()}
    monkeypatch.setattr(race.data, "with_corpus", lambda cfg, fixed: cfg)
    monkeypatch.setattr(race, "train", train)
    for name in race.CELLS:
        for replicate in (0, 1):  # the others lack 64 T0
            lines = race.run_replicate(name, replicate, None)
            places = [(x["cell"], x["replicate"]) for x in committed.values()]
            assert len(lines) == places.count((name, replicate))


@pytest.mark.parametrize(
    "values, word",
    [
        ([0.004, 0.005, 0.006], "tie"),  # although 0 is outside
        ([0.02, 0.021, 0.022], "decided"),
        ([-0.02, -0.021, -0.022], "decided"),
        ([0.012, -0.011, 0.002], "undecided"),
    ],
)
def test_a_verdict_follows_the_rule(values, word):
    assert tables.verdict(np.array(values)) == word


# -- The paper, and the decay ------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch):
    """Runs get their losses from a made-up law, with another minimum at every width
    without muP: lr = 0.01 (T / 80k)^-0.3 (batch / 2)^0.5.
    """

    def row_of(cfg, folder):
        x = math.log2(sweep.tuned_lr(vars(cfg)))
        best = math.log2(0.01) - 0.3 * math.log2(cfg.total_tokens / 80_000)
        best += 0.5 * math.log2(cfg.batch_size / 2)
        if cfg.attention_multiplier != cfg.n_head / cfg.n_embd:
            best -= math.log2(cfg.n_embd / 32)
        results = {"val_loss": 2 + 0.05 * (x - best) ** 2}
        return rows.row_of_record({}, {"config": vars(cfg), "results": results})

    monkeypatch.setattr(paper, "row_of", row_of)
    monkeypatch.setattr(sweep, "train_all", lambda *args: True)
    monkeypatch.setattr(sweep.data, "with_corpus", lambda cfg, typed: cfg)


def printed_rows(capsys) -> dict[str, list[str]]:
    lines = capsys.readouterr().out.splitlines()
    rows = [line[2:-2].split(" | ") for line in lines if line.startswith("| ")]
    return {name: cells for name, *cells in rows}


def test_transfer_finds_what_the_width_changes(trained, capsys):
    assert paper.main(["transfer", "--scale=laptop", "--widths=32,64,128"]) == 0
    rows = printed_rows(capsys)
    assert rows["with μP"][-1] == "1.00 [1.00, 1.00]"
    assert rows["without μP"][-1] == "0.25 [0.25, 0.25]"


def test_power_finds_the_best_a_and_b(trained, capsys):
    argv = ["power", "--scale=laptop", "--batches=8", "--budgets=320k"]
    assert paper.main(argv) == 0
    rows = printed_rows(capsys)
    # a beta T^b is the best learning rate, at b = -0.51 and at a = 16
    rate = 0.01 * 4**-0.3 * 2
    beta = 8 * 128 / 4096
    assert float(rows["a"][0]) == pytest.approx(rate / beta * 320_000**0.51, rel=0.01)
    b = math.log(rate / beta / 16) / math.log(320_000)
    assert float(rows["b"][0]) == pytest.approx(b, abs=0.006)


def test_compare_finds_what_a_held_learning_rate_loses(trained, capsys):
    assert paper.main(["compare", "--scale=laptop", "--budgets=1.28M"]) == 0
    rows = printed_rows(capsys)
    # tuned at 80k and 320k, at the lattice's nearest, 0.0091. At 1.28M the best is 4^-0.6
    # of the best at 80k
    x = math.log2(0.009051 / 0.01)
    held = 0.05 * (x + 0.3 * 4) ** 2 - 0.05 * x**2
    (mean,) = rows["Power (fitted) minus WSD"]
    assert float(mean.split()[0]) == pytest.approx(-held, abs=6e-4)
    assert rows["Power (fitted) minus WSD (fitted)"][0].startswith(("0.000", "-0.000"))


def test_peaks_and_the_law_of_the_presets_are_those_of_the_sweeps():
    fitted = tables.fitted_peaks()
    for row, values in schedules.PEAKS.items():
        assert values == pytest.approx(fitted[row], abs=0.0051), row
    _, b, q = tables.laptop_law()
    law = config.LAPTOP_LAW
    found = tables.laptop_a(), b, q  # its a is of the preset itself
    assert (law.a, law.b, law.q) == pytest.approx(found, rel=2e-3)
