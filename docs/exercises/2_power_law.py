"""Exercise 2, from WSD to Power: write `power_law`.

Return a function of n. By which factor does it fall if n doubles? What is it at n = T0?
"""

from pytest import approx

from power import T0


def power_law(lr, b, lr_max):
    """lr * (n / T0)^b, but at most lr_max."""
    raise NotImplementedError("write power_law")


def test_its_learning_rate_at_T0_is_lr():
    assert power_law(0.01, b=-0.3, lr_max=1.0)(T0) == approx(0.01)


def test_it_has_the_values_of_the_paper():
    """Of its figure 1, with a = 4, b = -0.51 and beta = 1024."""
    schedule = power_law(1024 * 4 * T0**-0.51, b=-0.51, lr_max=0.02)
    assert schedule(9e11) == approx(0.0032787, rel=1e-4)
    assert schedule(1e12) == approx(0.0031071, rel=1e-4)


def test_it_stays_below_its_ceiling():
    schedule = power_law(0.01, b=-0.3, lr_max=0.02)
    assert schedule(1) == 0.02
    assert schedule(100) == 0.02
