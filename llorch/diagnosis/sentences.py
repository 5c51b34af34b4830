"""Sentences of findings: the cause, the pattern of the error inside the array, and the passes that have it."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from llorch.diagnosis.dump_checker import ArrayPair, pair_of
from llorch.diagnosis.expected import rows
from llorch.diagnosis.patterns import (
    describe_context_terms,
    describe_error,
    describe_kv_heads,
    describe_mask,
    describe_non_finite,
    describe_product_terms,
    describe_seen_keys,
    recover_probs,
)
from llorch.diagnosis.patterns.axes import N_LISTED, Axis, axes_of, join_words, split_heads
from llorch.diagnosis.patterns.describe import MAX_ELEMENTS
from llorch.diagnosis.replay import Arrays, Replay
from llorch.diagnosis.search.cause_search import CauseSearch
from llorch.diagnosis.verdict import StageCheck, count, percent
from llorch.engines.dumps.stage_dump import DumpedArray
from llorch.judging.types import Cause
from llorch.ops.numerics import QuantMethod
from llorch.stages.comparison import FAIL, safe_ratio
from llorch.stages.table import BY_NAME, Stage, input_keys, key, matrix_of

DECIDES = 2.0  # times: the worst element exceeds its tolerance by so much more than the array does
RECOVERED = 1e-4  # tolerance of probabilities that are recovered from contexts
N_SOURCES = 48  # most arrays of the dump that are compared with a wrong one


def describe_causes(causes: Sequence[Cause], starts_in: Sequence[str], passes: str) -> str:
    """Describe causes that explain an error together; `passes` is from `describe_passes`."""
    sentences = " And: ".join(cause.sentence for cause in causes)
    where = f" Wrong in {passes}." if passes else ""
    return f"{_origin(starts_in)}: {sentences} This explains {percent(causes[0].explained_share)} of the error.{where}"


def describe_unknown(
    check: StageCheck, starts_in: Sequence[str], pattern: str, passes: str, *, is_misread: bool
) -> str:
    """Describe an error without a known cause; `is_misread` tells that a quantised matrix has other numbers."""
    difference = check.isolated.difference
    words = [pattern or difference.fault or _describe_worst(check), passes]
    if difference.fault_kind == "non-finite":
        return f"{check.key}: {'; '.join(filter(None, words))}."
    reader = "; suspect the engine's reader: a matrix has other numbers than the folder" if is_misread else ""
    location = f"This error matches no known mistake; it starts in {_origin(starts_in)}{reader}."
    return f"{check.key}: {'; '.join([*filter(None, words)])}. {location}" if any(words) else f"{check.key}: {location}"


def _describe_worst(check: StageCheck) -> str:
    """Describe the worst element if it exceeds its tolerance by far more than the whole array does."""
    difference, tolerance = check.isolated.difference, check.isolated.tolerance
    whole = max(safe_ratio(difference.error, tolerance.error), safe_ratio(*difference.nearest_token(tolerance)))
    if safe_ratio(difference.worst, tolerance.worst) < DECIDES * whole:
        return ""
    return (
        f"one element decides, at {difference.index}: expected {difference.expected:.7g}, got {difference.actual:.7g}"
    )


def _origin(starts_in: Sequence[str]) -> str:
    return starts_in[0] if len(starts_in) == 1 else f"{starts_in[0]} to {starts_in[-1]}"


@np.errstate(all="ignore")  # numbers of a wrong engine may overflow
def describe_pattern(check: StageCheck, search: CauseSearch) -> str:
    """Describe where the error of a stage is and what its values are; empty if there is no pattern."""
    replay, fault = search.replay, check.isolated.difference.fault_kind
    stage, layer = replay.stages[check.key]
    if stage.is_selection or fault not in (None, "mask", "non-finite"):
        return ""
    computed, passed = search.run_part(check)
    dumped = replay.dump.dumped[check.n_pass, check.key]
    pair = pair_of(replay, dumped, check.key, computed[check.key])
    if pair.actual.shape != pair.expected.shape:
        return ""
    actual, expected = (split_heads(array, stage, replay.config) for array in (pair.actual, pair.expected))
    axes = _axes(stage, check.n_pass, expected, dumped, replay)
    if "topk" in stage.axes.split():
        ids = _rows(passed[key("topk_ids", layer)], key("topk_ids", layer), dumped, replay)
        axes.append(Axis("expert", ids.reshape(*ids.shape, *[1] * (expected.ndim - ids.ndim))))
    if fault == "mask":
        return describe_mask(actual, expected, axes)
    if fault == "non-finite":
        names = (name for name in input_keys(stage, layer, replay.config) if name in passed)
        inputs = {name: _rows(passed[name], name, dumped, replay) for name in names}
        return f"{describe_non_finite(actual, expected, inputs, axes)}{_describe_inputs(check, replay)}"
    if stage.name == "attn_probs" and (keys := describe_seen_keys(actual, expected, axes)):
        return keys
    sources = _sources(check, replay, computed, pair.actual.shape)
    words = describe_error(actual, expected, axes, tolerance=check.isolated.tolerance.error, sources=sources)
    terms = "" if ": " in words or dumped.heads else _describe_terms(check, pair, passed, dumped, replay)
    return ": ".join(filter(None, (words, terms)))


def _describe_terms(check: StageCheck, pair: ArrayPair, passed: Arrays, dumped: DumpedArray, replay: Replay) -> str:
    """Describe the terms of a product or of a sum of values that the engine counts wrongly; empty if there are none."""
    stage, layer = replay.stages[check.key]
    names = input_keys(stage, layer, replay.config)
    if stage.masked:
        q, keys = _rows(passed[names[0]], names[0], dumped, replay), passed[names[1]]
        if q.shape[-1] != keys.shape[-1] or len(keys) * pair.actual.size > MAX_ELEMENTS:
            return ""
        visible, by_kv_head = np.isfinite(pair.expected), np.einsum("thd,gkd->ghtk", q, keys)
        actual, expected, by_kv_head = (np.where(visible, x, 0) for x in (pair.actual, pair.expected, by_kv_head))
        return describe_kv_heads(actual, expected, by_kv_head)
    error = pair.expected - pair.actual
    matrix = matrix_of(stage, replay.config)
    if matrix and not stage.by_expert and error.ndim == 2:
        x, weight = _rows(passed[names[0]], names[0], dumped, replay), replay.layer_weights(layer)[matrix]
        dense = weight.dequantize() if isinstance(weight, QuantMethod) else np.asarray(weight)
        return describe_product_terms(error, x.reshape(len(x), -1), dense)
    if stage.name == "attn_context":
        probs, values = _rows(passed[names[0]], names[0], dumped, replay), passed[names[1]]
        shape = len(error), len(probs), -1
        terms = describe_context_terms(error.reshape(shape), probs, values)
        if not terms and len(values) * error.size <= MAX_ELEMENTS:
            actual, expected = (array.reshape(shape).swapaxes(0, 1) for array in (pair.actual, pair.expected))
            terms = describe_kv_heads(actual, expected, np.einsum("htk,gkd->ghtd", probs, values))
        return terms or _describe_recovered(check, pair.actual.reshape(shape), probs, values, dumped, replay)
    return ""


def _describe_recovered(
    check: StageCheck, context: np.ndarray, probs: np.ndarray, values: np.ndarray, dumped: DumpedArray, replay: Replay
) -> str:
    """Describe the probabilities that give the engine's contexts; empty if they do not follow, or have no pattern."""
    recovered = recover_probs(context, values)
    if recovered is None:
        return ""
    axes = _axes(BY_NAME["attn_probs"], check.n_pass, probs, dumped, replay)
    words = describe_seen_keys(recovered, probs, axes) or describe_error(recovered, probs, axes, tolerance=RECOVERED)
    return words and f"the probabilities that give this array: {words}"


def _axes(stage: Stage, n_pass: int, array: np.ndarray, dumped: DumpedArray, replay: Replay) -> list[Axis]:
    """List the axes of a dumped array, with positions and keys as the whole run counts them."""
    tokens, n_cached = replay.tokens(n_pass), replay.n_cached(n_pass)
    indices = np.arange(len(tokens.ids)) if dumped.tokens is None else np.asarray(dumped.tokens)
    n_keys = n_cached + len(tokens.ids)
    first_key = n_keys - dumped.keys if dumped.keys is not None else 0
    is_joined = "heads" not in stage.axes  # heads and their dimensions share an axis
    first_head = dumped.heads[0] // (replay.config.head_dim if is_joined else 1) if dumped.heads else 0
    positions = tokens.first_position + indices
    return axes_of(stage, array.shape, positions, n_cached + indices, first_key, first_head)


def _rows(array: np.ndarray, name: str, dumped: DumpedArray, replay: Replay) -> np.ndarray:
    """Select the tokens of an input that a dumped array has, and split its heads."""
    stage, _ = replay.stages[name]
    return split_heads(rows(array, stage, DumpedArray(name, "", lambda: array, dumped.tokens)), stage, replay.config)


def _describe_inputs(check: StageCheck, replay: Replay) -> str:
    """Tell if the dump has the inputs of a stage, and if they are finite."""
    stage, layer = replay.stages[check.key]
    names = input_keys(stage, layer, replay.config)
    dumped = [replay.dump.dumped[check.n_pass, name] for name in names if (check.n_pass, name) in replay.dump.dumped]
    if len(dumped) < len(names):
        return "; the dump lacks some of its inputs"
    is_finite = all((np.isfinite(array) | np.isneginf(array)).all() for array in (entry.read() for entry in dumped))
    return "; its inputs are finite" if is_finite else "; an input is not finite either"


def _sources(
    check: StageCheck, replay: Replay, computed: Arrays, shape: tuple[int, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arrays of a shape of which a wrong one may be a copy, with split heads: llorch's, then the engine's."""
    stage, _ = replay.stages[check.key]
    for name, array in _all_sources(check, replay, computed):
        if array.shape == shape:
            yield name, split_heads(array, stage, replay.config)


def _all_sources(check: StageCheck, replay: Replay, computed: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """Yield llorch's arrays of the layer, then the engine's arrays of the pass that have as many elements."""
    _, layer = replay.stages[check.key]
    for name, array in computed.items():
        other, other_layer = replay.stages[name]
        if name != check.key and other_layer == layer:
            yield f"the right {other.name}", array
    size, order = math.prod(replay.shape(check.n_pass, check.key)), replay.order
    names = [
        name
        for n_pass, name in replay.dump.dumped
        if n_pass == check.n_pass and name != check.key and math.prod(replay.shape(n_pass, name)) == size
    ]
    for name in sorted(names, key=lambda name: abs(order[name] - order[check.key]))[:N_SOURCES]:
        other, other_layer = replay.stages[name]
        place = f" of layer {other_layer}, as if never written" if other_layer not in (None, layer) else ""
        yield f"the engine's {other.name}{place}", replay.dump.dumped[check.n_pass, name].read()


def describe_passes(check: StageCheck, checks: Sequence[StageCheck], replay: Replay) -> str:
    """Tell in which passes a stage is wrong if it is right in others; empty if it is wrong in all."""
    same = [other for other in checks if other.key == check.key]
    wrong = [other.n_pass for other in same if other.verdict == FAIL]
    right = [other.n_pass for other in same if other.verdict != FAIL]
    if not wrong or not right:
        return ""
    sizes = sorted({len(replay.tokens(n_pass).ids) for n_pass in wrong})
    tokens = count(sizes[0], "token") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} tokens"
    are_steps = all(len(replay.tokens(n_pass).ids) == 1 for n_pass in right)
    others = "the steps are" if are_steps else f"pass {right[0]} is" if len(right) == 1 else "the others are"
    listed = f"pass{'es' if len(wrong) > 1 else ''} {join_words([str(n_pass) for n_pass in wrong])}"
    numbers = listed if len(wrong) <= N_LISTED else f"{len(wrong)} passes"
    return f"{numbers} of {len(replay.dump.passes)} only ({tokens}); {others} right"
