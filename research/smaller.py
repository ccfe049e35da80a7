"""Our smaller experiments, as tables: the default run, the recipe and those of research/log.md.

    python research/smaller.py

Prints its tables of TABLES.md, from the committed records.
"""

import json
import statistics
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from fit import mean_of, show
from records import read_records, row
from tables import Table
from tools import flags

RESULTS = ROOT / "research/results"


def rows_in(folder: str) -> list[dict]:
    """All runs of a folder as rows with their origin, where some have a name `run`."""
    return [row(r) | r["origin"] for r in read_records(RESULTS / folder)]


def over_seeds(gaps: list[float], digits: int = 3) -> str:
    """Mean of a difference, with its interval over the seeds."""
    return show(mean_of(np.array(gaps)[None]), digits) if any(gaps) else ""


def losses_by_name(folder: str) -> dict[str, float]:
    """{name of a run: its validation loss}, of the runs that have one."""
    return {r["run"]: r["val_loss"] for r in rows_in(folder) if "run" in r}


# -- The default run ---------------------------------------------------------------------


def tuned() -> dict[str, list[dict]]:
    """{schedule: the runs of its best learning rate, a seed each}, judged by unread text."""
    found = {}
    for schedule in ("power", "wsd", "cosine"):
        by_lr: dict = {}
        for r in rows_in("laptop"):
            if r["schedule"] == schedule:
                by_lr.setdefault(r["tuned_lr"], []).append(r)
        judge = lambda runs: statistics.mean(r["val_loss_unread"] for r in runs)
        found[schedule] = sorted(min(by_lr.values(), key=judge), key=lambda r: r["seed"])
    return found


def laptop_table() -> Table:
    best = tuned()
    power = [r["val_loss"] for r in best["power"]]
    rows = []
    for schedule, runs in best.items():
        losses = [r["val_loss"] for r in runs]
        setting = f"learning rate {runs[0]['lr']:g}"
        if schedule == "power":
            setting = f"a = {runs[0]['power_a']:g}"
        row = [schedule, setting, *(f"{loss:.4f}" for loss in losses)]
        gaps = [loss - other for loss, other in zip(losses, power)]
        rows.append([*row, f"{statistics.mean(losses):.4f}", over_seeds(gaps, 4)])
    losses = [r["val_loss"] for r in rows_in("laptop-moe")]
    row = ["power, laptop-moe", "", *(f"{loss:.4f}" for loss in losses)]
    rows.append([*row, f"{statistics.mean(losses):.4f}", ""])
    return Table(
        "default run",
        "The preset `laptop` under three schedules, each with the learning rate that was best "
        "on training text that the run had not read (`laptop`), and `laptop-moe`.",
        ["schedule", "tuned", "seed 0", "seed 1", "seed 2", "mean", "minus Power"],
        rows,
    )


def dtype_table() -> Table:
    by_dtype: dict = {}
    for r in rows_in("dtype"):
        by_dtype.setdefault(r["dtype"], []).append(f"{r['val_loss']:.4f}")
    return Table(
        "dtype",
        "The preset `laptop` under Power with the b and q of the paper, for 4.2M tokens "
        "(`dtype`).",
        ["dtype", "seed 0", "seed 1", "seed 2"],
        [[name, *losses] for name, losses in by_dtype.items()],
    )


# -- The recipe, on manual pages ---------------------------------------------------------


def recipe_table() -> Table:
    names = {
        "power": "Power with our law",
        "default": "Power with the defaults of train.py",
        "wsd": "WSD at the learning rate of our law",
        "wsdhigh": "WSD at √2 times the learning rate of our law",
        "wsddefault": "WSD with the defaults of train.py",
    }
    losses = losses_by_name("recipe")
    rows = []
    for name, words in names.items():
        seeds = [losses[f"{name}-{seed}"] for seed in range(3)]
        rows.append([words, *(f"{x:.3f}" for x in (*seeds, statistics.mean(seeds)))])
    return Table(
        "recipe",
        "Runs of docs/recipe.md at T = 1.28M (`recipe`).",
        ["run", "seed 0", "seed 1", "seed 2", "mean"],
        rows,
    )


def ceilings_table() -> Table:
    losses = losses_by_name("ceiling-rule")
    lengths = 1_280_000, 5_120_000

    def seeds(kind: str, T: int) -> np.ndarray:
        return np.array([losses[f"{kind}-{T}-{seed}"] for seed in range(5)])

    names = {
        "2000": "2,000 tokens (no ceiling)",
        "4000": "4,000 tokens",
        "80000": "80,000 tokens",
        "320000": "320,000 tokens",
        "wsd": "WSD, at the learning rate of the law",
    }
    rows = []
    for kind, words in names.items():
        row = [f"{seeds(kind, T).mean():.3f}" for T in lengths]
        gaps = [over_seeds(seeds(kind, T) - seeds("80000", T)) for T in lengths]
        rows.append([words, *row, *gaps])
    return Table(
        "ceilings of the recipe",
        "Power runs that follow a law, with ceilings at the law of these tokens, five seeds "
        "(`ceiling-rule`).",
        [
            "ceiling, the law at",
            "1.28M",
            "5.12M",
            "1.28M, minus 80,000",
            "5.12M, minus it",
        ],
        rows,
    )


# -- The experiments of log.md -----------------------------------------------------------


def two_stage_table() -> Table:
    one, two = [], []
    for r in rows_in("two-stage"):
        (two if r["decay_data"] else one).append(r)
    rows = []
    for source in ("torch", "library", "clean"):
        name = f"val_loss_{source}"
        before, after = [np.array([r[name] for r in runs]) for runs in (one, two)]
        gaps = [f"{gap:+.3f}" for gap in after - before]
        rows.append([source, f"{before.mean():.3f}", f"{after.mean():.3f}", *gaps])
    return Table(
        "two stages",
        "Validation loss with the same data throughout, and with other data in the decay, "
        "means of three seeds (`two-stage`).",
        ["validation text", "one stage", "two stages"]
        + [f"difference, seed {seed}" for seed in range(3)],
        rows,
    )


def by_seed(losses: dict) -> np.ndarray:
    """{(batch size, T, seed): loss} -> the mean loss of every seed."""
    seeds = sorted({seed for *_, seed in losses})
    return np.array(
        [np.mean([losses[key] for key in losses if key[2] == seed]) for seed in seeds]
    )


def ceiling_tables() -> list[Table]:
    decayed: dict = {}  # (warmup, lr_max) -> {(batch size, T, seed): loss}
    averaged, held, merged = {}, {}, {}
    for r in rows_in("ceiling-laptop"):
        cell = r["batch_size"], r["total_tokens"], r["seed"]
        if r["average"]:
            averaged[cell], held[cell] = r["average_val_loss"], r["val_loss"]
        else:
            setting = r["warmup_tokens"], r["lr_max"]
            decayed.setdefault(setting, {})[cell] = r["val_loss"]
    lines = (RESULTS / "ceiling-laptop/merged.jsonl").read_text("utf-8").splitlines()
    for r in map(json.loads, lines):
        cell = tuple(map(int, r["run"].split("-")))
        merged.setdefault(r["shape"], {})[cell] = r["val_loss"]

    usual = decayed[32_000, 0.02]
    minus = lambda losses: over_seeds(by_seed(losses) - by_seed(usual))
    ceilings = sorted({lr_max for _, lr_max in decayed})
    crossed = []
    for warmup in sorted({warmup for warmup, _ in decayed}):
        gaps = [minus(decayed[warmup, lr_max]) or "0" for lr_max in ceilings]
        crossed.append([f"{warmup:,}", *gaps])
    ends = {"decay": usual, "running average": averaged, "no decay": held}
    ends |= {f"merged as {shape}": losses for shape, losses in merged.items()}
    rows = [[name, f"{by_seed(x).mean():.3f}", minus(x)] for name, x in ends.items()]
    cells = (
        "width 64, batch sizes 2 and 8, T = 80k and 1.28M, three seeds (`ceiling-laptop`)"
    )
    return [
        Table(
            "warmup and ceiling",
            f"Loss of Power (fitted) minus that with a warmup of 32,000 tokens and a ceiling "
            f"of 0.02: {cells}.",
            ["warmup", *(f"lr_max {lr_max:g}" for lr_max in ceilings)],
            crossed,
        ),
        Table(
            "weights in place of a decay",
            f"What the last tenth of Power (fitted) is: {cells}.",
            ["in the last tenth", "loss", "minus the decay"],
            rows,
        ),
    ]


def steps(record: dict) -> int:
    """Optimizer steps of a run; a step that would end after total_tokens is not made."""
    ramp = record.get("batch_ramp") or f"{record['batch_size']}@0"
    stages = [stage.split("@") for stage in ramp.split(",")]
    tokens = count = 0
    while True:
        batch_size = [int(size) for size, start in stages if float(start) <= tokens][-1]
        tokens += batch_size * record["seq_len"]
        if tokens > record["total_tokens"]:
            return count
        count += 1


def ramp_table() -> Table:
    runs: dict = {}  # (T, name of the schedule) -> the records of its seeds
    for r in rows_in("ramp-laptop"):
        if r["seed"] < 100:  # the others tuned
            name = {"power": "Power", "wsd": "WSD"}[r["schedule"]]
            name += ", ramp" if r.get("batch_ramp") else ""
            runs.setdefault((r["total_tokens"], name), {})[r["seed"]] = r
    rows = []
    for (T, name), seeds in sorted(runs.items()):
        row = [f"{T:,}, {name}"]
        row.append(f"{statistics.mean(r['val_loss'] for r in seeds.values()):.3f}")
        for other in ("Power", "WSD"):
            others = runs[T, other]
            gaps = [seeds[seed]["val_loss"] - others[seed]["val_loss"] for seed in seeds]
            row.append(over_seeds(gaps))
        rows.append([*row, f"{steps(seeds[0]):,}"])
    return Table(
        "ramp",
        "A batch size that grows from 8 to 64 sequences, and one of 8, three seeds "
        "(`ramp-laptop`, width 64).",
        ["T, schedule", "loss", "minus Power", "minus WSD", "steps"],
        rows,
    )


def tables() -> list[Table]:
    return [
        laptop_table(),
        dtype_table(),
        recipe_table(),
        ceilings_table(),
        two_stage_table(),
        *ceiling_tables(),
        ramp_table(),
    ]


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("smaller.py", __doc__).parse_args(argv)
    print(*tables(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
