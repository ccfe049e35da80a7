"""Do intervals hold the truth of made-up sweeps, and does coverage.py make them as it says?"""

import math
import runpy
from pathlib import Path

import numpy as np
import pytest

import fit

# by its path, because a package on PyPI has the same name
PROGRAM = Path(__file__).parents[2] / "research/coverage.py"
coverage = runpy.run_path(str(PROGRAM))


@pytest.mark.parametrize("seeds", [2, 3])
def test_intervals_of_a_small_sweep_hold_the_truth(seeds):
    found = coverage["count"]("3 batch sizes", seeds, sweeps=60)
    for answer in ("b", "q", "change of b"):
        share, width = found[answer]["both"]
        assert share >= 0.9 and 0.05 < width < 1


def test_without_noise_all_answers_are_the_laws():
    b, q, s = (coverage[name] for name in ("B", "Q", "GROWTH"))
    for name in coverage["SWEEPS"]:
        truth = coverage["truths"](name, 0.0)
        assert (truth["b"], truth["q"]) == pytest.approx((b, q), abs=0.005)
    truth = coverage["truths"]("8 batch sizes", 0.0)
    # the best of batch sizes in steps of 2 grow only about as they should
    assert truth["three best"] == pytest.approx(b + (q - 1) * s, abs=0.06)
    assert truth["best batch"] == pytest.approx(b + q * s, abs=0.06)


def test_components_are_those_of_sums_of_independent_parts():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        parts = rng.normal(0, 3, (5, 1)) + rng.normal(0, 2, 4) + rng.normal(0, 1, (5, 4))
        found.append(coverage["components"](parts))
    assert np.mean(found, axis=0) == pytest.approx([9, 4, 1], rel=0.1)


def test_pairs_and_seeds_alone_are_students_intervals():
    values = np.array([[0.1, 0.7], [0.4, 0.9], [-0.6, 0.3]])
    for which, means, t in (
        ("pairs", values.mean(axis=1), 4.303),
        ("seeds", values.mean(axis=0), 12.706),
    ):
        low, high = coverage["by_leaving_out"](fit.mean_of(values))[which]
        error = means.std(ddof=1) / math.sqrt(len(means))
        assert (high - low) / 2 == pytest.approx(t * error, rel=1e-3)


@pytest.mark.parametrize("sweeps", ("-1", "0", "x"))
def test_fewer_than_one_sweep_is_refused_in_one_line(sweeps, capsys):
    with pytest.raises(SystemExit) as error:
        coverage["main"](["--sweeps", sweeps])
    assert error.value.code == 2 and capsys.readouterr().err.count("\n") == 1
