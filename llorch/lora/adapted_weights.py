"""Frozen weights with an adapter, for `forward` and `backward`. The base weights do not change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from llorch.files import Weights
from llorch.lora.adapter import LORA_A, LORA_B, MAGNITUDE, Adapter
from llorch.lora.targets import LoraTarget, MatrixPart
from llorch.ops.lora import Lora, LoraMatrix, Trained
from llorch.ops.numerics import Numerics


class AdaptedWeights(Weights):
    """Weights whose adapted matrices are `LoraMatrix`, with dense or packed base matrices of any dtype."""

    def __init__(
        self,
        weights: Weights,
        adapter: Adapter,
        *,
        parameters: Mapping[str, Float[np.ndarray, "..."]] | None = None,
        masks: Mapping[str, Float[np.ndarray, "seq in"]] | None = None,
    ) -> None:
        """Combine an adapter with a frozen base.

        `parameters` replace all tensors of the adapter, named as in `Adapter.flat`; float64 training passes float64
        arrays. `masks` are dropout masks of the adapter's inputs, by name of the adapted matrix.
        """
        vars(self).update(vars(weights))  # the same open file and the same arrays
        self._base = weights
        self._adapter = adapter
        self._parameters = adapter.flat() if parameters is None else parameters
        self._masks = {} if masks is None else masks
        targets = adapter.targets.values()
        self._linear_targets = {part.name: (t, part) for t in targets if not t.is_embedding for part in t.parts}
        self._embedding_targets = {target.weight: target for target in targets if target.is_embedding}
        self._names = self._linear_targets.keys() | self._embedding_targets.keys()
        self._adapted: dict[str, LoraMatrix | AdaptedExperts] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            return self._base[name]
        if name not in self._adapted:
            target, part = self._linear_targets.get(name, (None, None))
            if target is not None and part is not None and target.n_experts:
                loras = [self._make_lora(target, part, expert) for expert in range(target.n_experts)]
                self._adapted[name] = AdaptedExperts(self._base[name], loras)
            else:
                lora, embedding_lora = self._make_lora(target, part), self._make_lora(self._embedding_targets.get(name))
                self._adapted[name] = LoraMatrix(self._base[name], lora, embedding_lora=embedding_lora)
        return self._adapted[name]

    def astype(self, dtype: type[np.floating], *, keep: bool = False) -> "AdaptedWeights":
        """Return the same adapter and base file in another dtype."""
        return self._with_base(self._base.astype(dtype, keep=keep))

    def using(self, numerics: Numerics | None = None, *, packed: bool | None = None) -> "AdaptedWeights":
        """Return the same adapter with the base in other numerics, packed or not; None keeps the present setting."""
        return self._with_base(self._base.using(numerics, packed=packed))

    def _with_base(self, weights: Weights) -> "AdaptedWeights":
        """Return a copy with another base and the same adapter."""
        return AdaptedWeights(weights, self._adapter, parameters=self._parameters, masks=self._masks)

    def _make_lora(
        self, target: LoraTarget | None, part: MatrixPart | None = None, expert: int | None = None
    ) -> Lora | None:
        """Make the LoRA of a matrix (a target, or its part or expert) in the run's dtype; None without a target."""
        if target is None:
            return None
        values = {kind: self._parameters.get(f"{target.name}.{kind}") for kind in (LORA_A, LORA_B, MAGNITUDE)}
        arrays: dict[str, Any] = {kind: array for kind, array in values.items() if array is not None}
        share = None
        if part is not None and (part.rows is not None or expert is not None):
            share = Share(target, part, expert, {kind: array.shape for kind, array in arrays.items()})
            arrays = share.of(arrays)
        if (mask := self._masks.get(target.name)) is not None:
            arrays["mask"] = mask
        arrays = {kind: array.astype(self.dtype) for kind, array in arrays.items()}
        name = "" if share is None else target.name.rpartition(".")[2]
        return Lora(scaling=self._adapter.scaling(target.name), name=name, pad=share, **arrays)


@dataclass(frozen=True)
class Share:
    """Share of a target's tensors that belongs to one matrix; a call maps its gradients to complete tensors."""

    target: LoraTarget
    part: MatrixPart
    expert: int | None
    shapes: Mapping[str, tuple[int, ...]]

    def of(self, arrays: Trained) -> Trained:
        """Return the tensors of this matrix, as views where possible."""
        lora_A, lora_B = self.target.by_expert(arrays[LORA_A], arrays[LORA_B])
        if self.expert is not None:
            lora_A, lora_B = lora_A[self.expert], lora_B[self.expert]
        arrays_of_matrix = {LORA_A: lora_A, LORA_B: lora_B[self._rows]}
        return arrays_of_matrix | ({MAGNITUDE: arrays[MAGNITUDE][self._rows]} if MAGNITUDE in arrays else {})

    def __call__(self, trained: Trained) -> Trained:
        """Write the gradients of this matrix into the complete tensors, with zeros elsewhere."""
        grads = {kind: np.zeros(shape, trained[kind].dtype) for kind, shape in self.shapes.items()}
        lora_A, lora_B = self.target.by_expert(grads[LORA_A], grads[LORA_B])
        if self.expert is not None:
            lora_A, lora_B = lora_A[self.expert], lora_B[self.expert]
        lora_A[...], lora_B[self._rows] = trained[LORA_A], trained[LORA_B]
        if MAGNITUDE in grads:
            grads[MAGNITUDE][self._rows] = trained[MAGNITUDE]
        return grads

    @property
    def _rows(self) -> Any:
        """Return the index of this matrix's rows in lora_B and in the magnitudes."""
        return ... if self.part.rows is None else np.array(self.part.rows)


class AdaptedExperts(Sequence[LoraMatrix]):
    """Matrices of all experts with their adapters; each `LoraMatrix` is made when an expert is selected."""

    def __init__(self, base: Sequence[Any], loras: Sequence[Lora | None]) -> None:
        """Store the matrix and the LoRA (or None) of each expert."""
        self._base, self._loras = base, loras

    def __getitem__(self, expert: Any) -> Any:
        return LoraMatrix(self._base[expert], self._loras[expert])

    def __len__(self) -> int:
        return len(self._loras)
