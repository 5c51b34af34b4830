"""Several adapters beside one base that runs: each request is given a model of its own, which shares all weights.

The base's modules are never touched: without an adapter it runs as if there were none, with the same kernels, graphs
and bits. A view is a copy of the few modules that own kernels, with adapters put beside them; what a request uses
cannot change under it, whatever is added, removed or asked for meanwhile. A compiled model compiles each of them.
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

_OWNERS = (CausalLM, Decoder, nn.ModuleList, Block, Attention, GatedDeltaNet, MLP, SparseMoe, ExpertsModule)


def view(adapted: CausalLM, names: Sequence[str | None]) -> CausalLM:
    """Look at a model, or a view of it, through the adapter of each sequence, or one for batches of any size."""
    made = skeleton(adapted)
    rows = {name: [row for row, other in enumerate(names) if other == name] for name in names if name is not None}
    device = adapted.model.norm.weight.device
    routes = [
        (name, None if len(rows[name]) == len(names) else torch.tensor(rows[name], device=device)) for name in rows
    ]
    for path, _, lora_module in list(lora_modules(made)):
        own = copy(lora_module)
        own._modules = dict(lora_module._modules)
        own.parts = tuple(route for route in routes if route[0] in lora_module.names)
        made.set_submodule(path, own)
    return made


def skeleton(module: Any) -> Any:
    """Copy the modules that own kernels; the kernels are shared."""
    made = copy(module)
    made._modules = {
        name: skeleton(child) if isinstance(child, _OWNERS) else child for name, child in module._modules.items()
    }
    return made


class AdaptedModules(OpenModel):
    """A base module and the views of it through adapters; `module` is the pass without one."""

    def __init__(self, weights: Weights, module: CausalLM, *, compiled: bool) -> None:
        """Wrap a module that has its weights, with the kernels that it is to run with."""
        super().__init__(weights)
        self.module = module
        self._adapted = module  # from the first adapter on a copy, to which all are attached
        self._uniform: dict[str, CausalLM] = {}  # views for batches that want one adapter
        self.compiles = compiled
        self._compiled: dict[str | None, tuple[CausalLM, Forward]] = {}  # by adapter

    def add_adapter(self, name: str, adapter: Adapter | str | Path, *, any_base: bool = False) -> str:
        """See `OpenModel.add_adapter`; the tensors go where the model is, in float32, or in float64 for that base."""
        known = super().add_adapter(name, adapter, any_base=any_base)
        try:
            if self._adapted is self.module:
                self._adapted = skeleton(self.module)
            attach(self._adapted, self._adapters[name], name=name)
        except BaseException:
            super().remove_adapter(name)
            raise
        return known

    def remove_adapter(self, name: str) -> None:
        """See `OpenModel.remove_adapter`; views that were handed out keep it."""
        super().remove_adapter(name)
        detach(self._adapted, name)
        self._uniform.pop(name, None)
        self._compiled.pop(name, None)

    def module_for(self, adapters: Sequence[str | None]) -> CausalLM:
        """Return the module of a batch, with the adapters of its sequences.

        It is one and the same view wherever all sequences want the same adapter, and the base where none wants one.
        Raises ValueError if a compiled model is to use several adapters.
        """
        for name in adapters:
            require_known(name, self.adapters)
        (first, *others) = dict.fromkeys(adapters)
        if others:
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
