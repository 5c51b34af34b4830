"""The judge: it compares an array of llorch with the expected one. Every row of a verification is made here.

An expectation is made from goldens alone: a place, a `mode` (how the place is reached), the engine whose array is
expected, and the tolerance. A runner computes; `judge` compares.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from llorch.engines import LoadPath
from llorch.judging.expert_selection import ExpertSelection
from llorch.stages.comparison import FAIL, PASS, TIE, Difference, Tolerance, measure, measure_in
from llorch.stages.stage_ref import StageRef


@dataclass(frozen=True)
class Comparison:
    """One comparison and its verdict."""

    model: str
    checkpoint: str
    stage: str
    layer: int | None
    case: str
    engine: str
    backend: str
    mode: str  # isolated, chained, decode, exact, free: with no flip replaced; whole, in parts: of long contexts
    error: float  # ours from the golden
    worst: float  # its worst element
    reference_error: float  # llorch's from the float64 reference; NaN for isolated rows, which start from the golden
    engine_error: float  # the golden from the float64 reference
    tolerance: float
    tolerance_worst: float
    verdict: str
    note: str = ""
    flips: int = 0  # values of this stage that the next product rounds to another side than the golden's
    token_error: float = math.nan  # of the token that is nearest to its limit; NaN where tokens are not told apart
    tolerance_token: float = math.nan
    common_factor: float = math.nan  # of llorch's array on the golden; 1 is right, NaN where it is not judged
    tolerance_factor: float = math.nan  # how far from 1 it may be
    load_path: LoadPath | None = None  # how the engine loaded the file; None where the file or its text is compared
    stage_ref: StageRef = field(default=StageRef("", ""), repr=False, compare=False)

    def record(self) -> dict[str, object]:
        """Return the comparison as `--json` gives it; the place is in the other fields."""
        shown: dict[str, object] = {each.name: getattr(self, each.name) for each in fields(self)}
        del shown["stage_ref"]
        return shown | {"load_path": self.load_path and asdict(self.load_path)}


@dataclass(frozen=True)
class Expectation:
    """Expected value and tolerance of one array.

    Attributes:
        stage_ref: Where it stands.
        mode: How it is reached, as in `Comparison`.
        engine: The engine that made `expected`.
        expected: The golden.
        tolerance: The tolerance.
        reference: The same array of the float64 reference; None where there is none, as for isolated stages.
        engine_error: The golden's distance from the float64 reference, where that is known without `reference`.
        masked: Whether -inf marks masked entries.
        token_axis: Along which tokens stand, where each is judged.
        unit: What differences are measured in, instead of as shares of the golden.
        choice: What experts were chosen by, where the array is a choice.
    """

    stage_ref: StageRef
    mode: str
    engine: str
    expected: np.ndarray
    tolerance: Tolerance
    reference: np.ndarray | None = None
    engine_error: float | None = None
    masked: bool = False
    token_axis: int | None = None
    unit: float | None = None
    choice: ExpertSelection | None = None

    def difference(self, actual: np.ndarray | None, expected: np.ndarray | None = None) -> Difference:
        """Measure the difference between an array and the golden, or between whole arrays if `expected` is given."""
        if self.choice is not None:
            return (self.choice if expected is None else replace(self.choice, ids=expected)).difference(actual)
        if self.unit is not None:
            return measure_in(actual, self.expected if expected is None else expected, unit=self.unit)
        if expected is not None:
            return measure(actual, expected, masked=self.masked)
        return measure(actual, self.expected, masked=self.masked, token_axis=self.token_axis)

    def reference_error_of(self, array: np.ndarray | None) -> float:
        """Measure the error of an array against the float64 reference; NaN if there is none."""
        if self.reference is None:
            return math.nan
        return self.difference(None if array is None else array.astype(self.reference.dtype), self.reference).error

    @cached_property
    def engine_error_of_golden(self) -> float:
        """Error of the golden against the float64 reference; the same for all runners that have to reproduce it."""
        return self.reference_error_of(self.expected) if self.engine_error is None else self.engine_error


def judge(expectation: Expectation, actual: np.ndarray | None, *, model: str, backend: str) -> Comparison:
    """Compare an array of llorch with what is expected of it."""
    found = expectation.difference(actual)
    same = expectation.expected is expectation.reference and found.fault is None
    comparison = row_of(
        found, expectation.tolerance, expectation.stage_ref, expectation.mode, expectation.engine,
        model=model, backend=backend, reference_error=found.error if same else expectation.reference_error_of(actual),
        engine_error=0.0 if same else expectation.engine_error_of_golden,
    )  # fmt: skip
    if (
        expectation.choice is None
        or actual is None
        or found.fault is not None
        or not (note := expectation.choice.note(actual))
    ):
        return comparison
    return as_tie(comparison, note) if comparison.verdict == PASS else replace(comparison, note=note)


def row_of(
    found: Difference, tolerance: Tolerance, stage_ref: StageRef, mode: str, engine: str, *, model: str, backend: str,
    reference_error: float = math.nan, engine_error: float = math.nan,
) -> Comparison:  # fmt: skip
    """Compare a difference with its tolerance. Errors against the float64 reference are NaN where there is none."""
    token_error, token_limit = found.nearest_token(tolerance)
    judges_factor = tolerance.common_factor is not None and found.fault is None
    return Comparison(
        model=model,
        checkpoint=stage_ref.checkpoint,
        stage=stage_ref.name,
        layer=stage_ref.layer,
        case=stage_ref.run,
        engine=engine,
        backend=backend,
        mode=mode,
        error=found.error,
        worst=found.worst,
        reference_error=reference_error,
        engine_error=engine_error,
        tolerance=tolerance.error,
        tolerance_worst=tolerance.worst,
        verdict=PASS if found.within(tolerance) else FAIL,
        note=found.fault or _describe_factor(found, tolerance),
        token_error=token_error,
        tolerance_token=token_limit,
        common_factor=found.common_factor if judges_factor else math.nan,
        tolerance_factor=tolerance.common_factor if judges_factor and tolerance.common_factor is not None else math.nan,
        stage_ref=stage_ref,
    )


def _describe_factor(found: Difference, tolerance: Tolerance) -> str:
    """Describe a common factor beyond its tolerance; empty if it is within."""
    if found.has_no_factor(tolerance):
        return ""
    return f"common factor {found.common_factor:.4f}, expected 1 within {tolerance.common_factor:.4f}"


def compare_exact(
    stage_ref: StageRef, engine: str, wrong: float, note: str, *, model: str, backend: str = "numpy"
) -> Comparison:
    """Compare things that must be equal; `wrong` is the share that is not equal."""
    return Comparison(
        model=model,
        checkpoint=stage_ref.checkpoint,
        stage=stage_ref.name,
        layer=stage_ref.layer,
        case=stage_ref.run,
        engine=engine,
        backend=backend,
        mode="exact",
        error=wrong,
        worst=wrong,
        reference_error=wrong,
        engine_error=0.0,
        tolerance=0.0,
        tolerance_worst=0.0,
        verdict=FAIL if wrong else PASS,
        note=note,
        stage_ref=stage_ref,
    )


def with_load_paths(comparisons: Iterable[Comparison], routes: Mapping[str, LoadPath]) -> Iterator[Comparison]:
    """Add the load path of its reference engine to each comparison."""
    return (replace(c, load_path=routes[c.engine]) for c in comparisons)


def as_tie(comparison: Comparison, note: str) -> Comparison:
    """Mark a comparison as a near-tie."""
    return replace(comparison, verdict=TIE, note=note)
