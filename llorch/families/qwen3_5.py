"""Qwen3.5, dense and with experts: gated delta nets; the text part of multimodal models."""

from dataclasses import replace

from llorch.families.family import Family, LlamaCppQuirks, TensorLayout, TransformersQuirks
from llorch.families.rules import delta_net_layers, only_sparse_layers

FAMILY = Family(
    gguf="qwen35", classes="Qwen3_5", multimodal_type="qwen3_5", qk_norm=True, delta_net="separate",
    sections="interleaved", layer_rules=(delta_net_layers,),
    defaults={
        "max_position_embeddings": 32768, "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25,
    },
    layout=TensorLayout(
        names={"ffn_norm": "post_attention_norm"}, norm_weight_offset=True, has_mtp_layers=True,
        multimodal_prefixes=("model.", "model.language_model."),
    ),
)  # fmt: skip
WITH_EXPERTS = replace(
    FAMILY,
    gguf="qwen35moe",
    classes="Qwen3_5Moe",
    multimodal_type="qwen3_5_moe",
    router="softmax",
    shared_expert="gated",
    layer_rules=(only_sparse_layers, delta_net_layers),
    defaults={**FAMILY.defaults, "num_key_value_heads": 2},
    llamacpp=LlamaCppQuirks(norm_topk_prob=True),
    transformers=TransformersQuirks(pre_tokenizer="qwen35"),
)
