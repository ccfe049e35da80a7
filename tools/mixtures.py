"""Read and write --data, a folder or several with their shares, as in web:0.8,code:0.2."""

import os
import re
from os.path import basename


def parse_mixture(text: str, flag: str = "--data") -> dict[str, float]:
    """'web:0.8,code:0.2' -> {'/home/me/web': 0.8, '/home/me/code': 0.2}, or raise ValueError."""
    shares = {}
    for part in text.split(","):
        folder, share = re.fullmatch(r"(.*?)(?::(-?\d*\.?\d+(?:e-?\d+)?))?", part).groups("1")
        folder = folder if folder in ("", "embedded") else os.path.abspath(folder)
        if basename(folder) in map(basename, shares):
            raise ValueError(f"{flag} {text}: two folders have the name {basename(folder)}")
        shares[folder] = float(share)
    if "" in shares or min(shares.values()) < 0 or not abs(sum(shares.values()) - 1) < 1e-6:
        raise ValueError(f"{flag} {text}: needs shares that add up to 1, as in web:0.8,code:0.2")
    return shares


def format_mixture(shares: dict[str, float]) -> str:
    """The text that parse_mixture reads."""
    alone = len(shares) == 1
    return ",".join(folder if alone else f"{folder}:{share}" for folder, share in shares.items())
