"""The cost of a rounding, and one stage of a pass as the rules of `llorch.judging.tolerances.forward` read it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llorch.families.config import ModelConfig
from llorch.files import LayerWeights, Weights
from llorch.ops.rounding import ActivationKind
from llorch.stages.table import Stage

ISOLATED, CHAINED, FREE = range(3)
UNIT = 2.0**-24  # half a step of float32, relative
SUM = 2 * UNIT**2 / 48  # times the width and the squared terms: the variance between two orders of a sum
DRIFT = 2 * UNIT**2 / 72  # times the width and the squared sum: the same, as far as it grows like k / n
SQUARES = DRIFT / 4  # times the width: that of the root of a sum of squares, relative


@dataclass(frozen=True)
class Arithmetic:
    """The dtype that stages are rounded to.

    Attributes:
        unit: Half a step, relative; also how far a weight that was rounded to it may be off.
        smallest: Half the step of the smallest numbers, absolute.
        activations: What an engine of others rounds the inputs of its products to, where ours does not.
    """

    unit: float
    smallest: float = 0.0
    activations: ActivationKind = "F32"

    @property
    def is_half(self) -> bool:
        """True if inputs and weights are rounded, too."""
        return self.unit > UNIT

    def rounding(self, y: np.ndarray) -> np.ndarray:
        """Compute the variance of one rounding of each element."""
        return np.square(self.unit * y) + self.smallest**2


ARITHMETICS: Mapping[str, Arithmetic] = {  # float64 is no question of arithmetic
    "float32": Arithmetic(UNIT),
    "bfloat16": Arithmetic(2.0**-9),
    "float16": Arithmetic(2.0**-12, 2.0**-25),
}
FLOAT32 = ARITHMETICS["float32"]


@dataclass(frozen=True)
class Step:
    """One stage of the golden, and how far its inputs are off: variances have the runs as first axis."""

    stage: Stage
    config: ModelConfig
    weights: Weights | LayerWeights
    positions: np.ndarray
    x: tuple[np.ndarray, ...]
    y: np.ndarray
    given: tuple[np.ndarray, ...]  # variances of x
    arithmetic: Arithmetic
    f16_cache: bool
    divisor: np.ndarray  # relative variance of the last norm's divisor from the errors of its inputs: (runs, tokens, 1)
    past: np.ndarray | None = None  # variances of what a cache held before
    state: np.ndarray | None = None  # what a delta net held before, zeros if not told

    @property
    def rounding(self) -> np.ndarray:
        """The variance of one rounding of the result."""
        return self.arithmetic.rounding(self.y)
