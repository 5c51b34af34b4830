"""Wrong tokens, by the name of the known mistake. Each must fail under its name."""

import numpy as np


def last_of_equals(row: np.ndarray) -> int:
    best = 0
    for i, logit in enumerate(row.tolist()):
        if logit >= row[best]:
            best = i
    return best


def smallest(row: np.ndarray) -> int:
    return int(np.argsort(row)[0])


def counted_from_one(row: np.ndarray) -> int:
    best, highest = 0, -np.inf
    for i, logit in enumerate(row.tolist(), start=1):
        if logit > highest:
            best, highest = i, logit
    return best


WRONG = {
    "argmax": {
        "argmax-last-of-ties": last_of_equals,
        "argmax-smallest": smallest,
        "argmax-counted-from-one": counted_from_one,
    }
}
UNTYPED: dict[str, str] = {}
