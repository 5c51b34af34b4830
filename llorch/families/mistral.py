"""Mistral: a window in all layers, unless sliding_window is null. An absent key is refused."""

from collections.abc import Mapping

from llorch.families.config import ModelConfig
from llorch.families.family import EPSILON, FREQUENCY_FACTORS, Family, LlamaCppQuirks, TensorLayout, TransformersQuirks
from llorch.families.layers import Layer
from llorch.families.rules import with_windows
from llorch.runtime.fields import Fields


def read_layers(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Put the window on all layers."""
    return with_windows(fields, layers, [not fields.is_null("sliding_window")] * len(layers))


def config_settings(config: ModelConfig) -> Mapping[str, object]:
    """Say that there is no window."""
    return {"sliding_window": None}


FAMILY = Family(
    gguf="llama",
    classes="Mistral",
    qkv_bias=False,
    o_bias=False,
    read_layers=read_layers,
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    layout=TensorLayout(interleaved_rope="gguf"),
    llamacpp=LlamaCppQuirks(reads=frozenset({EPSILON, FREQUENCY_FACTORS})),
    transformers=TransformersQuirks(config_settings=config_settings),
)
