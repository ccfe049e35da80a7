import inspect
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models in tests are small
# the same tests on a machine with a GPU
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# A shell ignores Ctrl-C in what it starts in the background, and nohup a lost connection.
# The programs that tests start would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import harness
import pytest
import torch

import data
import train
from tools.prepare import prepare

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Small documents with a little structure, which a model learns in seconds."""
    rng = random.Random(0)
    names = ["alpha", "beta", "gamma", "delta", "épsilon", "ζ"]
    texts = []
    for _ in range(300):
        lines = []
        for _ in range(rng.randrange(1, 40)):
            lines.append(f"def {rng.choice(names)}({rng.choice(names)}):")
            lines.append(f"    return {rng.randrange(10)}\n")
        texts.append("\n".join(lines))
    return texts


@pytest.fixture(scope="session")
def corpus_path(documents, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "small"
    prepare(documents, "bytes", path)
    return path


@pytest.fixture
def corpus(corpus_path) -> data.Corpus:
    return data.open_corpus(corpus_path)


@pytest.fixture(scope="session")
def tokenizer_path(documents, tmp_path_factory) -> str:
    """A tokenizer.json: all bytes, and a few longer tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "words.json"
    harness.train_tokenizer(path, documents, size=280)
    return str(path)


@pytest.fixture
def one_line(capsys) -> Callable:
    """A function that calls a main, which must refuse its flags. Returns what it says."""

    def refused(main: Callable, flags: list[str]) -> str:
        capsys.readouterr()
        try:
            status = main(flags)
        except SystemExit as stop:  # of argparse
            status = stop.code
        error = capsys.readouterr().err
        assert status == 2 and len(error.splitlines()) == 1, (flags, status, error)
        assert error.startswith(f"{Path(inspect.getfile(main)).name}: ")
        return error

    return refused


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """No test leaves anything in the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def short_samples():
    """A whole one would take longer than the training of a small model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "sample", partial(train.sample, max_new_tokens=20))
        yield
