"""Detect arrays that were dumped at another point than their names say: at norms, and at YaRN's attention factor.

Norms: the array alone does not decide, because an engine that omits a norm or its gain has a mistake to diagnose. Later
products decide: if they follow from the right array, the dumped array was captured at a wrong point.

YaRN: an engine may multiply the scores by the squared attention factor instead of cosines and sines by the factor. Both
ways are mathematically equal. Rotated queries and keys then lack the factor, and the scores are right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llorch.diagnosis.verdict import StageCheck
from llorch.engines.dumps.stage_dump import DumpedArray, StageDump
from llorch.families.config import ModelConfig, YarnScaling
from llorch.files import Weights
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.runtime.errors import GuardFailed
from llorch.stages.comparison import FAIL
from llorch.stages.table import BY_NAME, DENSE_PRODUCTS, input_key, input_keys, key, keys, matrix_of

_UNIT = 3e-3  # largest distance from 1 of a normalised row's mean square, in bfloat16 too
_SAME = 1e-3  # largest relative error of the same array in another dtype
_CLOSE = 0.1  # largest relative error of a product computed from the right inputs
_ROWS = 8  # rows that are enough to decide
_PRODUCTS = {  # norm -> products that read its output
    norm: tuple(sorted(stage.name for stage in DENSE_PRODUCTS if stage.inputs == (norm,)))
    for norm in ("attn_norm", "ffn_norm", "final_norm")
}


@dataclass(frozen=True)
class _MisplacedArray:
    """Array that may have been dumped at another point (`looks`), with the norm's output in both cases."""

    key: str
    looks: str
    norm: str
    layer: int | None
    as_named: np.ndarray
    as_it_looks: np.ndarray
    tokens: Sequence[int]


def check_norms(dump: StageDump, weights: Weights) -> list[str]:
    """Check that arrays at a norm were dumped before or after it, as their names say; GuardFailed if one was not.

    Return notes on arrays whose point the dump does not reveal.
    """
    notes = []
    for n_pass in range(len(dump.passes)):
        for suspect in _misnamed_stages(dump, weights, n_pass):
            is_wrong = _is_misplaced(dump, weights, n_pass, suspect)
            if is_wrong is None and suspect.key != suspect.norm:
                is_wrong = True  # a residual stream never has unit rows
            if is_wrong is None:
                notes.append(f"norm: {suspect.key} {suspect.looks}: no norm in the engine, or dumped at another point")
            if is_wrong:
                point = "before the final norm" if suspect.key != suspect.norm else "after the norm and its gain"
                raise GuardFailed(
                    "norm",
                    f"expected {suspect.key} {point}, got an array of pass {n_pass} that {suspect.looks}; "
                    "dump the expected array, or leave this one out",
                    source=dump.source,
                )
    return notes


def _misnamed_stages(dump: StageDump, weights: Weights, n_pass: int) -> Iterator[_MisplacedArray]:
    """Yield the arrays of a pass that were apparently dumped on the other side of a norm, or without its gain."""
    eps, last = weights.config.rms_norm_eps, input_key("last_block_out", None, weights.config)
    for name, stage, layer in keys(weights.config):
        if (n_pass, name) not in dump.dumped or (stage.name not in _PRODUCTS and name != last):
            continue
        dumped = dump.dumped[n_pass, name]
        array, tokens = dumped.read(), dumped_tokens(dump, n_pass, dumped)
        norm = stage.name if name != last else "final_norm"
        gain = weights["final_norm"] if norm == "final_norm" else weights.layer(layer or 0)[norm]
        normalised = rms_norm(array, gain.astype(array.dtype), eps=eps)
        if name == last:
            if _is_unit(array / np.where(gain, gain, 1)):  # a gain of 0 leaves nothing to divide
                yield _MisplacedArray(name, "was taken after this norm", "final_norm", None, normalised, array, tokens)
        elif _equals(dump, n_pass, input_keys(stage, layer, weights.config)[0], array, tokens):
            yield _MisplacedArray(name, "is the input of the norm", name, layer, array, normalised, tokens)
        elif _is_unit(array) and not np.allclose(gain, 1, atol=0.05):  # a gain of about 1 changes nothing
            yield _MisplacedArray(name, "is normalised without the gain", name, layer, array, array * gain, tokens)


def _is_misplaced(dump: StageDump, weights: Weights, n_pass: int, suspect: _MisplacedArray) -> bool | None:
    """Tell if later arrays follow from the apparent point instead of the named one; None if the dump lacks them."""
    norm = suspect.norm.rpartition(".")[2]
    norm_output = [] if suspect.norm == suspect.key else [norm]
    for name in (*norm_output, *_PRODUCTS[norm]):
        array_key = n_pass, key(name, suspect.layer)
        if array_key not in dump.dumped:
            continue
        dumped_rows = dumped_tokens(dump, n_pass, dump.dumped[array_key])
        common = [token for token in suspect.tokens if token in dumped_rows][:_ROWS]
        actual = dump.dumped[array_key].read()[[dumped_rows.index(token) for token in common]]
        rows = [suspect.tokens.index(token) for token in common]
        distance_named, distance_looks = (
            relative_distance(
                actual, array[rows] if name == norm else _product(weights, name, suspect.layer, array[rows])
            )
            for array in (suspect.as_named, suspect.as_it_looks)
        )
        if common and min(distance_named, distance_looks) < _CLOSE:
            return distance_looks < distance_named
    return None


def _product(weights: Weights, name: str, layer: int | None, rows: np.ndarray) -> np.ndarray:
    matrix = matrix_of(BY_NAME[name], weights.config)
    w = weights if layer is None else weights.layer(layer)
    return linear(rows, w[matrix], w.get(matrix.replace("_proj", "_bias")) if layer is not None else None)


def dumped_tokens(dump: StageDump, n_pass: int, dumped: DumpedArray) -> Sequence[int]:
    """Return the tokens of a pass whose rows an array has."""
    return range(len(dump.passes[n_pass].ids)) if dumped.tokens is None else dumped.tokens


def _equals(dump: StageDump, n_pass: int, name: str, array: np.ndarray, tokens: Sequence[int]) -> bool:
    """Tell if the dump has an array of the same tokens and the same values, up to rounding."""
    dumped = dump.dumped.get((n_pass, name))
    if dumped is None or [*dumped_tokens(dump, n_pass, dumped)] != [*tokens]:
        return False
    return relative_distance(array, dumped.read()) < _SAME


def _is_unit(rows: np.ndarray) -> bool:
    """Tell if every row has a mean square of 1; a single row may have it by chance, so it does not count."""
    return len(rows) > 1 and bool((np.abs(np.square(rows).mean(axis=-1) - 1) < _UNIT).all())


def relative_distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Divide the norm of the difference by the norm of the expected values; do not divide if that is 0."""
    size = float(np.linalg.norm(expected))
    return float(np.linalg.norm(actual - expected)) / size if size else float(np.linalg.norm(actual))


ROTATED_STAGES = ("q_rope", "k_rope", "q_tempered", "k_cache")
SCORES = "attn_scores"
_AFTER_ROTATION = (SCORES, "attn_probs", "attn_context")


def with_gain(dump: StageDump, config: ModelConfig) -> StageDump | None:
    """Multiply dumped rotated queries and keys by YaRN's attention factor; None without a factor or such arrays."""
    yarn = config.rope_scaling
    gain = yarn.attention_factor if isinstance(yarn, YarnScaling) else 1.0
    rotated = {key for key in dump.dumped if key[1].rpartition(".")[2] in ROTATED_STAGES}
    if gain == 1.0 or not rotated:
        return None
    note = f"YaRN's gain, {gain:.6g}, is in the scale of the scores, not in queries and keys: this gives equal scores"
    dumped = {key: _times(dumped, gain) if key in rotated else dumped for key, dumped in dump.dumped.items()}
    return replace(dump, dumped=dumped, notes=(*dump.notes, note))


def is_folded(checks: Sequence[StageCheck], scaled: Sequence[StageCheck]) -> bool:
    """Tell if scaling (`with_gain`) cures the scores or a later stage, and leaves no wrong stage of attention."""
    wrong, still_wrong = ({(c.n_pass, c.key) for c in run if c.verdict == FAIL} for run in (checks, scaled))
    if any(check.verdict == FAIL and check.stage in (*ROTATED_STAGES, *_AFTER_ROTATION) for check in scaled):
        return False
    cured = wrong - still_wrong
    return any((c.n_pass, c.key) in cured and any(key.endswith(SCORES) for key in c.ran_since) for c in checks)


def _times(dumped: DumpedArray, gain: float) -> DumpedArray:
    """Return a dumped array whose values are multiplied by the factor when read."""
    return replace(dumped, read=lambda: (array := dumped.read()) * array.dtype.type(gain))
