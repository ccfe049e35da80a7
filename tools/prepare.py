"""Turn text of several formats into a corpus, a folder with train.bin, val.bin and meta.json.

`read_files` yields documents, `divide` holds some of them out, `write_tokens` encodes them on every
core, and `prepare` puts it all together. `notes` counts everything that we skip or change.
"""

import glob
import gzip
import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from tools.tokenizers import bytes_per_token, load_tokenizer, tokenizer_file

HELD_OUT_BYTES = 32 * 1024  # kept of a held-out document, so that no single file rules the loss


def source_files(sources: list[str]) -> list[Path | str]:
    """The files in the folders and quoted patterns of --source. hf:NAME stays as it is."""
    files: list[Path | str] = []
    for source in sources:
        path = Path(source)
        if source.startswith("hf:"):
            files.append(source)
        elif path.is_dir():
            hidden = lambda p: re.search(r"(^|/)\.", p.relative_to(path).as_posix())
            files += [p for p in sorted(path.rglob("*")) if p.is_file() and not hidden(p)]
        elif path.exists():
            files.append(path)
        else:
            found = sorted(glob.glob(source, recursive=True))
            files += [Path(p) for p in found if Path(p).is_file()]
            if not found:
                raise FileNotFoundError(f"--source {source}: no such file or folder")
    return files


def read_files(sources: list[str], field: str, notes: Counter) -> Iterator[str]:
    """Yield the documents. Raises ValueError if a file is damaged or has no text in `field`."""
    for file in source_files(sources):
        read = read_text
        if re.search(r"^hf:|\.parquet$", str(file)):
            read = read_rows
        elif re.search(r"\.(jsonl|ndjson)(\.\w+)?$|\.json\.gz$", str(file)):
            read = read_lines
        try:
            yield from read(file, field, notes)
        except (ImportError, EOFError, OSError, ValueError, zlib.error) as error:
            problem = " ".join(str(error).split())
            advice = "; pip install datasets" if isinstance(error, ImportError) else ""
            raise ValueError(f"--source {file}: {problem}{advice}") from None


def unpack(file: Path):
    return gzip.open(file) if file.suffix == ".gz" else open(file, "rb")


def read_text(file: Path, _field: str, notes: Counter) -> Iterator[str]:
    """A file is one document."""
    with unpack(file) as stream:
        raw = stream.read()
    if b"\0" in raw[:8192]:  # as git recognizes them
        notes["binary files skipped"] += 1
    else:
        yield raw.decode(errors="surrogateescape")


def read_lines(file: Path, field: str, notes: Counter) -> Iterator[str]:
    """A line of JSON is one document."""
    if file.suffix not in (".jsonl", ".ndjson", ".gz"):
        raise ValueError("of packed files we read only .gz; unpack it first")
    with unpack(file) as lines:
        yield from texts_of(map(parse, lines), field, notes)


def parse(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def read_rows(file: Path | str, field: str, notes: Counter) -> Iterator[str]:
    """A row of a Parquet file, or of a hub dataset hf:NAME or hf:NAME:CONFIG, is one document."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # we report errors, in one line
    if isinstance(file, Path):
        source = {"path": "parquet", "data_files": str(file)}
    else:
        name, _, config = file.removeprefix("hf:").partition(":")
        source = {"path": name, "name": config or None}
    rows = datasets.load_dataset(**source, split="train", streaming=True)
    yield from texts_of(rows, field, notes)


def texts_of(rows: Iterable, field: str, notes: Counter) -> Iterator[str]:
    """Yield the texts in rows of data. Raises ValueError if the first row lacks the field."""
    for i, row in enumerate(rows):
        row = row if isinstance(row, dict) else {}
        if i == 0 and field not in row:
            fields = ", ".join(row) or "nothing"
            raise ValueError(f"row 1 has no text {field!r}, but {fields}; choose --text_field")
        if isinstance(row.get(field), str):
            yield row[field]
        else:
            notes["rows without text skipped"] += 1


def divide(documents: Iterable[str], val_fraction: float, notes: Counter) -> Iterator[tuple]:
    """Yield ("train" or "val", text) of every document.

    A hash of the text decides, so a document always lands on the same side. But the first document
    is for training.
    """
    first = True
    invalid = re.compile("[\ud800-\udfff]")  # surrogates, from bytes that are not UTF-8 or JSON
    for text in tqdm(documents, "encoding", unit=" documents", leave=False, disable=None):
        text, times = invalid.subn("\ufffd", text)
        if times:
            notes["invalid characters replaced"] += times
        raw = text.encode()
        if not raw:
            notes["empty documents skipped"] += 1
            continue
        number = int.from_bytes(hashlib.sha256(raw).digest()[:8], "big") / 2**64
        split = "val" if number < val_fraction and not first else "train"
        if split == "val" and len(raw) > HELD_OUT_BYTES:
            notes[f"held-out texts cut at {HELD_OUT_BYTES // 1024} KB"] += 1
            text = raw[:HELD_OUT_BYTES].decode(errors="ignore")
        yield split, text
        first = False


def prepare(documents: Iterable[str], tokenizer: str, out: Path, val_fraction=0.02, notes=None):
    """Encode texts, with an end-of-text after every one, into `out`; return its meta.json.

    The folder appears by rename, whole or not at all. Raises OSError if `out` exists or we cannot
    make it, ValueError for an unknown tokenizer or too little text to train on and to hold out.
    """
    encoding = load_tokenizer(tokenizer)
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32)
    notes = Counter() if notes is None else notes
    if out.exists():
        raise FileExistsError(f"--out {out}: already exists; choose another folder or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        folder = Path(temporary, out.name)
        folder.mkdir()
        write_tokens(folder, divide(documents, val_fraction, notes), encoding, dtype)
        if not (folder / "val.bin").stat().st_size:
            hold_out_the_end(folder, dtype, val_fraction)
        meta = describe(folder, tokenizer, encoding, dtype, notes)
        if not (meta["train_tokens"] and meta["val_tokens"]):
            found = [f"{times:,} {what}" for what, times in notes.items()]
            raise ValueError("; ".join(["--source: too little text to divide", *found]))
        if file := tokenizer_file(tokenizer):  # a copy, so that the corpus does not need it
            shutil.copy(file, folder)
        os.rename(folder, out)
    return meta


def write_tokens(folder: Path, texts: Iterator[tuple], tokenizer, dtype: np.dtype) -> None:
    """Encode the texts in order. tiktoken releases the GIL, so threads use every core."""

    def encode(item: tuple) -> tuple[str, np.ndarray]:
        split, text = item
        if tokenizer.n_vocab == 256:  # only "bytes" is so small
            ids = np.frombuffer(text.encode(), np.uint8)
        else:
            ids = tokenizer.encode_to_numpy(text, disallowed_special=())
        return split, np.append(ids.astype(dtype), dtype.type(tokenizer.eot_token))

    with (
        open(folder / "train.bin", "wb") as train,
        open(folder / "val.bin", "wb") as val,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        while batch := list(islice(texts, 256)):  # few at a time, to save memory
            for split, ids in pool.map(encode, batch):
                file = train if split == "train" else val
                file.write(ids.tobytes())


def hold_out_the_end(folder: Path, dtype: np.dtype, val_fraction: float) -> None:
    """Move the last tokens of train.bin to val.bin, because the hash held out no document."""
    with open(folder / "train.bin", "r+b") as train, open(folder / "val.bin", "wb") as val:
        n = os.path.getsize(train.name) // dtype.itemsize
        cut = int(n * (1 - val_fraction)) * dtype.itemsize
        train.seek(cut)
        shutil.copyfileobj(train, val)
        train.truncate(cut)


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
    meta |= notes
    meta["fingerprint"] = fingerprint.hexdigest()[:16]
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta
