"""Compare an array with the expected array. All comparisons of llorch use this module.

An `Expectation` is derived from goldens (arrays of reference engines) only: the array, its stage and engine, the mode
(source of the stage's inputs, see `types.Comparison`), and the tolerance. A runner computes the actual array, and
`judge` compares both.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from llorch.engines import LoadPath
from llorch.judging.types import Comparison, Expectation
from llorch.stages.comparison import EXACT, FAIL, PASS, TIE, Difference, Tolerance
from llorch.stages.stage_ref import StageRef


def judge(expectation: Expectation, actual: np.ndarray | None, *, model: str, backend: str) -> Comparison:
    """Compare an array of llorch with the expected array."""
    difference = expectation.difference(actual)
    is_reference = (
        expectation.expected is expectation.reference and difference.fault is None
    )  # float64 run: known errors
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
    """Compare a difference with its tolerance; errors against the float64 reference are NaN if there is none."""
    return Comparison(
        model, stage_ref, mode, engine, backend, difference, tolerance,
        PASS if difference.within(tolerance) else FAIL, engine_error, reference_error,
        note=difference.fault or _describe_factor(difference, tolerance),
    )  # fmt: skip


def _describe_factor(difference: Difference, tolerance: Tolerance) -> str:
    """Describe a factor that all values share, so no rounding, if it is beyond its tolerance; else return ""."""
    if difference.has_no_factor(tolerance):
        return ""
    return f"common factor {difference.common_factor:.4f}, expected 1 within {tolerance.common_factor:.4f}"


def compare_exact(
    stage_ref: StageRef, engine: str, wrong: float, note: str, *, model: str, backend: str = "numpy"
) -> Comparison:
    """Create the comparison of quantities that must be equal; `wrong` is the share of unequal ones."""
    difference, verdict = Difference(wrong, wrong), FAIL if wrong else PASS
    return Comparison(model, stage_ref, "exact", engine, backend, difference, EXACT, verdict, 0.0, wrong, note=note)


def with_load_paths(comparisons: Iterable[Comparison], load_paths: Mapping[str, LoadPath]) -> Iterator[Comparison]:
    """Add the load path of its reference engine to each comparison."""
    return (replace(c, load_path=load_paths[c.engine]) for c in comparisons)


def as_tie(comparison: Comparison, note: str) -> Comparison:
    """Mark a comparison as a TIE: only tokens or experts differ whose scores rounding can exchange."""
    return replace(comparison, verdict=TIE, note=note)
