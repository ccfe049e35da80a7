"""From files and datasets to tokens: nothing lost, nothing leaked, and what we skip."""

import gzip
import hashlib
import json
import re
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
        if expected["train"] and is_held_out(text, val_fraction):
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
        assert corpus.meta[f"{split}_documents"] == len(expected[split])
    size = len("".join(expected["val"]).encode())
    assert corpus.meta["bytes_per_token"] == size / len(corpus.val)


def test_every_text_is_there_once(documents, tokenizer_path, monkeypatch):
    # many batches, some of many texts
    monkeypatch.setattr("tools.prepare.BATCH_SIZE", 2000)
    long = [f"{i}" + "é" * 20_000 for i in range(20)]  # 32 KB end within a letter
    long = [text for text in long if is_held_out(text, 0.3)]
    texts = sorted([*documents, *long[:3]], key=lambda text: is_held_out(text, 0.3))
    texts.reverse()
    assert is_held_out(texts[0], 0.3)  # but the first one trains
    for tokenizer in ("bytes", tokenizer_path):
        folder = Path(tokenizer).stem
        prepare(["", *texts], tokenizer, Path(folder), val_fraction=0.3)
        check(folder, texts, tokenizer, 0.3)


@pytest.mark.parametrize("name, val_fraction", [("bytes", 0.05), ("words", 0.1)])
@pytest.mark.parametrize("n_texts, limit", [(1, 2**15), (14, 2**15), (600, 40)])
def test_few_or_long_texts_hold_out_blocks(
    n_texts, limit, name, val_fraction, tokenizer_path, monkeypatch
):
    """As much as asked for, from all over the texts, with the bytes of these blocks."""
    monkeypatch.setattr("tools.prepare.HELD_OUT_BYTES", limit)
    lines = []
    for i in range(6000):
        word = "ζ" if i % 7 else "a deep 東京"  # tokens of 1 to 3 bytes
        lines.append(f"{i:05}{word * (i % 5)}\n")
    texts = ["".join(part) for part in np.array_split(lines, n_texts)]
    while not is_held_out(texts[-1], val_fraction):  # although it may be the only one
        texts[-1] += "\n"
    tokenizer = "bytes" if name == "bytes" else tokenizer_path
    prepare(texts, tokenizer, Path("c"), val_fraction)

    corpus = data.open_corpus("c")
    n_tokens = len(corpus.val) + len(corpus.train)
    assert len(corpus.val) == pytest.approx(val_fraction * n_tokens, rel=0.01)
    end = corpus.tokenizer.eot_token
    ids = [split[split != end].tolist() for split in (corpus.train, corpus.val)]
    train, val = [corpus.tokenizer.decode(split) for split in ids]
    assert corpus.meta["bytes_per_token"] == len(val.encode()) / len(corpus.val)
    numbers = [int(number) for number in re.findall(r"^\d{5}", val, re.M)]
    in_halves, _ = np.histogram(numbers, bins=2, range=(0, 6000))
    assert in_halves == pytest.approx([val_fraction * 3000] * 2, rel=0.5)
    # nothing is lost, except characters that the start or end of a block cuts
    n = len("".join(texts))
    n_found = len(train.replace("\ufffd", "") + val)
    assert n - 2 * corpus.meta["val_documents"] <= n_found <= n


def write_as(layout: str, texts: list[str]) -> None:
    """Put texts into the folder `source`, in files of this kind."""
    Path("source").mkdir()
    pack = gzip.compress if layout.endswith(".gz") else bytes
    files = texts
    if "json" in layout:
        files = []
        for part in (texts[:111], texts[111:]):
            files.append("\n".join(json.dumps({"id": 1, "text": t}) for t in part))
    for i, content in enumerate(files):
        Path("source", f"{i:05}.{layout}").write_bytes(pack(content.encode()))


@pytest.mark.parametrize("layout", ["txt", "py.gz", "jsonl", "json.gz"])
def test_every_kind_of_file_gives_the_same_tokens(layout, documents, capsys):
    texts = [
        text + "\r\n\r<|endoftext|> ζ\n" * (i % 7) for i, text in enumerate(documents)
    ]
    write_as(layout, texts)
    assert data.main(["--source=source", "--out=c", "--val_fraction=0.3"]) == 0
    check("c", texts, val_fraction=0.3)
    assert "skipped" not in capsys.readouterr().out


def test_a_dataset_gives_the_same_tokens(documents, one_line):
    pytest.importorskip("datasets")
    write_as("jsonl", documents)
    assert data.main(["--dataset=source", "--out=c", "--val_fraction=0.3"]) == 0
    check("c", documents, val_fraction=0.3)
    typed = ["--dataset=source", "--out=d", "--text_field=body"]
    assert "id, text" in one_line(data.main, typed)


def test_files_come_in_the_order_of_their_names():
    names = ["a/[d]/x.md", "a/d/e/x", "b/c.txt", "b/x.txt", "b-c/x", "b.txt", "x"]
    for name in [*reversed(names), ".git/x", "a/.x", "b/.c/d/x"]:
        Path("top", name).parent.mkdir(parents=True, exist_ok=True)
        Path("top", name).write_text(name)
    assert list(read_files(["top"], "text")) == names


MESS = [
    b'\xef\xbb\xbf{"text": "byte order mark"}', b'{"text": "windows"}\r', b'{"text": ""}',
    b"", b" \r", b'{"text": "cut of', b'{"text": null}', b'{"body": "no"}', b"[1]",
    b'{"text": 5}', b'{"text": "bad \xff byte"}', rb'{"text": "half \ud83d pair"}',
    rb'{"text": "whole \ud83d\ude00 pair"}', b'{"text": "last"}', b"",
]  # fmt: skip


def test_what_cannot_be_read_is_skipped_and_named(capsys):
    """And nothing else, so that one bad file does not end the work of hours."""
    packed = gzip.compress(b'{"text": "packed"}\n' * 10_000, compresslevel=0)
    bad = {
        "mess.jsonl": b"\n".join(MESS),
        "half.jsonl.gz": packed[:100_000],
        "not-packed.gz": b"text",
        "picture": b"\x89PNG\0\0",
    }
    good = {
        "a-latin": "naïve text".encode("latin-1"),
        "b-latin": "naïve text".encode("latin-1"),
        "replaced-before": "na\ufffdve".encode(),
        "utf-16": "ζ of Windows\r\n".encode("utf-16"),
    }
    Path("top").mkdir()
    for name, content in (bad | good).items():
        Path("top", name).write_bytes(content)
    texts = list(read_files(["top"], "text"))
    assert texts.count("packed") > 3000
    assert [text for text in texts if text != "packed"] == [
        "na\ufffdve text", "na\ufffdve text", "byte order mark", "windows", "",
        "half \ud83d pair", "whole \U0001f600 pair", "last", "na\ufffdve",
        "ζ of Windows\r\n",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert said.count("skipped") == len(bad)
    assert all(f"skipped top/{name}" in said for name in bad)
    assert "6 of 12 lines" in said
    assert "UTF-8 in 2 files, such as top/a-latin" in said


@pytest.mark.parametrize("argv, word", [
    ("--source f nowhere --out c", "nowhere"),
    ("--source f --out c --val_fraction 2", "--val_fraction"),
    ("--source f", "--out"),
    ("--source f --dataset g --out c", "--dataset"),
    ("--source f --out f", "--out f"),
    ("--source a.jsonl --out c", "text"),
    ("--source f --out c --tokenizer gpt9", "gpt9"),
])  # fmt: skip
def test_errors_are_one_line_and_leave_nothing(argv, word, one_line):
    files = {"f": "text", "a.jsonl": '{"body": "x"}\n' * 9}
    for name, content in files.items():
        Path(name).write_text(content)
    assert word in one_line(data.main, argv.split())
    assert {path.name for path in Path().iterdir()} == set(files)
