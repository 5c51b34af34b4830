"""Training on a base in bfloat16: its tolerances, made from PEFT in that dtype, and what it can show at all.

The truth is the float64 run with the weights as they are stored, as in `verify.half`: rounding the base is part of what
a run in half precision does. The adapter, its gradients and the optimizer are float32 on any base, in PEFT and here, so
an optimizer step alone keeps its tolerance of float32.
"""

import math

from llorch.config import ModelConfig
from llorch.files import Weights
from llorch.numerics import DtypeName
from llorch.stages import keys
from llorch.verify.compare import FLOORS, Tolerance
from llorch.verify.half import IN_ONE_OP
from llorch.verify.training.goldens import Errors, Tolerances, TrainingGolden
from llorch.verify.training.judge import TrainingJudge
from llorch.verify.training.limits import WORST
from llorch.verify.training.stages import Key, TrainingStage

NUMPY_ALONE = ("learning_rate", "merged_weight", "exported_logits")  # groups that no path in half precision has
MOVED = ("parameters", "norm_curve")  # chained: of parameters that went one way or the other
FROM_FLOAT32 = ("grad_norm", "first_moment", "second_moment", "parameters")  # isolated
GOES_BACK = ("gradient", "grad_norm", "first_moment", "second_moment")  # a backward pass is in these


def shows(mode: str, key: Key) -> bool:
    """Whether half precision can show a mistake at a stage.

    Adam's first step is nearly the sign of the gradient: where that is smaller than its rounding, a correct run moves
    the parameter the other way, two learning rates off. Four times such distances are more than the step itself, so
    parameters after a chain of steps tell nothing, and gradients and moments that were made with them tell little.

    Args:
        mode: `isolated` or `chained`.
        key: Of the stage.

    Returns:
        Whether it is judged.
    """
    group = key.group
    if group.name in NUMPY_ALONE or (mode == "chained" and group.name in MOVED):
        return False
    return mode == "isolated" or group.checkpoint != "18" or key.case == "step 1"


def half_ceiling(config: ModelConfig, mode: str, stage: TrainingStage, dtype: DtypeName) -> Tolerance:
    """The largest tolerance of a group of stages, whatever PEFT shows.

    Errors of independent roundings add up as the root of their number. There is one at each stage of the forward pass
    and another on the way back; alone, a gradient is that of one block. A square is twice as far off as its root.

    Args:
        config: The model.
        mode: `isolated` or `chained`.
        stage: The group.
        dtype: Of the run.

    Returns:
        The ceiling.
    """
    judged = [layer for _, _, layer in keys(config)]
    n_stages = len(judged) if mode == "chained" else judged.count(0)
    passes = 2 if stage.name in GOES_BACK else 1
    in_one_op = mode == "isolated" and stage.name not in GOES_BACK
    roundings = IN_ONE_OP if in_one_op else math.sqrt(passes * n_stages)
    error = FLOORS[dtype] * roundings * (2 if stage.name == "second_moment" else 1)
    return Tolerance(error, WORST * error)


class HalfTrainingJudge(TrainingJudge):
    """Judges training paths on a base in half precision; with PEFT's arrays of such a run it makes the tolerances."""

    def __init__(self, name: str, weights: Weights, golden: TrainingGolden, dtype: DtypeName) -> None:
        """Prepare; nothing is computed yet.

        Args:
            name: Name of the model in the rows.
            weights: The base in float32, as it is stored.
            golden: Its training goldens; of float32 to judge, of a run in the dtype to make tolerances.
            dtype: In `training_goldens.HALF_DTYPES`.
        """
        super().__init__(name, weights, golden)
        self.dtype: DtypeName = dtype

    def shows(self, mode: str, key: Key) -> bool:
        """See `shows` of this module."""
        return shows(mode, key)

    def floor_of(self, stage: TrainingStage) -> float:
        """Of the dtype."""
        return FLOORS[self.dtype]

    def ceiling_of(self, mode: str, stage: TrainingStage) -> Tolerance:
        """Of the dtype, or of float32 where all is float32."""
        if _from_float32(mode, stage.name):
            return super().ceiling_of(mode, stage)
        return half_ceiling(self.weights.config, mode, stage, self.dtype)

    def stored_tolerance(self, mode: str, stage: TrainingStage) -> Tolerance:
        """Likewise."""
        if _from_float32(mode, stage.name):
            return super().stored_tolerance(mode, stage)
        return self.golden.half_tolerances[self.dtype][mode][stage.name]

    def tolerances(self) -> Tolerances:
        """Those that are of the dtype."""
        made = super().tolerances()
        return {
            mode: {name: tolerance for name, tolerance in groups.items() if not _from_float32(mode, name)}
            for mode, groups in made.items()
        }

    def errors(self) -> Errors:
        """How far the producer is from the truth, with three digits; more would be noise."""
        out: dict[str, dict[str, dict[str, float]]] = {}
        for mode, text, _, golden in self._comparisons():
            key = Key.of(text)
            cases = out.setdefault(mode, {}).setdefault(key.group.name, {})
            error = float(f"{self._distance(mode, text, golden).error:.2e}")
            cases[key.case] = max(error, cases.get(key.case, 0.0))
        return out


def _from_float32(mode: str, group: str) -> bool:
    return mode == "isolated" and group in FROM_FLOAT32
