"""Made-up laws come back, what they lose is the closed form, and faults are one line."""

import csv
import itertools
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import fit
import train
from config import make_config
from fit import Cell
from tools.stats import student

LENGTHS = [100_000 * 2**k for k in range(5)]
LATTICE = math.log2(1e-4)  # learning rates are 1e-4 * 2^(j / 2)


def log2_best(cell: Cell, a=40, b=-0.4, q=0.6) -> float:
    return math.log2(a) + b * math.log2(cell.T) + q * math.log2(cell.beta)


def gentle(cell: Cell) -> float:
    return log2_best(cell, a=3, b=-0.3, q=0.5)


def made_rows(
    best=log2_best,
    widths=(32, 64, 128),
    batches=(1, 2, 4, 8),
    lengths=LENGTHS,
    seeds=1,
    steps=4,
    **more,
) -> list[dict]:
    """Rows of a sweep, with a loss of 0.03 x^2 beside best(cell), in doublings of lr.

    Batch sizes 2 and 4 are the best.
    """
    rows = []
    fields = dict(schedule="wsd", decay_share=0.1, warmup_tokens=3000, n_layer=2)
    fields |= dict(fingerprint="0") | more
    for width, batch, T in itertools.product(widths, batches, lengths):
        cell = dict(n_embd=width, n_head=width // 16, batch_size=batch, total_tokens=T)
        row = vars(make_config(**fields | cell)) | {"shape": ("width", width)}
        row["batch_tokens"] = batch * row["seq_len"]
        center = best(fit.cell_of(row))
        middle = round(2 * (center - LATTICE))
        for seed, j in itertools.product(range(seeds), range(-steps, steps + 1)):
            x = (middle + j) / 2 + LATTICE
            loss = 2 + 0.03 * (x - center) ** 2 + 0.02 * abs(math.log2(batch) - 1.4)
            rows.append(row | dict(seed=str(seed), lr=2**x, loss=loss))
    return rows


def write(rows: list[dict], folder: str) -> str:
    """The folder of a sweep with these rows."""
    Path(folder).mkdir(exist_ok=True)
    lines = []
    for row in rows:
        results = {"val_loss": row["loss"] if row["loss"] < math.inf else None}
        config = dict(row)
        for name in ("loss", "shape", "batch_tokens"):
            config.pop(name, None)
        lines.append(json.dumps({"config": config, "results": results}) + "\n")
    Path(folder, "trunk.jsonl").write_text("".join(lines))
    return folder


def law_in(folder: str) -> dict:
    return json.loads(Path(folder, "law.json").read_text())


def next_of(printed: str) -> train.TrainConfig:
    """The config of the printed command, as train.py makes it."""
    (command,) = re.findall(r"^next.*?: (.*)", printed, re.M)
    typed, _ = train.parse(shlex.split(command)[2:])
    return make_config(**typed)


MADE = pytest.approx((-0.4, 0.6), abs=1e-6)  # b and q of log2_best

# -- From valleys to bottoms -------------------------------------------------------------

STEPS = [x / 2 for x in range(-5, 6)]
VALLEY = [(x, 1 + (x - 0.3) ** 2 + 0.1 * (x - 0.3) ** 3) for x in STEPS]
DIVERGED = [(x, math.inf) for x in STEPS]
HILL = [(x, 1 - x * x / 9 if x else 0.7) for x in STEPS[2:9]]


def test_a_cubic_is_found_exactly():
    bent = [(x, y + 7 * (x < -1)) for x, y in VALLEY]  # outside the window
    assert fit.bottom(bent) == (pytest.approx(0.3, abs=1e-9), "")
    parabola = [(x - 9, 2 + 0.03 * (x - 0.2) ** 2) for x in STEPS]
    assert fit.bottom(parabola)[0] == pytest.approx(0.2 - 9, abs=1e-8)


@pytest.mark.parametrize("points, why", [
    (VALLEY[:4], "at highest"), (VALLEY[6:], "at lowest"), (VALLEY[:1], "at lowest"),
    (VALLEY[5:8], "too few"), (VALLEY[4:8], ""), (VALLEY[:7] + DIVERGED[7:], ""),
    (DIVERGED, "diverged"), (HILL, "no valley"),
])  # fmt: skip
def test_unusable_minima_say_why(points, why):
    assert fit.bottom(points)[1] == why


def test_a_valley_beside_diverged_runs_has_all_its_other_points():
    points = [(float(x), (x - 4.8) ** 2) for x in range(6)]
    points += [(float(x), math.inf) for x in (6, 7, 8)]
    assert fit.bottom(points) == (pytest.approx(4.8), "")
    # five points of a pilot, one of which diverged: a cubic would go through all others
    points = [(-2.0, 2.5), (-1.0, 2.125), (0.0, 2.0), (1.0, 2.25)]
    c2, c1, _ = np.polyfit(*np.array(points).T, 2)
    assert fit.bottom([*points, (2.0, math.inf)])[0] == pytest.approx(-c1 / (2 * c2))


# -- From bottoms to a law ---------------------------------------------------------------


def cells_of(pairs: list[tuple]) -> dict[Cell, float]:
    """{cell: x of the law} of (T, batch size)."""
    cells = [Cell((), T, batch, batch / 32) for T, batch in pairs]
    return {cell: log2_best(cell) for cell in cells}


@pytest.mark.parametrize("pairs, assumed", [
    ([(1000, 2), (2000, 4), (4000, 8)], ("q",)),  # T in proportion to the batch size
    ([(1000, 2), (1400, 2)], ("b", "q")),  # below a factor of 1.5
    # 10M tokens in whole batches, which would "determine" b by a factor of 1.06
    ([(9.96e6, 1), (9.96e6, 2), (9.44e6, 4), (9.96e6, 4)], ("b",)),
    ([(1e6, 1), (1e6, 2), (4e6, 1), (4e6, 1.2)], ()),
], ids=str)  # fmt: skip
def test_an_exponent_is_free_if_its_cells_differ_by_a_factor(pairs, assumed):
    law = fit.fit_law(cells_of(pairs), b=-0.4, q=0.6)
    assert law.assumed == assumed
    assert (law.b, law.q) == pytest.approx((-0.4, 0.6))
    other = fit.fit_law(cells_of(pairs), b=7.0, q=9.0)
    assert (other.b == 7.0, other.q == 9.0) == ("b" in assumed, "q" in assumed)


def test_the_interval_of_a_mean_is_that_of_student_over_seeds_or_over_batch_sizes():
    rng = np.random.default_rng(0)
    of_seed = rng.normal(0, 0.1, 3)
    of_batch = rng.normal(0, 0.2, 4)

    def mean(curves: fit.Curves) -> np.ndarray:
        return np.array([np.mean([curve[0.0] for curve in curves.values()])])

    def half(table: np.ndarray) -> float:
        curves = {}
        for (seed, batch), loss in np.ndenumerate(table):
            curves[Cell((), 1e6, batch, batch), str(seed)] = {0.0: float(loss)}
        ((answer, _, high),) = fit.intervals(curves, mean)
        assert answer == pytest.approx(table.mean())
        return high - answer

    def expected(values) -> float:
        n = len(values)
        return student(n - 1) * np.std(values, ddof=1) / math.sqrt(n)

    assert half(of_seed[:, None] + np.zeros(4)) == pytest.approx(expected(of_seed))
    assert half(np.zeros((3, 1)) + of_batch) == pytest.approx(expected(of_batch))
    both = of_seed[:, None] + of_batch
    assert half(both) == pytest.approx(max(expected(of_seed), expected(of_batch)))
    assert math.isnan(half(both[:1, :1]))  # one run says nothing


def test_b_has_an_interval_over_two_batch_sizes_although_q_has_none():
    """One batch size asks for -0.4, the other for -0.3. Without one, q is assumed."""

    def of_batch(cell: Cell) -> float:
        return log2_best(cell, b=-0.4 if cell.batch_size == 2 else -0.3)

    rows = made_rows(of_batch, widths=[32], batches=[2, 4], seeds=2, steps=6)
    assert fit.main([write(rows, "a")]) == 0
    low, high = law_in("a")["b_interval"]
    half = student(1) * 0.05  # that of the mean of -0.4 and -0.3
    assert (low, high) == pytest.approx((-0.35 - half, -0.35 + half), abs=1e-3)


# -- From a law to a run -----------------------------------------------------------------


def test_the_next_run_has_the_settings_of_the_sweep_unless_typed(capsys):
    more = dict(weight_decay=0.05, base_width=256, data="a b", preset="laptop-moe")
    assert fit.main([write(made_rows(gentle, batches=[2, 4], **more), "a")]) == 0
    cfg = next_of(capsys.readouterr().out)
    assert (cfg.schedule, cfg.decay_share) == ("wsd", 0.1)
    best = 3 * (2 * 128 / 4096) ** 0.5 * LENGTHS[-1] ** -0.3
    assert cfg.lr == pytest.approx(best / 2, rel=0.01)
    assert cfg.total_tokens == 16 * LENGTHS[-1] and cfg.batch_size == 2
    assert (cfg.weight_decay, cfg.base_width, cfg.data) == (0.05, 256, "a b")
    assert (cfg.n_layer, cfg.n_embd, cfg.n_expert) == (2, 128, 8)
    assert (cfg.preset, cfg.fingerprint) == ("laptop-moe", "0")
    assert cfg.warmup_tokens == 100_000  # of the preset


def test_the_next_run_of_a_wide_pilot_is_as_wide(capsys):
    """Not the 3 layers of width 128 of its preset."""
    fields = dict(widths=[256], n_layer=8, batches=[4], lengths=LENGTHS[:1])
    assert fit.main([write(made_rows(gentle, **fields), "a")]) == 0
    cfg = next_of(capsys.readouterr().out)
    assert (cfg.n_layer, cfg.n_embd, cfg.n_head) == (8, 256, 16)
    assert cfg.attention_multiplier == 1 / cfg.d_head  # as muP has it


# -- A pilot, and the folder of a sweep --------------------------------------------------


def pilot_rows(best=0.008, off=(0.0, 0.0)) -> list[dict]:
    """Power at five learning rates at n = T, a factor of 2 apart, with two seeds."""
    rows = []
    for seed, k in itertools.product((100, 101), range(-2, 3)):
        lr = 0.0064 * 2.0**k
        a = lr / ((1 / 4) ** 0.5 * 327_680**-0.3)
        fields = dict(n_layer=2, n_embd=32, n_head=2, total_tokens=327_680, seed=seed)
        cfg = make_config(**fields, power_a=a, lr_max=1.0, warmup_tokens=32_768)
        x = math.log2(lr / best) - off[seed - 100]
        rows.append(vars(cfg) | dict(loss=2 + 0.03 * x**2 + 0.001 * x**3))
    return rows


def test_a_pilot_gives_one_number_and_a_figure(figures, capsys):
    assert fit.main([write(pilot_rows(off=(0.1, -0.1)), "a")]) == 0
    assert Path("a/valleys.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "lr  0.008 [" in printed and printed.count("assumed") == 2
    law = law_in("a")
    assert (law["schedule"], law["b"], law["q"]) == ("power", -0.3, 0.5)
    assert law["a"] * 0.25**0.5 * 327_680**-0.3 == pytest.approx(0.008, rel=2e-3)
    cfg = next_of(printed)
    assert (cfg.schedule, cfg.decay_share) == ("power", 0.3)
    assert cfg.total_tokens == pytest.approx(16 * 327_680, rel=1e-2)
    assert cfg.warmup_tokens == 3 * 32_768
    # its ceiling is the law at the end of the pilot's warmup, because the pilot had none
    assert cfg.power_a == pytest.approx(law["a"], rel=1e-3)
    assert cfg.lr_max == pytest.approx(0.008 * 10**0.3, rel=1e-2)


@pytest.mark.parametrize("best, end", [(0.001, "lowest"), (0.05, "highest")])
def test_a_best_rate_at_an_edge_is_no_law(best, end, capsys):
    assert fit.main([write(pilot_rows(best), "a")]) == 2
    printed = capsys.readouterr()
    assert "no cell has a minimum" in printed.err and f"at {end}" in printed.out
    assert "--lrs" in printed.out and not Path("a/law.json").exists()


def test_a_valley_has_the_rates_of_all_seeds():
    """The second seed has higher losses, and lacks two rates of the first."""
    rows = made_rows(widths=[32], seeds=2)
    kept = []
    for row in rows:
        x = math.log2(row["lr"]) - log2_best(fit.cell_of(row))
        if row["seed"] == "0" or -1.5 < x < 1.8:
            kept.append(row | {"loss": row["loss"] + int(row["seed"])})
    assert len(rows) - len(kept) > 20
    assert fit.main([write(kept, "a")]) == 0
    assert (law_in("a")["b"], law_in("a")["q"]) == MADE


def test_a_folder_has_one_setting_and_one_text_wherever_that_is(capsys, one_line):
    rows = made_rows(widths=[32], batches=[2, 4])
    write(rows + made_rows(widths=[32], batches=[8], weight_decay=0.0), "a")
    assert "weight_decay" in one_line(fit.main, ["a"])
    write(rows + made_rows(widths=[32], batches=[8], fingerprint="1"), "b")
    assert "fingerprint" in one_line(fit.main, ["b"])
    assert "two runs" in one_line(fit.main, [write(rows + rows[:1], "c")])
    for row in rows:
        row["data"] = "moved" if row["batch_size"] == 4 else "data/mine"
        if row["batch_size"] == 2:
            del row["grad_clip"]  # as in records from before this field existed
    Path(write(rows, "d"), "unfinished").touch()
    Path("d/._trunk.jsonl").write_bytes(b"\x00\x05\x16\x07\xff")  # of a Mac
    assert fit.main(["d"]) == 0
    assert "not finished" in capsys.readouterr().out
    settings = law_in("d")["settings"]
    assert settings["data"] == "moved"  # where it was last
    assert settings["grad_clip"] == 1.0
    Path("empty").mkdir()
    assert "no runs" in one_line(fit.main, ["empty"])


# -- A table from elsewhere --------------------------------------------------------------


def table(seeds=1, **more) -> list[dict]:
    """What somebody else's trainer may have logged."""
    rows = []
    for row in made_rows(widths=[32], batches=[2, 4, 8], seq_len=1024, seeds=seeds):
        names = ("lr", "total_tokens", "batch_size", "seq_len", "seed")
        theirs = {name: row[name] for name in names}
        rows.append(theirs | {"val_loss": row["loss"]} | more)
    return rows


def write_csv(rows: list[dict]) -> str:
    with open("runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return "runs.csv"


def test_a_table_gives_its_law_and_numbers_for_its_trainer(capsys):
    """Its columns have other names, as in a sweep of OpenEuroLLM."""
    names = {"total_tokens": "D", "batch_size": "gbsz", "val_loss": "loss"}
    rows = []
    for row in table(seeds=2):
        del row["seq_len"]
        rows.append({names.get(x, x): value for x, value in row.items()})
    columns = ",".join(f"{ours}={theirs}" for ours, theirs in names.items())
    columns += ",seq_len=1024,decay_share=0.3"
    assert fit.main([write_csv(rows), "--columns", columns]) == 0
    law = law_in(".")
    assert (law["b"], law["q"]) == MADE and law["a"] == pytest.approx(40, rel=1e-6)
    assert (law["schedule"], law["decay_share"]) == ("wsd", 0.3)
    assert next_of(capsys.readouterr().out).seq_len == 1024


def test_a_run_that_diverged_is_a_run_and_one_that_is_not_finished_is_none():
    losses = itertools.cycle(["", "nan", "inf"])
    rows = table(State="Finished")
    for k, row in enumerate(rows):
        best = 40 * (row["batch_size"] / 4) ** 0.6 * row["total_tokens"] ** -0.4
        if row["lr"] > 3 * best:
            row["val_loss"] = next(losses)
        row["total_tokens"] += k  # tokens as trained
    running = rows[0] | dict(State="running", lr="", val_loss=9.0)
    assert fit.main([write_csv([*rows, running])]) == 0
    assert (law_in(".")["b"], law_in(".")["q"]) == MADE


def test_shapes_without_a_common_a_have_one_each(capsys):
    """The mean `a` of these would be four times too high for the widest, without muP."""
    rows = []
    for width in (64, 128, 256, 512, 1024):
        for row in table(N=width, n_embd=width):
            rows.append(row | {"lr": row["lr"] * 64 / width})
    assert fit.main([write_csv(rows), "--columns=shape=N"]) == 0
    law = law_in(".")
    assert (law["b"], law["q"]) == MADE
    printed = capsys.readouterr().out
    assert "N 64: 40, N 128: 20, N 256: 10, N 512: 5, N 1024: 2.5" in printed
    shape = int(re.search(r"only the a of N (\d+)", printed)[1])
    assert law["a"] == pytest.approx(40 * 64 / shape, rel=1e-6)


def row_5(**cells) -> list[dict]:
    """A table whose row 5 has these cells."""
    rows = table(state="finished", weight_decay=0.1)
    rows[3] |= cells
    return rows


@pytest.mark.parametrize("rows, says", [
    (row_5(lr=0), "row 5: lr"),
    (row_5(total_tokens=""), "row 5: total_tok"),
    (row_5(val_loss="low"), "row 5: loss"),
    (row_5(weight_decay=0.0), "weight_decay"),
    (table(state="crashed"), "no finished run"),
    ([{"val_loss": 1.0}], "no column lr"),
    (table(schedule="power"), "power"),
])  # fmt: skip
def test_a_fault_of_a_table_is_one_line(rows, says, one_line):
    assert says in one_line(fit.main, [write_csv(rows)])
    assert [path.name for path in Path().iterdir()] == ["runs.csv"]


@pytest.mark.parametrize("columns", ["lr=rates", "learning_rate=lr"])
def test_a_fault_of_columns_is_one_line(columns, one_line):
    says = one_line(fit.main, [write_csv(table()), "--columns", columns])
    assert f"--columns {columns}" in says
