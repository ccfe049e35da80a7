"""Flags of sweep.py besides those of train.py."""

import argparse

from tools.flags import at_least, whole_number


def numbers(text: str) -> list[int]:
    return [whole_number(part) for part in text.split(",")]


def pair(text: str) -> tuple[str, int | str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=VALUE")
    return name, int(value) if value.isdecimal() else value


def add_sweep_flags(parser, experiments: tuple, scales: tuple, parse_field) -> None:
    """Add the flags of sweep.py. parse_field(name, text): the value of a swept field."""

    def swept(text: str) -> tuple[str, list]:
        name, _, values = text.partition("=")
        return name, [parse_field(name, value) for value in values.split(",")]

    add = parser.add_argument
    add("experiment", choices=experiments)
    add(
        "--scale",
        choices=scales,
        default="quick",
        help="the grid (default: quick)",
    )
    add(
        "--workers",
        type=at_least(1),
        help="jobs at a time (default: one per GPU, or per core)",
    )
    add("--engine", choices=("local", "slurm"), default="local", help="where jobs run")
    add(
        "--slurm",
        type=pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of submitit, as in timeout_min=240; may be repeated",
    )
    add(
        "--dry_run",
        action="store_true",
        help="print the number of runs and tokens, and stop",
    )
    for name in ("widths", "batches", "budgets"):
        help = f"{name} in place of the grid's, as in 320k,1.28M"
        add(f"--{name}", type=numbers, metavar="N,N,...", help=help)
    add(
        "--seeds",
        type=at_least(1),
        metavar="N",
        help="seeds 0 to N-1 in place of the grid's",
    )
    add(
        "--sweep",
        type=swept,
        action="append",
        default=[],
        metavar="FIELD=V,V,...",
        help="a field with several values; may be repeated",
    )
