"""Lesson 06: the feed-forward part. Widen every token, let a gate decide what passes, narrow it again.

Write `swiglu` and `feed_forward`, save, and check them: llorch learn check 06
`swiglu` alone is the gate; `feed_forward` puts three projections around it.
"""

import numpy as np


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Let silu(gate) decide how much of each inner value passes; silu(z) = z / (1 + exp(-z)).

    Args:
        gate: Output of gate_proj, (seq, inter), float32.
        up: Output of up_proj, (seq, inter).

    Returns:
        Shape and dtype of `gate`.
    """
    raise NotImplementedError


def feed_forward(h: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray) -> np.ndarray:
    """Apply two projections up, the gate between them, and one projection down. No biases.

    Args:
        h: Normalised tokens, (seq, hidden), float32.
        gate_proj: (inter, hidden), one row for every output.
        up_proj: (inter, hidden).
        down_proj: (hidden, inter).

    Returns:
        (seq, hidden), dtype of `h`.
    """
    raise NotImplementedError
