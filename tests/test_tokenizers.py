"""Tokenizers give every text back, and their ids are those of the libraries."""

import base64
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

import data
from tools.flags import UserError
from tools.tokenizers import (
    END_OF_TEXT,
    GPT2_PATTERN,
    encode,
    fingerprint,
    load_tokenizer,
)

# what goes wrong easily
HARD = "</s>a <s> <|endoftext|><fim>\r\n\0 naïve 東京 🙂 1234  def x\t\n"


def some_texts(n: int) -> list[str]:
    """Words, spaces and letters of all kinds, in any order."""
    rng = random.Random(n)
    pool = [
        "x",
        "naïve",
        "東京",
        "1234",
        "it's",
        " def",
        "\r\n",
        "\t",
        " ",
        "      ",
        "🙂",
        HARD,
    ]
    return ["".join(rng.choices(pool, k=rng.randint(1, 30))) for _ in range(n)]


# -- tiktoken ----------------------------------------------------------------------------

WORDS = [bytes([i]) for i in range(256)] + [b"de", b"def", b"  ", b" a", "ζ".encode()]


def write_tiktoken(path: str, tokens: list[bytes] = WORDS) -> str:
    lines = [base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)]
    Path(path).write_bytes(b"".join(lines))
    return path


def test_bytes_are_the_bytes_of_utf8():
    tokenizer = load_tokenizer("bytes")
    for text in some_texts(50):
        ids = tokenizer.encode_ordinary(text)
        assert ids == list(text.encode()) == encode(tokenizer, text).tolist()
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot_token not in ids
    assert tokenizer.decode([255, 97]) == "\ufffda"  # a model may write anything


def test_a_tiktoken_file_cuts_words_as_gpt2_does():
    tokenizer = load_tokenizer(write_tiktoken("words.tiktoken"))
    ranks = {token: i for i, token in enumerate(WORDS)}
    theirs = tiktoken.Encoding(
        "x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    for text in some_texts(50):
        ids = tokenizer.encode_ordinary(text)
        assert ids == theirs.encode_ordinary(text) == encode(tokenizer, text).tolist()
        assert tokenizer.decode(ids) == text
    assert tokenizer.eot_token == len(WORDS)
    assert tokenizer.n_vocab == len(WORDS) + 1


def test_a_million_spaces_are_a_text_like_any_other():
    tokenizer = load_tokenizer(write_tiktoken("words.tiktoken"))
    text = "a" + " " * 1_100_000 + "b"
    assert tokenizer.decode(encode(tokenizer, text).tolist()) == text


# -- tokenizer.json ----------------------------------------------------------------------

LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
ONLY_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PRE_TOKENIZERS = {
    "gpt2": BYTE_LEVEL,
    "starcoder": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTE_LEVEL]),
    "llama3": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), ONLY_BYTES]
    ),
}
SPECIAL = ["<fim>", "[UNK]"]


def byte_level(kind="gpt2", end="<|endoftext|>") -> Tokenizer:
    """Train a tokenizer whose letters are bytes."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = PRE_TOKENIZERS[kind]
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[end, *SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["def f(x): return x", "it's a text 123"] * 9, trainer)
    return library


def llama2() -> Tokenizer:
    """One whose spaces are ▁, with a token for every byte of unknown letters."""
    special = ["<|endoftext|>", *SPECIAL]
    letters = ["▁", "▁▁", *"abcdefx", "de", "def", "▁def"]
    tokens = special + [f"<0x{i:02X}>" for i in range(256)] + letters
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "▁"), ("d", "e"), ("de", "f"), ("▁", "def")]
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="[UNK]")
    library = Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(special)
    return library


def lossy(kind: str) -> Tokenizer:
    """One that replaces letters, or words that it does not know."""
    vocabulary = {token: i for i, token in enumerate(["[UNK]", *"defxy", "def"])}
    if kind == "lower case":
        library = byte_level()
        library.normalizer = normalizers.Lowercase()
        return library
    if kind == "few letters":
        library = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]"))
        library.pre_tokenizer = BYTE_LEVEL
        library.decoder = decoders.ByteLevel()
    elif kind == "word pieces":  # as BERT
        library = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        library.decoder = decoders.WordPiece()
    else:  # as T5
        pieces = [(piece, -1.0) for piece in vocabulary]
        library = Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
        library.pre_tokenizer = pre_tokenizers.Metaspace()
        library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<|endoftext|>"])
    return library


@pytest.mark.parametrize("kind", [*PRE_TOKENIZERS, "llama2"])
def test_ids_are_those_of_the_package(kind):
    """Without tokens around a text, without cuts, and with no end-of-text in a text."""
    library = llama2() if kind == "llama2" else byte_level(kind)
    library.save("plain.json")
    library.post_processor = processors.TemplateProcessing(
        single="<fim> $A <|endoftext|>",
        special_tokens=[("<fim>", 1), ("<|endoftext|>", 0)],
    )
    library.enable_truncation(8)
    library.enable_padding()
    library.save("more.json")
    theirs = Tokenizer.from_file("plain.json")
    theirs.encode_special_tokens = True
    tokenizer = load_tokenizer("more.json")
    for text in some_texts(100):
        ids = tokenizer.encode_ordinary(text)
        assert ids == theirs.encode(text).ids == encode(tokenizer, text).tolist()
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot_token not in ids
    assert tokenizer.n_vocab == theirs.get_vocab_size()
    assert tokenizer.eot_token == theirs.token_to_id("<|endoftext|>")


@pytest.mark.parametrize("kind", ["lower case", "few letters", "word pieces", "unigram"])
def test_tokenizers_that_change_text_are_refused(kind):
    lossy(kind).save("tokenizer.json")
    with pytest.raises(UserError, match="give a text back"):
        load_tokenizer("tokenizer.json")


@pytest.mark.parametrize("end", END_OF_TEXT)
def test_end_of_text_is_a_special_token(end):
    """And not a word for HTML, such as </s> in Gemma's tokenizer."""
    library = byte_level(end=end)
    words = [AddedToken(name, special=False) for name in END_OF_TEXT if name != end]
    library.add_tokens(words)
    library.save("tokenizer.json")
    tokenizer = load_tokenizer("tokenizer.json")
    assert tokenizer.eot_token == library.token_to_id(end)
    assert tokenizer.n_vocab == library.get_vocab_size()


def test_a_corpus_brings_its_tokenizer(documents):
    byte_level("starcoder").save("tokenizer.json")
    theirs = load_tokenizer("tokenizer.json")
    data.prepare(documents, "tokenizer.json", Path("corpus"))
    Path("tokenizer.json").unlink()
    corpus = data.open_corpus("corpus")
    data.check_tokenizer(corpus, str(Path("corpus", "tokenizer.json")))
    ids = np.concatenate([corpus.train, corpus.val])
    assert ids.max() < corpus.meta["vocab_size"] == theirs.n_vocab
    texts = np.split(ids, np.flatnonzero(ids == theirs.eot_token) + 1)[:-1]
    back = [corpus.tokenizer.decode(text[:-1].tolist()) for text in texts]
    assert sorted(back) == sorted(documents)


# -- Names -------------------------------------------------------------------------------


def test_equal_tokenizers_are_equal_under_any_name():
    write_tiktoken("a.tiktoken")
    shutil.copy("a.tiktoken", "b.tiktoken")
    write_tiktoken("fewer.tiktoken", WORDS[:-1])
    byte_level().save("gpt2.json")
    byte_level("llama3").save("llama3.json")
    names = ["bytes", "a.tiktoken", "fewer.tiktoken", "gpt2.json", "llama3.json"]
    prints = {fingerprint(load_tokenizer(name)) for name in names}
    assert len(prints) == len(names)
    assert fingerprint(load_tokenizer("b.tiktoken")) in prints


@pytest.mark.parametrize("name, word", [
    ("gpt9", "cl100k_base"),
    ("missing.json", "missing.json"),
    ("missing.tiktoken", "missing.tiktoken"),
    ("text.tiktoken", "text.tiktoken"),
    ("null.json", "null.json"),
    ("no-end.json", "<|endoftext|>"),
    ("cl100k_base.tiktoken", "pattern"),  # it is in the library, not in the file
])  # fmt: skip
def test_other_names_and_files_are_refused(name, word):
    Path("text.tiktoken").write_text("just some text")
    Path("null.json").write_text("null")
    byte_level(end="<end>").save("no-end.json")
    write_tiktoken("cl100k_base.tiktoken")
    with pytest.raises(UserError, match=word.replace("|", r"\|")) as error:
        load_tokenizer(name)
    assert "\n" not in str(error.value)


def test_without_the_package_one_line_names_it(monkeypatch):
    byte_level().save("tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    with pytest.raises(UserError, match="pip install tokenizers"):
        load_tokenizer("tokenizer.json")
