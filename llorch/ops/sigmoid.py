"""Sigmoid: how far a gate is open, from 0 to 1.

    s = 1 / (1 + exp(-x))
    ds/dx = s (1 - s)

Source: the gates of arXiv:2412.06464 and of the shared expert in Qwen.
"""

import numpy as np
from jaxtyping import Float

from llorch.ops.precision import widen


def sigmoid(x: Float[np.ndarray, "*any"]) -> Float[np.ndarray, "*any"]:
    """Open or close a gate, element by element."""
    (wide,) = widen(x)
    with np.errstate(over="ignore"):  # exp(-x) = inf for very negative x gives the right limit, 0
        return (1 / (1 + np.exp(-wide))).astype(x.dtype, copy=False)


def sigmoid_backward(grad: Float[np.ndarray, "*any"], s: Float[np.ndarray, "*any"]) -> Float[np.ndarray, "*any"]:
    """Gradient by what the gate was opened with, from how far it is open."""
    wide_grad, wide = widen(grad, s)
    return (wide_grad * wide * (1 - wide)).astype(s.dtype, copy=False)
