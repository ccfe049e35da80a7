"""Every figure, drawn from plain arrays; the only file that imports matplotlib."""

import math
from pathlib import Path

from tools.runs import read_metrics

STYLE = Path(__file__).parent.parent / "figures.mplstyle"


COLORS = {"cosine": "#6b6b6b", "wsd": "#B34700", "power": "#0072B2", "constant": "#B34700", "average": "#00735A"}


def draw_schedules(path: Path, paper_curves, best_lr, T: float, batch: int) -> None:
    """Figure 1 of the paper, and below it what the two words of its title mean."""
    import matplotlib
    from matplotlib.figure import Figure

    crossing = (4.6 / 4) ** (1 / -0.51)  # share of T where 4 n^-0.51 has come down to 4.6 T^-0.51
    look = {
        "cosine": dict(color=COLORS["cosine"], linestyle="--"),
        "wsd": dict(color=COLORS["wsd"]),
        "power": dict(color=COLORS["power"], linewidth=2.4),
    }

    with matplotlib.rc_context(fname=STYLE):
        fig = Figure(figsize=(5, 6.2))
        top, bottom = fig.subplots(2, 1, sharex=True, sharey=True)

        def plot(ax, schedule, total, **style):
            n = [total * i / 2000 for i in range(2001)]
            ax.plot([x / 1e9 for x in n], [schedule(x) for x in n], **style)

        for name, schedule in paper_curves(T, batch).items():
            plot(top, schedule, T, **look[name])
        top.set_title("WSD holds its rate, Power lets it fall with n")
        top.text(2.2, 0.0112, "Power", color=COLORS["power"])
        top.text(3.0, 0.0030, "WSD", color=COLORS["wsd"])
        top.text(12.2, 0.0005, "cosine", color=COLORS["cosine"])
        at = crossing * T / 1e9
        top.annotate(
            f"below WSD's best rate\nafter {crossing:.0%} of the run",
            (at, best_lr(T, batch)), (at, 0.0073), ha="center", arrowprops={"arrowstyle": "-", "linewidth": 0.8},
        )  # fmt: skip

        for total in (T / 4, T / 2, T):
            for name in ("cosine", "power"):
                plot(bottom, paper_curves(total, batch)[name], total, **look[name])
        for other in (batch // 2, batch * 2):
            plot(bottom, paper_curves(T, other)["power"], T, color=COLORS["power"], linewidth=0.8)
        bottom.set_title("Power is one curve for all budgets, cosine is not")
        bottom.text(15.2, 0.0168, "dashed: cosines, another\ncurve for every budget", color=COLORS["cosine"])
        bottom.text(15.2, 0.0122, f"thin: batch {batch // 2} and {batch * 2},\nhalf and twice the rate", color=COLORS["power"])
        tail = 0.93 * T / 2  # a place on the middle tail to point at
        bottom.annotate(
            f"budgets {T / 4e9:.0f}B, {T / 2e9:.0f}B, {T / 1e9:.0f}B:\none curve, three tails",
            (tail / 1e9, paper_curves(T / 2, batch)["power"](tail)), (15.2, 0.0077),
            color=COLORS["power"], arrowprops={"arrowstyle": "-", "linewidth": 0.8, "color": COLORS["power"]},
        )  # fmt: skip
        bottom.set_xlabel("tokens seen (billions)")
        for ax in (top, bottom):
            ax.set_ylabel("learning rate")
            ax.set_xlim(0, T / 1e9 * 1.02)
            ax.set_ylim(0, 0.0212)
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path)


def draw_coordinates(path: Path, changes: dict[str, dict[str, list[float]]], WIDTHS, slope) -> None:
    """The coordinate check: mean change of each kind of activation against width, standard above, muP below."""
    HOOKS = list(next(iter(changes.values())))
    import matplotlib
    from matplotlib.figure import Figure

    colors = dict(zip(HOOKS, ("#0072B2", "#B34700", "#00735A", "#000000")))
    markers = dict(zip(HOOKS, "os^D"))
    with matplotlib.rc_context(fname=STYLE):
        fig = Figure(figsize=(5, 6.2))
        panels = fig.subplots(2, 1, sharex=True, sharey=True)
        for ax, (name, change) in zip(panels, changes.items()):
            for hook in HOOKS:
                ax.plot(WIDTHS, change[hook], color=colors[hook], marker=markers[hook])
            for hook, y in spread({hook: change[hook][-1] for hook in HOOKS}).items():
                ax.text(WIDTHS[-1] * 1.1, y, f"{hook} {slope(change[hook]):+.1f}", color=colors[hook], va="center")
            ax.set_xscale("log", base=2)
            ax.set_yscale("log", base=2)
            ax.set_xticks(WIDTHS, [str(w) for w in WIDTHS])
            ax.set_xlim(WIDTHS[0] * 0.9, WIDTHS[-1] * 2.6)
            ax.set_ylim(bottom=min(map(min, change.values())) / 2)
            ax.set_ylabel("mean change in 4 steps")
        panels[0].set_title("Standard: wider models move further")
        panels[1].set_title("μP: they move the same at any width")
        panels[1].set_xlabel("width (numbers: slope of the log change)")
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path)


def spread(ends: dict[str, float], factor: float = 1.9) -> dict[str, float]:
    """Heights for labels on a log axis: each near its line's end, no two closer than `factor`."""
    placed: dict[str, float] = {}
    ceiling = math.inf
    for name, y in sorted(ends.items(), key=lambda item: -item[1]):
        placed[name] = ceiling = min(y, ceiling / factor)
    return placed


def draw_curve(out: Path, record: dict) -> None:
    """curve.png: the loss, and below it the learning rate that made it; of a mixture also how even its experts' load is."""
    import matplotlib
    from matplotlib.figure import Figure

    lines = read_metrics(out)
    training = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "val_loss" in line]
    mixture = record["n_expert"] > 0
    color = COLORS.get(record["schedule"], "#7a3b8f")  # of a fork's own schedule
    with matplotlib.rc_context(fname=STYLE):
        fig = Figure(figsize=(5, 6.2 if mixture else 4.6))
        top, bottom, *third = fig.subplots(2 + mixture, 1, sharex=True, height_ratios=(2, 1, 1)[: 2 + mixture])
        millions = lambda some: [line["tokens"] / 1e6 for line in some]
        values = lambda some, key: [math.nan if line[key] is None else line[key] for line in some]
        top.plot(millions(training), values(training, "loss"), color=color, linewidth=0.8, alpha=0.6)
        top.plot(millions(held_out), values(held_out, "val_loss"), color="black", marker="o", markersize=4)
        labels = [(0.93, "held-out text", "black"), (0.84, "training batches", color)]
        if record["average"]:
            top.plot(millions(held_out), values(held_out, "average_val_loss"), color=COLORS["average"], marker="s", markersize=4)
            labels.append((0.75, "averaged weights", COLORS["average"]))
        for y, label, hue in labels:
            top.text(0.98, y, label, color=hue, ha="right", va="top", transform=top.transAxes)  # losses fall: this corner is free
        end = "diverged" if record["diverged"] else f"{record['val_loss']:.3f} nats on held-out text"
        top.set_title(f"{record['preset']}, {record['schedule']}: {end}")
        top.set_ylabel("loss (nats per token)")
        bottom.plot(millions(training), [line["lr"] for line in training], color=color, linewidth=2)
        bottom.set_ylabel("learning rate")
        bottom.set_ylim(bottom=0)
        for panel in third:
            for x, key, label, hue in (
                (0.0, "max_load", "max load / mean", "#0072B2"),  # a line for each layer
                (0.37, "aux_loss", "auxiliary loss", "#B34700"),
                (0.68, "router_entropy", "entropy (nats)", "#00735A"),
            ):
                panel.plot(millions(training), values(training, key), color=hue, linewidth=0.8)
                panel.text(x, 1.04, label, color=hue, transform=panel.transAxes)
            panel.set_ylim(bottom=0)
            panel.set_ylabel("experts")
        fig.axes[-1].set_xlabel("tokens seen (millions)")
        fig.savefig(out / "curve.png")
