"""Make a corpus: from files and datasets to texts, and from texts to tokens on disk."""

import codecs
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
from contextlib import ExitStack
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
    not_utf8 = []
    for path in list(find_files(sources)):
        try:
            yield from read_file(path, field)
        except UnicodeDecodeError:
            not_utf8.append(path)
        except DAMAGES as error:
            skipped.append(f"skipped {path}: {error}")
    for line in skipped[:10]:
        print(line)
    if len(skipped) > 10:
        print(f"skipped {len(skipped) - 10:,} more files")
    if not_utf8:
        where = f"{len(not_utf8):,} files, such as {not_utf8[0]}"
        print(f"replaced bytes that are not UTF-8 in {where}")


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

    Raises ValueError at the end if it skipped something, and UnicodeDecodeError, which is
    one, if it replaced bytes that are not UTF-8.
    """
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        if path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson", ".json")):
            yield from read_lines(file, field)
            return
        raw = file.read()
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raw = raw.decode("utf-16", errors="replace").encode()
    # the byte order mark of Windows (-sig) is not text
    text = raw.decode("utf-8-sig", errors="replace")
    if "\0" in text:
        raise ValueError("not text (--dataset reads a folder of Parquet)")
    yield text
    if "\ufffd" in text:
        raw.decode()  # raises UnicodeDecodeError, unless the file has this character


def read_lines(lines: Iterable[bytes], field: str) -> Iterator[str]:
    """Yield the texts of lines of JSON. Raises ValueError at the end if some lack one."""
    n_lines = 0
    n_without = 0
    for line in lines:
        if line.isspace():
            continue
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
        rule = f"are not JSON in UTF-8 with a text {field!r} (--text_field)"
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

        # 2. Blocks of all texts instead, if the hash held out few texts, or too few tokens
        n_left_out = counts["whole_bytes"] - counts["val_bytes"]
        wanted = int(val_fraction * (counts["train_tokens"] + counts["whole_tokens"]))
        if wanted < 8:  # a character may take several tokens, and a block needs one
            found = f"{counts['whole_bytes']:,} bytes of text"
            raise UserError(f"--out {out}: {found} are too little to divide")
        if counts["val_documents"] < 20 or counts["val_tokens"] < wanted / 2:
            hold_out_blocks(folder, counts, encoding, dtype, wanted)
        elif n_left_out:
            print(f"left out {n_left_out:,} bytes of held-out texts above 32 KB")
        (folder / "whole.bin").unlink()

        # 3. Their description
        for name in ("train_documents", "val_documents", "train_tokens", "val_tokens"):
            meta[name] = counts[name]
        meta["bytes_per_token"] = counts["val_bytes"] / counts["val_tokens"]
        for split in ("train", "val"):
            fingerprint.update(np.memmap(folder / f"{split}.bin", mode="r"))
        meta["fingerprint"] = fingerprint.hexdigest()[:16]
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        if tokenizer_file(tokenizer):  # a copy, so that the corpus does not need the file
            shutil.copy(tokenizer, folder)

        # 4. Put the folder into its place
        os.rename(folder, out)


HELD_OUT_BYTES = 2**15  # limit for a held-out text, so that no single text rules the loss
BATCH_SIZE = 2**20  # characters that a thread encodes at a time


def divide(texts: Iterable[str], val_fraction: float) -> Iterator[tuple[str, str]]:
    """Yield ("train", text), or ("val", its first 32 KB) and ("whole", text).

    A hash decides, so equal texts are on one side. The first text always trains, because
    there may be no other.
    """
    for number, text in enumerate(filter(None, texts)):
        raw = text.encode(errors="replace")  # JSON may contain half a pair of UTF-16
        digest = hashlib.sha256(raw).digest()
        uniform = int.from_bytes(digest[:8], "big") / 2**64  # from 0 to 1
        if number > 0 and uniform < val_fraction:
            yield "val", raw[:HELD_OUT_BYTES].decode(errors="ignore")
            yield "whole", raw.decode()  # in case we hold out blocks instead
        else:
            yield "train", raw.decode()


def write_tokens(folder: Path, divided: Iterable[tuple], tokenizer, dtype) -> Counter:
    """Write a file for every split. Returns their documents, tokens and bytes of text."""
    counts = Counter()
    files = {}
    with ExitStack() as stack:
        for split in ("train", "val", "whole"):
            file = open(folder / f"{split}.bin", "wb")
            files[split] = stack.enter_context(file)
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


def hold_out_blocks(folder: Path, counts: Counter, tokenizer, dtype, n: int) -> None:
    """Hold out about n tokens of all texts, in evenly spaced blocks. Updates the counts."""
    # 1. All texts in one file
    with open(folder / "whole.bin", "ab") as file:
        np.memmap(folder / "train.bin", dtype, mode="r").tofile(file)
    tokens = np.memmap(folder / "whole.bin", dtype, mode="r")

    # 2. Hold out the start of every part. Blocks are long, because a start lacks context
    n_blocks = min(100, max(1, n // 1000))
    size = n // n_blocks
    counts["val_tokens"] = counts["val_bytes"] = 0
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for part in np.array_split(tokens, n_blocks):
            ids, n_bytes = encode_again(part[:size], tokenizer, dtype)
            ids.tofile(val)
            part[size:].tofile(train)
            counts["val_tokens"] += len(ids)
            counts["val_bytes"] += n_bytes
    counts["val_documents"] = n_blocks
    counts["train_documents"] += counts["whole_documents"]
    counts["train_tokens"] = len(tokens) - n_blocks * size
    print(f"few or long texts: held out {n_blocks} evenly spaced blocks")


def encode_again(block: np.ndarray, tokenizer, dtype) -> tuple[np.ndarray, int]:
    """Encode the text of a block, without characters that it cuts, and count its bytes."""
    end = tokenizer.eot_token
    batch = []
    for ids in np.split(block, np.flatnonzero(block == end)):
        text = tokenizer.decode(ids[ids != end].tolist()).strip("\ufffd")
        if text:
            batch.append(("val", text))
    encoded = encode(batch, tokenizer, dtype)
    ids = np.concatenate([ids for _, ids, _ in encoded])
    return ids[:-1], sum(n_bytes for _, _, n_bytes in encoded)  # it ends within a text
