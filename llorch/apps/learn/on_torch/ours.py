"""References under other names: what is put in the place of ours in llorch is not put here, see `parts.forward`."""

from llorch.pytorch.causal_lm import rms_norm as our_rms_norm
from llorch.pytorch.causal_lm import rope as our_rope

__all__ = ["our_rms_norm", "our_rope"]
