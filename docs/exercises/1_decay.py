"""Exercise 1, from a constant learning rate to WSD: write `decay`.

Return a function of n, as `warmup` in power.py does. Until `start` it follows the schedule.
From there, the schedule keeps its value at `start`, and a factor falls from 1 to 0.
"""

from pytest import approx

from power import constant


def decay(schedule, start, T):
    """Follow the schedule until `start`, then fall in a straight line to 0 at T."""
    raise NotImplementedError("write decay")


def falling(n):
    """A schedule that would go on falling during the decay."""
    return 8 / n


def test_it_follows_the_schedule_until_it_starts():
    schedule = decay(falling, start=800, T=1000)
    assert schedule(1) == 8
    assert schedule(500) == falling(500)
    assert schedule(800) == approx(falling(800))


def test_it_is_a_straight_line_to_0():
    schedule = decay(constant(1.0), start=800, T=1000)
    found = [schedule(n) for n in (800, 850, 900, 950, 1000)]
    assert found == approx([1, 0.75, 0.5, 0.25, 0])


def test_it_lowers_the_value_that_the_schedule_has_at_the_start():
    schedule = decay(falling, start=800, T=1000)
    assert schedule(900) == approx(falling(800) / 2)


def test_it_stays_at_0_after_the_end():
    schedule = decay(falling, start=800, T=1000)
    assert schedule(1100) == 0
