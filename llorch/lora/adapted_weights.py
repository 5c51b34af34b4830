"""Frozen weights with an adapter beside them: what `forward` runs and `backward` reads. No number of theirs changes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from llorch.files import Weights
from llorch.lora.adapter import LORA_A, LORA_B, MAGNITUDE, Adapter
from llorch.lora.config import Target
from llorch.numerics import Numerics
from llorch.ops.lora import Lora, LoraMatrix


class AdaptedWeights(Weights):
    """Weights whose adapted matrices are `LoraMatrix`, over dense or packed ones, in any dtype."""

    def __init__(
        self,
        weights: Weights,
        adapter: Adapter,
        *,
        parameters: Mapping[str, Float[np.ndarray, "..."]] | None = None,
        masks: Mapping[str, Float[np.ndarray, "seq in"]] | None = None,
    ) -> None:
        """Put an adapter beside a frozen base.

        `parameters`, named as in `Adapter.flat`, are used in place of the adapter's; in the midst of a float64 training
        they are float64. `masks` are dropout masks of the adapters' inputs by canonical name; without one nothing is
        dropped.
        """
        vars(self).update(vars(weights))  # the same open file and the same arrays
        self._base = weights
        self._adapter = adapter
        self._parameters = adapter.flat() if parameters is None else parameters
        self._masks = {} if masks is None else masks
        targets = adapter.targets.values()
        self._of_products = {target.weight: target for target in targets if not target.is_embedding}
        self._of_rows = {target.weight: target for target in targets if target.is_embedding}
        self._names = self._of_products.keys() | self._of_rows.keys()
        self._adapted: dict[str, LoraMatrix] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            return self._base[name]
        if name not in self._adapted:
            lora, embedding_lora = self._lora(self._of_products.get(name)), self._lora(self._of_rows.get(name))
            self._adapted[name] = LoraMatrix(self._base[name], lora, embedding_lora=embedding_lora)
        return self._adapted[name]

    def astype(self, dtype: type[np.floating], *, keep: bool = False) -> "AdaptedWeights":
        """The same adapter over the same file, base, adapter and run in another type."""
        return self._beside(self._base.astype(dtype, keep=keep))

    def using(self, numerics: Numerics | None = None, *, packed: bool | None = None) -> "AdaptedWeights":
        """The same adapter beside the base in another arithmetic, packed or not; None keeps what it has."""
        return self._beside(self._base.using(numerics, packed=packed))

    def _beside(self, weights: Weights) -> "AdaptedWeights":
        return AdaptedWeights(weights, self._adapter, parameters=self._parameters, masks=self._masks)

    def _lora(self, target: Target | None) -> Lora | None:
        if target is None:
            return None
        values = {kind: self._parameters.get(f"{target.name}.{kind}") for kind in (LORA_A, LORA_B, MAGNITUDE)}
        values["mask"] = self._masks.get(target.name)
        arrays: Any = {kind: None if array is None else array.astype(self.dtype) for kind, array in values.items()}
        return Lora(scaling=self._adapter.scaling(target.name), **arrays)
