"""Wrong code for RMSNorm, by the name of the known mistake. Each must fail under its name.

The page plants one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def eps_outside_the_root(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    rms = np.sqrt(np.mean(x**2, axis=-1, keepdims=True))
    return x / (rms + eps) * weight


WRONG = {
    "rms_norm": {
        "norm-eps-outside-root": eps_outside_the_root,
    }
}
UNTYPED = {"norm-gain-of-other-norm": "typed in 07: the block chooses the gain of this function"}
