"""The torch model with logits that do not depend on the company: not on a bit."""

from typing import Any

import torch
from torch import Tensor, nn

from llorch.kernels.cpu_library import library
from llorch.kernels.cpu_linear import KINDS
from llorch.kernels.quantised_linear import QuantisedLinear
from llorch.kernels.reproducible import WIDE_ROWS, FixedNorm, FixedRows, attention, swiglu, wide_rows_agree
from llorch.torch_backend.leaves import fitted
from llorch.torch_model import CausalLM, rotate_and_cache

NORMS = ("input_layernorm", "post_attention_layernorm")


@torch.inference_mode()
def make_reproducible(model: CausalLM) -> None:
    """Replace leaves so that no logit depends on the batch, on padding, or on how a prompt is cut into passes.

    Prefill and cached decode give the same bits too. That holds for one device, dtype and number of threads. Rotations
    and the cache stay as they are: each element of theirs is made by itself.

    Args:
        model: With its weights, dense or packed; changed in place.
    """
    config = model.config
    fix = _Projections(model.model.norm.weight)
    layers: list[Any] = list(model.model.layers)
    for layer in layers:
        for name in NORMS:
            setattr(layer, name, FixedNorm(getattr(layer, name)))
        attend, mlp = layer.self_attn, layer.mlp
        fix(attend, ("q_proj", "k_proj", "v_proj"), config.hidden_size)
        fix(attend, ("o_proj",), config.q_width)
        if attend.q_norm is not None:
            attend.q_norm, attend.k_norm = FixedNorm(attend.q_norm), FixedNorm(attend.k_norm)
        attend.rotate, attend.attend = rotate_and_cache, attention
        fix(mlp, ("gate_proj", "up_proj"), config.hidden_size)
        fix(mlp, ("down_proj",), config.intermediate_size)
        mlp.act = swiglu
    model.model.norm = FixedNorm(model.model.norm)
    fix(model, ("lm_head",), config.hidden_size)


class _Projections:
    """Wraps projections; those of one kind and shape share what was found out about wide products."""

    def __init__(self, like: Tensor) -> None:
        """Remember the dtype and the device of the run."""
        self._like = like
        self._wide: dict[object, bool] = {}

    def __call__(self, owner: nn.Module, names: tuple[str, ...], in_features: int) -> None:
        """Wrap some projections of a module."""
        for name in names:
            leaf = self._faster(getattr(owner, name))
            tensors = (*leaf.parameters(), *leaf.buffers())
            kind = (type(leaf), in_features, *((t.dtype, t.shape) for t in tensors))
            if kind not in self._wide:
                generator = torch.Generator().manual_seed(0)
                probe = torch.randn(WIDE_ROWS, in_features, generator=generator).to(self._like)
                self._wide[kind] = wide_rows_agree(leaf, probe)
            setattr(owner, name, FixedRows(leaf, self._wide[kind]))

    def _faster(self, leaf: nn.Module) -> nn.Module:
        """The CPU's leaves, where there are some: oneDNN, whose sums have one order for few and many rows."""
        if self._like.device.type != "cpu" or self._like.dtype not in KINDS:
            return leaf
        return fitted(leaf, library() if isinstance(leaf, QuantisedLinear) else None)
