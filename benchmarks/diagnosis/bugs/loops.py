"""Bugs without a common name: loops, tiles and tails that end too early, wrong lanes and indices."""

import numpy as np

from benchmarks.diagnosis.bugs.planting import WITH_HEAD_NORM, changed, local, put
from benchmarks.diagnosis.port import Port


@local("ffn_gate")
def last_terms_of_a_sum_left_out(port: Port):
    """End the loop over the inner dimension at a multiple of its tile, four terms early."""

    def linear(right, x, name):
        return x[:, :-4] @ port.matrix("g")[:, :-4].T if name == "g" else right(x, name)

    port.around("linear", linear)


@local("ffn_up")
def last_columns_never_computed(port: Port):
    """Launch the grid of a kernel one block short, so that the last eight outputs are zero."""
    changed(port, "linear", put(lambda y: np.s_[:, -8:], 0), None, "u")


@local("attn_norm", layer=0)
def lanes_exchanged(port: Port):
    """Exchange channels 0 to 3 of a vector register with channels 4 to 7."""

    def change(y):
        y[:, :8] = np.roll(y[:, :8], 4, axis=1)

    changed(port, "norm", change, 0, "xn")


@local("q_rope k_rope", plan="whole")
def last_token_not_turned(port: Port):
    """End the loop over tokens of RoPE one token early."""

    def turn(right, x, places, name):
        return np.concatenate([right(x, places, name)[:-1], x[-1:]])

    port.around("turn", turn)


@local("q_rope k_rope")
def first_pair_not_turned(port: Port):
    """Start the loop over pairs of RoPE at the second pair."""

    def change(tables):
        tables[0, ..., 0], tables[1, ..., 0] = 1, 0

    changed(port, "tables", change)


@local("attn_probs", plan="whole")
def sum_of_the_first_eight(port: Port):
    """Sum only the eight keys of one register in the denominator of the softmax."""

    def share(right, s):
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        return e / e[..., :8].sum(axis=-1, keepdims=True)

    port.around("share", share)


@local("logits")
def end_of_the_vocabulary_stale(port: Port):
    """Set the last seventeen logits to zero: the buffer is larger than the range that the kernel writes."""
    changed(port, "run_head", put(lambda y: np.s_[:, -17:], 0))


@local("embed")
def ids_of_one_byte(port: Port):
    """Pass ids through one byte, so that ids above 255 lose their upper part."""
    port.around("embed", lambda right, ids: right(ids & 0xFF))


@local("attn_residual", layer=0, plan="whole")
def branch_of_the_token_before(port: Port):
    """Add the attention of token 7 to token 8, at the edge of a tile."""

    def add(right, x, y, name):
        if name == "mid":
            y = y.copy()
            y[8] = y[7]
        return right(x, y, name)

    port.around("add", add, 0)


@local("attn_scores")
def last_head_reads_the_first(port: Port):
    """Give the last query head the first key head: an index that wraps."""
    port.around("source", lambda right, head, name: 0 if (head, name) == (port.n_q - 1, "K") else right(head, name))


@local("attn_scores", plan="whole")
def tail_of_queries_not_scaled(port: Port):
    """Leave the tokens after a multiple of eight unscaled: the tail takes another path."""

    def compare(right, q, keys):
        s = right(q, keys).copy()
        s[:, 8:] /= np.float32(port.scale)
        return s

    port.around("compare", compare)


@local("attn_context")
def first_key_left_out_of_the_mix(port: Port):
    """Start the sum over keys at the second key, except where only one key is visible."""

    def mix(right, p, values):
        p = p.copy()
        p[:, :, 0] = np.where((p[:, :, 1:] > 0).any(axis=-1), 0, p[:, :, 0])
        return right(p, values)

    port.around("mix", mix)


@local("ffn_act")
def last_channels_without_silu(port: Port):
    """Multiply gate and up without SiLU in the tail of a vectorised loop."""

    def gated(right, g, u):
        return np.concatenate([right(g[:, :-3], u[:, :-3]), g[:, -3:] * u[:, -3:]], axis=1)

    port.around("gated", gated)


@local("final_norm")
def mean_of_half_a_row(port: Port):
    """Take the mean square over the first half of a row: a reduction that lost its second warp."""

    def norm(right, x, name):
        half = x[:, : x.shape[1] // 2]
        root = np.sqrt(np.mean(half * half, axis=-1, keepdims=True) + np.float32(port.eps))
        return x / root * port.gain(name) if name == "fin" else right(x, name)

    port.around("norm", norm)


@local("k_norm", models=WITH_HEAD_NORM)
def last_head_not_normalised(port: Port):
    """End the loop over key heads of the norm one head early."""

    def norm(right, x, name):
        y = right(x, name)
        return np.concatenate([y[:, :-1], x[:, -1:]], axis=1) if name == "k_unit" else y

    port.around("norm", norm)


@local("ffn_up", plan="whole")
def odd_tokens_with_the_up_of_the_even(port: Port):
    """Write the result of the first of two tokens twice, in a kernel for two tokens."""
    changed(port, "linear", put(lambda y: np.s_[1::2], lambda y: y[: len(y) // 2 * 2 : 2]), None, "u")
