"""What layers remember of the tokens so far, so that each is computed once: keys and values, or a state.

Storage grows by doubling: its size follows the tokens that were seen, never a number in a file. The state of a delta
net has one size for any number of tokens.
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
CacheRounding = Mapping[int, tuple[SchemeRounding, SchemeRounding]]  # of keys and of values, by layer


@dataclass
class DeltaState:
    """The memory of a delta net: the last inputs of its convolution, and a matrix per value head, never rounded."""

    conv: Float[np.ndarray, "taps conv_width"]  # taps = conv_kernel - 1, the oldest first
    delta: Float[np.ndarray, "v_heads key_dim value_dim"]

    @classmethod
    def empty(cls, net: DeltaNet, dtype: type[np.floating]) -> "DeltaState":
        """Make the state before the first token: zeros."""
        return cls(
            np.zeros((net.conv_kernel - 1, net.conv_width), dtype),
            np.zeros((net.n_value_heads, net.key_head_dim, net.value_head_dim), dtype),
        )


class KVCache:
    """The cache of one sequence."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: type[np.floating],
        *,
        first_position: int = 0,
        rounding: CacheRounding = MappingProxyType({}),
    ) -> None:
        """Start empty; `rounding` says how keys and values of a layer are rounded before they are stored."""
        shape = (config.n_kv_heads, 0, config.head_dim)
        self._keys = [np.empty(shape, dtype) for _ in range(config.n_layers)]
        self._values = [np.empty(shape, dtype) for _ in range(config.n_layers)]
        wide = np.promote_types(dtype, np.float32).type  # a float16 cache is one of keys and values
        self._states = {
            i: DeltaState.empty(config.delta_net, wide)
            for i in range(config.n_layers)
            if config.delta_net is not None and config.layer(i).mixer == "delta_net"
        }
        self._new_states: dict[int, DeltaState] = {}  # of the pass that runs
        self._first_position = first_position
        self._rounding = rounding
        self._max_positions = config.max_position_embeddings
        self.length = 0  # tokens whose keys and values every layer holds

    @classmethod
    def of(cls, weights: Weights, *, first_position: int = 0) -> "KVCache":
        """Start empty for a model, with the dtype and the rounding of its cache."""
        return cls(weights.config, weights.cache_dtype, first_position=first_position, rounding=weights.cache_rounding)

    def next_positions(self, n_tokens: int) -> Int[np.ndarray, " seq"]:
        """Return the absolute positions of the next tokens; ValueError for none, or more than the context holds."""
        start = self._first_position + self.length
        require_context(n_tokens, start, self._max_positions)
        return np.arange(start, start + n_tokens)

    def memory(self, layer: int) -> Any:
        """Return the memory of a layer: `append` of an attention layer, or the state of a delta net.

        The arrays of a state are replaced, never changed, so that a pass that fails leaves those before it.
        """
        if layer not in self._states:
            return partial(self.append, layer)
        self._new_states[layer] = replace(self._states[layer])
        return self._new_states[layer]

    def append(self, layer: int, k: NewRows, v: NewRows) -> tuple[Context, Context]:
        """Add rotated keys and values of the new tokens; returns views of the whole context."""
        end = self.length + len(k)
        if layer in self._rounding:
            of_keys, of_values = self._rounding[layer]
            k, v = round_as_scheme(k, of_keys), round_as_scheme(v, of_values)
        for store, new in ((self._keys, k), (self._values, v)):
            if end > store[layer].shape[1]:
                store[layer] = _grown(store[layer], self.length, end)
            store[layer][:, self.length : end] = new.swapaxes(0, 1)
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def advance(self, n_tokens: int) -> None:
        """Complete a pass: the next one sees the tokens and states that its layers wrote."""
        self._states |= self._new_states
        self.length += n_tokens


def require_context(n_tokens: int, start: int, max_positions: int) -> None:
    """Refuse (ValueError) no tokens, or tokens from a position on that the context does not hold."""
    if n_tokens < 1:
        raise UserError("forward: expected at least one token id, got none")
    if start < 0 or start + n_tokens > max_positions:
        raise UserError(
            f"forward: {n_tokens} tokens from position {start} do not fit the context of "
            f"{max_positions} tokens; shorten the prompt"
        )


def _grown(old: np.ndarray, used: int, needed: int) -> np.ndarray:
    """Return a copy of the first `used` slots of axis 1, at least doubled and with space for `needed`."""
    room = max(needed, 2 * old.shape[1])
    new = np.empty((old.shape[0], room, old.shape[2]), old.dtype)
    new[:, :used] = old[:, :used]
    return new
