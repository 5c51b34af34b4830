"""Variance of one rounding, and `RuleInput`, the input of the rules that `tolerances.forward` explains."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llorch.families.config import ModelConfig
from llorch.files import LayerWeights, Weights
from llorch.ops.rounding import ActivationKind
from llorch.stages.table import Stage

ISOLATED, CHAINED, FREE = range(3)  # indices of the runs whose errors are propagated, see `tolerances.forward`
UNIT = 2.0**-24  # half a step of float32, relative
SUM = 2 * UNIT**2 / 48  # variance between two orders of a sum, per term and per squared term
DRIFT = 2 * UNIT**2 / 72  # variance between two orders of a sum of terms of one sign, per term and per squared sum
SQUARES = DRIFT / 4  # relative variance of the root of a sum of squares, per term


@dataclass(frozen=True)
class Arithmetic:
    """The dtype that stages are rounded to.

    Attributes:
        unit: Half a step, relative: the largest relative error of a rounded stage or weight.
        smallest: Half the step of subnormal numbers, absolute.
        activations: Type to which another engine rounds the inputs of its products, if llorch does not round them.
    """

    unit: float
    smallest: float = 0.0
    activations: ActivationKind = "F32"

    @property
    def is_half(self) -> bool:
        """True for a half precision, in which inputs and weights are rounded, too."""
        return self.unit > UNIT

    def rounding(self, y: np.ndarray) -> np.ndarray:
        """Compute the variance of one rounding of each element."""
        return np.square(self.unit * y) + self.smallest**2


ARITHMETICS: Mapping[str, Arithmetic] = {  # float64 is absent: its tolerance is `MATHEMATICS`
    "float32": Arithmetic(UNIT),
    "bfloat16": Arithmetic(2.0**-9),
    "float16": Arithmetic(2.0**-12, 2.0**-25),
}
_LARGEST_CODE = 127
_CACHE_BLOCK = 32  # values
FLOAT32 = ARITHMETICS["float32"]


@dataclass(frozen=True)
class Int8Cache(Arithmetic):
    """Arithmetic of a KV cache of 8-bit integers, (kv_heads, ctx, head_dim), times a scale for each group of values.

    Attributes:
        group: Values that share a scale, see `INT8_CACHES`: token, row, head or block.
    """

    group: str = "row"

    def half_steps(self, y: np.ndarray) -> np.ndarray:
        """Compute the largest error of each value: half of its group's largest absolute value / 127."""
        size = y.shape[-1]
        width = _CACHE_BLOCK if self.group == "block" and size % _CACHE_BLOCK == 0 else size
        blocks = np.abs(y).reshape(*y.shape[:-1], -1, width)
        axes = {"token": (0, 2, 3), "head": (1, 2, 3)}.get(self.group, (3,))
        return np.broadcast_to(blocks.max(axis=axes, keepdims=True) / (2 * _LARGEST_CODE), blocks.shape).reshape(
            y.shape
        )

    def rounding(self, y: np.ndarray) -> np.ndarray:
        """Compute the variance of an error that is uniform within half a step, and of the dtype of the values."""
        return super().rounding(y) + np.square(self.half_steps(y)) / 3

    def largest_factor(self, half_steps: np.ndarray, y: np.ndarray) -> float:
        """Return the largest distance from 1 of the common factor of y that roundings by half a step may cause."""
        y = np.where(np.isfinite(y), y, 0).astype(np.float64)
        return float((half_steps * np.abs(y)).sum() / (np.square(y).sum() or 1.0)) + self.unit


@dataclass(frozen=True)
class RuleInput:
    """One stage of the golden with the variances of its inputs in the runs ISOLATED, CHAINED and perhaps FREE."""

    stage: Stage
    config: ModelConfig
    weights: Weights | LayerWeights
    positions: np.ndarray
    x: tuple[np.ndarray, ...]  # inputs
    y: np.ndarray  # output
    variances: tuple[np.ndarray, ...]  # variances of x, the runs first
    arithmetic: Arithmetic
    f16_cache: bool  # True if ggml stores keys and values as float16
    divisor: np.ndarray  # relative variance of the last norm's divisor from the errors of its inputs: (runs, tokens, 1)
    past: np.ndarray | None = None  # variances of the earlier contents of the cache or state
    state: np.ndarray | None = None  # earlier contents of the state of a delta net; None: zeros
    denominators: np.ndarray | None = None  # relative variance of the last softmax's denominators, see `one_lane`

    @property
    def one_lane(self) -> bool:
        """True if the engine may add all keys one by one."""
        return self.denominators is not None

    @property
    def rounding(self) -> np.ndarray:
        """Variance of one rounding of the stage's output."""
        return self.arithmetic.rounding(self.y)
