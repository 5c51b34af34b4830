"""Differences in a unit of their own."""

import math

import numpy as np
import pytest

from llorch.verify.compare import Tolerance, measure_in


def test_a_difference_in_units_worked_by_hand():
    found = measure_in(np.array([1.0, 2.0, 5.0]), np.array([1.0, 2.4, 4.7]), unit=0.1)
    assert found.error == pytest.approx(math.sqrt((16 + 9) / 3))
    assert found.worst == pytest.approx(4)
    assert found.index == (1,)


def test_the_size_of_the_numbers_does_not_count():
    near, far = (measure_in(np.array([x, 0.25]), np.array([x, 0.5]), unit=0.5) for x in (1.0, 1e6))
    assert (near.error, near.worst) == (far.error, far.worst) == (math.sqrt(0.125), 0.5)


@pytest.mark.parametrize("got", [None, np.ones(3), np.ones(2, np.float32), np.array([1.0, np.nan])])
def test_what_cannot_be_compared_never_passes(got: np.ndarray | None):
    found = measure_in(got, np.ones(2), unit=1.0)
    assert found.fault is not None
    assert not found.within(Tolerance(math.inf, math.inf))
