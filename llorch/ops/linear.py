"""Linear projection with weights in Hugging Face order, (out, in).

y = x @ weight.T + bias
"""

import numpy as np
from jaxtyping import Float

from llorch.ops.precision import widen


def linear(
    x: Float[np.ndarray, "seq in"],
    weight: Float[np.ndarray, "out in"],
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
    wide_x, wide_weight = widen(x, weight)
    y = wide_x @ wide_weight.T
    if bias is not None:
        y += bias
    return y.astype(x.dtype, copy=False)
