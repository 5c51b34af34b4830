"""Wrong code for RoPE, by the name of the known mistake. Each must fail under its name.

The page plants one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def in_bfloat16(head_dim: int, theta: float) -> np.ndarray:
    inv_freq = (1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    upper = (inv_freq.view(np.uint32) + 0x8000) & 0xFFFF0000  # bfloat16 is the upper half of a float32
    return upper.view(np.float32).astype(np.float64)


def neighbours_turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    cos, sin = cos[:, None, :], sin[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def half_of_it(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    rotated, unrotated = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None, 0::2], sin[:, None, 0::2]  # every second speed: those of a head of half the size
    first, second = np.split(rotated, 2, axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin, unrotated]
    return np.concatenate(parts, axis=-1).astype(x.dtype)


WRONG = {
    "frequencies": {
        "rope-frequencies-in-bfloat16": in_bfloat16,
    },
    "rope": {
        "rope-interleaved-pairs": neighbours_turned,
        "rope-first-half-only": half_of_it,
    },
}
UNTYPED = {
    "heads-cut-last": "typed in 07",
    "rope-before-norm": "typed in 07",
    "rope-position-by-head": "tables with one row per token do not broadcast along the heads, so NumPy raises an error",
    "rope-exponent-by-hidden-over-heads": "no function gets hidden_size and the number of heads, only head_dim",
}
