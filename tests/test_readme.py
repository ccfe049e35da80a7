"""The pages show what is there: files, quoted code, and every number, compared with the records.

In a page's source, <!--n:NAME--> stands before a number from the records, and <!--t:NAME--> before
a table of them. NUMBERS and TABLES compute what belongs there: a number, a list for the next
numbers of the line, or bootstrap draws for a number and its interval. Pages may round. So
sentences can be edited freely, while numbers cannot drift.
"""

import json
import math
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tools import compare

import fit
import train

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in FILES}
README, EVERYTHING = PAGES["README.md"], "\n".join(PAGES.values())
SHORT, LONG = ("wsd-laptop",), ("wsd-laptop-long",)  # warmup of 2,000 and of 32,000 tokens
COMPARE, COMPARE_SHORT = ("compare-laptop", *LONG), ("compare-short", *SHORT)
PAPER, FITTED, ROOT_COSINE = "Power (paper)", "Power (fitted)", "cosine, learning rate ∝ √batch"
AVERAGED = f"{FITTED}, averaged"


@cache
def records(*folders: str) -> list[dict]:
    return fit.read_records([ROOT / "results" / folder for folder in folders])


def values(folder: str, name: str = "val_loss") -> list[float]:
    """One field of all records, in the order of the file."""
    lines = (ROOT / f"results/{folder}/records.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)[name] for line in lines]


@cache
def minima(folders: tuple, window: int = 5) -> list:
    return [m for m in fit.minima(records(*folders), window) if not m.why_not]


def law(folders: tuple, keep=lambda m: True):
    return fit.joint_law([m for m in minima(folders) if keep(m)])


def law_row(label: str) -> list[np.ndarray]:
    """A row of the tables of fits: warmup and, after a comma and a space, the window."""
    window = int(label.partition(", ")[2] or 5)  # "2,000, 3"
    found = minima(LONG if label.startswith("32,000") else SHORT, window)
    joint = fit.joint_law(found)
    return [joint.b, joint.q, fit.paper_law(found).b]


def slopes() -> list[np.ndarray]:
    own = fit.slopes(minima(SHORT))
    return [own[f"width {width}"] for width in (32, 64, 128)]


def a_ratio(width: int) -> np.ndarray:
    a = law(SHORT).a_of
    return a[f"width {width}"] / a["width 32"]


def best_lr(*cell) -> float:
    return 2 ** np.mean([m.x for m in minima(SHORT) if (m.shape, m.T, m.batch_size) == cell])


def off_by(found: list, step: float) -> float:
    """Mean loss above the lowest one measured in its cell, `step` to the right of the best value."""
    costs = []
    for m in found:
        best = min(m.points, key=lambda point: point[1])[0]
        costs += [y - m.loss for x, y in m.points if abs(x - best - step) < 0.01 * abs(step)]
    return np.mean([cost for cost in costs if math.isfinite(cost)])


def trunk_share() -> float:
    """Percent of the tokens of separate runs: stable phases are trained once, decays always."""
    trunks: dict = {}
    for r in records(*SHORT):
        key = r["n_embd"], r["batch_size"], r["lr"], r["seed"]
        trunks.setdefault(key, []).append((r["total_tokens"] - r["decay_tokens"], r["decay_tokens"]))
    trained = sum(max(runs)[0] + sum(decay for _, decay in runs) for runs in trunks.values())
    return 100 * trained / sum(r["total_tokens"] for r in records(*SHORT))


def beyond_cost() -> float:
    (m,), joint = fit.minima(records("beyond-laptop")), law(SHORT)
    lr = joint.a[0] * m.beta ** joint.q[0] * m.T ** joint.b[0]
    return 100 * (np.interp(math.log2(lr), *zip(*sorted(m.points))) / m.loss - 1)


def transfer(standard: bool) -> list[float]:
    """Best learning rates, narrow to wide, without or with the rules of μP."""
    some = [r for r in records("transfer-quick") if r["standard"] == standard]
    return [2**m.x for m in fit.minima(some) if not m.why_not]


def longer_warmup() -> np.ndarray:
    """b with the short warmup minus b with the long one, in the cells and seeds of both."""
    cell = lambda m: (m.shape, m.T, m.batch_size, m.seed)
    both = {cell(m) for m in minima(SHORT)} & {cell(m) for m in minima(LONG)}
    short, long = (law(folders, lambda m: cell(m) in both).b for folders in (SHORT, LONG))
    return short - long


@cache
def lines(folders: tuple = COMPARE) -> dict:
    """{line: {(shape, T, batch size): {seed: loss}}}"""
    return compare.comparison(records(*folders))[0]


def cells(moe: bool = False, folders: tuple = COMPARE) -> list:
    return [cell for cell in lines(folders)["baseline"] if ("experts" in cell[0]) == moe]


def cost(line: str, moe: bool = False, folders: tuple = COMPARE) -> np.ndarray:
    """Loss minus the baseline's, [seeds that did not choose it, cells]."""
    return np.array(list(compare.above(lines(folders), line, cells(moe, folders)).values()))


def cost_row(line: str, moe: bool = False, warmups: tuple = (COMPARE, COMPARE_SHORT)) -> list[float]:
    by_cell = [cost(line, moe, folders).mean(axis=0) for folders in warmups]
    return [x for some in by_cell for x in (some.mean(), some.max())]


def difference(one: str, other: str, moe: bool = False) -> np.ndarray:
    """Mean difference and its bootstrap draws. Cells of one series share a trunk: draw series."""
    series: dict = {}
    for cell in cells(moe):
        for seed, loss in lines()[one][cell].items():
            series.setdefault((cell[0], cell[2], seed), []).append(loss - lines()[other][cell][seed])
    means = np.array([np.mean(some) for some in series.values()])
    draws = np.random.default_rng(0).integers(len(means), size=(10_000, len(means)))
    return np.concatenate([[means.mean()], means[draws].mean(axis=1)])


def worst_difference(one: str, other: str) -> float:
    mean = lambda line, cell: np.mean(list(lines()[line][cell].values()))
    return max(mean(one, cell) - mean(other, cell) for cell in cells())


def stopped_cosine() -> float:
    """Worst loss above the baseline of the longest cosine, evaluated before its end."""
    worst, baseline = [], lines()["baseline"]
    for T in (80_000, 160_000, 320_000, 640_000):
        key = f"val_loss_at_{T}"
        runs = [r for r in records(*COMPARE) if key in r and r["seed"] in (1, 2) and not r["n_expert"]]
        runs = [r for r in runs if r["n_embd"] == 128 and r["batch_size"] == 2]
        worst.append(np.mean([r[key] - baseline["width 128", T, 2][r["seed"]] for r in runs]))
    return max(worst)


@cache
def price() -> list[float]:
    """Cost of one learning rate for all cells, of one per batch size, of one by T and √batch."""
    wsd = [r for r in records(*COMPARE) if r["schedule"] == "wsd" and r["seed"] < 100]
    costs, _ = compare.price(fit.usable(fit.minima(wsd)), {})
    return [costs[rule].mean() for rule in ("nothing", "batch size", "T and batch size, ∝ √batch")]


@cache
def scan(name: str) -> list:
    """Minima over log2 of a, or over b, of the runs of Power that vary it."""
    fixed, value = ("power_b", -0.51) if name == "a" else ("power_a", 16)
    of = (lambda r: math.log2(r["power_a"])) if name == "a" else (lambda r: r["power_b"])
    return fit.minima([r for r in records("power-laptop") if r[fixed] == value], of=of)


def best_b(*cell) -> np.ndarray:
    found = [m for m in scan("b") if not m.why_not]
    return np.array([m.x for m in found if not cell or (m.T, m.batch_size) == cell])


def stages(source: str) -> list[float]:
    """Validation loss with one stage, with two, and the differences of three seeds."""
    one, two = np.split(np.array(values("two-stage", f"val_loss_{source}")), 2)
    return [one.mean(), two.mean(), *(two - one)]


def paper_lr(beta: float, T: float) -> float:
    return 4.6 * beta * T**-0.51  # equations 5 and 6


NUMBERS = {
    "laptop.power": lambda: values("laptop")[0],
    "laptop.wsd": lambda: values("laptop")[1],
    "laptop.cosine": lambda: values("laptop")[2],
    "laptop.moe": lambda: values("laptop-moe")[0],
    "moe.params": lambda: values("laptop-moe", "n_params")[0] / values("laptop", "n_params")[0],
    "float32": lambda: values("dtype")[:3],
    "bfloat16": lambda: values("dtype")[3:],
    "beta": lambda: 8 * 128 / 4096,
    "quadruple.paper": lambda: 4**-0.51,
    "quadruple.ours": lambda: 4 ** round(law(SHORT).b[0], 2),
    "valleys.T": lambda: best_lr("width 64", 1_280_000, 2) / best_lr("width 64", 80_000, 2),
    "valleys.batch": lambda: best_lr("width 64", 1_280_000, 8) / best_lr("width 64", 1_280_000, 1),
    "factor.2": lambda: [off_by(minima(SHORT), step) for step in (-1, 1)],
    "trunk.share": trunk_share,
    "transfer.mup": lambda: max(transfer(False)) / min(transfer(False)),
    "transfer.standard": lambda: transfer(True)[-1] / transfer(True)[0],
    "law.b": lambda: law(SHORT).b,
    "law.q": lambda: law(SHORT).q,
    "long.b": lambda: law(LONG).b,
    "law.runs": lambda: [len(minima(SHORT)), len(records(*SHORT))],
    "long.runs": lambda: [len(minima(LONG)), len(records(*LONG))],
    "long.small.b": lambda: law(LONG, lambda m: m.batch_size <= 2).b,
    "long.large.b": lambda: law(LONG, lambda m: m.batch_size > 2).b,
    "long.short.b": lambda: law(LONG, lambda m: m.T <= 160_000).b,
    "long.rest.b": lambda: law(LONG, lambda m: m.T > 160_000).b,
    "against.b": longer_warmup,
    "beyond.cost": beyond_cost,
    "a.64": lambda: a_ratio(64),
    "a.128": lambda: a_ratio(128),
    "b.widths": lambda: [b[0] for b in slopes()],
    "b.128-32": lambda: slopes()[2] - slopes()[0],
    "unit.sequences": lambda: paper_lr(1024, 1e13),
    "unit.tokens": lambda: paper_lr(1024 * 4096, 1e13),
    "unit.steps": lambda: paper_lr(1024, 1e13 / 1024 / 4096),
    "doublings": lambda: math.log2(1e13 / 1e6) * (0.51 - 0.32),
    "crossing": lambda: 100 * (4 / 4.6) ** (1 / 0.51),  # 4 n^b = 4.6 T^b
    "anytime.cut": stopped_cosine,
    "seeds": lambda: [some.mean() for some in cost(PAPER)],
    "power.wsd": lambda: difference(PAPER, "WSD"),
    "power.cosine": lambda: difference(PAPER, ROOT_COSINE),
    "fitted.cosine": lambda: difference(FITTED, ROOT_COSINE),
    "average.cosine": lambda: difference(AVERAGED, ROOT_COSINE),
    "average.worst": lambda: worst_difference(AVERAGED, ROOT_COSINE),
    "moe.power.wsd": lambda: difference(PAPER, "WSD", moe=True),
    "moe": lambda: [cost(line, moe=True).mean() for line in (FITTED, "WSD", "cosine", PAPER)],
    "short": lambda: [cost(line, folders=COMPARE_SHORT).mean() for line in (PAPER, "WSD")],
    "price": price,
    "power.b": lambda: [best_b().mean(), best_b().std()],
    "power.b.8": lambda: [best_b(T, 8).mean() for T in (80_000, 1_280_000)],
    "power.a.cost": lambda: np.mean([off_by(scan("a"), step) for step in (-1, 1)]),
    "power.b.cost": lambda: np.mean([off_by(scan("b"), step) for step in (-0.06, 0.06)]),
}
TABLES = {  # name -> (first column -> the numbers of that row)
    "law": law_row,
    "compare": lambda line: cost_row(line, warmups=(COMPARE,)),
    "compare.dense": cost_row,
    "compare.moe": lambda line: cost_row(line, moe=True),
    "two-stage": stages,
}


def as_numbers(value) -> list[float]:
    """Bootstrap draws become an estimate and its 95% interval; lists of them one long list."""
    if isinstance(value, np.ndarray):
        return [value[0], *fit.interval(value)]
    return sum(map(as_numbers, value), []) if isinstance(value, list) else [value]


def wrong(text: str, value) -> list[str]:
    """The first numbers of a text that differ from the value, each with what it should be."""
    text = re.sub(r"<!--.*?-->|\]\(.*?\)", "", text)
    shown = [s.rstrip(",").replace(",", "") for s in re.findall(r"[+-]?\d[\d,]*(?:\.\d+)?", text)]
    bare = isinstance(value, np.ndarray) and not re.match(r"\S+ \[", text)
    value = as_numbers(value)[: 1 if bare else None]
    if len(shown) < len(value) or "TODO" in text[:10]:
        return [f"needs {value}"]
    digits = [len(s.partition(".")[2]) for s in shown]
    pairs = zip(shown, value, digits)
    return [f"{s} is {v:.5g}" for s, v, d in pairs if abs(float(s) - v) > 0.501 / 10**d]


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_the_records(page):
    found = []
    for mark in re.finditer(r"<!--n:(.+?)-->(?=(.*))", PAGES[page]):
        found += [f"{mark[1]}: {error}" for error in wrong(mark[2], NUMBERS[mark[1]]())]
    for name, rows in re.findall(r"<!--t:(.+?)-->\n.*\n\|---.*\n((?:\|.*\n)+)", PAGES[page]):
        for label, numbers in re.findall(r"^\| (.+?) \|(.+)\|$", rows, re.M):
            if label != "the paper":
                found += [f"{label}: {error}" for error in wrong(numbers, TABLES[name](label))]
    assert "\n".join(found) == ""


def test_every_number_has_its_place_and_no_page_waits_for_one():
    assert set(re.findall(r"<!--n:(.+?)-->", EVERYTHING)) == set(NUMBERS)
    assert [name for name, text in PAGES.items() if "TODO" in text] == []


def test_verdicts_follow_from_the_intervals():
    """What the pages conclude: the paper's exponents are outside, Power ties, width is open."""
    short, long = law(SHORT), law(LONG)
    assert all(fit.interval(x.b)[0] > -0.51 and fit.interval(x.q)[1] < 1 for x in (short, long))
    assert fit.interval(long.b)[0] < -0.32 < fit.interval(short.b)[0]
    assert fit.interval(slopes()[2] - slopes()[0])[1] < 0 < fit.interval(longer_warmup())[1]
    low, high = fit.interval(difference(PAPER, ROOT_COSINE))
    assert -0.01 < low < 0 < high < 0.01 and fit.interval(difference(PAPER, "WSD"))[1] < 0
    fitted, wsd, paper = (cost(line, moe=True).mean() for line in (FITTED, "WSD", PAPER))
    assert fitted < 0 < wsd < paper


def test_records_of_the_default_run_have_the_presets_settings():
    cfg = train.make_config()
    for name in ("total_tokens", "n_embd", "n_layer", "power_a", "lr", "batch_size"):
        assert set(values("laptop", name)) == {getattr(cfg, name)}


def test_code_and_patches_are_quoted_from_the_source():
    source = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*.py"))
    blocks = re.findall(r"```python\n(.*?)```", EVERYTHING, re.S)
    quoted = [line.strip() for block in blocks for line in block.splitlines()]
    assert len(quoted) > 5 and [line for line in quoted if line not in source] == []
    for path in (ROOT / "forks").iterdir():
        assert path.read_text(encoding="utf-8") in PAGES["forks.md"]


def test_links_files_and_figures_exist():
    for path in FILES:
        text = PAGES[path.name]
        linked = [path.parent / target for target in re.findall(r"\]\((?!http)([^)#]+)\)", text)]
        linked += [ROOT / name for name in re.findall(r"`((?:tools/|tests/)?\w+\.py)`", text)]
        assert [str(target) for target in linked if not target.exists()] == []
    drawn = {path.name for path in (ROOT / "assets").glob("*.png")}
    assert drawn == set(re.findall(r"assets/(\w+\.png)", EVERYTHING))


def test_the_two_commands_are_single_lines():
    section = README.split("## Two commands")[1].split("\n## ")[0]
    one, two = (line for line in section.splitlines() if line.startswith("python3 -m venv"))
    assert one.endswith("train.py --schedule power")
    assert two.endswith("-m pytest -n 2 --dist loadfile")


def test_shell_blocks_are_shell():
    for block in re.findall(r"```sh\n(.*?)```", EVERYTHING, re.S):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    launched = re.findall(r"^(?:torchrun .*|    )train\.py (--.*)$", EVERYTHING, re.M)
    assert len(launched) == 3
    for flags in launched:
        train.make_config(**train.parse(shlex.split(flags))[0])


def words(text: str) -> list[str]:
    return re.findall(r"\S*\w\S*", re.sub(r"<!--.*?-->", "", text))


def prose(text: str) -> str:
    """Without code, tables, headings, "Run it" lines, tags and link targets."""
    text = re.sub(r"```.*?```|<.*?>", "", text, flags=re.S)
    text = re.sub(r"!?\[(.*?)\]\(.*?\)", r"\1", text)
    lines = text.splitlines()
    return "\n".join(line for line in lines if not re.match(r"[|#]|\*\*Run it", line))


def sentences(text: str) -> list[list[str]]:
    """Words of each sentence. A list item and a paragraph end one, too."""
    parts = re.split(r"\n|(?<=[.?!])[\"*_)]*\s+(?=[\"*_(`]*[^a-z\s])", prose(text))
    return [words(part) for part in parts if words(part)]


def test_the_readme_is_short():
    walk = sentences(README.split("## 1 ")[1].split("## Ten files")[0])
    assert np.mean([len(some) for some in walk]) <= 18
    assert [" ".join(some) for some in walk if len(some) > 35] == []
    assert len(words(prose(README))) <= 2700 and len(words(README)) <= 3300


@pytest.mark.parametrize("page", [name for name in PAGES if name != "README.md"])
def test_a_page_is_short_and_opens_with_its_use(page):
    assert len(words(re.sub(r"```.*?```", "", PAGES[page], flags=re.S))) <= 800
    opening = re.match(r"# .+\n\n(.+)\n\n```sh\n", PAGES[page])  # a sentence, then a command
    assert opening and len(sentences(opening[1])) == 1
