"""Build docs/index.html, the page to drag, from its three sources and the committed records.

    python docs/page.py              docs/index.html
    python docs/page.py --picture    and assets/page.png, by a headless Chromium

docs/page.template.html has the words, docs/page.css the looks and docs/page.js all that
moves. This file adds the data: the sweeps of weight decay (step 1) and of batch size (steps
2 and 4), and the loss curves of one Power run and four cosines (step 3).
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fit
from records import only, records_in
from tools import figures, flags
from tools.flags import UserError

RESULTS = ROOT / "results"
LENGTHS = (320_000, 640_000, 1_280_000, 2_560_000, 5_120_000)  # T of step 1, in tokens
RATES = {  # batch size -> the three learning rates whose curves we draw
    2: (0.0016, 0.0032, 0.0064),
    8: (0.004525, 0.0064, 0.009051),
    32: (0.0064, 0.0128, 0.0256),
}
POLICIES = {  # name -> folder below results/, and the runs there. Those with two seeds are shown
    "weight decay 0": ("memory-laptop", ["weight_decay=0"]),
    "weight decay 0.1": ("memory-laptop", ["weight_decay=0.1"]),
    "weight decay 0.3": ("memory-laptop", ["weight_decay=0.3"]),
}
RACE_LENGTHS = (400_000, 800_000, 1_600_000, 3_200_000)  # T of step 3
# exponents of Bjorck et al., Step Law and Power Scheduler
PAPERS = {"fixed": -0.32, "best": 0.31, "three": -0.51}


def estimate(rows: np.ndarray) -> list[float]:
    """An estimate and its 95% interval, rounded."""
    return [round(float(x), 6) for x in (rows[0], *fit.interval(rows))]


# -- Step 1: the best learning rate against T, at several weight decays ------------------


def curves_of(folder: Path, choices: list[str]) -> dict:
    """{(batch size, seed, T, lr): (tokens, loss)} of the training curves that are finite."""
    lines = (folder / "curves.jsonl").read_text(encoding="utf-8").splitlines()
    found = {}
    for run in only([json.loads(line) for line in lines], choices):
        tokens, loss = (run["curve"][name] for name in ("tokens", "loss"))
        key = run["batch_size"], run["seed"], run["total_tokens"], run["lr"]
        if None not in loss:
            found[key] = np.array(tokens), np.array(loss)
    return found


def trunks(curves: dict, batch_size: int, seed: int, first: int = 140_000) -> tuple:
    """The stable phases at three learning rates, x [n] in log2 tokens and losses [3, n].

    A point is taken from the shortest run that has not begun to decay there. All runs of
    one seed read the same text, so they share the noise of the batches. We remove it: it is
    what the mean of the three has beside a smooth curve.
    """
    x, losses = [], []
    begin = first
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


def race_of_rates(curves: dict, found: list, batch_size: int) -> dict:
    """The curves of three learning rates and the losses at the ends of their branches."""
    # 1. The trunks, as means over the seeds in bins of 1/8 octave
    first = math.log2(140_000)
    edges = np.arange(first, math.log2(0.9 * LENGTHS[-1]) + 1e-9, 1 / 8)
    seeds = sorted({seed for B, seed, _, _ in curves if B == batch_size})
    lines = [binned(*trunks(curves, batch_size, seed), edges) for seed in seeds]
    losses = np.mean(lines, axis=0)
    middle = (edges[1:] + edges[:-1]) / 2

    # 2. Where every branch ends. Its height is that of the training loss. The differences
    #    between the three are those of the validation loss, which decides who wins.
    validation, heights = [], []
    for m in found:
        at_rate = {round(2**x, 7): loss for x, loss in m.points}
        final = np.array([at_rate[lr] for lr in RATES[batch_size]])
        fall = np.mean([drop(curves, batch_size, seed, m.T) for seed in seeds])
        level = trunk_at(m.T, middle, losses.mean(axis=0)) - fall
        validation.append(np.round(final, 6).tolist())
        heights.append(np.round(level + final - final.mean(), 4).tolist())
    return {
        "rates": RATES[batch_size],
        "x": np.round(middle, 4).tolist(),
        "trunks": np.round(losses, 4).tolist(),
        "ends": heights,
        "val_loss": validation,
    }


def best_rates(found: list, by_seed: list) -> list[dict]:
    """The best learning rate at every T, with those of every seed, in log2."""
    best = []
    for m in found:
        seeds = [
            s.x
            for s in by_seed
            if (s.T, s.batch_size) == (m.T, m.batch_size) and not s.why_not
        ]
        best.append({"T": m.T, "x": round(m.x, 6), "seeds": np.round(seeds, 4).tolist()})
    return best


def valley_above_lowest(m: fit.Minimum) -> list[list[float]]:
    """[log2 of the learning rate, loss minus the lowest] of a cell."""
    points = [(x, loss) for x, loss in m.points if math.isfinite(loss)]
    lowest = min(loss for _, loss in points)
    return [[round(x, 6), round(loss - lowest, 5)] for x, loss in points]


def policy(name: str, folder: Path, choices: list[str]) -> dict | None:
    """A weight decay with its curves, minima and law; None if a cell has only one seed."""
    records = fit.read_records([folder], choices)
    fits = fit.fits_of(records)
    if min(len(m.seeds) for m in fits.found) < 2:
        return None
    curves = curves_of(folder, choices)
    by_seed = fit.minima(records, by_seed=True)
    batches = []
    for batch_size in RATES:
        found = [m for m in fits.points if m.batch_size == batch_size]
        best = {"batch": batch_size, "best": best_rates(found, by_seed)}
        best["valley"] = valley_above_lowest(found[-1])
        batches.append(best | race_of_rates(curves, found, batch_size))
    (a,) = fits.law.a.values()
    law = {"a": float(a[0]), "b": estimate(fits.law.b), "q": float(fits.law.q[0])}
    return {"name": name, "law": law, "batches": batches}


def policies() -> list[dict]:
    found = []
    for name, (folder, choices) in POLICIES.items():
        if (RESULTS / folder / "curves.jsonl").exists():
            found.append(policy(name, RESULTS / folder, choices))
    return [one for one in found if one]


# -- Steps 2 and 4: the valleys of eight batch sizes, and three questions to them --------


def valley(m: fit.Minimum) -> dict:
    """A cell, with losses [seeds, lr] at the learning rates that all seeds have."""
    rates = [float(f"{2**x:.4g}") for x, _ in m.points]  # a sweep rounds them like this
    losses = []
    for seed in sorted(m.seeds):
        finite = [m.seeds[seed][x] for x, _ in m.points]
        losses.append([round(x, 6) if math.isfinite(x) else None for x in finite])
    return {
        "shape": m.shape,
        "T": m.T,
        "batch": m.batch_size,
        "lr": rates,
        "losses": losses,
    }


def questions(records: list[dict]) -> dict:
    """The valleys of a sweep, and the exponent of T in the readings of three papers."""
    fits = fit.fits_of(records)
    readings = {
        "fixed": estimate(fits.law.b),
        "best": estimate(fit.step_law_reading(fits.found)),
        "three": estimate(fits.paper[0]),
    }
    rows = {key: {"ours": readings[key], "theirs": PAPERS[key]} for key in PAPERS}
    lows, highs = zip(*(interval for _, *interval in readings.values()))
    return {
        "seq_len": records[0]["seq_len"],
        "runs": len(records),
        "cells": [valley(m) for m in fits.found],
        "readings": rows,
        "overlap": max(lows) < min(highs),  # of all three intervals
        "order": order(fits),
    }


def order(fits: fit.Fits) -> list[float]:
    """How near two exponents come if we leave out any one batch size or either seed.

    The best batch size minus a fixed one, and the fixed one minus the three best.
    """
    answers = [fits.law.b, fit.step_law_reading(fits.found), fits.paper[0]]
    # a row of NaN left out nothing that this answer uses
    fixed, best, three = [np.where(np.isnan(b), b[0], b) for b in answers]
    return [round(float(min(gap)), 6) for gap in (best - fixed, fixed - three)]


# -- Step 3: one Power run, and cosines --------------------------------------------------


def race(folder: Path) -> dict:
    """Curves and losses of the runs of results/curves-laptop."""
    # 1. Curves of validation losses, as means over the seeds
    lines = (folder / "curves.jsonl").read_text(encoding="utf-8").splitlines()
    curves = {curve["run"]: curve for curve in map(json.loads, lines)}
    seeds = sorted({name.rpartition("-")[2] for name in curves})

    def mean_curve(name: str, begin: int = 0) -> list[list]:
        some = [curves[f"{name}-{s}"] for s in seeds]
        tokens = np.array(some[0]["tokens"])
        loss = np.mean([curve["val_loss"] for curve in some], axis=0)
        later = tokens > begin
        return [tokens[later].tolist(), np.round(loss[later], 4).tolist()]

    def at(name: str, T: int) -> list[float]:
        some = [curves[f"{name}-{s}"] for s in seeds]
        return [round(float(np.interp(T, c["tokens"], c["val_loss"])), 5) for c in some]

    # 2. The settings that their schedules need
    runs = records_in(folder / "records.jsonl")
    power = next(r for r in runs if r["schedule"] == "power")
    cosines = {r["total_tokens"]: r for r in runs if r["schedule"] == "cosine"}
    longest = RACE_LENGTHS[-1]
    return {
        "seeds": len(seeds),
        "power": {name: power[f"power_{name}"] for name in "abq"},
        "lr_max": power["lr_max"],
        "beta": power["batch_size"] * power["seq_len"] / 4096,
        "batch": power["batch_size"],
        "width": power["n_embd"],
        "warmup": power["warmup_tokens"],
        "trunk": mean_curve("power-trunk"),
        "lengths": [
            {
                "T": T,
                "branch": mean_curve(f"power-{T}", begin=T - T // 10),
                "planned": mean_curve(f"cosine-{T}"),
                "lr": cosines[T]["lr"],
                "min_lr_ratio": cosines[T]["min_lr_ratio"],
                "losses": {
                    "power": at(f"power-{T}", T),
                    "planned": at(f"cosine-{T}", T),
                    "cut": at(f"cosine-{longest}", T),
                },
            }
            for T in RACE_LENGTHS
        ],
    }


# -- The page ----------------------------------------------------------------------------


def content() -> dict:
    """The data of the page, rounded, so that every machine writes the same bytes."""
    sweep = ["warmup_tokens=80000", "n_embd=32"]
    return {
        "policies": policies(),
        "questions": questions(fit.read_records([RESULTS / "bend-laptop"], sweep)),
        "race": race(RESULTS / "curves-laptop"),
    }


def colors() -> str:
    """The colors of all figures of the project, as custom properties of CSS."""
    rows = [f"--{name}: {color};" for name, color in figures.COLORS.items()]
    for name, (low, high) in figures.HUES.items():
        name = name.replace(" ", "-")
        rows += [f"--{name}-low: {low};", f"--{name}-high: {high};"]
    return " ".join(rows)


def page(data: dict) -> str:
    """The page, one file that loads nothing."""
    sources = Path(__file__).parent
    text = json.dumps(data, separators=(",", ":"))
    # Nothing in a record may end the script. The JSON is ASCII, so it has no U+2028 either.
    text = text.replace("<", r"\u003c")
    html = (sources / "page.template.html").read_text(encoding="utf-8")
    style = (sources / "page.css").read_text(encoding="utf-8")
    script = (sources / "page.js").read_text(encoding="utf-8")
    html = html.replace("{{STYLE}}", style.replace("{{COLORS}}", colors()))
    return html.replace("{{SCRIPT}}", script).replace("{{DATA}}", text)


def take_picture(path: Path) -> None:
    """A picture of step 1, 600 pixels wide, twice as sharp. Raises UserError without a Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        raise UserError("--picture needs chromium or google-chrome")
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, "--headless", "--no-sandbox", "--hide-scrollbars"]
        command += ["--force-device-scale-factor=2", "--window-size=600,850"]
        command += [f"--user-data-dir={profile}", f"--screenshot={path}"]
        address = (ROOT / "docs/index.html").as_uri() + "#stop=4&seen=weight+decay+0"
        subprocess.run([*command, address], check=True, capture_output=True)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("page.py", __doc__)
    parser.add_argument(
        "--picture", action="store_true", help="also draw assets/page.png"
    )
    args = parser.parse_args(argv)
    try:
        text = page(content())
        (ROOT / "docs/index.html").write_text(text, encoding="utf-8", newline="\n")
        print(f"docs/index.html, {len(text.encode()) / 1000:.0f} KB")
        if args.picture:
            take_picture(ROOT / "assets/page.png")
            print("assets/page.png")
    except (UserError, OSError) as error:
        return flags.fail("page.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
