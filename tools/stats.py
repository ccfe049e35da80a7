"""Means with 95% intervals, by Student's t, and how we print them."""

import math

import numpy as np

# for 1 to 10 degrees of freedom
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
)  # fmt: skip


def student(freedom: int) -> float:
    """95% of Student's t lie between -t and t. Returns t, to four digits."""
    if freedom <= len(STUDENT_T):
        return STUDENT_T[freedom - 1]
    # that of the normal distribution, with the first terms of a series in 1 / freedom
    return 1.95996 + 2.37227 / freedom + 2.8225 / freedom**2 + 2.556 / freedom**3


def over(values) -> list[float]:
    """The mean of some values, and the ends of its 95% interval."""
    n = len(values)
    mean = float(np.mean(values))
    if n == 1:
        return [mean, math.nan, math.nan]
    half = student(n - 1) * np.std(values, ddof=1) / math.sqrt(n)
    return [mean, mean - half, mean + half]


def show(answer, form: str = ".3f") -> str:
    """(answer, low, high) -> '-0.278 [-0.374, -0.182]'"""
    value, low, high = (format(x, form) for x in answer)
    return value if low == "nan" else f"{value} [{low}, {high}]"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)
