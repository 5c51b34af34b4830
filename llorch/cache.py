"""Keys and values of the tokens so far, per layer, so that each is computed once.

Storage grows by doubling: its size follows the tokens that were seen, never a number in a file.
"""

import numpy as np
from jaxtyping import Float, Int

from llorch.config import ModelConfig

NewRows = Float[np.ndarray, "seq kv_heads head_dim"]
Context = Float[np.ndarray, "kv_heads ctx head_dim"]


class KVCache:
    """The cache of one sequence.

    Attributes:
        length: Tokens whose keys and values every layer holds.
    """

    def __init__(self, config: ModelConfig, dtype: type[np.floating], *, first_position: int = 0) -> None:
        """Start empty.

        Args:
            config: The model.
            dtype: Dtype of keys and values.
            first_position: Position of the first token.
        """
        shape = (config.n_kv_heads, 0, config.head_dim)
        self._keys = [np.empty(shape, dtype) for _ in range(config.n_layers)]
        self._values = [np.empty(shape, dtype) for _ in range(config.n_layers)]
        self._first_position = first_position
        self._max_positions = config.max_position_embeddings
        self.length = 0

    def next_positions(self, n_tokens: int) -> Int[np.ndarray, " seq"]:
        """Absolute positions of the next tokens.

        Args:
            n_tokens: How many tokens come; at least one.

        Returns:
            Their positions.

        Raises:
            ValueError: No token, or more than the context holds.
        """
        start = self._first_position + self.length
        require_context(n_tokens, start, self._max_positions)
        return np.arange(start, start + n_tokens)

    def append(self, layer: int, k: NewRows, v: NewRows) -> tuple[Context, Context]:
        """Add the keys and values of the new tokens.

        Args:
            layer: Which layer; layers come in order, the last one completes the step.
            k: Rotated keys.
            v: Values.

        Returns:
            Keys and values of the whole context, views of the cache.
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
    """Refuse tokens that do not fit the context.

    Args:
        n_tokens: How many tokens come.
        start: Position of the first one.
        max_positions: Length of the context.

    Raises:
        ValueError: No token, or more than the context holds.
    """
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
