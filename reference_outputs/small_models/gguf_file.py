"""Write a trained transformers model as a GGUF file, with the names and row order of llama.cpp's converter."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

from llorch.families.config import Llama3Scaling, ModelConfig
from llorch.families.table import FAMILIES
from llorch.files.tensor_names import interleave, inventory
from llorch.ops.rope import frequencies, llama3_factors
from small_models.shapes import Recipe


def write(
    path: Path,
    model: transformers.PreTrainedModel,
    recipe: Recipe,
    tokenizer_metadata: Mapping[str, object],
) -> None:
    """Write one model.

    Args:
        path: The file to write.
        model: The trained model.
        recipe: Recipe that it was made from.
        tokenizer_metadata: `tokenizer.ggml.*` keys and values.
    """
    config = model_config(recipe)
    writer = gguf.GGUFWriter(path, recipe.family)
    for key, value in {**_general(path.stem), **_hyperparameters(config), **tokenizer_metadata}.items():
        _add(writer, key, value)
    if isinstance(config.rope_scaling, Llama3Scaling):
        factors = llama3_factors(frequencies(config.head_dim, config.rope_theta), config.rope_scaling)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    state = {name: tensor.detach().to(torch.float32).numpy() for name, tensor in model.state_dict().items()}
    for weight in inventory(config).values():
        rows, heads = state[weight.huggingface], weight.interleaved_heads
        if rows.shape != weight.shape:
            raise ValueError(f"{weight.huggingface}: expected shape {weight.shape}, got {rows.shape}")
        writer.add_tensor(weight.gguf, np.ascontiguousarray(interleave(rows, heads) if heads else rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_config(recipe: Recipe) -> ModelConfig:
    """Express a recipe as a configuration of llorch.

    Args:
        recipe: The recipe.

    Returns:
        Its configuration.
    """
    shape, family = recipe.config, FAMILIES[recipe.family]
    rope = dict(shape["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    return ModelConfig(
        family=recipe.family,
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        n_layers=shape["num_hidden_layers"],
        n_heads=shape["num_attention_heads"],
        n_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        vocab_size=shape["vocab_size"],
        rms_norm_eps=shape["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=Llama3Scaling(**rope) if kind == "llama3" else None,
        max_position_embeddings=shape["max_position_embeddings"],
        qkv_bias=bool(family.qkv_bias),
        o_bias=False,
        qk_norm=family.qk_norm,
        tie_word_embeddings=shape["tie_word_embeddings"],
    )


def _general(name: str) -> dict[str, object]:
    return {
        "general.name": name,
        "general.author": "llorch",
        "general.license": "apache-2.0",
        "general.description": "Trained from scratch on generated stories; see reference_outputs/make_models.py",
        "general.file_type": int(gguf.LlamaFileType.ALL_F32),
    }


def _hyperparameters(config: ModelConfig) -> dict[str, object]:
    values = {
        "block_count": config.n_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    return {f"{config.family}.{key}": value for key, value in values.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
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
            raise TypeError(f"{key}: no GGUF type for {type(value).__name__}")
