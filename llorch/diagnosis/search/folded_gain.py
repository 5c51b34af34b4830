"""YaRN's gain in another place: an engine may multiply the scores by its square instead of cosines and sines by it.

Both ways are mathematically equal. Rotated queries and keys are then smaller by the gain, and the scores are right.
"""

from collections.abc import Sequence
from dataclasses import replace

from llorch.diagnosis.verdict import WRONG, StageResult
from llorch.engines.dumps.stage_dump import DumpedArray, StageDump
from llorch.families.config import ModelConfig, YarnScaling

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


def is_folded(as_shown: Sequence[StageResult], with_it: Sequence[StageResult]) -> bool:
    """Tell if the gain makes every wrong stage of attention right, the scores or a later stage included."""
    wrong, left = ({(r.n_pass, r.key) for r in results if r.verdict == WRONG} for results in (as_shown, with_it))
    if any(result.verdict == WRONG and result.stage in (*TURNED, *_MIXED) for result in with_it):
        return False
    cured = wrong - left
    return any((r.n_pass, r.key) in cured and any(at.endswith(BEHIND) for at in r.ran_since) for r in as_shown)


def _times(dumped: DumpedArray, gain: float) -> DumpedArray:
    """Return the dumped array as one that reads its values times the gain."""
    return replace(dumped, read=lambda: (read := dumped.read()) * read.dtype.type(gain))
