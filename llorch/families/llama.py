"""Llama 1 to 3."""

from collections.abc import Mapping

from llorch.families.config import ModelConfig
from llorch.families.family import (
    EPSILON,
    FREQUENCY_FACTORS,
    NULLABLE,
    OUTPUT_BIAS,
    Family,
    LlamaCppQuirks,
    TensorLayout,
    TransformersQuirks,
)


def config_settings(config: ModelConfig) -> Mapping[str, object]:
    """Say that the feed-forward part has no bias."""
    return {"mlp_bias": False}


FAMILY = Family(
    gguf="llama",
    classes="Llama",
    defaults={"max_position_embeddings": 2048},
    layout=TensorLayout(interleaved_rope="gguf"),
    llamacpp=LlamaCppQuirks(reads=frozenset({EPSILON, FREQUENCY_FACTORS, OUTPUT_BIAS})),
    transformers=TransformersQuirks(nullable=NULLABLE, config_settings=config_settings),
)
