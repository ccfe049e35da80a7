"""Data mixtures: several corpora in one run, with shares that may change during it.

We must answer two questions about sequence g of a run, without the g sequences before it.
Which source does it come from, and how many sequences of this source came before it? The
second answer is a position in the order of the source. Read `mixed`.

    python mixture.py data/web:0.8,data/code:0.2    the sources of the first sequences
"""

import hashlib
import sys
from dataclasses import dataclass
from os.path import basename

import numpy as np

from data import Corpus, check_tokenizer, n_sequences, open_corpus, parse_mixture
from data import read_sequences, scramble, shuffled, token_hash
from tools import flags


@dataclass(eq=False)
class Mixture:
    """Several corpora, which a run reads like one."""

    path: str  # as in --data
    meta: dict  # tokenizer, vocab_size and fingerprint of all
    tokenizer: object
    sources: dict[str, Corpus]  # by the last part of their paths
    shares: tuple[float, ...]  # of the sources in the validation loss
    stages: list[tuple[int, dict]]  # [(first sequence, {name: share}), ...]

    def draw(self, g: np.ndarray, seq_len: int, seed: int) -> tuple:
        """As Corpus.draw. A run takes the sequences of every source in their separate order."""
        inputs = np.empty((len(g), seq_len), dtype=np.int64)
        targets = np.empty((len(g), seq_len), dtype=np.int64)
        names, counts = sources_of(g, self.stages, seed)
        for name in set(names):
            here = names == name  # [B], the rows of this source
            tokens = self.sources[name].train
            index = shuffled(counts[name][here], n_sequences(tokens, seq_len), seed)
            inputs[here], targets[here] = read_sequences(tokens, index, seq_len)
        return inputs, targets

    def epochs(self, n: int, seq_len: int, seed: int) -> dict[str, float]:
        """How often the first n sequences of a run have gone through the sources."""
        _, counts = sources_of(np.array([n]), self.stages, seed)
        passes = {}
        for name, source in self.sources.items():
            passes[name] = counts[name].item() / n_sequences(source.train, seq_len)
        return passes


def mixed(g: np.ndarray, shares: dict[str, float], seed: int) -> tuple[np.ndarray, dict]:
    """Sequence g [B] of a mixture -> (its source [B], {name: its sequences before g [B]}).

    The rarest source takes one sequence of every 1 / share, at a random place among them,
    so it has no fixed place in a batch. The next does the same with the sequences left
    over, and so on. In any stretch of a run, two sources have their shares to within two
    sequences, eight within five.
    """
    # 1. The sources from the rarest up, with shares in whole numbers, which are exact
    parts = {name: round(share * 10**8) for name, share in shares.items()}
    rarer = sorted((part, name) for name, part in parts.items() if part)
    _, most_common = rarer.pop()

    # 2. Let every source but the last take its sequences. `left` of the sequences before
    #    g are left over, in which the remaining sources have `total` parts
    left = np.array(g, dtype=np.int64)  # [B]
    total = sum(parts.values())
    names = np.full(len(g), most_common)
    counts = {}
    for i, (part, name) in enumerate(rarer):
        # the stretch that g is in, of about total / part sequences, of which one is ours
        turn = left * part // total  # its number, which is also our sequences before it
        first = -(-turn * total // part)  # rounded up
        end = -(-(turn + 1) * total // part)
        # the random place of our sequence in it
        key = scramble(np.full_like(turn, seed, np.uint64)) + i
        random = scramble(scramble(key) + turn.astype(np.uint64))
        place = first + (random % (end - first).astype(np.uint64)).astype(np.int64)

        counts[name] = turn + (place < left)
        is_ours = (names == most_common) & (place == left)
        names = np.where(is_ours, name, names)
        left = left - counts[name]
        total = total - part

    # 3. The last source has everything left over
    counts[most_common] = left
    return names, counts


def sources_of(g: np.ndarray, stages: list, seed: int) -> tuple[np.ndarray, dict]:
    """`mixed` for shares that change during a run. Counts continue from stage to stage."""
    names = np.full(len(g), "")
    counts = {}
    for _, shares in stages:
        for name in shares:
            counts[name] = np.zeros_like(g)
    ends = [start for start, _ in stages[1:]] + [None]  # the last stage has no end
    for (start, shares), end in zip(stages, ends):
        in_stage = np.clip(g, start, end) - start  # sequences of this stage before g
        drawn, drawn_before = mixed(in_stage, shares, seed)
        names = np.where(g >= start, drawn, names)
        for name, count in drawn_before.items():
            counts[name] += count
    return names, counts


def load_mixture(data: str, tokenizer: str, stages: list[tuple[int, dict]]) -> Mixture:
    """Open the folders of stages [(first sequence, {folder: share}), ...].

    data: the text of --data, which one of them reads. Folders that only earlier stages
    read may be missing. Raises UserError.
    """
    # 1. We are in the last stage that reads --data. Open its folders, and the folders
    #    of later stages
    now = 0
    for i, (_, mixture) in enumerate(stages):
        if mixture == parse_mixture(data):
            now = i
    folders = []
    for _, mixture in stages[now:]:
        folders += [folder for folder in mixture if folder not in folders]
    sources = {}
    for folder in folders:
        name = basename(folder)
        if name in sources:
            raise flags.UserError(
                f"--decay_data {folder}: --data has one of this name; rename it"
            )
        sources[name] = open_corpus(folder, tokenizer)
    first = sources[basename(folders[0])]
    for source in sources.values():
        check_tokenizer(source, token_hash(first.tokenizer), first.path)

    # 2. Call the folders by their names, which stay if you move them
    named_stages = []
    for start, mixture in stages:
        shares = {basename(folder): share for folder, share in mixture.items()}
        named_stages.append((start, shares))

    # 3. The fingerprint of all sources, with their shares from now on
    meta = dict(first.meta)
    if len(sources) > 1:
        key = []
        for name, source in sources.items():
            shares = [shares.get(name, 0.0) for _, shares in named_stages[now:]]
            key.append((source.meta["fingerprint"], *shares))
        meta["fingerprint"] = hashlib.sha256(repr(key).encode()).hexdigest()[:16]

    _, current = named_stages[now]
    shares = tuple(current.get(name, 0.0) for name in sources)
    return Mixture(data, meta, first.tokenizer, sources, shares, named_stages)


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("mixture.py", __doc__)
    parser.add_argument("data", help="as --data of train.py")
    args = parser.parse_args(argv)
    try:
        shares = parse_mixture(args.data)
    except flags.UserError as error:
        return flags.fail("mixture.py", error)
    names, counts = mixed(np.arange(32), shares, seed=0)
    for g, name in enumerate(names):
        print(f"sequence {g:>2}: {name}, its sequence {counts[name][g]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
