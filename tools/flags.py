"""A dataclass field is a command-line flag: help, type, limits, parsing, one-line
errors."""

import argparse
import dataclasses
import math
import os
import signal
import sys
import typing
from operator import ge, gt, le, lt


class UserError(ValueError):
    """A mistake of the user. Programs print it as one line; any other error keeps its traceback."""


LIMITS = dict(above=gt, at_least=ge, at_most=le, below=lt)


MARKS = {"choices", "runtime", "fixed"}


def option(default=dataclasses.MISSING, help: str = "", **marks):
    """A config field with the help of its flag, and its LIMITS or MARKS."""
    assert marks.keys() <= LIMITS.keys() | MARKS
    return dataclasses.field(default=default, metadata={"help": help, **marks})


def check_limits(config: type, values: dict) -> None:
    """Raise UserError, naming flag, value and limit, for the first field outside its limits."""
    for f in dataclasses.fields(config):
        value = values[f.name]
        kinds = typing.get_args(f.type) or (f.type,)  # (int, NoneType) of int | None
        if not isinstance(value, (*kinds, int, float)):
            raise UserError(f"--{f.name} {value!r}: must be of type {kinds[0].__name__}")
        demand = violated(value, f.metadata)
        if demand:
            raise UserError(f"--{f.name} {value}: must be {demand}")


def violated(value, limits) -> str | None:
    """Return the first limit that a value breaks, in words; None if it keeps all."""
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if value not in limits.get("choices", (value,)):
        return "one of " + ", ".join(limits["choices"])
    for name, holds in LIMITS.items():
        if name in limits and not holds(value, limits[name]):
            return f"{name.replace('_', ' ')} {limits[name]}"
    return None


def program_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser whose errors are one line. The docstring of the program is the help.

    It also makes printing safe, so that a terminal without UTF-8 shows ? instead of
    failing.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's streams have no such method
            stream.reconfigure(errors="replace")
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def error(message: str) -> None:
        parser.exit(fail(prog, message))

    parser.error = error
    return parser


def add_flags(parser: argparse.ArgumentParser, config: type, laptop: dict) -> None:
    """Add a flag for every field of a config class. The help has its value in preset laptop."""
    for f in dataclasses.fields(config):
        kind = (typing.get_args(f.type) or (f.type,))[0]  # int of int | None
        defaults = (
            [str(f.default)] if f.default not in (None, dataclasses.MISSING) else []
        )
        defaults += [f"laptop: {laptop[f.name]}"] if f.name in laptop else []
        text = f.metadata["help"] + (f" ({', '.join(defaults)})" if defaults else "")
        if kind is bool:
            how = dict(action=argparse.BooleanOptionalAction)
        else:
            choices = f.metadata.get("choices")
            metavar = kind.__name__.upper() if choices is None else None
            parse = whole_number if kind is int else kind
            how = dict(type=parse, metavar=metavar, choices=choices)
        parser.add_argument(f"--{f.name}", help=text, default=argparse.SUPPRESS, **how)


def whole_number(text: str) -> int:
    """'2B', '2e9' and '2000000000' are the same number. Raises ValueError for 1.5."""
    text = text[:-1] + {"k": "e3", "M": "e6", "B": "e9"}.get(text[-1:], text[-1:])
    try:
        return int(text)
    except ValueError:
        if float(text).is_integer():
            return int(float(text))
        raise


def at_least(low: float, kind=whole_number):
    """The type of a flag whose value has a lower limit."""

    def number(text: str):
        if not kind(text) >= low:  # refuses NaN, too
            raise argparse.ArgumentTypeError(f"{text}: must be at least {low}")
        return kind(text)

    return number


def say(text: str) -> None:
    """Print a line. If nobody reads it any more, as after `| head -1`, ask the program to stop."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.raise_signal(signal.SIGHUP)  # as if the terminal had been closed


def end_with_reader() -> None:
    """End quietly if nobody reads what we print any more, as after `| head -1`."""
    if hasattr(signal, "SIGPIPE"):  # Windows has none
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def fail(prog: str, error: Exception | str, status: int = 2) -> int:
    """Print the error of a user as one line, and return the exit status."""
    if isinstance(error, OSError):
        error = plain(error)
    text = f"{prog}: {error}".replace("\n", "\\n")  # as in the name of a file
    print(text, file=sys.stderr, flush=True)
    return status


def plain(error: OSError) -> str:
    """The file and what is wrong with it, without the number of the error."""
    if error.filename:
        return f"{error.filename2 or error.filename}: {error.strerror}"
    return str(error)
