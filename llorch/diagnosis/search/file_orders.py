"""Detect arrays in the order of GGUF files: neighbouring RoPE pairs of queries and keys, tiled heads of a delta net.

A right engine may keep the order of its file if the permutation cancels: in the scores, and in the last product of a
delta net. An engine that permutes queries only, or rotates the wrong pairs, has a mistake to diagnose. So llorch undoes
the order in all arrays, checks the dump again, and keeps the result only if it cures every part of the permutation, no
other stage becomes wrong, and a right stage shows that the permutation cancels.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llorch.diagnosis.verdict import StageCheck
from llorch.engines.dumps.layout import PAIRED, VALUE_HEADS, undo_pairs, undo_tiles
from llorch.engines.dumps.stage_dump import DumpedArray, StageDump
from llorch.families.config import ModelConfig
from llorch.stages.comparison import FAIL
from llorch.stages.table import BY_NAME, Stage

_ROTATED = ({"q_rope"}, {"k_rope", "k_cache"})  # right stages of both sets show that RoPE turned the permuted pairs


@dataclass(frozen=True)
class FileOrder:
    """Order of rows in GGUF files that an engine may keep.

    Attributes:
        stages: Stages that have it.
        parts: Prefixes of stages that must all be cured.
        undo: Function that permutes an array of such a stage to llorch's order.
        note: Note for a dump that has the order.
    """

    stages: Collection[str]
    parts: tuple[str, ...]
    undo: Callable[[np.ndarray, Stage, ModelConfig], np.ndarray]
    note: str

    def apply(self, dump: StageDump, config: ModelConfig) -> StageDump:
        """Return the dump with its arrays in llorch's order, except those whose order was declared."""
        dumped = {
            (n_pass, key): self._permute(array, BY_NAME[_stage(key)], config) if _stage(key) in self.stages else array
            for (n_pass, key), array in dump.dumped.items()
        }
        return replace(dump, dumped=dumped, notes=(*dump.notes, self.note))

    def _permute(self, dumped: DumpedArray, stage: Stage, config: ModelConfig) -> DumpedArray:
        if dumped.is_reordered:
            return dumped
        return replace(dumped, read=lambda: np.ascontiguousarray(self.undo(dumped.read(), stage, config)))

    def parts_of(self, keys: Collection[tuple[int, str]]) -> set[str]:
        """Return the parts of the permutation to which some of these stages belong."""
        names = {_stage(key) for _, key in keys} & {*self.stages}
        return {part for part in self.parts if any(name.startswith(part) for name in names)}

    def is_kept(self, checks: Sequence[StageCheck], permuted: Sequence[StageCheck]) -> bool:
        """Tell if the engine keeps the order, from the checks of its dump without and with `apply`."""
        wrong, still_wrong = ({(c.n_pass, c.key) for c in run if c.verdict == FAIL} for run in (checks, permuted))
        parts = self.parts_of([(check.n_pass, check.key) for check in checks])
        if still_wrong - wrong or self.parts_of(wrong - still_wrong) != parts:
            return False
        right = [check for check in permuted if check.verdict != FAIL]
        cured = {_stage(key) for _, key in wrong - still_wrong}
        reads_order = any(check.stage not in self.stages and self._reads(check) for check in right)
        return reads_order or (self is PAIRS and all(cured & names for names in _ROTATED))

    def _reads(self, check: StageCheck) -> bool:
        """Tell if llorch computed the check's stage from stages with this order, dumped or not."""
        inputs = (name for key in check.ran_since for names in BY_NAME[_stage(key)].inputs for name in names.split("|"))
        return not {*self.stages}.isdisjoint(inputs)


PAIRS = FileOrder(
    PAIRED, ("q_", "k_"), undo_pairs,
    "queries and keys have the order of Llama GGUF files, in which RoPE turns neighbouring pairs (declare it with "
    'permuted = "interleaved"); it cancels in the scores, so llorch undoes it',
)  # fmt: skip
TILES = FileOrder(
    VALUE_HEADS, ("",), undo_tiles,
    "value heads of the delta nets have the tiled order of GGUF files (declare it with value_heads = \"tiled\"); it "
    "cancels in the last product, so llorch undoes it",
)  # fmt: skip


def orders_to_try(checks: Sequence[StageCheck], dump: StageDump, config: ModelConfig) -> Iterator[FileOrder]:
    """Yield the orders that the model's files may have and that may explain wrong stages of every part.

    A single token does not show the rotation, and its attention does not depend on queries and keys.
    """
    wrong = [(check.n_pass, check.key) for check in checks if check.verdict == FAIL]
    net = config.delta_net
    n_tokens = (dump.n_before or 0) + sum(len(tokens.ids) for tokens in dump.passes)
    has_pairs = n_tokens > 1 and not config.interleaved_rope_hf and config.rotated == config.head_dim
    for order, is_possible in ((PAIRS, has_pairs), (TILES, net is not None and net.n_key_heads < net.n_value_heads)):
        parts = order.parts_of([(check.n_pass, check.key) for check in checks])
        if is_possible and parts and order.parts_of(wrong) == parts:
            yield order


def _stage(key: str) -> str:
    return key.rpartition(".")[2]
