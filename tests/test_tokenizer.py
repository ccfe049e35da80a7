"""tokenizer.json files through tiktoken: the ids of `tokenizers`, and back again."""

import json
import random
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import data
from test_mistakes import one_line
from tools.tokenizers import tokenizer_files

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS = pre_tokenizers.Digits(individual_digits=True)
SPLIT = pre_tokenizers.Split(Regex(LLAMA), "isolated")
ONLY_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PRE_TOKENIZERS = {
    "gpt2": BYTE_LEVEL,
    "starcoder": pre_tokenizers.Sequence([DIGITS, BYTE_LEVEL]),
    "a pattern": pre_tokenizers.Sequence([SPLIT, ONLY_BYTES]),
}


def train_tokenizer(path: Path, texts, kind="starcoder", size=900, end="<|endoftext|>"):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        PRE_TOKENIZERS[kind],
        decoders.ByteLevel(),
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[end, "<fim>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
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
    pool = known + known[:128] * 20 + [" "] * 800 + common * 60
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
    train_tokenizer(tmp_path / "tokenizer.json", texts, end="</s>")
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
    ours = data.load_tokenizer(
        "bytes" if kind == "bytes" else str(tmp_path / "tokenizer.json")
    )
    for name, content in tokenizer_files(ours).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    again = data.load_tokenizer(str(tmp_path / "tokenizer.json"))
    for text in random_strings(500):
        ids = ours.encode_ordinary(text)
        assert (
            ids
            == theirs.encode(text, add_special_tokens=False)
            == again.encode_ordinary(text)
        )
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == again.eot_token == ours.eot_token


CHANGES = [
    ({"model": {"type": "WordPiece"}}, "byte-level"),
    ({"normalizer": {"type": "NFC"}}, "normalizer"),
    ({"added_tokens": []}, "end-of-text"),
    ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "pre-tokenizer"),
    ("reversed merges", "order"), ("without a", "'a'"), ("without ÿ", None),
    ("pattern [a-z]+", "does not match every text"), ("pattern ([", "cannot be loaded"),
    ("id '300'", "whole numbers"), ("id -1", "whole numbers"), ("id 2**40", "whole numbers"),
    ("id 5.0", "whole numbers"), ("id [5]", "whole numbers"), ("id 5", "the same id"),
]  # fmt: skip


@pytest.mark.parametrize("change, says", CHANGES, ids=str)
def test_other_kinds_are_refused(change, says, texts, tmp_path, capsys):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(path, texts, size=300)
    spec = json.loads(path.read_text(encoding="utf-8"))
    model = spec["model"]
    if isinstance(change, dict):
        spec |= change
    elif change == "reversed merges":
        model["merges"].reverse()
    elif change.startswith("pattern "):
        split = {"type": "Split", "behavior": "Isolated"}
        split["pattern"] = {"Regex": change.removeprefix("pattern ")}
        last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, last]}
    elif change.startswith("id "):
        spec["added_tokens"][1]["id"] = eval(change.removeprefix("id "))
    else:
        model["merges"], _ = [], model["vocab"].pop(change[-1])
    path.write_text(json.dumps(spec), encoding="utf-8")
    if says is None:  # no text contains the byte of ÿ
        assert data.load_tokenizer(str(path)).decode([5]) == "$"
        return
    argv = ["--source", __file__, "--tokenizer", str(path), "--out", "new"]
    error = one_line(data.main, argv, capsys)
    assert "tokenizer.json" in error and says in error and not Path("new").exists()
