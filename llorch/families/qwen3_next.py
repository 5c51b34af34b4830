"""Qwen3-Next: gated delta nets and experts. llama.cpp and transformers have two fused matrices for a delta net."""

from llorch.families.family import Family, LlamaCppQuirks, TensorLayout, TransformersQuirks
from llorch.families.rules import delta_net_layers, sparse_layers

FAMILY = Family(
    gguf="qwen3next", classes="Qwen3Next", qk_norm=True, delta_net="fused", router="softmax", shared_expert="gated",
    layer_rules=(sparse_layers, delta_net_layers),
    defaults={
        "max_position_embeddings": 32768, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
    },
    layout=TensorLayout(names={"ffn_norm": "post_attention_norm"}, norm_weight_offset=True, has_mtp_layers=True),
    llamacpp=LlamaCppQuirks(norm_topk_prob=True),
    transformers=TransformersQuirks(habits=frozenset({"old_expert_names"})),
)  # fmt: skip
