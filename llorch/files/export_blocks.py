"""Lossless repacking of quantised matrices: a folder's codes and scales become a block type of ggml.

Codes and scales are repacked by rows without rounding. The rows of q and k get the order of GGUF files. A matrix is
decoded if it shares a tensor of the GGUF file with other matrices, or has another order there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from llorch.files.packed import Packed
from llorch.files.quant import GGMLType
from llorch.files.quantised.blocks import block_type, blocks
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.files.tensor_names import Weight, gguf_tensors, interleave
from llorch.files.tensor_storage import AS_IS
from llorch.files.weights import Weights


@dataclass(frozen=True, slots=True)
class Blocks:
    """Quantised matrices by canonical name: `kept` as blocks with their type, or `decoded` with the reason."""

    kept: dict[str, GGMLType] = field(default_factory=dict)
    decoded: dict[str, str] = field(default_factory=dict)


def find_blocks(weights: Weights) -> Blocks:
    """Find the block type of every quantised matrix; empty if the model is not a quantised folder."""
    plan = Blocks()
    for tensor in gguf_tensors(weights.config):
        for weight in tensor.weights:
            if not isinstance(weights.as_stored(weight.name), QuantisedMatrix):
                continue
            kind = _block_type(weights, weight) if len(tensor.weights) == 1 else "in one tensor with others"
            if isinstance(kind, str):
                plan.decoded[weight.name] = kind
            else:
                plan.kept[weight.name] = kind
    return plan


def block_bytes(weights: Weights, weight: Weight, kind: GGMLType) -> Iterator[np.ndarray]:
    """Yield the blocks of a matrix, or of each expert of a stack, in the row order of GGUF files."""
    for matrix in _stored_matrices(weights, weight):
        assert isinstance(matrix, QuantisedMatrix)
        matrix.require_scales()
        if weight.interleaved_heads:
            matrix = matrix.picked(interleave(np.arange(weight.shape[0]), weight.interleaved_heads))
        yield blocks(matrix, kind).raw
    weights.search_zeros(weight.name)


def _block_type(weights: Weights, weight: Weight) -> GGMLType | str:
    """Return the block type that represents a weight exactly, or the reason why there is none."""
    if weight.stays_f32:
        return "GGUF files store it as F32"
    if weights.is_changed(weight.name):
        return "an adapter is merged into it"
    if weight.in_gguf != AS_IS or weights.slots[weight.name].layout.rows is not None:
        return "its rows or columns have another order in GGUF files"
    kinds = {block_type(m) if isinstance(m, QuantisedMatrix) else "floats" for m in _stored_matrices(weights, weight)}
    return kinds.pop() if len(kinds) == 1 else "experts of several types"


def _stored_matrices(weights: Weights, weight: Weight) -> Iterator[Packed]:
    if len(weight.shape) == 2:
        yield weights.as_stored(weight.name)
        return
    for expert in range(weight.shape[0]):
        yield weights.expert_as_stored(weight.name, expert)
