"""The quantiles of Student's t."""

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
