"""Text parts of Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: Qwen2, Qwen3 and Qwen3-MoE with RoPE on three axes."""

from dataclasses import replace

from llorch.families import qwen2, qwen3, qwen3_moe
from llorch.families.family import LlamaCppQuirks, TensorLayout, TransformersQuirks
from llorch.families.rules import full_attention, sparse_layers

_PREFIXES = ("model.", "model.language_model.")  # module paths in the text model, in the multimodal model
QWEN2_5_VL = replace(
    qwen2.FAMILY,
    gguf="qwen2vl", classes="Qwen2_5_VL", multimodal_type="qwen2_5_vl", written_as="qwen2", sections="halves",
    defaults={
        "max_position_embeddings": 32768, "num_key_value_heads": 8, "rope_theta": 1e6, "max_window_layers": 80,
    },
    layout=TensorLayout(multimodal_prefixes=_PREFIXES),
    llamacpp=LlamaCppQuirks(reads_epsilon=False, same_width=True),
    transformers=TransformersQuirks(),  # not those of Qwen2
)  # fmt: skip
QWEN3_VL = replace(
    qwen3.FAMILY,
    gguf="qwen3vl",
    classes="Qwen3VL",
    multimodal_type="qwen3_vl",
    written_as="qwen3",
    sections="interleaved",
    layer_rules=(full_attention,),
    defaults={"max_position_embeddings": 128000, "num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e5},
    layout=TensorLayout(multimodal_prefixes=_PREFIXES),
)
QWEN3_VL_MOE = replace(
    qwen3_moe.FAMILY,
    gguf="qwen3vlmoe",
    classes="Qwen3VLMoe",
    multimodal_type="qwen3_vl_moe",
    written_as="qwen3_moe",
    sections="interleaved",
    layer_rules=(sparse_layers, full_attention),
    defaults={"max_position_embeddings": 128000, "num_key_value_heads": 16, "rope_theta": 5e5},
    layout=TensorLayout(transposed_experts="files", multimodal_prefixes=_PREFIXES),
    transformers=TransformersQuirks(),
)
