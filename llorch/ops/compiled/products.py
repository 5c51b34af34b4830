"""Matrices whose products with a few rows, and whose decoded rows, are computed in C: `products.c`, called by NumPy.

    y = x W^T        sums are float32

A matrix of a ggml type is used as in its file: rows of blocks. A matrix of a quantised folder has codes that index a
table, and its scales, zero points and minima in arrays of their own.
"""

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from jaxtyping import Float32, Int, Shaped

from llorch.ops.compiled.library import find_compiler, library
from llorch.runtime.threads import n_cores, n_requested

KINDS = {  # `kind` in blocks.h; ggml's types by name, and the two tables
    "F32": 0, "BF16": 1, "Q8_0": 2, "Q4_0": 3, "Q4_K": 4, "Q6_K": 5, "TABLE_4": 6, "TABLE_8": 7, "F16": 8, "Q4_1": 9,
    "Q5_0": 10, "Q5_1": 11, "Q2_K": 12, "Q3_K": 13, "Q5_K": 14, "IQ4_NL": 15, "IQ4_XS": 16, "MXFP4": 17,
}  # fmt: skip
RUN = 32  # elements that are decoded together; a row has whole runs
FEW = 8  # up to this many rows, products from the stored matrix are faster than from decoded tiles
LARGE = 1 << 20  # elements; a smaller matrix stays in the processor's cache, where BLAS is as fast


@dataclass(frozen=True)
class CompiledMatrix:
    """Arguments of the C functions for one matrix; the arrays must not change, and be contiguous."""

    kind: str
    shape: tuple[int, ...]  # (out, in)
    codes: Shaped[np.ndarray, "out columns"]
    d: Float32[np.ndarray, "out groups"] | None = None
    shared: Shaped[np.ndarray, " bytes"] | None = None  # of a table: see `products.c`
    more: Float32[np.ndarray, "out groups"] | None = None  # zero points or minima of a table
    order: Int[np.ndarray, " in"] | None = None  # the matrix's column of each column of the codes; None: the same

    @property
    def is_dense(self) -> bool:
        """True for floats, which are multiplied faster by BLAS if there is more than one row."""
        return self.kind in ("F32", "BF16", "F16")

    def multiply(self, x: Float32[np.ndarray, "seq in"]) -> Float32[np.ndarray, "seq out"]:
        """Multiply a few rows; MemoryError if memory for their sums is lacking."""
        x = np.ascontiguousarray(x if self.order is None else x[:, self.order])
        y = np.empty((len(x), self.shape[0]), np.float32)
        compiled = threaded_library()
        if compiled.llorch_product(*self._arguments, x.ctypes.data, None, y.ctypes.data, len(x), *self.shape):
            raise MemoryError(f"linear: cannot allocate memory for {len(x)} rows")
        return y

    def decode_into(self, first: int, out: Float32[np.ndarray, "rows in"]) -> None:
        """Write decoded rows, from row `first` on, into a contiguous array."""
        threaded_library().llorch_decode(*self._arguments, out.ctypes.data, first, len(out), self.shape[1])
        if self.order is not None:
            out[:, self.order] = out.copy()

    @cached_property
    def _arguments(self) -> tuple[int | None, ...]:
        arrays = self.codes, self.d, self.shared, self.more
        return KINDS[self.kind], *(None if array is None else array.ctypes.data for array in arrays), 0


def threaded_library() -> ctypes.CDLL:
    """Return the library, with this thread's number of OpenMP threads as the user set it."""
    compiled = library()
    assert compiled is not None  # callers check this before they make a matrix
    compiled.omp_set_num_threads(n_requested() or n_cores())
    return compiled


@cache
def is_available() -> bool:
    """Tell if the library is built, or can be; without a compiler, do not warn: NumPy computes the same."""
    return find_compiler() is not None and library() is not None
