"""From tokens on disk to batches, always in the same order."""

import math
from pathlib import Path

import numpy as np
import pytest

import config
import data
from tools.flags import UserError
from tools.prepare import prepare

# -- The order ---------------------------------------------------------------------------

SEQ_LEN = 4


def by_text(stages) -> list[tuple]:
    """Shares of every source as stages of a Mixture, which leave out those that are 0."""
    named = []
    for first, shares in stages:
        named.append((first, {str(i): share for i, share in enumerate(shares) if share}))
    return named


def mixture_of(sizes: list[int], stages: list[tuple]) -> data.Mixture:
    """Sources with so many sequences. The first token of a sequence names both numbers."""
    sources = {}
    for number, n in enumerate(sizes):
        tokens = np.arange(n * SEQ_LEN + 1) + number * 10**6
        meta = {"fingerprint": str(number)}
        sources[f"folder {number}"] = data.Corpus(Path(), meta, None, tokens, tokens)
    return data.Mixture(sources, [], stages, {}, None)


def drawn(mixture: data.Mixture, g, seed: int) -> list[tuple[int, int]]:
    """(source, sequence) of the positions g of a run."""
    inputs, targets = mixture.draw(np.asarray(g), SEQ_LEN, seed)
    assert inputs.dtype == targets.dtype == np.int64
    assert (inputs == inputs[:, :1] + np.arange(SEQ_LEN)).all()
    assert (targets == inputs + 1).all()
    firsts = inputs[:, 0].tolist()
    return [(first // 10**6, first % 10**6 // SEQ_LEN) for first in firsts]


def plain_order(sizes, stages, n: int, seed: int) -> list[tuple[int, int]]:
    """The first n sequences of a run, by a loop that counts and keeps no table."""
    order = []
    read = [0] * len(sizes)
    ends = [first for first, _ in stages[1:]] + [n]
    for (first, shares), end in zip(stages, ends):
        for g in range(first, end):
            block, place = divmod(g - first, 1000)
            in_turn = []
            for source, share in enumerate(shares):
                in_turn += [source] * round(share * 1000)
            permutation = np.random.default_rng([seed, block]).permutation(1000)
            source = in_turn[permutation[place]]
            epoch, i = divmod(read[source], sizes[source])
            read[source] += 1
            permutation = np.random.default_rng([seed, epoch]).permutation(sizes[source])
            order.append((source, int(permutation[i])))
    return order


@pytest.mark.parametrize("stages", [
    [(0, (1.0,))],
    [(0, (0.333, 0.334, 0.333))],
    [(0, (0.5, 0.5, 0.0)), (1234, (0.25, 0.0, 0.75))],
])  # fmt: skip
def test_the_order_is_that_of_a_loop(stages):
    """And does not depend on which sequences we draw together, or when."""
    sizes = [300, 41, 7][: len(stages[0][1])]
    expected = plain_order(sizes, stages, 1600, seed=3)
    mixture = mixture_of(sizes, by_text(stages))
    assert drawn(mixture, range(1600), seed=3) == expected
    some = [1599, 0, 1234, 7, 6, 1000, 999]
    assert drawn(mixture, some, seed=3) == [expected[g] for g in some]


def test_an_order_is_made_once_and_few_are_kept():
    """They are large. A batch may need two of every source."""
    mixture = mixture_of([40, 25], by_text([(0, (0.5, 0.5))]))
    drawn(mixture, range(2000), seed=0)  # 1000 of each
    cache = mixture.order_of.cache_info()
    assert cache.misses == 1000 // 40 + 1000 // 25
    assert cache.currsize == 2 * 2


def assert_each_once(order: list[tuple[int, int]], sizes: list[int]) -> None:
    """Every epoch of a source has each of its sequences once, by counting."""
    for source, n in enumerate(sizes):
        read = [sequence for number, sequence in order if number == source]
        for start in range(0, len(read), n):
            epoch = read[start : start + n]
            assert len(set(epoch)) == len(epoch), (source, start)
            assert start + n > len(read) or set(epoch) == set(range(n))


A, B, C = {"0": 1.0}, {"1": 1.0}, {"2": 1.0}
BOTH = {"0": 0.5, "1": 0.5}
TURNED = {"1": 0.5, "0": 0.5}  # in a different order, so that a block has it, too


@pytest.mark.parametrize("lives", [
    [(0, [(0, A)]), (480, [(0, C)])],
    [(0, [(0, BOTH)]), (333, [(0, A), (500, B)])],
    [(0, [(0, BOTH)]), (333, [(0, TURNED), (700, C)])],
    [(0, [(0, BOTH), (400, C)]), (450, [(0, BOTH), (600, A)])],  # inside a decay
    [(0, [(0, BOTH)]), (250, [(0, C)]), (333, [(0, B), (800, A)]), (801, [(0, BOTH)])],
    [(0, [(0, BOTH), (400, C)]), (400, [(0, BOTH), (400, B)])],  # decays at once
])  # fmt: skip
def test_a_branch_reads_each_sequence_of_an_epoch_once(lives):
    """A run, a branch of it, a branch of the branch, and so on: (start, own stages)."""
    sizes = [170, 133, 90]
    order = []
    stages = []
    for start, own in lives:
        order = order[:start]
        stages = data.continued(stages, start, own)
        order += drawn(mixture_of(sizes, stages), range(start, 1000), seed=3)
        assert_each_once(order, sizes)


def test_a_branch_with_the_same_shares_reads_on_in_the_same_order():
    sizes = [170, 133, 90]
    for own in ([(0, BOTH)], [(0, BOTH), (900, C)], [(0, BOTH), (900, BOTH)]):
        alone = drawn(mixture_of(sizes, own), range(1200), seed=3)
        for start in (0, 1, 899, 900, 950):
            # the parent may have had a decay later, and a resumed run has its own
            for parent in ([(0, BOTH), (1000, A)], own):
                if start > 900 and parent is not own:
                    continue
                stages = data.continued(parent, start, own)
                order = drawn(mixture_of(sizes, stages), range(start, 1200), seed=3)
                assert order == alone[start:], (own, start, parent)


def test_mixtures_are_written_as_folders_and_shares():
    assert data.parse_mixture("--data", "web") == {"web": 1}
    shares = {"a/web": 0.8, "code": 0.15, "math": 0.05}
    assert data.parse_mixture("--data", "a/web:0.8,code:0.15,math:0.05") == shares
    for text in ("a:0.5", "a,b", "a:1.5,b:-0.5", "a:x,b:0.5", "a:0.9999,b:0.0001"):
        with pytest.raises(UserError, match="--decay_data"):
            data.parse_mixture("--decay_data", text)


# -- Opening -----------------------------------------------------------------------------


def settings(**typed) -> config.TrainConfig:
    return config.make_config(**typed, seq_len=32, decay_tokens=1_000_001)


def test_decay_data_take_over_where_the_decay_begins(documents):
    for name, part in (("web", slice(100)), ("code", slice(100, 200))):
        prepare(documents[part], "bytes", Path(name))
    whole = data.load_mixture(settings(data="web", decay_data="web:0.5,code:0.5"))
    begin = math.ceil((3_200_000 - 1_000_001) / 32)
    texts = [data.open_corpus(name).meta["fingerprint"] for name in ("web", "code")]
    assert whole.stages == [(0, {texts[0]: 1.0}), (begin, dict.fromkeys(texts, 0.5))]
    assert whole.shares == [1.0, 0.0]
    web = data.load_mixture(settings(data="web"))
    assert web.meta == data.open_corpus("web").meta
    other = data.load_mixture(settings(data="web", decay_data="web:0.6,code:0.4"))
    assert len({part.meta["fingerprint"] for part in (whole, web, other)}) == 3


def test_a_mixture_has_one_tokenizer(documents, corpus_path, tokenizer_path):
    prepare(documents, tokenizer_path, Path("words"))
    with pytest.raises(UserError, match="words"):
        data.load_mixture(settings(data=f"{corpus_path}:0.5,words:0.5"))


def test_a_corpus_must_have_a_sequence_to_validate(corpus):
    with pytest.raises(UserError, match="--seq_len"):
        data.check_corpus(config.make_config(seq_len=len(corpus.val)), corpus)


@pytest.mark.parametrize("file, content", [
    ("train.bin", None),
    ("val.bin", b"cut"),
    ("meta.json", b'{"no": '),
    ("words.tiktoken", None),
])  # fmt: skip
def test_damaged_corpora_are_refused(file, content, documents, tokenizer_path):
    prepare(documents[:30], tokenizer_path, Path("c"))
    Path("c", file).unlink()
    if content:
        Path("c", file).write_bytes(content)
    with pytest.raises(UserError):
        data.open_corpus("c")


def test_the_embedded_corpus_is_prepared_once(documents, tokenizer_path, monkeypatch):
    monkeypatch.setattr(data, "__file__", str(Path("data.py").absolute()))
    monkeypatch.setattr("tools.prepare.embedded_texts", lambda folder: documents)
    corpus = data.open_corpus("embedded")
    words = data.open_corpus("embedded", tokenizer_path)
    assert corpus.path != words.path
    assert words.meta["tokenizer"] == tokenizer_path
    monkeypatch.setattr("tools.prepare.embedded_texts", None)
    assert data.load_mixture(settings()).meta == corpus.meta
