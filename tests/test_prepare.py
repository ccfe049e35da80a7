"""From files and datasets to tokens: nothing lost, nothing leaked, and what we refuse."""

import gzip
import hashlib
import json
import unicodedata
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from tools.prepare import embedded_texts, prepare, read_files
from tools.tokenizers import load_tokenizer

# -- The embedded text -------------------------------------------------------------------


def test_the_embedded_text_does_not_depend_on_the_build(tmp_path):
    """Nor on the order in which a disk lists files, or on line ends."""
    names = ["A.py", "a-b/c.py", "a.py", "a/b.py", "nn/version.py"]
    for name in [*reversed(names), "version.py", "x.pyi"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(f"# {name}\r\nx = 'é'\n".encode())
    texts = list(embedded_texts(tmp_path))
    assert texts == [f"# {name}\nx = 'é'\n" for name in names]


@pytest.mark.skipif(version("torch").split("+")[0] != "2.13.0", reason="other text")
def test_the_embedded_corpus_is_that_of_the_committed_runs():
    prepare(embedded_texts(Path(torch.__file__).parent), "bytes", Path("c"))
    assert data.open_corpus("c").meta["fingerprint"] == "b02b98e2d54fc83c"


# -- Any text ----------------------------------------------------------------------------


def is_held_out(text: str, val_fraction: float) -> bool:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def check(folder: str, texts: list[str], tokenizer_name="bytes", val_fraction=0.02):
    """A corpus has every text once, encoded in one go, and says how many there are."""
    tokenizer = load_tokenizer(tokenizer_name)
    expected = {"train": [], "val": []}  # texts
    for text in texts:
        if text != texts[0] and is_held_out(text, val_fraction):
            text = text.encode()[: 32 * 1024].decode(errors="ignore")
            expected["val"].append(text)
        else:
            expected["train"].append(text)
    corpus = data.open_corpus(folder)
    for split, tokens in (("train", corpus.train), ("val", corpus.val)):
        ids = []
        for text in expected[split]:
            ids += [*tokenizer.encode_ordinary(text), tokenizer.eot_token]
        assert tokens.tolist() == ids
    size = len("".join(expected["val"]).encode())
    assert corpus.meta["bytes_per_token"] == size / len(corpus.val)


@pytest.mark.parametrize("tokenizer", ["bytes", "json"])
def test_every_text_is_there_once_and_its_copies_on_one_side(
    tokenizer, documents, tokenizer_path
):
    name = tokenizer_path if tokenizer == "json" else tokenizer
    long = [f"{i}" + "é" * 20_000 for i in range(20)]  # 32 KB end within a letter
    long = [text for text in long if is_held_out(text, 0.3)]
    texts = sorted([*documents, *long[:3]], key=lambda text: is_held_out(text, 0.3))
    texts.reverse()
    assert is_held_out(texts[0], 0.3)  # but the first one trains
    prepare(["", *texts, *texts], name, Path("c"), val_fraction=0.3)
    check("c", [*texts, *texts], name, 0.3)


def test_bytes_are_counted_in_what_comes_back(tokenizer_path, documents):
    """A tokenizer that composes letters makes the text shorter."""
    content = json.loads(Path(tokenizer_path).read_text(encoding="utf-8"))
    content["normalizer"] = {"type": "NFC"}
    Path("nfc.json").write_text(json.dumps(content), encoding="utf-8")
    texts = [unicodedata.normalize("NFD", text + "é" * 99) for text in documents]
    prepare(texts, "nfc.json", Path("c"), 0.2)
    corpus = data.open_corpus("c")
    words = corpus.val[corpus.val != corpus.tokenizer.eot_token].tolist()
    size = len(corpus.tokenizer.decode(words).encode())
    assert corpus.meta["bytes_per_token"] == size / len(corpus.val)


@pytest.mark.parametrize("name, texts", [
    ("bytes", ["".join(f"{i:05} é\n" for i in range(5000))]),
    ("words", ["".join(f"def a({i}):\n" for i in range(5000)), "b" * 99]),
])  # fmt: skip
def test_few_or_long_texts_hold_out_the_end(name, texts, tokenizer_path):
    """As the last tenth of one book. Nothing is lost, and nothing is on both sides."""
    tokenizer = "bytes" if name == "bytes" else tokenizer_path
    prepare(texts, tokenizer, Path("c"), 0.1)
    corpus = data.open_corpus("c")
    whole = np.concatenate([corpus.train, corpus.val])
    assert len(corpus.val) == pytest.approx(0.1 * len(whole), rel=0.01)
    end = corpus.tokenizer.eot_token
    assert corpus.tokenizer.decode(whole[whole != end].tolist()) == "".join(texts)
    val = corpus.tokenizer.decode(corpus.val[corpus.val != end].tolist())
    size = corpus.meta["bytes_per_token"] * len(corpus.val)
    assert size == pytest.approx(len(val.encode()))


def test_another_division_of_a_text_has_another_fingerprint():
    """Even if it moves the border only, so that all tokens stay in the same order."""
    texts = ["".join(f"{i:05} é\n" for i in range(5000))]
    found = set()
    for val_fraction in (0.1, 0.2):
        prepare(texts, "bytes", Path(f"{val_fraction}"), val_fraction)
        found.add(data.open_corpus(f"{val_fraction}").meta["fingerprint"])
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
    check("c", texts, val_fraction=0.3)


def test_files_come_in_the_order_of_their_names():
    names = ["a/[d]/x.md", "a/d/e/x", "b/c.txt", "b/x.txt", "b-c/x", "b.txt", "x"]
    for name in [*reversed(names), ".git/x", "a/.x", "b/.c/d/x"]:
        Path("top", name).parent.mkdir(parents=True, exist_ok=True)
        Path("top", name).write_text(name)
    assert list(read_files(["top"], "text")) == names
    assert list(read_files(["top/x", "top/b"], "text")) == ["x", *names[2:4]]


UNREADABLE = {
    "cut.jsonl": b'{"text": "cut of',
    "other.jsonl": b'{"text": "yes"}\n{"body": "no"}\n',
    "list.json": b"[1]",
    "half.txt.gz": gzip.compress(b"packed" * 10_000, compresslevel=0)[:20_000],
    "not-packed.gz": b"text",
    "latin": "naïve".encode("latin-1"),
}


@pytest.mark.parametrize("typed, word", [
    *[(f"--source {name} --out c", name) for name in UNREADABLE],
    ("--source f nowhere --out c", "nowhere"),
    ("--source f", "--out"),
    ("--source f --out f", "--out f"),
    ("--source f --out c --tokenizer gpt9", "gpt9"),
    ("--source f --out c", "too little"),
    ("--source f --out c --val_fraction 1.5", "--val_fraction 1.5"),
    ("--source f --out c --val_fraction nan", "--val_fraction nan"),
])  # fmt: skip
def test_errors_are_one_line_and_leave_nothing(typed, word, one_line):
    for name, content in (UNREADABLE | {"f": b"text"}).items():
        Path(name).write_bytes(content)
    assert word in one_line(data.main, typed.split())
    assert {path.name for path in Path().iterdir()} == {*UNREADABLE, "f"}
