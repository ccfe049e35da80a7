"""Tokens on disk, and the order in which a run reads them.

A corpus is a folder with train.bin and val.bin (token ids, which stay on disk until we
need them) and meta.json (tokenizer, counts, fingerprint). The default is torch's Python
source.

Read `shuffled`, then `draw`. Every comparison in this project rests on the order.
Sequence g of a run depends only on the seed and g, not on batch size or processes, so a
loader needs no state.

    python data.py                                             prepare the embedded corpus
    python data.py --source ~/notes --out data/notes           prepare one from text files
    python data.py --source 'web/*.jsonl.gz' --out data/web    a document per line
"""

import hashlib
import json
import shlex
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from functools import lru_cache
from os.path import basename
from pathlib import Path

import numpy as np
import tiktoken

from tools.flags import UserError, fail, parse_mixture, program_parser
from tools.prepare import prepare, read_files, spot_check
from tools.tokenizers import bytes_per_token, load_tokenizer, tokenizer_file


@dataclass(eq=False)
class Corpus:
    """Tokens to train on, from one folder or a mixture of several. A folder is a mixture
    of one."""

    path: Path | str
    meta: dict  # tokenizer, vocab_size, fingerprint and, of a folder, counts
    tokenizer: tiktoken.Encoding
    train: np.memmap | None = None  # token ids on disk, [train_tokens]
    val: np.memmap | None = None
    sources: dict[str, "Corpus"] | None = None  # by name, the last part of the path
    shares: tuple[float, ...] = (1.0,)  # of the sources in the validation loss
    stages: list | None = None  # [(first sequence, {name: share}), ...]


def open_corpus(path: Path) -> Corpus:
    """Map a prepared folder into memory. Raises UserError if it is missing or damaged."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        name, dtype = meta["tokenizer"], meta["dtype"]
        train, val = (
            np.memmap(path / f"{part}.bin", dtype, mode="r") for part in ("train", "val")
        )
        if (len(train), len(val)) != (meta["train_tokens"], meta["val_tokens"]):
            raise UserError("meta.json has different counts")
        if "spot_check" in meta and meta["spot_check"] != spot_check(
            path
        ):  # older ones have none
            raise UserError("train.bin or val.bin has changed since data.py wrote it")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--data {path}: {error}; prepare it with data.py") from None
    tokenizer = load_tokenizer(str(path / name) if tokenizer_file(name) else name)
    corpus = Corpus(path, meta, tokenizer, train, val, stages=[(0, {path.name: 1.0})])
    corpus.sources = {path.name: corpus}
    return corpus


def embedded_texts(folder: Path) -> Iterator[str]:
    """torch's Python files in the order of their paths, the same in every wheel of a
    version.

    Only version.py names the build. read_text turns the CR LF of wheels for Windows into
    LF.
    """
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    for name in sorted(names - {"version.py"}):
        yield (folder / name).read_text(encoding="utf-8")


def embedded_corpus(tokenizer: str = "bytes") -> Corpus:
    """The default corpus, prepared at its first use."""
    import torch  # here, because it takes a second or two, and other corpora do not need it

    version, kind, file = (
        torch.__version__.split("+")[0],
        tokenizer,
        tokenizer_file(tokenizer),
    )
    if file and file.is_file():  # different files may have the same name
        kind = f"{file.stem}-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"
    path = Path(__file__).parent / "data" / f"torch{version}-{kind}"
    if not path.exists():
        print(f"preparing the embedded corpus, once: {path}")
        try:
            prepare(embedded_texts(Path(torch.__file__).parent), tokenizer, path)
        except (UserError, OSError):
            if not path.exists():  # otherwise another process was faster
                raise
    return open_corpus(path)


def open_sources(folders: Iterable[str], tokenizer: str) -> dict[str, Corpus]:
    """{name: corpus}. Raises UserError if a corpus is missing or two do not fit
    together."""
    sources = {}
    for folder in folders:
        if basename(folder) in sources:
            raise UserError(
                f"--decay_data {folder}: --data has one of this name; rename it"
            )
        new = (
            embedded_corpus(tokenizer)
            if folder == "embedded"
            else open_corpus(Path(folder))
        )
        sources[basename(folder)] = new
        first = next(iter(sources.values()))
        if not np.array_equal(
            bytes_per_token(first.tokenizer), bytes_per_token(new.tokenizer)
        ):
            raise UserError(
                f"--data {new.path}: its tokenizer is not that of {first.path}"
            )
    return sources


def load_corpus(
    data: str | None, tokenizer: str = "bytes", stages: list | None = None
) -> Corpus:
    """Open the folder or mixture that --data names. None is the embedded corpus in
    `tokenizer`.

    stages: [(first sequence, mixture), ...] if the mixture changes during a run, from its
    parents to its decay. Folders that only its parents read may be missing.
    """
    data = data or "embedded"
    mixtures = [(start, parse_mixture(text)) for start, text in stages or [(0, data)]]
    i = max(
        i for i, (_, m) in enumerate(mixtures) if m == parse_mixture(data)
    )  # where we are now
    folders = dict.fromkeys(folder for _, mixture in mixtures[i:] for folder in mixture)
    sources = open_sources(folders, tokenizer)
    stages = [
        (start, {basename(f): share for f, share in m.items()}) for start, m in mixtures
    ]
    shares = {name: [m.get(name, 0.0) for _, m in stages[i:]] for name in sources}
    first = next(iter(sources.values()))
    meta = dict(first.meta)
    if len(sources) > 1:  # of all sources and their shares from now on
        key = [
            (source.meta["fingerprint"], *shares[name])
            for name, source in sources.items()
        ]
        meta["fingerprint"] = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    current = tuple(some[0] for some in shares.values())
    return Corpus(
        data, meta, first.tokenizer, sources=sources, shares=current, stages=stages
    )


def tokenizer_of(config: dict) -> tiktoken.Encoding:
    """Load the tokenizer of a run or of released weights. Raises OSError or UserError."""
    if config.get("data") and tokenizer_file(
        config["tokenizer"]
    ):  # its file is in the corpus
        return load_corpus(config["data"], config["tokenizer"]).tokenizer
    return load_tokenizer(config["tokenizer"])


def check_corpus(cfg, source: Corpus) -> None:
    """Raise UserError if the model cannot read this corpus."""
    size = source.meta["vocab_size"]
    if size > cfg.vocab_size:
        raise UserError(
            f"--vocab_size {cfg.vocab_size}: {source.path} needs --vocab_size {size}"
        )
    for split, ids in (("training", source.train), ("validation", source.val)):
        if n_sequences(ids, cfg.seq_len) < 1:
            raise UserError(
                f"--seq_len {cfg.seq_len}: the corpus {source.path} has only "
                f"{len(ids):,} {split} tokens; choose a shorter one"
            )


def check_tokenizer(path: Path | str, config: dict, corpus: Corpus) -> None:
    """Raise UserError if the model at this path, with this config, has another
    tokenizer."""
    try:
        trained = tokenizer_of(config)
    except (UserError, OSError):  # if its corpus is gone, we trust the new one
        return
    if not np.array_equal(bytes_per_token(trained), bytes_per_token(corpus.tokenizer)):
        raise UserError(f"--data {corpus.path}: its tokenizer is not that of {path}")


def is_prepared(data_flag: str | None) -> bool:
    """Does --data name folders of data.py, which have a tokenizer already?"""
    return bool(data_flag) and "embedded" not in parse_mixture(data_flag)


def tokenizer_name(cfg, corpus: Corpus) -> str:
    """What a run notes as its tokenizer."""
    return corpus.meta["tokenizer"] if is_prepared(cfg.data) else cfg.tokenizer


def scramble(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers, as SplitMix64 does. Every output bit depends on all input
    bits."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def shuffled(g: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Map position g = 0, 1, 2, ... in a run to one of the n sequences of a corpus.

    Every epoch g // n is a new bijection of 0 ... n-1, which we compute and never store.
    A Feistel network is a bijection below a power of four. We repeat it while the result
    is not below n.
    """
    epoch, x = np.divmod(np.asarray(g, dtype=np.uint64), n)
    half = ((n - 1).bit_length() + 1) // 2
    low_bits = 2**half - 1
    key = scramble(scramble(np.full_like(x, seed)) + epoch + 1)
    keys = scramble(
        key + np.arange(4, dtype=np.uint64)[:, None]
    )  # of four rounds, [4, B]

    def permute(x, keys):
        left, right = x >> half, x & low_bits
        for key in keys:
            left, right = right, left ^ (scramble(right + key) & low_bits)
        return left << half | right

    x = permute(x, keys)
    while (outside := x >= n).any():
        x[outside] = permute(x[outside], keys[:, outside])
    return x.astype(np.int64)


@lru_cache(maxsize=64)
def order(block: int, n: int, seed: int) -> list[int]:
    """`shuffled` at 1,024 positions, for which numpy takes only 8 times as long as for
    one."""
    return shuffled(1024 * block + np.arange(1024), n, seed).tolist()


def mixed(g: np.ndarray, shares: dict[str, float], seed: int) -> tuple[np.ndarray, dict]:
    """Sequence g [B] of a mixture -> (its source [B], {name: its sequences before g
    [B]}).

    The rarest source takes one sequence of every 1 / share, at a random place among them,
    so it has no fixed place in a batch. The next does the same with the sequences left
    over, and so on. In any stretch of a run, two sources have their shares to within two
    sequences, eight within five.
    """
    parts = {
        name: round(share * 10**8) for name, share in shares.items()
    }  # integers are exact
    *rarer, (_, last) = sorted((part, name) for name, part in parts.items() if part)
    total, rest = sum(parts.values()), np.array(g, dtype=np.int64)
    names, counts = np.full(len(g), last), {}  # the last source has everything left over
    for i, (part, name) in enumerate(rarer):
        turn = rest * part // total  # its sequences before this stretch
        first, end = (
            -(-t * total // part) for t in (turn, turn + 1)
        )  # its stretch, rounded up
        key = scramble(scramble(np.full_like(turn, seed, np.uint64)) + i) + turn.astype(
            np.uint64
        )
        place = first + (scramble(key) % (end - first).astype(np.uint64)).astype(np.int64)
        counts[name] = turn + (place < rest)
        names = np.where((names == last) & (place == rest), name, names)
        total, rest = total - part, rest - counts[name]
    return names, counts | {last: rest}


def sources_of(g: np.ndarray, stages: list, seed: int) -> tuple[np.ndarray, dict]:
    """`mixed` for shares that change during a run. Counts continue from stage to
    stage."""
    names, ends = np.full(len(g), ""), [start for start, _ in stages[1:]]
    counts = {name: np.zeros_like(g) for _, shares in stages for name in shares}
    for (start, shares), end in zip(stages, [*ends, None]):
        drawn, here = mixed(np.clip(g, start, end) - start, shares, seed)
        names = np.where(g >= start, drawn, names)
        for name in here:
            counts[name] += here[name]
    return names, counts


def epochs(corpus: Corpus, n: int, seq_len: int, seed: int) -> dict[str, float]:
    """How often the first n sequences of a run have gone through the sources."""
    _, read = sources_of(np.array([n]), corpus.stages, seed)
    sizes = {name: n_sequences(s.train, seq_len) for name, s in corpus.sources.items()}
    return {name: read[name].item() / size for name, size in sizes.items()}


def draw(
    corpus: Corpus, g: np.ndarray, seq_len: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Training sequences g [B] of a run -> (inputs, targets), both [B, seq_len] int64.

    Every source has a separate order, in which a run takes its sequences one after the
    other.
    """
    inputs, targets = np.empty((2, len(g), seq_len), dtype=np.int64)
    names, counts = sources_of(g, corpus.stages, seed)
    for name in set(names):
        tokens, here = corpus.sources[name].train, names == name
        n = n_sequences(tokens, seq_len)
        index = np.array(
            [order(i // 1024, n, seed)[i % 1024] for i in counts[name][here].tolist()]
        )
        inputs[here], targets[here] = read_sequences(tokens, index, seq_len)
    return inputs, targets


def n_sequences(tokens: np.memmap, seq_len: int, max_tokens: int | None = None) -> int:
    """Whole sequences in a token file, at most about max_tokens, but at least one of
    them."""
    n = (
        len(tokens) - 1
    ) // seq_len  # the last one needs one more token, as its last target
    return n if max_tokens is None else min(n, max(1, max_tokens // seq_len))


def read_sequences(tokens: np.memmap, index: np.ndarray, seq_len: int) -> tuple:
    """Sequences `index` [B] of a token file -> (inputs, targets), both [B, seq_len]
    int64.

    Sequence i is tokens i * seq_len ... (i + 1) * seq_len, wherever documents start and
    end. As is usual in pre-training, attention crosses document borders.
    """
    rows = tokens[index[:, None] * seq_len + np.arange(seq_len + 1)].astype(np.int64)
    return rows[:, :-1], rows[:, 1:]


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("data.py", __doc__)
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
    try:
        if not 0 < args.val_fraction < 1:
            raise UserError(
                f"--val_fraction {args.val_fraction}: must be between 0 and 1"
            )
        if bool(args.source) != bool(args.out):
            raise UserError("--source and --out: one is missing; give both")
        if not args.source and args.val_fraction != parser.get_default("val_fraction"):
            raise UserError(
                f"--val_fraction {args.val_fraction}: has no effect without --source"
            )
        if args.source:
            notes = Counter()
            documents = read_files(args.source, args.text_field, notes)
            prepare(
                documents,
                args.tokenizer,
                args.out,
                args.val_fraction,
                args.text_field,
                notes,
            )
        corpus = open_corpus(args.out) if args.source else embedded_corpus(args.tokenizer)
    except (UserError, OSError, BrokenExecutor) as error:
        return fail("data.py", error)
    except KeyboardInterrupt:
        return fail("data.py", "interrupted; run the same command again")
    for name, value in corpus.meta.items():
        print(
            f"{name:>27} {value:,}" if isinstance(value, int) else f"{name:>27} {value}"
        )
    print(f"python train.py --data {shlex.quote(str(corpus.path))}")
    return 0


if __name__ == "__main__":
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # end as after Ctrl-C, and leave nothing behind
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)
    raise SystemExit(main())
