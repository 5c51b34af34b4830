"""Weights of a base with an adapter, as the source of a merged file.

    W' = W + s B A                         embedding: W' = W + s (B A)^T
    DoRA: W' = magnitude * (W + s B A) / norm of each row

Source: arXiv:2106.09685 section 4.1; DoRA arXiv:2402.09353; peft/tuners/lora/layer.py (`get_delta_weight`).
"""

from collections.abc import Iterator

import numpy as np

from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.files.packed import has_codes
from llorch.files.quant import GGMLType
from llorch.files.tensor_names import inventory
from llorch.judging.source.tensors import EMBEDDING, HEAD, Expected, ModelTensors, RowIds, WrongForm, half_ulp
from llorch.lora.adapter import Adapter
from llorch.lora.targets import LoraTarget, MatrixPart

_ROUNDING = 2.0**-7  # of the product B A, relative: PEFT multiplies in the dtype of the base, at least bfloat16
_FACTOR_ERROR = 0.02  # of a factor that was measured
_FACTORS = {0.0: "left out", -1.0: "subtracted", 2.0: "applied twice"}


class MergedTensors(ModelTensors):
    """Weights of a base with an adapter merged into them."""

    def __init__(self, base: Weights, adapter: Adapter) -> None:
        """Find the weights that an adapter changes; embedding and head of a tied base differ if one is adapted."""
        super().__init__(base)
        self.adapter = adapter
        self.parts: dict[str, tuple[LoraTarget, MatrixPart]] = {}
        for target in adapter.targets.values():
            for part in target.parts:
                name = HEAD if target.name == "lm_head" else canonical_name(part.name, self.config)
                self.parts[name] = target, part
        if HEAD not in self.forms and self.parts.keys() & {EMBEDDING, HEAD}:
            self.forms = {**self.forms, HEAD: self.forms[EMBEDDING]}

    def expect(self, name: str) -> Expected:
        """Return the function that computes the merged values of a weight."""
        return self._merge(name, 1.0) if name in self.parts else super().expect(name)

    def _merge(self, name: str, factor: float, error: float = 0.0) -> Expected:
        """Return the function that merges `factor` times the product; `error` is the uncertainty of the factor."""
        base_type = self.stored_type(name)
        kind = base_type if isinstance(base_type, GGMLType) and not has_codes(base_type) else GGMLType.BF16

        def expected(rows: RowIds) -> tuple[np.ndarray, np.ndarray | float]:
            delta = self.delta(name, rows)
            values = self.read(name, rows) + factor * delta
            scale = self._magnitude_factors(name, rows, values)
            merged = values * scale
            # The merged weight was stored in the type of the base, before it was converted.
            return merged, (_ROUNDING + error) * np.abs(delta * scale) + half_ulp(merged, kind)

        return expected

    def delta(self, name: str, rows: RowIds) -> np.ndarray:
        """Compute s B A of some rows of a weight, float64."""
        target, part = self.parts[name]
        lora = self.adapter.tensors[target.name]
        lora_A, lora_B = (array.astype(np.float64) for array in target.pair_of(part, lora.lora_A, lora.lora_B))
        scaling = self.adapter.scaling(target.name)
        if target.is_embedding:
            return scaling * (lora_A.T[rows] @ lora_B.T)
        if not target.n_experts:
            return scaling * (lora_B[rows] @ lora_A)
        experts, local = np.divmod(rows, lora_B.shape[1])
        return scaling * np.einsum("nr,nri->ni", lora_B[experts, local], lora_A[experts])

    def _magnitude_factors(self, name: str, rows: RowIds, merged: np.ndarray) -> np.ndarray | float:
        """Return DoRA's factor of each row, (rows, 1); 1 without DoRA."""
        target, part = self.parts[name]
        magnitude = self.adapter.tensors[target.name].magnitude
        if magnitude is None:
            return 1.0
        if target.is_embedding:
            everything = np.arange(self.form(name).weight_shape[0])
            whole = self.read(name, everything) + self.delta(name, everything)
            return (magnitude / np.linalg.norm(whole, axis=0))[None, :]
        of_part = magnitude if part.rows is None else magnitude[list(part.rows)]
        return of_part[rows][:, None] / np.linalg.norm(merged, axis=1, keepdims=True)

    def wrong_merges(self, file: ModelTensors, name: str, rows: RowIds) -> Iterator[WrongForm]:
        """Yield the base without the adapter, and with it subtracted, twice, or by the factor that fits best."""
        if name not in self.parts:
            return
        delta = self.delta(name, rows)
        square = float(np.vdot(delta, delta))
        change = file.read(name, rows) - self.read(name, rows)
        factor = float(np.vdot(change, delta)) / square if square else 0.0
        for wrong_factor in sorted(_FACTORS, key=lambda number: abs(number - factor)):
            yield WrongForm(
                f"adapter {_FACTORS[wrong_factor]}",
                f"the adapter is {_FACTORS[wrong_factor]}",
                self._merge(name, wrong_factor),
            )
        rounded = float(f"{factor:.2g}")
        merged = self._merge(name, factor, _FACTOR_ERROR * abs(factor))
        yield WrongForm("adapter scaled", f"the adapter is merged {rounded:g} times", merged)


def canonical_name(name: str, config: ModelConfig) -> str:
    """Return the canonical name of llorch's matrix `layers.3.q_proj`, see `forms`."""
    path = inventory(config)[name].huggingface.replace(".{e}", "")
    prefix, separator, module = path.rpartition("linear_attn.in_proj_")
    return f"{prefix}{separator}{name.rpartition('.in_')[2]}.weight" if module in ("qkvz.weight", "ba.weight") else path
