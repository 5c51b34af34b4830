"""Rules for layers that several families share: kinds of attention, windows, layers with experts.

Source: transformers `configuration_*.py`; llama.cpp `src/models/*.cpp`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from llorch.families.layers import Layer
from llorch.runtime.fields import Fields

BETA = "llama_4_scaling_beta"  # RoPE setting: scale of the attention temperature
# RoPE settings for which transformers does not replace null by a default.
_NEVER_NULL_IN_ROPE = ("original_max_position_embeddings", "rope_theta", "rope_type", "truncate", "type")


def full_attention(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Return the layers unchanged; raise FormatError if the file asks for windows."""
    fields.refuse("use_sliding_window", unless=(False,), default=False)
    return with_windows(fields, layers, [False] * len(layers))


def with_windows(fields: Fields, layers: list[Layer], windowed: list[bool], *, takes_list: bool = False) -> list[Layer]:
    """Set the file's window for the `windowed` layers; `takes_list`: for those in `layer_types`, if the file has it."""
    default_kinds = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windowed]
    allowed = ("full_attention", "sliding_attention") if takes_list else None
    kinds = read_layer_list(fields, "layer_types", default_kinds, allowed)
    if allowed is None and kinds != default_kinds:
        raise fields.error("Unsupported", "layer_types", f"{' '.join(sorted({*default_kinds}))} for every layer", kinds)
    if "sliding_attention" not in kinds:
        return layers
    window = below_context(fields, fields.integer("sliding_window", low=1))
    return [
        replace(layer, window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(layers, kinds, strict=True)
    ]


def late_windows(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Set windows for the layers from `max_window_layers` on, if the file asks for windows."""
    return requested_windows(fields, layers, lambda layer, first_windowed: layer >= first_windowed)


def requested_windows(fields: Fields, layers: list[Layer], is_windowed: Callable[[int, int], bool]) -> list[Layer]:
    """Set windows for layers by `is_windowed(layer, max_window_layers)`, if the file asks for windows."""
    if not has_sliding_window(fields):
        return with_windows(fields, layers, [False] * len(layers))
    limit = fields.integer("max_window_layers", default=28)
    return with_windows(fields, layers, [is_windowed(layer, limit) for layer in range(len(layers))], takes_list=True)


def has_sliding_window(fields: Fields) -> bool:
    """Check if the file asks for windows by `use_sliding_window`."""
    return fields.boolean("use_sliding_window", default=False) and fields.has("sliding_window")


def below_context(fields: Fields, length: int) -> int | None:
    """Return the length of a window or chunk; None if it covers the whole context."""
    return length if length < fields.integer("max_position_embeddings") else None


def sparse_layers(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """In a model with experts, set them for every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    if not any(layer.experts for layer in layers):
        return layers
    dense, step = _dense_layers(fields)
    return [replace(layer, experts=i not in dense and (i + 1) % step == 0) for i, layer in enumerate(layers)]


def only_sparse_layers(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Raise FormatError for layers without experts."""
    if any(layer.experts for layer in layers):
        dense, step = _dense_layers(fields)
        if dense or step != 1:
            expected = "no dense layer (transformers has no dense layer in this family)"
            raise fields.error("Unsupported", "mlp_only_layers", expected, dense)
    return layers


def _dense_layers(fields: Fields) -> tuple[list[int], int]:
    return read_integers(fields, "mlp_only_layers"), fields.integer("decoder_sparse_step", default=1, low=1)


def delta_net_layers(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Set delta nets for all layers except every `full_attention_interval`-th, unless the file lists them."""
    fields.refuse("use_sliding_window", unless=(False,), default=False)
    interval = fields.integer("full_attention_interval", default=4, low=1)
    default_kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(len(layers))]
    kinds = read_layer_list(fields, "layer_types", default_kinds, ("linear_attention", "full_attention"))
    return [
        replace(layer, mixer="delta_net" if kind == "linear_attention" else "attention")
        for layer, kind in zip(layers, kinds, strict=True)
    ]


def no_gguf_window(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Raise FormatError for a window in a GGUF file that llama.cpp does not read for this architecture."""
    window = fields.integer("attention.sliding_window", default=0)
    if 0 < window < fields.integer("context_length"):
        expected = f"no window below the context length (llama.cpp reads no window for {fields.full('')[:-1]})"
        raise fields.error("Unsupported", "attention.sliding_window", expected, window)
    return layers


def rope_settings(fields: Fields) -> Fields | None:
    """Return the RoPE settings from rope_parameters or the older rope_scaling, else the family's default, or None."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new is not None and old is not None and new.values != old.values:
        # transformers would use the old key and the default theta, which the author cannot have meant.
        raise fields.error("Inconsistent", "rope_scaling", "the values of rope_parameters", old.values)
    rope = new or old
    if rope is None:
        default = fields.defaults.get("rope_parameters")
        return Fields(default, fields.path) if isinstance(default, Mapping) else None
    rope.refuse_null(*_NEVER_NULL_IN_ROPE)
    for key, setting in rope.values.items():
        if isinstance(setting, Mapping):
            raise rope.error("Unsupported", key, "one set of RoPE parameters for all layers", setting)
    return rope


def bias_key(keys: Mapping[str, str], fact: str) -> str:
    """Return the key of config.json for a fact, `qkv_bias` or `o_bias`; `keys` are the family's exceptions."""
    return keys.get(fact, "attention_bias")


def read_integers(fields: Fields, key: str) -> list[int]:
    """Return a list of integers; an absent or null key gives an empty list."""
    numbers = fields.values.get(key)
    if numbers is None:
        return []
    if not isinstance(numbers, list) or not all(type(number) in (int, bool) for number in numbers):
        raise fields.error("Malformed", key, "a list of integers", numbers)
    return [int(number) for number in numbers]


def read_layer_list(fields: Fields, key: str, default_kinds: list[str], names: tuple[str, ...] | None) -> list[str]:
    """Return the file's list, one of `names` for each layer (None: not checked), or `default_kinds` without a list."""
    if not fields.has(key):
        return default_kinds
    kinds = fields.values[key]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise fields.error("Malformed", key, "a list of names", kinds)
    if names is None:
        return kinds
    if len(kinds) != len(default_kinds):
        expected = f"{len(default_kinds)} entries, one for each layer"
        raise fields.error("Inconsistent", key, expected, f"{len(kinds)} entries")
    if not {*kinds} <= {*names}:
        raise fields.error("Unsupported", key, " or ".join(names), next(kind for kind in kinds if kind not in names))
    return kinds
