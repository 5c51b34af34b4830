"""Mistakes that can be injected into the port, by the part that they change; none was written from known mistakes."""

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

PAGES = (  # each registers its bugs
    attentions, blocks, caches, norms, positions, streams, together, weights, approximations, buffers, loops,
)  # fmt: skip
__all__ = ["BUGS", "PAGES", "Bug"]
