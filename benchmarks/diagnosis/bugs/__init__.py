"""Mistakes that can be planted in the port, by what they spoil. None was written after the known mistakes' code."""

from benchmarks.diagnosis.bugs import attentions, caches, local, norms, positions, streams, weights
from benchmarks.diagnosis.bugs.planting import BUGS, Bug

__all__ = ["BUGS", "Bug", "attentions", "caches", "local", "norms", "positions", "streams", "weights"]
