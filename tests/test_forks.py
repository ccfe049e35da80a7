"""The patches in forks/: each applies to a copy of the project, runs, and does what it says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SMALL = dict(
    n_layer=2, n_embd=32, n_head=2, seq_len=32, base_width=32, batch_size=8, device="cpu",
    log_every=1024, eval_every=10**6, warmup_tokens=1024, init_std=0.02, m_emb=1.0,
)  # fmt: skip


@pytest.fixture
def fork(tmp_path):
    """A function: patch, and which files of it -> the folder of a patched copy."""

    def apply(patch: str, *only: str) -> Path:
        copy = tmp_path / "-".join([patch or "plain", *only])
        skip = shutil.ignore_patterns(".*", "results", "assets", "tests", "docs", "runs", "data")
        shutil.copytree(ROOT, copy, ignore=skip)
        if patch:
            files = [f"--include={name}" for name in only]
            command = ["git", "apply", *files, str(ROOT / f"forks/{patch}.patch")]
            subprocess.run(command, cwd=copy, check=True)
        return copy

    return apply


def train(folder: Path, *runs: dict) -> subprocess.CompletedProcess:
    """train.py of a copy, with one set of flags after the other, in one process."""
    argvs = json.dumps([[f"--{name}={value}" for name, value in flags.items()] for flags in runs])
    code = "import sys, torch, train; torch.set_num_threads(1); "
    code += f"sys.exit(max(train.main(argv) for argv in {argvs}))"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_free_batch_exponent_scales_the_learning_rate(fork, corpus_path):
    folder, lr = fork("free_q"), {}
    cases = [(8, 0.5), (32, 0.5), (32, 1.0)]
    flags = SMALL | dict(data=corpus_path, total_tokens=4096, warmup_tokens=0, lr_max=1e9)
    runs = [flags | dict(batch_size=B, power_q=q, out=f"{B}-{q}") for B, q in cases]
    result = train(folder, *runs)
    assert result.returncode == 0, result.stderr
    for B, q in cases:
        lines = (folder / f"{B}-{q}/metrics.jsonl").read_text().splitlines()
        step = next(line for line in map(json.loads, lines) if line["tokens"] == 3072)
        lr[B, q] = step["lr"] * (3072 - B * 32 / 2) ** 0.51  # at the middle of the step
    assert lr[32, 0.5] / lr[8, 0.5] == pytest.approx(2)
    assert lr[32, 1.0] / lr[32, 0.5] == pytest.approx((32 * 32 / 4096) ** 0.5)


def test_qk_norm_needs_a_rule_and_survives_a_high_learning_rate(fork, corpus_path):
    flags = SMALL | dict(data=corpus_path, schedule="wsd", lr=0.64, total_tokens=10_240, out="a")
    unruled = train(fork("qk_norm", "model.py"), flags)
    assert unruled.returncode != 0 and "no rule for blocks.0.attn.q_norm" in unruled.stderr
    folders = fork("qk_norm"), fork("")
    for folder, more in zip(folders, (dict(attention_multiplier=16**-0.5), {})):
        assert train(folder, flags | more).returncode == 0
    normed, plain = (json.loads((folder / "a/record.json").read_text()) for folder in folders)
    assert normed["n_params"] == plain["n_params"] + 2 * 2 * 16  # two gains in each of two blocks
    assert normed["val_loss"] < plain["val_loss"] - 0.3


def test_notebooks_become_documents_of_a_corpus(fork):
    folder = fork("notebooks")
    (folder / "notes").mkdir()
    outputs = [{"text": "OUTPUT" * 99}]
    cells = [{"source": ["# A\n", "text"]}, {"source": "x = 1\nprint(x)", "outputs": outputs}]
    for i in range(30):
        notebook = json.dumps({"cells": [*cells, {"source": f"print({i})"}]})
        (folder / f"notes/{i}.ipynb").write_text(notebook)
    flags = ["--source", "notes", "--val_fraction", "0.2", "--out", "corpus"]
    command = [sys.executable, "data.py", *flags]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    splits = [np.fromfile(folder / f"corpus/{split}.bin", np.uint16) for split in ("train", "val")]
    documents = np.concatenate(splits).astype(np.uint8).tobytes().split(b"\xff")[:-1]
    expected = [f"# A\ntext\n\nx = 1\nprint(x)\n\nprint({i})".encode() for i in range(30)]
    assert sorted(documents) == sorted(expected)
