"""Functions that contain a known mistake, as a learner types them: made from rows of `llorch.diagnosis.mistakes`.

A row that replaces a function of a lesson takes the arguments of that function. This module adapts the other rows.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise
from llorch.apps.learn.exercises.forward import LINEAR, RMS_NORM, ROPE, SWIGLU, our_linear
from llorch.apps.learn.exercises.quantised import our_q4_0, our_q8_0
from llorch.apps.learn.typed_training import typed_in_training
from llorch.diagnosis.mistakes import MISTAKES, QUANTISED, Mistake, QuantisedInputs
from llorch.diagnosis.mistakes.planting import instead, replaced
from llorch.files.quant import GGMLType

RIGHT_DECODERS = {GGMLType.Q8_0: our_q8_0, GGMLType.Q4_0: our_q4_0}
FLOATS = (np.float32, np.float64)
BLOCK = 32  # values in a block of Q8_0 or Q4_0
Tensor = Any  # of torch, which only lesson 14 imports
Typed = Callable[[Exercise], Mapping[str, Call]]  # of an exercise: the name of each mistake, and the function


def make_typed_mistakes(exercise: Exercise) -> Mapping[str, Call]:
    """Make the wrong functions of an exercise, by the names of the mistakes, in the order of the library."""
    return {name: _in_dtype(function) for name, function in SPECIAL.get(exercise.name, _replaced)(exercise).items()}


def _replaced(exercise: Exercise) -> Mapping[str, Call]:
    """Return an exercise's reference with each known mistake, by the mistake's name."""
    return {
        **{mistake.name: mistake.wrong(exercise.reference) for mistake in _mistakes_of(exercise.name)},
        **typed_in_training(exercise),
    }


def _mistakes_of(name: str) -> list[Mistake[Any]]:
    return [mistake for mistake in MISTAKES.values() if mistake.part == name]


def _in_dtype(function: Call) -> Call:
    """Round results that are wider than every array, as a lesson asks for: some rows compute in float64."""

    @wraps(function)
    def wrong(*given: Any, **named: Any) -> Any:
        dtypes = [each.dtype for each in (*given, *named.values()) if getattr(each, "dtype", None) in FLOATS]
        returned = function(*given, **named)
        if isinstance(returned, tuple):
            return tuple(_as(each, dtypes) for each in returned)
        return _as(returned, dtypes)

    return wrong


def _as(result: Any, dtypes: Sequence[np.dtype]) -> Any:
    """Round a float array to the first of the dtypes, unless it has one of them."""
    is_other = isinstance(result, np.ndarray) and result.dtype in FLOATS and result.dtype not in dtypes
    return result.astype(dtypes[0]) if is_other and dtypes else result


def _both_caches(exercise: Exercise) -> Mapping[str, Call]:
    """Do to keys and values alike what a row does to the rows of one cache."""

    def of_both(one: Call) -> Call:
        def append(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
            new_k, new_v = k.swapaxes(0, 1), v.swapaxes(0, 1)
            return one(past=past_k, new=new_k), one(past=past_v, new=new_v)

        return append

    def right(past: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.concatenate([past, new], axis=1)

    return {mistake.name: of_both(mistake.wrong(right)) for mistake in _mistakes_of(exercise.name)}


def _decoders(exercise: Exercise) -> Mapping[str, Call]:
    """Decode blocks of one type as each mistake of that type does."""
    kind = GGMLType[exercise.name.upper()]

    def decoder(mistake: Mistake[QuantisedInputs]) -> Call:
        def wrong(blocks: np.ndarray) -> np.ndarray:
            shape, no_inputs = (len(blocks), BLOCK), np.empty((0, 0), np.float32)
            with replaced(exercise.replaces, instead(RIGHT_DECODERS[kind])):  # where this function stands itself
                return mistake.result(QuantisedInputs(kind, blocks, shape, no_inputs), "decode").reshape(shape)

        return wrong

    able = (mistake for mistake in QUANTISED if "decode" in mistake.stages and kind.name in mistake.cases)
    return {mistake.name: decoder(mistake) for mistake in able}


def _outputs_of_attention(exercise: Exercise) -> Mapping[str, Call]:
    def of_output(linear: Call) -> Call:
        def attention_output(context: np.ndarray, o_proj: np.ndarray, o_bias: np.ndarray | None) -> np.ndarray:
            return linear(x=context, weight=o_proj, bias=o_bias)

        return attention_output

    return _of_products("attn_out", of_output)


def _feed_forwards(exercise: Exercise) -> Mapping[str, Call]:
    """Get the last product wrong, or the whole."""

    def of_down(linear: Call) -> Call:
        def feed_forward(
            h: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray
        ) -> np.ndarray:
            act = SWIGLU.reference(gate=our_linear(h, gate_proj), up=our_linear(h, up_proj))
            return linear(x=act, weight=down_proj, bias=None)

        return feed_forward

    return {**_replaced(exercise), **_of_products("ffn_out", of_down)}


def _logits_mistakes(exercise: Exercise) -> Mapping[str, Call]:
    """Get the product wrong, or what is done to the logits."""

    def of_output(linear: Call) -> Call:
        def logits(
            x: np.ndarray, final_norm: np.ndarray, lm_head: np.ndarray | None, embed_tokens: np.ndarray, eps: float
        ) -> np.ndarray:
            normed = RMS_NORM.reference(x=x, weight=final_norm, eps=eps)
            return linear(x=normed, weight=embed_tokens if lm_head is None else lm_head, bias=None)

        return logits

    return {**_replaced(exercise), **_of_products("logits", of_output)}


def _of_products(stage: str, brought: Callable[[Call], Call]) -> Mapping[str, Call]:
    """Put the wrong products that a stage can have into a function around them."""
    mistakes = (mistake for mistake in _mistakes_of("linear") if stage in mistake.stages)
    return {mistake.name: brought(mistake.wrong(LINEAR.reference)) for mistake in mistakes}


def _norms_of_tensors(exercise: Exercise) -> Mapping[str, Call]:
    """Normalise tensors as the wrong norms of lesson 01 normalise arrays."""

    def of_tensors(function: Call) -> Call:
        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return _like(x, function(x=_array(x), weight=_array(weight), eps=eps))

        return rms_norm

    return {name: of_tensors(function) for name, function in make_typed_mistakes(RMS_NORM).items()}


def _turns_of_tensors(exercise: Exercise) -> Mapping[str, Call]:
    """Rotate tensors as the wrong rotations of lesson 01b rotate arrays, one row of the batch after the other."""

    def of_tensors(function: Call) -> Call:
        def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            tables = (np.broadcast_to(_array(table, np.float64), (len(x), *table.shape[1:])) for table in (cos, sin))
            rows = [function(x=row, cos=c, sin=s) for row, c, s in zip(_array(x), *tables, strict=True)]
            return _like(x, np.stack(rows))

        return rope

    return {name: of_tensors(function) for name, function in make_typed_mistakes(ROPE).items()}


def _array(tensor: Tensor, dtype: type[np.floating] = np.float32) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().astype(dtype, copy=False)


def _like(x: Tensor, array: np.ndarray) -> Tensor:
    """Return the array as a tensor with the dtype and the device of `x`."""
    return x.new_tensor(array, dtype=x.dtype)


SPECIAL: Mapping[str, Typed] = {
    "append": _both_caches,
    "attention_output": _outputs_of_attention,
    "feed_forward": _feed_forwards,
    "logits": _logits_mistakes,
    "q8_0": _decoders,
    "q4_0": _decoders,
    "torch_rms_norm": _norms_of_tensors,
    "torch_rope": _turns_of_tensors,
}
