"""Loss curves: one Power run that ends at four lengths, and cosines planned for each of them.

    python research/curves.py

Draws the first two figures of README.md from research/results/curves-laptop, as means over its
seeds, and prints their losses. results/curves-laptop/run.sh of commit 81f0289 made the runs.
"""

import json
import sys
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from config import make_config
from fit import Estimate, mean_of, show
from schedules import make_schedule
from tables import Table
from tools import flags
from tools.figures import COLORS, figure, size

FOLDER = ROOT / "research/results/curves-laptop"
LENGTHS = (400_000, 800_000, 1_600_000, 3_200_000)  # run lengths T
SEEDS = (0, 1, 2)
RED = "#a32020"  # a cosine that is stopped early


@cache
def read() -> dict:
    """{run: its curve}, a curve has tokens, val_loss and perhaps average_val_loss."""
    lines = (FOLDER / "curves.jsonl").read_text(encoding="utf-8").splitlines()
    return {curve["run"]: curve for curve in map(json.loads, lines)}


def curve(name: str, of="val_loss") -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the mean loss over the seeds, of "power-trunk" or "cosine-800000"."""
    curves = [read()[f"{name}-{seed}"] for seed in SEEDS]
    return np.array(curves[0]["tokens"]), np.mean([c[of] for c in curves], axis=0)


def losses(name: str, T: int, of="val_loss") -> np.ndarray:
    """The losses of all seeds where a run passes T tokens. [seeds]"""
    curves = [read()[f"{name}-{seed}"] for seed in SEEDS]
    return np.array([np.interp(T, c["tokens"], c[of]) for c in curves])


def ends(name: str) -> np.ndarray:
    """The losses at the end of the runs of all lengths. [lengths, seeds]"""
    return np.array([losses(f"{name}-{T}", T) for T in LENGTHS])


def cut_short() -> np.ndarray:
    """The losses of the longest cosine at all lengths. [lengths, seeds]"""
    return np.array([losses(f"cosine-{LENGTHS[-1]}", T) for T in LENGTHS])


def over_seeds(difference: np.ndarray) -> Estimate:
    """The mean, with Student's t over the seeds. difference [lengths, seeds]"""
    return mean_of(difference.mean(axis=0, keepdims=True))


def millions(tokens) -> np.ndarray:
    return np.asarray(tokens) / 1e6


def line(ax, x, y, **look) -> None:
    ax.plot(millions(x), y, **look)


def mark(ax, name: str, T: int, marker: str, color: str) -> None:
    """A point where a run passes T tokens."""
    line(ax, T, losses(name, T).mean(), marker=marker, color=color, markersize=6)


# -- The race: one Power run, planned cosines, and a cosine that is cut short ------------


def draw_race(path: Path) -> None:
    blue = COLORS["power"]
    gray = COLORS["cosine"]
    with figure(path, 3.75) as (ax,):
        # 1. The cosines, of which the longest is also stopped early
        for T in LENGTHS:
            thin = dict(linewidth=1, linestyle="--")
            line(ax, *curve(f"cosine-{T}"), color=gray, **thin)
            mark(ax, f"cosine-{T}", T, "s", gray)
        for T in LENGTHS[:-1]:
            mark(ax, f"cosine-{LENGTHS[-1]}", T, "X", RED)

        # 2. Power, with a decay for each length
        line(ax, *curve("power-trunk"), color=blue, linewidth=1.6)
        for T in LENGTHS:
            line(ax, *curve(f"power-{T}"), color=blue, linewidth=2.6)
            mark(ax, f"power-{T}", T, "o", blue)

        # 3. Words beside the lines
        ax.text(1.72, 1.47, "one Power run ...", color=blue)
        ax.text(1.72, 1.425, "... decays at four lengths", color=blue)
        ax.text(0.28, 1.27, "cosines, each planned\nfor its length", color=gray)
        ax.text(0.87, 1.66, "the longest cosine,\nstopped early", color=RED)
        ax.set(xlim=(0, 3.35), ylim=(1.2, 2.0))
        ax.set_xticks(millions(LENGTHS), [size(T) for T in LENGTHS])
        ax.set(xlabel="tokens", ylabel="validation loss (nats per byte)")
        ax.set_title("One Power run can end at any length")


# -- Why a decay lowers the loss ---------------------------------------------------------


def draw_decay(path: Path, T: int = LENGTHS[2]) -> None:
    blue = COLORS["power"]
    green = COLORS["average"]
    begin = T - T // 10
    first, last = begin - T // 4, T + T // 8
    with figure(path, 4.6, 2, sharex=True, height_ratios=(2, 1)) as (top, bottom):
        # 1. The losses of the trunk, of its averaged weights, and of the branch
        line(top, *curve("power-trunk"), color=blue, linewidth=1.2)
        line(top, *curve("power-trunk", "average_val_loss"), color=green, linewidth=1.6)
        tokens, branch = curve(f"power-{T}")
        leaves = begin, losses("power-trunk", begin).mean()
        branch_x = [leaves[0], *tokens[tokens > begin]]
        branch_y = [leaves[1], *branch[tokens > begin]]
        line(top, branch_x, branch_y, color=blue, linewidth=2.8)

        # 2. The learning rates
        n = np.linspace(first, last, 1001)
        trunk = make_schedule(make_config(total_tokens=2 * T, decay_tokens=0))
        decayed = make_schedule(make_config(total_tokens=T))
        line(bottom, n, [trunk(x) for x in n], color=blue, linewidth=1.2)
        n = np.linspace(begin, T, 201)
        line(bottom, n, [decayed(x) for x in n], color=blue, linewidth=2.8)

        # 3. Words
        top.set_title("A decay lowers the loss, and so does an average")
        top.set(ylabel="validation loss (nats per byte)", xlim=millions((first, last)))
        bottom.set(ylabel="learning rate", xlabel="tokens (millions)", ylim=(0, None))
        low, high = visible(top, first, last)
        top.set_ylim(low - 0.02, high + 0.02)
        above = losses("power-trunk", begin).mean() + 0.03
        top.text(millions(begin), above, "the run continues", color=blue)
        top.text(millions(begin) - 0.02, above - 0.075, "a decay", color=blue, ha="right")
        below = losses("power-trunk", first, "average_val_loss").mean() - 0.075
        top.text(millions(first) + 0.02, below, "average of its weights", color=green)


def visible(ax, first: float, last: float) -> tuple[float, float]:
    """The lowest and the highest loss between two positions."""
    seen = []
    for drawn in ax.lines:
        x, y = map(np.asarray, drawn.get_data())
        seen += list(y[(x >= first / 1e6) & (x <= last / 1e6)])
    return min(seen), max(seen)


def draw_all() -> None:
    draw_race(ROOT / "assets/curves.png")
    draw_decay(ROOT / "assets/decay.png")


def tables() -> list[Table]:
    power, cosine, cut = ends("power"), ends("cosine"), cut_short()
    rows = []
    for i, T in enumerate(LENGTHS):
        row = [f"{values[i].mean():.3f}" for values in (power, cosine, cut)]
        gaps = [power[i] - cosine[i], cut[i] - cosine[i]]
        rows.append([size(T), *row, *(show(mean_of(gap[None])) for gap in gaps)])
    rows.append(["mean of all T", "", "", "", show(over_seeds(power - cosine)), ""])
    about = (
        "The default run under one Power run with four decays, cosines planned for each "
        "length, and the longest cosine, stopped there (`curves-laptop`, three seeds)."
    )
    head = ["T", "Power", "cosine", "longest cosine", "Power minus cosine"]
    race = Table("curves", about, [*head, "longest cosine minus cosine"], rows)

    T = LENGTHS[2]
    drop = losses(f"power-{T}", T) - losses("power-trunk", T)
    rows = [[f"T = {size(T)}", show(mean_of(drop[None]))]]
    about = "Loss of this Power run after a decay minus that of the run that continues."
    return [race, Table("decay", about, ["", "difference"], rows)]


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("curves.py", __doc__).parse_args(argv)
    print(*tables(), sep="\n\n")
    draw_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
