"""Text to tokens, and the order in which a run reads them.

A corpus is a folder: train.bin and val.bin (token ids, nothing else, read through memory maps) and
meta.json (tokenizer, counts, fingerprint). Without any download there is always one: the Python
source that came with torch and with Python itself.

Read `prepare` for how text becomes tokens, and `shuffled` for the data order, which every
comparison of this project rests on: sequence number g of a run depends on the seed and g alone,
never on the batch size, the micro-batch or the number of processes.

    python data.py                                    prepares the embedded corpus
    python data.py --source ~/notes --out data/notes  prepares a corpus from plain text files
"""

import argparse
import base64
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

# ---------------------------------------------------------------------------------------------
# Tokenizers: always a tiktoken.Encoding, so that the rest of the project knows one type

# How GPT-2 cuts text into words before it merges bytes; a .tiktoken file does not contain it.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# StarCoder, and with it the paper's models, takes single digits out first.
STARCODER_PATTERN = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # its names in a tokenizer.json; tiktoken knows the first


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """'bytes', the path of a .tiktoken or tokenizer.json file, or a name that tiktoken knows (it may download).

    Raises FileNotFoundError or ValueError where there is no such tokenizer.
    """
    if name == "bytes":
        # Ids are the bytes themselves. 255 never occurs in UTF-8, so it can be end-of-text.
        return tiktoken.Encoding(
            "bytes", explicit_n_vocab=256, pat_str=r"[\s\S]",
            mergeable_ranks={bytes([i]): i for i in range(255)}, special_tokens={"<|endoftext|>": 255},
        )  # fmt: skip
    if name.endswith((".tiktoken", ".json")) and not Path(name).is_file():
        raise FileNotFoundError(f"--tokenizer {name}: no such file")
    if name.endswith(".json"):
        return read_tokenizer_json(Path(name))
    if name.endswith(".tiktoken"):
        try:  # a line is a token in base64 and its rank, which is also its id
            lines = [line.split() for line in Path(name).read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        except ValueError:
            raise ValueError(f"--tokenizer {name}: not a .tiktoken file, a line of it is not a token and its rank") from None
        if not all(bytes([i]) in ranks for i in range(256)):
            raise ValueError(f"--tokenizer {name}: not a byte-level vocabulary, some of the 256 bytes are missing")
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError(f"--tokenizer {name}: its ranks are not 0, 1, 2, ... without gap or repetition")
        special = {"<|endoftext|>": len(ranks)}
        return tiktoken.Encoding(Path(name).stem, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
        raise ValueError(f"--tokenizer {name}: not one of {known}, nor a path to a .tiktoken or tokenizer.json file")
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        raise ValueError(f"--tokenizer {name}: tiktoken has no copy of it and cannot download one ({error})") from None


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a tokenizer.json: itself if it can be seen, else one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def read_tokenizer_json(path: Path) -> tiktoken.Encoding:
    """A byte-level BPE of Hugging Face's format, with the same ids. Raises ValueError for other kinds.

    tiktoken merges in the order of the ids, so the ids have to follow the order of the merges.
    """

    def demand(holds: bool, problem: str) -> None:
        if not holds:
            raise ValueError(f"--tokenizer {path}: {problem}")

    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
        model, cutting = spec["model"], spec["pre_tokenizer"]
        demand(model["type"] == "BPE" and not spec["normalizer"] and not model.get("byte_fallback"), "not a byte-level BPE")
        match cutting["pretokenizers"] if cutting["type"] == "Sequence" else [cutting]:
            case [{"type": "ByteLevel", "add_prefix_space": False} as last] if last.get("use_regex", True):
                pattern = GPT2_PATTERN
            case [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False} as last] if last.get("use_regex", True):
                pattern = STARCODER_PATTERN
            case [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                  {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]:  # fmt: skip
                pass
            case _:
                demand(False, "its pre-tokenizer is neither GPT-2's nor StarCoder's nor one pattern")
        vocab, special = model["vocab"], {token["content"]: token["id"] for token in spec["added_tokens"]}
        merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]  # older files: "a b"
        merged = list(dict.fromkeys(vocab[a + b] for a, b in merges))  # two merges may make the same token
        demand(all(x < y for x, y in zip(merged, merged[1:])), "its ids do not follow the order of its merges")
        bytes_of = {letter: byte for byte, letter in byte_letters().items()}
        tokens = [letter for letter in bytes_of if letter in vocab] + [a + b for a, b in merges]
        ranks = {bytes(bytes_of[letter] for letter in token): vocab[token] for token in tokens}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if str(error).startswith("--tokenizer"):
            raise
        raise ValueError(f"--tokenizer {path}: not the tokenizer.json of a byte-level BPE ({type(error).__name__}: {error})") from None
    # 0xC0, 0xC1 and 0xF5 ... 0xFF never occur in UTF-8
    demand(all(bytes([b]) in ranks for b in range(0xF5) if b not in (0xC0, 0xC1)), "not a byte-level vocabulary, some of the 256 bytes are missing")
    eot = next((special[name] for name in END_OF_TEXT if name in special), None)
    demand(eot is not None, f"has no end-of-text, none of {', '.join(END_OF_TEXT)}")
    return tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special | {END_OF_TEXT[0]: eot})


def tokenizer_files(tokenizer: tiktoken.Encoding) -> dict[str, str]:
    """The same tokenizer in Hugging Face's format: tokenizer.json and tokenizer_config.json, name -> content."""
    ranks, letters = tokenizer._mergeable_ranks, byte_letters()
    special = {name: tokenizer.encode_single_token(name) for name in sorted(tokenizer.special_tokens_set)}
    spell = lambda token: "".join(letters[b] for b in token)
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:  # merge what comes first, as an encoder would, until two parts are left
            i = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append([spell(part) for part in parts])
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": tokenizer._pat_str}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]}  # fmt: skip
    added = [{"id": i, "content": name, "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
             for name, i in sorted(special.items(), key=lambda item: item[1])]  # fmt: skip
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": pre_tokenizer, "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "byte_fallback": False,
                  "vocab": {spell(token): rank for token, rank in ranks.items()} | special, "merges": merges},
    }  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | {f"{kind}_token": END_OF_TEXT[0] for kind in ("bos", "eos", "pad")}
    return {"tokenizer.json": json.dumps(spec, ensure_ascii=False), "tokenizer_config.json": json.dumps(config, indent=1)}


def tokenizer_of(path: Path) -> tiktoken.Encoding:
    """The tokenizer of a run's folder (or a checkpoint in it) or of a Granite folder.

    Raises FileNotFoundError or ValueError where it has none.
    """
    folder = path if path.is_dir() else path.parent.parent
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise FileNotFoundError(f"{path}: no config.json that says which tokenizer it was trained with") from None
    if "model_type" in config:
        return load_tokenizer(str(folder / "tokenizer.json"))
    return load_corpus(config["data"]).tokenizer if config["data"] else load_tokenizer(config["tokenizer"])


def bytes_per_token(tokenizer: tiktoken.Encoding) -> np.ndarray:
    """Length in bytes of every token id, [n_vocab] int64; special tokens stand for no text: 0."""
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    special = {tokenizer.encode_single_token(token) for token in tokenizer.special_tokens_set}
    for token in set(range(tokenizer.n_vocab)) - special:
        with contextlib.suppress(KeyError):  # some vocabularies have unused ids
            lengths[token] = len(tokenizer.decode_single_token_bytes(token))
    return lengths


# ---------------------------------------------------------------------------------------------
# Documents


def embedded_files() -> list[Path]:
    """Python files that every user of this project has: torch's and the standard library's."""
    torch_folder = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    library = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "idlelib"}
    of_library = (p for p in library.rglob("*.py") if not skip & set(p.relative_to(library).parts))
    return sorted(torch_folder.rglob("*.py")) + sorted(of_library)


def source_files(sources: list[str]) -> list[Path]:
    """The files named by --source, folders searched to the bottom; hidden files are left alone.

    Raises FileNotFoundError for a path that does not exist.
    """
    files: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = (p for p in sorted(source.rglob("*")) if p.is_file())
            files += [p for p in inside if not any(part.startswith(".") for part in p.relative_to(source).parts)]
        elif source.exists():
            files.append(source)
        else:
            raise FileNotFoundError(f"--source {source}: no such file or folder")
    if not files:
        raise ValueError(f"--source {' '.join(sources)}: there is no file in it")
    return files


def read_documents(files: list[Path], counts: Counter) -> Iterator[str]:
    """One document per text file. Empty and binary files are skipped, and counted in `counts`."""
    for file in tqdm(files, desc="encoding", unit=" files", leave=False, disable=None):  # None: only on a terminal
        raw = file.read_bytes()
        if b"\0" in raw[:8192]:  # git's test for "not text"
            counts["binary files skipped"] += 1
            continue
        text = raw.decode("utf-8", errors="replace")
        counts["files with invalid UTF-8"] += text.encode() != raw
        if text:
            yield text
        else:
            counts["empty files skipped"] += 1


# ---------------------------------------------------------------------------------------------
# Text to token files

HELD_OUT_BYTES = 32 * 1024  # what is kept of a held-out document, so that no one file rules the score


def is_held_out(text: str, val_fraction: float) -> bool:
    """Decided by the content alone: the same document always lands on the same side."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def prepare(documents: Iterable[str], tokenizer_name: str, out: Path, val_fraction: float = 0.02) -> dict:
    """Encode documents into the new folder `out` and return what its meta.json says.

    Every document is followed by end-of-text. The folder appears at the very end, by rename: it is
    there and whole, or it is not there.
    Raises FileExistsError if `out` exists, ValueError if there is too little text to train on and to
    hold out, or no such tokenizer.
    """
    if out.exists():
        raise FileExistsError(f"--out {out}: exists already, name another folder or remove it")
    tokenizer = load_tokenizer(tokenizer_name)
    dtype = np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32
    building = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        building.mkdir(parents=True)
    except OSError as error:
        raise OSError(f"--out {out}: cannot be made ({error.strerror})") from None
    try:
        n_documents = {"train": 0, "val": 0}
        with open(building / "train.bin", "wb") as train, open(building / "val.bin", "wb") as val:
            for text in documents:
                # (the first document is for training in any case: there is always something to read)
                split = "val" if n_documents["train"] and is_held_out(text, val_fraction) else "train"
                if split == "val":
                    text = text.encode()[:HELD_OUT_BYTES].decode(errors="ignore")
                ids = [*tokenizer.encode_ordinary(text), tokenizer.eot_token]
                (val if split == "val" else train).write(np.array(ids, dtype=dtype).tobytes())
                n_documents[split] += 1
        if n_documents["train"] and not n_documents["val"]:
            # Too few documents for the hash to divide them: the end of the text is held out instead.
            whole = np.memmap(building / "train.bin", dtype=dtype, mode="r")
            cut = int(len(whole) * (1 - val_fraction))
            whole[cut:].tofile(building / "val.bin")
            os.truncate(building / "train.bin", cut * dtype().itemsize)
        if not all((building / f"{split}.bin").stat().st_size for split in ("train", "val")):
            raise ValueError("--source: too little text to train on one part and hold out another")

        lengths = bytes_per_token(tokenizer)
        if Path(tokenizer_name).is_file():  # a corpus can be read without the file it was made with
            shutil.copy(tokenizer_name, building)
        meta = {"tokenizer": Path(tokenizer_name).name, "vocab_size": tokenizer.n_vocab, "dtype": np.dtype(dtype).name}
        fingerprint = hashlib.sha256(repr(sorted(meta.items())).encode())
        for split in ("train", "val"):
            ids = np.memmap(building / f"{split}.bin", dtype=dtype, mode="r")
            fingerprint.update(ids)
            meta[f"{split}_documents"] = n_documents[split]
            meta[f"{split}_tokens"] = len(ids)
            meta[f"{split}_bytes"] = int(np.bincount(ids, minlength=len(lengths)) @ lengths)
        meta["fingerprint"] = fingerprint.hexdigest()[:16]
        (building / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        os.rename(building, out)
        return meta
    finally:
        shutil.rmtree(building, ignore_errors=True)


# ---------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Corpus:
    path: Path
    meta: dict
    tokenizer: tiktoken.Encoding
    train: np.ndarray  # token ids on disk, [train_tokens]
    val: np.ndarray


def open_corpus(path: Path) -> Corpus:
    """Map a prepared folder into memory. Raises FileNotFoundError or ValueError if it is not one."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        dtype, parts = np.dtype(meta["dtype"]), []
        for split in ("train", "val"):
            file = path / f"{split}.bin"
            if file.stat().st_size != meta[f"{split}_tokens"] * dtype.itemsize:
                raise ValueError(f"--data {path}: {file.name} is not the file that meta.json describes, prepare it again")
            parts.append(np.memmap(file, dtype=dtype, mode="r"))
        own = path / meta["tokenizer"]
        return Corpus(path, meta, load_tokenizer(str(own) if own.is_file() else meta["tokenizer"]), *parts)
    except (FileNotFoundError, NotADirectoryError) as missing:
        raise FileNotFoundError(f"--data {path}: no prepared corpus there ({missing.filename} is missing), make one with data.py") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ValueError(f"--data {path}: meta.json is damaged, prepare it again") from None


def embedded_corpus(tokenizer: str = "bytes") -> Corpus:
    """The default corpus, prepared the first time. Its folder names the versions that its text has."""
    python, torch = platform.python_version(), importlib.metadata.version("torch")
    kind = tokenizer
    if Path(tokenizer).is_file():  # two files of one name are two tokenizers
        kind = f"{Path(tokenizer).stem}-{hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()[:8]}"
    path = Path(__file__).parent / "data" / f"python{python}-torch{torch}-{kind}".replace("/", "-")
    if not path.exists():
        print(f"preparing the embedded corpus, once: {path}")
        try:
            prepare(read_documents(embedded_files(), Counter()), tokenizer, path)
        except OSError:
            if not path.exists():  # else another process was faster, and made the same
                raise
    return open_corpus(path)


def load_corpus(path: str | None, tokenizer: str = "bytes") -> Corpus:
    """The prepared corpus in this folder; None is the embedded one, in this tokenizer's tokens."""
    return embedded_corpus(tokenizer) if path is None else open_corpus(Path(path))


# ---------------------------------------------------------------------------------------------
# The order in which a run reads


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers (the finalizer of SplitMix64): every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(g: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Which of a corpus's n sequences is number g (0, 1, 2, ...) of a run with this data seed.

    Each epoch g // n is a bijection of 0 ... n-1 of its own, computed and never stored: a Feistel
    network permutes a power of four >= n, and what falls outside n goes round again until it is
    inside (cycle walking). So there is no loader to save and restore, and any g can be asked for at any time.
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


def n_sequences(tokens: np.ndarray, seq_len: int) -> int:
    """Whole sequences in a token file; each needs one token more, as the last one's target."""
    return (len(tokens) - 1) // seq_len


def read_sequences(tokens: np.ndarray, index: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences number `index` [B] of a token file -> (inputs, targets), [B, seq_len] int64 each.

    Sequence i is tokens i * seq_len ... (i + 1) * seq_len, wherever documents begin and end: as in
    the paper's kind of pre-training, attention looks across document borders.
    """
    rows = tokens[np.asarray(index)[:, None] * seq_len + np.arange(seq_len + 1)].astype(np.int64)
    return rows[:, :-1], rows[:, 1:]


# ---------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="data.py", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--source", nargs="+", metavar="PATH", help="text files or folders (default: the embedded corpus)")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, a name known to tiktoken, or a .tiktoken or tokenizer.json file (default: bytes)")
    parser.add_argument("--out", type=Path, help="the corpus's folder, with --source")
    parser.add_argument("--val_fraction", type=float, help="share of the documents that is held out (default: 0.02)")
    args = parser.parse_args(argv)
    try:
        if not args.source:
            if args.out or args.val_fraction is not None:
                raise ValueError("--out and --val_fraction go with --source; the embedded corpus has a place and a share of its own")
            corpus = embedded_corpus(args.tokenizer)
            path, meta, counts = corpus.path, corpus.meta, Counter()
        else:
            if args.out is None:
                raise ValueError("--source needs --out, the folder that the corpus goes to")
            val_fraction = 0.02 if args.val_fraction is None else args.val_fraction
            if not 0 < val_fraction < 1:
                raise ValueError(f"--val_fraction {val_fraction}: must be between 0 and 1")
            path, counts = args.out, Counter()
            meta = prepare(read_documents(source_files(args.source), counts), args.tokenizer, path, val_fraction)
    except (ValueError, OSError) as mistake:
        print(f"data.py: {mistake}", file=sys.stderr)
        return 2
    for split in ("train", "val"):
        print(f"{split:<6}{meta[f'{split}_documents']:>8,} documents {meta[f'{split}_bytes']:>12,} bytes {meta[f'{split}_tokens']:>12,} tokens")
    for what, count in counts.items():
        if count:
            print(f"{count:,} {what}")
    print(f"corpus {path}, fingerprint {meta['fingerprint']}: train.py --data {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
