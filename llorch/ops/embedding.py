"""Embedding: a token id picks its row.

y[t] = weight[ids[t]]
"""

import numpy as np
from jaxtyping import Float, Int


def embedding(
    ids: Int[np.ndarray, " seq"], weight: Float[np.ndarray, "vocab hidden"]
) -> Float[np.ndarray, "seq hidden"]:
    """Gather one row per token.

    Args:
        ids: Token ids, 0 to vocab - 1.
        weight: The embedding table.

    Returns:
        A new array of the picked rows.
    """
    return weight[ids]
