"""Sigmoid: how far a gate is open, from 0 to 1.

    s = 1 / (1 + exp(-x))
    ds/dx = s (1 - s)

Source: the gates of arXiv:2412.06464 and of the shared expert in Qwen.
"""

import numpy as np
from jaxtyping import Float

from llorch.ops.precision import widen


def sigmoid(x: Float[np.ndarray, "*any"]) -> Float[np.ndarray, "*any"]:
    """Compute the sigmoid element by element."""
    (wide_x,) = widen(x)
    with np.errstate(over="ignore"):  # exp(-x) overflows for very negative x; 1 / inf is the right limit, 0
        return (1 / (1 + np.exp(-wide_x))).astype(x.dtype, copy=False)


def sigmoid_backward(grad: Float[np.ndarray, "*any"], s: Float[np.ndarray, "*any"]) -> Float[np.ndarray, "*any"]:
    """Compute the gradient by the input from the output `s` of the forward pass."""
    wide_grad, wide_s = widen(grad, s)
    return (wide_grad * wide_s * (1 - wide_s)).astype(s.dtype, copy=False)
