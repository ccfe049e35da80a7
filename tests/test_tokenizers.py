"""Tokenizers give every text back, and their ids are those of the libraries."""

from pathlib import Path

import harness
import pytest
from tokenizers import Tokenizer, normalizers

import train
from conftest import STEP, argv
from eval import load_model
from tools.flags import UserError
from tools.prepare import prepare
from tools.tokenizers import identity, load_tokenizer

# what goes wrong easily
HARD = "</s>a <s> <|endoftext|><fim>\r\n\0 naïve 東京 🙂 1234  def x\t\n"


def save(name: str, end="<|endoftext|>", change=lambda library: None) -> Tokenizer:
    """Write a tokenizer.json, changed, and return it."""
    texts = ["def f(x): return x", "it's a text 123"] * 9
    harness.train_tokenizer(Path(name), texts, size=300, end=end)
    library = Tokenizer.from_file(name)
    change(library)
    library.save(name)
    return library


def test_bytes_are_the_bytes_of_utf8():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode_ordinary(HARD) == list(HARD.encode())
    assert tokenizer.decode(list(HARD.encode())) == HARD
    assert tokenizer.decode([255, 97]) == "\ufffda"  # a model may write anything


def test_ids_are_those_of_the_package():
    """Without tokens around a text, without cuts, and with no end-of-text in a text.

    In Gemma's tokenizer, </s> is for HTML.
    """

    def as_others_use_it(library: Tokenizer) -> None:
        library.enable_truncation(8)
        library.enable_padding()
        library.add_tokens(["</s>"])

    library = save("tokenizer.json", change=as_others_use_it)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    tokenizer = load_tokenizer("tokenizer.json")
    assert tokenizer.n_vocab == library.get_vocab_size()
    assert tokenizer.eot_token == library.token_to_id("<|endoftext|>")
    for text in (HARD, HARD[::-1], "x", " \n  "):
        ids = tokenizer.encode_ordinary(text)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot_token not in ids


def test_a_moved_corpus_and_a_moved_run_have_their_tokenizer(documents):
    """Also for a branch onto a text with the same tokenizer from another place."""
    save("words.json")
    prepare(documents, "words.json", Path("a"))
    Path("words.json").rename("moved.json")
    prepare(documents[:200], "moved.json", Path("b"))
    assert identity("a/" + identity("moved.json")) == identity("moved.json")
    Path("moved.json").unlink()
    typed = argv(data="a", total_tokens=8 * STEP, out="run", final_eval_tokens=320)
    assert train.main(typed) == 0
    Path("a").rename("c")
    Path("run").rename("moved")
    branch = f"--branch=moved --total_tokens={12 * STEP}".split()
    assert train.main([*branch, "--data=b", "--out=d"]) == 0
    tokenizer = load_tokenizer(load_model("moved").run["tokenizer"])
    assert tokenizer.decode(tokenizer.encode_ordinary(HARD)) == HARD
    save("other.json", end="<eos>")
    prepare(documents, "other.json", Path("other"))
    assert train.main([*branch, "--data=other", "--out=e"]) == 2


def lower(library: Tokenizer) -> None:
    library.normalizer = normalizers.Lowercase()


@pytest.mark.parametrize("name, word", [
    ("gpt9", "gpt9"), ("no-end.json", "endoftext"), ("text.json", "text.json"),
    ("lower.json", "give a text back"),
])  # fmt: skip
def test_other_names_and_files_are_refused(name, word):
    Path("text.json").write_text("just some text")
    save("no-end.json", end="<end>")
    save("lower.json", change=lower)
    with pytest.raises(UserError, match=word) as error:
        load_tokenizer(name)
    assert "\n" not in str(error.value)
