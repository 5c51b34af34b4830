"""Reports of others, re-enacted on the port: what happened in their engines, planted in ours.

Each names its thread, what was seen, what the cause was, and the mistake that a diagnosis should name; where the
library of known mistakes has none, that nothing known makes it. Where the original concerned another model of the
family or another width, the cause is the same and the numbers are those of a built-in model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.diagnosis.arithmetic import bf16, f16
from benchmarks.diagnosis.bugs.planting import Bug
from benchmarks.diagnosis.port import Port

HEADS = ("q_rope", "k_rope")
NORMS = ("attn_norm", "q_norm", "k_norm", "ffn_norm", "final_norm")


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        thread: `owner/repository#number`.
        seen: The symptom, in our words.
        bug: The cause, planted.
        names: What it may be named; empty: none of the known.
        value: The value that is to be recovered, where there is one.
    """

    thread: str
    seen: str
    bug: Bug
    names: tuple[str, ...]
    value: str = ""

    @property
    def link(self) -> str:
        """The address of the thread; GitHub sends issues on to pull requests."""
        return "https://github.com/" + self.thread.replace("#", "/issues/")


REPORTS: list[Report] = []


def report(
    thread: str, seen: str, made: tuple[str, ...], names: str, *, model: str, plan: str = "steps", first_pass: int = 0,
    value: str = "", layer: int | None = None,
) -> Callable[[Callable[[Port], None]], Callable[[Port], None]]:  # fmt: skip
    """Enter a report with the function that plants its cause, whose first line says what it was."""

    def enter(plant: Callable[[Port], None]) -> Callable[[Port], None]:
        name = f"{plant.__name__.replace('_', '-')} ({thread})"
        said, layers = (plant.__doc__ or "").strip(), None if layer is None else (layer,)
        bug = Bug(name, said, plant, made, layers, (model,), plan, first_pass, shapes=True, known=bool(names))
        REPORTS.append(Report(thread, seen, bug, tuple(names.split()), value))
        return plant

    return enter


def _rows(port: Port, name: str, order: Callable[[np.ndarray], np.ndarray]) -> None:
    """Bring the rows of a projection into another order in all layers."""
    for layer in port.layers:
        layer[name] = order(layer[name])


def _paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in halves brought into pairs, as converters to GGUF do, with some number of heads."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _halved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The way back."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _in_pairs(port: Port) -> None:
    def turn(_right: object, x: np.ndarray, places: np.ndarray, _name: str) -> np.ndarray:
        cos, sin = port.tables(places)
        pairs = (x[..., ::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape).astype(np.float32)

    port.around("turn", turn)


# Layout --------------------------------------------------------------------------------------------------------------


@report("karpathy/llama2.c#286", "gibberish after some twenty tokens", HEADS, "rope-interleaved-pairs",
        model="micro-llama")  # fmt: skip
def order_of_hugging_face_rotated_in_pairs(port: Port) -> None:
    """Rows of q and k stayed in Hugging Face's order, the engine turns neighbours."""
    _in_pairs(port)


@report("huggingface/candle#3411", "logits drift by 11.7 over 48 layers", HEADS, "rope-interleaved-pairs",
        model="micro-qwen3")  # fmt: skip
def interleaved_kernel_for_a_qwen(port: Port) -> None:
    """The kernel of the interleaved kind was called for a model with halves."""
    _in_pairs(port)


@report("NeuraLegion/shainet#111", "the first words are right, then garbage", HEADS,
        "rope-interleaved-pairs rope-scaling-missing", model="micro-llama3")  # fmt: skip
def pairs_and_no_scaling(port: Port) -> None:
    """Two at once: neighbours are turned, and the llama3 scaling is not there."""
    _in_pairs(port)
    port.stretch = {}


@report("ggml-org/llama.cpp#3018", "TinyLlama converts and speaks gibberish", ("k_proj",),
        "k-rows-reordered-by-query-heads", model="story")  # fmt: skip
def keys_permuted_by_the_group(port: Port) -> None:
    """The converter permuted k with n_heads // n_kv_heads heads, the engine undoes it with n_kv_heads."""
    _rows(port, "k", lambda rows: _halved(_paired(rows, port.n_q // port.n_kv), port.n_kv))


@report("huggingface/transformers#31766", "a llama3 that went to GGUF and back is another", ("k_proj",),
        "k-rows-reordered-by-query-heads", model="story")  # fmt: skip
def keys_undone_with_query_heads(port: Port) -> None:
    """The way back from GGUF took the number of query heads for k."""
    _rows(port, "k", lambda rows: _halved(_paired(rows, port.n_kv), port.n_q))


@report("nntile/nntile#347", "right with one head, wrong with several", ("attn_out",), "o-proj-heads-interleaved",
        model="micro-qwen3")  # fmt: skip
def columns_of_o_by_dimension(port: Port) -> None:
    """The output projection took its columns as (head_dim, heads)."""

    def swapped(matrix: np.ndarray) -> np.ndarray:
        return matrix.reshape(len(matrix), port.d, port.n_q).swapaxes(1, 2).reshape(matrix.shape)

    _rows(port, "o", swapped)


@report("nntrainer/nntrainer#4194", "fluent nonsense", ("ffn_gate", "ffn_up"), "ffn-gate-and-up-swapped",
        model="micro-qwen3")  # fmt: skip
def gate_and_up_in_the_other_order(port: Port) -> None:
    """Up came first in the file of the converter."""
    for layer in port.layers:
        layer["g"], layer["u"] = layer["u"], layer["g"]


# Settings ------------------------------------------------------------------------------------------------------------


@report("ggml-org/llama.cpp#2373", "perplexity 5.90 where 5.83 is right", NORMS, "norm-eps-1e-6-for-1e-5 norm-eps",
        model="micro-llama", value="1e-06")  # fmt: skip
def eps_of_llama_1(port: Port) -> None:
    """Eps was 1e-6, Llama 2 has 1e-5."""
    port.eps = 1e-6


@report("Wenyueh/MinivLLM#82", "a small drift from the first layer on", NORMS, "norm-eps-1e-5-for-1e-6 norm-eps",
        model="micro-qwen3", value="1e-05")  # fmt: skip
def eps_not_read(port: Port) -> None:
    """Eps was the default of the class and not the config's."""
    port.eps = 1e-5


@report("ollama/ollama#2379", "a code model writes garbage", HEADS, "rope-base-1e4 rope-theta", model="micro-qwen2",
        value="10000")  # fmt: skip
def base_not_read(port: Port) -> None:
    """The base of the file, a million, was not read; 10000 was taken."""
    port.theta = 1e4


@report("lyogavin/airllm#368", "incoherent after 800 to 1000 tokens", HEADS, "rope-base-1e4 rope-theta",
        model="micro-llama3", plan="far", value="10000")  # fmt: skip
def base_lost_on_the_way_to_a_layer(port: Port) -> None:
    """One of two paths does not copy the base, and a default stands in for it."""
    port.theta = 1e4


@report("ggml-org/llama.cpp#8650", "Llama 3.1 loses the thread in long contexts", HEADS, "rope-scaling-missing",
        model="micro-llama3", plan="far")  # fmt: skip
def no_llama3_scaling(port: Port) -> None:
    """The scaling of Llama 3.1 was not known yet."""
    port.stretch = {}


@report("ikawrakow/ik_llama.cpp#2291", "perplexity 2916 for 5.50 at 32k, right near the start", HEADS,
        "rope-scaling-missing", model="micro-llama3")  # fmt: skip
def frequency_factors_are_null(port: Port) -> None:
    """rope_freqs was not handed to the operation."""
    port.around("slowed", lambda right, speeds: speeds)


@report("meta-llama/llama-models#241", "Llama 3.2 is wrong beyond 80k", HEADS, "rope-scaling-factor",
        model="micro-llama3", plan="far", value="32")  # fmt: skip
def factor_of_another_size(port: Port) -> None:
    """The factor was 32 where the model has 8; there it was the other way round."""
    port.stretch = port.stretch | {"factor": 32}


@report("FareedKhan-dev/train-llm-from-scratch#3", "attention is too flat", ("attn_scores",), "scores-scaled-by-hidden",
        model="micro-llama")  # fmt: skip
def scale_of_the_embedding(port: Port) -> None:
    """Scores were divided by the root of the embedding's width."""
    port.scale = port.hidden**-0.5


@report("mlc-ai/mlc-llm#3426", "cosine 0.862 of embeddings", ("attn_scores",), "scores-not-scaled", model="micro-llama")
def no_scale_in_a_fallback(port: Port) -> None:
    """A fallback path multiplied with the default scale, 1."""
    port.scale = 1.0


# Weights that were not read ------------------------------------------------------------------------------------------


@report("sbryngelson/ANEForge#253", "Qwen2.5 answers in other alphabets, TinyLlama is right",
        ("q_proj", "k_proj", "v_proj"), "qkv-bias-missing", model="micro-qwen2")  # fmt: skip
def biases_not_loaded(port: Port) -> None:
    """The adapter of the loader read weights only."""
    for layer in port.layers:
        for name in "qkv":
            del layer[f"{name}.b"]


@report("EricLBuehler/candle-vllm#167", "Qwen2 without its biases", ("q_proj", "k_proj", "v_proj"), "qkv-bias-missing",
        model="micro-qwen2", plan="whole")  # fmt: skip
def bias_is_off_by_default(port: Port) -> None:
    """attention_bias was taken for false where the config is silent."""
    port.around("bias", lambda right, y, name: y if name in "qkv" else right(y, name))


@report("pegainfer-project/pegainfer#544", "completions collapse into repeated tokens", ("logits",),
        "logits-tied-wrongly", model="micro-qwen3")  # fmt: skip
def head_replaced_by_embeddings(port: Port) -> None:
    """The head of an untied model was not looked for."""
    port.top["lg"] = port.top["tok"]


@report(
    "kekzl/imp#1282",
    "perplexity is exactly the size of the vocabulary",
    ("logits",),
    "weight-never-loaded",
    model="micro-llama3",
)
def tied_head_not_loaded(port: Port) -> None:
    """The tied head came to nothing on its way to the device."""
    port.top["lg"] = np.zeros_like(port.top["lg"])


# Order of operations -------------------------------------------------------------------------------------------------


@report("meta-pytorch/torchtune#2809", "Qwen3 trains and evaluates a little worse", HEADS, "rope-before-norm",
        model="micro-qwen3")  # fmt: skip
def heads_turned_before_they_are_normalised(port: Port) -> None:
    """RoPE came before the norm of the heads."""
    turning: list[str] = []

    def norm(right: Callable[..., np.ndarray], x: np.ndarray, name: str) -> np.ndarray:
        return x if name.endswith("unit") and not turning else right(x, name)

    def turn(right: Callable[..., np.ndarray], x: np.ndarray, places: np.ndarray, name: str) -> np.ndarray:
        turning.append(name)
        turned = port.norm(right(x, places, name), f"{name}_unit")
        turning.pop()
        return turned

    port.around("norm", norm)
    port.around("turn", turn)
    port.around("note", lambda right, name, x: x if name.endswith("unit") else right(name, x))  # nothing to show


@report("vllm-project/vllm#16311", "MMLU-Pro 0.686 where 0.715 is right", ("q_norm", "k_norm"),
        "norm-of-heads-together", model="micro-qwen3")  # fmt: skip
def heads_normalised_as_one_row(port: Port) -> None:
    """Queries and keys were normalised over all heads; Llama 4 there, Qwen3 here."""

    def norm(right: Callable[..., np.ndarray], x: np.ndarray, name: str) -> np.ndarray:
        if not name.endswith("unit"):
            return right(x, name)
        mean = np.mean(np.square(x), axis=(1, 2), keepdims=True)
        return x / np.sqrt(mean + np.float32(port.eps)) * port.gain(name)

    port.around("norm", norm)


@report("ekzhang/jax-js#180", "grouped heads are wrong, plain ones right", ("attn_scores",), "groups-tiled-for-keys",
        model="micro-qwen2")  # fmt: skip
def heads_tiled(port: Port) -> None:
    """Keys and values were tiled for the query heads and not repeated."""
    port.around("source", lambda right, head, name: head % port.n_kv)


@report("onnx/onnx#7274", "the operator disagrees with torch", ("attn_context",), "groups-tiled-for-values",
        model="micro-llama", plan="whole")  # fmt: skip
def values_tiled(port: Port) -> None:
    """Tile in place of repeat interleave, here for values alone, as where one of two paths was mended."""
    port.around("source", lambda right, head, name: head % port.n_kv if name == "V" else right(head, name))


# Positions and cache -------------------------------------------------------------------------------------------------


@report("huggingface/transformers#43082", "chunked prefill is another text than a whole one", HEADS,
        "rope-position-restarts", model="micro-llama", plan="chunks", first_pass=1)  # fmt: skip
def chunks_begin_at_zero(port: Port) -> None:
    """Position ids of a later chunk began at 0 again."""
    port.around("places", lambda right, n: np.arange(n) + port.start)


@report("Blaizzy/mlx-vlm#1983", "the answer repeats itself", HEADS, "rope-position-restarts", model="micro-qwen2",
        first_pass=1)  # fmt: skip
def steps_at_zero(port: Port) -> None:
    """Every step of the decode was at position 0."""
    port.around("places", lambda right, n: right(n) if n > 1 else np.zeros(1, int))


@report("keras-team/keras-hub#1544", "generation degrades", HEADS, "rope-position-restarts", model="story",
        first_pass=1)  # fmt: skip
def start_index_ignored(port: Port) -> None:
    """The tables were always sliced from their first row."""
    port.around("tables", lambda right, places: right(places - places[0]))


@report("InfiniTensor/InfiniLM#389", "answers are a little off", ("embed",), "embedding-first-token-twice",
        model="micro-llama", plan="whole")  # fmt: skip
def bos_twice(port: Port) -> None:
    """Template and tokenizer put the beginning token in front, and the last one was cut off to the old length."""
    port.around("embed", lambda right, ids: right(np.concatenate([ids[:1], ids[:-1]])))


# Precision -----------------------------------------------------------------------------------------------------------


@report("QwenLM/Qwen3#910", "exclamation marks only", ("attn_scores",), "scores-in-half scaled-scores-in-half",
        model="micro-qwen2")  # fmt: skip
def scores_of_half(port: Port) -> None:
    """Queries and keys were multiplied in float16; real models overflow there, small ones lose digits."""
    port.around("compare", lambda right, q, keys: f16(right(q, keys)))


@report("huggingface/transformers#25681", "tables of half precision are off by up to 0.8", HEADS,
        "rope-tables-in-half", model="micro-llama")  # fmt: skip
def tables_of_half(port: Port) -> None:
    """Cosines and sines were kept in float16."""
    port.around("tables", lambda right, places: f16(right(places)))


@report("huggingface/candle#3005", "Qwen3 loses quality far out", HEADS, "rope-frequencies-in-bfloat16",
        model="micro-qwen3", plan="far")  # fmt: skip
def frequencies_of_bfloat16(port: Port) -> None:
    """inv_freq was made in the dtype of the model."""
    port.around("speeds", lambda right: bf16(right()))


@report("ggml-org/llama.cpp#27016", "NaN from some length on", ("ffn_out",), "", model="micro-llama", layer=1)
def overflow_behind_down(port: Port) -> None:
    """A product overflowed on the way through float16; here its largest value, whatever that is."""

    def linear(right: Callable[..., np.ndarray], x: np.ndarray, name: str) -> np.ndarray:
        y = right(x, name)
        return np.where(np.abs(y) == np.abs(y).max(), np.float32(np.inf), y) if name == "d" else y

    port.around("linear", linear, layer=1)
    port.around("run", np.errstate(invalid="ignore")(lambda right, ids: right(ids)))
