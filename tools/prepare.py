"""Turn text of several formats into a corpus, a folder with train.bin, val.bin and
meta.json.

`read_files` yields documents, `encode` turns them into tokens on every core, and
`prepare` writes these. `notes` counts what we skip or change.
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

# We keep the first 32 KB of a held-out document, so that no single file rules the loss.
HELD_OUT_BYTES = 32 * 1024
BATCH_SIZE = 2**20  # characters that a process encodes at a time

# -- Files to documents ------------------------------------------------------------------


def source_files(sources: list[str]) -> Iterator[Path]:
    """The files in the folders and quoted patterns of --source, without hidden ones."""
    for source in sources:
        path = Path(source)
        if not source:
            raise UserError("--source: an empty name; the current folder is --source .")
        if path.is_dir():
            names = expand(f"{glob.escape(source)}/**/*")
            for found in sorted(Path(name) for name in names):
                if found.is_file():
                    yield found
        elif path.exists():
            yield path
        else:
            names = expand(source)
            if not names:
                raise UserError(f"--source {source}: no such file or folder")
            files = [Path(name) for name in sorted(names) if not Path(name).is_dir()]
            if not files:
                raise UserError(
                    f"--source {source}: matches folders only; leave out the quotes, or "
                    "add /**"
                )
            yield from files


def expand(pattern: str) -> set[str]:
    """The paths of glob.glob(pattern, recursive=True), which may never end if links form loops."""
    if pattern.endswith("/**") or pattern == "**":
        pattern += "/*"
    first_stars = re.match(r"((?:.*?/)??)\*\*/(.*)", pattern, re.DOTALL)
    if not first_stars:
        return set(glob.glob(pattern))
    before, after = first_stars.groups()
    found = set()
    for top in glob.glob(before or "./"):
        for folder in walk(top):
            found |= expand(os.path.join(glob.escape(folder), after))
    return found


def walk(top: str) -> Iterator[str]:
    """A folder and all folders in it, also through links, but none of them twice or hidden."""
    seen = set()
    for folder, inside, _ in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            inside.clear()  # os.walk then enters no folder in this one
            continue
        seen.add(real)
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        yield folder


def read_files(sources: list[str], field: str, notes: Counter) -> Iterator[str | bytes]:
    """Yield texts and lines of JSON, reading every file once, however many links lead to it.

    Raises UserError for a damaged file or a missing field.
    """
    seen = set()
    files = list(source_files(sources))  # finds a wrong name before any work
    for file in files:
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
    """A line of JSON is one document. So is a text file, but we skip binary files, as git does."""
    is_json = re.search(r"\.(jsonl|ndjson)(\.\w+)?$|\.json\.gz$", file.name)
    if is_json:
        can_read = file.suffix in (".jsonl", ".ndjson", ".gz")  # but not .jsonl.zst
    else:
        can_read = file.suffix != ".parquet"
    if not can_read:
        raise UserError(
            "we read text, JSON lines and .gz; convert it first (docs/train.md)"
        )
    open_file = gzip.open if file.suffix == ".gz" else open
    with open_file(file, "rb") as stream:
        if not is_json:
            raw = stream.read()
            is_binary = b"\0" in raw[:8192]
            yield "" if is_binary else raw.decode(errors="surrogateescape")
            return
        for i, line in enumerate(stream):
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


# -- Documents to a corpus ---------------------------------------------------------------


def prepare(
    documents: Iterable,
    tokenizer: str,
    out: Path,
    val_fraction=0.02,
    field="text",
    notes: Counter | None = None,
) -> dict:
    """Encode texts, with an end-of-text after every one, into `out`; return its meta.json.

    notes: counts of what `documents` skips. meta.json lists them too. The folder appears
    by rename, whole or not at all. Raises OSError if we cannot make it, UserError if `out`
    exists, for an unknown tokenizer, or for too little text to train on and to hold out.
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
        train_file = folder / "train.bin"
        val_file = folder / "val.bin"

        # 1. Encode the texts
        encoded = encode_all(documents, encoding, dtype, field, val_fraction)
        with open(train_file, "wb") as train, open(val_file, "wb") as val:
            for tokens, found in encoded:
                train.write(tokens["train"])
                val.write(tokens["val"])
                notes.update(found)

        # 2. If the hash of no text holds it out, hold out the end
        if not val_file.stat().st_size:
            ids = np.fromfile(train_file, dtype)
            cut = int(len(ids) * (1 - val_fraction))
            ids[:cut].tofile(train_file)
            ids[cut:].tofile(val_file)

        # 3. Count and describe the tokens
        meta = describe(folder, tokenizer, encoding, dtype, notes)
        if not meta["train_tokens"] or not meta["val_tokens"]:
            reasons = ["--source: too little text to divide"]
            reasons += [f"{times:,} {what}" for what, times in notes.items()]
            raise UserError("; ".join(reasons))
        file = tokenizer_file(tokenizer)
        if file:  # a copy, so that the corpus does not need the file any more
            shutil.copy(file, folder)

        # 4. Put the folder into its place, when all its files are on the disk
        for path in folder.iterdir():
            flush(path)
        flush(folder)
        os.rename(folder, out)
        flush(out.parent)
    return meta


def flush(path: Path) -> None:
    """Wait until a file or the names in a folder are on the disk, where a power cut spares them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def encode_all(documents: Iterable, *settings) -> Iterator[tuple[dict, Counter]]:
    """Encode batches of documents on every core. Yield what `encode` returns, in order.

    settings: the arguments of `encode` that are the same for all batches.
    """
    tokenizer = settings[0]
    first = True  # until a document is there to train on
    running = deque()  # results that processes still work on, in the order of the batches
    with ProcessPoolExecutor(initializer=start_worker, initargs=settings) as pool:
        for batch in batches(documents):
            if first or tokenizer.name == "bytes":  # too little work to start processes
                tokens, notes = encode(batch, first, *settings)
                if tokens["train"]:
                    first = False
                yield tokens, notes
            else:
                running.append(pool.submit(work, batch))
            if len(running) > 2 * os.cpu_count():  # few at a time, to save memory
                yield running.popleft().result()
        for future in running:
            yield future.result()


def batches(documents: Iterable) -> Iterator[list]:
    """Lists of documents, of about BATCH_SIZE characters together."""
    batch = []
    size = 0
    for document in tqdm(
        documents, "encoding", unit=" documents", leave=False, disable=None
    ):
        batch.append(document)
        size += len(document)
        if size >= BATCH_SIZE:
            yield batch
            batch = []
            size = 0
    yield batch


def start_worker(*args) -> None:
    """Leave Ctrl-C and a lost terminal to the parent, and end when it ends."""
    global settings  # of all batches, for `work`
    settings = args
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which the pool ends its workers

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def work(batch: list) -> tuple[dict, Counter]:
    return encode(batch, False, *settings)


def encode(documents: list, first: bool, tokenizer, dtype, field, val_fraction) -> tuple:
    """Documents -> ({"train": their tokens, "val": their tokens}, notes).

    A hash of the text divides them, so it always lands on the same side. The first one
    trains.
    """
    tokens = {"train": bytearray(), "val": bytearray()}
    notes = Counter()
    lengths = bytes_per_token(tokenizer)  # [n_vocab]
    end_of_text = dtype.type(tokenizer.eot_token).tobytes()
    for document in documents:
        # 1. Find the text, in Unicode that UTF-8 can write
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

        # 2. Train on it or hold it out
        digest = hashlib.sha256(raw).digest()
        number = int.from_bytes(digest[:8], "big") / 2**64  # uniform from 0 to 1
        split = "val" if number < val_fraction and not first else "train"
        first = False
        if split == "val" and len(raw) > HELD_OUT_BYTES:
            notes[f"held-out texts cut at {HELD_OUT_BYTES // 1024} KB"] += 1
            text = raw[:HELD_OUT_BYTES].decode(errors="ignore")
            raw = text.encode()

        # 3. Encode it
        if tokenizer.name == "bytes":
            ids = np.frombuffer(raw, np.uint8)
        else:
            ids = tokenizer.encode_to_numpy(text, disallowed_special=())
            # tiktoken drops what its pattern does not match
            if lengths[ids].sum() != len(raw):
                start = textwrap.shorten(text, 40)
                raise UserError(
                    f"--tokenizer {tokenizer.name}: loses part of the text {start!r}"
                )
        tokens[split] += ids.astype(dtype).tobytes() + end_of_text
    return tokens, notes


# -- The description of a corpus ---------------------------------------------------------


def spot_check(folder: Path) -> str:
    """Hash 64 blocks of 4 KB of train.bin and of val.bin, evenly spaced from start to end.

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
        counts = np.zeros(len(lengths), dtype=np.int64)  # of every token id
        with open(folder / f"{split}.bin", "rb") as file:
            while chunk := file.read(2**22):
                fingerprint.update(chunk)
                ids = np.frombuffer(chunk, dtype)
                counts += np.bincount(ids, minlength=len(lengths))
        meta[f"{split}_documents"] = int(counts[tokenizer.eot_token])
        meta[f"{split}_tokens"] = int(counts.sum())
        meta[f"{split}_bytes"] = int(counts @ lengths)
    meta.update(notes)
    meta["fingerprint"] = fingerprint.hexdigest()[:16]
    meta["spot_check"] = spot_check(folder)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta
