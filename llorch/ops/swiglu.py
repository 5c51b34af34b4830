"""SwiGLU: a gate scales each intermediate value.

    y = silu(gate) * up            silu(z) = z s(z), s(z) = 1 / (1 + exp(-z))
    dL/dup   = dL/dy * silu(gate)
    dL/dgate = dL/dy * up * s (1 + gate (1 - s))        s = s(gate), because s' = s (1 - s)

Source: arXiv:2002.05202.
"""

import numpy as np
from jaxtyping import Float

from llorch.ops.precision import widen


def swiglu(
    gate: Float[np.ndarray, "*rows inter"], up: Float[np.ndarray, "*rows inter"]
) -> Float[np.ndarray, "*rows inter"]:
    """Gate the outputs of up_proj by those of gate_proj."""
    wide_gate, wide_up = widen(gate, up)
    with np.errstate(over="ignore"):  # exp(-z) overflows for very negative z; z / inf is the right limit, 0
        y = -wide_gate
        np.exp(y, out=y)
    y += 1
    np.divide(wide_gate, y, out=y)
    y *= wide_up
    return y.astype(gate.dtype, copy=False)


def swiglu_backward(
    grad: Float[np.ndarray, "*rows inter"], gate: Float[np.ndarray, "*rows inter"], up: Float[np.ndarray, "*rows inter"]
) -> tuple[Float[np.ndarray, "*rows inter"], Float[np.ndarray, "*rows inter"]]:
    """Compute the gradients by gate and up."""
    wide_grad, wide_gate, wide_up = widen(grad, gate, up)
    with np.errstate(over="ignore"):  # exp(-gate) overflows as in the forward pass; s is then 0
        s = 1 / (1 + np.exp(-wide_gate))
    d_gate = wide_grad * wide_up * s * (1 + wide_gate * (1 - s))
    d_up = wide_grad * wide_gate * s
    return d_gate.astype(gate.dtype, copy=False), d_up.astype(up.dtype, copy=False)
