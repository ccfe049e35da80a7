"""docs/schedules.md: every command and its words are the schedule that the page says they are."""

import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from tools.config import check_effect

import schedules
import train

PAGE = (Path(__file__).parent.parent / "docs/schedules.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (.+?) \| (`(?:decay|warmup)\(.+) \|$", PAGE, re.M))
COMMANDS = re.findall(r"^python train\.py (.+?) +# (.+)$", PAGE, re.M)  # and their names
T, W, BATCH, LR = 4_200_000, 100_000, 1024, 0.004  # the default run
A, B = 16 * 0.25, -0.51  # its a * beta, and b
rise = lambda n: min(n / W, 1)
stable = lambda n: min(max(n, W), 0.9 * T)  # warmup and decay hold the value at their ends


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


wsd = lambda shape, tail=T // 10, **warm: settings(num_decay_steps=tail, decay_type=shape, **warm)
paper = lambda n: A * stable(n) ** B * lm_engine_exp(n) / LR
multi_step = lambda n: LR * (rise(n) if n < 0.8 * T else 0.316 if n < 0.9 * T else 0.1)
ORACLES = {  # a function of n, or settings for the page's function of transformers
    "linear to zero": settings(), "cosine to zero": settings(),
    "1-sqrt to zero": wsd("1-sqrt", T - W), "cosine to a tenth": settings(min_lr_rate=0.1),
    "warmup-stable": dict(num_warmup_steps=W), "WSD, exp": lm_engine_exp,
    "WSD, linear": wsd("linear"), "WSD, 1-sqrt": wsd("1-sqrt"), "WSD, cosine": wsd("cosine"),
    "trapezoid": wsd("linear", 10**6, warm=10**6), "multi-step": multi_step, "Power": paper,
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
    assert {name for _, name in COMMANDS} == set(ORACLES) == set(ROWS) | {"multi-step"}


@pytest.mark.parametrize("name", ORACLES)
def test_a_command_and_its_words_are_the_schedule(name):
    expected, fields, tokens = oracle(name), {}, 0
    for command in [command for command, of in COMMANDS if of == name]:  # steps are branches
        fields |= train.parse(command.split())[0]
        cfg = train.make_config(**fields)
        check_effect(fields, "schedule", cfg.schedule, schedules.READS)
        names = vars(schedules) | dict(T=T, W=W, lr=LR, a=16, beta=0.25, lr_max=cfg.lr_max)
        by_flags = schedules.make_schedule(cfg)
        by_words = eval(ROWS[name].split("`")[1], names) if name in ROWS else by_flags
        while tokens + BATCH <= cfg.total_tokens:
            n, tokens = tokens + BATCH / 2, tokens + BATCH  # as in train.training_steps
            assert abs(by_flags(n) - expected(n)) < 1e-12 * LR
            assert abs(by_words(n) - by_flags(n)) < 1e-12 * LR
    assert tokens == T // BATCH * BATCH
