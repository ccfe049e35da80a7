"""The figures of README.md and docs/ that come from our runs.

    python research/figures.py --out assets

They are curves.png, decay.png, valleys.png, longer.png, b.png and transfer.png.
regret.png comes from `python fit.py research/results/wsd-laptop`, and schedules.py and
power.py draw the others. A schedule has the same color in all of them.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import fit
import tables
from schedules import Schedule, make_schedule
from tables import ENDS
from tools import files, flags, plots, reports
from tools.plots import COLORS, figure, size

BLUE = COLORS["power"]
GRAY = COLORS["cosine"]
GREEN = COLORS["average"]
RED = "#a32020"  # a cosine that is stopped early


def bars_of(values) -> tuple[np.ndarray, np.ndarray]:
    """Means of values [n, seeds], and half the lengths of their 95% intervals."""
    mean, _, high = np.transpose([tables.over_seeds(x) for x in values])
    return mean, high - mean


def curve(name: str, of="val_loss", begin: float = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the mean loss over the seeds, of "power-trunk" or "cosine-800000"."""
    curves = [tables.loss_curves()[f"{name}-{seed}"] for seed in range(3)]
    tokens = np.array(curves[0]["tokens"])
    loss = np.mean([some[of] for some in curves], axis=0)
    return tokens[tokens > begin] / 1e6, loss[tokens > begin]


def branch(T: int) -> tuple[list, list]:
    """The curve of the Power run that leaves the trunk and ends at T."""
    begin = T - T // 10
    tokens, loss = curve(f"power-{T}", begin=begin)
    leaves = tables.curve_at("power-trunk", begin).mean()
    return [begin / 1e6, *tokens], [leaves, *loss]


def default_curve(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Millions of tokens, and mean losses, of the default run as "linear-3200000"."""
    by_run = files.read_json(tables.RESULTS / "laptop-decay/curves.json")
    of_seeds = [by_run[f"{name}-{seed}"] for seed in range(3)]
    tokens = np.array(of_seeds[0]["tokens"]) / 1e6
    return tokens, np.mean([run["val_loss"] for run in of_seeds], axis=0)


def draw_curves(path: Path) -> None:
    """One Power run with four ends, and how far from it other schedules end."""
    longest = ENDS[-1]
    with figure(path, 5.2, 2, sharex=True, height_ratios=(3, 2)) as (losses, gaps):
        # 1. The losses: a trunk with its decays, and two planned runs, stopped early
        for name, line in (("cosine", "--"), ("linear", ":")):
            curve = default_curve(f"{name}-{longest}")
            losses.plot(*curve, line, color=COLORS[name], linewidth=1.6)
        tokens, trunk = default_curve(f"power-{longest}-30")
        end = 0.7 * longest / 1e6  # of the trunk
        stable = tokens < end
        x = [*tokens[stable], end]
        losses.plot(x, np.interp(x, tokens, trunk), color=BLUE, linewidth=1.6)
        for T in ENDS:
            x, loss = default_curve(f"power-{T}-30")
            begin = 0.7 * T / 1e6
            leaves = np.interp(begin, tokens, trunk)
            x, loss = x[x > begin], loss[x > begin]
            losses.plot([begin, *x], [leaves, *loss], color=BLUE, linewidth=2.8)
            losses.plot(x[-1], loss[-1], "o", color=BLUE)
        words = "one Power run, which decays\nto end at four lengths"
        losses.text(1.35, 1.47, words, color=BLUE)
        words = "a cosine and a straight line to 0,\nboth planned for 3.2M"
        losses.text(0.62, 1.72, words, color=GRAY)
        losses.set(xlim=(0, 3.35), ylim=(1.18, 1.9), ylabel="loss (nats per byte)")
        losses.set_title("One Power run ends about as low as runs that knew their length")

        # 2. At the ends: WSD, and runs planned for each length, minus Power
        gaps.axhline(0, color=BLUE, linewidth=2.4)
        looks = {"WSD": ("s", "-."), "linear": ("v", ":"), "cosine": ("D", "--")}
        for i, (name, (marker, line)) in enumerate(looks.items()):
            of_line = [tables.minus_power(T)[name] for T in ENDS]
            mean, error = bars_of(of_line)
            x = np.array(ENDS) / 1e6 + 0.03 * (i - 1)  # beside each other
            look = dict(color=COLORS[name.lower()], marker=marker, ls=line, capsize=3)
            gaps.errorbar(x, mean, error, label=name, **look)
        gaps.set_xticks([T / 1e6 for T in ENDS], [size(T) for T in ENDS])
        gaps.set(xlabel="tokens (three seeds, bars are 95% intervals)")
        gaps.set_ylabel("minus Power")
        gaps.legend(ncols=3, loc="upper right")


def draw_anytime(path: Path, cell: str = "code-short") -> None:
    """Who was tuned in a short pilot and then ran long, relative to Power."""
    T0, _ = tables.SHORT[cell]
    times = [
        t for t in (1, 4, 16, 64) if tables.tuned_short(cell, tables.FALL, t) is not None
    ]
    power = [tables.tuned_short(cell, tables.FALL, t) for t in times]
    held = [tables.tuned_short(cell, tables.HELD, t) for t in times]
    line = [tables.tuned_short(cell, tables.LINE, t) for t in times]
    best = [tables.best_line(cell, t) for t in times]
    x = np.log2(times)
    with figure(path, 3.6) as (ax,):
        ax.axhline(0, color=BLUE, linewidth=2.4)
        ax.plot(x, 0 * x, "o", color=BLUE, markersize=8)
        lines = {  # label -> losses, color, marker, line
            "held (WSD)": (held, COLORS["wsd"], "s", "-."),
            "line, planned for T": (line, COLORS["linear"], "v", ":"),
            "the best line for T": (best, GRAY, "D", "--"),
        }
        for i, (label, (losses, color, marker, dashes)) in enumerate(lines.items()):
            mean, error = bars_of(np.subtract(losses, power))
            look = dict(color=color, marker=marker, ls=dashes, capsize=3)
            ax.errorbar(x + 0.06 * (i - 1), mean, error, label=label, **look)
        ax.set_xticks(x, [f"{size(t * T0)}\n{t} T0" for t in times])
        ax.legend(loc="upper left")


def schedule_of(T: int, decay_tokens: int) -> Schedule:
    """The schedule of the Power run that ends at T."""
    for row in tables.rows_in("curves-laptop"):
        if (row["total_tokens"], row["decay_tokens"]) == (T, decay_tokens):
            if row["schedule"] == "power":
                return make_schedule(SimpleNamespace(**{"warmup_start": 0} | row))


def draw_decay(path: Path, T: int = ENDS[2]) -> None:
    """Why a decay lowers the loss: a trunk, its branch, and an average of its weights."""
    begin = (T - T // 10) / 1e6
    first = begin - T / 4e6
    last = T / 1e6 + T / 8e6
    layout = dict(sharex=True, height_ratios=(2, 1))
    with figure(path, 4.2, 2, **layout) as (losses, rates):
        # 1. The losses
        losses.plot(*curve("power-trunk"), color=BLUE, linewidth=1.2)
        average = curve("power-trunk", "average_val_loss")
        losses.plot(*average, "-.", color=GREEN, linewidth=1.8)
        losses.plot(*branch(T), color=BLUE, linewidth=2.8)

        # 2. The learning rates
        trunk = schedule_of(ENDS[-1], 0)
        decayed = schedule_of(T, T // 10)
        n = np.linspace(first, last, 1001)
        rates.plot(n, [trunk(x * 1e6) for x in n], color=BLUE, linewidth=1.2)
        n = np.linspace(begin, T / 1e6, 201)
        rates.plot(n, [decayed(x * 1e6) for x in n], color=BLUE, linewidth=2.8)

        # 3. Words
        losses.text(1.44, 1.43, "the run continues", color=BLUE)
        losses.text(1.46, 1.372, "a copy decays", color=BLUE, ha="right")
        losses.text(1.06, 1.345, "average of its weights", color=GREEN)
        losses.set_title("A decay lowers the loss, and so does an average")
        losses.set(ylabel="loss (nats per byte)", xlim=(first, last), ylim=(1.28, 1.51))
        xlabel = "tokens (millions; means of three seeds)"
        rates.set(ylabel="learning rate", xlabel=xlabel, ylim=(0, None))


def titled(panel: dict, title: str) -> dict:
    """A panel of fit.py with a title, where {ratio} is its last minimum over the first."""
    first, *_, last = [bottom for _, _, bottom in panel["valleys"].values()]
    return panel | {"title": title.format(ratio=f"{2 ** (last - first):.2g}")}


def panel_of(runs: list[fit.Trial], at: fit.Cell, field: str) -> dict:
    return reports.panel(fit.with_curves(fit.valleys_of(runs)), at, field)


def draw_valleys(path: Path) -> None:
    """Valleys of width 64 at some T, and at some batch sizes."""
    runs = fit.trials_of(tables.rows_in("wsd-laptop"))
    cells = [run.cell for run in runs if run.cell.shape == "width 64"]
    at = max(cell for cell in cells if cell.batch_size == 2)  # with the longest T
    some_T = [run for run in runs if run.cell.T in (80_000, 320_000, 1_280_000)]
    some_batches = [run for run in runs if run.cell.batch_size != 4]
    over_T = "16× the tokens, best\nlearning rate × {ratio}"
    over_batch = "8× the batch size, best\nlearning rate × {ratio}"
    panels = [
        titled(panel_of(some_T, at, "T"), over_T),
        titled(panel_of(some_batches, at, "batch_size"), over_batch),
    ]
    plots.draw_valleys(path, panels)


def draw_transfer(path: Path) -> None:
    """The valleys of three widths, without and with muP."""
    runs = fit.trials_of(tables.rows_in("transfer-quick"))
    ratio = "4× the width,\nbest learning rate × {ratio}"
    panels = []
    for name, is_standard in (("Without μP", True), ("With μP", False)):
        some = [run for run in runs if (fit.STANDARD in run.cell.shape) == is_standard]
        panel = panel_of(some, some[0].cell, "shape")
        panels.append(titled(panel, f"{name}: {ratio}"))
    plots.draw_valleys(path, panels)


LOOKS = {  # of longer.png: (schedule, share of the decay) -> label, line, marker
    ("power", 0.1): ("Power, decay 10%", ":", "v"),
    ("power", 0.3): ("Power, decay 30%", "-", "o"),
    ("power", 0.5): ("Power, decay 50%", "--", "^"),
    ("wsd", 0.3): ("WSD at one learning\nrate, decay 30%", "-.", "s"),
    ("cosine", 0.0): ("cosine that knows T", (0, (1, 1)), "D"),
}


def label_ends(ax, ends: dict[str, tuple], gap: float) -> None:
    """Write labels {text: (x, y, color)} at the ends of lines, at least `gap` apart."""
    lowest = -math.inf
    for text, (x, y, color) in sorted(ends.items(), key=lambda end: end[1][1]):
        lowest = max(y, lowest + gap * (1 + text.count("\n")))
        ax.text(x, lowest, text, color=color, va="center")


def draw_longer(path: Path) -> None:
    """The gap to linear to 0 against T, by how much of the run decays."""
    lengths = np.log2(tables.SOME)
    ends = {"linear to 0": (lengths[-1] + 0.2, -0.003, COLORS["linear"])}
    with figure(path, 4.1) as (ax,):
        ax.axhline(0, color=COLORS["linear"], linewidth=2.4)
        for i, ((schedule, share), look) in enumerate(LOOKS.items()):
            label, line, marker = look
            gaps = []
            for T in tables.SOME:
                gaps.append(tables.of_line(schedule, share, T) - tables.of_linear(T))
            mean, error = bars_of(gaps)
            color = COLORS[schedule]
            x = lengths + 0.04 * (i - 2)  # beside each other
            bars = dict(capsize=3, elinewidth=1.2)
            ax.errorbar(x, mean, error, color=color, ls=line, marker=marker, **bars)
            ends[label] = (lengths[-1] + 0.2, mean[-1], color)
        label_ends(ax, ends, 0.004)
        ax.set_xticks(lengths, [size(T) for T in tables.SOME])
        ax.set(xlim=(lengths[0] - 0.2, lengths[-1] + 2.2))
        words = """run length T (tokens)
Bars are 95% intervals of three seeds. The line and the cosine knew T."""
        ax.set_xlabel(words, loc="left")
        ax.set(ylabel="loss above linear to 0 (nats)")
        ax.set_title("Decay for 30% of the run, and for more of a longer run")


def draw_b(path: Path) -> None:
    """b, by how much of the run decays, in our runs and in a public sweep."""
    names = {
        "none": "none",
        "10": "10%",
        "30": "30%",
        "linear": "all of it\n(linear to 0)",
    }
    with figure(path, 3.2) as (ax,):
        for x, folder in enumerate(names):
            b, low, high = tables.b_of_decay(folder)
            ax.plot(x, b, "o", color=BLUE)
            ax.vlines(x, low, high, color=BLUE)
        # marin-community/marin#7856: a constant learning rate, and linear to 5%
        ax.plot([0.15, 3.15], [-0.556, -0.346], "D", color=RED)
        ax.vlines(0.15, -0.65, -0.46, color=RED)
        ax.axhline(0, color="black", linewidth=0.6)
        ax.set_xticks(range(4), names.values())
        ax.set(xlabel="share of the run that decays", ylabel="b, in best lr ∝ T^b")
        ax.set_title("The more of a run decays, the less its learning rate must fall")
        ax.text(1.0, -0.62, "◆ marin's sweep, to 520B tokens", color=RED)
        ax.text(1.0, -0.54, "● ours, to 5M tokens (95% intervals)", color=BLUE)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("figures.py", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    out = parser.parse_args(argv).out
    draw_anytime(out / "anytime.png")
    draw_curves(out / "curves.png")
    draw_decay(out / "decay.png")
    draw_valleys(out / "valleys.png")
    draw_transfer(out / "transfer.png")
    draw_longer(out / "longer.png")
    draw_b(out / "b.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
