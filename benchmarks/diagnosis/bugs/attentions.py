"""Bugs of scores, mask, softmax and the mix of values."""

import math

import numpy as np

from benchmarks.diagnosis.bugs.planting import NARROW_HEADS, WITH_HEAD_NORM, bug
from benchmarks.diagnosis.port import Port


@bug("attn_scores")
def products_not_scaled(port: Port):
    """Nothing divides the products."""
    port.scale = 1


@bug("attn_scores")
def divided_by_the_width_of_a_head(port: Port):
    """The width of a head instead of its root."""
    port.scale = 1 / port.d


@bug("attn_scores")
def divided_by_the_root_of_the_width(port: Port):
    """The root of the hidden size."""
    port.scale = 1 / math.sqrt(port.hidden)


@bug("attn_scores", models=WITH_HEAD_NORM)
def divided_by_the_root_of_hidden_over_heads(port: Port):
    """The root of hidden / heads, for a width that the model states."""
    port.scale = 1 / math.sqrt(port.hidden // port.n_q)


@bug("attn_scores")
def scale_of_a_tenth(port: Port):
    """A scale of 0.1 that stood in a configuration."""
    port.scale = 0.1


@bug("attn_scores")
def scale_of_base_two(port: Port):
    """The products are multiplied by log2(e) for a softmax that has the base e."""
    port.scale *= math.log2(math.e)


@bug("attn_scores", layer=1)
def scale_lost_in_one_block(port: Port):
    """One block takes another kernel, which does not scale."""
    port.around("compare", lambda right, q, keys: right(q, keys) * np.float32(math.sqrt(port.d)), layer=1)


@bug("attn_scores")
def scores_capped_at_50(port: Port):
    """Gemma 2's cap of scores."""
    port.around("compare", lambda right, q, keys: 50 * np.tanh(right(q, keys) / 50))


@bug("attn_scores")
def everything_visible(port: Port):
    """There is no mask."""
    port.around("visible", lambda right, n, context: np.ones((n, context), bool))


@bug("attn_scores")
def next_one_visible(port: Port):
    """The mask begins one diagonal too late."""
    port.around("visible", lambda right, n, context: _shifted(n, context, 1))


@bug("attn_scores")
def itself_hidden(port: Port):
    """The mask begins one diagonal too early; the first token keeps its only key."""
    port.around("visible", lambda right, n, context: _shifted(n, context, -1))


def _shifted(n: int, context: int, by: int) -> np.ndarray:
    seen = np.arange(context) <= np.arange(context - n, context)[:, None] + by
    seen[~seen.any(axis=1), 0] = True
    return seen


@bug("attn_scores", first_pass=1)
def newest_key_hidden_in_steps(port: Port):
    """The length of the context is taken before the new token is counted."""
    port.around("visible", lambda right, n, context: right(n, context) if n > 1 else _shifted(n, context, -1))


@bug("attn_scores")
def past_hidden(port: Port):
    """The upper triangle is what is seen."""
    port.around("visible", lambda right, n, context: np.arange(context) >= np.arange(context - n, context)[:, None])


@bug("attn_scores", plan="chunks", first_pass=1)
def mask_laid_at_the_first_key(port: Port):
    """The mask of a chunk does not count the tokens before it."""
    port.around("visible", lambda right, n, context: np.arange(context) <= np.arange(n)[:, None])


@bug("attn_scores")
def hidden_by_ten(port: Port):
    """Hidden scores are lowered by 10."""
    port.around("hide", lambda right, s: np.where(port.visible(*s.shape[1:]), s, s - 10))


@bug("attn_scores", plan="whole")
def window_of_six(port: Port):
    """A query sees six keys."""
    _window(port, 6)


@bug("attn_scores", plan="long", first_pass=1)
def window_of_twenty(port: Port):
    """A query sees twenty keys; a short prompt cannot show it."""
    _window(port, 20)


def _window(port: Port, width: int) -> None:
    def visible(right, n, context):
        key, query = np.arange(context), np.arange(context - n, context)[:, None]
        return right(n, context) & (key > query - width)

    port.around("visible", visible)


@bug("attn_scores")
def chunks_of_eight_apart(port: Port):
    """Attention ends at multiples of eight tokens, as chunked attention of Llama 4."""

    def visible(right, n, context):
        key, query = np.arange(context), np.arange(context - n, context)[:, None]
        return right(n, context) & (key // 8 == query // 8)

    port.around("visible", visible)


@bug("attn_scores")
def keys_tiled(port: Port):
    """Query head h reads key head h modulo their number."""
    port.around("source", lambda right, head, name: head % port.n_kv if name == "K" else right(head, name))


@bug("attn_context")
def values_tiled(port: Port):
    """Query head h mixes value head h modulo their number."""
    port.around("source", lambda right, head, name: head % port.n_kv if name == "V" else right(head, name))


@bug("attn_scores attn_context")
def keys_and_values_tiled(port: Port):
    """Query head h reads key and value head h modulo their number."""
    port.around("source", lambda right, head, name: head % port.n_kv)


@bug("attn_scores attn_context")
def first_head_for_all(port: Port):
    """All query heads read the first key and value head, as with one of them."""
    port.around("source", lambda right, head, name: 0)


@bug("attn_scores")
def scores_in_half(port: Port):
    """Scores are float16."""
    port.around("compare", lambda right, q, keys: right(q, keys).astype(np.float16).astype(np.float32))


@bug("attn_probs")
def shares_over_queries(port: Port):
    """The softmax runs over the wrong axis."""

    def share(right, s):
        e = np.exp(s - s.max(axis=(1, 2), keepdims=True))
        return e / np.maximum(e.sum(axis=1, keepdims=True), 1e-30)

    port.around("share", share)


@bug("attn_probs")
def shares_over_heads(port: Port):
    """The softmax runs over the heads."""

    def share(right, s):
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        return e / np.maximum(e.sum(axis=0, keepdims=True), 1e-30)

    port.around("share", share)


@bug("attn_probs")
def exponentials_not_divided(port: Port):
    """Shares do not sum to one."""
    port.around("share", lambda right, s: np.exp(s - s.max(axis=-1, keepdims=True)))


@bug("attn_probs")
def shares_to_base_two(port: Port):
    """exp2 without the factor that it needs."""
    port.around("share", lambda right, s: right(s * np.float32(math.log(2))))


@bug("attn_probs")
def one_added_to_the_sum(port: Port):
    """A sink that takes a share: one more in the denominator, as models with attention sinks have it."""

    def share(right, s):
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        return e / (1 + e.sum(axis=-1, keepdims=True))

    port.around("share", share)


@bug("attn_probs")
def hidden_after_the_shares(port: Port):
    """The softmax sees all keys, and then some shares are set to zero."""

    def share(right, s):
        everything = port.compare(port.noted("q_rot"), port.noted("K"))
        return right(everything) * port.visible(*s.shape[1:])

    port.around("share", share)


@bug("attn_context")
def heads_joined_as_they_lie(port: Port):
    """(heads, tokens, d) is reshaped without a transpose."""
    port.around("join", lambda right, mixed: mixed.reshape(mixed.shape[1], -1))


@bug("attn_context")
def heads_joined_last(port: Port):
    """Heads are joined as (d, heads)."""
    port.around("join", lambda right, mixed: np.moveaxis(mixed, 0, -1).reshape(mixed.shape[1], -1))


@bug("attn_context")
def keys_mixed(port: Port):
    """Shares are of keys."""
    port.around("mix", lambda right, p, values: right(p, port.noted("K")))


@bug("attn_context")
def heads_joined_backwards(port: Port):
    """The last head comes first."""
    port.around("join", lambda right, mixed: right(mixed[::-1]))


@bug("q_rope", models=NARROW_HEADS)
def queries_cut_with_heads_last(port: Port):
    """The queries are cut into (d, heads)."""

    def cut(right, x, name):
        return x.reshape(len(x), port.d, -1).swapaxes(1, 2) if name == "q" else right(x, name)

    port.around("cut", cut)


@bug("v_cache")
def values_cut_with_heads_last(port: Port):
    """The values are cut into (d, heads)."""

    def cut(right, x, name):
        return x.reshape(len(x), port.d, -1).swapaxes(1, 2) if name == "v" else right(x, name)

    port.around("cut", cut)
