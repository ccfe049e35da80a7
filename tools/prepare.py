"""Turn text of several formats into a corpus, a folder with train.bin, val.bin and
meta.json.

`read_files` yields documents, `encode` runs on every core, `notes` counts what we skip or
change.
"""

import errno
import glob
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import textwrap
import threading
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from tools.flags import UserError
from tools.tokenizers import bytes_per_token, load_tokenizer, tokenizer_file

HELD_OUT_BYTES = (
    32 * 1024
)  # kept of a held-out document, so that no single file rules the loss
BATCH_SIZE = 2**20  # characters that a process encodes at a time


def source_files(sources: list[str]) -> Iterator[Path]:
    """The files in the folders and quoted patterns of --source, without hidden ones."""
    for source in sources:
        path = Path(source)
        if not source:
            raise UserError("--source: an empty name; the current folder is --source .")
        if path.is_dir():
            found = map(Path, expand(f"{glob.escape(source)}/**/*"))
            yield from (p for p in sorted(found) if p.is_file())
        else:
            found = [path] if path.exists() else sorted(expand(source))
            yield from (Path(p) for p in found if not Path(p).is_dir())
            if not found:
                raise UserError(f"--source {source}: no such file or folder")


def expand(pattern: str) -> set[str]:
    """The paths of glob.glob(pattern, recursive=True), which may never end if links form
    loops."""
    if pattern.endswith("/**") or pattern == "**":
        pattern += "/*"
    recursive = re.match(r"((?:.*?/)??)\*\*/(.*)", pattern, re.DOTALL)
    if not recursive:
        return set(glob.glob(pattern))
    before, after = recursive.groups()
    found = set()
    for top in glob.glob(before or "./"):
        for folder in walk(top):
            found |= expand(os.path.join(glob.escape(folder), after))
    return found


def walk(top: str) -> Iterator[str]:
    """A folder and all folders in it, also through links, but none of them twice or
    hidden."""
    seen = set()
    for folder, inside, _ in os.walk(top, followlinks=True):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        real = os.path.realpath(folder)
        if real in seen:
            inside.clear()
        else:
            seen.add(real)
            yield folder


def read_files(sources: list[str], field: str, notes: Counter) -> Iterator[str | bytes]:
    """Yield texts and lines of JSON, reading every file once, however many links lead to
    it.

    Raises UserError for a damaged file or a missing field.
    """
    seen = set()
    for file in list(source_files(sources)):  # finds a wrong name before any work
        real = os.path.realpath(file)
        if real in seen:
            notes["linked or repeated files skipped"] += 1
            continue
        seen.add(real)
        try:
            yield from read_file(file, field)
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise UserError(f"--source {file}: {error}") from None


def read_file(file: Path, field: str) -> Iterator[str | bytes]:
    """A line of JSON is one document. So is a text file, but we skip binary files, as git
    does."""
    is_json = re.search(r"\.(jsonl|ndjson)(\.\w+)?$|\.json\.gz$", file.name)
    if (
        file.suffix == ".parquet"
        or is_json
        and file.suffix not in (".jsonl", ".ndjson", ".gz")
    ):
        raise UserError(
            "we read text, JSON lines and .gz; convert it first (docs/train.md)"
        )
    with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
        if not is_json:
            raw = stream.read()
            yield "" if b"\0" in raw[:8192] else raw.decode(errors="surrogateescape")
            return
        for i, line in enumerate(stream):  # of JSON
            if i == 0 and field not in parse(line):
                fields = ", ".join(parse(line)) or "nothing"
                raise UserError(
                    f"line 1 has no text {field!r}, but {fields}; choose --text_field"
                )
            yield line


def parse(line: bytes) -> dict:
    """The fields of a line of JSON; none if it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # damaged, or a thousand brackets deep
        return {}
    return row if isinstance(row, dict) else {}


def prepare(
    documents: Iterable,
    tokenizer: str,
    out: Path,
    val_fraction=0.02,
    field="text",
    notes: Counter | None = None,
) -> dict:
    """Encode texts, with an end-of-text after every one, into `out`; return its
    meta.json.

    notes: counts of what `documents` skips. meta.json lists them too. The folder appears
    by rename, whole or not at all. Raises OSError if `out` exists or we cannot make it,
    UserError for an unknown tokenizer or too little text to train on and to hold out.
    """
    encoding = load_tokenizer(tokenizer)
    notes = Counter() if notes is None else notes
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32)
    if out.exists():
        raise UserError(
            f"--out {out}: already exists; choose another folder or remove it"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        folder = Path(temporary, out.name)
        folder.mkdir()
        with (
            open(folder / "train.bin", "wb") as train,
            open(folder / "val.bin", "wb") as val,
        ):
            for tokens, found in encode_all(
                documents, encoding, dtype, field, val_fraction
            ):
                train.write(tokens["train"])
                val.write(tokens["val"])
                notes.update(found)
        if (
            not (folder / "val.bin").stat().st_size
        ):  # the hash held out none: take the end
            ids = np.fromfile(folder / "train.bin", dtype)
            cut = int(len(ids) * (1 - val_fraction))
            ids[:cut].tofile(folder / "train.bin")
            ids[cut:].tofile(folder / "val.bin")
        meta = describe(folder, tokenizer, encoding, dtype, notes)
        if not (meta["train_tokens"] and meta["val_tokens"]):
            found = [f"{times:,} {what}" for what, times in notes.items()]
            raise UserError("; ".join(["--source: too little text to divide", *found]))
        if file := tokenizer_file(
            tokenizer
        ):  # a copy, so that the corpus does not need it
            shutil.copy(file, folder)
        for path in (*folder.iterdir(), folder):
            flush(path)
        os.rename(folder, out)
        flush(out.parent)
    return meta


def flush(path: Path) -> None:
    """Wait until a file or the names in a folder are on the disk, where a power cut
    spares them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def encode_all(documents: Iterable, *settings) -> Iterator[tuple[dict, Counter]]:
    """Encode batches of documents on every core. Yield what `encode` returns, in
    order."""
    first, running, tokenizer = True, deque(), settings[0]
    with ProcessPoolExecutor(initializer=start_worker, initargs=settings) as pool:
        for batch in batches(documents):
            if first or tokenizer.name == "bytes":  # too little work to start processes
                yield (result := encode(batch, first, *settings))
                first = first and not result[0]["train"]
            else:
                running.append(pool.submit(work, batch))
            if len(running) > 2 * os.cpu_count():  # few at a time, to save memory
                yield running.popleft().result()
        for future in running:
            yield future.result()


def batches(documents: Iterable) -> Iterator[list]:
    batch, size = [], 0
    for document in tqdm(
        documents, "encoding", unit=" documents", leave=False, disable=None
    ):
        batch.append(document)
        size += len(document)
        if size >= BATCH_SIZE:
            yield batch
            batch, size = [], 0
    yield batch


def start_worker(*args) -> None:
    """Leave Ctrl-C and a lost terminal to the parent, and end when it ends."""
    global settings
    settings = args
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(
        signal.SIGTERM, signal.SIG_DFL
    )  # the pool ends its workers with SIGTERM
    wait = multiprocessing.parent_process().join
    threading.Thread(target=lambda: (wait(), os._exit(1)), daemon=True).start()


def work(batch: list) -> tuple[dict, Counter]:
    return encode(batch, False, *settings)


def encode(documents: list, first: bool, tokenizer, dtype, field, val_fraction) -> tuple:
    """Documents -> ({"train": their tokens, "val": their tokens}, notes).

    A hash of the text divides them, so it always lands on the same side. The first one
    trains.
    """
    tokens, notes = {"train": bytearray(), "val": bytearray()}, Counter()
    lengths = bytes_per_token(tokenizer)
    end_of_text = dtype.type(tokenizer.eot_token).tobytes()
    for document in documents:
        text = parse(document).get(field) if isinstance(document, bytes) else document
        if not text or not isinstance(text, str):
            notes["documents without text skipped"] += 1
            continue
        try:
            raw = text.encode()
        except UnicodeEncodeError:  # surrogates, from bytes that are not UTF-8 or JSON
            text, times = re.subn("[\ud800-\udfff]", "\ufffd", text)
            notes["invalid characters replaced"] += times
            raw = text.encode()
        number = int.from_bytes(hashlib.sha256(raw).digest()[:8], "big") / 2**64
        split = "val" if number < val_fraction and not first else "train"
        if split == "val" and len(raw) > HELD_OUT_BYTES:
            notes[f"held-out texts cut at {HELD_OUT_BYTES // 1024} KB"] += 1
            text = raw[:HELD_OUT_BYTES].decode(errors="ignore")
            raw = text.encode()
        if tokenizer.name == "bytes":
            ids = np.frombuffer(raw, np.uint8)
        else:
            ids = tokenizer.encode_to_numpy(text, disallowed_special=())
            if lengths[ids].sum() != len(
                raw
            ):  # tiktoken drops what its pattern does not match
                start = textwrap.shorten(text, 40)
                raise UserError(
                    f"--tokenizer {tokenizer.name}: loses part of the text {start!r}"
                )
        tokens[split] += ids.astype(dtype).tobytes() + end_of_text
        first = False
    return tokens, notes


def spot_check(folder: Path) -> str:
    """Hash 64 blocks of 4 KB of train.bin and of val.bin, evenly spaced from start to
    end.

    Opening a corpus compares it, which takes milliseconds for any size. It notices other
    text and large holes. It cannot notice a change between the blocks. The fingerprint
    would, but for that it has to read everything.
    """
    digest = hashlib.sha256()
    for split in ("train", "val"):
        with open(folder / f"{split}.bin", "rb") as file:
            last = max(0, file.seek(0, os.SEEK_END) - 4096)
            for i in range(64):
                file.seek(last * i // 63)
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]


def describe(folder: Path, name: str, tokenizer, dtype: np.dtype, notes: Counter) -> dict:
    """Write and return meta.json, with counts, notes, and a fingerprint of all tokens."""
    lengths = bytes_per_token(tokenizer)
    meta = {"tokenizer": Path(name).name, "vocab_size": len(lengths), "dtype": dtype.name}
    fingerprint = hashlib.sha256(repr(sorted(meta.items())).encode())
    for split in ("train", "val"):
        counts = np.zeros(len(lengths), dtype=np.int64)
        with open(folder / f"{split}.bin", "rb") as file:
            while chunk := file.read(2**22):
                fingerprint.update(chunk)
                counts += np.bincount(np.frombuffer(chunk, dtype), minlength=len(lengths))
        meta[f"{split}_documents"] = int(counts[tokenizer.eot_token])
        meta[f"{split}_tokens"] = int(counts.sum())
        meta[f"{split}_bytes"] = int(counts @ lengths)
    meta |= {**notes, "fingerprint": fingerprint.hexdigest()[:16]}
    meta["spot_check"] = spot_check(folder)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta
