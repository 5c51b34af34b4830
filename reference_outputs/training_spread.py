"""How far the goldens of training may be from those of another processor, where Adam makes much of little.

An element moves by lr * m / (sqrt(v) + eps). Where its gradient is no larger than its own rounding error, a correct run
moves it anywhere between one learning rate up and one down, and every gradient after that is of another adapter. So
PEFT's run in float64 is repeated with gradients that are off by as much as PEFT's are in float32, and what it is off by
then is what another order of sums can do. Nothing of ours computes.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from make_training import stage_of

from llorch.train.batch import Batch
from llorch.verify.compare import FACTOR, Difference, Tolerance, tolerance_from
from llorch.verify.training.judge import TrainingJudge, difference
from llorch.verify.training.recipe import OPTIMIZER, STEPS_SHOWN, step_batches
from llorch.verify.witnesses.float64_everywhere import float64_everywhere
from llorch.verify.witnesses.peft import Arrays, Peft, gradients_of

N_RUNS = 4


class DisturbedPeft(Peft):
    """Optimizer steps whose gradients are off by random shares of each tensor's size."""

    def run(self, judge: TrainingJudge, *, size: float, seed: int) -> Arrays:
        """The arrays of the steps that are stored, and the gradients that these were given.

        Args:
            judge: Of the stored goldens.
            size: Root mean square of what a gradient is off by, as a share of its own.
            seed: Of the shares.

        Returns:
            By the keys of the golden.
        """
        self._size, self._rng = size, torch.Generator().manual_seed(seed)
        steps = [step_batches(judge.golden.batches, step, 1) for step in range(1, max(STEPS_SHOWN) + 1)]
        made = self.steps(judge.golden.adapter_for(self.config), steps, OPTIMIZER, shown=STEPS_SHOWN)
        return {f"step {step}/{key}": array for step, arrays in made.items() for key, array in arrays.items()}

    def _backward(self, model: Any, batches: Sequence[Batch]) -> None:
        super()._backward(model, batches)
        for grad in gradients_of(model).values():
            grad += self._size * grad.square().mean().sqrt() * torch.randn(grad.shape, generator=self._rng)


def training_spread(judge: TrainingJudge) -> dict[str, Tolerance]:
    """What rounding can do to the arrays of optimizer steps.

    Args:
        judge: Of the stored goldens.

    Returns:
        Key to how far a golden that is made again may be from the stored one.
    """
    size = judge.tolerances()["chained"]["gradient"].error / FACTOR  # the engine's largest distance at step 1
    found: dict[str, list[Difference]] = defaultdict(list)
    with float64_everywhere():
        producer = DisturbedPeft(judge.weights.path, dtype="float64")
        truth = producer.run(judge, size=0.0, seed=0)
        for seed in range(N_RUNS):
            for text, array in producer.run(judge, size=size, seed=seed).items():
                found[text].append(difference(array, truth[text], stage_of(text)))
    return {text: tolerance_from(each, floor=stage_of(text).floor) for text, each in found.items()}
