"""Bugs that nobody has a name for: loops, tiles and tails that end too early, lanes and indices that are off."""

import numpy as np

from benchmarks.diagnosis.bugs.planting import WITH_HEAD_NORM, changed, local, put
from benchmarks.diagnosis.port import Port


@local("ffn_gate")
def last_terms_of_a_sum_left_out(port: Port):
    """The loop over the inner dimension ends at a multiple of its tile, four terms early."""

    def linear(right, x, name):
        return x[:, :-4] @ port.matrix("g")[:, :-4].T if name == "g" else right(x, name)

    port.around("linear", linear)


@local("ffn_up")
def last_columns_never_computed(port: Port):
    """The grid of a kernel is one block short: the last eight outputs are zero."""
    changed(port, "linear", put(lambda y: np.s_[:, -8:], 0), None, "u")


@local("attn_norm", layer=0)
def lanes_exchanged(port: Port):
    """Channels 4 to 7 and 0 to 3 of a vector register were exchanged at its end."""

    def change(y):
        y[:, :8] = np.roll(y[:, :8], 4, axis=1)

    changed(port, "norm", change, 0, "xn")


@local("q_rope k_rope", plan="whole")
def last_token_not_turned(port: Port):
    """The loop over tokens ends one early."""

    def turn(right, x, places, name):
        return np.concatenate([right(x, places, name)[:-1], x[-1:]])

    port.around("turn", turn)


@local("q_rope k_rope")
def first_pair_not_turned(port: Port):
    """The loop over pairs begins with the second."""

    def change(tables):
        tables[0, ..., 0], tables[1, ..., 0] = 1, 0

    changed(port, "tables", change)


@local("attn_probs", plan="whole")
def sum_of_the_first_eight(port: Port):
    """The denominator sums the eight keys of a register; what is behind them is left out."""

    def share(right, s):
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        return e / e[..., :8].sum(axis=-1, keepdims=True)

    port.around("share", share)


@local("logits")
def end_of_the_vocabulary_stale(port: Port):
    """The last seventeen logits are zero: the buffer is larger than what the kernel writes."""
    changed(port, "run_head", put(lambda y: np.s_[:, -17:], 0))


@local("embed")
def ids_of_one_byte(port: Port):
    """Ids go through one byte, and those above 255 lose their upper part."""
    port.around("embed", lambda right, ids: right(ids & 0xFF))


@local("attn_residual", layer=0, plan="whole")
def branch_of_the_token_before(port: Port):
    """At the edge of a tile token 8 is added the attention of token 7."""

    def add(right, x, y, name):
        if name == "mid":
            y = y.copy()
            y[8] = y[7]
        return right(x, y, name)

    port.around("add", add, 0)


@local("attn_scores")
def last_head_reads_the_first(port: Port):
    """The last query head is given the first key head: an index that wraps."""
    port.around("source", lambda right, head, name: 0 if (head, name) == (port.n_q - 1, "K") else right(head, name))


@local("attn_scores", plan="whole")
def tail_of_queries_not_scaled(port: Port):
    """The tail of the tokens, behind a multiple of eight, takes a path that does not scale."""

    def compare(right, q, keys):
        s = right(q, keys).copy()
        s[:, 8:] /= np.float32(port.scale)
        return s

    port.around("compare", compare)


@local("attn_context")
def first_key_left_out_of_the_mix(port: Port):
    """The sum over keys begins with the second, except where there is one only."""

    def mix(right, p, values):
        p = p.copy()
        p[:, :, 0] = np.where((p[:, :, 1:] > 0).any(axis=-1), 0, p[:, :, 0])
        return right(p, values)

    port.around("mix", mix)


@local("ffn_act")
def last_channels_without_silu(port: Port):
    """The tail of a vectorised loop multiplies gate and up, and that is all."""

    def gated(right, g, u):
        return np.concatenate([right(g[:, :-3], u[:, :-3]), g[:, -3:] * u[:, -3:]], axis=1)

    port.around("gated", gated)


@local("final_norm")
def mean_of_half_a_row(port: Port):
    """A reduction that lost its second warp: the mean square is that of the first half."""

    def norm(right, x, name):
        half = x[:, : x.shape[1] // 2]
        root = np.sqrt(np.mean(half * half, axis=-1, keepdims=True) + np.float32(port.eps))
        return x / root * port.gain(name) if name == "fin" else right(x, name)

    port.around("norm", norm)


@local("k_norm", models=WITH_HEAD_NORM)
def last_head_not_normalised(port: Port):
    """The loop over key heads ends one early."""

    def norm(right, x, name):
        y = right(x, name)
        return np.concatenate([y[:, :-1], x[:, -1:]], axis=1) if name == "k_unit" else y

    port.around("norm", norm)


@local("ffn_up", plan="whole")
def odd_tokens_with_the_up_of_the_even(port: Port):
    """A kernel for two tokens writes the first one's result twice."""
    changed(port, "linear", put(lambda y: np.s_[1::2], lambda y: y[: len(y) // 2 * 2 : 2]), None, "u")
