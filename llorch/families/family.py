"""The families as data: what the blocks of each contain, and what its files leave unsaid.

Source: transformers `configuration_*.py` of each; llama.cpp `src/models/*.cpp`, which fixes what a GGUF file lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llorch.families.layers import Temperature

FamilyName = Literal[
    "llama", "qwen2", "qwen3", "mistral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "smollm3",
    "ministral3", "llama4", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the blocks of a family contain; None means that the file decides."""

    gguf: str  # architecture in GGUF files
    classes: str  # stem of its classes in transformers
    multimodal_type: str = ""  # model type of the whole that it is the text part of
    multimodal_prefixes: tuple[str, str] = (
        "",
        "",
    )  # what paths of modules begin with in the text part alone, and in the whole
    written_as: FamilyName | None = (
        None  # family with the same text part; transformers has no class for this part alone
    )
    # Biases and norms:
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    bias_key: tuple[str, bool] = ("attention_bias", False)  # of config.json, where it decides on qkv_bias; its default
    qk_norm: bool = False
    head_norm: bool = False  # heads are divided by their root mean square after RoPE, unless use_qk_norm is false
    norm_weight_offset: bool = False  # Hugging Face stores gains less one, but that of the delta net
    # Where config.json names none, as in transformers:
    head_dim: int | None = None  # None is hidden_size / n_heads
    null_head_dim: bool = False  # a null is such a case, too
    n_kv_heads: int | None = None  # None is n_heads
    context: int = 32768
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, object] | None = None
    tied: bool = False
    # Attention, layer by layer:
    hybrid: bool = False  # delta nets between layers of gated attention
    fused_projections: bool = False  # a delta net has two matrices: queries, keys, values and gates; b and a
    window: Literal["", "asked", "given", "required", "late", "every_other", "unrotated"] = ""  # see `huggingface`
    max_window_layers: int = 28  # where config.json names none
    chunk: int | None = None  # layers with RoPE see a chunk of so many tokens, unless config.json names another number
    rope_interval: int = 0  # every n-th layer has no RoPE, unless config.json lists layers; 0: all have RoPE
    rotary_share: float | None = None  # part of a head that RoPE turns where the file names none; None: always all
    interleaved_rope_hf: bool = False  # RoPE turns neighbours in Hugging Face folders, too
    sections: Literal["", "halves", "interleaved"] = ""  # RoPE of three axes, all equal for text
    tempered: Literal["", "beta", "unrotated"] = ""  # all layers, by llama_4_scaling_beta; or those without RoPE
    temperature: Temperature | None = None  # of those without RoPE, where config.json names none
    # Experts:
    experts: bool = False  # a router and some experts
    sparse: Literal["", "step", "listed"] = ""  # all layers have them; those of decoder_sparse_step; of moe_layers
    shared: bool = False  # beside an expert that every token has
    shared_gate: bool = False  # which is multiplied by a sigmoid
    scaled_inputs: bool = False  # a sigmoid of the chosen logits multiplies what the experts are given
    n_experts_per_token: int | None = None  # where config.json names none; None: it has to
    norm_topk_prob_default: bool | None = False  # where config.json names none; None: always true, no such key
    aux_loss: bool = True  # transformers can train the router to spread tokens over experts
    # Names:
    ffn_norm: str = "ffn_norm"  # of GGUF files
    mlp: str = "mlp"  # of Hugging Face folders
    router: str = "gate"  # of Hugging Face folders
    keys: Mapping[str, str] = field(default_factory=dict)  # of config.json: the usual name to the one of this family
    written: Mapping[str, object] = field(default_factory=dict)  # what llorch writes into config.json, too
    told: Mapping[str, object] = field(default_factory=dict)  # what transformers is told, too, to run a GGUF file
    # Order of numbers in files:
    interleaved_rope_gguf: bool = False  # GGUF files hold the rows of q and k in the pairs that llama.cpp turns
    transposed_experts: Literal["", "files", "modules"] = ""  # one tensor (experts, in, out); in the modules, too
    has_mtp_layers: bool = False  # files may have further layers, which predict further tokens
    words: str = ""  # pre-tokenizer of transformers, whatever tokenizer.json says
    # llama.cpp computes or expects:
    norm_topk_prob: bool | None = None  # None: no experts, or it does not apply
    factors: bool = False  # it reads rope_freqs.weight
    reads_o_bias: bool = False  # it reads attn_output.bias
    reads_eps: bool = True  # it reads the epsilon of the norms
    reads_yarn: bool = False  # it reads the betas of YaRN, and its gain as a multiplier of a logarithm
    same_width: bool = False  # it expects that all heads together are as wide as the model
    untied: bool = False  # it expects an output matrix
    no_head_norm: int = 0  # number of experts for which it leaves the norm of heads out
    divided_gate: bool = False  # it computes the sigmoid of the shared gate as silu(x) / x
    merged_out: bool = False  # its sum of shared and chosen experts has a name of its own
    named_norm: bool = True  # its norm before the feed-forward part has the name ffn_norm
    # transformers and PEFT do:
    counts_by_cache: bool = False  # transformers counts positions by the length of its cache
    old_expert_names: bool = False  # PEFT takes names of modules for parameters of experts


_FIXED: dict[str, Any] = {"qkv_bias": False, "o_bias": False}
_QWEN2: dict[str, Any] = {
    "qkv_bias": True, "o_bias": False, "window": "late", "same_width": True,
}  # fmt: skip
_QWEN3: dict[str, Any] = {"qk_norm": True, "n_kv_heads": 32, "head_dim": 128}
_HYBRID: dict[str, Any] = {
    "qk_norm": True, "head_dim": 256, "hybrid": True, "rotary_share": 0.25, "norm_weight_offset": True,
    "has_mtp_layers": True, "ffn_norm": "post_attention_norm",
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"experts": True, "shared": True, "shared_gate": True, "norm_topk_prob": True}
_LLAMA: dict[str, Any] = {"interleaved_rope_gguf": True, "factors": True}
_BESIDE_EYES: dict[str, Any] = {"multimodal_prefixes": ("model.", "model.language_model.")}
_YARN_OF_MINISTRAL = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

MOST_LAYERS = 512

FAMILIES: dict[str, Family] = {
    "llama": Family(
        gguf="llama", classes="Llama", context=2048, null_head_dim=True, written={"mlp_bias": False},
        reads_o_bias=True, **_LLAMA,
    ),
    "qwen2": Family(gguf="qwen2", classes="Qwen2", n_kv_heads=32, words="qwen2", **_QWEN2),
    "qwen3": Family(gguf="qwen3", classes="Qwen3", window="late", **_QWEN3),
    "mistral": Family(
        gguf="llama", classes="Mistral", n_kv_heads=8, context=131072, window="required",
        written={"sliding_window": None}, **_LLAMA, **_FIXED,
    ),
    "qwen2_moe": Family(
        gguf="qwen2moe", classes="Qwen2Moe", o_bias=False, bias_key=("qkv_bias", True), n_kv_heads=16,
        window="every_other", experts=True, sparse="step", shared=True, shared_gate=True, norm_topk_prob=False,
        same_width=True, untied=True, divided_gate=True,
    ),
    "qwen3_moe": Family(
        gguf="qwen3moe", classes="Qwen3Moe", n_kv_heads=4, window="asked", experts=True, sparse="step",
        norm_topk_prob=True, qk_norm=True, old_expert_names=True,
    ),
    "qwen3_next": Family(
        gguf="qwen3next", classes="Qwen3Next", n_kv_heads=2, fused_projections=True, sparse="step",
        norm_topk_prob_default=True, old_expert_names=True, **_HYBRID, **_EXPERTS,
    ),
    "qwen3_5": Family(
        gguf="qwen35", classes="Qwen3_5", n_kv_heads=4, multimodal_type="qwen3_5", sections="interleaved",
        **_BESIDE_EYES, **_HYBRID,
    ),
    "qwen3_5_moe": Family(
        gguf="qwen35moe", classes="Qwen3_5Moe", n_kv_heads=2, multimodal_type="qwen3_5_moe", sections="interleaved",
        norm_topk_prob_default=None, words="qwen35", **_BESIDE_EYES, **_HYBRID, **_EXPERTS,
    ),
    "smollm3": Family(
        gguf="smollm3", classes="SmolLM3", n_kv_heads=4, rope_theta=2e6, tied=True, window="unrotated",
        rope_interval=4, interleaved_rope_gguf=True, written={"mlp_bias": False, "pad_token_id": None},
        told={"pad_token_id": None},
    ),
    "ministral3": Family(
        gguf="mistral3", classes="Ministral3", n_kv_heads=8, head_dim=128, context=262144, window="given",
        rope_parameters=_YARN_OF_MINISTRAL, tempered="beta", interleaved_rope_gguf=True, reads_yarn=True,
        told={"sliding_window": None, "pad_token_id": None}, **_FIXED,
    ),
    "llama4": Family(
        gguf="llama4", classes="Llama4", n_kv_heads=8, head_dim=128, context=131072, rope_theta=5e5, chunk=8192,
        rope_interval=4, head_norm=True, no_head_norm=128, tempered="unrotated",
        temperature=Temperature(scale=0.1, floor=8192, offset=1), experts=True, sparse="listed", shared=True,
        scaled_inputs=True, n_experts_per_token=1, aux_loss=False, transposed_experts="modules",
        interleaved_rope_hf=True, multimodal_type="llama4", multimodal_prefixes=("", "language_model."),
        mlp="feed_forward", router="router", factors=True,
        keys={
            "intermediate_size": "intermediate_size_mlp", "moe_intermediate_size": "intermediate_size",
            "num_experts": "num_local_experts",
        },
        merged_out=True, named_norm=False, counts_by_cache=True,
    ),
    "qwen2_5_vl": Family(
        gguf="qwen2vl", classes="Qwen2_5_VL", n_kv_heads=8, rope_theta=1e6, max_window_layers=80, sections="halves",
        multimodal_type="qwen2_5_vl", written_as="qwen2", reads_eps=False, **_BESIDE_EYES, **_QWEN2,
    ),
    "qwen3_vl": Family(
        gguf="qwen3vl", classes="Qwen3VL", context=128000, rope_theta=5e5, sections="interleaved",
        multimodal_type="qwen3_vl", written_as="qwen3", **_BESIDE_EYES, **_QWEN3,
    ),
    "qwen3_vl_moe": Family(
        gguf="qwen3vlmoe", classes="Qwen3VLMoe", n_kv_heads=16, context=128000, rope_theta=5e5, qk_norm=True,
        experts=True, sparse="step", norm_topk_prob_default=None, norm_topk_prob=True, transposed_experts="files",
        sections="interleaved", multimodal_type="qwen3_vl_moe", written_as="qwen3_moe", **_BESIDE_EYES,
    ),
}  # fmt: skip
BY_MODEL_TYPE = {name: name for name, family in FAMILIES.items() if not family.multimodal_type} | {
    f"{family.multimodal_type}_text": name for name, family in FAMILIES.items() if family.multimodal_type
}
BY_WHOLE = {
    family.multimodal_type: name for name, family in FAMILIES.items() if family.multimodal_type
}  # models that see, too
BY_GGUF = {family.gguf: name for name, family in reversed(FAMILIES.items())}  # the first of two that share a name
