"""Wrong code for merging and export, by the name of the known mistake."""

import numpy as np


def twice(weight: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    for _ in range(2):  # a script that was run on its own output
        weight = (weight + scaling * (lora_B @ lora_A)).astype(weight.dtype)
    return weight


def scale_forgotten(weight: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    return weight + lora_B @ lora_A


def unmerged(weight: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    return (weight - scaling * (lora_B @ lora_A)).astype(weight.dtype)


def left_in_halves(rows: np.ndarray, n_heads: int) -> np.ndarray:
    return rows.copy()


def alpha_of_the_configuration(lora_alpha: float, scalings: np.ndarray, ranks: np.ndarray) -> float:
    return lora_alpha


WRONG = {
    "merged": {"merge-twice": twice, "merge-without-scale": scale_forgotten, "merge-subtracted": unmerged},
    "interleave": {"export-b-rows-not-permuted": left_in_halves},
    "gguf_alpha": {"export-one-alpha": alpha_of_the_configuration},
}
UNTYPED: dict[str, str] = {}
