"""Wrong code for the cache, by the name of the known mistake. Each must fail."""

import numpy as np

Caches = tuple[np.ndarray, np.ndarray]


def room(past: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Make room: the old rows, then zeros for the new ones."""
    kept = np.zeros((past.shape[0], past.shape[1] + len(new), past.shape[2]), past.dtype)
    kept[:, : past.shape[1]] = past
    return kept


def written_from_slot_0(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> Caches:
    keys, values = room(past_k, k), room(past_v, v)
    for token in range(len(k)):
        keys[:, token], values[:, token] = k[token], v[token]
    return keys, values


def one_slot_early(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> Caches:
    keys, values = room(past_k, k), room(past_v, v)
    start = max(past_k.shape[1] - 1, 0)  # the last index
    keys[:, start : start + len(k)] = k.swapaxes(0, 1)
    values[:, start : start + len(v)] = v.swapaxes(0, 1)
    return keys, values


def newest_first(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> Caches:
    keys = np.concatenate([k.transpose(1, 0, 2), past_k], axis=1)
    values = np.concatenate([v.transpose(1, 0, 2), past_v], axis=1)
    return keys, values


def returned_before_it_is_written(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> Caches:
    keys, values = room(past_k, k), room(past_v, v)
    read = keys.copy(), values.copy()
    keys[:, past_k.shape[1] :], values[:, past_v.shape[1] :] = k.swapaxes(0, 1), v.swapaxes(0, 1)
    return read


def keys_and_values_exchanged(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> Caches:
    keys = np.concatenate([past_k, v.swapaxes(0, 1)], axis=1)
    values = np.concatenate([past_v, k.swapaxes(0, 1)], axis=1)
    return keys, values


def reshaped(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> Caches:
    kv_heads, _, head_dim = past_k.shape
    keys = np.concatenate([past_k, k.reshape(kv_heads, -1, head_dim)], axis=1)
    values = np.concatenate([past_v, v.reshape(kv_heads, -1, head_dim)], axis=1)
    return keys, values


def by_token_after_all(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> Caches:
    by_head = k.swapaxes(0, 1), v.swapaxes(0, 1)
    keys, values = room(past_k, k), room(past_v, v)
    for token, (new_k, new_v) in enumerate(zip(*(each.reshape(k.shape) for each in by_head), strict=True)):
        keys[:, past_k.shape[1] + token], values[:, past_v.shape[1] + token] = new_k, new_v
    return keys, values


WRONG = {
    "append": {
        "cache-past-overwritten": written_from_slot_0,
        "cache-one-slot-early": one_slot_early,
        "cache-newest-first": newest_first,
        "cache-never-written": returned_before_it_is_written,
        "cache-keys-and-values-exchanged": keys_and_values_exchanged,
        "cache-heads-and-tokens-mixed": reshaped,
        "cache-tokens-and-heads-mixed": by_token_after_all,
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
