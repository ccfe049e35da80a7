"""The figures of README.md and docs/ that come from our runs.

    python research/figures.py --out assets

They are race.png, decay.png, valleys.png, b.png and transfer.png. power.py draws
power.png. A schedule has the same color in all of them.
"""

import sys
from operator import itemgetter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

import numpy as np

import fit
import paper
import race
import tables
from config import make_config
from schedules import make_schedule
from tables import Runner
from tools import files, flags
from tools.plots import COLORS, draw_panel, figure
from tools.stats import over

BLUE = COLORS["power"]
GREEN = COLORS["average"]
RED = "#a32020"  # the runs of others

# -- The race ----------------------------------------------------------------------------

FINDING = "In longer runs, half of a pilot's number ends lower than all of it"
LOOKS = {  # runner: its color, dashes and marker
    Runner("held", 0.3): (COLORS["wsd"], "-", "s"),
    Runner("held", 0.5): (COLORS["wsd"], ":", "s"),
    Runner("half", 0.3): (COLORS["linear"], "-", "^"),
    Runner("half", 0.5): (COLORS["linear"], ":", "^"),
    Runner("power", 0.5): (BLUE, ":", "o"),
    tables.LINE: (GREEN, "--", "D"),
}


def draw_race(path: Path) -> None:
    """How far every runner ends above Power with a decay of 30%, by length."""
    losses = tables.race_losses()
    x = np.log2(race.TIMES)
    with figure(path, 4.4) as (ax,):
        for i, (runner, (color, dashes, marker)) in enumerate(LOOKS.items()):
            gaps = [tables.gap(losses, runner, times) for times in race.TIMES]
            mean, low, _ = np.transpose([over(gap) for gap in gaps])
            look = dict(color=color, ls=dashes, marker=marker, lw=1.2, markersize=5)
            beside = x + 0.1 * (i - 2.5)  # each other
            label = tables.name_of(runner)
            if runner == tables.LINE:
                label = "a line to 0"
            ax.errorbar(beside, mean, mean - low, **look, label=label)
        ax.axhline(0, color=BLUE, lw=2.4, label="power, 30%")
        ax.set_xticks(x, race.TIMES)
        ax.set(xlabel="length of the run, in pilots (bars: 95% over seven cells)")
        ax.set(ylabel="loss minus that of Power, 30% (nats)", title=FINDING)
        ax.legend(ncols=2)


# -- Why a decay lowers the loss ---------------------------------------------------------


def curve(name: str, of="val_loss") -> tuple[np.ndarray, np.ndarray]:
    """Millions of tokens, and the mean loss over the seeds, of "power-trunk"."""
    curves = files.read_json(tables.RESULTS / "curves-laptop/curves.json")
    seeds = [curves[f"{name}-{seed}"] for seed in range(3)]
    return np.array(seeds[0]["tokens"]) / 1e6, np.mean([x[of] for x in seeds], axis=0)


def draw_decay(path: Path, T: int = 1_600_000) -> None:
    """A trunk, its branch, and an average of its weights."""
    start = 0.9 * T / 1e6
    last = 1.125 * T / 1e6
    grid = dict(nrows=2, sharex=True, height_ratios=(2, 1))
    with figure(path, 4.2, **grid) as (losses, rates):
        # 1. The losses
        tokens, loss = curve("power-trunk")
        losses.plot(tokens, loss, color=BLUE, linewidth=1.2)
        average = curve("power-trunk", "average_val_loss")
        losses.plot(*average, "-.", color=GREEN, linewidth=1.8)
        branch, branch_loss = curve(f"power-{T}")
        is_after = branch > start
        x = [start, *branch[is_after]]
        y = [np.interp(start, tokens, loss), *branch_loss[is_after]]
        losses.plot(x, y, color=BLUE, linewidth=2.8)

        # 2. The learning rates
        trunk = make_schedule(make_config(schedule="power", decay_share=0.0))
        ending = make_config(schedule="power", total_tokens=T, decay_share=0.1)
        decayed = make_schedule(ending)
        n = np.linspace(start - 0.4, last, 1001)
        rates.plot(n, [trunk(x * 1e6) for x in n], color=BLUE, linewidth=1.2)
        n = np.linspace(start, T / 1e6, 201)
        rates.plot(n, [decayed(x * 1e6) for x in n], color=BLUE, linewidth=2.8)

        # 3. Words
        losses.text(1.44, 1.43, "the run continues", color=BLUE)
        losses.text(1.46, 1.372, "a copy decays", color=BLUE, ha="right")
        losses.text(1.06, 1.345, "average of its weights", color=GREEN)
        losses.set_title("A decay lowers the loss, and so does an average")
        losses.set(ylabel="loss (nats per byte)", xlim=(start - 0.4, last))
        losses.set(ylim=(1.28, 1.51))
        xlabel = "tokens (millions; means of three seeds)"
        rates.set(ylabel="learning rate", xlabel=xlabel, ylim=(0, None))


# -- Valleys -----------------------------------------------------------------------------


TICKS = (0.001, 0.002, 0.004, 0.008, 0.016)


def draw_cells(ax, rows: list[dict], labels: list[str], title: str) -> None:
    """The valleys of some runs. The title ends with the last bottom over the first."""
    rows = sorted(rows, key=itemgetter("n_embd", "batch_size", "total_tokens"))
    valleys = []
    for label, valley in zip(labels, fit.valleys_of(fit.curves_of(rows)).values()):
        points = fit.near_lowest(valley)
        x, _ = fit.bottom(points)
        curve = fit.cubic_of(points)
        valleys.append(dict(label=label, points=points, curve=curve, bottom=x))
    draw_panel(ax, valleys)
    ratio = 2 ** (valleys[-1]["bottom"] - valleys[0]["bottom"])
    ax.set_title(f"{title} × {ratio:.2g}")
    ax.set_xticks(TICKS, [f"{lr:g}" for lr in TICKS])
    ax.minorticks_off()


def draw_valleys(path: Path) -> None:
    """Valleys of width 64 at some T, and at some batch sizes."""
    over_T = []
    over_batch = []
    for row in tables.read("wsd-laptop"):
        cell = row["n_embd"], row["batch_size"], row["total_tokens"]
        if cell in [(64, 2, T) for T in (80_000, 320_000, 1_280_000)]:
            over_T.append(row)
        if cell in [(64, batch_size, 1_280_000) for batch_size in (1, 2, 8)]:
            over_batch.append(row)
    with figure(path, 3.7, ncols=2, sharey=True) as (left, right):
        names = ["T = 80k", "T = 320k", "T = 1.28M"]
        draw_cells(left, over_T, names, "16× the tokens, best\nlearning rate")
        names = ["batch size 1", "batch size 2", "batch size 8"]
        draw_cells(right, over_batch, names, "8× the batch size, best\nlearning rate")
        left.set(ylabel="loss above the bottom (nats)")


def draw_transfer(path: Path) -> None:
    """The valleys of three widths, without and with muP."""
    rows = tables.read("transfer-quick")
    widths = ["width 32", "width 64", "width 128"]
    with figure(path, 3.7, ncols=2, sharey=True) as axes:
        for ax, name, is_mup in zip(axes, ("Without μP", "With μP"), (False, True)):
            some = [row for row in rows if paper.has_mup(row) == is_mup]
            title = f"{name}: 4× the width,\nbest learning rate"
            draw_cells(ax, some, widths, title)
        axes[0].set(ylabel="loss above the bottom (nats)")


# -- b, by how much of a run decays ------------------------------------------------------


def draw_b(path: Path) -> None:
    """In our runs and in a public sweep."""
    names = {
        "none": "none",
        "10": "10%",
        "30": "30%",
        "linear": "all of it\n(linear to 0)",
    }
    with figure(path, 3.2) as (ax,):
        for x, ending in enumerate(names):
            b, low, high = tables.b_of_decay(ending)
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
    draw_race(out / "race.png")
    draw_decay(out / "decay.png")
    draw_valleys(out / "valleys.png")
    draw_transfer(out / "transfer.png")
    draw_b(out / "b.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
