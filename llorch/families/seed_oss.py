"""Seed-OSS: Llama with a bias of q, k and v, and a separate key for the bias of o_proj."""

from llorch.families.family import NULLABLE, Family, TensorLayout, TransformersQuirks

FAMILY = Family(
    gguf="seed_oss",
    classes="SeedOss",
    defaults={"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    layout=TensorLayout(names={"ffn_norm": "post_attention_norm"}),
    transformers=TransformersQuirks(keys={"o_bias": "attention_out_bias"}, nullable=NULLABLE),
)
