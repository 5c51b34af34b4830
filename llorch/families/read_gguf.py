"""Hyperparameters from GGUF metadata, with llama.cpp's constants for settings that GGUF files omit.

Source: llama.cpp `src/models/*.cpp` (`load_arch_hparams`), `src/llama-model.cpp`, `docs/gguf.md`.
"""

from collections.abc import Container, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from llorch.families.config import MOST_LAYERS, ModelConfig
from llorch.families.family import FREQUENCY_FACTORS, OUTPUT_BIAS, YARN, Family
from llorch.families.layers import DeltaNet, Experts, Layer
from llorch.families.read_huggingface import as_layer_tuple, head_width, unsupported_architecture, with_temperature
from llorch.families.rope_scaling import FactorScaling, LinearScaling, RopeScaling, YarnScaling, yarn_gain
from llorch.families.table import BY_GGUF, FAMILIES
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

# YaRN settings that llama.cpp ignores for some architectures -> values allowed there; the first is its constant.
_IGNORED_OF_YARN = {
    "yarn_ext_factor": (1.0, -1.0), "yarn_attn_factor": (1.0,), "yarn_beta_fast": (32.0,), "yarn_beta_slow": (1.0,),
    "yarn_log_multiplier": (0.0,),
}  # fmt: skip
_SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func; 0: not set

# Keys that may hold one number for each layer, as in llama.cpp.
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


def config_from_gguf(
    metadata: Mapping[str, object],
    *,
    tensor_names: Container[str],
    vocab_size: int,
    rope_factors: np.ndarray | None,
    path: str | Path,
) -> ModelConfig:
    """Read GGUF metadata; a FormatError names the key and the file `path`.

    Biases and tied embeddings follow from `tensor_names`. `vocab_size` is the number of rows of `token_embd.weight`.
    `rope_factors` is the tensor `rope_freqs.weight`, if there is one.
    """
    arch = Fields(metadata, path).text("general.architecture")
    if arch not in BY_GGUF:
        raise unsupported_architecture(arch, path, sorted(BY_GGUF))
    name = BY_GGUF[arch]
    family, fields = FAMILIES[name], Fields(_one_for_all_layers(metadata, arch, path), path, prefix=f"{arch}.")
    _require_vocab_size(fields, vocab_size)
    n_heads = fields.integer("attention.head_count", low=1)
    hidden_size = fields.integer("embedding_length", low=1)
    with fields.adding_path():
        head_dim = head_width(fields, "attention.key_length", hidden_size, n_heads)
        rotary_dim = _read_rotary_dim(fields, family, head_dim)
        _refuse_variants(fields, family, head_dim)
        n_layers = _read_n_layers(fields, family)
        context = fields.integer("context_length")
        experts = _read_experts(fields, family)
        layers = _read_layers(fields, family, n_layers, has_experts=experts is not None)
        layers, temperature = with_temperature(layers, family, lambda: family.read_gguf_temperature(fields))
        return ModelConfig(
            family=name,
            hidden_size=hidden_size,
            intermediate_size=_read_intermediate_size(fields, experts),
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=fields.integer("attention.head_count_kv", default=n_heads, low=1),
            head_dim=head_dim,
            vocab_size=vocab_size,
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base", default=10000.0),
            rope_scaling=_read_scaling(fields, family, name, rope_factors),
            max_position_embeddings=context,
            qkv_bias=family.qkv_bias if family.qkv_bias is not None else _has_bias(layers, tensor_names),
            o_bias=OUTPUT_BIAS in family.llamacpp.reads and f"blk.0.{OUTPUT_BIAS}" in tensor_names,
            qk_norm=family.qk_norm,
            tie_word_embeddings="output.weight" not in tensor_names,
            layers=as_layer_tuple(layers),
            experts=experts,
            delta_net=_read_delta_net(fields) if family.delta_net else None,
            attention_gate=bool(family.delta_net),
            rotary_dim=rotary_dim,
            rope_sections=_read_sections(fields, family),
            interleaved_rope_hf=family.layout.interleaved_rope == "both",
            temperature=temperature,
        )


def _require_vocab_size(fields: Fields, n_rows: int) -> None:
    """Raise FormatError if `vocab_size` is not the number of embedding rows; llama.cpp creates `vocab_size` tokens."""
    declared = fields.integer("vocab_size", default=n_rows, low=1)
    if declared != n_rows:
        raise fields.error("Inconsistent", "vocab_size", f"the {n_rows} rows of token_embd.weight", declared)


def _one_for_all_layers(metadata: Mapping[str, object], arch: str, path: str | Path) -> Mapping[str, object]:
    """Replace lists of equal numbers for all layers by one number; raise FormatError for different numbers."""
    uniform: Any = copy(metadata)
    fields = Fields(metadata, path, prefix=f"{arch}.")
    for key in (f"{arch}.{name}" for name in _PER_LAYER):
        per_layer = uniform.get(key)
        if not isinstance(per_layer, np.ndarray):
            continue
        if len(per_layer) != (n_layers := fields.integer("block_count")):
            message = (
                f"{key}: expected one number, or one number for each of {n_layers} layers, got {len(per_layer)} numbers"
            )
            raise FormatError("Inconsistent", message, path=path)
        if per_layer.dtype.kind not in "iu" or len(np.unique(per_layer)) > 1:
            message = f"{key}: expected the same integer for all layers, got {per_layer.tolist()}"
            raise FormatError("Unsupported", message, path=path)
        uniform[key] = int(per_layer[0])
    return uniform


def _has_bias(layers: list[Layer], tensor_names: Container[str]) -> bool:
    """Check if the first attention layer has a query bias, by the names of the tensors."""
    first = next((index for index, layer in enumerate(layers) if layer.mixer == "attention"), 0)
    return f"blk.{first}.attn_q.bias" in tensor_names


def _refuse_variants(fields: Fields, family: Family, head_dim: int) -> None:
    """Raise FormatError for settings that llorch does not compute in this family."""
    if not family.router:
        fields.refuse("expert_count", unless=(0,), default=0)
    if not family.layout.has_mtp_layers:
        fields.refuse("nextn_predict_layers", unless=(0,), default=0)
    fields.refuse("attention.causal", unless=(True,), default=True)
    fields.refuse("attention.value_length", unless=(head_dim,), default=head_dim)


def _read_rotary_dim(fields: Fields, family: Family, head_dim: int) -> int:
    """Return the number of dimensions of a head that RoPE rotates, 0 for the whole head."""
    width = fields.integer("rope.dimension_count", default=head_dim)
    if width != head_dim and "partial_rotary_factor" not in family.defaults:
        message = f"config: rope.dimension_count must be head_dim = {head_dim}, got {width}"
        raise FormatError("OutOfRange", message)
    return 0 if width == head_dim else width


def _read_sections(fields: Fields, family: Family) -> tuple[int, ...]:
    """Return the number of RoPE pairs for each axis of multimodal RoPE; in text all axes have the same position."""
    if not family.sections:
        return ()
    sections = _read_integers(fields, key := "rope.dimension_sections")
    if len(sections) not in (3, 4) or min(sections) < 0 or not any(sections):
        raise fields.error("Malformed", key, "three or four numbers", sections)
    return tuple(sections)


def _read_integers(fields: Fields, key: str) -> list[int]:
    numbers = fields.values.get(fields.full(key))
    if numbers is None:
        raise FormatError("Missing", f"{fields.full(key)}: expected numbers, got nothing", path=fields.path)
    if not isinstance(numbers, np.ndarray) or numbers.dtype.kind not in "iub":
        raise fields.error("Malformed", key, "integers", numbers)
    return [int(number) for number in numbers]


def _read_n_layers(fields: Fields, family: Family) -> int:
    """Return the number of layers, without extra blocks for multi-token prediction."""
    n_layers = fields.integer("block_count")
    extra = fields.integer("nextn_predict_layers", default=0, low=0) if family.layout.has_mtp_layers else 0
    if extra and extra >= n_layers:
        raise fields.error("Inconsistent", "nextn_predict_layers", f"fewer than block_count = {n_layers}", extra)
    return n_layers - extra


def _read_experts(fields: Fields, family: Family) -> Experts | None:
    """Read the experts' sizes and counts; None for a family without experts."""
    if not family.router:
        return None
    n_experts = fields.integer("expert_count", low=1)
    n_used = fields.integer("expert_used_count", low=1)
    fields.refuse("expert_weights_scale", unless=(0.0, 1.0), default=0.0)
    fields.refuse("expert_group_count", unless=(0, 1), default=0)
    gating = _SIGMOID if family.router == "sigmoid" else _SOFTMAX
    fields.refuse("expert_gating_func", unless=(0, gating), default=0)
    if family.router == "sigmoid":
        size = fields.integer("expert_feed_forward_length", low=1)
        return Experts(
            n_experts=n_experts, n_experts_per_token=n_used, expert_size=size, shared_size=size,
            norm_topk_prob=False, scaled_inputs=True,
        )  # fmt: skip
    norm_topk_prob = family.llamacpp.norm_topk_prob
    assert norm_topk_prob is not None
    fields.refuse("expert_weights_norm", unless=(norm_topk_prob,), default=norm_topk_prob)
    has_size = fields.has("expert_feed_forward_length")  # the oldest Qwen2-MoE files have the sum only
    size = fields.integer("expert_feed_forward_length") if has_size else fields.integer("feed_forward_length") // n_used
    shared = 0  # width of the shared expert
    if family.shared_expert:
        has_shared = fields.has("expert_shared_feed_forward_length")
        shared = fields.integer("expert_shared_feed_forward_length" if has_shared else "feed_forward_length")
    return Experts(
        n_experts=n_experts, n_experts_per_token=n_used, expert_size=size, shared_size=shared,
        shared_gate=family.shared_expert == "gated", norm_topk_prob=norm_topk_prob,
    )  # fmt: skip


def _read_intermediate_size(fields: Fields, experts: Experts | None) -> int:
    return fields.integer("feed_forward_length", **({} if experts is None else {"default": experts.expert_size}))


def _read_delta_net(fields: Fields) -> DeltaNet:
    n_value_heads = fields.integer("ssm.time_step_rank", low=1)
    inner = fields.integer("ssm.inner_size", low=1)
    if inner % n_value_heads:
        raise fields.error("Inconsistent", "ssm.inner_size", f"a multiple of time_step_rank = {n_value_heads}", inner)
    return DeltaNet(
        conv_kernel=fields.integer("ssm.conv_kernel"),
        n_key_heads=fields.integer("ssm.group_count", low=1),
        n_value_heads=n_value_heads,
        key_head_dim=fields.integer("ssm.state_size"),
        value_head_dim=inner // n_value_heads,
    )


def _read_layers(fields: Fields, family: Family, n_layers: int, *, has_experts: bool) -> list[Layer]:
    """Read the description of every layer: mixer, window, RoPE, experts."""
    if not 1 <= n_layers <= MOST_LAYERS:
        return []  # ModelConfig raises the error for n_layers
    is_delta_net = _read_delta_net_layers(fields, n_layers) if family.delta_net else [False] * n_layers
    layers = [
        Layer(
            mixer="delta_net" if is_delta_net[index] else "attention",
            experts=has_experts,
            rope=not family.rope_interval or (index + 1) % family.rope_interval != 0,
        )
        for index in range(n_layers)
    ]
    return family.read_gguf_layers(fields, layers)


def _read_delta_net_layers(fields: Fields, n_layers: int) -> list[bool]:
    """Return for each layer whether it has a delta net instead of attention."""
    key = "attention.recurrent_layers"
    if not fields.has(key):
        interval = fields.integer("full_attention_interval", default=4, low=1)
        return [(index + 1) % interval != 0 for index in range(n_layers)]
    flags, n_blocks = _read_integers(fields, key), fields.integer("block_count")
    if len(flags) != n_blocks:
        raise fields.error("Inconsistent", key, f"{n_blocks} entries, one for each block", f"{len(flags)} entries")
    return [bool(flag) for flag in flags[:n_layers]]


def _read_scaling(fields: Fields, family: Family, name: str, rope_factors: np.ndarray | None) -> RopeScaling | None:
    """Read RoPE scaling as llama.cpp does: linear if the type is absent; a factor of 0 means no scaling."""
    kind = fields.text("rope.scaling.type", default="linear")
    factor = fields.number("rope.scaling.factor", default=fields.number("rope.scale_linear", default=0.0)) or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise fields.error("Unsupported", "rope.scaling.type", "none, linear or yarn", kind)
    if rope_factors is not None:
        if FREQUENCY_FACTORS not in family.llamacpp.reads:
            raise fields.error(
                "Unexpected", "rope_freqs.weight", "frequency factors only for the llama architecture", name
            )
        if kind == "yarn" or factor != 1.0:
            raise fields.error("Unsupported", "rope.scaling.type", "none, because the file has rope_freqs.weight", kind)
    if kind != "yarn":
        fields.refuse("rope.scaling.attn_factor", unless=(1.0,), default=1.0)
    if rope_factors is not None:
        return FactorScaling(factors=tuple(float(factor) for factor in rope_factors))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if factor < 1:
        raise fields.error("OutOfRange", "rope.scaling.factor", "at least 1.0", factor)
    return _read_yarn(fields, family, factor) if kind == "yarn" else LinearScaling(factor=factor)


def _read_yarn(fields: Fields, family: Family, factor: float) -> YarnScaling:
    """Read the YaRN settings; raise FormatError if one differs from llama.cpp and llama.cpp ignores it."""
    read_keys = tuple(key for key in YARN if key in family.llamacpp.reads)
    for key, ignored in _IGNORED_OF_YARN.items():
        if key not in read_keys:
            fields.refuse(f"rope.scaling.{key}", unless=ignored, default=ignored[0])
    context, yarn = fields.integer("context_length"), {key: _read_yarn_setting(fields, read_keys, key) for key in YARN}
    gain = yarn_gain(factor) / (yarn_gain(factor, multiplier) if (multiplier := yarn["yarn_log_multiplier"]) else 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=fields.integer("rope.scaling.original_context_length", default=context, low=1),
        attention_factor=fields.number("rope.scaling.attn_factor", default=1.0, low=1e-6) * gain,
        beta_fast=yarn["yarn_beta_fast"],
        beta_slow=yarn["yarn_beta_slow"],
    )


def _read_yarn_setting(fields: Fields, read_keys: tuple[str, ...], key: str) -> float:
    """Return the setting in the file if llama.cpp reads it, else llama.cpp's constant."""
    default = _IGNORED_OF_YARN[key][0]
    low = 0.0 if key == "yarn_log_multiplier" else 1e-6  # YaRN divides by the betas
    return fields.number(f"rope.scaling.{key}", default=default, low=low) if key in read_keys else default
