"""The table of kernels that run on CUDA instead of torch's own; importing it imports Triton.

Packed layers with the same input multiply one row in one launch. Alone, the key projection of a model with grouped
heads is over before the memory is busy. The check of kernels tries the launch with single matrices.
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
    """A packed layer that multiplies by kernels; for a single row, the matrix is not rounded to the dtype of inputs."""

    def __init__(self, layer: QuantisedLinear) -> None:
        """Share the fields and the bias of a plain one."""
        super().__init__(layer.fields, layer.ggml_type)
        self.bias, self.multiply = layer.bias, multiply
        self.together: SharedInputProducts | None = None

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply, in the dtype of `x`."""
        is_recorded = torch.is_grad_enabled() and x.requires_grad
        is_row = x.shape[-1] == x.numel() == self.in_features
        if self.together is None or not is_row or x.dtype is torch.float64 or is_recorded:
            return super().forward(x)
        return self.together.product(self, x)


def join_alike(layers: Sequence[PackedLinear]) -> None:
    """Let layers of one input whose matrices have the same kind and fields share a launch."""
    alike = defaultdict(list)
    for layer in layers:
        form = tuple((name, field.dtype, field.shape[1]) for name, field in layer.fields.items())
        alike[layer.ggml_type, layer.bias is None, form].append(layer)
    for some in alike.values():
        if len(some) > 1:
            JoinedRows(some)


class JoinedRows:
    """The matrices of some layers, one below the other in memory; each layer keeps a view of its rows."""

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        """Move the fields of layers, all with a bias or none, into common ones, and let a launch make all products."""
        self._kind, self._sizes = layers[0].ggml_type, [layer.out_features for layer in layers]
        self._fields = {name: torch.cat([layer.fields[name] for layer in layers]) for name in layers[0].fields}
        for name, field in self._fields.items():
            for layer, rows in zip(layers, field.split(self._sizes), strict=True):
                layer.register_buffer(name, rows.view(layer.get_buffer(name).dtype))
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = torch.cat(tuple(biases)) if biases else None
        if self._bias is not None:
            for layer, part in zip(layers, self._bias.split(self._sizes), strict=True):
                layer.bias = nn.Parameter(part, requires_grad=False)
        self._places = self._places_of(layers)
        share_launch(layers, self.multiply_row)

    def multiply_row(self, x: Float[Tensor, "*one in"], layers: Sequence[PackedLinear]) -> list[Tensor]:
        """Compute the products of all layers; one by one if they were moved to other memory."""
        if self._places_of(layers) != self._places:
            return [QuantisedLinear.forward(layer, x) for layer in layers]
        y = multiply_few_rows(x.reshape(1, -1).contiguous(), self._fields, self._kind, self._bias)
        return [part.view(*x.shape[:-1], -1) for part in y.split(self._sizes, dim=1)]

    def _places_of(self, layers: Sequence[PackedLinear]) -> list[int]:
        """List the addresses of all fields and biases of some layers."""
        tensors = [tensor for layer in layers for tensor in (*layer.buffers(), layer.bias) if tensor is not None]
        return [tensor.data_ptr() for tensor in tensors]


def trained_packed(kernel: QuantisedLinear) -> QuantisedLinear:
    """Make a packed layer multiply forward and back by one matrix, that of the reference."""
    kernel.multiply, kernel.multiply_back = multiply_by_library, back_by_library
    return kernel


def packed_experts(kernel: QuantisedExperts) -> QuantisedExperts:
    """Multiply packed matrices of experts by kernels."""
    kernel.multiply, kernel.multiply_chosen = multiply, multiply_chosen
    return kernel


def joined(block: Block) -> Block:
    """Let a block make the projections of one input in one launch, where these layers or their matrices are alike."""
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
    "norm": FusedRMSNorm,
    "linear": DenseLinear,
    **{f"packed {kind}": PackedLinear for kind in KIND_NAMES},
    **{f"packed experts {kind}": packed_experts for kind in KIND_NAMES},
    "rotate": lambda plain: rotate_and_cache,
    "attend": lambda plain: decode_attention,
    "act": lambda plain: swiglu,
    "block": joined,
    "graph": lambda plain: GraphedSteps(),
    f"{TRAINED}norm": trained.TrainedRMSNorm,
    f"{TRAINED}rotate": lambda plain: trained.rotate_and_cache,
    f"{TRAINED}act": lambda plain: trained.swiglu,
    **{f"{TRAINED}packed {kind}": trained_packed for kind in KIND_NAMES},
}
