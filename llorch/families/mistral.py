"""Mistral: a window in all layers, unless sliding_window is null. The key is required."""

from llorch.families.family import FREQUENCY_FACTORS, Family, LlamaCppQuirks, TensorLayout, TransformersQuirks
from llorch.families.layers import Layer
from llorch.families.rules import with_windows
from llorch.runtime.fields import Fields


def window_everywhere(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Set the window for all layers."""
    return with_windows(fields, layers, [not fields.is_null("sliding_window")] * len(layers))


FAMILY = Family(
    gguf="llama",
    classes="Mistral",
    qkv_bias=False,
    o_bias=False,
    layer_rules=(window_everywhere,),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    layout=TensorLayout(interleaved_rope="gguf"),
    llamacpp=LlamaCppQuirks(reads=frozenset({FREQUENCY_FACTORS})),
    transformers=TransformersQuirks(config_settings=lambda config: {"sliding_window": None}),
)
