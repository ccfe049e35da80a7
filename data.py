"""Tokens on disk, and the order in which a run reads them.

A corpus is a folder with train.bin and val.bin (token ids, which stay on disk until we
need them) and meta.json (tokenizer, counts, fingerprint). The default is torch's Python
source.

Read `shuffled`, then `draw`. Every comparison in this project rests on the order.
Sequence g of a run depends only on the seed and g, not on batch size or processes, so a
loader needs no state. Mixtures of several corpora have a section near the end.

    python data.py                                             prepare the embedded corpus
    python data.py --source ~/notes --out data/notes           prepare one from text files
    python data.py --source 'web/*.jsonl.gz' --out data/web    a document per line
"""

import argparse
import dataclasses
import hashlib
import json
import shlex
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from functools import lru_cache
from os.path import basename
from pathlib import Path

import numpy as np

from tools import flags
from tools.flags import UserError, parse_mixture
from tools.prepare import prepare, read_files, spot_check
from tools.tokenizers import bytes_per_token, load_tokenizer, tokenizer_file

# -- A corpus ----------------------------------------------------------------------------


@dataclass(eq=False)
class Corpus:
    """Tokens to train on, from one folder or from several."""

    path: Path | str
    meta: dict  # tokenizer, vocab_size, fingerprint and, of a folder, counts
    tokenizer: object  # a tiktoken.Encoding
    # token ids on disk, [train_tokens] and [val_tokens]; None in a mixture
    train: np.memmap | None = None
    val: np.memmap | None = None
    # {name: folder}, by the last part of its path; of one folder, the corpus itself
    sources: dict[str, "Corpus"] = dataclasses.field(default_factory=dict)
    shares: tuple[float, ...] = (1.0,)  # of the sources in the validation loss
    stages: list | None = None  # of a mixture, [(first sequence, {name: share}), ...]


def n_sequences(tokens: np.memmap, seq_len: int, max_tokens: int | None = None) -> int:
    """Whole sequences in a token file, at most about max_tokens, but at least one of them."""
    # the last sequence needs one more token, as its last target
    n = (len(tokens) - 1) // seq_len
    if max_tokens is None:
        return n
    return min(n, max(1, max_tokens // seq_len))


def read_sequences(tokens: np.memmap, index: np.ndarray, seq_len: int) -> tuple:
    """Sequences `index` [B] of a token file -> (inputs, targets), both [B, seq_len] int64.

    Sequence i is tokens i * seq_len ... (i + 1) * seq_len, wherever documents start and
    end. As is usual in pre-training, attention crosses document borders.
    """
    positions = index[:, None] * seq_len + np.arange(seq_len + 1)
    rows = tokens[positions]  # [B, seq_len + 1]
    inputs = rows[:, :-1].astype(np.int64)
    targets = rows[:, 1:].astype(np.int64)  # the token after every input
    return inputs, targets


# -- The order ---------------------------------------------------------------------------
#
# In every epoch, a run reads all n sequences once, in a new random order. The
# obvious way is to permute their numbers and to keep the table:
#
#     epoch, place = divmod(g, n)
#     sequence = np.random.default_rng([seed, epoch]).permutation(n)[place]
#
# Instead, we compute an entry when we need it. 500B tokens in sequences of 4096 make a
# table of a gigabyte, in every process. And NumPy may change its permutations, but a run
# must find its order again after any upgrade.


def shuffled(g: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Position g = 0, 1, 2, ... in a run -> number of a sequence in a corpus of n, both [B].

    Every epoch g // n is a new permutation of 0 ... n - 1.
    """
    g = np.asarray(g, dtype=np.uint64)
    epoch = g // n
    place = g % n  # in its epoch
    key = scramble(scramble(np.full_like(g, seed)) + epoch + 1)
    return permutation(place, n, key).astype(np.int64)


def permutation(x: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Entry x [B] of a permutation of 0 ... n - 1, which the key [B] chooses.

    This is a Feistel network. A round adds (with XOR) a hash of the right half of the
    bits to the left half, and swaps the halves. Adding the hash again would undo it, so
    different numbers stay different, however wild the hash.
    """
    # 1. A key for every round
    keys = scramble(key + np.arange(4, dtype=np.uint64)[:, None])  # [4, B]

    # 2. Two halves with equally many bits, together just wide enough for n - 1
    half = ((n - 1).bit_length() + 1) // 2
    low_bits = 2**half - 1

    def four_rounds(x: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left = x >> half
        right = x & low_bits
        for round_key in keys:
            new_right = left ^ (scramble(right + round_key) & low_bits)
            left = right
            right = new_right
        return left << half | right

    # 3. The halves can hold numbers from n up. Permute these until they are below n
    x = four_rounds(x, keys)
    outside = x >= n
    while outside.any():
        x[outside] = four_rounds(x[outside], keys[:, outside])
        outside = x >= n
    return x


def scramble(x: np.ndarray) -> np.ndarray:
    """Hash 64-bit integers, as SplitMix64 does. Every output bit depends on all input
    bits. Products wrap around at 2**64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


# -- A batch -----------------------------------------------------------------------------


def draw(
    corpus: Corpus, g: np.ndarray, seq_len: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Training sequences g [B] of a run -> (inputs, targets), both [B, seq_len] int64."""
    if corpus.stages is not None:  # several corpora
        return draw_from_mixture(corpus, g, seq_len, seed)
    n = n_sequences(corpus.train, seq_len)
    index = shuffled_batch(g, n, seed)  # [B], numbers of sequences in the corpus
    return read_sequences(corpus.train, index, seq_len)


def shuffled_batch(g: np.ndarray, n: int, seed: int) -> np.ndarray:
    """`shuffled`, but faster for the few positions of a batch, which are close together.

    NumPy takes only 8 times as long for 1,024 positions as for one, so we compute blocks
    of 1,024 and keep the latest.
    """
    index = []
    for position in g.tolist():
        block = shuffled_block(position // 1024, n, seed)
        index.append(block[position % 1024])
    return np.array(index, dtype=np.int64)


@lru_cache(maxsize=64)
def shuffled_block(block: int, n: int, seed: int) -> list[int]:
    positions = 1024 * block + np.arange(1024)
    return shuffled(positions, n, seed).tolist()


# -- Opening a corpus --------------------------------------------------------------------


def load_corpus(
    data: str | None, tokenizer: str = "bytes", stages: list | None = None
) -> Corpus:
    """Open the folder or mixture that --data names. None is the embedded corpus in `tokenizer`.

    stages: [(first sequence, mixture), ...] if the data change during a run, from its
    parents to its decay. Folders that only its parents read may be missing.
    """
    data = data or "embedded"
    parsed = []
    folders = set()
    for start, text in stages or [(0, data)]:
        mixture = parse_mixture(text)  # {folder: share}
        parsed.append((start, mixture))
        folders.update(mixture)
    if len(folders) > 1:
        return load_mixture(data, tokenizer, parsed)

    folder = folders.pop()
    corpus = open_folder(folder, tokenizer)
    return dataclasses.replace(corpus, path=data, sources={basename(folder): corpus})


def open_folder(folder: str, tokenizer: str) -> Corpus:
    if folder == "embedded":
        return embedded_corpus(tokenizer)
    return open_corpus(Path(folder))


def open_corpus(path: Path) -> Corpus:
    """Map a prepared folder into memory. Raises UserError if it is missing or damaged."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        name = meta["tokenizer"]
        train = np.memmap(path / "train.bin", meta["dtype"], mode="r")
        val = np.memmap(path / "val.bin", meta["dtype"], mode="r")
        counts = (meta["train_tokens"], meta["val_tokens"])
        if (len(train), len(val)) != counts:
            raise UserError("meta.json has different counts")
        # older corpora have no spot check
        if "spot_check" in meta and meta["spot_check"] != spot_check(path):
            raise UserError("train.bin or val.bin has changed since data.py wrote it")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--data {path}: {error}; prepare it with data.py") from None
    if tokenizer_file(name):  # the corpus has a copy of it
        name = str(path / name)
    corpus = Corpus(path, meta, load_tokenizer(name), train, val)
    corpus.sources[path.name] = corpus
    return corpus


def embedded_corpus(tokenizer: str = "bytes") -> Corpus:
    """The default corpus, prepared at its first use."""
    import torch  # here, because it takes a second, and other corpora do not need it

    # 1. The folder has the version of its text and the tokenizer in its name
    version = torch.__version__.split("+")[0]
    kind = tokenizer
    file = tokenizer_file(tokenizer)
    if file and file.is_file():  # different files may have the same name
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        kind = f"{file.stem}-{digest[:8]}"
    path = Path(__file__).parent / "data" / f"torch{version}-{kind}"

    # 2. Prepare it once
    if not path.exists():
        print(f"preparing the embedded corpus, once: {path}")
        try:
            prepare(embedded_texts(Path(torch.__file__).parent), tokenizer, path)
        except (UserError, OSError):
            if not path.exists():  # otherwise another process was faster
                raise
    return open_corpus(path)


def embedded_texts(folder: Path) -> Iterator[str]:
    """torch's Python files in the order of their paths, the same in every wheel of a version.

    Only version.py names the build. read_text turns the CR LF of wheels for Windows into
    LF.
    """
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    for name in sorted(names - {"version.py"}):
        yield (folder / name).read_text(encoding="utf-8")


def vocab_size_of(data_flag: str | None, tokenizer: str) -> int:
    """Number of tokens of the corpus or mixture that --data names, embedded in `tokenizer`."""
    folder = next(iter(parse_mixture(data_flag or "embedded")))  # all have one tokenizer
    if folder == "embedded":  # not prepared yet, perhaps
        return load_tokenizer(tokenizer).n_vocab
    return open_corpus(Path(folder)).meta["vocab_size"]


def is_prepared(data_flag: str | None) -> bool:
    """Does --data name folders of data.py, which have a tokenizer already?"""
    return bool(data_flag) and "embedded" not in parse_mixture(data_flag)


def tokenizer_name(cfg, corpus: Corpus) -> str:
    """The name of the tokenizer in the record of a run."""
    return corpus.meta["tokenizer"] if is_prepared(cfg.data) else cfg.tokenizer


def tokenizer_of(config: dict):
    """Load the tokenizer of a run or of released weights. Raises OSError or UserError."""
    if config.get("data") and tokenizer_file(config["tokenizer"]):
        # its file is in the corpus
        return load_corpus(config["data"], config["tokenizer"]).tokenizer
    return load_tokenizer(config["tokenizer"])


# -- Checks ------------------------------------------------------------------------------


def check_corpus(cfg, source: Corpus) -> None:
    """Raise UserError if the model cannot read this corpus."""
    size = source.meta["vocab_size"]
    if size > cfg.vocab_size:
        raise UserError(
            f"--vocab_size {cfg.vocab_size}: {source.path} needs --vocab_size {size}"
        )
    for split, tokens in (("training", source.train), ("validation", source.val)):
        if n_sequences(tokens, cfg.seq_len) < 1:
            raise UserError(
                f"--seq_len {cfg.seq_len}: the corpus {source.path} has only "
                f"{len(tokens):,} {split} tokens; choose a shorter one"
            )


def token_hash(tokenizer) -> str:
    """A hash of the lengths of all tokens, which other tokenizers do not share."""
    return hashlib.sha256(bytes_per_token(tokenizer).tobytes()).hexdigest()[:16]


def check_tokenizer(
    path: Path | str, config: dict, corpus: Corpus, known: str | None = None
) -> None:
    """Raise UserError if the model at this path, with this config, has another tokenizer.

    known: the token_hash of the model, if its checkpoint has one.
    """
    if known and known != token_hash(corpus.tokenizer):
        raise UserError(f"--data {corpus.path}: its tokenizer is not that of {path}")
    try:
        tokenizer = tokenizer_of(config)
    except (UserError, OSError):  # if its corpus is gone, we trust the new corpus
        return
    compare_tokenizers(tokenizer, path, corpus)


def compare_tokenizers(tokenizer, path: Path | str, corpus: Corpus) -> None:
    """Raise UserError if a corpus has other tokens than the tokenizer of this path."""
    # other tokens have other lengths
    expected = bytes_per_token(tokenizer)
    if not np.array_equal(expected, bytes_per_token(corpus.tokenizer)):
        raise UserError(f"--data {corpus.path}: its tokenizer is not that of {path}")


# -- Mixtures of several corpora, which a run with one corpus does not use ---------------
#
# We must answer two questions about sequence g of a run, without the g sequences before
# it. Which source does it come from, and how many sequences of this source came before
# it? The second answer is a position in the order of the source.


def draw_from_mixture(
    corpus: Corpus, g: np.ndarray, seq_len: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """`draw` for a mixture. A run takes the sequences of every source in their separate order."""
    inputs = np.empty((len(g), seq_len), dtype=np.int64)
    targets = np.empty((len(g), seq_len), dtype=np.int64)
    names, counts = sources_of(g, corpus.stages, seed)
    for name in set(names):
        here = names == name  # [B], the rows of this source
        tokens = corpus.sources[name].train
        n = n_sequences(tokens, seq_len)
        index = shuffled_batch(counts[name][here], n, seed)
        inputs[here], targets[here] = read_sequences(tokens, index, seq_len)
    return inputs, targets


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


def epochs(corpus: Corpus, n: int, seq_len: int, seed: int) -> dict[str, float]:
    """How often the first n sequences of a run have gone through the sources."""
    if corpus.stages is None:
        return {name: n / n_sequences(corpus.train, seq_len) for name in corpus.sources}
    _, counts = sources_of(np.array([n]), corpus.stages, seed)
    passes = {}
    for name, source in corpus.sources.items():
        passes[name] = counts[name].item() / n_sequences(source.train, seq_len)
    return passes


def load_mixture(data: str, tokenizer: str, stages: list[tuple[int, dict]]) -> Corpus:
    """`load_corpus` for stages [(first sequence, {folder: share}), ...] with several folders."""
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
            raise UserError(
                f"--decay_data {folder}: --data has one of this name; rename it"
            )
        sources[name] = open_folder(folder, tokenizer)
    first = sources[basename(folders[0])]
    for source in sources.values():
        compare_tokenizers(first.tokenizer, first.path, source)

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
    return Corpus(
        data,
        meta,
        first.tokenizer,
        sources=sources,
        shares=tuple(current.get(name, 0.0) for name in sources),
        stages=named_stages,
    )


# -- Command line ------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = flags.program_parser("data.py", __doc__)
    add = parser.add_argument
    add("--source", nargs="+", help="files, folders, quoted patterns (default: embedded)")
    add("--out", type=Path, help="folder of the new corpus")
    add(
        "--tokenizer",
        default="bytes",
        help="bytes (default), a tiktoken name, a tokenizer file",
    )
    add("--text_field", default="text", help="field with the text (default: text)")
    add(
        "--val_fraction",
        default=0.02,
        type=float,
        help="share to hold out (default: 0.02)",
    )
    args = parser.parse_args(argv)
    given = f"--val_fraction {args.val_fraction}"
    if not 0 < args.val_fraction < 1:
        raise UserError(f"{given}: must be between 0 and 1")
    if bool(args.source) != bool(args.out):
        raise UserError("--source and --out: one is missing; give both")
    if not args.source and args.val_fraction != parser.get_default("val_fraction"):
        raise UserError(f"{given}: has no effect without --source")
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        if args.source:
            notes = Counter()  # counts of all that we skip or change
            documents = read_files(args.source, args.text_field, notes)
            prepare(
                documents,
                args.tokenizer,
                args.out,
                args.val_fraction,
                args.text_field,
                notes,
            )
            corpus = open_corpus(args.out)
        else:
            corpus = embedded_corpus(args.tokenizer)
    except (UserError, OSError, BrokenExecutor) as error:
        return flags.fail("data.py", error)
    except KeyboardInterrupt:
        return flags.fail("data.py", "interrupted; run the same command again")
    for name, value in corpus.meta.items():
        text = f"{value:,}" if isinstance(value, int) else value
        print(f"{name:>27} {text}")
    print(f"python train.py --data {shlex.quote(str(corpus.path))}")
    return 0


if __name__ == "__main__":
    # end as after Ctrl-C, and leave nothing behind
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)
    raise SystemExit(main())
