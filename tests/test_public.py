"""Our questions of public runs, asked of made-up ones whose answers are known."""

import csv
import json
import math

import numpy as np
import pytest

import public

LENGTHS = (6e9, 12e9, 30e9, 120e9, 200e9, 300e9)
RATES = [0.0005 * 2**i for i in range(6)]


@pytest.fixture
def openeurollm(tmp_path):
    """A table as OpenEuroLLM writes it. One series lacks the low learning rates.

    The law is loss = 2 + 0.01 log2(lr / best)^2, with best ~ batch^0.5 T^-0.3.
    """
    rows = []
    for batch, rates in ((128, RATES), (256, RATES), (512, RATES[3:])):
        for T in LENGTHS:
            for lr in rates:
                row = dict(N=124455168, D=T, lr=lr, gbsz=batch, beta2=0.99)
                row["seed"] = 2345 if lr == 0.004 else 1234  # they are pooled
                best = 0.008 * (batch / 256) ** 0.5 * (T / 6e9) ** -0.3
                row["loss"] = 2 + 0.01 * math.log2(lr / best) ** 2
                rows.append(row)
    file = tmp_path / "openeurollm/data/loss_all_exps_post_annealing.csv"
    file.parent.mkdir(parents=True)
    with open(file, "w", newline="") as text:
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path / "openeurollm"


@pytest.fixture
def schaipp(tmp_path):
    """Logs as Schaipp et al. write them. b is the share - 0.5, and 60% is 0.02 lower."""

    def write(name: str, loss: float, **config):
        file = tmp_path / "schaipp/data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        log = {"config": config, "summary": {"final-val/loss": loss}}
        file.write_text(json.dumps(log))

    for share in (0.2, 0.6):
        for T in (15_000, 25_000, 35_000, 50_000):
            for lr in (0.0005, 0.001, 0.002):
                best = 0.001 * (T / 25_000) ** (share - 0.5)
                loss = 3 + 0.01 * math.log2(lr / best) ** 2 - 0.02 * (share == 0.6)
                name = f"ann124-{share}_lr{lr}_decay_linear_{share}_iter{T}.json"
                write(name, loss, wsd_fract_decay=share, iterations=T, lr=lr)
    for scheduler, loss in (("wsd", 2.9), ("wsd_twostage", 2.8)):
        config = dict(n_layer=24, iterations=100_000, wsd_fract_decay=0.2)
        name = f"horizon_transfer/extend-50k_{scheduler}.json"
        write(name, loss, scheduler=scheduler, **config)
    return tmp_path / "schaipp"


def test_runners_lose_what_the_law_says(openeurollm):
    file = openeurollm / "data/loss_all_exps_post_annealing.csv"
    pairs = public.pairs_of(public.read_valleys(file))
    assert len(pairs) == 21 + 21 + 10  # of 6, 6 and 4 lengths, with themselves
    for pair in pairs:
        ratio = pair.ratio
        best = 0.008 * (pair.series[1] / 256) ** 0.5 * (pair.T0 / 6e9 * ratio) ** -0.3
        lowest = 0.004 if pair.series[1] == 512 else 0.0005
        lr = best * ratio**0.3 * np.array([1, 0.5, ratio**-0.3, ratio**-0.5])
        expected = 0.01 * np.log2(np.maximum(lr, lowest) / best) ** 2
        assert pair.losses == pytest.approx(expected, abs=1e-9)
        assert pair.is_tried.tolist() == (lr >= lowest).tolist()
    rows = {name: cells for name, *cells in public.at_scale(pairs)}
    assert rows["15 to 50 times, not tried"] == ["11", "0", "0", "0", "1"]
    assert rows["30B, 4 to 10 times, median"][0] == "7"


def test_medians_count_pairs_and_intervals_series():
    pairs = []
    for series, held in ((1, 0.01), (1, 0.02), (1, 0.09), (2, 0.06)):
        losses = np.array([held, 0, 0.01, 0.01])
        pairs.append(public.Pair((series, 64), 6e9, 20, losses, None))
    medians, minus = public.summary("x", pairs)
    assert medians == ["x, median", "4", "0.0400", "0.0000", "0.0100", "0.0100"]
    # of 0.03 and 0.05: the standard error is 0.01, and t of one degree of freedom 12.706
    assert minus[1:3] == ["2", "0.0400 [-0.0871, 0.1671]"]
    assert minus[3] == "-0.0100 [-0.0100, -0.0100]"


def test_the_share_of_the_decay(schaipp):
    usual, long = public.shares(schaipp)
    assert usual == ["20%", "-0.30", *["0.0000"] * 4]
    assert long[:2] == ["60%", "0.10"]
    # at 50,000, 0.001 is 0.1 and 0.3 octaves beside the best learning rates
    gap = -0.02 + 0.01 * 0.1**2 - 0.01 * 0.3**2
    assert float(long[5]) == pytest.approx(gap, abs=5e-5)
    assert public.extended(schaipp) == [["210M, 2 times", "2.9000", "2.8000", ""]]


def test_the_command_says_whether_the_figures_agree(
    openeurollm, schaipp, tmp_path, monkeypatch, capsys
):
    committed = tmp_path / "public.json"
    monkeypatch.setattr(public, "COMMITTED", committed)
    command = ["--openeurollm", str(openeurollm), "--schaipp", str(schaipp)]
    assert public.main(command) == 0  # writes them
    assert public.main(command) == 0
    rows = json.loads(committed.read_text())
    rows["extended"][0][1] = "2.9001"
    committed.write_text(json.dumps(rows))
    assert public.main(command) == 1
    assert capsys.readouterr().out.endswith("public.json: extended\n")
