"""Mistakes that can be planted in the port, by what they spoil. None was written after the known mistakes' code."""

from benchmarks.diagnosis.bugs import attentions, blocks, caches, local, norms, positions, streams, together, weights
from benchmarks.diagnosis.bugs.planting import BUGS, Bug

PAGES = (attentions, blocks, caches, local, norms, positions, streams, together, weights)  # each enters its bugs
__all__ = ["BUGS", "PAGES", "Bug"]
