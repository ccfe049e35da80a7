"""Every figure, drawn from plain arrays. No other file imports matplotlib.

A draw_* function with a path saves one PNG, 5 inches wide. Log axes hold log2 values, and
`log_ticks` labels them. `found` is a list of minima as fit.minima returns them.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tools.files import read_metrics, replacing

STYLE = Path(__file__).parent.parent / "figures.mplstyle"
COLORS = {
    "power": "#0072B2",
    "wsd": "#B34700",
    "average": "#00735A",
    "cosine": "#6b6b6b",
    "other": "#7a3b8f",
}


@contextlib.contextmanager
def figure(path: Path, height: float, panels: int = 1, **layout) -> Iterator[np.ndarray]:
    """Yield the axes of stacked panels, and save the figure when the block ends."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(fname=STYLE):
        fig = Figure(figsize=(5, height))
        yield fig.subplots(panels, 1, squeeze=False, **layout)[:, 0]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            fig.savefig(temporary, format="png")


def size(tokens: float) -> str:
    """131072 -> '131k'"""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= 0.9995 * unit:
            return f"{tokens / unit:.3g}{letter}"
    return f"{tokens:.3g}"


def shades(values: dict) -> dict:
    """{value: a color}, all dark enough to read as text on white."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list(
        "", ["#0b3d91", "#7a3b8f", "#c2185b", "#b34700"]
    )
    return dict(zip(values, colors(np.linspace(0, 1, len(values)))))


def log_ticks(axis, values, unit: float | None = None) -> None:
    """Label an axis in log2 units at six values or fewer: unit * 2^k, or sizes from the
    lowest."""
    low, high = min(values), max(values)
    step = max(1, math.ceil((high - low) / 5 - 0.01))
    if unit:
        step = step if high - low > 1.5 else 0.5
        grid, zero = min(1, step), math.log2(unit)
        low = zero + grid * math.floor((low - zero) / grid + 0.7)
        high = max(high, low + step)  # at least two
    at = np.arange(low, high + 0.01, step)
    axis.set_ticks(at, [f"{2**x:.2g}" if unit else size(2**x) for x in at])


def push_apart(heights: list[float], gap: float) -> list[float]:
    """Move neighbors apart until the gaps between them are wide enough."""
    order, placed = np.argsort(heights, kind="stable"), list(heights)
    for _ in range(100):
        for low, high in zip(order, order[1:]):
            overlap = max(0.0, gap - (placed[high] - placed[low]))
            placed[low] -= overlap / 2
            placed[high] += overlap / 2
    return placed


def label_ends(ax, ends: dict[str, tuple]) -> None:
    """Write {label: (x, y, color)} right of the panel, with a pointer to (x, y)."""
    low, high = ax.get_ylim()
    gap = 0.08 * (high - low)
    heights = push_apart([y for _, y, _ in ends.values()], gap)
    ax.set_ylim(min(low, min(heights) - gap / 2), max(high, max(heights) + gap / 2))
    for (label, (x, y, color)), height in zip(ends.items(), heights):
        pointer = dict(arrowstyle="-", color=color, linewidth=0.6, shrinkA=1, shrinkB=2)
        where = dict(
            xytext=(1.03, height), textcoords=ax.get_yaxis_transform(), va="center"
        )
        ax.annotate(label, (x, y), **where, color=color, arrowprops=pointer)


# -- Schedules and runs ------------------------------------------------------------------


def draw_schedules(path: Path, paper_curves, T: float, beta: float) -> None:
    """Figure 1 of the paper, and below it two schedules at three run lengths."""
    looks = {"power": dict(linewidth=2.4), "wsd": {}, "cosine": dict(linestyle="--")}
    words = {"power": "Power", "wsd": "WSD", "cosine": "cosine"}
    lengths = f": {size(T / 4)}, {size(T / 2)}, {size(T)} tokens"
    with figure(path, 6.2, 2, sharex=True, sharey=True) as (top, bottom):
        curves = [(top, name, T, words[name]) for name in words]
        for name in ("power", "cosine"):
            curves += [(bottom, name, T, words[name] + lengths)]
            curves += [(bottom, name, T / 2, None), (bottom, name, T / 4, None)]
        for ax, name, total, label in curves:
            schedule, n = paper_curves(total, beta)[name], np.linspace(0, total, 2001)
            look = dict(color=COLORS[name], label=label) | looks[name]
            ax.plot(n / 1e9, [schedule(x) for x in n], **look)
        top.set_title("WSD holds its learning rate, Power lets it fall")
        bottom.set_title("Power is one curve for every length, cosine is not")
        bottom.set_xlabel("tokens seen (billions)")
        for ax in (top, bottom):
            ax.set(ylabel="learning rate", xlim=(0, T / 1e9 * 1.02), ylim=(0, None))
            ax.legend(loc="upper right")


def column(lines: list[dict], name: str) -> tuple[list, list]:
    """Millions of tokens and a metric, of the lines that have it."""
    some = [line for line in lines if line.get(name) is not None]
    return [line["tokens"] / 1e6 for line in some], [line[name] for line in some]


def draw_curve(out: Path, record: dict) -> None:
    """curve.png of a run folder, with loss, learning rate and the load of experts in an
    MoE."""
    lines, moe = read_metrics(out), record["n_expert"] > 0
    color = COLORS.get(record["schedule"], COLORS["other"])
    layout = dict(sharex=True, height_ratios=(2, 1, 1)[: 2 + moe])
    with figure(out / "curve.png", 6.2 if moe else 4.6, 2 + moe, **layout) as axes:
        losses, rates = axes[:2]
        losses.plot(
            *column(lines, "loss"), color=color, linewidth=0.8, label="training batches"
        )
        dots = dict(marker="o", markersize=4)
        losses.plot(*column(lines, "val_loss"), color="black", label="validation", **dots)
        if record["average"]:
            averages, label = (
                column(lines, "average_val_loss"),
                "validation, averaged weights",
            )
            losses.plot(*averages, color=COLORS["average"], label=label, **dots)
        losses.legend(loc="upper right")
        end = (
            "diverged"
            if record["diverged"]
            else f"validation loss {record['val_loss']:.3f} nats"
        )
        title = f"{record['preset']}, {record['schedule']}: {end}"
        losses.set(title=title, ylabel="loss (nats per token)")
        rates.plot(*column(lines, "lr"), color=color, linewidth=2)
        rates.set(ylabel="learning rate", ylim=(0, None))
        if moe:
            loads = column(
                lines, "max_load"
            )  # of the busiest expert, with a curve for every layer
            axes[2].plot(*loads, color=COLORS["other"], linewidth=0.8)
            axes[2].set(ylabel="max / mean load", ylim=(0, None))
        axes[-1].set_xlabel("tokens seen (millions)")


# -- Minima and the law ------------------------------------------------------------------


def draw_valleys(path: Path, panels: list[dict]) -> None:
    """Figure 2 of the paper, loss against learning rate, with the minima below zero.

    A panel has title, xlabel, log (of the x axis) and groups {label: minima}.
    """
    log = [panel for panel in panels if panel["log"]]
    x = [
        p[0]
        for panel in log
        for some in panel["groups"].values()
        for m in some
        for p in m.points
    ]
    with figure(
        path, 3.75 * len(panels), len(panels), sharex=len(log) == len(panels)
    ) as axes:
        for ax, panel in zip(axes, panels):
            groups, color_of_group = panel["groups"], shades(panel["groups"])
            heights = [
                draw_valley(ax, groups[name], color_of_group[name]) for name in groups
            ]
            draw_feet(ax, groups, color_of_group, top=1.6 * max(heights) or 0.1)
            ax.set(
                title=panel["title"],
                xlabel=panel["xlabel"],
                ylabel="loss above lowest (nats)",
            )
            if panel["log"]:
                log_ticks(ax.xaxis, x, unit=0.001 if min(x) < 0 else 1)  # or a of Power


def draw_valley(ax, found: list, color) -> float:
    """Losses above the lowest one. Fits use the filled points; returns the highest of
    these."""
    near, hollow = [], dict(markersize=4, markerfacecolor="none", markeredgewidth=0.8)
    for m in found:
        points = [(x, y - m.loss) for x, y in m.points if math.isfinite(y)]
        near += [(x, y - m.loss) for x, y in m.near if math.isfinite(y)]
        ax.plot(
            [x for x, _ in points], [y for _, y in points], "o", color=color, **hollow
        )
    if len({x for x, _ in near}) > found[0].rule[0]:
        x, y = np.array(near).T
        ax.scatter(x, y, s=14, color=[color])
        line = np.linspace(x.min(), x.max())
        ax.plot(line, np.polyval(np.polyfit(x, y, found[0].rule[0]), line), color=color)
    return max((y for _, y in near), default=0)


def draw_feet(ax, groups: dict, colors: dict, top: float) -> None:
    """A row per group below zero, with triangles at the minima and a line at their
    mean."""
    feet = {name: [m.x for m in found if not m.why_not] for name, found in groups.items()}
    rightmost = sorted(feet, key=lambda name: -np.mean(feet[name] or [math.inf]))
    ends, right = {}, ax.get_xlim()[1]
    for i, name in enumerate(rightmost, 1):  # on top, so no line crosses a pointer
        y, look = -0.13 * i * top, dict(color=colors[name])
        if feet[name]:
            ax.plot([np.mean(feet[name])] * 2, [y, 0], **look, linewidth=0.8, alpha=0.6)
            ax.plot(feet[name], [y] * len(feet[name]), "^", **look, markersize=5)
        ends[name] = max(feet[name], default=right), y, colors[name]
    ax.set_ylim(-0.13 * (len(groups) + 0.8) * top, top)
    ax.set_yticks([y for y in ax.get_yticks() if 0 <= y <= top])
    ax.axhline(0, color="black", linewidth=0.6)
    label_ends(ax, ends)


def draw_points(
    path: Path, groups: dict, title: str, xlabel: str, ylabel: str = ""
) -> None:
    """Points with intervals, and lines, as in Figure 3 of the paper.

    groups: {label: [(log2 x, y, low, high, y of the line, filled or hollow)]}, in order
    of x. Without a ylabel, all y are log2 of the best learning rate.
    """
    color_of_label, ends = shades(groups), {}
    all_x, all_y, *_ = zip(*sum(groups.values(), []))
    right = max(all_x)
    with figure(path, 3.75) as (ax,):
        for label, points in groups.items():
            color = color_of_label[label]
            for x, y, low, high, _, filled in points:
                ax.vlines(x, low, high, color=color, linewidth=0.8)
                ax.plot(
                    x, y, "o", color=color, markersize=5, mfc=color if filled else "white"
                )
            x, _, _, _, line, _ = zip(*points)
            ax.plot(x, line, color=color)
            ends[label] = x[-1], line[-1], color
            if (
                len(x) > 1 and x[-2] < x[-1]
            ):  # if it ends early, it goes on, dotted, to its label
                end = line[-1] + (line[-1] - line[-2]) / (x[-1] - x[-2]) * (right - x[-1])
                ax.plot([x[-1], right], [line[-1], end], ":", color=color)
                ends[label] = right, end, color
        if not ylabel:
            log_ticks(ax.yaxis, all_y, unit=0.001)
        log_ticks(ax.xaxis, all_x)
        label_ends(ax, ends)  # last, because ticks may change the limits
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel or "best learning rate")


# -- The comparison ----------------------------------------------------------------------

WHEN = {
    "never": COLORS["average"],
    "when it decays": COLORS["power"],
    "from the start": "#555555",
}


def draw_differences(path: Path, panels: list[dict], level: float) -> None:
    """A row for every line: its mean difference with interval, from the best line at the
    top.

    A panel has title, other (its line at 0) and rows {line: (mean, low, high, when it
    needs T)}.
    """
    heights = [len(panel["rows"]) for panel in panels]
    height = 0.27 * sum(heights) + 0.8 * len(panels)
    with figure(path, height, len(panels), height_ratios=heights) as axes:
        for ax, panel in zip(axes, panels):
            ax.axvspan(-level, level, color="#dddddd", linewidth=0)
            ax.axvline(0, color="black", linewidth=0.6)
            for y, (mean, low, high, when) in enumerate(panel["rows"].values()):
                ax.hlines(y, low, high, color=WHEN[when])
                ax.plot(mean, y, "o", color=WHEN[when], markersize=4)
            ax.set_yticks(range(len(panel["rows"])), list(panel["rows"]))
            ax.invert_yaxis()
            ax.set_title(panel["title"], loc="right")
            ax.set(ylabel=" ", xlabel=f"loss minus {panel['other']} (nats)")
            ax.locator_params(axis="x", nbins=5)
        for when, color in WHEN.items():
            axes[0].plot([], [], color=color, label=when)
        axes[0].legend(
            loc="upper right", handlelength=0, title="needs T"
        )  # words have the colors
