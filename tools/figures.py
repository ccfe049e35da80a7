"""Every figure, drawn from plain arrays. No other file imports matplotlib.

A draw_* function with a path saves one PNG, 5 inches wide. Log axes hold log2 values, and
`log_ticks` labels them.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tools.files import read_metrics, replacing

STYLE = Path(__file__).parent.parent / "figures.mplstyle"
# a color for each schedule, the same in every figure
COLORS = {
    "power": "#0072B2",
    "wsd": "#B34700",
    "average": "#00735A",
    "cosine": "#6b6b6b",
    "other": "#7a3b8f",
}
# a hue for each setting, light for its lowest value and dark for its highest
HUES = {
    "tokens": ("#e0559a", "#3d0a24"),
    "batch size": ("#2a9d8f", "#06302b"),
    "width": ("#8d7fc7", "#1c1245"),
    "other": ("#b8860b", "#332400"),
}


@contextlib.contextmanager
def figure(path: Path, height: float, panels: int = 1, **layout) -> Iterator[np.ndarray]:
    """Yield the axes of stacked panels, and save the figure when the block ends."""
    # A notebook tells its programs to draw into it, and matplotlib then fails to start
    # without the notebook's packages. We draw into a file.
    os.environ["MPLBACKEND"] = "Agg"
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


def shades(names, hue: str) -> dict:
    """{name: (red, green, blue)}, from the light end of a hue to its dark end."""
    ends = [list(bytes.fromhex(color.removeprefix("#"))) for color in HUES[hue]]
    light, dark = np.array(ends) / 255
    return dict(zip(names, map(tuple, np.linspace(light, dark, len(names)))))


def log_ticks(axis, values, unit: float | None = None) -> None:
    """Label an axis in log2 units, at six values or fewer.

    With a unit, the labels are unit * 2^k, else they are sizes from the lowest value up.
    """
    low = min(values)
    high = max(values)
    step = max(1, math.ceil((high - low) / 5 - 0.01))
    if unit is None:
        ticks = np.arange(low, high + 0.01, step)
        labels = [size(2**x) for x in ticks]
    else:
        if high - low <= 1.5:
            step = 0.5
        # start at the tick nearest the lowest value, rather above it
        zero = math.log2(unit)
        grid = min(1, step)
        low = zero + grid * math.floor((low - zero) / grid + 0.7)
        high = max(high, low + step)  # at least two
        ticks = np.arange(low, high + 0.01, step)
        labels = [f"{2**x:.2g}" for x in ticks]
    axis.set_ticks(ticks, labels)


def push_apart(heights: list[float], gap: float) -> list[float]:
    """Move neighbors apart until the gaps between them are wide enough."""
    order = np.argsort(heights, kind="stable")
    placed = list(heights)
    for _ in range(100):
        for low, high in zip(order, order[1:]):
            overlap = max(0.0, gap - (placed[high] - placed[low]))
            placed[low] -= overlap / 2
            placed[high] += overlap / 2
    return placed


def label_ends(ax, ends: dict[str, tuple]) -> None:
    """Write {label: (x, y, color)} right of the panel, with a pointer to (x, y)."""
    # 1. A height for every label, and a panel that is high enough for all
    low, high = ax.get_ylim()
    gap = 0.065 * (high - low)
    heights = push_apart([y for _, y, _ in ends.values()], gap)
    ax.set_ylim(min(low, min(heights) - gap / 2), max(high, max(heights) + gap / 2))

    # 2. The labels. Their x is a share of the width of the panel, their y a value.
    for (label, (x, y, color)), height in zip(ends.items(), heights):
        pointer = dict(arrowstyle="-", color=color, linewidth=0.6, shrinkA=1, shrinkB=2)
        ax.annotate(
            label,
            (x, y),
            xytext=(1.03, height),
            textcoords=ax.get_yaxis_transform(),
            va="center",
            arrowprops=pointer,
        )


# -- Schedules and runs ------------------------------------------------------------------


def draw_schedules(path: Path, paper_curves, T: float, beta: float) -> None:
    """Figure 1 of the paper, and below it two schedules at three run lengths.

    paper_curves(T, beta) is {name: schedule}.
    """
    words = {"power": "Power", "wsd": "WSD", "cosine": "cosine"}
    looks = {"power": dict(linewidth=2.4), "wsd": {}, "cosine": dict(linestyle="--")}

    def draw(ax, name: str, total: float, label: str | None) -> None:
        schedule = paper_curves(total, beta)[name]
        n = np.linspace(0, total, 2001)
        rates = [schedule(x) for x in n]
        ax.plot(n / 1e9, rates, color=COLORS[name], label=label, **looks[name])

    with figure(path, 6.2, 2, sharex=True, sharey=True) as (top, bottom):
        for name in words:
            draw(top, name, T, words[name])
        lengths = f"{size(T / 4)}, {size(T / 2)}, {size(T)} tokens"
        for name in ("power", "cosine"):
            draw(bottom, name, T, f"{words[name]}: {lengths}")
            draw(bottom, name, T / 2, None)
            draw(bottom, name, T / 4, None)
        low = top.get_ylim()[1] / 16
        top.text(1.4, low, "warmup")
        top.text(0.25 * T / 1e9, low, "stable phase")
        top.text(T / 1e9, 3.8 * low, "decay", ha="right")
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
    """curve.png of a run folder, with loss, learning rate and the load of experts in an MoE."""
    lines = read_metrics(out)
    config = record["config"]
    color = COLORS.get(config["schedule"], COLORS["other"])
    is_moe = config["n_expert"] > 0
    height = 6.2 if is_moe else 4.6
    ratios = (2, 1, 1) if is_moe else (2, 1)
    layout = dict(sharex=True, height_ratios=ratios)
    with figure(out / "curve.png", height, len(ratios), **layout) as axes:
        # 1. The losses
        losses = axes[0]
        batches = "training batches"
        losses.plot(*column(lines, "loss"), color=color, linewidth=0.8, label=batches)
        dots = dict(marker="o", markersize=4)
        losses.plot(*column(lines, "val_loss"), color="black", label="validation", **dots)
        if config["average"]:
            losses.plot(
                *column(lines, "average_val_loss"),
                color=COLORS["average"],
                label="validation, averaged weights",
                **dots,
            )
        losses.legend(loc="upper right")
        end = "diverged"
        if not record["results"]["diverged"]:
            end = f"validation loss {record['results']['val_loss']:.3f} nats"
        title = f"{config['preset']}, {config['schedule']}: {end}"
        losses.set(title=title, ylabel="loss (nats per token)")

        # 2. The learning rate
        rates = axes[1]
        rates.plot(*column(lines, "lr"), color=color, linewidth=2)
        rates.set(ylabel="learning rate", ylim=(0, None))

        # 3. The load of the busiest expert, with a curve for every layer
        if is_moe:
            loads = axes[2]
            loads.plot(*column(lines, "max_load"), color=COLORS["other"], linewidth=0.8)
            loads.set(ylabel="max / mean load", ylim=(0, None))
        axes[-1].set_xlabel("tokens seen (millions)")


# -- Valleys and points ------------------------------------------------------------------
#
# A valley is a dict with points [(x, loss above the lowest)], the degree of the curve
# through them, and the x of its bottom, or None.


def draw_valleys(path: Path, panels: list[dict]) -> None:
    """Figure 2 of the paper: losses, and the curves through them, with the bottoms below zero.

    A panel has title, xlabel, log (of the x axis), hue and groups {label: valleys}. Ticks
    of a log axis are at its `unit` times powers of 2, by default 0.001. All panels have
    the same loss axis.
    """
    # 1. The limits that all panels share
    log_x = []
    top = 0.0
    for panel in panels:
        for valley in itertools.chain(*panel["groups"].values()):
            top = max([top, *[1.1 * above for _, above in valley["points"]]])
            if panel["log"]:
                log_x += [x for x, _ in valley["points"]]
    rows = max(len(panel["groups"]) for panel in panels)
    all_log = all(panel["log"] for panel in panels)

    # 2. The valleys of every group, and below them their bottoms
    with figure(path, 3.6 * len(panels), len(panels), sharex=all_log) as axes:
        for ax, panel in zip(axes, panels):
            groups = panel["groups"]
            colors = shades(groups, panel["hue"])
            for name in groups:
                draw_valley(ax, groups[name], colors[name])
            draw_feet(ax, groups, colors, top or 0.1, rows)
            ax.set(title=panel["title"], xlabel=panel["xlabel"])
            ax.set_ylabel("loss above lowest (nats)")
            if panel["log"]:
                log_ticks(ax.xaxis, log_x, unit=panel.get("unit", 0.001))


def draw_valley(ax, valleys: list[dict], color) -> None:
    """The points of the valleys of a group, and the curve through all of them."""
    points = list(itertools.chain(*[valley["points"] for valley in valleys]))
    if not points:
        return
    x, y = np.array(points).T
    ax.scatter(x, y, s=14, color=[color])
    degree = valleys[0]["degree"]
    if len(set(x)) > degree:
        line = np.linspace(x.min(), x.max())
        ax.plot(line, np.polyval(np.polyfit(x, y, degree), line), color=color)


def draw_feet(ax, groups: dict, colors: dict, top: float, rows: int) -> None:
    """A row per group below zero, with triangles at the bottoms and a line at their mean.

    There is space for `rows` groups.
    """
    # 1. The group with the rightmost bottoms is on top, so no line crosses a pointer.
    feet = {}
    mean = {}
    for name, valleys in groups.items():
        feet[name] = [v["bottom"] for v in valleys if v["bottom"] is not None]
        mean[name] = np.mean(feet[name]) if feet[name] else math.inf
    rightmost_first = sorted(groups, key=mean.get, reverse=True)

    # 2. A row for each
    step = 0.1 * top
    right = ax.get_xlim()[1]
    ends = {}
    for i, name in enumerate(rightmost_first, 1):
        y = -step * i
        color = colors[name]
        if feet[name]:
            center = mean[name]
            ax.plot([center, center], [y, 0], color=color, linewidth=0.8, alpha=0.6)
            ax.plot(feet[name], [y] * len(feet[name]), "^", color=color, markersize=5)
        ends[name] = max(feet[name], default=right), y, color

    # 3. The loss axis has ticks above zero only.
    ax.set_ylim(-step * (rows + 0.6), top)
    ax.set_yticks([y for y in ax.get_yticks() if 0 <= y <= top])
    ax.axhline(0, color="black", linewidth=0.6)
    label_ends(ax, ends)


def draw_points(
    path: Path, groups: dict, colors: dict, title: str, xlabel: str, ylabel="", best=None
) -> None:
    """Points with intervals, and lines, as in Figure 3 of the paper.

    groups: {label: [(log2 x, y, low, high, y of the line)]}, in order of x. Without a
    ylabel, all y are log2 of the best learning rate. best: {label: (log2 x, y)}, points
    to ring in the color of their group, and to connect.
    """
    everything = list(itertools.chain(*groups.values()))
    all_x = [point[0] for point in everything]
    all_y = [point[1] for point in everything]
    right = max(all_x)

    with figure(path, 3.75) as (ax,):
        # 1. A line for every group
        ends = {}
        for label, points in groups.items():
            color = colors[label]
            x, y, low, high, on_line = map(list, zip(*points))
            ax.vlines(x, low, high, color=color, linewidth=0.8)
            ax.plot(x, y, "o", color=color, markersize=4)
            ax.plot(x, on_line, color=color)
            end = on_line[-1]
            if len(x) > 1 and x[-2] < x[-1] < right:
                # a line that ends early goes on, dotted, to its label
                rise = (on_line[-1] - on_line[-2]) / (x[-1] - x[-2])
                end += rise * (right - x[-1])
                ax.plot([x[-1], right], [on_line[-1], end], ":", color=color)
            ends[label] = right if len(x) > 1 else x[-1], end, color

        # 2. The path of the best points
        if best:
            ax.plot(*zip(*best.values()), color="black", linewidth=0.8)
            ring = dict(markersize=10, markerfacecolor="none", markeredgewidth=2)
            for label, (x, y) in best.items():
                ax.plot(x, y, "o", color=colors[label], **ring)

        # 3. The axes. The labels come last, because ticks may change the limits.
        if not ylabel:
            log_ticks(ax.yaxis, all_y, unit=0.001)
        log_ticks(ax.xaxis, all_x)
        label_ends(ax, ends)
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel or "best learning rate")


# -- The comparison ----------------------------------------------------------------------

WHEN = {
    "never": COLORS["average"],
    "when it decays": COLORS["power"],
    "from the start": "#555555",
}


def draw_differences(path: Path, panels: list[dict], level: float) -> None:
    """A row for every line: its mean difference with interval, from the best line at the top.

    A panel has title, other (its line at 0) and rows {line: (mean, low, high, when it
    needs T)}.
    """
    lengths = [len(panel["rows"]) for panel in panels]
    height = 0.27 * sum(lengths) + 0.8 * len(panels)
    with figure(path, height, len(panels), height_ratios=lengths) as axes:
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
        # without handles, because the words have the colors
        axes[0].legend(loc="upper right", handlelength=0, title="needs T")
