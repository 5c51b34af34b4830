"""Table of the kernels that replace torch's own on CUDA; importing it imports Triton.

Packed layers (quantised matrices in their codes) with the same input multiply one row in one launch. In a launch of its
own, the key projection of a model with grouped heads would end before the memory is busy.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llorch.pytorch.causal_lm import Block
from llorch.pytorch.kernels import TRAINED, KernelTable
from llorch.pytorch.kernels.packing import KIND_NAMES
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.kernels.triton import trained
from llorch.pytorch.kernels.triton.decode_attention import decode_attention
from llorch.pytorch.kernels.triton.dense_matvec import DenseLinear, SharedInputProducts, multiply_row, share_launch
from llorch.pytorch.kernels.triton.fused import FusedRMSNorm, rotate_and_cache, swiglu
from llorch.pytorch.kernels.triton.graph import GraphedSteps
from llorch.pytorch.kernels.triton.quantised import back_by_library, multiply, multiply_by_library
from llorch.pytorch.kernels.triton.quantised_matvec import multiply_chosen, multiply_few_rows
from llorch.pytorch.models.experts import QuantisedExperts


class PackedLinear(QuantisedLinear):
    """Packed layer that multiplies by kernels; for one row they do not round the matrix to the dtype of the input."""

    def __init__(self, layer: QuantisedLinear) -> None:
        """Share the fields and the bias of a `QuantisedLinear`."""
        super().__init__(layer.fields, layer.ggml_type)
        self.bias, self.multiply = layer.bias, multiply
        self.shared_launch: SharedInputProducts | None = None

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply in the dtype of `x`."""
        needs_gradient = torch.is_grad_enabled() and x.requires_grad
        is_row = x.shape[-1] == x.numel() == self.in_features
        if self.shared_launch is None or not is_row or x.dtype is torch.float64 or needs_gradient:
            return super().forward(x)
        return self.shared_launch.product(self, x)


def join_alike(layers: Sequence[PackedLinear]) -> None:
    """Let layers of one input share a launch if their matrices have the same kind and fields; see `StackedLayers`."""
    groups = defaultdict(list)
    for layer in layers:
        layout = tuple((name, field.dtype, field.shape[1]) for name, field in layer.fields.items())
        groups[layer.ggml_type, layer.bias is None, layout].append(layer)
    for group in groups.values():
        if len(group) > 1:
            StackedLayers(group)


class StackedLayers:
    """Matrices of some layers, stacked in memory; each layer has a view of its rows."""

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        """Move the fields of layers, all with a bias or none, into common tensors, and share their launch."""
        self._kind, self._sizes = layers[0].ggml_type, [layer.out_features for layer in layers]
        self._fields = {name: torch.cat([layer.fields[name] for layer in layers]) for name in layers[0].fields}
        for name, field in self._fields.items():
            for layer, rows in zip(layers, field.split(self._sizes), strict=True):
                layer.register_buffer(name, rows.view(layer.get_buffer(name).dtype))
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = torch.cat(tuple(biases)) if biases else None
        if self._bias is not None:
            for layer, layer_bias in zip(layers, self._bias.split(self._sizes), strict=True):
                layer.bias = nn.Parameter(layer_bias, requires_grad=False)
        self._addresses = self._list_addresses(layers)
        share_launch(layers, self.multiply_row)

    def multiply_row(self, x: Float[Tensor, "*one in"], layers: Sequence[PackedLinear]) -> list[Tensor]:
        """Compute the products of all layers; one by one if they were moved to other memory."""
        if self._list_addresses(layers) != self._addresses:
            return [QuantisedLinear.forward(layer, x) for layer in layers]
        y = multiply_few_rows(x.reshape(1, -1).contiguous(), self._fields, self._kind, self._bias)
        return [product.view(*x.shape[:-1], -1) for product in y.split(self._sizes, dim=1)]

    def _list_addresses(self, layers: Sequence[PackedLinear]) -> list[int]:
        """List the addresses of all fields and biases of some layers."""
        tensors = [tensor for layer in layers for tensor in (*layer.buffers(), layer.bias) if tensor is not None]
        return [tensor.data_ptr() for tensor in tensors]


def trained_packed(kernel: QuantisedLinear) -> QuantisedLinear:
    """Make a packed layer multiply its decoded matrix, forward and backward, as is fastest for training's many rows."""
    kernel.multiply, kernel.multiply_back = multiply_by_library, back_by_library
    return kernel


def packed_experts(kernel: QuantisedExperts) -> QuantisedExperts:
    """Make packed experts multiply by kernels."""
    kernel.multiply, kernel.multiply_chosen = multiply, multiply_chosen
    return kernel


def share_block_launches(block: Block) -> Block:
    """Compute the projections of one input of a block in one launch, if their layers or matrices match."""
    if not block.is_dense:
        return block
    attention, mlp = block.self_attn, block.mlp
    for projections in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        dense = [layer for layer in projections if isinstance(layer, DenseLinear)]
        if len(dense) > 1:
            share_launch(dense, multiply_row)
        join_alike([layer for layer in projections if isinstance(layer, PackedLinear)])
    return block


TRITON_KERNELS: KernelTable = {
    "norm": FusedRMSNorm, "linear": DenseLinear,
    **{f"packed {kind}": PackedLinear for kind in KIND_NAMES},
    **{f"packed experts {kind}": packed_experts for kind in KIND_NAMES},
    "rotate": lambda module: rotate_and_cache, "attend": lambda module: decode_attention,
    "act": lambda module: swiglu, "block": share_block_launches, "graph": lambda module: GraphedSteps(),
    f"{TRAINED}norm": trained.TrainedRMSNorm, f"{TRAINED}rotate": lambda module: trained.rotate_and_cache,
    f"{TRAINED}act": lambda module: trained.swiglu,
    **{f"{TRAINED}packed {kind}": trained_packed for kind in KIND_NAMES},
}  # fmt: skip
