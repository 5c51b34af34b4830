"""Tolerances of LoRA training, by dtype: floors and ceilings of float32 and bfloat16, and the tolerances of float64.

An array of a group of stages (such as all gradients) is compared `isolated`, computed from the golden's inputs, or
`chained`, in a complete run. The golden is PEFT's array, the float64 reference is PEFT in float64.

**float32**: 4 times the engine's largest distance from the float64 reference in a group of stages, at least a floor and
at most a ceiling. The floor is 4 ulp except for `GROUP_FLOORS`. The ceilings of float32 are fixed: orders of magnitude
above the engines' errors, and orders of magnitude below the errors of mistakes.

**bfloat16**: 4 times the distance of PEFT's bfloat16 run, with the floor of the dtype. The float64 reference uses the
stored weights, because rounding the base is part of a bfloat16 run. Errors of independent roundings add up as the root
of their number, so the ceiling is derived: one rounding at each stage of the forward pass and one at each stage of the
backward pass. An isolated gradient counts one block. A square has twice the relative error of its root. The adapter,
its gradients and the optimizer are float32 on any base, in PEFT and in llorch, so an isolated optimizer step keeps its
float32 tolerance.

**float64**: the tolerance is `FLOAT64_TOLERANCE`, as a share of the tensor and of its largest element. Sums of about a
thousand products round to about 1e-15, and the tolerance is a thousand times that. A constant that is wrong by one part
in a million exceeds it a million times.

Parameters after a chain of steps have a larger tolerance, because Adam divides by the size of a gradient that may be
nearly zero. A step moves a parameter by r = m / (sqrt(v) + eps) learning rates, with m and v bias-corrected. If no
gradient so far has an error above d, then the errors of m and of sqrt(v), a root mean square, are at most d. The error
of r is then at most

    d / (sqrt(v) + eps)  +  |m| d / (sqrt(v) + eps)^2   =   d (1 + |r|) / (sqrt(v) + eps)

and the error of the parameters is the sum over the steps. Gradients have d = FLOAT64_TOLERANCE times the largest
element. `amplification` derives the factor of d from the float64 reference only; it is stored in the golden.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from llorch.families.config import ModelConfig
from llorch.judging.expectations.training_refs import CHAINED, ISOLATED
from llorch.judging.goldens.training_recipe import OptimizerRecipe
from llorch.ops.numerics import DtypeName
from llorch.stages.comparison import FACTOR, FLOAT32_ULP, FLOOR, FLOORS, Tolerance
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import keys

FLOAT64_TOLERANCE = 1e-12
CEILINGS = {"isolated": 1e-5, "chained": 1e-3}  # fixed ceilings of float32, of a whole tensor
OF_PARAMETERS = {
    "isolated": 1e-4,
    "chained": 0.02,
}  # fixed ceilings, in learning rates: a step with a wrong sign errs by 2
WORST = 10  # ceiling of the worst element over the ceiling of the whole tensor; fixed
GROUP_FLOORS = {  # of float32
    "parameters": FLOOR / 1e-2,  # in learning rates of 1e-2: 4 ulp of a parameter of size 1
    "learning_rate": 1e-15,  # computed in float64: about 4 ulp of float64
}
IN_ONE_OP = 4  # roundings: of the weights, of the result, and of two intermediate values

FROM_FILES = ("exported_logits",)  # groups that are computed from files, which hold float32
NUMPY_ONLY = ("learning_rate", "merged_weight", *FROM_FILES)  # groups that no torch runner computes
MOVED = ("parameters", "norm_curve")  # chained, they depend on the sign of tiny gradients, see `can_show_mistakes`
FROM_FLOAT32 = ("grad_norm", "first_moment", "second_moment", "parameters")  # isolated, float32 on any base
BACKWARD_GROUPS = ("gradient", "grad_norm", "first_moment", "second_moment")  # groups that include a backward pass

Parts = Mapping[str, np.ndarray]


def can_show_mistakes(stage_ref: StageRef, mode: str, dtype: DtypeName) -> bool:
    """Check if a run in a dtype can show a mistake at a stage, so that the stage is compared at all.

    Adam's first step is nearly the sign of the gradient. If the gradient is smaller than its rounding in half
    precision, a correct run moves the parameter the other way, two learning rates off. Four times such distances are
    more than the step itself, so parameters after a chain of steps show no mistake, and neither do other arrays of
    later optimizer steps, validation point 18.
    """
    if dtype == "float32":
        return True
    if dtype == "float64":
        return stage_ref.stage not in FROM_FILES
    if stage_ref.stage in NUMPY_ONLY:
        return False
    return mode == ISOLATED or not (
        stage_ref.stage in MOVED or (stage_ref.checkpoint == "18" and stage_ref.case != "step 1")
    )


def tolerance_dtype(stage_ref: StageRef, mode: str, dtype: DtypeName) -> DtypeName:
    """Return the dtype whose tolerances apply: an isolated optimizer step is float32 on any base."""
    return "float32" if mode == ISOLATED and stage_ref.stage in FROM_FLOAT32 and dtype != "float64" else dtype


def floor(stage: str, dtype: DtypeName) -> float:
    """Return the lower bound of the tolerance of a group of stages."""
    return GROUP_FLOORS.get(stage, FLOOR) if dtype == "float32" else FLOORS[dtype]


def ceiling(config: ModelConfig, stage: str, mode: str, dtype: DtypeName) -> Tolerance:
    """Return the upper bound of the tolerance of a group of stages in float32 or half precision."""
    if dtype == "float32":
        error = (OF_PARAMETERS if stage == "parameters" else CEILINGS)[mode]
        return Tolerance(error, WORST * error)
    n_stages = _stage_counts(config)[mode]
    in_one_op = mode == ISOLATED and stage not in BACKWARD_GROUPS
    roundings = IN_ONE_OP if in_one_op else math.sqrt((2 if stage in BACKWARD_GROUPS else 1) * n_stages)
    error = FLOORS[dtype] * roundings * (2 if stage == "second_moment" else 1)
    return Tolerance(error, WORST * error)


@lru_cache
def _stage_counts(config: ModelConfig) -> Mapping[str, int]:
    """Count the stages of the first block and of a whole model; cached, because every expectation needs them."""
    stage_layers = [layer for _, _, layer in keys(config)]
    return {ISOLATED: stage_layers.count(0), CHAINED: len(stage_layers)}


def tolerance_in_float64(factors: np.ndarray | None) -> Tolerance:
    """Return the tolerance of a stage in float64; `factors` are its two of `amplification`, None if it has none."""
    error, worst = (1.0, 1.0) if factors is None else np.maximum(factors, 1.0)
    return Tolerance(FLOAT64_TOLERANCE * float(error), FLOAT64_TOLERANCE * float(worst))


def amplification(
    steps: Sequence[tuple[Parts, ...]], norms: Sequence[float], recipe: OptimizerRecipe
) -> list[dict[str, np.ndarray]]:
    """Derive the factor by which errors of gradients may move parameters, in learning rates; see the module docstring.

    Return the root mean square and the largest factor of each tensor, for each step. `steps` has for each step its
    gradients before clipping, and m and v after the step, by tensor; `norms` are the norms of all gradients of a step.
    """
    sums, largest, factors = dict[str, np.ndarray](), dict[str, float](), []
    for step, ((grads, m, v), norm) in enumerate(zip(steps, norms, strict=True), start=1):
        for name, grad in grads.items():
            size = min(1.0, recipe.max_norm / norm) * float(np.abs(grad).max())
            largest[name] = max(size, largest.get(name, 0.0))
            root = np.sqrt(v[name] / (1 - recipe.betas[1] ** step)) + recipe.eps
            update = np.abs(m[name]) / (1 - recipe.betas[0] ** step) / root
            sums[name] = sums.get(name, 0.0) + largest[name] * (1 + update) / root
        factors.append({name: np.array([np.sqrt(np.square(x).mean()), x.max()]) for name, x in sums.items()})
    return factors


def of_dump(config: ModelConfig, stage: str, mode: str, dtype: DtypeName, last_position: int) -> Tolerance:
    """Derive the tolerance for a dump of another trainer's run, for which no golden has the engines' errors.

    An isolated quantity is float32 on any base, and has the fixed float32 tolerance. A float32 chain is allowed the
    errors of half precision: roundings at every stage, forward and backward. It is also allowed the errors of angles at
    far positions. Engines compute these angles in float32, with an error of half an ulp of the position. The sum of
    both errors counts 4 times, like the measured errors of engines.
    """
    if mode == ISOLATED:
        return ceiling(config, stage, mode, "float32")
    if dtype != "float32":
        return ceiling(config, stage, mode, dtype)
    n_stages = sum(1 for _ in keys(config))
    roundings = math.sqrt((2 if stage in BACKWARD_GROUPS else 1) * n_stages)
    error = FACTOR * (FLOOR * roundings + last_position * 2.0**-24) * (2 if stage == "second_moment" else 1)
    return Tolerance(error, WORST * error).at_most(ceiling(config, stage, mode, dtype))


def of_parameters(start: np.ndarray, rate: float, step: Tolerance) -> Tolerance:
    """Derive the tolerance of parameters after a step from `start`, in learning rates.

    It is the tolerance of the step plus float32 roundings: half an ulp of the sum and of the decayed parameter.
    """
    ulps = FLOAT32_ULP * np.array([math.sqrt(np.square(start).mean()), np.abs(start).max()]) / rate
    return Tolerance(step.error + float(ulps[0]), step.worst + float(ulps[1]))
