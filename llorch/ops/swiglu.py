"""SwiGLU: a gate decides how much of each inner value passes.

    y = silu(gate) * up            silu(z) = z / (1 + exp(-z))

Source: arXiv:2002.05202.
"""

import numpy as np
from jaxtyping import Float

from llorch.ops.precision import widen


def swiglu(gate: Float[np.ndarray, "seq inter"], up: Float[np.ndarray, "seq inter"]) -> Float[np.ndarray, "seq inter"]:
    """Gate the inner values.

    Args:
        gate: Output of gate_proj.
        up: Output of up_proj.

    Returns:
        The gated values.
    """
    wide_gate, wide_up = widen(gate, up)
    with np.errstate(over="ignore"):  # exp(-z) = inf for very negative z gives the right limit, 0
        y = -wide_gate
        np.exp(y, out=y)
    y += 1
    np.divide(wide_gate, y, out=y)
    y *= wide_up
    return y.astype(gate.dtype, copy=False)
