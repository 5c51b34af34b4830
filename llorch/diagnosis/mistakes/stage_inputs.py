"""Inputs of one stage (named array of the forward pass), as a mistake reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llorch.families.config import ModelConfig, RopeScaling
from llorch.families.layers import Layer
from llorch.files import Weights
from llorch.model.blocks.delta_net import heads
from llorch.model.cache import DeltaState
from llorch.ops.delta_rule import delta_rule_in_chunks
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.rope import rope, rope_adjacent, rope_tables
from llorch.ops.short_conv import next_state
from llorch.stages.stage_ref import Pass, part_of
from llorch.stages.table import BY_NAME, Stage, input_key, key, keys


@dataclass(frozen=True)
class StageInputs:
    """Inputs of one stage in one layer of one pass."""

    config: ModelConfig
    weights: Mapping[str, Any]  # short name to weight: of the layer, or outside the layers
    arrays: Mapping[str, np.ndarray]  # stages of `Stage.inputs`; `past_*` are caches before the pass
    ids: np.ndarray
    positions: np.ndarray
    dtype: type[np.floating]  # dtype of the run
    layer: int | None

    @property
    def kind(self) -> Layer:
        """Kind of the stage's layer: mixer, window, chunk, RoPE, experts."""
        assert self.layer is not None
        return self.config.layer(self.layer)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the input stage `name`; for `a|b`, the stage that exists, because models differ."""
        return self.arrays[next((alternative for alternative in name.split("|") if alternative in self.arrays), name)]

    @property
    def has_past(self) -> bool:
        """True if the layer has cached keys or a state from earlier passes."""
        return self.arrays["past_k"].shape[1] > 0 or ("past_conv" in self.arrays and bool(self["past_conv"].any()))

    def heads(self, name: str) -> np.ndarray:
        """Split the input stage `name` into heads, (seq, heads, head_dim).

        For a projection to queries and gates, return the queries.
        """
        array, head_dim = self["q_gate_proj|" + name] if name == "q_proj" else self[name], self.config.head_dim
        if array.shape[-1] == 2 * self.config.q_width and name in ("q_proj", "q_gate_proj"):
            return array.reshape(len(array), -1, 2, head_dim)[:, :, 0]
        return array.reshape(len(array), -1, head_dim)

    def linear(self, x: str, projection: str) -> np.ndarray:
        """Multiply the input stage `x` by one projection of the layer; add the bias if the projection has one."""
        bias = self.weights.get(projection.replace("_proj", "_bias"))
        return linear(self[x], self.weights[projection], bias)

    def rms_norm(self, x: np.ndarray, gain: str) -> np.ndarray:
        """Normalise `x` with one gain of the layer."""
        return rms_norm(x, self.weights[gain], eps=self.config.rms_norm_eps)

    def rope(self, x: np.ndarray) -> np.ndarray:
        """Apply RoPE to `x` at the positions of this pass."""
        return self.turn(x, *self.tables(self.config.rope_scaling))

    def tables(self, scaling: RopeScaling | None) -> tuple[np.ndarray, np.ndarray]:
        """Compute cosines and sines of the positions of this pass."""
        config = self.config
        return rope_tables(self.positions, head_dim=config.rotated, theta=config.rope_theta, scaling=scaling)

    def turn(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        """Rotate the pairs of `x` in the model's RoPE layout."""
        return (rope_adjacent if self.config.interleaved_rope_hf else rope)(x, cos, sin)


def stage_inputs(
    stage: Stage,
    layer: int | None,
    weights: Weights,
    pass_ref: Pass,
    trace: Mapping[str, np.ndarray],
    past: Mapping[str, np.ndarray] | None = None,
    *,
    reads: Sequence[str] = (),
) -> StageInputs:
    """Collect the inputs of one stage from a trace of the pass, and the caches from a trace of the tokens before it.

    A trace maps stage keys to arrays. `reads` are stages that a mistake reads in addition to the stage's inputs.
    """
    config = weights.config
    names = (*stage.input_names(config, layer), *existing_stages(reads, config, layer))
    arrays = {name: trace[input_key(name, layer, config)] for name in names}
    if layer is not None and config.layer(layer).mixer == "delta_net":
        state = state_after(past, layer, config, weights.dtype)
        arrays |= {"past_conv": state.conv, "past_delta": state.delta}
    if layer is not None:
        empty = np.empty((config.n_kv_heads, 0, config.head_dim), weights.dtype)
        arrays["past_k"] = (past or {}).get(key("k_cache", layer), empty)
        arrays["past_v"] = (past or {}).get(key("v_cache", layer), empty)
    arrays = {name: array if array.dtype.kind == "i" else array.astype(weights.dtype) for name, array in arrays.items()}
    w = weights if layer is None else weights.layer(layer)
    return StageInputs(config, w, arrays, np.asarray(pass_ref.ids), pass_ref.positions, weights.dtype, layer)


def existing_stages(names: Sequence[str], config: ModelConfig, layer: int | None) -> tuple[str, ...]:
    """Select the stages in `names` that a layer has.

    For alternatives, `a|b`, take the first that the layer has. Keep names that are no stages.
    """
    existing = []
    for alternatives in names:
        candidates = [n for n in alternatives.split("|") if n not in BY_NAME or BY_NAME[n].applies_to(config, layer)]
        existing += candidates[:1]
    return tuple(existing)


def state_after(
    past: Mapping[str, np.ndarray] | None, layer: int, config: ModelConfig, dtype: type[np.floating]
) -> DeltaState:
    """Compute a delta net's state after a pass from the rule's inputs in its trace; empty before the first pass."""
    assert config.delta_net is not None
    state = DeltaState.empty(config.delta_net, dtype)
    if past is None:
        return state
    q, k, mixed, beta, g, x = (
        past[key(name, layer)].astype(dtype) for name in ("q_l2", "k_l2", "conv_out", "beta", "log_decay", "qkv_in")
    )
    _, delta = delta_rule_in_chunks(q, k, heads(mixed, config)[2], beta, g, state.delta)
    return DeltaState(next_state(state.conv, x), delta)


def part_of_trace(
    golden: Mapping[str, np.ndarray], config: ModelConfig, start: int, stop: int
) -> dict[str, np.ndarray]:
    """Cut a trace (arrays by stage key) of all tokens to the trace of a pass over the tokens from `start` to `stop`."""
    return {name: part_of(stage, golden[name], start, stop) for name, stage, _ in keys(config)}
