"""Hyperparameters from the object of a Hugging Face `config.json`, as transformers reads it.

llorch reads the text part of a multimodal model. A setting that an engine would read, but that llorch does not compute,
is an error that names the key.

Source: transformers `configuration_*.py` and `modeling_rope_utils.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from llorch.families.config import MOST_LAYERS, ModelConfig
from llorch.families.family import Family
from llorch.families.layers import DeltaNet, Experts, Layer, Temperature
from llorch.families.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling, yarn_gain
from llorch.families.rules import bias_key, read_integers, rope_settings
from llorch.families.table import BY_MODEL_TYPE, BY_WHOLE, FAMILIES
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

# Keys for which transformers does not replace null by a default: it raises an error, or computes something else.
_NEVER_NULL = (
    "attention_bias", "head_dim", "hidden_act", "is_causal", "max_position_embeddings", "mlp_bias",
    "tie_word_embeddings", "use_sliding_window", "norm_topk_prob", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size",
)  # fmt: skip
_SUPPORTED = {  # key -> values that llorch supports; the first is the default
    "is_causal": (True,), "per_layer_config": (None,), "hidden_act": ("silu", "swish"), "mlp_bias": (False,),
    "original_max_position_embeddings": (None,),  # belongs in rope_scaling
    "attn_output_gate": (True,), "output_gate_type": (None, "silu", "swish"), "mamba_ssm_dtype": ("float32",),
    "n_group": (None, 1), "topk_group": (None, 1), "scoring_func": (None, "softmax"),
    "routed_scaling_factor": (None, 1.0), "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
}  # fmt: skip


def config_from_huggingface(settings: Mapping[str, object], *, path: str | Path) -> ModelConfig:
    """Read the object of a `config.json`; a FormatError names the key and the file `path`."""
    root = Fields(settings, path)
    fields = _text_part(root)
    if (model_type := fields.text("model_type")) not in BY_MODEL_TYPE:
        raise unsupported_architecture(model_type, path)
    name = BY_MODEL_TYPE[model_type]
    family = FAMILIES[name]
    nulls = {key for key in family.transformers.nullable if fields.is_null(key)}
    fields = Fields(
        fields.values, path, defaults={key: default for key, default in family.defaults.items() if key not in nulls}
    )
    _refuse_variants(fields, family)
    n_heads = fields.integer("num_attention_heads", low=1)
    hidden_size = fields.integer("hidden_size", low=1)
    context = fields.integer("max_position_embeddings")
    tied = fields.boolean("tie_word_embeddings", default=False)
    qkv_bias, o_bias = _read_bias(fields, family, "qkv_bias"), _read_bias(fields, family, "o_bias")
    with fields.adding_path():
        head_dim = head_width(fields, "head_dim", hidden_size, n_heads)
        rope = rope_settings(fields)
        rotary_dim = _read_rotary_dim(fields, rope, family, head_dim)
        experts = _read_experts(fields, family)
        layers = _read_layers(fields, family, has_experts=experts is not None)
        layers, temperature = with_temperature(layers, family, lambda: family.read_temperature(fields))
        return ModelConfig(
            family=name,
            hidden_size=hidden_size,
            intermediate_size=_read_intermediate_size(fields, family, experts),
            n_layers=fields.integer("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=fields.integer("num_key_value_heads", default=n_heads, low=1),
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=_read_theta(fields, rope),
            rope_scaling=_read_scaling(rope, context) if rope is not None else None,
            max_position_embeddings=context,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=family.qk_norm,
            tie_word_embeddings=root.boolean("tie_word_embeddings", default=tied),  # the outer key takes precedence
            layers=as_layer_tuple(layers),
            experts=experts,
            delta_net=_read_delta_net(fields) if family.delta_net else None,
            attention_gate=bool(family.delta_net),
            rotary_dim=rotary_dim,
            interleaved_rope_hf=family.layout.interleaved_rope == "both",
            temperature=temperature,
            part_of_whole=root.text("model_type") in BY_WHOLE,
        )


def with_temperature(
    layers: list[Layer], family: Family, read_temperature: Callable[[], Temperature | None]
) -> tuple[list[Layer], Temperature | None]:
    """Mark the layers with a temperature: layers without RoPE, if the family has such layers, else all layers."""
    has_temperature = [not (family.rope_interval and layer.rope) for layer in layers]
    temperature = read_temperature() if any(has_temperature) else None
    if temperature is None:
        return layers, None
    return [
        replace(layer, has_attention_temperature=is_set) for layer, is_set in zip(layers, has_temperature, strict=True)
    ], temperature


def head_width(fields: Fields, key: str, hidden_size: int, n_heads: int) -> int:
    """Return the width of a head, by default hidden_size / n_heads."""
    default = hidden_size // n_heads if hidden_size % n_heads == 0 else None
    if default is None and not fields.has(key) and fields.defaults.get(key) is None:
        message = (
            "config: expected head_dim, or a hidden_size that n_heads divides, "
            f"got hidden_size {hidden_size}, n_heads {n_heads} and no head_dim"
        )
        raise FormatError("OutOfRange", message)
    return fields.integer(key, default=default)


def as_layer_tuple(layers: list[Layer]) -> tuple[Layer, ...]:
    """Return the layers of a model as a tuple, which is empty if all layers are dense."""
    return () if all(layer.is_dense for layer in layers) else tuple(layers)


def unsupported_architecture(name: str, path: str | Path, supported: Iterable[str] = FAMILIES) -> FormatError:
    """Create the error for an architecture that llorch does not support; `supported` lists the others."""
    return FormatError("Unsupported", f"architecture {name!r}: llorch reads {', '.join(supported)}", path=path)


def _text_part(root: Fields) -> Fields:
    """Return the settings of the text model inside a multimodal configuration, else the configuration."""
    kind = root.text("model_type")
    if kind not in BY_WHOLE:
        return root
    text = root.section("text_config")
    text_settings: Any = copy(root.values if text is None else text.values)  # old Qwen2.5-VL: no text_config
    if text_settings.get("rope_scaling") is None and root.has("rope_scaling"):
        text_settings["rope_scaling"] = root.values["rope_scaling"]
    text_settings["model_type"] = f"{kind}_text"
    return Fields(text_settings, root.path)


def _read_bias(fields: Fields, family: Family, fact: Literal["qkv_bias", "o_bias"]) -> bool:
    """Return True if there is a bias: by the family, or by the file if the family leaves it open (None)."""
    fact_of_family = family.qkv_bias if fact == "qkv_bias" else family.o_bias
    declared = fields.boolean(bias_key(family.transformers.keys, fact), default=False)
    return declared if fact_of_family is None else fact_of_family


def _refuse_variants(fields: Fields, family: Family) -> None:
    fields.refuse_null(*(key for key in _NEVER_NULL if key not in family.transformers.nullable))
    for key, supported in _SUPPORTED.items():
        fields.refuse(key, unless=supported, default=supported[0])
    if family.router == "softmax" and "norm_topk_prob" not in fields.defaults:
        fields.refuse("norm_topk_prob", unless=(True,), default=True)
    if "partial_rotary_factor" not in fields.defaults:
        fields.refuse("partial_rotary_factor", unless=(1, None), default=None)


def _read_intermediate_size(fields: Fields, family: Family, experts: Experts | None) -> int:
    key = family.transformers.keys.get(usual := "intermediate_size", usual)
    default = {} if experts is None or key != usual else {"default": experts.expert_size}
    return fields.integer(key, **default)


def _read_experts(fields: Fields, family: Family) -> Experts | None:
    """Read the experts' sizes and counts; None for a model without experts."""
    if not family.router:
        return None
    count, size = (family.transformers.keys.get(usual, usual) for usual in ("num_experts", "moe_intermediate_size"))
    if fields.has("num_local_experts") and not fields.has(count):
        count = "num_local_experts"
    n_experts = fields.integer(count, low=1 if family.router == "sigmoid" else 0)
    if n_experts == 0:
        return None
    return Experts(
        n_experts=n_experts,
        n_experts_per_token=fields.integer("num_experts_per_tok", low=1),
        expert_size=(expert_size := fields.integer(size, low=1)),
        shared_size=_read_shared_size(fields, family, expert_size),
        shared_gate=family.shared_expert == "gated",
        norm_topk_prob=_is_normalized(fields, family),
        scaled_inputs=family.router == "sigmoid",
    )


def _read_shared_size(fields: Fields, family: Family, expert_size: int) -> int:
    if family.shared_expert == "gated":
        return fields.integer("shared_expert_intermediate_size", low=1)
    return expert_size if family.shared_expert else 0


def _is_normalized(fields: Fields, family: Family) -> bool:
    """Check if the weights of a token's selected experts are divided by their sum."""
    if family.router == "sigmoid":  # the weight of an expert depends only on its own logit
        return False
    return "norm_topk_prob" not in fields.defaults or fields.boolean("norm_topk_prob", default=True)


def _read_delta_net(fields: Fields) -> DeltaNet:
    return DeltaNet(
        conv_kernel=fields.integer("linear_conv_kernel_dim", default=4),
        n_key_heads=fields.integer("linear_num_key_heads", default=16),
        n_value_heads=fields.integer("linear_num_value_heads", default=32),
        key_head_dim=fields.integer("linear_key_head_dim", default=128),
        value_head_dim=fields.integer("linear_value_head_dim", default=128),
    )


def _read_layers(fields: Fields, family: Family, *, has_experts: bool) -> list[Layer]:
    """Read the description of every layer: mixer, window, RoPE, experts."""
    n_layers = fields.integer("num_hidden_layers")
    if not 1 <= n_layers <= MOST_LAYERS:
        return []  # ModelConfig raises the error for n_layers
    rope_flags = _read_rope_flags(fields, n_layers, family.rope_interval) if family.rope_interval else [True] * n_layers
    layers = [Layer(experts=has_experts, rope=rotates) for rotates in rope_flags]
    for rule in family.layer_rules:
        layers = rule(fields, layers)
    return layers


def _read_rope_flags(fields: Fields, n_layers: int, default_interval: int) -> list[bool]:
    """Return a flag for each layer: it has RoPE. By default every `default_interval`-th layer has none."""
    interval = fields.integer("no_rope_layer_interval", default=default_interval, low=1)
    flags = read_integers(fields, "no_rope_layers") or [int((index + 1) % interval != 0) for index in range(n_layers)]
    if len(flags) < n_layers or not {*flags} <= {0, 1}:
        raise fields.error("Inconsistent", "no_rope_layers", f"0 or 1 for each of {n_layers} layers", flags)
    return [bool(flag) for flag in flags[:n_layers]]


def _read_theta(fields: Fields, rope: Fields | None) -> float:
    if rope is not None and rope.has("rope_theta"):
        return rope.number("rope_theta")
    fields.refuse_null("rope_theta")
    return fields.number("rope_theta", default=10000.0)


def _read_rotary_dim(fields: Fields, rope: Fields | None, family: Family, head_dim: int) -> int:
    """Return the width of the part of a head that RoPE rotates, 0 for the whole head."""
    if rope is not None and family.sections == "halves":
        _refuse_sections(rope, head_dim)
    if "partial_rotary_factor" not in fields.defaults:
        if rope is not None:
            rope.refuse("partial_rotary_factor", unless=(1, None), default=None)
        return 0
    default = fields.number("partial_rotary_factor")
    fraction = default if rope is None else rope.number("partial_rotary_factor", default=default)
    if not 0 < fraction <= 1:
        raise fields.error("OutOfRange", "partial_rotary_factor", "above 0, at most 1", fraction)
    width = int(head_dim * fraction)
    return 0 if width == head_dim else width


def _refuse_sections(rope: Fields, head_dim: int) -> None:
    sections = read_integers(rope, "mrope_section")
    if sections and sum(sections) != head_dim // 2:
        raise rope.error("Inconsistent", "mrope_section", f"numbers with the sum {head_dim // 2}", sections)


def _read_scaling(rope: Fields, context: int) -> RopeScaling | None:
    """Read the scaling of RoPE frequencies; None if there is none."""
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    match kind:
        case "default" | "mrope":
            return None
        case "linear":
            return LinearScaling(factor=rope.number("factor", low=1.0))
        case "llama3":
            low = rope.number("low_freq_factor", low=1e-6)
            return Llama3Scaling(
                factor=rope.number("factor", low=1.0),
                low_freq_factor=low,
                high_freq_factor=rope.number("high_freq_factor", low=low),
                original_max_position_embeddings=rope.integer("original_max_position_embeddings", low=1),
            )
        case "yarn":
            return _read_yarn(rope, context)
        case _:
            raise rope.error("Unsupported", "rope_type", "default, linear, llama3 or yarn", kind)


def _read_yarn(rope: Fields, context: int) -> YarnScaling:
    rope.refuse("truncate", unless=(True,), default=True)  # below, low=1e-6 means above 0
    factor = rope.number("factor", low=1.0)
    mscale, mscale_all = (rope.number(key, default=0.0, low=0.0) for key in ("mscale", "mscale_all_dim"))
    gain = yarn_gain(factor, mscale) / yarn_gain(factor, mscale_all) if mscale and mscale_all else yarn_gain(factor)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=rope.integer("original_max_position_embeddings", default=context, low=1),
        attention_factor=rope.number("attention_factor", default=gain, low=1e-6),
        beta_fast=rope.number("beta_fast", default=32.0, low=1e-6),
        beta_slow=rope.number("beta_slow", default=1.0, low=1e-6),
    )
