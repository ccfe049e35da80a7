"""Load tokenizers: bytes, the names and files of tiktoken, and tokenizer.json.

All have `name`, `n_vocab`, `eot_token`, `encode_ordinary` and `decode` with tiktoken's
meaning. `tokenizer_files` writes the tokenizer.json of an export. A model needs no
tokenizer, so we import the libraries only where we make one.
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
# End-of-text has one of these names in a tokenizer.json. tiktoken uses the first.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def load_tokenizer(name: str):
    """Load 'bytes', a .tiktoken or tokenizer.json file, or a name that tiktoken knows
    (and may download). Raises UserError if no tokenizer has this name."""
    import tiktoken

    if name == "bytes":  # 255 never occurs in UTF-8, so it can be end-of-text
        ranks = {bytes([i]): i for i in range(255)}
        return encoding("bytes", r"[\s\S]", ranks, eot=255)
    file = tokenizer_file(name)
    try:
        if file and file.suffix == ".json":
            return JsonTokenizer(file)
        if file:
            return read_tiktoken(file)
    except (OSError, ValueError) as error:
        raise UserError(f"--tokenizer {name}: cannot be loaded ({error})") from None
    if name in tiktoken.list_encoding_names():
        try:
            return tiktoken.get_encoding(name)
        except (OSError, ValueError):
            raise UserError(
                f"--tokenizer {name}: tiktoken cannot download it; without a network, "
                "choose bytes, or a .tiktoken or .json file"
            ) from None
    known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
    raise UserError(
        f"--tokenizer {name}: unknown; choose {known}, or a .tiktoken or .json file"
    )


def tokenizer_file(name: str) -> Path | None:
    """The path, if this tokenizer name is one."""
    return Path(name) if name.endswith((".tiktoken", ".json")) else None


def encode(tokenizer, text: str) -> np.ndarray:
    """The token ids of a text, without special tokens. In threads, this runs in parallel."""
    if tokenizer.name == "bytes":
        return np.frombuffer(text.encode(), np.uint8)
    if isinstance(tokenizer, JsonTokenizer):
        return np.array(tokenizer.encode_ordinary(text), dtype=np.int64)
    return tokenizer.encode_to_numpy(text, disallowed_special=())


@lru_cache(maxsize=8)  # `encode` needs it for every text
def bytes_per_token(tokenizer) -> np.ndarray:
    """Length in bytes of every token id, [n_vocab] int64; 0 for special tokens and unused ids."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.lengths
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    for token, i in tokenizer._mergeable_ranks.items():
        lengths[i] = len(token)
    return lengths


def losses(tokenizer, n_bytes: int, ids: np.ndarray) -> dict[str, int]:
    """What a text of n_bytes has lost in its tokens, for the notes of a corpus."""
    found = {}
    if isinstance(tokenizer, JsonTokenizer):
        if tokenizer.is_exact:
            found["bytes that have no token dropped"] = (
                n_bytes - tokenizer.lengths[ids].sum()
            )
        if tokenizer.unknown is not None:
            found["unknown tokens"] = np.count_nonzero(ids == tokenizer.unknown)
    return {name: int(times) for name, times in found.items() if times > 0}


# -- tiktoken ----------------------------------------------------------------------------


def encoding(name: str, pattern: str, ranks: dict[bytes, int], eot: int):
    """Make a tokenizer whose ranks are its ids."""
    import tiktoken

    special = {END_OF_TEXT[0]: eot}
    return tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )


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
    missing = {bytes([i]) for i in range(255)} - ranks.keys()  # no text contains byte 255
    if missing:
        raise UserError(f"has no token for the byte {min(missing)[0]}")
    return encoding(path.name, GPT2_PATTERN, ranks, eot=len(ranks))


# -- tokenizer.json ----------------------------------------------------------------------


class JsonTokenizer:
    """A tokenizer.json of any kind, by the package `tokenizers`.

    A special token in a text is ordinary text. Raises UserError for a file that has no
    end-of-text, or is none.
    """

    def __init__(self, path: Path):
        try:
            import tokenizers
        except ImportError:
            raise UserError("needs a package: pip install tokenizers") from None

        self.name = path.name
        self.text = path.read_text(encoding="utf-8")
        spec = json.loads(self.text)
        try:
            self.eot_name = end_of_text(spec)
            hide_special_words(spec)
            # a text is encoded whole, and always in the same way
            spec |= {"truncation": None, "padding": None}
            spec["model"].pop("dropout", None)
            self.library = tokenizers.Tokenizer.from_str(json.dumps(spec))
            self.library.encode_special_tokens = True  # as ordinary text
            ids = self.library.get_vocab()
            self.lengths = lengths_of(spec, ids)
        except UserError:
            raise
        except Exception as error:  # the package raises no other class
            raise UserError(f"not a tokenizer.json: {error!r}") from None
        self.n_vocab = len(self.lengths)
        self.eot_token = ids.get(self.eot_name, ids.get(hidden(self.eot_name)))
        self.is_exact = is_byte_level(spec) and not spec.get("normalizer")
        model = spec["model"]  # a unigram model has the id of its unknown token
        self.unknown = model.get("unk_id", ids.get(model.get("unk_token")))

    def encode_ordinary(self, text: str) -> list[int]:
        text = text.encode(errors="replace").decode()  # half a pair of UTF-16 becomes ?
        return self.library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.library.decode(ids)


def end_of_text(spec: dict) -> str:
    """The name of the end-of-text token, which we mark as special."""
    added = {token["content"]: token for token in spec["added_tokens"]}
    for name in END_OF_TEXT:
        if name in added:
            added[name]["special"] = True
            return name
    raise UserError(f"has no end-of-text token, none of {', '.join(END_OF_TEXT)}")


def hidden(name: str) -> str:
    """A name of a special token that no text contains."""
    return f"{name}\0special"


def hide_special_words(spec: dict) -> None:
    """Rename the special tokens of a unigram model, which would find </s> in HTML."""
    if spec["model"].get("type") != "Unigram":
        return
    special = {token["content"] for token in spec["added_tokens"] if token["special"]}
    for i, piece in enumerate(spec["model"]["vocab"]):
        if piece[0] in special and i != spec["model"]["unk_id"]:
            piece[0] = hidden(piece[0])
    for token in spec["added_tokens"]:
        if any(piece[0] == hidden(token["content"]) for piece in spec["model"]["vocab"]):
            token["content"] = hidden(token["content"])


def is_byte_level(spec: dict) -> bool:
    """Is one letter of a token one byte?"""
    return '"ByteLevel"' in json.dumps(
        [spec.get("normalizer"), spec.get("pre_tokenizer")]
    )


def lengths_of(spec: dict, ids: dict[str, int]) -> np.ndarray:
    """Length in bytes of every token id, as the file writes it, [n_vocab] int64."""
    added = {token["content"]: token["special"] for token in spec["added_tokens"]}
    letters_are_bytes = is_byte_level(spec)
    lengths = np.zeros(max(ids.values()) + 1, dtype=np.int64)
    for token, i in ids.items():
        if token not in added and letters_are_bytes:
            lengths[i] = len(token)
        elif not added.get(token):
            lengths[i] = len(token.encode())
    return lengths


# -- An export ---------------------------------------------------------------------------


def tokenizer_files(tokenizer) -> dict[str, str]:
    """The same tokenizer in Hugging Face's format, as file name -> content."""
    eot_name = END_OF_TEXT[0]
    if isinstance(tokenizer, JsonTokenizer):
        eot_name = tokenizer.eot_name
        text = tokenizer.text
    else:
        text = json.dumps(spec_of(tokenizer), ensure_ascii=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": eot_name,
        "eos_token": eot_name,
        "pad_token": eot_name,
    }
    return {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False),
    }


def spec_of(tokenizer) -> dict:
    """The content of a tokenizer.json with the same tokens as a tiktoken.Encoding."""
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
    #    result is a token, lowest rank first. A word that is a token needs no merges.
    merges = []
    for token in sorted(ranks, key=ranks.get):
        for i in range(1, len(token)):
            left = token[:i]
            right = token[i:]
            if left in ranks and right in ranks:
                merges.append([spell(left), spell(right)])
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True}

    # 3. The steps before and after
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
    return {
        "added_tokens": added_tokens,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": model,
    }


def byte_letters() -> dict[int, str]:
    """The letter of every byte in a tokenizer.json. Invisible bytes get letters from 256 up."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in visible}
    for byte in range(256):
        if byte not in visible:
            n_hidden = len(letters) - len(visible)  # so far
            letters[byte] = chr(256 + n_hidden)
    return letters
