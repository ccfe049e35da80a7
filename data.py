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
import re
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

    Raises ValueError where there is no such tokenizer.
    """
    if name == "bytes":
        # Ids are the bytes themselves. 255 never occurs in UTF-8, so it can be end-of-text.
        return tiktoken.Encoding(
            "bytes", explicit_n_vocab=256, pat_str=r"[\s\S]",
            mergeable_ranks={bytes([i]): i for i in range(255)}, special_tokens={"<|endoftext|>": 255},
        )  # fmt: skip
    try:
        if file := tokenizer_file(name):
            return read_tokenizer_json(file) if file.suffix == ".json" else read_tiktoken_file(file)
        if name in tiktoken.list_encoding_names():
            return tiktoken.get_encoding(name)
    except OSError as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read, or not be downloaded by tiktoken ({error})"
        raise ValueError(f"--tokenizer {name}: {problem}") from None
    except ValueError as error:
        raise ValueError(f"--tokenizer {name}: {error}") from None
    known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
    raise ValueError(f"--tokenizer {name}: not one of {known}, nor a path to a .tiktoken or tokenizer.json file")


def tokenizer_file(name: str) -> Path | None:
    """The path, if a tokenizer's name is one."""
    return Path(name) if name.endswith((".tiktoken", ".json")) else None


def read_tiktoken_file(path: Path) -> tiktoken.Encoding:
    """A line is a token in base64 and its rank, which is also its id. Raises ValueError for anything else.

    The file does not say how text is cut into words before: as GPT-2 does it. (For cl100k_base and
    o200k_base, which do it in their own ways, give tiktoken's name and not the file.)
    """
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError:
        raise ValueError("not a .tiktoken file, a line of it is not a token and its rank") from None
    if not all(bytes([i]) in ranks for i in range(256)) or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("not a byte-level vocabulary: all 256 bytes, and ranks 0, 1, 2, ... without gap or repetition")
    special = {"<|endoftext|>": len(ranks)}
    return tiktoken.Encoding(path.stem, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a tokenizer.json: itself if it can be seen, else one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def read_tokenizer_json(path: Path) -> tiktoken.Encoding:
    """A byte-level BPE of Hugging Face's format, with the same ids. Raises ValueError for other kinds.

    tiktoken merges in the order of the ids, so the ids have to follow the order of the merges.
    """
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
        model, cutting = spec["model"], spec["pre_tokenizer"]
        plain = model["type"] == "BPE" and not spec["normalizer"] and not model.get("byte_fallback")
        match cutting["pretokenizers"] if cutting["type"] == "Sequence" else [cutting]:
            case [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                  {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]:  # fmt: skip
                pass
            case [{"type": "ByteLevel", "add_prefix_space": False, **how}] if how.get("use_regex", True):
                pattern = GPT2_PATTERN
            case [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False, **how}] if how.get("use_regex", True):
                pattern = STARCODER_PATTERN
            case _:
                pattern = None
        vocab, special = model["vocab"], {token["content"]: token["id"] for token in spec["added_tokens"]}
        merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]  # older files: "a b"
        merged = list(dict.fromkeys(vocab[a + b] for a, b in merges))  # two merges may make the same token
        bytes_of = {letter: byte for byte, letter in byte_letters().items()}
        tokens = [letter for letter in bytes_of if letter in vocab] + [a + b for a, b in merges]
        ranks = {bytes(bytes_of[letter] for letter in token): vocab[token] for token in tokens}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not the tokenizer.json of a byte-level BPE ({type(error).__name__}: {error})") from None
    in_utf8 = [b for b in range(0xF5) if b not in (0xC0, 0xC1)]
    end_of_text = next((special[name] for name in END_OF_TEXT if name in special), None)
    for holds, problem in (
        (plain, "not a byte-level BPE"),
        (pattern, "its pre-tokenizer is neither GPT-2's nor StarCoder's nor one pattern"),
        (merged == sorted(merged), "its ids do not follow the order of its merges"),
        (all(bytes([b]) in ranks for b in in_utf8), "not a byte-level vocabulary, some of the 256 bytes are missing"),
        (end_of_text is not None, f"has no end-of-text, none of {', '.join(END_OF_TEXT)}"),
    ):
        if not holds:
            raise ValueError(problem)
    return tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special | {END_OF_TEXT[0]: end_of_text})


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


def run_of(checkpoint: Path) -> Path:
    """The run's folder that a checkpoint is in, at the top or under ckpt/."""
    return checkpoint.parent if (checkpoint.parent / "config.json").exists() else checkpoint.parent.parent


def tokenizer_of(path: Path) -> tiktoken.Encoding:
    """The tokenizer of a run's folder (or a checkpoint in it) or of a Granite folder.

    Raises FileNotFoundError or ValueError where it has none.
    """
    folder = path if path.is_dir() else run_of(path)
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


@dataclass(frozen=True)
class Block:
    """A stretch of the input. Taking it apart is left to the process that encodes it."""

    records: list  # text files as Path, a table's rows as str, one part of a long text as bytes, or many lines of JSON as one bytes
    where: str = ""  # the file, for messages,
    line: int = 1  # and the number of the first record in it
    field: str | None = None  # where the text of a line of JSON is; None: the records are no JSON
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

    Folders are searched to the bottom; hidden files and links to folders are left alone. A quoted
    pattern is expanded here. Raises FileNotFoundError for a path that does not exist, ValueError if there is no file.
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
    Anything else is a text file, one document. Raises ValueError for a damaged file, OSError where
    an optional library is missing or the hub cannot be reached.
    """
    small, size = [], 0  # text files that wait for company
    for file in [*files, None]:
        is_small = isinstance(file, Path) and reader_of(file) is read_text and file.suffix not in UNPACK and file.stat().st_size <= LONG
        if small and (not is_small or size >= BLOCK or len(small) == 256):
            yield Block(small, size=size)
            small, size = [], 0
        if is_small:
            small, size = [*small, file], size + file.stat().st_size
        elif file is not None:
            try:
                yield from reader_of(file)(file, field)
            except ImportError as error:  # an OSError, and no ValueError: when it is installed, the same command goes on
                raise OSError(f"--source {file}: {error}: pip install datasets") from None
            except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:  # ours, or a damaged file's
                may_pass = isinstance(file, str) and isinstance(error, OSError)  # the hub may be there again later
                raise (OSError if may_pass else ValueError)(f"--source {file}: {' '.join(str(error).split())}") from None


def reader_of(file: Path | str):
    """The function that reads files of this name."""
    if isinstance(file, str):
        return read_rows
    suffix = Path(file.stem).suffix if file.suffix in UNPACK else file.suffix
    if suffix == ".json" and file.suffix in UNPACK:  # what big corpora call .json.gz has a document per line
        return read_lines
    return {".jsonl": read_lines, ".ndjson": read_lines, ".parquet": read_rows}.get(suffix, read_text)


def unzstd(raw):
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))


UNPACK = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": unzstd}


def chunks(file: Path, read) -> Iterator[tuple]:
    """read(stream) of a file's unpacked bytes, again and again -> (what it returned, how many more bytes on the disk that took)."""
    with open(file, "rb") as raw:
        if file.suffix in UNPACK and not file.stat().st_size:
            raise EOFError("it is empty, not even an archive")
        stream, at = UNPACK.get(file.suffix, lambda raw: raw)(raw), 0
        while chunk := read(stream):
            yield chunk, raw.tell() - at
            at = raw.tell()


def read_lines(file: Path, field: str) -> Iterator[Block]:
    number = 1
    for lines, size in chunks(file, lambda stream: stream.read(BLOCK) + stream.readline()):
        yield Block([lines], str(file), number, field, size)
        number += lines.count(b"\n")


def read_rows(file: Path | str, field: str) -> Iterator[Block]:
    """The text column of a Parquet file, or of a data set on the hub (hf:NAME or hf:NAME:CONFIG)."""
    if isinstance(file, str):
        import datasets

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every retry
        name, _, config = file.removeprefix("hf:").partition(":")
        rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
        texts, columns, bytes_per_row = (row.get(field) for row in rows), rows.column_names or [field], 0
    else:
        import pyarrow.parquet

        table = pyarrow.parquet.ParquetFile(file)
        texts = (text for batch in table.iter_batches(256, columns=[field]) for text in batch.column(0).to_pylist())
        columns, bytes_per_row = table.schema_arrow.names, file.stat().st_size / max(1, table.metadata.num_rows)
    if field not in columns:
        raise ValueError(f"no column {field!r}, but {', '.join(columns)}; name one with --text_field")
    block, length, first = [], 0, 1
    for text in texts:
        block.append(text)
        length += len(text) if isinstance(text, str) else 1
        if length >= BLOCK:
            yield Block(block, str(file), first, size=round(len(block) * bytes_per_row))
            block, length, first = [], 0, first + len(block)
    yield Block(block, str(file), first, size=round(len(block) * bytes_per_row))


def read_text(file: Path, _field: str) -> Iterator[Block]:
    """One text of any length, in parts that give the same tokens as the whole."""
    rest, size, part, digest = b"", 0, 0, None
    for chunk, taken in chunks(file, lambda stream: stream.read(LONG)):
        rest, size = rest + chunk, size + taken
        if part == 0 and is_binary(rest):
            break
        if len(rest) > LONG and (cut := word_end(rest)):
            digest = digest or hashlib.sha256(rest[:cut].decode(errors="replace").encode()).digest()
            yield Block([rest[:cut]], str(file), size=size, part=part, ends=False, digest=digest)
            rest, size, part = rest[cut:], 0, part + 1
    yield Block([rest], str(file), size=size, part=part, digest=digest)


def is_binary(raw: bytes) -> bool:
    return b"\0" in raw[:8192]  # git's test


def word_end(raw: bytes) -> int:
    """The last place to cut a text, 0 if there is none: before a space between two letters.

    However the usual patterns take text apart, a word ends there and the next one begins with its
    space. Where there is no such place, as in Chinese or a table of numbers, it is enough that a
    letter or a number ends at white space. Neither lies within a character of UTF-8.
    """
    if place := re.match(rb"(?s).*[A-Za-z](?= [A-Za-z])", raw):
        return place.end()
    end = raw[-(2**16) :].decode(errors="surrogateescape")
    place = re.match(r"(?s).*[^\W_](?=\s)", end)
    return len(raw) - len(end[place.end() :].encode(errors="surrogateescape")) if place else 0


# ---------------------------------------------------------------------------------------------
# Blocks to tokens, in a process of its own or in this one

HELD_OUT_BYTES = 32 * 1024  # what is kept of a held-out document, so that no one file rules the score


def is_held_out(digest: bytes, val_fraction: float) -> bool:
    """Decided by the content alone: the same document always lands on the same side."""
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def texts_of(block: Block, note) -> Iterator[tuple[int, str]]:
    """Number in the block and text of each document; note(what, number, times=1) is told of all that is not as it should be.

    Raises ValueError where the beginning of a file shows that it is not what its name says.
    """
    good, complaint = 0, None
    for i, record in enumerate(block.records if block.field is None else block.records[0].split(b"\n")):
        text = record.read_bytes() if isinstance(record, Path) else record
        if isinstance(text, bytes):
            raw = text
            if block.field is None and block.part == 0 and is_binary(raw):
                note("binary files skipped", i)
                continue
            text = raw.decode(errors="replace")
            replaced = text.count("\ufffd")
            if replaced and (times := replaced - raw.count("\ufffd".encode())):
                note("sequences of invalid UTF-8 replaced", i, times)
        if block.field is not None:
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
            text, times = re.subn("[\ud800-\udfff]", "\ufffd", text)
            note("sequences of invalid UTF-8 replaced", i, times)
        yield i, text
    if complaint and block.line == 1 and not good:
        raise ValueError(f"--source {block.where}: {complaint}")


def encode_block(number: int, block: Block, tokenizer: tiktoken.Encoding, val_fraction: float) -> dict:
    """Block number 0, 1, 2, ... -> what goes to train.bin and val.bin, and what there is to report."""
    dtype = token_type(tokenizer)
    end_of_text = np.array([tokenizer.eot_token], dtype).tobytes()
    tokens, n_bytes, documents, notes = {"train": [], "val": []}, {"train": 0, "val": 0}, {"train": 0, "val": 0}, []

    def note(what: str, number: int, times: int = 1) -> None:
        record = block.records[number] if block.field is None else None
        notes.append((what, times, str(record) if isinstance(record, Path) else f"{block.where}:{block.line + number}"))

    for i, text in texts_of(block, note):
        raw = text.encode()
        # The first document is for training in any case: there is always something to read. (Block number k
        # is part k of a text only if all blocks before it are parts of it too: then it is the first text.)
        first = number == block.part and not documents["train"]
        split = "val" if not first and is_held_out(block.digest or hashlib.sha256(raw).digest(), val_fraction) else "train"
        documents[split] += block.part == 0
        ends = block.ends
        if split == "val":
            if block.part > 0:
                continue
            if len(raw) > HELD_OUT_BYTES or not ends:
                note(f"held-out documents cut at {HELD_OUT_BYTES // 1024} KB", i)
            text, ends = raw[:HELD_OUT_BYTES].decode(errors="ignore"), True
            raw = text.encode()
        ids = tokenizer.encode_to_numpy(text, disallowed_special=())  # as encode_ordinary, without a list of int
        tokens[split] += [ids.astype(dtype).tobytes(), end_of_text if ends else b""]
        n_bytes[split] += len(raw)
    return {"train": b"".join(tokens["train"]), "val": b"".join(tokens["val"]), "bytes": n_bytes, "documents": documents, "notes": notes}


def token_type(tokenizer: tiktoken.Encoding) -> type:
    return np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32


def start_worker(tokenizer_name: str, val_fraction: float) -> None:
    """Load the tokenizer, once per process; and end with the parent process, even if it is killed."""
    global worker
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
    pool, waiting = ProcessPoolExecutor(workers, initializer=start_worker, initargs=(tokenizer_name, val_fraction)), deque()
    try:
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
    Raises OSError if `out` exists, cannot be made or is being made, ValueError if there is too little
    text to train on and to hold out, or no such tokenizer.
    """
    tokenizer, file = load_tokenizer(tokenizer_name), tokenizer_file(tokenizer_name)
    if out.exists():
        raise FileExistsError(f"--out {out}: exists already, name another folder or remove it")
    building = out.with_name(f".{out.name}.{'partial' if identity else os.getpid()}")
    try:
        building.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {out}: cannot be made ({error.strerror})") from None
    with locked(building):
        try:
            key = repr((identity, val_fraction, tokenizer_name, file is not None and file.read_bytes()))
            done = read_progress(building, hashlib.sha256(key.encode()).hexdigest())
            blocks = enumerate(d if isinstance(d, Block) else Block([d]) for d in documents)
            left = itertools.islice(blocks, done["blocks"], None)
            write_tokens(building, done, encode_blocks(left, tokenizer_name, val_fraction, workers), size)
            if not done["val"]:  # too few documents for the hash to divide them
                hold_out_the_end(building, done, val_fraction, tokenizer)
            if not (done["train"] and done["val"]):
                raise ValueError("; ".join(["--source: too little text to train on one part and hold out another", *report(done["notes"])]))
            if file:  # a corpus can be read without the file it was made with
                shutil.copy(file, building)
            meta = describe(building, done, tokenizer_name, tokenizer)
            (building / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
            (building / "progress.json").unlink()
            os.rename(building, out)
            return meta | {"notes": done["notes"], "seconds": done["seconds"]}
        except BaseException as error:
            to_be_continued = identity and (building / "progress.json").exists() and not isinstance(error, ValueError)
            if not to_be_continued:
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
        yield
    except BlockingIOError:
        raise OSError(f"{folder}: another process is at work there") from None
    finally:
        os.close(held)


def read_progress(folder: Path, key: str) -> dict:
    """How far a preparation has come, by its last note; nowhere, if there is none or it is of another input."""
    with contextlib.suppress(FileNotFoundError):
        done = json.loads((folder / "progress.json").read_text())
        if done["key"] == key:
            return done
    return {"key": key, "blocks": 0, "size": 0, "seconds": 0.0, "train": 0, "val": 0, "bytes": {"train": 0, "val": 0}, "documents": {"train": 0, "val": 0}, "notes": {}}


def write_tokens(folder: Path, done: dict, encoded: Iterator[tuple[Block, dict]], size: int | None) -> None:
    """Write encoded blocks to train.bin and val.bin, behind those that are done.

    Every few seconds progress.json notes how far that has come: it holds the lengths of both files, so that
    what was written after the last note can be cut off, and written again.
    """
    started, saved_at = time.perf_counter() - done["seconds"], done["seconds"]
    bar = tqdm(desc="encoding", total=size, initial=done["size"], unit="B", unit_scale=True, leave=False, disable=None)  # None: only on a terminal
    with open(folder / "train.bin", "ab") as train, open(folder / "val.bin", "ab") as val, bar:
        files = {"train": train, "val": val}
        for split, file in files.items():
            file.truncate(done[split])
        for block, result in encoded:
            for split, file in files.items():
                file.write(result[split])
                done[split] += len(result[split])
                done["bytes"][split] += result["bytes"][split]
                done["documents"][split] += result["documents"][split]
            for what, times, where in result["notes"]:
                before, first = done["notes"].get(what, (0, where))
                done["notes"][what] = (before + times, first)
            done |= {"blocks": done["blocks"] + 1, "size": done["size"] + block.size, "seconds": time.perf_counter() - started}
            bar.update(block.size)
            if done["seconds"] > saved_at + SAVE_EVERY:
                save_progress(folder, done, files.values())
                saved_at = done["seconds"]
        save_progress(folder, done, files.values())


def save_progress(folder: Path, done: dict, files) -> None:
    for file in files:  # on the disk before the note that counts on it
        file.flush()
        os.fsync(file.fileno())
    (folder / "progress.tmp").write_text(json.dumps(done))
    os.replace(folder / "progress.tmp", folder / "progress.json")


def hold_out_the_end(folder: Path, done: dict, val_fraction: float, tokenizer: tiktoken.Encoding) -> None:
    """Move the last tokens from train.bin to val.bin."""
    dtype = np.dtype(token_type(tokenizer))
    cut = int(done["train"] // dtype.itemsize * (1 - val_fraction)) * dtype.itemsize
    with open(folder / "train.bin", "rb") as train, open(folder / "val.bin", "wb") as val:
        train.seek(cut)
        shutil.copyfileobj(train, val)
        val.flush()
        n_bytes = int(bytes_per_token(tokenizer)[np.fromfile(val.name, dtype)].sum())
        done |= {"train": cut, "val": done["train"] - cut, "bytes": {"train": done["bytes"]["train"] - n_bytes, "val": n_bytes}}
        save_progress(folder, done, [val])  # until it is there, the whole of train.bin counts
    os.truncate(folder / "train.bin", cut)


def describe(folder: Path, done: dict, tokenizer_name: str, tokenizer: tiktoken.Encoding) -> dict:
    """For meta.json: the tokenizer, documents, tokens and bytes of text in both files, and the hash of it all."""
    dtype = np.dtype(token_type(tokenizer))
    meta = {"tokenizer": Path(tokenizer_name).name, "vocab_size": tokenizer.n_vocab, "dtype": dtype.name}
    fingerprint = hashlib.sha256(repr(sorted(meta.items())).encode())
    for split in ("train", "val"):
        with open(folder / f"{split}.bin", "rb") as file:
            while chunk := file.read(2**22):
                fingerprint.update(chunk)
        meta |= {f"{split}_documents": done["documents"][split], f"{split}_tokens": done[split] // dtype.itemsize, f"{split}_bytes": done["bytes"][split]}
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
    train: np.memmap  # token ids on the disk, [train_tokens]
    val: np.memmap

    @property
    def sources(self) -> dict[str, "Corpus"]:  # a corpus is a mixture of one
        return {self.path.name: self}

    numbers, shares, stages = (0,), (1.0,), ((0, (1.0,)),)


@dataclass(frozen=True)
class Mixture:
    """Several corpora, and each one's share of the sequences from certain sequences on."""

    path: str  # as --data names it
    meta: dict  # tokenizer, vocab_size and fingerprint
    tokenizer: tiktoken.Encoding
    sources: dict[str, Corpus]  # what is read from now on, by the last part of its path
    shares: tuple[float, ...]  # of each of them in --data: the weights of the held-out loss
    numbers: tuple[int, ...]  # of each of them among all that were ever read, which is what stages are about:
    stages: tuple[tuple[int, tuple[float, ...]], ...]  # first sequence, share of each source


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
        own = tokenizer_file(meta["tokenizer"])
        return Corpus(path, meta, load_tokenizer(str(path / own) if own else meta["tokenizer"]), *parts)
    except (FileNotFoundError, NotADirectoryError) as missing:
        raise FileNotFoundError(f"--data {path}: no prepared corpus there ({missing.filename} is missing), make one with data.py") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ValueError(f"--data {path}: meta.json is damaged, prepare it again") from None


def embedded_corpus(tokenizer: str = "bytes") -> Corpus:
    """The default corpus, prepared the first time. Its folder names the versions that its text has."""
    python, torch = platform.python_version(), importlib.metadata.version("torch")
    kind, file = tokenizer, tokenizer_file(tokenizer)
    if file and file.is_file():  # two files of one name are two tokenizers
        kind = f"{file.stem}-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"
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
    shares = parse_mixture(data or "embedded")
    stages = [(first, parse_mixture(text or "embedded")) for first, text in stages or [(0, data)]]
    now = max(i for i, (_, weights) in enumerate(stages) if weights == shares)
    ahead = [shares] + [weights for _, weights in stages[now:]]
    folders = list(dict.fromkeys(itertools.chain(*ahead)))
    corpora = {Path(folder).name: embedded_corpus(tokenizer) if folder == "embedded" else open_corpus(Path(folder)) for folder in folders}
    if len(corpora) < len(folders):
        raise ValueError(f"--decay_data: two sources have the same name among {', '.join(folders)}")
    first, *others = corpora.values()
    if not others and len(stages) == 1:
        return first
    for other in others:
        if not np.array_equal(bytes_per_token(first.tokenizer), bytes_per_token(other.tokenizer)):
            raise ValueError(f"--data {other.path}: has the tokenizer {other.meta['tokenizer']}, but {first.path} has {first.meta['tokenizer']}")
    fingerprint = first.meta["fingerprint"]
    if others:
        content = [(corpora[Path(folder).name].meta["fingerprint"], *(weights.get(folder, 0.0) for weights in ahead[1:])) for folder in folders]
        fingerprint = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
    # Sources that are only in the past need not be there any more, but they are counted. All are numbered in the
    # order in which they came, so that a branch counts what its parents have read as they did.
    known = list(dict.fromkeys(itertools.chain(*(weights for _, weights in stages))))
    return Mixture(
        data or "embedded", first.meta | {"fingerprint": fingerprint}, first.tokenizer, corpora,
        shares=tuple(shares.get(folder, 0.0) for folder in folders), numbers=tuple(known.index(folder) for folder in folders),
        stages=tuple((start, tuple(weights.get(folder, 0.0) for folder in known)) for start, weights in stages),
    )  # fmt: skip


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
    next larger source does the same with them. So all of this follows from g and the seed alone, and
    after any number of sequences each source has had its share, give or take one per source.
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
    return {name: float(read[j] / n_sequences(source.train, seq_len)) for j, (name, source) in zip(corpus.numbers, corpus.sources.items())}


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
        chosen, before = mixed(g[here] - start, shares, seed)
        before += sequences_read(corpus.stages[:s], start, seed)
        for j, source in zip(corpus.numbers, corpus.sources.values()):
            if not (mine := chosen == j).any():
                continue
            index = shuffled(before[mine, j], n_sequences(source.train, seq_len), seed)
            inputs[here[mine]], targets[here[mine]] = read_sequences(source.train, index, seq_len)
    return inputs, targets


def n_sequences(tokens: np.memmap, seq_len: int) -> int:
    """Whole sequences in a token file; each needs one token more, as the last one's target."""
    return (len(tokens) - 1) // seq_len


def read_sequences(tokens: np.memmap, index: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences number `index` [B] of a token file -> (inputs, targets), [B, seq_len] int64 each.

    Sequence i is tokens i * seq_len ... (i + 1) * seq_len, wherever documents begin and end: as in
    the paper's kind of pre-training, attention looks across document borders.
    """
    rows = np.empty((len(index), seq_len + 1), tokens.dtype)
    with open(tokens.filename, "rb", buffering=0) as file:  # reading is faster than a page fault for every 4 KB of the map
        for row, i in zip(rows, index.tolist()):
            file.seek(i * seq_len * tokens.itemsize)
            if file.readinto(row) < row.nbytes:
                raise OSError(f"{tokens.filename}: ends before sequence {i}, it has changed since it was opened")
    rows = rows.astype(np.int64)
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
