"""Qwen2 and Qwen2.5."""

from llorch.families.family import Family, LlamaCppQuirks, TransformersQuirks
from llorch.families.rules import late_windows

FAMILY = Family(
    gguf="qwen2",
    classes="Qwen2",
    qkv_bias=True,
    o_bias=False,
    layer_rules=(late_windows,),
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
    llamacpp=LlamaCppQuirks(same_width=True),
    transformers=TransformersQuirks(pre_tokenizer="qwen2"),
)
