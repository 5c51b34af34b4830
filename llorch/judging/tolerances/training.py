"""Tolerances of training, by dtype: floors and ceilings of float32 and bfloat16, and the tolerances of float64.

**float32**: 4 times the engine's largest distance from the float64 reference in a group of stages, at least a floor and
at most a ceiling. The floors are 4 ulp, where nothing else is said; the ceilings of float32 are fixed: orders above
what engines show, orders below what mistakes make.

**bfloat16**: the same of PEFT's run in it, with the floor of the dtype. The float64 reference is a run with the weights
as they are stored: rounding the base is part of what such a run does. Errors of independent roundings add up as the
root of their number, so the ceiling is derived: there is one at each stage of the forward pass and another on the way
back; alone, a gradient is that of one block. A square is twice as far off as its root. The adapter, its gradients and
the optimizer are float32 on any base, in PEFT and here, so an optimizer step alone keeps its limits of float32.

**float64**: the tolerance is `FLOAT64_TOLERANCE`, as a share of the tensor and of its largest element. Sums of some
thousand products round to some 1e-15, and the tolerance is a thousand times that; a constant that is off by one part in
a million exceeds it a million times.

Parameters after a chain of steps have a larger tolerance, because Adam divides by the size of a gradient that may be
nearly zero. A step moves a parameter by r = m / (sqrt(v) + eps) learning rates, m and v corrected. If no gradient up to
then is off by more than d, then m is off by at most d, and sqrt(v) too: it is a root mean square. So r is off by at
most

    d / (sqrt(v) + eps)  +  |m| d / (sqrt(v) + eps)^2   =   d (1 + |r|) / (sqrt(v) + eps)

and parameters by the sum over the steps. The tolerance of gradients is d = GATE times the largest of the tensor. What
that is multiplied with is made of the float64 reference alone, see `amplification`, and stored beside it.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from llorch.families.config import ModelConfig
from llorch.judging.expectations.training_places import CHAINED, ISOLATED
from llorch.judging.goldens.training_recipe import OptimizerRecipe
from llorch.ops.numerics import DtypeName
from llorch.stages.comparison import FACTOR, FLOAT32_ULP, FLOOR, FLOORS, Tolerance
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import keys

FLOAT64_TOLERANCE = 1e-12
CEILINGS = {"isolated": 1e-5, "chained": 1e-3}  # fixed ceilings of float32, of a whole tensor
OF_PARAMETERS = {"isolated": 1e-4, "chained": 0.02}  # fixed likewise, in learning rates: a wrong sign is 2 of them
WORST = 10  # times the ceiling of a whole tensor: the largest tolerance of its worst element; fixed
OWN_FLOORS = {  # of float32
    "parameters": FLOOR / 1e-2,  # in learning rates of 1e-2: 4 ulp of a parameter of size 1
    "learning_rate": 1e-15,  # made in float64: some 4 ulp of that
}
IN_ONE_OP = 4  # roundings: of the weights, of the result, and of two things in between

FROM_FILES = ("exported_logits",)  # groups that are made from files, which hold float32
NUMPY_ALONE = ("learning_rate", "merged_weight", *FROM_FILES)  # groups that no path on torch has
MOVED = ("parameters", "norm_curve")  # chained: of parameters that went one way or the other
FROM_FLOAT32 = ("grad_norm", "first_moment", "second_moment", "parameters")  # alone they are float32 on any base
GOES_BACK = ("gradient", "grad_norm", "first_moment", "second_moment")  # a backward pass is in these

Parts = Mapping[str, np.ndarray]


def shows(stage_ref: StageRef, mode: str, dtype: DtypeName) -> bool:
    """Check if a run in a dtype can show a mistake at a place.

    Adam's first step is nearly the sign of the gradient. If the gradient is smaller than its rounding in half
    precision, a correct run moves the parameter the other way, two learning rates off. Four times such distances are
    more than the step itself, so parameters after a chain of steps tell nothing. Arrays made with these parameters tell
    little.
    """
    if dtype == "float32":
        return True
    if dtype == "float64":
        return stage_ref.stage not in FROM_FILES
    if stage_ref.stage in NUMPY_ALONE:
        return False
    return mode == ISOLATED or not (
        stage_ref.stage in MOVED or (stage_ref.checkpoint == "18" and stage_ref.case != "step 1")
    )


def held_to(stage_ref: StageRef, mode: str, dtype: DtypeName) -> DtypeName:
    """Return the dtype whose tolerances apply: an isolated optimizer step is float32 on any base."""
    return "float32" if mode == ISOLATED and stage_ref.stage in FROM_FLOAT32 and dtype != "float64" else dtype


def floor(stage: str, dtype: DtypeName) -> float:
    """Return the smallest tolerance of a group of stages."""
    return OWN_FLOORS.get(stage, FLOOR) if dtype == "float32" else FLOORS[dtype]


def ceiling(config: ModelConfig, stage: str, mode: str, dtype: DtypeName) -> Tolerance:
    """Return the largest tolerance of a group of stages, however far apart the reference engines are.

    float64 has no such ceiling.
    """
    if dtype == "float32":
        error = (OF_PARAMETERS if stage == "parameters" else CEILINGS)[mode]
        return Tolerance(error, WORST * error)
    n_stages = _stage_counts(config)[mode]
    in_one_op = mode == ISOLATED and stage not in GOES_BACK
    roundings = IN_ONE_OP if in_one_op else math.sqrt((2 if stage in GOES_BACK else 1) * n_stages)
    error = FLOORS[dtype] * roundings * (2 if stage == "second_moment" else 1)
    return Tolerance(error, WORST * error)


@lru_cache
def _stage_counts(config: ModelConfig) -> Mapping[str, int]:
    """Count the stages of the first block and of a whole model; every expectation needs them."""
    matrix_layers = [layer for _, _, layer in keys(config)]
    return {ISOLATED: matrix_layers.count(0), CHAINED: len(matrix_layers)}


def wide_limit(amplified: np.ndarray | None) -> Tolerance:
    """Return the tolerance of a stage in float64, given its `amplification` where it has one."""
    error, worst = (1.0, 1.0) if amplified is None else np.maximum(amplified, 1.0)
    return Tolerance(FLOAT64_TOLERANCE * float(error), FLOAT64_TOLERANCE * float(worst))


def amplification(
    steps: Sequence[tuple[Parts, ...]], norms: Sequence[float], recipe: OptimizerRecipe
) -> list[dict[str, np.ndarray]]:
    """Derive how far errors of gradients may move parameters, in learning rates.

    The result has the root mean square and the largest value of each tensor. Each step, from the first, is its
    gradients before clipping, and m and v after it, by name; `norms` are the norms of the gradients.
    """
    sums, largest, made = dict[str, np.ndarray](), dict[str, float](), []
    for step, ((grads, m, v), norm) in enumerate(zip(steps, norms, strict=True), start=1):
        for name, grad in grads.items():
            size = min(1.0, recipe.max_norm / norm) * float(np.abs(grad).max())
            largest[name] = max(size, largest.get(name, 0.0))
            root = np.sqrt(v[name] / (1 - recipe.betas[1] ** step)) + recipe.eps
            moved = np.abs(m[name]) / (1 - recipe.betas[0] ** step) / root
            sums[name] = sums.get(name, 0.0) + largest[name] * (1 + moved) / root
        made.append({name: np.array([np.sqrt(np.square(each).mean()), each.max()]) for name, each in sums.items()})
    return made


def of_dump(config: ModelConfig, stage: str, mode: str, dtype: DtypeName, last_position: int) -> Tolerance:
    """Derive the tolerance for a run of another trainer, where no golden says how far engines are apart.

    An isolated quantity is float32 on any base, and has the fixed float32 tolerance. A float32 chain is allowed the
    errors of half precision: roundings at every stage, forward and backward. It is also allowed the errors of angles at
    far positions. Engines compute these angles in float32, with an error of half an ulp of the position. The sum counts
    4 times, as where engines are measured.
    """
    if mode == ISOLATED:
        return ceiling(config, stage, mode, "float32")
    if dtype != "float32":
        return ceiling(config, stage, mode, dtype)
    n_stages = sum(1 for _ in keys(config))
    roundings = math.sqrt((2 if stage in GOES_BACK else 1) * n_stages)
    error = FACTOR * (FLOOR * roundings + last_position * 2.0**-24) * (2 if stage == "second_moment" else 1)
    return Tolerance(error, WORST * error).at_most(ceiling(config, stage, mode, dtype))


def of_parameters(start: np.ndarray, rate: float, step: Tolerance) -> Tolerance:
    """Derive the tolerance of parameters, in learning rates.

    It is the tolerance of a step, plus the rounding of the sum to float32. That rounding is half an ulp of the sum, and
    as much again for the decay before, which is rounded to float32 too.
    """
    ulps = FLOAT32_ULP * np.array([math.sqrt(np.square(start).mean()), np.abs(start).max()]) / rate
    return Tolerance(step.error + float(ulps[0]), step.worst + float(ulps[1]))
