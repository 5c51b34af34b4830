"""Rules about layers that several families share: kinds of attention, windows, layers with experts.

Source: transformers `configuration_*.py`; llama.cpp `src/models/*.cpp`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from llorch.families.layers import Layer
from llorch.runtime.fields import Fields

BETA = "llama_4_scaling_beta"  # of RoPE settings: the scale of the temperature of the queries
# A null of the RoPE settings that transformers does not take for a default.
_NEVER_NULL_IN_ROPE = ("original_max_position_embeddings", "rope_theta", "rope_type", "truncate", "type")


def full_attention(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Let every layer see all earlier tokens; refuse windows."""
    fields.refuse("use_sliding_window", unless=(False,), default=False)
    return with_windows(fields, layers, [False] * len(layers))


def with_windows(fields: Fields, layers: list[Layer], windowed: list[bool], *, takes_list: bool = False) -> list[Layer]:
    """Put `sliding_window` on some layers; a file may list others if `takes_list`."""
    default_kinds = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windowed]
    known = ("full_attention", "sliding_attention") if takes_list else None
    kinds = read_layer_list(fields, "layer_types", default_kinds, known)
    if known is None and kinds != default_kinds:
        raise fields.error("Unsupported", "layer_types", f"{' '.join(sorted({*default_kinds}))} for every layer", kinds)
    if "sliding_attention" not in kinds:
        return layers
    window = below_context(fields, fields.integer("sliding_window", low=1))
    return [
        replace(layer, window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(layers, kinds, strict=True)
    ]


def late_windows(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Put windows, if the file asks for them, on the layers from `max_window_layers` on."""
    return windows_if_asked(fields, layers, lambda i, late: i >= late)


def windows_if_asked(fields: Fields, layers: list[Layer], is_windowed: Callable[[int, int], bool]) -> list[Layer]:
    """Put windows, if the file asks for them, on layers by their index and `max_window_layers`."""
    if not asks_for_window(fields):
        return with_windows(fields, layers, [False] * len(layers))
    late = fields.integer("max_window_layers", default=28)
    return with_windows(fields, layers, [is_windowed(i, late) for i in range(len(layers))], takes_list=True)


def asks_for_window(fields: Fields) -> bool:
    """Tell if a file that has to ask for windows does so."""
    return fields.boolean("use_sliding_window", default=False) and fields.has("sliding_window")


def below_context(fields: Fields, length: int) -> int | None:
    """Return the length of a window or chunk; None if it holds the whole context."""
    return length if length < fields.integer("max_position_embeddings") else None


def sparse_layers(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Give experts to every `decoder_sparse_step`-th layer, but those of `mlp_only_layers`."""
    if not any(layer.experts for layer in layers):
        return layers
    dense, step = _dense_layers(fields)
    return [replace(layer, experts=i not in dense and (i + 1) % step == 0) for i, layer in enumerate(layers)]


def only_sparse_layers(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Refuse layers without experts."""
    if any(layer.experts for layer in layers):
        dense, step = _dense_layers(fields)
        if dense or step != 1:
            expected = "no dense layer (transformers has no dense layer in this family)"
            raise fields.error("Unsupported", "mlp_only_layers", expected, dense)
    return layers


def _dense_layers(fields: Fields) -> tuple[list[int], int]:
    return read_integers(fields, "mlp_only_layers"), fields.integer("decoder_sparse_step", default=1, low=1)


def delta_net_layers(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Put delta nets in all layers but every `full_attention_interval`-th, unless the file lists them."""
    fields.refuse("use_sliding_window", unless=(False,), default=False)
    interval = fields.integer("full_attention_interval", default=4, low=1)
    default_kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(len(layers))]
    kinds = read_layer_list(fields, "layer_types", default_kinds, ("linear_attention", "full_attention"))
    return [
        replace(layer, mixer="delta_net" if kind == "linear_attention" else "attention")
        for layer, kind in zip(layers, kinds, strict=True)
    ]


def no_gguf_window(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Refuse a window of a GGUF file that llama.cpp does not read."""
    window = fields.integer("attention.sliding_window", default=0)
    if 0 < window < fields.integer("context_length"):
        expected = f"no window below the context length (llama.cpp reads no window for {fields.full('')[:-1]})"
        raise fields.error("Unsupported", "attention.sliding_window", expected, window)
    return layers


def rope_settings(fields: Fields) -> Fields | None:
    """Return the RoPE settings from their new or old key, else the family's, or None."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new is not None and old is not None and new.values != old.values:
        # transformers takes the old key then, and with it the default theta: never what the author meant.
        raise fields.error("Inconsistent", "rope_scaling", "the values of rope_parameters", old.values)
    rope = new or old
    if rope is None:
        usual = fields.defaults.get("rope_parameters")
        return Fields(usual, fields.path) if isinstance(usual, Mapping) else None
    rope.refuse_null(*_NEVER_NULL_IN_ROPE)
    for key, value in rope.values.items():
        if isinstance(value, Mapping):
            raise rope.error("Unsupported", key, "one set of RoPE parameters for all layers", value)
    return rope


def bias_key(keys: Mapping[str, str], fact: str) -> str:
    """Return the key of config.json that decides on a fact, `qkv_bias` or `o_bias`."""
    return keys.get(fact, "attention_bias")


def read_integers(fields: Fields, key: str) -> list[int]:
    """Return a list of integers; an absent or null key gives an empty list."""
    listed = fields.values.get(key)
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(type(number) in (int, bool) for number in listed):
        raise fields.error("Malformed", key, "a list of integers", listed)
    return [int(number) for number in listed]


def read_layer_list(fields: Fields, key: str, default_kinds: list[str], known: tuple[str, ...] | None) -> list[str]:
    """Return the list in the file, with one known name for each layer.

    Without a list in the file, return `default_kinds`, as transformers makes it. `known` is None if the names are not
    checked here.
    """
    if not fields.has(key):
        return default_kinds
    listed = fields.values[key]
    if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
        raise fields.error("Malformed", key, "a list of names", listed)
    if known is None:
        return listed
    if len(listed) != len(default_kinds):
        expected = f"{len(default_kinds)} entries, one for each layer"
        raise fields.error("Inconsistent", key, expected, f"{len(listed)} entries")
    if not {*listed} <= {*known}:
        raise fields.error("Unsupported", key, " or ".join(known), next(kind for kind in listed if kind not in known))
    return listed
