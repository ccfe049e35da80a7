"""A dataclass field is a command-line flag: help, limits, parsing, one-line errors."""

import argparse
import contextlib
import dataclasses
import math
import sys
from dataclasses import field


def program_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The parser of a program of this project: its docstring is its help."""
    return argparse.ArgumentParser(
        prog=prog, description=description, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def fail(prog: str, error: Exception | str) -> int:
    """Print a user's error as one line; return the exit status that goes with it."""
    print(f"{prog}: {error}", file=sys.stderr, flush=True)
    return 2


def option(default=dataclasses.MISSING, help="", **limits):
    """A config field that is also a command-line flag: its help and limits travel with it.

    Limits: above, at_least, at_most, below (numbers), choices (a sequence).
    """
    return field(default=default, metadata={"help": help, **limits})


def check_limits(cfg) -> None:
    """Raise ValueError, naming flag, value and limit, for the first field outside its limits."""
    for f in dataclasses.fields(cfg):
        value, limits = getattr(cfg, f.name), f.metadata

        def demand(holds: bool, what: str) -> None:
            if not holds:
                raise ValueError(f"--{f.name} {value}: must be {what}")

        if value is None:
            continue
        if isinstance(value, str):
            demand(value != "", "something")
        if isinstance(value, float):
            demand(math.isfinite(value), "a finite number")
        if "choices" in limits:
            demand(value in limits["choices"], "one of " + ", ".join(limits["choices"]))
        if "above" in limits:
            demand(value > limits["above"], f"above {limits['above']}")
        if "at_least" in limits:
            demand(value >= limits["at_least"], f"at least {limits['at_least']}")
        if "at_most" in limits:
            demand(value <= limits["at_most"], f"at most {limits['at_most']}")
        if "below" in limits:
            demand(value < limits["below"], f"below {limits['below']}")


def fill_in(cfg, **values) -> None:
    """Replace each None among these fields. Only for __post_init__: a config is frozen after it.

    So a config always says what is used. To derive another one, build it again from what was typed
    (train.make_config); dataclasses.replace would keep values that followed from the old width.
    """
    for name, value in values.items():
        if getattr(cfg, name) is None:
            object.__setattr__(cfg, name, value)


def whole_number(text: str) -> int:
    """'2e9' and '2000000000' are the same number of tokens."""
    if text.lstrip("+-").isdigit():
        return int(text)
    with contextlib.suppress(ValueError):
        if float(text).is_integer():
            return int(float(text))
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
