"""The schedules against the paper's numbers, and against transformers."""

import math
import shlex

import pytest
import torch
import transformers

import config
import schedules
import train
from schedules import PLANNED, SCHEDULES, make_schedule, paper_batch_size, power_law


def schedule_of(**changed):
    """A schedule for the paper's 1B model, power if not changed."""
    fields = dict(
        preset="1B", schedule="power", total_tokens=10**12, warmup_tokens=10**9,
        batch_size=1024, seq_len=4096, lr=0.01, power_a=4, power_b=-0.51, power_q=1,
        lr_max=0.02,
    )  # fmt: skip
    return make_schedule(config.make_config(**fields | changed))


# -- The paper ---------------------------------------------------------------------------


def test_the_papers_numbers():
    # "given a 10 trillion token corpus and a batch size 1024, [...] is 0.0011"
    assert power_law(4.6, -0.51, 1024, 1)(1e13) == pytest.approx(0.001104, abs=5e-7)
    assert schedules.best_lr(1e13, 1024) == pytest.approx(0.001104, abs=5e-7)
    assert schedule_of()(9e11) == pytest.approx(0.0032787, abs=5e-8)
    assert schedule_of(decay_share=0)(1e12) == pytest.approx(0.0031071, abs=5e-8)
    # after the warmup of 1B tokens, a batch of 128 is below the ceiling already
    assert schedule_of(batch_size=128)(1e9) == pytest.approx(0.0132, abs=5e-5)
    assert schedule_of(batch_size=128)(5e8) == pytest.approx(0.0066, abs=5e-5)
    assert schedule_of(batch_size=256)(1e9) == 0.02


def test_beta_counts_sequences_of_4096_tokens_and_q_is_its_exponent():
    assert paper_batch_size(1024 * 4096) == 1024
    assert schedule_of(seq_len=128, batch_size=32 * 1024)(5e11) == schedule_of()(5e11)
    for q in (0, 0.5, 1):
        small = schedule_of(power_q=q, batch_size=64, lr_max=1e9)
        large = schedule_of(power_q=q, batch_size=1024, lr_max=1e9)
        assert large(5e11) / small(5e11) == pytest.approx(16**q)


def test_the_decay_is_ibms_and_starts_from_the_last_value_of_the_law():
    shares = [1, 0.8495, 0.7132, 0.59, 0.4785, 0.3775, 0.2862, 0.2036, 0.1289, 0.0612, 0]
    for tenth, share in enumerate(shares):
        lr = schedule_of()(9e11 + tenth * 1e10)
        assert lr / schedule_of()(9e11) == pytest.approx(share, abs=5e-5)


# -- Limits ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCHEDULES)
def test_only_planned_schedules_depend_on_the_end_before_the_decay(kind):
    short = schedule_of(schedule=kind)
    long = schedule_of(schedule=kind, total_tokens=4 * 10**12)
    same = {short(n) == long(n) for n in (2e10, 5e11, 8.99e11)}
    assert same == {kind not in PLANNED}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_field_without_effect_leaves_the_curve_and_all_others_move_it(kind):
    base = dict(schedule=kind, total_tokens=1000, warmup_tokens=100, decay_share=0.3)
    base |= dict(batch_size=2, seq_len=1, power_a=200)
    changes = dict(
        lr=0.02, power_a=400, power_b=-0.4, power_q=0.5, lr_max=0.003, min_lr_ratio=0.2,
        warmup_tokens=200, decay_share=0.4, decay_shape="linear",
    )  # fmt: skip

    def curve(**changed):
        schedule = schedule_of(**base | changed)
        return [schedule(n) for n in range(0, 1000, 7)]

    same = {name for name, value in changes.items() if curve(**{name: value}) == curve()}
    assert schedules.fields_without_effect(kind) == same


def test_phases_of_length_zero_and_tokens_past_the_end():
    no_warmup = schedule_of(warmup_tokens=0)
    assert no_warmup(0) == 0.02 and math.isfinite(no_warmup(1e-300))
    for shape in schedules.DECAY_SHAPES:
        past = schedule_of(decay_shape=shape)
        assert past(1e12) == pytest.approx(0, abs=1e-15) and past(5e12) == past(1e12)
    assert schedule_of(schedule="cosine")(5e12) == pytest.approx(0.001)


def test_a_schedule_that_nobody_makes_is_no_constant():
    cfg = config.make_config()
    cfg.schedule = "mine"
    with pytest.raises(ValueError, match="mine"):
        make_schedule(cfg)


# -- From a law to a learning rate -------------------------------------------------------


def test_peaks_are_those_of_the_nearest_share():
    assert schedules.peak("wsd", 0.12) == schedules.peak("wsd", 0.1)
    assert schedules.peak("power", 0.6) == schedules.peak("power", 0.5)
    assert schedules.peak("mine", 0.3) == 1


def test_power_has_one_law_for_all_lengths():
    law = config.LAPTOP_LAW._replace(schedule="linear", decay_share=0.0)
    a = law.a * 0.75 / schedules.peak("linear", 0.0)
    ceiling = a * 0.25**law.q * 320_000**law.b  # its shortest run
    for T in (10**6, 10**8):
        found = schedules.lr_by_law(law, config.make_config(total_tokens=T))
        expected = dict(power_a=a, power_b=law.b, power_q=law.q, lr_max=ceiling)
        assert found == pytest.approx(expected, rel=1e-3)


# -- Other programs ----------------------------------------------------------------------

FUNCTIONS = {  # of transformers: flags of train.py
    "linear_schedule_with_warmup": "--schedule linear",
    "cosine_schedule_with_warmup": "--schedule cosine --min_lr_ratio 0",
    "cosine_with_min_lr_schedule_with_warmup": "--schedule cosine",
    "wsd_schedule": "--schedule wsd --decay_shape 1-sqrt",
}


@pytest.mark.parametrize("function, flags", FUNCTIONS.items(), ids=str)
def test_flags_make_the_schedule_of_transformers(function, flags):
    cfg = config.make_config(**train.parse(shlex.split(flags))[0])
    ours = make_schedule(cfg)
    unit = cfg.warmup_tokens // 100  # tokens of a step of transformers
    steps = dict(num_warmup_steps=100, num_training_steps=cfg.total_tokens // unit)
    if function == "wsd_schedule":
        steps |= dict(num_decay_steps=cfg.decay_tokens // unit)
        steps |= dict(decay_type=cfg.decay_shape)
    if function == "cosine_with_min_lr_schedule_with_warmup":
        steps |= dict(min_lr_rate=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    factor = getattr(transformers, f"get_{function}")(optimizer, **steps).lr_lambdas[0]
    for step in range(1, cfg.total_tokens // unit, 97):
        near = pytest.approx(cfg.lr * factor(step), rel=1e-9, abs=1e-15)
        assert ours(step * unit) == near
