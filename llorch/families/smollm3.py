"""SmolLM3: every fourth layer has no RoPE, and windows, if the file asks for them."""

from collections.abc import Mapping

from llorch.families.config import ModelConfig
from llorch.families.family import Family, TensorLayout, TransformersQuirks
from llorch.families.layers import Layer
from llorch.families.rules import asks_for_window, with_windows
from llorch.runtime.fields import Fields


def windows_without_rope(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Put windows on the layers without RoPE."""
    asked = asks_for_window(fields)
    return with_windows(fields, layers, [asked and not layer.rope for layer in layers], takes_list=asked)


def config_settings(config: ModelConfig) -> Mapping[str, object]:
    """Say that the feed-forward part has no bias, beside `engine_settings`."""
    return {"mlp_bias": False, **engine_settings(config)}


def engine_settings(config: ModelConfig) -> Mapping[str, object]:
    """List the layers with RoPE; transformers has a padding token by default."""
    return {"pad_token_id": None, "no_rope_layers": [int(config.layer(i).rope) for i in range(config.n_layers)]}


FAMILY = Family(
    gguf="smollm3", classes="SmolLM3", rope_interval=4, layer_rules=(windows_without_rope,),
    defaults={
        "max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True,
    },
    layout=TensorLayout(interleaved_rope="gguf"),
    transformers=TransformersQuirks(config_settings=config_settings, engine_settings=engine_settings),
)  # fmt: skip
