"""Build docs/index.html, the page to drag: one file that loads nothing.

    python docs/page.py

page.template.html has the words, page.css the looks, and page.js all that moves. The
numbers come from research/results, rounded to the digits that the page can show.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fit
from schedules import paper_batch_size
from tools import files, flags

RESULTS = ROOT / "research/results"
PILOT = {  # schedule of step 1 -> its runs
    "WSD": "decay-laptop/30",
    "Power": "anytime/price",
    "linear": "decay-laptop/linear",
}
T0 = 320_000  # tokens of the short runs of step 1
RACE_LENGTHS = (400_000, 800_000, 1_600_000, 3_200_000)  # T of step 2, in tokens
LENGTHS = (320_000, 640_000, 1_280_000, 2_560_000, 5_120_000)  # T of step 3
WEIGHT_DECAYS = (0, 0.1, 0.3)
RATES = {  # batch size -> the three learning rates whose curves we draw
    2: (0.0016, 0.0032, 0.0064),
    8: (0.004525, 0.0064, 0.009051),
    32: (0.0064, 0.0128, 0.0256),
}
FIRST = 140_000  # tokens, at which the curves of step 3 begin


def rounded(values, digits: int) -> list:
    return np.round(np.asarray(values, float), digits).tolist()


# -- Step 1: tuned in a short run ---------------------------------------------------------


def log2_number(row: dict) -> float:
    """log2 of the number that we tune: the learning rate at n = T0, or the peak."""
    if row["schedule"] != "power":
        return math.log2(row["lr"])
    beta = paper_batch_size(row["batch_size"] * row["seq_len"])
    return math.log2(row["power_a"] * beta ** row["power_q"] * T0 ** row["power_b"])


def smooth(points: list[tuple], domain: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Losses at x [n], by the curve of fit.py in its domain, and lines beside it."""
    inside = [point for point in points if domain[0] <= point[0] <= domain[1]]
    curved = (domain[0] <= x) & (x <= domain[1])
    return np.where(curved, fit.curve_of(inside)(x), np.interp(x, *zip(*points)))


def valley(rows: list[dict]) -> dict:
    """The runs of a schedule and a T: their means, their bottom, and a curve per seed."""
    trials = fit.trials_of(rows, log2_number)
    (points,) = fit.valleys_of(trials).values()
    bottom, why_not = fit.bottom(points)
    if why_not:
        raise ValueError(f"a valley without a bottom: {why_not}")
    low, high = points[0][0], points[-1][0]
    x = np.append(np.arange(low, high - 0.01, 0.1), high)
    domain = fit.curve_of(points).domain
    curves, bottoms = [], []
    for seed in sorted({trial.seed for trial in trials}):
        of_seed = [trial for trial in trials if trial.seed == seed]
        (its_points,) = fit.valleys_of(of_seed).values()
        curves.append(smooth(its_points, domain, x))
        bottoms.append(fit.bottom(its_points)[0])
    return {
        "points": [rounded(point, 4) for point in points],
        "bottom": round(float(bottom), 3),
        "bottoms": rounded(bottoms, 3),  # of the seeds
        "x": rounded(x, 3),
        "curves": rounded(curves, 4),  # [seeds, x]
    }


def pilot() -> dict:
    """The valleys of three schedules at T0 and at 16 T0, with the same three seeds."""
    lengths = (T0, 16 * T0)
    lines = []
    for name, folder in PILOT.items():
        rows = fit.read_sweep(RESULTS / folder)
        rows = [row for row in rows if row["batch_size"] == 8 and row["seed"] < 100]
        valleys = [
            valley([row for row in rows if row["total_tokens"] == T]) for T in lengths
        ]
        lines.append({"name": name, "valleys": valleys})
    return {"lengths": lengths, "lines": lines}


# -- Step 2: four schedules ---------------------------------------------------------------


def race() -> dict:
    """Losses of the default run under Power and cosines, means over the seeds.

    And the settings of four schedules: page.js computes their learning rates, also of runs
    that nobody trained.
    """
    folder = RESULTS / "laptop-decay"
    curves = files.read_json(folder / "curves.json")
    rows = {row["name"]: row for row in fit.read_sweep(folder)}
    seeds = sorted({row["seed"] for row in rows.values()})

    def end_of(name: str) -> float:
        return np.mean([rows[f"{name}-{seed}"]["loss"] for seed in seeds])

    def on_part(name: str) -> tuple:
        """Tokens and losses of the run, from the start of a branch."""
        of_seeds = [curves[f"{name}-{seed}"] for seed in seeds]
        loss = np.mean([curve["val_loss"] for curve in of_seeds], axis=0)
        return of_seeds[0]["tokens"], loss

    # the losses of curves are on a part of the validation text, and those of ends on all
    # of it. So we lift all curves by what this changes for Power
    lifts = []
    for T in RACE_LENGTHS:
        _, loss = on_part(f"power-{T}-30")
        lifts.append(end_of(f"power-{T}-30") - loss[-1])

    def mean_curve(name: str) -> list[list]:
        tokens, loss = on_part(name)
        return [tokens, rounded(loss + np.interp(tokens, RACE_LENGTHS, lifts), 4)]

    longest = RACE_LENGTHS[-1]
    power = rows[f"power-{longest}-30-0"]
    share = power["decay_share"]
    lengths = []
    for T in RACE_LENGTHS:
        names = {"Power": f"power-{T}-30", "cosine": f"cosine-{T}"}
        losses = {line: round(float(end_of(name)), 4) for line, name in names.items()}
        tokens, loss = mean_curve(names["Power"])
        decay = [[n, x] for n, x in zip(tokens, loss) if n > (1 - share) * T]
        lengths.append({"T": T, "power": list(zip(*decay)), "losses": losses})
        lengths[-1]["cosine"] = mean_curve(names["cosine"])
    return {
        "seeds": len(seeds),
        "batch": power["batch_size"],
        "width": power["n_embd"],
        "share": share,
        "warmup": power["warmup_tokens"],
        "a": power["power_a"],
        "b": power["power_b"],  # the peaks of the cosines fall as T^b, too
        "q": power["power_q"],
        "beta": paper_batch_size(power["batch_size"] * power["seq_len"]),
        "lr_max": power["lr_max"],
        "wsd_lr": rows[f"wsd-{longest}-30-0"]["lr"],
        "peak": rows[f"cosine-{longest}-0"]["lr"],
        "linear_peak": rows[f"linear-{longest}-0"]["lr"],
        "trunk": trunk(mean_curve),
        "lengths": lengths,
    }


def trunk(mean_curve) -> list[list]:
    """The Power run that continues: the longest before its decay, then one without."""
    before = mean_curve(f"power-{RACE_LENGTHS[-1]}-30")
    after = mean_curve(f"power-{RACE_LENGTHS[-1]}-0")
    n_before = sum(n < after[0][0] for n in before[0])
    return [before[i][:n_before] + after[i] for i in range(2)]


# -- Step 3: the best learning rate against T, at several weight decays ------------------


def curves_of(folder: Path) -> dict:
    """{(batch size, seed, T, lr): (tokens, loss)} of the training curves."""
    found = {}
    for curve in files.read_json(folder / "curves.json"):
        key = tuple(curve[name] for name in ("batch_size", "seed", "total_tokens", "lr"))
        found[key] = np.array(curve["tokens"]), np.array(curve["loss"])
    return found


def trunks(curves: dict, batch_size: int, seed: int) -> tuple:
    """The stable phases at three learning rates, x [n] in log2 tokens and losses [3, n].

    We take a point from the shortest run that does not yet decay there. All runs of one
    seed read the same text, so they share the noise of the batches. We remove this noise,
    the difference between the mean of the three and a smooth curve.
    """
    x, losses = [], []
    begin = FIRST
    for T in LENGTHS:
        runs = [curves[batch_size, seed, T, lr] for lr in RATES[batch_size]]
        tokens = runs[0][0]
        here = (begin < tokens) & (tokens <= 0.9 * T)
        x.append(np.log2(tokens[here]))
        losses.append([loss[here] for _, loss in runs])
        begin = 0.9 * T
    x = np.concatenate(x)
    losses = np.concatenate(losses, axis=1)
    mean = losses.mean(axis=0)
    center = x.mean()
    smooth = np.polyval(np.polyfit(x - center, mean, 5), x - center)
    return x, losses - (mean - smooth)


def drop(curves: dict, batch_size: int, seed: int, T: int) -> float:
    """How far a decay ends below the trunk that goes on to T, in training loss.

    The mean of three learning rates still has the noise of the batches. So we fit a line
    in log tokens to the trunk, and a parabola to the drop of the decay.
    """
    runs = [curves[batch_size, seed, T, lr] for lr in RATES[batch_size]]
    tokens = runs[0][0]
    loss = np.mean([loss for _, loss in runs], axis=0)
    here = tokens > 0.5 * T
    done = np.maximum((tokens[here] - 0.9 * T) / (0.1 * T), 0)  # share of the decay
    trunk = np.log2(tokens[here])
    design = np.column_stack([np.ones_like(trunk), trunk, done, done**2])
    solution = np.linalg.lstsq(design, loss[here], rcond=None)[0]
    return -float(solution[2:].sum())


def trunk_at(T: int, x: np.ndarray, loss: np.ndarray) -> float:
    """Where a trunk would be at T, by a line through its octave before the decay."""
    begin = math.log2(0.9 * T)
    octave = (begin - 1 < x) & (x <= begin)
    return float(np.polyval(np.polyfit(x[octave], loss[octave], 1), math.log2(T)))


def binned(x: np.ndarray, losses: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean losses [3, bins] between the edges."""
    place = np.digitize(x, edges) - 1
    means = [losses[:, place == i].mean(axis=1) for i in range(len(edges) - 1)]
    return np.array(means).T


def curves_and_ends(curves: dict, valleys: dict, batch_size: int) -> dict:
    """The curves of three learning rates and the losses at the ends of their branches.

    valleys: {T: [(log2 of the learning rate, validation loss)]}
    """
    # 1. The trunks, as means over the seeds in bins of 1/8 octave
    edges = np.arange(math.log2(FIRST), math.log2(0.9 * LENGTHS[-1]) + 1e-9, 1 / 8)
    seeds = sorted({seed for B, seed, _, _ in curves if B == batch_size})
    lines = [binned(*trunks(curves, batch_size, seed), edges) for seed in seeds]
    losses = np.mean(lines, axis=0)
    middle = (edges[1:] + edges[:-1]) / 2

    # 2. Where every branch ends. Its height is that of the training loss. The differences
    #    between the three are those of the validation loss, which decides who wins.
    validation, heights = [], []
    for T, points in valleys.items():
        at_rate = {round(2**x, 7): loss for x, loss in points}
        final = np.array([at_rate[lr] for lr in RATES[batch_size]])
        fall = np.mean([drop(curves, batch_size, seed, T) for seed in seeds])
        level = trunk_at(T, middle, losses.mean(axis=0)) - fall
        validation.append(final)
        heights.append(level + final - final.mean())
    return {
        "rates": RATES[batch_size],
        "x": rounded(middle, 3),
        "trunks": rounded(losses, 4),
        "ends": rounded(heights, 4),
        "val_loss": rounded(validation, 5),
    }


def above_lowest(points: list[tuple]) -> list[list[float]]:
    """[log2 of the learning rate, loss minus the lowest] of a valley."""
    _, lowest = fit.lowest(points)
    finite = [(x, loss) for x, loss in points if math.isfinite(loss)]
    return [[round(x, 3), round(loss - lowest, 5)] for x, loss in finite]


def b_of(trials: list[fit.Trial]) -> np.ndarray:
    return np.array([fit.fit_law(fit.bottoms(fit.valleys_of(trials))).b])


def policy(weight_decay: float) -> dict:
    """The curves, minima and law of the runs at a weight decay."""
    folder = RESULTS / f"memory-laptop/{weight_decay}"
    trials = fit.trials_of(fit.read_sweep(folder))
    best = fit.bottoms(fit.valleys_of(trials))
    trials = [trial for trial in trials if trial.cell in best]
    law = fit.fit_law(best)
    seeds = sorted({trial.seed for trial in trials})
    of_seed = []
    for seed in seeds:
        some = fit.valleys_of([trial for trial in trials if trial.seed == seed])
        of_seed.append(fit.bottoms(some))
    curves = curves_of(folder)
    batches = []
    for batch_size in RATES:
        cells = sorted(cell for cell in best if cell.batch_size == batch_size)
        points = fit.valleys_of(trials)
        valleys = {cell.T: points[cell] for cell in cells}
        minima = []
        for cell in cells:
            several = [some[cell] for some in of_seed if cell in some]
            x = round(best[cell], 3)
            minima.append({"T": cell.T, "x": x, "seeds": rounded(several, 3)})
        line = [law.log2_lr(cell) for cell in (cells[0], cells[-1])]
        batches.append(
            {
                "batch": batch_size,
                "best": minima,
                "valley": above_lowest(valleys[LENGTHS[-1]]),
                "line": rounded(line, 3),  # of the law, at the shortest and the longest T
            }
            | curves_and_ends(curves, valleys, batch_size)
        )
    (interval,) = fit.jackknife(trials, b_of)
    name = f"weight decay {weight_decay}"
    return {"name": name, "b": rounded(interval, 2), "batches": batches}


# -- The page ----------------------------------------------------------------------------


def numbers() -> dict:
    policies = [policy(weight_decay) for weight_decay in WEIGHT_DECAYS]
    return {"pilot": pilot(), "race": race(), "policies": policies}


def source(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def page(data: dict) -> str:
    html = source("page.template.html").replace("{{STYLE}}", source("page.css"))
    html = html.replace("{{SCRIPT}}", source("page.js"))
    return html.replace("{{DATA}}", json.dumps(data, separators=(",", ":")))


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("page.py", __doc__).parse_args(argv)
    text = page(numbers())
    (ROOT / "docs/index.html").write_text(text, encoding="utf-8", newline="\n")
    print(f"docs/index.html, {len(text.encode()) / 1000:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
