"""Lesson 02: queries, keys and values. Project every row three times and cut the results into heads.

Write `linear`, then `qkv` with it, save, and check: llorch learn check 02
Qwen3 normalises each head with `rms_norm`: yours from lesson 01, or llorch's if you have not written it.
"""

import numpy as np
from l01_rms_norm import rms_norm


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Project every row.

    Args:
        x: Rows, (seq, in), float32.
        weight: One row per output, (out, in).
        bias: Added to every result, (out,); None where the family has none.

    Returns:
        (seq, out), dtype of `x`.
    """
    raise NotImplementedError


def qkv(
    h: np.ndarray,
    q_proj: np.ndarray,
    k_proj: np.ndarray,
    v_proj: np.ndarray,
    q_bias: np.ndarray | None,
    k_bias: np.ndarray | None,
    v_bias: np.ndarray | None,
    q_norm: np.ndarray | None,
    k_norm: np.ndarray | None,
    head_dim: int,
    eps: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute queries, keys and values of every token, in heads.

    Args:
        h: Normalised rows, (seq, hidden).
        q_proj: (heads * head_dim, hidden); the rows of one head lie together.
        k_proj: (kv_heads * head_dim, hidden).
        v_proj: (kv_heads * head_dim, hidden).
        q_bias: (heads * head_dim,), or None. Qwen2 has the three biases.
        k_bias: (kv_heads * head_dim,), or None.
        v_bias: (kv_heads * head_dim,), or None.
        q_norm: The gain of all query heads, (head_dim,), or None. Qwen3 has the two norms.
        k_norm: The gain of all key heads, (head_dim,), or None.
        head_dim: Numbers in a head.
        eps: For `rms_norm`.

    Returns:
        q (seq, heads, head_dim), k and v (seq, kv_heads, head_dim).
    """
    raise NotImplementedError
