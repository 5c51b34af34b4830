"""The torch model with logits that do not depend on the company: not on a bit."""

from typing import Any

import torch
from torch import Tensor, nn

from llorch.pytorch.causal_lm import CausalLM, rotate_and_cache
from llorch.pytorch.cpu.library import library
from llorch.pytorch.cpu.linear import KINDS
from llorch.pytorch.leaves import fitted
from llorch.pytorch.quantised_linear import QuantisedLinear
from llorch.pytorch.reproducible_sums import FixedNorm, FixedRows, attention, swiglu

NORMS = ("input_layernorm", "post_attention_layernorm")


@torch.inference_mode()
def make_reproducible(model: CausalLM) -> None:
    """Replace leaves so that no logit depends on the batch, on padding, or on how a prompt is cut into passes.

    Prefill and cached decode give the same bits too. That holds for one device, dtype and number of threads. Rotations
    and the cache stay as they are: each element of theirs is made by itself.
    """
    like = model.model.norm.weight
    layers: list[Any] = list(model.model.layers)
    for layer in layers:
        for name in NORMS:
            setattr(layer, name, FixedNorm(getattr(layer, name)))
        attend, mlp = layer.self_attn, layer.mlp
        _fix(attend, ("q_proj", "k_proj", "v_proj", "o_proj"), like)
        if attend.q_norm is not None:
            attend.q_norm, attend.k_norm = FixedNorm(attend.q_norm), FixedNorm(attend.k_norm)
        attend.rotate, attend.attend = rotate_and_cache, attention
        _fix(mlp, ("gate_proj", "up_proj", "down_proj"), like)
        mlp.act = swiglu
    model.model.norm = FixedNorm(model.model.norm)
    _fix(model, ("lm_head",), like)


def _fix(owner: nn.Module, names: tuple[str, ...], like: Tensor) -> None:
    """Wrap some projections of a module that runs on the device and in the dtype of a tensor."""
    for name in names:
        setattr(owner, name, FixedRows(_faster(getattr(owner, name), like)))


def _faster(leaf: nn.Module, like: Tensor) -> nn.Module:
    """The CPU's leaf, where there is one: oneDNN, whose sums have one order for few and many rows."""
    if like.device.type != "cpu" or like.dtype not in KINDS:
        return leaf
    return fitted(leaf, library() if isinstance(leaf, QuantisedLinear) else None)
