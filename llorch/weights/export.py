"""Write weights as a float32 GGUF file that llama.cpp loads.

Hyperparameters go into metadata keys, the llama3 frequency scaling into the tensor `rope_freqs.weight` (one
divisor per frequency), and q and k of the llama family into the paired row order that llama.cpp rotates.

Source: llama.cpp conversion/base.py and conversion/llama.py (keys, rope factors); gguf GGUFWriter.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFValueType, GGUFWriter, LlamaFileType, RopeScalingType

from llorch.config import FactorScaling, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from llorch.errors import FormatError
from llorch.ops.rope import frequencies, llama3_factors
from llorch.weights import Weights
from llorch.weights.metadata import NUMBERS, StringArray
from llorch.weights.names import Weight, interleave, inventory

_VALUE_TYPES = {dtype: kind for kind, dtype in NUMBERS.items() if kind is not GGUFValueType.BOOL}


def write_gguf(weights: Weights, path: str | Path, *, tokenizer_metadata: Mapping[str, object] | None = None) -> None:
    """Write all weights as F32; the file appears under its name only when it is complete.

    Args:
        weights: The model.
        path: Target; may be the file that the weights are read from.
        tokenizer_metadata: `tokenizer.*` keys as `GGUFFile.metadata` holds them. None: llama.cpp loads the file as
            a model without vocabulary.

    Raises:
        FormatError: Unsupported for a frequency scaling that llama.cpp does not know for this family.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(weights, temporary, tokenizer_metadata)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write(weights: Weights, path: Path, tokenizer_metadata: Mapping[str, object] | None) -> None:
    config = weights.config
    writer = GGUFWriter(path, config.family)
    try:
        factors = _rope_factors(weights)
        _add_hyperparameters(writer, config)
        _add_rope(writer, config)
        for key, value in (tokenizer_metadata or {"tokenizer.ggml.model": "no_vocab"}).items():
            _add_value(writer, key, value)
        for name, shape, _ in _tensors(weights, factors):
            n_bytes = 4 * int(np.prod(shape))
            writer.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, _, load in _tensors(weights, factors):
            writer.write_tensor_data(np.ascontiguousarray(load(), np.float32))
        writer.flush()
    finally:
        writer.close()


def _tensors(
    weights: Weights, factors: np.ndarray | None
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
    """Name, shape and how to load: shapes are written long before the first array is wanted."""
    if factors is not None:
        yield "rope_freqs.weight", factors.shape, lambda: factors
    for weight in inventory(weights.config).values():
        yield weight.gguf, weight.shape, lambda weight=weight: _in_gguf_order(weights, weight)


def _in_gguf_order(weights: Weights, weight: Weight) -> np.ndarray:
    array = weights[weight.name]
    return interleave(array, weight.interleaved_heads) if weight.interleaved_heads else array


def _rope_factors(weights: Weights) -> np.ndarray | None:
    config = weights.config
    match config.rope_scaling:
        case FactorScaling(factors=factors):
            values = np.array(factors)
        case Llama3Scaling() as scaling:
            values = llama3_factors(frequencies(config.head_dim, config.rope_theta), scaling)
        case _:
            return None
    if config.family != "llama":
        message = f"llama.cpp reads frequency factors for the llama family only, got {config.family}"
        raise FormatError("Unsupported", message, path=weights.path)
    return values.astype(np.float32)


def _add_hyperparameters(writer: GGUFWriter, config: ModelConfig) -> None:
    writer.add_name("llorch export")
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_rope(writer: GGUFWriter, config: ModelConfig) -> None:
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    match config.rope_scaling:
        case LinearScaling(factor=factor):
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        case YarnScaling() as yarn:
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(yarn.factor)
            writer.add_rope_scaling_orig_ctx_len(yarn.original_max_position_embeddings)
            # llama.cpp multiplies by YaRN's own gain as well, so that is left out here.
            writer.add_rope_scaling_attn_factors(yarn.attention_factor / (0.1 * math.log(yarn.factor) + 1.0))
            if (yarn.beta_fast, yarn.beta_slow) != (32.0, 1.0):
                message = f"llama.cpp computes YaRN with betas 32 and 1, got {yarn.beta_fast} and {yarn.beta_slow}"
                raise FormatError("Unsupported", message)


def _add_value(writer: GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_key_value(key, value, GGUFValueType.INT32 if value < 0 else GGUFValueType.UINT32)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case np.ndarray():
            kind = GGUFValueType.BOOL if value.dtype == bool else _VALUE_TYPES[value.dtype]
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, kind)
        case Sequence():
            writer.add_key_value(key, list(value), GGUFValueType.ARRAY, _element_type(value))
        case _:
            raise TypeError(f"{key} must be a scalar, a string, an array or strings, got {type(value).__name__}")


def _element_type(values: Sequence) -> GGUFValueType:
    if isinstance(values, StringArray):
        return GGUFValueType.STRING
    return GGUFValueType.get_type(values[0])
