"""Embedding: look up one row of a table per token id.

y[t] = weight[ids[t]]
dL/dweight[v] = sum of dL/dy[t] over all t with ids[t] = v        0 for tokens that do not occur
"""

import numpy as np
from jaxtyping import Float, Int

from llorch.ops.numerics import QuantMethod


def embedding(
    ids: Int[np.ndarray, " seq"], weight: Float[np.ndarray, "vocab hidden"] | QuantMethod
) -> Float[np.ndarray, "seq hidden"]:
    """Gather one row per token, ids from 0 to vocab - 1, as a new array."""
    return weight[ids] if isinstance(weight, np.ndarray) else weight.rows(ids)


def embedding_backward(
    grad: Float[np.ndarray, "seq hidden"], ids: Int[np.ndarray, " seq"], *, vocab_size: int
) -> Float[np.ndarray, "vocab hidden"]:
    """Compute the gradient by the table: each row gets the sum of the gradients of its tokens."""
    d_weight = np.zeros((vocab_size, grad.shape[1]), grad.dtype)
    np.add.at(d_weight, ids, grad)
    return d_weight
