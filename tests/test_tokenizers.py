"""Tokenizers give every text back, and their ids are those of the libraries."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer, normalizers, processors

import train
from conftest import STEP, argv
from eval import load_model
from tools.flags import UserError
from tools.prepare import prepare
from tools.tokenizers import copy_tokenizer, identity, load_tokenizer

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
        assert ids == expected(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot_token not in ids


def test_bytes_are_the_bytes_of_utf8():
    tokenizer = load_tokenizer("bytes")
    check(tokenizer, lambda text: list(text.encode()))
    assert tokenizer.decode([255, 97]) == "\ufffda"  # a model may write anything


SPECIAL = ["<fim>", "[UNK]"]


def byte_level(end="<|endoftext|>") -> Tokenizer:
    """Train a tokenizer whose letters are bytes."""
    library = ByteLevelBPETokenizer()
    texts = ["def f(x): return x", "it's a text 123"] * 9
    settings = dict(vocab_size=400, special_tokens=[end, *SPECIAL], show_progress=False)
    library.train_from_iterator(texts, **settings)
    return Tokenizer.from_str(library.to_str())


def test_ids_are_those_of_the_package():
    """Without tokens around a text, without cuts, and with no end-of-text in a text."""
    library = byte_level()
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


def test_the_best_name_is_end_of_text():
    """In Gemma's tokenizer, </s> is for HTML."""
    library = byte_level(end="<eos>")
    library.add_tokens(["</s>"])
    library.save("tokenizer.json")
    tokenizer = load_tokenizer("tokenizer.json")
    assert tokenizer.eot_token == library.token_to_id("<eos>")
    assert tokenizer.n_vocab == library.get_vocab_size()


def test_a_name_is_the_fingerprint_of_a_file():
    byte_level().save("words.json")
    shutil.copy("words.json", "copy.json")
    byte_level(end="<eos>").save("other.json")
    names = [identity(name) for name in ("words.json", "copy.json", "other.json")]
    assert names[0] == names[1] != names[2]
    assert identity("bytes") == "bytes" and identity("gpt2") == "gpt2"
    copy_tokenizer("words.json", Path(), Path())
    assert identity(names[0]) == names[0]  # its own name


def test_a_moved_corpus_and_a_moved_run_have_their_tokenizer(documents, tmp_path):
    """Also for a branch onto a text with the same tokenizer from another place."""
    byte_level().save("words.json")
    prepare(documents, "words.json", Path("a"))
    Path("words.json").rename("moved.json")
    prepare(documents[:200], "moved.json", Path("b"))
    Path("moved.json").unlink()
    typed = argv(data="a", total_tokens=8 * STEP, out="run", final_eval_tokens=320)
    assert train.main(typed) == 0
    Path("a").rename("c")
    Path("run").rename("moved")
    branch = f"--branch=moved --total_tokens={12 * STEP}".split()
    assert train.main([*branch, "--data=b", "--out=d"]) == 0
    tokenizer = load_tokenizer(load_model("moved").run["tokenizer"])
    assert tokenizer.decode(tokenizer.encode_ordinary(HARD)) == HARD
    prepare(documents, "bytes", Path("bytes"))
    assert train.main([*branch, "--data=bytes", "--out=e"]) == 2


@pytest.mark.parametrize("name, word", [
    ("gpt9", "gpt9"), ("missing.json", "missing.json"), ("no-end.json", "<|endoftext|>"),
    ("text.json", "text.json"), ("lower.json", "give a text back"),
])  # fmt: skip
def test_other_names_and_files_are_refused(name, word):
    Path("text.json").write_text("just some text")
    byte_level(end="<end>").save("no-end.json")
    library = byte_level()
    library.normalizer = normalizers.Lowercase()
    library.save("lower.json")
    with pytest.raises(UserError, match=word.replace("|", r"\|")) as error:
        load_tokenizer(name)
    assert "\n" not in str(error.value)
