"""Wrong tokens, by the name of the known mistake. Each must fail under its name.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def last_of_equals(row: np.ndarray) -> int:
    best = 0
    for i, logit in enumerate(row.tolist()):
        if logit >= row[best]:
            best = i
    return best


WRONG = {
    "argmax": {
        "argmax-last-of-ties": last_of_equals,
    }
}
UNTYPED: dict[str, str] = {}
