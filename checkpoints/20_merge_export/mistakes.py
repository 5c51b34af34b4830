"""Wrong code for merging and export, by the name of the known mistake.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def left_in_halves(rows: np.ndarray, n_heads: int) -> np.ndarray:
    return rows.copy()


WRONG = {
    "interleave": {"export-b-rows-not-permuted": left_in_halves},
}
UNTYPED: dict[str, str] = {}
