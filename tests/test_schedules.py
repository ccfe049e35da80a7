"""The schedules against the paper's equations and numbers."""

import math
import random
from types import SimpleNamespace

import pytest

import schedules
from schedules import constant, cosine, decay, make_schedule, power_law, warmup


def config(**changed):
    """A run of the paper's 1B model."""
    fields = dict(
        schedule="power", total_tokens=10**12, warmup_tokens=10**9, decay_tokens=10**11, decay_shape="exp",
        batch_size=1024, seq_len=4096, lr=0.01, power_a=4, power_b=-0.51, lr_max=0.02, min_lr_ratio=0.1,
    )  # fmt: skip
    return SimpleNamespace(**(fields | changed))


def test_the_papers_numbers():
    # "given a 10 trillion token corpus and a batch size 1024, the predicted optimal learning rate is 0.0011"
    assert round(power_law(4.6, -0.51, 1024, 1)(1e13), 4) == 0.0011
    assert power_law(4.6, -0.51, 1024, 1)(1e13) == pytest.approx(0.001104, abs=5e-7)
    assert power_law(4, -0.51, 1024, 0.02)(900e9) == pytest.approx(0.0032787, abs=5e-8)
    assert power_law(4, -0.51, 1024, 0.02)(1e12) == pytest.approx(0.0031071, abs=5e-8)


@pytest.mark.parametrize(
    "batch, leaves_the_ceiling_at",
    [(16, 7.46e6), (32, 29.0e6), (64, 113e6), (128, 440e6), (256, 1.713e9), (512, 6.67e9), (1024, 25.96e9)],
)
def test_where_the_ceiling_ends(batch, leaves_the_ceiling_at):
    rate = power_law(4, -0.51, batch, 0.02)
    assert rate(leaves_the_ceiling_at * 0.99) == 0.02
    assert rate(leaves_the_ceiling_at * 1.01) < 0.02


def test_exponential_decay_table():
    printed = [1, 0.8495, 0.7132, 0.5900, 0.4785, 0.3775, 0.2862, 0.2036, 0.1289, 0.0612, 0]
    f = schedules.DECAY_SHAPES["exp"]
    assert [round(f(i / 10), 4) for i in range(11)] == printed


def test_closed_forms():
    """Each phase written out as in equations 2 and 8, at random points."""
    rng = random.Random(0)
    shapes = {
        "exp": lambda x: (math.e ** (1 - x) - 1) / (math.e - 1), "linear": lambda x: 1 - x,
        "1-sqrt": lambda x: 1 - x**0.5, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    }  # fmt: skip
    assert set(shapes) == set(schedules.DECAY_SHAPES)
    for _ in range(300):
        total = rng.randrange(10**6, 10**12)
        warm, tail = (rng.randrange(1, total // 2) for _ in range(2))
        batch, shape = rng.choice([1, 16, 100, 1024]), rng.choice(list(shapes))
        cfg = config(total_tokens=total, warmup_tokens=warm, decay_tokens=tail, decay_shape=shape, batch_size=batch)
        law = lambda n: min(0.02, batch * 4 * math.exp(-0.51 * math.log(n)))
        for stable, name in ((law, "power"), (lambda n: 0.01, "wsd")):
            cfg.schedule = name
            lr = make_schedule(cfg)
            close = lambda value: pytest.approx(value, rel=1e-12, abs=1e-18)
            n = rng.uniform(0, warm)
            assert lr(n) == close(n / warm * stable(warm))
            n = rng.uniform(warm, total - tail)
            assert lr(n) == close(stable(n))
            n = rng.uniform(total - tail, total)
            x = (n - (total - tail)) / tail
            assert lr(n) == close(shapes[shape](x) * stable(total - tail))
        cfg.schedule = "cosine"
        n = rng.uniform(warm, total)
        x = (n - warm) / (total - warm)
        assert make_schedule(cfg)(n) == close(0.001 + 0.009 * (1 + math.cos(math.pi * x)) / 2)
        cfg.schedule = "constant"
        assert make_schedule(cfg)(rng.uniform(warm, 2 * total)) == 0.01


@pytest.mark.parametrize("shape", schedules.DECAY_SHAPES)
@pytest.mark.parametrize("kind", ["power", "wsd", "cosine"])
@pytest.mark.parametrize("batch", [64, 1024])
def test_continuous_at_both_joints(kind, batch, shape):
    cfg = config(schedule=kind, batch_size=batch, decay_shape=shape)
    lr = make_schedule(cfg)
    for joint in (cfg.warmup_tokens, cfg.total_tokens - cfg.decay_tokens):
        # 1 - sqrt(x) starts with infinite slope: a token to the right is 1e-11 of the decay, its root 3e-6
        assert lr(joint - 1) == pytest.approx(lr(joint), rel=1e-5)
        assert lr(joint + 1) == pytest.approx(lr(joint), rel=1e-5)


@pytest.mark.parametrize("batch, target", [(64, None), (128, 0.0132), (256, 0.02), (512, 0.02), (1024, 0.02)])
def test_warmup_rises_to_the_value_at_its_end(batch, target):
    """With 1B tokens of warm-up, a batch of 128 has left the ceiling before the warm-up is over."""
    lr = make_schedule(config(batch_size=batch))
    if target:
        assert lr(1e9) == pytest.approx(target, abs=5e-5)
    assert lr(1e9) == min(0.02, 4 * batch * 1e9**-0.51)
    assert lr(0.5e9) == pytest.approx(lr(1e9) / 2, rel=1e-12)
    assert max(lr(n * 1e7) for n in range(1, 1000)) == lr(1e9)


@pytest.mark.parametrize("kind", ["power", "wsd", "constant"])
def test_the_budget_changes_nothing_before_the_decay(kind):
    short, long = make_schedule(config(schedule=kind)), make_schedule(config(schedule=kind, total_tokens=4 * 10**12))
    assert all(short(n) == long(n) for n in (0, 1, 5e8, 1e9, 2e10, 8.99e11))
    cosines = [make_schedule(config(schedule="cosine", total_tokens=t)) for t in (10**12, 4 * 10**12)]
    assert cosines[0](8.99e11) < 0.5 * cosines[1](8.99e11)  # which is the paper's complaint


def test_twice_the_batch_is_twice_the_power_rate():
    one, two = make_schedule(config(batch_size=128)), make_schedule(config(batch_size=256))
    assert two(8e11) == pytest.approx(2 * one(8e11), rel=1e-12)
    # only tokens matter: twice the sequences of half the length are the same batch
    same = make_schedule(config(batch_size=512, seq_len=2048))
    assert same(8e11) == two(8e11)


def test_edges():
    no_warmup = make_schedule(config(warmup_tokens=0))
    assert no_warmup(0) == 0.02 and math.isfinite(no_warmup(1e-300))
    no_decay = make_schedule(config(decay_tokens=0))
    assert no_decay(1e12) == 1024 * 4 * 1e12**-0.51
    for shape in schedules.DECAY_SHAPES:
        for kind in ("power", "wsd"):
            past = make_schedule(config(schedule=kind, decay_shape=shape))
            assert past(1e12) == pytest.approx(0, abs=1e-15) and past(5e12) == past(1e12)
    assert make_schedule(config(schedule="cosine"))(5e12) == pytest.approx(0.001)
    all_ramp = make_schedule(config(warmup_tokens=9 * 10**11))  # warm-up + decay = total: no stable phase
    assert all_ramp(9e11) == max(all_ramp(n * 1e9) for n in range(1001))


@pytest.mark.parametrize("kind", schedules.SCHEDULES)
def test_no_step_is_wasted_at_rate_zero(kind):
    rng = random.Random(1)
    for _ in range(300):
        batch_tokens = rng.randrange(1, 5000)
        total = batch_tokens * rng.choice([1, 1, 2, 3, 50]) + rng.randrange(batch_tokens)
        warm = rng.choice([0, rng.randrange(total)])
        tail = rng.choice([0, total - warm, rng.randrange(total - warm)])
        cfg = config(
            schedule=kind, total_tokens=total, warmup_tokens=warm, decay_tokens=tail, batch_size=1, seq_len=batch_tokens,
            decay_shape=rng.choice(list(schedules.DECAY_SHAPES)), min_lr_ratio=0,
        )  # fmt: skip
        lr = make_schedule(cfg)
        n_steps = total // batch_tokens
        assert all(lr((step + 0.5) * batch_tokens) > 0 for step in range(n_steps))


def test_phases_that_do_not_fit_are_refused_with_their_numbers():
    for kind in ("power", "wsd"):
        with pytest.raises(ValueError) as refusal:
            make_schedule(config(schedule=kind, total_tokens=1000, warmup_tokens=600, decay_tokens=500))
        assert all(number in str(refusal.value) for number in ("1,000", "600", "500"))
    with pytest.raises(ValueError, match="1,000"):
        make_schedule(config(schedule="cosine", total_tokens=1000, warmup_tokens=1000))


def test_wsd_and_power_differ_in_one_word():
    wsd = decay(warmup(constant(0.01), 1e9), 1e12, 1e11, "exp")
    power = decay(warmup(power_law(4, 0, 1024, 0.01), 1e9), 1e12, 1e11, "exp")  # b = 0 holds the ceiling
    assert all(wsd(n) == power(n) for n in (0, 1e8, 1e9, 5e11, 9.5e11, 1e12))
    assert warmup(cosine(1, 0, 100, 0), 0)(50) == pytest.approx(0.5)


def test_picture_and_table(tmp_path, capsys):
    assert schedules.main(["--out", str(tmp_path / "new" / "figure.png")]) == 0
    assert (tmp_path / "new" / "figure.png").read_bytes()[:4] == b"\x89PNG"
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith("0.000000")]
    assert rows[-1][0] == "32.00B"
    (tmp_path / "file").write_text("")
    assert schedules.main(["--out", str(tmp_path / "file" / "figure.png")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
