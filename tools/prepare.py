"""Make a corpus: from files or a dataset to texts, and from texts to tokens on disk."""

import gzip
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from tools.flags import UserError
from tools.tokenizers import copy_tokenizer, identity, load_tokenizer

# -- From files or a dataset to texts ----------------------------------------------------


def embedded_texts(folder: Path) -> Iterator[str]:
    """torch's Python files in the order of their paths, the same in all its builds."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    del files["version.py"]  # names the build
    for name in sorted(files):
        yield files[name].read_text(encoding="utf-8")


def read_files(sources: list[str], field: str) -> Iterator[str]:
    """The texts of files and folders, in the order of their names. Raises UserError."""
    for source in sources:
        for path in files_of(Path(source)):
            yield from read_file(path, field)


def files_of(path: Path) -> Iterator[Path]:
    """The files at a path, without hidden files in a folder, such as .git."""
    if not path.is_dir():
        yield path
        return
    for child in sorted(path.iterdir()):
        if not child.name.startswith("."):
            yield from files_of(child)


def read_file(path: Path, field: str) -> Iterator[str]:
    """The text of every line of a JSON file, or any other file as one text."""
    name = path.name.lower()
    open_file = gzip.open if name.endswith(".gz") else open
    is_json = name.removesuffix(".gz").endswith((".jsonl", ".ndjson", ".json"))
    try:
        with open_file(path, "rt", encoding="utf-8-sig", newline="") as file:
            if not is_json:
                yield file.read()
                return
            for line in file:
                if line.strip():
                    yield json.loads(line)[field]
    except (ValueError, LookupError, TypeError, EOFError, gzip.BadGzipFile):
        kind = f"lines of JSON with a text {field!r}" if is_json else "text"
        rule = f"not {kind} in UTF-8, perhaps in gzip; leave it out or convert it"
        raise UserError(f"--source {path}: {rule}") from None


def read_dataset(name: str, field: str) -> Iterator[str]:
    """The training texts of a dataset on huggingface.co, or in a folder of files.

    The name may end in a configuration, as in HuggingFaceFW/fineweb-edu:sample-10BT. We
    download while we encode, and store only the tokens.
    """
    from datasets import load_dataset

    path, _, configuration = name.partition(":")
    rows = load_dataset(path, configuration or None, split="train", streaming=True)
    for row in rows:
        yield row[field]


# -- From texts to a corpus --------------------------------------------------------------

HELD_OUT_BYTES = 2**15  # limit for a held-out text, so that no single text rules the loss


def prepare(texts: Iterable[str], tokenizer: str, out: Path, val_fraction=0.02) -> None:
    """Encode texts into the new folder `out`, which appears whole or not at all."""
    if not 0 < val_fraction < 1:
        raise UserError(f"--val_fraction {val_fraction}: must be between 0 and 1")
    encoding = load_tokenizer(tokenizer)
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32)
    meta = {
        "tokenizer": identity(tokenizer),
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
        copy_tokenizer(tokenizer, Path(), folder)

        # 1. The tokens
        n = write_tokens(folder, divide(texts, val_fraction), encoding, dtype)
        wanted = int(val_fraction * (n["train"] + n["val"]))
        if wanted < 8:  # a character may take several tokens
            raise UserError(f"--out {out}: too little text to divide")
        if n["val"] < wanted / 2:  # few or long texts
            hold_out_the_end(folder, dtype, wanted)
            # however many we move, the tokens of both files stay in the same order
            fingerprint.update(f"held out {wanted}".encode())

        # 2. Their description
        train = np.memmap(folder / "train.bin", dtype, mode="r")
        val = np.fromfile(folder / "val.bin", dtype)
        fingerprint.update(train)
        fingerprint.update(val)
        meta |= {
            "train_tokens": len(train),
            "val_tokens": len(val),
            "bytes_per_token": count_bytes(val, encoding) / len(val),
            "fingerprint": fingerprint.hexdigest()[:16],
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")

        # 3. Put the folder into its place
        folder.rename(out)


def divide(texts: Iterable[str], val_fraction: float) -> Iterator[tuple[str, str]]:
    """Yield ("train", text), or ("val", its first 32 KB).

    A hash decides, so equal texts are on one side. The first text and its copies always
    train, because there may be no other.
    """
    first = None
    for text in filter(None, texts):
        raw = text.encode()
        digest = hashlib.sha256(raw).digest()
        first = first or digest
        uniform = int.from_bytes(digest[:8], "big") / 2**64  # from 0 to 1
        if uniform < val_fraction and digest != first:
            yield "val", raw[:HELD_OUT_BYTES].decode(errors="ignore")
        else:
            yield "train", text


def write_tokens(folder: Path, divided: Iterator[tuple], tokenizer, dtype) -> dict:
    """Write a file for every split. Returns their numbers of tokens."""
    n = {"train": 0, "val": 0}

    def encode(item: tuple[str, str]) -> np.ndarray:
        return np.array([*tokenizer.encode_ordinary(item[1]), tokenizer.eot_token], dtype)

    # threads are enough, because tokenizers let other threads run
    with (
        open(folder / "train.bin", "wb") as train,
        open(folder / "val.bin", "wb") as val,
        ThreadPoolExecutor() as pool,
    ):
        files = {"train": train, "val": val}
        batch = list(islice(divided, 256))  # few at a time, to save memory
        while batch:
            for (split, _), ids in zip(batch, pool.map(encode, batch)):
                files[split].write(ids)
                n[split] += len(ids)
            batch = list(islice(divided, 256))
    return n


def hold_out_the_end(folder: Path, dtype, n: int) -> None:
    """Move the last n tokens of the training split to the held-out one."""
    tokens = np.fromfile(folder / "train.bin", dtype)
    with open(folder / "val.bin", "ab") as val:
        tokens[-n:].tofile(val)
    tokens[:-n].tofile(folder / "train.bin")
    print(f"few or long texts, so the last {n:,} tokens are for validation")


def count_bytes(tokens: np.ndarray, tokenizer) -> int:
    """The bytes of the text that comes back, which a tokenizer may have normalized."""
    ends = np.flatnonzero(tokens == tokenizer.eot_token)
    n = 0
    for document in np.split(tokens, ends + 1):
        words = document[document != tokenizer.eot_token]
        n += len(tokenizer.decode(words.tolist()).encode())
    return n
