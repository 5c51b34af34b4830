"""The table of what runs on CUDA instead of torch's own; importing it imports Triton."""

from llorch.pytorch.causal_lm import Block
from llorch.pytorch.cuda.decode_attention import decode_attention
from llorch.pytorch.cuda.dense_matvec import DenseLinear, Together
from llorch.pytorch.cuda.fused import FusedRMSNorm, rotate_and_cache, swiglu
from llorch.pytorch.cuda.graph import GraphedSteps
from llorch.pytorch.cuda.quantised import multiply
from llorch.pytorch.cuda.quantised_matvec import multiply_chosen
from llorch.pytorch.experts import QuantisedExperts
from llorch.pytorch.leaves import Leaves
from llorch.pytorch.packing import PACKERS
from llorch.pytorch.quantised_linear import QuantisedLinear


def packed(leaf: QuantisedLinear) -> QuantisedLinear:
    """A packed layer that multiplies by kernels, also where its gradient is wanted."""
    leaf.multiply = multiply
    return leaf


def packed_experts(leaf: QuantisedExperts) -> QuantisedExperts:
    """Packed matrices of experts, likewise; those of a few rows at once."""
    leaf.multiply, leaf.multiply_chosen = multiply, multiply_chosen
    return leaf


def joined(block: Block) -> Block:
    """A block whose projections of one input are made in one launch, where they are dense and ours."""
    if not block.is_dense:
        return block
    attention, mlp = block.self_attn, block.mlp
    for projections in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        dense = [layer for layer in projections if isinstance(layer, DenseLinear)]
        if len(dense) > 1:
            Together(dense)
    return block


LEAVES: Leaves = {
    "norm": FusedRMSNorm,
    "linear": DenseLinear,
    **{f"packed {kind.name}": packed for kind in PACKERS},
    **{f"packed experts {kind.name}": packed_experts for kind in PACKERS},
    "rotate": lambda plain: rotate_and_cache,
    "attend": lambda plain: decode_attention,
    "act": lambda plain: swiglu,
    "block": joined,
    "graph": lambda plain: GraphedSteps(),
}
