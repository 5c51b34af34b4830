"""Wrong rows, by the name of the known mistake. Each must fail under its name.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def before_last(logits: np.ndarray) -> np.ndarray:
    n = len(logits) - 1
    return logits[n - 1].copy()


WRONG = {
    "last_row": {
        "selected-row-before-last": before_last,
    }
}
UNTYPED: dict[str, str] = {}
