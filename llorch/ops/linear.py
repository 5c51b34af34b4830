"""Linear projection with weights in Hugging Face order, (out, in).

y = x @ weight.T + bias
"""

import numpy as np
from jaxtyping import Float

from llorch.numerics import QuantMethod
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
    y = product(x, weight) if isinstance(weight, np.ndarray) else weight.forward(x)
    if bias is not None:
        y += bias
    return y.astype(x.dtype, copy=False)


def product(x: Float[np.ndarray, "seq in"], weight: Float[np.ndarray, "out in"]) -> Float[np.ndarray, "seq out"]:
    """Multiply, without a last rounding to the dtype of `x` where the operands are small enough to be widened.

    Args:
        x: Activations.
        weight: One row per output.

    Returns:
        A new array.
    """
    wide_x, wide_weight = widen(x, weight)
    return wide_x @ wide_weight.T
