"""power.py is the paper in one file. The other files are its oracle, and it is theirs."""

import json
import math
import os
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
import schedules
import train

# -- Schedules ---------------------------------------------------------------------------


def test_schedules_are_those_of_schedules():
    N = np.linspace(0, 640_000, 1001)
    T = 640_000
    warm = power.WARMUP
    pairs = []
    for q, lr_max in ((1, 0.02), (0.5, 1.0)):
        law = dict(a=0.5, b=-0.3, beta=0.25, lr_max=lr_max, q=q)
        pairs.append((power.power_law(**law), schedules.power_law(**law)))
    pairs.append((power.constant(0.01), schedules.constant(0.01)))
    ends = []
    for one, other in pairs:
        one = power.decay(power.warmup(one, warm), T, 200_000)
        other = schedules.decay(schedules.warmup(other, warm), T, 200_000, "exp")
        ends.append((one, other))
    cosine = power.warmup(power.cosine(0.01, warm, T), warm)
    ends.append((cosine, schedules.warmup(schedules.cosine(0.01, warm, T, 0.1), warm)))
    line = power.warmup(power.linear(0.01, warm, T), warm)
    held = schedules.warmup(schedules.constant(0.01), warm)
    ends.append((line, schedules.decay(held, T, T - warm, "linear")))
    for one, other in ends:
        assert [one(n) for n in N] == pytest.approx([other(n) for n in N], rel=1e-12)


def test_the_race_scales_the_law():
    """At its first length, Power and WSD are at the law times their factor."""
    law = (0.7, -0.3, 0.5)
    first = power.LENGTHS[0]
    at_law = power.law_at(law, first, power.BATCH_SIZE)
    assert power.falling(law, 1.5)(first) == pytest.approx(1.5 * at_law)
    assert power.falling(law, 1.5)(4 * first) == pytest.approx(1.5 * at_law * 4**-0.3)
    assert power.held(law, 1.5)(4 * first) == pytest.approx(1.5 * at_law)


# -- Training ----------------------------------------------------------------------------


def test_its_losses_are_those_of_train(monkeypatch):
    """A whole run, with the same weights at the start and the same batches."""
    total = 4_096
    monkeypatch.setattr(power, "WARMUP", 1_000)
    cfg = train.make_config(
        schedule="wsd", lr=0.01, total_tokens=total, warmup_tokens=power.WARMUP,
        batch_size=2, n_layer=power.LAYERS, n_embd=power.WIDTH, n_head=power.HEADS,
        seq_len=power.SEQ_LEN, base_width=power.WIDTH, init_std=power.INIT_STD,
        m_emb=power.M_EMB, attention_multiplier=(power.HEADS / power.WIDTH) ** 0.5,
        device="cpu", dtype="float32", compile=False,
    )  # fmt: skip

    def draw(g, seq_len, _seed):
        rows = power.batch_at(int(g[0]) * seq_len, len(g)).numpy()
        return rows[:, :-1].copy(), rows[:, 1:].copy()

    state = train.build(cfg)
    run = power.Run(batch_size=2)
    for one, other in zip(run.model.parameters(), state.model.parameters()):
        if one.dim() == 2:  # drawn with the same standard deviation
            assert one.std().item() == pytest.approx(other.std().item(), rel=0.1)
    run.model.load_state_dict(state.model.state_dict())  # the same names
    warm = power.warmup(power.constant(0.01), power.WARMUP)
    schedule = power.decay(warm, total, cfg.decay_tokens)
    for step in train.training_steps(cfg, state, SimpleNamespace(draw=draw)):
        loss = run.branch().step(step.lr)
        assert loss.item() == pytest.approx(step.loss.item(), rel=1e-5)
        run.train(schedule, run.tokens + cfg.batch_tokens)
        assert run.rates[-1][1] == pytest.approx(step.lr, rel=1e-12)
    assert run.tokens == state.tokens == total // cfg.batch_tokens * cfg.batch_tokens


def test_a_branch_is_the_separate_run():
    """Bit for bit, and it does not change its trunk."""
    lengths = (4_096, 8_192)
    warm = power.warmup(power.power_law(0.5, -0.3, 0.25, 0.02, q=0.5), 1_000)
    trunk, branches = power.trunk_and_branches(warm, 2, lengths)
    pairs = [(power.Run(2).train(warm, round(0.7 * lengths[-1])), trunk)]
    for length in lengths:
        decayed = power.decay(warm, length, round(0.3 * length))
        pairs.append((power.Run(2).train(decayed, length), branches[length]))
    for one, other in pairs:
        for p, p_other in zip(one.model.parameters(), other.model.parameters()):
            assert torch.equal(p, p_other)


# -- The law. docs/exercises/judge.py tests losses without a bottom ----------------------


def test_its_law_is_that_of_fit():
    """On valleys that are parabolas around a known law."""
    a, b, q = 0.4, -0.31, 0.55
    minima, rows = [], []
    for length in power.SWEEP_LENGTHS:
        for batch_size in (2, 8, 32):
            beta = batch_size * power.SEQ_LEN / 4096
            best = math.log2(a * beta**q * length**b)
            rates = [2 ** (round(best) + k) for k in (-2, -1, 0, 1, 2)]
            losses = {lr: 2 + 0.1 * (math.log2(lr) - best) ** 2 for lr in rates}
            assert power.vertex(losses) == pytest.approx(2**best, rel=1e-9)
            assert power.regret(losses, 2**best, 2 * 2**best) == pytest.approx(0.1)
            minima.append((length, beta, power.vertex(losses)))
            same = dict(total_tokens=length, batch_size=batch_size, seed=0, shape="1")
            for lr, loss in losses.items():
                rows.append(dict(same, seq_len=power.SEQ_LEN, lr=lr, loss=loss))
    assert power.fit_law(minima) == pytest.approx((a, b, q), rel=1e-9)
    law = fit.fit_law(fit.bottoms(fit.valleys_of(fit.trials_of(rows))))
    (log2_a,) = law.log2_a.values()
    assert (2**log2_a, law.b, law.q) == pytest.approx((a, b, q), rel=1e-9)


# -- The program and its notebook --------------------------------------------------------

SOURCE = Path(power.__file__).read_text(encoding="utf-8")
FIGURES = {"power-schedules.png", "power-valleys.png", "power-law.png", "power.png"}
SMALLER = {
    "SEQ_LEN = 128": "SEQ_LEN = 16",
    "WARMUP = 32_000": "WARMUP = 100",
    "(80_000, 160_000, 320_000)": "(320, 480, 640)",
    "(320_000, 640_000, 1_280_000)": "(640, 800, 1_000)",
    "256, 32, 2, 2": "256, 8, 1, 1",
    "[:256]": "[:16]",
    'rglob("*.py"))': 'rglob("*.py"))[::20]',
    # runs as short as these have no law
    "law = fit_law(minima)": "law = (0.6, -0.3, 0.5)",
    "dpi=200": "dpi=50",
}


def test_the_whole_file_runs(tmp_path, monkeypatch, capsys):
    """With the MPLBACKEND of a notebook's `!python power.py`, or any other."""
    source = SOURCE
    for old, new in SMALLER.items():
        assert old in source
        source = source.replace(old, new)
    (tmp_path / "power.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    runpy.run_path("power.py", run_name="__main__")
    assert os.environ["MPLBACKEND"] == "Agg"
    printed = capsys.readouterr().out
    assert printed.count("batch ") == 10
    for name in ("Power", "WSD", "cosine", "linear"):  # of every racer, the tries
        assert re.search(rf"^  {name} .* so we take", printed, re.M), name
    assert re.search(r"nats above .*\n.* above it", printed)
    assert {path.name for path in tmp_path.glob("*.png")} == FIGURES


def test_a_figure_that_it_cannot_write_ends_it_in_one_line(capsys):
    Path("power.png").mkdir()  # also root may not write over a folder
    with pytest.raises(SystemExit) as end:
        power.finish("power.png")
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_notebook_is_the_file():
    """Its cells are those of power.py, and it shows what they print and draw."""
    path = Path(power.__file__).parent / "docs/power.ipynb"
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    cells = notebook.cells_of(SOURCE)
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in found] == cells
    outputs = [out["output_type"] for cell in found for out in cell.get("outputs", [])]
    assert outputs.count("display_data") == len(FIGURES)
    assert outputs.count("stream") == 4  # valleys, law, worth of the law, race
    assert "/" not in "".join(found[1]["source"])  # no path of a machine
    text = "\n".join(source for kind, source in cells if kind == "markdown")
    for link in re.findall(r"\]\((.*?)\)", text):  # relative to the notebook
        assert path.parent.joinpath(link).exists(), link
