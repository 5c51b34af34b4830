"""How a run of the port is written down: which of its tensors, under which names, in which file."""

from collections.abc import Mapping

import numpy as np

from benchmarks.diagnosis.port import OWN_NAMES
from llorch.dumps.stage_dump import StageDump, Tokens
from llorch.stages import key

_STAGES = {own: stage for stage, own in OWN_NAMES.items()}


def stage_keys(tape: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What stands on the tape of a pass by the keys of the stage table."""
    return {stage_key(name): array for name, array in tape.items()}


def stage_key(name: str) -> str:
    """The key of the stage table for a name of the port, `blk0.q_rot`."""
    block, dot, own = name.rpartition(".")
    return key(_STAGES[own], int(block.removeprefix("blk")) if dot else None)


def in_memory(passes: list[Tokens], tapes: list[dict[str, np.ndarray]]) -> StageDump:
    """Everything, without a file."""
    return StageDump.of_arrays(passes, *map(stage_keys, tapes), source="port")
