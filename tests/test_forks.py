"""The patches in forks/: each applies to a copy of the project, runs, and does what it says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import train
from test_train import flags, read

ROOT = Path(__file__).parent.parent


def fork(patch: str) -> Path:
    """Apply a patch to a copy of the project. -> its folder."""
    copy = Path(patch).absolute()
    skip = shutil.ignore_patterns(
        ".*", "research", "assets", "tests", "docs", "runs", "data"
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
