"""Merging: an adapter's product added to the weights it stands beside, in float64, rounded once to their dtype.

    W' = W + s B A                         of an embedding: W' = W + s (B A)^T
    DoRA: W' = magnitude * (W + s B A) / length of each of its rows

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

_AT_ONCE = 1 << 20  # elements in float64 at a time


class MergedWeights(Weights):
    """A base whose adapted matrices are read with the adapter merged in; the file is not touched."""

    def __init__(self, weights: Weights, adapter: Adapter) -> None:
        """Put both together; tied embedding and output become two where one of them is adapted."""
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
        """Read a weight in the dtype of the base or a wider one, merged anew and not kept; see `Weights.read`."""
        array = super().read(name, np.promote_types(dtype, self.dtype).type)
        return merged_matrix(array, self.adapter, name, where=self.path) if self.is_changed(name) else array

    def is_changed(self, name: str) -> bool:
        """Tell if an adapter is merged into a weight."""
        return name in parts_of(self.adapter)

    def read_expert(self, name: str, number: int) -> np.ndarray:
        """Return one expert in the dtype of the base, merged anew; see `Weights.read_expert`."""
        array = super().read_expert(name, number).astype(self.dtype, copy=False)
        if not self.is_changed(name):
            return array
        return merged_matrix(array, self.adapter, name, expert=number, where=self.path)

    def _multiplies_itself(self, slot: Slot) -> bool:
        """Return False, so that merged matrices are read as arrays."""
        return False  # what the file packs is not what is multiplied


def parts_of(adapter: Adapter) -> Mapping[str, tuple[LoraTarget, MatrixPart]]:
    """Map each weight to the target and the part that change it. A tied `lm_head` has become a separate weight."""
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
    """Merge the adapter of a weight, or of one expert, and round once; FormatError NonFinite where that overflows."""
    target, part = parts_of(adapter)[name]
    whole, scaling = adapter.tensors[target.name], adapter.scaling(target.name)
    lora_A, lora_B = target.pair_of(part, whole.lora_A, whole.lora_B)
    if target.n_experts and expert is None:
        each = zip(weight, map(LoraTensors, lora_A, lora_B), strict=True)
        merged = np.stack([_merge_matrix(one, tensors, scaling, is_embedding=False) for one, tensors in each])
    else:
        pair = (lora_A, lora_B) if expert is None else (lora_A[expert], lora_B[expert])
        magnitude = whole.magnitude if part.rows is None or whole.magnitude is None else whole.magnitude[[*part.rows]]
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
        factors = tensors.magnitude / output_lengths(weight, tensors, scaling, is_embedding=is_embedding)
        factors = factors[None, :] if is_embedding else factors[:, None]
    merged = np.empty_like(weight)
    with np.errstate(over="ignore", invalid="ignore"):
        for rows, wide in _sums(weight, tensors, scaling, is_embedding=is_embedding):
            own = factors if factors is None or is_embedding else factors[rows]
            merged[rows] = wide if own is None else wide * own
    return merged


def _sums(
    weight: np.ndarray, tensors: LoraTensors, scaling: float, *, is_embedding: bool
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield W + s B A in float64, some rows at a time."""
    left, right = (tensors.lora_A.T, tensors.lora_B.T) if is_embedding else (tensors.lora_B, tensors.lora_A)
    right = right * np.float64(scaling)
    step = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        yield rows, weight[rows] + left[rows].astype(np.float64) @ right


def output_lengths(weight: np.ndarray, tensors: LoraTensors, scaling: float, *, is_embedding: bool) -> np.ndarray:
    """Measure the length |W + s B A| of every output: of a row of a matrix, of a column of an embedding."""
    axis = 0 if is_embedding else 1
    squares = [np.square(wide).sum(axis=axis) for _, wide in _sums(weight, tensors, scaling, is_embedding=is_embedding)]
    return np.sqrt(np.sum(squares, axis=0) if is_embedding else np.concatenate(squares))
