"""Token ids of a dump that has none: rows of its embeddings are rows of the embedding table."""

import numpy as np

from llorch.files import Weights

_ROWS_AT_ONCE = 4096
_SAME_ROW = 1e-2  # of its norm: rows that were rounded to bfloat16 are within 2^-9


def ids_from_embedding(array: np.ndarray, weights: Weights) -> tuple[int, ...] | None:
    """The tokens whose embeddings these are.

    Args:
        array: The stage `embed`, (tokens, hidden).
        weights: Of the model.

    Returns:
        Of equal rows the lowest id; None where a row is no row of the table.
    """
    wanted = array.astype(np.float64)
    best = np.full(len(wanted), np.inf)
    ids = np.zeros(len(wanted), np.int64)
    table = weights.array("embed_tokens")
    for start in range(0, len(table), _ROWS_AT_ONCE):
        rows = table[start : start + _ROWS_AT_ONCE].astype(np.float64)
        squares = (rows**2).sum(1) - 2 * wanted @ rows.T  # less the wanted row's own, the same for all
        nearest = squares.argmin(1)
        distances = squares[np.arange(len(wanted)), nearest]
        ids = np.where(distances < best, start + nearest, ids)
        best = np.minimum(best, distances)
    errors = np.linalg.norm(wanted - table[ids], axis=1)
    is_row = errors <= _SAME_ROW * np.linalg.norm(wanted, axis=1)
    return tuple(map(int, ids)) if is_row.all() else None
