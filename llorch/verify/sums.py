"""How far two float32 results of the same product may lie apart, when they add the same terms in another order.

A sum of n terms t, added one by one, passes through n partial sums, each rounded by up to 2^-24 of its size. For terms
of random sign the errors add up to 2^-24 * sqrt(n / 6 * sum(t * t)) on the average. Two engines are off, independently,
and both add in at least 8 lanes, so n = width / 8; 4 times the average is granted.

Where a block has a minimum, w = d * q + m, ggml sums d * q * x and m * x apart, and the two may cancel: then the terms
are those of each block in both sums.

Source: the usual random-walk estimate of rounding errors (N. Higham, Accuracy and Stability, 2.8); ggml vec_dot.
"""

import math

import numpy as np

from llorch.files.matrix import Matrix
from llorch.files.quant import BLOCK_SIZES, GGMLType, decode
from llorch.numerics import QuantMethod

MATMUL_ERROR = 1e-6  # squared 1e-12: what a product of a smaller width holds, unless the engine itself is farther off
WIDE = 4096  # from this width on a longer sum may need more
_UNIT = 4 * math.sqrt(2) * 2.0**-24
_BLOCK = 32
# Where a block keeps its codes; without them, its numbers are the minima.
_CODES = {
    GGMLType.Q4_1: slice(4, 20),
    GGMLType.Q5_1: slice(4, 24),
    GGMLType.Q2_K: slice(16, 80),
    GGMLType.Q4_K: slice(16, 144),
    GGMLType.Q5_K: slice(16, 176),
}


def product_limit(x: np.ndarray, weight: "np.ndarray | QuantMethod", y: np.ndarray) -> float:
    """How large the relative error of a whole product may be.

    Args:
        x: The inputs.
        weight: The matrix.
        y: The product.

    Returns:
        The bound, for terms as large as `spread` says.
    """
    return _UNIT * math.sqrt(x.shape[1] / 48) * spread(x, weight, y)


def spread(x: np.ndarray, weight: "np.ndarray | QuantMethod", y: np.ndarray) -> float:
    """By what factor terms are larger than what remains of them; 1 where nothing cancels.

    Args:
        x: The inputs.
        weight: The matrix.
        y: The product.

    Returns:
        Root of the sum of squared terms over the size of the product, at least 1.
    """
    size = float(np.linalg.norm(y))
    return max(1.0, math.sqrt(float(squared_terms(x, weight).sum(dtype=np.float64))) / size) if size else 1.0


def squared_terms(x: np.ndarray, weight: "np.ndarray | QuantMethod") -> np.ndarray:
    """The sum of the squared terms of every element of a product.

    Args:
        x: The inputs.
        weight: The matrix.

    Returns:
        As large as the product.
    """
    matrix = weight if isinstance(weight, np.ndarray) else weight.dequantize()
    minima = _minima(weight) if isinstance(weight, Matrix) else None
    if minima is None:
        return np.square(x) @ np.square(matrix).T
    return _squares_in_two_sums(x, matrix - minima, minima)


def _minima(weight: Matrix) -> np.ndarray | None:
    """The minimum of every element's block, in Hugging Face's order of rows; None for types without."""
    packed = weight.packed
    if packed.ggml_type not in _CODES:
        return None
    blocks = packed.raw.reshape(-1, BLOCK_SIZES[packed.ggml_type][1]).copy()
    blocks[:, _CODES[packed.ggml_type]] = 0
    return weight.in_order(decode(blocks, packed.ggml_type, packed.shape))


def _squares_in_two_sums(x: np.ndarray, scaled: np.ndarray, minima: np.ndarray) -> np.ndarray:
    total = np.zeros((len(x), len(scaled)), x.dtype)
    for start in range(0, x.shape[1], _BLOCK):
        part = slice(start, start + _BLOCK)
        total += np.square(x[:, part] @ scaled[:, part].T)
        total += np.square(x[:, part] @ minima[:, part].T)
    return total
