"""Operations in another order, or over the wrong heads."""

from collections.abc import Callable

import numpy as np

from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.reenacted.reporting import HEADS, report


@report("meta-pytorch/torchtune#2809", "Qwen3 trains and evaluates a little worse", HEADS, "rope-before-norm",
        model="micro-qwen3")  # fmt: skip
def heads_turned_before_they_are_normalised(port: Port) -> None:
    """Apply RoPE before the norm of the heads."""
    turning: list[str] = []

    def norm(right: Callable[..., np.ndarray], x: np.ndarray, name: str) -> np.ndarray:
        return x if name.endswith("unit") and not turning else right(x, name)

    def turn(right: Callable[..., np.ndarray], x: np.ndarray, places: np.ndarray, name: str) -> np.ndarray:
        turning.append(name)
        rotated = port.norm(right(x, places, name), f"{name}_unit")
        turning.pop()
        return rotated

    port.around("norm", norm)
    port.around("turn", turn)
    port.around("note", lambda right, name, x: x if name.endswith("unit") else right(name, x))  # no array to dump


@report("vllm-project/vllm#16311", "MMLU-Pro 0.686 where 0.715 is right", ("q_norm", "k_norm"),
        "norm-of-heads-together", model="micro-qwen3")  # fmt: skip
def heads_normalised_as_one_row(port: Port) -> None:
    """Normalise queries and keys over all heads; the report is about Llama 4, here it is Qwen3."""

    def norm(right: Callable[..., np.ndarray], x: np.ndarray, name: str) -> np.ndarray:
        if not name.endswith("unit"):
            return right(x, name)
        mean = np.mean(np.square(x), axis=(1, 2), keepdims=True)
        return x / np.sqrt(mean + np.float32(port.eps)) * port.gain(name)

    port.around("norm", norm)


@report("ekzhang/jax-js#180", "grouped heads are wrong, plain ones right", ("attn_scores",), "groups-tiled-for-keys",
        model="micro-qwen2")  # fmt: skip
def heads_tiled(port: Port) -> None:
    """Tile keys and values for the query heads instead of repeating them."""
    port.around("source", lambda right, head, name: head % port.n_kv)


@report("onnx/onnx#7274", "the operator disagrees with torch", ("attn_context",), "groups-tiled-for-values",
        model="micro-llama", plan="whole")  # fmt: skip
def values_tiled(port: Port) -> None:
    """Tile instead of repeat interleave, here only for values, like a fix of one path out of two."""
    port.around("source", lambda right, head, name: head % port.n_kv if name == "V" else right(head, name))
