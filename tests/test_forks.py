"""The three forks of the README: each patch applies to a copy of the project, runs, and does what it says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from test_train import SMALL

import train

ROOT = Path(__file__).parent.parent


@pytest.fixture
def fork(tmp_path):
    """-> a function: patch (and which files of it) -> the folder of a patched copy."""

    def apply(patch: str, *only: str) -> Path:
        copy = tmp_path / "-".join([patch, *only])
        copy.mkdir()
        for path in [*ROOT.glob("*.py"), ROOT / "figures.mplstyle"]:
            shutil.copy(path, copy)
        include = [f"--include={name}" for name in only]
        subprocess.run(["git", "apply", *include, str(ROOT / "forks" / f"{patch}.patch")], cwd=copy, check=True)
        return copy

    return apply


def run(folder: Path, *commands: dict) -> subprocess.CompletedProcess:
    """train.py of a copy, with one set of flags after the other, in one process."""
    argvs = [[f"--{name}={value}" for name, value in flags.items()] for flags in commands]
    code = "import json, sys, train; sys.exit(max(train.main(argv) for argv in json.loads(sys.argv[1])))"
    return subprocess.run([sys.executable, "-c", code, json.dumps(argvs)], cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})


def test_a_free_batch_exponent(fork, corpus_path):
    folder, rates = fork("free_q"), {}
    cases = [(8, 0.5), (32, 0.5), (32, 1.0)]
    flags = SMALL | dict(data=str(corpus_path), total_tokens=4096, warmup_tokens=0, lr_max=1e9, log_every=1024, eval_every=10**6)
    result = run(folder, *(flags | dict(batch_size=batch_size, power_q=q, out=f"{batch_size}-{q}") for batch_size, q in cases))
    assert result.returncode == 0, result.stderr
    for batch_size, q in cases:
        lines = [json.loads(line) for line in (folder / f"{batch_size}-{q}" / "metrics.jsonl").read_text().splitlines()]
        middle = 3072 - batch_size * 32 / 2  # of the step's tokens
        rates[batch_size, q] = next(line["lr"] for line in lines if line["tokens"] == 3072) * middle**0.51
    assert rates[32, 0.5] / rates[8, 0.5] == pytest.approx(2) and rates[32, 1.0] / rates[32, 0.5] == pytest.approx((32 * 32 / 4096) ** 0.5)


def test_qk_norm(fork, corpus_path):
    flags = SMALL | dict(data=str(corpus_path), schedule="wsd", lr=0.64, total_tokens=10 * 1024, out="a", eval_every=10**6)
    without_a_role = run(fork("qk_norm", "model.py"), flags)
    assert without_a_role.returncode != 0 and "no rule for blocks.0.attn.q_norm" in without_a_role.stderr
    folder = fork("qk_norm")
    assert run(folder, flags | dict(attention_multiplier=16**-0.5)).returncode == 0
    assert train.main([f"--{name}={value}" for name, value in flags.items()]) == 0
    with_norm, without = (json.loads((where / "a" / "record.json").read_text()) for where in (folder, Path()))
    assert with_norm["n_params"] == without["n_params"] + 2 * 2 * 16  # two gains for each of two blocks
    assert with_norm["val_loss"] < without["val_loss"] - 0.3  # at far too high a rate


def test_notebooks_as_a_corpus(fork):
    folder = fork("notebooks")
    (folder / "notes").mkdir()
    cells = [{"source": ["# A title\n", "and text"], "cell_type": "markdown"}, {"source": "x = 1\nprint(x)", "cell_type": "code", "outputs": [{"text": "OUTPUT" * 99}]}]
    for i in range(30):
        (folder / "notes" / f"{i}.ipynb").write_text(json.dumps({"cells": [*cells, {"source": f"print({i})"}]}))
    result = subprocess.run([sys.executable, "data.py", "--source", "notes", "--val_fraction", "0.2", "--out", "corpus"], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    ids = np.concatenate([np.fromfile(folder / "corpus" / f"{split}.bin", np.uint16) for split in ("train", "val")])
    documents = ids.astype(np.uint8).tobytes().split(b"\xff")[:-1]  # ids are the bytes; 255 ends a document
    assert sorted(documents) == sorted(f"# A title\nand text\n\nx = 1\nprint(x)\n\nprint({i})".encode() for i in range(30))
