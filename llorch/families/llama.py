"""Llama 1 to 3."""

from llorch.families.family import (
    FREQUENCY_FACTORS,
    NULLABLE,
    OUTPUT_BIAS,
    Family,
    LlamaCppQuirks,
    TensorLayout,
    TransformersQuirks,
)

FAMILY = Family(
    gguf="llama",
    classes="Llama",
    defaults={"max_position_embeddings": 2048},
    layout=TensorLayout(interleaved_rope="gguf"),
    llamacpp=LlamaCppQuirks(reads=frozenset({FREQUENCY_FACTORS, OUTPUT_BIAS})),
    transformers=TransformersQuirks(nullable=NULLABLE, config_settings=lambda config: {"mlp_bias": False}),
)
