"""Which weights a model has, what they are called where, and the row order of q and k in Llama GGUF files.

Canonical names follow Hugging Face without the decoration: `layers.3.q_proj`. Shapes are (out, in)
everywhere.

llama.cpp rotates neighbouring pairs of a head for the llama family, Hugging Face rotates the first half
against the second. The converter therefore reorders the rows of q and k, per head, when it writes a Llama
GGUF file:

    gguf[2 * j] = hf[j]        gguf[2 * j + 1] = hf[j + half]        j = 0 .. half - 1

Qwen files keep the Hugging Face order. The order is undone on loading, here and nowhere else.

Source: llama.cpp gguf-py/gguf/tensor_mapping.py and conversion of LlamaModel (`permute`); transformers
modeling_llama.
"""

from dataclasses import dataclass

import numpy as np

from llorch.config import ModelConfig


@dataclass(frozen=True, slots=True)
class WeightRow:
    """One line of the table: a weight, its names in both formats, its axes, and when a model has it."""

    name: str
    gguf: str
    huggingface: str
    axes: tuple[str, ...]  # attributes of ModelConfig
    only_if: tuple[str, bool] | None = None  # attribute of ModelConfig and the value it must have
    heads: str | None = None  # rows in heads, reordered in Llama GGUF files; attribute of ModelConfig


MODEL_WEIGHTS = (
    WeightRow("embed_tokens", "token_embd.weight", "model.embed_tokens.weight", ("vocab_size", "hidden_size")),
    WeightRow("final_norm", "output_norm.weight", "model.norm.weight", ("hidden_size",)),
    WeightRow(
        "lm_head", "output.weight", "lm_head.weight", ("vocab_size", "hidden_size"), ("tie_word_embeddings", False)
    ),
)

_QKV_BIAS, _O_BIAS, _QK_NORM = ("qkv_bias", True), ("o_bias", True), ("qk_norm", True)

# Names without their prefixes `layers.{i}.`, `blk.{i}.` and `model.layers.{i}.`.
LAYER_WEIGHTS = (
    WeightRow("attn_norm", "attn_norm.weight", "input_layernorm.weight", ("hidden_size",)),
    WeightRow("q_proj", "attn_q.weight", "self_attn.q_proj.weight", ("q_width", "hidden_size"), None, "n_heads"),
    WeightRow("q_bias", "attn_q.bias", "self_attn.q_proj.bias", ("q_width",), _QKV_BIAS, "n_heads"),
    WeightRow("k_proj", "attn_k.weight", "self_attn.k_proj.weight", ("kv_width", "hidden_size"), None, "n_kv_heads"),
    WeightRow("k_bias", "attn_k.bias", "self_attn.k_proj.bias", ("kv_width",), _QKV_BIAS, "n_kv_heads"),
    WeightRow("v_proj", "attn_v.weight", "self_attn.v_proj.weight", ("kv_width", "hidden_size")),
    WeightRow("v_bias", "attn_v.bias", "self_attn.v_proj.bias", ("kv_width",), _QKV_BIAS),
    WeightRow("o_proj", "attn_output.weight", "self_attn.o_proj.weight", ("hidden_size", "q_width")),
    WeightRow("o_bias", "attn_output.bias", "self_attn.o_proj.bias", ("hidden_size",), _O_BIAS),
    WeightRow("q_norm", "attn_q_norm.weight", "self_attn.q_norm.weight", ("head_dim",), _QK_NORM),
    WeightRow("k_norm", "attn_k_norm.weight", "self_attn.k_norm.weight", ("head_dim",), _QK_NORM),
    WeightRow("ffn_norm", "ffn_norm.weight", "post_attention_layernorm.weight", ("hidden_size",)),
    WeightRow("gate_proj", "ffn_gate.weight", "mlp.gate_proj.weight", ("intermediate_size", "hidden_size")),
    WeightRow("up_proj", "ffn_up.weight", "mlp.up_proj.weight", ("intermediate_size", "hidden_size")),
    WeightRow("down_proj", "ffn_down.weight", "mlp.down_proj.weight", ("hidden_size", "intermediate_size")),
)


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of one model."""

    name: str
    gguf: str
    huggingface: str
    shape: tuple[int, ...]
    interleaved_heads: int  # heads whose rows a GGUF file of this model holds in pairs; 0: rows as in Hugging Face


def inventory(config: ModelConfig) -> dict[str, Weight]:
    """Every weight of a model by canonical name, in the order of the forward pass inside a layer."""
    rows = [("", "", "", row) for row in MODEL_WEIGHTS]
    for layer in range(config.n_layers):
        prefixes = (f"layers.{layer}.", f"blk.{layer}.", f"model.layers.{layer}.")
        rows += [(*prefixes, row) for row in LAYER_WEIGHTS]
    weights = {}
    for ours, gguf, huggingface, row in rows:
        if row.only_if is not None and getattr(config, row.only_if[0]) != row.only_if[1]:
            continue
        shape = tuple(getattr(config, axis) for axis in row.axes)
        heads = getattr(config, row.heads) if row.heads and config.family == "llama" else 0
        weight = Weight(ours + row.name, gguf + row.gguf, huggingface + row.huggingface, shape, heads)
        weights[weight.name] = weight
    return weights


def undo_interleave(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Bring rows of q or k, weight or bias, from the pairs of Llama GGUF files to the halves of Hugging Face."""
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])  # (heads, half, 2, ...)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def interleave(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Bring rows of q or k from halves to pairs: element j of a head's first half, then element j of its second."""
    halves = rows.reshape(n_heads, 2, -1, *rows.shape[1:])  # (heads, 2, half, ...)
    return halves.swapaxes(1, 2).reshape(rows.shape)


def is_plain_name(name: str) -> bool:
    """Whether a name from a file is harmless in messages, C strings and paths."""
    return bool(name) and name.isprintable() and not any(part in name for part in ("/", "\\", ".."))
