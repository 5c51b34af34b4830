"""Products of stored matrices: packed matrices, or matrices whose inputs are rounded first.

A packed matrix is multiplied in C from its blocks, or decoded tile by tile at every use. Inputs are rounded as in ggml,
or by the scheme of a quantised folder:

    y = round(x) @ decode(blocks).T

ggml multiplies integer codes and scales the sum. The exact product is the same; in float32 it differs by the rounding
of a sum. Q4_1 and Q5_1 differ more: ggml multiplies their minima by the *sum* of a block of activations, and rounds the
sum to float16 independently of the activations.

Source: llama.cpp ggml/src/ggml-cpu (vec_dot of each type); llorch.ops.rounding.
"""

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from llorch.files.compiled import compiled_matrix
from llorch.files.packed import Packed
from llorch.files.quant import ACTIVATION_TYPE, BLOCK_SIZES, decode_minima
from llorch.files.tensor_names import undo_interleave
from llorch.ops.compiled.ggml import ggml_kernels
from llorch.ops.compiled.products import FEW, CompiledMatrix
from llorch.ops.linear import product
from llorch.ops.numerics import ProductKernels
from llorch.ops.precision import WIDE_LIMIT
from llorch.ops.rounding import ActivationKind, block_sums, round_activations
from llorch.ops.scheme_rounding import SchemeRounding, round_as_scheme

_WITH_SUMS = "Q8_1"  # the only activation type with a rounded sum of each block


class Matrix:
    """Matrix over a stored tensor, with its own product; a `QuantMethod` of `llorch.ops.numerics`."""

    def __init__(
        self,
        packed: Packed,
        *,
        dtype: type[np.floating] = np.float32,
        round_inputs: bool,
        scheme: SchemeRounding | None = None,
        decoded: np.ndarray | None = None,
        interleaved_heads: int = 0,
        columns: np.ndarray | None = None,
        kernels: ProductKernels = "own",
    ) -> None:
        """Wrap a stored matrix; FormatError NonFinite for a NaN block scale.

        `dtype` is the dtype of the run and of embedding rows. `round_inputs` rounds activations as ggml does for this
        type, `scheme` as a quantised folder does. `decoded` is the matrix in Hugging Face's order; None decodes at
        every use. The stored rows of `interleaved_heads` are in pairs. `columns` has the stored index of each of
        Hugging Face's columns; `decoded` then has the stored column order. `kernels` of ggml round and multiply float32
        activations with the stored rows; NoKernels if they cannot be used.
        """
        self.packed = packed
        self._dtype = dtype
        self._decoded = decoded
        self._heads = interleaved_heads
        self._columns = columns
        self._stored_order = None if columns is None else np.argsort(columns)
        self.shape = packed.shape
        self.n_bytes = packed.n_bytes
        self._kind: ActivationKind = ACTIVATION_TYPE[packed.ggml] if round_inputs else "F32"
        self._scheme = scheme
        self.activations: str = self._kind if scheme is None else str(scheme)
        packed.require_scales()
        self._ggml = ggml_kernels().matrix(packed.ggml, packed.by_row, packed.shape[1]) if kernels == "ggml" else None

    def forward(self, x: Float[np.ndarray, "seq in"]) -> Float[np.ndarray, "seq out"]:
        """Round, multiply tile by tile, in the dtype of `x`; FormatError NonFinite if a weight is NaN or infinite."""
        x = self.arranged(x)
        if self._ggml is not None and x.dtype == np.float32:
            y = self._ggml.multiply(x)
            if np.isfinite(y).all():  # else the form below names the weight
                return undo_interleave(y.T, self._heads).T if self._heads else y
        rounded_x = self._round(x)
        if self._decoded is not None:
            return self._with_sums(x, rounded_x, product(rounded_x, self._decoded)).astype(x.dtype, copy=False)
        y = self._with_sums(x, rounded_x, self._multiply(rounded_x)).astype(x.dtype, copy=False)
        return undo_interleave(y.T, self._heads).T if self._heads else y

    def _multiply(self, x: Float[np.ndarray, "seq in"]) -> Float[np.ndarray, "seq out"]:
        """Multiply by the packed matrix, in the order of its rows."""
        compiled = self._compiled
        if compiled is not None and x.dtype == np.float32 and len(x) <= (1 if compiled.is_dense else FEW):
            y = compiled.multiply(x)
            if not np.isfinite(y).all():
                for start, tile in self._tiles():
                    self.packed.require_finite(start, tile)
            return y
        y = np.empty((len(x), self.shape[0]), x.dtype)
        for start, tile in self._tiles():
            with np.errstate(invalid="ignore"):  # checked below
                products = product(x, tile)
            if not np.isfinite(products).all():
                self.packed.require_finite(start, tile)
            y[:, start : start + len(tile)] = products
        return y

    @cached_property
    def _compiled(self) -> CompiledMatrix | None:
        is_large = math.prod(self.shape) > WIDE_LIMIT  # a product with a smaller matrix is summed in float64
        return compiled_matrix(self.packed) if is_large and self._dtype is np.float32 else None

    def _tiles(self) -> Iterator[tuple[int, Float[np.ndarray, "rows in"]]]:
        """Yield the tiles of the packed matrix, as `Packed.tiles` does."""
        if self._compiled is None:
            yield from self.packed.tiles()
            return
        step = self.packed.rows_at_once
        buffer = np.empty((step, self.shape[1]), np.float32)
        for start in range(0, self.shape[0], step):
            tile = buffer[: self.shape[0] - start]
            self._compiled.decode_into(start, tile)
            yield start, tile

    def _round(self, x: np.ndarray) -> np.ndarray:
        if self._scheme is not None:
            return round_as_scheme(x, self._scheme)
        return x if self._kind == "F32" else round_activations(x, self._kind)

    def arranged(self, x: Float[np.ndarray, "seq in"]) -> Float[np.ndarray, "seq in"]:
        """Reorder inputs to the column order of the file, the order of its blocks."""
        return x if self._stored_order is None else np.ascontiguousarray(x[:, self._stored_order])

    def dequantize(self) -> Float[np.ndarray, "out in"]:
        """Decode the matrix to float32, in Hugging Face's order."""
        rows = self.in_order(self.packed.decode()) if self._decoded is None else self._decoded
        return rows if self._columns is None else rows[:, self._columns]

    def in_order(self, rows: np.ndarray) -> np.ndarray:
        """Reorder rows from the file's order to Hugging Face's order."""
        return undo_interleave(rows, self._heads) if self._heads else rows

    def rows(self, ids: Int[np.ndarray, " seq"]) -> Float[np.ndarray, "seq in"]:
        """Decode embedding rows in the dtype of the run; FormatError NonFinite."""
        if self._decoded is not None:
            return self._decoded[ids].astype(self._dtype, copy=False)
        rows = self._decode_rows(ids)
        for row, token_id in zip(rows, ids, strict=True):
            self.packed.require_finite(int(token_id), row[None])
        return rows.astype(self._dtype, copy=False)

    def _decode_rows(self, ids: Int[np.ndarray, " seq"]) -> Float[np.ndarray, "seq in"]:
        if self._compiled is None:
            return self.packed.decode_rows(ids)
        rows = np.empty((len(ids), self.shape[1]), np.float32)
        for index, token_id in enumerate(ids):
            self._compiled.decode_into(range(self.shape[0])[token_id], rows[index : index + 1])
        return rows

    def _with_sums(self, x: np.ndarray, rounded: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Correct the minima's part of the product: ggml uses rounded block sums, not sums of rounded inputs."""
        if self._kind != _WITH_SUMS:
            return y
        block = BLOCK_SIZES[self.packed.ggml][0]
        sums = rounded.reshape(len(x), -1, block).sum(axis=-1, dtype=np.float64)
        return y + product((block_sums(x) - sums).astype(x.dtype), self._minima)

    @cached_property
    def _minima(self) -> np.ndarray:
        packed = self.packed
        minima = decode_minima(packed.raw, packed.ggml, packed.shape)
        in_order = self._decoded is not None and self._heads
        return undo_interleave(minima, self._heads) if in_order else minima
