"""Exercise 4, the bottom of a valley: write `vertex`.

np.polyfit fits a parabola. On which axis are the learning rates evenly spaced?
"""

import math

from pytest import approx

RATES = (0.002, 0.004, 0.008, 0.016, 0.032)


def vertex(losses):
    """{learning rate: loss} -> the learning rate at the bottom of the valley.

    If the parabola opens downward, or has its bottom outside the tries, the best try.
    """
    raise NotImplementedError("write vertex")


def valley(bottom, bumps=(0, 0, 0, 0, 0)):
    """{learning rate: loss} on a parabola over log2 of the learning rate, plus bumps."""
    losses = {}
    for lr, bump in zip(RATES, bumps):
        losses[lr] = 2 + 0.1 * math.log2(lr / bottom) ** 2 + bump
    return losses


def test_it_finds_the_bottom_between_the_tries():
    for bottom in (0.005, 0.008, 0.012):
        assert vertex(valley(bottom)) == approx(bottom)


def test_it_uses_all_tries():
    """No parabola can follow these bumps, so they must not move its bottom."""
    bumps = (0.02, -0.08, 0.12, -0.08, 0.02)
    assert vertex(valley(0.011, bumps)) == approx(0.011)


def test_it_takes_the_best_try_if_the_parabola_opens_downward():
    assert vertex({0.5: 2.30, 1: 2.33, 2: 2.34}) == 0.5


def test_it_takes_the_best_try_if_the_bottom_is_outside():
    assert vertex({0.5: 2.340, 1: 2.320, 2: 2.303}) == 2
    assert vertex({0.5: 2.303, 1: 2.320, 2: 2.340}) == 0.5
