"""Bugs of weights, projections, embeddings and the output matrix."""

import math

import numpy as np

from benchmarks.diagnosis.bugs.planting import LLAMA, QWEN, UNTIED, WITH_BIAS, bug
from benchmarks.diagnosis.port import Port

SQUARE = "micro-qwen2"  # model whose q and o projections are square


def _spoil(port: Port, name: str, change, layer: int | None = None) -> None:
    """Change a weight in one layer or in all."""
    for i, weights in enumerate(port.layers):
        if name in weights and layer in (None, i):
            weights[name] = np.ascontiguousarray(change(weights[name]), np.float32)


def _axes_misread(w: np.ndarray) -> np.ndarray:
    """Read the numbers in storage order as (in, out)."""
    return w.reshape(w.shape[::-1]).T


def _heads_last(w: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows from (heads, d) to (d, heads)."""
    return w.reshape(heads, -1, *w.shape[1:]).swapaxes(0, 1).reshape(w.shape)


def _paired(w: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows to the order of a Llama GGUF file: 0, half, 1, half + 1 ... of each head."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def _unpaired(w: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows to 0, 2, 4 ... of each head, then 1, 3, 5 ..."""
    return w.reshape(heads, -1, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


@bug("q_proj", models=SQUARE)
def queries_transposed(port: Port):
    """Multiply by W instead of W.T; the matrix is square, so nothing complains."""
    _spoil(port, "q", np.transpose)


@bug("attn_out", models=SQUARE)
def output_transposed(port: Port):
    """Multiply joined heads by W instead of W.T."""
    _spoil(port, "o", np.transpose)


@bug("attn_out", models=SQUARE)
def output_not_projected(port: Port):
    """Add the joined heads to the stream without the output projection."""
    port.around("linear", lambda right, x, name: x if name == "o" else right(x, name))


@bug("ffn_up")
def up_read_with_axes_exchanged(port: Port):
    """Take the file's first dimension for the rows of up."""
    _spoil(port, "u", _axes_misread)


@bug("k_proj")
def keys_read_with_axes_exchanged(port: Port):
    """Take the file's first dimension for the rows of the keys' matrix."""
    _spoil(port, "k", _axes_misread)


@bug("v_proj", layer=1)
def values_never_loaded(port: Port):
    """Leave one matrix at zero: the loader does not know its name."""
    _spoil(port, "v", np.zeros_like, layer=1)


@bug("ffn_out")
def down_never_loaded(port: Port):
    """Leave the down matrices at zero: the second way to load wires everything except them."""
    _spoil(port, "d", np.zeros_like)


@bug("q_proj k_proj v_proj", models=WITH_BIAS)
def biases_not_loaded(port: Port):
    """Leave out the bias of every projection."""
    port.around("bias", lambda right, y, name: y)


@bug("k_proj v_proj", models=WITH_BIAS)
def bias_for_queries_only(port: Port):
    """Cut off the bias of the fused projection after the queries."""
    port.around("bias", lambda right, y, name: right(y, name) if name == "q" else y)


@bug("q_proj k_proj v_proj", models=WITH_BIAS)
def biases_added_twice(port: Port):
    """Add the bias twice, in the product and after it."""
    port.around("bias", lambda right, y, name: right(right(y, name), name))


@bug("v_proj", layer=1, models=WITH_BIAS)
def bias_of_values_twice_in_one_layer(port: Port):
    """Add the bias a second time after a kernel that already fused the addition."""
    port.around("bias", lambda right, y, name: right(right(y, name), name) if name == "v" else right(y, name), layer=1)


@bug("k_proj v_proj", models=WITH_BIAS)
def biases_of_k_and_v_exchanged(port: Port):
    """Exchange the biases of keys and values."""
    swapped = {"k": "v", "v": "k"}
    port.around("bias", lambda right, y, name: right(y, swapped.get(name, name)))


@bug("k_proj v_proj")
def keys_and_values_exchanged(port: Port):
    """Cut a fused matrix into queries, values, keys."""
    swapped = {"k": "v", "v": "k"}
    port.around("linear", lambda right, x, name: right(x, swapped.get(name, name)))


@bug("q_proj k_proj v_proj")
def fused_matrix_cut_by_group(port: Port):
    """Cut the fused matrix group by group: some queries, a key, a value."""
    for weights in port.layers:
        for end in ("", ".b"):
            if f"q{end}" not in weights:
                continue
            parts = [weights[name + end] for name in "qkv"]
            fused = np.concatenate(parts).reshape(port.n_kv, -1, port.d, *parts[0].shape[1:])
            cuts = np.split(fused, [port.n_q // port.n_kv, port.n_q // port.n_kv + 1], axis=1)
            for name, part, cut in zip("qkv", parts, cuts, strict=True):
                weights[name + end] = cut.reshape(part.shape)


@bug("q_proj")
def query_rows_with_heads_last(port: Port):
    """Order rows of the queries' matrix as (d, heads)."""
    _spoil(port, "q", lambda w: _heads_last(w, port.n_q))
    _spoil(port, "q.b", lambda w: _heads_last(w, port.n_q))


@bug("v_proj")
def value_rows_with_heads_last(port: Port):
    """Order rows of the values' matrix as (d, heads)."""
    _spoil(port, "v", lambda w: _heads_last(w, port.n_kv))
    _spoil(port, "v.b", lambda w: _heads_last(w, port.n_kv))


@bug("q_proj k_proj", models=LLAMA)
def rows_left_in_pairs(port: Port):
    """Leave rows of queries and keys in the order of the Llama GGUF file, and rotate them as if half-split."""
    for name, heads in (("q", port.n_q), ("k", port.n_kv)):
        _spoil(port, name, lambda w, heads=heads: _paired(w, heads))


@bug("q_proj k_proj", models=QWEN)
def rows_taken_out_of_pairs_needlessly(port: Port):
    """Undo the pairs of a Llama file in a Qwen file, which does not have them."""
    for name, heads in (("q", port.n_q), ("k", port.n_kv), ("q.b", port.n_q), ("k.b", port.n_kv)):
        _spoil(port, name, lambda w, heads=heads: _unpaired(w, heads))


@bug("k_proj", models="story")
def keys_paired_by_query_heads(port: Port):
    """Undo the pairs of the keys' rows with the number of query heads."""
    _spoil(port, "k", lambda w: _unpaired(_paired(w, port.n_kv), port.n_q))


@bug("attn_out")
def output_columns_with_heads_last(port: Port):
    """Order columns of the output projection as (d, heads)."""
    _spoil(port, "o", lambda w: _heads_last(w.T, port.n_q).T)


@bug("ffn_gate ffn_up")
def gate_and_up_exchanged(port: Port):
    """Cut the fused matrix into up and gate, in that order."""
    swapped = {"g": "u", "u": "g"}
    port.around("linear", lambda right, x, name: right(x, swapped.get(name, name)))


@bug("ffn_gate ffn_up")
def gate_and_up_alternate(port: Port):
    """Cut the fused matrix into even and odd rows."""
    for weights in port.layers:
        fused = np.concatenate([weights["g"], weights["u"]])
        weights["g"], weights["u"] = fused[::2], fused[1::2]


@bug("attn_norm q_proj k_proj v_proj q_norm k_norm attn_out ffn_norm ffn_gate ffn_up ffn_out", layer=1)
def block_with_the_weights_of_the_first(port: Port):
    """Build the second block from the weights of the first: an index that stands still."""
    port.layers[1] = port.layers[0]


@bug("k_proj", layer=1)
def keys_with_the_matrix_of_the_first_block(port: Port):
    """Use the keys' matrix of the first block in the second."""
    port.layers[1] |= {name: w for name, w in port.layers[0].items() if name in ("k", "k.b")}


@bug("ffn_out", layer=1)
def down_of_the_block_before(port: Port):
    """Use the down matrix of the first block in the second."""
    port.layers[1]["d"] = port.layers[0]["d"]


@bug("q_proj k_proj v_proj")
def stream_projected_without_the_norm(port: Port):
    """Let queries, keys and values read the block's input before the norm."""
    port.around("linear", lambda right, x, name: right(port.block_input if name in ("q", "k", "v") else x, name))


@bug("embed")
def row_of_the_next_token(port: Port):
    """Look up the row of the next token, as if ids counted from one."""
    port.around("embed", lambda right, ids: right(ids + 1))


@bug("embed")
def embeddings_times_root_of_width(port: Port):
    """Multiply embeddings by the root of the width, Gemma's factor."""
    port.around("embed", lambda right, ids: right(ids) * math.sqrt(port.hidden))


@bug("embed", plan="whole")
def beginning_twice(port: Port):
    """Repeat the first token and drop the last, which no longer fits."""
    port.around("embed", lambda right, ids: right(np.concatenate([ids[:1], ids[:-1]])))


@bug("embed", models=UNTIED)
def rows_of_the_output_matrix(port: Port):
    """Take embeddings from lm_head."""
    port.top["tok"] = port.top["lg"]


@bug("embed")
def embeddings_read_with_axes_exchanged(port: Port):
    """Take the file's first dimension for the vocabulary."""
    port.top["tok"] = _axes_misread(port.top["tok"])


@bug("logits", models=UNTIED)
def tied_without_being_so(port: Port):
    """Use the embeddings as the output matrix, which was not found."""
    port.top["lg"] = port.top["tok"]


@bug("logits")
def output_rows_one_late(port: Port):
    """Shift the rows of the output matrix by one, so that logit t is the logit of token t + 1."""
    port.top["lg"] = np.roll(port.top["lg"], -1, axis=0)


@bug("logits")
def capped_at_30(port: Port):
    """Cap logits by 30 tanh(x / 30), as Gemma does."""
    port.around("run_head", lambda right, x: 30 * np.tanh(right(x) / 30))


@bug("logits")
def capped_at_50(port: Port):
    """Cap logits by 50 tanh(x / 50)."""
    port.around("run_head", lambda right, x: 50 * np.tanh(right(x) / 50))


@bug("logits")
def log_probabilities_for_logits(port: Port):
    """Return log probabilities instead of logits."""

    def logged(right, x):
        y = right(x)
        return y - y.max(-1, keepdims=True) - np.log(np.exp(y - y.max(-1, keepdims=True)).sum(-1, keepdims=True))

    port.around("run_head", logged)


@bug("logits")
def logits_divided_by_root_of_width(port: Port):
    """Divide logits by the root of the width, a scale of some other tied models."""
    port.around("run_head", lambda right, x: right(x) / math.sqrt(port.hidden))


@bug("logits")
def logits_of_the_stream_before_the_norm(port: Port):
    """Compute and show the final norm, but give the head the unnormalised stream."""
    port.around("run_head", lambda right, x: right(port.tape[-1][f"blk{len(port.layers) - 1}.out"]))
