"""Wrong rows, by the name of the known mistake. Each must fail under its name."""

import numpy as np


def first(logits: np.ndarray) -> np.ndarray:
    return logits[0].copy()


def before_last(logits: np.ndarray) -> np.ndarray:
    n = len(logits) - 1
    return logits[n - 1].copy()


def mean(logits: np.ndarray) -> np.ndarray:
    return logits.mean(axis=0)


WRONG = {
    "last_row": {
        "selected-first-row": first,
        "selected-row-before-last": before_last,
        "selected-mean-of-rows": mean,
    }
}
UNTYPED: dict[str, str] = {}
