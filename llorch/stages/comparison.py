"""The one comparison: how far apart two arrays or two traces are, and whether that passes.

    error = |got - want| / |want|                   Euclidean norms, in float64
    worst = max |got - want| / max |want|           the single worst element, on the tensor's own scale
    tokens                                          the error of each token's row, on that row's own scale
    common factor = <got, want> / <want, want>      1 where the two differ by independent roundings alone

Presence, shape, dtype and finiteness are judged before any value. NaN, infinity, an empty array or a broadcast
never pass. Nothing else in the project decides whether numbers agree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from llorch.runtime.errors import UserError
from llorch.stages.table import Stage, forward_order

PASS, FAIL, TIE, ROUNDING, NOT_RUN = "PASS", "FAIL", "TIE", "ROUNDING", "NOT RUN"  # verdicts
FLOAT32_ULP = 2.0**-23
FLOOR = 4 * FLOAT32_ULP  # 4 ulp of the tensor's scale: no tolerance is ever below it
FLOORS: Mapping[str, float] = {  # by dtype of a run; half precision: 4 ulp of a number just below that scale
    "float32": FLOOR,
    "bfloat16": 4 * 2.0**-8,
    "float16": 4 * 2.0**-11,
}
FACTOR = 4.0  # times the larger distance of an engine from the float64 reference

Trace = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Tolerance:
    """How far an array may be from its golden; all limits hold at once.

    Attributes:
        error: Of the whole.
        worst: Of its worst element.
        tokens: Of the row of each token, one limit or one per token; None where tokens are not told apart.
        common_factor: How far the common factor may be from 1; None where it is not judged.
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

    error: float
    worst: float
    fault: str | None = None
    index: tuple[int, ...] = ()  # of the worst element
    actual: float = math.nan
    expected: float = math.nan
    tokens: np.ndarray | None = field(default=None, compare=False)  # the error of each token
    common_factor: float = field(default=1.0, compare=False)  # the projection of `actual` on `expected`
    fault_kind: FaultKind | None = field(default=None, compare=False)

    @classmethod
    def of_fault(cls, fault: Fault) -> "Difference":
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
            times_over(self.error, tolerance.error),
            times_over(self.worst, tolerance.worst),
            times_over(*self.nearest_token(tolerance)),
            0.0 if tolerance.common_factor is None else times_over(factor, tolerance.common_factor),
        )

    def has_no_factor(self, tolerance: Tolerance) -> bool:
        """Tell whether rounding explains the common factor."""
        return tolerance.common_factor is None or abs(self.common_factor - 1) <= tolerance.common_factor

    def nearest_token(self, tolerance: Tolerance) -> tuple[float, float]:
        """Return error and limit of the token nearest to its limit, or farthest beyond it; zeros if there is none."""
        if self.tokens is None or tolerance.tokens is None:
            return 0.0, 0.0
        limits = np.asarray(tolerance.tokens, np.float64)
        with np.errstate(divide="ignore"):
            shares = np.divide(self.tokens, limits, out=np.zeros_like(self.tokens), where=self.tokens > 0)
        at = int(shares.argmax())
        return float(self.tokens[at]), float(limits[at] if limits.ndim else limits)

    def describe(self) -> str:
        """Format the difference as one line for a person."""
        if self.fault is not None:
            return self.fault
        numbers = f"expected {self.expected:.7g}, got {self.actual:.7g}"
        return f"error {self.error:.1e}, worst {self.worst:.1e} at {self.index}: {numbers}"


def tolerance_from(distances: list[Difference], *, floor: float = FLOOR) -> Tolerance:
    """Derive a tolerance from the distances of each reference engine (and layer) from the float64 reference.

    It is 4 times the largest distance, and at least the `floor` of the dtype, see `FLOORS`. ValueError: no distance, or
    one with a fault or without a finite size; it would let everything pass.
    """
    faults = [d.describe() for d in distances if d.fault is not None or not math.isfinite(d.error + d.worst)]
    if faults or not distances:
        raise UserError(f"tolerance: expected faultless distances of the engines, got {faults or 'none'}")
    error, worst = max(d.error for d in distances), max(d.worst for d in distances)
    return Tolerance(max(floor, FACTOR * error), max(floor, FACTOR * worst))


def measure(actual: object, expected: object, *, masked: bool = False, token_axis: int | None = None) -> Difference:
    """Measure how far one array is from another; `fault` gives the reason if they cannot be compared.

    `masked`: -inf marks masked entries, which both sides must then have in the same places. `token_axis`: along which
    tokens stand, to measure each of them, too.
    """
    fault = array_fault(actual, expected)
    if fault is not None:
        return Difference.of_fault(fault)
    assert isinstance(actual, np.ndarray)
    assert isinstance(expected, np.ndarray)
    if masked and (fault := _mask_fault(actual, expected)):
        return Difference.of_fault(fault)
    if actual.dtype.kind in "iu":
        return _measure_exact(actual, expected)
    a, b = (np.where(np.isneginf(expected), 0, x) if masked else x for x in (actual, expected))
    a, b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    with np.errstate(invalid="ignore"):
        off = np.asarray(a - b)
    index = _index_of(np.abs(off).argmax(), off.shape)  # of NaN or infinity where there is one
    largest, size = float(np.abs(off[index])), float(np.abs(b).max())
    if not math.isfinite(largest) and (fault := _not_finite(actual, expected, masked=masked)):
        return Difference.of_fault(fault)
    scale = max(largest, size) or 1.0  # squares must neither overflow nor vanish
    off, scaled = off / scale, b / scale
    error = times_over(_euclidean_norm(off), _euclidean_norm(scaled))
    tokens = None if token_axis is None else _by_token(off, scaled, token_axis)
    factor = 1 + times_over(float(np.vdot(off, scaled)), float(np.vdot(scaled, scaled)))
    return Difference(error, times_over(largest, size), None, index, float(a[index]), float(b[index]), tokens, factor)


def distance(array: np.ndarray, true: np.ndarray, stage: Stage) -> Difference:
    """Measure the distance of a stage, in any float dtype, from its float64 reference."""
    return measure(array.astype(true.dtype), true, masked=stage.masked)


def measure_in(actual: object, expected: object, *, unit: float) -> Difference:
    """Measure the distance between two arrays in a fixed unit, for numbers whose size says nothing about their error.

    Parameters in training move by about a learning rate per step, whatever their size. The learning rate is then the
    unit. The error is the root mean square of the differences, in units; `fault` is as in `measure`.
    """
    fault = array_fault(actual, expected)
    if fault is not None:
        return Difference.of_fault(fault)
    assert isinstance(actual, np.ndarray)
    assert isinstance(expected, np.ndarray)
    if fault := _not_finite(actual, expected):
        return Difference.of_fault(fault)
    apart = np.abs(actual.astype(np.float64) - expected) / unit
    index = _index_of(apart.argmax(), apart.shape)
    error = float(np.sqrt(np.square(apart).mean()))
    return Difference(error, float(apart[index]), None, index, float(actual[index]), float(expected[index]))


@dataclass(frozen=True)
class Report:
    """The comparison of two traces, stage by stage in the order of the forward pass.

    Attributes:
        differences: Of the stages that both have.
        tolerance: What passes.
        only: Stages that one side alone has, by side, `actual` or `expected`.
    """

    differences: Mapping[str, Difference]
    tolerance: Tolerance
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def first_divergence(self) -> str | None:
        """The first stage of both that does not pass, or None."""
        return next((key for key, d in self.differences.items() if not d.within(self.tolerance)), None)

    @property
    def agrees(self) -> bool:
        """True if both have the same stages, and all pass."""
        return self.first_divergence is None and not any(self.only.values())

    def __str__(self) -> str:
        """Format one line: the verdict, the first stage that fails if any, and the stages that only one side has."""
        first = self.first_divergence
        text = f"{len(self.differences)} stages agree"
        if first is not None:
            passed = list(self.differences).index(first)
            text = f"{first}: {self.differences[first].describe()}; first failing stage, {passed} before it passed"
        return text + "".join(f"; only in {side}: {', '.join(keys)}" for side, keys in self.only.items() if keys)


def compare(actual: Trace, expected: Trace, tolerance: Tolerance = Tolerance(1e-5, 1e-4)) -> Report:
    """Compare two traces of the same input, whatever order their files have them in.

    Args:
        actual: The trace under test.
        expected: The trace to reproduce.
        tolerance: What passes; the default suits two float32 engines near position 0.

    Returns:
        The report, in the order of the forward pass; names that are no stages come last, in the order of `expected`.

    Raises:
        ValueError: The traces have no stage in common.
    """
    differences = {
        key: measure(actual[key], expected[key], masked=key.endswith("attn_scores"))
        for key in forward_order(expected)
        if key in actual
    }
    if not differences:
        raise UserError(f"compare: expected a stage in both traces, got {len(actual)} and {len(expected)} stages")
    sides = (("actual", actual, expected), ("expected", expected, actual))
    only = {side: [key for key in forward_order(one) if key not in other] for side, one, other in sides}
    return Report(differences, tolerance, only)


def array_fault(actual: object, expected: object) -> Fault | None:
    """Explain why two values are no arrays of one shape and dtype; None if they are."""
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
    """Describe the first side with values that are not finite, None if there is none; `masked` admits -inf."""
    for side, array in (("actual", actual), ("expected", expected)):
        allowed = np.isfinite(array) | (np.isneginf(array) if masked else False)
        if not allowed.all():
            return "non-finite", f"{array.size - int(allowed.sum())} of {array.size} {side} values"
    return None


def _mask_fault(actual: np.ndarray, expected: np.ndarray) -> Fault | None:
    if fault := _not_finite(actual, expected, masked=True):
        return fault
    if not np.array_equal(np.isneginf(actual), np.isneginf(expected)):
        n_wrong = int((np.isneginf(actual) != np.isneginf(expected)).sum())
        return "mask", f"{n_wrong} of {expected.size} entries masked on one side only"
    return None if np.isfinite(expected).any() else ("mask", "expected at least one entry that is not masked, got none")


def _measure_exact(actual: np.ndarray, expected: np.ndarray) -> Difference:
    """Measure arrays that must be equal: `error` is the share of wrong entries, `worst` 1 if there is one."""
    wrong = actual != expected
    index = _index_of(wrong.argmax(), wrong.shape)
    error, worst = float(wrong.mean()), float(wrong.any())  # one wrong integer is above every tolerance
    return Difference(error, worst, None, index, float(actual[index]), float(expected[index]))


def _index_of(at: np.intp, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(at, shape)))


def _euclidean_norm(array: "np.ndarray | np.float64") -> float:
    flat = array.ravel(order="K")
    return math.sqrt(flat.dot(flat))


def _by_token(off_by: np.ndarray, expected: np.ndarray, axis: int) -> np.ndarray:
    """Measure the error of every token; if all values of a token are zero, any difference is infinite."""
    others = tuple(other for other in range(expected.ndim) if other != axis)
    off, size = (np.sqrt(np.square(array).sum(axis=others)) for array in (off_by, expected))
    if size.all():
        return off / size
    return np.where(size > 0, off / np.where(size > 0, size, 1.0), np.where(off > 0, math.inf, 0.0))


def times_over(part: float, whole: float) -> float:
    """Divide `part` by `whole`; 0 / 0 gives 0, any other number over 0 gives infinity."""
    if part == 0:
        return 0.0
    return part / whole if whole > 0 else math.inf
