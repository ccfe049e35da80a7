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
import train
from config import make_config, read_law, remarks
from fit import Cell
from schedules import PEAKS, best_lr, paper_batch_size, peak
from tools.flags import UserError
from tools.rows import read_csv
from tools.student import student

RESULTS = Path(__file__).parent.parent / "research/results"
LENGTHS = [100_000 * 2**k for k in range(5)]


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
            n_embd=width, n_layer=2, seq_len=seq_len, batch_size=batch, total_tokens=T,
            schedule="wsd", preset="laptop", warmup_tokens=3000, decay_share=0.1,
            batch_tokens=batch * seq_len, base_width=64, shape=f"width {width}",
        ) | more  # fmt: skip
        center = best(fit.cell_of(row))
        middle = round(2 * (center + math.log2(1e4)))
        for seed, j in itertools.product(range(seeds), range(-steps, steps + 1)):
            x = (middle + j) / 2 - math.log2(1e4)
            loss = 2 + 0.03 * (x - center) ** 2 + 0.02 * abs(math.log2(batch) - 1.4)
            loss += rng.normal(0, noise)
            rows.append(row | dict(seed=seed, lr=2**x, loss=loss))
    return rows


def write(rows: list[dict], folder: str, fingerprint="0") -> str:
    """The folder of a sweep with these rows."""
    Path(folder).mkdir()
    lines = []
    for row in rows:
        results = {"val_loss": row["loss"] if row["loss"] < math.inf else None}
        config = {name: row[name] for name in row if name not in ("loss", "shape")}
        share = config["decay_share"]
        config = {"decay_tokens": round(share * row["total_tokens"])} | config
        origin = {"fingerprint": fingerprint}
        lines.append(json.dumps(dict(config=config, results=results, origin=origin)))
    Path(folder, "trunk.jsonl").write_text("\n".join(lines))
    return folder


def refused(argv: list[str], capsys) -> str:
    """The one line with which fit.py refuses a command."""
    capsys.readouterr()
    assert fit.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("fit.py: ") and error.count("\n") == 1
    return error


def fit_of(rows: list[dict]) -> fit.Fit:
    return fit.fit_law(fit.bottoms(fit.valleys_of(fit.curves_of(rows))))


def configs_of(command: str) -> train.TrainConfig:
    """The config of a printed command, as train.py makes it."""
    typed, args = train.parse(shlex.split(command)[2:])
    return make_config(read_law(args.law), **typed)


def next_of(printed: str) -> train.TrainConfig:
    return configs_of(printed.splitlines()[-1].removeprefix("next: "))


# -- 1. Rows, and 2. bottoms -------------------------------------------------------------


def test_all_means_are_over_the_same_seeds():
    def points_of(*seeds: dict) -> list:
        rows = []
        for seed, losses in enumerate(seeds):
            for lr, loss in losses.items():
                row = dict(total_tokens=1e6, batch_size=2, seq_len=128, schedule="wsd")
                rows.append(row | dict(shape="a", seed=seed, lr=lr, loss=loss))
        (points,) = fit.valleys_of(fit.curves_of(rows)).values()
        return points

    found = points_of({1: 5.0, 2: 4.0, 4: 6.0}, {2: 2.0, 4: 3.0, 8: 1.0})
    assert found == [(1.0, 3.0), (2.0, 4.5)]
    # the second has begun
    assert points_of({1: 5.0, 2: 4.0, 4: 6.0}, {2: 2.0}) == [(0, 5.0), (1, 4.0), (2, 6.0)]


STEPS = [x / 2 for x in range(-5, 6)]
VALLEY = [(x, 1 + (x - 0.3) ** 2 + 0.1 * (x - 0.3) ** 3) for x in STEPS]
HILL = [(x, 1 - x * x / 9 if x else 0.7) for x in STEPS[2:9]]
SLOPE = [(x, -x - x**3 if x else -5.0) for x in STEPS[2:9]]  # no derivative is 0


def diverging(*at: float) -> list[tuple]:
    return [(x, math.inf if x in at else y) for x, y in VALLEY]


def test_a_cubic_is_found_exactly():
    bent = [(x, y + 7 * (x < -1)) for x, y in VALLEY]  # outside the window
    for points in (VALLEY, bent):
        assert fit.bottom(points) == (pytest.approx(0.3, abs=1e-12), "")
    parabola = [(x - 9, 2 + 0.03 * (x - 0.2) ** 2) for x in STEPS]
    assert fit.bottom(parabola)[0] == pytest.approx(0.2 - 9, abs=1e-9)


@pytest.mark.parametrize("points, why", [
    (VALLEY[:4], "at highest"), (VALLEY[6:], "at lowest"), (VALLEY[:1], "at lowest"),
    (VALLEY[5:8], "too few"), (VALLEY[4:8], ""), (diverging(1.0), ""), (HILL, "no valley"),
    (diverging(1.0, 1.5, 2.0), ""), (diverging(*STEPS), "diverged"),
    (SLOPE, "no valley"),
])  # fmt: skip
def test_unusable_minima_say_why(points, why):
    assert fit.bottom(points)[1] == why


def test_a_valley_beside_diverged_runs_has_all_its_other_points():
    points = [(float(x), (x - 4.8) ** 2) for x in range(6)]
    points += [(float(x), math.inf) for x in (6, 7, 8)]
    assert fit.near_lowest(points) == points[:6]
    assert fit.bottom(points) == (pytest.approx(4.8), "")
    # five points of a pilot, one of which diverged: a cubic would go through all others
    points = [(-2.0, 2.5), (-1.0, 2.125), (0.0, 2.0), (1.0, 2.25)]
    c2, c1, _ = np.polyfit(*np.array(points).T, 2)
    assert fit.bottom([*points, (2.0, math.inf)])[0] == pytest.approx(-c1 / (2 * c2))


# -- 3. The law --------------------------------------------------------------------------


@pytest.mark.parametrize("a, b, q", [(40, -0.4, 0.6), (4.6, -0.51, 1.0)])
@pytest.mark.parametrize("grid", [
    dict(widths=[64], batches=[2, 16], lengths=LENGTHS[:2]), dict(seeds=3),
])  # fmt: skip
def test_a_made_up_law_comes_back_from_every_grid(grid, a, b, q):
    found = fit_of(made_rows(lambda cell: log2_best(cell, a, b, q), **grid))
    assert (found.b, found.q) == pytest.approx((b, q), abs=1e-9)
    assert found.assumed == ()
    assert np.allclose(list(found.log2_a.values()), math.log2(a), atol=1e-6)


def test_lengths_in_proportion_to_the_batch_size_determine_one_exponent():
    cells = [Cell("a", 1000.0 * batch, batch, batch / 32) for batch in (2, 4, 8)]
    law = fit.fit_law({cell: log2_best(cell) for cell in cells}, dict(b=0.0, q=0.6))
    assert law.assumed == ("q",) and law.b == pytest.approx(-0.4)


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
    assert capsys.readouterr().out.count("assumed, as in the preset") == len(assumed)
    ends = json.loads(Path("a/law.json").read_text())
    assert all((ends[f"{x}_interval"] == [None, None]) == (x in assumed) for x in "bq")
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


def test_the_committed_law_to_three_digits(capsys):
    assert fit.main([str(RESULTS / "wsd-laptop"), "--out=a"]) == 0
    law = json.loads(Path("a/law.json").read_text())
    for name, value in dict(a=0.612, b=-0.278, q=0.531).items():
        assert law[name] == pytest.approx(value, abs=6e-4)
    printed = capsys.readouterr().out
    for text in (
        "0.0011 (0.0058)   0.0028 (0.0089)",
        "0.0007 (0.0021)   0.0162 (0.0231)",
    ):
        assert text in printed


# -- 4. Intervals ------------------------------------------------------------------------


def test_quantiles_of_student_are_those_of_the_tables():
    table = {1: 12.706, 2: 4.303, 4: 2.776, 8: 2.306, 100: 1.984, 1e6: 1.960}
    found = student(np.array(list(table)))
    assert found == pytest.approx(list(table.values()), rel=2e-3)


def test_the_interval_of_a_mean_is_that_of_student_over_seeds_or_over_batch_sizes():
    rng = np.random.default_rng(0)
    of_seed = rng.normal(0, 0.1, 3)
    of_batch = rng.normal(0, 0.2, 4)

    def half(table: np.ndarray) -> float:
        curves = {}
        for (seed, batch), loss in np.ndenumerate(table):
            curves[Cell("a", 1e6, batch, batch), str(seed)] = {0.0: float(loss)}
        mean = lambda some: np.array([np.mean([curve[0.0] for curve in some.values()])])
        ((answer, low, high),) = fit.intervals(curves, mean)
        assert answer == pytest.approx(table.mean())
        return high - answer

    def expected(values) -> float:
        n = len(values)
        return student(np.array(n - 1.0)) * np.std(values, ddof=1) / math.sqrt(n)

    assert half(of_seed[:, None] + np.zeros(4)) == pytest.approx(expected(of_seed))
    assert half(np.zeros((3, 1)) + of_batch) == pytest.approx(expected(of_batch))
    both = of_seed[:, None] + of_batch
    assert half(both) == pytest.approx(max(expected(of_seed), expected(of_batch)))


# -- 5. What a law is worth --------------------------------------------------------------


def test_regret_is_the_height_above_the_bottom():
    points = [(x, 2 + 0.03 * (x - 0.2) ** 2) for x in STEPS]
    for x in (-1.5, 0.0, 0.2, 1.5):
        assert fit.regret(points, x) == pytest.approx(0.03 * (x - 0.2) ** 2, abs=1e-9)
    # beyond the 7 points of the curve, the straight line between two that we tried
    assert fit.regret(points, 2.25) == pytest.approx(0.03 * (1.8**2 + 2.3**2) / 2)
    assert math.isnan(fit.regret(points, 2.51)) and math.isnan(fit.regret(points, -3))
    # beside runs that diverged it is worse than all others
    assert fit.regret(diverging(2.0, 2.5), 1.9) == math.inf


@pytest.mark.parametrize("bend", [0.0, 0.3])
def test_regrets_in_longer_runs_are_their_closed_form(bend):
    """b is -0.4 up to 200k, where we fit it, and -0.4 + bend after that."""

    def bent(cell: Cell) -> float:
        return log2_best(cell) + bend * max(0.0, math.log2(cell.T / LENGTHS[1]))

    T, regrets = fit.worth(fit.valleys_of(fit.curves_of(made_rows(bent, steps=6))))
    assert (T, list(regrets)) == (LENGTHS[1], LENGTHS[2:])
    for length, found in regrets.items():
        doublings = math.log2(length / T)
        expected = [
            0.03 * (bend * doublings) ** 2,
            0.03 * ((0.4 - bend) * doublings) ** 2,
        ]
        assert np.array(found) == pytest.approx(np.tile(expected, (12, 1)).T, abs=1e-9)


# -- 6. From a law to a run --------------------------------------------------------------


def test_the_next_run_has_the_settings_of_the_sweep_unless_typed(capsys):
    more = dict(weight_decay=0.05, base_width=256, data="a b", preset="laptop-moe")
    rows = made_rows(lambda cell: log2_best(cell, 3, -0.3, 0.5), **more)
    assert fit.main([write(rows, "a")]) == 0
    cfg = next_of(capsys.readouterr().out)
    assert (cfg.schedule, cfg.total_tokens, cfg.batch_size) == ("power", 12_800_000, 2)
    assert (cfg.weight_decay, cfg.base_width, cfg.data) == (0.05, 256, "a b")
    assert (cfg.n_layer, cfg.decay_share, cfg.preset) == (2, 0.1, "laptop-moe")
    assert cfg.n_embd == 128  # of the preset, because muP carries the law to it
    assert not remarks(read_law(Path("a/law.json")), cfg).startswith("n_layer")
    cfg = configs_of("python train.py --law a/law.json --n_layer 3")
    assert cfg.n_layer == 3 and cfg.weight_decay == 0.05
    assert "n_layer 2 (this is 3)" in remarks(read_law(Path("a/law.json")), cfg)


@pytest.mark.parametrize("schedule", ["power", "wsd", "linear", "cosine", "constant"])
@pytest.mark.parametrize("of, share", [("wsd", 0.3), ("wsd", 0.1), ("linear", 0.0)])
def test_train_takes_the_learning_rate_of_a_law(schedule, of, share):
    made = dict(schedule=of, decay_share=share)
    rows = made_rows(lambda cell: log2_best(cell, 3, -0.3, 0.5), **made)
    assert fit.main([write(rows, "a")]) == 0
    at = f"--schedule {schedule} --total_tokens 400k --batch_size 4 --warmup_tokens 4k"
    cfg = configs_of(f"python train.py --law a/law.json {at} --decay_share 0.3")
    T = LENGTHS[-1] if schedule == "power" else 400_000
    times = peak(schedule, 0.3, T) / peak(of, share, T)
    beta = paper_batch_size(4 * 128)
    if schedule == "power":
        found = (cfg.power_a, cfg.power_b, cfg.power_q, cfg.lr_max)
        ceiling = times * 3 * beta**0.5 * LENGTHS[0] ** -0.3
        assert found == pytest.approx((times * 3, -0.3, 0.5, ceiling), rel=1e-3)
    else:
        expected = times * 3 * beta**0.5 * 400_000**-0.3
        assert cfg.lr == pytest.approx(expected, rel=1e-3)
    says = remarks(read_law(Path("a/law.json")), cfg)
    assert "total_tokens" not in says
    assert ("times" in says) == (abs(times - 1) > 0.01)
    # a typed learning rate wins
    name = "power_a" if schedule == "power" else "lr"
    cfg = configs_of(f"python train.py --law a/law.json {at} --{name} 0.3")
    assert getattr(cfg, name) == 0.3 and not remarks(read_law(Path("a/law.json")), cfg)


def test_a_law_that_rises_with_T_gets_no_power_run(capsys):
    rows = made_rows(lambda cell: log2_best(cell, b=0.1))
    assert fit.main([write(rows, "a")]) == 0
    assert next_of(capsys.readouterr().out).schedule == "wsd"
    with pytest.raises(UserError, match="needs b <= 0"):
        configs_of("python train.py --law a/law.json --schedule power")


GOOD = dict(
    a=1.0, b=-0.3, q=0.5, schedule="wsd", decay_share=0.3, first_n=1e5, assumed=[],
    measured=dict(total_tokens=[1e5, 1e6]), settings={"n_layer": 2},
)  # fmt: skip
BAD = {
    "text": "not JSON",
    "nan": json.dumps(GOOD | {"a": math.nan}),
    "setting": json.dumps(GOOD | {"settings": {"layers": 3}}),
    "ending": json.dumps(GOOD | {"schedule": "triangle"}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_law_is_one_line(name, one_line):
    Path("law.json").write_text(BAD[name])
    says = one_line(train.main, ["--law", "law.json", "--out", "run"])
    assert "law.json" in says and not Path("run").exists()


# -- A pilot, and edges ------------------------------------------------------------------


def pilot_rows(best=0.008, off=(0.0, 0.0)) -> list[dict]:
    """Power at five learning rates at n = T, a factor of 2 apart, with two seeds."""
    rows = []
    for seed, k in itertools.product((100, 101), range(-2, 3)):
        lr = 0.006 * 2.0**k
        cfg = make_config(
            n_layer=2, n_embd=32, n_head=2, total_tokens=327_680, seed=seed,
            power_a=lr / ((1 / 4) ** 0.5 * 327_680**-0.3), lr_max=1.0,
            warmup_tokens=32_768,
        )  # fmt: skip
        x = math.log2(lr / best) - off[seed - 100]
        rows.append(vars(cfg) | dict(loss=2 + 0.03 * x**2 + 0.001 * x**3))
    return rows


def test_a_pilot_gives_one_number(capsys):
    assert fit.main([write(pilot_rows(off=(0.1, -0.1)), "a")]) == 0
    printed = capsys.readouterr().out
    assert "lr  0.008 [" in printed and printed.count("assumed") == 2
    law = read_law(Path("a/law.json"))
    assert (law.schedule, law.b, law.q, law.decay_share) == ("power", -0.3, 0.5, 0.3)
    assert best_lr(327_680, 1 / 4, law) == pytest.approx(0.008, rel=2e-3)
    cfg = next_of(printed)
    assert (cfg.schedule, cfg.total_tokens) == ("power", 8 * 327_680)
    # no ceiling, because Power had none in the pilot
    assert (cfg.power_a, cfg.power_b) == (pytest.approx(law.a, rel=1e-3), -0.3)
    assert cfg.lr_max == pytest.approx(0.008 * 10**0.3, rel=1e-2)
    # WSD from the same number
    cfg = configs_of("python train.py --law a/law.json --schedule wsd")
    expected = 0.008 / PEAKS["power", 0.3][0] * (3_200_000 / 327_680) ** -0.3
    assert cfg.lr == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("best, end, lrs", [
    (0.001, "lowest", "0.000375,0.0005303,0.00075,0.001061"),
    (0.05, "highest", "0.03394,0.048,0.06788,0.096"),
])  # fmt: skip
def test_an_edge_is_named_with_the_flag_that_mends_it(best, end, lrs, capsys):
    folder = write(pilot_rows(best), "a")
    assert fit.main([folder]) == 2
    printed = capsys.readouterr()
    assert "no cell has a minimum" in printed.err and f"at {end}" in printed.out
    assert f"--lrs {lrs}\n" in printed.out
    assert not Path("a/law.json").exists()


def test_a_cell_with_an_edge_is_left_out_and_named(capsys):
    rows = made_rows(widths=[32], batches=[2, 4])
    short = [row for row in rows if row["total_tokens"] == LENGTHS[4]]
    kept = [row for row in rows if row["total_tokens"] < LENGTHS[4]]
    kept += [r for r in short if math.log2(r["lr"]) > log2_best(fit.cell_of(r)) + 0.1]
    assert fit.main([write(kept, "a")]) == 0
    printed = capsys.readouterr().out
    assert "2 cells are best at the lowest rate" in printed
    assert next_of(printed).total_tokens == 8 * LENGTHS[3]


def test_runs_with_other_settings_are_not_fitted_together(capsys):
    rows = made_rows(widths=[32]) + made_rows(widths=[32], weight_decay=0.0)
    assert "weight_decay" in refused([write(rows, "a")], capsys)
    Path("c").mkdir()
    assert "no records" in refused(["c"], capsys)


# -- A table from elsewhere --------------------------------------------------------------


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
    found = fit_of(read_csv(Path(write_csv(rows, separator)), columns))
    return found.b, found.q


MADE = pytest.approx((-0.4, 0.6), abs=0.005)  # from rounded learning rates


def test_a_table_gives_its_law_and_numbers_for_its_trainer(capsys):
    rows = [row | {"shape": 64 * 2 ** row["seed"]} for row in table(seeds=2)]
    assert fit.main([write_csv(rows)]) == 0
    law = read_law(Path("law.json"))
    assert (law.b, law.q) == MADE and law.a == pytest.approx(40, rel=0.05)
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    assert config.main(shlex.split(command)[2:]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "seq_len 1024 " in printed and "schedule power" in printed
    # with an unknown ending it serves its own, and says so
    cfg = make_config(law, total_tokens=10**6, decay_share=0.5)
    assert "does not know" in remarks(law, cfg)
    cfg = make_config(law, total_tokens=400_000, schedule="wsd", batch_size=4)
    assert cfg.lr == pytest.approx(40 * 400_000**-0.4, rel=0.05)


def test_columns_may_have_other_names_and_separators():
    """As in a sweep of OpenEuroLLM, with N, D, gbsz, lr and loss."""
    names = {"total_tokens": "D", "batch_size": "gbsz", "val_loss": "loss"}
    rows = []
    for row in table():
        del row["seq_len"], row["seed"]
        rows.append({names.get(x, x): value for x, value in row.items()} | {"N": 5e7})
    columns = ",".join(f"{ours}={theirs}" for ours, theirs in names.items())
    for separator in ",;\t":
        assert law_of(rows, f"{columns},shape=N,seq_len=1024", separator) == MADE


def test_runs_that_diverged_and_rates_in_single_precision():
    rows = table(seeds=2)
    for row in rows:
        best = 40 * (row["batch_size"] / 4) ** 0.6 * row["total_tokens"] ** -0.4
        if row["lr"] > 3 * best:
            row["val_loss"] = {2: "", 4: "nan", 8: "inf"}[row["batch_size"]]
        if row["seed"] == 1:
            row["lr"] = float(np.float32(row["lr"]))
    assert law_of(rows) == MADE


@pytest.mark.parametrize("rows, columns, says", [
    (table(), "lr=rates", "row 2, lr"), (table(), "learning_rate=lr", "no such column"),
    (table(), "shape=N", "shape=N"), ([{"val_loss": 1.0}], "", "no column lr"),
    (table(lr="high"), "", "row 2, lr"), (table(val_loss=""), "", "no cell has a minimum"),
    (table(lr=-1), "", "row 2"),
])  # fmt: skip
def test_a_fault_of_a_table_is_one_line(rows, columns, says, capsys):
    assert says in refused([write_csv(rows), "--columns", columns], capsys)
    assert [path.name for path in Path().iterdir()] == ["runs.csv"]
