"""Load tokenizers as a tiktoken.Encoding: bytes, tiktoken names and files, tokenizer.json
files.

`tokenizer_files` writes the tokenizer.json of Hugging Face for an export.
"""

import base64
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import tiktoken

from tools.flags import UserError

# GPT-2 cuts text into these words before it merges bytes.
GPT2_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
# StarCoder and the paper take out single digits first.
STARCODER_PATTERN = (
    r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?=\p{N})|\s+(?!\S)|\s+"
)
# End-of-text has one of these names in a tokenizer.json. tiktoken uses the first.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")
# every tokenizer can encode it
PROBE = "".join(map(chr, range(128))) + "é 東 \N{GRINNING FACE}"


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Load 'bytes', a .tiktoken or tokenizer.json file, or a name that tiktoken knows
    (and may download). Raises UserError if no tokenizer has this name."""
    if name == "bytes":  # 255 never occurs in UTF-8, so it can be end-of-text
        ranks = {bytes([i]): i for i in range(255)}
        return encoding("bytes", r"[\s\S]", ranks, {"<|endoftext|>": 255})
    try:
        if file := tokenizer_file(name):
            return (
                read_tokenizer_json(file)
                if file.suffix == ".json"
                else read_tiktoken(file)
            )
        if name in tiktoken.list_encoding_names():
            return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        raise UserError(f"--tokenizer {name}: cannot be loaded ({error})") from None
    known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
    raise UserError(
        f"--tokenizer {name}: unknown; choose {known}, or a .tiktoken or .json file"
    )


def encoding(name: str, pattern: str, ranks: dict, special: dict) -> tiktoken.Encoding:
    """Make a tokenizer. Raises UserError for ids that tiktoken cannot use, or if text
    gets lost."""
    ids = [*ranks.values(), *special.values()]
    if not all(type(i) is int and 0 <= i < 2**24 for i in ids):
        raise UserError("its ids must be whole numbers from 0 to 2**24 - 1")
    if len(set(ids)) < len(ranks) + len(
        set(special.values())
    ):  # a special token may have 2 names
        raise UserError("two of its tokens have the same id")
    missing = {bytes([i]) for i in range(255)} - ranks.keys()  # no text contains byte 255
    if missing:
        raise UserError(f"has no token for the byte {min(missing)[0]}")
    made = tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    if (
        made.decode(made.encode_ordinary(PROBE)) != PROBE
    ):  # tiktoken drops what does not match
        raise UserError("its regular expression does not match every text")
    return made


def tokenizer_file(name: str) -> Path | None:
    """The path, if this tokenizer name is one."""
    return Path(name) if name.endswith((".tiktoken", ".json")) else None


@lru_cache(maxsize=8)  # `encode` calls it for every batch
def bytes_per_token(tokenizer: tiktoken.Encoding) -> np.ndarray:
    """Length in bytes of every token id, [n_vocab] int64; 0 for special tokens and unused
    ids."""
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    for token, i in tokenizer._mergeable_ranks.items():
        lengths[i] = len(token)
    return lengths


def read_tiktoken(path: Path) -> tiktoken.Encoding:
    """Read a .tiktoken file. Every line is a token in base64 and its rank, which is also
    its id.

    It does not contain the pattern that cuts text into words, so we use GPT-2's. For
    cl100k_base and o200k_base, which differ, give the name. Raises UserError for other
    files.
    """
    ranks = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token, validate=True)] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError("the ranks must be 0, 1, 2, ... without gaps")
    return encoding(path.name, GPT2_PATTERN, ranks, {END_OF_TEXT[0]: len(ranks)})


def byte_letters() -> dict[int, str]:
    """The letter of every byte in a tokenizer.json. Invisible bytes get letters from 256
    up."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def read_tokenizer_json(path: Path) -> tiktoken.Encoding:
    """Read Hugging Face's byte-level BPE, with the same ids. Raises UserError for other
    kinds."""
    spec = json.loads(path.read_text(encoding="utf-8"))
    try:
        special = {token["content"]: token["id"] for token in spec["added_tokens"]}
        pattern, ranks = word_pattern(spec["pre_tokenizer"]), ranks_of(**spec["model"])
    except (KeyError, TypeError) as error:
        raise UserError(f"not a byte-level BPE: {error!r}") from None
    if spec.get("normalizer") or not isinstance(pattern, str):
        raise UserError("its normalizer or pre-tokenizer is one that we cannot imitate")
    if not (ends := [special[name] for name in END_OF_TEXT if name in special]):
        raise UserError(f"has no end-of-text token, none of {', '.join(END_OF_TEXT)}")
    return encoding(path.name, pattern, ranks, special | {END_OF_TEXT[0]: ends[0]})


def ranks_of(vocab: dict, merges: list, **_) -> dict[bytes, int]:
    """The tokens of a tokenizer.json and their ids. tiktoken merges in the order of the
    ids."""
    letters = byte_letters().items()
    byte_of = {
        s: b for b, s in letters if b < 255 or s in vocab
    }  # no text contains byte 255
    merges = [
        m.split(" ") if isinstance(m, str) else m for m in merges
    ]  # str in older files
    tokens = [*byte_of, *(a + b for a, b in merges)]
    ranks = {bytes(byte_of[letter] for letter in token): vocab[token] for token in tokens}
    merged = list(ranks.values())[len(byte_of) :]
    if merged != sorted(merged):
        raise UserError("its ids do not follow the order of its merges")
    return ranks


def word_pattern(spec: dict) -> str | None:
    """The regular expression of a tokenizer.json's pre-tokenizer; None if we do not know
    it."""
    *before, last = spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    match before, last.get("use_regex", True):
        case [], True:
            return GPT2_PATTERN
        case [{"type": "Digits", "individual_digits": True}], True:
            return STARCODER_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
        ], False:
            return regex


def tokenizer_files(tokenizer: tiktoken.Encoding) -> dict[str, str]:
    """The same tokenizer in Hugging Face's format, as file name -> content."""
    ranks, letters = tokenizer._mergeable_ranks, byte_letters()
    spell = lambda token: "".join(letters[byte] for byte in token)
    merges = []  # tiktoken merges two tokens whenever the result is a token, lowest rank first
    for token in sorted(ranks, key=ranks.get):
        parts = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges += [[spell(a), spell(b)] for a, b in parts if a in ranks and b in ranks]
    special = sorted(tokenizer._special_tokens.items(), key=lambda item: item[1])
    vocab = {spell(token): rank for token, rank in ranks.items()} | dict(special)
    flags = dict(
        special=True, normalized=False, single_word=False, lstrip=False, rstrip=False
    )
    split = dict(type="Split", pattern={"Regex": tokenizer._pat_str}, behavior="Isolated")
    byte_level = dict(
        type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False
    )
    steps = [split | {"invert": False}, byte_level]
    spec = {
        "added_tokens": [{"id": i, "content": name} | flags for name, i in special],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    config |= {f"{kind}_token": END_OF_TEXT[0] for kind in ("bos", "eos", "pad")}
    files = {"tokenizer.json": spec, "tokenizer_config.json": config}
    return {
        name: json.dumps(content, ensure_ascii=False) for name, content in files.items()
    }
