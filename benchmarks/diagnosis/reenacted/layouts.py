"""Rows and pairs in another order, and weights that were not loaded."""

from collections.abc import Callable

import numpy as np

from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.reenacted.reporting import HEADS, report


def _reorder_rows(port: Port, name: str, order: Callable[[np.ndarray], np.ndarray]) -> None:
    """Reorder the rows of a projection in all layers."""
    for layer in port.layers:
        layer[name] = order(layer[name])


def _paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows from halves into pairs, as converters to GGUF do, for some number of heads."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _halved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows from pairs into halves: the inverse of `_paired`."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _rotate_in_pairs(port: Port) -> None:
    def turn(_right: object, x: np.ndarray, places: np.ndarray, _name: str) -> np.ndarray:
        cos, sin = port.tables(places)
        pairs = (x[..., ::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape).astype(np.float32)

    port.around("turn", turn)


@report("karpathy/llama2.c#286", "gibberish after some twenty tokens", HEADS, "rope-interleaved-pairs",
        model="micro-llama")  # fmt: skip
def order_of_hugging_face_rotated_in_pairs(port: Port) -> None:
    """Keep rows of q and k in Hugging Face's order, but rotate neighbours."""
    _rotate_in_pairs(port)


@report("huggingface/candle#3411", "logits drift by 11.7 over 48 layers", HEADS, "rope-interleaved-pairs",
        model="micro-qwen3")  # fmt: skip
def interleaved_kernel_for_a_qwen(port: Port) -> None:
    """Call the kernel for interleaved pairs on a model with halves."""
    _rotate_in_pairs(port)


@report("NeuraLegion/shainet#111", "the first words are right, then garbage", HEADS,
        "rope-interleaved-pairs rope-scaling-missing", model="micro-llama3")  # fmt: skip
def pairs_and_no_scaling(port: Port) -> None:
    """Make two mistakes at once: rotate neighbours, and leave out the llama3 scaling."""
    _rotate_in_pairs(port)
    port.stretch = {}


@report("ggml-org/llama.cpp#3018", "TinyLlama converts and speaks gibberish", ("k_proj",),
        "k-rows-reordered-by-query-heads", model="story")  # fmt: skip
def keys_permuted_by_the_group(port: Port) -> None:
    """Permute k in the converter with n_heads // n_kv_heads heads, and undo it with n_kv_heads."""
    _reorder_rows(port, "k", lambda rows: _halved(_paired(rows, port.n_q // port.n_kv), port.n_kv))


@report("huggingface/transformers#31766", "a llama3 that went to GGUF and back is another", ("k_proj",),
        "k-rows-reordered-by-query-heads", model="story")  # fmt: skip
def keys_undone_with_query_heads(port: Port) -> None:
    """Undo the order of k in a GGUF file with the number of query heads."""
    _reorder_rows(port, "k", lambda rows: _halved(_paired(rows, port.n_kv), port.n_q))


@report("nntile/nntile#347", "right with one head, wrong with several", ("attn_out",), "o-proj-heads-interleaved",
        model="micro-qwen3")  # fmt: skip
def columns_of_o_by_dimension(port: Port) -> None:
    """Take the columns of the output projection as (head_dim, heads)."""

    def swapped(matrix: np.ndarray) -> np.ndarray:
        return matrix.reshape(len(matrix), port.d, port.n_q).swapaxes(1, 2).reshape(matrix.shape)

    _reorder_rows(port, "o", swapped)


@report("nntrainer/nntrainer#4194", "fluent nonsense", ("ffn_gate", "ffn_up"), "ffn-gate-and-up-swapped",
        model="micro-qwen3")  # fmt: skip
def gate_and_up_in_the_other_order(port: Port) -> None:
    """Put up before gate in the converter's file."""
    for layer in port.layers:
        layer["g"], layer["u"] = layer["u"], layer["g"]


@report("sbryngelson/ANEForge#253", "Qwen2.5 answers in other alphabets, TinyLlama is right",
        ("q_proj", "k_proj", "v_proj"), "qkv-bias-missing", model="micro-qwen2")  # fmt: skip
def biases_not_loaded(port: Port) -> None:
    """Load only weights in the adapter of the loader, and no biases."""
    for layer in port.layers:
        for name in "qkv":
            del layer[f"{name}.b"]


@report("EricLBuehler/candle-vllm#167", "Qwen2 without its biases", ("q_proj", "k_proj", "v_proj"), "qkv-bias-missing",
        model="micro-qwen2", plan="whole")  # fmt: skip
def bias_is_off_by_default(port: Port) -> None:
    """Take attention_bias for false if the config does not say it."""
    port.around("bias", lambda right, y, name: y if name in "qkv" else right(y, name))


@report("pegainfer-project/pegainfer#544", "completions collapse into repeated tokens", ("logits",),
        "logits-tied-wrongly", model="micro-qwen3")  # fmt: skip
def head_replaced_by_embeddings(port: Port) -> None:
    """Use the embeddings of an untied model as its head, which the engine did not look for."""
    port.top["lg"] = port.top["tok"]


@report(
    "kekzl/imp#1282",
    "perplexity is exactly the size of the vocabulary",
    ("logits",),
    "weight-never-loaded",
    model="micro-llama3",
)
def tied_head_not_loaded(port: Port) -> None:
    """Lose the tied head on its way to the device, so that it is zero."""
    port.top["lg"] = np.zeros_like(port.top["lg"])
