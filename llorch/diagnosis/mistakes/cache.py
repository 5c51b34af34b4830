"""Mistakes of checkpoint 03: what lies in the cache, and where."""

from collections.abc import Callable

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake, Wrong
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.stages import BY_NAME, rope_input

CACHES = ("k_cache", "v_cache")
(KEY,) = BY_NAME["k_cache"].inputs


def _past_and_new(s: StageInputs, stage: str) -> tuple[np.ndarray, np.ndarray]:
    """Return cached and new rows, (kv_heads, tokens, head_dim) each."""
    past, new = ("past_k", KEY) if stage == "k_cache" else ("past_v", "v_proj")
    return s[past], s.heads(new).swapaxes(0, 1)


def _laid(parts: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]) -> Wrong:
    """Concatenate parts made of the cached and the new rows."""
    return lambda s, stage: np.concatenate(parts(*_past_and_new(s, stage)), axis=1)


def past_overwritten(s: StageInputs, stage: str) -> np.ndarray:
    """Write new rows into the cache from slot 0 on."""
    past, new = _past_and_new(s, stage)
    cache = np.concatenate([past, np.zeros_like(new)], axis=1)
    cache[:, : new.shape[1]] = new
    return cache


def _read_by_token(new: np.ndarray) -> np.ndarray:
    n_heads, seq, head_dim = new.shape
    return new.reshape(seq, n_heads, head_dim).swapaxes(0, 1)


CACHE: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="cache-past-forgotten", stages=CACHES, wrong=lambda s, stage: _past_and_new(s, stage)[1],
        after_cached=True,
        diagnosis="The cache has only the new tokens; append their keys and values to the cached ones.",
    ),
    Mistake(
        name="cache-past-overwritten", stages=CACHES, wrong=past_overwritten, after_cached=True,
        diagnosis="New tokens were written from slot 0 on, over the old ones; they go after the cached tokens.",
    ),
    Mistake(
        name="cache-one-slot-early", stages=CACHES, after_cached=True,
        wrong=_laid(lambda past, new: (past[:, :-1], new, np.zeros_like(new[:, :1]))),
        diagnosis="New tokens were written one slot too early, over the last cached one; slot n is token n.",
    ),
    Mistake(
        name="cache-newest-first", stages=CACHES, wrong=_laid(lambda past, new: (new, past)), after_cached=True,
        diagnosis="New tokens were put in front of the cached ones; the cache is in the order of positions.",
    ),
    Mistake(
        name="cache-never-written", stages=CACHES, wrong=_laid(lambda past, new: (past, np.zeros_like(new))),
        diagnosis="The slots of the new tokens are zero: attention read the cache before it was written.",
    ),
    Mistake(
        name="cache-warm-up-left", stages=CACHES, wrong=_laid(lambda past, new: (new[:, :2], past, new)),
        diagnosis="The cache starts with tokens of an earlier run; empty it for every new sequence.",
    ),
    Mistake(
        name="cache-keys-before-rope", stages=("k_cache",), reads=("k_proj", "k_norm"),
        wrong=lambda s, _: np.concatenate([s["past_k"], s.heads(rope_input("k", s.config)).swapaxes(0, 1)], axis=1),
        diagnosis="Keys were cached before RoPE; rotate each key once, at its own position, and then cache it.",
    ),
    Mistake(
        name="cache-heads-repeated", stages=CACHES,
        wrong=lambda s, stage: np.repeat(np.concatenate(_past_and_new(s, stage), axis=1), s.config.group_size, axis=0),
        diagnosis="Heads were repeated for the query heads before caching; the cache holds n_kv_heads heads.",
    ),
    Mistake(
        name="cache-keys-and-values-exchanged", stages=CACHES, reads=(KEY, "v_proj"),
        wrong=lambda s, stage: np.concatenate(_past_and_new(s, "v_cache" if stage == "k_cache" else "k_cache"), axis=1),
        diagnosis="The caches of keys and values were exchanged.",
    ),
    Mistake(
        name="cache-heads-and-tokens-mixed", stages=CACHES,
        wrong=_laid(lambda past, new: (past, new.swapaxes(0, 1).reshape(new.shape))),
        diagnosis="Rows in the order (seq, kv_heads) were copied into a cache of (kv_heads, ctx) without a transpose.",
    ),
    Mistake(
        name="cache-tokens-and-heads-mixed", stages=CACHES, wrong=_laid(lambda past, new: (past, _read_by_token(new))),
        diagnosis="Rows in the order (kv_heads, tokens) were read as (tokens, kv_heads) without a transpose.",
    ),
)  # fmt: skip
