"""What the wrong variant of a stage may read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llorch.config import ModelConfig
from llorch.files import Weights
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.rope import rope, rope_tables
from llorch.stages import Stage, input_key, key, keys
from llorch.verify.places import Pass, part_of


@dataclass(frozen=True)
class StageInputs:
    """All that one stage may read."""

    config: ModelConfig
    weights: Mapping[str, Any]  # short name to array or matrix: of the layer, or outside the layers
    arrays: Mapping[str, np.ndarray]  # stages named in `Stage.inputs`; `past_k`, `past_v`: the caches before the pass
    ids: np.ndarray
    positions: np.ndarray
    dtype: type[np.floating]  # of the run

    def __getitem__(self, name: str) -> np.ndarray:
        """The input stage called `name`."""
        return self.arrays[name]

    def heads(self, name: str) -> np.ndarray:
        """The input stage called `name`, cut into heads: (seq, heads, head_dim)."""
        array = self.arrays[name]
        return array.reshape(len(array), -1, self.config.head_dim)

    def linear(self, x: str, projection: str) -> np.ndarray:
        """The input stage `x` through one projection of the layer, with its bias when it has one."""
        bias = self.weights.get(projection.replace("_proj", "_bias"))
        return linear(self[x], self.weights[projection], bias)

    def rms_norm(self, x: np.ndarray, gain: str) -> np.ndarray:
        """`x` normalised with one gain of the layer."""
        return rms_norm(x, self.weights[gain], eps=self.config.rms_norm_eps)

    def rope(self, x: np.ndarray) -> np.ndarray:
        """`x` rotated to the positions of this pass."""
        cos, sin = rope_tables(
            self.positions,
            head_dim=self.config.head_dim,
            theta=self.config.rope_theta,
            scaling=self.config.rope_scaling,
        )
        return rope(x, cos, sin)


def stage_inputs(
    stage: Stage,
    layer: int | None,
    weights: Weights,
    this: Pass,
    trace: Mapping[str, np.ndarray],
    past: Mapping[str, np.ndarray] | None = None,
    *,
    reads: Sequence[str] = (),
) -> StageInputs:
    """What a stage of a pass reads, from a trace of that pass and, for the caches, of the tokens before it.

    `reads` are stages that a mistake reads beside the stage's own inputs.
    """
    config = weights.config
    arrays = {name: trace[input_key(name, layer, config)] for name in (*stage.input_names(config), *reads)}
    if layer is not None:
        empty = np.empty((config.n_kv_heads, 0, config.head_dim), weights.dtype)
        arrays["past_k"] = past[key("k_cache", layer)] if past is not None else empty
        arrays["past_v"] = past[key("v_cache", layer)] if past is not None else empty
    return StageInputs(
        config=config,
        weights=weights if layer is None else weights.layer(layer),
        arrays={name: array.astype(weights.dtype) for name, array in arrays.items()},
        ids=np.asarray(this.ids),
        positions=this.positions,
        dtype=weights.dtype,
    )


def part_of_trace(
    golden: Mapping[str, np.ndarray], config: ModelConfig, start: int, stop: int
) -> dict[str, np.ndarray]:
    """What a pass over the tokens from `start` to `stop` shows of a whole one."""
    return {name: part_of(stage, golden[name], start, stop) for name, stage, _ in keys(config)}
