"""Text to tokens, and the order in which a run reads them.

A corpus is a folder: train.bin and val.bin (token ids, nothing else, read from the disk as they are
needed) and meta.json (tokenizer, counts, fingerprint). Without any download there is always one: the
Python source that came with torch and with Python itself.

Read `encode_block` and `prepare` for how text becomes tokens, then `shuffled` and `mixed` for the data
order, which every comparison of this project rests on: sequence number g of a run depends on the seed
and g alone, never on the batch size, the micro-batch or the number of processes.

    python data.py                                              prepares the embedded corpus
    python data.py --source ~/notes --out data/notes            prepares a corpus from text files
    python data.py --source 'web/*.jsonl.gz' --out data/web     from a document per line, .parquet, hf:NAME
"""

import argparse
import base64
import bz2
import contextlib
import glob
import gzip
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import logging
import lzma
import math
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import sysconfig
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
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
    return load_corpus(config["data"], config["tokenizer"]).tokenizer if config["data"] else load_tokenizer(config["tokenizer"])


def bytes_per_token(tokenizer: tiktoken.Encoding) -> np.ndarray:
    """Length in bytes of every token id, [n_vocab] int64; special tokens stand for no text: 0."""
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    special = {tokenizer.encode_single_token(token) for token in tokenizer.special_tokens_set}
    for token in set(range(tokenizer.n_vocab)) - special:
        with contextlib.suppress(KeyError):  # some vocabularies have unused ids
            lengths[token] = len(tokenizer.decode_single_token_bytes(token))
    return lengths


# ---------------------------------------------------------------------------------------------
# Sources to blocks of documents

BLOCK = 2**20  # bytes of input that a process encodes at a time, about
LONG = 2**22  # a text file above this is encoded in parts
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True)
class Block:
    """A stretch of the input. Taking it apart is left to the process that encodes it."""

    kind: str  # "texts", "paths" of text files, "lines" of JSON, or "part" of one text, as bytes
    records: list
    where: str = ""  # the file, for messages,
    line: int = 1  # and the number of the first record in it
    field: str = "text"  # of a line of JSON
    size: int = 0  # bytes on the disk, for the progress bar
    part: int = 0  # of a text: number of this part, is it the last, and the hash of the first one
    ends: bool = True
    digest: bytes | None = None


def embedded_files() -> list[Path]:
    """Python files that every user of this project has: torch's and the standard library's."""
    torch_folder = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    library = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "idlelib"}
    of_library = (p for p in library.rglob("*.py") if not skip & set(p.relative_to(library).parts))
    return sorted(torch_folder.rglob("*.py")) + sorted(of_library)


def source_files(sources: list[str]) -> list[Path | str]:
    """The files named by --source, in reading order; hf:NAME stays what it is.

    Folders are searched to the bottom; hidden files are left alone. A quoted pattern is expanded here.
    Raises FileNotFoundError for a path that does not exist.
    """
    files: list[Path | str] = []
    for source in sources:
        if source.startswith("hf:"):
            files.append(source)
        elif Path(source).is_dir():
            inside = (p for p in sorted(Path(source).rglob("*")) if p.is_file())
            files += [p for p in inside if not any(part.startswith(".") for part in p.relative_to(source).parts)]
        elif Path(source).exists():
            files.append(Path(source))
        elif found := sorted(glob.glob(source, recursive=True)):
            files += [Path(p) for p in found if Path(p).is_file()]
        else:
            raise FileNotFoundError(f"--source {source}: no such file or folder")
    if not files:
        raise ValueError(f"--source {' '.join(sources)}: there is no file in it")
    return files


def read_blocks(files: list[Path | str], field: str = "text") -> Iterator[Block]:
    """All of these files in order, each by what its name says.

    .jsonl: a document per line; .parquet and hf:NAME: one per row; `field` is where its text is.
    Anything else is a text file, one document. Raises ValueError for a damaged file, or where an
    optional library is missing.
    """
    small, size = [], 0  # text files that wait for company
    for file in [*files, None]:
        is_small = isinstance(file, Path) and layout(file) == "text" and file.suffix not in COMPRESSED and file.stat().st_size <= LONG
        if small and (not is_small or size >= BLOCK or len(small) == 256):
            yield Block("paths", small, size=size)
            small, size = [], 0
        if is_small:
            small, size = [*small, file], size + file.stat().st_size
        elif file is not None:
            read = {"text": read_text, "lines": read_lines, "rows": read_rows}[layout(file)]
            try:
                yield from read(file, field)
            except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:  # ours, or a damaged file's
                raise ValueError(f"--source {file}: {' '.join(str(error).split())}") from None


def layout(file: Path | str) -> str:
    """How documents lie in a file: "text" (all of it is one), "lines" of JSON, or "rows" of a table."""
    if isinstance(file, str):
        return "rows"
    compressed = file.suffix in COMPRESSED
    suffix = Path(file.stem).suffix if compressed else file.suffix
    if suffix in (".jsonl", ".ndjson") or (compressed and suffix == ".json"):  # big corpora call such lines .json.gz
        return "lines"
    return "rows" if suffix == ".parquet" else "text"


@contextlib.contextmanager
def opened(file: Path):
    """Yields a file's decompressed bytes, and a function: how many more bytes on the disk has that taken?"""
    with open(file, "rb") as raw:
        if file.suffix in COMPRESSED and not file.stat().st_size:
            raise EOFError("it is empty, not even an archive")
        match file.suffix:
            case ".gz":
                stream = gzip.open(raw)
            case ".bz2":
                stream = bz2.open(raw)
            case ".xz":
                stream = lzma.open(raw)
            case ".zst":
                stream = io.BufferedReader(optional("pyarrow").CompressedInputStream(raw, "zstd"))
            case _:
                stream = raw
        positions = [0]

        def advance() -> int:
            positions.append(raw.tell())
            return positions[-1] - positions[-2]

        yield stream, advance


def optional(library: str):
    """Import a library that only some formats need; raises ValueError where it is missing."""
    try:
        return importlib.import_module(library)
    except ImportError:
        raise ValueError("reading it takes a library that is not installed: pip install datasets") from None


def read_lines(file: Path, field: str) -> Iterator[Block]:
    with opened(file) as (stream, advance):
        number = 1
        while lines := stream.readlines(BLOCK):
            yield Block("lines", lines, str(file), number, field, advance())
            number += len(lines)


def read_rows(file: Path | str, field: str) -> Iterator[Block]:
    """The text column of a Parquet file, or of a data set on the hub (hf:NAME or hf:NAME:CONFIG)."""
    if isinstance(file, str):
        name, _, config = file.removeprefix("hf:").partition(":")
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every retry
        rows = optional("datasets").load_dataset(name, config or None, split="train", streaming=True)
        texts, total, columns = (row.get(field) for row in rows), 0, rows.column_names or [field]
    else:
        table, total = optional("pyarrow.parquet").ParquetFile(file), file.stat().st_size
        columns = table.schema_arrow.names
        texts = (text for batch in table.iter_batches(256, columns=[field]) for text in batch.column(0).to_pylist())
    if field not in columns:
        raise ValueError(f"no column {field!r}, but {', '.join(columns)}; name one with --text_field")
    block, length, first = [], 0, 1
    for text in texts:
        block.append(text)
        length += len(text) if isinstance(text, str) else 1
        if length >= BLOCK:
            yield Block("texts", block, str(file), first)
            block, length, first = [], 0, first + len(block)
    yield Block("texts", block, str(file), first, size=total)


def read_text(file: Path, _field: str) -> Iterator[Block]:
    """One text of any length, in parts that give the same tokens as the whole."""
    with opened(file) as (stream, advance):
        rest, part, digest = b"", 0, None
        while chunk := stream.read(LONG):
            rest += chunk
            if part == 0 and is_binary(rest):
                break
            if len(rest) > LONG and (cut := word_end(rest)):
                digest = digest or hashlib.sha256(rest[:cut].decode(errors="replace").encode()).digest()
                yield Block("part", [rest[:cut]], str(file), size=advance(), part=part, ends=False, digest=digest)
                rest, part = rest[cut:], part + 1
        yield Block("part", [rest], str(file), size=advance(), part=part, digest=digest)


def is_binary(raw: bytes) -> bool:
    return b"\0" in raw[:8192]  # git's test


def word_end(raw: bytes) -> int:
    """The last place to cut a text: behind a letter, before a space and a letter; 0 if there is none.

    However a byte-level tokenizer takes text apart, a word ends there and the next one begins with
    its space. No such place lies within a character of UTF-8.
    """
    at = raw.rfind(b" ", 1, -1)
    while at > 0 and not (raw[at - 1 : at].isalpha() and raw[at + 1 : at + 2].isalpha()):
        at = raw.rfind(b" ", 1, at)
    return max(at, 0)


# ---------------------------------------------------------------------------------------------
# Blocks to tokens, in a process of its own or in this one

HELD_OUT_BYTES = 32 * 1024  # what is kept of a held-out document, so that no one file rules the score


def is_held_out(digest: bytes, val_fraction: float) -> bool:
    """Decided by the content alone: the same document always lands on the same side."""
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def texts_of(block: Block, note) -> Iterator[str]:
    """The documents of a block; note(what, record, times=1) is told of all that is not as it should be.

    Raises ValueError where the beginning of a file shows that it is not what its name says.
    """
    good, complaint = 0, None
    for i, text in enumerate(block.records):
        if block.kind == "paths":
            text = text.read_bytes()
        if isinstance(text, bytes):
            raw = text
            if block.kind != "lines" and block.part == 0 and is_binary(raw):
                note("binary files skipped", i)
                continue
            text = raw.decode(errors="replace")
            if "\ufffd" in text and (times := text.count("\ufffd") - raw.count("\ufffd".encode())):
                note("sequences of invalid UTF-8 replaced", i, times)
        if block.kind == "lines":
            if not text.strip():
                continue
            try:
                row = json.loads(text.removeprefix("\ufeff"))
            except (ValueError, RecursionError) as error:
                complaint = complaint or f"line {block.line + i} is not JSON ({error})"
                note("lines that are not JSON skipped", i)
                continue
            row = row if isinstance(row, dict) else {}
            text = row.get(block.field)
            if not isinstance(text, str):
                complaint = complaint or f"line {block.line + i} has no text in {block.field!r}, but {', '.join(row) or 'nothing'}; see --text_field"
        if not isinstance(text, str):
            note("documents without a text skipped", i)
            continue
        good += 1
        if not text:
            note("empty documents skipped", i)
            continue
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can write half of a surrogate pair
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            note("sequences of invalid UTF-8 replaced", i)
        yield text
    if complaint and block.line == 1 and not good:
        raise ValueError(f"--source {block.where}: {complaint}")


def encode_block(number: int, block: Block, tokenizer: tiktoken.Encoding, val_fraction: float) -> dict:
    """Block number 0, 1, 2, ... -> what goes to train.bin and val.bin, and what there is to report."""
    dtype = token_type(tokenizer)
    end_of_text = np.array([tokenizer.eot_token], dtype).tobytes()
    tokens, documents, notes = {"train": [], "val": []}, {"train": 0, "val": 0}, {}

    def note(what: str, record: int, times: int = 1) -> None:
        where = block.records[record] if block.kind == "paths" else f"{block.where}:{block.line + record}"
        before, first = notes.get(what, (0, str(where)))
        notes[what] = (before + times, first)

    for text in texts_of(block, note):
        raw = text.encode()
        # (the first document is for training in any case: there is always something to read)
        first = number == block.part and not documents["train"]
        split = "val" if not first and is_held_out(block.digest or hashlib.sha256(raw).digest(), val_fraction) else "train"
        documents[split] += block.part == 0
        ends = block.ends
        if split == "val":
            if block.part > 0:
                continue
            text, ends = raw[:HELD_OUT_BYTES].decode(errors="ignore"), True
        ids = tokenizer.encode_to_numpy(text, disallowed_special=())  # as encode_ordinary, without a list of int
        tokens[split] += [ids.astype(dtype).tobytes(), end_of_text if ends else b""]
    return {"train": b"".join(tokens["train"]), "val": b"".join(tokens["val"]), "documents": documents, "notes": notes}


def token_type(tokenizer: tiktoken.Encoding) -> type:
    return np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32


def start_worker(*settings) -> None:
    """Load the tokenizer, once per process; and end with the parent process, even if it is killed."""
    global worker
    tokenizer_name, val_fraction = settings
    worker = load_tokenizer(tokenizer_name), val_fraction
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def work(number: int, block: Block) -> dict:
    return encode_block(number, block, *worker)


def encode_blocks(blocks: Iterator[tuple[int, Block]], tokenizer_name: str, val_fraction: float, workers: int) -> Iterator[tuple[Block, dict]]:
    """encode_block for all of them, in order, by so many processes; 0: in this one.

    Two blocks per process are under way, and no more: that is all that it takes of memory.
    """
    if not workers:
        tokenizer = load_tokenizer(tokenizer_name)
        yield from ((block, encode_block(number, block, tokenizer, val_fraction)) for number, block in blocks)
        return
    pool = ProcessPoolExecutor(workers, initializer=start_worker, initargs=(tokenizer_name, val_fraction))
    try:
        waiting = deque()
        for number, block in blocks:
            waiting.append((block, pool.submit(work, number, block)))
            if len(waiting) > 2 * workers:
                block, future = waiting.popleft()
                yield block, future.result()
        for block, future in waiting:
            yield block, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------------
# Tokens to a corpus

SAVE_EVERY = 5.0  # seconds between two notes of how far a preparation has come


def prepare(
    documents: Iterable[str] | Iterable[Block], tokenizer_name: str, out: Path, val_fraction: float = 0.02, workers: int = 0, identity=None, size=None
) -> dict:
    """Encode documents into the new folder `out`; returns what its meta.json says, with "notes" and "seconds".

    Every document is followed by end-of-text. The folder appears at the very end, by rename: it is
    there and whole, or it is not there.
    workers: processes to encode with, 0 for this one alone. size: bytes of input, for the progress bar.
    identity: a list that is the same if and only if the input is. With it, a preparation that was
    interrupted, even by SIGKILL, goes on behind the blocks that are done, and ends with the same bytes.
    Raises FileExistsError if `out` exists, ValueError if there is too little text to train on and to
    hold out, or no such tokenizer.
    """
    tokenizer, file = load_tokenizer(tokenizer_name), Path(tokenizer_name)
    if out.exists():
        raise FileExistsError(f"--out {out}: exists already, name another folder or remove it")
    building = out.with_name(f".{out.name}.{'partial' if identity else os.getpid()}")
    try:
        building.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {out}: cannot be made ({error.strerror})") from None
    with locked(building):
        try:
            key = repr((identity, val_fraction, tokenizer_name, file.is_file() and file.read_bytes()))
            blocks = (d if isinstance(d, Block) else Block("texts", [d]) for d in documents)
            encoded = lambda done: encode_blocks(itertools.islice(enumerate(blocks), done, None), tokenizer_name, val_fraction, workers)
            done = write_tokens(building, hashlib.sha256(key.encode()).hexdigest(), encoded, size)
            if not done["val"]:  # too few documents for the hash to divide them
                hold_out_the_end(building, done, val_fraction, token_type(tokenizer)().itemsize)
            if not (done["train"] and done["val"]):
                raise ValueError("; ".join(["--source: too little text to train on one part and hold out another", *report(done["notes"])]))
            if file.is_file():  # a corpus can be read without the file it was made with
                shutil.copy(file, building)
            meta = {"tokenizer": file.name, "vocab_size": tokenizer.n_vocab, "dtype": token_type(tokenizer).__name__}
            meta |= count(building, tokenizer, done["documents"], hashlib.sha256(repr(sorted(meta.items())).encode()))
            (building / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
            (building / "progress.json").unlink()
            os.rename(building, out)
            return meta | {"notes": done["notes"], "seconds": done["seconds"]}
        except BaseException as error:
            if not identity or isinstance(error, ValueError):  # else the next one goes on with it
                shutil.rmtree(building, ignore_errors=True)
            raise


@contextlib.contextmanager
def locked(folder: Path):
    """Keep other processes out of a folder. Raises OSError if there is one."""
    try:
        import fcntl
    except ImportError:  # Windows: there, nobody guards the folder
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise OSError(f"{folder}: another process is at work there") from None
    try:
        yield
    finally:
        os.close(held)


def write_tokens(folder: Path, key: str, encoded, size: int | None) -> dict:
    """Write the blocks of encoded(number of blocks done already) to train.bin and val.bin.

    Every few seconds progress.json notes how far that has come: it holds the lengths of both files, so that
    what was written after the last note can be cut off, and written again. Returns the last note.
    """
    done = {"key": key, "blocks": 0, "train": 0, "val": 0, "documents": {"train": 0, "val": 0}, "notes": {}, "size": 0, "seconds": 0.0}
    with contextlib.suppress(FileNotFoundError):
        earlier = json.loads((folder / "progress.json").read_text())
        done = earlier if earlier["key"] == key else done  # with another input, from the start
    saved_at = time.perf_counter()
    with open(folder / "train.bin", "ab") as train, open(folder / "val.bin", "ab") as val:
        train.truncate(done["train"])
        val.truncate(done["val"])
        bar = tqdm(desc="encoding", total=size, initial=done["size"], unit="B", unit_scale=True, leave=False, disable=None)  # None: only on a terminal
        for block, result in itertools.chain(encoded(done["blocks"]), [(None, None)]):
            if block:
                for split, file in (("train", train), ("val", val)):
                    file.write(result[split])
                    done[split] += len(result[split])
                    done["documents"][split] += result["documents"][split]
                for what, (times, first) in result["notes"].items():
                    before, first = done["notes"].get(what, (0, first))
                    done["notes"][what] = (before + times, first)
                done["blocks"] += 1
                done["size"] += block.size
                bar.update(block.size)
            if not block or time.perf_counter() - saved_at > SAVE_EVERY:
                train.flush()
                val.flush()
                now = time.perf_counter()
                done["seconds"], saved_at = done["seconds"] + now - saved_at, now
                save_progress(folder, done)
        bar.close()
    return done


def save_progress(folder: Path, done: dict) -> None:
    for split in ("train", "val"):  # on the disk before the note that counts on it
        with open(folder / f"{split}.bin", "rb") as file:
            os.fsync(file.fileno())
    (folder / "progress.tmp").write_text(json.dumps(done))
    os.replace(folder / "progress.tmp", folder / "progress.json")


def hold_out_the_end(folder: Path, done: dict, val_fraction: float, width: int) -> None:
    """Move the last tokens, of `width` bytes each, from train.bin to val.bin."""
    cut = int(done["train"] // width * (1 - val_fraction)) * width
    with open(folder / "train.bin", "rb") as train, open(folder / "val.bin", "wb") as val:
        train.seek(cut)
        shutil.copyfileobj(train, val)
    done |= {"train": cut, "val": done["train"] - cut}
    save_progress(folder, done)
    os.truncate(folder / "train.bin", cut)


def count(folder: Path, tokenizer: tiktoken.Encoding, documents: dict[str, int], fingerprint) -> dict:
    """Documents, tokens and bytes of text in both files, and the hash of it all, for meta.json."""
    lengths, meta = bytes_per_token(tokenizer), {}
    for split in ("train", "val"):
        n_tokens = n_bytes = 0
        with open(folder / f"{split}.bin", "rb") as file:
            while chunk := file.read(2**22):
                fingerprint.update(chunk)
                ids = np.frombuffer(chunk, token_type(tokenizer))
                n_tokens += len(ids)
                n_bytes += int(np.bincount(ids, minlength=len(lengths)) @ lengths)
        meta |= {f"{split}_documents": documents[split], f"{split}_tokens": n_tokens, f"{split}_bytes": n_bytes}
    return meta | {"fingerprint": fingerprint.hexdigest()[:16]}


def report(notes: dict[str, tuple[int, str]]) -> list[str]:
    return [f"{times:,} {what} (the first: {first})" for what, (times, first) in notes.items()]


# ---------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Corpus:
    path: Path
    meta: dict
    tokenizer: tiktoken.Encoding
    train: np.ndarray  # token ids on disk, [train_tokens]
    val: np.ndarray

    @property
    def sources(self) -> dict[str, "Corpus"]:  # a corpus is a mixture of one
        return {self.path.name: self}

    stages = ((0, (1.0,)),)


@dataclass(frozen=True)
class Mixture:
    """Several corpora, and each one's share of the sequences from certain sequences on."""

    path: str  # as --data names it
    meta: dict  # tokenizer, vocab_size and fingerprint
    tokenizer: tiktoken.Encoding
    sources: dict[str, Corpus]  # by the last part of their path
    shares: tuple[float, ...]  # of each source in --data: the weights of the held-out loss
    stages: tuple[tuple[int, tuple[float, ...]], ...]  # first sequence, share of each source; further shares are of past sources


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
            prepare(read_blocks(embedded_files()), tokenizer, path)
        except OSError:
            if not path.exists():  # else another process was faster, and made the same
                raise
    return open_corpus(path)


def parse_mixture(text: str, flag: str = "--data") -> dict[str, float]:
    """'web:0.8,code:0.2' -> {'/home/me/web': 0.8, '/home/me/code': 0.2}; a folder alone has it all.

    Raises ValueError where a weight is missing, or they do not add up to 1.
    """
    weights = {}
    for part in text.split(","):
        folder, _, weight = part.rpartition(":")
        try:
            weight = float(weight)
        except ValueError:
            folder, weight = part, 1.0 if "," not in text else math.nan
        if not folder or not 0 <= weight <= 1:
            raise ValueError(f"{flag} {text}: {part!r} must be a folder and its share, as in web:0.8,code:0.2")
        folder = folder if folder == "embedded" else os.path.abspath(folder)
        if Path(folder).name in {Path(other).name for other in weights}:
            raise ValueError(f"{flag} {text}: two sources have the name {Path(folder).name}")
        weights[folder] = weight
    if abs(sum(weights.values()) - 1) > 1e-6:
        raise ValueError(f"{flag} {text}: the weights are shares, they must add up to 1 and not to {sum(weights.values()):g}")
    return weights


def format_mixture(weights: dict[str, float]) -> str:
    """The text that parse_mixture reads."""
    return ",".join(f"{folder}:{weight}" for folder, weight in weights.items()) if len(weights) > 1 else next(iter(weights))


def load_corpus(data: str | None, tokenizer: str = "bytes", stages: list[tuple[int, str | None]] | None = None) -> Corpus | Mixture:
    """The corpus in this folder, or the mixture that a text like 'web:0.8,code:0.2' describes.

    None or 'embedded' is the embedded corpus, in this tokenizer's tokens.
    stages: (first sequence, mixture), ... where what is read changes in the course of a run: what its
    parents read, `data`, then what the decay reads.
    Raises ValueError or OSError where there is no such corpus, or corpora do not fit together.
    """
    stages = [(first, parse_mixture(text or "embedded")) for first, text in stages or [(0, data)]]
    shares = parse_mixture(data or "embedded")
    now = max(i for i, (_, weights) in enumerate(stages) if weights == shares)  # before that, a source is only counted
    folders = list(dict.fromkeys(folder for _, weights in [(0, shares), *stages[now:]] for folder in weights))
    corpora = {Path(folder).name: embedded_corpus(tokenizer) if folder == "embedded" else open_corpus(Path(folder)) for folder in folders}
    if len(corpora) < len(folders):
        raise ValueError(f"--decay_data: two sources have the same name among {', '.join(folders)}")
    first, *others = corpora.values()
    if not others and len(stages) == 1:
        return first
    for other in others:
        if not np.array_equal(bytes_per_token(first.tokenizer), bytes_per_token(other.tokenizer)):
            raise ValueError(f"--data {other.path}: has the tokenizer {other.meta['tokenizer']}, but {first.path} has {first.meta['tokenizer']}")
    known = dict.fromkeys(folders + [folder for _, weights in stages for folder in weights])
    stages = tuple((start, tuple(weights.get(folder, 0.0) for folder in known)) for start, weights in stages)
    content = [(corpora[name].meta["fingerprint"], *(share[j] for _, share in stages[now:])) for j, name in enumerate(corpora)]
    fingerprint = first.meta["fingerprint"] if not others else hashlib.sha256(repr(content).encode()).hexdigest()[:16]
    meta = first.meta | {"fingerprint": fingerprint}
    return Mixture(data or "embedded", meta, first.tokenizer, corpora, tuple(shares.get(folder, 0.0) for folder in folders), stages)


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


def mixed(g: np.ndarray, shares: tuple[float, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences number g [B] of a mixture -> (the source of each [B], how many came before it from each source [B, n]).

    The smallest source takes one sequence out of every 1 / share, at a random place among these, so
    that it has no favourite place in a batch. The sequences that it leaves are numbered anew, and the
    next larger source does the same with them. So all of this follows from g and the seed alone, and after any number of sequences each source has had its share, give or take two.
    """
    rest = np.array(g, dtype=np.int64)
    source, before = np.full(rest.shape, -1), np.zeros((len(rest), len(shares)), dtype=np.int64)
    order = sorted((share, j) for j, share in enumerate(shares) if share > 0)
    for i, (share, j) in enumerate(order):
        share /= sum(other for other, _ in order[i:])  # of what the smaller ones have left
        if share == 1:  # the last one takes the rest
            before[:, j] = rest
            source[source < 0] = j
            break
        turn = np.floor(rest * share).astype(np.int64)  # the turn of this source that each one falls in
        begin, end = first_of_turn(turn, share), first_of_turn(turn + 1, share)
        key = mix(mix(np.full(rest.shape, seed, dtype=np.uint64)) + np.uint64(j)) + turn.astype(np.uint64)
        chosen = begin + (mix(key) % (end - begin).astype(np.uint64)).astype(np.int64)
        before[:, j] = turn + (chosen < rest)
        source[(source < 0) & (chosen == rest)] = j
        rest -= before[:, j]
    return source, before


def first_of_turn(turn: np.ndarray, share: float) -> np.ndarray:
    """The smallest whole n with floor(n * share) >= turn, without an error from rounding."""
    n = np.ceil(turn / share).astype(np.int64)
    n -= np.floor((n - 1) * share) >= turn
    return n + (np.floor(n * share) < turn)


def sequences_read(stages, n: int, seed: int) -> np.ndarray:
    """How many of a run's first n sequences came from each source, [sources]."""
    ends = [start for start, _ in stages[1:]] + [n]
    return sum(mixed(np.array([max(0, min(end, n) - start)]), shares, seed)[1][0] for (start, shares), end in zip(stages, ends))


def epochs(corpus: Corpus | Mixture, n: int, seq_len: int, seed: int) -> dict[str, float]:
    """How often a run's first n sequences have gone through each source."""
    read = sequences_read(corpus.stages, n, seed)
    return {name: float(count / n_sequences(source.train, seq_len)) for count, (name, source) in zip(read, corpus.sources.items())}


def draw(corpus: Corpus | Mixture, g: np.ndarray, seq_len: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training sequences number g [B] of a run -> (inputs, targets), [B, seq_len] int64 each.

    Each source is read in its own shuffled order, by its own count. Where the shares change, at the
    next stage, the counts go on.
    """
    g = np.asarray(g)
    stage = np.searchsorted([start for start, _ in corpus.stages], g, side="right") - 1
    inputs, targets = np.empty((2, len(g), seq_len), dtype=np.int64)
    for s in set(stage.tolist()):
        start, shares = corpus.stages[s]
        here = np.flatnonzero(stage == s)
        source, before = mixed(g[here] - start, shares, seed)
        before += sequences_read(corpus.stages[:s], start, seed)
        for j in set(source.tolist()):
            tokens = list(corpus.sources.values())[j].train
            mine = source == j
            index = shuffled(before[mine, j], n_sequences(tokens, seq_len), seed)
            inputs[here[mine]], targets[here[mine]] = read_sequences(tokens, index, seq_len)
    return inputs, targets


def n_sequences(tokens: np.ndarray, seq_len: int) -> int:
    """Whole sequences in a token file; each needs one token more, as the last one's target."""
    return (len(tokens) - 1) // seq_len


def read_sequences(tokens: np.ndarray, index: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences number `index` [B] of a token file -> (inputs, targets), [B, seq_len] int64 each.

    Sequence i is tokens i * seq_len ... (i + 1) * seq_len, wherever documents begin and end: as in
    the paper's kind of pre-training, attention looks across document borders.
    """
    rows, width = np.empty((len(index), seq_len + 1), dtype=np.int64), tokens.itemsize
    if isinstance(tokens, np.memmap) and hasattr(os, "pread"):
        with open(tokens.filename, "rb", buffering=0) as file:
            for row, i in zip(rows, index.tolist()):
                row[:] = np.frombuffer(os.pread(file.fileno(), (seq_len + 1) * width, i * seq_len * width), tokens.dtype)
    else:
        for row, i in zip(rows, index.tolist()):
            row[:] = tokens[i * seq_len : (i + 1) * seq_len + 1]
    return rows[:, :-1], rows[:, 1:]


# ---------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="data.py", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--source", nargs="+", metavar="PATH", help="files, folders, quoted patterns or hf:NAME (default: the embedded corpus)")
    parser.add_argument("--text_field", default="text", help="where the text of a .jsonl line or a table's row is (default: text)")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, a name known to tiktoken, or a .tiktoken or tokenizer.json file (default: bytes)")
    parser.add_argument("--out", type=Path, help="the corpus's folder, with --source")
    parser.add_argument("--val_fraction", type=float, help="share of the documents that is held out (default: 0.02)")
    args = parser.parse_args(argv)
    try:
        if not args.source:
            if args.out or args.val_fraction is not None or args.text_field != "text":
                raise ValueError("--out, --val_fraction and --text_field go with --source; the embedded corpus has a place and a share of its own")
            corpus = embedded_corpus(args.tokenizer)
            path, meta = corpus.path, corpus.meta
        else:
            if args.out is None:
                raise ValueError("--source needs --out, the folder that the corpus goes to")
            val_fraction = 0.02 if args.val_fraction is None else args.val_fraction
            if not 0 < val_fraction < 1:
                raise ValueError(f"--val_fraction {val_fraction}: must be between 0 and 1")
            path, files = args.out, source_files(args.source)
            known = [(f.stat().st_size, f.stat().st_mtime_ns) if isinstance(f, Path) else None for f in files]
            size = sum(k[0] for k in known) if all(known) else None
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            workers = 0 if size is not None and size < 8 * BLOCK else cores  # starting them takes a second
            identity = [*zip(map(str, files), known), args.text_field]
            meta = prepare(read_blocks(files, args.text_field), args.tokenizer, path, val_fraction, workers, identity, size)
    except (ValueError, OSError) as mistake:
        print(f"data.py: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("data.py: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    for split in ("train", "val"):
        n_bytes, n_tokens = meta[f"{split}_bytes"], meta[f"{split}_tokens"]
        print(f"{split:<6}{meta[f'{split}_documents']:>10,} documents {n_bytes:>16,} bytes {n_tokens:>16,} tokens {n_bytes / n_tokens:6.2f} bytes per token")
    print(*report(meta.get("notes", {})), sep="\n", end="\n" * bool(meta.get("notes")))
    took = f" in {meta['seconds']:,.1f} s" if "seconds" in meta else ""
    print(f"corpus {path}{took}, fingerprint {meta['fingerprint']}: train.py --data {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
