"""The three forks of the README: each patch applies to a copy of the project, runs, and does what it says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from test_train import SMALL

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


def run(folder: Path, file: str, **flags) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, file, *(f"--{name}={value}" for name, value in flags.items())], cwd=folder, capture_output=True, text=True)


def test_a_free_batch_exponent(fork, corpus_path):
    folder, rates = fork("free_q"), {}
    for batch_size, q in ((8, 0.5), (32, 0.5), (32, 1.0)):
        flags = SMALL | dict(data=corpus_path, batch_size=batch_size, total_tokens=4096, warmup_tokens=0, power_q=q, lr_max=1e9, out="a", log_every=1024, eval_every=10**6)
        result = run(folder, "train.py", **flags)
        assert result.returncode == 0, result.stderr
        lines = [json.loads(line) for line in (folder / "a" / "metrics.jsonl").read_text().splitlines()]
        middle = 3072 - batch_size * 32 / 2  # of the step's tokens
        rates[batch_size, q] = next(line["lr"] for line in lines if line["tokens"] == 3072) * middle**0.51
        shutil.rmtree(folder / "a")
    assert rates[32, 0.5] / rates[8, 0.5] == pytest.approx(2) and rates[32, 1.0] / rates[32, 0.5] == pytest.approx((32 * 32 / 4096) ** 0.5)


def test_qk_norm(fork, corpus_path):
    without_a_role = run(fork("qk_norm", "model.py"), "train.py", **SMALL | dict(data=corpus_path))
    assert without_a_role.returncode != 0 and "no rule for blocks.0.attn.q_norm" in without_a_role.stderr
    flags = SMALL | dict(data=corpus_path, schedule="wsd", lr=0.64, total_tokens=10 * 1024, out="a", eval_every=10**6)
    folder, plain = fork("qk_norm"), fork("free_q")  # the other fork leaves the layer alone
    record = lambda where, **more: run(where, "train.py", **flags | more).returncode or json.loads((where / "a" / "record.json").read_text())
    with_norm, without = record(folder, attention_multiplier=16**-0.5), record(plain)
    assert with_norm["n_params"] == without["n_params"] + 2 * 2 * 16  # two gains for each of two blocks
    print(with_norm["val_loss"], without["val_loss"])
    assert with_norm["val_loss"] < without["val_loss"]  # at far too high a rate


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
