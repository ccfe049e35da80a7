"""Files of any kind to a corpus: a folder with train.bin, val.bin and meta.json.

Readers yield documents, `divide` holds some out, `encode` makes tokens of them on every core, and
`build` writes the folder. An interrupted preparation resumes after its last finished files.
"""

import bz2
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

from tools.runs import lock, write_json
from tools.tokenizers import bytes_per_token, load_tokenizer, token_type, tokenizer_file

HELD_OUT_BYTES = 32 * 1024  # kept of a held-out document, so that no single file rules the loss
LONG = 2**22  # bytes; a longer text is read and encoded in stretches
GROUP = 2**26  # bytes of files between two saves of the progress
BATCH = 2**18  # characters that a thread encodes at a time

# ---------------------------------------------------------------------------------------------
# Files to documents: (name, the text in one or more stretches), or (name, why it is skipped)


def source_files(sources: list[str]) -> list[Path | str]:
    """The files that --source names, in reading order; hf:NAME stays as it is.

    Folders are searched recursively, without hidden files; quoted patterns are expanded here.
    """
    files: list[Path | str] = []
    for source in sources:
        path = Path(source)
        if source.startswith("hf:"):
            files.append(source)
        elif path.is_dir():
            hidden = lambda p: re.search(r"(^|/)\.", p.relative_to(path).as_posix())
            files += [p for p in sorted(path.rglob("*")) if p.is_file() and not hidden(p)]
        elif found := [path] if path.exists() else sorted(glob.glob(source, recursive=True)):
            files += [Path(p) for p in found if Path(p).is_file()]
        else:
            raise FileNotFoundError(f"--source {source}: no such file or folder")
    return files


def read_files(files: list[Path | str], field: str) -> Iterator[tuple]:
    """The documents in these files. Raises ValueError if one is damaged or cannot be read."""
    for file in files:
        read = read_text
        if re.search(r"^hf:|\.parquet$", str(file)):
            read = read_rows
        elif re.search(r"\.(jsonl|ndjson|json(?=\.))(\.gz|\.bz2|\.xz|\.zst)?$", str(file)):
            read = read_lines
        try:
            yield from read(file, field)
        except (ImportError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
            problem = " ".join(str(error).split()) or type(error).__name__
            advice = "; pip install datasets" if isinstance(error, ImportError) else ""
            raise ValueError(f"--source {file}: {problem}{advice}") from None


def open_zst(file: Path, _mode: str):
    import pyarrow  # comes with datasets

    return io.BufferedReader(pyarrow.CompressedInputStream(str(file), "zstd"))


UNPACK = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zst}


def unpack(file: Path):
    if file.suffix in UNPACK and not file.stat().st_size:
        raise EOFError("empty, not even an archive")
    return UNPACK.get(file.suffix, open)(file, "rb")


def read_text(file: Path, _field: str) -> Iterator[tuple]:
    """One document, in stretches that give the same tokens as the whole."""

    def stretches() -> Iterator[str]:
        rest = b""
        while chunk := stream.read(LONG):
            rest += chunk
            if len(rest) > LONG and (cut := word_end(rest)):
                yield rest[:cut].decode(errors="surrogateescape")
                rest = rest[cut:]
        yield rest.decode(errors="surrogateescape")

    with unpack(file) as stream:
        is_binary = b"\0" in stream.peek(8192)[:8192]  # git's test
        yield str(file), "binary files skipped" if is_binary else stretches()


def word_end(raw: bytes) -> int:
    """The last place to cut a text, 0 if there is none: before a space between two letters, where
    every common pre-tokenizer splits; in Chinese or a table of numbers, which have no such place,
    where a letter or digit meets whitespace. Neither cut can fall inside a UTF-8 character.
    """
    end = raw[-(2**16) :].decode(errors="surrogateescape")
    patterns = r"(?s).*[A-Za-z](?= [A-Za-z])", r"(?s).*[^\W_](?=\s)"
    place = re.match(patterns[0], end) or re.match(patterns[1], end)
    return len(raw) - len(end[place.end() :].encode(errors="surrogateescape")) if place else 0


def read_lines(file: Path, field: str) -> Iterator[tuple]:
    """A document per line of JSON."""
    with unpack(file) as stream:
        yield from texts_of(map(parse, stream), file, field)


def parse(line: bytes) -> object:
    try:
        return json.loads(line.decode(errors="surrogateescape").removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None


def read_rows(file: Path | str, field: str) -> Iterator[tuple]:
    """A document per row of a Parquet file or a hub dataset, hf:NAME or hf:NAME:CONFIG."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # we report errors, in one line
    name, _, config = str(file).removeprefix("hf:").partition(":")
    how = {"name": config or None}
    if isinstance(file, Path):
        name, how = "parquet", {"data_files": str(file)}
    rows = datasets.load_dataset(name, split="train", streaming=True, **how)
    yield from texts_of(rows, file, field)


def texts_of(rows: Iterable, file: Path | str, field: str) -> Iterator[tuple]:
    """The texts in rows of data. Raises ValueError if the first row lacks the field."""
    for number, row in enumerate(rows, 1):
        row = row if isinstance(row, dict) else {}
        if number == 1 and field not in row:
            fields = ", ".join(row) or "nothing"
            raise ValueError(f"row 1 has no text {field!r}, but {fields}; choose --text_field")
        is_text = isinstance(row.get(field), str)
        yield f"{file}:{number}", [row[field]] if is_text else "rows without a text skipped"


# ---------------------------------------------------------------------------------------------
# Documents to tokens


def divide(documents, val_fraction: float, first: bool, note) -> Iterator[tuple[str, str | None]]:
    """Yield ("train" or "val", stretch of text), and (..., None) where a document ends.

    A hash of the text decides, so the same document always lands on the same side; but the first
    document is for training. note(what, name, times) is called for all that is skipped or changed.
    """
    for name, stretches in documents:
        if isinstance(stretches, str):
            note(stretches, name)
            continue
        split = None
        for text in filter(None, stretches):
            if not text.isascii():  # were there invalid bytes, or JSON's half surrogate pairs?
                text, times = re.subn("[\ud800-\udfff]", "\ufffd", text)
                note("invalid characters replaced", name, times)
            raw = text.encode()
            if split is None:
                number = int.from_bytes(hashlib.sha256(raw).digest()[:8], "big") / 2**64
                split, first = "val" if number < val_fraction and not first else "train", False
            if split == "val" and len(raw) > HELD_OUT_BYTES:
                note(f"held-out documents cut at {HELD_OUT_BYTES // 1024} KB", name)
                yield split, raw[:HELD_OUT_BYTES].decode(errors="ignore")
                break
            yield split, text
        if split:
            yield split, None
        else:
            note("empty documents skipped", name)


def encode(stretches: Iterable, tokenizer: tiktoken.Encoding) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (split, token ids) in order. tiktoken releases the GIL, so threads use every core; few
    batches wait at a time, so memory does not grow with the input.
    """
    end = np.array([tokenizer.eot_token])
    ids = lambda text: tokenizer.encode_to_numpy(text, disallowed_special=())
    if (tokenizer.name, tokenizer.n_vocab) == ("bytes", 256):
        ids = lambda text: np.frombuffer(text.encode(), np.uint8)
    encode_batch = lambda batch: [(s, end if text is None else ids(text)) for s, text in batch]
    waiting, batch, size = deque(), [], 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for split, text in stretches:
            batch.append((split, text))
            size += len(text or "")
            if size >= BATCH:
                waiting.append(pool.submit(encode_batch, batch))
                batch, size = [], 0
            if len(waiting) > 2 * os.cpu_count():
                yield from waiting.popleft().result()
        for future in [*waiting, pool.submit(encode_batch, batch)]:
            yield from future.result()


# ---------------------------------------------------------------------------------------------
# Tokens to a folder


def prepare(documents: Iterable[str], tokenizer: str, out: Path, val_fraction=0.02) -> dict:
    """Encode texts, each followed by end-of-text, into the new folder `out`; return its meta.json.

    The folder appears by rename, whole or not at all. Raises OSError if `out` exists or cannot be
    made, ValueError for an unknown tokenizer or too little text to train on and to hold out.
    """
    named = ((f"document {i}", [text]) for i, text in enumerate(documents, 1))
    return build([named], tokenizer, out, val_fraction)


def prepare_files(sources, tokenizer: str, out: Path, val_fraction: float, field: str) -> dict:
    """prepare() for the files that --source names; `field` is where rows have their text.

    After an interruption the same command resumes, unless files have changed (hf: is not checked).
    """
    groups, size, key = [], GROUP, [tokenizer, val_fraction, field]
    for file in source_files(sources):
        if size >= GROUP:
            groups, size = [*groups, []], 0
        stat = file.stat() if isinstance(file, Path) else None
        size += stat.st_size if stat else GROUP
        groups[-1].append(file)
        key.append((str(file), stat and (stat.st_size, stat.st_mtime_ns)))
    key = hashlib.sha256(repr(key).encode()).hexdigest()
    return build([read_files(g, field) for g in groups], tokenizer, out, val_fraction, key)


def build(groups: list, name: str, out: Path, val_fraction: float, key: str | None = None) -> dict:
    """Encode groups of documents into the new folder `out`. With a key, which identifies the input,
    an interrupted preparation leaves its finished groups to the next one.
    """
    tokenizer, file = load_tokenizer(name), tokenizer_file(name)
    if out.exists():
        raise FileExistsError(f"--out {out}: already exists; choose another folder or remove it")
    building = out.with_name(f".{out.name}.{'partial' if key else os.getpid()}")
    progress = building / "progress.json"
    try:
        building.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {out}: cannot be written ({error.strerror})") from None
    done = {"key": key, "groups": 0, "notes": {}, "train": 0, "val": 0}
    with lock(building):
        try:
            if progress.exists() and (saved := json.loads(progress.read_text()))["key"] == key:
                done = saved
            write_tokens(building, groups, done, tokenizer, val_fraction)
            progress.unlink(missing_ok=True)  # the rest is done from the beginning, or not at all
            meta = finish(building, name, tokenizer, val_fraction) | {"notes": done["notes"]}
            if not (meta["train_tokens"] and meta["val_tokens"]):
                raise ValueError("; ".join(["--source: too little text to divide", *report(meta)]))
            if file:  # a corpus can be read without the file it was made with
                shutil.copy(file, building)
            (building / ".lock").unlink()
            os.rename(building, out)
            return meta
        finally:
            if not progress.exists():
                shutil.rmtree(building, ignore_errors=True)


def write_tokens(folder: Path, groups: list, done: dict, tokenizer, val_fraction: float) -> None:
    """Append the groups that `done` does not count yet to train.bin and val.bin."""

    def note(what: str, name: str, times: int = 1) -> None:
        if times:
            done["notes"].setdefault(what, [0, name])[0] += times

    bar = tqdm(desc="encoding", unit=" tokens", unit_scale=True, leave=False, disable=None)
    with open(folder / "train.bin", "ab") as train, open(folder / "val.bin", "ab") as val, bar:
        files = {"train": train, "val": val}
        for split, file in files.items():
            file.truncate(done[split])  # drop what came after the last save
        for group in groups[done["groups"] :]:
            stretches = divide(group, val_fraction, done["groups"] == 0, note)
            for split, ids in encode(stretches, tokenizer):
                files[split].write(ids.astype(token_type(tokenizer)).tobytes())
                bar.update(len(ids))
            done["groups"] += 1
            for split, file in files.items():
                file.flush()
                os.fsync(file.fileno())
                done[split] = file.tell()
            if done["key"]:
                write_json(folder / "progress.json", done)


def finish(folder: Path, name: str, tokenizer, val_fraction: float) -> dict:
    """Write and return meta.json. If the hash held out nothing, hold out the end of the text."""
    dtype, lengths = token_type(tokenizer), bytes_per_token(tokenizer)
    train, val = folder / "train.bin", folder / "val.bin"
    if takes_the_end := not val.stat().st_size:
        cut = int(train.stat().st_size // dtype.itemsize * (1 - val_fraction)) * dtype.itemsize
        with open(train, "r+b") as whole, open(val, "wb") as end:
            whole.seek(cut)
            shutil.copyfileobj(whole, end)
            whole.truncate(cut)
    meta = {"tokenizer": Path(name).name, "vocab_size": len(lengths), "dtype": dtype.name}
    fingerprint = hashlib.sha256(repr(sorted(meta.items())).encode())
    for path in (train, val):
        counts = np.zeros(len(lengths), dtype=np.int64)
        with open(path, "rb") as file:
            while chunk := file.read(2**22):
                fingerprint.update(chunk)
                counts += np.bincount(np.frombuffer(chunk, dtype), minlength=len(lengths))
        n = {"documents": counts[tokenizer.eot_token], "tokens": sum(counts)}
        n["bytes"] = counts @ lengths
        meta |= {f"{path.stem}_{what}": int(number) for what, number in n.items()}
    if takes_the_end:  # of a document that starts in train.bin
        meta["train_documents"] += meta["val_documents"]
        meta["val_documents"] = 0
    meta["fingerprint"] = fingerprint.hexdigest()[:16]
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def report(meta: dict) -> list[str]:
    """What was skipped or changed, a line each."""
    notes = meta.get("notes", {}).items()
    return [f"{times:,} {what} (the first: {name})" for what, (times, name) in notes]
