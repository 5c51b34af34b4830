"""Qwen3."""

from llorch.families.family import Family
from llorch.families.rules import late_windows

FAMILY = Family(
    gguf="qwen3",
    classes="Qwen3",
    qk_norm=True,
    read_layers=late_windows,
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
)
