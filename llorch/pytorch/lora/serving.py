"""Several adapters on one running base: each batch gets a view of the model that shares all weights.

The base's modules never change: a batch without adapters has the same kernels, CUDA graphs and bits as if there were
none. A view is a copy of the few modules that contain kernels, with adapters attached. So adding or removing adapters
does not affect a running request. A compiled model compiles each view.
"""

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llorch.files import Weights
from llorch.lora.adapter import Adapter, require_known
from llorch.model.model import OpenModel
from llorch.pytorch.causal_lm import MLP, Attention, Block, CausalLM, Decoder
from llorch.pytorch.decoding import Forward, compiled_forward
from llorch.pytorch.lora.adapters import attach, detach, lora_modules
from llorch.pytorch.models.delta_net import GatedDeltaNet
from llorch.pytorch.models.experts import ExpertsModule, SparseMoe
from llorch.runtime.errors import UserError

_CONTAINERS = (CausalLM, Decoder, nn.ModuleList, Block, Attention, GatedDeltaNet, MLP, SparseMoe, ExpertsModule)


def view(adapted: CausalLM, names: Sequence[str | None]) -> CausalLM:
    """Return a view of a model with the adapter of each sequence; for one name, a view for any batch size."""
    viewed = skeleton(adapted)
    rows = {name: [row for row, adapter in enumerate(names) if adapter == name] for name in names if name is not None}
    device = adapted.model.norm.weight.device
    adapter_rows = [
        (name, None if len(rows[name]) == len(names) else torch.tensor(rows[name], device=device)) for name in rows
    ]
    for path, _, lora_module in list(lora_modules(viewed)):
        lora_copy = copy(lora_module)
        lora_copy._modules = dict(lora_module._modules)
        lora_copy.active = tuple(pair for pair in adapter_rows if pair[0] in lora_module.names)
        viewed.set_submodule(path, lora_copy)
    return viewed


def skeleton(module: Any) -> Any:
    """Copy the modules that contain other modules; the kernels (projections, norms) and their weights are shared."""
    copied = copy(module)
    copied._modules = {
        name: skeleton(child) if isinstance(child, _CONTAINERS) else child for name, child in module._modules.items()
    }
    return copied


class AdaptedModules(OpenModel):
    """Base module and its views with adapters; `module` is the base without adapters."""

    def __init__(self, weights: Weights, module: CausalLM, *, compiled: bool) -> None:
        """Wrap a module with its weights and kernels."""
        super().__init__(weights)
        self.module = module
        self._adapted = module  # the base, or a copy to which all adapters are attached
        self._uniform: dict[str, CausalLM] = {}  # by adapter: view for batches in which all sequences use it
        self.compiles = compiled
        self._compiled: dict[str | None, tuple[CausalLM, Forward]] = {}  # by adapter

    def add_adapter(self, name: str, adapter: Adapter | str | Path, *, any_base: bool = False) -> str:
        """See `OpenModel.add_adapter`; tensors go to the model's device in float32, or float64 for that base."""
        name_added = super().add_adapter(name, adapter, any_base=any_base)
        try:
            if self._adapted is self.module:
                self._adapted = skeleton(self.module)
            attach(self._adapted, self._adapters[name], name=name)
        except BaseException:
            super().remove_adapter(name)
            raise
        return name_added

    def remove_adapter(self, name: str) -> None:
        """See `OpenModel.remove_adapter`; existing views keep the adapter."""
        super().remove_adapter(name)
        detach(self._adapted, name)
        self._uniform.pop(name, None)
        self._compiled.pop(name, None)

    def module_for(self, adapters: Sequence[str | None]) -> CausalLM:
        """Return the module of a batch, with the adapters of its sequences.

        It is always the same view if all sequences use the same adapter, and the base if none uses an adapter.
        Raises UserError if an adapter is unknown, or a compiled model would need several adapters.
        """
        for name in adapters:
            require_known(name, self.adapters)
        (first, *further) = dict.fromkeys(adapters)
        if further:
            if self.compiles:
                raise UserError(
                    "generate_batch: a compiled model takes one adapter per call; call it once for each adapter"
                )
            return view(self._adapted, adapters)
        if first is None:
            return self.module
        if first not in self._uniform:
            self._uniform[first] = view(self._adapted, adapters[:1])
        return self._uniform[first]

    def compiled_for(self, module: CausalLM, adapter: str | None, *, growing: bool) -> Forward:
        """Compile a module from `module_for` with torch.compile, once; see `compiled_forward`."""
        if adapter not in self._compiled or self._compiled[adapter][0] is not module:
            self._compiled[adapter] = module, compiled_forward(module, growing=growing)
        return self._compiled[adapter][1]
