"""What the README shows is what is there."""

import json
import math
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

import data
import eval as evaluation
import fit
import model as model_file
import mup
import schedules
import sweep
import train

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)


def test_code_is_quoted_from_the_source():
    source = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*.py"))
    quoted = [line for kind, block in BLOCKS if kind == "python" for line in block.splitlines() if line.strip()]
    assert len(quoted) > 5
    for line in quoted:
        assert line.strip() in source, line


def test_pictures_and_files_exist():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"`(\w+\.py)`", README):
        assert (ROOT / name).exists(), name


def test_commands_are_understood():
    """Every `python FILE ...` line, as far as its flags go; the two one-line commands are run by .ci/run."""
    commands = [line.split("#")[0] for kind, block in BLOCKS if kind == "sh" for line in block.splitlines() if line.startswith("python ") and "power_q" not in line]  # a fork's flag
    commands += re.findall(r"\*\*Run it:\*\* `([^`]+)`", README)
    assert len(commands) > 12
    for command in commands:
        _, file, *argv = shlex.split(command)
        if file == "-c":
            continue
        assert (ROOT / file).exists(), command
        if file == "train.py":
            typed, actions = train.parse(argv)
            if not (actions.branch or actions.resume):
                train.make_config(**typed)
        elif file == "sweep.py":
            args, typed = sweep.parse(argv)
            sweep.columns_of(args.experiment, args.scale, typed)
        else:
            files = {"data.py": data, "eval.py": evaluation, "fit.py": fit, "model.py": model_file, "mup.py": mup, "schedules.py": schedules}
            main = files.get(file)
            known = (ROOT / file).read_text(encoding="utf-8")
            assert all(f'"{word}"' in known for word in argv if word.startswith("--")), command
            assert main or not argv, command


def test_the_two_commands_are_single_lines():
    section = README.split("## Two commands")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2 and lines[0].endswith("train.py --schedule power") and lines[1].endswith("-m pytest -n 2 --dist loadfile")


def test_numbers_of_the_default_run():
    """The README's claims about the default run are the committed record's."""
    records = {r["schedule"]: r for r in map(json.loads, (ROOT / "results" / "laptop" / "records.jsonl").read_text().splitlines())}
    table = dict(re.findall(r"^\| (power|wsd|cosine) \|.*\| ([\d.]+) \|$", README, re.M))
    assert {name: f"{r['val_loss']:.3f}" for name, r in records.items()} == table
    assert f"**{records['power']['val_loss']:.2f} nats per byte**" in README
    cfg = train.make_config()
    assert all(r[name] == getattr(cfg, name) for r in records.values() for name in ("total_tokens", "n_embd", "n_layer", "power_a", "lr", "batch_size"))


def test_shell_blocks_are_shell():
    """The Slurm file and every other block, as far as bash itself can tell."""
    blocks = [block for kind, block in BLOCKS if kind == "sh"]
    assert any("#SBATCH" in block for block in blocks)
    for block in blocks:
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    launched = re.findall(r"^(?:torchrun .*|    )train\.py (--.*)$", README, re.M)
    assert len(launched) == 3
    for flags in launched:
        train.make_config(**train.parse(shlex.split(flags))[0])


def losses_in(name: str) -> list[float]:
    return [json.loads(line)["val_loss"] for line in (ROOT / "results" / name / "records.jsonl").read_text().splitlines()]


def test_numbers_of_other_runs():
    dense, mixture = losses_in("laptop")[0], losses_in("laptop-moe")[0]
    assert f"held-out loss {mixture:.3f} nats per byte, {dense:.3f} for `laptop`" in README and mixture < dense
    float32, bfloat16 = losses_in("dtype")[:3], losses_in("dtype")[3:]
    listed = lambda losses, form: ", ".join(format(loss, form) for loss in losses)
    assert f"{listed(bfloat16, '.4f')} for seeds 0, 1, 2 in bfloat16 and at {listed(float32, '.4f')} in float32" in README
    assert f"differences of {listed([b - f for b, f in zip(bfloat16, float32)], '+.3f')} where seeds differ by {max(float32) - min(float32):.3f}" in README


def fitted(folder: str, window: int = 5) -> tuple[fit.Law, fit.Law]:
    found = fit.minima(fit.read_records([ROOT / "results" / folder]), window)
    return fit.joint_law(found), fit.paper_law(found)


def test_numbers_of_the_law():
    """The table of both readings, for windows of 3, 5 and 7 rates."""
    rows = re.findall(r"^\| ([\d,]+) tokens \| (\d) \| (.+?) \| (.+?) \| (.+?) \|$", README, re.M)
    folders = {"2,000": "wsd-laptop", "32,000": "wsd-laptop-long"}
    assert len(rows) == 3 * len([name for name in folders.values() if (ROOT / "results" / name).exists()])
    for warmup, window, *numbers in rows:
        joint, paper = fitted(folders[warmup], int(window))
        assert numbers == [fit.show(joint.b, 2), fit.show(joint.q, 2), fit.show(paper.b, 2)], (warmup, window)


@pytest.fixture(scope="module")
def comparisons() -> dict[str, dict]:
    """With the long warm-up and with the short one; the floor's dense runs are, in part, those of the sweeps of WSD."""
    folders = {"long": ("compare-laptop", "wsd-laptop-long"), "short": ("compare-short", "wsd-laptop")}
    return {name: fit.comparison(fit.read_records([ROOT / "results" / folder for folder in some]))[0] for name, some in folders.items()}


def costs_of(lines: dict, line: str, mixture: bool) -> np.ndarray:
    """Above the floor, mean over seeds, for each cell."""
    return np.mean(list(fit.above(lines, line, [cell for cell in lines["floor"] if ("experts" in cell[0]) == mixture]).values()), axis=0)


@pytest.mark.parametrize("mixture", [False, True])
def test_tables_of_the_comparison(comparisons, mixture):
    """Sections 7 and 8, from the records."""
    names = {
        "Power: the paper's b, rate ∝ batch": "Power", "Power, our b and q (section 5)": "Power, our law", "the same, averaged instead of decayed": "Power, our law, averaged",
        "WSD": "WSD", "WSD, rate ∝ √batch": "WSD, rate ∝ √batch", "cosine": "cosine", "cosine, rate ∝ √batch": "cosine, rate ∝ √batch",
    }  # fmt: skip
    head = f"| schedule: loss above the floor, {'mixture' if mixture else 'dense'} | warm-up 32,000: mean | worst cell | warm-up 2,000: mean | worst cell |"
    rows = re.findall(r"^\| (.+?) " + r"\| ([+-]0\.\d{3}) " * 4 + r"\|$", README.split(head)[1].split("\n\n")[0], re.M)
    assert [name for name, *_ in rows] == list(names)
    for name, *numbers in rows:
        costs = [costs_of(comparisons[warmup], names[name], mixture) for warmup in ("long", "short")]
        assert [len(c) for c in costs] == [10 if mixture else 20] * 2 and numbers == [f"{x:+.3f}" for c in costs for x in (c.mean(), c.max())], name


def test_numbers_in_the_prose_about_the_comparison(comparisons):
    long, short = comparisons["long"], comparisons["short"]
    loss = lambda lines, line, cell: np.mean(list(lines[line][cell].values()))
    share = {}
    for mixture in (False, True):
        floor = np.mean([loss(long, "floor", cell) for cell in long["floor"] if ("experts" in cell[0]) == mixture])
        share[mixture] = {line: f"{100 * costs_of(long, line, mixture).mean() / floor:.2f} %" for line in long}
    dense, experts = share[False], share[True]
    root = dense["cosine, rate ∝ √batch"]
    assert f"Power's loss is {dense['Power']} above the floor, below WSD ({dense['WSD']}) and cosine ({dense['cosine']}); cosines that know T and the √batch rule are level with it ({root})." in README
    below = lambda shares, line: f"{shares[line].removeprefix('-')} below" * shares[line].startswith("-")
    assert f"With our own b and q it is {below(dense, 'Power, our law')} the floor" in README
    assert f"Averaged, without any decay, it is {below(dense, 'Power, our law, averaged')}:" in README
    ratios = [loss(long, "Power, our law, averaged", cell) / loss(long, "cosine, rate ∝ √batch", cell) - 1 for cell in long["floor"] if "experts" not in cell[0]]
    assert f"at worst {100 * max(ratios):.1f} % above the √batch cosine planned for that T, on average {-100 * np.mean(ratios):.1f} % below" in README
    everywhere = [loss(long, "floor", cell) - loss(short, "floor", cell) for cell in long["floor"] if "experts" not in cell[0]]
    assert f"(The floor itself is {np.mean(everywhere):.3f} lower then.)" in README
    assert costs_of(short, "Power", False).mean() > costs_of(short, "WSD", False).mean()
    assert f"Our own law: {below(experts, 'Power, our law')} the floor." in README and f"Power is {experts['Power']} above, no better than WSD or cosine." in README
    assert costs_of(long, "Power", True).mean() > max(costs_of(long, name, True).mean() for name in ("WSD", "cosine"))
    claims = f"loss {dense['Power']} above a search; WSD {dense['WSD']}, cosine {dense['cosine']}, with √batch {root}; with a short warm-up behind WSD"
    assert claims in README and f"{experts['Power']} above; WSD {experts['WSD']}, cosine {experts['cosine']}; with our b and q {below(experts, 'Power, our law')}" in README
    records = fit.read_records([ROOT / "results" / folder for folder in ("compare-laptop", "wsd-laptop-long")])
    price, n = fit.price(records, {})
    one, batch, both = (price[rule].mean() for rule in ("nothing: one rate for all", "the batch size: a rate for each", "both, rate ∝ √batch"))
    assert f"one rate for all costs {one:.3f} nats, one for each batch size {batch:.3f}, one by T and √batch {both:.3f}" in README and n == 60
    assert {r["warmup_tokens"] for r in records} == {32_000} == {2 * 80_000 // 5}
    law = fit.joint_law(fit.minima(fit.read_records([ROOT / "results" / "wsd-laptop-long"])))
    (ours,) = {r["power_b"] for r in records if fit.kind_of(r) == "ours"}
    assert "section 5's long warm-up, -0.3 and ½" in README and ours == -0.3 == round(law.b[0], 1) and abs(law.q[0] - 0.5) < 0.05


def test_arithmetic_of_the_walk():
    b = round(fitted("wsd-laptop")[0].b[0], 2)  # as the reader knows it
    assert f"By T^-0.51, the paper's law, to {4**-0.51:.2f} of where it was; by the slope found below, T^{b:.2f}, to {4**b:.2f}." in README
    rate = lambda beta, T: 4.6 * beta * T**-0.51
    assert f"= {rate(1024, 1e13):.4f} is the paper's rate" in README and f"the same formula says {rate(1024 * 4096, 1e13):.1f}" in README
    assert f"{rate(1024, 1e13):.5f}, {rate(1024 * 4096, 1e13):.2f} and {rate(1024, 1e13 / (1024 * 4096)):.2f}: only the first" in README
    assert "T doubles 23 times. T^-0.51 and T^-0.32 are then 4.4 factors of two apart" in README
    assert math.floor(math.log2(1e13 / 1e6)) == 23 and round(math.log2(1e13 / 1e6) * (0.51 - 0.32), 1) == 4.4
    assert f"for the first {(4 / 4.6) ** (1 / 0.51):.0%} of a run".replace("%", " %") in README  # 4 n^b = 4.6 T^b
    trunks: dict = {}
    records = fit.read_records([ROOT / "results" / "wsd-laptop"])
    for r in records:
        trunks.setdefault((r["n_embd"], r["batch_size"], r["lr"], r["seed"]), []).append(r)
    trained = sum(max(r["total_tokens"] - r["decay_tokens"] for r in runs) + sum(r["decay_tokens"] for r in runs) for runs in trunks.values())
    assert f"for {100 * trained / sum(r['total_tokens'] for r in records):.0f} % of their tokens" in README
    steps = [r["total_tokens"] / (128 * r["batch_size"]) for r in records]
    assert f"({min(steps):.0f} to {max(steps):,.0f} steps)" in README
    dense, mixture = (json.loads((ROOT / "results" / name / "records.jsonl").read_text().splitlines()[0])["n_params"] for name in ("laptop", "laptop-moe"))
    assert f"{mixture / dense:.1f} times the parameters" in README


def test_numbers_of_the_transfer():
    records = fit.read_records([ROOT / "results" / "transfer-quick"])
    best = lambda standard: {m.shape.split(",")[0]: m.x for m in fit.minima([r for r in records if r["standard"] == standard]) if not m.why_not}
    ours, other = best(False), best(True)
    assert ours.keys() == other.keys() == {"width 32", "width 64", "width 128"}
    assert max(ours.values()) - min(ours.values()) < math.log2(1.3) and other["width 128"] - other["width 32"] < -1
    assert "the best rate of widths 32, 64, 128 stays within 30 % under μP, and falls by more than half without" in README
    assert "stays within 30 % from width 32 to 128; without μP it falls by more than half (one seed)" in README


def test_numbers_of_power():
    records = fit.read_records([ROOT / "results" / "power-laptop"])
    scans = fit.scans(records)
    good = [m for m in fit.minima(scans["b"], of=fit.KNOB["b"]) if not m.why_not]
    x = np.array([m.x for m in good])
    assert f"b {x.mean():.2f} ± {x.std():.2f}, from {x.min():.2f} to {x.max():.2f} at a = 16" in README
    assert f"The best b lies at {x.mean():.2f}, with a standard deviation of {x.std():.2f} over" in README and np.abs(x - x.mean()).max() < 0.055  # one place
    at = lambda batch, T: np.mean([m.x for m in good if (m.batch_size, m.T) == (batch, T)])
    assert f"batch 8, where it rises from {at(8, 80_000):.2f} to {at(8, 1_280_000):.2f} with T" in README
    assert all(abs(at(batch, T) - x.mean()) < 0.03 for batch in (2, 4) for T in {m.T for m in good})
    cost = {}
    for name, step in (("a", 1), ("b", 0.06)):
        cells: dict = {}
        for r in scans[name]:
            cells.setdefault((r["total_tokens"], r["batch_size"], r["seed"]), {})[fit.KNOB[name](r)] = fit.loss_of(r)
        best = {key: min(cell, key=cell.get) for key, cell in cells.items()}
        off = [loss - cell[best[key]] for key, cell in cells.items() for value, loss in cell.items() if abs(abs(value - best[key]) - step) < 0.001]
        cost[name] = np.mean(off)
    assert f"A factor of 2 in a costs {cost['a']:.3f} nats, 0.06 in b {cost['b']:.3f}." in README
    assert 1.9 < 80_000**0.06 < 1_280_000**0.06 < 2.4  # "about a factor of 2"
    assert {r["power_a"] for r in scans["b"]} == {16} and {r["power_b"] for r in scans["a"]} == {-0.51} and {r["seed"] for r in records} == {0, 1}


def test_number_beyond_the_grid(tmp_path, capsys):
    assert fit.main([str(ROOT / "results" / "wsd-laptop"), "--beyond", str(ROOT / "results" / "beyond-laptop"), "--out", str(tmp_path)]) == 0
    T, rate, cost = re.search(r"T = (\S+), batch 4: the law says (\S+), .*, \+(\S+)%$", capsys.readouterr().out, re.M).groups()
    assert T == "5.12M" and f"(the star) the law's rate costs {cost} % more loss than the best of a search" in README


def test_numbers_of_the_long_warmup(capsys):
    folder, other = (str(ROOT / "results" / name) for name in ("wsd-laptop", "wsd-laptop-long"))
    assert fit.main([folder, "--against", other]) == 0
    short, long, difference, low, high = map(float, re.search(r"b: (\S+) .*? against (\S+) .*?, difference (\S+) \[(.+?), (.+?)\]", capsys.readouterr().out).groups())
    joint, _ = fitted("wsd-laptop-long")
    assert f"b is {joint.b[0]:.2f}: from {short:.2f} in the same cells and seeds, a difference of {difference:.2f} [{low:.2f}, {high:.2f}]" in README
    assert long == pytest.approx(joint.b[0], abs=0.005) and low < 0 < high  # "a step, if it is one"
    low, high = fit.interval(joint.b)
    assert f"T^{joint.b[0]:.2f} [{low:.2f}, {high:.2f}], 32,000" in README and low < -0.32 < high


def test_figures_are_drawn_from_the_results(tmp_path):
    """Pixel by pixel, with the matplotlib of requirements.txt."""
    import matplotlib.image

    beyond = ["--beyond", str(ROOT / "results" / "beyond-laptop")]
    drawn = [
        (["wsd-laptop"], beyond, ["valleys", "batch", "gamma", "law"]), (["transfer-quick"], [], ["transfer"]), (["power-laptop"], [], ["power", "best_b"]),
        (["compare-laptop", "wsd-laptop-long"], [], ["compare", "anytime", "price"]),
    ]  # fmt: skip
    for folders, more, names in drawn:
        assert fit.main([*(str(ROOT / "results" / folder) for folder in folders), *more, "--out", str(tmp_path)]) == 0
        for name in names:
            ours, committed = (matplotlib.image.imread(path / f"{name}.png") for path in (tmp_path, ROOT / "assets"))
            assert ours.shape == committed.shape and (ours == committed).all(), name
    assert schedules.main(["--out", str(tmp_path / "schedules.png")]) == 0
    ours, committed = (matplotlib.image.imread(path / "schedules.png") for path in (tmp_path, ROOT / "assets"))
    assert ours.shape == committed.shape and (ours == committed).all()
    assert {path.stem for path in (ROOT / "assets").glob("*.png")} == {name for *_, names in drawn for name in names} | {"schedules"}


def test_the_walk_is_short():
    """At most 2,300 words before the reference part, not counting code and tables."""
    walk = re.sub(r"```.*?```", "", README.split("\n## Reference")[0], flags=re.S)
    assert len([word for line in walk.splitlines() if not line.startswith("|") for word in line.split()]) <= 2300


def test_forks_are_the_files():
    for path in (ROOT / "forks").iterdir():
        assert path.read_text(encoding="utf-8") in README, path


def test_numbers_in_the_prose_about_the_law():
    records = fit.read_records([ROOT / "results" / "wsd-laptop"])
    found, (joint, _) = fit.minima(records), fitted("wsd-laptop")
    ratios = [fit.show(joint.a_of[f"width {n}"] / joint.a_of["width 32"], 2) for n in (64, 128)]
    assert f"The `a` of width 64 is {ratios[0]} times that of width 32, that of width 128 {ratios[1]} times" in README
    assert f"{ratios[0]} and {ratios[1]}" in README and f"{len(found)} minima of {len(records):,} runs" in README
    own = fit.slopes(found)
    b32, b64, b128 = (own[f"width {n}"] for n in (32, 64, 128))
    assert f"own b: {b32[0]:.2f}, {b64[0]:.2f} and {b128[0]:.2f}; the last is {fit.show(b128 - b32, 2)} below the first" in README
    assert f"b: {b32[0]:.2f}, {b64[0]:.2f}, {b128[0]:.2f}, difference {fit.show(b128 - b32, 2)}" in README
    mean = lambda **where: sum(xs := [m.x for m in found if not m.why_not and all(getattr(m, k) == v for k, v in where.items())]) / len(xs)
    shape = dict(shape="width 64")
    assert f"to {2 ** (mean(T=1_280_000, batch_size=2, **shape) - mean(T=80_000, batch_size=2, **shape)):.2f} of the rate" in README
    assert f"eight times the batch wants {2 ** (mean(T=1_280_000, batch_size=8, **shape) - mean(T=1_280_000, batch_size=1, **shape)):.1f} times the rate" in README
    low, high = fit.interval(joint.b)
    assert f"T^{joint.b[0]:.2f} [{low:.2f}, {high:.2f}]" in README and f"q = {fit.show(joint.q, 2)}" in README
    assert f"b {joint.b[0]:.2f} and q {joint.q[0]:.2f}, `law.json`" in README
    assert low < -0.26 < high < -0.2 and not low <= -0.32 <= high and not low <= -0.51 <= high  # what the text says of them
    best = {}
    for r in records:
        best.setdefault((fit.shape_of(r), r["total_tokens"], r["batch_size"], r["seed"]), {})[r["lr"]] = fit.loss_of(r)
    off = [[loss - min(cell.values()) for lr, loss in cell.items() if abs(lr / min(cell, key=cell.get) / factor - 1) < 0.01] for cell in best.values() for factor in (0.5, 2)]
    below, above = (sum(sum(off[k::2], [])) / len(sum(off[k::2], [])) for k in (0, 1))
    assert 0.045 < below < above < 0.065  # "5 to 6 % of perplexity"
