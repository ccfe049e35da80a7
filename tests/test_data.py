"""From text to batches: nothing lost, nothing leaked, and always in the same order."""

import base64
import bz2
import functools
import gzip
import hashlib
import json
import lzma
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import eval as evaluation
import train

ROOT = Path(__file__).parent.parent


def split_at_end_of_text(ids: np.ndarray, tokenizer) -> list[str]:
    ends = np.flatnonzero(ids == tokenizer.eot_token)
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(part[part != tokenizer.eot_token].tolist()) for part in np.split(ids, ends[:-1] + 1)]


def check_counts(folder: Path) -> None:
    """meta.json counts while it encodes; here everything is counted again, in what was written."""
    corpus = data.open_corpus(folder)
    lengths = data.bytes_per_token(corpus.tokenizer)
    for split, ids in ("train", corpus.train), ("val", corpus.val):
        counted = [np.count_nonzero(ids == corpus.tokenizer.eot_token), len(ids), lengths[ids].sum()]
        assert [corpus.meta[f"{split}_{what}"] for what in ("documents", "tokens", "bytes")] == counted


# -- the order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [range(1, 70), (97, 127, 128, 129, 251, 256, 257, 1009, 4096, 4097, 10007)])
def test_an_epoch_visits_every_sequence_once(sizes):
    for n in sizes:
        for seed in (0, 1, 12345):
            order = data.shuffled(np.arange(3 * n), n, seed)
            for epoch in np.split(order, 3):
                assert np.array_equal(np.sort(epoch), np.arange(n))


def test_epochs_and_seeds_differ():
    n = 1000
    orders = [data.shuffled(np.arange(e * n, (e + 1) * n), n, seed) for seed in (0, 1) for e in (0, 1)]
    for i, one in enumerate(orders):
        # a random permutation has one fixed point on average; agreement with another one likewise
        assert (one == np.arange(n)).sum() < 10
        assert abs(np.corrcoef(one, np.arange(n))[0, 1]) < 0.15
        assert all((one == other).sum() < 10 for other in orders[:i])


def test_any_number_can_be_asked_for_alone():
    n, seed = 777, 3
    together = data.shuffled(np.arange(2000), n, seed)
    assert [data.shuffled(np.array([g]), n, seed)[0] for g in (0, 1, 776, 777, 1999)] == [together[g] for g in (0, 1, 776, 777, 1999)]
    huge = data.shuffled(np.array([10**15, 10**15 + 1]), 10**12, seed)
    assert huge[0] != huge[1] and (huge < 10**12).all()


def test_batches_read_the_same_text_in_the_same_order(corpus, monkeypatch):
    """Batch size and micro-batch cut one stream at different places; nothing else changes."""
    seen = []
    real = data.read_sequences

    def watched(tokens, index, seq_len):
        seen.extend(index.tolist())
        return real(tokens, index, seq_len)

    monkeypatch.setattr(data, "read_sequences", watched)
    streams = []
    for batch, micro in ((4, 4), (4, 1), (16, 16), (16, 4), (16, 1)):
        cfg = train.resolve_device(train.make_config(
            n_layer=1, n_embd=16, n_head=1, seq_len=32, batch_size=batch, micro_batch_size=micro, total_tokens=10**5, warmup_tokens=0, device="cpu",
        ))  # fmt: skip
        state = train.build(cfg)
        model, optimizer = state.model, state.optimizer
        seen.clear()
        for n0 in range(0, 64 * 32, cfg.batch_tokens):
            train.optimizer_step(cfg, model, optimizer, corpus, n0, lr=1e-3)
        streams.append(list(seen))
    assert len(streams[0]) == 64 and all(stream == streams[0] for stream in streams)


def test_sequences_are_cut_where_they_should_be(tmp_path):
    np.arange(101, dtype=np.uint16).tofile(tmp_path / "ids")
    tokens = np.memmap(tmp_path / "ids", dtype=np.uint16, mode="r")
    assert data.n_sequences(tokens, 10) == 10  # the last sequence's last target is token 100
    x, y = data.read_sequences(tokens, np.array([0, 9]), 10)
    assert x.tolist() == [list(range(10)), list(range(90, 100))]
    assert y.tolist() == [list(range(1, 11)), list(range(91, 101))]
    assert x.dtype == np.int64
    os.truncate(tmp_path / "ids", 190)
    assert data.read_sequences(tokens, np.array([0]), 10)[0].tolist() == [list(range(10))]
    with pytest.raises(OSError, match="ends before sequence 9"):
        data.read_sequences(tokens, np.array([0, 9]), 10)


# -- the corpus ------------------------------------------------------------------------------------


def test_every_document_is_there_once(documents, corpus):
    inside = split_at_end_of_text(corpus.train, corpus.tokenizer) + split_at_end_of_text(corpus.val, corpus.tokenizer)
    assert sorted(inside) == sorted(documents)
    meta = corpus.meta
    assert meta["train_documents"] + meta["val_documents"] == len(documents)
    assert meta["train_bytes"] + meta["val_bytes"] == sum(len(d.encode()) for d in documents)
    assert meta["train_tokens"] == len(corpus.train) and meta["vocab_size"] == 256


def test_no_held_out_file_of_the_embedded_corpus_is_trained_on(tmp_path):
    """On the real thing, every 8th file of it; the decision depends on a file's content alone."""
    files = data.embedded_files()
    library = Path(sysconfig.get_paths()["stdlib"])
    ours = [f.relative_to(library).parts for f in files if f.is_relative_to(library) and "site-packages" not in f.parts]
    assert len(files) > 1500 and len(ours) > 400 and ("argparse.py",) in ours
    assert not any({"test", "tests", "encodings", "idlelib"} & set(parts) for parts in ours)
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files[::8]]
    texts = [text for text in texts if text]
    meta = data.prepare(texts, "bytes", tmp_path / "c", val_fraction=0.05)
    corpus = data.open_corpus(tmp_path / "c")
    held_out = split_at_end_of_text(corpus.val, corpus.tokenizer)
    trained = split_at_end_of_text(corpus.train, corpus.tokenizer)
    assert held_out and not any(t.startswith(h) for h in held_out if len(h) > 100 for t in trained)
    assert 0.02 < meta["val_documents"] / len(texts) < 0.1
    assert max(len(h.encode()) for h in held_out) <= 32 * 1024
    data.prepare(reversed(texts), "bytes", tmp_path / "again", val_fraction=0.05)  # in any order
    assert sorted(split_at_end_of_text(data.open_corpus(tmp_path / "again").val, corpus.tokenizer)) == sorted(held_out)


def test_held_out_documents_are_cut_between_characters(tmp_path):
    letter = next(x for x in "abcdefghijklmnopqrstuvwxyz" if data.is_held_out(hashlib.sha256((x + "é" * 20_000).encode()).digest(), 0.5))
    data.prepare(["short", letter + "é" * 20_000], "bytes", tmp_path / "c", val_fraction=0.5)
    texts = split_at_end_of_text(np.fromfile(tmp_path / "c" / "val.bin", np.uint16), data.load_tokenizer("bytes"))
    assert texts[0] == letter + "é" * 16_383  # 32767 bytes: half a character does not fit any more
    check_counts(tmp_path / "c")


def test_one_long_text_is_divided_too(tmp_path):
    """The hash cannot divide a single document: the end of it is held out."""
    text = "All work and no play makes a dull boy. " * 5000
    meta = data.prepare([text], "bytes", tmp_path / "c", val_fraction=0.1)
    corpus = data.open_corpus(tmp_path / "c")
    assert meta["val_tokens"] == pytest.approx(0.1 * (len(text) + 1), abs=1)
    assert bytes(corpus.train.astype(np.uint8)) + bytes(corpus.val.astype(np.uint8)) == text.encode() + b"\xff"
    n_bytes = [corpus.meta[f"{split}_bytes"] for split in ("train", "val")]
    assert n_bytes == [meta["train_tokens"], meta["val_tokens"] - 1]  # a byte a token, but the end-of-text


def test_text_survives_bytes_tokens():
    tokenizer = data.load_tokenizer("bytes")
    text = "naïve 文字\r\n\ttabs \x00 \U0001f600 <|endoftext|>"
    assert tokenizer.encode_ordinary(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eot_token == 255 and tokenizer.n_vocab == 256


@pytest.fixture
def word_tokenizer(tmp_path) -> str:
    """A .tiktoken file: all bytes, and a few longer tokens."""
    ranks = [bytes([i]) for i in range(256)] + [b"de", b"def", b"re", b" a", b"\xce\xb6"]
    file = tmp_path / "words.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(ranks)))
    return str(file)


def test_bits_per_byte_with_longer_tokens(documents, word_tokenizer, tmp_path):
    """A model that knows nothing spends ln V on every token; the bytes are counted one by one."""
    data.prepare(documents, word_tokenizer, tmp_path / "c")
    (tmp_path / "words.tiktoken").write_bytes(b"")  # the corpus has its own copy
    corpus = data.open_corpus(tmp_path / "c")
    cfg = train.make_config(n_layer=1, n_embd=16, n_head=1, seq_len=32, vocab_size=corpus.meta["vocab_size"], warmup_tokens=0)
    model = train.GPT(cfg)
    model.embed.weight.data.zero_()
    result = evaluation.validation_loss(model, corpus)
    n = (len(corpus.val) - 1) // 32 * 32
    targets = corpus.val[1 : n + 1].tolist()
    n_bytes = sum(len(corpus.tokenizer.decode_bytes([t])) for t in targets if t != corpus.tokenizer.eot_token)
    assert 1.1 * n < n_bytes  # the longer tokens are in use
    assert result["val_loss"] == pytest.approx(math.log(cfg.vocab_size), rel=1e-6)
    assert result["val_bpb"] == pytest.approx(math.log2(cfg.vocab_size) * n / n_bytes, rel=1e-6)


def test_held_out_loss_is_the_mean_over_all_targets(corpus):
    torch.manual_seed(0)
    model = train.GPT(train.make_config(n_layer=1, n_embd=16, n_head=1, seq_len=32, warmup_tokens=0, init_std=0.5)).train()
    n = (len(corpus.val) - 1) // 32
    rows = torch.from_numpy(corpus.val[: n * 32].astype(np.int64)).view(n, 32)
    targets = torch.from_numpy(corpus.val[1 : n * 32 + 1].astype(np.int64)).view(n, 32)
    with torch.no_grad():
        by_hand = -model(rows).log_softmax(-1).gather(-1, targets[..., None]).double().mean().item()
    assert evaluation.validation_loss(model, corpus)["val_loss"] == pytest.approx(by_hand, rel=1e-6)
    assert model.training  # left as it was found
    some = [evaluation.validation_loss(model, corpus, 320)["val_loss"] for _ in range(2)]
    assert some[0] == some[1] != by_hand


def test_two_tokenizer_files_of_one_name_are_two_tokenizers(word_tokenizer, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    lines = Path(word_tokenizer).read_bytes().splitlines(keepends=True)
    (other / "words.tiktoken").write_bytes(b"".join(lines[:-1]))
    sizes = []
    for folder in (tmp_path, other):
        monkeypatch.chdir(folder)
        sizes.append(data.load_tokenizer("words.tiktoken").n_vocab)
    assert sizes == [262, 261]


def test_a_corpus_without_its_tokenizer_is_refused(documents, word_tokenizer, tmp_path, monkeypatch):
    """A file of that name that lies elsewhere is another one; a name that is no path is none."""
    (tmp_path / "bytes").write_text("a file that happens to have this name")
    data.prepare(documents, "bytes", tmp_path / "b")
    assert data.open_corpus(tmp_path / "b").tokenizer.name == "bytes" and not (tmp_path / "b" / "bytes").exists()
    data.prepare(documents, word_tokenizer, tmp_path / "c")
    (tmp_path / "c" / "words.tiktoken").unlink()
    with pytest.raises(ValueError, match="c/words.tiktoken: no such file"):
        data.open_corpus(tmp_path / "c")


def test_large_vocabularies_get_more_bits(tmp_path):
    tokens = [bytes([i]) for i in range(256)] + [b"x%05d" % i for i in range(65_536)]
    (tmp_path / "wide.tiktoken").write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)))
    data.prepare(["some text"] * 40, "wide.tiktoken", tmp_path / "c")
    ids = np.fromfile(tmp_path / "c" / "train.bin", np.uint32)
    assert ids[:10].tolist() == [*b"some text", 65_536 + 256]


def test_command_line_prepares_a_folder(tmp_path, capsys):
    notes = tmp_path / "notes"
    (notes / "deep" / ".git").mkdir(parents=True)
    (notes / "a.txt").write_text("hello " * 2000)
    (notes / "deep" / "b.md").write_bytes(b"caf\xe9 " * 10)
    (notes / "deep" / ".git" / "hidden").write_text("never")
    (notes / "empty").write_text("")
    (notes / "picture").write_bytes(b"\x89PNG\0\0")
    assert data.main(["--source", str(notes), "--out", "corpus"]) == 0
    out = capsys.readouterr().out
    assert "1 binary files skipped" in out and "1 empty documents skipped" in out and "10 sequences of invalid UTF-8 replaced" in out
    assert f"(the first: {notes}/picture)" in out and "bytes per token" in out
    corpus = data.open_corpus(tmp_path / "corpus")
    text = corpus.tokenizer.decode([t for part in (corpus.train, corpus.val) for t in part.tolist() if t != 255])
    assert "hello" in text and "caf\ufffd" in text and "never" not in text


def test_an_interrupted_preparation_leaves_nothing(tmp_path):
    def breaks():
        yield "some text"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.prepare(breaks(), "bytes", tmp_path / "new" / "c")
    assert list((tmp_path / "new").iterdir()) == []


# -- every format ----------------------------------------------------------------------------------


def plainly(texts, tokenizer_name, val_fraction=0.02) -> dict[str, bytes]:
    """What a corpus must consist of: each text encoded in one go, as `prepare` describes it."""
    tokenizer, parts = data.load_tokenizer(tokenizer_name), {"train": [], "val": []}
    for text in texts:
        raw = text.encode()
        held_out = parts["train"] and int.from_bytes(hashlib.sha256(raw).digest()[:8], "big") < val_fraction * 2**64
        if held_out:
            text = raw[: 32 * 1024].decode(errors="ignore")
        parts["val" if held_out else "train"] += [*tokenizer.encode_ordinary(text), tokenizer.eot_token]
    return {split: np.array(ids, np.uint16).tobytes() for split, ids in parts.items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def zst(raw: bytes) -> bytes:
    return pytest.importorskip("pyarrow").compress(raw, "zstd", asbytes=True)


PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}


def write_in(layout: str, texts: list[str], folder: Path) -> str:
    """Put texts into a folder in this layout, over two files where it has many to a file; -> --source."""
    folder.mkdir()
    name, _, packed = layout.partition(".")
    pack = PACK["." + packed if packed else ""]
    if name == "txt":
        for i, text in enumerate(texts):
            (folder / f"{i:05}.{layout}").write_bytes(pack(text.encode()))
    for i, part in enumerate((texts[:111], texts[111:])):
        if name in ("jsonl", "json"):
            lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=i == 0) for text in part]
            (folder / f"{i}.{layout}").write_bytes(pack("\n".join(lines).encode() + b"\n" * i))
        if name == "parquet":
            pq = pytest.importorskip("pyarrow.parquet")
            pq.write_table(pytest.importorskip("pyarrow").table({"id": range(len(part)), "text": part}), folder / f"{i}.parquet", row_group_size=50)
    return str(folder)


@pytest.mark.parametrize("layout", ["txt", "txt.gz", "txt.zst", "jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst", "json.gz", "parquet"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_format_gives_the_same_tokens(layout, workers, documents, word_tokenizer, tmp_path, monkeypatch):
    texts = [text + "\r\n<|endoftext|> ζ\n" * (i % 7) for i, text in enumerate(documents)]
    monkeypatch.setattr(data, "BLOCK", 20_000)  # so that there are many
    blocks = data.read_blocks(data.source_files([write_in(layout, texts, tmp_path / "source")]))
    data.prepare(blocks, word_tokenizer, tmp_path / "c", workers=workers)
    expected = plainly(texts, word_tokenizer)
    made = files_of(tmp_path / "c")
    assert made["train.bin"] == expected["train"] and made["val.bin"] == expected["val"] and expected["val"]
    check_counts(tmp_path / "c")


def test_a_data_set_of_the_hub(documents, tmp_path):
    """Streamed through `datasets`; a local folder stands for the hub."""
    pytest.importorskip("datasets")
    write_in("jsonl", documents, tmp_path / "source")
    assert data.main(["--source", "hf:./source", "--out", "c"]) == 0
    assert files_of(tmp_path / "c")["train.bin"] == plainly(documents, "bytes")["train"]


def test_patterns_and_fields(documents, tmp_path):
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "one.txt").write_text("never")
    (tmp_path / "a" / "deep" / "two.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in documents))
    assert data.main(["--source", "a/**/*.jsonl", "--text_field", "content", "--out", "c"]) == 0
    assert files_of(tmp_path / "c")["train.bin"] == plainly(documents, "bytes")["train"]


PATTERNS = {
    "bytes": r"[\s\S]",
    "gpt2": data.GPT2_PATTERN,
    "starcoder": r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}  # fmt: skip


LETTERS = {
    "any": [*"aabbCS stdm   \n\r\t''1,.", "é", "文", "\U0001f600", "e\u0301", " a", "a b", "'s", "\u3000", "\xa0"],
    "chinese": [*"文文字é文字文,.。/_", "\U0001f600", "e\u0301", "\n", "\r\n", "\n\n", " ", "\u3000", "\xa0", "\x1c"],
    "numbers": [*"0123456789,.-_", " ", "  ", "\t", "\n", "\r\n"],
}


@pytest.mark.parametrize("letters", LETTERS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_long_text_in_parts_is_the_same_as_in_one(pattern, letters, tmp_path, monkeypatch):
    """A hostile text, cut wherever that is allowed: no token differs from those of the whole."""
    rng = np.random.default_rng(0)
    alphabet = LETTERS[letters]
    text = "".join(rng.choice(alphabet, 60_000))
    ranks = {bytes([i]): i for i in range(256)}
    for pair in (b" a", b" b", b"a ", b"b a", b"ab", b" ab", b"  ", b"\n ", b" \n", b"'s", b"s ", b"st", b" st", b"aa", b"\r\n", b"\n\n", b",\n", b"12", b" 1", b"1\n"):
        ranks[pair] = len(ranks)
    tokenizer = data.tiktoken.Encoding("t", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})
    monkeypatch.setattr(data, "LONG", 500)
    (tmp_path / "long").write_bytes(text.encode())
    blocks = list(data.read_blocks([tmp_path / "long"]))
    assert len(blocks) > 100 and b"".join(block.records[0] for block in blocks) == text.encode()
    made = b"".join(data.encode_block(i, block, tokenizer, 0.02)["train"] for i, block in enumerate(blocks))
    assert made == np.array([*tokenizer.encode_ordinary(text), tokenizer.eot_token], np.uint16).tobytes()


def test_long_texts_among_others(tmp_path, monkeypatch):
    """Held out or not, with invalid UTF-8 at the border of a part, or without a place to cut."""
    monkeypatch.setattr(data, "LONG", 1000)
    (tmp_path / "s").mkdir()
    raw = {f"{i}.txt": (b"%d word " % i) * (10 + 50 * i) for i in range(20)} | {"x.txt": b"x" * 5000, "y.txt": b"word\xff word " * 500, "z.txt": b"\0 word word" * 500}
    for name, content in raw.items():
        (tmp_path / "s" / name).write_bytes(content)
    digest = lambda content: hashlib.sha256(content[: (data.word_end(content[:2000]) if len(content) > 1000 else 0) or None]).digest()
    texts, held_out, first = [], [], True
    for name in sorted(raw):
        if name != "z.txt":
            out = not first and data.is_held_out(digest(raw[name].replace(b"\xff", "\ufffd".encode())), 0.3)
            (held_out if out else texts).append(raw[name].decode(errors="replace"))
            first = False
    for workers in (0, 2):
        meta = data.prepare(data.read_blocks(data.source_files([str(tmp_path / "s")])), "bytes", tmp_path / f"c{workers}", 0.3, workers)
        corpus = data.open_corpus(tmp_path / f"c{workers}")
        assert split_at_end_of_text(corpus.train, corpus.tokenizer) == texts and meta["train_documents"] == len(texts)
        kept = split_at_end_of_text(corpus.val, corpus.tokenizer)
        assert meta["val_documents"] == len(held_out) == len(kept) and all(b.startswith(a) for a, b in zip(kept, held_out))
        check_counts(tmp_path / f"c{workers}")
        assert meta["notes"].pop("held-out documents cut at 32 KB")[0] == sum(a != b for a, b in zip(kept, held_out)) > 0
        assert meta["notes"] == {"binary files skipped": (1, f"{tmp_path}/s/z.txt:1"), "sequences of invalid UTF-8 replaced": (500, f"{tmp_path}/s/y.txt:1")}


MESS = [
    b'\xef\xbb\xbf{"text": "byte order mark"}', b'{"text": "windows"}\r', b"", b"   ", b'{"text": ""}', b'{"text": "cut of', b'{"text": null}',
    b'{"body": "no"}', b"[1]", b'{"text": 5}', b'{"text": "bad \xff byte"}', rb'{"text": "half \ud83d pair"}', rb'{"text": "whole \ud83d\ude00 pair"}',
    b'{"text": "<|endoftext|>"}', b'{"text": "nul \\u0000"}', b'{"text": "last"}',
]  # fmt: skip


def test_nothing_is_lost_without_a_word(tmp_path, capsys):
    (tmp_path / "mess.jsonl").write_bytes(b"\n".join(MESS))
    assert data.main(["--source", "mess.jsonl", "--out", "c", "--val_fraction", "1e-20"]) == 2  # too little to hold out: and yet it says all
    error = capsys.readouterr().err
    for line in (
        "1 empty documents skipped (the first: mess.jsonl:5)", "1 lines that are not JSON skipped (the first: mess.jsonl:6)",
        "4 documents without a text skipped (the first: mess.jsonl:7)", "2 sequences of invalid UTF-8 replaced (the first: mess.jsonl:11)",
    ):  # fmt: skip
        assert line in error
    assert len(error.splitlines()) == 1
    (tmp_path / "more.jsonl").write_text('{"text": "more"}\n' * 99)
    assert data.main(["--source", "mess.jsonl", "more.jsonl", "--out", "c"]) == 0
    assert "1 empty documents skipped (the first: mess.jsonl:5)\n" in capsys.readouterr().out
    corpus = data.open_corpus(tmp_path / "c")
    good = ["byte order mark", "windows", "bad \ufffd byte", "half \ufffd pair", "whole \U0001f600 pair", "<|endoftext|>", "nul \0", "last"]
    read = split_at_end_of_text(np.r_[corpus.train, corpus.val], corpus.tokenizer)
    assert sorted(set(read)) == sorted([*good, "more"])


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("how", ["half", "end", "start", "empty", "flipped"])
def test_a_truncated_archive_is_refused(packed, how, tmp_path, capsys):
    raw = b"".join(b'{"text": "%d"}\n' % i for i in np.random.default_rng(0).integers(0, 10**15, 3000))
    whole = PACK[packed](raw)
    middle = len(whole) // 2
    cut = {"half": whole[:middle], "end": whole[:-1], "start": whole[:3], "empty": b"", "flipped": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]}
    if (packed, how) == (".zst", "flipped"):
        pytest.skip("a frame of zstd has no checksum unless it was asked for")
    (tmp_path / f"a.jsonl{packed}").write_bytes(cut[how])
    assert data.main(["--source", f"a.jsonl{packed}", "--out", "c"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and f"a.jsonl{packed}" in error and not list(tmp_path.glob("*c*"))[1:]


@pytest.mark.parametrize(
    "name, content, argv, says",
    [
        ("a.jsonl", b'{"content": "x", "id": 1}\n' * 9, [], ("a.jsonl", "line 1", "'text'", "content, id", "--text_field")),
        ("a.jsonl", b'{"text": "x"}\n' * 9, ["--text_field", "body"], ("'body'", "text")),
        ("a.jsonl", b"plain text\n" * 9, [], ("a.jsonl", "line 1 is not JSON")),
        ("a.json.gz", gzip.compress(b"{\n}\n", mtime=0), [], ("a.json.gz", "not JSON")),
        ("a.parquet", b"PAR1 and then nothing", [], ("a.parquet",)),
        ("a.parquet", b"", [], ("a.parquet",)),
        ("a.jsonl.gz", b"not compressed", [], ("a.jsonl.gz",)),
        ("a.jsonl", b'{"text": "x"}\n', ["--text_field", ""], ("--text_field",)),
    ],
)
def test_foreign_files_are_refused(name, content, argv, says, tmp_path, capsys):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    assert data.main(["--source", name, "--out", "c", *argv]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and all(word in error for word in says), error
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("source, library", [("a.parquet", "pyarrow.parquet"), ("a.jsonl.zst", "pyarrow"), ("hf:some/thing", "datasets")])
def test_a_missing_library_is_named(source, library, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, library, None)
    if not source.startswith("hf:"):
        (tmp_path / source).write_bytes(b"something")
    assert data.main(["--source", source, "--out", "c"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and source in error and "pip install datasets" in error


# -- stopped and continued -------------------------------------------------------------------------


def sources_of_all_kinds(documents, folder: Path) -> str:
    write_in("jsonl.gz", documents[:200], folder)
    (folder / "2.txt").write_text("\n".join(documents))  # a long one
    for i, text in enumerate(documents[200:]):
        (folder / f"3{i:04}.py").write_text(text)
    (folder / "4.jsonl").write_bytes(b"\n".join([*MESS, b"nonsense"]))
    return str(folder)


SMALL_BLOCKS = "import sys, data; data.BLOCK, data.LONG, data.SAVE_EVERY = 5000, 9000, 0; sys.exit(data.main(sys.argv[1:]))"


def test_killed_at_any_time(documents, tmp_path, capsys):
    """SIGKILL again and again, then never: the same bytes, and no process left behind."""
    source = sources_of_all_kinds(documents, tmp_path / "s")
    argv = [sys.executable, "-c", SMALL_BLOCKS, "--source", source, "--out"]
    run = lambda out: subprocess.Popen([*argv, out], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    quiet = run("quiet")
    assert "2 lines that are not JSON" in quiet.communicate()[0] and quiet.returncode == 0
    resumed, progress = 0, tmp_path / ".killed.partial" / "progress.json"
    for attempt in range(9):
        process, before = run("killed"), progress.read_bytes() if progress.exists() else None
        resumed += before is not None
        if attempt == 8:
            process.wait()
        while process.poll() is None and (not progress.exists() or progress.read_bytes() == before):
            time.sleep(0.001)  # until it has come further
        time.sleep(0.007 * attempt)
        group = children(process.pid)
        process.kill()
        if process.wait() == 0:
            break
        deadline = time.time() + 20
        while any(alive(pid) for pid in group):
            assert time.time() < deadline, "a worker has outlived its parent"
            time.sleep(0.01)
    assert resumed > 2 and files_of(tmp_path / "killed") == files_of(tmp_path / "quiet")


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # not on Linux, or gone
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", ["many", "single"])
def test_killed_at_every_note(kind, documents, tmp_path, monkeypatch, capsys):
    """At each write of the progress and of the end, before it and after it; also while one long text is divided."""
    monkeypatch.setattr(data, "SAVE_EVERY", 0)
    monkeypatch.setattr(data, "BLOCK", 60_000)
    monkeypatch.setattr(data, "LONG", 60_000)
    source = sources_of_all_kinds(documents[:220], tmp_path / "s") if kind == "many" else str(tmp_path / "one")
    (tmp_path / "one").write_text("\n".join(documents))
    assert data.main(["--source", source, "--out", "quiet"]) == 0
    expected, calls = files_of(tmp_path / "quiet"), [0]

    def dying(real, at, after):
        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] == at and not after:
                raise Killed
            result = real(*args, **kwargs)
            if calls[0] == at:
                raise Killed
            return result

        return call

    for at in range(1, 200):
        for after in (False, True):
            calls[0] = 0
            with monkeypatch.context() as patch:
                for module, name in ((os, "replace"), (os, "rename"), (os, "truncate"), (shutil, "copyfileobj")):
                    patch.setattr(module, name, dying(getattr(module, name), at, after))
                try:
                    data.main(["--source", source, "--out", "c"])
                except Killed:
                    pass
                died = calls[0] >= at
            if not (tmp_path / "c").exists():
                assert data.main(["--source", source, "--out", "c"]) == 0
            assert files_of(tmp_path / "c") == expected and not (tmp_path / ".c.partial").exists()
            shutil.rmtree(tmp_path / "c")
        if not died:
            break
    assert at > 4 and not died


def test_interrupted_and_changed(documents, tmp_path, monkeypatch, capsys):
    """Ctrl-C says how to go on; where the input is another one by then, all begins again."""
    write_in("jsonl", documents, tmp_path / "s")
    monkeypatch.setattr(data, "SAVE_EVERY", 0)
    monkeypatch.setattr(data, "BLOCK", 40_000)  # too little for processes
    real, seen = data.encode_block, []

    def encode_block(number, *args):
        seen.append(number)
        if number == 2:
            raise KeyboardInterrupt
        return real(number, *args)

    for changed in (False, True):
        seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(data, "encode_block", encode_block)
            assert data.main(["--source", "s", "--out", "c"]) == 130
        error = capsys.readouterr().err
        assert "the same command goes on" in error and len(error.splitlines()) == 1 and seen[0] in (0, 2)
        if changed:
            with open(tmp_path / "s" / "1.jsonl", "a") as file:
                file.write('\n{"text": "one more"}')
            assert data.main(["--source", "s", "--out", "c"]) == 0
            assert files_of(tmp_path / "c")["train.bin"] == plainly([*documents, "one more"], "bytes")["train"]
    assert seen == [2]  # the second time, the first two were done


def test_the_hub_goes_away(documents, tmp_path, monkeypatch, capsys):
    """What has been read of it stays; where there is nothing to go on with, nothing stays."""
    datasets = pytest.importorskip("datasets")

    class Rows(list):
        column_names = ["text"]

        def __iter__(self):
            for i, row in enumerate(super().__iter__()):
                if i == lost_at:
                    raise ConnectionError("Server\nDisconnected")
                yield row

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Rows({"text": text} for text in documents))
    monkeypatch.setattr(data, "SAVE_EVERY", 0)
    monkeypatch.setattr(data, "BLOCK", 5000)
    monkeypatch.setattr(data, "encode_blocks", functools.partial(encode_in_this_process, data.encode_blocks))
    for lost_at, left in ((0, []), (200, [".c.partial"])):
        assert data.main(["--source", "hf:some/thing", "--out", "c"]) == 2
        assert capsys.readouterr().err == "data.py: --source hf:some/thing: Server Disconnected\n"
        assert [path.name for path in tmp_path.iterdir()] == left
    done, lost_at = json.loads((tmp_path / ".c.partial" / "progress.json").read_text())["blocks"], None
    assert data.main(["--source", "hf:some/thing", "--out", "c"]) == 0 and done > 5
    assert files_of(tmp_path / "c")["train.bin"] == plainly(documents, "bytes")["train"]


def encode_in_this_process(encode_blocks, blocks, tokenizer_name, val_fraction, workers):
    return encode_blocks(blocks, tokenizer_name, val_fraction, 0)


def test_two_processes_on_one_folder(documents, tmp_path, capsys):
    write_in("jsonl", documents, tmp_path / "s")
    (tmp_path / ".c.partial").mkdir()
    with data.locked(tmp_path / ".c.partial"):
        assert data.main(["--source", "s", "--out", "c"]) == 2
        assert "another process" in capsys.readouterr().err
    assert data.main(["--source", "s", "--out", "c"]) == 0


# -- any size --------------------------------------------------------------------------------------


def sparse_corpus(path: Path, n_tokens: int) -> Path:
    """A corpus of so many tokens that takes no room on the disk."""
    path.mkdir()
    meta = {"tokenizer": "bytes", "vocab_size": 256, "dtype": "uint16", "fingerprint": "0"}
    for split, n in (("train", n_tokens), ("val", 10**6)):
        meta |= {f"{split}_documents": 1, f"{split}_tokens": n, f"{split}_bytes": n}
        with open(path / f"{split}.bin", "wb") as file:
            file.truncate(2 * n)
    (path / "meta.json").write_text(json.dumps(meta))
    return path


@pytest.mark.parametrize("batch, seq_len, draws, cold", [(8, 1024, 200, False), (8, 1024, 200, True), (64, 4096, 40, True)])
def test_a_trillion_tokens_cost_what_a_million_cost(batch, seq_len, draws, cold, tmp_path):
    """cold: neither file in the cache; to fill it is the kernel's work, a page at a time, whatever the size of the file."""
    small, path = data.open_corpus(sparse_corpus(tmp_path / "small", 10**7)), sparse_corpus(tmp_path / "huge", 10**12)
    memory, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    huge = data.open_corpus(path)
    assert time.process_time() - started < 1
    times = {"small": [], "huge": []}
    for k in range(draws):
        for name, corpus in random.sample([("small", small), ("huge", huge)], 2):
            if cold:
                with open(corpus.train.filename, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.process_time()
            inputs, _ = data.draw(corpus, np.arange(batch * k, batch * (k + 1)), seq_len, 0)
            times[name].append(time.process_time() - started)
            assert inputs.shape == (batch, seq_len)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 * 1024  # kilobytes
    assert np.median(times["huge"]) < 1.2 * np.median(times["small"])


# -- what else is known of a corpus ----------------------------------------------------------------


def test_fingerprint_follows_the_text(documents, tmp_path):
    one = data.prepare(documents, "bytes", tmp_path / "1")["fingerprint"]
    same = data.prepare(documents, "bytes", tmp_path / "2")["fingerprint"]
    other = data.prepare([*documents[:-1], documents[-1] + "!"], "bytes", tmp_path / "3")["fingerprint"]
    assert one == same != other


def broken_corpus(tmp_path, corpus_path, damage) -> str:
    import shutil

    shutil.copytree(corpus_path, tmp_path / "broken")
    damage(tmp_path / "broken")
    return str(tmp_path / "broken")


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda p: (p / "train.bin").unlink(), "train.bin is missing"),
        (lambda p: (p / "meta.json").unlink(), "meta.json is missing"),
        (lambda p: (p / "meta.json").write_text("{"), "meta.json is damaged"),
        (lambda p: (p / "meta.json").write_text("{}"), "meta.json is damaged"),
        (lambda p: (p / "meta.json").write_text("[]"), "meta.json is damaged"),
        (lambda p: (p / "meta.json").write_bytes(b"\xff\xfe"), "meta.json is damaged"),
        (lambda p: (p / "val.bin").write_bytes(b"foreign"), "val.bin is not the file"),
    ],
)
def test_damaged_corpora_are_refused(tmp_path, corpus_path, damage, says):
    with pytest.raises((ValueError, OSError), match=says):
        data.open_corpus(Path(broken_corpus(tmp_path, corpus_path, damage)))


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--source", "nowhere", "--out", "c"], "--source nowhere"),
        (["--source", "."], "--source needs --out"),
        (["--source", ".", "--out", "."], "--out ."),
        (["--source", "empty", "--out", "c"], "--source empty: there is no file"),
        (["--source", "blank", "--out", "c"], "too little text"),
        (["--source", "f", "--out", "c", "--val_fraction", "1e-20"], "too little text"),
        (["--out", "c"], "go with --source"),
        (["--val_fraction", "0.1"], "go with --source"),
        (["--source", "f", "--out", "c", "--val_fraction", "1.5"], "--val_fraction 1.5"),
        (["--source", "f", "--out", "c", "--val_fraction", "nan"], "--val_fraction nan"),
        (["--source", "f", "--out", "c", "--tokenizer", "gpt9"], "--tokenizer gpt9"),
        (["--source", "f", "--out", "c", "--tokenizer", "no.tiktoken"], "--tokenizer no.tiktoken"),
        (["--source", "f", "--out", "c", "--tokenizer", "bad.tiktoken"], "--tokenizer bad.tiktoken"),
        (["--source", "f", "--out", "c", "--tokenizer", "worse.tiktoken"], "--tokenizer worse.tiktoken"),
        (["--source", "f", "--out", "c", "--tokenizer", "twice.tiktoken"], "--tokenizer twice.tiktoken"),
        (["--source", "f", "--out", "f/c"], "f/c"),
    ],
)
def test_mistakes_are_one_line(argv, says, tmp_path, capfd):
    (tmp_path / "f").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "file").write_text("")
    (tmp_path / "bad.tiktoken").write_bytes(base64.b64encode(b"a") + b" 0\n")
    (tmp_path / "worse.tiktoken").write_bytes(b"this is not a vocabulary\n")
    (tmp_path / "twice.tiktoken").write_bytes(b"".join(base64.b64encode(bytes([i])) + b" 0\n" for i in range(256)))
    before = sorted(p.name for p in tmp_path.iterdir())
    assert data.main(argv) == 2
    error = capfd.readouterr().err.splitlines()
    assert len(error) == 1 and says in error[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_unknown_flags_are_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        data.main(["--sorce", "x"])
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_meta_is_what_a_reader_expects(corpus_path):
    meta = json.loads((corpus_path / "meta.json").read_text())
    assert set(meta) == {
        "tokenizer", "vocab_size", "dtype", "fingerprint", "train_documents", "train_tokens", "train_bytes", "val_documents", "val_tokens", "val_bytes",
    }  # fmt: skip


# -- speed (slow) ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_vocabulary(tmp_path_factory) -> str:
    """A .tiktoken file of ordinary size, learned from the embedded corpus; none can be downloaded here."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train([str(f) for f in data.embedded_files()], trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False))
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for the 256 bytes
    letters = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(sorted(set(range(256)) - set(plain)))}
    tokens = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    file = tmp_path_factory.mktemp("vocabulary") / "python.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(bytes(letters[c] for c in token)) + b" %d\n" % i for token, i in tokens))
    return str(file)


def memory_of(pid: int) -> int:
    """Bytes that a process and its children hold, what they share counted once."""
    total = 0
    for one in (pid, *children(pid)):
        try:
            total += int(next(line for line in open(f"/proc/{one}/smaps_rollup") if line.startswith("Pss:")).split()[1]) * 1024
        except (OSError, StopIteration):
            pass
    return total


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["txt", "jsonl"])
def test_speed_and_memory_of_a_large_input(layout, real_vocabulary, tmp_path):
    """0.9 x cores x what one core does with encode_ordinary, and less than 1 GiB for 2 GB. The machine must be idle."""
    size, cores = int(float(os.environ.get("INPUT_BYTES", 2e9))), len(os.sched_getaffinity(0))
    texts = [text for text in (file.read_text(encoding="utf-8", errors="replace") for file in data.embedded_files()) if text]
    tokenizer = data.load_tokenizer(real_vocabulary)

    def on_one_core() -> float:
        started = time.perf_counter()
        for text in texts:
            tokenizer.encode_ordinary(text)
        return sum(len(text.encode()) for text in texts) / (time.perf_counter() - started)

    source, written = tmp_path / f"large.{layout}", 0
    with open(source, "wb") as file:
        while written < size:
            for text in texts:
                written += file.write(json.dumps({"text": text}).encode() + b"\n" if layout == "jsonl" else text.encode())
    argv = [sys.executable, str(ROOT / "data.py"), "--source", str(source), "--tokenizer", real_vocabulary, "--out", str(tmp_path / "c")]
    one_core = [on_one_core()]  # and once more at the end: machines change their speed
    before, started, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    process = subprocess.Popen(argv)
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(0.2)
    assert process.returncode == 0
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    meta = json.loads((tmp_path / "c" / "meta.json").read_text())
    text_bytes = meta["train_bytes"] + meta["val_bytes"]
    of_cpu = text_bytes / (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    shutil.rmtree(tmp_path)
    one_core = (one_core[0] + on_one_core()) / 2
    print(f"{layout}: {text_bytes / 1e6:.0f} MB at {text_bytes / seconds / 1e6:.2f} MB/s, one core {one_core / 1e6:.2f} MB/s, {cores} cores: "
          f"{text_bytes / seconds / one_core / cores:.3f} of ideal, {of_cpu / one_core:.3f} per second of CPU; "
          f"peak memory {peak / 2**20:.0f} MiB")  # fmt: skip
    assert peak < 2**30 and text_bytes / seconds > 0.9 * cores * one_core
