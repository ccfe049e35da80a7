"""Draws what you wrote.

python draw.py steps     exercises 1 and 2: constant, warmup, WSD, Power
python draw.py loss      the same, and the losses of four short runs
python draw.py rules     exercise 3: a hidden matrix at five widths
python draw.py vertex    exercise 4: a valley and its bottom
python draw.py branch    exercise 5: the losses of a trunk and its branches
python draw.py average   exercise 6: a mean of the weights beside a decay
"""

import os
import sys

os.environ["MPLBACKEND"] = "Agg"  # we draw into files, also from a notebook's !python

import matplotlib.pyplot as plt

import average
import judge
import power

T = 16 * power.T0  # tokens
LR = 0.016
LENGTHS = [2**k * power.T0 for k in (1, 2, 3, 4)]  # of the branches, in tokens


def steps() -> dict:
    """Name -> schedule of the four steps, as far as they are written."""
    warm = power.warmup(power.constant(LR))
    start = T - round(power.DECAY * T)
    schedules = {"constant": power.constant(LR), "constant with warmup": warm}
    try:
        schedules["WSD: ... and decay"] = power.decay(warm, start, T)
        warm = power.warmup(power.power_law(LR, b=-0.3, lr_max=0.064))
        schedules["Power: power_law for constant"] = power.decay(warm, start, T)
    except NotImplementedError as missing:
        print(f"{missing} to see more")
    return schedules


def draw_steps(with_loss: bool = False) -> None:
    schedules = steps()
    rows = 2 if with_loss else 1
    columns = len(schedules)
    size = (3 * columns, 3 * rows)
    _, axes = plt.subplots(rows, columns, figsize=size, sharey="row", squeeze=False)
    tokens = range(1, T + 1, power.STEP)
    for (name, schedule), column in zip(schedules.items(), axes.T):
        column[0].plot(tokens, [schedule(n) for n in tokens])
        column[0].set_title(name, loc="left", fontsize=9)
        column[-1].set_xlabel("tokens")
        if with_loss:
            run = power.Run(seed=0)
            curve = []
            for part in range(1, 17):
                run.train(schedule, part * T // 16).measure()
                curve.append((run.tokens, run.loss))
            column[1].plot(*zip(*curve))
            print(f"{name:<30} ends at {run.loss:.3f}", flush=True)
    axes[0, 0].set_ylabel("learning rate")
    axes[-1, 0].set_ylabel("loss (nats per token)" if with_loss else "learning rate")


def draw_loss() -> None:
    draw_steps(with_loss=True)


def draw_rules() -> None:
    _, axes = plt.subplots(1, 2, figsize=(8, 3), sharex=True)
    widths = [m * judge.BASE_WIDTH for m in (1, 2, 4, 8, 16)]
    tables = {"the rule of the base width": lambda m: judge.rules_at(1)}
    tables["your rules"] = judge.rules_at
    for name, table_at in tables.items():
        sizes = []
        for width in widths:
            rule = table_at(width / judge.BASE_WIDTH)["hidden"]
            sizes.append(judge.start_and_change(rule, width))
        for ax, size in zip(axes, zip(*sizes)):
            ax.plot(widths, size, "o-", label=name)
        growth = [last / first for first, last in zip(sizes[0], sizes[-1])]
        print(
            f"{name}, 16 times the width: start {growth[0]:.2f}, change {growth[1]:.2f}"
        )
    axes[0].set(xscale="log", yscale="log", title="outputs at the start", xlabel="width")
    axes[1].set(yscale="log", title="how far one step moves them", xlabel="width")
    axes[0].legend()


def draw_vertex() -> None:
    # the losses that power.py measured for WSD at T0
    losses = {0.004: 2.740, 0.008: 2.643, 0.016: 2.603, 0.032: 2.612, 0.064: 2.761}
    _, ax = plt.subplots(figsize=(5, 3))
    ax.plot(losses.keys(), losses.values(), "o")
    bottom = power.vertex(losses)
    ax.axvline(bottom)
    ax.set(xscale="log", xlabel="learning rate", ylabel="loss (nats per token)")
    ax.set_xticks(list(losses), list(losses))
    ax.minorticks_off()
    ax.set_title(f"your bottom is at {bottom:.4f}", loc="left")
    print(f"your bottom is at {bottom:.4f}")


def draw_branch() -> None:
    _, ax = plt.subplots(figsize=(6, 4))
    schedule = power.warmup(power.constant(LR))
    branches = power.trunk_and_branches(schedule, LENGTHS, seed=0)
    trunk = power.Run(seed=0)  # again, to measure it
    curve = []
    for length, branch in branches.items():
        start = length - round(power.DECAY * length)
        trunk.train(schedule, start).measure()
        curve.append((trunk.tokens, trunk.loss))
        ends = [curve[-1], (branch.tokens, branch.loss)]
        ax.plot(*zip(*ends), "o-", label=f"branch, T = {length:,}")
        fall = f"from {trunk.loss:.3f} to {branch.loss:.3f}"
        print(f"T = {length:7,}: the decay takes the loss {fall}", flush=True)
    ax.plot(*zip(*curve), "k-", label="trunk")
    ax.set(xlabel="tokens", ylabel="loss (nats per token)")
    ax.legend()


def draw_average() -> None:
    """The loss of a run that holds its learning rate, and of two ways to end it."""
    _, ax = plt.subplots(figsize=(6, 4))
    schedule = power.warmup(power.constant(LR))
    run = power.Run(seed=0)
    curve = []
    for length in LENGTHS:
        start = length - round(power.DECAY * length)
        run.train(schedule, start).measure()
        curve.append((run.tokens, run.loss))
        branch = run.branch()
        branch.train(power.decay(schedule, start, length), length).measure()
        mean = run.branch()
        mean.model = average.train_and_average(run, schedule, length)
        mean.measure()
        run.measure()
        curve.append((run.tokens, run.loss))
        losses = {"held": run.loss, "decay": branch.loss, "mean": mean.loss}
        shown = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        print(f"T = {length:7,}: {shown}", flush=True)
        ax.plot(length, losses["decay"], "v", color="tab:blue")
        ax.plot(length, losses["mean"], "o", color="tab:green")
    ax.plot(*zip(*curve), color="black")
    ax.set(xlabel="tokens", ylabel="loss (nats per token)")
    ax.set_title("held (line), decay (triangle), mean (dot)", loc="left")


PICTURES = {
    "steps": draw_steps,
    "loss": draw_loss,
    "rules": draw_rules,
    "vertex": draw_vertex,
    "branch": draw_branch,
    "average": draw_average,
}


def main(name: str) -> None:
    PICTURES[name]()
    plt.savefig(f"{name}.png", dpi=150, bbox_inches="tight")
    print(f"{name}.png")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PICTURES:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except NotImplementedError as missing:
        sys.exit(str(missing))
