"""The quantiles of Student's t."""

# for 1 to 10 degrees of freedom
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
)  # fmt: skip


def student(freedom: int) -> float:
    """95% of Student's t lie between -t and t. Returns t, to three digits."""
    if freedom <= len(STUDENT_T):
        return STUDENT_T[freedom - 1]
    # the normal distribution, and its correction for a finite freedom
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2
