"""Wrong filters, by the name of the known mistake. Each must fail under its name."""

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def penalised(logits: np.ndarray, history: np.ndarray, penalty: float) -> np.ndarray:
    out = logits.copy()
    for token in set(history.tolist()):
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    return out


def top_k_kept(logits: np.ndarray, k: int) -> np.ndarray:
    if k == 0 or k >= logits.size:
        return logits
    return np.where(logits < np.sort(logits)[-k], -np.inf, logits)


def top_p_kept(logits: np.ndarray, p: float) -> np.ndarray:
    if p >= 1:
        return logits
    order = np.argsort(-logits, kind="stable")
    likely = softmax(logits)[order]
    return only(logits, order[np.cumsum(likely) - likely < p])


def min_p_kept(logits: np.ndarray, min_p: float) -> np.ndarray:
    return np.where(softmax(logits) < min_p * softmax(logits).max(), -np.inf, logits)


def only(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    out = np.full_like(logits, -np.inf)
    out[ids] = logits[ids]
    return out


def filtered(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    return min_p_kept(top_p_kept(top_k_kept(logits, top_k), top_p), min_p)


def all_divided(logits: np.ndarray, history: np.ndarray, penalty: float) -> np.ndarray:
    out = logits.copy()
    out[np.unique(history)] /= penalty
    return out


def each_time(logits: np.ndarray, history: np.ndarray, penalty: float) -> np.ndarray:
    out = logits.copy()
    for token in history:
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    return out


def presence(logits: np.ndarray, history: np.ndarray, penalty: float) -> np.ndarray:
    out = logits.copy()
    out[np.unique(history)] -= penalty
    return out


def no_penalty(logits: np.ndarray, history: np.ndarray, penalty: float) -> np.ndarray:
    return logits


def all_kept(logits: np.ndarray, k: int) -> np.ndarray:
    return logits


def one_less(logits: np.ndarray, k: int) -> np.ndarray:
    if k == 0:
        return logits
    return np.where(logits <= np.sort(logits)[-k], -np.inf, logits)


def one_more(logits: np.ndarray, k: int) -> np.ndarray:
    if k == 0:
        return logits
    return np.where(logits < np.sort(logits)[::-1][k], -np.inf, logits)


def all_mass(logits: np.ndarray, p: float) -> np.ndarray:
    return logits


def mass_of_logits(logits: np.ndarray, p: float) -> np.ndarray:
    if p >= 1:
        return logits
    order = np.argsort(-logits, kind="stable")
    n = 1 + int(np.argmax(np.cumsum(logits[order]) >= p))
    return only(logits, order[:n])


def below_p(logits: np.ndarray, p: float) -> np.ndarray:
    if p >= 1:
        return logits
    order = np.argsort(-logits, kind="stable")
    n = int((np.cumsum(softmax(logits)[order]) < p).sum())
    return only(logits, order[: max(n, 1)])


def no_min_p(logits: np.ndarray, min_p: float) -> np.ndarray:
    return logits


def absolute_min_p(logits: np.ndarray, min_p: float) -> np.ndarray:
    return np.where(softmax(logits) < min_p, -np.inf, logits)


def no_temperature(
    logits: np.ndarray, history: np.ndarray, penalty: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    return softmax(filtered(penalised(logits, history, penalty), top_k, top_p, min_p))


def multiplied(
    logits: np.ndarray, history: np.ndarray, penalty: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    return softmax(filtered(penalised(logits, history, penalty) * temperature, top_k, top_p, min_p))


def temperature_last(
    logits: np.ndarray, history: np.ndarray, penalty: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    return softmax(filtered(penalised(logits, history, penalty), top_k, top_p, min_p) / temperature)


def set_to_zero(
    logits: np.ndarray, history: np.ndarray, penalty: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    warm = penalised(logits, history, penalty) / temperature
    likely = softmax(warm)
    likely[np.isinf(filtered(warm, top_k, top_p, min_p))] = 0
    return likely


WRONG = {
    "penalise": {
        "penalty-divides-negative-logits": all_divided,
        "penalty-per-occurrence": each_time,
        "penalty-subtracted": presence,
        "penalty-ignored": no_penalty,
    },
    "keep_top_k": {"top-k-ignored": all_kept, "top-k-one-less": one_less, "top-k-one-more": one_more},
    "keep_top_p": {
        "top-p-ignored": all_mass,
        "top-p-on-logits": mass_of_logits,
        "top-p-drops-crossing-token": below_p,
    },
    "keep_min_p": {"min-p-ignored": no_min_p, "min-p-absolute": absolute_min_p},
    "distribution": {
        "temperature-ignored": no_temperature,
        "temperature-multiplied": multiplied,
        "temperature-after-filters": temperature_last,
        "probabilities-not-renormalised": set_to_zero,
    },
}
UNTYPED: dict[str, str] = {}
