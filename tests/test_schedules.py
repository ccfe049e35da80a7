"""The schedules against the paper's numbers, against transformers, and against the formulas of
other programs in docs/power_vectors.json."""

import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import schedules
from schedules import SCHEDULES, is_planned, make_schedule, paper_batch_size, power_law

ROOT = Path(__file__).parent.parent


def config(**changed):
    """A run of the paper's 1B model."""
    fields = dict(
        schedule="power", total_tokens=10**12, warmup_tokens=10**9, decay_tokens=10**11,
        decay_shape="exp", batch_size=1024, seq_len=4096, lr=0.01, power_a=4, power_b=-0.51,
        power_q=1, lr_max=0.02, min_lr_ratio=0.1,
    )  # fmt: skip
    return SimpleNamespace(**(fields | changed))


# -- The paper ---------------------------------------------------------------------------


def test_the_papers_numbers():
    # "given a 10 trillion token corpus and a batch size 1024, the predicted [...] is 0.0011"
    assert power_law(4.6, -0.51, 1024, 1)(1e13) == pytest.approx(0.001104, abs=5e-7)
    assert schedules.best_lr(1e13, 1024) == pytest.approx(0.001104, abs=5e-7)
    power = make_schedule(config())
    assert power(9e11) == pytest.approx(0.0032787, abs=5e-8)
    assert make_schedule(config(decay_tokens=0))(1e12) == pytest.approx(
        0.0031071, abs=5e-8
    )
    # after the warmup of 1B tokens, a batch of 128 is below the ceiling already
    assert make_schedule(config(batch_size=128))(1e9) == pytest.approx(0.0132, abs=5e-5)
    assert make_schedule(config(batch_size=256))(1e9) == 0.02


def test_a_larger_batch_leaves_the_ceiling_later():
    last = {16: 7.46e6, 32: 29.0e6, 64: 113e6, 128: 440e6, 256: 1.713e9, 512: 6.67e9}
    for beta, n in (last | {1024: 25.96e9}).items():
        law = power_law(4, -0.51, beta, 0.02)
        assert law(0.99 * n) == 0.02 > law(1.01 * n)


def test_beta_counts_sequences_of_4096_tokens():
    assert paper_batch_size(1024 * 4096) == 1024
    short = make_schedule(config(seq_len=128, batch_size=1024 * 32))
    assert short(5e11) == make_schedule(config())(5e11)


def test_q_is_the_exponent_of_the_batch_size():
    for q in (0, 0.5, 1):
        small, large = (
            make_schedule(config(power_q=q, batch_size=batch, lr_max=1e9))(5e11)
            for batch in (64, 1024)
        )
        assert large / small == pytest.approx(16**q)


def test_the_decay_is_ibms_and_starts_from_the_last_value_of_the_law():
    remaining = [
        1,
        0.8495,
        0.7132,
        0.5900,
        0.4785,
        0.3775,
        0.2862,
        0.2036,
        0.1289,
        0.0612,
        0,
    ]
    power = make_schedule(config())
    for tenth, share in enumerate(remaining):
        n = 9e11 + tenth * 1e10
        assert power(n) / power(9e11) == pytest.approx(share, abs=5e-5)


def test_the_warmup_is_a_line_to_the_value_at_its_end():
    for kind in SCHEDULES:
        schedule = make_schedule(config(schedule=kind, batch_size=128))
        for share in (0, 0.1, 0.5, 0.999):
            assert schedule(share * 1e9) == pytest.approx(share * schedule(1e9))


# -- Limits ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCHEDULES)
def test_only_planned_schedules_depend_on_the_end_before_the_decay(kind):
    short = make_schedule(config(schedule=kind))
    long = make_schedule(config(schedule=kind, total_tokens=4 * 10**12))
    same = {short(n) == long(n) for n in (2e10, 5e11, 8.99e11)}
    assert same == {not is_planned(kind)}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_reads_the_fields_in_its_row(kind):
    """Changing a field moves the curve exactly if SCHEDULES says so."""
    base = dict(schedule=kind, total_tokens=1000, warmup_tokens=100, decay_tokens=300)
    base |= dict(batch_size=2, power_a=0.05)
    changes = dict(
        lr=0.02, power_a=0.1, power_b=-0.4, power_q=0.5, lr_max=0.003, min_lr_ratio=0.2,
        warmup_tokens=200, decay_tokens=400, decay_shape="linear",
    )  # fmt: skip

    def curve(**changed):
        schedule = make_schedule(config(**base | changed))
        return [schedule(n) for n in range(0, 1000, 7)]

    moved = {name for name, value in changes.items() if curve(**{name: value}) != curve()}
    assert moved == SCHEDULES[kind].reads
    assert schedules.unread(kind) == changes.keys() - moved


def test_phases_of_length_zero_and_tokens_past_the_end():
    no_warmup = make_schedule(config(warmup_tokens=0))
    assert no_warmup(0) == 0.02 and math.isfinite(no_warmup(1e-300))
    for shape in schedules.DECAY_SHAPES:
        past = make_schedule(config(decay_shape=shape))
        assert past(1e12) == pytest.approx(0, abs=1e-15) and past(5e12) == past(1e12)
    assert make_schedule(config(schedule="cosine"))(5e12) == pytest.approx(0.001)
    no_stable_phase = make_schedule(config(warmup_tokens=9 * 10**11))
    assert no_stable_phase(9e11) == max(no_stable_phase(n * 1e9) for n in range(1001))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_no_step_has_learning_rate_zero(kind):
    for steps, warm in ((1, 0), (1, 99), (2, 50), (50, 0), (50, 2500)):
        total = 100 * steps  # 100 tokens per step, and the decay starts after the warmup
        phases = dict(total_tokens=total, warmup_tokens=warm, decay_tokens=total - warm)
        for shape in schedules.DECAY_SHAPES:
            cfg = config(schedule=kind, decay_shape=shape, min_lr_ratio=0, **phases)
            schedule = make_schedule(cfg)
            assert all(schedule(100 * step + 50) > 0 for step in range(steps))


def test_phases_that_do_not_fit_are_refused_with_their_numbers():
    too_long = dict(total_tokens=1000, warmup_tokens=600, decay_tokens=500)
    with pytest.raises(ValueError, match="600.*500.*1,000"):
        make_schedule(config(schedule="wsd", **too_long))
    with pytest.raises(ValueError, match="1,000"):
        make_schedule(config(schedule="cosine", total_tokens=1000, warmup_tokens=1000))
    for kind in ("cosine", "constant"):
        make_schedule(config(schedule=kind, **too_long))  # they have no decay


# -- Other programs ----------------------------------------------------------------------

T, W = 32_000, 1_000  # tokens, which are the steps of transformers here
COSINE = dict(schedule="cosine", min_lr_ratio=0)
CASES = {  # fields of ours, function of transformers, its arguments besides the warmup
    "constant": (dict(schedule="constant"), "constant_schedule_with_warmup", {}),
    "cosine": (COSINE, "cosine_schedule_with_warmup", dict(num_training_steps=T)),
    "cosine to a tenth": (
        COSINE | dict(min_lr_ratio=0.1),
        "cosine_with_min_lr_schedule_with_warmup",
        dict(num_training_steps=T, min_lr_rate=0.1),
    ),
    "linear": (
        dict(schedule="wsd", decay_shape="linear", decay_tokens=T - W),
        "linear_schedule_with_warmup",
        dict(num_training_steps=T),
    ),
    "inverse square root": (
        dict(power_a=0.01 * W**0.5 / 1024, power_b=-0.5, decay_tokens=0),
        "inverse_sqrt_schedule",
        {},
    ),
}
for shape in ("linear", "cosine", "1-sqrt"):
    CASES[f"wsd {shape}"] = (
        dict(schedule="wsd", decay_shape=shape, decay_tokens=T // 10),
        "wsd_schedule",
        dict(num_training_steps=T, num_decay_steps=T // 10, decay_type=shape),
    )


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_is_that_of_transformers(name):
    fields, function, arguments = CASES[name]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    make = getattr(transformers, f"get_{function}")
    factor = make(optimizer, num_warmup_steps=W, **arguments).lr_lambdas[0]
    ours = make_schedule(config(total_tokens=T, warmup_tokens=W, **fields))
    for n in range(1, T, 97):
        assert ours(n) == pytest.approx(0.01 * factor(n), rel=1e-9, abs=1e-15)


VECTORS = json.loads((ROOT / "docs/power_vectors.json").read_text(encoding="utf-8"))
RUN = VECTORS["run"]


def near(lr: float):
    return pytest.approx(lr, rel=1e-11, abs=1e-17)


@pytest.mark.parametrize("name", VECTORS["ports"])
def test_vectors_follow_from_the_formula_of_the_program_and_from_our_words(name):
    port = VECTORS["ports"][name]
    words = eval(port["words"], vars(schedules) | RUN)
    for k, n, lr in port["vectors"]:
        names = port["settings"] | dict(k=k, c=RUN["c"], math=math)
        exec("\n".join(port["formula"]), names)
        assert (names["n"], names["lr"]) == (n, near(lr))
        assert words(n) == near(lr)


def test_our_vectors_are_those_of_make_schedule_in_all_phases():
    ours = VECTORS["ports"]["ours"]
    schedule = make_schedule(SimpleNamespace(power_q=1, **ours["settings"]))
    phases = set()
    for k, n, lr in ours["vectors"]:
        assert n == (k - 0.5) * RUN["c"] and schedule(n) == near(lr)
        phases.add((n >= RUN["W"], lr < 0.02, n > 0.9 * RUN["T"]))
    assert len(phases) == 4  # warmup, ceiling, law, decay


# -- The program -------------------------------------------------------------------------


def test_the_file_runs_alone_and_without_torch(monkeypatch):
    for name in ("torch", "numpy", "tools", *(file.stem for file in ROOT.glob("*.py"))):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
    alone = runpy.run_path(str(ROOT / "schedules.py"))
    assert alone["best_lr"](1e13, 1024) == pytest.approx(0.0011, abs=5e-6)


def test_main_draws_and_prints_the_curves(capsys):
    assert schedules.main([]) == 0
    assert Path("assets/schedules.png").stat().st_size > 0
    names, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert names.split() == ["tokens", "cosine", "wsd", "power"]
    numbers = {row.split()[0]: [float(x) for x in row.split()[1:]] for row in rows}
    peak = schedules.best_lr(32e9, 128)
    assert numbers["1.00B"] == pytest.approx([peak, peak, 0.01316], abs=5e-6)
    assert numbers["32.00B"] == pytest.approx([peak / 10, 0, 0], abs=1e-6)


def test_a_folder_that_may_not_be_written_is_one_line(capsys):
    Path("assets").write_text("a file, and not a folder")
    assert schedules.main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "assets" in said.err
