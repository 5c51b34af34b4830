"""The families as data: what the blocks of each contain, and what its files leave unsaid.

Source: transformers `configuration_*.py` of each; llama.cpp `src/models/*.cpp`, which fixes what a GGUF file lacks.
"""

from dataclasses import dataclass
from typing import Any, Literal

FamilyName = Literal[
    "llama", "qwen2", "qwen3", "mistral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "smollm3",
    "ministral3", "llama4", "qwen2_5_vl", "qwen3_vl",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the blocks of a family contain; None means that the file decides."""

    gguf: str  # architecture in GGUF files
    classes: str  # stem of its classes in transformers
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    # Where config.json names none, as in transformers:
    head_dim: int | None = None  # None is hidden_size / n_heads
    n_kv_heads: int | None = None  # None is n_heads
    context: int = 32768
    rope_theta: float = 10000.0
    tied: bool = False
    window: Literal["", "asked", "given", "late", "every_other"] = ""  # which layers have one, see `huggingface`
    # What is otherwise than in the dense ones:
    experts: bool = False  # a router and some experts
    shared: bool = False  # beside an expert that every token has
    hybrid: bool = False  # delta nets between layers of gated attention
    zero_centred: bool = False  # Hugging Face stores gains less one, but that of the delta net
    norm_topk_prob: bool | None = None  # what llama.cpp computes; None: no experts, or it does not apply
    paired_rows: bool = False  # GGUF files hold the rows of q and k in the pairs that llama.cpp turns
    adjacent_pairs: bool = False  # so do Hugging Face folders
    sections: Literal["", "halves", "interleaved"] = ""  # RoPE of three axes, all equal for text
    text_of: str = ""  # model type of the whole that it is the text part of
    in_whole: tuple[str, str] = ("", "")  # what paths of modules begin with in the text part alone, and in the whole
    ffn_norm: str = "ffn_norm"  # of GGUF files
    mlp: str = "mlp"  # of Hugging Face folders
    factors: bool = False  # llama.cpp reads rope_freqs.weight


_FIXED: dict[str, Any] = {"qkv_bias": False, "o_bias": False}
_QWEN2: dict[str, Any] = {"qkv_bias": True, "o_bias": False}
_QWEN3: dict[str, Any] = {"qk_norm": True, "n_kv_heads": 32, "head_dim": 128}
_HYBRID: dict[str, Any] = {
    "qk_norm": True, "head_dim": 256, "hybrid": True, "zero_centred": True, "ffn_norm": "post_attention_norm",
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"experts": True, "shared": True, "norm_topk_prob": True}
_LLAMA: dict[str, Any] = {"paired_rows": True, "factors": True}
_BESIDE_EYES: dict[str, Any] = {"in_whole": ("model.", "model.language_model.")}

MOST_LAYERS = 512

FAMILIES: dict[str, Family] = {
    "llama": Family(gguf="llama", classes="Llama", context=2048, **_LLAMA),
    "qwen2": Family(gguf="qwen2", classes="Qwen2", n_kv_heads=32, window="late", **_QWEN2),
    "qwen3": Family(gguf="qwen3", classes="Qwen3", window="late", **_QWEN3),
    "mistral": Family(
        gguf="llama", classes="Mistral", n_kv_heads=8, context=131072, window="given", **_LLAMA, **_FIXED
    ),
    "qwen2_moe": Family(
        gguf="qwen2moe", classes="Qwen2Moe", o_bias=False, n_kv_heads=16, window="every_other", experts=True,
        shared=True, norm_topk_prob=False,
    ),
    "qwen3_moe": Family(
        gguf="qwen3moe", classes="Qwen3Moe", n_kv_heads=4, window="asked", experts=True, norm_topk_prob=True,
        qk_norm=True,
    ),
    "qwen3_next": Family(gguf="qwen3next", classes="Qwen3Next", n_kv_heads=2, **_HYBRID, **_EXPERTS),
    "qwen3_5": Family(
        gguf="qwen35", classes="Qwen3_5", n_kv_heads=4, text_of="qwen3_5", sections="interleaved", **_BESIDE_EYES,
        **_HYBRID,
    ),
    "qwen3_5_moe": Family(
        gguf="qwen35moe", classes="Qwen3_5Moe", n_kv_heads=2, text_of="qwen3_5_moe", sections="interleaved",
        **_BESIDE_EYES, **_HYBRID, **_EXPERTS,
    ),
    "smollm3": Family(
        gguf="smollm3", classes="SmolLM3", n_kv_heads=4, rope_theta=2e6, tied=True, window="asked", paired_rows=True
    ),
    "ministral3": Family(
        gguf="mistral3", classes="Ministral3", n_kv_heads=8, head_dim=128, context=262144, window="given",
        paired_rows=True, **_FIXED,
    ),
    "llama4": Family(
        gguf="llama4", classes="Llama4", n_kv_heads=8, head_dim=128, context=131072, rope_theta=5e5, experts=True,
        shared=True, adjacent_pairs=True, text_of="llama4", in_whole=("", "language_model."), mlp="feed_forward",
        factors=True,
    ),
    "qwen2_5_vl": Family(
        gguf="qwen2vl", classes="Qwen2_5_VL", n_kv_heads=8, rope_theta=1e6, window="late", sections="halves",
        text_of="qwen2_5_vl", **_BESIDE_EYES, **_QWEN2,
    ),
    "qwen3_vl": Family(
        gguf="qwen3vl", classes="Qwen3VL", context=128000, rope_theta=5e5, sections="interleaved", text_of="qwen3_vl",
        **_BESIDE_EYES, **_QWEN3,
    ),
}  # fmt: skip
BY_MODEL_TYPE = {name: name for name, family in FAMILIES.items() if not family.text_of} | {
    f"{family.text_of}_text": name for name, family in FAMILIES.items() if family.text_of
}
BY_WHOLE = {family.text_of: name for name, family in FAMILIES.items() if family.text_of}  # models that see, too
BY_GGUF = {family.gguf: name for name, family in FAMILIES.items() if name != "mistral"}  # which is written as llama
