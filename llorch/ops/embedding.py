"""Embedding: a token id picks its row.

y[t] = weight[ids[t]]
"""

import numpy as np
from jaxtyping import Float, Int

from llorch.numerics import QuantMethod


def embedding(
    ids: Int[np.ndarray, " seq"], weight: Float[np.ndarray, "vocab hidden"] | QuantMethod
) -> Float[np.ndarray, "seq hidden"]:
    """Gather one row per token.

    Args:
        ids: Token ids, 0 to vocab - 1.
        weight: The embedding table.

    Returns:
        A new array of the picked rows.
    """
    return weight[ids] if isinstance(weight, np.ndarray) else weight.rows(ids)
