"""From files and datasets to tokens: nothing lost, nothing leaked, and what we refuse."""

import gzip
import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from tools.prepare import embedded_texts, prepare, read_files

# -- The embedded text -------------------------------------------------------------------


@pytest.mark.skipif(version("torch").split("+")[0] != "2.13.0", reason="other text")
def test_the_embedded_corpus_is_that_of_the_committed_runs():
    prepare(embedded_texts(Path(torch.__file__).parent), "bytes", Path("c"))
    assert data.open_corpus("c").meta["fingerprint"] == "b02b98e2d54fc83c"


# -- Any text ----------------------------------------------------------------------------


def is_held_out(text: str) -> bool:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < 0.3 * 2**64


def test_every_text_is_there_once_and_its_copies_on_one_side(documents):
    """Encoded in one go. 30% of the texts are held out, but never the first."""
    long = [f"{i}" + "é" * 20_000 for i in range(20)]  # 32 KB end within a letter
    texts = [*filter(is_held_out, [*long, *documents]), *documents]
    prepare(["", *texts, *texts], "bytes", Path("c"), val_fraction=0.3)
    corpus = data.open_corpus("c")
    expected = {"train": [], "val": []}  # token ids
    n_bytes = 0
    for text in [*texts, *texts]:
        split = "train"
        if is_held_out(text) and text != texts[0]:
            split = "val"
            text = text.encode()[: 32 * 1024].decode(errors="ignore")
            n_bytes += len(text.encode())
        ids = corpus.tokenizer.encode_ordinary(text)
        expected[split] += [*ids, corpus.tokenizer.eot_token]
    assert corpus.train.tolist() == expected["train"]
    assert corpus.val.tolist() == expected["val"]
    assert corpus.meta["bytes_per_token"] == n_bytes / len(corpus.val)


def test_few_or_long_texts_hold_out_the_end(tokenizer_path):
    """As the last tenth of one book. Nothing is lost, and nothing is on both sides.

    With another tenth the tokens have the same order, but another fingerprint.
    """
    texts = ["".join(f"def é({i}):\n" for i in range(5000)), "b" * 99]
    found = set()
    for share in (0.1, 0.2):
        prepare(texts, tokenizer_path, Path(f"{share}"), share)
        corpus = data.open_corpus(f"{share}")
        whole = np.concatenate([corpus.train, corpus.val])
        assert len(corpus.val) == pytest.approx(share * len(whole), rel=0.01)
        words = whole[whole != corpus.tokenizer.eot_token].tolist()
        assert corpus.tokenizer.decode(words) == "".join(texts)
        found.add(corpus.meta["fingerprint"])
    assert len(found) == 2


@pytest.mark.parametrize("layout, flag", [
    ("txt", "source"), ("py.gz", "source"), ("JSONL", "source"), ("json.gz", "source"),
    ("jsonl", "dataset"),
])  # fmt: skip
def test_every_kind_of_file_gives_the_same_tokens(layout, flag, documents):
    texts = []
    for i, text in enumerate(documents):
        texts.append(text + "\r\n\r<|endoftext|> ζ\n" * (i % 7))
    files = texts
    if "json" in layout.lower():
        files = []
        for part in (texts[:111], texts[111:]):
            files.append("\n".join(json.dumps({"id": 1, "text": t}) for t in part))
    Path("source").mkdir()
    pack = gzip.compress if layout.endswith(".gz") else bytes
    for i, content in enumerate(files):
        Path("source", f"{i:05}.{layout}").write_bytes(pack(content.encode()))
    assert data.main([f"--{flag}=source", "--out=c", "--val_fraction=0.3"]) == 0
    prepare(texts, "bytes", Path("expected"), 0.3)
    assert data.open_corpus("c").meta == data.open_corpus("expected").meta


def test_files_come_in_the_order_of_their_names():
    names = ["a/[d]/x.md", "a/d/e/x", "b/c.txt", "b-c/x", "b.txt", "x"]
    for name in [*reversed(names), ".git/x", "a/.x", "b/.c/d/x"]:
        Path("top", name).parent.mkdir(parents=True, exist_ok=True)
        Path("top", name).write_text(name)
    assert list(read_files(["top"], "text")) == names
    assert list(read_files(["top/x", "top/b"], "text")) == ["x", "b/c.txt"]


FILES = {
    "cut.jsonl": b'{"text": "cut of',
    "half.txt.gz": gzip.compress(b"packed" * 10_000, compresslevel=0)[:20_000],
    "latin": "naïve".encode("latin-1"),
    "short": b"text",
}


@pytest.mark.parametrize("typed, word", [
    ("--source cut.jsonl --out c", "cut.jsonl"),
    ("--source half.txt.gz --out c", "half.txt.gz"),
    ("--source latin --out c", "latin"),
    ("--source short --out c", "too little"),
    ("--source nowhere --out c", "nowhere"),
    ("--source short", "--out"),
    ("--source short --out latin", "--out latin"),
    ("--source short --out c --val_fraction nan", "--val_fraction nan"),
])  # fmt: skip
def test_errors_are_one_line_and_leave_nothing(typed, word, one_line):
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    assert word in one_line(data.main, typed.split())
    assert {path.name for path in Path().iterdir()} == FILES.keys()
