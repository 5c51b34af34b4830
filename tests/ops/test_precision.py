"""When an op may widen: all operands or none, by the size of the largest."""

import numpy as np
import pytest

from llorch.ops.precision import WIDE_LIMIT, widen


def test_small_arrays_are_all_widened():
    small, scalar = widen(np.ones(WIDE_LIMIT, np.float32), np.ones((), np.float32))
    assert small.dtype == scalar.dtype == np.float64


@pytest.mark.parametrize("at", [0, 1])
def test_one_large_array_keeps_all_in_their_own_dtype(at):
    arrays = [np.ones(3, np.float32), np.ones(3, np.float32)]
    arrays[at] = np.ones(WIDE_LIMIT + 1, np.float32)
    assert all(a is b for a, b in zip(widen(*arrays), arrays, strict=True))


def test_widening_is_exact_and_copies(rng):
    array = rng.normal(size=7).astype(np.float32)
    (wide,) = widen(array)
    np.testing.assert_array_equal(wide.astype(np.float32), array, strict=True)
    assert not np.shares_memory(wide, array)


def test_float64_arrays_are_handed_back_as_they_are():
    array = np.ones(3)
    assert widen(array)[0] is array
