"""Turn text of several formats into a corpus, a folder with train.bin, val.bin and
meta.json.

`read_files` yields texts, `encode` turns them into tokens on every core, and `prepare`
writes these. `notes` counts what we skip or change.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from tools import tokenizers
from tools.files import all_files
from tools.flags import UserError
from tools.tokenizers import bytes_per_token, load_tokenizer, tokenizer_file

# We keep the first 32 KB of a held-out text, so that no single file rules the loss.
HELD_OUT_BYTES = 32 * 1024
BATCH_SIZE = 2**20  # characters that a thread encodes at a time

# -- Files to texts ----------------------------------------------------------------------


def read_files(sources: list[str], field: str, notes: Counter) -> Iterator[str]:
    """Yield the texts of the files and folders of --source, which has `field` in JSON.

    A folder stands for all its files in the order of their names, without hidden files
    and links. Raises UserError for a damaged file or a missing field, OSError if a file
    or folder cannot be read.
    """
    files = []
    for source in sources:
        path = Path(source)
        if not source or not path.exists():
            raise UserError(
                f"--source {source}: no such file or folder (a pattern needs no quotes)"
            )
        for file in all_files(path) if path.is_dir() else [path]:
            if file.is_symlink() and file != path:
                notes["links skipped"] += 1
            elif file.is_file() or file == path:
                files.append(file)
    for file in files:
        try:
            yield from read_file(file, field, notes)
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise UserError(f"--source {file}: {error}") from None


def read_file(file: Path, field: str, notes: Counter) -> Iterator[str]:
    """A line of JSON is one text. So is a text file, but we skip binary files, as git does."""
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
        if is_json:
            yield from read_lines(stream, field, notes)
            return
        raw = stream.read()
        if b"\0" in raw[:8192]:
            notes["binary files skipped"] += 1
        else:
            yield raw.decode(errors="surrogateescape")


def read_lines(lines: Iterable[bytes], field: str, notes: Counter) -> Iterator[str]:
    """The texts of JSON lines. The first line must have one, because the field may be wrong."""
    for i, line in enumerate(lines):
        row = parse(line)
        if i == 0 and row is None:
            raise UserError("line 1 is no JSON object")
        if i == 0 and field not in row:
            raise UserError(
                f"line 1 has no text {field!r}, but {', '.join(row) or 'nothing'}; "
                "choose --text_field"
            )
        if row is None:
            notes["lines that are no JSON object skipped"] += 1
        elif not isinstance(row.get(field), str):
            notes[f"lines without a text {field!r} skipped"] += 1
        else:
            yield row[field]


def parse(line: bytes) -> dict | None:
    """The fields of a line of JSON; None if it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # damaged, or a thousand brackets deep
        return None
    return row if isinstance(row, dict) else None


# -- Texts to a corpus -------------------------------------------------------------------


def prepare(
    texts: Iterable[str],
    tokenizer: str,
    out: Path,
    val_fraction=0.02,
    notes: Counter | None = None,
) -> dict:
    """Encode texts, with an end-of-text after every one, into `out`; return its meta.json.

    notes: counts of what the reader of `texts` skips. meta.json lists them too. The
    folder appears by rename, whole or not at all. Raises OSError if we cannot make it,
    UserError if `out` exists, for an unknown tokenizer, or for too little text to train
    on and to hold out.
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
        n_bytes = Counter()
        with open(train_file, "wb") as train, open(val_file, "wb") as val:
            for tokens, found, sizes in encode_all(
                texts, notes, encoding, dtype, val_fraction
            ):
                train.write(tokens["train"])
                val.write(tokens["val"])
                notes.update(found)
                n_bytes.update(sizes)

        # 2. If the hash of no text holds it out, hold out the end
        if not val_file.stat().st_size:
            ids = np.fromfile(train_file, dtype)
            cut = int(len(ids) * (1 - val_fraction))
            ids[:cut].tofile(train_file)
            ids[cut:].tofile(val_file)

        # 3. Count and describe the tokens
        meta = describe(folder, tokenizer, encoding, dtype, n_bytes)
        meta |= notes
        if not meta["train_tokens"] or not meta["val_tokens"]:
            reasons = ["--source: too little text to divide"]
            reasons += [f"{times:,} {what}" for what, times in notes.items()]
            raise UserError("; ".join(reasons))
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        file = tokenizer_file(tokenizer)
        if file:  # a copy, so that the corpus does not need the file any more
            shutil.copy(file, folder)

        # 4. Put the folder into its place
        os.rename(folder, out)
    return meta


def encode_all(texts: Iterable[str], notes: Counter, *settings) -> Iterator[tuple]:
    """Encode batches of texts on every core. Yield what `encode` returns, in order.

    settings: the arguments of `encode` that are the same for all batches. Threads are
    enough, because the tokenizers let other threads run.
    """
    running = deque()  # results in the order of the batches
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, batch in enumerate(batches(texts, notes)):
            running.append(pool.submit(encode, batch, i == 0, *settings))
            if len(running) > 2 * os.cpu_count():  # few at a time, to save memory
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def batches(texts: Iterable[str], notes: Counter) -> Iterator[list[str]]:
    """Lists of texts that are not empty, of about BATCH_SIZE characters together."""
    batch = []
    size = 0
    for text in tqdm(texts, "encoding", unit=" texts", leave=False, disable=None):
        if not text:
            notes["empty texts skipped"] += 1
            continue
        batch.append(text)
        size += len(text)
        if size >= BATCH_SIZE:
            yield batch
            batch = []
            size = 0
    yield batch


def encode(texts: list[str], first: bool, tokenizer, dtype, val_fraction: float) -> tuple:
    """Texts -> ({"train": their tokens, "val": their tokens}, notes, bytes of both splits).

    A hash of the text divides them, so it always lands on the same side. The first text
    of the first batch trains.
    """
    tokens = {"train": bytearray(), "val": bytearray()}
    notes = Counter()
    n_bytes = Counter()
    end_of_text = dtype.type(tokenizer.eot_token).tobytes()
    for text in texts:
        # 1. In Unicode that UTF-8 can write
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
        ids = tokenizers.encode(tokenizer, text)
        notes.update(tokenizers.losses(tokenizer, len(raw), ids))
        tokens[split] += ids.astype(dtype).tobytes() + end_of_text
        n_bytes[split] += len(raw)
    return tokens, notes, n_bytes


def describe(folder: Path, name: str, tokenizer, dtype: np.dtype, n_bytes: dict) -> dict:
    """The facts of meta.json, with counts and a fingerprint of all tokens.

    n_bytes: the bytes of the texts of each split, or with all of them in "train" if we
    had to divide a text.
    """
    lengths = bytes_per_token(tokenizer)
    meta = {"tokenizer": Path(name).name, "vocab_size": len(lengths), "dtype": dtype.name}
    fingerprint = hashlib.sha256(repr(sorted(meta.items())).encode())
    written = {}  # bytes of the tokens of a split
    for split in ("train", "val"):
        counts = np.zeros(len(lengths), dtype=np.int64)  # of every token id
        last = None
        with open(folder / f"{split}.bin", "rb") as file:
            while chunk := file.read(2**22):
                fingerprint.update(chunk)
                ids = np.frombuffer(chunk, dtype)
                counts += np.bincount(ids, minlength=len(lengths))
                last = ids[-1]
        is_divided = last not in (None, tokenizer.eot_token)
        meta[f"{split}_documents"] = int(counts[tokenizer.eot_token]) + is_divided
        meta[f"{split}_tokens"] = int(counts.sum())
        written[split] = int(counts @ lengths)

    # the bytes of the texts, which a tokenizer may write differently
    train_bytes = n_bytes["train"]
    val_bytes = n_bytes["val"]
    if not val_bytes:
        everything = max(1, written["train"] + written["val"])
        val_bytes = round(train_bytes * written["val"] / everything)
        train_bytes -= val_bytes
    meta["train_bytes"] = train_bytes
    meta["val_bytes"] = val_bytes
    meta["val_token_bytes"] = written["val"]
    meta["fingerprint"] = fingerprint.hexdigest()[:16]
    return meta
