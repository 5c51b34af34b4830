"""Wrong code for the cache, by the name of the known mistake. Each must fail.

The page plants one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np

Caches = tuple[np.ndarray, np.ndarray]


def room(past: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Copy the old rows and append zeros for the new ones."""
    cache = np.zeros((past.shape[0], past.shape[1] + len(new), past.shape[2]), past.dtype)
    cache[:, : past.shape[1]] = past
    return cache


def one_slot_early(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> Caches:
    keys, values = room(past_k, k), room(past_v, v)
    start = max(past_k.shape[1] - 1, 0)  # the last index
    keys[:, start : start + len(k)] = k.swapaxes(0, 1)
    values[:, start : start + len(v)] = v.swapaxes(0, 1)
    return keys, values


def keys_and_values_exchanged(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> Caches:
    keys = np.concatenate([past_k, v.swapaxes(0, 1)], axis=1)
    values = np.concatenate([past_v, k.swapaxes(0, 1)], axis=1)
    return keys, values


WRONG = {
    "append": {
        "cache-one-slot-early": one_slot_early,
        "cache-keys-and-values-exchanged": keys_and_values_exchanged,
    }
}
UNTYPED = {
    "cache-past-forgotten": "the shape shows it: a context that is too short is refused before any number is compared",
    "cache-warm-up-left": "the shape shows it: a context that is too long is refused before any number is compared",
    "cache-heads-repeated": "the shape shows it: too many heads are refused before any number is compared",
    "cache-keys-before-rope": "typed in 07",
    "rope-on-values": "typed in 07",
    "heads-cut-last": "typed in 07",
}
