"""Write weights as a GGUF file that llama.cpp loads, in any type of `quant.LARGEST`.

Hyperparameters become metadata keys, the llama3 frequency scaling becomes the tensor `rope_freqs.weight` (one divisor
per frequency), and rows of q and k of the llama family are interleaved for llama.cpp's RoPE.

Vectors (norms, biases) are always F32, as in llama.cpp. A matrix whose rows are no multiple of the block size becomes
F16, and so do the embedding and the output matrix with ternary types, as in llama.cpp's converter.

Source: llama.cpp conversion/base.py, `prepare_tensors`, and conversion/llama.py (keys, rope factors); gguf GGUFWriter.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType, RopeScalingType

from llorch.families.config import FactorScaling, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from llorch.families.family import EXPERT_STEP, FREQUENCY_FACTORS, TEMPERATURE_SCALE, YARN
from llorch.families.rope_scaling import yarn_gain
from llorch.families.table import FAMILIES
from llorch.files import GGUFFile, Weights
from llorch.files.export_blocks import block_bytes
from llorch.files.mapped import release_pages
from llorch.files.metadata import NUMBERS, StringArray
from llorch.files.new_file import new_file
from llorch.files.quant import BLOCK_SIZES, LARGEST, GGMLType, encode, encoded_size
from llorch.files.tensor_names import Tensor, Weight, gguf_tensors, interleave, inventory
from llorch.files.tensor_storage import AS_IS
from llorch.ops.rope import frequencies, llama3_factors
from llorch.runtime.errors import FormatError

_VALUE_TYPES = {dtype: kind for kind, dtype in NUMBERS.items() if kind is not GGUFValueType.BOOL}
NO_VOCABULARY: Mapping[str, object] = {"tokenizer.ggml.model": "no_vocab"}
_TERNARY = (GGMLType.TQ1_0, GGMLType.TQ2_0)  # types with codes -1, 0, 1
_NONE: Mapping[str, GGMLType] = {}  # default of `kept`: no matrix keeps its blocks

_NAMES = {GGMLType.F32: "ALL_F32", GGMLType.MXFP4: "MOSTLY_MXFP4_MOE"}  # exceptions to MOSTLY_<type>
# Types to choose from, and llama.cpp's number for the type of the whole file.
FILE_TYPES = {kind: LlamaFileType[_NAMES.get(kind, f"MOSTLY_{kind.name}")] for kind in LARGEST}


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """Tensor to write, read lazily: the shapes are written before the first array is read."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    parts: Callable[[], Iterator[np.ndarray]]  # yields the bytes


def write_gguf(
    weights: Weights,
    path: str | Path,
    *,
    ggml_type: GGMLType = GGMLType.F32,
    tokenizer_metadata: Mapping[str, object] | None = None,
) -> None:
    """Write all weights atomically; the target may be the source file.

    `tokenizer_metadata` has the `tokenizer.*` keys of `GGUFFile.metadata`. FormatError: Unsupported for a frequency
    scaling that llama.cpp lacks for this family, NonFinite, or OutOfRange for values above the type's maximum.
    """
    with new_file(Path(path)) as temporary:
        metadata = {"general.name": "llorch export"} | dict(tokenizer_metadata or NO_VOCABULARY)
        write_gguf_content(weights, temporary, ggml_type=ggml_type, metadata=metadata)


def write_gguf_content(
    weights: Weights,
    path: Path,
    *,
    ggml_type: GGMLType,
    metadata: Mapping[str, object],
    kept: Mapping[str, GGMLType] = _NONE,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> None:
    """Write all weights to a temporary file; matrices in `kept` (name to type) are repacked, see `find_blocks`."""

    def add_metadata(writer: GGUFWriter) -> None:
        writer.add_file_type(FILE_TYPES[most_frequent_type(weights.config, ggml_type, kept)])
        if any(BLOCK_SIZES[kind][0] > 1 for kind in (ggml_type, *kept.values())):
            writer.add_quantization_version(GGML_QUANT_VERSION)
        add_hyperparameters(writer, weights.config)
        for key, value in metadata.items():
            _add_value(writer, key, value)

    write_entries(
        path, FAMILIES[weights.config.family].gguf, _entries(weights, ggml_type, kept), add_metadata, on_tensor
    )


def write_entries(
    path: Path,
    architecture: str,
    entries: Sequence[TensorToWrite],
    add_metadata: Callable[[GGUFWriter], None],
    on_tensor: Callable[[str], None] = lambda name: None,
) -> None:
    """Write metadata and tensors to a temporary file; `add_metadata` adds keys to the writer."""
    writer = GGUFWriter(path, architecture)
    try:
        add_metadata(writer)
        for entry in entries:
            n_bytes = encoded_size(entry.shape, entry.ggml_type)
            gguf_type = GGMLQuantizationType(entry.ggml_type)
            writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), n_bytes, raw_dtype=gguf_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.flush()
    finally:
        writer.close()
    with path.open("ab") as file:  # not by GGUFWriter, which ignores a full disk
        file.write(bytes(-file.tell() % writer.data_alignment))
        for entry in entries:
            on_tensor(entry.name)
            for chunk in entry.parts():
                file.write(chunk.data)
            file.write(bytes(-file.tell() % writer.data_alignment))


def gguf_types(config: ModelConfig, ggml_type: GGMLType, kept: Mapping[str, GGMLType] = _NONE) -> dict[str, GGMLType]:
    """Return the type of each weight in a file: its type in `kept`, else `ggml_type` if its rows allow it."""
    return {name: kept.get(name) or _written_type(weight, ggml_type) for name, weight in inventory(config).items()}


def gguf_size(config: ModelConfig, ggml_type: GGMLType, kept: Mapping[str, GGMLType] = _NONE) -> int:
    """Return the bytes of all tensors of a file, nearly its whole size."""
    types = gguf_types(config, ggml_type, kept)
    return sum(encoded_size(weight.shape, types[name]) for name, weight in inventory(config).items())


def most_frequent_type(config: ModelConfig, ggml_type: GGMLType, kept: Mapping[str, GGMLType]) -> GGMLType:
    """Return the type of the whole file: the type of most matrix elements, or `ggml_type` if no matrix is kept."""
    if not kept:
        return ggml_type
    counts: Counter[GGMLType] = Counter()
    for name, weight in inventory(config).items():
        if not weight.stays_f32:
            counts[kept.get(name, ggml_type)] += math.prod(weight.shape)
    return counts.most_common(1)[0][0]


@contextmanager
def weight_in_memory(weights: Weights, weight: Weight) -> Iterator[np.ndarray]:
    """Yield a weight in Hugging Face's row order, then release its memory; FormatError NonFinite."""
    try:
        yield weights.read(weight.name)
    finally:
        for tensor in weights.all_stored(weight.name):
            release_pages(tensor.raw)


def _written_type(weight: Weight, ggml_type: GGMLType) -> GGMLType:
    """Return the type of a written weight: F32 or F16 if it cannot have `ggml_type`."""
    if weight.stays_f32:
        return GGMLType.F32
    if weight.shape[-1] % BLOCK_SIZES[ggml_type][0]:
        return GGMLType.F16
    if ggml_type in _TERNARY and weight.name in ("embed_tokens", "lm_head"):
        return GGMLType.F16
    return ggml_type


def _entries(weights: Weights, ggml_type: GGMLType, kept: Mapping[str, GGMLType]) -> list[TensorToWrite]:
    entries = []
    factors = _rope_factors(weights)
    if factors is not None:
        entries.append(TensorToWrite("rope_freqs.weight", factors.shape, GGMLType.F32, lambda: iter([factors])))
    for tensor in gguf_tensors(weights.config):
        weight = tensor.weights[0]
        kind = kept.get(weight.name) or _written_type(weight, ggml_type)
        write = partial(block_bytes, weights, weight) if weight.name in kept else partial(_chunks, weights, tensor)
        entries.append(TensorToWrite(tensor.name, tensor.shape, kind, partial(write, kind)))
    return entries


def _chunks(weights: Weights, tensor: Tensor, ggml_type: GGMLType) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor in chunks; a weight of this type is checked and copied, not quantised again."""
    weight = tensor.weights[0]
    if len(weight.shape) == 3:
        yield from _stack_parts(weights, weight, ggml_type)
        return
    has_same_layout = all(weights.slots[w.name].layout == w.in_gguf for w in tensor.weights)
    with weight_in_memory(weights, weight) as array:
        if has_same_layout and all(_keeps_bytes(weights, w, ggml_type) for w in tensor.weights):
            yield weights.as_stored(weight.name).raw  # copied, because quantising twice would change some bytes
            return
        if len(tensor.weights) > 1 or weight.in_gguf != AS_IS:
            rows = assembled(weights, tensor, in_gguf=True)
        else:
            rows = interleave(array, weight.interleaved_heads) if weight.interleaved_heads else array
        yield from encode(rows, ggml_type, name=weight.gguf, path=weights.path)


def _keeps_bytes(weights: Weights, weight: Weight, ggml_type: GGMLType) -> bool:
    """Check if a weight keeps its bytes: it comes unchanged from a GGUF file of the same type."""
    in_gguf = isinstance(weights.source, GGUFFile) and not weights.is_changed(weight.name)
    return in_gguf and weights.stored_type(weight.name) is ggml_type


def _stack_parts(weights: Weights, weight: Weight, ggml_type: GGMLType) -> Iterator[np.ndarray]:
    """Yield the bytes of the experts, with one expert in memory at a time."""
    for expert in range(weight.shape[0]):
        array = weights.read_expert(weight.name, expert)
        if _keeps_bytes(weights, weight, ggml_type):
            yield weights.expert_as_stored(weight.name, expert).raw
        else:
            yield from encode(array, ggml_type, name=weight.gguf, path=weights.path)
    for tensor in weights.all_stored(weight.name):
        release_pages(tensor.raw)


def assembled(weights: Weights, tensor: Tensor, *, in_gguf: bool) -> np.ndarray:
    """Assemble a tensor of a new file (GGUF if `in_gguf`, else safetensors), as float32, from its weights."""
    array = np.empty(tensor.shape, np.float32)
    for weight in tensor.weights:
        with weight_in_memory(weights, weight) as part:
            (weight.in_gguf if in_gguf else weight.in_huggingface).put(part, array)
    return array


def _rope_factors(weights: Weights) -> np.ndarray | None:
    """Return llama.cpp's divisors of the RoPE frequencies, float32, or None if the model needs none."""
    config = weights.config
    match config.rope_scaling:
        case FactorScaling(factors=factors):
            divisors = np.array(factors)
        case Llama3Scaling() as scaling:
            divisors = llama3_factors(frequencies(config.rotated, config.rope_theta), scaling)
        case _:
            return None
    if FREQUENCY_FACTORS not in FAMILIES[config.family].llamacpp.reads:
        message = f"llama.cpp reads frequency factors for the llama family only, got {config.family}"
        raise FormatError("Unsupported", message, path=weights.path)
    return divisors.astype(np.float32)


def add_hyperparameters(writer: GGUFWriter, config: ModelConfig) -> None:
    """Add a configuration's keys; Unsupported for a frequency scaling that llama.cpp computes differently."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.n_layers)
    expert_size = 0 if config.experts is None else config.experts.expert_size
    if not FAMILIES[config.family].router or config.intermediate_size != expert_size:  # else readers use expert_size
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_rope(writer, config)
    _add_experts(writer, config)
    _add_delta_net(writer, config)
    if TEMPERATURE_SCALE in FAMILIES[config.family].llamacpp.reads and config.temperature is not None:
        writer.add_attn_temperature_scale(config.temperature.scale)
        if not isinstance(config.rope_scaling, YarnScaling):  # the key of the floor, which YaRN has added
            writer.add_rope_scaling_orig_ctx_len(config.temperature.floor)


def _add_experts(writer: GGUFWriter, config: ModelConfig) -> None:
    if (experts := config.experts) is None:
        return
    writer.add_expert_count(experts.n_experts)
    writer.add_expert_used_count(experts.n_experts_per_token)
    writer.add_expert_feed_forward_length(experts.expert_size)
    if EXPERT_STEP in FAMILIES[config.family].llamacpp.reads:
        first = next((i for i in range(config.n_layers) if config.layer(i).experts), -1)
        writer.add_interleave_moe_layer_step(first + 1)  # 0: no layer has experts
    elif experts.shared_size:
        writer.add_expert_shared_feed_forward_length(experts.shared_size)


def _add_delta_net(writer: GGUFWriter, config: ModelConfig) -> None:
    if (net := config.delta_net) is None:
        return
    writer.add_ssm_conv_kernel(net.conv_kernel)
    writer.add_ssm_state_size(net.key_head_dim)
    writer.add_ssm_group_count(net.n_key_heads)
    writer.add_ssm_time_step_rank(net.n_value_heads)
    writer.add_ssm_inner_size(net.value_width)
    recurrent = [config.layer(i).mixer == "delta_net" for i in range(config.n_layers)]
    writer.add_array(f"{FAMILIES[config.family].gguf}.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(recurrent.index(False) + 1 if False in recurrent else len(recurrent) + 1)


def _add_rope(writer: GGUFWriter, config: ModelConfig) -> None:
    writer.add_rope_dimension_count(config.rotated)
    writer.add_rope_freq_base(config.rope_theta)
    if kind := FAMILIES[config.family].sections:
        writer.add_rope_dimension_sections([*rope_sections(config.rotated // 2, kind), 0])  # the key has four axes
    match config.rope_scaling:
        case LinearScaling(factor=factor):
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        case YarnScaling() as yarn:
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(yarn.factor)
            writer.add_rope_scaling_orig_ctx_len(yarn.original_max_position_embeddings)
            _add_yarn(writer, yarn, reads_all={*YARN} <= FAMILIES[config.family].llamacpp.reads)


def _add_yarn(writer: GGUFWriter, yarn: YarnScaling, *, reads_all: bool) -> None:
    if reads_all and yarn.attention_factor == 1.0:
        writer.add_rope_scaling_yarn_log_mul(1.0)  # then llama.cpp's gain is 1
    else:
        # llama.cpp also multiplies by YaRN's gain, so it is divided out here.
        writer.add_rope_scaling_attn_factors(yarn.attention_factor / yarn_gain(yarn.factor))
    if reads_all:
        writer.add_rope_scaling_yarn_beta_fast(yarn.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(yarn.beta_slow)
    elif (yarn.beta_fast, yarn.beta_slow) != (32.0, 1.0):
        message = f"llama.cpp computes YaRN with betas 32 and 1, got {yarn.beta_fast} and {yarn.beta_slow}"
        raise FormatError("Unsupported", message)


def rope_sections(half: int, kind: str) -> list[int]:
    """Split `half` pairs over the three axes of multimodal RoPE; for text, any split with this sum is equivalent."""
    if kind == "interleaved":
        return [len(range(axis, half, 3)) for axis in range(3)]
    return [half // 4, (half - half // 4) // 2, half - half // 4 - (half - half // 4) // 2]


def _add_value(writer: GGUFWriter, key: str, value: object) -> None:
    """Add one metadata value to a GGUF file, with a type for its Python or NumPy type."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            size = 32 if -(2**31) <= value < 2**32 else 64
            writer.add_key_value(key, value, GGUFValueType[f"{'INT' if value < 0 else 'UINT'}{size}"])
        case float():
            needs_float64 = math.isfinite(value) and abs(value) > float(np.finfo(np.float32).max)
            writer.add_key_value(key, value, GGUFValueType.FLOAT64 if needs_float64 else GGUFValueType.FLOAT32)
        case str():
            writer.add_string(key, value)
        case np.ndarray():
            kind = GGUFValueType.BOOL if value.dtype == bool else _VALUE_TYPES[value.dtype]
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, kind)
        case Sequence():
            kind = GGUFValueType.STRING if isinstance(value, StringArray) else GGUFValueType.get_type(value[0])
            writer.add_key_value(key, list(value), GGUFValueType.ARRAY, kind)
        case _:
            raise TypeError(f"{key} must be a scalar, a string, an array or strings, got {type(value).__name__}")
