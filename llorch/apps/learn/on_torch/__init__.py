"""Lesson 14: exercises on torch tensors. Only the check of that lesson imports this package.

The names below are references: they do not change when a learner's functions replace llorch's, see
`exercises.forward`. `check` judges a run of llorch's torch modules.
"""

from llorch.pytorch.causal_lm import rms_norm as our_rms_norm
from llorch.pytorch.causal_lm import rope as our_rope

__all__ = ["our_rms_norm", "our_rope"]
