"""How far the goldens of training may be from those of another processor, where Adam makes much of little.

An element moves by lr * m / (sqrt(v) + eps). Where its gradient is no larger than its own rounding error, a correct run
moves it anywhere between one learning rate up and one down, and every gradient after that is of another adapter. So the
float64 run is repeated with gradients that are off by as much as the engine's are, and what it is off by then is what
another order of sums can do. Only the stored goldens and the truth go into it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from llorch.compare import FACTOR, Difference, Tolerance, tolerance_from
from llorch.train.batch import Batch
from llorch.training_goldens import TrainingGolden
from llorch.training_path import NumpyPath, OptimizerState
from llorch.training_recipe import with_stage
from llorch.training_stages import BY_GROUP, Key, TrainingStage
from llorch.verify_training import TrainingJudge, difference
from llorch.weights import Weights

N_RUNS = 4
GIVEN_AT = 2  # the step whose gradients are stored, too


class DisturbedPath(NumpyPath):
    """A run whose gradients are off by random shares of each tensor's size."""

    def __init__(self, weights: Weights, golden: TrainingGolden, *, size: float, seed: int) -> None:
        """Prepare; `size` is the root mean square of what a gradient is off by, as a share of its own."""
        super().__init__(weights, golden)
        self._size, self._rng = size, np.random.default_rng(seed)
        self._seen: list[Mapping[str, np.ndarray]] = []

    def run(self) -> dict[str, np.ndarray]:
        """The arrays of the optimizer steps, and the gradients that one of them was given."""
        found = dict(self._steps())
        given = {f"step {GIVEN_AT}/{with_stage(n, 'given')}": g for n, g in self._seen[GIVEN_AT - 1].items()}
        return found | given

    def _step_gradients(
        self, batches: Sequence[Batch], state: OptimizerState, smoothing: float
    ) -> tuple[float, dict[str, np.ndarray]]:
        loss, grads = super()._step_gradients(batches, state, smoothing)
        off = {name: self._size * np.sqrt(np.square(grad).mean()) for name, grad in grads.items()}
        self._seen.append({n: grad + off[n] * self._rng.standard_normal(grad.shape) for n, grad in grads.items()})
        return loss, dict(self._seen[-1])


def training_spread(judge: TrainingJudge) -> dict[str, Tolerance]:
    """What rounding can do to the arrays of optimizer steps.

    Args:
        judge: Of the stored goldens.

    Returns:
        Key to how far a golden that is made again may be from the stored one.
    """
    size = judge.tolerances()["chained"]["gradient"].error / FACTOR  # the engine's largest distance at step 1
    wide = judge.weights.astype(np.float64)
    truth = DisturbedPath(wide, judge.golden, size=0.0, seed=0).run()
    found: dict[str, list[Difference]] = defaultdict(list)
    for seed in range(N_RUNS):
        for text, array in DisturbedPath(wide, judge.golden, size=size, seed=seed).run().items():
            found[text].append(difference(array, truth[text], stage_of(text)))
    return {text: tolerance_from(each, floor=stage_of(text).floor) for text, each in found.items()}


def stage_of(text: str) -> TrainingStage:
    """The group that an array is measured like; what goes into a step is a gradient, other inputs go into a delta."""
    key = Key.of(text)
    if key.in_table:
        return key.group
    return BY_GROUP["gradient" if key.stage.startswith(("given.", "gradient.")) else "lora_delta"]
