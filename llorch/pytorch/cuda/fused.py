"""Puts the Triton leaves in place of the plain ones; only imported where there is a CUDA device, or an interpreter."""

from typing import Any

import torch
from torch import nn

from llorch.pytorch.causal_lm import Attention, CausalLM
from llorch.pytorch.cuda.decode_attention import decode_attention
from llorch.pytorch.cuda.dense_matvec import DenseLinear, Together
from llorch.pytorch.cuda.fused_rms_norm import FusedRMSNorm
from llorch.pytorch.cuda.fused_rotate import rotate_and_cache
from llorch.pytorch.cuda.fused_swiglu import swiglu
from llorch.pytorch.sdpa import sdpa_attention


def fuse(model: CausalLM) -> None:
    """Replace the leaves of a model, sharing their weights, for inference.

    Attention is replaced where `use_sdpa` did so before: step by step it has scores and probabilities to observe.
    Packed matrices stay as they are, and so does a model in float64: the kernels compute in float32.
    """
    if model.model.norm.weight.dtype is torch.float64:
        return
    layers: Any = model.model.layers
    for layer in layers:
        layer.input_layernorm = FusedRMSNorm(layer.input_layernorm)
        layer.post_attention_layernorm = FusedRMSNorm(layer.post_attention_layernorm)
        _fuse_attention(layer.self_attn)
        _fuse_projections(layer.mlp, "gate_proj", "up_proj")
        _fuse_projections(layer.mlp, "down_proj")
        layer.mlp.act = swiglu
    model.model.norm = FusedRMSNorm(model.model.norm)
    _fuse_projections(model, "lm_head")


def _fuse_attention(attention: Attention) -> None:
    _fuse_projections(attention, "q_proj", "k_proj", "v_proj")
    _fuse_projections(attention, "o_proj")
    if attention.q_norm is not None:
        attention.q_norm, attention.k_norm = FusedRMSNorm(attention.q_norm), FusedRMSNorm(attention.k_norm)
    attention.rotate = rotate_and_cache
    if attention.attend is sdpa_attention:
        attention.attend = decode_attention


def _fuse_projections(owner: nn.Module, *names: str) -> None:
    """Replace those that are dense; where there are several, they have one input."""
    layers = {name: DenseLinear(leaf) for name in names if isinstance(leaf := getattr(owner, name), nn.Linear)}
    for name, layer in layers.items():
        setattr(owner, name, layer)
    if len(layers) > 1:
        Together(list(layers.values()))
