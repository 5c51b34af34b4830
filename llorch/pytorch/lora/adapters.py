"""Adapters beside the modules of the torch model: put on, switched, trained and taken off again.

    y = W x + scaling * B A x                                       LoRA
    y = m / |W + scaling * B A| * (W x + scaling * B A x)           DoRA; no gradient flows through the length |.|

Attributes are named as in PEFT: `base_layer`, `lora_A`, `lora_B`. Parameters are float32, or float64 over a float64
base; the adapter's part is computed in their dtype, added, and the sum rounded once to the dtype of the base. Dropout
acts on the input of the adapter, in training mode.

Source: arXiv:2106.09685, arXiv:2402.09353 (section 4.3 for the constant length); peft/tuners/lora/layer.py and dora.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from llorch.lora.adapter import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    Adapter,
    LoraTensors,
    checked,
    require_fits,
    require_free,
    require_known,
)
from llorch.lora.initial import over_original
from llorch.lora.targets import LoraTarget, targets_of
from llorch.pytorch.batch_invariant.reproducible import FixedRows, is_fixed
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.distributed.dtensor import is_part
from llorch.pytorch.kernels.quantised_linear import Reordered
from llorch.pytorch.load import path_of
from llorch.pytorch.lora.modules import LoraEmbedding, LoraExperts, LoraLinear, LoraModule, as_float32
from llorch.runtime.errors import UserError


def attach(
    module: CausalLM, adapter: Adapter, *, name: str = "default", trainable: bool = False, minus: Adapter | None = None
) -> None:
    """Put a copy of an adapter beside modules of a model, whose weights are frozen, and make it the active one.

    `minus` is taken off what the adapter makes, frozen: the start of one that is trained with PiSSA.
    """
    require_free(name, adapter_names(module))
    if hasattr(nn.ParameterDict(), name):
        raise UserError(f"adapter: torch reserves the name {name!r}; choose another name")
    require_fits(name, adapter, module.config)
    dtype = torch.promote_types(module.model.norm.weight.dtype, torch.float32)
    if trainable:
        if any(is_part(parameter) for parameter in module.parameters()):
            raise UserError(
                f"adapter {name!r}: after parallelize, ranks would not sum the gradients of a new adapter; "
                "attach it before parallelize"
            )
        _freeze(module)
        _require_gradients(module, adapter, dtype)
    for target in adapter.targets.values():
        tensors, start = adapter.tensors[target.name], None if minus is None else minus.tensors[target.name]
        shared: LoraModule | None = None
        for part, path in zip(target.parts, paths_of(target), strict=True):
            lora_module = _wrapped(module, target, path)
            options = {"dtype": dtype, "trainable": trainable, "minus": start, "shared": shared}
            lora_module.add(name, adapter.config, target, tensors, part=part, **options)
            shared = shared or lora_module
    activate(module, name)


def detach(module: CausalLM, name: str) -> None:
    """Take an adapter off; modules without another adapter are the modules of the base again."""
    require_adapter(module, name)
    for path, _, lora_module in lora_modules(module):
        lora_module.remove(name)
        if not lora_module.names:
            module.set_submodule(path, lora_module.base_layer)


def activate(module: CausalLM, name: str | None) -> None:
    """Choose the adapter that a forward pass uses; None runs the base alone."""
    if name is not None:
        require_adapter(module, name)
    for *_, lora_module in lora_modules(module):
        lora_module.activate(name)


def trainable_parameters(module: CausalLM, name: str = "default") -> dict[str, nn.Parameter]:
    """Return the very parameters of an adapter that the forward pass uses, named and ordered as `Adapter.flat`."""
    require_adapter(module, name)
    return {
        f"{target.name}.{kind}": parameter
        for _, target, lora_module in lora_modules(module)
        for kind, parameter in lora_module.parameters_of(name).items()
    }


def adapter_of(module: CausalLM, name: str = "default") -> Adapter:
    """Copy an adapter out of a model, as float32, `minus` as by `over_original`; FormatError if it is not finite."""
    require_adapter(module, name)
    found = [(target.name, lora_module) for _, target, lora_module in lora_modules(module) if name in lora_module.names]
    config, where = found[0][1].config_of(name), f"adapter {name!r}"
    adapter = checked(
        config, {target: _lora_tensors(lora_module, name) for target, lora_module in found}, module.config, where=where
    )
    starts = {target: start for target, lora_module in found if (start := lora_module.start_of(name)) is not None}
    if not starts:
        return adapter
    return over_original(adapter, checked(config, starts, module.config), module.config)


def adapter_names(module: CausalLM) -> list[str]:
    """Return the names of the adapters that are attached, in the order in which they came."""
    return list(dict.fromkeys(name for *_, lora_module in lora_modules(module) for name in lora_module.names))


def require_adapter(module: CausalLM, name: str) -> None:
    """Refuse a name that no adapter has."""
    require_known(name, adapter_names(module))


def lora_modules(module: CausalLM) -> Iterator[tuple[str, LoraTarget, LoraModule]]:
    """Yield the modules that have adapters, by path and target, in the order of the forward pass."""
    for target in targets_of(module.config).values():
        for path in paths_of(target):
            lora_module = module.get_submodule(path)
            if isinstance(lora_module, LoraModule):
                yield path, target, lora_module


def paths_of(target: LoraTarget) -> list[str]:
    """Return the paths of a target's modules; llorch joins no matrices, and a tied `lm_head` has its own module."""
    if target.name == "lm_head":
        return ["lm_head"]
    return [path_of(part.name).removesuffix(".weight") for part in target.parts]


def _wrapped(module: CausalLM, target: LoraTarget, path: str) -> LoraModule:
    """Return the wrapped module of a target; wrap it now if it is not wrapped yet."""
    lora_module = module.get_submodule(path)
    if not isinstance(lora_module, LoraModule):
        fixed = is_fixed(getattr(module.lm_head, "base_layer", module.lm_head))
        kind = LoraEmbedding if target.is_embedding else LoraExperts if target.n_experts else LoraLinear
        lora_module = kind(lora_module, fixed=fixed)
        module.set_submodule(path, lora_module)
    return lora_module


def _freeze(module: CausalLM) -> None:
    """Turn off the gradients of all parameters but those of adapters."""
    of_adapters = {
        id(p)
        for *_, lora_module in lora_modules(module)
        for name in lora_module.names
        for p in lora_module.parameters_of(name).values()
    }
    for parameter in module.parameters():
        if id(parameter) not in of_adapters:
            parameter.requires_grad_(False)


def _require_gradients(module: CausalLM, adapter: Adapter, dtype: torch.dtype) -> None:
    """Refuse kernels that cut the graph silently: each kernel is tried with a row of zeros."""
    norm = module.model.norm.weight
    for target in adapter.targets.values():
        if target.is_embedding:
            continue
        chosen = (torch.zeros(1, 1, 1, dtype=torch.int64, device=norm.device),) if target.n_experts else ()
        for path in paths_of(target):
            lora_module: Any = module.get_submodule(path)
            lora_module = getattr(lora_module, "base_layer", lora_module)
            shape = (1, 1, 1, target.n_in) if target.n_experts else (1, _width(lora_module))
            probe = torch.zeros(shape, dtype=norm.dtype, device=norm.device, requires_grad=True)
            with torch.enable_grad():
                if not lora_module(probe, *chosen).requires_grad:
                    raise UserError(
                        f"adapter: {path} is a {type(lora_module).__name__}, which computes no gradient; "
                        "load without kernels"
                    )


def _width(lora_module: Any) -> int:
    """Return the number of inputs of a projection; a rank may have some of them."""
    base: Any = lora_module.kernel if isinstance(lora_module, FixedRows | Reordered) else lora_module
    return base.weight.shape[1] if isinstance(base, nn.Linear) else base.in_features


def _lora_tensors(lora_module: LoraModule, name: str) -> LoraTensors:
    arrays = {kind: as_float32(parameter) for kind, parameter in lora_module.parameters_of(name).items()}
    return LoraTensors(arrays[LORA_A], arrays[LORA_B], arrays.get(MAGNITUDE))
