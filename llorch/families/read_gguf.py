"""Hyperparameters from the metadata of a GGUF file, and from llama.cpp's source what such files leave unsaid.

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
from llorch.families.read_huggingface import head_width, one_for_each, unread, with_temperature
from llorch.families.rope_scaling import FactorScaling, LinearScaling, RopeScaling, YarnScaling, yarn_gain
from llorch.families.table import BY_GGUF, FAMILIES
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

# llama.cpp reads these of YaRN for other architectures only; a file that needs one would be computed wrongly.
_IGNORED_OF_YARN = {
    "yarn_ext_factor": (1.0, -1.0), "yarn_attn_factor": (1.0,), "yarn_beta_fast": (32.0,), "yarn_beta_slow": (1.0,),
    "yarn_log_multiplier": (0.0,),
}  # fmt: skip
_SOFTMAX, _SIGMOID = 1, 2  # numbers of expert_gating_func

# Keys that hold a number for each layer in some files, as llama.cpp allows it.
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

    Biases and tying show in `tensor_names` only; `vocab_size` is the number of rows of `token_embd.weight`,
    `rope_factors` the tensor `rope_freqs.weight`, when there is one.
    """
    arch = Fields(metadata, path).text("general.architecture")
    if arch not in BY_GGUF:
        raise unread(arch, path, sorted(BY_GGUF))
    name = BY_GGUF[arch]
    family, fields = FAMILIES[name], Fields(_one_for_all_layers(metadata, arch, path), path, prefix=f"{arch}.")
    _require_vocab_size(fields, vocab_size)
    n_heads = fields.integer("attention.head_count", low=1)
    hidden_size = fields.integer("embedding_length", low=1)
    with fields.naming_the_file():
        head_dim = head_width(fields, "attention.key_length", hidden_size, n_heads)
        rotary_dim = _rotary_dim(fields, family, head_dim)
        _refuse_variants(fields, family, head_dim)
        n_layers = _n_layers(fields, family)
        context = fields.integer("context_length")
        experts = _read_experts(fields, family)
        layers = _read_layers(fields, family, n_layers, has_experts=experts is not None)
        layers, temperature = with_temperature(layers, family, lambda: family.read_gguf_temperature(fields))
        return ModelConfig(
            family=name,
            hidden_size=hidden_size,
            intermediate_size=_intermediate_size(fields, experts),
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
            layers=one_for_each(layers),
            experts=experts,
            delta_net=_read_delta_net(fields) if family.delta_net else None,
            attention_gate=bool(family.delta_net),
            rotary_dim=rotary_dim,
            rope_sections=_sections(fields, family),
            interleaved_rope_hf=family.layout.interleaved_rope == "both",
            temperature=temperature,
        )


def _require_vocab_size(fields: Fields, n_rows: int) -> None:
    """Refuse a size of the vocabulary that is not the one of the embedding; llama.cpp makes tokens after it."""
    stated = fields.integer("vocab_size", default=n_rows, low=1)
    if stated != n_rows:
        raise fields.error("Inconsistent", "vocab_size", f"the {n_rows} rows of token_embd.weight", stated)


def _one_for_all_layers(metadata: Mapping[str, object], arch: str, path: str | Path) -> Mapping[str, object]:
    """Put one number in the place of a list that has an equal number for each layer; refuse a list of others."""
    values: Any = copy(metadata)
    fields = Fields(metadata, path, prefix=f"{arch}.")
    for key in (f"{arch}.{name}" for name in _PER_LAYER):
        listed = values.get(key)
        if not isinstance(listed, np.ndarray):
            continue
        if len(listed) != (n_layers := fields.integer("block_count")):
            message = (
                f"{key}: expected one number, or one number for each of {n_layers} layers, got {len(listed)} numbers"
            )
            raise FormatError("Inconsistent", message, path=path)
        if listed.dtype.kind not in "iu" or len(np.unique(listed)) > 1:
            message = f"{key}: expected the same integer for all layers, got {listed.tolist()}"
            raise FormatError("Unsupported", message, path=path)
        values[key] = int(listed[0])
    return values


def _has_bias(layers: list[Layer], tensor_names: Container[str]) -> bool:
    """Tell if the first attention layer has a bias of its queries, by the names of the tensors."""
    first = next((i for i, layer in enumerate(layers) if layer.mixer == "attention"), 0)
    return f"blk.{first}.attn_q.bias" in tensor_names


def _refuse_variants(fields: Fields, family: Family, head_dim: int) -> None:
    if not family.router:
        fields.refuse("expert_count", unless=(0,), default=0)
    if not family.layout.has_mtp_layers:
        fields.refuse("nextn_predict_layers", unless=(0,), default=0)
    fields.refuse("attention.causal", unless=(True,), default=True)
    fields.refuse("attention.value_length", unless=(head_dim,), default=head_dim)


def _rotary_dim(fields: Fields, family: Family, head_dim: int) -> int:
    """Return how many numbers of a head RoPE turns, 0 for the whole head."""
    width = fields.integer("rope.dimension_count", default=head_dim)
    if width != head_dim and "partial_rotary_factor" not in family.defaults:
        message = f"config: rope.dimension_count must be head_dim = {head_dim}, got {width}"
        raise FormatError("OutOfRange", message)
    return 0 if width == head_dim else width


def _sections(fields: Fields, family: Family) -> tuple[int, ...]:
    """Return the number of pairs for each axis of multimodal RoPE; in text all axes have the same position."""
    if not family.sections:
        return ()
    sections = _read_integers(fields, key := "rope.dimension_sections")
    if len(sections) not in (3, 4) or min(sections) < 0 or not any(sections):
        raise fields.error("Malformed", key, "three or four numbers", sections)
    return tuple(sections)


def _read_integers(fields: Fields, key: str) -> list[int]:
    listed = fields.values.get(fields.full(key))
    if listed is None:
        raise FormatError("Missing", f"{fields.full(key)}: expected numbers, got nothing", path=fields.path)
    if not isinstance(listed, np.ndarray) or listed.dtype.kind not in "iub":
        raise fields.error("Malformed", key, "integers", listed)
    return [int(one) for one in listed]


def _n_layers(fields: Fields, family: Family) -> int:
    """Return the number of layers, without the blocks after them that predict further tokens."""
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
    used = fields.integer("expert_used_count", low=1)
    fields.refuse("expert_weights_scale", unless=(0.0, 1.0), default=0.0)
    fields.refuse("expert_group_count", unless=(0, 1), default=0)
    gating = _SIGMOID if family.router == "sigmoid" else _SOFTMAX
    fields.refuse("expert_gating_func", unless=(0, gating), default=0)
    if family.router == "sigmoid":
        size = fields.integer("expert_feed_forward_length", low=1)
        return Experts(
            n_experts=n_experts, n_experts_per_token=used, expert_size=size, shared_size=size,
            norm_topk_prob=False, scaled_inputs=True,
        )  # fmt: skip
    norm_topk_prob = family.llamacpp.norm_topk_prob
    assert norm_topk_prob is not None
    fields.refuse("expert_weights_norm", unless=(norm_topk_prob,), default=norm_topk_prob)
    has_size = fields.has("expert_feed_forward_length")  # the oldest Qwen2-MoE files have the sum only
    size = fields.integer("expert_feed_forward_length") if has_size else fields.integer("feed_forward_length") // used
    shared = 0
    if family.shared_expert:
        has_shared = fields.has("expert_shared_feed_forward_length")
        shared = fields.integer("expert_shared_feed_forward_length" if has_shared else "feed_forward_length")
    return Experts(
        n_experts=n_experts, n_experts_per_token=used, expert_size=size, shared_size=shared,
        shared_gate=family.shared_expert == "gated", norm_topk_prob=norm_topk_prob,
    )  # fmt: skip


def _intermediate_size(fields: Fields, experts: Experts | None) -> int:
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
    """Read the facts of every layer: mixer, window, RoPE, experts."""
    if not 1 <= n_layers <= MOST_LAYERS:
        return []  # refused with the other sizes
    recurrent = _recurrent(fields, n_layers) if family.delta_net else [False] * n_layers
    layers = [
        Layer(
            mixer="delta_net" if recurrent[i] else "attention",
            experts=has_experts,
            rope=not family.rope_interval or (i + 1) % family.rope_interval != 0,
        )
        for i in range(n_layers)
    ]
    return family.read_gguf_layers(fields, layers)


def _recurrent(fields: Fields, n_layers: int) -> list[bool]:
    """Tell for each layer if it has a delta net in place of attention."""
    key = "attention.recurrent_layers"
    if not fields.has(key):
        interval = fields.integer("full_attention_interval", default=4, low=1)
        return [(i + 1) % interval != 0 for i in range(n_layers)]
    listed, n_blocks = _read_integers(fields, key), fields.integer("block_count")
    if len(listed) != n_blocks:
        raise fields.error("Inconsistent", key, f"{n_blocks} entries, one for each block", f"{len(listed)} entries")
    return [bool(one) for one in listed[:n_layers]]


def _read_scaling(fields: Fields, family: Family, name: str, rope_factors: np.ndarray | None) -> RopeScaling | None:
    """Read RoPE scaling as llama.cpp does: linear if the type is absent; a factor of 0 means none."""
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
        return FactorScaling(factors=tuple(float(value) for value in rope_factors))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if factor < 1:
        raise fields.error("OutOfRange", "rope.scaling.factor", "at least 1.0", factor)
    return _yarn(fields, family, factor) if kind == "yarn" else LinearScaling(factor=factor)


def _yarn(fields: Fields, family: Family, factor: float) -> YarnScaling:
    """Read the YaRN settings; refuse any that llama.cpp ignores for the family and that differ from its constants."""
    read = tuple(key for key in YARN if key in family.llamacpp.reads)
    for key, ignored in _IGNORED_OF_YARN.items():
        if key not in read:
            fields.refuse(f"rope.scaling.{key}", unless=ignored, default=ignored[0])
    context, own = fields.integer("context_length"), {key: _own(fields, read, key) for key in YARN}
    gain = yarn_gain(factor) / (yarn_gain(factor, multiplier) if (multiplier := own["yarn_log_multiplier"]) else 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=fields.integer("rope.scaling.original_context_length", default=context, low=1),
        attention_factor=fields.number("rope.scaling.attn_factor", default=1.0, low=1e-6) * gain,
        beta_fast=own["yarn_beta_fast"],
        beta_slow=own["yarn_beta_slow"],
    )


def _own(fields: Fields, read: tuple[str, ...], key: str) -> float:
    """Return the number that the file states if llama.cpp reads it, else llama.cpp's constant."""
    usual = _IGNORED_OF_YARN[key][0]
    low = 0.0 if key == "yarn_log_multiplier" else 1e-6  # no number of turns is a length of zero
    return fields.number(f"rope.scaling.{key}", default=usual, low=low) if key in read else usual
