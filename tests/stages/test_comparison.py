"""The comparison of two arrays: everything that must not pass, does not pass."""

import math

import numpy as np
import pytest
from helpers.refusals import assert_tells, refuses

from llorch.stages.comparison import EXACT, FACTOR, FLOOR, Difference, Tolerance, measure, tolerance_from

TIGHT = Tolerance(1e-6, 1e-6)
ANYTHING = Tolerance(math.inf, math.inf)


@pytest.fixture
def expected(rng, dtype) -> np.ndarray:
    return rng.normal(size=(4, 3, 5)).astype(dtype)


def passes(actual: object, expected: object, tolerance: Tolerance = TIGHT, *, masked: bool = False) -> bool:
    difference = measure(actual, expected, masked=masked)
    assert difference.within(tolerance) == (difference.over(tolerance) <= 1)
    return difference.within(tolerance)


def test_equal_arrays_pass_exactly(expected):
    first = float(expected[0, 0, 0])
    assert measure(expected.copy(), expected) == Difference(0.0, 0.0, None, (0, 0, 0), first, first)
    assert passes(expected.copy(), expected, EXACT)


def test_memory_order_and_mapped_memory_do_not_matter(expected, tmp_path):
    assert passes(np.asfortranarray(expected), expected, EXACT)
    assert passes(np.flip(np.flip(expected).copy()), expected, EXACT)
    expected.tofile(tmp_path / "golden")
    assert passes(np.memmap(tmp_path / "golden", expected.dtype, "r", shape=expected.shape), expected, EXACT)


@pytest.mark.parametrize("index", [(0, 0, 0), (2, 1, 3), (3, 2, 4)])
def test_one_perturbed_value_fails_and_is_named(expected, index):
    actual = expected.copy()
    actual[index] += 0.01
    difference = measure(actual, expected)
    assert not passes(actual, expected)
    assert difference.index == index
    assert (difference.actual, difference.expected) == (float(actual[index]), float(expected[index]))
    assert difference.worst == pytest.approx(0.01 / np.abs(expected).max(), rel=1e-5)
    assert difference.error == pytest.approx(0.01 / np.linalg.norm(expected), rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[:, ::-1],  # heads in another order
        lambda a: a[[1, 0, 2, 3]],  # two tokens swapped
        lambda a: np.roll(a, 1, axis=-1),
        lambda a: a.reshape(4, 5, 3).swapaxes(1, 2),  # merged before the transpose
        lambda a: -a,
        lambda a: a.mean() + 0 * a,
        lambda a: np.zeros_like(a),
        lambda a: np.sort(a, axis=None).reshape(a.shape),  # same values, same mean, same norm
        lambda a: a * a.dtype.type(1.0001),
        lambda a: a + a.dtype.type(0.0001),
    ],
)
def test_wrong_values_of_the_right_shape_fail(expected, change):
    assert not passes(np.ascontiguousarray(change(expected)), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sides", [("actual",), ("expected",), ("actual", "expected")])
def test_non_finite_values_never_pass(expected, value, sides):
    actual = expected.copy()
    for side in sides:
        (actual if side == "actual" else expected)[1, 2, 3] = value
    assert not passes(actual, expected, ANYTHING)
    assert measure(actual, expected).fault == f"non-finite: 1 of 60 {sides[0]} values"


@pytest.mark.parametrize("other_dtype", [np.float16, np.int32, np.longdouble, np.complex128, bool, object, None])
def test_another_dtype_never_passes(expected, other_dtype):
    other_dtype = other_dtype or {np.float32: np.float64, np.float64: np.float32}[expected.dtype.type]
    for actual, wanted in ((expected.astype(other_dtype), expected), (expected, expected.astype(other_dtype))):
        assert not passes(actual, wanted, ANYTHING)
        assert measure(actual, wanted).fault == f"dtype: expected {wanted.dtype}, got {actual.dtype}"


@pytest.mark.parametrize("dtype_", [bool, np.complex128, object, "U3"])
def test_arrays_that_are_no_numbers_never_pass(dtype_):
    array = np.ones(3).astype(dtype_)
    assert_tells(measure(array, array).fault or "", "dtype", got=array.dtype)
    assert not passes(array, array, ANYTHING)


@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 5), (4, 3, 1), (4, 1, 5), (1,), (), (60,), (4, 3, 5, 1), (4, 5, 3)])
def test_another_shape_never_passes_even_when_it_would_broadcast(shape):
    ones = np.ones((4, 3, 5))
    for actual, expected in ((np.ones(shape), ones), (ones, np.ones(shape))):
        assert not passes(actual, expected, ANYTHING)
        assert measure(actual, expected).fault == f"shape: expected {expected.shape}, got {actual.shape}"


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3, 5)])
@pytest.mark.parametrize("masked", [True, False])
def test_empty_arrays_never_pass(shape, masked):
    assert measure(np.empty(shape), np.empty(shape), masked=masked).fault == "empty: nothing to compare"
    assert not passes(np.empty(shape), np.empty(shape), ANYTHING, masked=masked)


@pytest.mark.parametrize("actual", [1.0, np.float64(1.0), [1.0], (1.0,), "1.0", None])
def test_non_arrays_never_pass(actual):
    expected, kind = np.ones(1), "nothing" if actual is None else type(actual).__name__
    for side, fault in (
        ("actual:", measure(actual, expected)),
        ("actual:", measure(actual, actual)),
        ("expected:", measure(expected, actual)),
    ):
        assert (fault.fault or "").startswith(side)
        assert_tells((fault.fault or "").removeprefix(side), got=kind)
    assert not passes(actual, expected, ANYTHING)
    assert not passes(actual, actual, ANYTHING)


def test_a_numpy_mask_hides_nothing():
    expected = np.array([1.0, 2.0, 3.0])
    for hidden in (99.0, np.nan):
        actual = np.ma.masked_array([1.0, hidden, 3.0], mask=[False, True, False])
        assert not passes(actual, expected)
        assert not passes(expected, actual)


def test_arrays_of_one_number_are_compared():
    assert passes(np.array(2.0), np.array(2.0), EXACT)
    assert not passes(np.array(2.0), np.array(2.001))
    assert measure(np.array(3.0), np.array(2.0)).index == ()


def test_zeros_equal_zeros_and_nothing_else(dtype):
    zeros, tiny = np.zeros((2, 3), dtype), np.full((2, 3), np.finfo(dtype).tiny)
    assert passes(zeros.copy(), zeros, EXACT)
    assert passes(-zeros, zeros, EXACT)
    assert measure(tiny, zeros) == Difference(math.inf, math.inf, None, (0, 0), float(tiny[0, 0]), 0.0)
    assert not passes(tiny, zeros, Tolerance(1e300, 1e300))
    assert not passes(zeros, tiny, Tolerance(0.5, 0.5))


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_scale_of_the_tensor_does_not_hide_an_error(rng, scale):
    expected = rng.normal(size=9) * scale  # squares underflow or overflow
    actual = expected.copy()
    actual[4] *= 1.01
    assert passes(expected.copy(), expected, EXACT)
    assert not passes(actual, expected)


BIG = np.concatenate([[1000.0], np.ones(10_000)])


@pytest.mark.parametrize(
    ("expected", "deviation", "error", "worst"),
    [
        (BIG, np.where(BIG == 1, 0.5, 0), 50 / math.sqrt(1e6 + 1e4), 5e-4),  # everywhere but in the largest value
        (np.ones(10_000), 0.01 * (np.arange(10_000) == 77), 1e-4, 1e-2),
    ],
    ids=["whole tensor", "worst element"],
)
def test_each_bound_fails_alone(expected: np.ndarray, deviation: np.ndarray, error: float, worst: float):
    difference = measure(expected + deviation, expected)
    assert (difference.error, difference.worst) == pytest.approx((error, worst))
    assert passes(expected + deviation, expected, Tolerance(1.1 * error, 1.1 * worst))
    assert not passes(expected + deviation, expected, Tolerance(0.9 * error, 1.1 * worst))
    assert not passes(expected + deviation, expected, Tolerance(1.1 * error, 0.9 * worst))


def test_error_equal_to_the_tolerance_passes():
    difference = Difference(0.25, 0.5)
    assert difference.within(Tolerance(0.25, 0.5))
    assert not difference.within(Tolerance(math.nextafter(0.25, 0), 0.5))
    assert not difference.within(Tolerance(0.25, math.nextafter(0.5, 0)))


def test_nothing_passes_a_tolerance_of_nan():
    for tolerance in (Tolerance(math.nan, 1.0), Tolerance(1.0, math.nan)):
        assert not Difference(0.0, 0.0).within(tolerance)
        assert not Difference(0.5, 0.5).within(tolerance)
    assert not Difference(math.nan, 0.0).within(ANYTHING)
    assert not Difference(0.0, math.nan).within(ANYTHING)


def test_over_is_the_factor_by_which_the_worse_bound_is_exceeded():
    assert Difference(0.3, 0.1).over(Tolerance(0.1, 0.1)) == pytest.approx(3)
    assert Difference(0.1, 0.7).over(Tolerance(0.1, 0.1)) == pytest.approx(7)
    assert Difference(0.0, 0.0).over(EXACT) == 0
    assert Difference(1e-30, 0.0).over(EXACT) == math.inf
    assert Difference(0.0, 0.0, "shape").over(ANYTHING) == math.inf


def test_tolerance_is_four_times_the_larger_distance_of_each_kind():
    assert FACTOR == 4
    actual = tolerance_from([Difference(1e-5, 2e-4), Difference(3e-5, 1e-4), Difference(2e-5, 1e-4)])
    assert (actual.error, actual.worst) == pytest.approx((1.2e-4, 8e-4))


def test_tolerance_is_never_under_four_ulp_of_the_scale():
    assert FLOOR == 4 * np.finfo(np.float32).eps
    assert tolerance_from([Difference(0.0, 0.0)]) == Tolerance(FLOOR, FLOOR)
    assert tolerance_from([Difference(FLOOR, 0.0)]) == Tolerance(4 * FLOOR, FLOOR)


@pytest.mark.parametrize(
    ("distances", "message"),
    [
        ([], "none"),
        ([Difference(0.1, 0.1), Difference(math.inf, math.inf, "shape: expected (), got (1,)")], "shape: expected"),
        ([Difference(0.0, 0.0, "empty: nothing to compare")], "empty: nothing"),
        ([Difference(math.inf, 1.0)], "error inf"),
        ([Difference(0.1, math.inf)], "worst inf"),
        ([Difference(math.nan, 0.1), Difference(0.1, 0.1)], "error nan"),
    ],
)
def test_invalid_distance_gives_no_tolerance(distances, message):
    with refuses(ValueError, got=message, where="tolerance"):
        tolerance_from(distances)


def test_a_difference_describes_its_numbers_and_their_place():
    actual, expected = np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    assert_tells(measure(actual, expected).describe(), "error 1.8e-01", "worst 2.5e-01", "(1, 1)", expected=4, got=5)


@pytest.mark.parametrize("factor", [1.01, 0.5, -2.0])
def test_common_factor_is_the_projection_of_one_array_on_the_other(expected, factor):
    actual = (factor * expected).astype(expected.dtype)
    turned = np.asfortranarray(actual), np.asfortranarray(expected)
    for one, other in ((actual, expected), (turned[0], expected), (actual, turned[1])):
        assert measure(one, other).common_factor == pytest.approx(factor, rel=1e-6)


def test_common_factor_does_not_see_what_is_orthogonal():
    expected = np.array([1.0, 0.0, 2.0])
    assert measure(expected + np.array([0.0, 5.0, 0.0]), expected).common_factor == 1.0
    assert measure(expected - expected, expected).common_factor == 0.0
    assert measure(expected, expected - expected).common_factor == 1.0  # of nothing; the error is infinite


def test_common_factor_of_huge_and_tiny_numbers_is_measured():
    for size in (1e-300, 1e300):
        assert measure(size * np.full(3, 1.01), np.full(3, size)).common_factor == pytest.approx(1.01)


def test_common_factor_passes_up_to_its_tolerance():
    expected = np.ones(4)
    anything = Tolerance(math.inf, math.inf, common_factor=0.002)
    assert passes(1.0019 * expected, expected, anything)
    for factor in (1.01, 0.99):
        assert measure(factor * expected, expected).over(anything) == pytest.approx(5, rel=1e-6)
        assert not measure(factor * expected, expected).within(anything)
        assert measure(factor * expected, expected).within(anything.times(6))
        assert not measure(factor * expected, expected).within(anything.at_least(TIGHT))
        assert measure(factor * expected, expected).within(ANYTHING)
