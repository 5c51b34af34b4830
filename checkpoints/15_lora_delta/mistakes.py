"""Wrong code for LoRA, by the name of the known mistake. Each must fail under its name.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def a_reshaped(x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    down = x @ lora_A.reshape(-1, lora_A.shape[0])  # fits, and is another matrix
    return (down @ lora_B.T * scaling).astype(x.dtype)


WRONG = {
    "lora_delta": {
        "lora-a-transposed": a_reshaped,
    },
}
UNTYPED: dict[str, str] = {}
