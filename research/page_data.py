"""Write docs/page_data.json, the numbers of the page to drag, from our committed runs.

    python research/page_data.py

The page shows curves of three learning rates for several weight decays (step 1), and one
Power run beside four cosines (step 2). We round to the digits that the page can show, so
that the processor that runs this program does not matter.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fit
from fit import Cell
from policies import read_curves
from records import only, read_records, read_rows, row
from schedules import make_schedule
from tools.flags import program_parser

RESULTS = ROOT / "research/results"
LENGTHS = (320_000, 640_000, 1_280_000, 2_560_000, 5_120_000)  # T of step 1, in tokens
RATES = {  # batch size -> the three learning rates whose curves we draw
    2: (0.0016, 0.0032, 0.0064),
    8: (0.004525, 0.0064, 0.009051),
    32: (0.0064, 0.0128, 0.0256),
}
WEIGHT_DECAYS = (0, 0.1, 0.3)
FIRST = 140_000  # tokens, at which the curves of step 1 begin
RACE_LENGTHS = (400_000, 800_000, 1_600_000, 3_200_000)  # T of step 2


def rounded(values, digits: int) -> list:
    return np.round(np.asarray(values, float), digits).tolist()


# -- Step 1: the best learning rate against T, at several weight decays ------------------


def curves_of(folder: Path, choices: list[str]) -> dict:
    """{(batch size, seed, T, lr): (tokens, loss)} of the training curves that are finite."""
    found = {}
    for run in only(read_curves(folder / "curves.jsonl"), choices):
        tokens, loss = (run["curve"][name] for name in ("tokens", "loss"))
        names = ("batch_size", "seed", "total_tokens", "lr")
        key = tuple(run["config"][name] for name in names)
        if None not in loss:
            found[key] = np.array(tokens), np.array(loss)
    return found


def trunks(curves: dict, batch_size: int, seed: int) -> tuple:
    """The stable phases at three learning rates, x [n] in log2 tokens and losses [3, n].

    A point is taken from the shortest run that has not begun to decay there. All runs of
    one seed read the same text, so they share the noise of the batches. We remove it: it is
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

    The mean of three learning rates still has the noise of the batches. So we fit the trunk
    by a line in log tokens, and what the decay adds by a parabola.
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


def curves_and_ends(curves: dict, found: list, batch_size: int) -> dict:
    """The curves of three learning rates and the losses at the ends of their branches."""
    # 1. The trunks, as means over the seeds in bins of 1/8 octave
    edges = np.arange(math.log2(FIRST), math.log2(0.9 * LENGTHS[-1]) + 1e-9, 1 / 8)
    seeds = sorted({seed for B, seed, _, _ in curves if B == batch_size})
    lines = [binned(*trunks(curves, batch_size, seed), edges) for seed in seeds]
    losses = np.mean(lines, axis=0)
    middle = (edges[1:] + edges[:-1]) / 2

    # 2. Where every branch ends. Its height is that of the training loss. The differences
    #    between the three are those of the validation loss, which decides who wins.
    validation, heights = [], []
    for cell in found:
        at_rate = {round(2**x, 7): loss for x, loss in fit.valley(cell)}
        final = np.array([at_rate[lr] for lr in RATES[batch_size]])
        fall = np.mean([drop(curves, batch_size, seed, cell.T) for seed in seeds])
        level = trunk_at(cell.T, middle, losses.mean(axis=0)) - fall
        validation.append(final)
        heights.append(level + final - final.mean())
    return {
        "rates": RATES[batch_size],
        "x": rounded(middle, 3),
        "trunks": rounded(losses, 4),
        "ends": rounded(heights, 4),
        "val_loss": rounded(validation, 5),
    }


def best_rates(found: list[Cell], by_seed: list[Cell]) -> list[dict]:
    """The best learning rate at every T, with those of every seed, in log2."""
    best = []
    for cell, x in fit.minima(found):
        seeds = [x for single, x in fit.minima(by_seed) if single[:3] == cell[:3]]
        best.append({"T": cell.T, "x": round(x, 3), "seeds": rounded(seeds, 3)})
    return best


def valley(cell: Cell) -> list[list[float]]:
    """[log2 of the learning rate, loss minus the lowest] of a cell."""
    lowest = fit.lowest_loss(cell)
    points = [(x, loss) for x, loss in fit.valley(cell) if math.isfinite(loss)]
    return [[round(x, 3), round(loss - lowest, 5)] for x, loss in points]


def policy(weight_decay: float) -> dict:
    """The runs at a weight decay, with curves, minima and law."""
    folder = RESULTS / "memory-laptop"
    choices = [f"weight_decay={weight_decay}"]
    rows = read_rows([folder], choices)
    cells = fit.fitted_cells(rows)
    curves = curves_of(folder, choices)
    by_seed = fit.cells_of(rows, by_seed=True)
    law = fit.as_json(cells, rows[0])
    batches = []
    for batch_size in RATES:
        found = [cell for cell in cells if cell.batch_size == batch_size]
        tokens = batch_size * rows[0]["seq_len"]
        line = [math.log2(fit.predict(law, T, tokens)) for T in (LENGTHS[0], LENGTHS[-1])]
        batch = {"batch": batch_size, "best": best_rates(found, by_seed)}
        batch["valley"] = valley(found[-1])
        batch["line"] = rounded(line, 3)  # of the law, at the shortest and the longest T
        batches.append(batch | curves_and_ends(curves, found, batch_size))
    b = rounded([law["b"], *law["b_interval"]], 2)
    return {"name": f"weight decay {weight_decay}", "b": b, "batches": batches}


# -- Step 2: one Power run, and cosines --------------------------------------------------


def learning_rates(run: dict, begin: float = 0) -> list[list]:
    """The schedule of a run, [tokens, learning rates]."""
    schedule = make_schedule(SimpleNamespace(**run))
    T = run["total_tokens"]
    tokens = np.linspace(begin, T, 81)
    if begin < run["warmup_tokens"]:
        tokens = np.sort(np.append(tokens, run["warmup_tokens"]))  # the kink
    return [rounded(tokens, 0), rounded([schedule(n) for n in tokens], 6)]


def race() -> dict:
    """Curves and losses of the runs of research/results/curves-laptop, as means over the seeds."""
    folder = RESULTS / "curves-laptop"
    lines = (folder / "curves.jsonl").read_text(encoding="utf-8").splitlines()
    curves = {curve["run"]: curve for curve in map(json.loads, lines)}
    seeds = sorted({name.rpartition("-")[2] for name in curves})

    def mean_curve(name: str, begin: float = 0) -> list[list]:
        some = [curves[f"{name}-{s}"] for s in seeds]
        tokens = np.array(some[0]["tokens"])
        loss = np.mean([curve["val_loss"] for curve in some], axis=0)
        later = tokens > begin
        return [tokens[later].tolist(), rounded(loss[later], 4)]

    def losses_at(name: str, T: int) -> list[float]:
        some = [curves[f"{name}-{s}"] for s in seeds]
        return rounded([np.interp(T, c["tokens"], c["val_loss"]) for c in some], 4)

    runs = [row(r) for r in read_records(folder / "records.jsonl")]

    def run(schedule: str, T: int, decay_tokens: int) -> dict:
        wanted = schedule, T, decay_tokens
        names = "schedule", "total_tokens", "decay_tokens"
        return next(r for r in runs if tuple(r[name] for name in names) == wanted)

    longest = RACE_LENGTHS[-1]
    trunk = run("power", longest, 0)
    lengths = []
    for T in RACE_LENGTHS:
        start = T - T // 10  # of the decay
        branch = run("power", T, T // 10)
        cosine = run("cosine", T, 0)
        lengths.append(
            {
                "T": T,
                "power": mean_curve(f"power-{T}", begin=start),
                "power_lr": learning_rates(branch, begin=start),
                "cosine": mean_curve(f"cosine-{T}"),
                "cosine_lr": learning_rates(cosine),
                "losses": {
                    "power": losses_at(f"power-{T}", T),
                    "planned": losses_at(f"cosine-{T}", T),
                    "cut": losses_at(f"cosine-{longest}", T),
                },
            }
        )
    return {
        "seeds": len(seeds),
        "batch": trunk["batch_size"],
        "width": trunk["n_embd"],
        "trunk": mean_curve("power-trunk"),
        "trunk_lr": learning_rates(trunk),
        "lengths": lengths,
    }


def content() -> dict:
    return {"policies": [policy(one) for one in WEIGHT_DECAYS], "race": race()}


def main(argv: list[str] | None = None) -> int:
    program_parser("page_data.py", __doc__).parse_args(argv)
    path = ROOT / "docs/page_data.json"
    text = json.dumps(content(), separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8", newline="\n")
    print(f"{path.relative_to(ROOT)}, {len(text) / 1000:.0f} KB; now python docs/page.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
