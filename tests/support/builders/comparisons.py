"""Comparisons of one stage, as the atlas has them."""

from llorch.judging.compare import judge_difference
from llorch.judging.types import Comparison
from llorch.stages.comparison import Difference, Tolerance
from llorch.stages.stage_ref import StageRef


def atlas_comparison(stage: str, error: float, tolerance: float = 1e-6) -> Comparison:
    return judge_difference(
        Difference(error, error), Tolerance(tolerance, tolerance), StageRef("08", stage), "chained",
        "transformers-float64", model="any", backend="engine",
    )  # fmt: skip
