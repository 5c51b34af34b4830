"""Hypotheses that the engine decoded quantised matrices wrongly, from GGUF files or Hugging Face folders."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from llorch.diagnosis.attempt import Hypothesis
from llorch.diagnosis.mistakes import QUANTISED_FOLDERS, Mistake
from llorch.diagnosis.mistakes.norm import NORMS
from llorch.diagnosis.mistakes.quantised import QuantisedInputs
from llorch.diagnosis.mistakes.quantised_blocks import BLOCKS
from llorch.diagnosis.mistakes.quantised_folders import requantised, scale_denominators, wrong_reading
from llorch.diagnosis.replay import Change, LayerSetting
from llorch.diagnosis.search.hypotheses import WEIGHTED, ChangedWeights
from llorch.files import Weights
from llorch.files.quantised import QuantisedFolder
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.files.tensor_names import undo_interleave

DecodeWrongly = Callable[[str], np.ndarray | None]  # name to wrong matrix; None if it is read correctly
LEFT_ALONE = "left-alone-module-quantised"
_ADVICE = (
    "A matrix of floats was quantised like the others; use it as the file stores it, because the settings exclude it "
    "(ignore, modules_to_not_convert, llm_int8_skip_modules)."
)
MULTIPLIED = tuple(stage for stage in WEIGHTED if stage not in NORMS)  # stages that read a matrix; embed is first


def block_mistakes(weights: Weights) -> Iterator[Hypothesis]:
    """Yield the known mistakes in decoding the GGUF types of a file, or the schemes of a Hugging Face folder."""
    types = {weights.stored_type(name).name for name in weights if len(weights.shape(name)) == 2}
    for mistake in BLOCKS:
        if types & {*mistake.cases}:
            yield from _make_hypotheses(mistake, weights, partial(_decode_matrix, mistake, weights))
    for mistake in QUANTISED_FOLDERS:
        if any(kind.startswith(mistake.cases) for kind in types):
            yield from _make_hypotheses(mistake, weights, partial(_decode_folder_matrix, mistake, weights))
    yield from _unquantised_module(weights)


def _unquantised_module(weights: Weights) -> Iterator[Hypothesis]:
    """Yield the mistake of quantising modules that the folder's settings exclude, for each usual scale."""
    if not isinstance(weights.source, QuantisedFolder):
        return
    example = weights.source.packed(next(iter(weights.source.matrices)))
    assert isinstance(example, QuantisedMatrix)
    for denominator in scale_denominators(example):
        change = _change_weights(partial(_quantise_like, weights, example, denominator), weights, MULTIPLIED[1:])
        yield Hypothesis(LEFT_ALONE, "mistake", MULTIPLIED[1:], _ADVICE, change, by_place=False)


def _quantise_like(weights: Weights, example: QuantisedMatrix, denominator: float, name: str) -> np.ndarray | None:
    """Quantise a floating-point matrix with the folder's scheme; None for other weights."""
    packed = weights.as_stored(name)
    if isinstance(packed, QuantisedMatrix) or len(weights.shape(name)) != 2 or name == "embed_tokens":
        return None
    return requantised(weights.array(name), example, denominator)


def _make_hypotheses(mistake: Mistake[Any], weights: Weights, decode: DecodeWrongly) -> Iterator[Hypothesis]:
    """Yield a mistake twice: in all stored matrices, and in all but the embedding."""
    for stages in (MULTIPLIED, MULTIPLIED[1:]):  # engines often decode embedding rows in separate code
        change = _change_weights(decode, weights, stages)
        yield Hypothesis(mistake.name, "mistake", stages, mistake.diagnosis, change, by_place=False)


def _change_weights(decode: DecodeWrongly, weights: Weights, stages: Sequence[str]) -> Any:
    """Make the change that decodes weights wrongly; the embedding stays right unless `stages` has `embed`."""
    right_names = () if "embed" in stages else ("embed_tokens",)
    decode_once = lru_cache(maxsize=16)(lambda name: None if name in right_names else decode(name))

    def replace_matrix(names: Mapping[str, str], name: str, weight: Any) -> Any:
        matrix = decode_once(names.get(name, name))
        return weight if matrix is None else matrix

    def change(setting: LayerSetting) -> LayerSetting:
        def layer_weights(layer: int | None) -> Mapping[str, Any]:
            names = {} if layer is None else weights.layer(layer).names
            return ChangedWeights(setting.layer_weights(layer), partial(replace_matrix, names))

        return replace(setting, layer_weights=layer_weights)

    return lambda stage_keys: Change(setting=change)


def _decode_folder_matrix(mistake: Mistake[QuantisedMatrix], weights: Weights, name: str) -> np.ndarray | None:
    """Read a matrix of a folder as the mistake reads it; None if it is read correctly, or is a stack of experts."""
    matrix = wrong_reading(mistake, weights.as_stored(name)) if len(weights.shape(name)) == 2 else None
    return None if matrix is None else matrix.astype(weights.dtype)


def _decode_matrix(mistake: Mistake[QuantisedInputs], weights: Weights, name: str) -> np.ndarray | None:
    """Decode a matrix as the mistake decodes it; None if the matrix has another type."""
    packed, slot = weights.as_stored(name), weights.slots[name]
    if len(slot.shape) != 2 or packed.ggml_type.name not in mistake.cases:
        return None
    rows = packed.raw.reshape(slot.shape[0], -1)
    inputs = QuantisedInputs(packed.ggml, rows, slot.shape, np.empty((0, slot.shape[1]), np.float32))
    with np.errstate(all="ignore"):
        matrix = mistake.result(inputs, "decode").astype(weights.dtype)
    return undo_interleave(matrix, slot.interleaved_heads) if slot.interleaved_heads else matrix
