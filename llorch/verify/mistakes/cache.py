"""Mistakes of checkpoint 03: what lies in the cache, and where."""

import numpy as np

from llorch.stages import StageInputs, rope_input
from llorch.verify.mistakes.mistake import Mistake

CACHES = ("k_cache", "v_cache")


def _past_and_new(s: StageInputs, stage: str) -> tuple[np.ndarray, np.ndarray]:
    """Cached and new rows, (kv_heads, tokens, head_dim) each."""
    past, new = ("past_k", "k_rope") if stage == "k_cache" else ("past_v", "v_proj")
    return s[past], s.heads(new).swapaxes(0, 1)


def past_forgotten(s: StageInputs, stage: str) -> np.ndarray:
    """The new rows alone."""
    return _past_and_new(s, stage)[1]


def past_overwritten(s: StageInputs, stage: str) -> np.ndarray:
    """New rows written from slot 0 on."""
    past, new = _past_and_new(s, stage)
    cache = np.concatenate([past, np.zeros_like(new)], axis=1)
    cache[:, : new.shape[1]] = new
    return cache


def one_slot_early(s: StageInputs, stage: str) -> np.ndarray:
    """The last cached row overwritten, the last slot empty."""
    past, new = _past_and_new(s, stage)
    return np.concatenate([past[:, :-1], new, np.zeros_like(new[:, :1])], axis=1)


def never_written(s: StageInputs, stage: str) -> np.ndarray:
    """Slots of the new rows still zero."""
    past, new = _past_and_new(s, stage)
    return np.concatenate([past, np.zeros_like(new)], axis=1)


def newest_first(s: StageInputs, stage: str) -> np.ndarray:
    """New rows in front."""
    past, new = _past_and_new(s, stage)
    return np.concatenate([new, past], axis=1)


def warm_up_left(s: StageInputs, stage: str) -> np.ndarray:
    """Two rows of an earlier run in front."""
    past, new = _past_and_new(s, stage)
    return np.concatenate([new[:, :2], past, new], axis=1)


def keys_before_rope(s: StageInputs, stage: str) -> np.ndarray:
    """Keys cached as projected."""
    return np.concatenate([s["past_k"], s.heads(rope_input("k", s.config)).swapaxes(0, 1)], axis=1)


def repeated_heads(s: StageInputs, stage: str) -> np.ndarray:
    """One row per query head."""
    return np.repeat(np.concatenate(_past_and_new(s, stage), axis=1), s.config.group_size, axis=0)


def keys_and_values_exchanged(s: StageInputs, stage: str) -> np.ndarray:
    """Keys in the values' cache and the other way round."""
    return np.concatenate(_past_and_new(s, "v_cache" if stage == "k_cache" else "k_cache"), axis=1)


def heads_and_tokens_mixed(s: StageInputs, stage: str) -> np.ndarray:
    """(seq, kv_heads, head_dim) copied without the transpose."""
    past, new = _past_and_new(s, stage)
    return np.concatenate([past, new.swapaxes(0, 1).reshape(new.shape)], axis=1)


CACHE: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="cache-past-forgotten", stages=CACHES, wrong=past_forgotten, after_cached=True,
        diagnosis="Only the new tokens are there; keys and values are appended to those of the tokens before.",
    ),
    Mistake(
        name="cache-past-overwritten", stages=CACHES, wrong=past_overwritten, after_cached=True,
        diagnosis="New tokens were written from slot 0 on, over the old ones; they go after the cached tokens.",
    ),
    Mistake(
        name="cache-one-slot-early", stages=CACHES, wrong=one_slot_early, after_cached=True,
        diagnosis="New tokens were written one slot too early, over the last cached one; slot n is token n.",
    ),
    Mistake(
        name="cache-newest-first", stages=CACHES, wrong=newest_first, after_cached=True,
        diagnosis="New tokens were put in front of the cached ones; the cache is in the order of positions.",
    ),
    Mistake(
        name="cache-never-written", stages=CACHES, wrong=never_written,
        diagnosis="The slots of the new tokens are zero: attention read the cache before it was written.",
    ),
    Mistake(
        name="cache-warm-up-left", stages=CACHES, wrong=warm_up_left,
        diagnosis="Tokens of an earlier run lie in front; empty the cache for every new sequence.",
    ),
    Mistake(
        name="cache-keys-before-rope", stages=("k_cache",), wrong=keys_before_rope, reads=("k_proj", "k_norm"),
        diagnosis="Keys were cached as projected; each key is rotated once, at its own position, then kept.",
    ),
    Mistake(
        name="cache-heads-repeated", stages=CACHES, wrong=repeated_heads,
        diagnosis="Heads were repeated for the query heads before caching; the cache holds n_kv_heads heads.",
    ),
    Mistake(
        name="cache-keys-and-values-exchanged", stages=CACHES, wrong=keys_and_values_exchanged,
        reads=("k_rope", "v_proj"),
        diagnosis="Keys lie in the cache of the values, or the other way round.",
    ),
    Mistake(
        name="cache-heads-and-tokens-mixed", stages=CACHES, wrong=heads_and_tokens_mixed,
        diagnosis="Rows in the order (seq, kv_heads) were copied into a cache of (kv_heads, ctx) without a transpose.",
    ),
)  # fmt: skip
