"""Known mistakes of reading quantised matrices of GGUF files and of folders: an engine ran with other numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from llorch.diagnosis.attempt import Hypothesis
from llorch.diagnosis.mistakes import Mistake
from llorch.diagnosis.mistakes.norm import NORMS
from llorch.diagnosis.mistakes.quantised import QuantisedInputs
from llorch.diagnosis.mistakes.quantised_blocks import BLOCKS
from llorch.diagnosis.mistakes.quantised_folders import QUANTISED_FOLDERS, divisors, requantised
from llorch.diagnosis.replay import Change, LayerSetting
from llorch.diagnosis.search.hypotheses import WEIGHTED, ChangedWeights
from llorch.files import Weights
from llorch.files.quantised import QuantisedFolder
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.files.tensor_names import undo_interleave

Wrong = Callable[[str], np.ndarray | None]  # a matrix by its name; None: it is read rightly
LEFT_ALONE = "left-alone-module-quantised"
_LEFT_ALONE_SAID = (
    "A matrix of floats was quantised like the others; use it as the file stores it, because the settings exclude it "
    "(ignore, modules_to_not_convert, llm_int8_skip_modules)."
)
MULTIPLIED = tuple(stage for stage in WEIGHTED if stage not in NORMS)


def block_mistakes(weights: Weights) -> Iterator[Hypothesis]:
    """Yield the known mistakes of the types and schemes that a file or a folder has."""
    types = {weights.stored_type(name).name for name in weights if len(weights.shape(name)) == 2}
    for mistake in BLOCKS:
        if types & {*mistake.cases}:
            yield from _hypotheses(mistake, weights, partial(_matrix, mistake, weights))
    for mistake in QUANTISED_FOLDERS:
        if any(kind.startswith(mistake.cases) for kind in types):
            yield from _hypotheses(mistake, weights, partial(_folder_matrix, mistake, weights))
    yield from _left_alone(weights)


def _left_alone(weights: Weights) -> Iterator[Hypothesis]:
    """Yield the mistake of quantising modules that the settings of a folder leave in floats, by each usual scale."""
    if not isinstance(weights.source, QuantisedFolder):
        return
    like = weights.source.packed(next(iter(weights.source.matrices)))
    assert isinstance(like, QuantisedMatrix)
    for divisor in divisors(like):
        change = _decoded_by(partial(_requantised, weights, like, divisor), weights, MULTIPLIED[1:])
        yield Hypothesis(LEFT_ALONE, "mistake", MULTIPLIED[1:], _LEFT_ALONE_SAID, change, by_place=False)


def _requantised(weights: Weights, like: QuantisedMatrix, divisor: float, name: str) -> np.ndarray | None:
    """Quantise a matrix of floats as the folder quantises others; None if it is no such matrix."""
    stored = weights.as_stored(name)
    if isinstance(stored, QuantisedMatrix) or len(weights.shape(name)) != 2 or name == "embed_tokens":
        return None
    return requantised(weights.array(name), like, divisor)


def _hypotheses(mistake: Mistake[Any], weights: Weights, wrong: Wrong) -> Iterator[Hypothesis]:
    """Yield a mistake twice: in all stored matrices, and in all but the embedding."""
    for stages in (MULTIPLIED, MULTIPLIED[1:]):  # rows of the embedding are often decoded by other code
        change = _decoded_by(wrong, weights, stages)
        yield Hypothesis(mistake.name, "mistake", stages, mistake.diagnosis, change, by_place=False)


def _decoded_by(decoded: Wrong, weights: Weights, stages: Sequence[str]) -> Any:
    """Make the change to wrongly decoded weights; the embedding stays right unless `stages` has `embed`."""
    right = () if "embed" in stages else ("embed_tokens",)
    wrong = lru_cache(maxsize=16)(lambda name: None if name in right else decoded(name))

    def decoded_or_right(names: Mapping[str, str], name: str, weight: Any) -> Any:
        matrix = wrong(names.get(name, name))
        return weight if matrix is None else matrix

    def change(setting: LayerSetting) -> LayerSetting:
        def layer_weights(layer: int | None) -> Mapping[str, Any]:
            names = {} if layer is None else weights.layer(layer).names
            return ChangedWeights(setting.layer_weights(layer), partial(decoded_or_right, names))

        return replace(setting, layer_weights=layer_weights)

    return lambda places: Change(setting=change)


def _folder_matrix(mistake: Mistake[QuantisedMatrix], weights: Weights, name: str) -> np.ndarray | None:
    """Read a matrix of a folder as the mistake reads it; None if the matrix has another scheme."""
    stored = weights.as_stored(name)
    if not isinstance(stored, QuantisedMatrix) or len(weights.shape(name)) != 2:
        return None
    if not stored.ggml_type.name.startswith(mistake.cases):
        return None
    with np.errstate(all="ignore"):
        return mistake.result(stored, "decode").astype(weights.dtype)


def _matrix(mistake: Mistake[QuantisedInputs], weights: Weights, name: str) -> np.ndarray | None:
    """Decode a matrix as the mistake decodes it; None if the matrix has another type."""
    packed, slot = weights.as_stored(name), weights.slots[name]
    if len(slot.shape) != 2 or packed.ggml_type.name not in mistake.cases:
        return None
    rows = packed.raw.reshape(slot.shape[0], -1)
    inputs = QuantisedInputs(packed.ggml, rows, slot.shape, np.empty((0, slot.shape[1]), np.float32))
    with np.errstate(all="ignore"):
        made = mistake.result(inputs, "decode").astype(weights.dtype)
    return undo_interleave(made, slot.interleaved_heads) if slot.interleaved_heads else made
