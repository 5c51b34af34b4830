"""Per-layer memory of the previous tokens: KV cache of attention, recurrent state of a delta net.

Storage grows by doubling: its size follows the number of tokens, never a context length in a file. The recurrent state
of a delta net has the same size for any number of tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from llorch.families.config import ModelConfig
from llorch.families.layers import DeltaNet
from llorch.files import Weights
from llorch.ops.scheme_rounding import SchemeRounding, round_as_scheme
from llorch.runtime.errors import UserError

NewRows = Float[np.ndarray, "seq kv_heads head_dim"]
Context = Float[np.ndarray, "kv_heads ctx head_dim"]
CacheRounding = Mapping[int, tuple[SchemeRounding, SchemeRounding]]  # layer -> rules for (keys, values)


@dataclass
class DeltaState:
    """State of a delta net: the last inputs of its convolution, and a matrix per value head; at least float32."""

    conv: Float[np.ndarray, "taps conv_width"]  # taps = conv_kernel - 1, the oldest first
    delta: Float[np.ndarray, "v_heads key_dim value_dim"]

    @classmethod
    def empty(cls, net: DeltaNet, dtype: type[np.floating]) -> "DeltaState":
        """Return the state before the first token, zeros."""
        return cls(
            np.zeros((net.conv_kernel - 1, net.conv_width), dtype),
            np.zeros((net.n_value_heads, net.key_head_dim, net.value_head_dim), dtype),
        )


class KVCache:
    """Cache of one sequence."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: type[np.floating],
        *,
        first_position: int = 0,
        rounding: CacheRounding = MappingProxyType({}),
    ) -> None:
        """Start empty; `rounding`: how a quantised folder's scheme rounds keys and values before storage, by layer."""
        shape = (config.n_kv_heads, 0, config.head_dim)
        self._keys = [np.empty(shape, dtype) for _ in range(config.n_layers)]
        self._values = [np.empty(shape, dtype) for _ in range(config.n_layers)]
        state_dtype = np.promote_types(dtype, np.float32).type  # float16 applies to keys and values only
        self._states = {
            i: DeltaState.empty(config.delta_net, state_dtype)
            for i in range(config.n_layers)
            if config.delta_net is not None and config.layer(i).mixer == "delta_net"
        }
        self._new_states: dict[int, DeltaState] = {}  # written by the running pass, valid after `advance`
        self._first_position = first_position
        self._rounding = rounding
        self._max_positions = config.max_position_embeddings
        self.length = 0  # tokens whose keys and values are in every layer

    @classmethod
    def of(cls, weights: Weights, *, first_position: int = 0) -> "KVCache":
        """Return an empty cache for a model, with the dtype and the rounding of its cache."""
        return cls(weights.config, weights.cache_dtype, first_position=first_position, rounding=weights.cache_rounding)

    def next_positions(self, n_tokens: int) -> Int[np.ndarray, " seq"]:
        """Return the absolute positions of the next tokens; UserError for no tokens or more than the context."""
        start = self._first_position + self.length
        require_context(n_tokens, start, self._max_positions)
        return np.arange(start, start + n_tokens)

    def memory(self, layer: int) -> Any:
        """Return the memory of a layer: `append` of an attention layer, or the state of a delta net.

        A pass replaces the arrays in a copy of the state and never changes them, so a failed pass leaves the old state.
        """
        if layer not in self._states:
            return partial(self.append, layer)
        self._new_states[layer] = replace(self._states[layer])
        return self._new_states[layer]

    def append(self, layer: int, k: NewRows, v: NewRows) -> tuple[Context, Context]:
        """Add rotated keys and values of the new tokens; returns views of the whole context."""
        end = self.length + len(k)
        if layer in self._rounding:
            key_rounding, value_rounding = self._rounding[layer]
            k, v = round_as_scheme(k, key_rounding), round_as_scheme(v, value_rounding)
        for store, new in ((self._keys, k), (self._values, v)):
            if end > store[layer].shape[1]:
                store[layer] = _enlarge(store[layer], self.length, end)
            store[layer][:, self.length : end] = new.swapaxes(0, 1)
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def advance(self, n_tokens: int) -> None:
        """Complete a pass: make its tokens and states visible to the next pass."""
        self._states |= self._new_states
        self.length += n_tokens


def require_context(n_tokens: int, start: int, max_positions: int) -> None:
    """Raise UserError if there are no tokens, or if they do not fit the context."""
    if n_tokens < 1:
        raise UserError("forward: expected at least one token id, got none")
    if start < 0 or start + n_tokens > max_positions:
        raise UserError(
            f"forward: {n_tokens} tokens from position {start} do not fit the context of "
            f"{max_positions} tokens; shorten the prompt"
        )


def _enlarge(array: np.ndarray, used: int, needed: int) -> np.ndarray:
    """Copy the first `used` slots of axis 1 into an array at least twice as long, with space for `needed`."""
    capacity = max(needed, 2 * array.shape[1])
    enlarged = np.empty((array.shape[0], capacity, array.shape[2]), array.dtype)
    enlarged[:, :used] = array[:, :used]
    return enlarged
