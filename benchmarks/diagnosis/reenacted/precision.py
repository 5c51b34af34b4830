"""Half precision where it is not enough."""

from collections.abc import Callable

import numpy as np

from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.reenacted.reporting import HEADS, report
from benchmarks.diagnosis.roundings import bf16, f16


@report("QwenLM/Qwen3#910", "exclamation marks only", ("attn_scores",), "scores-in-half scaled-scores-in-half",
        model="micro-qwen2")  # fmt: skip
def scores_of_half(port: Port) -> None:
    """Multiply queries and keys in float16; real models overflow there, small ones lose digits."""
    port.around("compare", lambda right, q, keys: f16(right(q, keys)))


@report("huggingface/transformers#25681", "tables of half precision are off by up to 0.8", HEADS,
        "rope-tables-in-half", model="micro-llama")  # fmt: skip
def tables_of_half(port: Port) -> None:
    """Store cosines and sines in float16."""
    port.around("tables", lambda right, places: f16(right(places)))


@report("huggingface/candle#3005", "Qwen3 loses quality far out", HEADS, "rope-frequencies-in-bfloat16",
        model="micro-qwen3", plan="far")  # fmt: skip
def frequencies_of_bfloat16(port: Port) -> None:
    """Compute inv_freq in the dtype of the model, bfloat16."""
    port.around("speeds", lambda right: bf16(right()))


@report("ggml-org/llama.cpp#27016", "NaN from some length on", ("ffn_out",), "", model="micro-llama", layer=1)
def overflow_behind_down(port: Port) -> None:
    """Overflow a product in float16; here the largest value of the product becomes infinite, whatever it is."""

    def linear(right: Callable[..., np.ndarray], x: np.ndarray, name: str) -> np.ndarray:
        y = right(x, name)
        return np.where(np.abs(y) == np.abs(y).max(), np.float32(np.inf), y) if name == "d" else y

    port.around("linear", linear, layer=1)
    port.around("run", np.errstate(invalid="ignore")(lambda right, ids: right(ids)))
