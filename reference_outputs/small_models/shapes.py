"""Recipes of the small models: family, dimensions, vocabulary and length of training.

All dimensions of a model differ from each other, so that a transposed or swapped axis is a shape error. One pair
cannot: llama.cpp wants the q_width of a qwen2 file equal to its hidden size.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings to make one model.

    Attributes:
        family: As llorch names it.
        vocabulary: Kind of the vocabulary, see `train_vocabulary`.
        config: Arguments of the transformers config.
        seed: Seed of weights, text and order.
        steps: Optimiser steps.
        windows: Tokens in a window, step by step, over and over.
        batch: Tokens in a batch, about.
        learning_rate: Peak rate of AdamW.
        embedding_rate: Factor on it for the embeddings; below 1 keeps them small.
        muon_rate: Peak rate of Muon, which then takes the matrices; None leaves all to AdamW.
        initial_std: Spread of the starting weights.
        quiet_start: Begin with output projections of zero: the text is learned sooner.
        mixed: Multiply matrices in bfloat16 while training; the weights are float32 all the same.
        threads: Torch threads.
    """

    family: str
    vocabulary: str
    config: dict[str, Any] = field(repr=False)
    seed: int
    steps: int = 600
    windows: tuple[int, ...] = (128,)
    batch: int = 1024
    learning_rate: float = 4e-3
    embedding_rate: float = 0.1
    muon_rate: float | None = None
    initial_std: float = 0.02
    quiet_start: bool = False
    mixed: bool = False
    threads: int = 1


def _shape(
    *, hidden: int, inter: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int, tied: bool,
    eps: float, rope: dict[str, Any], context: int = 8192,
) -> dict[str, Any]:  # fmt: skip
    return {
        "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "vocab_size": vocab, "tie_word_embeddings": tied, "rms_norm_eps": eps,
        "rope_parameters": rope, "max_position_embeddings": context,
    }  # fmt: skip


# One model for each kind of RoPE is tested at positions beyond 2**17.
_FAR = 262_144
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip

# The auxiliary loss spreads tokens over experts, else a brief training leaves some without any.
_EXPERTS = {"num_experts": 7, "moe_intermediate_size": 20, "output_router_logits": True, "router_aux_loss_coef": 0.02}

# llama.cpp has states of as many keys as values; eps 1e-6, which it takes for that of the L2 norm, too.
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 6, "linear_value_head_dim": 6,
}  # fmt: skip
_PARTIAL = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}

# The temperature starts at position 8. YaRN's ramp starts at pair 1 and ends at pair 3; a head has four pairs.
_MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8, "beta_fast": 0.015,
    "beta_slow": 2e-4, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

# A head has four pairs: the scaling keeps two, stretches one in part and one as a whole. A GGUF file stores the result
# of the formula. A folder stores its settings, so that llorch and transformers compute the formula.
_MISTRAL_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip

RECIPES = {
    "micro-llama": Recipe(
        family="llama", vocabulary="llama", seed=1,
        config=_shape(
            hidden=96, inter=128, layers=3, heads=6, kv_heads=2, head_dim=32, vocab=401, tied=False, eps=1e-5,
            rope={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
    "micro-llama3": Recipe(
        family="llama", vocabulary="llama-bpe", seed=2,
        config=_shape(
            hidden=96, inter=160, layers=2, heads=12, kv_heads=4, head_dim=32, vocab=397, tied=True, eps=1e-5,
            rope=_LLAMA3_ROPE, context=_FAR,
        ),
    ),
    "micro-qwen2": Recipe(
        family="qwen2", vocabulary="qwen2", seed=3,
        config=_shape(
            hidden=96, inter=224, layers=3, heads=6, kv_heads=2, head_dim=16, vocab=347, tied=True, eps=1e-6,
            rope={"rope_type": "default", "rope_theta": 1e6}, context=_FAR,
        ),
    ),
    "micro-qwen3": Recipe(
        family="qwen3", vocabulary="qwen2", seed=4,
        config=_shape(
            hidden=64, inter=224, layers=2, heads=15, kv_heads=3, head_dim=32, vocab=373, tied=False, eps=1e-6,
            rope={"rope_type": "default", "rope_theta": 1e6}, context=40960,
        ),
    ),
    "micro-qwen2-moe": Recipe(
        family="qwen2_moe", vocabulary="qwen2", seed=6, steps=300,
        config=_EXPERTS | {"shared_expert_intermediate_size": 28, "num_experts_per_tok": 2, "norm_topk_prob": False}
        | _shape(
            hidden=32, inter=44, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=269, tied=False, eps=1e-6,
            rope={"rope_type": "default", "rope_theta": 1e6}, context=32768,
        ),
    ),
    "micro-qwen3-moe": Recipe(
        family="qwen3_moe", vocabulary="qwen2", seed=7, steps=300,
        config=_EXPERTS | {"num_experts_per_tok": 3, "norm_topk_prob": True}
        | _shape(
            hidden=32, inter=44, layers=2, heads=4, kv_heads=2, head_dim=10, vocab=271, tied=False, eps=1e-6,
            rope={"rope_type": "default", "rope_theta": 1e6}, context=40960,
        ),
    ),
    "micro-qwen3-vl-moe": Recipe(
        family="qwen3_vl_moe", vocabulary="qwen2", seed=15, steps=300,
        config=_EXPERTS | {
            "num_experts": 5, "moe_intermediate_size": 12, "num_experts_per_tok": 2, "bos_token_id": 274,
            "eos_token_id": 274,
        } | _shape(
            hidden=28, inter=36, layers=2, heads=4, kv_heads=2, head_dim=10, vocab=277, tied=False, eps=1e-6,
            rope={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 1]}, context=32768,
        ),
    ),
    "micro-qwen3.5": Recipe(
        family="qwen3_5", vocabulary="qwen2", seed=8, steps=300,
        config=_HYBRID | _shape(
            hidden=20, inter=28, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=263, tied=False, eps=1e-6,
            rope=_PARTIAL | {"mrope_section": [1, 1, 0]}, context=_FAR,
        ),
    ),
    "micro-qwen3.5-moe": Recipe(
        family="qwen3_5_moe", vocabulary="qwen2", seed=9, steps=300,
        config=_HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 24, "num_experts_per_tok": 2} | _shape(
            hidden=20, inter=28, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=263, tied=False, eps=1e-6,
            rope=_PARTIAL | {"mrope_section": [1, 1, 0]}, context=32768,
        ),
    ),
    "micro-qwen3-next": Recipe(
        family="qwen3_next", vocabulary="qwen2", seed=10, steps=300,
        config=_HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 24, "num_experts_per_tok": 3} | _shape(
            hidden=20, inter=28, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=263, tied=False, eps=1e-6,
            rope=_PARTIAL, context=32768,
        ),
    ),
    "micro-smollm3": Recipe(
        family="smollm3", vocabulary="llama-bpe", seed=11, steps=300, embedding_rate=1.0,
        config={"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None} | _shape(
            hidden=20, inter=28, layers=4, heads=4, kv_heads=2, head_dim=8, vocab=275, tied=True, eps=1e-6,
            rope={"rope_type": "default", "rope_theta": 2e6}, context=65536,
        ),
    ),
    "micro-mistral": Recipe(
        family="mistral", vocabulary="llama-bpe", seed=14, steps=250,
        config={"sliding_window": 19, "bos_token_id": 268, "eos_token_id": 269, "pad_token_id": None} | _shape(
            hidden=20, inter=28, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=273, tied=False, eps=1e-5,
            rope=_MISTRAL_ROPE, context=32768,
        ),
    ),
    "micro-ministral3": Recipe(
        family="ministral3", vocabulary="llama-bpe", seed=12, steps=250,
        config={"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None} | _shape(
            hidden=20, inter=28, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=265, tied=False, eps=1e-5,
            rope=_MINISTRAL_ROPE, context=_FAR,
        ),
    ),
    "micro-llama4": Recipe(
        family="llama4", vocabulary="llama-bpe", seed=13, steps=250,
        config={
            "intermediate_size_mlp": 28, "num_local_experts": 3, "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
        } | _shape(
            hidden=20, inter=12, layers=4, heads=4, kv_heads=2, head_dim=8, vocab=267, tied=False, eps=1e-5,
            rope={"rope_type": "default", "rope_theta": 5e5}, context=16384,
        ),
    ),
    "story": Recipe(
        family="llama", vocabulary="llama-bpe", seed=5, steps=2400, windows=(192, 192, 192, 512), batch=2112,
        learning_rate=6e-3, embedding_rate=1.0, muon_rate=0.02, initial_std=0.07, quiet_start=True, mixed=True,
        config=_shape(
            hidden=192, inter=448, layers=5, heads=8, kv_heads=4, head_dim=32, vocab=1003, tied=True, eps=1e-5,
            rope={"rope_type": "default", "rope_theta": 10000.0}, context=512,
        ),
    ),
}  # fmt: skip
