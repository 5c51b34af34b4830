"""Distance that training goldens of another processor may have, where Adam amplifies small errors.

An element moves by lr * m / (sqrt(v) + eps). Where its gradient is no larger than its own rounding error, a correct run
moves it anywhere between one learning rate up and one down, and every gradient after that is of another adapter. So
PEFT's run in float64 is repeated with gradients that are off by as much as PEFT's are in float32, and what it is off by
then is what another order of sums can do. llorch computes nothing here.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from make_training import apart
from training_tolerances import tolerances

from llorch.engines.transformers_capture import float64_everywhere
from llorch.families.config import ModelConfig
from llorch.judging.expectations.training_places import CHAINED, Arrays
from llorch.judging.goldens.training import TrainingGolden
from llorch.judging.goldens.training_recipe import OPTIMIZER, STEPS_SHOWN, step_batches
from llorch.judging.tolerances import training as limits
from llorch.stages.comparison import FACTOR, Difference, Tolerance, tolerance_from
from llorch.stages.stage_ref import StageRef
from llorch.training.batch import Batch
from reference_outputs.peft_reference import Peft, gradient_of, trained

N_RUNS = 4


class DisturbedPeft(Peft):
    """Optimizer steps whose gradients are off by random shares of each tensor's size."""

    def run(self, golden: TrainingGolden, *, size: float, seed: int) -> Arrays:
        """Run the stored steps; return their arrays and the gradients that the optimizer got.

        `size` is the root mean square of what a gradient is off by, as a share of its own; `seed` that of the shares.
        """
        self._size, self._rng = size, torch.Generator().manual_seed(seed)
        steps = [step_batches(golden.batches, step, 1) for step in range(1, max(STEPS_SHOWN) + 1)]
        return self.steps(golden.adapter_for(self.config), steps, OPTIMIZER, shown=STEPS_SHOWN)

    def _backward(self, model: Any, batches: Sequence[Batch]) -> None:
        super()._backward(model, batches)
        for grad in map(gradient_of, trained(model).values()):
            grad += self._size * grad.square().mean().sqrt() * torch.randn(grad.shape, generator=self._rng)


def training_spread(path: str | Path, config: ModelConfig, golden: TrainingGolden) -> dict[StageRef, Tolerance]:
    """Measure how far rounding alone can move the arrays of optimizer steps, as tolerances for goldens made again."""
    made = tolerances(golden, config, "float32")[CHAINED]["gradient"]
    size = made.error / FACTOR  # the engine's largest distance at step 1
    found: dict[StageRef, list[Difference]] = defaultdict(list)
    with float64_everywhere():
        engine = DisturbedPeft(path, dtype="float64")
        reference = engine.run(golden, size=0.0, seed=0)
        for seed in range(N_RUNS):
            for stage_ref, array in engine.run(golden, size=size, seed=seed).items():
                found[stage_ref].append(apart(stage_ref, array, reference[stage_ref]))
    return {
        stage_ref: tolerance_from(each, floor=limits.floor(stage_ref.stage, "float32"))
        for stage_ref, each in found.items()
    }
