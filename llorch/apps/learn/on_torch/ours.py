"""llorch's functions under other names, which stay when a learner's functions replace them, see `parts.forward`."""

from llorch.pytorch.causal_lm import rms_norm as our_rms_norm
from llorch.pytorch.causal_lm import rope as our_rope

__all__ = ["our_rms_norm", "our_rope"]
