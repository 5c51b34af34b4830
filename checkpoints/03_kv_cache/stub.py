"""Lesson 03: the cache. Append the keys and values of new tokens to those of earlier tokens.

Write `append`, save, and check it: llorch learn check 03
The check runs the model in one pass and in two; both must give the same numbers.
"""

import numpy as np


def append(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the caches of one layer with the new tokens.

    Args:
        past_k: Keys so far, (kv_heads, past, head_dim); past is 0 in the first pass.
        past_v: Values so far, with the same shape.
        k: Keys of the new tokens, rotated, (seq, kv_heads, head_dim).
        v: Values of the new tokens, with the same shape, never rotated.

    Returns:
        Keys and values of the whole context, (kv_heads, past + seq, head_dim) each; slot n is token n.
    """
    raise NotImplementedError
