"""Hyperparameters from the object of a Hugging Face `config.json`, as transformers reads it.

Of a model that sees, too, the text part is read. Whatever an engine would read and llorch does not compute is refused
by the name of its key.

Source: transformers `configuration_*.py` and `modeling_rope_utils.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llorch.architecture import DeltaNet, Experts, Layer, Temperature
from llorch.config.families import BY_MODEL_TYPE, BY_WHOLE, FAMILIES, MOST_LAYERS, Family
from llorch.config.scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling, yarn_gain
from llorch.config_reader import Fields
from llorch.errors import FormatError

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
_YARN_OF_MINISTRAL = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def read(values: Mapping[str, object], path: str | Path) -> dict[str, Any]:
    """Read the fields of a `ModelConfig`; a FormatError names the key and the file."""
    whole = Fields(values, path)
    fields = _text_part(whole)
    name = _family(fields.text("model_type"), path)
    family = FAMILIES[name]
    _refuse_variants(fields, family, is_llama=name == "llama")
    n_heads = fields.integer("num_attention_heads", low=1)
    hidden_size = fields.integer("hidden_size", low=1)
    context = fields.integer("max_position_embeddings", default=family.context)
    bias = fields.boolean("attention_bias", default=False)
    qkv_bias = fields.boolean("qkv_bias", default=True) if name == "qwen2_moe" else _stated(family.qkv_bias, bias)
    with fields.naming_the_file():
        head_dim = head_width(fields, "head_dim", hidden_size, n_heads, family.head_dim)
        rope = _rope(fields, name)
        rotary_dim = _rotary_dim(fields, rope, family, head_dim)
        experts = _experts(fields, family)
        layers = _layers(fields, family, context, has_experts=experts is not None)
        tempered = any(layer.tempered for layer in layers)
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
            "rope_scaling": _scaling(rope, context) if rope is not None else None,
            "max_position_embeddings": context,
            "qkv_bias": qkv_bias,
            "o_bias": _stated(family.o_bias, bias),
            "qk_norm": family.qk_norm,
            "tie_word_embeddings": _tied(whole, fields, default=family.tied),
            "layers": one_for_each(layers),
            "experts": experts,
            "delta_net": _delta_net(fields) if family.hybrid else None,
            "attention_gate": family.hybrid,
            "rotary_dim": rotary_dim,
            "adjacent_pairs": family.adjacent_pairs,
            "temperature": _temperature(fields, rope, name, context) if tempered else None,
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


def unread(name: str, path: str | Path) -> FormatError:
    """Make the error for an architecture that llorch does not read."""
    return FormatError("Unsupported", f"architecture {name!r}: llorch reads {', '.join(FAMILIES)}", path=path)


def _text_part(whole: Fields) -> Fields:
    kind = whole.text("model_type")
    if kind not in BY_WHOLE:
        return whole
    text = whole.section("text_config")
    values = dict(whole.values if text is None else text.values)  # the oldest Qwen2.5-VL have no such part
    if values.get("rope_scaling") is None and whole.has("rope_scaling"):
        values["rope_scaling"] = whole.values["rope_scaling"]
    return Fields(values | {"model_type": f"{kind}_text"}, whole.path)


def _family(kind: str, path: str | Path) -> str:
    if kind not in BY_MODEL_TYPE:
        raise unread(kind, path)
    return BY_MODEL_TYPE[kind]


def _tied(whole: Fields, text: Fields, *, default: bool) -> bool:
    inner = text.boolean("tie_word_embeddings", default=default)
    return whole.boolean("tie_word_embeddings", default=inner)


def _stated(by_family: bool | None, by_file: bool) -> bool:
    return by_file if by_family is None else by_family


def _n_kv_heads(fields: Fields, n_heads: int, default: int | None) -> int:
    if default is None or fields.is_null("num_key_value_heads"):
        default = n_heads
    return fields.integer("num_key_value_heads", default=default, low=1)


def _refuse_variants(fields: Fields, family: Family, *, is_llama: bool) -> None:
    fields.refuse_null(*_NEVER_NULL)
    if not is_llama:
        fields.refuse_null("head_dim")
    for key, known in _LACKED.items():
        fields.refuse(key, unless=known, default=known[0])
    if family.norm_topk_prob is not None and family.hybrid and family.sections:  # no key of Qwen3.5
        fields.refuse("norm_topk_prob", unless=(True,), default=True)
    if not family.window:
        fields.refuse("use_sliding_window", unless=(False,), default=False)
    if not family.hybrid:
        fields.refuse("partial_rotary_factor", unless=(1, None), default=None)


def _intermediate_size(fields: Fields, family: Family, experts: Experts | None) -> int:
    if family.adjacent_pairs:  # Llama 4, whose intermediate_size is that of an expert
        return fields.integer("intermediate_size_mlp")
    return fields.integer("intermediate_size", **({} if experts is None else {"default": experts.expert_size}))


def _experts(fields: Fields, family: Family) -> Experts | None:
    if not family.experts:
        return None
    if family.adjacent_pairs:
        size = fields.integer("intermediate_size", low=1)
        return Experts(
            n_experts=fields.integer("num_local_experts", low=1),
            n_experts_per_token=fields.integer("num_experts_per_tok", default=1, low=1),
            expert_size=size, shared_size=size, norm_topk_prob=False, scaled_inputs=True,
        )  # fmt: skip
    count = "num_local_experts" if fields.has("num_local_experts") and not fields.has("num_experts") else "num_experts"
    n_experts = fields.integer(count, low=0)
    if n_experts == 0:
        return None
    return Experts(
        n_experts=n_experts,
        n_experts_per_token=fields.integer("num_experts_per_tok", low=1),
        expert_size=fields.integer("moe_intermediate_size", low=1),
        shared_size=fields.integer("shared_expert_intermediate_size", low=1) if family.shared else 0,
        shared_gate=family.shared,
        norm_topk_prob=fields.boolean("norm_topk_prob", default=family.hybrid),
    )


def _delta_net(fields: Fields) -> DeltaNet:
    return DeltaNet(
        conv_kernel=fields.integer("linear_conv_kernel_dim", default=4),
        n_key_heads=fields.integer("linear_num_key_heads", default=16),
        n_value_heads=fields.integer("linear_num_value_heads", default=32),
        key_head_dim=fields.integer("linear_key_head_dim", default=128),
        value_head_dim=fields.integer("linear_value_head_dim", default=128),
    )


def _layers(fields: Fields, family: Family, context: int, *, has_experts: bool) -> list[Layer]:
    n_layers = fields.integer("num_hidden_layers")
    if not 1 <= n_layers <= MOST_LAYERS:
        return []  # refused with the other sizes
    if family.adjacent_pairs:
        return _layers_of_llama4(fields, n_layers, context)
    experts = _with_experts(fields, n_layers, sparse=not family.sections) if has_experts else [False] * n_layers
    rope = _with_rope(fields, n_layers) if family.classes == "SmolLM3" else [True] * n_layers
    kinds = _kinds(fields, family, n_layers, rope)
    window = fields.integer("sliding_window", low=1) if "sliding_attention" in kinds else None
    tempered = family.classes == "Ministral3" and _beta(fields) != 0
    return [
        Layer(
            mixer="delta_net" if kind == "linear_attention" else "attention",
            experts=experts[i],
            rope=rope[i],
            tempered=tempered,
            window=window if kind == "sliding_attention" and window is not None and window < context else None,
        )
        for i, kind in enumerate(kinds)
    ]


def _kinds(fields: Fields, family: Family, n_layers: int, rope: list[bool]) -> list[str]:
    """Return the kind of attention of each layer, by the names of transformers."""
    if family.hybrid:
        interval = fields.integer("full_attention_interval", default=4, low=1)
        made = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(n_layers)]
        return _listed(fields, "layer_types", made, ("linear_attention", "full_attention"))
    made = ["sliding_attention" if there else "full_attention" for there in _windowed(fields, family, rope)]
    takes_list = family.window in ("late", "every_other") or family.classes == "SmolLM3"
    wanted = ("full_attention", "sliding_attention") if takes_list and _has_window(fields, family) else None
    kinds = _listed(fields, "layer_types", made, wanted)
    if wanted is None and kinds != made:
        raise fields.error("Unsupported", "layer_types", f"{' '.join(sorted({*made}))} for every layer", kinds)
    return kinds


def _has_window(fields: Fields, family: Family) -> bool:
    if not family.window:
        return False
    asked = family.window == "given" or fields.boolean("use_sliding_window", default=False)
    if family.window == "given" and not fields.is_null("sliding_window") and not fields.has("sliding_window"):
        return family.classes == "Mistral"  # 4096, unless null
    return asked and fields.has("sliding_window")


def _windowed(fields: Fields, family: Family, rope: list[bool]) -> list[bool]:
    n_layers = len(rope)
    if not _has_window(fields, family):
        return [False] * n_layers
    if family.classes == "SmolLM3":
        return [not one for one in rope]
    if family.window in ("asked", "given"):
        return [True] * n_layers
    late = fields.integer("max_window_layers", default=80 if family.classes == "Qwen2_5_VL" else 28)
    if family.window == "late":
        return [i >= late for i in range(n_layers)]
    return [(i + 1) % 2 == 1 and i < late for i in range(n_layers)]


def _with_experts(fields: Fields, n_layers: int, *, sparse: bool) -> list[bool]:
    dense = _numbers(fields, "mlp_only_layers")
    step = fields.integer("decoder_sparse_step", default=1, low=1)
    if not sparse and (dense or step != 1):  # no keys of Qwen3.5
        raise fields.error(
            "Unsupported", "mlp_only_layers", "no dense layer (transformers has no dense layer in this family)", dense
        )
    return [i not in dense and (i + 1) % step == 0 for i in range(n_layers)]


def _with_rope(fields: Fields, n_layers: int) -> list[bool]:
    interval = fields.integer("no_rope_layer_interval", default=4, low=1)
    listed = _numbers(fields, "no_rope_layers") or [int((i + 1) % interval != 0) for i in range(n_layers)]
    if len(listed) < n_layers or not {*listed} <= {0, 1}:
        raise fields.error("Inconsistent", "no_rope_layers", f"0 or 1 for each of {n_layers} layers", listed)
    return [bool(one) for one in listed[:n_layers]]


def _layers_of_llama4(fields: Fields, n_layers: int, context: int) -> list[Layer]:
    rope = _with_rope(fields, n_layers)
    step = fields.integer("interleave_moe_layer_step", default=1, low=1)
    moe = _numbers(fields, "moe_layers") if fields.has("moe_layers") else [*range(step - 1, n_layers, step)]
    if any(not 0 <= i < n_layers for i in moe):
        raise fields.error("Inconsistent", "moe_layers", f"layers from 0 to {n_layers - 1}", moe)
    made = ["chunked_attention" if one else "full_attention" for one in rope]
    kinds = _listed(fields, "layer_types", made, ("chunked_attention", "full_attention"))
    chunk = fields.integer("attention_chunk_size", default=8192, low=1) if "chunked_attention" in kinds else None
    if chunk is not None:
        fields.refuse_null("attention_chunk_size")
    head_norm = fields.boolean("use_qk_norm", default=True)
    return [
        Layer(
            experts=i in moe,
            rope=rope[i],
            head_norm=head_norm and rope[i],
            tempered=_tunes(fields) and not rope[i],
            chunk=chunk if kind == "chunked_attention" and chunk is not None and chunk < context else None,
        )
        for i, kind in enumerate(kinds)
    ]


def _tunes(fields: Fields) -> bool:
    """Whether queries grow with the position: true or false, of the first releases 4 or 0."""
    tuning = fields.values.get("attn_temperature_tuning", True)
    return bool(tuning) if isinstance(tuning, int) else fields.boolean("attn_temperature_tuning", default=True)


def _numbers(fields: Fields, key: str) -> list[int]:
    listed = fields.values.get(key)
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(type(one) in (int, bool) for one in listed):
        raise fields.error("Malformed", key, "a list of integers", listed)
    return [int(one) for one in listed]


def _listed(fields: Fields, key: str, made: list[str], known: tuple[str, ...] | None) -> list[str]:
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


def _rope(fields: Fields, name: str) -> Fields | None:
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new is not None and old is not None and new.values != old.values:
        # transformers takes the old key then, and with it the default theta: never what the author meant.
        raise fields.error("Inconsistent", "rope_scaling", "the values of rope_parameters", old.values)
    rope = new or old
    if rope is None:
        return Fields(_YARN_OF_MINISTRAL, fields.path) if name == "ministral3" else None
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
    """Width of the part that RoPE turns, 0 for all of it."""
    if rope is not None and family.sections == "halves":
        _refuse_sections(rope, head_dim)
    if not family.hybrid:
        if rope is not None:
            rope.refuse("partial_rotary_factor", unless=(1, None), default=None)
        return 0
    default = fields.number("partial_rotary_factor", default=0.25)
    share = default if rope is None else rope.number("partial_rotary_factor", default=default)
    if not 0 < share <= 1:
        raise fields.error("OutOfRange", "partial_rotary_factor", "above 0, at most 1", share)
    width = int(head_dim * share)
    return 0 if width == head_dim else width


def _refuse_sections(rope: Fields, head_dim: int) -> None:
    sections = _numbers(rope, "mrope_section")
    if sections and sum(sections) != head_dim // 2:
        raise rope.error("Inconsistent", "mrope_section", f"numbers with the sum {head_dim // 2}", sections)


def _beta(fields: Fields) -> float:
    rope = _rope(fields, "ministral3")
    return 0.0 if rope is None else rope.number("llama_4_scaling_beta", low=0.0)


def _temperature(fields: Fields, rope: Fields | None, name: str, context: int) -> Temperature | None:
    if name == "llama4":
        floor = fields.integer("floor_scale", default=8192, low=1)
        return Temperature(scale=fields.number("attn_scale", default=0.1), floor=floor, offset=1)
    if rope is not None:  # of Ministral 3
        floor = rope.integer("original_max_position_embeddings", default=context, low=1)
        return Temperature(scale=_beta(fields), floor=floor, offset=0)
    return None


def _scaling(rope: Fields, context: int) -> RopeScaling | None:
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
