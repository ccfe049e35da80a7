"""Tokens on disk, and the order in which a run reads them.

A corpus is a folder: train.bin and val.bin (token ids, read from the disk as they are needed) and
meta.json (tokenizer, counts, fingerprint). One needs no download: the Python source of torch.

Read `shuffled`, then `draw`. Every comparison in this project rests on the order: the text of
sequence g depends only on the seed and g, never on batch size, micro-batch size or the number of
processes. So there is no loader state to save.

    python data.py                                             prepare the embedded corpus
    python data.py --source ~/notes --out data/notes           prepare one from text files
    python data.py --source 'web/*.jsonl.gz' --out data/web    a document per line, or .parquet row
"""

import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import basename
from pathlib import Path

import numpy as np
import tiktoken

from tools.config import fail, program_parser
from tools.prepare import prepare, prepare_files, report
from tools.tokenizers import bytes_per_token, load_tokenizer, tokenizer_file
from tools.tokenizers import tokenizer_files  # noqa: F401  for model.py


@dataclass(eq=False)
class Corpus:
    """Tokens to train on: one folder, or a mixture of several. A folder is a mixture of one."""

    path: Path | str
    meta: dict  # tokenizer, vocab_size, fingerprint; for a folder also its counts
    tokenizer: tiktoken.Encoding
    train: np.memmap | None = None  # token ids on disk, [train_tokens]; None for a mixture
    val: np.memmap | None = None
    sources: dict[str, "Corpus"] | None = None  # by name, the last part of the path
    shares: tuple[float, ...] = (1.0,)  # of each source; weights of the validation loss
    stages: tuple | None = None  # (first sequence, {name: share}), ...

    def __post_init__(self):
        self.sources = self.sources or {self.path.name: self}
        self.stages = self.stages or ((0, {self.path.name: 1.0}),)


def open_corpus(path: Path) -> Corpus:
    """Map a prepared folder into memory. Raises FileNotFoundError or ValueError if there is none."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        name, dtype = meta["tokenizer"], meta["dtype"]
        ids = {split: np.memmap(path / f"{split}.bin", dtype, mode="r") for split in ("train", "val")}
        if any(len(ids[split]) != meta[f"{split}_tokens"] for split in ids):
            raise ValueError
    except OSError as error:
        problem = f"{Path(error.filename).name} is missing; make a corpus with data.py"
        raise FileNotFoundError(f"--data {path}: {problem}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--data {path}: meta.json does not fit; prepare it again") from None
    tokenizer = load_tokenizer(str(path / name) if tokenizer_file(name) else name)
    return Corpus(path, meta, tokenizer, **ids)


def embedded_texts(folder: Path) -> Iterator[str]:
    """torch's Python files in the order of their paths: the same text in every wheel of a version.

    Only version.py names the build. read_text turns the CR LF of wheels for Windows into LF.
    """
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    for name in sorted(names - {"version.py"}):
        yield (folder / name).read_text(encoding="utf-8")


def embedded_corpus(tokenizer: str = "bytes") -> Corpus:
    """The default corpus, prepared when it is first used."""
    version, kind = importlib.metadata.version("torch").split("+")[0], tokenizer
    if (file := tokenizer_file(tokenizer)) and file.is_file():  # a name may mean different files
        kind = f"{file.stem}-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"
    path = Path(__file__).parent / "data" / f"torch{version}-{kind}".replace("/", "-")
    if not path.exists():
        print(f"preparing the embedded corpus, once: {path}")
        torch = Path(importlib.util.find_spec("torch").origin).parent
        try:
            prepare(embedded_texts(torch), tokenizer, path)
        except OSError:
            if not path.exists():  # otherwise another process was faster
                raise
    return open_corpus(path)


def parse_mixture(text: str, flag: str = "--data") -> dict[str, float]:
    """'web:0.8,code:0.2' -> {'/home/me/web': 0.8, '/home/me/code': 0.2}; a folder alone has it all.

    Raises ValueError if the shares do not add up to 1, or if two folders have the same name.
    """
    shares = {}
    for part in text.split(","):
        folder, _, share = part.rpartition(":")
        try:
            share = float(share)
        except ValueError:
            folder, share = part, 1.0
        folder = folder if folder in ("", "embedded") else os.path.abspath(folder)
        if basename(folder) in map(basename, shares):
            raise ValueError(f"{flag} {text}: two folders are named {basename(folder)}; rename one")
        shares[folder] = share
    if "" in shares or min(shares.values()) < 0 or not abs(sum(shares.values()) - 1) < 1e-6:
        raise ValueError(f"{flag} {text}: needs shares that add up to 1, as in web:0.8,code:0.2")
    return shares


def format_mixture(shares: dict[str, float]) -> str:
    """The text that parse_mixture reads."""
    alone = len(shares) == 1
    return ",".join(folder if alone else f"{folder}:{share}" for folder, share in shares.items())


def load_corpus(data: str | None, tokenizer: str = "bytes", stages: list | None = None) -> Corpus:
    """Open the folder or mixture that --data names; None is the embedded corpus in `tokenizer`.

    stages: (first sequence, mixture), ... if the mixture changes during a run: what its parents
    read, then `data`, then the mixture of the decay. Sources that are only in the past need not
    exist any more; they are counted by name. Raises ValueError or OSError if a corpus is missing
    or two do not fit together.
    """
    shares = parse_mixture(data or "embedded")
    stages = [(start, parse_mixture(text or "embedded")) for start, text in stages or [(0, data)]]
    now = max(i for i, (_, mixture) in enumerate(stages) if mixture == shares)
    ahead = [mixture for _, mixture in stages[now:]]
    sources = {}
    for folder in dict.fromkeys(itertools.chain(*ahead)):
        new = embedded_corpus(tokenizer) if folder == "embedded" else open_corpus(Path(folder))
        first = next(iter(sources.values()), new)
        if basename(folder) in sources:
            raise ValueError(f"--decay_data: two folders are named {new.path.name}; rename one")
        if not np.array_equal(bytes_per_token(first.tokenizer), bytes_per_token(new.tokenizer)):
            raise ValueError(f"--data {new.path}: has another tokenizer than {first.path}")
        sources[basename(folder)] = new
    if len(sources) == len(stages) == 1:
        return first
    stages = [(start, {basename(f): m[f] for f in m}) for start, m in stages]
    fingerprint, weights = first.meta["fingerprint"], [mixture for _, mixture in stages[now:]]
    if len(sources) > 1:
        content = [(c.meta["fingerprint"], *(w.get(n, 0.0) for w in weights)) for n, c in sources.items()]
        fingerprint = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
    return Corpus(
        path=data or "embedded",
        meta=first.meta | {"fingerprint": fingerprint},
        tokenizer=first.tokenizer,
        sources=sources,
        shares=tuple(weights[0].get(name, 0.0) for name in sources),
        stages=stages,
    )


def tokenizer_of(path: Path) -> tiktoken.Encoding:
    """The tokenizer of a run folder, of a checkpoint in it, or of a Granite folder.

    Raises FileNotFoundError or ValueError if there is none.
    """
    folders = [path, *path.parents[:2]]  # of a checkpoint: itself, ckpt, the run
    folder = next((f for f in folders if (f / "config.json").is_file()), None)
    if folder is None:
        raise FileNotFoundError(f"{path}: no config.json there that names its tokenizer")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "model_type" in config:  # Granite
        return load_tokenizer(str(folder / "tokenizer.json"))
    if config["data"]:
        return load_corpus(config["data"], config["tokenizer"]).tokenizer
    return load_tokenizer(config["tokenizer"])


# ---------------------------------------------------------------------------------------------
# The order in which a run reads


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers (SplitMix64's finalizer): every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(g: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Map position g = 0, 1, 2, ... in a run to one of the corpus's n sequences, for this seed.

    Every epoch g // n is a different bijection of 0 ... n-1, computed and never stored. A Feistel
    network permutes the next power of four; results outside n go through it again until they are
    inside (cycle walking).
    """
    g = np.asarray(g, dtype=np.uint64)
    epoch, x = g // np.uint64(n), g % np.uint64(n)
    half = np.uint64((max(n - 1, 1).bit_length() + 1) // 2)
    low_bits = (np.uint64(1) << half) - np.uint64(1)
    key = mix(mix(np.full_like(g, seed)) + epoch + np.uint64(1))

    def permute(x, key):
        left, right = x >> half, x & low_bits
        for i in range(4):
            left, right = right, left ^ (mix(right + mix(key + np.uint64(i))) & low_bits)
        return left << half | right

    x = permute(x, key)
    while (outside := x >= n).any():
        x[outside] = permute(x[outside], key[outside])
    return x.astype(np.int64)


def mixed(g: np.ndarray, shares: dict[str, float], seed: int) -> tuple[np.ndarray, dict]:
    """Sequence g [B] of a mixture -> (name of its source [B], {name: how many came before it [B]}).

    The rarest source takes one sequence of every 1 / share, at a random place among them, so it has
    no fixed place in a batch. The next does the same with the sequences that are left, and so on.
    In every stretch of a run, each of two sources has its share to within two sequences (each of
    eight, to within five).
    """
    order = sorted((round(share * 10**8), name) for name, share in shares.items() if share)
    total, rest = sum(share for share, _ in order), np.array(g, dtype=np.int64)
    names, counts = np.full(len(g), ""), {}
    for i, (share, name) in enumerate(order):
        turn = rest * share // total
        first, end = -(-turn * total // share), -(-(turn + 1) * total // share)  # rounded up
        key = mix(mix(np.full_like(turn, seed, np.uint64)) + np.uint64(i)) + turn.astype(np.uint64)
        place = first + (mix(key) % (end - first).astype(np.uint64)).astype(np.int64)
        counts[name] = turn + (place < rest)
        names = np.where((names == "") & (place == rest), name, names)
        total, rest = total - share, rest - counts[name]
    return names, counts


def sequences_read(stages: tuple, n: int, seed: int) -> Counter:
    """How many of a run's first n sequences came from each source."""
    read, ends = Counter(), [start for start, _ in stages[1:]] + [n]
    for (start, shares), end in zip(stages, ends):
        _, counts = mixed(np.array([max(0, min(end, n) - start)]), shares, seed)
        read.update({name: int(count[0]) for name, count in counts.items()})
    return read


def epochs(corpus: Corpus, n: int, seq_len: int, seed: int) -> dict[str, float]:
    """How often a run's first n sequences have gone through each source."""
    read, sources = sequences_read(corpus.stages, n, seed), corpus.sources.items()
    return {name: read[name] / n_sequences(source.train, seq_len) for name, source in sources}


def draw(corpus: Corpus, g: np.ndarray, seq_len: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training sequences g [B] of a run -> (inputs, targets), both [B, seq_len] int64.

    Each source is read in its own shuffled order, by its own count; the counts continue when the
    shares change.
    """
    g = np.asarray(g)
    inputs, targets = np.empty((2, len(g), seq_len), dtype=np.int64)
    stage = np.searchsorted([start for start, _ in corpus.stages], g, side="right") - 1
    for s in np.unique(stage):
        start, shares = corpus.stages[s]
        here = np.flatnonzero(stage == s)
        names, counts = mixed(g[here] - start, shares, seed)
        before = sequences_read(corpus.stages[:s], start, seed)
        for name in np.unique(names):
            tokens, mine = corpus.sources[name].train, names == name
            index = shuffled(before[name] + counts[name][mine], n_sequences(tokens, seq_len), seed)
            inputs[here[mine]], targets[here[mine]] = read_sequences(tokens, index, seq_len)
    return inputs, targets


def n_sequences(tokens: np.memmap, seq_len: int) -> int:
    """Whole sequences in a token file. The last one needs one more token, as its last target."""
    return (len(tokens) - 1) // seq_len


def read_sequences(tokens: np.memmap, index: np.ndarray, seq_len: int) -> tuple:
    """Sequences `index` [B] of a token file -> (inputs, targets), both [B, seq_len] int64.

    Sequence i is tokens i * seq_len ... (i + 1) * seq_len, wherever documents begin and end: as is
    usual in pre-training, attention crosses document borders.
    """
    rows = np.empty((len(index), seq_len + 1), tokens.dtype)
    with open(tokens.filename, "rb", buffering=0) as file:  # faster than a page fault per 4 KB
        for row, i in zip(rows, index.tolist()):
            file.seek(i * seq_len * tokens.itemsize)
            if file.readinto(row) < row.nbytes:
                raise OSError(f"{tokens.filename}: too short for sequence {i}; it has changed")
    rows = rows.astype(np.int64)
    return rows[:, :-1], rows[:, 1:]


# ---------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("data.py", __doc__)
    add = parser.add_argument
    add("--source", nargs="+", help="files, folders, quoted patterns, hf:NAME (default: embedded)")
    add("--out", type=Path, help="folder of the new corpus")
    add("--tokenizer", default="bytes", help="bytes (default), a tiktoken name, a tokenizer file")
    add("--text_field", default="text", help="field or column with the text (default: text)")
    add("--val_fraction", default=0.02, type=float, help="share to hold out (default: 0.02)")
    args = parser.parse_args(argv)
    how = args.out, args.val_fraction, args.text_field
    try:
        if not 0 < args.val_fraction < 1:
            raise ValueError(f"--val_fraction {args.val_fraction}: must be between 0 and 1")
        if args.source and not args.out:
            raise ValueError("--source needs --out, the folder of the new corpus")
        if not args.source and how != (None, 0.02, "text"):
            raise ValueError("--out, --val_fraction and --text_field need --source")
        meta = prepare_files(args.source, args.tokenizer, *how) if args.source else {}
        corpus = open_corpus(args.out) if args.source else embedded_corpus(args.tokenizer)
    except (ValueError, OSError) as error:
        return fail("data.py", error)
    except KeyboardInterrupt:
        return fail("data.py", "interrupted; rerun the same command to resume")
    for split in ("train", "val"):
        kinds = ("documents", "bytes", "tokens")
        print(split, *(f"{corpus.meta[f'{split}_{kind}']:>16,} {kind}" for kind in kinds))
    print(*report(meta), f"fingerprint {corpus.meta['fingerprint']}", sep="\n")
    print(f"train on it: python train.py --data {shlex.quote(str(corpus.path))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
