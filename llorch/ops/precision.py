"""Float64 sums for small operands: an op computes in float64 and rounds once if that costs next to nothing.

A float32 sum of 100 products has an error of several roundings, a float64 sum rounded once at most half of one.
Up to `WIDE_LIMIT` elements float64 costs microseconds, so ops use it. Larger arrays are computed in the dtype of the
input at full speed. The output has the dtype of the input either way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

WIDE_LIMIT = 100_000  # elements of the largest operand
_limit = ContextVar("limit", default=WIDE_LIMIT)


@contextmanager
def own_dtype_only() -> Iterator[None]:
    """Switch the float64 sums off within the context, as if all arrays were large."""
    token = _limit.set(0)
    try:
        yield
    finally:
        _limit.reset(token)


def widen(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the operands of one op in float64, or unchanged if one of them is large."""
    limit = _limit.get()
    for array in arrays:
        if array.size > limit:
            return arrays
    return tuple([array.astype(np.float64, copy=False) for array in arrays])
