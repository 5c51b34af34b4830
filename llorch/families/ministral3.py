"""Ministral 3: YaRN, and an attention temperature in all layers."""

from llorch.families.family import TEMPERATURE_SCALE, YARN, Family, LlamaCppQuirks, TensorLayout, TransformersQuirks
from llorch.families.layers import Layer, Temperature
from llorch.families.rules import BETA, rope_settings, with_windows
from llorch.runtime.fields import Fields


def window_everywhere(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Set the window, if there is one, for all layers."""
    return with_windows(fields, layers, [fields.has("sliding_window")] * len(layers))


def read_temperature(fields: Fields) -> Temperature | None:
    """Read `llama_4_scaling_beta`, the scale of the temperature; 0: no temperature."""
    rope = rope_settings(fields)
    if rope is None or not (beta := rope.number(BETA, low=0.0)):
        return None
    context = fields.integer("max_position_embeddings")
    floor = rope.integer("original_max_position_embeddings", default=context, low=1)
    return Temperature(scale=beta, floor=floor, offset=0)


def read_gguf_temperature(fields: Fields) -> Temperature | None:
    """Read the scale of the temperature; 0: no temperature."""
    scale = fields.number(TEMPERATURE_SCALE, default=0.0, low=0.0)
    if not scale:
        return None
    floor = fields.integer("rope.scaling.original_context_length", default=fields.integer("context_length"), low=1)
    return Temperature(scale=scale, floor=floor, offset=0)


FAMILY = Family(
    gguf="mistral3", classes="Ministral3", qkv_bias=False, o_bias=False, layer_rules=(window_everywhere,),
    read_temperature=read_temperature, read_gguf_temperature=read_gguf_temperature,
    defaults={
        "max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "mscale_all_dim": 1.0, "mscale": 1.0, BETA: 0.1,
        },
    },
    layout=TensorLayout(interleaved_rope="gguf"),
    llamacpp=LlamaCppQuirks(reads=frozenset({TEMPERATURE_SCALE, *YARN})),
    transformers=TransformersQuirks(  # None, because transformers has defaults for both
        engine_settings=lambda config: {"sliding_window": None, "pad_token_id": None}
    ),
)  # fmt: skip
