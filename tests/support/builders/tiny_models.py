"""Tiny random models of every family as Hugging Face folders and GGUF files, each written with its own names.

The names here are typed out once more on purpose: they are what the table in llorch/files/tensor_names.py is tested by.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import safetensors.numpy
from gguf import GGUFWriter

HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 56, 4, 2, 8, 40

CONFIG: dict[str, object] = {
    "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": HEAD_DIM},
}


def huggingface_shapes(family: str) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(2):
        block = f"model.layers.{layer}."
        shapes |= {
            block + "input_layernorm.weight": (HIDDEN,),
            **{block + f"self_attn.{part}_proj.weight": (q if part == "q" else kv, HIDDEN) for part in "qkv"},
            block + "self_attn.o_proj.weight": (HIDDEN, q),
            block + "post_attention_layernorm.weight": (HIDDEN,),
            **{block + f"mlp.{part}_proj.weight": (INTER, HIDDEN) for part in ("gate", "up")},
            block + "mlp.down_proj.weight": (HIDDEN, INTER),
        }
        if family == "qwen2":
            shapes |= {block + f"self_attn.{part}_proj.bias": (q if part == "q" else kv,) for part in "qkv"}
        if family == "qwen3":
            shapes |= {block + f"self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    return shapes


def random_tensors(family: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        name: rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        for name, shape in huggingface_shapes(family).items()
    }


def with_biases(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Beside a folder's tensors, a bias that counts upwards for each projection of the attention."""
    widths = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": HIDDEN}
    return tensors | {
        f"model.layers.{layer}.self_attn.{part}_proj.bias": np.arange(width, dtype=np.float32)
        for layer in (0, 1)
        for part, width in widths.items()
    }


def write_folder(folder: Path, tensors: dict[str, np.ndarray], family: str = "llama", **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | FAMILIES[family] | changes))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


GGUF_METADATA: dict[str, object] = {
    "llama.block_count": 2, "llama.context_length": 64, "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INTER, "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0, "llama.rope.dimension_count": HEAD_DIM,
}  # fmt: skip


def gguf_tensors() -> dict[str, np.ndarray]:
    """The tensors of a valid Llama file, by the names of llama.cpp."""
    rng = np.random.default_rng(8)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (INTER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INTER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INTER),
        }
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def add_metadata(writer: GGUFWriter, metadata: Mapping[str, object]) -> None:
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
            case _:
                raise TypeError(f"{key}: expected a bool, number, text or list, got {value!r}")


def write_file(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, object], arch: str = "llama") -> Path:
    writer = GGUFWriter(path, arch)
    add_metadata(writer, metadata)
    finish(writer, tensors)
    return path


def finish(writer: GGUFWriter, tensors: Mapping[str, np.ndarray] = MappingProxyType({})) -> None:
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
