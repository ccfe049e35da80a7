"""Tokenizers: bytes, tiktoken's names and files, Hugging Face's tokenizer.json in and out.

Every tokenizer becomes a tiktoken.Encoding, so the rest of the project knows a single type.
"""

import base64
import contextlib
import json
from pathlib import Path

import numpy as np
import tiktoken

# GPT-2's rule for cutting text into words before it merges bytes. A .tiktoken file lacks it.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# StarCoder and the paper's models first take out single digits.
STARCODER_PATTERN = (
    r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
)
# Names of end-of-text in a tokenizer.json. tiktoken uses the first.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Load 'bytes', a .tiktoken or tokenizer.json file, or a name known to tiktoken (which may
    download it). Raises ValueError if no tokenizer has this name.
    """
    if name == "bytes":
        # Ids are the bytes themselves. 255 never occurs in UTF-8, so it can be end-of-text.
        ranks = {bytes([i]): i for i in range(255)}
        return encoding("bytes", r"[\s\S]", ranks, {"<|endoftext|>": 255})
    try:
        if file := tokenizer_file(name):
            return read_tokenizer_json(file) if file.suffix == ".json" else read_tiktoken(file)
        if name in tiktoken.list_encoding_names():
            return tiktoken.get_encoding(name)
    except FileNotFoundError:
        raise ValueError(f"--tokenizer {name}: no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer {name}: cannot be loaded: {error}") from None
    known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
    raise ValueError(f"--tokenizer {name}: unknown; choose {known}, or a .tiktoken or .json file")


def encoding(name: str, pattern: str, ranks: dict, special: dict) -> tiktoken.Encoding:
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def tokenizer_file(name: str) -> Path | None:
    """The path, if this tokenizer name is one."""
    return Path(name) if name.endswith((".tiktoken", ".json")) else None


def bytes_per_token(tokenizer: tiktoken.Encoding) -> np.ndarray:
    """Length in bytes of every token id, [n_vocab] int64; 0 for special tokens and unused ids."""
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    special = {tokenizer.encode_single_token(token) for token in tokenizer.special_tokens_set}
    for token in set(range(tokenizer.n_vocab)) - special:
        with contextlib.suppress(KeyError):  # an unused id
            lengths[token] = len(tokenizer.decode_single_token_bytes(token))
    return lengths


def token_type(tokenizer: tiktoken.Encoding) -> np.dtype:
    """The integer type of token ids on disk."""
    return np.dtype(np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32)


def read_tiktoken(path: Path) -> tiktoken.Encoding:
    """Read a .tiktoken file: each line is a token in base64 and its rank, which is also its id.

    The file does not say how to cut text into words; we cut as GPT-2 does. For cl100k_base and
    o200k_base, which differ, give the name, not the file. Raises ValueError for other files.
    """
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError:
        raise ValueError("not a .tiktoken file; each line must be a token and its rank") from None
    has_all_bytes = all(bytes([i]) in ranks for i in range(256))
    if not has_all_bytes or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("not a byte-level vocabulary: all 256 bytes, ranks 0, 1, 2, ... no gaps")
    return encoding(path.stem, GPT2_PATTERN, ranks, {"<|endoftext|>": len(ranks)})


def byte_letters() -> dict[int, str]:
    """The letter that a tokenizer.json writes for each byte; invisible ones get 256 and up."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def read_tokenizer_json(path: Path) -> tiktoken.Encoding:
    """Read Hugging Face's byte-level BPE, with the same ids. Raises ValueError for other kinds."""
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
        model = spec["model"]
        is_bpe = model["type"] == "BPE" and not spec["normalizer"]
        pattern = word_pattern(spec["pre_tokenizer"])
        vocab = model["vocab"]
        special = {token["content"]: token["id"] for token in spec["added_tokens"]}
        # older files write a merge as "a b"
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        merged = list(dict.fromkeys(vocab[a + b] for a, b in merges))  # two may make one token
        byte_of = {letter: byte for byte, letter in byte_letters().items()}
        tokens = [letter for letter in byte_of if letter in vocab] + [a + b for a, b in merges]
        ranks = {bytes(byte_of[letter] for letter in token): vocab[token] for token in tokens}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not the tokenizer.json of a byte-level BPE ({error!r})") from None
    end_of_text = next((special[name] for name in END_OF_TEXT if name in special), None)
    if not is_bpe or model.get("byte_fallback"):
        raise ValueError("not a byte-level BPE")
    if pattern is None:
        raise ValueError("its pre-tokenizer is neither GPT-2's nor StarCoder's nor one pattern")
    if merged != sorted(merged):  # tiktoken merges in the order of the ids
        raise ValueError("its ids do not follow the order of its merges")
    if not all(bytes([b]) in ranks for b in {*range(0xF5)} - {0xC0, 0xC1}):  # in UTF-8
        raise ValueError("not a byte-level vocabulary; some of the 256 bytes are missing")
    if end_of_text is None:
        raise ValueError(f"has no end-of-text token, none of {', '.join(END_OF_TEXT)}")
    return encoding(path.stem, pattern, ranks, special | {END_OF_TEXT[0]: end_of_text})


def word_pattern(spec: dict) -> str | None:
    """The regular expression of a tokenizer.json's pre-tokenizer; None if we do not know it."""
    *before, last = spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    match before, last.get("use_regex", True):
        case [], True:
            return GPT2_PATTERN
        case [{"type": "Digits", "individual_digits": True}], True:
            return STARCODER_PATTERN
        case [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}], False:
            return None if before[0]["invert"] else regex


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two parts of every token longer than a byte, in order of rank."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:  # merge the lowest rank first, as an encoder would
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append(tuple(parts))
    return merges


def tokenizer_files(tokenizer: tiktoken.Encoding) -> dict[str, str]:
    """The same tokenizer in Hugging Face's format, as file name -> content."""
    ranks, letters = tokenizer._mergeable_ranks, byte_letters()
    id_of = tokenizer.encode_single_token
    special = {t: id_of(t) for t in sorted(tokenizer.special_tokens_set)}
    spell = lambda token: "".join(letters[b] for b in token)
    flags = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
    byte_level = {"type": "ByteLevel", "trim_offsets": True}
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": i, "content": name, "special": True} | flags
                         for name, i in sorted(special.items(), key=lambda item: item[1])],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": tokenizer._pat_str},
             "behavior": "Isolated", "invert": False},
            byte_level | {"add_prefix_space": False, "use_regex": False},
        ]},
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "byte_fallback": False,
            "vocab": {spell(token): rank for token, rank in ranks.items()} | special,
            "merges": [[spell(part) for part in pair] for pair in merges_of(ranks)],
        },
    }  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{kind}_token": END_OF_TEXT[0] for kind in ("bos", "eos", "pad")}
    files = {"tokenizer.json": spec, "tokenizer_config.json": config}
    return {name: json.dumps(content, ensure_ascii=False) for name, content in files.items()}
