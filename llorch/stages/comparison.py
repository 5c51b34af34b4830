"""Comparison of two arrays or two traces: their difference, and whether it is within a tolerance.

    error = |actual - expected| / |expected|             Euclidean norms, in float64
    worst = max |actual - expected| / max |expected|     the worst element, relative to the largest
    tokens                                               `error` of each token's row, relative to that row
    common factor = <actual, expected> / |expected|**2   near 1 for independent roundings, not for a wrong constant

Presence, shape, dtype and finiteness are checked before any value. NaN, infinity, an empty array or a broadcast
never pass. No other module of the project decides whether numbers agree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from llorch.runtime.errors import UserError
from llorch.stages.table import Stage, forward_order

PASS, FAIL, TIE, ROUNDING, NOT_RUN = "PASS", "FAIL", "TIE", "ROUNDING", "NOT RUN"  # verdicts, see `judging.types`
FLOAT32_ULP = 2.0**-23
FLOOR = 4 * FLOAT32_ULP  # least tolerance: 4 ulp of the tensor's scale
FLOORS: Mapping[str, float] = {  # by dtype of a run; half precision: 4 ulp of a number just below the scale
    "float32": FLOOR,
    "bfloat16": 4 * 2.0**-8,
    "float16": 4 * 2.0**-11,
}
FACTOR = 4.0  # tolerance over the largest distance of a reference engine from the float64 reference

Trace = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Tolerance:
    """Largest difference of an array from its golden that passes; all limits must hold.

    Attributes:
        error: Limit of `Difference.error`.
        worst: Limit of `Difference.worst`.
        tokens: Limit of each token's error, one number or one per token; None without a check per token.
        common_factor: Limit of the common factor's distance from 1; None without this check.
    """

    error: float
    worst: float
    tokens: "np.ndarray | float | None" = field(default=None, compare=False)
    common_factor: float | None = None

    def at_most(self, highest: "Tolerance") -> "Tolerance":
        """Cap `error` and `worst` of this tolerance at those of `highest`."""
        return Tolerance(min(self.error, highest.error), min(self.worst, highest.worst))

    def at_least(self, lowest: "Tolerance") -> "Tolerance":
        """Raise each part of this tolerance to at least that of `lowest`."""
        tokens = None if self.tokens is None else np.maximum(self.tokens, lowest.tokens or 0.0)
        return Tolerance(max(self.error, lowest.error), max(self.worst, lowest.worst), tokens, self.common_factor)

    def times(self, factor: float) -> "Tolerance":
        """Multiply every part of this tolerance by `factor`."""
        tokens = None if self.tokens is None else factor * self.tokens
        common_factor = None if self.common_factor is None else factor * self.common_factor
        return Tolerance(factor * self.error, factor * self.worst, tokens, common_factor)


EXACT = Tolerance(0.0, 0.0)
FaultKind = Literal["actual", "expected", "shape", "dtype", "empty", "non-finite", "mask", "ids"]
Fault = tuple[FaultKind, str]


@dataclass(frozen=True)
class Difference:
    """Distance of `actual` from `expected`; `fault` gives the reason if the values cannot be compared."""

    error: float  # as in the module docstring, or in units, see `measure_in`
    worst: float
    fault: str | None = None
    index: tuple[int, ...] = ()  # index of the worst element
    actual: float = math.nan
    expected: float = math.nan
    tokens: np.ndarray | None = field(default=None, compare=False)  # error of each token
    common_factor: float = field(default=1.0, compare=False)  # projection of `actual` on `expected`
    fault_kind: FaultKind | None = field(default=None, compare=False)

    @classmethod
    def from_fault(cls, fault: Fault) -> "Difference":
        """Return the infinite difference of arrays that cannot be compared."""
        return cls(math.inf, math.inf, ": ".join(fault), fault_kind=fault[0])

    def within(self, tolerance: Tolerance) -> bool:
        """Check this difference against a tolerance; True if it passes."""
        if self.fault is not None or not (self.error <= tolerance.error and self.worst <= tolerance.worst):
            return False
        if not self.has_no_factor(tolerance):
            return False
        return self.tokens is None or tolerance.tokens is None or bool((self.tokens <= tolerance.tokens).all())

    def over(self, tolerance: Tolerance) -> float:
        """Compute the factor by which the tolerance is exceeded; at most 1 for a pass, infinite for a fault."""
        if self.fault is not None:
            return math.inf
        factor = abs(self.common_factor - 1)
        return max(
            safe_ratio(self.error, tolerance.error),
            safe_ratio(self.worst, tolerance.worst),
            safe_ratio(*self.nearest_token(tolerance)),
            0.0 if tolerance.common_factor is None else safe_ratio(factor, tolerance.common_factor),
        )

    def has_no_factor(self, tolerance: Tolerance) -> bool:
        """Check if the distance of the common factor from 1 is within the tolerance, so that rounding explains it."""
        return tolerance.common_factor is None or abs(self.common_factor - 1) <= tolerance.common_factor

    def nearest_token(self, tolerance: Tolerance) -> tuple[float, float]:
        """Return error and limit of the token with the largest error / limit; zeros without errors or limits."""
        if self.tokens is None or tolerance.tokens is None:
            return 0.0, 0.0
        limits = np.asarray(tolerance.tokens, np.float64)
        with np.errstate(divide="ignore"):
            ratios = np.divide(self.tokens, limits, out=np.zeros_like(self.tokens), where=self.tokens > 0)
        index = int(ratios.argmax())
        return float(self.tokens[index]), float(limits[index] if limits.ndim else limits)

    def describe(self) -> str:
        """Format the difference in one line."""
        if self.fault is not None:
            return self.fault
        numbers = f"expected {self.expected:.7g}, got {self.actual:.7g}"
        return f"error {self.error:.1e}, worst {self.worst:.1e} at {self.index}: {numbers}"


def tolerance_from(distances: list[Difference], *, floor: float = FLOOR) -> Tolerance:
    """Derive a tolerance from the distances of each reference engine (and layer) from the float64 reference.

    It is 4 times the largest distance, and at least the `floor` of the dtype, see `FLOORS`. UserError if there is no
    distance, or if one is not finite or has a fault: it would let everything pass.
    """
    faults = [d.describe() for d in distances if d.fault is not None or not math.isfinite(d.error + d.worst)]
    if faults or not distances:
        raise UserError(f"tolerance: expected faultless distances of the engines, got {faults or 'none'}")
    error, worst = max(d.error for d in distances), max(d.worst for d in distances)
    return Tolerance(max(floor, FACTOR * error), max(floor, FACTOR * worst))


def measure(actual: object, expected: object, *, masked: bool = False, token_axis: int | None = None) -> Difference:
    """Measure how far one array is from another; `fault` gives the reason if they cannot be compared.

    `masked`: -inf marks masked entries; both sides must have the same mask. `token_axis`: axis of the tokens, to also
    measure the error of each token. Integers must be equal.
    """
    fault = array_fault(actual, expected)
    if fault is not None:
        return Difference.from_fault(fault)
    assert isinstance(actual, np.ndarray)
    assert isinstance(expected, np.ndarray)
    if masked and (fault := _mask_fault(actual, expected)):
        return Difference.from_fault(fault)
    if actual.dtype.kind in "iu":
        return _measure_exact(actual, expected)
    a, b = (np.where(np.isneginf(expected), 0, x) if masked else x for x in (actual, expected))
    a, b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    with np.errstate(invalid="ignore"):
        errors = np.asarray(a - b)
    index = _index_of(np.abs(errors).argmax(), errors.shape)  # index of a NaN or infinity if there is one
    largest, size = float(np.abs(errors[index])), float(np.abs(b).max())
    if not math.isfinite(largest) and (fault := _not_finite(actual, expected, masked=masked)):
        return Difference.from_fault(fault)
    scale = max(largest, size) or 1.0  # so that squares neither overflow nor underflow
    errors, scaled = errors / scale, b / scale
    error = safe_ratio(_euclidean_norm(errors), _euclidean_norm(scaled))
    tokens = None if token_axis is None else _by_token(errors, scaled, token_axis)
    factor = 1 + safe_ratio(float(np.vdot(errors, scaled)), float(np.vdot(scaled, scaled)))
    return Difference(error, safe_ratio(largest, size), None, index, float(a[index]), float(b[index]), tokens, factor)


def distance(array: np.ndarray, reference: np.ndarray, stage: Stage) -> Difference:
    """Measure the distance of a stage, in any float dtype, from its float64 reference."""
    return measure(array.astype(reference.dtype), reference, masked=stage.masked)


def measure_in(actual: object, expected: object, *, unit: float) -> Difference:
    """Measure the distance between two arrays in a fixed unit, for errors that do not depend on the values' size.

    Parameters in training move by about a learning rate per step, whatever their size. The learning rate is then the
    unit. The error is the root mean square of the differences, in units; `fault` is as in `measure`.
    """
    fault = array_fault(actual, expected)
    if fault is not None:
        return Difference.from_fault(fault)
    assert isinstance(actual, np.ndarray)
    assert isinstance(expected, np.ndarray)
    if fault := _not_finite(actual, expected):
        return Difference.from_fault(fault)
    differences = np.abs(actual.astype(np.float64) - expected) / unit
    index = _index_of(differences.argmax(), differences.shape)
    error = float(np.sqrt(np.square(differences).mean()))
    return Difference(error, float(differences[index]), None, index, float(actual[index]), float(expected[index]))


@dataclass(frozen=True)
class Report:
    """Comparison of two traces, stage by stage in the order of the forward pass.

    Attributes:
        differences: Differences of the stages in both traces.
        tolerance: Tolerance of every stage.
        only: Stages in one trace only, by side, `actual` or `expected`.
    """

    differences: Mapping[str, Difference]
    tolerance: Tolerance
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def first_divergence(self) -> str | None:
        """First stage of both traces, in forward order, that does not pass; None if all pass."""
        return next((key for key, d in self.differences.items() if not d.within(self.tolerance)), None)

    @property
    def agrees(self) -> bool:
        """True if both traces have the same stages, and all pass."""
        return self.first_divergence is None and not any(self.only.values())

    def __str__(self) -> str:
        """Format one line: the verdict, the first stage that fails if any, and the stages that only one side has."""
        first = self.first_divergence
        line = f"{len(self.differences)} stages agree"
        if first is not None:
            passed = list(self.differences).index(first)
            line = f"{first}: {self.differences[first].describe()}; first failing stage, {passed} before it passed"
        return line + "".join(f"; only in {side}: {', '.join(keys)}" for side, keys in self.only.items() if keys)


def compare(actual: Trace, expected: Trace, tolerance: Tolerance = Tolerance(1e-5, 1e-4)) -> Report:
    """Compare two traces of the same input, in any order of their keys.

    Args:
        actual: The trace under test.
        expected: The trace to reproduce.
        tolerance: Tolerance of every stage; the default suits float32 near position 0, where RoPE's angles are exact.

    Returns:
        The report, in the order of the forward pass; names that are no stages come last, in the order of `expected`.

    Raises:
        UserError: The traces have no stage in common.
    """
    differences = {
        key: measure(actual[key], expected[key], masked=key.endswith("attn_scores"))
        for key in forward_order(expected)
        if key in actual
    }
    if not differences:
        raise UserError(f"compare: expected a stage in both traces, got {len(actual)} and {len(expected)} stages")
    sides = (("actual", actual, expected), ("expected", expected, actual))
    only = {side: [key for key in forward_order(trace) if key not in other_trace] for side, trace, other_trace in sides}
    return Report(differences, tolerance, only)


def array_fault(actual: object, expected: object) -> Fault | None:
    """Describe why two values cannot be compared: no arrays, unequal shape or dtype, no numbers, or empty."""
    sides: tuple[tuple[FaultKind, object], ...] = ("actual", actual), ("expected", expected)
    for side, array in sides:
        if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
            return side, f"expected an array, got {'nothing' if array is None else type(array).__name__}"
    assert isinstance(actual, np.ndarray)
    assert isinstance(expected, np.ndarray)
    if actual.shape != expected.shape:
        return "shape", f"expected {expected.shape}, got {actual.shape}"
    if actual.dtype != expected.dtype:
        return "dtype", f"expected {expected.dtype}, got {actual.dtype}"
    if expected.dtype.kind not in "iuf":
        return "dtype", f"expected integers or floats, got {expected.dtype}"
    return ("empty", "nothing to compare") if expected.size == 0 else None


def _not_finite(actual: np.ndarray, expected: np.ndarray, *, masked: bool = False) -> Fault | None:
    """Describe the first side with non-finite values, None if there is none; `masked` allows -inf."""
    for side, array in (("actual", actual), ("expected", expected)):
        is_allowed = np.isfinite(array) | (np.isneginf(array) if masked else False)
        if not is_allowed.all():
            return "non-finite", f"{array.size - int(is_allowed.sum())} of {array.size} {side} values"
    return None


def _mask_fault(actual: np.ndarray, expected: np.ndarray) -> Fault | None:
    if fault := _not_finite(actual, expected, masked=True):
        return fault
    if not np.array_equal(np.isneginf(actual), np.isneginf(expected)):
        n_different = int((np.isneginf(actual) != np.isneginf(expected)).sum())
        return "mask", f"{n_different} of {expected.size} entries masked on one side only"
    return None if np.isfinite(expected).any() else ("mask", "expected at least one entry that is not masked, got none")


def _measure_exact(actual: np.ndarray, expected: np.ndarray) -> Difference:
    """Measure arrays that must be equal: `error` is the share of different entries, `worst` is 1 if there are any."""
    differs = actual != expected
    index = _index_of(differs.argmax(), differs.shape)
    error, worst = float(differs.mean()), float(differs.any())  # so one wrong integer exceeds every tolerance
    return Difference(error, worst, None, index, float(actual[index]), float(expected[index]))


def _index_of(flat_index: np.intp, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(flat_index, shape)))


def _euclidean_norm(array: "np.ndarray | np.float64") -> float:
    flat = array.ravel(order="K")
    return math.sqrt(flat.dot(flat))


def _by_token(differences: np.ndarray, expected: np.ndarray, axis: int) -> np.ndarray:
    """Measure the error of every token; if all values of a token are zero, any difference is infinite."""
    other_axes = tuple(index for index in range(expected.ndim) if index != axis)
    errors, norms = (np.sqrt(np.square(array).sum(axis=other_axes)) for array in (differences, expected))
    if norms.all():
        return errors / norms
    return np.where(norms > 0, errors / np.where(norms > 0, norms, 1.0), np.where(errors > 0, math.inf, 0.0))


def safe_ratio(numerator: float, denominator: float) -> float:
    """Divide; 0 / 0 gives 0, any other number over 0 gives infinity."""
    if numerator == 0:
        return 0.0
    return numerator / denominator if denominator > 0 else math.inf
