"""Bugs of scores, mask, softmax and the mix of values."""

import math

import numpy as np

from benchmarks.diagnosis.bugs.planting import NARROW_HEADS, WITH_HEAD_NORM, bug
from benchmarks.diagnosis.port import Port


@bug("attn_scores")
def products_not_scaled(port: Port):
    """Leave the products undivided."""
    port.scale = 1


@bug("attn_scores")
def divided_by_the_width_of_a_head(port: Port):
    """Divide the products by the width of a head instead of its root."""
    port.scale = 1 / port.d


@bug("attn_scores")
def divided_by_the_root_of_the_width(port: Port):
    """Divide the products by the root of the hidden size."""
    port.scale = 1 / math.sqrt(port.hidden)


@bug("attn_scores", models=WITH_HEAD_NORM)
def divided_by_the_root_of_hidden_over_heads(port: Port):
    """Divide the products by the root of hidden / heads in a model that states another width of a head."""
    port.scale = 1 / math.sqrt(port.hidden // port.n_q)


@bug("attn_scores")
def scale_of_a_tenth(port: Port):
    """Scale the products by 0.1, a value from a configuration."""
    port.scale = 0.1


@bug("attn_scores")
def scale_of_base_two(port: Port):
    """Multiply the products by log2(e) before a softmax that has the base e."""
    port.scale *= math.log2(math.e)


@bug("attn_scores", layer=1)
def scale_lost_in_one_block(port: Port):
    """Compute one block with another kernel, which does not scale."""
    port.around("compare", lambda right, q, keys: right(q, keys) * np.float32(math.sqrt(port.d)), layer=1)


@bug("attn_scores")
def scores_capped_at_50(port: Port):
    """Cap the scores by 50 tanh(s / 50), as Gemma 2 does."""
    port.around("compare", lambda right, q, keys: 50 * np.tanh(right(q, keys) / 50))


@bug("attn_scores")
def everything_visible(port: Port):
    """Leave out the mask."""
    port.around("visible", lambda right, n, context: np.ones((n, context), bool))


@bug("attn_scores")
def next_one_visible(port: Port):
    """Begin the mask one diagonal too late."""
    port.around("visible", lambda right, n, context: _shifted(n, context, 1))


@bug("attn_scores")
def itself_hidden(port: Port):
    """Begin the mask one diagonal too early; the first token keeps its only key."""
    port.around("visible", lambda right, n, context: _shifted(n, context, -1))


def _shifted(n: int, context: int, by: int) -> np.ndarray:
    is_visible = np.arange(context) <= np.arange(context - n, context)[:, None] + by
    is_visible[~is_visible.any(axis=1), 0] = True
    return is_visible


@bug("attn_scores", first_pass=1)
def newest_key_hidden_in_steps(port: Port):
    """Take the length of the context before the new token is counted."""
    port.around("visible", lambda right, n, context: right(n, context) if n > 1 else _shifted(n, context, -1))


@bug("attn_scores")
def past_hidden(port: Port):
    """Show each query the upper triangle of keys and hide the past."""
    port.around("visible", lambda right, n, context: np.arange(context) >= np.arange(context - n, context)[:, None])


@bug("attn_scores", plan="chunks", first_pass=1)
def mask_laid_at_the_first_key(port: Port):
    """Build the mask of a chunk without counting the tokens before the chunk."""
    port.around("visible", lambda right, n, context: np.arange(context) <= np.arange(n)[:, None])


@bug("attn_scores")
def hidden_by_ten(port: Port):
    """Lower hidden scores by 10 instead of setting them to minus infinity."""
    port.around("hide", lambda right, s: np.where(port.visible(*s.shape[1:]), s, s - 10))


@bug("attn_scores", plan="whole")
def window_of_six(port: Port):
    """Let a query see only six keys."""
    _window(port, 6)


@bug("attn_scores", plan="long", first_pass=1)
def window_of_twenty(port: Port):
    """Let a query see only twenty keys; a short prompt cannot show it."""
    _window(port, 20)


def _window(port: Port, width: int) -> None:
    def visible(right, n, context):
        key, query = np.arange(context), np.arange(context - n, context)[:, None]
        return right(n, context) & (key > query - width)

    port.around("visible", visible)


@bug("attn_scores")
def chunks_of_eight_apart(port: Port):
    """End attention at multiples of eight tokens, like the chunked attention of Llama 4."""

    def visible(right, n, context):
        key, query = np.arange(context), np.arange(context - n, context)[:, None]
        return right(n, context) & (key // 8 == query // 8)

    port.around("visible", visible)


@bug("attn_scores")
def keys_tiled(port: Port):
    """Let query head h read key head h modulo the number of key heads."""
    port.around("source", lambda right, head, name: head % port.n_kv if name == "K" else right(head, name))


@bug("attn_context")
def values_tiled(port: Port):
    """Let query head h mix value head h modulo the number of value heads."""
    port.around("source", lambda right, head, name: head % port.n_kv if name == "V" else right(head, name))


@bug("attn_scores attn_context")
def keys_and_values_tiled(port: Port):
    """Let query head h read key and value head h modulo the number of key heads."""
    port.around("source", lambda right, head, name: head % port.n_kv)


@bug("attn_scores attn_context")
def first_head_for_all(port: Port):
    """Let all query heads read the first key and value head, like multi-query attention."""
    port.around("source", lambda right, head, name: 0)


@bug("attn_scores")
def scores_in_half(port: Port):
    """Round the scores to float16."""
    port.around("compare", lambda right, q, keys: right(q, keys).astype(np.float16).astype(np.float32))


@bug("attn_probs")
def shares_over_queries(port: Port):
    """Run the softmax over the wrong axis, the queries."""

    def share(right, s):
        e = np.exp(s - s.max(axis=(1, 2), keepdims=True))
        return e / np.maximum(e.sum(axis=1, keepdims=True), 1e-30)

    port.around("share", share)


@bug("attn_probs")
def shares_over_heads(port: Port):
    """Run the softmax over the heads."""

    def share(right, s):
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        return e / np.maximum(e.sum(axis=0, keepdims=True), 1e-30)

    port.around("share", share)


@bug("attn_probs")
def exponentials_not_divided(port: Port):
    """Leave out the division of the softmax, so that shares do not sum to one."""
    port.around("share", lambda right, s: np.exp(s - s.max(axis=-1, keepdims=True)))


@bug("attn_probs")
def shares_to_base_two(port: Port):
    """Use exp2 in the softmax without the factor log2(e) that exp2 needs."""
    port.around("share", lambda right, s: right(s * np.float32(math.log(2))))


@bug("attn_probs")
def one_added_to_the_sum(port: Port):
    """Add one to the denominator of the softmax, a sink that takes a share, as in models with attention sinks."""

    def share(right, s):
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        return e / (1 + e.sum(axis=-1, keepdims=True))

    port.around("share", share)


@bug("attn_probs")
def hidden_after_the_shares(port: Port):
    """Run the softmax over all keys, and set the shares of hidden keys to zero afterwards."""

    def share(right, s):
        scores = port.compare(port.noted("q_rot"), port.noted("K"))
        return right(scores) * port.visible(*s.shape[1:])

    port.around("share", share)


@bug("attn_context")
def heads_joined_as_they_lie(port: Port):
    """Reshape (heads, tokens, d) without a transpose."""
    port.around("join", lambda right, mixed: mixed.reshape(mixed.shape[1], -1))


@bug("attn_context")
def heads_joined_last(port: Port):
    """Join heads as (d, heads)."""
    port.around("join", lambda right, mixed: np.moveaxis(mixed, 0, -1).reshape(mixed.shape[1], -1))


@bug("attn_context")
def keys_mixed(port: Port):
    """Mix keys, not values, by their shares."""
    port.around("mix", lambda right, p, values: right(p, port.noted("K")))


@bug("attn_context")
def heads_joined_backwards(port: Port):
    """Join the heads in reverse order, the last head first."""
    port.around("join", lambda right, mixed: right(mixed[::-1]))


@bug("q_rope", models=NARROW_HEADS)
def queries_cut_with_heads_last(port: Port):
    """Cut the queries into (d, heads)."""

    def cut(right, x, name):
        return x.reshape(len(x), port.d, -1).swapaxes(1, 2) if name == "q" else right(x, name)

    port.around("cut", cut)


@bug("v_cache")
def values_cut_with_heads_last(port: Port):
    """Cut the values into (d, heads)."""

    def cut(right, x, name):
        return x.reshape(len(x), port.d, -1).swapaxes(1, 2) if name == "v" else right(x, name)

    port.around("cut", cut)
