"""Tokenizers give every text back, and their ids are those of the libraries."""

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import tiktoken
from harness import TOKENS, write_tiktoken
from tokenizers import AddedToken, ByteLevelBPETokenizer, Tokenizer
from tokenizers import decoders, models, normalizers, processors

from tools.flags import UserError
from tools.tokenizers import END_OF_TEXT, GPT2_PATTERN
from tools.tokenizers import encode, fingerprint, load_tokenizer

# what goes wrong easily
HARD = "</s>a <s> <|endoftext|><fim>\r\n\0 naïve 東京 🙂 1234  def x\t\n"


def some_texts(n: int) -> list[str]:
    """Words, spaces and letters of all kinds, in any order."""
    rng = random.Random(n)
    pool = ["x", "naïve", "東京", "1234", "it's", " def", "\r\n", "\t", " " * 6, HARD]
    return ["".join(rng.choices(pool, k=rng.randint(1, 30))) for _ in range(n)]


def check(tokenizer, expected: Callable[[str], list[int]]) -> None:
    """Texts have the expected ids, without end-of-text, and come back."""
    for text in some_texts(50):
        ids = tokenizer.encode_ordinary(text)
        assert ids == expected(text) == encode(tokenizer, text).tolist()
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot_token not in ids


# -- tiktoken ----------------------------------------------------------------------------


def test_bytes_are_the_bytes_of_utf8():
    tokenizer = load_tokenizer("bytes")
    check(tokenizer, lambda text: list(text.encode()))
    assert tokenizer.decode([255, 97]) == "\ufffda"  # a model may write anything


def test_a_tiktoken_file_cuts_words_as_gpt2_does(tokenizer_path):
    tokenizer = load_tokenizer(tokenizer_path)
    ranks = {token: i for i, token in enumerate(TOKENS)}
    theirs = tiktoken.Encoding(
        "x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    check(tokenizer, theirs.encode_ordinary)
    assert tokenizer.eot_token == len(TOKENS)
    assert tokenizer.n_vocab == len(TOKENS) + 1


def test_a_million_spaces_are_a_text_like_any_other(tokenizer_path):
    tokenizer = load_tokenizer(tokenizer_path)
    text = "a" + " " * 1_100_000 + "b"
    assert tokenizer.decode(encode(tokenizer, text).tolist()) == text


# -- tokenizer.json ----------------------------------------------------------------------

SPECIAL = ["<fim>", "[UNK]"]


def byte_level(end="<|endoftext|>") -> Tokenizer:
    """Train a tokenizer whose letters are bytes."""
    library = ByteLevelBPETokenizer()
    texts = ["def f(x): return x", "it's a text 123"] * 9
    settings = dict(vocab_size=400, special_tokens=[end, *SPECIAL], show_progress=False)
    library.train_from_iterator(texts, **settings)
    return Tokenizer.from_str(library.to_str())


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


@pytest.mark.parametrize("make", [byte_level, llama2])
def test_ids_are_those_of_the_package(make):
    """Without tokens around a text, without cuts, and with no end-of-text in a text."""
    library = make()
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
    check(tokenizer, lambda text: theirs.encode(text).ids)
    assert tokenizer.n_vocab == theirs.get_vocab_size()
    assert tokenizer.eot_token == theirs.token_to_id("<|endoftext|>")


@pytest.mark.parametrize("make", [byte_level, llama2])
def test_a_long_text_has_the_same_ids_in_pieces(make, monkeypatch):
    """The package needs 175 bytes of memory for a character that it encodes."""
    make().save("tokenizer.json")
    tokenizer = load_tokenizer("tokenizer.json")
    text = "".join(some_texts(200))
    ids = tokenizer.encode_ordinary(text)
    noted = mock.Mock(wraps=tokenizer.encode_ordinary)
    monkeypatch.setattr(tokenizer, "encode_ordinary", noted)
    monkeypatch.setattr("tools.tokenizers.PIECE", 100)
    assert encode(tokenizer, text).tolist() == ids
    lengths = [len(call.args[0]) for call in noted.call_args_list]
    assert max(lengths) < 300 < len(text) / 10


def test_a_tokenizer_that_changes_text_is_refused():
    library = byte_level()
    library.normalizer = normalizers.Lowercase()
    library.save("tokenizer.json")
    with pytest.raises(UserError, match="give a text back"):
        load_tokenizer("tokenizer.json")


def test_end_of_text_is_a_special_token():
    """And not a word for HTML, such as </s> in Gemma's tokenizer."""
    library = byte_level(end="<eos>")
    assert END_OF_TEXT[-1] == "<eos>"
    library.add_tokens([AddedToken(name, special=False) for name in END_OF_TEXT[:-1]])
    library.save("tokenizer.json")
    tokenizer = load_tokenizer("tokenizer.json")
    assert tokenizer.eot_token == library.token_to_id("<eos>")
    assert tokenizer.n_vocab == library.get_vocab_size()


# -- Names -------------------------------------------------------------------------------


def test_equal_tokenizers_are_equal_under_any_name(tokenizer_path):
    shutil.copy(tokenizer_path, "copy.tiktoken")
    write_tiktoken(Path("fewer.tiktoken"), TOKENS[:-1])
    byte_level().save("words.json")
    names = ["bytes", tokenizer_path, "fewer.tiktoken", "words.json"]
    prints = {fingerprint(load_tokenizer(name)) for name in names}
    assert len(prints) == len(names)
    assert fingerprint(load_tokenizer("copy.tiktoken")) in prints


@pytest.mark.parametrize("name, word", [
    ("gpt9", "cl100k_base"),
    ("missing.json", "missing.json"),
    ("text.tiktoken", "text.tiktoken"),
    ("no-end.json", "<|endoftext|>"),
    ("cl100k_base.tiktoken", "pattern"),  # it is in the library, not in the file
])  # fmt: skip
def test_other_names_and_files_are_refused(name, word):
    Path("text.tiktoken").write_text("just some text")
    byte_level(end="<end>").save("no-end.json")
    write_tiktoken(Path("cl100k_base.tiktoken"), TOKENS)
    with pytest.raises(UserError, match=word.replace("|", r"\|")) as error:
        load_tokenizer(name)
    assert "\n" not in str(error.value)


def test_without_the_package_one_line_names_it(monkeypatch):
    byte_level().save("tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    with pytest.raises(UserError, match="pip install tokenizers"):
        load_tokenizer("tokenizer.json")
