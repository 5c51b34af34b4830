"""Describe the error of one array: where it is, what the values are there, and whether it grows with the position."""

from collections.abc import Iterable, Sequence

import numpy as np

from llorch.diagnosis.patterns.axes import ROWS, Axis
from llorch.diagnosis.patterns.location import UNEXPLAINED, locate
from llorch.diagnosis.patterns.values import describe_values

MAX_ELEMENTS = 2**24  # elements of the largest array that is examined
MIN_ROWS, MIN_RANK, MIN_GROWTH = 8, 0.95, 4.0  # rows, rank correlation and factor that show growth


def describe_error(
    actual: np.ndarray, expected: np.ndarray, axes: Sequence[Axis], *, tolerance: float,
    sources: Iterable[tuple[str, np.ndarray]] = (), unexplained: float = UNEXPLAINED,
) -> str:  # fmt: skip
    """Describe the error of an array in words; empty if it has no pattern.

    Args:
        actual: The engine's array, with split heads.
        expected: The right array; both are -inf where an entry is masked.
        axes: Axes of both.
        tolerance: Largest relative error of a right array.
        sources: Names and arrays of the same shape, of which the engine's array may be a copy.
        unexplained: Largest share of the error that the values may leave.
    """
    actual, expected = (np.where(np.isneginf(expected), 0.0, array).astype(np.float64) for array in (actual, expected))
    error = np.abs(actual - expected)
    if actual.size > MAX_ELEMENTS or not np.isfinite(error).all() or not error.any():
        return ""
    location = locate(error, expected, axes, tolerance)
    values = describe_values(actual, expected, location, axes, sources, unexplained) or _describe_growth(
        error, expected, axes
    )
    return ": ".join(filter(None, (location.words, values)))


def _describe_growth(error: np.ndarray, expected: np.ndarray, axes: Sequence[Axis]) -> str:
    """Tell if the relative error of the rows grows with the position; empty if not."""
    axis = next((axis.dimension for axis in axes if axis.noun in ROWS), None)
    if axis is None or error.shape[axis] < MIN_ROWS:
        return ""
    errors, sizes = (
        np.linalg.norm(np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1), axis=1) for x in (error, expected)
    )
    shares = np.divide(errors, sizes, out=np.zeros_like(errors), where=sizes > 0)
    ranks = np.empty(len(shares))
    ranks[shares.argsort()] = np.arange(len(shares))
    correlation = np.corrcoef(ranks, np.arange(len(shares)))[0, 1]
    if correlation < MIN_RANK or shares[-1] < MIN_GROWTH * shares[shares > 0][0]:
        return ""
    return f"the error grows with the position, up to {shares[-1]:.2g} of the right values"


def describe_mask(actual: np.ndarray, expected: np.ndarray, axes: Sequence[Axis]) -> str:
    """Describe which entries are masked (-inf) although they are visible, or visible although they are masked."""
    sides = (
        ("masked though visible", np.isneginf(actual) & ~np.isneginf(expected)),
        ("visible though masked", ~np.isneginf(actual) & np.isneginf(expected)),
    )
    words = []
    for name, is_different in sides:
        if is_different.any():
            location = locate(is_different.astype(float), np.zeros(expected.shape), axes, 0.0)
            place = location.words or f"{is_different.sum()} of {is_different.size} entries"
            words.append(f"{name}: {place}")
    return "; ".join(words)
