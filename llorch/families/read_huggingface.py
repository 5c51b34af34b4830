"""Hyperparameters from the object of a Hugging Face `config.json`, as transformers reads it.

llorch reads the text part of a multimodal model. Whatever an engine would read and llorch does not compute is refused
by the name of its key.

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

# A null of config.json that transformers does not take for a default: it refuses it, or computes something else.
_NEVER_NULL = (
    "attention_bias", "head_dim", "hidden_act", "is_causal", "max_position_embeddings", "mlp_bias",
    "tie_word_embeddings", "use_sliding_window", "norm_topk_prob", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size",
)  # fmt: skip
_LACKED = {  # key to the values that llorch computes; the first is that of an absent key
    "is_causal": (True,), "per_layer_config": (None,), "hidden_act": ("silu", "swish"), "mlp_bias": (False,),
    "original_max_position_embeddings": (None,),  # belongs into rope_scaling
    "attn_output_gate": (True,), "output_gate_type": (None, "silu", "swish"), "mamba_ssm_dtype": ("float32",),
    "n_group": (None, 1), "topk_group": (None, 1), "scoring_func": (None, "softmax"),
    "routed_scaling_factor": (None, 1.0), "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
}  # fmt: skip


def config_from_huggingface(values: Mapping[str, object], *, path: str | Path) -> ModelConfig:
    """Read the object of a `config.json`; a FormatError names the key and the file `path`."""
    whole = Fields(values, path)
    fields = _text_part(whole)
    if (kind := fields.text("model_type")) not in BY_MODEL_TYPE:
        raise unread(kind, path)
    name = BY_MODEL_TYPE[kind]
    family = FAMILIES[name]
    nulls = {key for key in family.transformers.nullable if fields.is_null(key)}
    fields = Fields(
        fields.values, path, defaults={key: value for key, value in family.defaults.items() if key not in nulls}
    )
    _refuse_variants(fields, family)
    n_heads = fields.integer("num_attention_heads", low=1)
    hidden_size = fields.integer("hidden_size", low=1)
    context = fields.integer("max_position_embeddings")
    tied = fields.boolean("tie_word_embeddings", default=False)
    qkv_bias, o_bias = _bias(fields, family, "qkv_bias"), _bias(fields, family, "o_bias")
    with fields.naming_the_file():
        head_dim = head_width(fields, "head_dim", hidden_size, n_heads)
        rope = rope_settings(fields)
        rotary_dim = _rotary_dim(fields, rope, family, head_dim)
        experts = _read_experts(fields, family)
        layers = _read_layers(fields, family, has_experts=experts is not None)
        layers, temperature = with_temperature(layers, family, lambda: family.read_temperature(fields))
        return ModelConfig(
            family=name,
            hidden_size=hidden_size,
            intermediate_size=_intermediate_size(fields, family, experts),
            n_layers=fields.integer("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=fields.integer("num_key_value_heads", default=n_heads, low=1),
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=_theta(fields, rope),
            rope_scaling=_read_scaling(rope, context) if rope is not None else None,
            max_position_embeddings=context,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=family.qk_norm,
            tie_word_embeddings=whole.boolean("tie_word_embeddings", default=tied),  # the whole has precedence
            layers=one_for_each(layers),
            experts=experts,
            delta_net=_read_delta_net(fields) if family.delta_net else None,
            attention_gate=bool(family.delta_net),
            rotary_dim=rotary_dim,
            interleaved_rope_hf=family.layout.interleaved_rope == "both",
            temperature=temperature,
            part_of_whole=whole.text("model_type") in BY_WHOLE,
        )


def with_temperature(
    layers: list[Layer], family: Family, read_temperature: Callable[[], Temperature | None]
) -> tuple[list[Layer], Temperature | None]:
    """Mark the layers that have the temperature: those without RoPE, if the family has such layers, else all."""
    has_temperature = [not (family.rope_interval and layer.rope) for layer in layers]
    temperature = read_temperature() if any(has_temperature) else None
    if temperature is None:
        return layers, None
    return [
        replace(layer, has_attention_temperature=has) for layer, has in zip(layers, has_temperature, strict=True)
    ], temperature


def head_width(fields: Fields, key: str, hidden_size: int, n_heads: int) -> int:
    """Return the width of a head. A file may leave it out if the heads share the width of the model."""
    default = hidden_size // n_heads if hidden_size % n_heads == 0 else None
    if default is None and not fields.has(key) and fields.defaults.get(key) is None:
        message = (
            "config: expected head_dim, or a hidden_size that n_heads divides, "
            f"got hidden_size {hidden_size}, n_heads {n_heads} and no head_dim"
        )
        raise FormatError("OutOfRange", message)
    return fields.integer(key, default=default)


def one_for_each(layers: list[Layer]) -> tuple[Layer, ...]:
    """Return the layers of a model; an empty tuple if all of them are dense."""
    return () if all(layer.is_dense for layer in layers) else tuple(layers)


def unread(name: str, path: str | Path, known: Iterable[str] = FAMILIES) -> FormatError:
    """Make the error for an architecture that llorch does not read; `known`: those that it reads."""
    return FormatError("Unsupported", f"architecture {name!r}: llorch reads {', '.join(known)}", path=path)


def _text_part(whole: Fields) -> Fields:
    """Return the settings of the text model inside a multimodal configuration, or the configuration itself."""
    kind = whole.text("model_type")
    if kind not in BY_WHOLE:
        return whole
    text = whole.section("text_config")
    values: Any = copy(whole.values if text is None else text.values)  # the oldest Qwen2.5-VL have no such part
    if values.get("rope_scaling") is None and whole.has("rope_scaling"):
        values["rope_scaling"] = whole.values["rope_scaling"]
    values["model_type"] = f"{kind}_text"
    return Fields(values, whole.path)


def _bias(fields: Fields, family: Family, fact: Literal["qkv_bias", "o_bias"]) -> bool:
    """Return a fact of the family, or what the file says under the key of the family."""
    fixed = family.qkv_bias if fact == "qkv_bias" else family.o_bias
    value = fields.boolean(bias_key(family.transformers.keys, fact), default=False)
    return value if fixed is None else fixed


def _refuse_variants(fields: Fields, family: Family) -> None:
    fields.refuse_null(*(key for key in _NEVER_NULL if key not in family.transformers.nullable))
    for key, known in _LACKED.items():
        fields.refuse(key, unless=known, default=known[0])
    if family.router == "softmax" and "norm_topk_prob" not in fields.defaults:
        fields.refuse("norm_topk_prob", unless=(True,), default=True)
    if "partial_rotary_factor" not in fields.defaults:
        fields.refuse("partial_rotary_factor", unless=(1, None), default=None)


def _intermediate_size(fields: Fields, family: Family, experts: Experts | None) -> int:
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
        shared_size=_shared_size(fields, family, expert_size),
        shared_gate=family.shared_expert == "gated",
        norm_topk_prob=_normalises(fields, family),
        scaled_inputs=family.router == "sigmoid",
    )


def _shared_size(fields: Fields, family: Family, expert_size: int) -> int:
    if family.shared_expert == "gated":
        return fields.integer("shared_expert_intermediate_size", low=1)
    return expert_size if family.shared_expert else 0


def _normalises(fields: Fields, family: Family) -> bool:
    """Tell if the weights of a token's chosen experts are scaled to the sum 1."""
    if family.router == "sigmoid":  # of each logit it is its weight
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
    """Read the facts of every layer: mixer, window, RoPE, experts."""
    n_layers = fields.integer("num_hidden_layers")
    if not 1 <= n_layers <= MOST_LAYERS:
        return []  # refused with the other sizes
    rope = _with_rope(fields, n_layers, family.rope_interval) if family.rope_interval else [True] * n_layers
    layers = [Layer(experts=has_experts, rope=rotates) for rotates in rope]
    for rule in family.layer_rules:
        layers = rule(fields, layers)
    return layers


def _with_rope(fields: Fields, n_layers: int, usual: int) -> list[bool]:
    """Tell for each layer if it rotates queries and keys; every `usual`-th does not, unless the file differs."""
    interval = fields.integer("no_rope_layer_interval", default=usual, low=1)
    listed = read_integers(fields, "no_rope_layers") or [int((i + 1) % interval != 0) for i in range(n_layers)]
    if len(listed) < n_layers or not {*listed} <= {0, 1}:
        raise fields.error("Inconsistent", "no_rope_layers", f"0 or 1 for each of {n_layers} layers", listed)
    return [bool(one) for one in listed[:n_layers]]


def _theta(fields: Fields, rope: Fields | None) -> float:
    if rope is not None and rope.has("rope_theta"):
        return rope.number("rope_theta")
    fields.refuse_null("rope_theta")
    return fields.number("rope_theta", default=10000.0)


def _rotary_dim(fields: Fields, rope: Fields | None, family: Family, head_dim: int) -> int:
    """Return the width of the part that RoPE turns, 0 for all of it."""
    if rope is not None and family.sections == "halves":
        _refuse_sections(rope, head_dim)
    if "partial_rotary_factor" not in fields.defaults:
        if rope is not None:
            rope.refuse("partial_rotary_factor", unless=(1, None), default=None)
        return 0
    default = fields.number("partial_rotary_factor")
    share = default if rope is None else rope.number("partial_rotary_factor", default=default)
    if not 0 < share <= 1:
        raise fields.error("OutOfRange", "partial_rotary_factor", "above 0, at most 1", share)
    width = int(head_dim * share)
    return 0 if width == head_dim else width


def _refuse_sections(rope: Fields, head_dim: int) -> None:
    sections = read_integers(rope, "mrope_section")
    if sections and sum(sections) != head_dim // 2:
        raise rope.error("Inconsistent", "mrope_section", f"numbers with the sum {head_dim // 2}", sections)


def _read_scaling(rope: Fields, context: int) -> RopeScaling | None:
    """Read how RoPE's frequencies are scaled; None if they are not."""
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
            return _yarn(rope, context)
        case _:
            raise rope.error("Unsupported", "rope_type", "default, linear, llama3 or yarn", kind)


def _yarn(rope: Fields, context: int) -> YarnScaling:
    rope.refuse("truncate", unless=(True,), default=True)
    factor = rope.number("factor", low=1.0)
    above, below = (rope.number(key, default=0.0, low=0.0) for key in ("mscale", "mscale_all_dim"))
    gain = yarn_gain(factor, above) / yarn_gain(factor, below) if above and below else yarn_gain(factor)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=rope.integer("original_max_position_embeddings", default=context, low=1),
        attention_factor=rope.number("attention_factor", default=gain, low=1e-6),
        beta_fast=rope.number("beta_fast", default=32.0, low=1e-6),
        beta_slow=rope.number("beta_slow", default=1.0, low=1e-6),
    )
