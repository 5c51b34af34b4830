"""When an op computes in float64 and rounds once: whenever that costs next to nothing.

A float32 sum of 100 products is off by several rounding errors, a float64 sum rounded once by at most half of one.
Up to `WIDE_LIMIT` elements the wider arithmetic takes microseconds, so ops use it there; larger arrays are computed in
their own dtype at full speed. The dtype of the result is that of the input either way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

WIDE_LIMIT = 100_000  # elements of the largest operand
_limit = ContextVar("limit", default=WIDE_LIMIT)


@contextmanager
def own_dtype_only() -> Iterator[None]:
    """Compute everything in its own dtype while the context lasts, as if all arrays were large."""
    token = _limit.set(0)
    try:
        yield
    finally:
        _limit.reset(token)


def widen(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Float64 copies of the operands of one op, or, where one of them is large, all as they are."""
    limit = _limit.get()
    for array in arrays:
        if array.size > limit:
            return arrays
    return tuple([array.astype(np.float64, copy=False) for array in arrays])
