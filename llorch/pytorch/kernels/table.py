"""Replace modules of the reference model by optimized kernels, using one table per device.

A kernel replaces a module or a function that `causal_lm` calls: a norm, a projection, the rotation, attention, the
activation, a whole block. It has the interface of the reference module and shares its weights. A table maps a kind of
module to the function that makes the kernel from the module; modules of other kinds stay. The kind "graph" is no
module: it makes the object that replays decode steps as a CUDA graph.
"""

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import nn

from llorch.ops.compiled.library import library
from llorch.pytorch.causal_lm import MLP, Attention, CausalLM, RMSNorm, attention, rotate_and_cache
from llorch.pytorch.kernels import KernelTable
from llorch.pytorch.kernels.cpu.block import cpu_kernels
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.models.delta_net import GatedDeltaNet, GatedNorm, ShortConv
from llorch.pytorch.models.experts import ExpertLinear, ExpertsModule, QuantisedExperts
from llorch.runtime.errors import MissingDevice, MissingExtra


def kernels_for(device: torch.device, dtype: torch.dtype, *, required: bool) -> KernelTable:
    """Return all kernels of llorch for a device and a dtype; `required`: raise if a dependency is missing."""
    if device.type == "cpu":
        compiled = library()
        if required and compiled is None:
            raise MissingDevice("kernels own: the CPU kernels are not built; install a C compiler or use auto")
        return cpu_kernels(compiled, dtype)
    if dtype is torch.float64:  # the kernels compute in float32
        return {}
    if find_spec("triton") is None:
        if required:
            raise MissingExtra("torch", "triton")
        return {}
    from llorch.pytorch.kernels.triton.kernels import (
        TRITON_KERNELS,  # imports triton, which CPU builds of torch do not have
    )

    return TRITON_KERNELS


def install_kernels(model: CausalLM, kernels: KernelTable) -> None:
    """Replace modules by kernels; unfused attention stays: the user chose it to observe scores and probabilities."""
    for module in list(model.modules()):
        for name, kernel in module.named_children():
            setattr(module, name, faster(kernel, kernels))
        if isinstance(module, MLP | ExpertsModule) and "act" in kernels:
            module.act = kernels["act"](module.act)
        if isinstance(module, Attention):
            if "rotate" in kernels and module.rotate is rotate_and_cache:
                module.rotate = kernels["rotate"](module.rotate)
            if "attend" in kernels and module.attend is not attention:
                module.attend = kernels["attend"](module.attend)
        if isinstance(module, GatedDeltaNet):
            for name, kind in (("l2_norm", "l2 norm"), ("rule", "delta rule")):
                if kind in kernels:
                    setattr(module, name, kernels[kind](getattr(module, name)))
    if "block" in kernels:
        model.model.layers = nn.ModuleList(map(kernels["block"], model.model.layers))


def faster(module: nn.Module, kernels: KernelTable) -> nn.Module:
    """Return the kernel that replaces a module, or the module itself if its kind is not in the table."""
    make = kernels.get(_kind_of(module))
    return module if make is None else make(module)


def _kind_of(module: nn.Module) -> str:
    """Return the key of a module in kernel tables; "" if no kernel replaces it."""
    if isinstance(module, QuantisedLinear):
        return f"packed {module.ggml_type.name}"
    if isinstance(module, QuantisedExperts):
        return f"packed experts {module.ggml_type.name}"
    return next((kind for module_type, kind in _KINDS.items() if isinstance(module, module_type)), "")


_KINDS: Mapping[type[nn.Module], str] = {
    RMSNorm: "norm", nn.Linear: "linear", ExpertLinear: "experts", ShortConv: "conv", GatedNorm: "gated norm",
}  # fmt: skip
