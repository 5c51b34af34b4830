"""DoRA: train the norm of every row of an adapted matrix separately from its direction.

    y = k V x            V = W + s B A, k = m / |V|, one number per row; |V| counts as a constant in the gradient
      = W x + added      added = (k - 1) W x + k delta, delta = s B A x
    dL/dm     = sum over rows of g of g (W x + delta) / |V|            g = dL/dy
    dL/ddelta = k g
    dL/d(W x) = (k - 1) g            in addition to the g of the first term of y

With dropout, `added` uses the dropped-out x, as in PEFT.

Source: arXiv:2402.09353, the constant in section 4.3; peft/tuners/lora/dora.py.
"""

import numpy as np
from jaxtyping import Float

from llorch.ops.precision import widen


def dora(
    of_base: Float[np.ndarray, "seq out"],
    delta: Float[np.ndarray, "seq out"],
    magnitude: Float[np.ndarray, " out"],
    lengths: Float[np.ndarray, " out"],
) -> Float[np.ndarray, "seq out"]:
    """Compute the addition to the frozen projection that gives its rows their trained norms.

    Args:
        of_base: W x.
        delta: LoRA addition, s B A x.
        magnitude: Trained row norms, m.
        lengths: Row norms |V|, see `row_lengths`.

    Returns:
        The addition, in the dtype of `delta`.
    """
    wide_base, wide_delta, wide_m, wide_lengths = widen(of_base, delta, magnitude, lengths)
    gain = wide_m / wide_lengths
    return ((gain - 1) * wide_base + gain * wide_delta).astype(delta.dtype, copy=False)


def dora_backward(
    grad: Float[np.ndarray, "seq out"],
    of_base: Float[np.ndarray, "seq out"],
    delta: Float[np.ndarray, "seq out"],
    magnitude: Float[np.ndarray, " out"],
    lengths: Float[np.ndarray, " out"],
) -> tuple[Float[np.ndarray, "seq out"], Float[np.ndarray, "seq out"], Float[np.ndarray, " out"]]:
    """Compute the gradients by both products and by the magnitude.

    Args:
        grad: Gradient by the addition.
        of_base: W x.
        delta: LoRA addition, s B A x.
        magnitude: Trained row norms, m.
        lengths: Row norms |V|.

    Returns:
        Gradients by `of_base`, `delta` and `magnitude`, in the dtype of `grad`.
    """
    wide_grad, wide_base, wide_delta, wide_m, wide_lengths = widen(grad, of_base, delta, magnitude, lengths)
    gain = wide_m / wide_lengths
    d_magnitude = (wide_grad * (wide_base + wide_delta)).sum(axis=0) / wide_lengths
    grads = ((gain - 1) * wide_grad, gain * wide_grad, d_magnitude)
    d_base, d_delta, d_magnitude = (array.astype(grad.dtype, copy=False) for array in grads)
    return d_base, d_delta, d_magnitude


def row_lengths(
    weight: Float[np.ndarray, "out in"], addition: Float[np.ndarray, "out in"]
) -> Float[np.ndarray, " out"]:
    """Compute the norm of every row of an adapted matrix.

    Args:
        weight: The frozen matrix.
        addition: LoRA addition to the matrix, s B A.

    Returns:
        The norms, in the dtype of `addition`: a packed matrix is decoded to float32 even in a float64 run.
    """
    wide_weight, wide_addition = widen(weight, addition)
    squares = np.square(wide_weight + wide_addition, dtype=np.float64)
    return np.sqrt(squares.sum(axis=-1)).astype(addition.dtype, copy=False)
