"""Learning-rate schedules: cosine, WSD and Power.

A schedule here is a function: tokens seen so far -> learning rate. No state, no steps, no
scheduler objects. The paper's two schedules are one line each and differ in one word:

    WSD   = decay(warmup(constant(lr), ...), ...)
    Power = decay(warmup(power_law(a, b, beta, lr_max), ...), ...)

Read `power_law`, `warmup`, `decay` and `make_schedule`; the rest draws them.

    python schedules.py        prints the curves and draws the paper's Figure 1

Units, everywhere in this project: n and all lengths are *tokens*; beta is the batch size in
*sequences of 4096 tokens*. With them a = 4.6, b = -0.51 gives the paper's 0.0011 for 10T tokens
at batch size 1024; with tokens or steps in place of either it gives nonsense.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

Schedule = Callable[[float], float]  # tokens seen -> learning rate of a parameter with lr_scale 1

PAPER_SEQ_LEN = 4096  # the paper counts batches in sequences of this length


def paper_batch_size(batch_tokens: float) -> float:
    """beta: the batch size in sequences of 4096 tokens, whatever our own sequences' length is."""
    return batch_tokens / PAPER_SEQ_LEN


# ---------------------------------------------------------------------------------------------
# What the learning rate does for most of the run


def constant(lr: float) -> Schedule:
    """Hold `lr`: the stable phase of WSD (equation 2 of the paper)."""
    return lambda n: lr


def power_law(a: float, b: float, beta: float, lr_max: float) -> Schedule:
    """min(lr_max, beta * a * n^b), the paper's power learning rate (equation 7).

    The fitted law says that a WSD run of T tokens wants beta * a * T^b. Power puts n in T's
    place: run at every moment at about the rate that would be right if you stopped soon.
    """
    # b < 0, so the law is infinite at n = 0: the ceiling is what it starts from.
    return lambda n: min(lr_max, beta * a * n**b) if n > 0 else lr_max


def cosine(lr: float, warmup_tokens: float, total_tokens: float, min_lr_ratio: float) -> Schedule:
    """Half a cosine from `lr` at the end of warm-up to `min_lr_ratio * lr` at `total_tokens`.

    The end is inside the formula: a cosine cannot be drawn before one knows where it stops.
    The paper does not give its final value; a tenth of the peak is the usual choice.
    """

    def schedule(n: float) -> float:
        x = (n - warmup_tokens) / (total_tokens - warmup_tokens)  # share of the way down
        x = min(max(x, 0.0), 1.0)
        return lr * (min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * x)))

    return schedule


# ---------------------------------------------------------------------------------------------
# What it does at the beginning and at the end


def warmup(schedule: Schedule, warmup_tokens: float) -> Schedule:
    """Rise linearly from 0 to the schedule's value *at* `warmup_tokens`, then follow it.

    Not to lr_max: with a small batch the power law has left its ceiling by then.
    """
    if warmup_tokens == 0:
        return schedule
    target = schedule(warmup_tokens)
    return lambda n: target * n / warmup_tokens if n < warmup_tokens else schedule(n)


# x: share of the decay phase that is over, 0 ... 1 -> share of the learning rate that is left.
# The paper says "exponentially to 0" and no more; `exp` is what IBM's training code does.
DECAY_SHAPES = {
    "exp": lambda x: (math.exp(1 - x) - 1) / (math.e - 1),
    "linear": lambda x: 1 - x,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
}


def decay(schedule: Schedule, total_tokens: float, decay_tokens: float, shape: str) -> Schedule:
    """Follow the schedule, then fall from its last value to 0 over the last `decay_tokens`.

    The value is frozen where the decay begins: from there on only the shape falls, the power
    law underneath does not go on falling (equations 2 and 8 of the paper).
    """
    if decay_tokens == 0:
        return schedule
    start = total_tokens - decay_tokens
    last = schedule(start)
    f = DECAY_SHAPES[shape]
    # min: past the end the rate stays 0; unclamped, `exp` would turn negative.
    return lambda n: schedule(n) if n <= start else last * f(min(1.0, (n - start) / decay_tokens))


# ---------------------------------------------------------------------------------------------
# The four schedules of a training run

SCHEDULES = ("power", "wsd", "cosine", "constant")
PLANNED = ("cosine",)  # these must be told their end from the first step
READS = {  # the fields of a TrainConfig that each schedule depends on, apart from batch size and length
    "power": {"power_a", "power_b", "lr_max", "warmup_tokens", "decay_tokens", "decay_shape"},
    "wsd": {"lr", "warmup_tokens", "decay_tokens", "decay_shape"},
    "cosine": {"lr", "min_lr_ratio", "warmup_tokens"},
    "constant": {"lr", "warmup_tokens"},
}


def make_schedule(cfg) -> Schedule:
    """The schedule that a TrainConfig asks for: tokens -> learning rate.

    Raises ValueError where warm-up and decay do not fit into the run.
    The learning rate of a step is the schedule at the *middle* of the tokens that the step
    consumes, `make_schedule(cfg)(n0 + batch_tokens / 2)`. So neither the first nor the last
    step is wasted at rate 0, and the curve does not shift with the batch size.
    """
    total, warm, tail = cfg.total_tokens, cfg.warmup_tokens, cfg.decay_tokens
    if cfg.schedule in ("cosine", "constant"):
        tail = 0  # the cosine is its own decay; constant has none
    if warm + tail > total:
        raise ValueError(
            f"warmup_tokens {warm:,} + decay_tokens {tail:,} is more than "
            f"total_tokens {total:,}: shorten one of the phases or train longer"
        )
    if cfg.schedule == "cosine":
        if warm == total:
            raise ValueError(f"warmup_tokens {warm:,} leaves no token of total_tokens {total:,} for the cosine")
        return warmup(cosine(cfg.lr, warm, total, cfg.min_lr_ratio), warm)
    if cfg.schedule == "power":
        stable = power_law(cfg.power_a, cfg.power_b, paper_batch_size(cfg.batch_size * cfg.seq_len), cfg.lr_max)
    else:
        stable = constant(cfg.lr)
    return decay(warmup(stable, warm), total, tail, cfg.decay_shape)


# ---------------------------------------------------------------------------------------------
# The picture



def best_lr(total_tokens: float, batch: float) -> float:
    """The paper's law for the best constant rate of WSD: 4.6 * beta * T^-0.51 (equations 5 and 6)."""
    return 4.6 * batch * total_tokens**-0.51


def paper_curves(T: float, batch: float) -> dict[str, Schedule]:
    """The three schedules as in the paper's sweeps: 1B tokens of warm-up, the last 10 % decay.

    Cosine and WSD get the law's best rate for this T and batch; Power is told nothing.
    """
    lr, warm = best_lr(T, batch), 1e9
    return {
        "cosine": warmup(cosine(lr, warm, T, 0.1), warm),
        "wsd": decay(warmup(constant(lr), warm), T, T / 10, "exp"),
        "power": decay(warmup(power_law(4, -0.51, batch, 0.02), warm), T, T / 10, "exp"),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="schedules.py", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("assets/schedules.png"), help="where the picture goes")
    args = parser.parse_args(argv)

    from tools import figures

    T, batch = 32e9, 128  # one cell of the paper's Table 2
    curves = paper_curves(T, batch)
    print(f"T = {T / 1e9:.0f}B tokens, batch {batch} x 4096 tokens, 1B of warm-up, the last 10 % decay")
    print(f"cosine (to a tenth of its peak) and WSD at the law's best rate for this T and batch, {best_lr(T, batch):.5f}; Power knows neither\n")
    print(f"{'tokens':>8}" + "".join(f"{name:>10}" for name in curves))
    for share in (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 0.9, 0.95, 0.99, 1):
        print(f"{share * T / 1e9:7.2f}B" + "".join(f"{f(share * T):10.6f}" for f in curves.values()))
    try:
        figures.draw_schedules(args.out, paper_curves, best_lr, T, batch)
    except OSError as error:
        print(f"schedules.py: cannot write --out {args.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"\npicture: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
