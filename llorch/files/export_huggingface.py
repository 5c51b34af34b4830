"""Write weights as the safetensors of a Hugging Face folder, and the config.json that transformers reads beside them.

Tensors have the names and the row order of transformers, all in one dtype; above `SHARD_BYTES` they are spread over
several files with an index.

Source: transformers modeling_utils, `save_pretrained` (file names, index, metadata); safetensors README (layout).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np

from llorch.families.config import FactorScaling, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from llorch.families.family import Family
from llorch.families.rules import BETA, bias_key
from llorch.families.table import FAMILIES
from llorch.files import Weights
from llorch.files.export import assembled, rope_sections
from llorch.files.quant import GGMLType, encode, encoded_size
from llorch.files.safetensors import header_bytes
from llorch.files.tensor_names import Tensor, huggingface_tensors, inventory, written_family
from llorch.ops.rope import frequencies, llama3_factors
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import shortest

SHARD_BYTES = 5_000_000_000  # of the tensors of one file, unless a single one is larger

DTYPES: dict[GGMLType, str] = {GGMLType.F32: "float32", GGMLType.F16: "float16", GGMLType.BF16: "bfloat16"}
# Contexts of pre-training that are tried to explain frequency factors: 8192 as in Llama 3, then other powers of two.
_CONTEXTS = (8192, *(2**exponent for exponent in range(5, 21)))


def write_safetensors(
    weights: Weights,
    folder: Path,
    *,
    ggml_type: GGMLType,
    shard_bytes: int = SHARD_BYTES,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> None:
    """Write all weights into a folder, as one file or shards of at most `shard_bytes` (or one tensor) with an index."""
    shards = _shards(weights.config, ggml_type, shard_bytes)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(weights, folder / name, shard, ggml_type, on_tensor)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        metadata = {"total_size": huggingface_size(weights.config, ggml_type)}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)


def huggingface_size(config: ModelConfig, ggml_type: GGMLType) -> int:
    """Predict the bytes of all tensors."""
    return sum(encoded_size(weight.shape, ggml_type) for weight in inventory(config).values())


def huggingface_config(config: ModelConfig, ggml_type: GGMLType, *, path: Path) -> dict[str, object]:
    """Express a configuration as transformers does, without token ids; RoPE in keys that both 4 and 5 read."""
    name = written_family(config)
    family = FAMILIES[name]
    biases, o_key = bias_settings(config, family), bias_key(family.transformers.keys, "o_bias")
    if biases.get(o_key, config.o_bias) != config.o_bias:
        message = f"{o_key} of {name}: transformers has one switch for q, k, v and o, this model has a bias for "
        raise FormatError("Unsupported", message + ("q, k and v" if config.qkv_bias else "o") + " only", path=path)
    values: dict[str, object] = {
        "architectures": [f"{family.classes}ForCausalLM"],
        "model_type": f"{family.multimodal_type}_text" if family.multimodal_type else name,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": shortest(config.rms_norm_eps),
        **_rope_settings(config, path),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": DTYPES[ggml_type],
        "use_cache": True,
    }
    values |= biases | _experts_settings(config, family) | delta_net_settings(config)
    return values | {**family.transformers.config_settings(config)}


def bias_settings(config: ModelConfig, family: Family) -> dict[str, bool]:
    """Express the biases that the family leaves to the file; one key for both says what q, k and v have."""
    facts = (("o_bias", family.o_bias, config.o_bias), ("qkv_bias", family.qkv_bias, config.qkv_bias))
    return {bias_key(family.transformers.keys, name): value for name, fixed, value in facts if fixed is None}


def _experts_settings(config: ModelConfig, family: Family) -> dict[str, object]:
    if (experts := config.experts) is None or family.router == "sigmoid":
        return {}
    values: dict[str, object] = {
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.n_experts_per_token,
        "moe_intermediate_size": experts.expert_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return values | ({"shared_expert_intermediate_size": experts.shared_size} if experts.shared_size else {})


def delta_net_settings(config: ModelConfig) -> dict[str, object]:
    """Express delta nets as transformers does; empty for a model without them."""
    if (net := config.delta_net) is None:
        return {}
    kinds = {"delta_net": "linear_attention", "attention": "full_attention"}
    return {
        "layer_types": [kinds[config.layer(i).mixer] for i in range(config.n_layers)],
        "linear_conv_kernel_dim": net.conv_kernel,
        "linear_num_key_heads": net.n_key_heads,
        "linear_num_value_heads": net.n_value_heads,
        "linear_key_head_dim": net.key_head_dim,
        "linear_value_head_dim": net.value_head_dim,
    }


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a JSON file as transformers does: indented, not escaped, with a line end."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _shards(config: ModelConfig, ggml_type: GGMLType, shard_bytes: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    used = 0
    for tensor in huggingface_tensors(config):
        n_bytes = encoded_size(tensor.shape, ggml_type)
        if shards[-1] and used + n_bytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += n_bytes
    return shards


def _write_shard(
    weights: Weights, path: Path, shard: list[Tensor], ggml_type: GGMLType, on_tensor: Callable[[str], None]
) -> None:
    """Write one safetensors file; `on_tensor` hears each tensor's name, of experts only the first."""
    rows = [(one.name, ggml_type.name, one.shape, encoded_size(one.shape, ggml_type)) for one in shard]
    with path.open("wb") as file:
        file.write(header_bytes(rows, metadata={"format": "pt"}))  # without it transformers refuses the file
        for tensor in shard:
            if not tensor.expert:  # of a stack the first only
                on_tensor(tensor.weights[0].huggingface)
            if tensor.expert is None:
                array = assembled(weights, tensor, in_gguf=False)
            else:
                array = weights.read_expert(tensor.weights[0].name, tensor.expert)
            for part in encode(array, ggml_type, name=tensor.name, path=weights.path):
                file.write(part.data)


def _rope_settings(config: ModelConfig, path: Path) -> dict[str, object]:
    """Write RoPE with the keys that transformers 4 has too, or with the newer ones for a family that it lacks."""
    theta, scaling, kind = shortest(config.rope_theta), _rope_scaling(config, path), written_family(config)
    if "partial_rotary_factor" in FAMILIES[kind].defaults:
        values: dict[str, object] = {"rope_theta": theta, "partial_rotary_factor": config.rotated / config.head_dim}
        if FAMILIES[kind].sections:
            values["mrope_section"] = rope_sections(config.rotated // 2, FAMILIES[kind].sections)
        return {"rope_parameters": values | (scaling or {"rope_type": "default"})}
    if BETA in FAMILIES[kind].rope_defaults:
        beta = 0.0 if config.temperature is None else shortest(config.temperature.scale)
        original = config.max_position_embeddings if config.temperature is None else config.temperature.floor
        values = {"rope_theta": theta, BETA: beta, "original_max_position_embeddings": original}
        return {"rope_parameters": values | _with_mscale(scaling or {"rope_type": "default"})}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _with_mscale(scaling: dict[str, object]) -> dict[str, object]:
    """Express a gain of one as Ministral 3 does, in keys that llama.cpp's converter looks for."""
    if scaling.get("attention_factor") != 1.0:
        return scaling
    kept = {key: value for key, value in scaling.items() if key != "attention_factor"}
    return kept | {"mscale": 1.0, "mscale_all_dim": 1.0}


def _rope_scaling(config: ModelConfig, path: Path) -> dict[str, object] | None:
    match config.rope_scaling:
        case None:
            return None
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": shortest(factor)}
        case FactorScaling(factors=factors):
            return {"rope_type": "llama3", **asdict(_explained(factors, config, path))}
        case Llama3Scaling() as scaling:
            return {"rope_type": "llama3", **asdict(scaling)}
        case YarnScaling() as yarn:  # whose fields have the names of transformers, as those of Llama 3 have
            return {"rope_type": "yarn", **asdict(yarn), "factor": shortest(yarn.factor)}


def _explained(factors: tuple[float, ...], config: ModelConfig, path: Path) -> Llama3Scaling:
    """Find the scaling of Llama 3 or 4 that gives the factors of a file; FormatError Unsupported for none."""
    plain = frequencies(config.rotated, config.rope_theta)
    for context, high in product(_CONTEXTS, (4.0, 1.0)):
        scaling = Llama3Scaling(
            factor=shortest(max(1.0, *factors)),
            low_freq_factor=1.0,
            high_freq_factor=high,
            original_max_position_embeddings=context,
        )
        if np.allclose(llama3_factors(plain, scaling), factors, rtol=1e-6, atol=0):
            return scaling
    message = "rope_freqs.weight: expected the factors of a Llama 3 scaling, got other factors"
    raise FormatError("Unsupported", f"{message}; transformers cannot express them", path=path)
