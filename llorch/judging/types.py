"""Expected array with its tolerance, result of a comparison, and cause of an error."""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from llorch.engines import LoadPath
from llorch.judging.expert_selection import ExpertSelection
from llorch.stages.comparison import Difference, Tolerance, measure, measure_in
from llorch.stages.stage_ref import StageRef, token_axis
from llorch.stages.table import Stage

CauseKind = Literal["mistake", "setting", "rounding", "near miss"]


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
        stage: The stage whose masked entries and tokens are judged; None where the array is judged as a whole.
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
    stage: Stage | None = None
    unit: float | None = None
    expert_selection: ExpertSelection | None = None

    def difference(self, actual: np.ndarray | None, expected: np.ndarray | None = None) -> Difference:
        """Measure the difference between an array and the golden, or between whole arrays if `expected` is given."""
        if (selection := self.expert_selection) is not None:
            return (selection if expected is None else replace(selection, ids=expected)).difference(actual)
        if self.unit is not None:
            return measure_in(actual, self.expected if expected is None else expected, unit=self.unit)
        masked = self.stage is not None and self.stage.masked
        if expected is not None:
            return measure(actual, expected, masked=masked)
        return measure(actual, self.expected, masked=masked, token_axis=self.stage and token_axis(self.stage))

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


@dataclass(frozen=True)
class Cause:
    """Possible cause of an error, compared with the error.

    Attributes:
        name: Name of the mistake, setting or arithmetic: `rope-interleaved-pairs`, `norm-eps`.
        kind: What it is; `near miss`: it explains much of the error, but is not the cause.
        sentence: The mistake and the right way, with the recovered value: "eps is 1e-5 here, the file says 1e-6".
        stages: Keys of the stages in which it was injected.
        explained_share: Share of the error that it explains, 0 to 1.
        remaining: Factor by which the remaining error exceeds the tolerance; at most 1: all is explained.
        value: Recovered value of a setting: a number, or its name.
    """

    name: str
    kind: CauseKind
    sentence: str
    stages: tuple[str, ...]
    explained_share: float
    remaining: float
    value: str = ""
