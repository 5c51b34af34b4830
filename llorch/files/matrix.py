"""Matrices that multiply themselves, because they lie packed or because their inputs are rounded first.

Packed ones are decoded tile by tile at every use. Inputs are rounded when that is asked for, as ggml does it or as the
scheme of a quantised folder says:

    y = round(x) @ decode(blocks).T

ggml multiplies the integers of both sides and scales the sum; in real numbers that is the same product, in float32 it
differs by the rounding of a sum. Q4_1 and Q5_1 differ more: ggml multiplies their minima with the *sum* of a block of
activations, which it rounds to float16 apart from the activations.

Source: llama.cpp ggml/src/ggml-cpu (vec_dot of each type); llorch.ops.rounding.
"""

from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from llorch.files.packed import Packed
from llorch.files.quant import ACTIVATION_TYPE, BLOCK_SIZES, decode_minima
from llorch.files.tensor_names import undo_interleave
from llorch.ops.linear import product
from llorch.ops.rounding import ActivationKind, block_sums, round_activations
from llorch.ops.scheme_rounding import SchemeRounding, round_as_scheme

_SUMMED = "Q8_1"  # the one activation type with a rounded sum beside the codes


class Matrix:
    """A `QuantMethod` over a stored tensor."""

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
    ) -> None:
        """Wrap a stored matrix; FormatError NonFinite for a block scale that means NaN.

        `dtype` is that of the run, in which rows of an embedding are handed out; `round_inputs` rounds activations as
        ggml does for this type, `scheme` as a quantised folder says; `decoded` is the whole matrix in Hugging Face's
        order, None decodes at every use; the file holds the rows of `interleaved_heads` in pairs. `columns` says where
        in the file each of Hugging Face's columns is; `decoded` has those of the file then.
        """
        self.packed = packed
        self._dtype = dtype
        self._decoded = decoded
        self._heads = interleaved_heads
        self._columns = columns
        self._back = None if columns is None else np.argsort(columns)
        self.shape = packed.shape
        self.n_bytes = packed.n_bytes
        self._kind: ActivationKind = ACTIVATION_TYPE[packed.ggml] if round_inputs else "F32"
        self._scheme = scheme
        self.activations: str = self._kind if scheme is None else str(scheme)
        packed.require_scales()

    def forward(self, x: Float[np.ndarray, "seq in"]) -> Float[np.ndarray, "seq out"]:
        """Round, multiply tile by tile, in the dtype of `x`; FormatError NonFinite when a weight is NaN or infinite."""
        x = self.arranged(x)
        rounded = self._rounded(x)
        if self._decoded is not None:
            return self._with_sums(x, rounded, product(rounded, self._decoded)).astype(x.dtype, copy=False)
        y = np.empty((len(x), self.shape[0]), x.dtype)
        for start, tile in self.packed.tiles():
            with np.errstate(invalid="ignore"):  # looked for below
                part = product(rounded, tile)
            if not np.isfinite(part).all():
                self.packed.require_finite(start, tile)
            y[:, start : start + len(tile)] = part
        y = self._with_sums(x, rounded, y).astype(x.dtype, copy=False)
        return undo_interleave(y.T, self._heads).T if self._heads else y

    def _rounded(self, x: np.ndarray) -> np.ndarray:
        if self._scheme is not None:
            return round_as_scheme(x, self._scheme)
        return x if self._kind == "F32" else round_activations(x, self._kind)

    def arranged(self, x: Float[np.ndarray, "seq in"]) -> Float[np.ndarray, "seq in"]:
        """Put inputs into the column order of the file, which is the order of its blocks."""
        return x if self._back is None else np.ascontiguousarray(x[:, self._back])

    def dequantize(self) -> Float[np.ndarray, "out in"]:
        """Decode everything to float32, in Hugging Face's order."""
        rows = self.in_order(self.packed.decode()) if self._decoded is None else self._decoded
        return rows if self._columns is None else rows[:, self._columns]

    def in_order(self, rows: np.ndarray) -> np.ndarray:
        """Reorder rows from the order of the file to the order of Hugging Face."""
        return undo_interleave(rows, self._heads) if self._heads else rows

    def rows(self, ids: Int[np.ndarray, " seq"]) -> Float[np.ndarray, "seq in"]:
        """Decode some rows of an embedding in the dtype of the run; FormatError NonFinite."""
        if self._decoded is not None:
            return self._decoded[ids].astype(self._dtype, copy=False)
        rows = self.packed.decode_rows(ids)
        for row, token in zip(rows, ids, strict=True):
            self.packed.require_finite(int(token), row[None])
        return rows.astype(self._dtype, copy=False)

    def _with_sums(self, x: np.ndarray, rounded: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Replace the sums of rounded activations, by which minima were multiplied, with ggml's rounded sums."""
        if self._kind != _SUMMED:
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
