"""Bugs without a common name: races, stale and spoiled buffers, overwritten weights."""

import numpy as np

from benchmarks.diagnosis.bugs.planting import WITH_BIAS, changed, local, put
from benchmarks.diagnosis.port import Port


@local("v_proj", layer=1, plan="whole")
def stale_row_of_a_token(port: Port):
    """Give token 3 the values of token 2, as a thread that is late does."""

    def change(y):
        y[3] = y[2]

    changed(port, "linear", change, 1, "v")


@local("attn_context", layer=0)
def one_head_uninitialised(port: Port):
    """Fill the output of head 2 with random numbers, like a buffer that nobody wrote."""

    def change(mixed):
        mixed[2] = np.random.default_rng(1).normal(size=mixed.shape[1:]) * 0.01

    changed(port, "mix", change, 0)


@local("v_proj", layer=1)
def rows_of_a_weight_overwritten(port: Port):
    """Overwrite four rows of the values' matrix with random numbers, like rows of another buffer."""
    matrix = port.layers[1]["v"].copy()
    matrix[5:9] = np.random.default_rng(2).normal(size=matrix[5:9].shape) * matrix.std()
    port.layers[1]["v"] = matrix


@local("ffn_out", plan="whole")
def row_added_twice(port: Port):
    """Count one row twice, as a race of two blocks of a split sum does."""
    changed(port, "linear", put(lambda y: 9, lambda y: 2 * y[9]), 0, "d")


@local("attn_out", layer=1, plan="whole")
def accumulator_not_reset(port: Port):
    """Start the sum of row 4 with the result of row 3."""

    def change(y):
        y[4] += y[3]

    changed(port, "linear", change, 1, "o")


@local("ffn_norm", layer=0)
def sign_of_a_channel(port: Port):
    """Negate one channel."""
    changed(port, "norm", put(lambda y: np.s_[:, 17], lambda y: -y[:, 17]), 0, "xm")


@local("v_cache", layer=0)
def slot_written_backwards(port: Port):
    """Reverse one head of one slot."""

    def remember(right, k, v):
        keys, values = right(k, v)
        values = values.copy()
        values[1, 2] = values[1, 2, ::-1]
        return keys, values

    port.around("remember", remember, 0)


@local("ffn_out", layer=1)
def block_scale_doubled(port: Port):
    """Double the scale of the first 32 columns of a matrix."""
    matrix = port.layers[1]["d"].copy()
    matrix[:, :32] *= 2
    port.layers[1]["d"] = matrix


@local("attn_out")
def bias_from_nowhere(port: Port):
    """Add a bias that the model does not have, a buffer of 0.003."""
    changed(port, "linear", put(lambda y: np.s_[:], lambda y: y + np.float32(0.003)), None, "o")


@local("q_proj", layer=0)
def two_heads_exchanged(port: Port):
    """Exchange the first two heads of the queries, as a wrong merge of files does."""

    def change(y):
        y[:, : 2 * port.d] = np.roll(y[:, : 2 * port.d], port.d, axis=1)

    changed(port, "linear", change, 0, "q")


@local("k_cache", first_pass=2)
def one_head_of_a_slot_kept(port: Port):
    """Write only the first head of the keys at the second step."""

    def remember(right, k, v):
        keys, values = right(k, v)
        if port.n_pass == 2:
            port.all_keys[port.layer, port.filled, 1:] = 0
        return keys, values

    port.around("remember", remember)


@local("q_proj", layer=1)
def column_of_a_weight_lost(port: Port):
    """Set one column of the queries' matrix to zero, a feature that a pruning mask removed."""
    matrix = port.layers[1]["q"].copy()
    matrix[:, 11] = 0
    port.layers[1]["q"] = matrix


@local("ffn_norm", layer=1)
def gain_one_place_on(port: Port):
    """Read the gain one element too far."""
    port.around("gain", lambda right, name: np.roll(right(name), -1) if name == "xm" else right(name), 1)


@local("block_out", layer=1, first_pass=1)
def residual_of_the_pass_before(port: Port):
    """Let the second block add, in steps, the stream of the pass before: a buffer that is not refreshed."""
    streams: list[np.ndarray] = []

    def add(right, x, y, name):
        if name != "out":
            return right(x, y, name)
        streams.append(x)
        return right(streams[-2][-len(x) :] if port.n_pass else x, y, name)

    port.around("add", add, 1)


@local("logits")
def one_row_of_the_output_matrix(port: Port):
    """Replace one row of the output matrix by the next row."""
    matrix = port.top["lg"].copy()
    matrix[100] = matrix[101]
    port.top["lg"] = matrix


@local("q_proj", models=WITH_BIAS)
def bias_of_half_the_queries(port: Port):
    """Load half of a bias and leave the rest of the buffer at zero."""
    for weights in port.layers:
        weights["q.b"] = np.where(np.arange(len(weights["q.b"])) < len(weights["q.b"]) // 2, weights["q.b"], 0)


@local("attn_scores", layer=1, plan="whole")
def column_of_scores_of_its_neighbour(port: Port):
    """Give key 2 the scores of key 1, as two threads that write one column do."""
    changed(port, "compare", put(lambda s: np.s_[:, :, 2], lambda s: s[:, :, 1]), 1)


@local("embed")
def end_of_a_row_of_the_next(port: Port):
    """Read rows with the right stride from a start that is two elements too far."""

    def embed(right, ids):
        table = port.top["tok"].reshape(-1)
        return np.stack([table[i * port.hidden + 2 :][: port.hidden] for i in ids])

    port.around("embed", embed)


@local("attn_scores", layer=0)
def one_head_scaled_twice(port: Port):
    """Divide the scores of the first query head by the root of its width a second time."""
    changed(port, "compare", put(lambda s: 0, lambda s: s[0] * np.float32(port.scale)), 0)


@local("logits", plan="whole")
def last_row_of_logits_stale(port: Port):
    """Give the last token the logits of the token before it."""
    changed(port, "run_head", put(lambda y: -1, lambda y: y[-2]))


@local("attn_context", layer=1)
def one_head_mixes_the_block_before(port: Port):
    """Let one head read the values of the first block: a pointer that was not moved on."""

    def mix(right, p, values):
        values = values.copy()
        values[0] = port.all_values[0, : values.shape[1], 0]
        return right(p, values)

    port.around("mix", mix, 1)


@local("ffn_gate", layer=0)
def rows_of_gate_negated(port: Port):
    """Negate every sixteenth row: the sign bit of a block's scale was lost."""
    matrix = port.layers[0]["g"].copy()
    matrix[::16] *= -1
    port.layers[0]["g"] = matrix
