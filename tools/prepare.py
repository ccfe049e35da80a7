"""Make a corpus: from files and datasets to texts, and from texts to tokens on disk."""

import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tools import tokenizers
from tools.flags import UserError
from tools.tokenizers import load_tokenizer, tokenizer_file

# -- From files and datasets to texts ----------------------------------------------------


def embedded_texts(folder: Path) -> Iterator[str]:
    """torch's Python files in the order of their paths, the same in all its builds."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    del files["version.py"]  # names the build
    for name in sorted(files):
        yield files[name].read_text(encoding="utf-8")


def read_dataset(name: str, field: str) -> Iterator[str]:
    """Yield the training texts of a dataset on huggingface.co, or in a folder of files.

    The name may end in a configuration, as in HuggingFaceFW/fineweb-edu:sample-10BT. We
    download while we encode, and store only the tokens. Raises UserError.
    """
    try:
        import datasets
    except ImportError:
        raise UserError("--dataset: needs a package; pip install datasets") from None

    path, _, configuration = name.partition(":")
    try:
        rows = datasets.load_dataset(
            path, configuration or None, split="train", streaming=True
        )
    except ValueError as error:  # no such configuration, or no split of this name
        raise UserError(f"--dataset {name}: {error}") from None
    for row in rows:
        if field not in row:
            rule = f"the dataset has {', '.join(row)}"
            raise UserError(f"--text_field {field}: {rule}")
        yield row[field] or ""


# errors of a file that we cannot access, that is not complete, or that is not text
DAMAGES = (OSError, EOFError, zlib.error, ValueError)


def read_files(sources: list[str], field: str) -> Iterator[str]:
    """Yield the texts of files and folders, and print what we skip. Raises UserError."""
    skipped = []
    for path in list(find_files(sources)):
        try:
            yield from read_file(path, field)
        except DAMAGES as error:
            skipped.append(f"skipped {path}: {error}")
    for line in skipped[:10]:
        print(line)
    if len(skipped) > 10:
        print(f"skipped {len(skipped) - 10:,} more files")


def find_files(sources: list[str]) -> Iterator[Path]:
    """Yield the files, and the files in the folders in the order of their names.

    We leave out hidden files in a folder, such as .git. Raises UserError.
    """
    for source in map(Path, sources):
        if not source.exists():
            raise UserError(f"--source {source}: no such file or folder")
        if not source.is_dir():
            yield source
            continue
        for path in sorted(source.rglob("*")):
            names = path.relative_to(source).parts
            is_hidden = any(name.startswith(".") for name in names)
            if path.is_file() and not is_hidden:
                yield path


def read_file(path: Path, field: str) -> Iterator[str]:
    """Yield every line of a JSON file as a text, and any other file as one text.

    Raises ValueError at the end if it skipped something.
    """
    open_file = gzip.open if path.suffix == ".gz" else open
    # CR LF stays as it is, and the byte order mark of Windows (-sig) is not text
    how = dict(encoding="utf-8-sig", errors="replace", newline="\n")
    with open_file(path, "rt", **how) as file:
        if path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson", ".json")):
            yield from read_lines(file, field)
            return
        text = file.read()
    if "\0" in text:
        raise ValueError("not text (--dataset reads a folder of Parquet)")
    yield text


def read_lines(lines: Iterable[str], field: str) -> Iterator[str]:
    """Yield the texts of lines of JSON. Raises ValueError at the end if some lack one."""
    n_lines = 0
    n_without = 0
    for line in lines:
        n_lines += 1
        try:
            text = json.loads(line)[field]
        except (ValueError, KeyError, TypeError):
            text = None
        if isinstance(text, str):
            yield text
        else:
            n_without += 1
    if n_without:
        rule = f"are not JSON with a text {field!r} (--text_field)"
        raise ValueError(f"{n_without:,} of {n_lines:,} lines {rule}")


# -- From texts to a corpus --------------------------------------------------------------


def prepare(texts: Iterable[str], tokenizer: str, out: Path, val_fraction=0.02) -> None:
    """Encode texts into the new folder `out`, which appears whole or not at all.

    Raises UserError or OSError.
    """
    from tqdm import tqdm

    encoding = load_tokenizer(tokenizer)
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32)
    meta = {
        "tokenizer": Path(tokenizer).name,
        "vocab_size": encoding.n_vocab,
        "dtype": dtype.name,
    }
    fingerprint = hashlib.sha256(repr(sorted(meta.items())).encode())
    if out.exists():
        raise UserError(f"--out {out}: exists already; choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        # a folder inside, because only we may read the temporary folder
        folder = Path(temporary, out.name)
        folder.mkdir()

        # 1. The tokens
        texts = tqdm(texts, "encoding", unit=" texts", leave=False, disable=None)
        counts = write_tokens(folder, divide(texts, val_fraction), encoding, dtype)
        wanted = int(val_fraction * (counts["train_tokens"] + counts["val_tokens"]))
        if counts["val_tokens"] < min(wanted / 2, FEW_TOKENS):
            hold_out_end(folder, counts, dtype, wanted - counts["val_tokens"])
        if not counts["train_tokens"] or not counts["val_tokens"]:
            raise UserError(f"--out {out}: too little text to divide")

        # 2. Their description
        for name in ("train_documents", "val_documents", "train_tokens", "val_tokens"):
            meta[name] = counts[name]
        meta["bytes_per_token"] = counts["val_bytes"] / counts["val_tokens"]
        for split in ("train", "val"):
            fingerprint.update(np.memmap(folder / f"{split}.bin", mode="r"))
        meta["fingerprint"] = fingerprint.hexdigest()[:16]
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        if tokenizer_file(tokenizer):  # a copy, so that the corpus does not need the file
            shutil.copy(tokenizer, folder)

        # 3. Put the folder into its place
        os.rename(folder, out)


# with fewer held-out tokens, the validation loss depends on the texts among them
FEW_TOKENS = 50_000
HELD_OUT_BYTES = 2**15  # limit for a held-out text, so that no single text rules the loss
BATCH_SIZE = 2**20  # characters that a thread encodes at a time


def divide(texts: Iterable[str], val_fraction: float) -> Iterator[tuple[str, str]]:
    """Yield ("train" or "val", text). A hash decides, so equal texts are on one side.

    The first text always trains, because there may be no other.
    """
    n_left_out = 0
    for number, text in enumerate(filter(None, texts)):
        raw = text.encode(errors="replace")  # JSON may contain half a pair of UTF-16
        digest = hashlib.sha256(raw).digest()
        uniform = int.from_bytes(digest[:8], "big") / 2**64  # from 0 to 1
        if number > 0 and uniform < val_fraction:
            n_left_out += max(0, len(raw) - HELD_OUT_BYTES)
            yield "val", raw[:HELD_OUT_BYTES].decode(errors="ignore")
        else:
            yield "train", raw.decode()
    if n_left_out:
        print(f"left out {n_left_out:,} bytes of held-out texts above 32 KB")


def write_tokens(folder: Path, divided: Iterable[tuple], tokenizer, dtype) -> Counter:
    """Write train.bin and val.bin. Returns their documents, tokens and bytes of text."""
    counts = Counter()
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        files = {"train": train, "val": val}
        for split, ids, n_bytes in encode_all(divided, tokenizer, dtype):
            files[split].write(ids)
            counts[f"{split}_documents"] += 1
            counts[f"{split}_tokens"] += len(ids)
            counts[f"{split}_bytes"] += n_bytes
    return counts


def encode_all(divided: Iterable[tuple], tokenizer, dtype) -> Iterator[tuple]:
    """Encode texts on all cores, in order. Yields (split, token ids, number of bytes).

    Threads are enough, because tokenizers let other threads run.
    """
    running = deque()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for batch in batches(divided):
            running.append(pool.submit(encode, batch, tokenizer, dtype))
            if len(running) > 2 * os.cpu_count():  # few at a time, to save memory
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()


def batches(divided: Iterable[tuple]) -> Iterator[list[tuple]]:
    """Yield lists of (split, text), each with about BATCH_SIZE characters."""
    batch = []
    size = 0
    for split, text in divided:
        batch.append((split, text))
        size += len(text)
        if size >= BATCH_SIZE:
            yield batch
            batch = []
            size = 0
    yield batch


def encode(batch: list[tuple], tokenizer, dtype: np.dtype) -> list[tuple]:
    """(split, text) -> (split, token ids with an end-of-text, number of bytes)."""
    end = np.array([tokenizer.eot_token], dtype)
    encoded = []
    for split, text in batch:
        ids = tokenizers.encode(tokenizer, text).astype(dtype)
        encoded.append((split, np.append(ids, end), len(text.encode())))
    return encoded


def hold_out_end(folder: Path, counts: Counter, dtype: np.dtype, n: int) -> None:
    """Move n tokens from the end of train.bin to val.bin, which has too few."""
    ids = np.fromfile(folder / "train.bin", dtype)
    cut = len(ids) - n
    ids[:cut].tofile(folder / "train.bin")
    with open(folder / "val.bin", "ab") as file:
        ids[cut:].tofile(file)
    counts["val_bytes"] += counts["train_bytes"] * n / max(1, len(ids))
    counts["train_tokens"] -= n
    counts["val_tokens"] += n
