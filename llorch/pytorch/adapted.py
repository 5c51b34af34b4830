"""Adapters of a model that runs in torch: which module a batch goes through, compiled or not."""

from collections.abc import Sequence
from pathlib import Path

from llorch.files import Weights
from llorch.lora.adapter import Adapter, require_known
from llorch.model import Opened
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.cuda.graph import compiled_forward
from llorch.pytorch.decoding import Forward
from llorch.pytorch.lora.serving import Views


class AdaptedModules(Opened):
    """A base module and the views of it through adapters; `module` is the pass without one."""

    def __init__(self, weights: Weights, module: CausalLM, *, compiled: bool) -> None:
        """Wrap a module that has its weights."""
        super().__init__(weights)
        self.module = module
        self._views = Views(module)
        self._compiles = compiled
        self._compiled: dict[str | None, tuple[CausalLM, Forward]] = {}  # by adapter

    def add_adapter(self, name: str, adapter: Adapter | str | Path, *, any_base: bool = False) -> str:
        """See `Opened.add_adapter`; the tensors go where the model is, in float32, or float64 beside a float64 base."""
        known = super().add_adapter(name, adapter, any_base=any_base)
        try:
            self._views.add(name, self._adapters[name])
        except BaseException:
            super().remove_adapter(name)
            raise
        return known

    def remove_adapter(self, name: str) -> None:
        """See `Opened.remove_adapter`."""
        super().remove_adapter(name)
        self._views.remove(name)
        self._compiled.pop(name, None)

    def module_for(self, adapters: Sequence[str | None]) -> CausalLM:
        """The module of a batch: the same one whenever one adapter or none is asked for."""
        for name in adapters:
            require_known(name, self.adapters)
        if self._compiles and len(set(adapters)) > 1:
            raise ValueError("generate_batch: a compiled model takes one adapter per call; make a call for each")
        return self._views.of(adapters)

    def compiled_for(self, module: CausalLM, adapter: str | None, *, growing: bool) -> Forward:
        """A module from `module_for` through torch.compile, once; see `compiled_forward`."""
        if adapter not in self._compiled or self._compiled[adapter][0] is not module:
            self._compiled[adapter] = module, compiled_forward(module, growing=growing)
        return self._compiled[adapter][1]
