"""From text to batches: nothing lost, nothing leaked, and always in the same order."""

import base64
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import eval as evaluation
import runs
import sweep
import train
from test_mistakes import one_line
from test_train import flags
from tools.flags import UserError
from tools.prepare import read_files
from tools.tokenizers import bytes_per_token, load_tokenizer

ROOT = Path(__file__).parent.parent


def plainly(texts, tokenizer_name="bytes", val_fraction=0.02) -> dict[str, bytes]:
    """What a corpus must consist of: each text encoded in one go."""
    tokenizer, parts = load_tokenizer(tokenizer_name), {"train": [], "val": []}
    for text in texts:
        raw = text.encode()
        digest = int.from_bytes(hashlib.sha256(raw).digest()[:8], "big")
        split = "val" if parts["train"] and digest < val_fraction * 2**64 else "train"
        if split == "val":
            text = raw[: 32 * 1024].decode(errors="ignore")
        parts[split] += [*tokenizer.encode_ordinary(text), tokenizer.eot_token]
    return {split: np.array(ids, np.uint16).tobytes() for split, ids in parts.items()}


def check(folder: Path, expected: dict[str, bytes]) -> None:
    """The tokens are the expected ones, and meta.json counts what is there."""
    assert {
        split: (folder / f"{split}.bin").read_bytes() for split in expected
    } == expected
    corpus = data.open_corpus(folder)
    lengths = bytes_per_token(corpus.tokenizer)
    for split, ids in ("train", corpus.train), ("val", corpus.val):
        counted = [
            (ids == corpus.tokenizer.eot_token).sum(),
            len(ids),
            lengths[ids].sum(),
        ]
        kinds = ("documents", "tokens", "bytes")
        assert [corpus.meta[f"{split}_{kind}"] for kind in kinds] == counted
    names = {path.name for path in folder.iterdir()}
    assert names - {corpus.meta["tokenizer"]} == {"train.bin", "val.bin", "meta.json"}


def test_an_epoch_visits_every_sequence_once():
    for n in [*range(1, 40), 97, 127, 128, 129, 251, 256, 257, 1009, 4096, 4097]:
        for seed in (0, 12345):
            order = data.shuffled(np.arange(3 * n), n, seed)
            assert (np.sort(order.reshape(3, n)) == np.arange(n)).all()
            some = np.array([2 * n, 0, n - 1])  # any position can be computed alone
            assert (data.shuffled(some, n, seed) == order[some]).all()


def test_the_order_of_committed_runs_has_not_changed():
    places = data.shuffled(np.array([0, 1, 999, 1000, 10**9]), 1000, 7)
    assert places.tolist() == [919, 595, 744, 386, 944]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_embedded_text_depends_only_on_the_wheel(newline, tmp_path):
    """Not on the order in which a disk lists files, on line ends, or on the build."""
    for name in (
        "a/b.py",
        "a.py",
        "A.py",
        "a-b/c.py",
        "version.py",
        "nn/version.py",
        "b/x.pyi",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = f"# {name}\nx = 'é'\n" * 9
        (tmp_path / name).write_bytes(text.replace("\n", newline).encode())
    names = ["A.py", "a-b/c.py", "a.py", "a/b.py", "nn/version.py"]
    assert list(data.embedded_texts(tmp_path)) == [f"# {n}\nx = 'é'\n" * 9 for n in names]


@pytest.mark.skipif(version("torch").split("+")[0] != "2.13.0", reason="other text")
def test_the_fingerprint_of_the_embedded_corpus(tmp_path):
    """Prepared from this torch, with nothing in a folder of its own: docs/train.md has it too."""
    meta = data.prepare(
        data.embedded_texts(Path(torch.__file__).parent), "bytes", tmp_path / "c"
    )
    assert meta["fingerprint"] == "b02b98e2d54fc83c"
    assert meta["fingerprint"] in (ROOT / "docs" / "train.md").read_text()


def test_the_embedded_corpus_is_prepared_once(
    documents, word_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(data, "__file__", str(tmp_path / "data.py"))
    monkeypatch.setattr(data, "embedded_texts", lambda folder: documents)
    name = f"torch{version('torch').split('+')[0]}"
    assert data.open_corpus("embedded").path == tmp_path / "data" / f"{name}-bytes"
    monkeypatch.setattr(data, "embedded_texts", None)
    assert data.load_corpus(None).meta == data.load_corpus("embedded").meta
    monkeypatch.setattr(data, "embedded_texts", lambda folder: documents)
    first = data.embedded_corpus(
        word_tokenizer
    )  # two files of one name are two tokenizers
    lines = Path(word_tokenizer).read_bytes().splitlines(keepends=True)
    Path(word_tokenizer).write_bytes(b"".join(lines[:-1]))
    assert data.embedded_corpus(word_tokenizer) != first


@pytest.fixture
def word_tokenizer(tmp_path, monkeypatch) -> str:
    """A .tiktoken file: all bytes, and a few longer tokens. Every core has work."""
    monkeypatch.setattr("tools.prepare.BATCH_SIZE", 1)
    ranks = [bytes([i]) for i in range(256)] + [b"de", b"def", b"re", b" a", b"\xce\xb6"]
    lines = [base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(ranks)]
    (tmp_path / "words.tiktoken").write_bytes(b"".join(lines))
    return str(tmp_path / "words.tiktoken")


def test_every_document_is_there_once(documents, word_tokenizer, tmp_path):
    # 32 KB end within a character
    long = [letter + "é" * 20_000 for letter in "abcdefgh"]
    texts = sorted(
        documents + long, key=lambda text: hashlib.sha256(text.encode()).digest()
    )
    # the first one is for training against its hash
    for tokenizer in (
        "bytes",
        word_tokenizer,
    ):
        folder = tmp_path / Path(tokenizer).stem
        data.prepare(["", *texts], tokenizer, folder, val_fraction=0.3)
        check(folder, plainly(texts, tokenizer, 0.3))


def test_the_end_of_a_single_text_is_held_out(tmp_path):
    text = "All work and no play makes a dull boy. " * 5000
    meta = data.prepare([text], "bytes", tmp_path / "c", val_fraction=0.1)
    corpus = data.open_corpus(tmp_path / "c")
    assert meta["val_tokens"] == pytest.approx(0.1 * (len(text) + 1), abs=1)
    whole = np.concatenate([corpus.train, corpus.val])
    assert bytes(whole.astype(np.uint8)) == text.encode() + b"\xff"
    assert meta["train_documents"] == meta["val_documents"] == 1
    assert meta["train_bytes"] + meta["val_bytes"] == len(text)


def test_validation_loss_counts_every_target_and_every_byte(
    documents, word_tokenizer, tmp_path
):
    data.prepare(documents, word_tokenizer, tmp_path / "c")
    Path(word_tokenizer).write_bytes(b"")  # the corpus has a copy
    corpus = data.open_corpus(tmp_path / "c")
    shape = dict(
        n_layer=1, n_embd=16, n_head=1, seq_len=32, init_std=0.5, warmup_tokens=0
    )
    model = train.GPT(train.make_config(**shape, vocab_size=corpus.meta["vocab_size"]))
    n = (len(corpus.val) - 1) // 32 * 32
    tokens = torch.from_numpy(corpus.val[: n + 1].astype(np.int64))
    targets = tokens[1:].view(-1, 32, 1)
    with torch.no_grad():
        loss = (
            -model(tokens[:-1].view(-1, 32))
            .log_softmax(-1)
            .gather(-1, targets)
            .double()
            .sum()
        )
    texts = [t for t in tokens[1:].tolist() if t != corpus.tokenizer.eot_token]
    n_bytes = len(corpus.tokenizer.decode_bytes(texts))
    result = evaluation.validation_loss(model, corpus)
    assert result["val_loss"] == pytest.approx(loss.item() / n, rel=1e-6)
    assert result["val_bpb"] == pytest.approx(loss.item() / np.log(2) / n_bytes, rel=1e-6)


def write_in(layout: str, texts: list[str], folder: Path) -> None:
    """Put texts into a folder in this layout, some of them to a file."""
    folder.mkdir()
    kind, _, packed = layout.partition(".")
    pack = gzip.compress if packed else bytes
    for i, text in enumerate(texts if kind == "txt" else ()):
        (folder / f"{i:05}.{layout}").write_bytes(pack(text.encode()))
    for i, part in enumerate((texts[:111], texts[111:])):
        lines = [
            json.dumps({"id": 1, "text": text}, ensure_ascii=i == 0) for text in part
        ]
        if "json" in kind:
            (folder / f"{i}.{layout}").write_bytes(pack("\n".join(lines).encode()))


LAYOUTS = ["txt", "txt.gz", "jsonl", "jsonl.gz", "json.gz", "ndjson"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_source_gives_the_same_tokens(layout, documents, word_tokenizer, tmp_path):
    texts = [text + "\r\n<|endoftext|> ζ\n" * (i % 7) for i, text in enumerate(documents)]
    write_in(layout, texts, tmp_path / "source")
    argv = ["--source", "source", "--out", "c", "--tokenizer", word_tokenizer]
    assert data.main(argv) == 0
    check(tmp_path / "c", plainly(texts, word_tokenizer))


def texts_in(corpus: data.Corpus) -> list[str]:
    """The texts of a corpus of bytes."""
    raw = np.concatenate([corpus.train, corpus.val]).astype(np.uint8).tobytes()
    return [text.decode() for text in raw.removesuffix(b"\xff").split(b"\xff")]


def test_files_come_in_the_order_of_their_names(tmp_path):
    """As they always did, since the fingerprints depend on it."""
    names = "b/c/x.txt b/x.txt b.txt b-c/x.txt b/.hidden/x.txt .x.txt a/d/e/d/x.txt a/[d]/x.md [x"
    for name in names.split():
        (tmp_path / "top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / name).write_text(name)
    paths = sorted(Path("top").rglob("*"))
    visible = [path for path in paths if path.is_file() and "/." not in str(path)]
    expected = [path.relative_to("top").as_posix() for path in visible]
    assert len(expected) == 7
    for source in ("top", "top/", str(tmp_path / "top")):
        assert list(read_files([source], "text", data.Counter())) == expected


def test_links_are_skipped_and_counted(tmp_path, capsys):
    """They would bring a text in twice, or lead round in a loop."""
    (tmp_path / "top" / "in").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    for name in ("top/a.txt", "top/in/b.txt", "outside/c.txt"):
        (tmp_path / name).write_text(f"text {name}")
    (tmp_path / "top" / "in" / "loop").symlink_to("..")
    (tmp_path / "top" / "to-a.txt").symlink_to("a.txt")
    (tmp_path / "top" / "out").symlink_to("../outside")
    (tmp_path / "link").symlink_to("top")  # named in --source, it is followed
    for source in ("top", "link"):
        argv = ["--source", source, "--out", f"c-{source}", "--val_fraction", "0.5"]
        assert data.main(argv) == 0
        corpus = data.open_corpus(tmp_path / f"c-{source}")
        assert sorted(texts_in(corpus)) == ["text top/a.txt", "text top/in/b.txt"]
        assert corpus.meta["links skipped"] == 3
        assert "links skipped 3" in capsys.readouterr().out


@pytest.mark.parametrize("closed", ["notes/private", "notes/private/a.txt"])
def test_what_may_not_be_read_is_an_error(closed, capsys, monkeypatch):
    """A corpus without it would be another one, without a word."""
    folder = Path(tempfile.mkdtemp())  # one in which every user may write
    folder.chmod(0o777)
    monkeypatch.chdir(folder)
    Path("notes/private").mkdir(parents=True)
    for name in ("notes/a.txt", "notes/private/a.txt"):
        Path(name).write_text("All work and no play. " * 99)
    Path(closed).chmod(0)
    if os.geteuid() == 0:  # root may read everything
        os.seteuid(65534)
    try:
        error = one_line(data.main, ["--source", "notes", "--out", "c"], capsys)
    finally:
        os.seteuid(os.getuid())
        Path(closed).chmod(0o755)
        shutil.rmtree(folder)
    assert f"{closed}" in error and "Permission denied" in error


MESS = [
    b'\xef\xbb\xbf{"text": "byte order mark"}', b'{"text": "windows"}\r', b'{"text": ""}',
    b'{"text": "cut of', b'{"text": null}', b'{"body": "no"}', b"[1]", b'{"text": 5}',
    b"[" * 10**5, b'{"text": "deep", "more": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    b'{"text": "bad \xff byte"}', rb'{"text": "half \ud83d pair"}',
    rb'{"text": "whole \ud83d\ude00 pair"}', b'{"text": "<|endoftext|>"}',
    b'{"text": "nul \\u0000"}', b'{"text": "last"}',
]  # fmt: skip


def test_everything_skipped_or_changed_is_reported(tmp_path, capsys):
    (tmp_path / "mess.jsonl").write_bytes(b"\n".join(MESS))
    (tmp_path / "more" / ".git").mkdir(parents=True)
    (tmp_path / "more" / ".git" / "hidden").write_text("never")
    (tmp_path / "more" / "picture").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "more" / "text").write_bytes(b"bad \xff text")
    (tmp_path / "more" / "z.jsonl").write_text('{"text": "more"}\n' * 99)
    assert data.main(["--source", "mess.jsonl", "more", "--out", "c"]) == 0
    notes = {
        "lines that are no JSON object skipped": 5,
        "lines without a text 'text' skipped": 3,
        "empty texts skipped": 1,
        "binary files skipped": 1,
        "invalid characters replaced": 2,
    }
    corpus = data.open_corpus(tmp_path / "c")
    assert notes.items() <= corpus.meta.items()
    out = capsys.readouterr().out
    assert all(f"{name} {n}" in out for name, n in notes.items())
    assert set(texts_in(corpus)) == {
        "byte order mark", "windows", "bad \ufffd text", "half \ufffd pair",
        "whole \U0001f600 pair", "<|endoftext|>", "nul \0", "last", "more",
    }  # fmt: skip


def test_a_run_takes_the_vocabulary_of_its_corpus(documents, word_tokenizer, tmp_path):
    """Also of a mixture, a sweep and a resumed run; a larger one may be typed."""
    for name in ("a", "b"):
        data.prepare(documents, word_tokenizer, tmp_path / name)
    size = 256 + 5 + 1  # bytes, words and end-of-text
    quick = dict(total_tokens=512, warmup_tokens=0)
    for i, (text, typed) in enumerate(
        [("a", {}), ("a:0.5,b:0.5", {}), ("a", {"vocab_size": 300})]
    ):
        argv = flags(text, **quick, **typed, out=f"run{i}")
        assert train.main(argv) == 0
        config = json.loads(Path(f"run{i}/record.json").read_text())["config"]
        assert config["vocab_size"] == typed.get("vocab_size", size)
    # a run that was killed before its first checkpoint keeps its vocabulary
    shutil.rmtree("run2/ckpt")
    Path("run2/record.json").unlink()
    assert train.main(["--resume", "--out=run2"]) == 0
    assert json.loads(Path("run2/record.json").read_text())["config"]["vocab_size"] == 300
    argv = ["--n_layer=1", "--data=a", "--budgets=1024,2048", "--warmup_tokens=0"]
    args, typed = sweep.parse(["wsd", *argv])
    _, configs, _ = sweep.check(args, typed)
    assert {cfg.vocab_size for cfg in configs} == {size}


def test_the_embedded_vocabulary_is_that_of_its_tokenizer(word_tokenizer):
    assert runs.with_vocabulary({}) == {"vocab_size": 256}
    typed = {"data": "embedded", "tokenizer": word_tokenizer}
    assert runs.with_vocabulary(typed) == typed | {"vocab_size": 262}


@pytest.mark.parametrize("name", ["words", "bytes"])
def test_only_the_bytes_tokenizer_is_raw_bytes(name, documents, tmp_path, monkeypatch):
    """A different tokenizer with 256 ids is not, whatever the name of its file."""
    monkeypatch.setattr("tools.prepare.BATCH_SIZE", 1)
    lines = [
        base64.b64encode(bytes([i])) + b" %d\n" % (254 - i) for i in range(254, -1, -1)
    ]
    file = tmp_path / f"{name}.tiktoken"
    file.write_bytes(b"".join(lines))
    data.prepare(documents, str(file), tmp_path / "c")
    check(tmp_path / "c", plainly(documents, str(file)))


@pytest.mark.parametrize("content", [None, b"[]"])
@pytest.mark.parametrize("file", ["train.bin", "val.bin", "meta.json", "words.tiktoken"])
def test_damaged_corpora_are_refused(file, content, documents, word_tokenizer, tmp_path):
    data.prepare(documents, word_tokenizer, tmp_path / "c")
    (tmp_path / "c" / file).unlink()
    if content is not None:
        (tmp_path / "c" / file).write_bytes(content)
    with pytest.raises(
        ValueError, match="--tokenizer .*tiktoken" if "words" in file else "--data"
    ):
        data.open_corpus(tmp_path / "c")


LINES = [
    b'{"text": "%d"}\n' % i for i in np.random.default_rng(0).integers(0, 10**15, 100)
]
PACKED = gzip.compress(b"".join(LINES))
FILES = {
    "f": b"text", "blank": b"", "x.jsonl": b"plain text\n" * 9, "a.jsonl": b'{"body": "x"}\n' * 9,
    "bad.tiktoken": base64.b64encode(b"a") + b" 1\n", "a.parquet": b"PAR1 and then nothing",
    "few.tiktoken": base64.b64encode(b"\0") + b" 0\n", "null.json": b"null",
    "a.jsonl.gz": b"not compressed", "a.jsonl.zst": b"not supported",
    "half.gz": PACKED[:300], "flipped.jsonl.gz": PACKED[:300] + b"flipped" + PACKED[307:],
}  # fmt: skip


@pytest.mark.parametrize("argv, says", [
    ("--source nowhere --out c", "--source nowhere: no such file"),
    ("--source= --out c", "--source : no such file"),
    ("--source f --out c --val_fraction 2", "--val_fraction 2.0: must be"),
    ("--source f", "give both"), ("--source f --out f", "--out f: already exists"),
    ("--source blank --out c", "too little text to divide; 1 empty texts skipped"),
    ("--source f --out f/c", "data.py: f: "),
    ("--source f --out c --tokenizer gpt9", "--tokenizer gpt9: unknown"),
    ("--source f --out c --tokenizer no.tiktoken", "--tokenizer no.tiktoken"),
    ("--source f --out c --tokenizer bad.tiktoken", "ranks"),
    ("--source f --out c --tokenizer few.tiktoken", "no token for the byte 1"),
    ("--source f --out c --tokenizer null.json", "null.json: cannot be loaded"),
    ("--source x.jsonl --out c", "x.jsonl: line 1 is no JSON object"),
    ("--source a.jsonl --out c", "'text', but body; choose --text_field"),
    ("--source a.jsonl.gz --out c", "a.jsonl.gz: Not a gzipped file"),
    ("--source half.gz --out c", "half.gz: Compressed file ended"),
    ("--source flipped.jsonl.gz --out c", "--source flipped.jsonl.gz: "),
    ("--source a.jsonl.zst --out c", "a.jsonl.zst: we read text, JSON lines and .gz"),
    ("--source a.parquet --out c", "convert it first"),
])  # fmt: skip
def test_errors_are_one_line(argv, says, tmp_path, capfd):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    assert says in one_line(data.main, argv.split(), capfd)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(number, word_tokenizer, tmp_path):
    os.mkfifo("pipe.jsonl")
    argv = "--source pipe.jsonl --out c --tokenizer".split() + [word_tokenizer]
    command = [sys.executable, str(ROOT / "data.py"), *argv]
    process = subprocess.Popen(command, text=True, stderr=subprocess.PIPE)
    with open("pipe.jsonl", "wb", buffering=0) as pipe:
        # more than fits into a pipe, so this waits until data.py encodes
        pipe.write(b'{"text": "%s"}\n' % (b"word " * 200) * 9000)
        assert list(tmp_path.glob(".c.*/c/train.bin"))
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error == "data.py: interrupted; run the same command again\n"
    assert {path.name for path in tmp_path.iterdir()} == {"pipe.jsonl", "words.tiktoken"}


def test_a_folder_without_a_corpus_says_what_it_lacks(tmp_path):
    with pytest.raises(UserError, match="has no meta.json; prepare it with data.py"):
        data.open_corpus(tmp_path)
