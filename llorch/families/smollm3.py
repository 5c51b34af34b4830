"""SmolLM3: every fourth layer has no RoPE, but a window if the file asks for windows."""

from collections.abc import Mapping

from llorch.families.config import ModelConfig
from llorch.families.family import Family, TensorLayout, TransformersQuirks
from llorch.families.layers import Layer
from llorch.families.rules import has_sliding_window, with_windows
from llorch.runtime.fields import Fields


def windows_without_rope(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Set windows for the layers without RoPE, if the file asks for windows."""
    has_windows = has_sliding_window(fields)
    return with_windows(fields, layers, [has_windows and not layer.rope for layer in layers], takes_list=has_windows)


def config_settings(config: ModelConfig) -> Mapping[str, object]:
    """Return `engine_settings`, and the setting that the feed-forward block has no bias."""
    return {"mlp_bias": False, **engine_settings(config)}


def engine_settings(config: ModelConfig) -> Mapping[str, object]:
    """Return the list of layers with RoPE, and no padding token, which transformers has by default."""
    return {"pad_token_id": None, "no_rope_layers": [int(config.layer(layer).rope) for layer in range(config.n_layers)]}


FAMILY = Family(
    gguf="smollm3", classes="SmolLM3", rope_interval=4, layer_rules=(windows_without_rope,),
    defaults={
        "max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True,
    },
    layout=TensorLayout(interleaved_rope="gguf"),
    transformers=TransformersQuirks(config_settings=config_settings, engine_settings=engine_settings),
)  # fmt: skip
