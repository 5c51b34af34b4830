"""Calls of a learner's functions during a check: arguments, results, and the results of llorch's function."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_ALIKE, MAX_CALLS = 2, 24  # recorded calls with arguments of the same shapes and settings, and of one function
ROUNDING = 4e-6  # error that is no mistake, relative to the largest number of a float32 result
CLEAR, UNCLEAR = 3e-5, 1e-4  # smallest error that shows a mistake, and largest difference where none is shown
REPRODUCED = 0.01  # largest share of a clear error that may remain

Results = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class FunctionCall:
    """A call of a learner's function.

    Attributes:
        arguments: By name.
        actual: The learner's results.
        expected: Results of llorch's function for the same arguments.
    """

    arguments: Mapping[str, Any]
    actual: Results
    expected: Results

    @property
    def is_wrong(self) -> bool:
        """True if a result differs from the expected one by more than rounding."""
        return not all(_is_close(*pair) for pair in zip(self.actual, self.expected, strict=True))

    def is_reproduced_by(self, results: Results) -> bool:
        """Tell if other results have the same clear errors as the learner's, and no others."""
        return len(results) == len(self.actual) and all(map(_has_same_error, results, self.actual, self.expected))

    @property
    def is_clear(self) -> bool:
        """True if a result has an error that rounding cannot hide."""
        return any(
            actual.shape != expected.shape or _distance(actual, expected) > CLEAR * _largest(expected)
            for actual, expected in zip(self.actual, self.expected, strict=True)
        )


class CallRecord:
    """Some calls of every function of an implementation, by name of the exercise."""

    def __init__(self) -> None:
        """Start with no calls."""
        self._calls: dict[str, dict[object, list[FunctionCall]]] = {}

    def add(self, name: str, key: object, call: FunctionCall) -> None:
        """Record a call, unless enough calls with this `key` of their arguments are recorded."""
        calls = self._calls.setdefault(name, {})
        is_new_error = call.is_wrong and not any(recorded.is_wrong for recorded in calls.get(key, ()))
        if is_new_error or (len(calls.get(key, ())) < MAX_ALIKE and sum(map(len, calls.values())) < MAX_CALLS):
            calls.setdefault(key, []).append(call)

    def of(self, name: str) -> list[FunctionCall]:
        """Return the recorded calls of an exercise, the smallest first."""
        calls = [call for alike in self._calls.get(name, {}).values() for call in alike]
        return sorted(calls, key=lambda call: sum(array.size for array in call.actual))

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()


def _is_close(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Tell if two results differ by rounding at most."""
    return actual.shape == expected.shape and _distance(actual, expected) <= ROUNDING * _largest(expected)


def _has_same_error(candidate: np.ndarray, actual: np.ndarray, expected: np.ndarray) -> bool:
    """Tell if a candidate's result has the error of the actual result."""
    if candidate.shape != actual.shape:
        return False
    distance, size = _distance(actual, candidate), max(_largest(candidate), _largest(expected))
    error = _distance(actual, expected) if actual.shape == expected.shape else np.inf
    if error <= CLEAR * size:
        return distance <= UNCLEAR * size
    return distance <= (ROUNDING * size if np.isinf(error) else max(ROUNDING * size, REPRODUCED * error))


def _distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of two numbers; infinite if NaN or infinity are not in the same places."""
    first, second = (array.astype(np.float64) for array in (actual, expected))
    is_finite = np.isfinite(first) & np.isfinite(second)
    if not np.array_equal(first[~is_finite], second[~is_finite], equal_nan=True):
        return np.inf
    return float(np.abs(first[is_finite] - second[is_finite]).max(initial=0.0))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)].astype(np.float64)).max(initial=0.0))
