"""What training is granted: ceilings of float32, and the limits of float64 against the foreign truth.

In float64 everything is granted `GATE`, as a share of the tensor and of its largest element. Sums of some thousand
products round to some 1e-15, and the gate is a thousand times that; a constant that is off by one part in a million is
a million gates off.

Parameters after a chain of steps are granted more, because Adam divides by the size of a gradient that may be nearly
zero. A step moves a parameter by r = m / (sqrt(v) + eps) learning rates, m and v corrected. If no gradient up to then
is off by more than d, then m is off by at most d, and sqrt(v) too: it is a root mean square. So r is off by at most

    d / (sqrt(v) + eps)  +  |m| d / (sqrt(v) + eps)^2   =   d (1 + |r|) / (sqrt(v) + eps)

and parameters by the sum over the steps. Gradients are granted d = GATE times the largest of the tensor. What that is
multiplied with is made of the truth alone, see `amplification`, and stored beside it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from llorch.verify.compare import Tolerance
from llorch.verify.training.recipe import OptimizerRecipe
from llorch.verify.training.stages import TrainingStage

GATE = 1e-12
WORST = 10  # times the ceiling of a whole tensor: what its worst element is granted at most
Parts = Mapping[str, np.ndarray]


def ceiling(mode: str, stage: TrainingStage) -> Tolerance:
    """The largest tolerance that is ever granted to a stage in float32."""
    error = stage.isolated_ceiling if mode == "isolated" else stage.chained_ceiling
    worst = stage.worst_ceiling if mode == "chained" else 0.0
    return Tolerance(error, worst or WORST * error)


def wide_limit(amplified: np.ndarray | None) -> Tolerance:
    """What a stage is granted in float64.

    Args:
        amplified: Of `amplification`, where the stage has one.

    Returns:
        The limit.
    """
    error, worst = (1.0, 1.0) if amplified is None else np.maximum(amplified, 1.0)
    return Tolerance(GATE * float(error), GATE * float(worst))


def amplification(
    steps: Sequence[tuple[Parts, ...]], norms: Sequence[float], recipe: OptimizerRecipe
) -> list[dict[str, np.ndarray]]:
    """By how much errors of gradients may move parameters, in learning rates.

    Args:
        steps: Of every step from the first the gradients before clipping, and m and v after it, by name.
        norms: Of these gradients.
        recipe: Settings of the optimizer.

    Returns:
        Of every step, by name: the root mean square and the largest of all elements.
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
