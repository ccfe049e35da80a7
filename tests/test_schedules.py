"""The schedules: the paper's numbers, units and limits; and their curves, as the page has them."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import schedules
import train
from schedules import SCHEDULES, is_planned, make_schedule, power_law


def config(**changed):
    """A run of the paper's 1B model."""
    fields = dict(
        schedule="power", total_tokens=10**12, warmup_tokens=10**9, decay_tokens=10**11,
        decay_shape="exp", batch_size=1024, seq_len=4096, lr=0.01, power_a=4, power_b=-0.51,
        power_q=1, lr_max=0.02, min_lr_ratio=0.1,
    )  # fmt: skip
    return SimpleNamespace(**(fields | changed))


def test_the_papers_numbers():
    # "given a 10 trillion token corpus and a batch size 1024, the predicted [...] is 0.0011"
    assert power_law(4.6, -0.51, 1024, 1)(1e13) == pytest.approx(0.001104, abs=5e-7)
    assert schedules.best_lr(1e13, 1024) == power_law(4.6, -0.51, 1024, 1)(1e13)
    assert power_law(4, -0.51, 1024, 0.02)(900e9) == pytest.approx(0.0032787, abs=5e-8)
    assert power_law(4, -0.51, 1024, 0.02)(1e12) == pytest.approx(0.0031071, abs=5e-8)
    # with 1B tokens of warmup, a batch of 128 has left the ceiling before the warmup is over
    assert make_schedule(config(batch_size=128))(1e9) == pytest.approx(0.0132, abs=5e-5)


def test_q_is_the_exponent_of_the_batch_size():
    lr = lambda q, batch: make_schedule(config(power_q=q, batch_size=batch, lr_max=1e9))(
        5e11
    )
    assert lr(0.5, 1024) / lr(0.5, 64) == pytest.approx(4)
    assert lr(1, 1024) / lr(1, 64) == pytest.approx(16)
    assert lr(0, 1024) == lr(0, 64) == pytest.approx(4 * 5e11**-0.51)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_only_planned_schedules_depend_on_the_end_before_the_decay(kind):
    short = make_schedule(config(schedule=kind))
    long = make_schedule(config(schedule=kind, total_tokens=4 * 10**12))
    same = [short(n) == long(n) for n in (2e10, 5e11, 8.99e11)]
    assert not any(same) if is_planned(kind) else all(same)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_reads_the_fields_in_its_row(kind):
    """Changing a field moves the curve exactly if SCHEDULES says so."""
    base = config(schedule=kind, total_tokens=1000, warmup_tokens=100, decay_tokens=300)
    base.batch_size, base.power_a = 2, 0.05
    changes = dict(lr=0.02, power_a=0.1, power_b=-0.4, lr_max=0.003, min_lr_ratio=0.2)
    changes |= dict(power_q=0.5)
    changes |= dict(warmup_tokens=200, decay_tokens=400, decay_shape="linear")
    curve = lambda cfg: [make_schedule(cfg)(n) for n in range(0, 1000, 7)]
    moved = {
        f: curve(SimpleNamespace(**vars(base) | {f: value}))
        for f, value in changes.items()
    }
    # decay_share reaches a schedule only as decay_tokens
    reads = SCHEDULES[kind].reads - {"total_tokens", "decay_share"}
    assert {f for f in moved if moved[f] != curve(base)} == reads


def test_phases_of_length_zero_and_tokens_past_the_end():
    no_warmup = make_schedule(config(warmup_tokens=0))
    assert no_warmup(0) == 0.02 and math.isfinite(no_warmup(1e-300))
    assert make_schedule(config(decay_tokens=0))(1e12) == 1024 * 4 * 1e12**-0.51
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
            lr = make_schedule(
                config(schedule=kind, decay_shape=shape, min_lr_ratio=0, **phases)
            )
            assert all(lr(100 * step + 50) > 0 for step in range(steps))


def test_phases_that_do_not_fit_are_refused_with_their_numbers():
    too_long = dict(total_tokens=1000, warmup_tokens=600, decay_tokens=500)
    with pytest.raises(ValueError, match="600.*500.*1,000"):
        make_schedule(config(schedule="wsd", **too_long))
    with pytest.raises(ValueError, match="1,000"):
        make_schedule(config(schedule="cosine", total_tokens=1000, warmup_tokens=1000))
    for kind in ("cosine", "constant"):
        make_schedule(config(schedule=kind, **too_long))  # they have no decay


# -- docs/elsewhere.md: every command and its words are the schedule that the page names -

PAGE = (Path(__file__).parent.parent / "docs/elsewhere.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (.+?) \| (`(?:decay|warmup)\(.+) \|$", PAGE, re.M))
COMMANDS = re.findall(r"^python train\.py (.+?) +# (.+)$", PAGE, re.M)  # and their names
T, W, BATCH, LR = 3_200_000, 100_000, 1024, 0.004  # the default run
A, B = 16 * 0.25, -0.51  # its a * beta, and b
rise = lambda n: min(n / W, 1)
# warmup and decay hold the value at their ends
stable = lambda n: min(max(n, W), 0.9 * T)


def lm_engine_exp(n: float) -> float:
    x = max(0, n - 0.9 * T) / (0.1 * T)
    return LR * rise(n) * (math.e / (math.e - 1) * math.exp(-x) - 1 / (math.e - 1))


def lm_engine_power(n: float) -> float:
    lr, c, steps = 0.01, BATCH, max(n, W) / BATCH  # its lr is the ceiling
    return lr * rise(n) * min(1, A / lr * (steps * c) ** B)


def olmo_core(n: float) -> float:
    initial_lr, falls = A * W**B, min(1, (T - n) / (T / 10))
    return initial_lr * rise(n) * falls * (stable(n) / W) ** B


def settings(warm=W, **more) -> dict:
    """Arguments of transformers, which counts our tokens as its steps."""
    return dict(num_warmup_steps=warm, num_training_steps=T) | more


wsd = lambda shape, tail=T // 10, **warm: settings(
    num_decay_steps=tail, decay_type=shape, **warm
)
paper = lambda n: A * stable(n) ** B * lm_engine_exp(n) / LR
multi_step = lambda n: LR * (rise(n) if n < 0.8 * T else 0.316 if n < 0.9 * T else 0.1)
fitted = lambda n: 0.5059 * 0.25**0.5 * stable(n) ** -0.3 * lm_engine_exp(n) / LR
ORACLES = {  # a function of n, or settings for the page's function of transformers
    "linear to zero": settings(), "cosine to zero": settings(),
    "1-sqrt to zero": wsd("1-sqrt", T - W), "cosine to a tenth": settings(min_lr_rate=0.1),
    "warmup-stable": dict(num_warmup_steps=W), "WSD, exp": lm_engine_exp,
    "WSD, linear": wsd("linear"), "WSD, 1-sqrt": wsd("1-sqrt"), "WSD, cosine": wsd("cosine"),
    "trapezoid": wsd("linear", 10**6, warm=10**6), "multi-step": multi_step, "Power": paper,
    "Power, fitted": fitted,
    "Power of lm-engine": lm_engine_power, "Power of OLMo-core": olmo_core,
    "inverse square root": dict(num_warmup_steps=W),
}  # fmt: skip


def oracle(name: str):
    if callable(ORACLES[name]):
        return ORACLES[name]
    make = getattr(transformers, re.search(r"`(get_\w+)`", ROWS[name])[1])
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    factor = make(optimizer, **ORACLES[name]).lr_lambdas[0]
    peak = A * W**-0.5 if name == "inverse square root" else LR
    return lambda n: peak * factor(n)


def test_the_page_shows_every_schedule_with_its_words():
    assert {name for _, name in COMMANDS} == set(ORACLES)
    assert set(ROWS) == set(ORACLES) - {"multi-step"} | {"Power of Levanter"}


@pytest.mark.parametrize("name", ORACLES)
def test_a_command_and_its_words_are_the_schedule(name):
    expected, fields, tokens = oracle(name), {}, 0
    # steps are branches
    for command in [command for command, of in COMMANDS if of == name]:
        fields |= train.parse(command.split())[0]
        cfg = train.make_config(**fields)
        assert not fields.keys() & schedules.unread(cfg.schedule)
        names = vars(schedules) | dict(
            T=T, W=W, lr=LR, a=16, beta=0.25, lr_max=cfg.lr_max
        )
        by_flags = schedules.make_schedule(cfg)
        by_words = eval(ROWS[name].split("`")[1], names) if name in ROWS else by_flags
        while tokens + BATCH <= cfg.total_tokens:
            n, tokens = tokens + BATCH / 2, tokens + BATCH  # as in train.training_steps
            assert abs(by_flags(n) - expected(n)) < 1e-12 * LR
            assert abs(by_words(n) - by_flags(n)) < 1e-12 * LR
    assert tokens == T // BATCH * BATCH


# -- docs/power_vectors.json: learning rates of other programs, by their formulas and our words

VECTORS = json.loads(
    (Path(__file__).parent.parent / "docs/power_vectors.json").read_text("utf-8")
)
RUN, PORTS = VECTORS["run"], VECTORS["ports"]
# n is so far before k * c
HALF_STEPS = {
    "ours": 1,
    "lm-engine": 2,
    "OLMo-core": 0,
    "Levanter": 2,
}
near = lambda lr: pytest.approx(lr, rel=1e-11, abs=1e-17)


@pytest.mark.parametrize("name", PORTS)
def test_vectors_follow_from_the_formula_of_the_port_and_from_our_words(name):
    port = PORTS[name]
    words = eval(port["words"], vars(schedules) | RUN)
    for k, n, lr in port["vectors"]:
        names = port["settings"] | dict(k=k, c=RUN["c"], math=math)
        exec("\n".join(port["formula"]), names)
        assert (names["n"], names["lr"]) == (n, near(lr))
        assert n == (k - HALF_STEPS[name] / 2) * RUN["c"] and words(n) == near(lr)


def test_vectors_cover_all_phases_and_the_first_is_ours():
    assert set(PORTS) == set(HALF_STEPS)
    assert RUN["c"] == RUN["batch_size"] * RUN["seq_len"]
    assert RUN["beta"] == schedules.paper_batch_size(RUN["c"])
    ours = PORTS["ours"]["settings"]
    by_settings = make_schedule(SimpleNamespace(power_q=1, **ours))
    for k, n, lr in PORTS["ours"]["vectors"]:
        assert n == (k - 0.5) * RUN["c"] and by_settings(n) == near(lr)
    start = RUN["T"] - ours["decay_tokens"]
    phase = lambda n, lr: (n >= RUN["W"], lr < ours["lr_max"], n > start)
    phases = {phase(n, lr) for _, n, lr in PORTS["ours"]["vectors"]}
    assert len(phases) == 4  # warmup, ceiling, law, decay


def test_ports_differ_by_what_the_page_says():
    ours, levanter = PORTS["ours"]["settings"], PORTS["Levanter"]["settings"]
    assert 1 - (100 / 99.5) ** ours["power_b"] == pytest.approx(0.0026, abs=5e-5)
    first = {name: port["vectors"][0][2] / (port["vectors"][0][0] * RUN["c"] / RUN["W"])
             for name, port in PORTS.items()}  # fmt: skip
    assert first == {
        "ours": near(0.01),
        "lm-engine": 0,
        "OLMo-core": near(0.03),
        "Levanter": 0,
    }
    assert PORTS["OLMo-core"]["vectors"][-1][2] == 0
    row = ROWS["Power of Levanter"].split("`")[1]  # until the cooldown
    names = (
        vars(schedules) | RUN | dict(a=levanter["a"], lr_max=levanter["learning_rate"])
    )
    for _, n, lr in PORTS["Levanter"]["vectors"][:-2]:
        assert eval(row, names)(n) == near(lr)


def test_a_folder_that_may_not_be_written_is_named_in_one_line(capsys):
    Path("assets").write_text("a file is no folder, for root neither")
    assert schedules.main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "assets" in said.err
