"""Distance that training goldens of another processor may have, because Adam amplifies small errors.

An element moves by lr * m / (sqrt(v) + eps). Where its gradient is no larger than its own rounding error, a correct run
moves it anywhere between one learning rate up and one down, and every later gradient belongs to another adapter. So
PEFT's float64 run is repeated with gradients disturbed by PEFT's own float32 error. The distance of these runs is the
effect that another order of sums can have. llorch computes nothing here.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from make_training import compare
from training_tolerances import tolerances

from llorch.engines.transformers_capture import float64_everywhere
from llorch.families.config import ModelConfig
from llorch.judging.expectations.training_refs import CHAINED, Arrays
from llorch.judging.goldens.training import TrainingGolden
from llorch.judging.goldens.training_recipe import OPTIMIZER, STEPS_SHOWN, step_batches
from llorch.judging.tolerances import training as limits
from llorch.stages.comparison import FACTOR, Difference, Tolerance, tolerance_from
from llorch.stages.stage_ref import StageRef
from llorch.training.batch import Batch
from reference_outputs.peft_reference import Peft, gradient_of, trained

N_RUNS = 4


class DisturbedPeft(Peft):
    """PEFT whose optimizer steps get gradients with a random relative error."""

    def run(self, golden: TrainingGolden, *, size: float, seed: int) -> Arrays:
        """Run the stored steps; return their arrays and the gradients that the optimizer got.

        `size` is the root mean square error of a gradient, relative to its own; `seed` is that of the random errors.
        """
        self._size, self._rng = size, torch.Generator().manual_seed(seed)
        steps = [step_batches(golden.batches, step, 1) for step in range(1, max(STEPS_SHOWN) + 1)]
        return self.steps(golden.adapter_for(self.config), steps, OPTIMIZER, recorded_steps=STEPS_SHOWN)

    def _backward(self, model: Any, batches: Sequence[Batch]) -> None:
        super()._backward(model, batches)
        for grad in map(gradient_of, trained(model).values()):
            grad += self._size * grad.square().mean().sqrt() * torch.randn(grad.shape, generator=self._rng)


def training_spread(path: str | Path, config: ModelConfig, golden: TrainingGolden) -> dict[StageRef, Tolerance]:
    """Measure how far rounding alone can move the arrays of optimizer steps, as tolerances for goldens made again."""
    gradient_tolerance = tolerances(golden, config, "float32")[CHAINED]["gradient"]
    size = gradient_tolerance.error / FACTOR  # the engine's largest distance at step 1
    differences: dict[StageRef, list[Difference]] = defaultdict(list)
    with float64_everywhere():
        engine = DisturbedPeft(path, dtype="float64")
        reference = engine.run(golden, size=0.0, seed=0)
        for seed in range(N_RUNS):
            for stage_ref, array in engine.run(golden, size=size, seed=seed).items():
                differences[stage_ref].append(compare(stage_ref, array, reference[stage_ref]))
    return {
        stage_ref: tolerance_from(stage_differences, floor=limits.floor(stage_ref.stage, "float32"))
        for stage_ref, stage_differences in differences.items()
    }
