"""Qwen1.5-MoE and Qwen2-MoE: windows in every second layer of the first layers."""

from collections.abc import Iterator

from llorch.families.config import ModelConfig
from llorch.families.family import Family, LlamaCppQuirks, TransformersQuirks
from llorch.families.layers import Layer
from llorch.families.rules import requested_windows, sparse_layers
from llorch.runtime.fields import Fields


def even_windows(fields: Fields, layers: list[Layer]) -> list[Layer]:
    """Set windows for layers 0, 2, 4 ... below `max_window_layers`."""
    return requested_windows(fields, layers, lambda layer, limit: layer % 2 == 0 and layer < limit)


def limits(config: ModelConfig, n_tokens: int) -> Iterator[str]:
    """Yield a reason if the embeddings are tied."""
    if config.tie_word_embeddings:
        yield f"llama.cpp expects an output matrix for {config.family}, this configuration has tie_word_embeddings"


FAMILY = Family(
    gguf="qwen2moe", classes="Qwen2Moe", o_bias=False, router="softmax", shared_expert="gated",
    layer_rules=(sparse_layers, even_windows),
    defaults={
        "max_position_embeddings": 32768, "num_key_value_heads": 16, "qkv_bias": True, "norm_topk_prob": False,
    },
    llamacpp=LlamaCppQuirks(
        nodes={"shared_gate": ("DIV", "ffn_shexp_gate")},  # llama.cpp computes the sigmoid as silu(x) / x
        norm_topk_prob=False, same_width=True, limits=limits,
    ),
    transformers=TransformersQuirks(keys={"qkv_bias": "qkv_bias"}),
)  # fmt: skip
