"""The quantiles of Student's t, from a table of a few."""

import numpy as np

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
