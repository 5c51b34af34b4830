"""Expected array with its tolerance, result of a comparison, and cause of an error."""

import math
from dataclasses import dataclass, field, replace
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
        stage_ref: Validation point (`checkpoint`), stage, layer and case (input) of the array.
        mode: Source of the stage's inputs, see `Comparison`.
        engine: Engine that computed `expected`.
        expected: The golden.
        tolerance: Largest difference that passes.
        reference: The same array of the float64 reference; None if there is none, as for isolated stages.
        engine_error: Distance of the golden from the float64 reference, if it was measured before.
        stage: Stage that defines masked entries and the token axis; None to compare the whole array only.
        unit: Divisor of absolute differences: the learning rate for trained parameters; None for relative differences.
        expert_selection: Experts that the engine selected, and their scores; None if the array is no selection.
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
        """Measure the difference of an array from the golden, or of the whole array from `expected` if it is passed."""
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
        """Error of the golden against the float64 reference; cached, because it is equal for all runners."""
        return self.reference_error_of(self.expected) if self.engine_error is None else self.engine_error


@dataclass(frozen=True)
class Comparison:
    """Result of comparing one array: difference, tolerance and verdict.

    Attributes:
        model: Name of the model.
        stage_ref: Validation point (`checkpoint`), stage, layer and case (input) of the array.
        mode: `isolated`: the stage reads the golden's inputs. `chained`: it reads llorch's inputs, but the golden's
            values replace flips and near-ties of experts. `decode`: chained, after a prefill. `free`: chained, no flip
            is replaced. `whole` or `in parts`: chained, a long text in one pass or in chunks. `exact`: files, token ids
            and other quantities that must be equal.
        engine: Engine whose array is expected.
        backend: llorch backend that computed the actual array.
        difference: Distance of the actual array from the expected array.
        tolerance: Largest difference that passes.
        verdict: PASS; FAIL; TIE: other tokens or experts, whose scores are closer than rounding errors; ROUNDING: an
            error in a dump that its arithmetic explains.
        engine_error: Distance of the expected array from the float64 reference; NaN if there is none.
        reference_error: Distance of the actual array from the float64 reference; NaN if there is none.
        load_path: Tools that loaded the file into the engine; None if the file or its tokenization is compared.
        note: Explanation that the numbers do not give.
        flips: Number of values that the next matrix product rounds to other codes than the golden's; only under ggml
            numerics, in which products round their inputs to integer codes.
        expectation: Expected array, if it is displayed later; None for exact comparisons.
        actual: Actual array, if it is displayed later; None if the runner never computed it.
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
        """Return the comparison as a record for `--json`; NaN marks values that were not measured."""
        difference, tolerance, stage_ref = self.difference, self.tolerance, self.stage_ref
        has_tokens = difference.tokens is not None and tolerance.tokens is not None
        token_error, tolerance_token = difference.nearest_token(tolerance) if has_tokens else (math.nan, math.nan)
        has_factor = tolerance.common_factor is not None and difference.fault is None  # with a fault: unmeasured
        return {
            "model": self.model, "checkpoint": stage_ref.checkpoint, "stage": stage_ref.name, "layer": stage_ref.layer,
            "case": stage_ref.run, "engine": self.engine, "backend": self.backend, "mode": self.mode,
            "error": difference.error, "worst": difference.worst, "reference_error": self.reference_error,
            "engine_error": self.engine_error, "tolerance": tolerance.error, "tolerance_worst": tolerance.worst,
            "verdict": self.verdict, "note": self.note, "flips": self.flips, "token_error": token_error,
            "tolerance_token": tolerance_token,
            "common_factor": difference.common_factor if has_factor else math.nan,
            "tolerance_factor": tolerance.common_factor if has_factor else math.nan,
            "load_path": self.load_path and dict(vars(self.load_path)),
        }  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """Possible cause of an error, with the share of the error that it explains.

    Attributes:
        name: Name of the mistake, setting or arithmetic: `rope-interleaved-pairs`, `norm-eps`.
        kind: Kind of the cause; a `near miss` explains much of the error, but is not the cause.
        sentence: The mistake and the correct way, with the recovered value: "eps is 1e-5 here, the file says 1e-6".
        stages: Keys of the stages into which the cause was injected.
        explained_share: Share of the error that the cause explains, 0 to 1.
        remaining: Remaining error divided by the tolerance; at most 1 if the cause explains the whole error.
        value: Recovered value of a setting: a number or a name.
    """

    name: str
    kind: CauseKind
    sentence: str
    stages: tuple[str, ...]
    explained_share: float
    remaining: float
    value: str = ""
