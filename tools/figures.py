"""Every figure, drawn from plain arrays; the only file that imports matplotlib.

Each draw_* function gets numbers and texts and saves one PNG, 5 inches wide. `lines` is
{label: {x: [y of each seed]}}. Log axes hold log2 values, and `log_ticks` labels them.
`found` is a list of minima as fit.minima returns them, `panels` a list of dicts.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

STYLE = Path(__file__).parent.parent / "figures.mplstyle"
COLORS = {"cosine": "#6b6b6b", "wsd": "#B34700", "power": "#0072B2", "constant": "#B34700",
          "average": "#00735A", "baseline": "black"}  # fmt: skip
OTHER = "#7a3b8f"  # a schedule of a fork
PALETTE = ("#0072B2", "#B34700", "#00735A", "#6b6b6b", OTHER, "#000000")
MARKERS = "os^Dv<>pPX"
short = "{:.2g}".format

# ---------------------------------------------------------------------------------------------
# Parts of a figure


@contextlib.contextmanager
def figure(path: Path, height: float, panels: int = 1, **layout) -> Iterator[np.ndarray]:
    """Yield the axes of stacked panels; save the figure when the block ends."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(fname=STYLE):
        fig = Figure(figsize=(5, height))
        yield fig.subplots(panels, 1, squeeze=False, **layout)[:, 0]
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path)


def size(tokens: float) -> str:
    """131072 -> '131k'"""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    unit, letter = next(((u, c) for u, c in units if tokens >= 0.9995 * u), (1, ""))
    return f"{tokens / unit:.3g}{letter}"


def shades(values) -> dict:
    """A color for each of some values in order, all dark enough to be seen on white."""
    import matplotlib

    values = sorted(set(values))
    at = np.linspace(0, 0.58, len(values)) if len(values) > 1 else [0.0]
    return dict(zip(values, (matplotlib.colormaps["viridis"](x)[:3] for x in at)))


def ink(color):
    """A shade for text, which has to be darker than a line; named colors stay."""
    return color if isinstance(color, str) else tuple(0.72 * channel for channel in color)


def spread(heights: list[float], sizes: list[float]) -> list[float]:
    """Move labels of these sizes as little as possible until none overlap (isotonic regression)."""
    order = np.argsort(heights, kind="stable")
    offset = np.cumsum([0, *((sizes[i] + sizes[j]) / 2 for i, j in zip(order, order[1:]))])
    blocks: list = []  # labels that touch: (mean height, how many)
    for i, shift in zip(order, offset):
        mean, n = heights[i] - shift, 1
        while blocks and blocks[-1][0] >= mean:
            other, m = blocks.pop()
            mean, n = (n * mean + m * other) / (n + m), n + m
        blocks.append((mean, n))
    placed = dict(zip(order, [mean for mean, n in blocks for _ in range(n)] + offset))
    return [placed[i] for i in range(len(heights))]


def log_ticks(axis, values, text: Callable[[float], str], finest: float = 1) -> None:
    """Ticks of an axis in log2 units, from the first value in steps that leave at most seven."""
    low, high = min(values), max(values)
    steps = (finest, 1, 2, 3, 4, 6, 8, 12, 99)
    step = next(step for step in steps if (high - low) / step <= 6)
    at = [low + k * step for k in range(math.floor((high - low) / step + 0.01) + 1)]
    axis.set_ticks(at, [text(2**x) for x in at])


def label_ends(ax, ends: dict[str, tuple]) -> None:
    """Write {label: (x, y, color)} right of the panel, as near to y as the other labels allow."""
    low, high = ax.get_ylim()
    line = 0.19 * (high - low) / inches(ax)
    sizes = [line * (1.15 + label.count("\n")) for label in ends]
    heights = spread([y for _, y, _ in ends.values()], sizes)
    low = min(low, *(y - some / 2 for y, some in zip(heights, sizes)))
    ax.set_ylim(low, max(high, *(y + some / 2 for y, some in zip(heights, sizes))))
    for (label, (x, y, color)), height in zip(ends.items(), heights):
        pointer = dict(arrowstyle="-", color=color, linewidth=0.6, shrinkA=1, shrinkB=2)
        where = dict(xytext=(1.03, height), textcoords=ax.get_yaxis_transform(), va="center")
        ax.annotate(label, (x, y), **where, color=ink(color), arrowprops=pointer)


def label_peak(ax, label: str, x: list, y: list, color) -> None:
    """Write a label above the highest point of a line."""
    top = int(np.argmax(y))
    side = {0: "left", len(x) - 1: "right"}.get(top, "center")
    ax.annotate(label, (x[top], y[top]), (0, 6), textcoords="offset points", color=color, ha=side)
    ax.set_ylim(top=max(y) + 0.35 / inches(ax) * np.ptp(ax.get_ylim()))


def draw_lines(ax, lines: dict, looks: list[dict], peak: str | None = None) -> None:
    """Points of each seed, a line through their means, its label at its end (or at its peak)."""
    ends = {}
    for (label, points), look in zip(lines.items(), looks):
        x = sorted(points)
        means = [np.mean(points[at]) for at in x]
        ax.plot(x, means, **look)
        for at in x if max(map(len, points.values())) > 1 else []:
            ax.scatter([at] * len(points[at]), points[at], s=8, color=[look["color"]])
        if label == peak:
            label_peak(ax, label, x, means, look["color"])
        else:
            ends[label] = x[-1], means[-1], look["color"]
    label_ends(ax, ends)


def inches(ax) -> float:
    """About the height of a panel inside its axes; the layout is settled only when it is drawn."""
    return ax.figure.get_figheight() / len(ax.figure.axes) - 0.75


def key(ax, *groups: list[tuple]) -> None:
    """Explain markers (marker, color, text) in rows below the data, each group in new rows."""
    rows = []
    for group in groups:
        longest = max(len(text) for *_, text in group)
        n = 4 if longest <= 8 else 3 if longest <= 13 else 2
        rows += [(n, group[i : i + n]) for i in range(0, len(group), n)]
    step = 0.19 / inches(ax)
    low, high = ax.get_ylim()
    ax.set_ylim(high - (high - low) / (1 - step * (len(rows) + 0.3)), high)
    for i, (n, row) in enumerate(reversed(rows)):
        for k, (marker, color, text) in enumerate(row):
            x, y = 0.03 + k / n, step * (i + 0.7)
            ax.scatter([x], [y], s=24, marker=marker, color=[color], transform=ax.transAxes)
            ax.text(x + 0.03, y, text, color=ink(color), va="center", transform=ax.transAxes)


# ---------------------------------------------------------------------------------------------
# Schedules, the coordinate check, one run


def draw_schedules(path: Path, paper_curves, best_lr, T: float, batch: int) -> None:
    """Figure 1 of the paper, and below it one schedule at several run lengths and batch sizes."""
    with figure(path, 6.2, 2, sharex=True, sharey=True) as (top, bottom):
        for name, schedule in paper_curves(T, batch).items():
            _plot(top, schedule, T, **SCHEDULES[name])
        _annotate_schedules(top, best_lr, T, batch)
        for total in (T / 4, T / 2, T):
            for name in ("cosine", "power"):
                _plot(bottom, paper_curves(total, batch)[name], total, **SCHEDULES[name])
        for other in (batch // 2, batch * 2):
            _plot(bottom, paper_curves(T, other)["power"], T, color=COLORS["power"], linewidth=0.8)
        _annotate_run_lengths(bottom, paper_curves, T, batch)
        bottom.set_xlabel("tokens seen (billions)")
        for ax in (top, bottom):
            ax.set_ylabel("learning rate")
            ax.set_xlim(0, T / 1e9 * 1.02)
            ax.set_ylim(0, 0.0212)


SCHEDULES = {
    "cosine": dict(color=COLORS["cosine"], linestyle="--"),
    "wsd": dict(color=COLORS["wsd"]), "power": dict(color=COLORS["power"], linewidth=2.4),
}  # fmt: skip


def _plot(ax, schedule, total: float, **look) -> None:
    n = np.linspace(0, total, 2001)
    ax.plot(n / 1e9, [schedule(x) for x in n], **look)


def _annotate_schedules(ax, best_lr, T: float, batch: int) -> None:
    ax.set_title("WSD holds its learning rate, Power lets it fall")
    for x, y, name in ((2.2, 0.0112, "Power"), (3.0, 0.0030, "WSD"), (12.2, 0.0005, "cosine")):
        ax.text(x, y, name, color=COLORS[name.lower()])
    crossing = (4.6 / 4) ** (1 / -0.51)  # share of T at which 4 n^-0.51 falls to 4.6 T^-0.51
    text = f"below WSD's best learning rate\nafter {crossing:.0%} of the run"
    x, pointer = crossing * T / 1e9, {"arrowstyle": "-", "linewidth": 0.8}
    ax.annotate(text, (x, best_lr(T, batch)), (x, 0.0073), ha="center", arrowprops=pointer)


def _annotate_run_lengths(ax, paper_curves, T: float, batch: int) -> None:
    color = COLORS["power"]
    ax.set_title("Power is one curve for every length, cosine is not")
    dashed = "dashed: cosine, a new\ncurve for every run length"
    ax.text(14.2, 0.0168, dashed, color=COLORS["cosine"])
    thin = f"thin: batch size {batch // 2} and {batch * 2},\nhalf and twice the learning rate"
    ax.text(14.2, 0.0122, thin, color=color)
    tail = 0.93 * T / 2  # a place on the middle decay to point at
    end = tail / 1e9, paper_curves(T / 2, batch)["power"](tail)
    text = f"{size(T / 4)}, {size(T / 2)}, {size(T)} tokens:\none curve, three decays"
    pointer = {"arrowstyle": "-", "linewidth": 0.8, "color": color}
    ax.annotate(text, end, (14.2, 0.0077), color=color, arrowprops=pointer)


def draw_coordinates(path: Path, changes: dict, widths, slope: Callable) -> None:
    """The coordinate check: {parametrization: {activation: its mean change at each width}}."""
    titles = ("Standard: wider models move further", "μP: they move the same at any width")
    y = np.log2([moved for change in changes.values() for moved in change.values()])
    with figure(path, 6.2, 2, sharex=True, sharey=True) as panels:
        panels[0].set_ylim(y.min() - 1, y.max() + 1)
        log_ticks(panels[0].yaxis, [math.floor(y.min()), y.max()], short)
        for ax, title, change in zip(panels, titles, changes.values()):
            points = lambda moved: {math.log2(w): [math.log2(c)] for w, c in zip(widths, moved)}
            lines = {f"{hook} {slope(moved):+.1f}": points(moved) for hook, moved in change.items()}
            looks = [dict(color=c, marker=m) for c, m in zip((*PALETTE[:3], "black"), MARKERS)]
            draw_lines(ax, lines, looks)
            ax.set_title(title)
            ax.set_ylabel("mean change in 4 steps")
        log_ticks(panels[0].xaxis, np.log2(widths), "{:.0f}".format)
        panels[1].set_xlabel("width (numbers: slope of the log change)")



def read_metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl in order of tokens, the last one if a resumed run repeats some.

    Lines that are not JSON are left out: a process was killed while it wrote them.
    """
    found, path = {}, run / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
            metrics = json.loads(line)
            found[metrics["tokens"], "val_loss" in metrics] = metrics
    return [found[key] for key in sorted(found)]


def column(lines: list[dict], name: str) -> tuple[list, list]:
    """Millions of tokens and a metric, of the lines that have it; NaN where it is None."""
    some = [line for line in lines if name in line]
    values = [math.nan if line[name] is None else line[name] for line in some]
    return [line["tokens"] / 1e6 for line in some], values


def draw_curve(out: Path, record: dict) -> None:
    """curve.png of a run folder: loss, learning rate, and of an MoE the load of its experts."""
    lines, moe = read_metrics(out), record["n_expert"] > 0
    color = COLORS.get(record["schedule"], OTHER)
    layout = dict(sharex=True, height_ratios=(2, 1, 1)[: 2 + moe])
    with figure(out / "curve.png", 6.2 if moe else 4.6, 2 + moe, **layout) as (top, bottom, *third):
        top.plot(*column(lines, "loss"), color=color, linewidth=0.8, alpha=0.6)
        top.plot(*column(lines, "val_loss"), color="black", marker="o", markersize=4)
        labels = [("validation", "black"), ("training batches", color)]
        if record["average"]:
            green = COLORS["average"]
            top.plot(*column(lines, "average_val_loss"), color=green, marker="s", markersize=4)
            labels.append(("validation, averaged weights", green))
        for i, (label, hue) in enumerate(labels):  # losses fall, so this corner is free
            where = dict(ha="right", va="top", transform=top.transAxes)
            top.text(0.98, 0.93 - 0.09 * i, label, color=hue, **where)
        end = "diverged" if record["diverged"] else f"validation loss {record['val_loss']:.3f} nats"
        top.set_title(f"{record['preset']}, {record['schedule']}: {end}")
        top.set_ylabel("loss (nats per token)")
        bottom.plot(*column(lines, "lr"), color=color, linewidth=2)
        bottom.set_ylabel("learning rate")
        bottom.set_ylim(bottom=0)
        for ax in third:
            _draw_experts(ax, lines)
        (third or [bottom])[-1].set_xlabel("tokens seen (millions)")


def _draw_experts(ax, lines: list[dict]) -> None:
    names = (0.0, "max_load", "max load / mean"), (0.37, "aux_loss", "auxiliary loss")
    names += ((0.68, "router_entropy", "entropy (nats)"),)
    for (x, name, label), hue in zip(names, PALETTE):
        ax.plot(*column(lines, name), color=hue, linewidth=0.8)  # max_load: a line for each layer
        ax.text(x, 1.04, label, color=hue, transform=ax.transAxes)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("experts")


def draw_curves(path: Path, curves: dict[str, list[dict]], window: int = 9) -> None:
    """Training loss (means of `window` lines of the log) and validation loss of any runs."""
    with figure(path, 3.6) as (ax,):
        ends, seen = {}, []
        for i, (name, lines) in enumerate(curves.items()):
            color, (x, loss) = PALETTE[i % len(PALETTE)], column(lines, "loss")
            n = max(1, min(window, len(x)))
            mean = lambda values: np.convolve(values, np.ones(n) / n, "valid") if x else []
            smooth, dots = (mean(x), mean(loss)), column(lines, "val_loss")
            ax.plot(*smooth, color=color, linewidth=1.5)
            ax.plot(*dots, color=color, marker="o", linestyle="none", markeredgecolor="white")
            ends[name] = (*(values[-1] for values in (dots if dots[0] else smooth)), color)
            seen += [*smooth[1], *dots[1]]
        low, high = np.nanmin(seen), np.nanpercentile(seen, 95)
        ax.set_ylim(low - 0.1 * (high - low), high)
        label_ends(ax, ends)
        ax.set_title("Validation loss (dots), training loss (lines)")
        ax.set_xlabel("tokens seen (millions)")
        ax.set_ylabel("loss (nats per token)")


# ---------------------------------------------------------------------------------------------
# Minima and the law


def draw_valleys(path: Path, panels: list[dict], **layout) -> None:
    """Figure 2 of the paper: loss against learning rate, each seed's minimum at the valley's foot.

    panels: title, xlabel, log (of the x axis), groups {label: minima}.
    """
    x: list = []
    with figure(path, 3.75 * len(panels), len(panels), **layout) as axes:
        for ax, panel in zip(axes, panels):
            groups, highest = panel["groups"], []
            colors = list(shades(range(len(groups))).values())
            for found, color in zip(groups.values(), colors):
                highest += _draw_valley(ax, found, color)
            top = 1.6 * max(highest, default=0) or 0.1
            _draw_feet(ax, groups, colors, top)
            ax.set_title(panel["title"])
            ax.set_ylabel("loss above the best (nats)")
            ax.set_xlabel(panel["xlabel"])
            points = [p for found in panel["groups"].values() for m in found for p in m.points]
            x = sorted({at for at, _ in points} | set(x if layout else []))  # of shared axes, all
            log_ticks(ax.xaxis, x, short) if panel["log"] else ax.set_xticks(x[1::4])
            percent = lambda y: 100 * np.expm1(y)
            nats = lambda p: np.log1p(np.maximum(p, -99) / 100)
            right = ax.secondary_yaxis("right", functions=(percent, nats))
            right.set_yticks([p for p in (0, 1, 2, 5, 10, 20, 50, 100) if nats(p) <= top][-3:])
            right.set_ylabel("perplexity above the best (%)")


def _draw_valley(ax, found: list, color) -> list[float]:
    """Loss above each seed's own best; filled points are in a fit. Returns the filled heights."""
    near = []
    for m in found:
        points = [(x, y - m.loss) for x, y in m.points if math.isfinite(y)]
        near += [(x, y - m.loss) for x, y in m.near if math.isfinite(y)]
        ax.scatter(*zip(*points), s=14, facecolors="none", edgecolors=[color], linewidths=0.8)
    if len({x for x, _ in near}) > 2:
        x, y = np.array(near).T
        ax.scatter(x, y, s=14, color=[color])
        line = np.linspace(x.min(), x.max())
        ax.plot(line, np.polyval(np.polyfit(x, y, 2), line), color=color)
    return [y for _, y in near]


def _draw_feet(ax, groups: dict, colors: list, top: float) -> None:
    """Below zero, a row for each group: a triangle at each seed's minimum, a line at the mean."""
    feet = [[m.x for m in found if not m.why_not] for found in groups.values()]
    rows = sorted(zip(groups, colors, feet), key=lambda row: -np.mean(row[2] or [math.inf]))
    for i, (label, color, at) in enumerate(rows, 1):  # right to left, so no line crosses a label
        y, (left, right) = -0.11 * i * top, ax.get_xlim()
        if at:
            ax.plot([np.mean(at)] * 2, [y, 0], color=color, linewidth=0.8, alpha=0.6)
            ax.scatter(at, [y] * len(at), s=22, color=[color], marker="^")
        else:
            label += ": no minimum inside"
        x = max(at, default=left) + 0.03 * (right - left)
        ax.text(x, y, label, color=ink(color), va="center")
        ax.plot([x + 0.021 * len(label) * (right - left)], [y], color="black", alpha=0)  # room
    ax.set_ylim(-0.11 * (len(groups) + 0.8) * top, top)
    ax.set_yticks([y for y in ax.get_yticks() if 0 <= y <= top])
    ax.axhline(0, color="black", linewidth=0.6)


def draw_minima(path: Path, lines: dict, title: str, xlabel: str, ylabel: str, *texts) -> None:
    """Best values against T or batch size (the paper's Figures 3 and 6). texts: of log2 ticks."""
    with figure(path, 3.6) as (ax,):
        draw_lines(ax, lines, [dict(color=color) for color in shades(range(len(lines))).values()])
        ax.set_title(title)
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel)
        log_ticks(ax.xaxis, [x for points in lines.values() for x in points], texts[0])
        if texts[1:]:
            every = [y for points in lines.values() for some in points.values() for y in some]
            log_ticks(ax.yaxis, [math.floor(2 * y) / 2 for y in every], texts[1], finest=0.5)


def draw_gamma(path: Path, found: list, laws: dict) -> None:
    """Figure 4 of the paper: gamma against T, for each shape and together.

    found: the minima of the three best batch sizes. laws: {shape or "together": Law}.
    """
    gamma = lambda m: m.x - math.log2(m.beta)
    colors = shades(m.batch_size for m in found)
    T = sorted({m.T for m in found})
    with figure(path, 2.1 * len(laws), len(laws), sharex=True, sharey=True) as panels:
        for ax, (shape, law) in zip(panels, laws.items()):
            a, b = law.a[0], law.b[0]
            some = [m for m in found if shape in (m.shape, "together")]
            if shape != "together":
                x, y = [math.log2(m.T) for m in some], [gamma(m) for m in some]
                ax.scatter(x, y, s=14, c=[colors[m.batch_size] for m in some])
            for i, name in enumerate([*laws][:-1] if shape == "together" else []):
                means = {t: [gamma(m) for m in some if (m.shape, m.T) == (name, t)] for t in T}
                y = [np.mean(means[t] or math.nan) for t in T]
                look = dict(marker=MARKERS[i % len(MARKERS)], facecolors="none", edgecolors="black")
                ax.scatter(np.log2(T), y, s=24, **look)
            ax.plot(np.log2(T), math.log2(a) + b * np.log2(T), color="black")
            ax.set_title(f"{shape}: gamma = {a:.3g} T^{b:.2f}")
            ax.set_ylabel("gamma")
        heights = [math.floor(2 * gamma(m)) / 2 for m in found]
        log_ticks(panels[0].yaxis, heights, short, finest=0.5)
        log_ticks(panels[0].xaxis, np.log2(T), size)
        key(panels[0], [("o", color, f"batch {B:g}") for B, color in colors.items()])
        panels[-1].set_xlabel("run length T (tokens); gamma = best learning rate / beta")


def draw_law(path: Path, found: list, law: dict, band: tuple, beyond: list) -> None:
    """All cells on one line: best learning rate / beta^q against T; a star: a cell not fitted.

    law: a, b, q, b_interval as in law.json. band: (log2 T, line, low, high), all log2.
    """
    height = lambda m: m.x - law["q"] * math.log2(m.beta)
    shapes = list(dict.fromkeys(m.shape for m in found))
    colors = shades(m.batch_size for m in found)
    marker_of = {shape: MARKERS[i % len(MARKERS)] for i, shape in enumerate(shapes)}
    shift = dict(zip(shapes, np.linspace(-0.12, 0.12, len(shapes))))
    T, line, low, high = band
    with figure(path, 4.4) as (ax,):
        ax.fill_between(T, low, high, color="#d9d9d9", linewidth=0)
        ax.plot(T, line, color="black")
        paper = line.mean() - 0.51 * (T - T.mean())
        ax.plot(T, paper, color=COLORS["wsd"], linestyle="--")
        cells: dict = {}
        for m in found:
            cells.setdefault((m.shape, m.T, m.batch_size), []).append(height(m))
        for (shape, t, B), heights in cells.items():
            look = dict(marker=marker_of[shape], facecolors="none", edgecolors=[colors[B]])
            ax.scatter(math.log2(t) + shift[shape], np.mean(heights), s=24, **look)
        for m in beyond:
            color = ink(colors.get(m.batch_size, (0, 0, 0)))
            ax.scatter(math.log2(m.T), height(m), s=120, marker="*", color=[color], zorder=3)
        slope, ours = "the paper's\nslope, -0.51", f"T^{law['b']:.2f}"
        label_ends(ax, {ours: (T[-1], line[-1], "black"), slope: (T[-1], paper[-1], COLORS["wsd"])})
        batches = [("o", color, f"batch {B:g}") for B, color in colors.items()]
        key(ax, [(marker_of[shape], "black", shape) for shape in shapes], batches)
        every = [height(m) for m in [*found, *beyond]]
        log_ticks(ax.yaxis, [math.floor(2 * y) / 2 for y in every], short, finest=0.5)
        log_ticks(ax.xaxis, [math.log2(m.T) for m in [*found, *beyond]], size)
        low, high = law["b_interval"]
        ax.set_title(f"Best learning rate falls as T^{law['b']:.2f} [{low:.2f}, {high:.2f}]")
        ax.set_xlabel("run length T (tokens)" + "; star: not in the fit" * bool(beyond))
        ax.set_ylabel(f"best learning rate / beta^{law['q']:.2f}")


# ---------------------------------------------------------------------------------------------
# The comparison


def look_of(line: str) -> dict:
    """One color for each schedule; dashed if ∝ √batch or stopped, dash-dotted if fitted."""
    color = next((color for name, color in COLORS.items() if name in line.lower()), OTHER)
    style = "--" if "√batch" in line or "early" in line else "-." if "fitted" in line else "-"
    wide = 2.4 if "(paper)" in line or "one Power" in line else 0.8 if line == "baseline" else 1.3
    return dict(color=color, linestyle=style, linewidth=wide)


def draw_above(path: Path, panels: list[dict], xlabel: str) -> None:
    """Loss above the baseline against T. panels: title, lines, peak (see draw_lines)."""
    with figure(path, 3.4 * len(panels), len(panels), sharex=True) as axes:
        for ax, panel in zip(axes, panels):
            lines = panel["lines"]
            x = sorted({at for points in lines.values() for at in points})
            ax.plot(x, [0] * len(x), **look_of("baseline"))
            draw_lines(ax, lines, list(map(look_of, lines)), panel.get("peak"))
            log_ticks(ax.xaxis, x, size)
            ax.set_title(panel["title"])
            ax.set_ylabel("loss above the baseline (nats)")
        axes[-1].set_xlabel(xlabel)


def draw_price(path: Path, costs: dict[str, np.ndarray]) -> None:
    """Mean and worst cost of each rule for the learning rate, {rule: nats in each cell}."""
    with figure(path, 1.4 + 0.3 * len(costs)) as (ax,):
        for i, (rule, cost) in enumerate(costs.items()):
            color = look_of(rule)["color"] if "tuned" in rule else "black"
            ax.plot([cost.mean(), cost.max()], [-i, -i], color=color, linewidth=0.8)
            ax.scatter([cost.mean()], [-i], s=30, color=color)
            ax.scatter([cost.max()], [-i], s=30, facecolors="white", edgecolors=color)
            ax.text(cost.mean(), -i + 0.22, rule, color=color, va="bottom")
        ax.set_xscale("log")
        ax.set_yticks([])
        ax.set_ylabel("the learning rate depends on")
        ax.set_ylim(-len(costs) + 0.6, 0.9)
        ax.set_title("Cost of ignoring T, the batch size, or both")
        ax.set_xlabel("loss above the best measured (nats); dot: mean, circle: worst cell")
