"""fit.py: made-up laws come back, what they lose is the closed form, faults are one line."""

import csv
import itertools
import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest

import config
import fit
import paper
import train
from config import make_config, remarks
from fit import Cell, Exponents, Trial
from schedules import PEAKS, Law, best_lr, peak
from tools.flags import UserError
from tools.reports import cost
from tools.rows import read_csv
from tools.student import student

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "research/results"
LENGTHS = [100_000 * 2**k for k in range(5)]


def read_law(file: Path) -> Law:
    return Law(**config.read_law(file))


def log2_best(cell: Cell, a=40, b=-0.4, q=0.6) -> float:
    return math.log2(a) + b * math.log2(cell.T) + q * math.log2(cell.beta)


def made_rows(
    best=log2_best, widths=(32, 64, 128), batches=(1, 2, 4, 8), lengths=LENGTHS, seeds=1,
    noise=0.0, seq_len=128, steps=4, **more,
) -> list[dict]:  # fmt: skip
    """Rows as read_sweep returns them, with a loss of 0.03 x^2 beside best(cell).

    x is in doublings of the learning rate, which grows in steps of sqrt(2) from 1e-4. Batch
    sizes 2 and 4 are the best. noise: of every loss, in nats.
    """
    rng = np.random.default_rng(0)
    rows = []
    for width, batch, T in itertools.product(widths, batches, lengths):
        row = dict(
            n_embd=width, n_layer=2, n_head=width // 16, attention_multiplier=1 / 16,
            n_expert=0, seq_len=seq_len, batch_size=batch, total_tokens=T, schedule="wsd",
            preset="laptop", warmup_tokens=3000, dtype="float32", decay_share=0.1,
            batch_tokens=batch * seq_len, base_width=64,
        ) | more  # fmt: skip
        row.setdefault("m_width", width / row["base_width"])
        center = best(fit.cell_of(row))
        middle = round(2 * (center + math.log2(1e4)))
        for seed, j in itertools.product(range(seeds), range(-steps, steps + 1)):
            x = (middle + j) / 2 - math.log2(1e4)
            loss = 2 + 0.03 * (x - center) ** 2 + 0.02 * abs(math.log2(batch) - 1.4)
            loss += rng.normal(0, noise)
            rows.append(row | dict(seed=seed, lr=2**x, loss=loss))
    return rows


def write(rows: list[dict], folder: str, **settings) -> str:
    """The folder of a sweep with these rows."""
    Path(folder).mkdir()
    lines = []
    for row in rows:
        results = {"val_loss": row["loss"] if row["loss"] < math.inf else None}
        content = {name: row[name] for name in row if name != "loss"}
        lines.append(json.dumps({"config": content, "results": results}))
    Path(folder, "trunk.jsonl").write_text("\n".join(lines))
    settings = {"fingerprint": "0"} | settings
    Path(folder, "sweep.json").write_text(json.dumps({"settings": settings}))
    return folder


def refused(argv: list[str], capsys) -> str:
    """The one line with which fit.py refuses a command."""
    capsys.readouterr()
    assert fit.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("fit.py: ") and error.count("\n") == 1
    return error


def bottoms_of(trials: list[Trial]) -> dict:
    return fit.bottoms(fit.valleys_of(trials))


def law_in(folder: str) -> dict:
    return json.loads(Path(folder, "law.json").read_text())


# -- 1. Runs -----------------------------------------------------------------------------


def test_the_seeds_of_a_cell_keep_their_common_learning_rates():
    rows = []
    for seed, losses in enumerate([{1: 5.0, 2: 4.0, 4: 6.0}, {2: 2.0, 4: 3.0, 8: 1.0}]):
        for lr, loss in losses.items():
            row = dict(total_tokens=1e6, batch_size=2, seq_len=128, lr=lr, loss=loss)
            rows.append(row | dict(shape="a", width=0.0, seed=seed))
    (points,) = fit.valleys_of(fit.trials_of(rows)).values()
    assert points == [(1.0, 3.0), (2.0, 4.5)]


# -- 2. A valley and its bottom ----------------------------------------------------------

STEPS = [x / 2 for x in range(-5, 6)]
VALLEY = [(x, 1 + (x - 0.3) ** 2 + 0.1 * (x - 0.3) ** 3) for x in STEPS]
HILL = [(x, 1 - x * x / 9 if x else 0.7) for x in STEPS[2:9]]
SLOPE = [(x, -x - x**3 if x else -5.0) for x in STEPS[2:9]]  # no derivative is 0


def diverging(*at: float) -> list[tuple]:
    return [(x, math.inf if x in at else y) for x, y in VALLEY]


def test_a_cubic_is_found_exactly_and_a_parabola_has_its_closed_form():
    bent = [(x, y + 7 * (x < -1)) for x, y in VALLEY]  # outside the window
    for points in (VALLEY, bent):
        assert fit.bottom(points) == (pytest.approx(0.3, abs=1e-12), "")
    parabola = [(x - 9, 2 + 0.03 * (x - 0.2) ** 2) for x in STEPS]
    assert fit.bottom(parabola)[0] == pytest.approx(0.2 - 9, abs=1e-9)
    # five points around 0.5
    x, _ = fit.bottom(VALLEY, degree=2, window=5)
    curve = np.polyfit(*np.array(VALLEY[4:9]).T, 2)
    assert x == pytest.approx(-curve[1] / 2 / curve[0]) and x < 0.29


@pytest.mark.parametrize("points, why", [
    (VALLEY[:4], "at highest"), (VALLEY[6:], "at lowest"), (VALLEY[:1], "at lowest"),
    (VALLEY[5:8], "too few"), (VALLEY[4:8], ""), (diverging(1.0), ""), (HILL, "no valley"),
    (diverging(1.0, 1.5, 2.0), ""), (diverging(*STEPS), "diverged"),
    (SLOPE, "no valley"),
])  # fmt: skip
def test_unusable_minima_say_why(points, why):
    assert fit.bottom(points)[1] == why
    hill = [(-1.0, 0.75), (-0.5, 1.0), (0.0, 0.7), (0.5, 1.0), (1.0, 0.75)]
    assert fit.bottom(hill, degree=2, window=5)[1] == "no valley"


# -- 3. The law --------------------------------------------------------------------------

SMALLEST = dict(widths=[64], batches=[2, 16], lengths=LENGTHS[:2])
LAPTOP = dict(seeds=3)


@pytest.mark.parametrize("grid", [SMALLEST, LAPTOP], ids=str)
@pytest.mark.parametrize("a, b, q", [(40, -0.4, 0.6), (4.6, -0.51, 1.0)])
def test_a_made_up_law_comes_back_from_every_grid(grid, a, b, q):
    runs = fit.trials_of(made_rows(lambda cell: log2_best(cell, a, b, q), **grid))
    found = fit.fit_law(bottoms_of(runs))
    assert (found.b, found.q) == pytest.approx((b, q), abs=1e-9)
    assert found.assumed == ()
    assert np.allclose(list(found.log2_a.values()), math.log2(a), atol=1e-6)
    # the paper sets q to 1, and takes the three best batch sizes
    found_b, log2_a = paper.fit_paper_law(runs)
    best = sorted({run.cell.beta for run in runs})[:3]
    of_batches = (q - 1) * np.mean(np.log2(best))
    assert (found_b, log2_a) == pytest.approx((b, math.log2(a) + of_batches))


def test_no_minimum_has_no_law(capsys):
    folder = write(made_rows(batches=[4], steps=0), "a")
    assert "no cell has a minimum" in refused([folder], capsys)
    assert not Path("a/law.json").exists()
    fit.main(["a"])  # prints why not
    assert "at lowest" in capsys.readouterr().out


EXPONENTS = [  # of a grid, which exponents it cannot determine
    (dict(batches=[4], widths=[64]), ("q",)),
    (dict(lengths=LENGTHS[:1]), ("b",)),
    (dict(lengths=LENGTHS[:1], batches=[4]), ("b", "q")),
]


@pytest.mark.parametrize("grid, assumed", EXPONENTS, ids=str)
def test_exponents_that_the_runs_do_not_determine_are_those_of_the_preset(
    grid, assumed, capsys
):
    """The law is exact where it was measured, whatever these exponents may be."""
    rows = made_rows(**grid, seeds=2, noise=0.001, decay_share=0.3)
    assert fit.main([write(rows, "a")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("assumed, as in the preset") == len(assumed)
    assert "nan" not in printed
    law = read_law(Path("a/law.json"))
    assert tuple(law.assumed) == assumed
    usual = {"b": -0.2245, "q": 0.5993}
    made = {"b": -0.4, "q": 0.6}
    for name in "bq":
        expected = usual if name in assumed else made
        assert getattr(law, name) == pytest.approx(expected[name], abs=0.02), name
    cell = fit.cell_of(rows[0])
    best = 2 ** log2_best(cell)
    assert best_lr(cell.T, cell.beta, law) == pytest.approx(best, rel=0.06)


def test_the_exponent_of_another_ending_is_turned():
    """b of a line is that of WSD with a decay of 30%, plus the difference of the table."""
    row = dict(preset="laptop", total_tokens=10**6, schedule="linear", decay_share=0.0)
    e = PEAKS["wsd", 1.0][1]
    assert fit.usual_exponents(row).b == pytest.approx(-0.2245 + e)
    row = dict(schedule="power", power_b=-0.4, power_q=0.7)
    assert fit.usual_exponents(row) == (-0.4, 0.7)


def test_lengths_in_proportion_to_the_batch_size_determine_one_exponent():
    best = {}
    for batch in (2, 4, 8):
        cell = Cell(32.0, "width 32", 1000.0 * batch, batch, batch / 32)
        best[cell] = log2_best(cell)
    law = fit.fit_law(best, Exponents(q=0.6))
    assert law.assumed == ("q",) and law.b == pytest.approx(-0.4)


def test_a_seed_that_is_not_finished_changes_nothing():
    rows = made_rows(seeds=3, noise=0.01)
    two = [row for row in rows if row["seed"] < 2]
    begun = [row for i, row in enumerate(rows) if row["seed"] == 2 and i % 9 < 4]
    assert fit.trials_of(two + begun) == fit.trials_of(two)


# -- 4. What a law is worth --------------------------------------------------------------


def test_regret_is_the_height_above_the_bottom():
    points = [(x, 2 + 0.03 * (x - 0.2) ** 2) for x in STEPS]
    for x in (-1.5, 0.0, 0.2, 1.5):
        assert fit.regret(points, x) == pytest.approx(0.03 * (x - 0.2) ** 2, abs=1e-9)
    # beyond the 7 points of the curve, the straight line between two that we tried
    assert fit.regret(points, 2.25) == pytest.approx(0.03 * (1.8**2 + 2.3**2) / 2)
    assert math.isnan(fit.regret(points, 2.51)) and math.isnan(fit.regret(points, -3))
    # beside runs that diverged it is worse than all others
    points = diverging(2.0, 2.5)
    assert fit.regret(points, 1.9) == fit.regret(points, 2.4) == math.inf
    assert fit.regret(points, 1.4) < math.inf and math.isnan(fit.regret(points, 2.6))


def test_what_is_outside_is_counted_and_in_no_mean():
    assert cost([0.1, math.nan, 0.3]) == (1, pytest.approx(0.2), 0.3)
    assert cost([0.1, math.inf, math.nan]) == (1, math.inf, math.inf)
    outside, mean, worst = cost([math.nan, math.nan])
    assert outside == 2 and math.isnan(mean) and math.isnan(worst)


@pytest.mark.parametrize("bend", [0.0, 0.3])
def test_regrets_in_longer_runs_are_their_closed_form(bend):
    """b is -0.4 up to 200k, where we fit it, and -0.4 + bend after that."""

    def bent(cell: Cell) -> float:
        return log2_best(cell) + bend * max(0.0, math.log2(cell.T / LENGTHS[1]))

    runs = fit.trials_of(made_rows(bent, steps=6))
    T = fit.shortest_fit(fit.valleys_of(runs))
    assert T == LENGTHS[1]
    longer = fit.longer_runs(fit.valleys_of(runs), T)
    assert list(longer) == [1, 2, 4, 8]
    for times, regrets in longer.items():
        law = 0.03 * (bend * math.log2(times)) ** 2
        same = 0.03 * ((0.4 - bend) * math.log2(times)) ** 2
        expected = np.array([[law] * 12, [same] * 12, [same] * 12])
        assert np.array(regrets) == pytest.approx(expected, abs=1e-9)


def test_regrets_in_larger_runs_are_their_closed_form():
    larger = fit.larger_runs(
        fit.valleys_of(fit.trials_of(made_rows(steps=6))), LENGTHS[1]
    )
    at_8 = larger["batch size 8"]
    assert at_8.law == pytest.approx([0] * 15, abs=1e-9)
    assert at_8.same == pytest.approx([0.03 * 0.6**2] * 15, abs=1e-9)
    assert at_8.in_proportion == pytest.approx([0.03 * 0.4**2] * 15, abs=1e-9)
    assert np.array(larger["width 128"]) == pytest.approx(np.zeros((3, 20)), abs=1e-9)
    # 2, 4 and 8 times T with twice the batch size
    expected = [0.03 * (0.6 - 0.4 * doublings) ** 2 for doublings in (1, 2, 3)]
    assert larger["all at once"].law == pytest.approx([0] * 3, abs=1e-9)
    assert larger["all at once"].same == pytest.approx(expected, abs=1e-9)


def test_a_sweep_too_small_for_a_row_says_so(capsys):
    assert fit.main([write(made_rows(**SMALLEST), "a")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("no law without it") == 2 and "No row tests" in printed
    assert not Path("a/regret.png").exists()


# -- 5. Intervals ------------------------------------------------------------------------

QUANTILES = {1: 12.706, 1.7: 5.119, 2: 4.303, 4: 2.776, 8: 2.306, 100: 1.984, 1e6: 1.960}


def test_quantiles_of_student_are_those_of_the_tables():
    found = student(np.array(list(QUANTILES)))
    assert found == pytest.approx(list(QUANTILES.values()), rel=2e-3)


def interval(table) -> tuple[float, float]:
    """The center and half of the interval of a mean loss. table: [pairs, seeds]."""
    runs = []
    for (pair, seed), loss in np.ndenumerate(table):
        cell = Cell(32.0, "width 32", 1e6, 2**pair, 2**pair / 32)
        runs.append(Trial(cell, str(seed), 0.0, float(loss)))

    def mean_loss(some: list[Trial]) -> np.ndarray:
        return np.array([np.mean([run.loss for run in some])])

    ((answer, low, high),) = fit.jackknife(runs, mean_loss)
    assert answer == pytest.approx(np.mean(table))
    return answer, high - answer


def test_the_variances_of_pairs_and_of_seeds_add_up():
    pair = np.array([0.1, 0.5, -0.3])
    seed = np.array([0.2, 0.0, -0.7, 0.1])
    of_pairs = np.var(pair, ddof=1) / 3
    of_seeds = np.var(seed, ddof=1) / 4
    freedom = (of_pairs + of_seeds) ** 2 / (of_pairs**2 / 2 + of_seeds**2 / 3)
    half = student(np.array(freedom)) * (of_pairs + of_seeds) ** 0.5
    assert interval(pair[:, None] + seed)[1] == pytest.approx(half)


def test_without_one_of_two_batch_sizes_there_is_no_interval():
    rows = made_rows(widths=[32], seeds=3, noise=0.002, batches=[1, 2])
    numbers, _ = fit.intervals(fit.trials_of(rows), Exponents())
    assert np.isnan(numbers["q"][1:]).all()


# -- 6. From a law to a run --------------------------------------------------------------


def configs_of(command: str) -> train.TrainConfig:
    """The config of a printed command, as train.py makes it."""
    typed, _ = train.parse(shlex.split(command)[2:])
    return make_config(**typed)


def next_of(printed: str) -> train.TrainConfig:
    line = printed.splitlines()[-1]
    assert line.startswith("next: ")
    return configs_of(line.removeprefix("next: "))


def test_the_next_command_has_the_settings_of_the_sweep(capsys):
    more = dict(weight_decay=0.05, base_width=256, decay_share=0.3, data="a b")
    rows = made_rows(lambda cell: log2_best(cell, 3, -0.3, 0.5), **more)
    assert fit.main([write(rows, "a")]) == 0
    cfg = next_of(capsys.readouterr().out)
    assert (cfg.schedule, cfg.total_tokens, cfg.batch_size) == ("power", 6_400_000, 2)
    assert (cfg.weight_decay, cfg.base_width, cfg.data) == (0.05, 256, "a b")
    assert (cfg.n_embd, cfg.n_layer) == (128, 3)  # those of the preset


def test_a_law_without_mup_stays_at_its_width(capsys):
    rows = made_rows(lambda cell: log2_best(cell, 3, -0.3, 0.5), [32], m_width=1.0)
    assert fit.main([write(rows, "a")]) == 0
    cfg = next_of(capsys.readouterr().out)
    assert (cfg.n_embd, cfg.n_head, cfg.m_width) == (32, 2, 1.0)


def test_a_short_next_run_has_a_short_warmup(capsys):
    """Shorter than in the preset, whose warmup of 100k tokens would be all of it."""
    assert fit.main([write(made_rows(widths=[32], lengths=[10_000, 20_000]), "a")]) == 0
    cfg = next_of(capsys.readouterr().out)
    assert (cfg.total_tokens, cfg.warmup_tokens) == (80_000, 20_000)


@pytest.mark.parametrize("schedule", ["power", "wsd", "linear"])
@pytest.mark.parametrize("b", [-0.3, 0.3])
def test_a_law_that_rises_with_T_gets_no_power_run(schedule, b):
    row = made_rows(widths=[32])[0]
    law = Law(1.0, b, 0.5, schedule, 0.3, first_n=1000)
    command = fit.next_command(law, fit.cell_of(row), row, Path("law.json"))
    expected = "linear" if schedule == "linear" else "power" if b < 0 else "wsd"
    assert f"--schedule {expected}" in command


SCHEDULES = ("power", "wsd", "linear", "cosine", "constant")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("of, share", [("wsd", 0.3), ("wsd", 0.1), ("linear", 0.0)])
def test_train_takes_the_learning_rate_of_a_law(schedule, of, share):
    made = dict(schedule=of, decay_share=share, weight_decay=0.1)
    rows = made_rows(lambda cell: log2_best(cell, 3, -0.3, 0.5), **made)
    assert fit.main([write(rows, "a")]) == 0
    at = f"--schedule {schedule} --total_tokens 400k --batch_size 4 --warmup_tokens 4k"
    cfg = configs_of(f"python train.py --law a/law.json {at}")
    T = LENGTHS[-1] if schedule == "power" else 400_000
    times = peak(schedule, 0.3 if schedule in ("wsd", "power") else 0.0, T)
    times /= peak(of, share, T)
    beta = 4 * 128 / 4096
    if schedule == "power":
        found = (cfg.power_a, cfg.power_b, cfg.power_q, cfg.lr_max)
        ceiling = times * 3 * beta**0.5 * LENGTHS[0] ** -0.3
        assert found == pytest.approx((times * 3, -0.3, 0.5, ceiling), rel=1e-3)
    else:
        expected = times * 3 * beta**0.5 * 400_000**-0.3
        assert cfg.lr == pytest.approx(expected, rel=1e-3)
    # it says where it was not measured
    says = remarks(cfg)
    assert "n_layer 2 (this is 3)" in says and "total_tokens" not in says
    assert ("times" in says) == (abs(times - 1) > 0.01)
    longer = configs_of(f"python train.py --law a/law.json {at} --total_tokens 64M")
    says = remarks(longer)
    assert "total_tokens 100k to 1.6M (this is 64M)" in says
    # a typed learning rate wins
    name = "power_a" if schedule == "power" else "lr"
    cfg = configs_of(f"python train.py --law a/law.json {at} --{name} 0.3")
    assert getattr(cfg, name) == 0.3 and not remarks(cfg)


def test_a_law_of_undecayed_runs_is_near_the_best_of_decayed_ones():
    """Used as it is, it would be 0.0016 at 5.12M, far below both."""
    assert fit.main([str(RESULTS / "decay-laptop/none"), "--out=a"]) == 0
    for schedule, best in (("wsd", 0.0064), ("linear", 0.0127)):
        at = f"--schedule {schedule} --total_tokens 5.12M"
        cfg = configs_of(f"python train.py --law a/law.json {at}")
        assert cfg.lr == pytest.approx(best, rel=0.4)


@pytest.mark.parametrize("b, bend, schedule, says", [
    (-0.4, 0.0, "power", "lost no more than"),
    (0.1, 0.0, "wsd", ""),
    (-0.4, 0.3, "power", "Not worth it"),
])  # fmt: skip
def test_a_law_that_power_cannot_follow_or_that_is_not_worth_it_says_so(
    b, bend, schedule, says, capsys
):
    """b after 200k is b + bend."""

    def bent(cell: Cell) -> float:
        return log2_best(cell, b=b) + bend * max(0.0, math.log2(cell.T / LENGTHS[1]))

    assert fit.main([write(made_rows(bent, steps=6), "a")]) == 0
    printed = capsys.readouterr().out
    assert next_of(printed).schedule == schedule and says in printed
    if b > 0:
        with pytest.raises(UserError, match="needs b <= 0"):
            configs_of("python train.py --law a/law.json --schedule power")


GOOD = dict(
    a=1.0, b=-0.3, q=0.5, schedule="wsd", decay_share=0.3, first_n=1e5, assumed=[],
    measured=dict(total_tokens=[1e5, 1e6]),
)  # fmt: skip
BAD = {
    "no": None,
    "text": "not JSON",
    "other": json.dumps({"model": "gpt"}),
    "list": "[1, 2]",
    "nan": json.dumps(GOOD | {"a": math.nan}),
    "null": json.dumps(GOOD | {"b": None}),
    "word": json.dumps(GOOD | {"q": "half"}),
    "range": json.dumps(GOOD | {"measured": {"total_tokens": [1, 2], "x": [1, 2]}}),
    "ending": json.dumps(GOOD | {"schedule": "triangle"}),
    "bytes": b"\xff\xfe",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_law_is_one_line(name, one_line):
    content = BAD[name]
    if content is not None:
        raw = content if isinstance(content, bytes) else content.encode()
        Path("law.json").write_bytes(raw)
    says = one_line(train.main, ["--law", "law.json", "--out", "run"])
    assert "law.json" in says and not Path("run").exists()


def test_a_good_law_is_read():
    Path("law.json").write_text(json.dumps(GOOD | {"b_interval": [None, None]}))
    assert read_law(Path("law.json")).measured == GOOD["measured"]


# -- A pilot -----------------------------------------------------------------------------


def pilot_rows(best=0.008, off=(0.0, 0.0), **more) -> list[dict]:
    """Power at five learning rates at n = T, a factor of 2 apart, with two seeds."""
    rows = []
    for seed, k in itertools.product((100, 101), range(-2, 3)):
        lr = 0.006 * 2.0**k
        cfg = make_config(
            n_layer=2, n_embd=32, n_head=2, total_tokens=327_680, seed=seed,
            power_a=lr / ((1 / 4) ** 0.5 * 327_680**-0.3), lr_max=1.0, **more,
            warmup_tokens=32_768,
        )  # fmt: skip
        x = math.log2(lr / best) - off[seed - 100]
        rows.append(vars(cfg) | dict(loss=2 + 0.03 * x**2 + 0.001 * x**3))
    return rows


def test_a_pilot_gives_one_number(capsys):
    assert fit.main([write(pilot_rows(off=(0.1, -0.1)), "a")]) == 0
    printed = capsys.readouterr().out
    assert "of each seed alone: 0.00857, 0.00746" in printed
    law = read_law(Path("a/law.json"))
    assert (law.schedule, law.b, law.q, law.decay_share) == ("power", -0.3, 0.5, 0.3)
    assert best_lr(327_680, 1 / 4, law) == pytest.approx(0.008, rel=2e-3)
    cfg = next_of(printed)
    assert (cfg.schedule, cfg.total_tokens) == ("power", 16 * 327_680)
    # no ceiling, because Power had none in the pilot
    assert (cfg.power_a, cfg.power_b) == (pytest.approx(law.a, rel=1e-3), -0.3)
    assert cfg.lr_max == pytest.approx(0.008 * 10**0.3, rel=1e-2)
    # WSD from the same number
    cfg = configs_of("python train.py --law a/law.json --schedule wsd")
    expected = 0.008 / PEAKS["power", 0.3][0] * (3_200_000 / 327_680) ** -0.3
    assert cfg.lr == pytest.approx(expected, rel=1e-2)
    assert not Path("a/law.png").exists() and Path("a/valleys.png").exists()


@pytest.mark.parametrize("best, lrs", [
    (0.001, "0.000375,0.00075"), (0.05, "0.048,0.096"),
])  # fmt: skip
def test_an_edge_of_a_pilot_is_named_with_the_flag_that_mends_it(best, lrs, capsys):
    says = refused([write(pilot_rows(best), "a")], capsys)
    assert "no cell has a minimum" in says
    fit.main(["a"])
    assert f"--lrs {lrs}\n" in capsys.readouterr().out


def test_a_law_knows_its_schedule_and_decay(capsys):
    made = dict(decay_share=0.0, schedule="linear")
    write(made_rows(lengths=LENGTHS[:2], **made), "b")
    assert fit.main(["b"]) == 0
    law = read_law(Path("b/law.json"))
    assert (law.schedule, law.decay_share) == ("linear", 0.0)
    assert next_of(capsys.readouterr().out).schedule == "linear"
    assert fit.main([write(made_rows(decay_share=0.5), "c")]) == 0
    assert read_law(Path("c/law.json")).decay_share == 0.5


def cut(rows: list[dict], end: str, lengths: list[int], batches: list[int]) -> list[dict]:
    """Leave out the learning rates on one side of the minimum of some cells."""
    kept = []
    for row in rows:
        beside = math.log2(row["lr"]) - log2_best(fit.cell_of(row))
        is_cut = row["total_tokens"] in lengths and row["batch_size"] in batches
        if not is_cut or (beside > 0.1 if end == "lowest" else beside < -0.1):
            kept.append(row)
    return kept


@pytest.mark.parametrize("end", ["lowest", "highest"])
def test_an_edge_is_one_line(end, capsys):
    rows = cut(made_rows(widths=[32], batches=[2, 4], steps=6), end, LENGTHS[4:], [2, 4])
    folder = write(rows, "a")
    assert fit.main([folder]) == 0
    printed = capsys.readouterr().out
    assert "not finished" not in printed
    lines = printed.splitlines()
    (i,) = [i for i, line in enumerate(lines) if line.startswith("best at the")]
    assert f"{end} learning rate" in lines[i]
    assert "T = 1.6M at batch size 2, T = 1.6M at batch size 4" in lines[i]
    # in steps of sqrt(2), from the nearest edge to a factor of 4 beyond the furthest
    lrs = list(map(float, lines[i + 1].partition("--lrs ")[2].split(",")))
    edges = []
    for batch in (2, 4):
        some = [
            row["lr"]
            for row in rows
            if (row["batch_size"], row["total_tokens"]) == (batch, LENGTHS[4])
        ]
        edges.append(min(some) if end == "lowest" else max(some))
    sign = -1 if end == "lowest" else 1
    nearest, furthest = sorted(edges, reverse=end == "lowest")
    assert sorted(lrs)[::sign][0] == pytest.approx(nearest * 2 ** (sign / 2), rel=1e-3)
    assert sorted(lrs)[::sign][-1] == pytest.approx(furthest * 4.0**sign, rel=1e-3)
    # the next run is four times as long as the longest with a minimum
    assert next_of(printed).total_tokens == 4 * LENGTHS[3]

    file = Path(folder, "sweep.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"finished": False}))
    assert fit.main([folder]) == 0
    assert "not finished" in capsys.readouterr().out


def test_a_pilot_with_a_diverged_run_has_a_parabola():
    """A cubic would go through all four of the others."""
    points = [(-2.0, 2.5), (-1.0, 2.125), (0.0, 2.0), (1.0, 2.25)]
    x, why_not = fit.bottom([*points, (2.0, math.inf)])
    c2, c1, _ = np.polyfit(*np.array(points).T, 2)
    assert not why_not and x == pytest.approx(-c1 / (2 * c2), abs=1e-9)


def test_the_next_command_trains_the_model_of_the_sweep(capsys):
    more = dict(preset="laptop-moe", n_expert=4, n_expert_active=1)
    rows = made_rows(log2_best, [32], **more)
    assert fit.main([write(rows, "a")]) == 0
    cfg = next_of(capsys.readouterr().out)
    found = cfg.preset, cfg.n_expert, cfg.n_expert_active
    assert found == ("laptop-moe", 4, 1)


def test_a_text_that_moved_is_the_same_text(capsys):
    for data in ("data/a", "b"):
        rows = made_rows(log2_best, [32] if data == "b" else [64], data=data)
        write(rows, data[-1])
    assert fit.main(["a", "b"]) == 0


def test_the_batch_size_with_the_lowest_loss_counts_although_it_is_at_an_edge(capsys):
    rows = made_rows(widths=[32], batches=[2, 8, 16], steps=6)  # 2 is the best
    rows = cut(rows, "lowest", LENGTHS[4:], [2])
    assert fit.main([write(rows, "a")]) == 0
    assert next_of(capsys.readouterr().out).batch_size == 2
    assert Path("a/regret.png").exists()


def test_a_reference_cell_without_a_minimum_at_the_shortest_length_is_drawn():
    """One cell at an edge, or the largest batch size only in longer runs."""
    rows = cut(
        made_rows(widths=[32], batches=[2, 4], steps=6), "lowest", LENGTHS[:1], [2]
    )
    assert fit.main([write(rows, "a")]) == 0
    rows = made_rows(widths=[32], batches=[4], lengths=LENGTHS)
    rows += made_rows(widths=[32], batches=[2], lengths=LENGTHS[1:])
    assert fit.main([write(rows, "b")]) == 0
    for folder in "ab":
        assert Path(folder, "regret.png").exists()


# -- 7. The committed sweeps -------------------------------------------------------------


def test_the_committed_law_to_three_digits():
    runs = fit.trials_of(fit.read_sweep(RESULTS / "wsd-laptop"))
    law, _ = fit.intervals(runs, Exponents())
    for name, numbers in dict(a=(0.612, 0.216, 1.737), b=(-0.278, -0.374, -0.182),
                              q=(0.531, 0.440, 0.622)).items():  # fmt: skip
        assert law[name] == pytest.approx(numbers, abs=6e-4)
    # what a law of T <= 160k loses, and the same learning rate
    T = fit.shortest_fit(fit.valleys_of(runs))
    assert T == 160_000
    for times, regrets in fit.longer_runs(fit.valleys_of(runs), T).items():
        means = {1: (5, 5), 2: (11, 28), 4: (10, 93), 8: (7, 162)}[times]
        found = np.mean(regrets.law), np.mean(regrets.same)
        assert np.multiply(found, 1e4) == pytest.approx(means, abs=0.6)
    costs = map(cost, fit.larger_runs(fit.valleys_of(runs), T)["batch size 8"])
    _, mean, worst = zip(*costs)
    assert mean == pytest.approx([0.0018, 0.0147, 0.0201], abs=6e-5)
    assert worst == pytest.approx([0.0134, 0.0440, 0.0732], abs=6e-5)


@pytest.mark.parametrize("name, texts", [
    ("power-laptop", ["30 of 30 valleys: mean 22.019", "30 of 30 valleys: mean -0.483"]),
    ("transfer-quick", ["0.95 [0.61, 1.47]", "0.26 [0.19, 0.35]"]),
    ("compare-laptop", [
        "| Power (fitted) | -0.002 [-0.010, 0.006] | -0.002 [-0.013, 0.008] |",
        "| cosine (fitted) | 0.004 [0.001, 0.006] | -0.007 [-0.022, 0.009] |",
        "| Power (paper) | 0.004 [-0.003, 0.010] | 0.009 [0.000, 0.018] |",
        "| linear to 0 (fitted) | 0.006 [-0.000, 0.012] | -0.011 [-0.029, 0.008] |",
        "-0.012 [-0.023, -0.001] from that of WSD"]),
])  # fmt: skip
def test_the_other_committed_experiments(name, texts, capsys):
    experiment = name.partition("-")[0]
    assert paper.main([experiment, f"--report={RESULTS / name}", "--out=a"]) == 0
    printed = capsys.readouterr().out
    for text in texts:
        assert text in printed


# -- 8. Widths, and a comparison ---------------------------------------------------------


def test_widths_are_compared_at_the_same_length_and_batch_size(capsys):
    """Under muP, the best learning rate depends on the batch size, and not on the width."""

    def without_mup(cell: Cell) -> float:
        return log2_best(cell) - math.log2(cell.width / 32)

    grid = dict(batches=[2, 8], lengths=LENGTHS[:2])
    rows = made_rows(**grid) + made_rows(without_mup, **grid, attention_multiplier=0.25)
    for row in rows:
        if row["n_embd"] == 128 and row["batch_size"] == 8:
            row["loss"] = math.inf
    paper.report_transfer(rows, Path())
    printed = capsys.readouterr().out
    assert "with muP, width 128 over width 32: 1.00" in printed
    assert "over width 32, standard: 0.25" in printed


def test_a_comparison_is_of_cells_with_all_runs(capsys):
    grid = dict(batches=[2, 8], lengths=LENGTHS[:2], widths=[32], seeds=2, steps=0)
    rows = []
    for line, gap in {"WSD (fitted)": 0.0, "WSD": 0.004, "Power (fitted)": 0.002}.items():
        schedule = line.split()[0].lower()
        for row in made_rows(**grid, line=line, schedule=schedule):
            loss = 2 + gap * row["total_tokens"] / 1e5 + 0.01 * row["seed"]
            rows.append(row | dict(loss=loss))
    tuning = [row | {"loss": 9.0} for row in rows]
    for row in tuning:
        del row["line"]
    paper.report_compare(tuning + rows, Path())
    printed = capsys.readouterr().out
    assert "4 cells" in printed and "| Power (fitted) | 0.003 | 0.004 |" in printed
    assert "-0.003 from that of WSD," in printed
    paper.report_compare(rows[1:], Path())
    assert "3 cells" in capsys.readouterr().out
    # stopped while it tunes
    with pytest.raises(UserError, match="running"):
        paper.report_compare(tuning, Path())


def test_a_cell_keeps_the_seeds_and_settings_with_most_runs():
    assert fit.complete({"0": {1, 2, 3}, "1": {4, 5}, "2": {4, 5}}) == (
        {"1", "2"},
        {4, 5},
    )
    some = {"0": {1, 2, 3, 4}, "1": {1, 2, 3}, "2": {1}}
    assert fit.complete(some) == ({"0", "1"}, {1, 2, 3})
    # every seed lacks another setting
    some = {"0": {2, 3, 4, 5, 6}, "1": {1, 3, 4, 5, 6}, "2": {1, 2, 4, 5, 6}}
    assert fit.complete(some) == ({"0", "1", "2"}, {4, 5, 6})
    # no setting is common
    assert fit.complete({"0": {1, 2}, "1": {3, 4, 5}}) == ({"1"}, {3, 4, 5})


def test_a_valley_beside_diverged_runs_has_all_its_other_points():
    points = [(float(x), (x - 4.8) ** 2) for x in range(6)]
    points += [(float(x), math.inf) for x in (6, 7, 8)]
    assert fit.near_lowest(points, 7) == points[:6]
    x, why_not = fit.bottom(points)
    assert (x, why_not) == (pytest.approx(4.8), "")


def test_runs_with_other_settings_are_not_fitted_together(capsys):
    write(made_rows(widths=[32], weight_decay=0.1), "a", fingerprint="1")
    write(made_rows(widths=[32], weight_decay=0.0), "b", fingerprint="1")
    write(made_rows(widths=[32], weight_decay=0.1), "d", fingerprint="2")
    assert "weight_decay 0.0 and 0.1" in refused(["a", "b"], capsys)
    assert "fingerprint 1 and 2" in refused(["a", "d"], capsys)
    Path("c").mkdir()
    assert "no records" in refused(["c"], capsys)


# -- 9. A table from elsewhere -----------------------------------------------------------


def table(seeds=1, **more) -> list[dict]:
    """What somebody else's trainer may have logged."""
    rows = []
    for row in made_rows(widths=[32], batches=[2, 4, 8], seq_len=1024, seeds=seeds):
        names = ("lr", "total_tokens", "batch_size", "seq_len", "seed")
        theirs = {name: row[name] for name in names}
        rows.append(theirs | {"val_loss": row["loss"]} | more)
    return rows


def write_csv(rows: list[dict], separator=",") -> str:
    with open("runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
        file.write("\n")  # an empty last line
    return "runs.csv"


def law_of(rows: list[dict], columns="", separator=",") -> tuple[float, float]:
    """b and q of a table."""
    file = Path(write_csv(rows, separator))
    law = fit.fit_law(bottoms_of(fit.trials_of(read_csv(file, columns, 4096))))
    return law.b, law.q


MADE = pytest.approx((-0.4, 0.6), abs=1e-6)


def test_a_table_gives_its_law_and_commands_with_its_sequence_length(capsys):
    rows = [row | {"shape": 64 * 2 ** row["seed"]} for row in table(seeds=2)]
    assert fit.main([write_csv(rows)]) == 0
    law = law_in(".")
    assert (law["b"], law["q"]) == MADE and law["a"] == pytest.approx(40)
    printed = capsys.readouterr().out
    assert "shape 128 " in printed  # the widest, without which we fit
    assert law["measured"]["seq_len"] == [1024, 1024]
    # numbers for the other trainer
    assert next_of(printed).power_b == pytest.approx(-0.4)


@pytest.mark.parametrize("batch_tokens", [256, 10_240, 131_072])
def test_a_table_without_sequences_keeps_its_tokens_per_step(batch_tokens, capsys):
    rows = []
    for row in table():
        tokens = batch_tokens * row.pop("batch_size") // 2
        del row["seq_len"]
        rows.append(row | {"batch_tokens": tokens})
    assert fit.main([write_csv(rows)]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "next: " in x]
    typed = train.parse(shlex.split(line.partition("train.py ")[2]))[0]
    assert typed["batch_size"] * typed["seq_len"] in {batch_tokens * k for k in (1, 2, 4)}


def test_rates_that_a_seed_has_in_single_precision_are_the_same_rates():
    rows = table(seeds=2)
    for row in rows:
        if row["seed"] == 1:
            row["lr"] = float(np.float32(row["lr"]))
    assert law_of(rows) == MADE


def test_columns_may_have_other_names_and_separators():
    names = {"lr": "learning rate", "total_tokens": "D", "val_loss": "val/loss"}
    rows = []
    for row in table():
        row["batch_tokens"] = 1024 * row.pop("batch_size")
        del row["seq_len"]
        rows.append({names.get(name, name): value for name, value in row.items()})
    columns = ",".join(f"{ours}={theirs}" for ours, theirs in names.items())
    for separator in ",;\t":
        assert law_of(rows, f"{columns},seq_len=1024", separator) == MADE


def test_a_table_as_trainers_log_it(capsys):
    """Its batch_size is a micro-batch, some runs diverged, and some were stopped."""
    rows = table(Status="FINISHED")
    for row in rows:
        best = 40 * (row["batch_size"] / 4) ** 0.6 * row["total_tokens"] ** -0.4
        if row["lr"] > 3 * best:
            row["val_loss"] = {2: "", 4: "nan", 8: "inf"}[row["batch_size"]]
        row["tokens_per_step"] = 1024 * row["batch_size"]
        row["batch_size"] = 1
    # the loss of a crashed run looks like that of a bad learning rate
    crashed = [row | {"Status": "FAILED", "val_loss": 9.0} for row in rows[::10]]
    assert law_of(rows + crashed, "batch_tokens=tokens_per_step") == MADE
    assert f"{len(crashed)} runs" in capsys.readouterr().out


def test_tables_of_two_schedules_are_not_fitted_together(capsys):
    Path(write_csv(table(schedule="wsd"))).rename("wsd.csv")
    Path(write_csv(table(schedule="cosine"))).rename("cosine.csv")
    assert "decay_share 0.0 and 0.1" in refused(["wsd.csv", "cosine.csv"], capsys)


COSINE = table(schedule="Cosine")
RANDOM = [row | {"seed": i, "lr": 0.001 * (1 + i)} for i, row in enumerate(table())]


@pytest.mark.parametrize("rows, columns, says", [
    ([{"LR": 1} | row for row in table()], "", "LR and lr"),
    (table(), "lr=rates", "no column rates"), (table(), "learning_rate=lr", "choose from"),
    ([{"val_loss": 1.0}], "", "no column 'lr'"), (table(lr="high"), "", "row 2"),
    (table(val_loss=""), "", "val_loss"), (table(state=""), "", "finished"),
    (COSINE + table(schedule="wsd"), "", "cosine and wsd"),
    (RANDOM, "", "no cell has a minimum"), (table(decay_share=10), "", "from 0 to 1"),
])  # fmt: skip
def test_a_fault_of_a_table_is_one_line(rows, columns, says, capsys):
    assert says in refused([write_csv(rows), "--columns", columns], capsys)
    assert [path.name for path in Path().iterdir()] == ["runs.csv"]


@pytest.mark.parametrize("schedule", ["cosine", "power"])
def test_runs_of_another_schedule_get_a_law(schedule, capsys):
    assert fit.main([write_csv(table(schedule=schedule))]) == 0
    assert f"runs of {schedule}" in capsys.readouterr().out
    assert read_law(Path("law.json")).schedule == schedule
