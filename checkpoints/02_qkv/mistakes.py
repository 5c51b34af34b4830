"""Wrong code for the projections, by the name of the known mistake.

A wrong `qkv` takes all but the rows by name, `**w`, to be short; what is right in it is in the three functions on top.
llorch makes all other mistakes of this lesson from `llorch.diagnosis.mistakes`.
"""

from typing import Any

import numpy as np

from llorch.ops.rms_norm import rms_norm

Heads = tuple[np.ndarray, np.ndarray, np.ndarray]


def projected(h: np.ndarray, w: dict[str, Any]) -> list[np.ndarray]:
    projections = []
    for name in "qkv":
        y = h @ w[f"{name}_proj"].T
        projections.append(y if w[f"{name}_bias"] is None else y + w[f"{name}_bias"])
    return projections


def cut(y: np.ndarray, w: dict[str, Any]) -> np.ndarray:
    return y.reshape(len(y), -1, w["head_dim"])


def normed(q: np.ndarray, k: np.ndarray, w: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    if w["q_norm"] is None:
        return q, k
    return rms_norm(q, w["q_norm"], eps=w["eps"]), rms_norm(k, w["k_norm"], eps=w["eps"])


def values_first(h: np.ndarray, **w: Any) -> Heads:
    q, v, k = (cut(y, w) for y in projected(h, w))
    return *normed(q, k, w), v


def cut_with_heads_last(h: np.ndarray, **w: Any) -> Heads:
    q, k, v = (y.reshape(len(h), w["head_dim"], -1).swapaxes(1, 2) for y in projected(h, w))
    return *normed(q, k, w), v


def rows_with_heads_last(h: np.ndarray, **w: Any) -> Heads:
    q, k, v = (cut(cut(y, w).swapaxes(1, 2).reshape(y.shape), w) for y in projected(h, w))
    return *normed(q, k, w), v


def cut_by_group(h: np.ndarray, **w: Any) -> Heads:
    n_kv_heads = len(w["k_proj"]) // w["head_dim"]
    fused = np.concatenate(projected(h, w), axis=1).reshape(len(h), n_kv_heads, -1, w["head_dim"])
    q, k, v = fused[:, :, :-2].reshape(len(h), -1, w["head_dim"]), fused[:, :, -2], fused[:, :, -1]
    return *normed(q, k, w), v


def in_the_order_of_the_file(h: np.ndarray, **w: Any) -> Heads:
    q, k, v = (cut(y, w) for y in projected(h, w))
    q, k = (np.stack(np.split(heads, 2, axis=-1), axis=-1).reshape(heads.shape) for heads in (q, k))
    return *normed(q, k, w), v


def reordered_for_qwen(h: np.ndarray, **w: Any) -> Heads:
    q, k, v = (cut(y, w) for y in projected(h, w))
    if w["q_bias"] is not None or w["q_norm"] is not None:  # Qwen
        q, k = (np.concatenate([heads[..., 0::2], heads[..., 1::2]], axis=-1) for heads in (q, k))
    return *normed(q, k, w), v


def heads_normalised_together(h: np.ndarray, **w: Any) -> Heads:
    q, k, v = (cut(y, w) for y in projected(h, w))
    if w["q_norm"] is not None:
        q, k = (y / np.sqrt((y * y).mean(axis=(1, 2), keepdims=True) + w["eps"]) for y in (q, k))
        q, k = q * w["q_norm"], k * w["k_norm"]
    return q, k, v


def gains_exchanged(h: np.ndarray, **w: Any) -> Heads:
    q, k, v = (cut(y, w) for y in projected(h, w))
    return *normed(q, k, w | {"q_norm": w["k_norm"], "k_norm": w["q_norm"]}), v


def normalised_twice(h: np.ndarray, **w: Any) -> Heads:
    q, k, v = (cut(y, w) for y in projected(h, w))
    return *normed(*normed(q, k, w), w), v


def heads_not_normalised(h: np.ndarray, **w: Any) -> Heads:
    q, k, v = (cut(y, w) for y in projected(h, w))
    return q, k, v


def eps_of_llama(h: np.ndarray, **w: Any) -> Heads:
    q, k, v = (cut(y, w) for y in projected(h, w))
    return *normed(q, k, w | {"eps": 1e-5}), v


WRONG = {
    "qkv": {
        "qkv-keys-and-values-swapped": values_first,
        "qkv-heads-interleaved": cut_with_heads_last,
        "qkv-rows-with-heads-last": rows_with_heads_last,
        "qkv-fused-per-group": cut_by_group,
        "qk-rows-left-interleaved": in_the_order_of_the_file,
        "qk-rows-reordered-needlessly": reordered_for_qwen,
        "norm-of-heads-together": heads_normalised_together,
        "norm-gain-of-other-norm": gains_exchanged,
        "norm-twice": normalised_twice,
        "norm-skipped": heads_not_normalised,
        "norm-eps-1e-5-for-1e-6": eps_of_llama,
    },
}
UNTYPED = {
    "norm-is-layer-norm": "typed in 01",
    "norm-divides-by-n-minus-one": "typed in 01",
    "norm-sum-for-mean": "typed in 01",
    "norm-root-missing": "typed in 01",
    "norm-over-all-tokens": "typed in 01",
    "norm-squares-in-half": "typed in 01",
    "norm-gain-plus-one": "typed in 01",
    "norm-gain-missing": "typed in 01",
    "qkv-input-not-normalised": "typed in 07",
    "k-rows-reordered-by-query-heads": "a converter makes it, and this function gets the rows in order",
}
