"""Keys that an engine's attention sees, from its probabilities, or recovered from its contexts and the values."""

from collections.abc import Sequence

import numpy as np

from llorch.diagnosis.patterns.axes import Axis
from llorch.diagnosis.patterns.describe import describe_mask

SEEN, HIDDEN = 1e-3, 1e-5  # of a row's largest probability: least of a key that is seen, most of a hidden one
TINY = np.finfo(np.float64).tiny
SAME_HEAD = 1e-3  # largest relative error of an array that one KV head gives
IN_SPAN = 1e-4  # largest share of a context that no probabilities give


def describe_seen_keys(actual: np.ndarray, expected: np.ndarray, axes: Sequence[Axis]) -> str:
    """Describe keys that have a probability and should have none, or the reverse, (heads, tokens, keys); else empty.

    A key counts only if one of its probabilities is clear and the other is as good as 0.
    """
    shares = [probs / np.maximum(np.abs(probs).max(axis=-1, keepdims=True), TINY) for probs in (actual, expected)]
    is_decided = (np.minimum(*shares) <= HIDDEN) & (np.maximum(*shares) >= SEEN)
    masked = [np.where((share > HIDDEN) | ~is_decided, 1.0, -np.inf) for share in shares]
    return describe_mask(masked[0], masked[1], axes)


def recover_probs(context: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """Recover the probabilities of which `context` is the weighted sum of `values`; None if they do not follow.

    Args:
        context: The engine's contexts, (tokens, heads, head_dim).
        values: Values of all keys, (kv_heads, keys, head_dim).

    There may be no more keys than head_dim. Return (heads, tokens, keys).
    """
    n_heads, head_dim = context.shape[1:]
    if values.shape[1] > head_dim or not np.isfinite(context).all():
        return None
    probs = []
    for head in range(n_heads):
        v = values[head * len(values) // n_heads]
        solution = np.linalg.lstsq(v.T, context[:, head].T, rcond=None)[0].T  # (tokens, keys)
        if np.linalg.norm(solution @ v - context[:, head]) > IN_SPAN * np.linalg.norm(context[:, head]):
            return None
        probs.append(solution)
    return np.stack(probs)


def describe_kv_heads(actual: np.ndarray, expected: np.ndarray, by_kv_head: np.ndarray) -> str:
    """Describe which KV head each query head read, if it is not its own and explains the array; else empty.

    Args:
        actual: The engine's scores or contexts, heads first; finite.
        expected: The right array.
        by_kv_head: The same array if all query heads read one KV head, for each KV head: (kv_heads, heads, ...).
    """
    n_kv, n_heads = by_kv_head.shape[:2]
    own = np.arange(n_heads) // (n_heads // n_kv)
    rows = [array.reshape(*array.shape[: array.ndim - 2], -1) for array in (actual, expected, by_kv_head)]
    right = rows[2][own, np.arange(n_heads)]
    scale = (right * rows[1]).sum() / max((right * right).sum(), TINY)
    errors = np.linalg.norm(rows[0] - scale * rows[2], axis=-1)  # (kv_heads, heads)
    read = errors.argmin(axis=0)
    if (read == own).all() or (errors.min(axis=0) > SAME_HEAD * np.linalg.norm(rows[1], axis=-1)).any():
        return ""
    heads = np.arange(n_heads)
    rules = {f"i % {n_kv}": heads % n_kv, **{f"i // {n}": heads // n for n in range(1, n_heads + 1)}}
    rule = next((rule for rule, targets in rules.items() if (read == targets).all()), "")
    words = f"query head i reads KV head {rule}" if rule else f"query heads read the KV heads {read.tolist()}"
    return f"{words}, instead of i // {n_heads // n_kv}"
