"""Tokenizers of every kind, in corpora, samples and exports, against the package `tokenizers`."""

import base64
import json
import random
import sys
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors, trainers

import data
import eval as evaluation
import model as model_file
import train
from test_mistakes import one_line
from test_train import flags
from tools.tokenizers import bytes_per_token, load_tokenizer, tokenizer_files

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ONLY_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BYTE_PRE_TOKENIZERS = {
    "gpt2": BYTE_LEVEL,
    "prefix space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "starcoder": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]
    ),
    "a pattern": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA), "isolated"), ONLY_BYTES]
    ),
    "part of the alphabet": BYTE_LEVEL,
}
KINDS = [*BYTE_PRE_TOKENIZERS, "unigram", "word pieces"]
# everything that may go wrong in one text
HARD = "</s>a <s> <|endoftext|><fim>[SEP]\r\n\0 naïve 東京 🙂 1234  x\t\n"


def train_tokenizer(path: Path, texts, kind="starcoder", size=900, end="<|endoftext|>"):
    """Train a tokenizer of this kind, and save it."""
    special = [end, "<fim>"]
    if kind == "unigram":  # as T5 and its kin
        special = ["</s>", "<unk>"]
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=size,
            special_tokens=special,
            unk_token="<unk>",
            show_progress=False,
        )
    elif kind == "word pieces":  # as BERT, which adds tokens around a text and cuts it
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, special_tokens=special, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = BYTE_PRE_TOKENIZERS[kind]
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = [] if kind == "part of the alphabet" else ALPHABET
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=alphabet,
        )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(["wörd"])  # one that is added, but not special
    if kind == "word pieces":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        tokenizer.enable_truncation(8)
        tokenizer.enable_padding()
    tokenizer.save(str(path))
    return tokenizer


@pytest.fixture(scope="module")
def texts():
    """Source code, and words and white space of all kinds."""
    rng = random.Random(1)
    words = ["x", "naïve 東京", "1234", "it's"]
    some = lambda: "".join(rng.choices(" \n\t", k=rng.randint(1, 9))) + rng.choice(words)
    return [
        Path(data.__file__).read_text(encoding="utf-8"),
        *(some() for _ in range(900)),
    ]


def random_strings(n: int) -> list[str]:
    rng = random.Random(0)
    # code points that both have known for years: nothing unassigned, no surrogates
    points = map(chr, [*range(0x3100), *range(0x1F300, 0x1F640)])
    known = [c for c in points if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs")]
    common = [*"\n\t\u00a00123456789", "  ", "      ", "\r\n", "'s", "'ll", "def", " if"]
    pool = known + known[:128] * 20 + [" "] * 800 + common * 60 + [" wörd"] * 9
    return ["".join(rng.choices(pool, k=rng.randint(0, 30))) for _ in range(n)]


def ids_of_the_package(path: Path, text: str) -> list[int]:
    library = Tokenizer.from_file(str(path))
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # special tokens are ordinary text
    return library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_package(kind, texts, tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(path, texts, kind)
    ours = load_tokenizer(str(path))
    library = Tokenizer.from_file(str(path))
    assert ours.n_vocab == library.get_vocab_size()
    ordinary = HARD.replace("</s>", "") if kind == "unigram" else HARD
    for text in ["", ordinary, ordinary * 99, *random_strings(200)]:
        ids = ours.encode_ordinary(text)
        assert ids == ids_of_the_package(path, text), text
        assert ours.decode(ids) == library.decode(ids)
    assert ours.encode_ordinary("half \ud83d") == ours.encode_ordinary("half ?")


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_never_contains_an_end_of_text(kind, texts, tmp_path):
    """Also not in a unigram model, for which </s> is a word like any other."""
    train_tokenizer(tmp_path / "tokenizer.json", texts, kind)
    ours = load_tokenizer(str(tmp_path / "tokenizer.json"))
    end = {"unigram": "</s>", "word pieces": "[SEP]"}.get(kind, "<|endoftext|>")
    assert ours.eot_token == ours.library.token_to_id(end) or kind == "unigram"
    assert bytes_per_token(ours)[ours.eot_token] == 0
    for text in (end, f"a{end}b", end * 2, HARD):
        ids = ours.encode_ordinary(text)
        assert ids and ours.eot_token not in ids
    if kind not in ("word pieces", "part of the alphabet", "prefix space"):
        assert ours.decode(ours.encode_ordinary(f"x {end} y")) == f"x {end} y"


@pytest.mark.parametrize("kind", KINDS)
def test_training_sampling_and_export(kind, texts, documents, tmp_path, capsys):
    """A corpus, a run, its validation loss in bytes of the documents, a text and an export."""
    path = tmp_path / "tokenizer.json"
    train_tokenizer(path, [*texts, *documents], kind)
    hard = [text + HARD.replace("</s>", "") * (i % 3) for i, text in enumerate(documents)]
    meta = data.prepare(hard, str(path), tmp_path / "corpus", val_fraction=0.2)
    corpus = data.open_corpus(tmp_path / "corpus")
    tokens = []
    for document in hard:
        tokens += [*ids_of_the_package(path, document), corpus.tokenizer.eot_token]
    both = [*corpus.train.tolist(), *corpus.val.tolist()]
    assert sorted(both) == sorted(tokens)
    n_bytes = sum(len(document.encode()) for document in hard)
    assert meta["train_bytes"] + meta["val_bytes"] == n_bytes
    # the bytes of the documents, which a tokenizer may have changed
    assert corpus.lengths[corpus.val].sum() == pytest.approx(meta["val_bytes"], rel=1e-9)
    lost = {"word pieces": "unknown tokens", "unigram": "unknown tokens"}
    lost["part of the alphabet"] = "bytes that have no token dropped"
    assert {name for name in meta if name in lost.values()} <= {lost.get(kind)}

    path.unlink()  # the corpus has a copy
    assert train.main(flags(tmp_path / "corpus", out="run", total_tokens=2048)) == 0
    capsys.readouterr()
    assert evaluation.main(["--model=run", "--device=cpu", "--prompt=def alpha"]) == 0
    assert capsys.readouterr().out.startswith("def alpha")
    assert model_file.main(["--export=run", "--to=out"]) == 0
    assert "same logits" in capsys.readouterr().out
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained("out")
    assert theirs.eos_token_id == corpus.tokenizer.eot_token
    ours = load_tokenizer("out/tokenizer.json")
    for text in random_strings(50):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode_ordinary(text) == expected
    assert evaluation.main(["--model=out", "--data=corpus", "--device=cpu"]) == 0


def write_tiktoken(path: Path, *more: bytes) -> str:
    """A .tiktoken file of all bytes and more tokens."""
    ranks = [bytes([i]) for i in range(256)] + list(more)
    lines = [base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(ranks)]
    path.write_bytes(b"".join(lines))
    return str(path)


@pytest.mark.parametrize("kind", ["bytes", "a few words", "a word that no pair makes"])
def test_tiktoken_becomes_a_tokenizer_json(kind, tmp_path):
    """What an export writes: transformers, and we, read the same tokenizer again."""
    from transformers import AutoTokenizer

    words = {"bytes": (), "a few words": (b"de", b"def", b"re", b" a", "ζ".encode())}
    more = words.get(kind, (b"def", b" naive"))
    name = "bytes" if kind == "bytes" else write_tiktoken(tmp_path / "w.tiktoken", *more)
    ours = load_tokenizer(name)
    for name, content in tokenizer_files(ours).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path / "tokenizer.json"))
    for text in ["def re a naive undefined", *random_strings(500)]:
        ids = ours.encode_ordinary(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ids == again.encode_ordinary(text)
        assert theirs.decode(ids) == again.decode(ids) == text
    assert theirs.eos_token_id == again.eot_token == ours.eot_token
    lengths = bytes_per_token(ours), bytes_per_token(again)
    assert lengths[0].tolist() == lengths[1].tolist()


def test_without_the_package_one_line_names_it(texts, tmp_path, monkeypatch, capsys):
    train_tokenizer(tmp_path / "tokenizer.json", texts)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    argv = ["--source", __file__, "--tokenizer", "tokenizer.json", "--out", "new"]
    assert "pip install tokenizers" in one_line(data.main, argv, capsys)


CHANGES = {
    "no end-of-text": ({"added_tokens": []}, "has no end-of-text token"),
    "no model": ({"model": None}, "not a tokenizer.json"),
    "another model": ({"model": {"type": "Unknown"}}, "not a tokenizer.json"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_files_are_refused(change, texts, tmp_path, capsys):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(path, texts, size=300)
    fields, says = CHANGES[change]
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    argv = ["--source", __file__, "--tokenizer", str(path), "--out", "new"]
    error = one_line(data.main, argv, capsys)
    assert "tokenizer.json" in error and says in error and not Path("new").exists()
