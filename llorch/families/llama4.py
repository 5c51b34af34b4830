"""Llama 4: chunks and head norms in layers with RoPE, attention temperature in the others, experts in listed layers.

Source: transformers `configuration_llama4.py`; llama.cpp `src/models/llama4.cpp`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from llorch.families.config import ModelConfig
from llorch.families.family import (
    EXPERT_STEP,
    FREQUENCY_FACTORS,
    Family,
    LlamaCppQuirks,
    TensorLayout,
    TransformersQuirks,
)
from llorch.families.layers import Layer, Temperature
from llorch.families.rules import below_context, read_integers, read_layer_list
from llorch.runtime.fields import Fields

# Constants of llama.cpp, and defaults of transformers.
CHUNK = 8192
TEMPERATURE = Temperature(scale=0.1, floor=8192, offset=1)
NO_HEAD_NORM = 128  # number of experts for which llama.cpp omits the head norm
ROPE_INTERVAL = 4  # every fourth layer has no RoPE


def read_layers(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Set experts, chunks and head norms of the layers."""
    if any(layer.experts for layer in layers):
        with_experts = _read_expert_layers(fields, len(layers))
        layers = [replace(layer, experts=has_experts) for layer, has_experts in zip(layers, with_experts, strict=True)]
    default_kinds = ["chunked_attention" if layer.rope else "full_attention" for layer in layers]
    fields.refuse("use_sliding_window", unless=(False,), default=False)
    kinds = read_layer_list(fields, "layer_types", default_kinds, ("chunked_attention", "full_attention"))
    chunk = _read_chunk(fields) if "chunked_attention" in kinds else None
    head_norm = fields.boolean("use_qk_norm", default=True)
    return [
        replace(layer, head_norm=head_norm and layer.rope, chunk=chunk if kind == "chunked_attention" else None)
        for layer, kind in zip(layers, kinds, strict=True)
    ]


def _read_expert_layers(fields: Fields, n_layers: int) -> list[bool]:
    step = fields.integer("interleave_moe_layer_step", default=1, low=1)
    moe_layers = read_integers(fields, "moe_layers") if fields.has("moe_layers") else [*range(step - 1, n_layers, step)]
    if any(not 0 <= layer < n_layers for layer in moe_layers):
        raise fields.error("Inconsistent", "moe_layers", f"layers from 0 to {n_layers - 1}", moe_layers)
    return [layer in moe_layers for layer in range(n_layers)]


def _read_chunk(fields: Fields) -> int | None:
    chunk = fields.integer("attention_chunk_size", default=CHUNK, low=1)
    fields.refuse_null("attention_chunk_size")
    return below_context(fields, chunk)


def read_temperature(fields: Fields) -> Temperature | None:
    """Read the temperature of the layers without RoPE; None if the file switches it off."""
    if not _has_temperature(fields):
        return None
    floor = fields.integer("floor_scale", default=TEMPERATURE.floor, low=1)
    return replace(TEMPERATURE, scale=fields.number("attn_scale", default=TEMPERATURE.scale), floor=floor)


def _has_temperature(fields: Fields) -> bool:
    """Check if the attention temperature is on: true or false, in the first releases 4 or 0."""
    tuning = fields.values.get("attn_temperature_tuning", True)
    return bool(tuning) if isinstance(tuning, int) else fields.boolean("attn_temperature_tuning", default=True)


def read_gguf_layers(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Set experts, chunks and head norms as llama.cpp does; raise FormatError for other chunks."""
    step = fields.integer(EXPERT_STEP, low=0)
    fields.refuse("attention.sliding_window_pattern", unless=(ROPE_INTERVAL,), default=ROPE_INTERVAL)
    fields.refuse("attention.sliding_window", unless=(CHUNK,), default=CHUNK)
    head_norm = fields.integer("expert_count") != NO_HEAD_NORM
    chunk = CHUNK if fields.integer("context_length") > CHUNK else None
    with_experts = [step > 0 and (index + 1) % step == 0 for index in range(len(layers))]
    return [
        replace(layer, experts=experts, head_norm=head_norm and layer.rope, chunk=chunk if layer.rope else None)
        for layer, experts in zip(layers, with_experts, strict=True)
    ]


def limits(config: ModelConfig, n_tokens: int) -> Iterator[str]:
    """Yield the reasons why llama.cpp's constants change a run of `n_tokens`."""
    layers = [config.layer(index) for index in range(config.n_layers)]
    for chunk in (layer.chunk or math.inf for layer in layers if layer.rope):
        if chunk != CHUNK and min(chunk, CHUNK) < n_tokens:
            actual = "none" if chunk == math.inf else chunk
            yield f"llama.cpp hard-codes attention_chunk_size {CHUNK}, this configuration has {actual}"
    is_same = config.temperature == TEMPERATURE and all(
        layer.has_attention_temperature != layer.rope for layer in layers
    )
    lowest = min(TEMPERATURE.floor, TEMPERATURE.floor if config.temperature is None else config.temperature.floor)
    if not is_same and n_tokens >= lowest:
        yield (
            f"llama.cpp hard-codes floor_scale {TEMPERATURE.floor} and attn_scale {TEMPERATURE.scale}, this "
            "configuration has other values"
        )
    yield from _layer_limits(config, layers)


def _layer_limits(config: ModelConfig, layers: list[Layer]) -> Iterator[str]:
    """Yield the reasons if llama.cpp expects experts or head norms in other layers."""
    if config.experts is None:
        yield f"llama.cpp cannot run {config.family} without experts"
        return
    has_head_norm = config.experts.n_experts != NO_HEAD_NORM
    if any(layer.rope and layer.head_norm != has_head_norm for layer in layers):
        yield (
            f"llama.cpp normalises heads unless there are {NO_HEAD_NORM} experts, use_qk_norm differs for "
            f"{config.experts.n_experts} experts"
        )
    step = next((index + 1 for index, layer in enumerate(layers) if layer.experts), 0)
    if [layer.experts for layer in layers] != [step > 0 and (index + 1) % step == 0 for index in range(len(layers))]:
        yield "llama.cpp expects experts in every n-th layer, moe_layers has other layers"


def config_settings(config: ModelConfig) -> Mapping[str, object]:
    """Return the settings of a config.json to write; a GGUF source has llama.cpp's constants."""
    layers = [config.layer(index) for index in range(config.n_layers)]
    with_experts = [index for index, layer in enumerate(layers) if layer.experts]
    return _expert_settings(config) | {
        "interleave_moe_layer_step": with_experts[0] + 1 if with_experts else 1,
        "no_rope_layers": [int(layer.rope) for layer in layers],
        "layer_types": ["chunked_attention" if layer.rope else "full_attention" for layer in layers],
        "attention_chunk_size": CHUNK,
        "use_qk_norm": any(layer.head_norm for layer in layers),
        "attn_temperature_tuning": True,
        "floor_scale": TEMPERATURE.floor,
        "attn_scale": TEMPERATURE.scale,
    }


def engine_settings(config: ModelConfig) -> Mapping[str, object]:
    """Return the settings with which transformers computes this configuration: experts, chunks and the temperature."""
    layers, temperature = [config.layer(index) for index in range(config.n_layers)], config.temperature
    scales = {} if temperature is None else {"floor_scale": temperature.floor, "attn_scale": temperature.scale}
    return {"no_rope_layers": [int(layer.rope) for layer in layers], **scales} | _expert_settings(config) | {
        "attention_chunk_size": next((layer.chunk for layer in layers if layer.chunk), CHUNK),
        "attn_temperature_tuning": temperature is not None,
        "use_qk_norm": any(layer.head_norm for layer in layers),
    }  # fmt: skip


def _expert_settings(config: ModelConfig) -> dict[str, object]:
    assert config.experts is not None
    return {
        "intermediate_size": config.experts.expert_size,
        "intermediate_size_mlp": config.intermediate_size,
        "num_local_experts": config.experts.n_experts,
        "num_experts_per_tok": config.experts.n_experts_per_token,
        "moe_layers": [layer for layer in range(config.n_layers) if config.layer(layer).experts],
    }


FAMILY = Family(
    gguf="llama4", classes="Llama4", multimodal_type="llama4", rope_interval=ROPE_INTERVAL, router="sigmoid",
    shared_expert="plain", layer_rules=(read_layers,), read_gguf_layers=read_gguf_layers,
    read_temperature=read_temperature, read_gguf_temperature=lambda fields: TEMPERATURE,  # constants of llama.cpp
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e5,
        "num_experts_per_tok": 1,
    },
    layout=TensorLayout(
        names={"mlp": "feed_forward", "router": "router"}, interleaved_rope="both", transposed_experts="modules",
        multimodal_prefixes=("", "language_model."),
    ),
    llamacpp=LlamaCppQuirks(
        reads=frozenset({FREQUENCY_FACTORS, EXPERT_STEP}), nodes={"moe_out": ("ADD", "ffn_moe_out_merged")},
        limits=limits,
    ),
    transformers=TransformersQuirks(
        keys={
            "intermediate_size": "intermediate_size_mlp", "moe_intermediate_size": "intermediate_size",
            "num_experts": "num_local_experts",
        },
        config_settings=config_settings, engine_settings=engine_settings, habits=frozenset({"counts_by_cache"}),
    ),
)  # fmt: skip
