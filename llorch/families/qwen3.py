"""Qwen3."""

from llorch.families.family import Family
from llorch.families.rules import late_windows

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}
FAMILY = Family(gguf="qwen3", classes="Qwen3", qk_norm=True, layer_rules=(late_windows,), defaults=DEFAULTS)
