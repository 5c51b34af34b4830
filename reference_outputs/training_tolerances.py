"""Tolerances of the training goldens and the refusal of wrong ones, both from the engines' distances from float64."""

from collections import defaultdict
from collections.abc import Iterator

from llorch.families.config import ModelConfig
from llorch.judging.expectations.training import make_expectations
from llorch.judging.expectations.training_refs import MODES
from llorch.judging.goldens.training import Errors, Tolerances, TrainingGolden, text
from llorch.judging.tolerances import training as limits
from llorch.judging.types import Expectation
from llorch.ops.numerics import DtypeName
from llorch.runtime.errors import UserError
from llorch.stages.comparison import Difference, Tolerance, tolerance_from
from llorch.stages.stage_ref import StageRef


def distances(
    golden: TrainingGolden, config: ModelConfig, dtype: DtypeName
) -> Iterator[tuple[Expectation, Difference]]:
    """Yield the distances of the reference engines from the float64 reference.

    Each distance comes with an expectation that has the largest tolerance.
    """

    def largest_tolerance(stage_ref: StageRef, mode: str) -> Tolerance:
        return limits.ceiling(config, stage_ref.stage, mode, limits.tolerance_dtype(stage_ref, mode, dtype))

    for expectation in make_expectations(golden, config, dtype, largest_tolerance):
        assert expectation.reference is not None
        yield (
            expectation,
            expectation.difference(expectation.expected.astype(expectation.reference.dtype), expectation.reference),
        )


def refuse_far_engines(name: str, golden: TrainingGolden, config: ModelConfig, dtype: DtypeName) -> None:
    """Refuse goldens that are further from the float64 reference than rounding explains."""
    far = [
        f"{expectation.engine} {expectation.mode} {text(expectation.stage_ref)}: {diff.describe()}"
        for expectation, diff in distances(golden, config, dtype)
        if not diff.within(expectation.tolerance)
    ]
    if far:
        raise UserError(
            f"training goldens of {name}: {len(far)} too far from the float64 reference:\n" + "\n".join(far)
        )


def tolerances(golden: TrainingGolden, config: ModelConfig, dtype: DtypeName) -> Tolerances:
    """Derive the tolerances of a dtype from the distances of the engines from the float64 reference."""
    stage_distances: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for expectation, distance in distances(golden, config, dtype):
        if limits.tolerance_dtype(expectation.stage_ref, expectation.mode, dtype) == dtype:
            stage_distances[expectation.mode, expectation.stage_ref.stage].append(distance)
    out: dict[str, dict[str, Tolerance]] = {mode: {} for mode in MODES}
    for (mode, stage), group in stage_distances.items():
        tolerance = tolerance_from(group, floor=limits.floor(stage, dtype))
        out[mode][stage] = tolerance.at_most(limits.ceiling(config, stage, mode, dtype))
    return out


def errors(golden: TrainingGolden, config: ModelConfig, dtype: DtypeName) -> Errors:
    """Collect the largest errors of the reference engines, with three digits; more digits would be noise.

    The errors are measured against the float64 reference.
    """
    out: dict[str, dict[str, dict[str, float]]] = {}
    for expectation, diff in distances(golden, config, dtype):
        cases = out.setdefault(expectation.mode, {}).setdefault(expectation.stage_ref.stage, {})
        cases[expectation.stage_ref.case] = max(float(f"{diff.error:.2e}"), cases.get(expectation.stage_ref.case, 0.0))
    return out
