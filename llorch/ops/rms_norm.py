"""RMSNorm: bring each row to unit root mean square, then apply a learned gain.

    y = x / root * weight        root = sqrt(mean(x * x) + eps), mean over the last axis
    dL/dx = (g - n mean(g n)) / root        g = dL/dy * weight, n = x / root

The component of g along n is removed, because the norm cancels a change of length.

Source: arXiv:1910.07467; eps sits inside the root, as in Llama and Qwen.
"""

import numpy as np
from jaxtyping import Float

from llorch.ops.precision import widen


def rms_norm(
    x: Float[np.ndarray, "*rows width"],
    weight: Float[np.ndarray, " width"],
    *,
    eps: float,
) -> Float[np.ndarray, "*rows width"]:
    """Normalise the last axis; every leading axis is an independent row.

    Args:
        x: Activations.
        weight: Gain as stored in the file (no `1 +`, unlike Gemma).
        eps: `rms_norm_eps` of the config, added to the mean square; > 0.

    Returns:
        The normalised activations, shape and dtype of `x`; squares and mean are taken in float64.
    """
    wide_x, wide_weight = widen(x, weight)
    return (wide_x / root_mean_square(wide_x, eps) * wide_weight).astype(x.dtype, copy=False)


def rms_norm_backward(
    grad: Float[np.ndarray, "*rows width"],
    x: Float[np.ndarray, "*rows width"],
    weight: Float[np.ndarray, " width"],
    *,
    eps: float,
) -> Float[np.ndarray, "*rows width"]:
    """Compute the gradient by the input rows; the gain is frozen."""
    wide_grad, wide_x, wide_weight = widen(grad, x, weight)
    root = root_mean_square(wide_x, eps)
    d_normed, normed = wide_grad * wide_weight, wide_x / root
    projection = (d_normed * normed).sum(axis=-1, keepdims=True, dtype=np.float64) / x.shape[-1]  # (*rows, 1)
    return ((d_normed - normed * projection.astype(wide_x.dtype, copy=False)) / root).astype(x.dtype, copy=False)


def root_mean_square(x: Float[np.ndarray, "*rows width"], eps: float) -> Float[np.ndarray, "*rows 1"]:
    """Compute the divisor of each row, in the dtype of `x`."""
    mean_square = np.square(x, dtype=np.float64).sum(axis=-1, keepdims=True) / x.shape[-1]
    return np.sqrt(mean_square + eps).astype(x.dtype, copy=False)
