"""Intervals of any answer, by leaving out one part of the data at a time."""

from collections.abc import Callable, Iterable

import numpy as np


def leave_out(trials: list, answer: Callable, parts: Iterable[Callable]) -> np.ndarray:
    """Compute numbers from all trials, and again without one part at a time.

    answer(trials): numbers [k]. parts: functions of a trial, such as its seed. Returns the
    numbers and the ends of their intervals [k, 3]. The ends are NaN if a number needs all
    trials, or if they have one value of every part.

    For a mean of n numbers, leaving out one at a time gives the usual variance over n. The
    variances of several parts add up. Their sum is a little too large, because each
    contains the variation of single trials. (If a part has one value, its variance is
    missing, and the sum too small.) Source: Tukey (1958).
    """
    total = 0.0  # the variance of the answer
    weighted = 0.0  # the variances squared, over their degrees of freedom
    for part in parts:
        values = sorted({part(trial) for trial in trials})
        n = len(values)
        if n == 1:
            continue
        answers = []
        for value in values:
            answers.append(answer([trial for trial in trials if part(trial) != value]))
        variance = (n - 1) * np.var(answers, axis=0)  # n - 1, as they share most runs
        total += variance
        weighted += variance**2 / (n - 1)
    with np.errstate(invalid="ignore"):
        freedom = np.divide(total**2, weighted)  # Welch, Satterthwaite
    center = answer(trials)
    half = student(freedom) * np.sqrt(total)
    return np.stack([center, center - half, center + half], axis=1)


# 95% of Student's t lie between -t and t
FREEDOMS = np.array([1, 1.2, 1.5, 2, 3, 4, 6, 10, 30])
STUDENT_T = np.array([12.706, 8.649, 6.017, 4.303, 3.182, 2.776, 2.447, 2.228, 2.042])
NORMAL = 1.960  # t for infinitely many degrees of freedom


def student(freedom: np.ndarray) -> np.ndarray:
    """Return t for degrees of freedom, from the table, to three digits."""
    # log(t / 1.96) is about in proportion to 1 / freedom, so this factor changes slowly
    factors = FREEDOMS * np.log(STUDENT_T / NORMAL)
    factor = np.interp(-1 / freedom, -1 / FREEDOMS, factors)
    return NORMAL * np.exp(factor / freedom)
