"""Mistakes of checkpoint 03: what lies in the cache, and where."""

from collections.abc import Callable

import numpy as np

from llorch.diagnosis.mistakes.in_stage import KEY, rows_of_cache
from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.planting import Replacement, instead
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.stages.table import rope_input

CACHES, PART = ("k_cache", "v_cache"), "append"


def _laid(parts: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]) -> Replacement:
    """Concatenate parts made of the cached and the new rows."""
    return instead(lambda past, new: np.concatenate(parts(past, new), axis=1))


def past_overwritten(past: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Write new rows into the cache from slot 0 on."""
    cache = np.concatenate([past, np.zeros_like(new)], axis=1)
    cache[:, : new.shape[1]] = new
    return cache


def warm_up_left(s: StageInputs, stage: str) -> np.ndarray:
    """Leave two tokens of another run in front of the cached ones."""
    past, new = rows_of_cache(s, stage)
    return np.concatenate([new[:, :2], past, new], axis=1)


def _read_by_token(new: np.ndarray) -> np.ndarray:
    """Misread the memory of (heads, seq, head_dim) as (seq, heads, head_dim); return it with heads first."""
    n_heads, seq, head_dim = new.shape
    return new.reshape(seq, n_heads, head_dim).swapaxes(0, 1)


CACHE: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="cache-past-forgotten", stages=CACHES, wrong=lambda s, stage: rows_of_cache(s, stage)[1],
        after_cached=True,
        diagnosis="The cache has only the new tokens; append their keys and values to the cached ones.",
    ),
    Mistake(
        name="cache-past-overwritten", stages=CACHES, part=PART, wrong=instead(past_overwritten),
        after_cached=True,
        diagnosis="New tokens were written from slot 0 on, over the old ones; they go after the cached tokens.",
    ),
    Mistake(
        name="cache-one-slot-early", stages=CACHES, after_cached=True, part=PART,
        wrong=_laid(lambda past, new: (past[:, :-1], new, np.zeros_like(past[:, :1]))),
        diagnosis="New tokens were written one slot too early, over the last cached one; slot n is token n.",
    ),
    Mistake(
        name="cache-newest-first", stages=CACHES, part=PART, wrong=_laid(lambda past, new: (new, past)),
        after_cached=True,
        diagnosis="New tokens were put in front of the cached ones; the cache is in the order of positions.",
    ),
    Mistake(
        name="cache-never-written", stages=CACHES, part=PART,
        wrong=_laid(lambda past, new: (past, np.zeros_like(new))),
        diagnosis="The slots of the new tokens are zero: attention read the cache before it was written.",
    ),
    Mistake(
        name="cache-warm-up-left", stages=CACHES, wrong=warm_up_left,
        diagnosis="The cache starts with tokens of an earlier run; empty it for every new sequence.",
    ),
    Mistake(
        name="cache-keys-before-rope", stages=("k_cache",), reads=("k_proj", "k_norm"),
        wrong=lambda s, _: np.concatenate([s["past_k"], s.heads(rope_input("k", s.config)).swapaxes(0, 1)], axis=1),
        diagnosis="Keys were cached before RoPE; rotate each key once, at its own position, and then cache it.",
    ),
    Mistake(
        name="cache-heads-repeated", stages=CACHES,
        wrong=lambda s, stage: np.repeat(np.concatenate(rows_of_cache(s, stage), axis=1), s.config.group_size, axis=0),
        diagnosis="Heads were repeated for the query heads before caching; the cache holds n_kv_heads heads.",
    ),
    Mistake(
        name="cache-keys-and-values-exchanged", stages=CACHES, reads=(KEY, "v_proj"),
        wrong=lambda s, stage: np.concatenate(rows_of_cache(s, "v_cache" if stage == "k_cache" else "k_cache"), axis=1),
        diagnosis="The caches of keys and values were exchanged.",
    ),
    Mistake(
        name="cache-heads-and-tokens-mixed", stages=CACHES, part=PART,
        wrong=_laid(lambda past, new: (past, new.swapaxes(0, 1).reshape(new.shape))),
        diagnosis="Rows in the order (seq, kv_heads) were copied into a cache of (kv_heads, ctx) without a transpose.",
    ),
    Mistake(
        name="cache-tokens-and-heads-mixed", stages=CACHES, part=PART,
        wrong=_laid(lambda past, new: (past, _read_by_token(new))),
        diagnosis="Rows in the order (kv_heads, tokens) were read as (tokens, kv_heads) without a transpose.",
    ),
)  # fmt: skip
