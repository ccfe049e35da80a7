"""Tokens on disk, and the order in which a run reads them.

A corpus is a folder: train.bin and val.bin (token ids and nothing else, read from the disk as they
are needed) and meta.json (tokenizer, counts, fingerprint). One corpus needs no download: the Python
source of torch itself, the same bytes in every wheel of a version.

Read `shuffled`, then `draw`. Every comparison in this project rests on the order: which text
sequence g of a run contains depends only on the seed and g, never on the batch size, the
micro-batch size or the number of processes. So there is no loader state to save.

    python data.py                                             prepare the embedded corpus
    python data.py --source ~/notes --out data/notes           prepare one from text files
    python data.py --source 'web/*.jsonl.gz' --out data/web    one document per line or .parquet row
"""

import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from tools.config import fail, program_parser
from tools.prepare import prepare, prepare_files, report
from tools.tokenizers import bytes_per_token, load_tokenizer, tokenizer_file
from tools.tokenizers import tokenizer_files  # noqa: F401  for model.py

Stages = tuple[tuple[int, dict[str, float]], ...]  # (first sequence, share of each source), ...


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
    stages: Stages | None = None

    def __post_init__(self):
        self.sources = self.sources or {self.path.name: self}
        self.stages = self.stages or ((0, {self.path.name: 1.0}),)


def open_corpus(path: Path) -> Corpus:
    """Map a prepared folder into memory. Raises FileNotFoundError or ValueError if it is not one."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        tokens = []
        for split in ("train", "val"):
            ids = np.memmap(path / f"{split}.bin", dtype=meta["dtype"], mode="r")
            if len(ids) != meta[f"{split}_tokens"]:
                raise ValueError(f"--data {path}: {split}.bin and meta.json differ; prepare it again")
            tokens.append(ids)
        name = meta["tokenizer"]
        return Corpus(path, meta, load_tokenizer(str(path / name) if tokenizer_file(name) else name), *tokens)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"--data {path}: not a prepared corpus, {Path(error.filename).name} is missing; make one with data.py") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ValueError(f"--data {path}: meta.json is damaged; prepare it again") from None


def embedded_texts(folder: Path | None = None) -> Iterator[str]:
    """torch's Python files, in the order of their paths: the same in every wheel of a version.

    Except version.py, which names the build. Wheels for Windows end lines with CR LF; read_text
    turns that into LF.
    """
    folder = folder or Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    for name in sorted(names):
        if name != "version.py":
            yield (folder / name).read_text(encoding="utf-8", errors="replace")


def embedded_corpus(tokenizer: str = "bytes") -> Corpus:
    """The default corpus, prepared when it is first used."""
    torch_version = importlib.metadata.version("torch").split("+")[0]
    kind, file = tokenizer, tokenizer_file(tokenizer)
    if file and file.is_file():  # different tokenizers may have the same file name
        kind = f"{file.stem}-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"
    path = Path(__file__).parent / "data" / f"torch{torch_version}-{kind}".replace("/", "-")
    if not path.exists():
        print(f"preparing the embedded corpus, once: {path}")
        try:
            prepare(embedded_texts(), tokenizer, path)
        except OSError:
            if not path.exists():  # otherwise another process was faster
                raise
    return open_corpus(path)


def parse_mixture(text: str, flag: str = "--data") -> dict[str, float]:
    """'web:0.8,code:0.2' -> {'/home/me/web': 0.8, '/home/me/code': 0.2}; a folder alone has it all.

    Raises ValueError if a share is missing or the shares do not add up to 1.
    """
    shares = {}
    for part in text.split(","):
        folder, _, share = part.rpartition(":")
        try:
            share = float(share)
        except ValueError:
            folder, share = part, math.nan if "," in text else 1.0
        if not folder or not 0 <= share <= 1:
            raise ValueError(f"{flag} {text}: {part!r} must be a folder and its share, as in web:0.8,code:0.2")
        folder = folder if folder == "embedded" else os.path.abspath(folder)
        if Path(folder).name in {Path(other).name for other in shares}:
            raise ValueError(f"{flag} {text}: two sources have the name {Path(folder).name}; rename one")
        shares[folder] = share
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"{flag} {text}: shares must add up to 1, not to {sum(shares.values()):g}")
    return shares


def format_mixture(shares: dict[str, float]) -> str:
    """The text that parse_mixture reads."""
    if len(shares) == 1:
        return next(iter(shares))
    return ",".join(f"{folder}:{share}" for folder, share in shares.items())


def load_corpus(data: str | None, tokenizer: str = "bytes", stages: list[tuple[int, str | None]] | None = None) -> Corpus:
    """Open the folder or mixture that --data names; None is the embedded corpus in `tokenizer`.

    stages: (first sequence, mixture), ... if the mixture changes during a run: what its parents
    read, then `data`, then the mixture of the decay. Sources that are only in the past need not
    exist any more; they are counted by name.
    Raises ValueError or OSError if a corpus is missing or two do not fit together.
    """
    shares = parse_mixture(data or "embedded")
    stages = [(start, parse_mixture(text or "embedded")) for start, text in stages or [(0, data)]]
    now = max(i for i, (_, mixture) in enumerate(stages) if mixture == shares)
    ahead = [mixture for _, mixture in stages[now:]]
    folders = list(dict.fromkeys(itertools.chain(*ahead)))
    sources = {}
    for folder in folders:
        name = Path(folder).name
        if name in sources:
            raise ValueError(f"--decay_data: two sources have the same name {name}; rename one")
        sources[name] = embedded_corpus(tokenizer) if folder == "embedded" else open_corpus(Path(folder))
    first, *others = sources.values()
    if not others and len(stages) == 1:
        return first
    lengths = bytes_per_token(first.tokenizer)
    for other in others:
        if not np.array_equal(lengths, bytes_per_token(other.tokenizer)):
            raise ValueError(
                f"--data {other.path}: its tokenizer is {other.meta['tokenizer']}, "
                f"but {first.path} has {first.meta['tokenizer']}"
            )
    fingerprint = first.meta["fingerprint"]
    if others:
        content = [
            (sources[Path(folder).name].meta["fingerprint"], *(mixture.get(folder, 0.0) for mixture in ahead))
            for folder in folders
        ]
        fingerprint = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
    by_name = lambda mixture: {Path(folder).name: share for folder, share in mixture.items()}
    return Corpus(
        data or "embedded", first.meta | {"fingerprint": fingerprint}, first.tokenizer,
        sources=sources, shares=tuple(shares.get(folder, 0.0) for folder in folders),
        stages=tuple((start, by_name(mixture)) for start, mixture in stages),
    )  # fmt: skip


def run_of(checkpoint: Path) -> Path:
    """The run folder that contains a checkpoint, directly or in ckpt/."""
    folder = checkpoint.parent
    return folder if (folder / "config.json").exists() else folder.parent


def tokenizer_of(path: Path) -> tiktoken.Encoding:
    """The tokenizer of a run folder, a checkpoint or a Granite folder.

    Raises FileNotFoundError or ValueError if there is none.
    """
    folder = path if path.is_dir() else run_of(path)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise FileNotFoundError(f"{path}: no config.json that names a tokenizer") from None
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
    """The source of sequence g [B] of a mixture, and how many came before it from every source.

    Returns (names [B], {name: count [B]}). The rarest source takes one sequence of every 1 / share,
    at a random place among them, so it has no fixed place in a batch. The rarest of the other
    sources does the same with the sequences that are left, and so on. All of this is arithmetic on
    g: after any number of sequences every source has its share, to within one sequence if there
    are two sources, two or three if there are eight.
    """
    whole = [(round(share * 10**8), name) for name, share in shares.items()]
    whole = sorted((share, name) for share, name in whole if share)
    rest, names, counts = np.array(g, dtype=np.int64), np.full(len(g), "", object), {}
    total = sum(share for share, _ in whole)
    for i, (share, name) in enumerate(whole):
        turn = rest * share // total
        first, end = -(-turn * total // share), -(-(turn + 1) * total // share)
        key = mix(mix(np.full(len(g), seed, dtype=np.uint64)) + np.uint64(i))
        random = mix(key + turn.astype(np.uint64)) % (end - first).astype(np.uint64)
        place = first + random.astype(np.int64)
        counts[name] = turn + (place < rest)
        names[(names == "") & (place == rest)] = name
        rest = rest - counts[name]
        total -= share
    return names, counts


def sequences_read(stages: Stages, n: int, seed: int) -> Counter:
    """How many of a run's first n sequences came from each source."""
    read, ends = Counter(), [start for start, _ in stages[1:]] + [n]
    for (start, shares), end in zip(stages, ends):
        _, counts = mixed(np.array([max(0, min(end, n) - start)]), shares, seed)
        read.update({name: int(count[0]) for name, count in counts.items()})
    return read


def epochs(corpus: Corpus, n: int, seq_len: int, seed: int) -> dict[str, float]:
    """How often a run's first n sequences have gone through each source."""
    read = sequences_read(corpus.stages, n, seed)
    return {
        name: read[name] / n_sequences(source.train, seq_len)
        for name, source in corpus.sources.items()
    }


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
        for name in set(names):
            tokens, mine = corpus.sources[name].train, names == name
            index = shuffled(before[name] + counts[name][mine], n_sequences(tokens, seq_len), seed)
            inputs[here[mine]], targets[here[mine]] = read_sequences(tokens, index, seq_len)
    return inputs, targets


def n_sequences(tokens: np.memmap, seq_len: int) -> int:
    """Whole sequences in a token file. The last one needs one more token, as its last target."""
    return (len(tokens) - 1) // seq_len


def read_sequences(tokens: np.memmap, index: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
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
    parser.add_argument("--source", nargs="+", metavar="PATH", help="files, folders, quoted patterns or hf:NAME (default: the embedded corpus)")
    parser.add_argument("--out", type=Path, help="folder of the new corpus, with --source")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, a name known to tiktoken, a .tiktoken or tokenizer.json file (default: bytes)")
    parser.add_argument("--text_field", help="field or column that holds the text (default: text)")
    parser.add_argument("--val_fraction", type=float, help="share of documents to hold out (default: 0.02)")
    args = parser.parse_args(argv)
    try:
        if not args.source:
            if args.out or args.val_fraction is not None or args.text_field is not None:
                raise ValueError("--out, --val_fraction and --text_field need --source; the embedded corpus uses fixed values for them")
            corpus = embedded_corpus(args.tokenizer)
            path, meta = corpus.path, corpus.meta
        else:
            if args.out is None:
                raise ValueError("--source needs --out, the folder of the new corpus")
            val_fraction = 0.02 if args.val_fraction is None else args.val_fraction
            if not 0 < val_fraction < 1:
                raise ValueError(f"--val_fraction {val_fraction}: must be between 0 and 1")
            path = args.out
            meta = prepare_files(args.source, args.tokenizer, path, val_fraction, args.text_field or "text")
    except (ValueError, OSError) as error:
        return fail("data.py", error)
    except KeyboardInterrupt:
        print("data.py: interrupted; rerun the same command to resume", file=sys.stderr)
        return 130
    for split in ("train", "val"):
        documents, n_bytes, n_tokens = (meta[f"{split}_{what}"] for what in ("documents", "bytes", "tokens"))
        print(f"{split:<6}{documents:>10,} documents {n_bytes:>16,} bytes {n_tokens:>16,} tokens {n_bytes / n_tokens:6.2f} bytes per token")
    print(*report(meta.get("notes", {})), f"corpus {path}, fingerprint {meta['fingerprint']}: train.py --data {path}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
