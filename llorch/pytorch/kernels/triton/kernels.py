"""The table of kernels that run on CUDA instead of torch's own; importing it imports Triton."""

from llorch.pytorch.causal_lm import Block
from llorch.pytorch.kernels import TRAINED, KernelTable
from llorch.pytorch.kernels.packing import KIND_NAMES
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.kernels.triton import trained
from llorch.pytorch.kernels.triton.decode_attention import decode_attention
from llorch.pytorch.kernels.triton.dense_matvec import DenseLinear, multiply_row, share_launch
from llorch.pytorch.kernels.triton.fused import FusedRMSNorm, rotate_and_cache, swiglu
from llorch.pytorch.kernels.triton.graph import GraphedSteps
from llorch.pytorch.kernels.triton.packed_linear import PackedLinear, join_alike
from llorch.pytorch.kernels.triton.quantised import back_by_library, multiply, multiply_by_library
from llorch.pytorch.kernels.triton.quantised_matvec import multiply_chosen
from llorch.pytorch.models.experts import QuantisedExperts


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
