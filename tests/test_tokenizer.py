"""tokenizer.json files through tiktoken: the ids of `tokenizers`, and back again."""

import json
import random
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import data

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    "gpt2": BYTE_LEVEL, "starcoder": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
    "a pattern": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
}  # fmt: skip


def train_tokenizer(path: Path, texts, kind="starcoder", vocab_size=900, special=("<|endoftext|>", "<fim>")) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE_TOKENIZERS[kind], decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(path))
    return tokenizer


@pytest.fixture(scope="module")
def texts():
    """Source code, and words and white space of all kinds."""
    rng = random.Random(1)
    spaces = ["".join(rng.choices(" \n\t", k=rng.randint(1, 9))) + rng.choice(["x", "naïve 東京", "1234", "it's"]) for _ in range(300)]
    return [Path(data.__file__).read_text(encoding="utf-8")] + spaces * 3


def random_strings(n: int) -> list[str]:
    rng = random.Random(0)
    # code points that both have known for years: nothing unassigned, no surrogates
    known = [chr(c) for c in [*range(0x3100), *range(0x1F300, 0x1F640)] if unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs")]
    pool = known + known[:128] * 20 + [" "] * 800 + ["\n", "\t", "  ", "      ", "\r\n", "\u00a0"] * 60 + list("0123456789") * 60 + ["'s", "'ll", "def", " return"] * 60
    return ["".join(rng.choices(pool, k=rng.randint(0, 30))) for _ in range(n)]


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_ids_are_those_of_tokenizers(kind, texts, tmp_path):
    theirs = train_tokenizer(tmp_path / "tokenizer.json", texts, kind)
    ours = data.load_tokenizer(str(tmp_path / "tokenizer.json"))
    for text in random_strings(10_000):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode_ordinary(text) == ids, text
        assert ours.decode(ids) == text
    assert (ours.n_vocab, ours.eot_token) == (900, 0)


def test_special_tokens_never_come_from_plain_text(texts, tmp_path):
    train_tokenizer(tmp_path / "tokenizer.json", texts, special=["</s>", "<fim>"])
    ours = data.load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert ours.eot_token == 0  # by whatever name
    assert data.bytes_per_token(ours)[:3].tolist() == [0, 0, 1]
    for text in ("</s>", "<fim>", "a<|endoftext|>b", "</s></s>"):
        ids = ours.encode_ordinary(text)
        assert min(ids) > 1 and ours.decode(ids) == text


@pytest.mark.parametrize("kind", ["bytes", "starcoder"])
def test_and_back(kind, texts, tmp_path):
    """What an export writes: transformers, and we, read the same tokenizer again."""
    from transformers import AutoTokenizer

    if kind != "bytes":
        train_tokenizer(tmp_path / "tokenizer.json", texts, kind)
    ours = data.load_tokenizer("bytes" if kind == "bytes" else str(tmp_path / "tokenizer.json"))
    for name, content in data.tokenizer_files(ours).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), data.load_tokenizer(str(tmp_path / "tokenizer.json"))
    for text in random_strings(500):
        assert ours.encode_ordinary(text) == theirs.encode(text, add_special_tokens=False) == again.encode_ordinary(text)
    assert theirs.eos_token_id == again.eot_token == ours.eot_token and again.n_vocab == ours.n_vocab


def test_a_corpus_keeps_its_tokenizer(texts, documents, tmp_path):
    train_tokenizer(tmp_path / "tokenizer.json", texts)
    data.prepare(documents, str(tmp_path / "tokenizer.json"), tmp_path / "corpus")
    (tmp_path / "tokenizer.json").unlink()
    corpus = data.open_corpus(tmp_path / "corpus")
    trained_on = corpus.tokenizer.decode(corpus.train.tolist()).split("<|endoftext|>")
    assert corpus.meta["vocab_size"] == 900 and len(trained_on) > 200 and set(trained_on) <= {*documents, ""}


def changed(spec: dict, **parts) -> str:
    return json.dumps(spec | parts)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda s: "", "byte-level"), (lambda s: "[]", "byte-level"), (lambda s: "{}", "byte-level"), (lambda s: changed(s, model={"type": "WordPiece"}), "byte-level"),
        (lambda s: changed(s, normalizer={"type": "NFC"}), "byte-level"), (lambda s: changed(s, pre_tokenizer={"type": "Metaspace"}), "pre-tokenizer"),
        (lambda s: changed(s, pre_tokenizer=s["pre_tokenizer"] | {"pretokenizers": [{"type": "ByteLevel", "add_prefix_space": True}]}), "pre-tokenizer"),
        (lambda s: changed(s, added_tokens=[]), "end-of-text"), (lambda s: changed(s, model=s["model"] | {"merges": s["model"]["merges"][::-1]}), "order"),
        (lambda s: changed(s, model=s["model"] | {"vocab": {k: v for k, v in s["model"]["vocab"].items() if k != "a"}}), "bytes"),
        (lambda s: changed(s, model=s["model"] | {"vocab": {k: v for k, v in s["model"]["vocab"].items() if k != "ÿ"}, "merges": []}), None),  # no text has it
        (lambda s: changed(s, model=s["model"] | {"vocab": {k: v for k, v in s["model"]["vocab"].items() if k != "a"}, "merges": []}), "bytes"),
    ],
)  # fmt: skip
def test_other_kinds_are_refused(change, says, texts, tmp_path, capsys):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(path, texts, vocab_size=300)
    path.write_text(change(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    if says is None:
        assert data.load_tokenizer(str(path)).decode([5]) == "$"
        return
    assert data.main(["--source", str(Path(__file__)), "--tokenizer", str(path), "--out", "new"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "tokenizer.json" in error and says in error, error
    assert not Path("new").exists()
