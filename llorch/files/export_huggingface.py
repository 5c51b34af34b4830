"""Write weights as the safetensors files of a Hugging Face folder, with the config.json for transformers.

Tensors have the names and the row order of transformers, all in one dtype; above `SHARD_BYTES` they are split into
shards with an index.

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

SHARD_BYTES = 5_000_000_000  # tensor bytes per file, unless one tensor is larger

DTYPES: dict[GGMLType, str] = {GGMLType.F32: "float32", GGMLType.F16: "float16", GGMLType.BF16: "bfloat16"}
# Original contexts to try for given frequency factors: 8192 as in Llama 3, then other powers of two.
_CONTEXTS = (8192, *(2**exponent for exponent in range(5, 21)))


def write_safetensors(
    weights: Weights,
    folder: Path,
    *,
    ggml_type: GGMLType,
    shard_bytes: int = SHARD_BYTES,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> None:
    """Write all weights into a folder: one file, or shards of at most `shard_bytes` (or one tensor) with an index."""
    shards = _shards(weights.config, ggml_type, shard_bytes)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(weights, folder / name, shard, ggml_type, on_tensor)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        metadata = {"total_size": huggingface_size(weights.config, ggml_type)}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)


def huggingface_size(config: ModelConfig, ggml_type: GGMLType) -> int:
    """Return the bytes of all tensors."""
    return sum(encoded_size(weight.shape, ggml_type) for weight in inventory(config).values())


def huggingface_config(config: ModelConfig, ggml_type: GGMLType, *, path: Path) -> dict[str, object]:
    """Build the config.json of transformers, without token ids; RoPE keys are read by versions 4 and 5."""
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
    """Return the bias settings that the family does not fix; if q, k, v and o share a key, q, k and v define it."""
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
    """Return the settings of delta nets in transformers; empty for a model without them."""
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
    """Write a JSON file like transformers: indented, not escaped, with a final newline."""
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
    """Write one safetensors file; `on_tensor` is called for each tensor, for experts only for the first."""
    rows = [(tensor.name, ggml_type.name, tensor.shape, encoded_size(tensor.shape, ggml_type)) for tensor in shard]
    with path.open("wb") as file:
        file.write(header_bytes(rows, metadata={"format": "pt"}))  # transformers requires it
        for tensor in shard:
            if not tensor.expert:  # only once per stack
                on_tensor(tensor.weights[0].huggingface)
            if tensor.expert is None:
                array = assembled(weights, tensor, in_gguf=False)
            else:
                array = weights.read_expert(tensor.weights[0].name, tensor.expert)
            for part in encode(array, ggml_type, name=tensor.name, path=weights.path):
                file.write(part.data)


def _rope_settings(config: ModelConfig, path: Path) -> dict[str, object]:
    """Return RoPE settings in keys of transformers 4, or in newer keys for a family that it lacks."""
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
    """Replace an attention factor of one by Ministral 3's keys, which llama.cpp's converter reads."""
    if scaling.get("attention_factor") != 1.0:
        return scaling
    remaining = {key: value for key, value in scaling.items() if key != "attention_factor"}
    return remaining | {"mscale": 1.0, "mscale_all_dim": 1.0}


def _rope_scaling(config: ModelConfig, path: Path) -> dict[str, object] | None:
    match config.rope_scaling:
        case None:
            return None
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": shortest(factor)}
        case FactorScaling(factors=factors):
            return {"rope_type": "llama3", **asdict(_find_scaling(factors, config, path))}
        case Llama3Scaling() as scaling:
            return {"rope_type": "llama3", **asdict(scaling)}
        case YarnScaling() as yarn:  # fields have the names of transformers, also for Llama 3
            return {"rope_type": "yarn", **asdict(yarn), "factor": shortest(yarn.factor)}


def _find_scaling(factors: tuple[float, ...], config: ModelConfig, path: Path) -> Llama3Scaling:
    """Find the scaling of Llama 3 or 4 with the given factors; FormatError Unsupported if there is none."""
    unscaled = frequencies(config.rotated, config.rope_theta)
    for context, high_freq_factor in product(_CONTEXTS, (4.0, 1.0)):  # 4 in Llama 3, 1 in Llama 4
        scaling = Llama3Scaling(
            factor=shortest(max(1.0, *factors)),
            low_freq_factor=1.0,
            high_freq_factor=high_freq_factor,
            original_max_position_embeddings=context,
        )
        if np.allclose(llama3_factors(unscaled, scaling), factors, rtol=1e-6, atol=0):
            return scaling
    message = "rope_freqs.weight: expected the factors of a Llama 3 scaling, got other factors"
    raise FormatError("Unsupported", f"{message}; transformers cannot express them", path=path)
