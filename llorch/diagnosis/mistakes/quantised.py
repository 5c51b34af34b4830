"""Inputs of the mistakes of checkpoint 13: a stored matrix and its activations, and the right steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llorch.files.matrix import Matrix
from llorch.files.packed import Packed
from llorch.files.quant import ACTIVATION_TYPE, GGMLType, decode, decode_minima
from llorch.ops.linear import linear, product
from llorch.ops.rounding import HOST_VARIANT, ActivationKind, VariantName, block_sums, round_activations


@dataclass(frozen=True)
class QuantisedInputs:
    """All that a step of checkpoint 13 may read."""

    kind: GGMLType
    blocks: np.ndarray  # the matrix, one block per row
    shape: tuple[int, ...]
    x: np.ndarray  # activations, (seq, in)
    variant: VariantName = HOST_VARIANT  # the build of ggml whose rounding counts

    @property
    def activations(self) -> ActivationKind:
        """Type to which the inputs are rounded."""
        return ACTIVATION_TYPE[self.kind]

    def decoded(self) -> np.ndarray:
        """Decode the matrix."""
        return decode(self.blocks, self.kind, self.shape)

    def with_blocks(self, blocks: np.ndarray) -> "QuantisedInputs":
        """Replace the bytes of the matrix."""
        return replace(self, blocks=blocks)

    def rounded(self, kind: ActivationKind | None = None, variant: VariantName | None = None) -> np.ndarray:
        """Round the activations that the matrix is multiplied with."""
        return round_activations(self.x, kind or self.activations, variant or self.variant)

    def product(
        self, *, matrix: np.ndarray | None = None, rounded: np.ndarray | None = None, sums: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute the product; arguments replace the decoded matrix, the rounded activations or the sums for minima."""
        matrix = self.decoded() if matrix is None else matrix
        values = self.rounded() if rounded is None else rounded
        y = product(values, matrix)
        if self.activations == "Q8_1" and rounded is None:
            sums = block_sums(self.x, self.variant) if sums is None else sums
            minima = decode_minima(self.blocks, self.kind, self.shape)
            y = y + product(sums - values.reshape(len(values), -1, 32).sum(axis=-1), minima)
        return y.astype(self.x.dtype, copy=False)


def _right_product(s: QuantisedInputs) -> np.ndarray:
    packed = Packed(s.kind.name, Path(), s.blocks.reshape(-1), s.kind, s.shape)
    return linear(s.x, Matrix(packed, round_inputs=True))


RIGHT: Mapping[str, Callable[[QuantisedInputs], np.ndarray]] = {
    "decode": QuantisedInputs.decoded,
    "rounding": QuantisedInputs.rounded,
    "product": _right_product,
}

Wrong = Callable[[QuantisedInputs, str], np.ndarray]


def in_blocks(spoil: Callable[[QuantisedInputs], QuantisedInputs]) -> Wrong:
    """Make a mistake from a function that spoils the bytes of the blocks."""

    def wrong(s: QuantisedInputs, step: str) -> np.ndarray:
        spoilt = spoil(s)
        return spoilt.decoded() if step == "decode" else spoilt.product()

    return wrong


def in_matrix(decode_wrongly: Callable[[QuantisedInputs], np.ndarray]) -> Wrong:
    """Make a mistake from a wrong decoding; it also changes the product with that matrix."""

    def wrong(s: QuantisedInputs, step: str) -> np.ndarray:
        matrix = decode_wrongly(s)
        return matrix if step == "decode" else s.product(matrix=matrix)

    return wrong


def in_rounding(round_wrongly: Callable[[QuantisedInputs], np.ndarray]) -> Wrong:
    """Make a mistake from a wrong rounding; it also changes the product.

    The product then uses the sums of the wrongly rounded activations.
    """

    def wrong(s: QuantisedInputs, step: str) -> np.ndarray:
        rounded = round_wrongly(s)
        return rounded if step == "rounding" else s.product(rounded=rounded)

    return wrong
