"""Keys and values of the tokens so far, per layer, so that each is computed once.

Storage grows by doubling: its size follows the tokens that were seen, never a number in a file.
"""

import numpy as np
from jaxtyping import Float, Int

from llorch.config import ModelConfig

NewRows = Float[np.ndarray, "seq kv_heads head_dim"]
Context = Float[np.ndarray, "kv_heads ctx head_dim"]


class KVCache:
    """The cache of one sequence."""

    def __init__(self, config: ModelConfig, dtype: type[np.floating], *, first_position: int = 0) -> None:
        """Start empty."""
        shape = (config.n_kv_heads, 0, config.head_dim)
        self._keys = [np.empty(shape, dtype) for _ in range(config.n_layers)]
        self._values = [np.empty(shape, dtype) for _ in range(config.n_layers)]
        self._first_position = first_position
        self._max_positions = config.max_position_embeddings
        self.length = 0  # tokens whose keys and values every layer holds

    def next_positions(self, n_tokens: int) -> Int[np.ndarray, " seq"]:
        """Absolute positions of the next tokens; ValueError for none, or more than the context holds."""
        start = self._first_position + self.length
        require_context(n_tokens, start, self._max_positions)
        return np.arange(start, start + n_tokens)

    def append(self, layer: int, k: NewRows, v: NewRows) -> tuple[Context, Context]:
        """Add rotated keys and values of the new tokens; returns views of the whole context.

        Layers come in order, the last one completes the step.
        """
        end = self.length + len(k)
        for store, new in ((self._keys, k), (self._values, v)):
            if end > store[layer].shape[1]:
                store[layer] = _grown(store[layer], self.length, end)
            store[layer][:, self.length : end] = new.swapaxes(0, 1)
        if layer == len(self._keys) - 1:
            self.length = end
        return self._keys[layer][:, :end], self._values[layer][:, :end]


def require_context(n_tokens: int, start: int, max_positions: int) -> None:
    """Refuse (ValueError) no tokens, or tokens from a position on that the context does not hold."""
    if n_tokens < 1:
        raise ValueError("forward: expected at least one token id, got none")
    if start < 0 or start + n_tokens > max_positions:
        raise ValueError(
            f"forward: {n_tokens} tokens from position {start} do not fit the context of "
            f"{max_positions} tokens; shorten the prompt"
        )


def _grown(old: np.ndarray, used: int, needed: int) -> np.ndarray:
    room = max(needed, 2 * old.shape[1])
    new = np.empty((old.shape[0], room, old.shape[2]), old.dtype)
    new[:, :used] = old[:, :used]
    return new
