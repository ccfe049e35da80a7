"""Our questions of public runs, asked of made-up ones whose answers are known."""

import csv
import json
import math

import pytest

import public

B = -0.3  # of the made-up law
BEND = 0.01  # loss = floor + BEND (log2 lr - log2 best)^2
LENGTHS = (6e9, 12e9, 30e9, 120e9, 200e9, 300e9)
RATES = [0.0005 * 2**i for i in range(6)]


def best_lr(T: float, batch: int) -> float:
    return 0.008 * (batch / 256) ** 0.5 * (T / 6e9) ** B


@pytest.fixture
def openeurollm(tmp_path):
    """A table as OpenEuroLLM writes it. One series lacks the low learning rates."""
    rows = []
    for batch, rates in ((128, RATES), (256, RATES), (512, RATES[3:])):
        for T in LENGTHS:
            for lr in rates:
                row = dict(job_name="x", N=124455168, D=T, lr=lr, gbsz=batch, beta2=0.99)
                row["seed"] = 2345 if lr == 0.004 else 1234  # they are pooled
                row["loss"] = 2 + BEND * math.log2(lr / best_lr(T, batch)) ** 2
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
    run = dict(n_layer=24, iterations=100_000)
    for scheduler, share, loss in (("wsd", 0.2, 2.9), ("wsd_twostage", 0.2, 2.8)):
        name = f"horizon_transfer/extend-50k_{scheduler}_{share}.json"
        write(name, loss, scheduler=scheduler, wsd_fract_decay=share, **run)
    return tmp_path / "schaipp"


def test_the_minimum_of_a_parabola_and_the_loss_above_it():
    points = [(x, 3 + 0.5 * (x - 1.25) ** 2) for x in (0, 1, 2, 3)]
    valley = public.valley_of(points)
    assert valley.bottom == pytest.approx(1.25)
    assert valley.loss == pytest.approx(3)
    assert valley.regret(2.25) == pytest.approx(0.5)
    assert valley.regret(4) == pytest.approx(0.5 * 1.75**2)  # as at 3
    assert not valley.tried(4)


@pytest.mark.parametrize("losses", [[1, 2, 3], [3, 2, 1], [1, 2, 1], [1, 2]], ids=str)
def test_a_cell_without_a_minimum_among_its_learning_rates_has_no_valley(losses):
    assert public.valley_of(list(enumerate(losses))) is None


@pytest.fixture
def valleys(openeurollm) -> public.Series:
    file = openeurollm / "data/loss_all_exps_post_annealing.csv"
    return public.read_valleys(file)


def octaves_too_high(runner: str, ratio: float) -> float:
    """log2 of a runner's learning rate over the best one of its run."""
    factor = {
        "held": 1,
        "half": 0.5,
        "ratio^-0.3": ratio**-0.3,
        "ratio^-0.5": ratio**-0.5,
    }
    return math.log2(factor[runner]) - B * math.log2(ratio)


def test_runners_lose_what_the_law_says(valleys):
    pairs = public.pairs_of({"x": valleys["124M, batch 256"]})
    assert len(pairs) == 21  # of 6 lengths, with themselves
    for pair in pairs:
        for runner in public.RUNNERS:
            expected = BEND * octaves_too_high(runner, pair.ratio) ** 2
            assert pair.losses[runner] == pytest.approx(expected, abs=1e-9)
    assert public.slopes(valleys)[0] == ["6B to 300B", "3", "-0.30 [-0.30, -0.30]"]


@pytest.mark.parametrize("shortest", [1, 3])
def test_the_worst_length_is_the_worst_of_a_dumb_loop(valleys, shortest):
    pairs = public.pairs_of({"x": valleys["124M, batch 256"]})
    worst = public.worst_lengths(pairs, shortest)
    assert [pair.T0 for pair in worst] == [6e9, 12e9]
    for pair in worst:
        for runner in public.RUNNERS:
            losses = []
            for T in LENGTHS:
                if T >= shortest * pair.T0:
                    octaves = octaves_too_high(runner, T / pair.T0)
                    losses.append(BEND * octaves**2)
            assert pair.losses[runner] == pytest.approx(max(losses), abs=1e-9)


def test_a_learning_rate_beyond_the_tried_ones_is_counted(valleys):
    beyond = [pair for pair in public.pairs_of(valleys) if pair.beyond]
    assert {pair.series for pair in beyond} == {"124M, batch 512"}
    [long] = [pair for pair in beyond if pair.ratio == 20]
    assert long.beyond == ["ratio^-0.5"]
    octaves = math.log2(0.004 / best_lr(120e9, 512))  # at the lowest of them
    assert long.losses["ratio^-0.5"] == pytest.approx(BEND * octaves**2)


def test_a_median_counts_pairs_and_an_interval_series():
    pairs = []
    for series, held in (("a", 0.01), ("a", 0.02), ("a", 0.09), ("b", 0.06)):
        losses = dict.fromkeys(public.RUNNERS, 0.01) | {"held": held}
        pairs.append(public.Pair(series, 6e9, 20, losses, []))
    a, b, medians, _ = public.at_scale(pairs)
    assert a[:3] == ["a", "3", "0.0400"]
    assert b[:3] == ["b", "1", "0.0600"]
    assert medians[1:4] == ["4", "0.0400", "0.0100"]
    # of 0.04 and 0.06: the standard error is 0.01, and t of one degree of freedom 12.706
    means, minus = public.differences({"x": pairs})
    assert means[1:3] == ["2", "0.0500 [-0.0771, 0.1771]"]
    assert minus[2:5] == ["0.0400 [-0.0871, 0.1671]", "0.0000 [0.0000, 0.0000]", ""]


def test_the_share_of_the_decay(schaipp):
    usual, long = public.shares(schaipp)
    assert usual == ["20%", "-0.30", *["0.0000"] * 8]
    assert long[:2] == ["60%", "0.10"]
    # held: at 25,000 steps, 0.001 is the best learning rate of both
    assert long[3] == "-0.0200"
    # at 50,000, one octave longer, it is 0.1 and 0.3 octaves beside them
    gap = -0.02 + 0.01 * 0.1**2 - 0.01 * 0.3**2
    assert float(long[5]) == pytest.approx(gap, abs=5e-5)
    assert long[6:] == ["-0.0200"] * 4  # tuned
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


def test_a_folder_that_is_missing_is_one_line(schaipp, tmp_path, capsys):
    command = ["--openeurollm", str(tmp_path / "no"), "--schaipp", str(schaipp)]
    assert public.main(command) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_row_of_the_committed_tables_has_all_columns():
    for _, _, head, rows in public.tables():
        assert rows
        assert {len(row) for row in rows} == {len(head)}
