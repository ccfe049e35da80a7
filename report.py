"""What fit.py prints and draws for a sweep: its law, with the commands of runs that follow
it, the effect of width, or the best a and b of Power. compare.py reports a comparison.
"""

import json
import math
import shlex
import statistics
import sys
from operator import attrgetter
from pathlib import Path

import numpy as np

import fit
from compare import comparison
from config import FIELDS, TrainConfig, make_config, runtime_fields
from fit import Cell, Law, cells_of, jackknife, show
from records import STANDARD
from schedules import PAPER_LAW, PAPER_SEQ_LEN, unread
from tools import figures, files, flags


def report(rows: list[dict], out: Path, sweep: dict) -> None:
    """Report an experiment of sweep.py.

    sweep: what it wrote to sweep.json, {} without one.
    """
    experiment = sweep.get("experiment") or guess(rows)
    if experiment == "compare":
        comparison(rows, out)
    elif experiment == "power":
        report_power(rows, out)
    elif experiment == "transfer":
        report_transfer(rows, out)
    else:
        report_law(rows, out, sweep)


def guess(rows: list[dict]) -> str:
    """The experiment that made these rows. Raises UserError if none has their schedules."""
    schedules = {row["schedule"] for row in rows}
    if schedules >= {"cosine", "power", "wsd"}:
        return "compare"
    if schedules == {"power"}:
        return "power"
    if schedules != {"wsd"}:
        raise flags.UserError(
            f"no report for schedules {sorted(schedules)}; is the sweep running? "
            "Or choose one, as in --only schedule=wsd"
        )
    return "transfer" if with_and_without_mup(rows) else "wsd"


def with_and_without_mup(rows: list[dict]) -> bool:
    """Do some of the runs follow muP, and others not?"""
    return {STANDARD in row["shape"] for row in rows} == {True, False}


def read_sweep(folders: list[Path]) -> dict:
    """The sweep.json of a folder. {} if it has none, or for several folders."""
    path = folders[0] / "sweep.json"
    if len(folders) > 1 or not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def label(cell: Cell, field: str) -> str:
    """T or the batch size of a cell, in words."""
    if field == "T":
        return f"T = {figures.size(cell.T)}"
    return f"batch size {cell.batch_size:g}"


def middle_shape(cells: list[Cell]) -> list[Cell]:
    """The cells of one shape, in the middle between narrow and wide."""
    shapes = list(dict.fromkeys(cell.shape for cell in cells))
    middle = shapes[len(shapes) // 2]
    return [cell for cell in cells if cell.shape == middle]


# -- A sweep of WSD: the law -------------------------------------------------------------


def report_law(rows: list[dict], out: Path, sweep: dict) -> None:
    """Print the law and the next runs, write law.json, and draw the figures."""
    print_runs(rows, sweep)
    try:
        cells = fit.fitted_cells(rows)
    except flags.UserError:  # too few cells for a law
        for cell, x in fit.minima(cells_of(rows)):
            where = f"{cell.shape}, {label(cell, 'T')}, {label(cell, 'batch_size')}"
            print(f"{where}: best learning rate {2**x:.3g}")
        raise
    law = fit.as_json(cells, rows[0]) | {"flags": flags_of(rows)}
    print_law(cells)
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "law.json", law)
    print(f"\n{out}: law.json, valleys.png, law.png")
    print_next_runs(law, cells, out / "law.json")
    draw_valleys(out / "valleys.png", cells)
    draw_law(out / "law.png", cells, law["seq_len"])


def print_runs(rows: list[dict], sweep: dict) -> None:
    """Print how many runs and cells we used, why not all, and whether runs are missing."""
    cells = cells_of(rows)
    used = f"{len(fit.minima(cells))} of {len(cells)} cells used"
    print(f"{len(rows):,} runs; {used}; left out: {fit.reasons(cells) or 'none'}")
    diverged = sum(math.isinf(row["loss"]) for row in rows)
    if diverged:
        print(f"{diverged:,} runs diverged, and count as worse than all others")
    if sweep.get("finished") is False:
        print("the sweep is not finished; its command resumes it")
        return
    short = 0
    for cell in cells_of(rows, by_seed=True):
        points = fit.valley(cell)
        left = points.index(fit.lowest(points))
        right = len(points) - 1 - left
        short += min(left, right) < 3
    if short:
        print(
            f"{short} valleys have fewer than three learning rates on one side of the "
            "lowest loss; is the sweep finished?"
        )


def print_law(cells: list[Cell]) -> None:
    """Print the law, the readings of the papers, and a of every shape."""
    laws = jackknife(cells, fit.fit_law)
    b = fit.apply(attrgetter("b"), laws)
    q = fit.apply(attrgetter("q"), laws)
    s = round(fit.growth(cells), 2) + 0.0  # never -0.00
    expected = b.answer + (q.answer - 1) * s
    b_paper = fit.reading(cells, fit.paper_b, 3)
    b_step_law = fit.reading(cells, fit.step_law_b, 1)
    print("\nlr = a beta^q T^b, 95% intervals")
    if len(set().union(*(cell.losses for cell in cells))) == 1:
        print("(one seed: another one may move the law out of these intervals)")
    print(f"{'all cells':<29} b {show(b)}  q {show(q)}")
    print(f"{'paper, three best batches':<29} b {show(b_paper)}  q 1")
    print(f"    beta grows as T^{s:.2f} there, and b + (q - 1) {s:.2f} = {expected:.3f}")
    print(f"{'Step Law, best batch':<29} b {show(b_step_law)}")

    first = cells[0].shape
    for shape, log2_a in laws.answer.log2_a.items():

        def ratio(law: Law) -> float:
            """log2 of a over that of the first shape."""
            return law.log2_a.get(shape, math.nan) - law.log2_a.get(first, math.nan)

        times = show(fit.apply(ratio, laws), 2, log2=True)
        print(f"{shape}: a {2**log2_a:.3g}, {times} times the first")


def draw_law(path: Path, cells: list[Cell], seq_len: float) -> None:
    """The law of the shape with most minima, with a ring at the best batch sizes of every T."""
    shape = statistics.mode(cell.shape for cell in cells)
    law = fit.fit_law(cells)
    groups: dict = {}
    for cell in cells:
        if cell.shape == shape:
            line = law.log2_a[shape]
            line += law.b * math.log2(cell.T) + law.q * math.log2(cell.beta)
            points = groups.setdefault(label(cell, "T"), [])
            points.append(point(cell.batch_size, cell, line))
    three_best: dict = {}  # label of T -> (log2 of the batch size, x) of the three best
    for cell, x in fit.minima(fit.best_batches(cells, 3)):
        if cell.shape == shape:
            best = math.log2(cell.batch_size), x
            three_best.setdefault(label(cell, "T"), []).append(best)
    figures.draw_points(
        path,
        groups,
        figures.shades(groups, "tokens"),
        title="Rings: mean of the three best batch sizes for each T",
        xlabel=f"batch size (sequences of {seq_len:g} tokens), {shape}",
        best={name: np.mean(three, axis=0) for name, three in three_best.items()},
    )


def point(at: float, cell: Cell, line: float | None = None) -> tuple:
    """A point for figures.draw_points: the best learning rate of a cell and its standard error.

    For two seeds, the error reaches about as far as their separate minima. (95% of
    Student's t would be 13 times as much.) Without a line, the line goes through the
    point.
    """
    best = jackknife([cell], fit.mean_log2_lr)
    error, _ = fit.error_of(best)
    x = best.answer
    return math.log2(at), x, x - error, x + error, x if line is None else line


def draw_valleys(path: Path, cells: list[Cell]) -> None:
    """Valleys of the middle shape by T, and by batch size at the longest T."""
    some = middle_shape(cells)  # in order of T, then of batch size
    longest = [cell for cell in some if cell.T == some[-1].T]
    best = min(longest, key=fit.lowest_loss)
    by_T = [cell for cell in some if cell.batch_size == best.batch_size]
    panels = [
        panel_of_valleys(by_T, "T", "tokens", fixed="batch_size"),
        panel_of_valleys(longest, "batch_size", "batch size", fixed="T"),
    ]
    figures.draw_valleys(path, panels)


def panel_of_valleys(row: list[Cell], field: str, words: str, fixed: str) -> dict:
    """A panel of cells that differ only in `field`. The axis label has `fixed`.

    words: the name of `field` in the title.
    """
    first = row[0]
    last = row[-1]
    longer = getattr(last, field) / getattr(first, field)
    moved = 2 ** (fit.bottom(last)[0] - fit.bottom(first)[0])
    return dict(
        groups={label(cell, field): [valley_of(cell)] for cell in row},
        title=f"{longer:.0f}× the {words}, {moved:.2g}× the best learning rate",
        xlabel=f"learning rate ({first.shape}, {label(first, fixed)})",
        hue="tokens" if field == "T" else "batch size",
        log=True,
    )


def valley_of(cell: Cell) -> dict:
    """A valley for figures.draw_valleys: the points that the fit used, and the bottom."""
    lowest = fit.lowest_loss(cell)
    points = []
    for x, loss in fit.nearest(fit.valley(cell), cell.window):
        if math.isfinite(loss):
            points.append((x, loss - lowest))
    bottom, why_not = fit.bottom(cell)
    return dict(points=points, degree=cell.degree, bottom=None if why_not else bottom)


# -- The next runs -----------------------------------------------------------------------


def flags_of(rows: list[dict]) -> dict | None:
    """The fields that make a run of train.py like those of the widest shape.

    Without run length, batch size, learning rate and seed. None if rows lack some fields,
    as those of a table from elsewhere do.
    """
    # 1. The fields on which the runs agree, unless their preset has the same value
    widest = cells_of(rows)[-1].shape
    rows = [row for row in rows if row["shape"] == widest]
    first = rows[0]
    if not FIELDS.keys() <= first.keys():
        return None
    skip = {"preset", "schedule", "total_tokens", "batch_size", "lr", "seed", "data_seed"}
    skip |= {"final_eval_tokens"} | runtime_fields(first) | unread("wsd")
    if first["decay_share"] is not None:
        skip.add("decay_tokens")
    if first["data"] and "embedded" not in first["data"]:
        skip.add("tokenizer")  # the corpus has it
    preset = {"preset": first["preset"], "total_tokens": 10**15}
    usual = vars(make_config(**preset))
    found = {}
    for name in FIELDS.keys() - skip:
        values = {row[name] for row in rows}
        if len(values) == 1 and values != {usual[name]}:
            found[name] = first[name]

    # 2. Without those that follow from others, as n_ffn from n_embd
    for name in sorted(found):
        rest = {other: value for other, value in found.items() if other != name}
        follows = FIELDS[name].default is None
        if follows and vars(make_config(**preset | rest))[name] == found[name]:
            found = rest
    if first["preset"] != TrainConfig.preset:
        found["preset"] = first["preset"]
    return {name: found[name] for name in FIELDS if name in found}


def print_next_runs(law: dict, cells: list[Cell], path: Path) -> None:
    """Print the commands of runs four times as long as the longest."""
    T = 4 * law["total_tokens"][1]
    batch_size, why = advised_batch_size(cells, T)
    lr = fit.predict(law, T, batch_size * law["seq_len"])
    print(f"\nBatch size {batch_size:g}: {why}.")
    where = f"T = {figures.size(T)} and batch size {batch_size:g}"
    print(f"For {where}, the law has learning rate {lr:.2g}.")
    for line in advice(law, T, batch_size, law["seq_len"]):
        print(line)
    print(
        "for other values: python fit.py --predict --total_tokens T --batch_size B "
        f"--law {shlex.quote(str(path))}"
    )


def advised_batch_size(cells: list[Cell], T: float) -> tuple[float, str]:
    """The batch size for a run of T tokens, and why.

    We round up to a power of two, because a batch size that is a little too large costs
    less than the noise, and its run is faster. It is one within the sweep, because the
    law is not measured beyond.
    """
    batches = sorted({cell.batch_size for cell in cells})
    best = fit.best_batch(cells, T)
    if math.isfinite(best):
        batch_size = 2.0 ** math.ceil(round(best, 2))
        batch_size = min(max(batch_size, batches[0]), batches[-1])
        why = (
            f"the losses of the three best batch sizes of every T have their bottom at "
            f"{2**best:.3g} for T = {figures.size(T)}, and we round up"
        )
    else:
        last = max(cell.T for cell in cells)
        longest = [cell for cell in cells if cell.T == last]
        batch_size = min(longest, key=fit.lowest_loss).batch_size
        why = "it has the lowest loss at the longest T of the sweep"
    edges = {batches[0]: "smallest", batches[-1]: "largest"}
    if batch_size in edges:
        why += f"; this is the {edges[batch_size]} of the sweep, so try others beyond it"
    return batch_size, why


def advice(law: dict, T: float, batch_size: float, seq_len: float) -> list[str]:
    """Lines to read before a run follows a law, and its commands."""
    lines = []
    batch_tokens = batch_size * seq_len

    # 1. How sure is it?
    low, high = fit.band(law, T, batch_tokens)
    if low < high:
        lines.append(f"95% band of this learning rate: {low:.2g} to {high:.2g}")
    elif math.isnan(low) and "without_pairs" in law:
        lines.append("no 95% band, because the law needs all its batch sizes or seeds")
    for name, value in (("total_tokens", T), ("batch_tokens", batch_tokens)):
        if name in law and not law[name][0] <= value <= law[name][1]:
            low, high = map(figures.size, law[name])
            size = figures.size(value)
            lines.append(f"{name} {size} is outside the sweep ({low} to {high})")

    # 2. Which settings did the sweep have?
    had = [f"sequences of {law['seq_len']:g} tokens"]
    if law.get("warmup_tokens") is not None:
        had.append(f"a warmup of {law['warmup_tokens']:,} tokens")
    if law.get("fingerprint"):
        had.append(f"a text with fingerprint {law['fingerprint']}")
    lines.append(f"the sweep had {', '.join(had)}")
    if seq_len != law["seq_len"]:
        lines.append(f"it has no sequences of {seq_len:g} tokens; its beta counts tokens")

    # 3. Which runs follow it?
    if "total_tokens" in law:  # a law of fit.py
        lines += commands(law, T, batch_size, seq_len)
    return lines


def commands(law: dict, T: float, batch_size: float, seq_len: float) -> list[str]:
    """The commands of Power, WSD and a linear decay to 0 that follow a law.

    With the settings of the sweep, if all fields of train.py are known.
    """
    schedules = schedules_of(law, T, batch_size * seq_len)
    settings = law.get("flags")
    if settings is None:
        lines = [f"{name}: {as_flags(one)}" for name, one in schedules.items()]
        return ["schedules in the flags of train.py", *lines]
    run = {"total_tokens": f"{T:.15g}", "batch_size": f"{batch_size:g}"}
    if seq_len != law["seq_len"]:
        run["seq_len"] = f"{seq_len:g}"
    lines = []
    for name, schedule in schedules.items():
        lines.append(f"{name}:")
        lines.append(f"python train.py {as_flags(settings | run | schedule)}")
    return lines


def schedules_of(law: dict, T: float, batch_tokens: float) -> dict[str, dict]:
    """Fields of train.py for Power, WSD, and a linear decay to 0 over the whole run.

    The sweep measured nothing below its shortest T, and a much higher ceiling costs loss,
    so lr_max of Power is the learning rate of the law there. A linear decay to 0 has its
    best learning rate at twice that of WSD (1.8 to 2.3 times in our runs of all lengths).
    """
    lr = fit.predict(law, T, batch_tokens)
    ceiling = fit.predict(law, law["total_tokens"][0], batch_tokens)
    power = {
        "schedule": "power",
        "power_a": f"{law['a']:.6g}",
        "power_b": f"{law['b']:.5f}",
        "power_q": f"{law['q']:.5f}",
        "lr_max": f"{ceiling:.4g}",
    }
    wsd = {"schedule": "wsd", "lr": f"{lr:.4g}"}
    linear = {"schedule": "wsd", "lr": f"{2 * lr:.4g}"}
    linear |= {"decay_shape": "linear", "decay_share": 1, "decay_tokens": None}
    planned = {"WSD, which needs T": wsd, "linear to 0, which needs T": linear}
    # train.py has no Power that rises with n, or falls with the batch size
    return {"Power": power} | planned if law["b"] <= 0 <= law["q"] else planned


def as_flags(fields: dict) -> str:
    """{"n_layer": 2, "average": True} -> '--n_layer 2 --average', without None."""
    words = []
    for name, value in fields.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def report_prediction(args) -> None:
    """Print the learning rate for --predict, and the rest to standard error. Raises UserError."""
    law = PAPER_LAW | {"seq_len": PAPER_SEQ_LEN}
    if args.law:
        law = fit.read_law(args.law)
    seq_len = law["seq_len"] if args.seq_len is None else args.seq_len
    numbers = {
        "total_tokens": args.total_tokens,
        "batch_size": args.batch_size,
        "seq_len": seq_len,
    }
    for name, value in numbers.items():
        if value is None or not 0 < value < math.inf:
            raise flags.UserError(f"--{name} {value}: --predict needs a number above 0")
    # alone on standard output, so that lr=$(python fit.py --predict ...) works
    print(f"{fit.predict(law, args.total_tokens, args.batch_size * seq_len):.2g}")
    if args.law:
        for line in advice(law, args.total_tokens, args.batch_size, seq_len):
            print(line, file=sys.stderr)


# -- A sweep over widths, with and without muP -------------------------------------------


def width_of(shape: str) -> int:
    """'width 128, 8 experts' -> 128"""
    return int(shape.split()[1].strip(","))


def report_transfer(rows: list[dict], out: Path) -> None:
    """Print and draw the best learning rate of every width, with and without muP."""
    cells = cells_of(rows)
    if not with_and_without_mup(rows):
        raise flags.UserError(
            "all runs are with muP, or all without; is the sweep running? Or is --only "
            "too narrow?"
        )
    if len({cell.shape for cell in cells}) < len(cells):
        raise flags.UserError("several T or batch sizes; choose one with --only")
    where = f"{label(cells[0], 'T')}, {label(cells[0], 'batch_size')}"
    print(f"{where}; best learning rates")
    panels = []
    for title, standard in (("Without μP", True), ("With μP", False)):
        some = [cell for cell in cells if (STANDARD in cell.shape) == standard]
        names = [cell.shape.removesuffix(STANDARD) for cell in some]
        for name, cell in zip(names, some):
            best = jackknife([cell], fit.mean_log2_lr)
            print(f"{title:<11}{name:<10} {show(best, 4, log2=True)}")
        ratio = ratio_of(some[-1], some[0])
        print(f"{title:<11}{names[-1]} / {names[0]}: {show(ratio, 2, log2=True)}")

        wider = width_of(names[-1]) / width_of(names[0])
        times = 2**ratio.answer
        panel = dict(
            groups={name: [valley_of(cell)] for name, cell in zip(names, some)},
            title=f"{title}: {wider:g}× width, {times:.2f}× the best learning rate",
            xlabel=f"learning rate ({where})",
            hue="width",
            log=True,
        )
        panels.append(panel)
    figures.draw_valleys(out / "transfer.png", panels)
    print(f"\n{out}: transfer.png")


def ratio_of(wide: Cell, narrow: Cell) -> fit.Estimate:
    """log2 of the ratio of two best learning rates. It needs both, so we leave out seeds only."""

    def difference(cells: list[Cell]) -> float:
        best = [x for _, x in fit.minima(cells)]
        return best[0] - best[1] if len(best) == 2 else math.nan

    return jackknife([wide, narrow], difference)._replace(without_pairs=[])


# -- A sweep of Power: its best a and b --------------------------------------------------


def scans(rows: list[dict]) -> tuple[dict[str, list[Cell]], dict]:
    """Cells of the runs of Power that only differ in a or in b, and the common a and b.

    With a cell for every seed, and parabolas through their valleys. x is log2 a, or b.
    """
    a = statistics.mode(row["power_a"] for row in rows)
    b = statistics.mode(row["power_b"] for row in rows)
    over_a = [row for row in rows if row["power_b"] == b]
    over_b = [row for row in rows if row["power_a"] == a]
    found = {}
    for name, some in (("a", over_a), ("b", over_b)):
        cells = cells_of(some, by_seed=True, tuned=f"power_{name}")
        found[name] = [cell._replace(degree=2, window=5) for cell in cells]
    return found, {"a": a, "b": b}


def report_power(rows: list[dict], out: Path) -> None:
    """Print and draw the best a and b."""
    found, center = scans(rows)
    panels = []
    for name in ("a", "b"):
        if not fit.minima(found[name]):
            raise flags.UserError(f"no best {name}: {fit.reasons(found[name])}")
        print_best(name, found[name])
        panels.append(panel_of_best(name, found[name], center))
    figures.draw_valleys(out / "power-scan.png", panels)
    print(f"{out}: power-scan.png")


def value_at(name: str, x: float) -> float:
    """a or b from the x of a minimum, which is log2 a, or b."""
    return 2**x if name == "a" else x


def print_best(name: str, cells: list[Cell]) -> None:
    """Print the best a or b, a row for every T and a column for every batch size."""
    best: dict = {}  # (T, batch size) -> the best values, of all shapes and seeds
    every = []
    for cell, x in fit.minima(cells):
        best.setdefault((cell.T, cell.batch_size), []).append(value_at(name, x))
        every.append(value_at(name, x))
    batches = sorted({cell.batch_size for cell in cells})

    left_out = fit.reasons(cells) or "none"
    print(f"best {name}, mean over seeds; left out: {left_out}")
    print(f"{'T':>8} " + "".join(f"{f'batch {B:g}':>11}" for B in batches))
    for T in sorted({cell.T for cell in cells}):
        means = [np.mean(best.get((T, B), math.nan)) for B in batches]
        print(f"{figures.size(T):>8} " + "".join(f"{mean:11.3f}" for mean in means))
    mean = np.mean(every)
    used = f"{len(every)} of {len(cells)} valleys"
    print(f"{used}: mean {mean:.3f}, standard deviation {np.std(every):.3f}\n")


def panel_of_best(name: str, cells: list[Cell], center: dict) -> dict:
    """A panel with the valleys of the middle shape at the longest T."""
    longest = max(cell.T for cell in cells)
    some = [cell for cell in middle_shape(cells) if cell.T == longest]
    groups: dict = {}
    for cell in some:  # in order of batch size
        valley = valley_of(cell)
        groups.setdefault(label(cell, "batch_size"), []).append(valley)

    best = []
    for valleys in groups.values():
        x = [v["bottom"] for v in valleys if v["bottom"] is not None]
        best.append(value_at(name, np.mean(x)) if x else math.nan)
    other = "b" if name == "a" else "a"
    where = f"{other} = {center[other]:g}, T = {figures.size(longest)}, {some[0].shape}"
    return dict(
        groups=groups,
        title=f"The best {name} is {np.nanmin(best):.2g} to {np.nanmax(best):.2g}",
        xlabel=f"{name} ({where})",
        hue="batch size",
        log=name == "a",
        unit=1,
    )
