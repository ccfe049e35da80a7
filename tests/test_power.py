"""power.py is the paper in one file. The other files are its oracle, and it is theirs."""

import itertools
import json
import math
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fit
import notebook
import power
import train
from tools.stats import student


def test_its_losses_are_those_of_train(monkeypatch):
    """Of a whole run, with the same weights at the start and the same batches.

    The norms of power.py have no gains, so those of train.py stay 1.
    """
    total = 4_096
    monkeypatch.setattr(power, "WARMUP", 1_000)
    cfg = train.make_config(
        schedule="wsd", lr=0.01, total_tokens=total, warmup_tokens=power.WARMUP,
        batch_size=power.BATCH_SIZE, n_layer=power.LAYERS, n_embd=power.WIDTH,
        n_head=power.HEADS, seq_len=power.SEQ_LEN, base_width=power.WIDTH,
        init_std=power.INIT_STD, m_emb=1 / power.INIT_STD, decay_shape="linear",
        attention_multiplier=power.D_HEAD**-0.5,
        device="cpu", dtype="float32", compile=False,
    )  # fmt: skip

    def draw(g, seq_len, _seed):
        rows = power.TRAIN[int(g[0]) : int(g[0]) + len(g)].numpy()
        return rows[:, :-1].copy(), rows[:, 1:].copy()

    state = train.build(cfg)
    run = power.Run(seed=0)
    matrices = [p for p in state.model.parameters() if p.dim() == 2]
    for p in state.model.parameters():
        p.requires_grad_(p.dim() == 2)
    for one, other in zip(run.model.parameters(), matrices, strict=True):
        # drawn with the same standard deviation
        assert one.std().item() == pytest.approx(other.std().item(), rel=0.1)
        one.data.copy_(other)
    start = total - cfg.decay_tokens
    schedule = power.decay(power.warmup(power.constant(0.01)), start, total)
    for step in train.training_steps(cfg, state, SimpleNamespace(draw=draw)):
        first = run.tokens // power.SEQ_LEN
        rows = power.TRAIN[first : first + power.BATCH_SIZE]
        loss = run.model(rows[:, :-1], rows[:, 1:]).item()
        assert loss == pytest.approx(step.loss.item(), rel=1e-5)
        run.train(schedule, run.tokens + power.STEP)
        assert run.rates[-1] == pytest.approx(step.lr, rel=1e-12)
    assert run.tokens == state.tokens == total


def equal(one: power.Run, other: power.Run) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def test_a_branch_is_the_separate_run(monkeypatch):
    """Bit for bit, also if its decay starts in a step, or before that of a shorter T."""
    monkeypatch.setattr(power, "WARMUP", 300)
    monkeypatch.setattr(power, "HELD_OUT", power.HELD_OUT[:8])
    lengths = (2_000, 2_560, 4_096)
    shares = (0.3, 0.5)
    warm = power.warmup(power.power_law(0.02, -0.3, 0.04))
    branches = power.trunk_and_branches(warm, lengths, 0, shares)
    assert branches.keys() == set(itertools.product(lengths, shares))
    for (T, share), branch in branches.items():
        start = T - round(share * T)
        alone = power.Run(seed=0).train(power.decay(warm, start, T), T)
        assert equal(branch, alone)
        assert branch.rates == alone.rates
        assert branch.tokens == alone.tokens <= T
        alone.measure()
        assert branch.loss == alone.loss
    assert not equal(power.Run(seed=0), power.Run(seed=1))


def test_nothing_that_we_train_on_is_held_out():
    held_out = {row.numpy().tobytes() for row in power.HELD_OUT}
    assert not held_out & {row.numpy().tobytes() for row in power.TRAIN}
    assert len(power.TRAIN) * power.SEQ_LEN == max(power.LENGTHS)


# -- The law and the errors. docs/exercises tests valleys without a bottom --------------


def test_its_law_is_that_of_fit():
    """On parabolas around a known law, with tilts of the seeds that are 0 on average."""
    b = -0.31
    valleys = {}
    rows = []
    for times in (1, 2, 4):
        T = times * power.T0
        best = math.log2(0.02 * times**b)
        losses = {lr: 2 + 0.1 * (math.log2(lr) - best) ** 2 for lr in power.RATES}
        assert power.vertex(losses) == pytest.approx(2**best, rel=1e-9)
        valleys[T] = {}
        for lr, loss in losses.items():
            tilts = (0, 0.05, -0.05, 0)
            valleys[T][lr] = [loss + tilt * math.log2(lr) for tilt in tilts]
            run = dict(total_tokens=T, batch_size=4, seq_len=power.SEQ_LEN, shape=())
            rows.append(dict(run, schedule="wsd", seed=0, lr=lr, loss=loss))
        assert power.best_rate(valleys[T]) == pytest.approx(2**best, rel=1e-9)
    law = fit.fit_law(fit.bottoms(fit.valleys_of(fit.curves_of(rows))))
    found, error = power.law(valleys)
    assert found == pytest.approx(b, rel=1e-9)
    assert law.b == pytest.approx(b, rel=1e-9)
    assert error == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seeds", power.STUDENT)
def test_the_error_is_half_of_the_interval_of_student(seeds):
    values = [0.1, 0.4, -0.2, 0.3, 0.7, 0.2][:seeds]
    error = student(seeds - 1) * np.std(values, ddof=1) / math.sqrt(seeds)
    expected = (np.mean(values), error)
    assert power.estimate(values) == pytest.approx(expected, rel=1e-3)


# -- The program and its notebook --------------------------------------------------------

SOURCE = Path(power.__file__).read_text(encoding="utf-8")
FIGURES = {"power-valleys.png", "power.png"}
SMALLER = {
    "SEQ_LEN = 128": "SEQ_LEN = 8",
    "T0 = 80 * STEP": "T0 = 5 * STEP",
    "WARMUP = 16 * STEP": "WARMUP = STEP",
    "PILOT_SEEDS = (0, 1, 2, 3)": "PILOT_SEEDS = (0, 1)",
    "SEEDS = (4, 5, 6, 7, 8)": "SEEDS = (4, 5)",
    "(0.004, 0.01, 0.025, 0.0625)": "(0.01, 0.025, 0.0625)",
    "LAYERS = 2": "LAYERS = 1",
    "[:128]": "[:16]",
    'rglob("*.py"))': 'rglob("*.py"))[::20]',
    "dpi=200": "dpi=50",
}


def test_the_whole_file_runs_and_its_race_has_what_the_pilot_found(tmp_path):
    source = SOURCE
    for old, new in SMALLER.items():
        assert old in source
        source = source.replace(old, new)
    Path("power.py").write_text(source, encoding="utf-8")
    names = runpy.run_path("power.py", run_name="__main__")
    assert {path.name for path in tmp_path.glob("*.png")} == FIGURES
    b, _ = names["law"](names["valleys"])
    wsd_lr = power.best_rate(names["valleys"][names["T0"]])
    half, _ = names["trunks"]["half"]
    assert half(1) == pytest.approx(wsd_lr / 2)
    trunk = names["power"](0.01)
    assert trunk(4 * names["T0"]) == pytest.approx(0.01 * 4**b)


NOTEBOOK = Path(power.__file__).parent / "docs/power.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
OUTPUTS = [out for cell in CELLS for out in cell.get("outputs", [])]
PRINTED = "".join("".join(out.get("text", "")) for out in OUTPUTS)


def test_the_notebook_is_the_file():
    """Its cells are those of power.py, and it shows what they print and draw."""
    cells = notebook.cells_of(SOURCE)
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in CELLS] == cells
    kinds = [out["output_type"] for out in OUTPUTS]
    assert kinds.count("display_data") == len(FIGURES)
    assert "The race" in PRINTED and "/" not in PRINTED  # no path of a machine
    text = "\n".join(source for kind, source in cells if kind == "markdown")
    for link in re.findall(r"\]\((.*?)\)", text):  # relative to the notebook
        assert NOTEBOOK.parent.joinpath(link).exists(), link


# -- What the lesson types ---------------------------------------------------------------

LESSON = (Path(power.__file__).parent / "docs/lesson.md").read_text(encoding="utf-8")
LOOP, WSD, POWER = re.findall(r"^```python\n(.*?)^```", LESSON, re.S | re.M)


def test_the_loop_of_the_lesson_runs(capsys):
    assert "STEPS = 320" in LOOP
    exec(LOOP.replace("STEPS = 320", "STEPS = 4"), {})
    # nats. New weights have ln 256 = 5.55 or more
    assert 2 < float(capsys.readouterr().out) < 5.5


@pytest.mark.parametrize("typed, b", [(WSD, 0), (POWER, -0.3)])
def test_the_schedules_of_the_lesson_are_those_of_power(typed, b):
    """Within a step, because they count steps and we take the middle."""
    names = {"STEPS": 320}
    exec(typed, names)
    trunk = power.warmup(power.power_law(0.016, b))
    T = 320 * power.STEP
    schedule = power.decay(trunk, 0.7 * T, T)
    for step in range(320):
        ends = schedule(step * power.STEP), schedule((step + 1) * power.STEP)
        assert min(ends) * (1 - 1e-9) <= names["learning_rate"](step)
        assert names["learning_rate"](step) <= max(ends) * (1 + 1e-9)


def test_the_race_of_the_lesson_is_that_of_the_notebook():
    found = re.findall(r"-?0\.\d+ ± 0\.\d+", LESSON)
    assert found and [x for x in found if x not in PRINTED] == []
