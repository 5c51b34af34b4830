"""Lesson 05b: the gated delta net. A memory whose size does not depend on the number of tokens.

Write `short_conv`, `l2_norm`, `log_decay` and `delta_rule`, save, and check them: llorch learn check 05b
The first three prepare, the last one remembers.
"""

import numpy as np


def short_conv(x: np.ndarray, kernel: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Mix the last few values of every channel with the channel's kernel, then apply SiLU.

    Args:
        x: Values of the new tokens, (seq, channels), float32.
        kernel: (channels, size), the newest token last.
        state: Values of the tokens before these, (size - 1, channels), the oldest first; zeros where there were none.

    Returns:
        Shape and dtype of `x`. Do not return the new state.
    """
    raise NotImplementedError


def l2_norm(x: np.ndarray) -> np.ndarray:
    """Bring every head to length 1: divide by the root of the sum of squares, with 1e-6 added to the sum.

    Args:
        x: (seq, heads, width), float32.

    Returns:
        Shape and dtype of `x`.
    """
    raise NotImplementedError


def log_decay(a: np.ndarray, dt_bias: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """Compute the logarithm of the kept share of each head's memory at a token: decay * softplus(a + dt_bias).

    Args:
        a: A number per token and head, (seq, heads), float32.
        dt_bias: (heads,).
        decay: -exp(A_log), (heads,); all below 0.

    Returns:
        Shape and dtype of `a`; at most 0.
    """
    raise NotImplementedError


def delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, g: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Forget, correct, read, token by token.

    Value head h reads query and key head h // (v_heads / k_heads).

    Args:
        q: Queries of length 1, (seq, k_heads, key_dim), float32.
        k: Keys of length 1, (seq, k_heads, key_dim).
        v: Values, (seq, v_heads, value_dim).
        beta: The share of a correction that is written, (seq, v_heads).
        g: Logarithm of the decay, (seq, v_heads).
        state: State before the first token, (v_heads, key_dim, value_dim); do not change it.

    Returns:
        The result read by every token, (seq, v_heads, value_dim), and the state after the last one.
    """
    raise NotImplementedError
