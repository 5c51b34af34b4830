"""Mistakes that can be planted in the port, by what they spoil. None was written after the known mistakes' code."""

from benchmarks.diagnosis.bugs import (
    approximations,
    attentions,
    blocks,
    buffers,
    caches,
    loops,
    norms,
    positions,
    streams,
    together,
    weights,
)  # fmt: skip
from benchmarks.diagnosis.bugs.planting import BUGS, Bug

PAGES = (  # each enters its bugs
    attentions, blocks, caches, norms, positions, streams, together, weights, approximations, buffers, loops,
)  # fmt: skip
__all__ = ["BUGS", "PAGES", "Bug"]
