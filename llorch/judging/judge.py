"""The judge: it compares an array with the expected one. Every comparison of llorch is made here.

An expectation is made from goldens alone: a place, a `mode` (how the place is reached), the engine whose array is
expected, and the tolerance. A runner computes; `judge` compares.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import numpy as np

from llorch.engines import LoadPath
from llorch.judging.expert_selection import ExpertSelection
from llorch.stages.comparison import EXACT, FAIL, PASS, TIE, Difference, Tolerance, measure, measure_in
from llorch.stages.stage_ref import StageRef


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
        expert_selection: What experts were chosen by, where the array is a choice.
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
    expert_selection: ExpertSelection | None = None

    def difference(self, actual: np.ndarray | None, expected: np.ndarray | None = None) -> Difference:
        """Measure the difference between an array and the golden, or between whole arrays if `expected` is given."""
        if (selection := self.expert_selection) is not None:
            return (selection if expected is None else replace(selection, ids=expected)).difference(actual)
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


@dataclass(frozen=True)
class Comparison:
    """The result of one array: what was compared, how far it is off, and the verdict.

    Attributes:
        model: Name of the model.
        stage_ref: Where the array stands.
        mode: How it is reached: isolated, chained, decode, exact; free: no flip replaced; whole, in parts: long texts.
        engine: The engine whose array is expected.
        backend: What computed the actual array.
        difference: Distance of the actual array from the expected one.
        tolerance: The largest difference that passes.
        verdict: PASS, FAIL, TIE or ROUNDING.
        engine_error: Distance of the expected array from the float64 reference; NaN where there is none.
        reference_error: Distance of the actual array from the float64 reference; NaN where there is none.
        load_path: How the engine loaded the file; None where the file or its text is compared.
        note: What a reader has to know beside the numbers.
        flips: Values of this stage that the next product rounds to another side than the golden's.
        expectation: What was expected, where the arrays are shown later; None where things are equal or not.
        actual: The array, where it is shown later; None if it never came.
    """

    model: str
    stage_ref: StageRef
    mode: str
    engine: str
    backend: str
    difference: Difference
    tolerance: Tolerance
    verdict: str
    engine_error: float = math.nan
    reference_error: float = math.nan
    load_path: LoadPath | None = None
    note: str = ""
    flips: int = 0
    expectation: Expectation | None = field(default=None, repr=False, compare=False)
    actual: np.ndarray | None = field(default=None, repr=False, compare=False)

    def record(self) -> dict[str, object]:
        """Return the comparison as every `--json` has it; NaN stands for what was not measured."""
        difference, tolerance, stage_ref = self.difference, self.tolerance, self.stage_ref
        has_tokens = difference.tokens is not None and tolerance.tokens is not None
        token_error, tolerance_token = difference.nearest_token(tolerance) if has_tokens else (math.nan, math.nan)
        has_factor = tolerance.common_factor is not None and difference.fault is None
        return {
            "model": self.model, "checkpoint": stage_ref.checkpoint, "stage": stage_ref.name, "layer": stage_ref.layer,
            "case": stage_ref.run, "engine": self.engine, "backend": self.backend, "mode": self.mode,
            "error": difference.error, "worst": difference.worst, "reference_error": self.reference_error,
            "engine_error": self.engine_error, "tolerance": tolerance.error, "tolerance_worst": tolerance.worst,
            "verdict": self.verdict, "note": self.note, "flips": self.flips, "token_error": token_error,
            "tolerance_token": tolerance_token,
            "common_factor": difference.common_factor if has_factor else math.nan,
            "tolerance_factor": tolerance.common_factor if has_factor else math.nan,
            "load_path": self.load_path and asdict(self.load_path),
        }  # fmt: skip


def judge(expectation: Expectation, actual: np.ndarray | None, *, model: str, backend: str) -> Comparison:
    """Compare an array of llorch with what is expected of it."""
    difference = expectation.difference(actual)
    is_reference = expectation.expected is expectation.reference and difference.fault is None
    comparison = judge_difference(
        difference, expectation.tolerance, expectation.stage_ref, expectation.mode, expectation.engine,
        model=model, backend=backend,
        reference_error=difference.error if is_reference else expectation.reference_error_of(actual),
        engine_error=0.0 if is_reference else expectation.engine_error_of_golden,
    )  # fmt: skip
    selection = expectation.expert_selection
    if selection is None or actual is None or difference.fault is not None or not (note := selection.note(actual)):
        return comparison
    return as_tie(comparison, note) if comparison.verdict == PASS else replace(comparison, note=note)


def judge_difference(
    difference: Difference, tolerance: Tolerance, stage_ref: StageRef, mode: str, engine: str, *, model: str,
    backend: str, reference_error: float = math.nan, engine_error: float = math.nan,
) -> Comparison:  # fmt: skip
    """Compare a difference with its tolerance. Errors against the float64 reference are NaN where there is none."""
    return Comparison(
        model, stage_ref, mode, engine, backend, difference, tolerance,
        PASS if difference.within(tolerance) else FAIL, engine_error, reference_error,
        note=difference.fault or _describe_factor(difference, tolerance),
    )  # fmt: skip


def _describe_factor(difference: Difference, tolerance: Tolerance) -> str:
    """Describe a common factor beyond its tolerance; empty if it is within."""
    if difference.has_no_factor(tolerance):
        return ""
    return f"common factor {difference.common_factor:.4f}, expected 1 within {tolerance.common_factor:.4f}"


def compare_exact(
    stage_ref: StageRef, engine: str, wrong: float, note: str, *, model: str, backend: str = "numpy"
) -> Comparison:
    """Compare things that must be equal; `wrong` is the share that is not equal."""
    difference, verdict = Difference(wrong, wrong), FAIL if wrong else PASS
    return Comparison(model, stage_ref, "exact", engine, backend, difference, EXACT, verdict, 0.0, wrong, note=note)


def with_load_paths(comparisons: Iterable[Comparison], load_paths: Mapping[str, LoadPath]) -> Iterator[Comparison]:
    """Add the load path of its reference engine to each comparison."""
    return (replace(c, load_path=load_paths[c.engine]) for c in comparisons)


def as_tie(comparison: Comparison, note: str) -> Comparison:
    """Mark a comparison as a near-tie."""
    return replace(comparison, verdict=TIE, note=note)
