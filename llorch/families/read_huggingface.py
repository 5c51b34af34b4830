"""Hyperparameters from the object of a Hugging Face `config.json`, as transformers reads it.

llorch reads the text part of a multimodal model. Whatever an engine would read and llorch does not compute is refused
by the name of its key.

Source: transformers `configuration_*.py` and `modeling_rope_utils.py`.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from llorch.families.family import BY_MODEL_TYPE, BY_WHOLE, FAMILIES, MOST_LAYERS, Family
from llorch.families.layers import DeltaNet, Experts, Layer, Temperature
from llorch.families.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling, yarn_gain
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

# A null of config.json that transformers does not take for a default: it refuses it, or computes something else.
_NEVER_NULL = (
    "attention_bias", "hidden_act", "is_causal", "max_position_embeddings", "mlp_bias", "tie_word_embeddings",
    "use_sliding_window", "norm_topk_prob", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
_NEVER_NULL_IN_ROPE = ("original_max_position_embeddings", "rope_theta", "rope_type", "truncate", "type")
_LACKED = {  # key to the values that llorch computes; the first is that of an absent key
    "is_causal": (True,), "per_layer_config": (None,), "hidden_act": ("silu", "swish"), "mlp_bias": (False,),
    "original_max_position_embeddings": (None,),  # belongs into rope_scaling
    "attn_output_gate": (True,), "output_gate_type": (None, "silu", "swish"), "mamba_ssm_dtype": ("float32",),
    "n_group": (None, 1), "topk_group": (None, 1), "scoring_func": (None, "softmax"),
    "routed_scaling_factor": (None, 1.0), "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
}  # fmt: skip


def read(values: Mapping[str, object], path: str | Path) -> dict[str, Any]:
    """Read the fields of a `ModelConfig`; a FormatError names the key and the file."""
    whole = Fields(values, path)
    fields = _text_part(whole)
    name = _family(fields.text("model_type"), path)
    family = FAMILIES[name]
    _refuse_variants(fields, family)
    n_heads = fields.integer("num_attention_heads", low=1)
    hidden_size = fields.integer("hidden_size", low=1)
    context = fields.integer("max_position_embeddings", default=family.context)
    bias, (key, default) = fields.boolean("attention_bias", default=False), family.bias_key
    qkv_bias = _stated(family.qkv_bias, fields.boolean(key, default=default))
    with fields.naming_the_file():
        head_dim = head_width(fields, "head_dim", hidden_size, n_heads, family.head_dim)
        rope = _read_rope(fields, family)
        rotary_dim = _rotary_dim(fields, rope, family, head_dim)
        experts = _read_experts(fields, family)
        layers = _read_layers(fields, family, context, has_experts=experts is not None)
        has_attention_temperature = any(layer.has_attention_temperature for layer in layers)
        return {
            "family": name,
            "hidden_size": hidden_size,
            "intermediate_size": _intermediate_size(fields, family, experts),
            "n_layers": fields.integer("num_hidden_layers"),
            "n_heads": n_heads,
            "n_kv_heads": _n_kv_heads(fields, n_heads, family.n_kv_heads),
            "head_dim": head_dim,
            "vocab_size": fields.integer("vocab_size"),
            "rms_norm_eps": fields.number("rms_norm_eps"),
            "rope_theta": _theta(fields, rope, family.rope_theta),
            "rope_scaling": _read_scaling(rope, context) if rope is not None else None,
            "max_position_embeddings": context,
            "qkv_bias": qkv_bias,
            "o_bias": _stated(family.o_bias, bias),
            "qk_norm": family.qk_norm,
            "tie_word_embeddings": _tied(whole, fields, default=family.tied),
            "layers": one_for_each(layers),
            "experts": experts,
            "delta_net": _read_delta_net(fields) if family.hybrid else None,
            "attention_gate": family.hybrid,
            "rotary_dim": rotary_dim,
            "interleaved_rope_hf": family.interleaved_rope_hf,
            "temperature": _temperature(fields, rope, family, context) if has_attention_temperature else None,
            "part_of_whole": whole.text("model_type") in BY_WHOLE,
        }


def head_width(fields: Fields, key: str, hidden_size: int, n_heads: int, default: int | None) -> int:
    """Return the width of a head. A file may leave it out if the heads share the width of the model."""
    if default is None and hidden_size % n_heads == 0:
        default = hidden_size // n_heads
    if default is None and not fields.has(key):
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


def _family(kind: str, path: str | Path) -> str:
    if kind not in BY_MODEL_TYPE:
        raise unread(kind, path)
    return BY_MODEL_TYPE[kind]


def _tied(whole: Fields, text: Fields, *, default: bool) -> bool:
    """Tell if embedding and output share a matrix; the whole configuration has precedence over its text part."""
    inner = text.boolean("tie_word_embeddings", default=default)
    return whole.boolean("tie_word_embeddings", default=inner)


def _stated(by_family: bool | None, by_file: bool) -> bool:
    """Return the value that the family fixes, or the file's if the family fixes none."""
    return by_file if by_family is None else by_family


def _n_kv_heads(fields: Fields, n_heads: int, default: int | None) -> int:
    """Read the number of key/value heads; null, or no default of the family, means one for each query head."""
    if default is None or fields.is_null("num_key_value_heads"):
        default = n_heads
    return fields.integer("num_key_value_heads", default=default, low=1)


def _refuse_variants(fields: Fields, family: Family) -> None:
    fields.refuse_null(*_NEVER_NULL)
    if not family.null_head_dim:
        fields.refuse_null("head_dim")
    for key, known in _LACKED.items():
        fields.refuse(key, unless=known, default=known[0])
    if family.experts and family.norm_topk_prob_default is None:
        fields.refuse("norm_topk_prob", unless=(True,), default=True)
    if not family.window:
        fields.refuse("use_sliding_window", unless=(False,), default=False)
    if family.rotary_share is None:
        fields.refuse("partial_rotary_factor", unless=(1, None), default=None)


def _intermediate_size(fields: Fields, family: Family, experts: Experts | None) -> int:
    key = family.keys.get(usual := "intermediate_size", usual)
    default = {} if experts is None or key != usual else {"default": experts.expert_size}
    return fields.integer(key, **default)


def _read_experts(fields: Fields, family: Family) -> Experts | None:
    """Read the experts' sizes and counts; None for a model without experts."""
    if not family.experts:
        return None
    count, size = (family.keys.get(usual, usual) for usual in ("num_experts", "moe_intermediate_size"))
    if fields.has("num_local_experts") and not fields.has(count):
        count = "num_local_experts"
    n_experts = fields.integer(count, low=1 if family.scaled_inputs else 0)
    if n_experts == 0:
        return None
    used = family.n_experts_per_token
    default = {} if used is None else {"default": used}
    return Experts(
        n_experts=n_experts,
        n_experts_per_token=fields.integer("num_experts_per_tok", low=1, **default),
        expert_size=(expert_size := fields.integer(size, low=1)),
        shared_size=_shared_size(fields, family, expert_size),
        shared_gate=family.shared_gate,
        norm_topk_prob=_normalises(fields, family),
        scaled_inputs=family.scaled_inputs,
    )


def _shared_size(fields: Fields, family: Family, expert_size: int) -> int:
    if not family.shared:
        return 0
    return fields.integer("shared_expert_intermediate_size", low=1) if family.shared_gate else expert_size


def _normalises(fields: Fields, family: Family) -> bool:
    """Tell if the weights of a token's chosen experts are scaled to the sum 1."""
    if family.scaled_inputs:  # a sigmoid of each logit is its weight
        return False
    default = family.norm_topk_prob_default
    return True if default is None else fields.boolean("norm_topk_prob", default=default)


def _read_delta_net(fields: Fields) -> DeltaNet:
    return DeltaNet(
        conv_kernel=fields.integer("linear_conv_kernel_dim", default=4),
        n_key_heads=fields.integer("linear_num_key_heads", default=16),
        n_value_heads=fields.integer("linear_num_value_heads", default=32),
        key_head_dim=fields.integer("linear_key_head_dim", default=128),
        value_head_dim=fields.integer("linear_value_head_dim", default=128),
    )


def _read_layers(fields: Fields, family: Family, context: int, *, has_experts: bool) -> list[Layer]:
    """Read the facts of every layer: mixer, window, RoPE, experts."""
    n_layers = fields.integer("num_hidden_layers")
    if not 1 <= n_layers <= MOST_LAYERS:
        return []  # refused with the other sizes
    rope = _with_rope(fields, n_layers, family.rope_interval) if family.rope_interval else [True] * n_layers
    experts = _with_experts(fields, n_layers, family.sparse) if has_experts else [False] * n_layers
    kinds = _kinds(fields, family, n_layers, rope)
    window = fields.integer("sliding_window", low=1) if "sliding_attention" in kinds else None
    chunk = _read_attention_chunk(fields, family) if "chunked_attention" in kinds else None
    head_norm = family.head_norm and fields.boolean("use_qk_norm", default=True)
    has_attention_temperature = _read_tempered(fields, family, rope)
    return [
        Layer(
            mixer="delta_net" if kind == "linear_attention" else "attention",
            experts=experts[i],
            rope=rope[i],
            head_norm=head_norm and rope[i],
            has_attention_temperature=has_attention_temperature[i],
            window=window if kind == "sliding_attention" and window is not None and window < context else None,
            chunk=chunk if kind == "chunked_attention" and chunk is not None and chunk < context else None,
        )
        for i, kind in enumerate(kinds)
    ]


def _kinds(fields: Fields, family: Family, n_layers: int, rope: list[bool]) -> list[str]:
    """Return the kind of attention of each layer, by the names of transformers."""
    if family.hybrid:
        interval = fields.integer("full_attention_interval", default=4, low=1)
        made = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(n_layers)]
        return _read_layer_list(fields, "layer_types", made, ("linear_attention", "full_attention"))
    if family.chunk is not None:
        made = ["chunked_attention" if one else "full_attention" for one in rope]
        return _read_layer_list(fields, "layer_types", made, ("chunked_attention", "full_attention"))
    made = ["sliding_attention" if there else "full_attention" for there in _windowed(fields, family, rope)]
    takes_list = family.window in ("late", "every_other", "unrotated")
    wanted = ("full_attention", "sliding_attention") if takes_list and _has_window(fields, family) else None
    kinds = _read_layer_list(fields, "layer_types", made, wanted)
    if wanted is None and kinds != made:
        raise fields.error("Unsupported", "layer_types", f"{' '.join(sorted({*made}))} for every layer", kinds)
    return kinds


def _has_window(fields: Fields, family: Family) -> bool:
    if not family.window:
        return False
    if family.window in ("given", "required"):
        absent = not fields.is_null("sliding_window") and not fields.has("sliding_window")
        return family.window == "required" if absent else fields.has("sliding_window")
    return fields.boolean("use_sliding_window", default=False) and fields.has("sliding_window")


def _windowed(fields: Fields, family: Family, rope: list[bool]) -> list[bool]:
    """Tell for each layer if it has a sliding window; `rope` tells which layers rotate."""
    n_layers = len(rope)
    if not _has_window(fields, family):
        return [False] * n_layers
    if family.window == "unrotated":
        return [not one for one in rope]
    if family.window in ("asked", "given", "required"):
        return [True] * n_layers
    late = fields.integer("max_window_layers", default=family.max_window_layers)
    if family.window == "late":
        return [i >= late for i in range(n_layers)]
    return [(i + 1) % 2 == 1 and i < late for i in range(n_layers)]


def _with_experts(fields: Fields, n_layers: int, sparse: str) -> list[bool]:
    if sparse == "listed":
        return _with_listed_experts(fields, n_layers)
    dense = _read_integers(fields, "mlp_only_layers")
    step = fields.integer("decoder_sparse_step", default=1, low=1)
    if not sparse and (dense or step != 1):
        raise fields.error(
            "Unsupported", "mlp_only_layers", "no dense layer (transformers has no dense layer in this family)", dense
        )
    return [i not in dense and (i + 1) % step == 0 for i in range(n_layers)]


def _with_listed_experts(fields: Fields, n_layers: int) -> list[bool]:
    step = fields.integer("interleave_moe_layer_step", default=1, low=1)
    moe = _read_integers(fields, "moe_layers") if fields.has("moe_layers") else [*range(step - 1, n_layers, step)]
    if any(not 0 <= i < n_layers for i in moe):
        raise fields.error("Inconsistent", "moe_layers", f"layers from 0 to {n_layers - 1}", moe)
    return [i in moe for i in range(n_layers)]


def _with_rope(fields: Fields, n_layers: int, usual: int) -> list[bool]:
    """Tell for each layer if it rotates queries and keys; every `usual`-th does not, unless the file differs."""
    interval = fields.integer("no_rope_layer_interval", default=usual, low=1)
    listed = _read_integers(fields, "no_rope_layers") or [int((i + 1) % interval != 0) for i in range(n_layers)]
    if len(listed) < n_layers or not {*listed} <= {0, 1}:
        raise fields.error("Inconsistent", "no_rope_layers", f"0 or 1 for each of {n_layers} layers", listed)
    return [bool(one) for one in listed[:n_layers]]


def _read_attention_chunk(fields: Fields, family: Family) -> int:
    chunk = fields.integer("attention_chunk_size", default=family.chunk, low=1)
    fields.refuse_null("attention_chunk_size")
    return chunk


def _read_tempered(fields: Fields, family: Family, rope: list[bool]) -> list[bool]:
    match family.tempered:
        case "beta":
            return [_beta(fields, family) != 0] * len(rope)
        case "unrotated":
            tunes = _tunes(fields)
            return [tunes and not one for one in rope]
        case "":
            return [False] * len(rope)


def _tunes(fields: Fields) -> bool:
    """Tell if queries grow with the position: true or false, in the first releases 4 or 0."""
    tuning = fields.values.get("attn_temperature_tuning", True)
    return bool(tuning) if isinstance(tuning, int) else fields.boolean("attn_temperature_tuning", default=True)


def _read_integers(fields: Fields, key: str) -> list[int]:
    """Return a list of integers; an absent or null key gives an empty list."""
    listed = fields.values.get(key)
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(type(one) in (int, bool) for one in listed):
        raise fields.error("Malformed", key, "a list of integers", listed)
    return [int(one) for one in listed]


def _read_layer_list(fields: Fields, key: str, made: list[str], known: tuple[str, ...] | None) -> list[str]:
    """Return the list in the file, with one known name for each layer.

    Without a list in the file, return `made`, as transformers makes it. `known` is None if the names are not checked
    here.
    """
    if not fields.has(key):
        return made
    listed = fields.values[key]
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise fields.error("Malformed", key, "a list of names", listed)
    if known is None:
        return listed
    if len(listed) != len(made):
        raise fields.error("Inconsistent", key, f"{len(made)} entries, one for each layer", f"{len(listed)} entries")
    if not {*listed} <= {*known}:
        raise fields.error("Unsupported", key, " or ".join(known), next(one for one in listed if one not in known))
    return listed


def _read_rope(fields: Fields, family: Family) -> Fields | None:
    """Return the RoPE settings from their new or old key, else the family's, or None."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new is not None and old is not None and new.values != old.values:
        # transformers takes the old key then, and with it the default theta: never what the author meant.
        raise fields.error("Inconsistent", "rope_scaling", "the values of rope_parameters", old.values)
    rope = new or old
    if rope is None:
        return None if family.rope_parameters is None else Fields(family.rope_parameters, fields.path)
    rope.refuse_null(*_NEVER_NULL_IN_ROPE)
    for key, value in rope.values.items():
        if isinstance(value, Mapping):
            raise rope.error("Unsupported", key, "one set of RoPE parameters for all layers", value)
    return rope


def _theta(fields: Fields, rope: Fields | None, default: float) -> float:
    if rope is not None and rope.has("rope_theta"):
        return rope.number("rope_theta")
    fields.refuse_null("rope_theta")
    return fields.number("rope_theta", default=default)


def _rotary_dim(fields: Fields, rope: Fields | None, family: Family, head_dim: int) -> int:
    """Return the width of the part that RoPE turns, 0 for all of it."""
    if rope is not None and family.sections == "halves":
        _refuse_sections(rope, head_dim)
    if family.rotary_share is None:
        if rope is not None:
            rope.refuse("partial_rotary_factor", unless=(1, None), default=None)
        return 0
    default = fields.number("partial_rotary_factor", default=family.rotary_share)
    share = default if rope is None else rope.number("partial_rotary_factor", default=default)
    if not 0 < share <= 1:
        raise fields.error("OutOfRange", "partial_rotary_factor", "above 0, at most 1", share)
    width = int(head_dim * share)
    return 0 if width == head_dim else width


def _refuse_sections(rope: Fields, head_dim: int) -> None:
    sections = _read_integers(rope, "mrope_section")
    if sections and sum(sections) != head_dim // 2:
        raise rope.error("Inconsistent", "mrope_section", f"numbers with the sum {head_dim // 2}", sections)


def _beta(fields: Fields, family: Family) -> float:
    """Read `llama_4_scaling_beta`, the scale of the queries' temperature; 0 without RoPE settings."""
    rope = _read_rope(fields, family)
    return 0.0 if rope is None else rope.number("llama_4_scaling_beta", low=0.0)


def _temperature(fields: Fields, rope: Fields | None, family: Family, context: int) -> Temperature | None:
    if (usual := family.temperature) is not None:
        floor = fields.integer("floor_scale", default=usual.floor, low=1)
        return replace(usual, scale=fields.number("attn_scale", default=usual.scale), floor=floor)
    if rope is not None:
        floor = rope.integer("original_max_position_embeddings", default=context, low=1)
        return Temperature(scale=_beta(fields, family), floor=floor, offset=0)
    return None


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
