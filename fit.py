"""The law behind a sweep: best learning rates, their power law in T and batch size, and the paper's figures.

    python fit.py runs/wsd-quick                                       the law with intervals, law.json, figures
    python fit.py runs/power-quick                                     the same for a and b of the Power schedule
    python fit.py runs/wsd-quick --beyond runs/beyond-quick            does the law hold at 4 times the longest T?
    python fit.py runs/transfer-quick                                  how the best rate moves with the width
    python fit.py runs/compare-quick                                   the tables and figures of a comparison
    python fit.py runs/wsd-a --against runs/wsd-b                      two sweeps: how much their b differ
    python fit.py --predict --total_tokens 10e12 --batch_size 1024     the learning rate by the paper's law
    python fit.py --curves runs/laptop-power-1 runs/laptop-wsd-1       losses of any runs in one figure

The procedure, fixed before the runs in results/ were made:

1. A *cell* is a shape, a T and a batch size. Its best learning rate, of every seed by itself, is the
   vertex of a parabola through loss against log lr, at 5 rates: the best one measured and two on
   each side, in equal steps. A minimum is left out, and counted, if it is the first or last of its
   rates, if one of the five diverged or is not there, or if the vertex falls outside of them. 3 and 7
   rates are reported too, to see what the choice does.
2. The joint reading: least squares for log lr = log a(shape) + b log T + q log beta, over all minima.
3. The paper's reading: q = 1, so only gamma = lr / beta is left to explain; of each shape and T only
   the three batch sizes with the lowest loss; log gamma = log a + b log T. (The paper averages the
   three gammas before it takes the logarithm, we average logarithms.)
4. Intervals hold 95 % of 2,000 bootstrap draws: seeds and cells are drawn anew, with replacement,
   both at once. So they include the noise of a seed and how far cells lie from a straight line. (The
   T of one shape and batch size share a trunk, so their errors are related: drawing them together
   leaves the interval of b in results/wsd-laptop as it is, and makes that of q wider by 0.02 a side.)

Read `parabola`, then `Law` and `bootstrap`; the rest prints and draws. T counts tokens, beta
sequences of 4096 tokens, as in schedules.py.
"""

import argparse
import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from schedules import PAPER_SEQ_LEN, paper_batch_size
from tools.figures import COLORS, STYLE

PAPER = {"a": 4.6, "b": -0.51, "q": 1.0, "seq_len": PAPER_SEQ_LEN}  # equation 6 of the paper
WINDOW = 5

# ---------------------------------------------------------------------------------------------
# Records


def read_records(paths: list[Path]) -> list[dict]:
    """All runs under these folders, each once: records.jsonl of sweeps, record.json of single runs.

    Raises FileNotFoundError where there are none, ValueError where they cannot be compared.
    """
    records = []
    for path in paths:
        files = [path] if path.is_file() else sorted([*path.rglob("records.jsonl"), *path.rglob("record.json")])
        if not files:
            raise FileNotFoundError(f"{path}: no records there, it should be the folder of a sweep")
        for file in files:
            text = file.read_text(encoding="utf-8")
            for line in text.splitlines() if file.suffix == ".jsonl" else [text]:
                with contextlib.suppress(json.JSONDecodeError):  # torn by a power cut
                    records.append(json.loads(line))
    for name in THE_SAME:
        values = sorted({str(r[name]) for r in records if name in r})
        if len(values) > 1:
            raise ValueError(f"{' '.join(map(str, paths))}: runs with different {name} ({', '.join(values)}), they cannot be fitted together")
    # A sweep that has attention's scale both as muP wants it and otherwise is `transfer`: each width with and without muP
    standard = [not math.isclose(r.get("attention_multiplier", r["n_head"] / r["n_embd"]), r["n_head"] / r["n_embd"]) for r in records]
    records = [r | {"standard": other and not all(standard)} for r, other in zip(records, standard)]
    names = ("schedule", "batch_size", "total_tokens", "seed", "lr", "power_a", "power_b", "average")
    unique = {(shape_of(r), *(r.get(name, False) for name in names)): r for r in records}
    return list(unique.values())


# What all runs of a sweep have in common; where it differs, losses are no points of one curve
THE_SAME = ("fingerprint", "warmup_tokens", "seq_len", "n_layer", "base_width", "init_std", "m_emb", "weight_decay", "beta1", "beta2", "adam_eps",
            "grad_clip", "decay_shape", "min_lr_ratio", "lr_max", "router_aux_weight", "eval_tokens")  # fmt: skip


def shape_of(record: dict) -> str:
    return f"width {record['n_embd']}" + (f", {record['n_expert']} experts" if record["n_expert"] else "") + ", standard" * record.get("standard", False)


# ---------------------------------------------------------------------------------------------
# From losses to minima


class Minimum(NamedTuple):
    shape: str
    T: int
    batch_size: int
    beta: float
    seed: int
    loss: float  # the lowest one measured
    x: float  # where it lies, log2 of the learning rate (of a, or b itself, in a scan of Power)
    why_not: str  # why it is left out, or nothing


def parabola(points: list[tuple[float, float]], window: int = WINDOW) -> tuple[float, str]:
    """Points (x, loss), loss inf where it diverged -> (x of the minimum, why it cannot be used, or nothing)."""
    points = sorted(points)
    best = min(range(len(points)), key=lambda i: points[i][1])
    near = points[max(0, best - window // 2) : best + window // 2 + 1]
    if best in (0, len(points) - 1):
        return points[best][0], "at an edge"
    if math.isinf(max(points[best - 1][1], points[best + 1][1])):
        return points[best][0], "beside a diverged run"
    if len(near) < window or np.ptp(np.diff([x for x, _ in near])) > 0.01 or math.isinf(max(y for _, y in near)):
        return points[best][0], f"fewer than {window} rates in equal steps"
    x, y = np.array(near).T
    curvature, slope, _ = np.polyfit(x - points[best][0], y, 2)
    vertex = points[best][0] - slope / (2 * curvature) if curvature > 0 else math.inf
    return (vertex, "") if x[0] <= vertex <= x[-1] else (points[best][0], "no valley")


def minima(records: list[dict], window: int = WINDOW, of: Callable[[dict], float] = lambda r: math.log2(r["lr"])) -> list[Minimum]:
    """The best learning rate of every shape, T, batch size and seed."""
    groups: dict = {}
    for r in records:
        beta = paper_batch_size(r["batch_size"] * r["seq_len"])
        key = shape_of(r), r["total_tokens"], r["batch_size"], beta, r["seed"]
        groups.setdefault(key, []).append((of(r), math.inf if r["diverged"] else r["val_loss"]))
    order = lambda key: (len(key[0]), key)  # narrow to wide
    return [Minimum(*key, min(y for _, y in groups[key]), *parabola(groups[key], window)) for key in sorted(groups, key=order)]


def cost_beside(records: list[dict], of: Callable[[dict], float], step: float) -> tuple[float, float]:
    """Mean loss above the lowest one measured, of the runs a step below the best value and a step above it (nats)."""
    cells: dict = {}
    for r in records:
        cells.setdefault((shape_of(r), r["total_tokens"], r["batch_size"], r["seed"]), []).append((of(r), loss_of(r)))
    off: dict = {-1: [], 1: []}
    for points in cells.values():
        best, lowest = min(points, key=lambda point: point[1])
        for side, costs in off.items():
            costs += [y - lowest for x, y in points if math.isfinite(y) and abs(x - best - side * step) < 0.01 * step]
    return tuple(float(np.mean(costs)) if costs else math.nan for costs in off.values())


# ---------------------------------------------------------------------------------------------
# From minima to a law


def bootstrap(points: list[Minimum], draws: int = 2000) -> np.ndarray:
    """Weights of the points, [1 + draws, n]: all 1 first; then how often seed and cell were drawn, with replacement."""
    rng = np.random.default_rng(0)
    weights = np.ones((draws, len(points)))
    for part in (lambda p: p.seed, lambda p: (p.shape, p.T, p.batch_size)):
        names, index = np.unique([str(part(p)) for p in points], return_inverse=True)
        weights *= rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)[:, index]
    return np.vstack([np.ones(len(points)), weights])


def regress(points: list[Minimum], weights: np.ndarray, shapes: list[list[str]], free_q: bool) -> np.ndarray:
    """Weighted least squares of log2 lr = log2 a + b log2 T + q log2 beta, for every row of weights.

    shapes: the shapes that share an a. -> [rows, len(shapes) + 2]: log2 a of each group, b, q (1 if
    not free). Rows that do not determine them, as some draws from few cells do not, are NaN.
    """
    T, beta, y = np.array([(math.log2(p.T), math.log2(p.beta), p.x) for p in points]).T
    X = np.array([[p.shape in group for p in points] for group in shapes] + [T] + [beta] * free_q, dtype=float).T  # [n, k]
    y = y if free_q else y - beta
    A = np.einsum("rn,ni,nj->rij", weights, X, X)
    solved = np.full(A.shape[:2], math.nan)
    good = np.linalg.matrix_rank(A) == X.shape[1]
    solved[good] = np.linalg.solve(A[good], np.einsum("rn,ni,n->ri", weights, X, y)[good][..., None])[..., 0]
    return solved if free_q else np.column_stack([solved, np.where(good, 1.0, math.nan)])


class Law(NamedTuple):
    """lr = a * beta^q * T^b: estimates, and all bootstrap draws behind them, [1 + draws]."""

    a: np.ndarray
    b: np.ndarray
    q: np.ndarray
    a_of: dict  # shape -> draws of its own a


def joint_law(found: list[Minimum]) -> Law:
    """One regression for all minima; a is the geometric mean of the shapes' own. Raises ValueError where they do not determine it."""
    points = usable(found)
    shapes = list(dict.fromkeys(m.shape for m in points))
    solved = regress(points, bootstrap(points), [[shape] for shape in shapes], free_q=True)
    if not np.isfinite(solved[0]).all():
        raise ValueError(f"{len(points)} usable minima do not determine a, b and q ({reasons(found)}); is the sweep still running?")
    log_a, b, q = solved[:, :-2], solved[:, -2], solved[:, -1]
    return Law(2 ** log_a.mean(axis=1), b, q, dict(zip(shapes, 2**log_a.T)))


def slopes(found: list[Minimum]) -> dict[str, np.ndarray]:
    """shape -> draws of its own b, where each has a, b and q to itself; drawn together, so that they can be subtracted."""
    points = usable(found)
    weights = bootstrap(points)
    by_shape = {shape: [i for i, m in enumerate(points) if m.shape == shape] for shape in dict.fromkeys(m.shape for m in points)}
    return {shape: regress([points[i] for i in mine], weights[:, mine], [[shape]], free_q=True)[:, -2] for shape, mine in by_shape.items()}


def paper_law(found: list[Minimum], shape: str | None = None) -> Law:
    """q = 1, the three best batch sizes of each shape and T, one a for all shapes (or for the one that is asked for)."""
    points = [m for m in best_three(usable(found)) if shape in (None, m.shape)]
    log_a, b, q = regress(points, bootstrap(points), [[m.shape for m in points]], free_q=False).T
    return Law(2**log_a, b, q, {})


def usable(found: list[Minimum]) -> list[Minimum]:
    """Raises ValueError where no law can be fitted to what is left."""
    points = [m for m in found if not m.why_not]
    if not points:
        raise ValueError(f"all {len(found)} minima are unusable: {reasons(found)}")
    for name, what in (("T", "budget T"), ("beta", "batch size")):
        if len({getattr(m, name) for m in points}) < 2:
            raise ValueError(f"usable minima for one {what} only, a law needs two or more" + (f" ({reasons(found)})" if len(points) < len(found) else ""))
    return points


def reasons(found: list[Minimum]) -> str:
    return ", ".join(f"{n} {why}" for why, n in Counter(m.why_not for m in found if m.why_not).items())


def best_three(points: list[Minimum]) -> list[Minimum]:
    """Those of the three batch sizes with the lowest loss, mean over seeds, for each shape and T."""
    losses: dict = {}
    for m in points:
        losses.setdefault((m.shape, m.T), {}).setdefault(m.batch_size, []).append(m.loss)
    best = {cell: sorted(by_batch, key=lambda B: np.mean(by_batch[B]))[:3] for cell, by_batch in losses.items()}
    return [m for m in points if m.batch_size in best[m.shape, m.T]]


def interval(draws: np.ndarray) -> tuple[float, float]:
    return tuple(np.nanpercentile(draws[1:], [2.5, 97.5]).tolist()) if np.isfinite(draws[1:]).any() else (math.nan, math.nan)


def show(draws: np.ndarray, digits: int = 3) -> str:
    low, high = interval(draws)
    return f"{draws[0]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def predict(law: dict, total_tokens: float, batch_tokens: float) -> float:
    """Best constant learning rate of a WSD run, equation 6 of the paper with a free exponent of beta."""
    return law["a"] * paper_batch_size(batch_tokens) ** law["q"] * total_tokens ** law["b"]


# ---------------------------------------------------------------------------------------------
# What the records say: WSD


def report_wsd(records: list[dict], out: Path, beyond: list[dict] = []) -> None:
    """Print the law by both readings, write law.json and the figures into `out`. beyond: a search outside of the grid."""
    found = minima(records)
    left_out = sum(bool(m.why_not) for m in found)
    print(f"{len(records):,} runs, {len(found)} minima" + (f", {left_out} of them left out: {reasons(found)}" if left_out else ""))
    joint, paper = joint_law(found), paper_law(found)

    print("\nlr = a beta^q T^b, 95 % intervals over seeds and cells")
    print(f"{'rates':>7}  {'joint reading: b':<25} {'q':<22} paper's reading (q = 1): b")
    for window in (3, 5, 7):
        try:
            again = minima(records, window)
            one, other = joint_law(again), paper_law(again)
            print(f"{window:7d}  {show(one.b):<25} {show(one.q):<22} {show(other.b)}")
        except ValueError as too_few:
            print(f"{window:7d}  {too_few}")
    for name, draws, values in (("b", joint.b, {"the paper's": -0.51, "Bjorck's": -0.32}), ("q", joint.q, {"the paper's": 1, "the root's": 0.5})):
        low, high = interval(draws)
        where = [f"{whose} {value:g} lies {'inside' if low <= value <= high else 'outside'}" for whose, value in values.items()]
        print(f"{name}, joint, {WINDOW} rates: {', '.join(where)}")

    print("a rate half of the best measured one, and twice it: {:.3f} and {:.3f} nats above it".format(*cost_beside(records, lambda r: math.log2(r["lr"]), 1)))
    first, own = next(iter(joint.a_of)), slopes(found)
    for shape, a in joint.a_of.items():
        line = f"{shape}: a = {a[0]:.3g}"
        if len(own) > 1:
            line += f", b alone {show(own[shape], 2)}"
        if shape != first:
            line += f"; a {show(a / joint.a_of[first], 2)} times {first}'s, b alone {show(own[shape] - own[first], 2)} beside it"
        print(line)

    law = {
        "a": joint.a[0], "b": joint.b[0], "q": joint.q[0], "a_interval": interval(joint.a), "b_interval": interval(joint.b), "q_interval": interval(joint.q),
        "a_paper": paper.a[0], "b_paper": paper.b[0], "b_paper_interval": interval(paper.b), "rule": f"parabola through {WINDOW} rates, 2000 draws of seeds and cells",
        "seq_len": records[0]["seq_len"], "warmup_tokens": records[0]["warmup_tokens"], "fingerprint": records[0]["fingerprint"],
    }  # fmt: skip
    (out / "law.json").write_text(json.dumps(law, indent=1) + "\n")
    for m in minima(beyond):
        rate = predict(law, m.T, m.beta * PAPER_SEQ_LEN)
        x, y = np.array(sorted((math.log2(r["lr"]), loss_of(r)) for r in beyond if (shape_of(r), r["total_tokens"], r["batch_size"], r["seed"]) == (m.shape, m.T, m.batch_size, m.seed))).T
        cost = np.interp(math.log2(rate), x, y) - m.loss
        print(f"\nbeyond the grid: {m.shape}, T = {size(m.T)}, batch {m.batch_size}: the law says {rate:.4f}, a search finds {2**m.x:.4f}"
              f"{f' ({m.why_not})' if m.why_not else ''}; loss {m.loss + cost:.4f} there, {m.loss:.4f} at its best, {cost / m.loss:+.2%}")  # fmt: skip
    best = min((r for r in records if not r["diverged"]), key=lambda r: r["val_loss"])
    T, names = 4 * best["total_tokens"], ("preset", "data", "n_layer", "n_embd", "n_head", "n_ffn", "seq_len", "base_width", "warmup_tokens", "dtype", "batch_size")
    flags = " ".join(f"--{name} {best[name]}" for name in names if best.get(name) is not None) + f" --total_tokens {T}"
    print(f"\nthe best run, with 4 times its tokens, under WSD and under Power:\npython train.py {flags} --schedule wsd --lr {predict(law, T, best['batch_size'] * best['seq_len']):.3g}")
    print(f"python train.py {flags} --schedule power --power_a {paper.a[0]:.3g} --power_b {paper.b[0]:.3g}")
    for name, draw in (("valleys", draw_valleys), ("batch", draw_batches), ("gamma", draw_gamma)):
        draw(out / f"{name}.png", records, found, joint, paper)
    draw_law(out / "law.png", records, found, joint, [m for m in minima(beyond) if not m.why_not])
    print()
    report_price(records, {}, out)
    print(f"\n{out}: law.json, valleys.png, batch.png, gamma.png, law.png, price.png")


def report_difference(records: list[dict], others: list[dict]) -> None:
    """b and q of two sweeps in the cells and seeds that both have, and the difference of the two, drawn together."""
    if records[0]["fingerprint"] != others[0]["fingerprint"]:
        raise ValueError(f"--against: another corpus, fingerprint {others[0]['fingerprint']} and not {records[0]['fingerprint']}")
    cell = lambda m: (m.shape, m.T, m.batch_size, m.seed)
    ours, theirs = ({cell(m): m for m in minima(some) if not m.why_not} for some in (records, others))
    common = sorted(ours.keys() & theirs.keys())
    one, other = (joint_law([some[key] for key in common]) for some in (ours, theirs))
    print(f"{len(common)} cells and seeds that both have; warm-up {records[0]['warmup_tokens']:,} against {others[0]['warmup_tokens']:,} tokens")
    for name in ("b", "q"):
        x, y = getattr(one, name), getattr(other, name)
        print(f"{name}: {show(x)} against {show(y)}, difference {show(x - y)}")


def report_transfer(records: list[dict], out: Path) -> None:
    """Print the best rate of every width, with and without muP, and what the narrowest one's costs the others; draw them into `out`."""
    kinds = {"muP": [r for r in records if not r["standard"]], "standard": [r for r in records if r["standard"]]}
    print(f"T = {size(records[0]['total_tokens'])}, batch {records[0]['batch_size']}; cost: loss at the narrowest width's best rate, above the lowest\n")
    print(f"{'':<10}{'width':>6}  {'best rate, each seed':<32}{'cost':>8}")
    for kind, some in kinds.items():
        loss: dict = {}  # width -> rate -> losses
        for r in some:
            loss.setdefault(r["n_embd"], {}).setdefault(r["lr"], []).append(loss_of(r))
        mean = {width: {lr: np.mean(losses) for lr, losses in by_rate.items()} for width, by_rate in loss.items()}
        transferred = min(mean[min(mean)], key=mean[min(mean)].get)
        for width in sorted(mean):
            x, y = np.array(sorted((math.log2(lr), value) for lr, value in mean[width].items())).T
            best = [2**m.x for m in minima([r for r in some if r["n_embd"] == width]) if not m.why_not]
            cost = np.interp(math.log2(transferred), x, y) - min(y)
            beyond = " or more" if not x[0] <= math.log2(transferred) <= x[-1] else ""
            print(f"{kind:<10}{width:6d}  {', '.join(f'{lr:.4f}' for lr in best):<32}{cost:8.4f}{beyond}")
    draw_transfer(out / "transfer.png", kinds)
    print(f"\n{out}: transfer.png")


# ---------------------------------------------------------------------------------------------
# What the records say: Power


def scans(records: list[dict]) -> dict[str, list[dict]]:
    """The runs that differ in b alone, at the a that most of them have, and the other way round."""
    centre = {name: Counter(r[name] for r in records).most_common(1)[0][0] for name in ("power_a", "power_b")}
    return {"a": [r for r in records if r["power_b"] == centre["power_b"]], "b": [r for r in records if r["power_a"] == centre["power_a"]]}


KNOB = {"a": lambda r: math.log2(r["power_a"]), "b": lambda r: r["power_b"]}


def report_power(records: list[dict], out: Path) -> None:
    """Print where the best a and b lie for every T and batch size; draw the figures into `out`."""
    found = {name: minima(some, of=KNOB[name]) for name, some in scans(records).items()}
    for name, some in found.items():
        good = [m for m in some if not m.why_not]
        budgets, batches = sorted({m.T for m in some}), sorted({m.batch_size for m in some})
        if not good:
            print(f"no best {name}: {reasons(some)}\n")
            continue
        at = lambda **where: [m.x if name == "b" else 2**m.x for m in good if all(getattr(m, k) == v for k, v in where.items())]
        print(f"best {name}, mean over seeds" + (f" ({reasons(some)})" if len(good) < len(some) else ""))
        print(f"{'T':>8} " + "".join(f"{f'batch {B}':>11}" for B in batches))
        for T in budgets:
            print(f"{size(T):>8} " + "".join(f"{np.mean(at(T=T, batch_size=B)) if at(T=T, batch_size=B) else math.nan:11.3f}" for B in batches))
        x = np.array(at())
        print(f"all: mean {x.mean():.3f}, standard deviation {x.std():.3f}, from {x.min():.3f} to {x.max():.3f}, {len(x)} minima")
        step, text = (1, "half of the best a, and twice it") if name == "a" else (0.06, "0.06 below the best b, and above it")
        print("{}: {:.3f} and {:.3f} nats above its loss\n".format(text, *cost_beside(some, KNOB[name], step)))
    if not any(m.why_not == "" for some in found.values() for m in some):
        raise ValueError(f"no best a or b: {reasons(found['a'] + found['b'])}")
    draw_power(out / "power.png", records, found)
    has_b = any(m.why_not == "" for m in found["b"])
    if has_b:
        draw_best_b(out / "best_b.png", found["b"])
    print(f"{out}: power.png" + ", best_b.png" * has_b)


# ---------------------------------------------------------------------------------------------
# What the records say: a comparison

TUNING = 100  # runs with this seed or a higher one tuned the schedules; sweep.py made them first


def kind_of(record: dict) -> str:
    """Its schedule; "ours" for Power with another b than the paper's, one that was measured at this scale."""
    return "ours" if record["schedule"] == "power" and record["power_b"] != PAPER["b"] else record["schedule"]


def tuned(records: list[dict], kind: str) -> tuple[float, str]:
    """The value that the trials of a kind chose, and a sentence about them."""
    trials: dict = {}
    for r in records:
        if r["seed"] >= TUNING and kind_of(r) == kind:
            trials.setdefault(r[KNOBS[kind]], []).append(loss_of(r))
    if not trials:
        raise ValueError(f"no runs that tuned {kind}, seeds from {TUNING} on")
    best = min(trials, key=lambda value: np.mean(trials[value]))
    edge = ", at the edge of its trials" if best in (min(trials), max(trials)) else ""
    return best, f"{kind}: {KNOBS[kind]} {best:g}, best of {len(trials)}{edge}"


def loss_of(record: dict, name: str = "val_loss") -> float:
    return math.inf if record["diverged"] else record[name]


KNOBS = {"power": "power_a", "ours": "power_a", "wsd": "lr", "cosine": "lr"}  # what was tuned
# Line -> (kind, p, averaged): the tuned value, times (batch / the batch it was tuned with)^p. Power's rate has one
# power of the batch by itself; half of it is taken back where it shall be ∝ √batch, as in the law that we measured.
LINES = {
    "Power": ("power", 0.0, False), "Power, averaged": ("power", 0.0, True), "Power, rate ∝ √batch": ("power", -0.5, False),
    "Power, our law": ("ours", -0.5, False), "Power, our law, averaged": ("ours", -0.5, True),
    "WSD": ("wsd", 0.0, False), "WSD, rate ∝ √batch": ("wsd", 0.5, False), "WSD, rate ∝ batch": ("wsd", 1.0, False),
    "cosine": ("cosine", 0.0, False), "cosine, rate ∝ √batch": ("cosine", 0.5, False), "cosine, rate ∝ batch": ("cosine", 1.0, False),
}  # fmt: skip


def comparison(records: list[dict]) -> tuple[dict, list[str]]:
    """-> {line: {cell: {seed: loss}}} of the cells (shape, T, batch size) that have all their runs, and what the tuning chose.

    The floor: WSD at the rate that was the best with seed 0. Raises ValueError as long as there is no such cell.
    """
    compared = [r for r in records if r["seed"] < TUNING]
    kinds = {kind: tuned(records, kind) for kind in KNOBS if kind != "ours" or "ours" in map(kind_of, records)}
    batch, seeds = next(r["batch_size"] for r in records if r["seed"] >= TUNING), {r["seed"] for r in compared}
    lines: dict = {line: {} for line, (kind, *_) in LINES.items() if kind in kinds} | {"floor": {}}
    searched: dict = {}
    for r in compared:
        cell, kind, average = (shape_of(r), r["total_tokens"], r["batch_size"]), kind_of(r), r.get("average", False)
        for line in lines.keys() - {"floor"}:
            its_kind, p, averaged = LINES[line]
            if (kind, average) == (its_kind, averaged) and math.isclose(r[KNOBS[kind]], kinds[kind][0] * (r["batch_size"] / batch) ** p, rel_tol=0.01):
                lines[line].setdefault(cell, {})[r["seed"]] = loss_of(r, "average_val_loss" if averaged else "val_loss")
        if kind == "wsd":
            searched.setdefault(cell, []).append(r)
    for cell, runs in searched.items():
        lr = min((r for r in runs if r["seed"] == 0), key=loss_of, default={"lr": None})["lr"]
        lines["floor"][cell] = {r["seed"]: loss_of(r) for r in runs if r["lr"] == lr}
    whole = [cell for cell in lines["Power"] if all(seeds == by_cell.get(cell, {}).keys() for by_cell in lines.values())]
    whole.sort(key=lambda cell: (len(cell[0]), cell))  # narrow to wide, the mixture last
    if not whole:
        raise ValueError("no cell of the comparison has all its runs; is the sweep still running?")
    return {line: {cell: by_cell[cell] for cell in whole} for line, by_cell in lines.items()}, [said for _, said in kinds.values()]


def above(lines: dict, line: str, cells: list | None = None) -> dict[int, np.ndarray]:
    """seed -> loss of a line above the floor with the same seed, in each cell.

    Without seed 0, if there are others: its noise has chosen the floor's rates, so its floor is too low.
    """
    cells = list(lines["floor"]) if cells is None else cells
    seeds = sorted(lines["floor"][cells[0]])
    return {seed: np.array([lines[line][cell][seed] - lines["floor"][cell][seed] for cell in cells]) for seed in seeds[1:] or seeds}


def report_compare(records: list[dict], out: Path) -> None:
    """Print the tables, in Markdown; draw the figures into `out`."""
    lines, said = comparison(records)
    first = next(r for r in records if r["seed"] >= TUNING)
    print(f"tuned at {shape_of(first)}, T = {size(first['total_tokens'])}, batch {first['batch_size']}:", *said, sep="\n")
    cells, tuned_batch = list(lines["floor"]), first["batch_size"]
    seeds = len(lines["floor"][cells[0]])
    print("\nheld-out loss in nats, mean" + f" ± standard deviation over {seeds} seeds" * (seeds > 1) + "; bold: the lowest, the floor aside")
    for shape, batch in dict.fromkeys((shape, batch) for shape, _, batch in cells):
        budgets = sorted(T for s, T, b in cells if (s, b) == (shape, batch))
        print(f"\n| {shape}, batch {batch}: T = | " + " | ".join(map(size, budgets)) + " |\n|---" + "|---" * len(budgets) + "|")
        losses = {line: [list(lines[line][shape, T, batch].values()) for T in budgets] for line in lines if batch != tuned_batch or "rate" not in line}
        lowest = np.min([np.mean(losses[line], axis=1) for line in losses if line != "floor"], axis=0)
        for line, by_T in losses.items():
            texts = [f"{np.mean(some):.3f}" + (f" ± {np.std(some, ddof=1):.3f}" if seeds > 1 else "") for some in by_T]
            print(f"| {line} | " + " | ".join(f"**{text}**" if line != "floor" and np.mean(some) == low else text for text, some, low in zip(texts, by_T, lowest)) + " |")
    for kind in ("dense", "mixture of experts"):
        some = [cell for cell in cells if ("experts" in cell[0]) == (kind != "dense")]
        if not some:
            continue
        print(f"\n| {kind}, {len(some)} cells | loss | perplexity | above the floor, mean (of each seed) | of the floor | worst cell |\n|---|---|---|---|---|---|")
        mean = {line: np.mean([np.mean(list(by_cell[cell].values())) for cell in some]) for line, by_cell in lines.items()}
        for line, loss in mean.items():
            by_seed = above(lines, line, some)
            cost = np.mean(list(by_seed.values()), axis=0)
            each = ", ".join(f"{d.mean():+.3f}" for d in by_seed.values())
            shape, T, batch = some[int(cost.argmax())]
            where = f"{cost.max():+.3f} ({shape}, T = {size(T)}, batch {batch})" if line != "floor" else ""
            print(f"| {line} | {loss:.3f} | {math.exp(loss):.3f} | {cost.mean():+.4f} ({each}) | {cost.mean() / mean['floor']:+.2%} | {where} |")
    if seeds > 1:
        print("above the floor: without seed 0, which has chosen the floor's rates")
    print("\none run, stopped anywhere, against a cosine planned for each T, its rate ∝ √batch: all cells, and the worst one")
    for line in (line for line in lines if line.startswith("Power")):
        ratios = [np.mean(list(lines[line][cell].values())) / np.mean(list(lines["cosine, rate ∝ √batch"][cell].values())) - 1 for cell in cells]
        print(f"{line:<28}{np.mean(ratios):+8.2%}{max(ratios):+8.2%}")
    print()
    draw_compare(out / "compare.png", lines, tuned_batch)
    draw_anytime(out / "anytime.png", lines, records, tuned_batch)
    report_price(records, {f"{line}, tuned in one cell": lines[line] for line in ("WSD", "Power", "Power, our law") if line in lines}, out)
    print(f"\n{out}: compare.png, anytime.png, price.png")


# ---------------------------------------------------------------------------------------------
# The price of not knowing


RULES = {  # what is known -> (the features of a linear model of log2 lr, q where it is given)
    "nothing: one rate for all": (lambda m, _: [1], 0),
    "T: a rate for each": (lambda m, every: [m.T == T for T in every["T"]], 0),
    "the batch size: a rate for each": (lambda m, every: [m.batch_size == B for B in every["batch_size"]], 0),
    "both, rate ∝ batch": (lambda m, _: [1, math.log2(m.T)], 1),
    "both, rate ∝ √batch": (lambda m, _: [1, math.log2(m.T)], 0.5),
    "both, free exponents": (lambda m, _: [1, math.log2(m.T), math.log2(m.beta)], 0),
}


def price(records: list[dict], lines: dict) -> tuple[dict[str, np.ndarray], int]:
    """What a rule for the learning rate costs: {rule: loss above the lowest one measured, for each cell}, and how many cells.

    A rule's constants are fitted to the minima of all other cells. Its rate in a cell is looked up
    among the measured losses there, means over the seeds that were searched, on straight lines
    between neighbouring rates; beyond the outermost one that one's counts.
    lines: losses of more rules, {name: {cell: {seed: loss}}}.
    """
    wsd = [r for r in records if r["schedule"] == "wsd" and r["seed"] < TUNING]
    found = usable(minima(wsd))
    searched: dict = {}  # cell -> the seeds that have a minimum there
    for m in found:
        searched.setdefault((m.shape, m.T, m.batch_size), {})[m.seed] = {}
    for r in wsd:
        cell = shape_of(r), r["total_tokens"], r["batch_size"]
        if r["seed"] in searched.get(cell, ()):
            searched[cell][r["seed"]][math.log2(r["lr"])] = loss_of(r)
    valleys = {}
    for cell, by_seed in searched.items():
        rates = sorted(set.intersection(*map(set, by_seed.values())))
        if len(rates) >= WINDOW:
            valleys[cell] = rates, np.mean([[losses[x] for x in rates] for losses in by_seed.values()], axis=0)
    found = [m for m in found if (m.shape, m.T, m.batch_size) in valleys]
    every = {name: sorted({getattr(m, name) for m in found}) for name in ("T", "batch_size")}
    costs: dict = {}
    for rule, (features, q) in RULES.items():
        X = np.array([features(m, every) for m in found], dtype=float)
        y = np.array([m.x - q * math.log2(m.beta) for m in found])
        for cell, (rates, losses) in valleys.items():
            here = np.array([(m.shape, m.T, m.batch_size) == cell for m in found])
            solution = np.linalg.lstsq(X[~here], y[~here], rcond=None)[0]
            m = found[here.argmax()]
            cost = np.interp(X[here.argmax()] @ solution + q * math.log2(m.beta), rates, losses) - min(losses)
            costs.setdefault(rule, []).append(cost)
    for name, line in lines.items():
        there = [cell for cell in valleys if cell in line and searched[cell].keys() <= line[cell].keys()]
        costs[name] = [np.mean([line[cell][seed] for seed in searched[cell]]) - min(valleys[cell][1]) for cell in there]
    return {rule: np.array(cost) for rule, cost in costs.items() if cost}, len(valleys)


def report_price(records: list[dict], lines: dict, out: Path) -> None:
    costs, n = price(records, lines)
    print(f"the price of not knowing, in nats above the best measured loss; {n} cells\n{'what the rate depends on':<40}{'mean':>8}{'worst':>8}")
    for rule, cost in costs.items():
        print(f"{rule:<40}{cost.mean():8.4f}{cost.max():8.4f}" + (f"   ({len(cost)} cells)" if len(cost) != n else ""))
    draw_price(out / "price.png", costs)


# ---------------------------------------------------------------------------------------------
# Pictures


def size(tokens: float) -> str:
    """131072 -> '131k'"""
    unit, letter = next(((u, c) for u, c in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if tokens >= 0.9995 * u), (1, ""))
    return f"{tokens / unit:.3g}{letter}"


def shades(values) -> dict:
    """A colour for each of some values in order, all dark enough to be seen on white."""
    import matplotlib

    values = sorted(set(values))
    return {value: matplotlib.colormaps["viridis"](0.58 * i / max(1, len(values) - 1))[:3] for i, value in enumerate(values)}


def ink(color) -> tuple:
    return tuple(0.72 * channel for channel in color)  # text has to be darker than a line


def spread(heights: list[float], gap: float) -> list[float]:
    """Heights for labels: each near its own, in the same order, no two closer than `gap`."""
    order, placed, floor = sorted(range(len(heights)), key=heights.__getitem__), [0.0] * len(heights), -math.inf
    for i in order:
        placed[i] = floor = max(heights[i], floor + gap)
    shift = sum(placed) / len(placed) - sum(heights) / len(heights)
    return [y - shift for y in placed]


def ticks(axis, values, text: Callable[[float], str], finest: float = 1) -> None:
    """Ticks of an axis in log2 units, from the first value on in steps that leave at most seven of them."""
    low, high = min(values), max(values)
    step = next(step for step in (finest, 1, 2, 3, 4, 6, 8, 12, 99) if (high - low) / step <= 6)
    at = [low + k * step for k in range(math.floor((high - low) / step + 0.01) + 1)]
    axis.set_ticks(at, [text(2**x) for x in at])


def save(path: Path, height: float, panels: int, draw: Callable, **layout) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(fname=STYLE):
        fig = Figure(figsize=(5, height))
        draw(*fig.subplots(panels, 1, squeeze=False, **layout)[:, 0])
        fig.savefig(path)


def rate_text(lr: float) -> str:
    return f"{lr:.2g}"


def middle_shape(found: list[Minimum]) -> str:
    shapes = list(dict.fromkeys(m.shape for m in found))
    return shapes[len(shapes) // 2]


def valleys(ax, groups: list[tuple[str, list[dict]]], of: Callable[[dict], float], colors: list) -> list[float]:
    """Loss above each seed's own best, and at the foot each seed's minimum, a row for each group; -> the groups' mean minima.

    groups: (label, records). Filled points are in a fit; the curve is a parabola through those of all seeds.
    """
    inside, feet = [], []
    for (_, some), color in zip(groups, colors):
        near = []
        for m in (m for m in minima(some, of=of) if math.isfinite(m.loss)):
            points = sorted((of(r), r["val_loss"] - m.loss) for r in some if r["seed"] == m.seed and not r["diverged"])
            best = [y for _, y in points].index(0)
            near += points[max(0, best - WINDOW // 2) : best + WINDOW // 2 + 1]
            ax.scatter(*zip(*points), s=14, facecolors="none", edgecolors=[color], linewidths=0.8)
        if len({x for x, _ in near}) > 2:
            x, y = np.array(near).T
            ax.scatter(x, y, s=14, color=[color])
            line = np.linspace(x.min(), x.max())
            ax.plot(line, np.polyval(np.polyfit(x, y, 2), line), color=color)
        inside += near
        feet.append([m.x for m in minima(some, of=of) if not m.why_not])
    top = 1.6 * max(y for _, y in inside)
    right_to_left = sorted(zip(groups, colors, feet), key=lambda each: -np.mean(each[2] or [math.inf]))  # then no line crosses a label
    for i, ((label, some), color, at) in enumerate(right_to_left, 1):
        row = -0.11 * i * top
        if at:
            ax.plot([np.mean(at)] * 2, [row, 0], color=color, linewidth=0.8, alpha=0.6)
            ax.scatter(at, [row] * len(at), s=22, color=[color], marker="^")
        else:
            label += ": no minimum inside"
        left, right = ax.get_xlim()
        x = max(at or [min(map(of, some))])
        ax.text(x + 0.03 * (right - left), row, label, color=ink(color), va="center")
        if x + 0.2 * (right - left) > right:
            ax.set_xlim(right=x + 0.2 * (right - left))  # room for the label
    ax.set_ylim(-0.11 * (len(groups) + 0.8) * top, top)
    ax.set_yticks([y for y in ax.get_yticks() if 0 <= y <= top])
    ax.axhline(0, color="black", linewidth=0.6)
    ax.set_ylabel("loss above the best (nats)")
    right = ax.secondary_yaxis("right", functions=(lambda y: 100 * np.expm1(y), lambda y: np.log1p(np.maximum(y, -99) / 100)))
    right.set_yticks([percent for percent in (0, 1, 2, 5, 10, 20, 50, 100) if math.log1p(percent / 100) <= top][-3:])
    right.set_ylabel("perplexity above the best (%)")
    return [np.mean(at) if at else math.nan for at in feet]


def draw_valleys(path: Path, records: list[dict], found: list[Minimum], joint: Law, paper: Law) -> None:
    """Figure 2 of the paper: loss against learning rate for each T, and for each batch size."""
    shape, longest = middle_shape(found), max(m.T for m in found)
    some = [r for r in records if shape_of(r) == shape]
    batch = min((m for m in found if m.shape == shape and m.T == longest), key=lambda m: m.loss).batch_size
    by_T, by_batch = shades(r["total_tokens"] for r in some), shades(r["batch_size"] for r in some)
    of = lambda r: math.log2(r["lr"])

    def draw(top, bottom):
        groups = [(size(T), [r for r in some if r["total_tokens"] == T and r["batch_size"] == batch]) for T in by_T]
        at = valleys(top, groups, of, list(by_T.values()))
        top.set_title(f"{longest / min(by_T):.0f} x the tokens: {2 ** (at[-1] - at[0]):.2f} x the rate ({shape}, batch {batch})")
        groups = [(f"batch {B}", [r for r in some if r["total_tokens"] == longest and r["batch_size"] == B]) for B in reversed(by_batch)]
        at = valleys(bottom, groups, of, list(reversed(by_batch.values())))
        bottom.set_title(f"{max(by_batch) / min(by_batch):.0f} x the batch: {2 ** (at[0] - at[-1]):.1f} x the rate ({shape}, T = {size(longest)})")
        bottom.set_xlabel("learning rate (triangles: each seed's minimum)")
        ticks(bottom.xaxis, [of(r) for r in some], rate_text)

    save(path, 7.4, 2, draw, sharex=True)


def draw_transfer(path: Path, kinds: dict[str, list[dict]]) -> None:
    """Loss against learning rate at several widths: does muP hold the valleys in place?"""

    def draw(*panels):
        for ax, (kind, title) in zip(panels, (("standard", "Without muP"), ("muP", "With muP"))):
            colors = shades(r["n_embd"] for r in kinds[kind])
            at = valleys(ax, [(f"width {n}", [r for r in kinds[kind] if r["n_embd"] == n]) for n in colors], lambda r: math.log2(r["lr"]), list(colors.values()))
            ax.set_title(f"{title}, {max(colors) / min(colors):.0f} x the width: {2 ** (at[-1] - at[0]):.2f} x the rate")
        ticks(panels[0].xaxis, [math.log2(r["lr"]) for some in kinds.values() for r in some], rate_text)
        panels[1].set_xlabel("learning rate (triangles: each seed's minimum)")

    save(path, 7.4, 2, draw, sharex=True)


def draw_batches(path: Path, records: list[dict], found: list[Minimum], joint: Law, paper: Law) -> None:
    """Figure 3 of the paper: the best learning rate against the batch size, a line for each T."""
    shape = middle_shape(found)
    some = [m for m in found if m.shape == shape and not m.why_not]
    colors = shades(m.T for m in some)

    def draw(ax):
        ends = []
        for T, color in colors.items():
            batches = sorted({m.batch_size for m in some if m.T == T})
            ax.scatter([math.log2(m.batch_size) for m in some if m.T == T], [m.x for m in some if m.T == T], s=12, color=[color])
            means = [np.mean([m.x for m in some if m.T == T and m.batch_size == B]) for B in batches]
            ax.plot([math.log2(B) for B in batches], means, color=color)
            ends.append(means[-1])
        right = max(math.log2(m.batch_size) for m in some)
        gap = 0.075 * max(1.0, np.ptp([m.x for m in some]))
        for (T, color), y in zip(colors.items(), spread(ends, gap)):
            ax.text(right + 0.12, y, f"T = {size(T)}", color=ink(color), va="center")
        ax.set_xlim(right=right + 0.9)
        ticks(ax.xaxis, [math.log2(m.batch_size) for m in some], lambda B: f"{B:.0f}")
        ticks(ax.yaxis, [math.floor(2 * m.x) / 2 for m in some], rate_text, finest=0.5)
        ax.set_title(f"The best rate rises as beta^{joint.q[0]:.2f} ({shape})")
        ax.set_xlabel(f"batch size (sequences of {records[0]['seq_len']} tokens)")
        ax.set_ylabel("best learning rate")

    save(path, 3.6, 1, draw)


def draw_gamma(path: Path, records: list[dict], found: list[Minimum], joint: Law, paper: Law) -> None:
    """Figure 4 of the paper: gamma of the three best batch sizes against T, for each shape and together."""
    points = best_three(usable(found))
    shapes, colors = list(dict.fromkeys(m.shape for m in points)), shades(m.batch_size for m in points)
    gamma = lambda m: m.x - math.log2(m.beta)
    ends = np.array([math.log2(min(m.T for m in points)), math.log2(max(m.T for m in points))])

    def draw(*panels):
        for ax, shape in zip(panels, shapes):
            own = paper_law(found, shape)
            for B, color in colors.items():
                at = [m for m in points if m.shape == shape and m.batch_size == B]
                ax.scatter([math.log2(m.T) for m in at], [gamma(m) for m in at], s=14, color=[color])
            ax.plot(ends, math.log2(own.a[0]) + own.b[0] * ends, color="black")
            ax.set_title(f"{shape}: gamma = {own.a[0]:.3g} T^{own.b[0]:.2f}")
        last = panels[-1]
        for marker, shape in zip("os^Dv", shapes):
            means = {T: np.mean([gamma(m) for m in points if m.shape == shape and m.T == T]) for T in sorted({m.T for m in points if m.shape == shape})}
            last.scatter([math.log2(T) for T in means], means.values(), s=24, marker=marker, facecolors="none", edgecolors="black")
        last.plot(ends, math.log2(paper.a[0]) + paper.b[0] * ends, color="black")
        last.set_title(f"together: gamma = {paper.a[0]:.3g} T^{paper.b[0]:.2f}")
        last.set_xlabel("T, tokens")
        ticks(last.xaxis, [math.log2(m.T) for m in points], size)
        for ax in panels:
            ax.set_ylabel("gamma = rate / beta")
            ticks(ax.yaxis, [math.floor(2 * gamma(m)) / 2 for m in points], rate_text, finest=0.5)
        for (B, color), x in zip(colors.items(), np.linspace(0.02, 0.8, len(colors))):
            panels[0].text(x, 0.06, f"batch {B}", color=ink(color), transform=panels[0].transAxes)

    save(path, 2.1 * (len(shapes) + 1), len(shapes) + 1, draw, sharex=True, sharey=True)


def draw_law(path: Path, records: list[dict], found: list[Minimum], joint: Law, beyond: list[Minimum]) -> None:
    """All cells on one line: the best learning rate, the batch size's share taken out, against T; beyond the grid a star."""
    points, q = usable(found), joint.q[0]
    shapes, colors = list(dict.fromkeys(m.shape for m in points)), shades(m.batch_size for m in points)
    height = lambda m: m.x - q * math.log2(m.beta)
    ends = np.linspace(math.log2(min(m.T for m in points)), math.log2(max(m.T for m in [*points, *beyond])), 50)

    def draw(ax):
        # drawn at the middle batch size: at beta = 1, far from the data, the draws' different q would widen the band
        middle = np.mean([math.log2(m.beta) for m in points])
        lines = (np.log2(joint.a) + (joint.q - q) * middle)[:, None] + joint.b[:, None] * ends  # [draws, 50]
        low, high = np.nanpercentile(lines[1:], [2.5, 97.5], axis=0)
        ax.fill_between(ends, low, high, color="#d9d9d9", linewidth=0)
        ax.plot(ends, lines[0], color="black")
        centre = lines[0].mean() + PAPER["b"] * (ends - ends.mean())
        ax.plot(ends, centre, color=COLORS["wsd"], linestyle="--")
        for marker, dx, shape in zip("os^Dv", np.linspace(-0.12, 0.12, len(shapes)), shapes):
            for cell in sorted({(m.T, m.batch_size) for m in points if m.shape == shape}):
                at = [m for m in points if (m.shape, m.T, m.batch_size) == (shape, *cell)]
                ax.scatter(math.log2(cell[0]) + dx, np.mean([height(m) for m in at]), s=24, marker=marker, facecolors="none", edgecolors=[colors[cell[1]]])
        for m in beyond:
            ax.scatter(math.log2(m.T), height(m), s=120, marker="*", color=[ink(colors.get(m.batch_size, (0, 0, 0)))], zorder=3)
        right = ends[-1] + 0.27
        for y, text, color in zip(spread([lines[0][-1], centre[-1]], 0.35), (f"T^{joint.b[0]:.2f}", "the paper's\nslope, -0.51"), ("black", COLORS["wsd"])):
            ax.text(right, y, text, color=color, va="center")
        ax.set_xlim(right=right + 1)
        values = [height(m) for m in [*points, *beyond]]
        ax.set_ylim(min(*values, *centre) - 0.9, max(*values, *centre) + 0.25)
        for x, shape in zip(np.linspace(0.02, 0.7, len(shapes)), shapes):
            ax.text(x, 0.12, f"{dict(zip(shapes, ['circle', 'square', 'triangle', 'diamond', 'v']))[shape]}: {shape}", transform=ax.transAxes)
        for (B, color), x in zip(colors.items(), np.linspace(0.02, 0.75, len(colors))):
            ax.text(x, 0.03, f"batch {B}", color=ink(color), transform=ax.transAxes)
        ticks(ax.xaxis, [math.log2(m.T) for m in [*points, *beyond]], size)
        ticks(ax.yaxis, [math.floor(2 * y) / 2 for y in values], rate_text, finest=0.5)
        low, high = interval(joint.b)
        ax.set_title(f"The best rate falls as T^{joint.b[0]:.2f} (95 %: {low:.2f} to {high:.2f})")
        ax.set_xlabel("T, tokens" + " (star: not in the fit)" * bool(beyond))
        ax.set_ylabel(f"best rate / beta^{q:.2f}")

    save(path, 4.2, 1, draw)


def draw_power(path: Path, records: list[dict], found: dict) -> None:
    """Figure 5 of the paper: Power's loss against a and against b, at the longest T, for each batch size."""
    longest, shape = max(r["total_tokens"] for r in records), middle_shape(found["b"])
    colors = shades(r["batch_size"] for r in records)

    def draw(*panels):
        for ax, (name, some) in zip(panels, scans(records).items()):
            at = {B: [r for r in some if r["batch_size"] == B and r["total_tokens"] == longest and shape_of(r) == shape] for B in colors}
            best = valleys(ax, [(f"batch {B}", at[B]) for B in colors], KNOB[name], list(colors.values()))
            low, high = (2**x if name == "a" else x for x in (np.nanmin(best), np.nanmax(best)))
            ax.set_title(f"Best {name}: {low:.2g} to {high:.2g} (T = {size(longest)}, {shape})")
        ticks(panels[0].xaxis, [KNOB["a"](r) for r in records], lambda a: f"{a:.3g}")
        panels[0].set_xlabel(f"a, with b = {scans(records)['a'][0]['power_b']:g}")
        panels[1].set_xticks(sorted({r["power_b"] for r in scans(records)["b"]})[1::4])
        panels[1].set_xlabel(f"b, with a = {scans(records)['b'][0]['power_a']:g}")

    save(path, 7.6, 2, draw)


def draw_best_b(path: Path, found: list[Minimum]) -> None:
    """Figure 6 of the paper: the best b against T, for each batch size."""
    good = [m for m in found if not m.why_not]
    colors = shades(m.batch_size for m in good)

    def draw(ax):
        ends = []
        for B, color in colors.items():
            budgets = sorted({m.T for m in good if m.batch_size == B})
            means = [np.mean([m.x for m in good if m.batch_size == B and m.T == T]) for T in budgets]
            ax.scatter([math.log2(m.T) for m in good if m.batch_size == B], [m.x for m in good if m.batch_size == B], s=12, color=[color])
            ax.plot(np.log2(budgets), means, color=color)
            ends.append(means[-1])
        low, high, right = min(m.x for m in good) - 0.02, max(m.x for m in good) + 0.02, max(math.log2(m.T) for m in good)
        for (B, color), y in zip(colors.items(), spread(ends, 0.08 * (high - low))):
            ax.text(right + 0.12, y, f"batch {B}", color=ink(color), va="center")
        ax.set_xlim(right=right + 1)
        ax.set_ylim(low, high)
        ticks(ax.xaxis, [math.log2(m.T) for m in good], size)
        ax.set_title(f"The best b: {np.mean([m.x for m in good]):.2f} ± {np.std([m.x for m in good]):.2f} (standard deviation)")
        ax.set_xlabel("T, tokens")
        ax.set_ylabel("best b")

    save(path, 3.6, 1, draw)


HUES = {"Power": COLORS["power"], "WSD": COLORS["wsd"], "cosine": COLORS["cosine"]}


def look(line: str) -> dict:
    """One colour for a schedule; the rate that grows with the batch dashed, or dotted."""
    name = line.split(",")[0]
    style = "--" if "√batch" in line else ":" if "∝ batch" in line else "-." if "our law" in line else "-"
    return dict(color=COLORS["average"] if "averaged" in line else HUES[name], linestyle=style, linewidth=2.4 if line == "Power" else 1.2)


def draw_above(ax, lines: dict, names: list[str], shapes: list[str], batch: int) -> None:
    """Loss above the floor against T, mean over shapes; seeds as dots, labels at the right end."""
    budgets = sorted({T for _, T, b in lines["floor"] if b == batch})
    ends = []
    for name in names:
        costs = [above(lines, name, [cell for cell in lines["floor"] if cell[0] in shapes and cell[1:] == (T, batch)]) for T in budgets]
        means = [np.mean(list(cost.values())) for cost in costs]
        ax.plot(np.log2(budgets), means, **look(name))
        for T, cost in zip(budgets, costs):
            ax.scatter([math.log2(T)] * len(cost), [d.mean() for d in cost.values()], s=6, color=look(name)["color"])
        ends.append(means[-1])
    ax.plot(np.log2(budgets), [0] * len(budgets), color="black", linewidth=0.6)
    ticks(ax.xaxis, np.log2(budgets), size)
    low, high = ax.get_ylim()
    right, heights = math.log2(budgets[-1]), spread(ends, 0.1 * (high - low))
    for name, y in zip(names, heights):
        ax.text(right + 0.1, y, name, color=look(name)["color"], va="center")
    ax.set_xlim(right=right + 2.2)
    ax.set_ylim(min(low, min(heights) - 0.05 * (high - low)), max(high, max(heights) + 0.05 * (high - low)))
    ax.set_ylabel("above the floor (nats)")


def draw_compare(path: Path, lines: dict, tuned_batch: int) -> None:
    """Every schedule, tuned once, above the floor: with the batch size that it was tuned at, and with another one."""
    shapes = list(dict.fromkeys(shape for shape, *_ in lines["floor"]))
    batches = sorted({batch for *_, batch in lines["floor"]}, key=lambda batch: abs(math.log(batch / tuned_batch)))

    def draw(*panels):
        for ax, batch in zip(panels, batches):
            scaled = batch != tuned_batch
            cells = [cell for cell in lines["floor"] if cell[2] == batch]
            mean = {name: round(np.mean(list(above(lines, name, cells).values())), 3) + 0.0 for name in ("Power", "WSD")}  # no -0.000
            names = [line for line in lines if line != "floor" and "averaged" not in line and "∝ batch" not in line and (scaled or "rate" not in line)]
            draw_above(ax, lines, names, shapes, batch)
            where = f"{batch / tuned_batch:g} x as tuned" if scaled else "as tuned"
            ax.set_title(f"Batch {batch}, {where}: Power {mean['Power']:+.3f}, WSD {mean['WSD']:+.3f}")
        panels[-1].set_xlabel("T, tokens (mean over " + ("shapes" if len(shapes) > 1 else shapes[0]) + "; dots: seeds)")

    save(path, 3.2 * len(batches), len(batches), draw, sharex=True)


def draw_anytime(path: Path, lines: dict, records: list[dict], batch: int) -> None:
    """If you stop here: one Power run, cooled down or averaged, against cosines planned for it and one that was not."""
    shape = max((s for s, *_ in lines["floor"] if "experts" not in s), key=lambda s: (len(s), s))  # the widest
    budgets = sorted(T for s, T, b in lines["floor"] if (s, b) == (shape, batch))
    if budgets != sorted({r["total_tokens"] for r in records if r["schedule"] == "cosine" and r["seed"] < TUNING}):
        return  # some are still in training
    longest = [r for r in records if r["schedule"] == "cosine" and (shape_of(r), r["batch_size"], r["total_tokens"]) == (shape, batch, budgets[-1]) and r["seed"] < TUNING]

    def draw(ax):
        shown = above(lines, "cosine")  # the same seeds as the other lines
        stopped = {T: [loss_of(r, f"val_loss_at_{T}" if T < budgets[-1] else "val_loss") - lines["floor"][shape, T, batch][r["seed"]] for r in longest if r["seed"] in shown] for T in budgets}
        means = {T: np.mean(some) for T, some in stopped.items()}
        ax.plot(np.log2(budgets), list(means.values()), color=COLORS["cosine"], linestyle="--", linewidth=1.2)
        for T, some in stopped.items():
            ax.scatter([math.log2(T)] * len(some), some, s=6, color=COLORS["cosine"])
        draw_above(ax, lines, [line for line in ("Power", "Power, our law", "Power, our law, averaged", "cosine") if line in lines], [shape], batch)
        top = max(means, key=means.get)
        ax.annotate(f"the cosine for {size(budgets[-1])},\nstopped early", (math.log2(top), max(stopped[top])), (0, 5),
                    textcoords="offset points", color=COLORS["cosine"], ha="left", va="bottom")  # fmt: skip
        ax.set_ylim(top=ax.get_ylim()[1] + 0.18 * np.ptp(ax.get_ylim()))
        power, cosine = (np.mean(list(above(lines, line, [(shape, T, batch) for T in budgets]).values())) for line in ("Power", "cosine"))
        ax.set_title(f"One Power run: {round(power - cosine, 3) + 0.0:+.3f} from planned cosines")
        ax.set_xlabel(f"tokens at which one stops ({shape}, batch {batch})")

    save(path, 3.6, 1, draw)


def draw_price(path: Path, costs: dict[str, np.ndarray]) -> None:
    """The ladder: mean and worst cost of every rule."""

    def draw(ax):
        for i, (rule, cost) in enumerate(costs.items()):
            color = COLORS["power"] if rule.startswith("Power") else "black"
            ax.plot([cost.mean(), cost.max()], [-i, -i], color=color, linewidth=0.8)
            ax.scatter([cost.mean()], [-i], s=30, color=color)
            ax.scatter([cost.max()], [-i], s=30, facecolors="white", edgecolors=color)
            ax.text(cost.mean(), -i + 0.22, rule, color=color, va="bottom")
        ax.set_xscale("log")
        ax.set_yticks([])
        ax.set_ylabel("what the rate depends on")
        ax.set_ylim(-len(costs) + 0.6, 0.9)
        ax.set_title("What not knowing costs (dot: mean, circle: worst cell)")
        ax.set_xlabel("loss above the best measured (nats)")

    save(path, 3.4, 1, draw)


def read_curve(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl. Raises FileNotFoundError where there are none."""
    try:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, json.JSONDecodeError):
        raise FileNotFoundError(f"--curves {run}: no readable metrics.jsonl there, it should be the folder of a run") from None


def draw_curves(path: Path, curves: dict[Path, list[dict]], window: int = 9) -> None:
    """Training loss of any runs (means of `window` lines of the log) and held-out loss, against tokens."""
    palette = ["#0072B2", "#B34700", "#00735A", "#6b6b6b", "#7a3b8f", "#000000"]

    def draw(ax):
        ends, right, seen = [], 0.0, []
        for (run, lines), color in zip(curves.items(), palette * len(curves)):
            loss = [(line["tokens"] / 1e6, line["loss"]) for line in lines if line.get("loss") is not None]
            n = min(window, len(loss))
            smooth = [np.mean(loss[k : k + n], axis=0) for k in range(len(loss) - n + 1)]
            held_out = [(line["tokens"] / 1e6, line["val_loss"]) for line in lines if line.get("val_loss") is not None]
            if smooth:
                ax.plot(*zip(*smooth), color=color, linewidth=1.5)
            if held_out:
                ax.plot(*zip(*held_out), color=color, marker="o", linestyle="none", markersize=5, markeredgecolor="white")
            last = (held_out or smooth)[-1]
            ends.append(last[1])
            right = max(right, last[0])
            seen += [y for _, y in smooth + held_out]
        low, high = min(seen), np.percentile(seen, 95)
        ax.set_ylim(low - 0.1 * (high - low), high)
        for run, y, color in zip(curves, spread(ends, 0.07 * (high - low)), palette * len(curves)):
            ax.text(1.03 * right, y, run.name, color=color, va="center")
        ax.set_xlim(right=right * (1.06 + 0.024 * max(len(run.name) for run in curves)))
        ax.set_title("Held-out loss (dots), training loss (lines)")
        ax.set_xlabel("tokens seen (millions)")
        ax.set_ylabel("loss (nats per token)")

    save(path, 3.6, 1, draw)


# ---------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fit.py", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folders", type=Path, nargs="*", help="folders of a sweep's records")
    parser.add_argument("--out", type=Path, help="folder for law.json and the figures (default: the first folder)")
    parser.add_argument("--against", type=Path, help="another sweep, to compare b and q with")
    parser.add_argument("--beyond", type=Path, help="a search outside of the grid, to try the law on")
    parser.add_argument("--curves", type=Path, nargs="+", metavar="RUN", help="draw the losses of these runs into curves.png")
    parser.add_argument("--predict", action="store_true", help="print the best learning rate for --total_tokens and --batch_size")
    parser.add_argument("--total_tokens", type=float, help="T")
    parser.add_argument("--batch_size", type=float, help="sequences per optimizer step")
    parser.add_argument("--seq_len", type=float, help=f"tokens per sequence (default: those of the law; the paper's: {PAPER_SEQ_LEN})")
    parser.add_argument("--law", default="paper", help="'paper' or a law.json (default: paper)")
    args = parser.parse_args(argv)
    try:
        if args.predict:
            law = read_law(args.law)
            args.seq_len = law["seq_len"] if args.seq_len is None else args.seq_len
            for name in ("total_tokens", "batch_size", "seq_len"):
                value = getattr(args, name)
                if value is None or not 0 < value < math.inf:
                    raise ValueError(f"--{name} {value}: --predict needs a number above 0")
            print(f"{predict(law, args.total_tokens, args.batch_size * args.seq_len):.2g}")
            return 0
        if not args.folders and not args.curves:
            raise ValueError("name the folder of a sweep, or --predict, or --curves; see --help")
        out = args.out or (args.folders[0] if args.folders else Path("."))
        out = out.parent if out.is_file() else out
        curves = {run: read_curve(run) for run in args.curves or []}
        records = read_records(args.folders) if args.folders else []
        others = read_records([args.against]) if args.against else []
        beyond = read_records([args.beyond]) if args.beyond else []
        transfer = any(r["standard"] for r in records)
        if beyond and (others or any(r["standard"] for r in records + beyond)):
            raise ValueError(f"--beyond {args.beyond}: goes with the sweep of WSD that gives the law, and not with --against")
        if beyond:
            together = read_records([*args.folders, args.beyond])  # raises if they are of different corpora or warm-ups
            if {r["schedule"] for r in together} != {"wsd"}:
                raise ValueError(f"--beyond {args.beyond}: must hold runs of WSD, as the sweep itself")
        schedules = sorted({r["schedule"] for r in records + others})
        reports = {("wsd",): report_transfer if transfer else report_wsd, ("power",): report_power, ("cosine", "power", "wsd"): report_compare}
        if records and tuple(schedules) not in reports:
            raise ValueError(f"runs with different schedules ({', '.join(schedules)}), they cannot be fitted together")
        out.mkdir(parents=True, exist_ok=True)
        if curves:
            draw_curves(out / "curves.png", curves)
            print(out / "curves.png")
        if others:
            report_difference(records, others)
        elif records:
            reports[tuple(schedules)](records, out, *([beyond] if beyond else []))
    except (ValueError, OSError) as mistake:
        print(f"fit.py: {mistake}", file=sys.stderr)
        return 2
    return 0


def read_law(name: str) -> dict:
    """The paper's law, or a law.json. Raises OSError or ValueError."""
    if name == "paper":
        return PAPER
    try:
        law = json.loads(Path(name).read_text())
        return {key: float(law[key]) for key in PAPER}
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        raise ValueError(f"--law {name}: not a law.json that fit.py wrote") from None


if __name__ == "__main__":
    sys.exit(main())
