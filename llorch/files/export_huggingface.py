"""Write weights as the safetensors of a Hugging Face folder, and the config.json that transformers reads beside them.

Tensors have the names and the row order of transformers, all in one dtype; above `SHARD_BYTES` they are spread over
several files with an index.

Source: transformers modeling_utils, `save_pretrained` (file names, index, metadata); safetensors README (layout).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from llorch.config import FactorScaling, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from llorch.errors import FormatError
from llorch.files import Weights
from llorch.files.encode import encode, encoded_size
from llorch.files.export import read_once
from llorch.files.names import Weight, inventory
from llorch.files.quant import GGMLType
from llorch.files.safetensors import header_bytes
from llorch.ops.rope import frequencies, llama3_factors

SHARD_BYTES = 5_000_000_000  # of the tensors of one file, unless a single one is larger

DTYPES: dict[GGMLType, str] = {GGMLType.F32: "float32", GGMLType.F16: "float16", GGMLType.BF16: "bfloat16"}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
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
        weight_map = {weight.huggingface: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        index = {
            "metadata": {"total_size": huggingface_size(weights.config, ggml_type)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(folder / "model.safetensors.index.json", index)


def huggingface_size(config: ModelConfig, ggml_type: GGMLType) -> int:
    """Predict the bytes of all tensors."""
    return sum(encoded_size(weight.shape, ggml_type) for weight in inventory(config).values())


def huggingface_config(config: ModelConfig, ggml_type: GGMLType, *, path: Path) -> dict[str, object]:
    """Express a configuration as transformers does, without token ids; RoPE in keys that both 4 and 5 read."""
    if config.family != "qwen2" and config.qkv_bias != config.o_bias:
        message = f"attention_bias of {config.family}: transformers has one for q, k, v and o together, this model for "
        raise FormatError("Unsupported", message + ("q, k and v" if config.qkv_bias else "o") + " only", path=path)
    values = {
        "architectures": [_CLASSES[config.family]],
        "model_type": config.family,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": shortest(config.rms_norm_eps),
        "rope_theta": shortest(config.rope_theta),
        "rope_scaling": _rope_scaling(config, path),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": DTYPES[ggml_type],
        "use_cache": True,
    }
    if config.family != "qwen2":
        values["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        values["mlp_bias"] = False
    return values


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a JSON file as transformers does: indented, not escaped, with a line end."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def shortest(value: float) -> float:
    """Undo the widening of a float32 from a GGUF file: 9.999999747378752e-06 was 1e-05; other numbers stay."""
    narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value


def _shards(config: ModelConfig, ggml_type: GGMLType, shard_bytes: int) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    used = 0
    for weight in inventory(config).values():
        n_bytes = encoded_size(weight.shape, ggml_type)
        if shards[-1] and used + n_bytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(weight)
        used += n_bytes
    return shards


def _write_shard(
    weights: Weights, path: Path, shard: list[Weight], ggml_type: GGMLType, on_tensor: Callable[[str], None]
) -> None:
    rows = [(one.huggingface, ggml_type.name, one.shape, encoded_size(one.shape, ggml_type)) for one in shard]
    with path.open("wb") as file:
        file.write(header_bytes(rows, metadata={"format": "pt"}))  # without it transformers refuses the file
        for weight in shard:
            on_tensor(weight.huggingface)
            with read_once(weights, weight) as array:
                for part in encode(array, ggml_type, name=weight.huggingface, path=weights.path):
                    file.write(part.data)


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
    """The llama3 scaling, with the low and high factor of all Llama 3 models, that gives the factors of a file."""
    plain = frequencies(config.head_dim, config.rope_theta)
    for context in _CONTEXTS:
        scaling = Llama3Scaling(
            factor=shortest(max(1.0, *factors)),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=context,
        )
        if np.allclose(llama3_factors(plain, scaling), factors, rtol=1e-6, atol=0):
            return scaling
    message = "rope_freqs.weight: expected the factors of a Llama 3 scaling, got others"
    raise FormatError("Unsupported", f"{message}; transformers cannot express them", path=path)
