"""Bugs of one place, which nobody has a name for: races, tails of loops, buffers, guards, tables."""

import numpy as np

from benchmarks.diagnosis.bugs.planting import WITH_BIAS, WITH_HEAD_NORM, bug
from benchmarks.diagnosis.port import Port


def _changed(port: Port, step: str, change, layer: int | None = None, only: str = "") -> None:
    """Change a copy of what a step gives; `only` where the step's last argument is that."""

    def new(right, *args):
        result = right(*args)
        if only and args[-1] != only:
            return result
        result = result.copy()
        change(result)
        return result

    port.around(step, new, layer)


def _set(where, value):
    """What sets a part of an array."""

    def change(x: np.ndarray) -> None:
        x[where(x)] = value(x) if callable(value) else value

    return change


def local(made: str, **how):
    """A bug that no list of mistakes has."""
    return bug(made, known=False, **how)


@local("v_proj", layer=1, plan="whole")
def stale_row_of_a_token(port: Port):
    """A thread was late: token 3 has the values of token 2."""

    def change(y):
        y[3] = y[2]

    _changed(port, "linear", change, 1, "v")


@local("attn_context", layer=0)
def one_head_uninitialised(port: Port):
    """The output of head 2 is what lay in the buffer."""

    def change(mixed):
        mixed[2] = np.random.default_rng(1).normal(size=mixed.shape[1:]) * 0.01

    _changed(port, "mix", change, 0)


@local("v_proj", layer=1)
def rows_of_a_weight_overwritten(port: Port):
    """Somebody wrote four rows of another buffer into the values' matrix."""
    matrix = port.layers[1]["v"].copy()
    matrix[5:9] = np.random.default_rng(2).normal(size=matrix[5:9].shape) * matrix.std()
    port.layers[1]["v"] = matrix


@local("ffn_gate")
def last_terms_of_a_sum_left_out(port: Port):
    """The loop over the inner dimension ends at a multiple of its tile, four terms early."""

    def linear(right, x, name):
        return x[:, :-4] @ port.matrix("g")[:, :-4].T if name == "g" else right(x, name)

    port.around("linear", linear)


@local("ffn_up")
def last_columns_never_computed(port: Port):
    """The grid of a kernel is one block short: the last eight outputs are zero."""
    _changed(port, "linear", _set(lambda y: np.s_[:, -8:], 0), None, "u")


@local("ffn_out", plan="whole")
def row_added_twice(port: Port):
    """Two blocks of a split sum race, and a row is counted twice."""
    _changed(port, "linear", _set(lambda y: 9, lambda y: 2 * y[9]), 0, "d")


@local("attn_norm", layer=0)
def lanes_exchanged(port: Port):
    """Channels 4 to 7 and 0 to 3 of a vector register were exchanged at its end."""

    def change(y):
        y[:, :8] = np.roll(y[:, :8], 4, axis=1)

    _changed(port, "norm", change, 0, "xn")


@local("attn_out", layer=1, plan="whole")
def accumulator_not_reset(port: Port):
    """The sum of row 4 begins with row 3."""

    def change(y):
        y[4] += y[3]

    _changed(port, "linear", change, 1, "o")


@local("ffn_gate")
def guard_against_large_numbers(port: Port):
    """What looks infinite is set to zero, and the threshold is far too low."""
    _changed(port, "linear", _set(lambda y: np.abs(y) > 0.7 * np.abs(y).max(), 0), None, "g")


@local("attn_residual")
def stream_clamped(port: Port):
    """The stream is clamped to where half of its outermost percent lie."""

    def change(y):
        limit = np.quantile(np.abs(y), 0.995).astype(np.float32)
        np.clip(y, -limit, limit, out=y)

    _changed(port, "add", change, None, "mid")


@local("ffn_norm", layer=0)
def sign_of_a_channel(port: Port):
    """One channel has the other sign."""
    _changed(port, "norm", _set(lambda y: np.s_[:, 17], lambda y: -y[:, 17]), 0, "xm")


@local("attn_norm ffn_norm final_norm")
def root_by_a_trick(port: Port):
    """The reciprocal root by the well-known constant and one step of Newton: 0.1 % off."""

    def norm(right, x, name):
        if name.endswith("unit"):
            return right(x, name)
        mean = np.mean(x * x, axis=-1, keepdims=True) + np.float32(port.eps)
        guess = (0x5F3759DF - (mean.view(np.int32) >> 1)).view(np.float32)
        return x * (guess * (np.float32(1.5) - mean / 2 * guess * guess)) * port.gain(name)

    port.around("norm", norm)


@local("attn_probs")
def exponential_from_a_table(port: Port):
    """The exponential of a number rounded to a sixteenth."""
    port.around("share", lambda right, s: right(np.round(s * 16) / 16))


@local("q_rope k_rope")
def angles_from_a_table(port: Port):
    """Cosines come from a table of 1024 entries, not interpolated."""

    def tables(right, places):
        step = 2 * np.pi / 1024
        angles = np.round(places[:, None, None] * port.speeds() / step) * step
        return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    port.around("tables", tables)


@local("ffn_act")
def sigmoid_in_pieces(port: Port):
    """The hard sigmoid, three straight lines, for the sigmoid."""
    port.around("gated", lambda right, g, u: g * np.clip(g / 6 + np.float32(0.5), 0, 1) * u)


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

    _changed(port, "tables", change)


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
    _changed(port, "run_head", _set(lambda y: np.s_[:, -17:], 0))


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


@local("v_cache", layer=0)
def slot_written_backwards(port: Port):
    """One head of one slot lies backwards."""

    def remember(right, k, v):
        keys, values = right(k, v)
        values = values.copy()
        values[1, 2] = values[1, 2, ::-1]
        return keys, values

    port.around("remember", remember, 0)


@local("ffn_out", layer=1)
def block_scale_doubled(port: Port):
    """The first 32 columns of a matrix have twice their scale."""
    matrix = port.layers[1]["d"].copy()
    matrix[:, :32] *= 2
    port.layers[1]["d"] = matrix


@local("ffn_act")
def activations_in_six_bits(port: Port):
    """Activations are rounded to 63 steps of the largest of the pass."""

    def gated(right, g, u):
        y = right(g, u)
        step = np.abs(y).max() / 31
        return np.round(y / step) * step

    port.around("gated", gated)


@local("attn_probs")
def dropout_left_on(port: Port):
    """The model is in training mode: a tenth of the shares is dropped, the others grow."""

    def share(right, s):
        kept = np.random.default_rng(port.layer + 7 * port.n_pass).random(s.shape) >= 0.1
        return right(s) * kept / np.float32(0.9)

    port.around("share", share)


@local("attn_out")
def bias_from_nowhere(port: Port):
    """A bias that the model does not have is added: a buffer of 0.003."""
    _changed(port, "linear", _set(lambda y: np.s_[:], lambda y: y + np.float32(0.003)), None, "o")


@local("q_proj", layer=0)
def two_heads_exchanged(port: Port):
    """The first two heads of the queries were exchanged when a file was merged."""

    def change(y):
        y[:, : 2 * port.d] = np.roll(y[:, : 2 * port.d], port.d, axis=1)

    _changed(port, "linear", change, 0, "q")


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


@local("k_cache", first_pass=2)
def one_head_of_a_slot_kept(port: Port):
    """At the second step only the first head of the keys is written."""

    def remember(right, k, v):
        keys, values = right(k, v)
        if port.n_pass == 2:
            port.all_keys[port.layer, port.filled, 1:] = 0
        return keys, values

    port.around("remember", remember)


@local("q_proj", layer=1)
def column_of_a_weight_lost(port: Port):
    """One column of the queries' matrix is zero: a feature that a mask of pruning took."""
    matrix = port.layers[1]["q"].copy()
    matrix[:, 11] = 0
    port.layers[1]["q"] = matrix


@local("ffn_norm", layer=1)
def gain_one_place_on(port: Port):
    """The gain is read from one element further on."""
    port.around("gain", lambda right, name: np.roll(right(name), -1) if name == "xm" else right(name), 1)


@local("block_out", layer=1, first_pass=1)
def residual_of_the_pass_before(port: Port):
    """In steps the second block adds the stream of the pass before: a buffer that is not refreshed."""
    kept: list[np.ndarray] = []

    def add(right, x, y, name):
        if name != "out":
            return right(x, y, name)
        kept.append(x)
        return right(kept[-2][-len(x) :] if port.n_pass else x, y, name)

    port.around("add", add, 1)


@local("logits")
def one_row_of_the_output_matrix(port: Port):
    """One row of the output matrix is that of a neighbour."""
    matrix = port.top["lg"].copy()
    matrix[100] = matrix[101]
    port.top["lg"] = matrix


@local("k_norm", models=WITH_HEAD_NORM)
def last_head_not_normalised(port: Port):
    """The loop over key heads ends one early."""

    def norm(right, x, name):
        y = right(x, name)
        return np.concatenate([y[:, :-1], x[:, -1:]], axis=1) if name == "k_unit" else y

    port.around("norm", norm)


@local("q_proj", models=WITH_BIAS)
def bias_of_half_the_queries(port: Port):
    """Half of a bias was loaded, the rest of the buffer is zero."""
    for weights in port.layers:
        weights["q.b"] = np.where(np.arange(len(weights["q.b"])) < len(weights["q.b"]) // 2, weights["q.b"], 0)


@local("attn_scores", layer=1, plan="whole")
def column_of_scores_of_its_neighbour(port: Port):
    """Two threads write one column: key 2 has the scores of key 1."""
    _changed(port, "compare", _set(lambda s: np.s_[:, :, 2], lambda s: s[:, :, 1]), 1)


@local("attn_probs")
def small_shares_dropped(port: Port):
    """Shares below a fiftieth are set to zero to save work, and the others stay."""
    _changed(port, "share", _set(lambda p: p < 0.02, 0))


@local("k_rope")
def keys_in_three_digits(port: Port):
    """Keys are rounded to three binary digits after the first, as an 8-bit float has, with the exponent of float32."""

    def turn(right, x, places, name):
        y = right(x, places, name)
        mantissa, exponent = np.frexp(y)
        return np.ldexp(np.round(mantissa * 16) / 16, exponent) if name == "k" else y

    port.around("turn", turn)


@local("embed")
def end_of_a_row_of_the_next(port: Port):
    """Rows are read with a stride that is right and a beginning that is two elements too far."""

    def embed(right, ids):
        table = port.top["tok"].reshape(-1)
        return np.stack([table[i * port.hidden + 2 :][: port.hidden] for i in ids])

    port.around("embed", embed)


@local("ffn_up", plan="whole")
def odd_tokens_with_the_up_of_the_even(port: Port):
    """A kernel for two tokens writes the first one's result twice."""
    _changed(port, "linear", _set(lambda y: np.s_[1::2], lambda y: y[: len(y) // 2 * 2 : 2]), None, "u")


@local("block_out")
def noise_of_a_thousandth(port: Port):
    """Sums race: every element is off by about a thousandth of the largest."""

    def change(y):
        y += np.random.default_rng(port.layer).normal(size=y.shape).astype(np.float32) * np.abs(y).max() / 1000

    _changed(port, "add", change, None, "out")


@local("v_cache")
def values_in_four_bits(port: Port):
    """Values are kept as whole numbers from -7 to 7, with one scale for each head of a token."""

    def remember(right, k, v):
        scale = np.abs(v).max(axis=-1, keepdims=True) / 7
        return right(k, np.round(v / scale) * scale)

    port.around("remember", remember)


@local("attn_scores", layer=0)
def one_head_scaled_twice(port: Port):
    """The first query head is divided by the root of its width once more."""
    _changed(port, "compare", _set(lambda s: 0, lambda s: s[0] * np.float32(port.scale)), 0)


@local("logits", plan="whole")
def last_row_of_logits_stale(port: Port):
    """The last token has the logits of the one before it."""
    _changed(port, "run_head", _set(lambda y: -1, lambda y: y[-2]))


@local("attn_context", layer=1)
def one_head_mixes_the_block_before(port: Port):
    """One head reads the values of the first block: a pointer that was not moved on."""

    def mix(right, p, values):
        values = values.copy()
        values[0] = port.all_values[0, : values.shape[1], 0]
        return right(p, values)

    port.around("mix", mix, 1)


@local("ffn_gate", layer=0)
def rows_of_gate_negated(port: Port):
    """Every sixteenth row has the other sign: the sign bit of a block's scale was lost."""
    matrix = port.layers[0]["g"].copy()
    matrix[::16] *= -1
    port.layers[0]["g"] = matrix
