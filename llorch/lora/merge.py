"""Merge an adapter into its base weights in float64, rounding once to their dtype (s: the adapter's scaling).

    W' = W + s B A                         embedding: W' = W + s (B A)^T
    DoRA: W' = magnitude * (W + s B A) / norm of each row

Source: arXiv:2106.09685 section 4.1; DoRA arXiv:2402.09353; peft/tuners/lora/layer.py (`merge`, `get_delta_weight`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from llorch.files import Slot, Weights
from llorch.lora.adapter import Adapter, LoraTensors
from llorch.lora.targets import LoraTarget, MatrixPart
from llorch.runtime.errors import FormatError

_AT_ONCE = 1 << 20  # float64 elements in one chunk, 8 MB


class MergedWeights(Weights):
    """Weights whose adapted matrices are merged when read; the base file does not change."""

    def __init__(self, weights: Weights, adapter: Adapter) -> None:
        """Combine base and adapter; untie embedding and output if one is adapted, because they then differ."""
        slots: dict[str, Slot] = dict(weights.slots)
        config = weights.config
        if config.tie_word_embeddings and adapter.tensors.keys() & {"embed_tokens", "lm_head"}:
            config = replace(config, tie_word_embeddings=False)
            slots["lm_head"] = slots["embed_tokens"]
        super().__init__(
            config=config, path=weights.path, source=weights.source, slots=slots, left_out=weights.left_out
        )
        self.dtype = weights.dtype
        self.adapter = adapter

    def read(self, name: str, dtype: type[np.floating] = np.float32) -> Float[np.ndarray, "..."]:
        """Read and merge a weight in the dtype of the base or a wider one, without caching; see `Weights.read`."""
        array = super().read(name, np.promote_types(dtype, self.dtype).type)
        return merged_matrix(array, self.adapter, name, where=self.path) if self.is_changed(name) else array

    def is_changed(self, name: str) -> bool:
        """Tell if an adapter is merged into a weight."""
        return name in parts_of(self.adapter)

    def read_expert(self, name: str, number: int) -> np.ndarray:
        """Read and merge one expert in the dtype of the base, without caching; see `Weights.read_expert`."""
        array = super().read_expert(name, number).astype(self.dtype, copy=False)
        if not self.is_changed(name):
            return array
        return merged_matrix(array, self.adapter, name, expert=number, where=self.path)

    def _multiplies_itself(self, slot: Slot) -> bool:
        """Return False, so that matrices are read as arrays: the file's packed matrix is not the merged one."""
        return False


def parts_of(adapter: Adapter) -> Mapping[str, tuple[LoraTarget, MatrixPart]]:
    """Map each weight to the target, and the part of it, that change it; a tied `lm_head` is a weight of its own."""
    targets = adapter.targets.values()
    return {"lm_head" if t.name == "lm_head" else part.name: (t, part) for t in targets for part in t.parts}


def merged_matrix(
    weight: Float[np.ndarray, "*experts rows columns"],
    adapter: Adapter,
    name: str,
    *,
    expert: int | None = None,
    where: object = None,
) -> Float[np.ndarray, "*experts rows columns"]:
    """Merge the adapter of a weight, or of one expert, and round once; FormatError NonFinite if it overflows."""
    target, part = parts_of(adapter)[name]
    lora, scaling = adapter.tensors[target.name], adapter.scaling(target.name)
    lora_A, lora_B = target.pair_of(part, lora.lora_A, lora.lora_B)
    if target.n_experts and expert is None:
        experts = zip(weight, map(LoraTensors, lora_A, lora_B), strict=True)
        merged = np.stack([_merge_matrix(matrix, tensors, scaling, is_embedding=False) for matrix, tensors in experts])
    else:
        pair = (lora_A, lora_B) if expert is None else (lora_A[expert], lora_B[expert])
        magnitude = lora.magnitude if part.rows is None or lora.magnitude is None else lora.magnitude[[*part.rows]]
        merged = _merge_matrix(weight, LoraTensors(*pair, magnitude), scaling, is_embedding=target.is_embedding)
    if not np.isfinite(merged).all():
        raise FormatError(
            "NonFinite", f"{name}: expected finite numbers after merging, got NaN or infinity", path=str(where)
        )
    return merged


def _merge_matrix(weight: np.ndarray, tensors: LoraTensors, scaling: float, *, is_embedding: bool) -> np.ndarray:
    """Return the merged matrix in the dtype of `weight`, with DoRA's magnitudes if there are any."""
    factors = None
    if tensors.magnitude is not None:
        factors = tensors.magnitude / output_norms(weight, tensors, scaling, is_embedding=is_embedding)
        factors = factors[None, :] if is_embedding else factors[:, None]
    merged = np.empty_like(weight)
    with np.errstate(over="ignore", invalid="ignore"):
        for rows, merged_rows in _sums(weight, tensors, scaling, is_embedding=is_embedding):
            row_factors = factors if factors is None or is_embedding else factors[rows]
            merged[rows] = merged_rows if row_factors is None else merged_rows * row_factors
    return merged


def _sums(
    weight: np.ndarray, tensors: LoraTensors, scaling: float, *, is_embedding: bool
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield W + s B A in float64, in chunks of rows."""
    outputs, inputs = (tensors.lora_A.T, tensors.lora_B.T) if is_embedding else (tensors.lora_B, tensors.lora_A)
    inputs = inputs * np.float64(scaling)
    step = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        yield rows, weight[rows] + outputs[rows].astype(np.float64) @ inputs


def output_norms(weight: np.ndarray, tensors: LoraTensors, scaling: float, *, is_embedding: bool) -> np.ndarray:
    """Compute the norm of W + s B A for every output: each row of a matrix, each column of an embedding."""
    axis = 0 if is_embedding else 1
    squares = [np.square(part).sum(axis=axis) for _, part in _sums(weight, tensors, scaling, is_embedding=is_embedding)]
    return np.sqrt(np.sum(squares, axis=0) if is_embedding else np.concatenate(squares))
