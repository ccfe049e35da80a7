"""The figures of README.md and docs/ that come from our runs.

    python research/figures.py --out assets

They are anytime.png, decay.png, valleys.png, longer.png, b.png and transfer.png.
regret.png comes from `python fit.py research/results/wsd-laptop`, and schedules.py and
power.py draw the others. A schedule has the same color in all of them.
"""

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
from tools import flags, plots, reports
from tools.plots import COLORS, figure, size

BLUE = COLORS["power"]
GREEN = COLORS["average"]
RED = "#a32020"  # the runs of others


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


def draw_anytime(path: Path, cell: str = "code-short") -> None:
    """One held run and one Power run, tuned in a pilot, end at four lengths.

    And lines whose peak is from the same pilot, each planned for its length.
    """
    T0, _ = tables.SHORT[cell]
    ends = [times * T0 for times in tables.TIMES]
    looks = {  # line -> its name, color, marker and dashes
        tables.HELD: ("held (WSD)", COLORS["wsd"], "s", "-."),
        tables.LINE: ("a line for each length", COLORS["linear"], "v", ":"),
        tables.FALL: ("Power", BLUE, "o", "-"),
    }
    layout = dict(beside=True, width_ratios=(2, 3))
    with figure(path, 3.5, 2, **layout) as (rates, gaps):
        # 1. The learning rates
        rows = [row for row in tables.rows_in(f"anytime/{cell}") if row["seed"] == 0]
        for line, (_, color, _, dashes) in looks.items():
            for row in rows:
                if row["line"] == line and round(row["decay_share"], 2) == 0.3:
                    schedule = make_schedule(SimpleNamespace(**{"warmup_start": 0} | row))
                    n = np.geomspace(T0 / 8, row["total_tokens"], 2001)
                    lr = [1000 * schedule(x) for x in n]
                    rates.plot(n, lr, color=color, ls=dashes, linewidth=1.4)
        rates.set(xscale="log", xlim=(T0 / 8, 1.4 * ends[-1]), ylim=(0, None))
        rates.set(ylabel="learning rate × 1000", xlabel="tokens")
        some = (T0, 8 * T0, 64 * T0)
        rates.set_xticks(some, [size(T) for T in some])
        rates.minorticks_off()

        # 2. The losses at the ends
        x = np.log2(tables.TIMES)
        for i, (line, (label, color, marker, dashes)) in enumerate(looks.items()):
            differences = []
            for times in tables.TIMES:
                power = tables.tuned_short(cell, tables.FALL, times)
                losses = tables.tuned_short(cell, line, times)
                differences.append(tables.minus(losses, power))
            mean, error = bars_of(differences)
            look = dict(color=color, marker=marker, ls=dashes, capsize=3, label=label)
            gaps.errorbar(
                x + 0.1 * i, mean, error if line != tables.FALL else None, **look
            )
        gaps.set_xticks(x, [f"{size(T)}\n{T // T0} T0" for T in ends])
        gaps.set(xlabel="length of the run (bars: 95%)")
        gaps.set(ylabel="loss minus Power's (nats)")
        gaps.set(ylim=(None, 0.085))
        gaps.legend(loc="upper left")
        rates.set_title("All tuned at 80k tokens")
        held = np.mean(tables.minus(tables.tuned_short(cell, tables.HELD, 64), power))
        gaps.set_title(f"At 64 times, held ends {held:.3f} above")


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


LOOKS = {  # of longer.png: label -> (schedule, share of the decay), line, marker
    "decay 10%": (("power", 0.1), ":", "v"),
    "decay 50%": (("power", 0.5), "--", "^"),
    "linear to 0,\nwhich knew T": (("linear", 0), "-.", "D"),
}


def draw_longer(path: Path) -> None:
    """Losses minus that of Power with a decay of 30%, by how much of the run decays."""
    lengths = np.log2(tables.SOME)
    with figure(path, 3.8) as (ax,):
        ax.axhline(0, color=BLUE, linewidth=2.4)
        ax.text(lengths[-1] + 0.2, 0.001, "Power, decay 30%", color=BLUE)
        for i, (label, ((schedule, share), line, marker)) in enumerate(LOOKS.items()):
            differences = []
            for T in tables.SOME:
                losses = tables.of_linear(T)
                if schedule == "power":
                    losses = tables.of_line(schedule, share, T)
                differences.append(losses - tables.of_line("power", 0.3, T))
            mean, error = bars_of(differences)
            x = lengths + 0.04 * (i - 1)  # beside each other
            look = dict(color=COLORS[schedule], ls=line, marker=marker, capsize=3)
            ax.errorbar(x, mean, error, elinewidth=1.2, **look)
            # the three ends are apart, but one
            y = mean[-1] - 0.004 * (label == "decay 50%")
            y -= 0.009 * (schedule == "linear")
            ax.text(lengths[-1] + 0.2, y, label, color=COLORS[schedule], va="center")
        ax.set_xticks(lengths, [size(T) for T in tables.SOME])
        ax.set(xlim=(lengths[0] - 0.2, lengths[-1] + 1.6))
        ax.set_xlabel("run length T (tokens; bars are 95% intervals of three seeds)")
        ax.set(ylabel="loss minus that of 30% (nats)")
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
    draw_decay(out / "decay.png")
    draw_valleys(out / "valleys.png")
    draw_transfer(out / "transfer.png")
    draw_longer(out / "longer.png")
    draw_b(out / "b.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
