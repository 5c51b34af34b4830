"""Matrices whose products with a few rows, and whose decoded rows, are computed in C: `products.c`, called by NumPy.

    y = x W^T        sums are float32

A matrix of a ggml type is used as in its file: rows of blocks. A matrix of a quantised folder has codes that index a
table, and its scales, zero points and minima in arrays of their own.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Shaped

from llorch.ops.compiled.library import library
from llorch.runtime.threads import n_cores, n_requested

KINDS = {"F32": 0, "BF16": 1, "TABLE_4": 6, "TABLE_8": 7, "F16": 8}  # `kind` in products.c
FEW = 8  # up to this many rows, products from the stored matrix are faster than from decoded tiles


@dataclass(frozen=True, slots=True)
class CompiledMatrix:
    """Arguments of the C functions for one matrix; the arrays must not change, and be contiguous."""

    kind: str
    shape: tuple[int, int]  # (out, in)
    codes: Shaped[np.ndarray, "out columns"]
    d: Float32[np.ndarray, "out groups"] | None = None
    shared: Shaped[np.ndarray, " bytes"] | None = None  # of a table: see `products.c`
    more: Float32[np.ndarray, "out groups"] | None = None  # zero points or minima of a table

    def multiply(self, x: Float32[np.ndarray, "seq in"]) -> Float32[np.ndarray, "seq out"]:
        """Multiply a few rows; MemoryError if memory for their sums is lacking."""
        x, y = np.ascontiguousarray(x), np.empty((len(x), self.shape[0]), np.float32)
        compiled = threaded_library()
        if compiled.llorch_product(*self._arguments(), x.ctypes.data, None, y.ctypes.data, len(x), *self.shape):
            raise MemoryError(f"linear: cannot allocate memory for {len(x)} rows")
        return y

    def decode_into(self, first: int, out: Float32[np.ndarray, "rows in"]) -> None:
        """Write decoded rows, from row `first` on, into a contiguous array."""
        threaded_library().llorch_decode(*self._arguments(), out.ctypes.data, first, len(out), self.shape[1])

    def _arguments(self) -> tuple[int | None, ...]:
        arrays = self.codes, self.d, self.shared, self.more
        return KINDS[self.kind], *(None if array is None else array.ctypes.data for array in arrays), 0


def threaded_library() -> ctypes.CDLL:
    """Return the library, with this thread's number of OpenMP threads as the user set it."""
    compiled = library()
    assert compiled is not None  # callers check this before they make a matrix
    compiled.omp_set_num_threads(n_requested() or n_cores())
    return compiled
