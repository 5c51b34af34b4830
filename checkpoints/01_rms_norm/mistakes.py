"""Wrong code for RMSNorm, by the name of the known mistake. Each must fail under its name."""

import numpy as np


def subtracts_the_mean(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(x.var(axis=-1, keepdims=True) + eps) * weight


def eps_outside_the_root(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    rms = np.sqrt(np.mean(x**2, axis=-1, keepdims=True))
    return x / (rms + eps) * weight


def eps_forgotten(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True)) * weight


def eps_of_qwen(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    eps = 1e-6
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def eps_of_llama(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    eps = 1e-5
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def sample_variance(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    mean_square = (x * x).sum(axis=-1, keepdims=True) / (x.shape[-1] - 1)
    return x / np.sqrt(mean_square + eps) * weight


def length_one(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps) * weight


def root_forgotten(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / (np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def axis_forgotten(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + np.float32(eps)) * weight


def squares_in_half(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    half = x.astype(np.float16)
    mean_square = np.mean(half * half, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + eps) * weight


def gain_as_in_gemma(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (1 + weight)


def gain_forgotten(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def normalised_twice(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    for _ in range(2):
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    return x


def left_out(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x


WRONG = {
    "rms_norm": {
        "norm-is-layer-norm": subtracts_the_mean,
        "norm-eps-outside-root": eps_outside_the_root,
        "norm-eps-missing": eps_forgotten,
        "norm-eps-1e-6-for-1e-5": eps_of_qwen,
        "norm-eps-1e-5-for-1e-6": eps_of_llama,
        "norm-divides-by-n-minus-one": sample_variance,
        "norm-sum-for-mean": length_one,
        "norm-root-missing": root_forgotten,
        "norm-over-all-tokens": axis_forgotten,
        "norm-squares-in-half": squares_in_half,
        "norm-gain-plus-one": gain_as_in_gemma,
        "norm-gain-missing": gain_forgotten,
        "norm-twice": normalised_twice,
        "norm-skipped": left_out,
    }
}
UNTYPED = {"norm-gain-of-other-norm": "typed in 07: the block chooses the gain of this function"}
