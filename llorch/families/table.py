"""Table of families by the model type of their text parts."""

from llorch.families import (
    llama,
    llama4,
    ministral3,
    mistral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    qwen_vl,
    seed_oss,
    smollm3,
)
from llorch.families.family import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_moe": qwen3_5.WITH_EXPERTS,
    "smollm3": smollm3.FAMILY,
    "seed_oss": seed_oss.FAMILY,
    "ministral3": ministral3.FAMILY,
    "llama4": llama4.FAMILY,
    "qwen2_5_vl": qwen_vl.QWEN2_5_VL,
    "qwen3_vl": qwen_vl.QWEN3_VL,
    "qwen3_vl_moe": qwen_vl.QWEN3_VL_MOE,
}
BY_MODEL_TYPE = {name: name for name, family in FAMILIES.items() if not family.multimodal_type} | {
    f"{family.multimodal_type}_text": name for name, family in FAMILIES.items() if family.multimodal_type
}
# Model type of a multimodal model -> family of its text part.
BY_WHOLE = {family.multimodal_type: name for name, family in FAMILIES.items() if family.multimodal_type}
BY_GGUF = {family.gguf: name for name, family in reversed(FAMILIES.items())}  # the first of two that share a name
