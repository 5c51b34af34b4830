"""Wrong code for gradients, by the name of the known mistake.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def like_a_sigmoid(grad: np.ndarray, probs: np.ndarray) -> np.ndarray:
    return grad * probs * (1 - probs)


WRONG = {
    "attention_probs_backward": {
        "gradient-softmax-as-sigmoid": like_a_sigmoid,
    },
}
UNTYPED: dict[str, str] = {}
