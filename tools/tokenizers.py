"""Load tokenizers as a tiktoken.Encoding: bytes, tiktoken names and files, tokenizer.json
files.

`tokenizer_files` writes the tokenizer.json of Hugging Face for an export. A model needs
no tokenizer, so we import tiktoken only where we make one.
"""

import base64
import json
from functools import lru_cache
from pathlib import Path

import numpy as np

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
# Every tokenizer must be able to encode this text.
PROBE = "".join(map(chr, range(128))) + "é 東 \N{GRINNING FACE}"


def load_tokenizer(name: str):
    """Load 'bytes', a .tiktoken or tokenizer.json file, or a name that tiktoken knows
    (and may download). Raises UserError if no tokenizer has this name."""
    import tiktoken

    if name == "bytes":  # 255 never occurs in UTF-8, so it can be end-of-text
        ranks = {bytes([i]): i for i in range(255)}
        return encoding("bytes", r"[\s\S]", ranks, {END_OF_TEXT[0]: 255})
    file = tokenizer_file(name)
    try:
        if file and file.suffix == ".json":
            return read_tokenizer_json(file)
        if file:
            return read_tiktoken(file)
        if name in tiktoken.list_encoding_names():
            return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        raise UserError(f"--tokenizer {name}: cannot be loaded ({error})") from None
    known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
    raise UserError(
        f"--tokenizer {name}: unknown; choose {known}, or a .tiktoken or .json file"
    )


def encoding(name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]):
    """Make a tokenizer. Raises UserError for ids that tiktoken cannot use, or if text gets lost."""
    import tiktoken

    # 1. Every id is a small whole number, and of one token
    for i in [*ranks.values(), *special.values()]:
        if type(i) is not int or not 0 <= i < 2**24:
            raise UserError("its ids must be whole numbers from 0 to 2**24 - 1")
    special_ids = set(special.values())  # a special token may have two names
    all_ids = special_ids | set(ranks.values())
    if len(all_ids) < len(ranks) + len(special_ids):
        raise UserError("two of its tokens have the same id")

    # 2. Every byte of a text has a token. No text contains byte 255
    missing = {bytes([i]) for i in range(255)} - ranks.keys()
    if missing:
        raise UserError(f"has no token for the byte {min(missing)[0]}")

    # 3. The pattern matches every text, because tiktoken drops what it does not match
    made = tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    if made.decode(made.encode_ordinary(PROBE)) != PROBE:
        raise UserError("its regular expression does not match every text")
    return made


def tokenizer_file(name: str) -> Path | None:
    """The path, if this tokenizer name is one."""
    return Path(name) if name.endswith((".tiktoken", ".json")) else None


@lru_cache(maxsize=8)  # `encode` calls it for every batch
def bytes_per_token(tokenizer) -> np.ndarray:
    """Length in bytes of every token id, [n_vocab] int64; 0 for special tokens and unused ids."""
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    for token, i in tokenizer._mergeable_ranks.items():
        lengths[i] = len(token)
    return lengths


def read_tiktoken(path: Path):
    """Read a .tiktoken file. Every line is a token in base64 and its rank, which is also its id.

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
    """The letter of every byte in a tokenizer.json. Invisible bytes get letters from 256 up."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in visible}
    for byte in range(256):
        if byte not in visible:
            n_hidden = len(letters) - len(visible)  # so far
            letters[byte] = chr(256 + n_hidden)
    return letters


def read_tokenizer_json(path: Path):
    """Read Hugging Face's byte-level BPE, with the same ids. Raises UserError for other kinds."""
    spec = json.loads(path.read_text(encoding="utf-8"))
    try:
        special = {token["content"]: token["id"] for token in spec["added_tokens"]}
        pattern = word_pattern(spec["pre_tokenizer"])
        ranks = ranks_of(**spec["model"])
    except (KeyError, TypeError) as error:
        raise UserError(f"not a byte-level BPE: {error!r}") from None
    if spec.get("normalizer") or not isinstance(pattern, str):
        raise UserError("its normalizer or pre-tokenizer is one that we cannot imitate")
    ends = [special[name] for name in END_OF_TEXT if name in special]
    if not ends:
        raise UserError(f"has no end-of-text token, none of {', '.join(END_OF_TEXT)}")
    special[END_OF_TEXT[0]] = ends[0]
    return encoding(path.name, pattern, ranks, special)


def ranks_of(vocab: dict, merges: list, **_) -> dict[bytes, int]:
    """The tokens of a tokenizer.json and their ids. tiktoken merges in the order of the ids."""
    # 1. The tokens of one byte
    byte_of = {}  # letter -> byte
    for byte, letter in byte_letters().items():
        if byte < 255 or letter in vocab:  # no text contains byte 255
            byte_of[letter] = byte
    ranks = {bytes([byte]): vocab[letter] for letter, byte in byte_of.items()}

    # 2. The tokens that merge two others
    for merge in merges:
        if isinstance(merge, str):  # as in older files
            merge = merge.split(" ")
        first, second = merge
        token = first + second
        token_bytes = bytes(byte_of[letter] for letter in token)
        ranks[token_bytes] = vocab[token]
    merged = list(ranks.values())[len(byte_of) :]
    if merged != sorted(merged):
        raise UserError("its ids do not follow the order of its merges")
    return ranks


def word_pattern(spec: dict) -> str | None:
    """The regular expression of a tokenizer.json's pre-tokenizer; None if we do not know it."""
    steps = spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    *before, last = steps
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
    return None


def tokenizer_files(tokenizer) -> dict[str, str]:
    """The same tokenizer in Hugging Face's format, as file name -> content."""
    ranks = tokenizer._mergeable_ranks
    special = tokenizer._special_tokens
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # 1. The vocabulary
    vocab = {spell(token): rank for token, rank in ranks.items()}
    added_tokens = []
    for name in sorted(special, key=special.get):
        vocab[name] = special[name]
        added_tokens.append(
            {
                "id": special[name],
                "content": name,
                "special": True,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
        )

    # 2. The merges. tiktoken has no list of them: it merges two tokens whenever the
    #    result is a token, lowest rank first
    merges = []
    for token in sorted(ranks, key=ranks.get):
        for i in range(1, len(token)):
            left = token[:i]
            right = token[i:]
            if left in ranks and right in ranks:
                merges.append([spell(left), spell(right)])

    # 3. The files
    split = {
        "type": "Split",
        "pattern": {"Regex": tokenizer._pat_str},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    spec = {
        "added_tokens": added_tokens,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": END_OF_TEXT[0],
        "eos_token": END_OF_TEXT[0],
        "pad_token": END_OF_TEXT[0],
    }
    return {
        "tokenizer.json": json.dumps(spec, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False),
    }
