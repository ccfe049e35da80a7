"""Tokens on disk, and the order in which a run reads them.

A corpus is a folder with train.bin and val.bin (token ids, which stay on disk until we
need them) and meta.json (tokenizer, counts, fingerprint). The default is torch's Python
source.

Read `shuffled`, then `Corpus.draw`. Every comparison in this project rests on the order.
Sequence g of a run depends only on the seed and g, not on batch size or processes, so a
loader needs no state. A run that reads several corpora has them in a mixture
(mixture.py).

    python data.py                                          prepare the embedded corpus
    python data.py --source ~/notes --out data/notes        prepare one from text files
    python data.py --source web/*.jsonl.gz --out data/web   a text per line
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from os.path import basename
from pathlib import Path

import numpy as np

from tools import files, flags, tokenizers
from tools.flags import UserError
from tools.prepare import prepare, read_files

# -- A corpus ----------------------------------------------------------------------------


@dataclass(eq=False)
class Corpus:
    """The tokens of one folder."""

    path: Path | str
    meta: dict  # tokenizer, vocab_size, fingerprint, counts
    tokenizer: object  # see tools/tokenizers.py
    train: np.memmap  # token ids on disk, [train_tokens]
    val: np.memmap  # [val_tokens]

    def draw(self, g: np.ndarray, seq_len: int, seed: int) -> tuple:
        """Training sequences g [B] of a run -> (inputs, targets), both [B, seq_len] int64."""
        n = n_sequences(self.train, seq_len)
        index = shuffled(g, n, seed)  # [B], numbers of sequences in the corpus
        return read_sequences(self.train, index, seq_len)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Bytes of text that every token covers in the validation split, [n_vocab].

        A tokenizer that changes text, to lower case for example, writes tokens of other
        lengths than the text has. Scaled, they add up to the bytes of the texts.
        """
        val_bytes = self.meta["val_bytes"]
        written = self.meta["val_token_bytes"]
        return tokenizers.bytes_per_token(self.tokenizer) * (val_bytes / max(1, written))

    @property
    def sources(self) -> dict[str, "Corpus"]:  # a mixture has several
        return {basename(self.path): self}


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
# Instead, we compute an entry when we need it, because 500B tokens in sequences of 4096
# make a table of a gigabyte, in every process.


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

    # 3. Four rounds. Numbers from n up, which the halves can hold, go through them again
    x = x.copy()
    todo = np.full(len(x), True)
    while todo.any():
        left = x[todo] >> half
        right = x[todo] & low_bits
        for round_key in keys[:, todo]:
            new_right = left ^ (scramble(right + round_key) & low_bits)
            left = right
            right = new_right
        x[todo] = left << half | right
        todo = x >= n
    return x


def scramble(x: np.ndarray) -> np.ndarray:
    """Hash 64-bit integers, as SplitMix64 does. Every output bit depends on all input
    bits. Products wrap around at 2**64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


# -- Opening a corpus --------------------------------------------------------------------


def load_corpus(data: str | None, tokenizer="bytes", stages: list | None = None):
    """Open the folder that --data names. None is the embedded corpus in `tokenizer`.

    Several folders become a Mixture. stages: [(first sequence, text of --data), ...] if
    the data change during a run, from its parents to its decay. Raises UserError.
    """
    data = data or "embedded"
    parsed = []
    folders = set()
    for start, text in stages or [(0, data)]:
        shares = parse_mixture(text)  # {folder: share}
        parsed.append((start, shares))
        folders.update(shares)
    if len(folders) > 1:
        import mixture  # here, because it imports this file

        return mixture.load_mixture(data, tokenizer, parsed)
    return open_corpus(folders.pop(), tokenizer)


NEEDED = set(
    "tokenizer vocab_size dtype train_tokens val_tokens val_bytes val_token_bytes "
    "fingerprint".split()
)


def open_corpus(folder: str | Path, tokenizer="bytes") -> Corpus:
    """Map the files of a folder into memory.

    "embedded" is the embedded corpus in `tokenizer`. Raises UserError if the folder is
    missing or damaged.
    """
    path = embedded_corpus(tokenizer) if folder == "embedded" else Path(folder)
    try:
        meta = json.loads((path / "meta.json").read_text())
        missing = NEEDED - meta.keys()
        if missing:
            raise UserError(f"meta.json lacks {', '.join(sorted(missing))}")
        train = np.memmap(path / "train.bin", meta["dtype"], mode="r")
        val = np.memmap(path / "val.bin", meta["dtype"], mode="r")
        if (len(train), len(val)) != (meta["train_tokens"], meta["val_tokens"]):
            raise UserError("meta.json has different counts")
    except FileNotFoundError as error:
        lost = Path(error.filename).name
        raise UserError(
            f"--data {path}: has no {lost}; prepare it with data.py"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--data {path}: {error}; prepare it with data.py") from None
    name = meta["tokenizer"]
    if tokenizers.tokenizer_file(name):  # the corpus has a copy of it
        name = str(path / name)
    return Corpus(path, meta, tokenizers.load_tokenizer(name), train, val)


def embedded_corpus(tokenizer: str) -> Path:
    """The folder of the default corpus, prepared at its first use."""
    import torch  # here, because it takes a second, and other corpora do not need it

    # 1. The folder has the version of its text and the tokenizer in its name
    version = torch.__version__.split("+")[0]
    kind = tokenizer
    file = tokenizers.tokenizer_file(tokenizer)
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
    return path


def embedded_texts(folder: Path) -> Iterator[str]:
    """torch's Python files in the order of their paths, the same in every wheel of a version.

    Only version.py names the build. read_text turns the CR LF of wheels for Windows into
    LF.
    """
    paths = {path.relative_to(folder).as_posix() for path in files.all_files(folder)}
    for name in sorted(paths - {"version.py"}):
        if name.endswith(".py"):
            yield (folder / name).read_text(encoding="utf-8")


def parse_mixture(text: str, flag: str = "--data") -> dict[str, float]:
    """'web:0.8,code:0.2' -> {'/home/me/web': 0.8, '/home/me/code': 0.2}, or raise UserError."""
    shares = {}
    for part in text.split(","):
        pattern = r"(?s)(.*?)(?::(-?\d*\.?\d+(?:e-?\d+)?))?"  # (?s): . is any character
        folder, share = re.fullmatch(pattern, part).groups("1")
        folder = folder if folder in ("", "embedded") else os.path.abspath(folder)
        if basename(folder) in map(basename, shares):
            raise UserError(
                f"{flag} {text}: two folders have the name {basename(folder)}"
            )
        shares[folder] = float(share)
    if (
        "" in shares
        or min(shares.values()) < 0
        or not abs(sum(shares.values()) - 1) < 1e-6
    ):
        raise UserError(
            f"{flag} {text}: needs shares that add up to 1, as in web:0.8,code:0.2"
        )
    return shares


def format_mixture(shares: dict[str, float]) -> str:
    """The text that parse_mixture reads."""
    alone = len(shares) == 1
    return ",".join(
        folder if alone else f"{folder}:{share}" for folder, share in shares.items()
    )


def is_prepared(data_flag: str | None) -> bool:
    """Does --data name folders of data.py, which have a tokenizer already?"""
    return bool(data_flag) and "embedded" not in parse_mixture(data_flag)


def tokenizer_name(cfg, corpus: Corpus) -> str:
    """The name of the tokenizer in the record of a run."""
    return corpus.meta["tokenizer"] if is_prepared(cfg.data) else cfg.tokenizer


def tokenizer_of(config: dict):
    """Load the tokenizer of a run or of released weights. Raises OSError or UserError."""
    if config.get("data") and tokenizers.tokenizer_file(config["tokenizer"]):
        # its file is in the corpus
        return load_corpus(config["data"], config["tokenizer"]).tokenizer
    return tokenizers.load_tokenizer(config["tokenizer"])


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
    lengths = tokenizers.bytes_per_token(tokenizer)
    return hashlib.sha256(lengths.tobytes()).hexdigest()[:16]


def check_tokenizer(corpus: Corpus, expected: str, owner: Path | str) -> None:
    """Raise UserError if the token_hash of a corpus is not the expected one, its owner's."""
    if token_hash(corpus.tokenizer) != expected:
        raise UserError(f"--data {corpus.path}: its tokenizer is not that of {owner}")


# -- Command line ------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = flags.program_parser("data.py", __doc__)
    add = parser.add_argument
    add("--source", nargs="+", help="files and folders of text (default: embedded)")
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
            texts = read_files(args.source, args.text_field, notes)
            prepare(texts, args.tokenizer, args.out, args.val_fraction, notes)
            corpus = open_corpus(args.out)
        else:
            corpus = open_corpus("embedded", args.tokenizer)
    except (UserError, OSError) as error:
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
