"""From tokens on disk to batches, always in the same order."""

from pathlib import Path

import numpy as np
import pytest

import config
import data
from tools.flags import UserError
from tools.prepare import prepare
from tools.tokenizers import identity

# -- The order ---------------------------------------------------------------------------

SEQ_LEN = 4


def mixture_of(sizes: list[int], shares: list[float]) -> data.Mixture:
    """Sources with so many sequences, whose first token names both numbers."""
    sources = {}
    for number, n in enumerate(sizes):
        tokens = np.arange(n * SEQ_LEN + 1) + number * 10**6
        meta = {"fingerprint": str(number)}
        sources[f"folder {number}"] = data.Corpus(Path(), meta, None, tokens, tokens)
    return data.Mixture(sources, [round(share * data.BLOCK) for share in shares])


def drawn(mixture: data.Mixture, g, seed: int) -> list[tuple[int, int]]:
    """(source, sequence) of the positions g of a run."""
    inputs, targets = mixture.draw(np.asarray(g), SEQ_LEN, seed)
    assert inputs.dtype == targets.dtype == np.int64
    assert (inputs == inputs[:, :1] + np.arange(SEQ_LEN)).all()
    assert (targets == inputs + 1).all()
    firsts = inputs[:, 0].tolist()
    return [(first // 10**6, first % 10**6 // SEQ_LEN) for first in firsts]


def plain_order(sizes, shares, n: int, seed: int) -> list[tuple[int, int]]:
    """The first n sequences of a run, by a loop that counts and keeps no table."""
    order = []
    read = [0] * len(sizes)
    in_turn = []
    for source, share in enumerate(shares):
        in_turn += [source] * round(share * 1000)
    for g in range(n):
        source = in_turn[np.random.default_rng([seed]).permutation(1000)[g % 1000]]
        epoch, i = divmod(read[source], sizes[source])
        read[source] += 1
        permutation = np.random.default_rng([seed, epoch]).permutation(sizes[source])
        order.append((source, int(permutation[i])))
    return order


@pytest.mark.parametrize("shares", [(1.0,), (0.333, 0.334, 0.333), (0.5, 0.2, 0.3)])
def test_the_order_is_that_of_a_loop(shares):
    """And does not depend on which sequences we draw together, or when."""
    sizes = [300, 41, 7][: len(shares)]
    expected = plain_order(sizes, shares, 1600, seed=3)
    mixture = mixture_of(sizes, list(shares))
    assert drawn(mixture, range(1600), seed=3) == expected
    some = [1599, 0, 1234, 7, 6, 1000, 999]
    assert drawn(mixture, some, seed=3) == [expected[g] for g in some]


def test_mixtures_are_written_as_folders_and_shares():
    assert data.parse_mixture("web") == {"web": 1000}
    counts = {"a/web": 800, "code": 150, "math": 50}
    assert data.parse_mixture("a/web:0.8,code:0.15,math:0.05") == counts
    bad = "a,b a:1.5,b:-0.5 a:x,b:0.5 a:0.9999,b:0.0001 a:0.5,b:0.4"
    for text in bad.split():
        with pytest.raises(UserError, match="--data"):
            data.parse_mixture(text)


# -- Opening -----------------------------------------------------------------------------


def test_a_mixture_has_one_tokenizer(documents, corpus_path, tokenizer_path):
    prepare(documents, tokenizer_path, Path("words"))
    cfg = config.make_config(data=f"{corpus_path}:0.5,words:0.5")
    with pytest.raises(UserError, match="words"):
        data.load_mixture(cfg)


def test_a_corpus_must_have_a_sequence_to_validate(corpus):
    fields = dict(data=str(corpus.path), seq_len=len(corpus.val), batch_size=1)
    with pytest.raises(UserError, match="--seq_len"):
        data.with_corpus(config.make_config(**fields), ())


def test_a_damaged_corpus_is_refused(documents):
    prepare(documents[:30], "bytes", Path("c"))
    Path("c/train.bin").write_text("")
    with pytest.raises(UserError, match="c: damaged"):
        data.open_corpus("c")


def test_the_embedded_corpus_is_prepared_once(documents, tokenizer_path, monkeypatch):
    monkeypatch.setattr(data, "__file__", str(Path("data.py").absolute()))
    monkeypatch.setattr("tools.prepare.embedded_texts", lambda folder: documents)
    corpus = data.open_corpus("embedded")
    words = data.open_corpus("embedded", tokenizer_path)
    assert corpus.path != words.path
    assert words.meta["tokenizer"] == identity(tokenizer_path)
    monkeypatch.setattr("tools.prepare.embedded_texts", None)
    assert data.load_mixture(config.make_config()).meta == corpus.meta
