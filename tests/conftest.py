"""What several tests share: fixtures, a small run, and readers of what it leaves."""

import inspect
import os
import random
import re
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
from schedules import WITH_DECAY
from tools import files, plots
from tools.prepare import prepare

torch.set_num_threads(1)

# -- A small run -------------------------------------------------------------------------

STEP = 256  # tokens
SMALL = dict(
    n_layer=1, n_embd=32, n_head=2, seq_len=32, base_width=16, init_std=0.05, m_emb=1.0,
    batch_size=8, total_tokens=30 * STEP, warmup_tokens=4 * STEP, device="cpu",
    dtype="float32", log_every=STEP, eval_every=10 * STEP,
)  # fmt: skip
MOE = dict(n_ffn=40, n_expert=4, n_expert_active=2)
FEW_VALIDATED = dict(eval_tokens=320, final_eval_tokens=640)


def argv(**changed) -> list[str]:
    """The command line of a small run, under Power if not changed."""
    schedule = changed.get("schedule", "power")
    fields = dict(SMALL)
    if schedule != "power":
        fields["lr"] = 0.02
    if schedule in WITH_DECAY:
        fields["decay_share"] = 0.1
    if "minutes" in changed:
        del fields["total_tokens"]
    return [f"--{name}={value}" for name, value in (fields | changed).items()]


def metrics(run, key: str = "loss") -> list[dict]:
    return [
        line for line in files.read_records(Path(run, "metrics.jsonl")) if key in line
    ]


def record_of(run) -> dict:
    return files.read_json(Path(run, "record.json"))


def newest(run) -> dict:
    """The newest checkpoint."""
    return torch.load(max(Path(run, "ckpt").iterdir()), weights_only=True)


def files_in(folder: Path) -> dict:
    """Every file of a folder, with the time of its last change."""
    found = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {path: path.stat().st_mtime_ns for path in found}


def cells_of(page: str) -> dict[tuple, str]:
    """{(table, row, column): text} of the tables of a page, as research/TABLES.md."""
    found = {}
    for section in page.split("\n## ")[1:]:
        name, _, rest = section.partition("\n")
        lines = re.findall(r"^\| ?(.*?) ?\|$", rest, re.M)
        head, *rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
        for row in rows:
            found |= {(name, row[0], c): cell for c, cell in zip(head[1:], row[1:])}
    return found


# -- Fixtures ----------------------------------------------------------------------------


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


@pytest.fixture(scope="session")
def numbers_path(tmp_path_factory):
    """Another corpus with the same tokenizer."""
    path = tmp_path_factory.mktemp("data") / "numbers"
    prepare([f"{i} squared is {i * i}\n" for i in range(2000)], "bytes", path)
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


DRAW = {name: getattr(plots, name) for name in ("draw_curve", "draw_valleys")}


@pytest.fixture(scope="session", autouse=True)
def short_samples_and_no_figures():
    """They would take longer than the training of a small model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "sample", partial(train.sample, max_new_tokens=20))
        for name in DRAW:
            patch.setattr(plots, name, lambda *_: None)
        yield


@pytest.fixture
def figures(monkeypatch):
    """A test with this argument draws them."""
    for name, draw in DRAW.items():
        monkeypatch.setattr(plots, name, draw)
