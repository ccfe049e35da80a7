"""The patches in forks/: each applies to a copy of the project, runs, and does what it says."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from test_train import SMALL, flags, metrics, read

ROOT = Path(__file__).parent.parent


def fork(patch: str) -> Path:
    """Apply a patch to a copy of the project. -> its folder."""
    copy = Path(patch).absolute()
    skip = shutil.ignore_patterns(
        ".*", "results", "research", "assets", "tests", "docs", "runs", "data"
    )
    shutil.copytree(ROOT, copy, ignore=skip)
    subprocess.run(["git", "apply", ROOT / f"forks/{patch}.patch"], cwd=copy, check=True)
    return copy


def run(folder: Path, *arguments) -> str:
    """Run a program of the fork. -> what it prints."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_ramp_changes_the_batch_size_and_with_it_the_learning_rate_of_power(
    corpus_path,
):
    # 32 tokens per sequence
    argv = flags(corpus_path, schedule="power", log_every=1, out="a")
    folder = fork("batch_ramp")
    run(folder, "train.py", *argv, "--batch_ramp=4@1e3,12@4e3,8@9e3")
    steps, n, size = [], 0, 8
    while n + 32 * size <= 10240:
        steps.append((n, size))
        n += 32 * size
        size = 8 if n < 1000 else 4 if n < 4000 else 12 if n < 9000 else 8
    lines = metrics(folder / "a")
    assert [line["tokens"] for line in lines] == [n + 32 * size for n, size in steps]
    law = dict(power_a=5.0, power_b=-0.51, power_q=1)
    config = lambda size: train.make_config(**SMALL | law | dict(batch_size=size))
    rates = [train.make_schedule(config(size))(n + 16 * size) for n, size in steps]
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-12)


def test_qk_norm_survives_a_high_learning_rate(corpus_path):
    argv = flags(corpus_path, schedule="wsd", lr=0.64, out="a")
    folder = fork("qk_norm")
    run(folder, "train.py", *argv, "--attention_multiplier=0.25")
    assert train.main(argv) == 0
    normed, plain = (read(out / "a/record.json") for out in (folder, Path()))
    # two gains in each of two blocks
    assert normed["n_params"] == plain["n_params"] + 2 * 2 * 16
    assert normed["val_loss"] < plain["val_loss"] - 0.3


def test_notebooks_become_documents_of_a_corpus():
    folder = fork("notebooks")
    (folder / "notes").mkdir()
    cells = [
        {"source": ["# A\n", "text"]},
        {"source": "x = 1", "outputs": [{"text": "OUTPUT"}]},
    ]
    for i in range(30):
        notebook = json.dumps({"cells": [*cells, {"source": f"print({i})"}]})
        (folder / f"notes/{i}.ipynb").write_text(notebook)
    run(folder, "data.py", "--source=notes", "--val_fraction=0.2", "--out=corpus")
    splits = [
        np.fromfile(folder / f"corpus/{split}.bin", np.uint16)
        for split in ("train", "val")
    ]
    documents = np.concatenate(splits).astype(np.uint8).tobytes().split(b"\xff")[:-1]
    expected = [f"# A\ntext\n\nx = 1\n\nprint({i})".encode() for i in range(30)]
    assert sorted(documents) == sorted(expected)


def test_schedule_free_adamw_equals_a_loop_over_its_definition():
    """x, y and z of one weight, with the averages as sums over all past steps."""
    code = """
import math, torch, train
weight = torch.nn.Parameter(torch.tensor([1.5], dtype=torch.double))
groups = [dict(params=[weight], weight_decay=0.1)]
optimizer = train.ScheduleFree(groups, dict(betas=(0.9, 0.95), eps=1e-8))
x, y, z, gradients, zs, shares = 1.5, 1.5, 1.5, [], [], []
for k in range(50):
    lr = optimizer.param_groups[0]["lr"] = 0.005 * min(k + 1, 10) * (0.5 if k > 40 else 1)
    weight.grad = (weight.detach() - 0.3) ** 3 + math.sin(k)
    optimizer.step()
    gradients.append((y - 0.3) ** 3 + math.sin(k))
    v = sum(0.05 * 0.95 ** (k - i) * g * g for i, g in enumerate(gradients)) / (1 - 0.95 ** (k + 1))
    z -= lr * (gradients[-1] / (math.sqrt(v) + 1e-8) + 0.1 * y)
    zs, shares = [*zs, z], [*shares, min(k + 1, 10) ** 2]  # of the highest learning rate so far
    x = sum(share * z for share, z in zip(shares, zs)) / sum(shares)
    y = 0.1 * z + 0.9 * x
    print(abs(weight.item() - y) + abs(optimizer.state[weight]["x"].item() - x))"""
    assert max(map(float, run(fork("schedule_free"), "-c", code).split())) < 1e-12


def test_schedule_free_adamw_branches_bit_for_bit(corpus_path):
    folder, small = fork("schedule_free"), dict(n_layer=1, schedule="constant")
    whole = [*flags(corpus_path, **small, out="a"), "--average"]
    half = [*flags(corpus_path, **small, out="b", total_tokens=5120), "--average"]
    branch = ["--branch=b", "--total_tokens=10240", "--out=c"]
    code = f"import train\nfor argv in {whole}, {half}, {branch}: assert train.main(argv) == 0"
    run(folder, "-c", code)
    a, c = (read(folder / out / "record.json") for out in "ac")
    assert (
        a["average_val_loss"] == c["average_val_loss"] != a["val_loss"] == c["val_loss"]
    )
    saved = torch.load(max((folder / "c/ckpt").iterdir()), weights_only=True)
    xs = [state["x"] for state in saved["optimizer"]["state"].values()]
    assert all(
        any(torch.equal(x, mean) for x in xs) for mean in saved["average"].values()
    )


def test_an_average_counts_weights_at_n_tokens_as_a_power_of_n():
    """Against the weights 1, 2, 3 ... in a sum over all steps."""
    code = """
import torch, train
mean, now = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
for power in (1.0, 64.0):
    for k in range(1, 21):
        torch.nn.init.constant_(now.weight, k)
        train.update_average(mean, now, 256 * (k - 1), 256 * k, power)
    print(mean.weight.item())"""
    found = list(map(float, run(fork("memory"), "-c", code).split()))
    for power, mean in zip((1, 64), found, strict=True):
        steps = range(1, 21)
        shares = [(k / 20) ** (power + 1) - ((k - 1) / 20) ** (power + 1) for k in steps]
        expected = sum(share * k for share, k in zip(shares, steps))
        assert mean == pytest.approx(expected, rel=1e-5)


def test_a_fixed_norm_is_kept_and_a_memory_lowers_the_weight_decay(corpus_path):
    """Initial norms after every step; the weights against a loop over the definition of AdamW."""
    folder = fork("memory")
    argv = flags(
        corpus_path, schedule="constant", weight_decay=0, out="a", save_every=256
    )
    code = f"""
import train
for fixed in ("none", "hidden", "all"):
    assert train.main([*{argv}, "--fixed_norm", fixed, "--out", fixed]) == 0
"""
    run(folder, "-c", code)
    for fixed in ("none", "hidden", "all"):
        newest = max((folder / fixed / "ckpt").iterdir())
        weights = torch.load(newest, weights_only=True)["model"]
        torch.manual_seed(0)
        first = train.GPT(train.make_config(**SMALL)).state_dict()
        kept = {
            name: math.isclose(w.norm(), first[name].norm(), rel_tol=1e-5)
            for name, w in weights.items()
            if w.dim() == 2
        }
        assert kept.pop("embed.weight") == (fixed == "all")
        assert set(kept.values()) == {fixed != "none"}

    code = """
import train
cfg = train.make_config(schedule="constant", memory=2.0, lr=0.01, warmup_tokens=2048)
print([train.weight_decay_at(cfg, n) for n in (100, 2048, 4096, 40960)])
"""
    found = json.loads(run(folder, "-c", code))
    # a step of 1024 tokens forgets the share 1024 / (2 n)
    assert found == pytest.approx(
        [1024 / (2 * n) / 0.01 for n in (2048, 2048, 4096, 40960)]
    )
