"""Which nodes of llama.cpp are the stages of a mixture of experts.

Files may hold the gate and up matrices of all experts as one: then both are views of one product. Some architectures
call a dense product and that of the shared expert alike, so these are known by their weights.

Source: llama.cpp `src/llama-graph.cpp` (build_moe_ffn), `src/models/{qwen2moe,qwen3moe,qwen3next,qwen35moe}.cpp`,
`src/models/llama4.cpp`.
"""

from collections.abc import Iterator

import numpy as np

from llorch.engines.llamacpp_delta_net import Rule
from llorch.families.config import FAMILIES, ModelConfig
from llorch.families.layers import Experts


def expert_rules(config: ModelConfig) -> Iterator[Rule]:
    """Stage, operation, name without its layer, and source of the nodes of one layer."""
    experts = config.experts
    assert experts is not None
    yield "router_logits", "MUL_MAT", "ffn_moe_logits", "blk.{i}.ffn_gate_inp.weight"
    if not experts.scaled_inputs:
        yield "router_probs", "SOFT_MAX", "ffn_moe_probs", None
    yield "topk_ids", "VIEW", "ffn_moe_topk", None
    if experts.norm_topk_prob:
        yield "topk_weights", "DIV", "ffn_moe_weights_norm", None
    else:
        yield "topk_weights", "GET_ROWS", "ffn_moe_weights", None
    if experts.scaled_inputs:
        yield "expert_in", "MUL", "ffn_moe_weighted", None
    for part in ("gate", "up"):
        yield f"expert_{part}", "MUL_MAT_ID", f"ffn_moe_{part}", f"blk.{{i}}.ffn_{part}_exps.weight"
        yield f"expert_{part}", "VIEW", f"ffn_moe_{part}", "ffn_moe_gate_up-{i}"
    yield "expert_act", "SWIGLU", "ffn_moe_swiglu", None
    yield "expert_out", "MUL_MAT_ID", "ffn_moe_down", "blk.{i}.ffn_down_exps.weight"
    if experts.shared_size:
        yield from _shared_rules(config)
    else:
        yield "moe_out", "CONT" if experts.n_experts_per_token == 1 else "ADD", "ffn_moe_out", None


def _shared_rules(config: ModelConfig) -> Iterator[Rule]:
    yield "shared_ffn_gate", "MUL_MAT", None, "blk.{i}.ffn_gate_shexp.weight"
    yield "shared_ffn_up", "MUL_MAT", None, "blk.{i}.ffn_up_shexp.weight"
    yield "shared_ffn_act", "SWIGLU", "ffn_swiglu", None
    yield "shared_out", "MUL_MAT", None, "blk.{i}.ffn_down_shexp.weight"
    if FAMILIES[config.family].merged_out:
        yield "moe_out", "ADD", "ffn_moe_out_merged", None
        return
    if FAMILIES[config.family].divided_gate:
        yield "shared_gate", "DIV", "ffn_shexp_gate", None  # silu(x) / x
    else:
        yield "shared_gate", "SIGMOID", "shared_expert_gate_sigmoid", None
    yield "moe_out", "ADD", "ffn_out", None


def of_experts(short: str, array: np.ndarray, experts: Experts | None) -> np.ndarray | None:
    """Reshape a stage to one row for each token and each of its experts; None for stages without experts."""
    if experts is None or short not in (
        "topk_ids",
        "expert_in",
        "expert_gate",
        "expert_up",
        "expert_act",
        "expert_out",
    ):
        return None
    if short == "topk_ids":
        return array.reshape(-1, experts.n_experts_per_token).astype(np.int64)
    return array.reshape(-1, experts.n_experts_per_token, array.shape[-1])
