"""Replace modules of the reference model by optimized kernels, using one table per device.

A kernel replaces a module or a function that `causal_lm` calls: a norm, a projection, the rotation, attention, the
activation, a whole block. It has the interface of the plain module and shares its weights. A table maps a kind to the
function that makes the kernel from the plain module; a kind that the table lacks stays plain. `graph` makes the object
that replays steps of decoding.
"""

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import nn

from llorch.pytorch.causal_lm import MLP, Attention, CausalLM, RMSNorm, attention, rotate_and_cache
from llorch.pytorch.kernels import KernelTable
from llorch.pytorch.kernels.cpu.block import cpu_leaves
from llorch.pytorch.kernels.cpu.library import library
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.models.delta_net import GatedDeltaNet, GatedNorm, ShortConv
from llorch.pytorch.models.experts import ExpertLinear, ExpertsModule, QuantisedExperts
from llorch.runtime.errors import MissingDevice, MissingExtra


def leaves_for(device: torch.device, dtype: torch.dtype, *, required: bool) -> KernelTable:
    """Return all kernels of llorch for a device and a dtype.

    `required`: raise an error that names what they need, where it is absent.
    """
    if device.type == "cpu":
        compiled = library()
        if required and compiled is None:
            raise MissingDevice("kernels own: the CPU kernels are not built; install a C compiler or use auto")
        return cpu_leaves(compiled, dtype)
    if dtype is torch.float64:  # the kernels compute in float32
        return {}
    if find_spec("triton") is None:
        if required:
            raise MissingExtra("torch", "triton")
        return {}
    from llorch.pytorch.kernels.triton.leaves import LEAVES  # imports triton, which torch for the CPU comes without

    return LEAVES


def put_leaves(model: CausalLM, leaves: KernelTable) -> None:
    """Put kernels in place of the plain modules.

    Eager attention stays, because someone wants its stages.
    """
    for module in list(model.modules()):
        for name, leaf in module.named_children():
            setattr(module, name, faster(leaf, leaves))
        if isinstance(module, MLP | ExpertsModule) and "act" in leaves:
            module.act = leaves["act"](module.act)
        if isinstance(module, Attention):
            if "rotate" in leaves and module.rotate is rotate_and_cache:
                module.rotate = leaves["rotate"](module.rotate)
            if "attend" in leaves and module.attend is not attention:
                module.attend = leaves["attend"](module.attend)
        if isinstance(module, GatedDeltaNet):
            for name, kind in (("l2_norm", "l2 norm"), ("rule", "delta rule")):
                if kind in leaves:
                    setattr(module, name, leaves[kind](getattr(module, name)))
    if "block" in leaves:
        model.model.layers = nn.ModuleList(map(leaves["block"], model.model.layers))


def faster(leaf: nn.Module, leaves: KernelTable) -> nn.Module:
    """Return the kernel that replaces a module; the module itself if its kind is not in the table."""
    make = leaves.get(_kind_of(leaf))
    return leaf if make is None else make(leaf)


def _kind_of(leaf: nn.Module) -> str:
    """Return the key of a module in kernel tables, "" if no kernel replaces it."""
    if isinstance(leaf, QuantisedLinear):
        return f"packed {leaf.ggml_type.name}"
    if isinstance(leaf, QuantisedExperts):
        return f"packed experts {leaf.ggml_type.name}"
    return next((kind for plain, kind in _KINDS.items() if isinstance(leaf, plain)), "")


_KINDS: Mapping[type[nn.Module], str] = {
    RMSNorm: "norm", nn.Linear: "linear", ExpertLinear: "experts", ShortConv: "conv", GatedNorm: "gated norm",
}  # fmt: skip
