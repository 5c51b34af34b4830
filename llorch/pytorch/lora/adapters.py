"""Adapters on modules of the torch model: attach, activate, train and detach them.

    y = W x + scaling * B A x                                       LoRA
    y = m / |W + scaling * B A| * (W x + scaling * B A x)           DoRA; no gradient flows through the length |.|

Attributes are named as in PEFT: `base_layer`, `lora_A`, `lora_B`. Parameters are float32, or float64 over a float64
base; the adapter's product is computed in their dtype, added, and the sum rounded once to the dtype of the base.
Dropout acts on the input of the adapter, in training mode.

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
from llorch.lora.initial import pissa_to_lora
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
    """Attach a copy of an adapter to a model and activate it; `trainable` freezes all weights of the base.

    The frozen product of `minus` is subtracted: y = W x + scaling * (B A - B0 A0) x. For PiSSA, whose initial adapter
    is not zero, `minus` is that initial adapter.
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
        tensors, minus_tensors = adapter.tensors[target.name], None if minus is None else minus.tensors[target.name]
        first: LoraModule | None = None  # PEFT's module may be several matrices of llorch, which share all parameters
        for part, path in zip(target.parts, paths_of(target), strict=True):
            lora_module = _wrap(module, target, path)
            options = {"dtype": dtype, "trainable": trainable, "minus": minus_tensors, "shared": first}
            lora_module.add(name, adapter.config, target, tensors, part=part, **options)
            first = first or lora_module
    activate(module, name)


def detach(module: CausalLM, name: str) -> None:
    """Detach an adapter; modules without another adapter become the modules of the base again."""
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
    """Return the parameters (not copies) of an attached adapter, named and ordered as `Adapter.flat`."""
    require_adapter(module, name)
    return {
        f"{target.name}.{kind}": parameter
        for _, target, lora_module in lora_modules(module)
        for kind, parameter in lora_module.parameters_of(name).items()
    }


def adapter_of(module: CausalLM, name: str = "default") -> Adapter:
    """Copy an adapter as float32, converted to LoRA if attached with `minus`; FormatError if it is not finite."""
    require_adapter(module, name)
    pairs = [(target.name, lora_module) for _, target, lora_module in lora_modules(module) if name in lora_module.names]
    config, label = pairs[0][1].config_of(name), f"adapter {name!r}"
    adapter = checked(
        config, {target: _lora_tensors(lora_module, name) for target, lora_module in pairs}, module.config, where=label
    )
    minus = {target: tensors for target, lora_module in pairs if (tensors := lora_module.start_of(name)) is not None}
    if not minus:
        return adapter
    return pissa_to_lora(adapter, checked(config, minus, module.config), module.config)


def adapter_names(module: CausalLM) -> list[str]:
    """Return the names of the attached adapters in order of attachment."""
    return list(dict.fromkeys(name for *_, lora_module in lora_modules(module) for name in lora_module.names))


def require_adapter(module: CausalLM, name: str) -> None:
    """Refuse the name of an unknown adapter."""
    require_known(name, adapter_names(module))


def lora_modules(module: CausalLM) -> Iterator[tuple[str, LoraTarget, LoraModule]]:
    """Yield the modules that have adapters, by path and target, in the order of the forward pass."""
    for target in targets_of(module.config).values():
        for path in paths_of(target):
            lora_module = module.get_submodule(path)
            if isinstance(lora_module, LoraModule):
                yield path, target, lora_module


def paths_of(target: LoraTarget) -> list[str]:
    """Return the path of each matrix of a target; a tied `lm_head` has its own module."""
    if target.name == "lm_head":
        return ["lm_head"]
    return [path_of(part.name).removesuffix(".weight") for part in target.parts]


def _wrap(module: CausalLM, target: LoraTarget, path: str) -> LoraModule:
    """Return the wrapped module of a target; wrap it if it is not wrapped yet."""
    lora_module = module.get_submodule(path)
    if not isinstance(lora_module, LoraModule):
        # mode "reproducible" replaces all projections at once, so any of them tells if the model is batch-invariant
        fixed = is_fixed(getattr(module.lm_head, "base_layer", module.lm_head))
        kind = LoraEmbedding if target.is_embedding else LoraExperts if target.n_experts else LoraLinear
        lora_module = kind(lora_module, fixed=fixed)
        module.set_submodule(path, lora_module)
    return lora_module


def _freeze(module: CausalLM) -> None:
    """Turn off the gradients of all parameters except those of adapters."""
    adapter_ids = {
        id(p)
        for *_, lora_module in lora_modules(module)
        for name in lora_module.names
        for p in lora_module.parameters_of(name).values()
    }
    for parameter in module.parameters():
        if id(parameter) not in adapter_ids:
            parameter.requires_grad_(False)


def _require_gradients(module: CausalLM, adapter: Adapter, dtype: torch.dtype) -> None:
    """Refuse kernels without backward, which cut the autograd graph silently: try each kernel on a row of zeros."""
    norm = module.model.norm.weight
    for target in adapter.targets.values():
        if target.is_embedding:
            continue
        expert_ids = (torch.zeros(1, 1, 1, dtype=torch.int64, device=norm.device),) if target.n_experts else ()
        for path in paths_of(target):
            projection: Any = module.get_submodule(path)
            projection = getattr(projection, "base_layer", projection)
            # of experts (batch, seq, inputs per token, in)
            shape = (1, 1, 1, target.n_in) if target.n_experts else (1, _n_inputs(projection))
            probe = torch.zeros(shape, dtype=norm.dtype, device=norm.device, requires_grad=True)
            with torch.enable_grad():
                if not projection(probe, *expert_ids).requires_grad:
                    raise UserError(
                        f"adapter: {path} is a {type(projection).__name__}, which computes no gradient; "
                        "load without kernels"
                    )


def _n_inputs(projection: Any) -> int:
    """Return the number of inputs of a projection, which may be a tensor-parallel rank's part, cut when loaded."""
    base: Any = projection.kernel if isinstance(projection, FixedRows | Reordered) else projection
    return base.weight.shape[1] if isinstance(base, nn.Linear) else base.in_features


def _lora_tensors(lora_module: LoraModule, name: str) -> LoraTensors:
    arrays = {kind: as_float32(parameter) for kind, parameter in lora_module.parameters_of(name).items()}
    return LoraTensors(arrays[LORA_A], arrays[LORA_B], arrays.get(MAGNITUDE))
