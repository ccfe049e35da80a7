"""power.py is the paper in one file. Here the other files are its oracle, and it is theirs."""

import json
import math
import os
import subprocess
import sys
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

N = np.linspace(0, 640_000, 1001)
FIGURES = {"power-schedules.png", "power-valleys.png", "power-law.png", "power.png"}


@pytest.mark.parametrize("q, lr_max", [(1, 0.02), (0.5, 1.0)])
def test_its_schedules_are_ours(q, lr_max):
    T = 640_000
    law = dict(a=0.5, b=-0.3, beta=0.25, lr_max=lr_max)
    warm = power.WARMUP
    pairs = [
        (power.power_law(**law, q=q), schedules.power_law(**law, q=q)),
        (power.constant(0.01), schedules.constant(0.01)),
    ]
    for one, other in pairs:
        one = power.decay(power.warmup(one, warm), T, T // 10)
        other = schedules.decay(schedules.warmup(other, warm), T, T // 10, "exp")
        assert [one(n) for n in N] == pytest.approx([other(n) for n in N], rel=1e-12)
    one = power.warmup(power.cosine(0.01, warm, T), warm)
    other = schedules.warmup(schedules.cosine(0.01, warm, T, 0.1), warm)
    assert [one(n) for n in N] == pytest.approx([other(n) for n in N], rel=1e-12)
    one = power.warmup(power.linear(0.01, warm, T), warm)
    held = schedules.warmup(schedules.constant(0.01), warm)
    other = schedules.decay(held, T, T - warm, "linear")
    assert [one(n) for n in N] == pytest.approx([other(n) for n in N], rel=1e-12)


def test_its_losses_are_those_of_train():
    """A whole run, with the same weights at the start and the same batches."""
    T = 40_000
    cfg = train.make_config(
        schedule="wsd", lr=0.01, total_tokens=T, warmup_tokens=power.WARMUP, batch_size=8,
        n_layer=power.LAYERS, n_embd=power.WIDTH, n_head=power.HEADS, seq_len=power.SEQ_LEN,
        base_width=power.WIDTH, init_std=power.INIT_STD, m_emb=power.M_EMB,
        attention_multiplier=(power.HEADS / power.WIDTH) ** 0.5, device="cpu",
        dtype="float32", compile=False,
    )  # fmt: skip

    def draw(g, seq_len, _seed):
        rows = power.batch_at(int(g[0]) * seq_len, len(g)).numpy()
        return rows[:, :-1].copy(), rows[:, 1:].copy()

    corpus = SimpleNamespace(draw=draw)
    state = train.build(cfg)
    ours = power.Run(batch_size=8)
    assert all(
        math.isclose(one.detach().std(), other.detach().std(), rel_tol=0.1)
        for one, other in zip(ours.model.parameters(), state.model.parameters())
        if one.dim() == 2
    )
    ours.model.load_state_dict(state.model.state_dict())  # the same names
    warm = power.warmup(power.constant(0.01), power.WARMUP)
    schedule = power.decay(warm, T, T // 10)
    for step in train.training_steps(cfg, state, corpus):
        lr = schedule(ours.tokens + cfg.batch_tokens / 2)
        assert step.lr == pytest.approx(lr, rel=1e-12)
        assert ours.step(lr).item() == pytest.approx(step.loss.item(), rel=1e-5)
    assert ours.tokens == state.tokens == T // cfg.batch_tokens * cfg.batch_tokens


def test_its_law_is_that_of_fit():
    """On valleys that are parabolas around a known law, sampled at the rates of a sweep."""
    a, b, q = 0.4, -0.31, 0.55
    minima, rows = [], []
    for T in power.SWEEP_LENGTHS:
        for batch_size in (2, 8, 32):
            beta = batch_size * power.SEQ_LEN / 4096
            best = math.log2(a * beta**q * T**b)
            rates = [2 ** (round(best) + k) for k in (-2, -1, 0, 1, 2)]
            losses = {lr: 2 + 0.1 * (math.log2(lr) - best) ** 2 for lr in rates}
            assert power.vertex(losses) == pytest.approx(2**best, rel=1e-9)
            minima.append((T, beta, power.vertex(losses)))
            same = dict(total_tokens=T, batch_size=batch_size, seq_len=power.SEQ_LEN)
            rows += [dict(same, lr=lr, val_loss=loss) for lr, loss in losses.items()]
    assert power.fit_law(minima) == pytest.approx((a, b, q), rel=1e-9)
    law = fit.law_of(rows)
    assert (law["a"], law["b"], law["q"]) == pytest.approx((a, b, q), rel=1e-9)


def test_a_branch_is_the_separate_run():
    """Bit for bit, and it does not change its trunk."""
    lengths = (20_000, 40_000)
    warm = power.warmup(power.power_law(0.5, -0.3, 0.25, 0.02, q=0.5), 4_000)
    trunk, branches = power.trunk_and_branches(warm, 8, lengths)
    for T in lengths:
        alone = power.Run(8)
        alone.train(power.decay(warm, T, T // 10), T)
        pairs = zip(alone.model.parameters(), branches[T].model.parameters())
        assert all(torch.equal(one, other) for one, other in pairs)
    straight = power.Run(8).train(warm, lengths[-1] * 9 // 10)
    pairs = zip(straight.model.parameters(), trunk.model.parameters())
    assert all(torch.equal(one, other) for one, other in pairs)


SOURCE = Path(power.__file__).read_text(encoding="utf-8")
SMALLER = {  # tokens, so that the whole program takes seconds
    "WARMUP = 32_000": "WARMUP = 2_000",
    "(80_000, 160_000, 320_000)": "(4_000, 5_000, 6_000)",
    "(320_000, 640_000, 1_280_000)": "(10_000, 12_000, 20_000)",
    "[:256]": "[:16]",
}


def run_as_program(folder: Path, source: str, *argv: str) -> subprocess.CompletedProcess:
    """With the MPLBACKEND of a notebook's `!python power.py`, or any other."""
    for old, new in SMALLER.items():
        assert old in source
        source = source.replace(old, new)
    (folder / "power.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "power.py", *argv]
    env = os.environ | {"MPLBACKEND": "nonsense"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_the_whole_file_runs(tmp_path):
    done = run_as_program(tmp_path, SOURCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("batch ") == 10 and "best learning rate =" in done.stdout
    assert {path.name for path in tmp_path.glob("*.png")} == FIGURES
    assert all((tmp_path / name).stat().st_size > 10_000 for name in FIGURES)


def test_help_is_its_docstring_and_trains_nothing(tmp_path):
    done = run_as_program(tmp_path, SOURCE, "--help")
    assert done.returncode == 0 and done.stdout.strip() == power.__doc__.strip()
    assert list(tmp_path.glob("*.png")) == []


def test_a_folder_that_it_may_not_write_to_ends_it_before_its_work(tmp_path):
    (tmp_path / "power-schedules.png").mkdir()  # also root may not write over a folder
    done = run_as_program(tmp_path, SOURCE)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("power.py: ") and done.stderr.count("\n") == 1


def test_the_notebook_is_the_file():
    """Its cells are those of power.py, and it shows what they print and draw."""
    root = Path(power.__file__).parent
    found = json.loads((root / "docs/power.ipynb").read_text(encoding="utf-8"))["cells"]
    cells = notebook.cells_of(SOURCE)
    assert [(c["cell_type"], "".join(c["source"])) for c in found] == cells
    outputs = [out["output_type"] for c in found for out in c.get("outputs", [])]
    assert outputs.count("display_data") == len(FIGURES) == 4
    assert outputs.count("stream") == 3
    assert "/" not in "".join(found[1]["source"])  # no path of a machine
