"""Wrong embeddings, by the name of the known mistake. Each must fail under its name.

The page plants one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def axes_as_in_the_file(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    vocab, hidden = table.shape
    return np.ascontiguousarray(table.reshape(hidden, vocab)[:, ids].T)


WRONG = {
    "embedding": {
        "embedding-dimensions-not-reversed": axes_as_in_the_file,
    }
}
UNTYPED = {"embedding-from-lm-head": "the function gets its table and does not choose between the two"}
