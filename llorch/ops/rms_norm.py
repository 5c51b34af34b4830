"""RMSNorm: bring each row to unit root mean square, then apply a learned gain.

    y = x / sqrt(mean(x * x) + eps) * weight        mean over the last axis

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
    mean_square = np.square(wide_x, dtype=np.float64).sum(axis=-1, keepdims=True) / x.shape[-1]  # (*rows, 1)
    root = np.sqrt(mean_square + eps).astype(wide_x.dtype, copy=False)
    return (wide_x / root * wide_weight).astype(x.dtype, copy=False)
