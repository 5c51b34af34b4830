"""Known mistakes in the KV cache (`CACHE`), and layers computed as layers of another kind (`LAYERS`).

A layer's kind is its window, chunk, RoPE and attention temperature; `LAYERS` mistakes add or omit one. Those of RoPE
list stages that layers of every kind have, because an engine that omits RoPE in a layer cannot dump its `q_rope`.
Module `mistake` explains the fields; `part` is the function of `in_stage` that `wrong` replaces, here the append.
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

CACHES, APPEND = ("k_cache", "v_cache"), "append"


def _concatenate(parts: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]) -> Replacement:
    """Make the replacement that concatenates parts of the cached and the new rows."""
    return instead(lambda past, new: np.concatenate(parts(past, new), axis=1))


def past_overwritten(past: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Write the new rows from slot 0 on."""
    cache = np.concatenate([past, np.zeros_like(new)], axis=1)
    cache[:, : new.shape[1]] = new
    return cache


def warm_up_left(s: StageInputs, stage: str) -> np.ndarray:
    """Leave the rows of two tokens before the cached ones, as if from another run."""
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
        name="cache-past-overwritten", stages=CACHES, part=APPEND, wrong=instead(past_overwritten), after_cached=True,
        diagnosis="New tokens were written from slot 0 on, over the old ones; they go after the cached tokens.",
    ),
    Mistake(
        name="cache-one-slot-early", stages=CACHES, after_cached=True, part=APPEND,
        wrong=_concatenate(lambda past, new: (past[:, :-1], new, np.zeros_like(past[:, :1]))),
        diagnosis="New tokens were written one slot too early, over the last cached one; slot n is token n.",
    ),
    Mistake(
        name="cache-newest-first", stages=CACHES, part=APPEND, wrong=_concatenate(lambda past, new: (new, past)),
        after_cached=True,
        diagnosis="New tokens were put in front of the cached ones; the cache is in the order of positions.",
    ),
    Mistake(
        name="cache-never-written", stages=CACHES, part=APPEND,
        wrong=_concatenate(lambda past, new: (past, np.zeros_like(new))),
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
        name="cache-heads-and-tokens-mixed", stages=CACHES, part=APPEND,
        wrong=_concatenate(lambda past, new: (past, new.swapaxes(0, 1).reshape(new.shape))),
        diagnosis="Rows in the order (seq, kv_heads) were copied into a cache of (kv_heads, ctx) without a transpose.",
    ),
    Mistake(
        name="cache-tokens-and-heads-mixed", stages=CACHES, part=APPEND,
        wrong=_concatenate(lambda past, new: (past, _read_by_token(new))),
        diagnosis="Rows in the order (kv_heads, tokens) were read as (tokens, kv_heads) without a transpose.",
    ),
)  # fmt: skip


Change = Callable[[ModelConfig, int], Layer]  # configuration and layer to the wrong kind of the layer
PROJECTED = {"q": "q_norm|q_proj", "k": "k_norm|k_proj"}  # heads before operations that depend on the position
ROTATED_STAGES = ("q_rope", "k_rope", "q_tempered", "k_cache", "attn_scores")


def _resize_window(n_tokens: int) -> Change:
    """Change the window size by `n_tokens` in layers that have a window, but not to 0."""

    def change(config: ModelConfig, layer: int) -> Layer:
        window = config.layer(layer).window
        return replace(config.layer(layer), window=window and (window + n_tokens or window))

    return change


def _remove_field(field: str) -> Change:
    """Remove the window or the chunk from layers that have one."""
    return lambda config, layer: replace(config.layer(layer), **{field: None})


def _set_everywhere(field: str) -> Change:
    """Set the model's largest window or chunk in every layer."""
    return lambda config, layer: replace(
        config.layer(layer), **{field: max((getattr(kind, field) or 0 for kind in config.layers), default=0) or None}
    )


def _exchange_windows(config: ModelConfig, layer: int) -> Layer:
    """Exchange the layers with and without a window, in models that have both."""
    windows = {kind.window for kind in config.layers}
    window = (windows - {None, config.layer(layer).window} or {None}).pop()
    return replace(config.layer(layer), window=window) if len(windows) > 1 else config.layer(layer)


def _chunk_as_window(config: ModelConfig, layer: int) -> Layer:
    kind = config.layer(layer)
    return kind if kind.chunk is None else replace(kind, chunk=None, window=kind.chunk)


def _temperature_everywhere(config: ModelConfig, layer: int) -> Layer:
    return replace(config.layer(layer), has_attention_temperature=config.temperature is not None)


def _with_attention(kind: Layer, attention_kind: Layer) -> Layer:
    """Return `kind` with another kind's attention; keep the window, which the configuration lists separately."""
    return replace(attention_kind, mixer=kind.mixer, experts=kind.experts, window=kind.window)


def _rope_everywhere(config: ModelConfig, layer: int) -> Layer:
    """Return the layer's kind with the attention of the first layer with RoPE."""
    kind = config.layer(layer)
    return kind if kind.rope else _with_attention(kind, next(c for c in config.layers if c.rope))


def _rope_gaps_one_early(config: ModelConfig, layer: int) -> Layer:
    """Place layers without RoPE, with all their attention settings, at i % 4 == 0 instead of (i + 1) % 4 == 0."""
    kind = config.layer(layer)
    without_rope = next((candidate for candidate in config.layers if not candidate.rope), kind)
    return _with_attention(kind, config.layer(layer - 1) if layer else without_rope)


def _change_scores(change: Change) -> Wrong[StageInputs]:
    """Mask right products like a layer of another kind."""
    return lambda s, stage: with_mask(s, stage, hidden_in(s, _wrong_kind(change, s)))


def _change_heads(change: Change) -> Wrong[StageInputs]:
    """Compute queries, keys and masked scores like a layer of another kind."""

    def wrong(s: StageInputs, stage: str) -> np.ndarray:
        kind = _wrong_kind(change, s)
        if stage == "k_cache":
            return np.concatenate([s["past_k"], _heads_by_kind(s, "k", kind).swapaxes(0, 1)], axis=1)
        if stage == "attn_scores":
            queries = _heads_by_kind(s, "q", kind)
            return with_mask(replace(s, arrays={"q_rope": queries, "k_cache": s["k_cache"]}), stage, hidden_in(s, kind))
        return _heads_by_kind(s, stage[0], kind)

    return wrong


def _wrong_kind(change: Change, s: StageInputs) -> Layer:
    assert s.layer is not None
    return change(s.config, s.layer)


def _heads_by_kind(s: StageInputs, q_or_k: str, kind: Layer) -> np.ndarray:
    """Compute the heads of queries or keys in a layer of a kind, (seq, heads, head_dim)."""
    x = s.heads(PROJECTED[q_or_k])
    if kind.rope:
        x = s.rope(x)
    if kind.head_norm:
        x = head_norm(x, eps=s.config.rms_norm_eps)
    if q_or_k == "q" and kind.has_attention_temperature and s.config.temperature is not None:
        x = x * s.config.temperature.of(s.positions)[:, None, None].astype(s.dtype)
    return x


def _mistake(
    name: str, change: Change, diagnosis: str, *, stages: tuple[str, ...] = SCORES, cases: tuple[str, ...] = ("long",)
) -> Mistake[StageInputs]:
    """Make the mistake of computing layers as another kind; it exists in layers that the change affects."""

    def is_changed(config: ModelConfig, layer: int) -> bool:
        return change(config, layer) != config.layer(layer)

    return Mistake(
        name=name, stages=stages, diagnosis=diagnosis, cases=cases, in_layers=is_changed,
        applies_to=lambda config: any(is_changed(config, layer) for layer in range(config.n_layers)),
        wrong=(_change_scores if stages == SCORES else _change_heads)(change),
        reads=QUERY_AND_KEY if stages == SCORES else tuple(PROJECTED.values()),
    )  # fmt: skip


LAYERS: tuple[Mistake[StageInputs], ...] = (
    _mistake("window-ignored", _remove_field("window"),
        "Every token saw all earlier tokens; layers with a sliding window show it itself and window - 1 earlier ones."),
    _mistake("window-one-too-wide", _resize_window(1),
        "A token saw itself and a whole window of earlier tokens; the window includes the token itself."),
    _mistake("window-one-too-narrow", _resize_window(-1),
        "The last token of the window was hidden: a token sees itself and window - 1 earlier ones."),
    _mistake("window-in-other-layers", _exchange_windows,
        "Layers with a sliding window and those without were exchanged; with max_window_layers the first ones have "
        "none."),
    _mistake("window-in-every-layer", _set_everywhere("window"),
        "Every layer had the sliding window; layer_types or max_window_layers names the layers."),
    _mistake("chunk-ignored", _remove_field("chunk"), cases=("far",),
        diagnosis="Every token saw all earlier tokens; in Llama 4's layers with RoPE it sees only its chunk."),
    _mistake("chunk-taken-for-window", _chunk_as_window,
        "A token saw a sliding window of the chunk's size; it sees the tokens from the start of its chunk."),
    _mistake("chunk-in-every-layer", _set_everywhere("chunk"), cases=("far",),
        diagnosis="Every layer saw only chunks; layers without RoPE see the whole text."),
    _mistake("rope-in-every-layer", _rope_everywhere, stages=("q_tempered", "k_cache", "attn_scores"),
        cases=("near", "far"),
        diagnosis="RoPE was applied in a layer without it; every fourth layer has none: (i + 1) % 4 == 0."),
    _mistake("rope-missing-one-layer-early", _rope_gaps_one_early,
        stages=("q_rope", "k_rope", "q_tempered", "k_cache", "attn_scores"), cases=("near", "far"),
        diagnosis="Layers without RoPE were taken to be 0, 4, 8 ...; counted from 0 they are 3, 7, 11 ...: (i + 1) % "
        "4 == 0."),
    _mistake("temperature-in-every-layer", _temperature_everywhere, stages=("attn_scores",), cases=("far",),
        diagnosis="Queries of a layer with RoPE were multiplied by the temperature; Llama 4 has it only in layers "
        "without RoPE."),
)  # fmt: skip
