"""Dumps in memory, and the goldens of the engines as these engines would have written them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
from helpers.stored_goldens import golden_of

from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.files.tensor_names import interleave
from llorch.runtime.builtin import builtin_path
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import keys

PADDED = 256  # the context of llama.cpp


def raw_array(name: str, array: np.ndarray, **fields: object) -> RawArray:
    return RawArray(name, str(array.dtype), array.shape, lambda: array, **fields)  # type: ignore[arg-type] (by each test)


def raw_dump(
    arrays: Mapping[str, np.ndarray] | Sequence[RawArray], ids: Sequence[int] = (), first_position: int = 0
) -> RawDump:
    """One pass."""
    listed = [raw_array(*each) for each in arrays.items()] if isinstance(arrays, Mapping) else arrays
    passes = (Tokens(tuple(ids), first_position),) if ids else ()
    return RawDump("dump", tuple((0, each) for each in listed), passes)


@cache
def weights_of(model: str) -> Weights:
    return open_weights(builtin_path(model))


def golden_trace(model: str, engine: str) -> tuple[tuple[int, ...], Mapping[str, np.ndarray]]:
    """Tokens of the prompt, and every stage as the engine computed it."""
    golden = golden_of(model)
    return golden.cases["near"].ids, golden.engine_outputs[engine].traces["near"]


def as_transformers(trace: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Under paths of modules, with a batch of one and heads before tokens, as hooks see them."""
    arrays = {}
    for key, stage, layer in keys(config):
        array = trace[key]
        if stage.name in ("q_rope", "k_rope"):
            array = array.swapaxes(0, 1)
        which, _, path = stage.transformers.partition(" of ")
        if which in ("input", "output"):
            name = path.replace("layers.{i}", f"model.layers.{layer}") + (".input" if which == "input" else "")
        else:
            name = key if "cache" not in key else f"past_key_values.{layer}.{'key' if 'k_' in key else 'value'}"
        arrays[name] = array[None]
    return arrays


def as_llamacpp(trace: Mapping[str, np.ndarray], config: ModelConfig, *, with_op: bool) -> list[RawArray]:
    """Nodes in the order of the graph, pairs as in its files; `kq` before scale and mask, the context padded."""
    listed: list[RawArray] = []

    def add(name: str, op: str, array: np.ndarray) -> None:
        listed.append(raw_array(name, np.ascontiguousarray(array), op=op if with_op else ""))

    def paired(array: np.ndarray) -> np.ndarray:
        if config.family != "llama":
            return array
        return interleave(array.reshape(-1), array.size // config.head_dim).reshape(array.shape)

    add("embd", "GET_ROWS", trace["embed"])
    for i in range(config.n_layers):
        layer = {stage.name: trace[f"l{i}.{stage.name}"] for _, stage, index in keys(config) if index == 0}
        add(f"norm-{i}", "RMS_NORM", layer["attn_norm"])
        add(f"attn_norm-{i}", "MUL", layer["attn_norm"])
        for letter in "qvk":
            _add_projection(add, paired, letter, i, layer, config)
        scores = np.where(np.isfinite(layer["attn_scores"]), layer["attn_scores"], 7.0) * config.head_dim**0.5
        add(f"kq-{i}", "MUL_MAT", _padded(scores.astype(np.float32)))
        add(f"kq_soft_max-{i}", "SOFT_MAX", _padded(layer["attn_probs"]))
        for node, op, stage in (
            ("kqv_out", "CONT", "attn_context"), ("attn_out", "MUL_MAT", "attn_out"),
            ("ffn_inp", "ADD", "attn_residual"), ("ffn_norm", "MUL", "ffn_norm"), ("ffn_gate", "MUL_MAT", "ffn_gate"),
            ("ffn_up", "MUL_MAT", "ffn_up"), ("ffn_swiglu", "GLU", "ffn_act"), ("ffn_out", "MUL_MAT", "ffn_out"),
            ("l_out", "ADD", "block_out"),
        ):  # fmt: skip
            add(f"{node}-{i}", op, layer[stage])
    add("result_norm", "MUL", trace["final_norm"])
    add("result_output", "MUL_MAT", trace["logits"][-1:])
    return listed


def _add_projection(
    add: Callable[[str, str, np.ndarray], None], paired: Callable[[np.ndarray], np.ndarray], letter: str, i: int,
    layer: Mapping[str, np.ndarray], config: ModelConfig,
) -> None:  # fmt: skip
    node, projected = f"{letter.upper()}cur-{i}", layer[f"{letter}_proj"]
    projected = projected if letter == "v" else paired(projected)
    heads = projected.reshape(len(projected), -1, config.head_dim)
    add(node, "MUL_MAT", projected - 1 if config.qkv_bias else projected)
    if config.qkv_bias:
        add(node, "ADD", projected)
    add(node, "RESHAPE", heads)
    if letter != "v":
        if config.qk_norm:
            add(f"{letter.upper()}cur_normed-{i}", "MUL", paired(layer[f"{letter}_norm"]))
        add(node, "ROPE", paired(layer[f"{letter}_rope"]))


def _padded(array: np.ndarray) -> np.ndarray:
    """Of the batch of one; behind the context there is what the last run left."""
    tail = np.full((*array.shape[:-1], PADDED - array.shape[-1]), 3.5, np.float32)
    return np.concatenate([array, tail], axis=-1)[None]
