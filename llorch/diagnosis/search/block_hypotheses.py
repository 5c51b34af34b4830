"""Known mistakes of taking quantised blocks apart: the engine ran with other numbers than the file has."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes import Mistake
from llorch.diagnosis.mistakes.norm import NORMS
from llorch.diagnosis.mistakes.quantised import QuantisedInputs
from llorch.diagnosis.mistakes.quantised_blocks import BLOCKS
from llorch.diagnosis.replay import Change, Places, Setting
from llorch.diagnosis.search.hypotheses import WEIGHTED, Hypothesis
from llorch.files import Weights
from llorch.files.names import undo_interleave

MULTIPLIED = tuple(stage for stage in WEIGHTED if stage not in NORMS)


def block_mistakes(weights: Weights) -> Iterator[Hypothesis]:
    """Those of the types that a file has."""
    types = {weights.stored_type(name).name for name in weights if len(weights.shape(name)) == 2}
    for mistake in BLOCKS:
        if types & {*mistake.cases}:
            for stages in (MULTIPLIED, MULTIPLIED[1:]):  # rows of the embedding are often decoded by other code
                change = _decoded_by(mistake, weights, stages)
                yield Hypothesis(mistake.name, "mistake", stages, mistake.diagnosis, change, by_place=False)


def _decoded_by(mistake: Mistake[QuantisedInputs], weights: Weights, stages: Sequence[str]) -> Any:
    right = () if "embed" in stages else ("embed_tokens",)
    wrong = lru_cache(maxsize=16)(lambda name: None if name in right else _matrix(mistake, weights, name))

    def change(setting: Setting) -> Setting:
        return replace(
            setting, layer_weights=lambda layer: _Decoded(setting.layer_weights(layer), wrong, weights, layer)
        )

    def changed(places: Places) -> Change:
        return Change(setting=change)

    return changed


def _matrix(mistake: Mistake[QuantisedInputs], weights: Weights, name: str) -> np.ndarray | None:
    """A matrix as the mistake decodes it; None where it is of another type."""
    packed, slot = weights.as_stored(name), weights.slots[name]
    if len(slot.shape) != 2 or packed.ggml_type.name not in mistake.cases:
        return None
    rows = packed.raw.reshape(slot.shape[0], -1)
    inputs = QuantisedInputs(packed.ggml, rows, slot.shape, np.empty((0, slot.shape[1]), np.float32))
    with np.errstate(all="ignore"):
        made = mistake.wrong(inputs, "decode").astype(weights.dtype)
    return undo_interleave(made, slot.interleaved_heads) if slot.interleaved_heads else made


class _Decoded(Mapping[str, Any]):
    """Weights of a layer, or of what is outside the layers, those of some types decoded wrongly."""

    def __init__(self, right: Mapping[str, Any], wrong: Any, weights: Weights, layer: int | None) -> None:
        self._right, self._wrong = right, wrong
        self._names = {} if layer is None else weights.layer(layer).names

    def __getitem__(self, name: str) -> Any:
        right = self._right[name]
        wrong = self._wrong(self._names.get(name, name))
        return right if wrong is None else wrong

    def __iter__(self) -> Iterator[str]:
        return iter(self._right)

    def __len__(self) -> int:
        return len(self._right)
