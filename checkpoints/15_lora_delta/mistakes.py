"""Wrong code for LoRA, by the name of the known mistake. Each must fail under its name."""

import numpy as np


def alpha_as_the_scale(r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool):
    return float(own_alpha or lora_alpha)


def rank_of_the_adapter(r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool):
    alpha = own_alpha or lora_alpha
    return alpha / np.sqrt(own_r or r) * (own_r or r) / r if use_rslora else alpha / r


def alpha_of_the_adapter(r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool):
    rank = own_r or r
    return lora_alpha / (rank**0.5 if use_rslora else rank)


def never_rank_stabilised(r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool):
    return (own_alpha or lora_alpha) / (own_r or r)


def scaled_on_both_ways(x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    down = (x @ lora_A.T * scaling).astype(x.dtype)
    return (down @ lora_B.T * scaling).astype(x.dtype)


def scale_forgotten(x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    return x @ lora_A.T @ lora_B.T


def a_reshaped(x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    down = x @ lora_A.reshape(-1, lora_A.shape[0])  # fits, and is another matrix
    return (down @ lora_B.T * scaling).astype(x.dtype)


def b_reshaped(x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    return (x @ lora_A.T @ lora_B.reshape(lora_B.shape[1], -1) * scaling).astype(x.dtype)


def always_dropping(x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    kept = np.random.default_rng().random(x.shape) >= 0.1
    return ((x * kept / 0.9) @ lora_A.T @ lora_B.T * scaling).astype(x.dtype)


def nothing_added(x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    return np.zeros((len(x), len(lora_B)), x.dtype)


WRONG = {
    "lora_scaling": {
        "lora-alpha-not-divided": alpha_as_the_scale,
        "lora-rank-pattern-ignored": rank_of_the_adapter,
        "lora-alpha-pattern-ignored": alpha_of_the_adapter,
        "lora-rslora-ignored": never_rank_stabilised,
    },
    "lora_delta": {
        "lora-scaled-twice": scaled_on_both_ways,
        "lora-not-scaled": scale_forgotten,
        "lora-a-transposed": a_reshaped,
        "lora-b-transposed": b_reshaped,
        "lora-dropout-at-evaluation": always_dropping,
        "lora-delta-missing": nothing_added,
    },
}
UNTYPED: dict[str, str] = {}
