"""Wrong filters, by the name of the known mistake. Each must fail under its name.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def all_divided(logits: np.ndarray, history: np.ndarray, penalty: float) -> np.ndarray:
    out = logits.copy()
    out[np.unique(history)] /= penalty
    return out


WRONG = {
    "penalise": {
        "penalty-divides-negative-logits": all_divided,
    },
}
UNTYPED: dict[str, str] = {}
