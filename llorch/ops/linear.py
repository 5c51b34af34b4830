"""Linear projection with weights in Hugging Face order, (out, in).

    y = x @ weight.T + bias
    dL/dx = dL/dy @ weight

The weight is frozen, so dL/dweight = dL/dy^T @ x is never computed; only adapters are trained, see `ops/lora.py`.
"""

import numpy as np
from jaxtyping import Float

from llorch.ops.compiled.products import LARGE, CompiledMatrix, is_available
from llorch.ops.numerics import QuantMethod
from llorch.ops.precision import widen


def linear(
    x: Float[np.ndarray, "seq in"],
    weight: Float[np.ndarray, "out in"] | QuantMethod,
    bias: Float[np.ndarray, " out"] | None = None,
) -> Float[np.ndarray, "seq out"]:
    """Project every row.

    Args:
        x: Activations.
        weight: One row per output.
        bias: Added to every row, when the family has one.

    Returns:
        The projected activations.
    """
    y = product(x, weight)
    if bias is not None:
        y += bias
    return y.astype(x.dtype, copy=False)


def product(
    x: Float[np.ndarray, "seq in"], weight: Float[np.ndarray, "out in"] | QuantMethod
) -> Float[np.ndarray, "seq out"]:
    """Multiply into a new array; the product of small operands stays in float64, for the caller to round.

    One row of a large matrix is multiplied in C, at the speed of the memory, if a compiler is installed.
    """
    if not isinstance(weight, np.ndarray):
        return weight.forward(x)
    if len(x) == 1 and _is_large(weight) and x.dtype == np.float32 and is_available():
        return CompiledMatrix("F32", weight.shape, weight).multiply(x)
    wide_x, wide_weight = widen(x, weight)
    return wide_x @ wide_weight.T


def _is_large(weight: np.ndarray) -> bool:
    return weight.size >= LARGE and weight.dtype == np.float32 and weight.flags.c_contiguous


def linear_backward(
    grad: Float[np.ndarray, "seq out"], weight: Float[np.ndarray, "out in"] | QuantMethod
) -> Float[np.ndarray, "seq in"]:
    """Compute the gradient by the input of the frozen projection.

    A packed weight is decoded. Its rounding of activations counts as the identity.
    """
    wide_grad, wide_weight = widen(grad, weight if isinstance(weight, np.ndarray) else weight.dequantize())
    return (wide_grad @ wide_weight).astype(grad.dtype, copy=False)
