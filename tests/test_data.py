"""From text to batches: nothing lost, nothing leaked, and always in the same order."""

import base64
import hashlib
import json
import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import eval as evaluation
import train


def split_at_end_of_text(ids: np.ndarray, tokenizer) -> list[str]:
    ends = np.flatnonzero(ids == tokenizer.eot_token)
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(part[part != tokenizer.eot_token].tolist()) for part in np.split(ids, ends[:-1] + 1)]


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
        model, optimizer = train.build(cfg)
        seen.clear()
        for n0 in range(0, 64 * 32, cfg.batch_tokens):
            train.optimizer_step(cfg, model, optimizer, corpus, n0, lr=1e-3)
        streams.append(list(seen))
    assert len(streams[0]) == 64 and all(stream == streams[0] for stream in streams)


def test_sequences_are_cut_where_they_should_be():
    tokens = np.arange(101, dtype=np.uint16)
    assert data.n_sequences(tokens, 10) == 10  # the last sequence's last target is token 100
    x, y = data.read_sequences(tokens, np.array([0, 9]), 10)
    assert x.tolist() == [list(range(10)), list(range(90, 100))]
    assert y.tolist() == [list(range(1, 11)), list(range(91, 101))]
    assert x.dtype == np.int64


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


def test_one_long_text_is_divided_too(tmp_path):
    """The hash cannot divide a single document: the end of it is held out."""
    text = "All work and no play makes a dull boy. " * 5000
    meta = data.prepare([text], "bytes", tmp_path / "c", val_fraction=0.1)
    corpus = data.open_corpus(tmp_path / "c")
    assert meta["val_tokens"] == pytest.approx(0.1 * (len(text) + 1), abs=1)
    assert bytes(corpus.train.astype(np.uint8)) + bytes(corpus.val.astype(np.uint8)) == text.encode() + b"\xff"


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
    result = evaluation.held_out_loss(model, corpus)
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
    assert evaluation.held_out_loss(model, corpus)["val_loss"] == pytest.approx(by_hand, rel=1e-6)
    assert model.training  # left as it was found
    some = [evaluation.held_out_loss(model, corpus, 320)["val_loss"] for _ in range(2)]
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


def test_large_vocabularies_get_more_bits(tmp_path):
    tokens = [bytes([i]) for i in range(256)] + [b"%05d" % i for i in range(65_536)]
    (tmp_path / "wide.tiktoken").write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)))
    data.prepare(["a65535"] * 40, "wide.tiktoken", tmp_path / "c")
    ids = np.fromfile(tmp_path / "c" / "train.bin", np.uint32)
    assert ids[:2].tolist() == [97, 256 + 65_535] or data.load_tokenizer("wide.tiktoken").decode(ids[:-1].tolist()).startswith("a65535")
    assert ids.max() == 65_536 + 256 and json.loads((tmp_path / "c" / "meta.json").read_text())["dtype"] == "uint32"


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
