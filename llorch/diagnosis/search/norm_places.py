"""Check of arrays that may have been dumped at another point than their names say: norms, and YaRN's gain.

Arrays at a norm: the array alone does not decide, because an engine may have left out a norm or its gain, and the
diagnosis judges that. Later products decide: if they follow from the right point, the array was dumped at a wrong one.

YaRN's gain: an engine may multiply the scores by its square instead of cosines and sines by it. Both ways are
mathematically equal. Rotated queries and keys are then smaller by the gain, and the scores are right.
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

_UNIT = 3e-3  # how far the mean square of a normalised row is from 1, in bfloat16 too
_SAME = 1e-3  # relative error of the same array in another dtype
_CLOSE = 0.1  # relative error of a product, from what it is made of
_ROWS = 8  # are enough to tell
_PRODUCTS = {
    norm: tuple(sorted(stage.name for stage in DENSE_PRODUCTS if stage.inputs == (norm,)))
    for norm in ("attn_norm", "ffn_norm", "final_norm")
}


@dataclass(frozen=True)
class _Suspect:
    """An array that looks as if it stood elsewhere; what the norm would give if it does not, and if it does."""

    key: str
    looks: str
    norm: str
    layer: int | None
    as_named: np.ndarray
    as_it_looks: np.ndarray
    tokens: Sequence[int]


def check_norms(dump: StageDump, weights: Weights) -> list[str]:
    """Check that arrays at a norm were dumped before or after it, as their names say.

    Returns:
        Notes on arrays for which nothing in the dump tells the point.

    Raises:
        GuardFailed: An array was dumped at the wrong point.
    """
    notes = []
    for number in range(len(dump.passes)):
        for suspect in _misnamed_stages(dump, weights, number):
            is_wrong = _is_elsewhere(dump, weights, number, suspect)
            if is_wrong is None and suspect.key != suspect.norm:
                is_wrong = True  # a residual stream of unit rows, of which nothing else was made
            if is_wrong is None:
                notes.append(f"norm: {suspect.key} {suspect.looks}: no norm in the engine, or dumped at another point")
            if is_wrong:
                before = "before the final norm" if suspect.key != suspect.norm else "after the norm and its gain"
                raise GuardFailed(
                    "norm",
                    f"expected {suspect.key} {before}, got an array of pass {number} that {suspect.looks}; "
                    "dump the expected array, or leave this one out",
                    source=dump.source,
                )
    return notes


def _misnamed_stages(dump: StageDump, weights: Weights, number: int) -> Iterator[_Suspect]:
    """Yield the arrays of a pass that look as if they were dumped on the other side of a norm, or without its gain."""
    eps, last = weights.config.rms_norm_eps, input_key("last_block_out", None, weights.config)
    for name, stage, layer in keys(weights.config):
        if (number, name) not in dump.dumped or (stage.name not in _PRODUCTS and name != last):
            continue
        dumped = dump.dumped[number, name]
        array, tokens = dumped.read(), dumped_tokens(dump, number, dumped)
        norm = stage.name if name != last else "final_norm"
        gain = weights["final_norm"] if norm == "final_norm" else weights.layer(layer or 0)[norm]
        behind = rms_norm(array, gain.astype(array.dtype), eps=eps)
        if name == last:
            if _is_unit(array / np.where(gain, gain, 1)):
                yield _Suspect(name, "was taken after this norm", "final_norm", None, behind, array, tokens)
        elif _equals(dump, number, input_keys(stage, layer, weights.config)[0], array, tokens):
            yield _Suspect(name, "is the input of the norm", name, layer, array, behind, tokens)
        elif _is_unit(array) and not np.allclose(gain, 1, atol=0.05):
            yield _Suspect(name, "is normalised without the gain", name, layer, array, array * gain, tokens)


def _is_elsewhere(dump: StageDump, weights: Weights, number: int, suspect: _Suspect) -> bool | None:
    """Tell if the arrays made from a suspect fit what it looks like; None if nothing in the dump tells."""
    norm = suspect.norm.rpartition(".")[2]
    made = [] if suspect.norm == suspect.key else [norm]
    for name in (*made, *_PRODUCTS[norm]):
        place = number, key(name, suspect.layer)
        if place not in dump.dumped:
            continue
        theirs = dumped_tokens(dump, number, dump.dumped[place])
        common = [token for token in suspect.tokens if token in theirs][:_ROWS]
        seen = dump.dumped[place].read()[[theirs.index(token) for token in common]]
        rows = [suspect.tokens.index(token) for token in common]
        named, looks = (
            relative_distance(
                seen, array[rows] if name == norm else _product(weights, name, suspect.layer, array[rows])
            )
            for array in (suspect.as_named, suspect.as_it_looks)
        )
        if common and min(named, looks) < _CLOSE:
            return looks < named
    return None


def _product(weights: Weights, name: str, layer: int | None, rows: np.ndarray) -> np.ndarray:
    matrix = matrix_of(BY_NAME[name], weights.config)
    own = weights if layer is None else weights.layer(layer)
    return linear(rows, own[matrix], own.get(matrix.replace("_proj", "_bias")) if layer is not None else None)


def dumped_tokens(dump: StageDump, number: int, dumped: DumpedArray) -> Sequence[int]:
    """Return the tokens of a pass whose rows an array has."""
    return range(len(dump.passes[number].ids)) if dumped.tokens is None else dumped.tokens


def _equals(dump: StageDump, number: int, name: str, array: np.ndarray, tokens: Sequence[int]) -> bool:
    """Tell if the dump has an array of the same tokens and, but for rounding, the same values."""
    dumped = dump.dumped.get((number, name))
    if dumped is None or [*dumped_tokens(dump, number, dumped)] != [*tokens]:
        return False
    return relative_distance(array, dumped.read()) < _SAME


def _is_unit(rows: np.ndarray) -> bool:
    """Tell if every row has a mean square of 1; a single row may have it by chance, so it does not count."""
    return len(rows) > 1 and bool((np.abs(np.square(rows).mean(axis=-1) - 1) < _UNIT).all())


def relative_distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Divide the norm of a difference by the norm of the wanted values; the norm itself if these are zero."""
    size = float(np.linalg.norm(expected))
    return float(np.linalg.norm(actual - expected)) / size if size else float(np.linalg.norm(actual))


TURNED = ("q_rope", "k_rope", "q_tempered", "k_cache")
BEHIND = "attn_scores"
_MIXED = (BEHIND, "attn_probs", "attn_context")


def with_gain(dump: StageDump, config: ModelConfig) -> StageDump | None:
    """Multiply rotated queries and keys by the gain; None where the model has none, or the dump no such array."""
    yarn = config.rope_scaling
    gain = yarn.attention_factor if isinstance(yarn, YarnScaling) else 1.0
    turned = {place for place in dump.dumped if place[1].rpartition(".")[2] in TURNED}
    if gain == 1.0 or not turned:
        return None
    note = f"YaRN's gain, {gain:.6g}, is in the scale of the scores, not in queries and keys: this gives equal scores"
    dumped = {place: _times(dumped, gain) if place in turned else dumped for place, dumped in dump.dumped.items()}
    return replace(dump, dumped=dumped, notes=(*dump.notes, note))


def is_folded(as_shown: Sequence[StageCheck], with_it: Sequence[StageCheck]) -> bool:
    """Tell if the gain makes every wrong stage of attention right, the scores or a later stage included."""
    wrong, left = ({(r.n_pass, r.key) for r in results if r.verdict == FAIL} for results in (as_shown, with_it))
    if any(result.verdict == FAIL and result.stage in (*TURNED, *_MIXED) for result in with_it):
        return False
    cured = wrong - left
    return any((r.n_pass, r.key) in cured and any(at.endswith(BEHIND) for at in r.ran_since) for r in as_shown)


def _times(dumped: DumpedArray, gain: float) -> DumpedArray:
    """Return the dumped array as one that reads its values times the gain."""
    return replace(dumped, read=lambda: (read := dumped.read()) * read.dtype.type(gain))
