"""The learning-rate schedules cosine, WSD and Power.

A schedule is a function from n, the tokens seen so far, to a learning rate. WSD and Power
are one line and differ in one word:

    WSD   = decay(warmup(constant(lr), ...), ...)
    Power = decay(warmup(power_law(a, b, beta, lr_max), ...), ...)

    python schedules.py        print the three curves and draw Figure 1 of the paper

Here n and the run length T count *tokens*, and beta is the batch size in *sequences of
4096 tokens*. So the paper's law, 4.6 * beta * T^-0.51, is 0.0011 at T = 1e13 and beta =
1024.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# tokens seen -> learning rate of a parameter with lr_scale 1
Schedule = Callable[[float], float]


def constant(lr: float) -> Schedule:
    """Hold `lr`, as in the stable phase of WSD (equation 2 of the paper)."""
    return lambda n: lr


def power_law(a: float, b: float, beta: float, lr_max: float, q: float = 1.0) -> Schedule:
    """min(lr_max, beta^q * a * n^b), with q = 1 the paper's power learning rate (equation 7).

    A WSD run of T tokens does best at learning rate beta^q * a * T^b. Power replaces T
    with n, so it always uses about the best learning rate for a run that ends soon.
    """
    # b < 0, so at n = 0 the law is infinite, and the ceiling applies
    return lambda n: min(lr_max, beta**q * a * n**b) if n > 0 else lr_max


def half_cosine(x: float) -> float:
    """From 1 at x = 0 to 0 at x = 1."""
    return 0.5 * (1 + math.cos(math.pi * x))


def cosine(
    lr: float, warmup_tokens: float, total_tokens: float, min_lr_ratio: float
) -> Schedule:
    """Half a cosine from `lr` at `warmup_tokens` to `min_lr_ratio * lr` at the end of the run."""

    def schedule(n: float) -> float:
        done = (n - warmup_tokens) / (total_tokens - warmup_tokens)
        done = min(max(done, 0.0), 1.0)
        return lr * (min_lr_ratio + (1 - min_lr_ratio) * half_cosine(done))

    return schedule


def warmup(schedule: Schedule, warmup_tokens: float) -> Schedule:
    """Rise linearly from 0 until `warmup_tokens`, then follow the schedule."""
    # under Power, the law may be below lr_max here already
    target = schedule(warmup_tokens)
    return lambda n: target * n / warmup_tokens if n < warmup_tokens else schedule(n)


def exponential(x: float) -> float:
    """From 1 at x = 0 to 0 at x = 1, as in IBM's code. The paper names no shape."""
    return (math.exp(1 - x) - 1) / (math.e - 1)


DECAY_SHAPES = {  # finished share of the decay -> remaining share of the learning rate
    "exp": exponential,
    "linear": lambda x: 1 - x,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": half_cosine,
}


def decay(
    schedule: Schedule, total_tokens: float, decay_tokens: float, shape: str
) -> Schedule:
    """Follow the schedule, then fall to 0 over the last `decay_tokens` (equations 2 and 8).

    During the decay the power law holds its last value, and only the shape lowers it.
    """
    if decay_tokens == 0:
        return schedule
    start = total_tokens - decay_tokens
    last = schedule(start)
    remaining = DECAY_SHAPES[shape]

    def decayed(n: float) -> float:
        if n <= start:
            return schedule(n)
        # past the end, `exp` would be negative
        done = min(1.0, (n - start) / decay_tokens)
        return last * remaining(done)

    return decayed


PAPER_SEQ_LEN = 4096  # tokens


def paper_batch_size(batch_tokens: float) -> float:
    """beta, the batch size in sequences of 4096 tokens, for sequences of any length."""
    return batch_tokens / PAPER_SEQ_LEN


# -- From the settings of a run to its schedule ------------------------------------------


class Kind(NamedTuple):
    """A row of SCHEDULES. Every schedule starts with a warmup."""

    stable: Callable[..., Schedule]  # config -> the schedule without warmup and decay
    reads: set[str]  # the fields of a config that change it; with DECAY, it gets a decay
    planned: bool = False  # does it depend on the run length from the first step?


def constant_of(cfg) -> Schedule:
    return constant(cfg.lr)


def cosine_of(cfg) -> Schedule:
    return cosine(cfg.lr, cfg.warmup_tokens, cfg.total_tokens, cfg.min_lr_ratio)


def power_of(cfg) -> Schedule:
    beta = paper_batch_size(cfg.batch_size * cfg.seq_len)
    return power_law(cfg.power_a, cfg.power_b, beta, cfg.lr_max, cfg.power_q)


DECAY = {"decay_share", "decay_tokens", "decay_shape"}
POWER = {"power_a", "power_b", "power_q", "lr_max"}
SCHEDULES = {
    "power": Kind(power_of, {"warmup_tokens"} | POWER | DECAY),
    "wsd": Kind(constant_of, {"warmup_tokens", "lr"} | DECAY),
    "cosine": Kind(cosine_of, {"warmup_tokens", "lr", "min_lr_ratio"}, planned=True),
    "constant": Kind(constant_of, {"warmup_tokens", "lr"}),
}
READ_BY_SOME = set().union(*(kind.reads for kind in SCHEDULES.values()))


def unread(schedule: str) -> set[str]:
    """Fields that other schedules read, and this one does not. Empty if it is unknown."""
    if schedule not in SCHEDULES:
        return set()
    return READ_BY_SOME - SCHEDULES[schedule].reads


def is_planned(schedule: str) -> bool:
    return SCHEDULES[schedule].planned


def has_decay(schedule: str) -> bool:
    return "decay_tokens" in SCHEDULES[schedule].reads


def make_schedule(cfg) -> Schedule:
    """The schedule of a TrainConfig. Raises ValueError if warmup and decay are longer than the run.

    Training takes the value at the middle of a step, so no step has learning rate 0.
    """
    total = cfg.total_tokens
    warm = cfg.warmup_tokens
    tail = cfg.decay_tokens if has_decay(cfg.schedule) else 0
    nothing_left = is_planned(cfg.schedule) and warm == total  # it would divide by 0
    if warm + tail > total or nothing_left:
        phases = f"--warmup_tokens {warm:,}"
        if tail:
            phases += f" --decay_tokens {tail:,}"
        message = f"too long for --total_tokens {total:,}; shorten a phase"
        raise ValueError(f"{phases}: {message}")
    stable = SCHEDULES[cfg.schedule].stable(cfg)
    return decay(warmup(stable, warm), total, tail, cfg.decay_shape)


# -- Figure 1 of the paper ---------------------------------------------------------------


PAPER_LAW = {"a": 4.6, "b": -0.51, "q": 1.0}  # equations 5 and 6


def best_lr(T: float, beta: float, law: dict = PAPER_LAW) -> float:
    """Best constant learning rate of a WSD run of T tokens, beta^q * a * T^b."""
    return beta ** law["q"] * law["a"] * T ** law["b"]


def paper_curves(T: float, beta: float) -> dict[str, Schedule]:
    """Figure 1 with the warmup of the paper's sweeps, 1B tokens, and their decay, the last 10%."""
    lr = best_lr(T, beta)
    power = power_law(4, -0.51, beta, 0.02)  # the paper's Power has a = 4, its law 4.6
    return {
        "cosine": warmup(cosine(lr, 1e9, T, 0.1), 1e9),
        "wsd": decay(warmup(constant(lr), 1e9), T, T / 10, "exp"),
        "power": decay(warmup(power, 1e9), T, T / 10, "exp"),
    }


def main(argv: list[str] | None = None) -> int:
    from tools import figures, flags

    flags.program_parser("schedules.py", __doc__).parse_args(argv)
    T = 32e9  # tokens, from the grid in Table 2
    beta = 128
    curves = paper_curves(T, beta)
    figure = Path("assets/schedules.png")
    try:
        figures.draw_schedules(figure, paper_curves, T, beta)
    except OSError as error:
        return flags.fail("schedules.py", error)
    print("  tokens" + "".join(f"{name:>10}" for name in curves))
    for n in (0.5e9, 1e9, 2e9, 4e9, 8e9, 16e9, 24e9, 28.8e9, 30.4e9, 31.68e9, 32e9):
        rates = "".join(f"{schedule(n):10.6f}" for schedule in curves.values())
        print(f"{n / 1e9:7.2f}B{rates}")
    print(f"\nfigure: {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
