"""Known mistakes in rounding the activations of a product with a quantised GGUF matrix, as ggml computes it.

A product has three steps: `decode` the matrix, `rounding` of the activations, `product`; `RIGHT` has the right ones.
Their inputs are `QuantisedInputs`, in `quantised_blocks` too. `cases` are matrix types; `mistake` explains all fields.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake, Wrong
from llorch.files.matrix import Matrix
from llorch.files.packed import Packed
from llorch.files.quant import ACTIVATION_TYPE, GGMLType, decode, decode_minima
from llorch.ops.linear import linear, product
from llorch.ops.rounding import (
    BLOCK_SIZE,
    HOST_VARIANT,
    ActivationKind,
    BlockKind,
    VariantName,
    block_sums,
    quantize_blocks,
    round_activations,
)


@dataclass(frozen=True)
class QuantisedInputs:
    """Inputs of a step of a quantised product: a stored matrix and its activations."""

    kind: GGMLType
    blocks: np.ndarray  # the matrix, one block per row
    shape: tuple[int, ...]
    x: np.ndarray  # activations, (seq, in)
    variant: VariantName = HOST_VARIANT  # ggml build that defines the rounding

    @property
    def activations(self) -> ActivationKind:
        """Type that the activations are rounded to."""
        return ACTIVATION_TYPE[self.kind]

    def decoded(self) -> np.ndarray:
        """Decode the matrix."""
        return decode(self.blocks, self.kind, self.shape)

    def rounded(self, kind: ActivationKind | None = None, variant: VariantName | None = None) -> np.ndarray:
        """Round the activations as the product does."""
        return round_activations(self.x, kind or self.activations, variant or self.variant)

    def product(
        self, *, matrix: np.ndarray | None = None, rounded: np.ndarray | None = None, sums: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute the product; arguments replace the decoded matrix, the rounded activations or the sums for minima."""
        matrix = self.decoded() if matrix is None else matrix
        values = self.rounded() if rounded is None else rounded
        y = product(values, matrix)
        if self.activations == "Q8_1" and rounded is None:  # minima are multiplied by sums that Q8_1 stores
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


def in_blocks(change_blocks: Callable[[QuantisedInputs], QuantisedInputs]) -> Wrong[QuantisedInputs]:
    """Make a mistake from a function that changes the bytes of the blocks."""
    return lambda s, step: change_blocks(s).decoded() if step == "decode" else change_blocks(s).product()


def in_matrix(decode_wrongly: Callable[[QuantisedInputs], np.ndarray]) -> Wrong[QuantisedInputs]:
    """Make a mistake from a wrong decoder; it also changes the product with that matrix."""
    return lambda s, step: decode_wrongly(s) if step == "decode" else s.product(matrix=decode_wrongly(s))


def in_rounding(round_wrongly: Callable[[QuantisedInputs], np.ndarray]) -> Wrong[QuantisedInputs]:
    """Make a mistake from a wrong rounding; it also changes the product.

    The product then uses the sums of the wrongly rounded activations.
    """
    return lambda s, step: round_wrongly(s) if step == "rounding" else s.product(rounded=round_wrongly(s))


def _blocks_and_scales(s: QuantisedInputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return activations in blocks, with their scales before and after storage."""
    kind: BlockKind = s.activations  # pyright: ignore[reportAssignmentType]
    blocks = s.x.reshape(-1, BLOCK_SIZE[kind])
    exact_scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    stored_scale = exact_scale if kind == "Q8_K" else exact_scale.astype(np.float16).astype(np.float32)
    return blocks, exact_scale, stored_scale


def scale_not_stored(s: QuantisedInputs) -> np.ndarray:
    """Multiply the codes by the float32 scale instead of the stored scale."""
    kind: BlockKind = s.activations  # pyright: ignore[reportAssignmentType]
    codes, _ = quantize_blocks(s.x, kind, s.variant)
    blocks, exact, _ = _blocks_and_scales(s)
    return (codes.reshape(blocks.shape).astype(np.float32) * exact).reshape(s.x.shape)


def codes_truncated(s: QuantisedInputs) -> np.ndarray:
    """Truncate codes towards zero."""
    blocks, exact_scale, stored_scale = _blocks_and_scales(s)
    with np.errstate(all="ignore"):
        codes = np.trunc(np.where(exact_scale > 0, blocks / exact_scale, 0))
    return (codes * stored_scale).astype(np.float32).reshape(s.x.shape)


def codes_up_to_128(s: QuantisedInputs) -> np.ndarray:
    """Compute the scale as the maximum over 128 instead of 127."""
    blocks, exact_scale, _ = _blocks_and_scales(s)
    scale = exact_scale * np.float32(127 / 128)
    stored_scale = scale if s.activations == "Q8_K" else scale.astype(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        codes = np.clip(np.rint(np.where(scale > 0, blocks / scale, 0)), -128, 127)
    return (codes * stored_scale).astype(np.float32).reshape(s.x.shape)


def sums_not_rounded(s: QuantisedInputs, step: str) -> np.ndarray:
    """Multiply minima by sums of the decoded activations, as after decoding both operands."""
    return s.product(rounded=s.rounded())


def sums_of_inputs(s: QuantisedInputs, step: str) -> np.ndarray:
    """Multiply minima by sums of the activations before their rounding."""
    return s.product(sums=s.x.reshape(len(s.x), -1, 32).sum(axis=-1).astype(np.float16).astype(np.float32))


ROUNDED = ("rounding", "product")
Q8_0_INPUTS, Q8_1_INPUTS, Q8_K_INPUTS = (
    tuple(kind.name for kind, rounded in ACTIVATION_TYPE.items() if rounded == activation_type)
    for activation_type in ("Q8_0", "Q8_1", "Q8_K")
)
BLOCK_INPUTS = (*Q8_0_INPUTS, *Q8_1_INPUTS, *Q8_K_INPUTS)

ROUNDINGS: tuple[Mistake[QuantisedInputs], ...] = (
    Mistake(
        name="activation-not-rounded", stages=ROUNDED, cases=("F16", "BF16", *BLOCK_INPUTS),
        wrong=in_rounding(lambda s: s.x),
        diagnosis="Activations were multiplied as they are; llama.cpp rounds them to the partner type of the weights "
        "first.",
    ),
    Mistake(
        name="activation-in-blocks-of-32", stages=ROUNDED, cases=Q8_K_INPUTS,
        wrong=in_rounding(lambda s: s.rounded("Q8_0")),
        diagnosis="Activations were rounded to Q8_0; K and IQ types go with Q8_K, blocks of 256 with a float32 scale.",
    ),
    Mistake(
        name="activation-in-blocks-of-256", stages=("product",), cases=(*Q8_0_INPUTS, *Q8_1_INPUTS),
        wrong=in_rounding(lambda s: s.rounded("Q8_K")),
        diagnosis="Activations were rounded to Q8_K; types in blocks of 32 go with Q8_0, those with a minimum with "
        "Q8_1.",
    ),
    Mistake(
        name="activation-float16-for-bfloat16", stages=ROUNDED, cases=("BF16",),
        wrong=in_rounding(lambda s: s.rounded("F16")),
        diagnosis="Activations were rounded to float16; BF16 weights go with bfloat16 ones.",
    ),
    Mistake(
        name="activation-bfloat16-for-float16", stages=ROUNDED, cases=("F16",),
        wrong=in_rounding(lambda s: s.rounded("BF16")),
        diagnosis="Activations were rounded to bfloat16; F16 weights go with float16 ones.",
    ),
    Mistake(
        name="activation-bfloat16-cut-off", stages=ROUNDED, cases=("BF16",),
        wrong=in_rounding(lambda s: (s.x.view(np.uint32) & np.uint32(0xFFFF_0000)).view(np.float32)),
        diagnosis="The lower 16 bits were cut off; bfloat16 is rounded to nearest, ties to even.",
    ),
    Mistake(
        name="activation-scale-not-float16", stages=ROUNDED, cases=(*Q8_0_INPUTS, *Q8_1_INPUTS),
        wrong=in_rounding(scale_not_stored),
        diagnosis="Codes were multiplied by the float32 scale; Q8_0 and Q8_1 store it as float16, and that counts.",
    ),
    Mistake(
        name="activation-codes-cut-off", stages=ROUNDED, cases=BLOCK_INPUTS, wrong=in_rounding(codes_truncated),
        diagnosis="Codes were cut off towards zero; they are rounded to nearest.",
    ),
    Mistake(
        name="activation-scale-of-128", stages=ROUNDED, cases=BLOCK_INPUTS, wrong=in_rounding(codes_up_to_128),
        diagnosis="The scale is the maximum over 128; it is over 127, so that codes are symmetric.",
    ),
    Mistake(
        name="activation-halves-away-from-zero", stages=("rounding",), cases=("Q8_0", "Q4_1"),
        wrong=in_rounding(lambda s: s.rounded(variant="generic")),
        diagnosis="Codes were computed as plain C does it, by the reciprocal of the scale and with halves away from "
        "zero; with SIMD on x86 halves go to even.",
    ),
    Mistake(
        name="activation-by-reciprocal", stages=("rounding",), cases=("Q8_0", "Q4_1"),
        wrong=in_rounding(lambda s: s.rounded(variant="neon")),
        diagnosis="Activations were multiplied by the reciprocal of the scale, as on ARM; x86 multiplies by 127 over "
        "the maximum, and edges between two codes differ.",
    ),
    Mistake(
        name="block-sums-not-rounded", stages=("product",), cases=Q8_1_INPUTS, wrong=sums_not_rounded,
        diagnosis="Minima were multiplied by the sum of the rounded activations; Q8_1 keeps that sum as float16, made "
        "from the scale before it is rounded.",
    ),
    Mistake(
        name="block-sums-of-inputs", stages=("product",), cases=Q8_1_INPUTS, wrong=sums_of_inputs,
        diagnosis="Minima were multiplied by the sum of the activations themselves; Q8_1 sums the codes.",
    ),
)  # fmt: skip
