"""Mistakes of checkpoint 03, and of layers taken for layers of another kind.

`CACHE` mistakes change the contents and the order of the cache. `LAYERS` mistakes put windows, chunks, RoPE or
temperature into layers that have none, or leave them out. Those of RoPE show in stages that layers of every kind have;
an engine without a layer's `q_rope` has none to show.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from llorch.diagnosis.mistakes.attention import QUERY_AND_KEY, SCORES, hidden_in, with_mask
from llorch.diagnosis.mistakes.in_stage import KEY, rows_of_cache
from llorch.diagnosis.mistakes.mistake import Mistake, Wrong
from llorch.diagnosis.mistakes.planting import Replacement, instead
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.families.config import ModelConfig
from llorch.families.layers import Layer
from llorch.model.blocks.llama4 import head_norm
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


Other = Callable[[ModelConfig, int], Layer]
PROJECTED = {"q": "q_norm|q_proj", "k": "k_norm|k_proj"}  # heads before what depends on the position
TURNED = ("q_rope", "k_rope", "q_tempered", "k_cache", "attn_scores")


def _windowed(by: int) -> Other:
    """Change the window size by `by` tokens in layers that have a window."""

    def other(config: ModelConfig, layer: int) -> Layer:
        window = config.layer(layer).window
        return replace(config.layer(layer), window=window and (window + by or window))

    return other


def _without(field: str) -> Other:
    """Take the window or the chunk away from the layers that have one."""
    return lambda config, layer: replace(config.layer(layer), **{field: None})


def _everywhere(field: str) -> Other:
    """Give the largest window or chunk of the model to every layer."""
    return lambda config, layer: replace(
        config.layer(layer), **{field: max((getattr(each, field) or 0 for each in config.layers), default=0) or None}
    )


def _windows_exchanged(config: ModelConfig, layer: int) -> Layer:
    """Exchange layers with and without a window, in models that have both."""
    windows = {each.window for each in config.layers}
    there = (windows - {None, config.layer(layer).window} or {None}).pop()
    return replace(config.layer(layer), window=there) if len(windows) > 1 else config.layer(layer)


def _chunk_as_window(config: ModelConfig, layer: int) -> Layer:
    this = config.layer(layer)
    return this if this.chunk is None else replace(this, chunk=None, window=this.chunk)


def _tempered_everywhere(config: ModelConfig, layer: int) -> Layer:
    return replace(config.layer(layer), has_attention_temperature=config.temperature is not None)


def _attending_as(this: Layer, other: Layer) -> Layer:
    """Return a layer with the attention of another layer; the window stays, because windows have a separate list."""
    return replace(other, mixer=this.mixer, experts=this.experts, window=this.window)


def _rope_everywhere(config: ModelConfig, layer: int) -> Layer:
    """Return a layer that attends as the first layer with RoPE does."""
    this = config.layer(layer)
    return this if this.rope else _attending_as(this, next(each for each in config.layers if each.rope))


def _one_layer_early(config: ModelConfig, layer: int) -> Layer:
    """Place layers without RoPE, and all that comes with it, at i % 4 == 0 instead of (i + 1) % 4 == 0."""
    this = config.layer(layer)
    bare = next((each for each in config.layers if not each.rope), this)
    return _attending_as(this, config.layer(layer - 1) if layer else bare)


def _scores_of(other: Other) -> Wrong:
    """Mask right products as another kind of layer does."""
    return lambda s, stage: with_mask(s, stage, hidden_in(s, _layer_of(other, s)))


def _heads_of(other: Other) -> Wrong:
    """Compute queries and keys as another kind of layer does, and scores of these queries under the other mask."""

    def wrong(s: StageInputs, stage: str) -> np.ndarray:
        kind = _layer_of(other, s)
        if stage == "k_cache":
            return np.concatenate([s["past_k"], _heads_by_kind(s, "k", kind).swapaxes(0, 1)], axis=1)
        if stage == "attn_scores":
            queries = _heads_by_kind(s, "q", kind)
            return with_mask(replace(s, arrays={"q_rope": queries, "k_cache": s["k_cache"]}), stage, hidden_in(s, kind))
        return _heads_by_kind(s, stage[0], kind)

    return wrong


def _layer_of(other: Other, s: StageInputs) -> Layer:
    assert s.layer is not None
    return other(s.config, s.layer)


def _heads_by_kind(s: StageInputs, which: str, kind: Layer) -> np.ndarray:
    """Compute the heads of queries or keys in a layer of a kind: (seq, heads, head_dim)."""
    x = s.heads(PROJECTED[which])
    if kind.rope:
        x = s.rope(x)
    if kind.head_norm:
        x = head_norm(x, eps=s.config.rms_norm_eps)
    if which == "q" and kind.has_attention_temperature and s.config.temperature is not None:
        x = x * s.config.temperature.of(s.positions)[:, None, None].astype(s.dtype)
    return x


def _taken(
    name: str, other: Other, diagnosis: str, *, stages: tuple[str, ...] = SCORES, cases: tuple[str, ...] = ("long",)
) -> Mistake[StageInputs]:
    """Describe the mistake of taking layers for other ones; it exists in layers that differ from the other ones."""

    def changes(config: ModelConfig, layer: int) -> bool:
        return other(config, layer) != config.layer(layer)

    return Mistake(
        name=name, stages=stages, diagnosis=diagnosis, cases=cases, in_layers=changes,
        applies_to=lambda config: any(changes(config, layer) for layer in range(config.n_layers)),
        wrong=(_scores_of if stages == SCORES else _heads_of)(other),
        reads=QUERY_AND_KEY if stages == SCORES else tuple(PROJECTED.values()),
    )  # fmt: skip


LAYERS: tuple[Mistake[StageInputs], ...] = (
    _taken("window-ignored", _without("window"),
        "Every token saw all earlier tokens; layers with a sliding window show it itself and window - 1 earlier ones."),
    _taken("window-one-too-wide", _windowed(1),
        "A token saw itself and a whole window of earlier tokens; the window includes the token itself."),
    _taken("window-one-too-narrow", _windowed(-1),
        "The last token of the window was hidden: a token sees itself and window - 1 earlier ones."),
    _taken("window-in-other-layers", _windows_exchanged,
        "Layers with a sliding window and those without were exchanged; with max_window_layers the first ones have "
        "none."),
    _taken("window-in-every-layer", _everywhere("window"),
        "Every layer had the sliding window; layer_types or max_window_layers names the layers."),
    _taken("chunk-ignored", _without("chunk"), cases=("far",),
        diagnosis="Every token saw all earlier tokens; in Llama 4's layers with RoPE it sees only its chunk."),
    _taken("chunk-taken-for-window", _chunk_as_window,
        "A token saw a sliding window of the chunk's size; it sees the tokens from the start of its chunk."),
    _taken("chunk-in-every-layer", _everywhere("chunk"), cases=("far",),
        diagnosis="Every layer saw only chunks; layers without RoPE see the whole text."),
    _taken("rope-in-every-layer", _rope_everywhere, stages=("q_tempered", "k_cache", "attn_scores"),
        cases=("near", "far"),
        diagnosis="RoPE was applied in a layer without it; every fourth layer has none: (i + 1) % 4 == 0."),
    _taken("rope-missing-one-layer-early", _one_layer_early,
        stages=("q_rope", "k_rope", "q_tempered", "k_cache", "attn_scores"), cases=("near", "far"),
        diagnosis="Layers without RoPE were taken to be 0, 4, 8 ...; counted from 0 they are 3, 7, 11 ...: (i + 1) % "
        "4 == 0."),
    _taken("temperature-in-every-layer", _tempered_everywhere, stages=("attn_scores",), cases=("far",),
        diagnosis="Queries of a layer with RoPE were multiplied by the temperature; Llama 4 has it only in layers "
        "without RoPE."),
)  # fmt: skip
