"""Qwen3-MoE: windows in all layers, if the file asks for them."""

from llorch.families.family import Family, LlamaCppQuirks, TransformersQuirks
from llorch.families.layers import Layer
from llorch.families.rules import has_sliding_window, sparse_layers, with_windows
from llorch.runtime.fields import Fields


def windows_everywhere(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Set windows for all layers, if the file asks for windows."""
    return with_windows(fields, layers, [has_sliding_window(fields)] * len(layers))


FAMILY = Family(
    gguf="qwen3moe",
    classes="Qwen3Moe",
    qk_norm=True,
    router="softmax",
    layer_rules=(sparse_layers, windows_everywhere),
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "norm_topk_prob": False},
    llamacpp=LlamaCppQuirks(norm_topk_prob=True),
    transformers=TransformersQuirks(habits=frozenset({"old_expert_names"})),
)
