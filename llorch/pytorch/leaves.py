"""Which leaves of the torch model are put in place on which target."""

import ctypes
from typing import cast

from torch import nn

from llorch.memory import keep_freed_memory
from llorch.pytorch.causal_lm import MLP, Attention, Block, CausalLM, RMSNorm, attention
from llorch.pytorch.cpu.block import CpuBlock
from llorch.pytorch.cpu.layer import CpuAttention, CpuRMSNorm, CpuRotate, CpuSwiglu
from llorch.pytorch.cpu.library import library
from llorch.pytorch.cpu.linear import KINDS, CpuLinear
from llorch.pytorch.cpu.quantised import CpuQuantisedLinear
from llorch.pytorch.device import Target
from llorch.pytorch.quantised_linear import QuantisedLinear


def fit(model: CausalLM, target: Target) -> None:
    """Put the fastest leaves that pass the checkpoints in place of the plain ones, sharing their weights.

    Float32 and bfloat16 on the CPU have such leaves; everything else is left as it is. They are for inference. The
    page's own attention stays, because someone wants its stages; another is replaced for few tokens.
    """
    if target.device.type != "cpu" or target.dtype not in KINDS:
        return
    keep_freed_memory()
    compiled = library()
    for module in list(model.modules()):
        for name, leaf in module.named_children():
            setattr(module, name, fitted(leaf, compiled))
        if compiled is not None:
            _fit_functions(module, compiled)
    if compiled is not None:
        model.model.layers = nn.ModuleList([CpuBlock(cast(Block, layer), compiled) for layer in model.model.layers])


def fitted(leaf: nn.Module, compiled: ctypes.CDLL | None) -> nn.Module:
    """The CPU's leaf for a plain or packed one, with its weights; any other module is returned as it is."""
    if isinstance(leaf, nn.Linear):
        return CpuLinear(leaf.weight, leaf.bias, compiled)
    if isinstance(leaf, QuantisedLinear) and compiled is not None:
        return CpuQuantisedLinear(leaf.fields, leaf.ggml_type, leaf.bias, compiled)
    if isinstance(leaf, RMSNorm) and compiled is not None:
        return CpuRMSNorm(leaf.weight, leaf.eps, compiled)
    return leaf


def _fit_functions(module: nn.Module, compiled: ctypes.CDLL) -> None:
    if isinstance(module, MLP):
        module.act = CpuSwiglu(compiled)
    if isinstance(module, Attention):
        module.rotate = CpuRotate(compiled)
        if module.attend is not attention:
            module.attend = CpuAttention(compiled, module.attend)
