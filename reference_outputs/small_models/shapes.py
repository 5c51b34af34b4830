"""What each small model is: its family, its dimensions, its vocabulary and how long it is trained.

All dimensions of a model differ from each other, so that a transposed or swapped axis is a shape error. One pair
cannot: llama.cpp wants the q_width of a qwen2 file equal to its hidden size.
"""

from dataclasses import dataclass, field
from typing import Any

from llorch.config import FamilyName


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to make one model.

    Attributes:
        family: Class prefix in transformers and architecture in GGUF, lower case.
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

    family: FamilyName
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


_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
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
            rope=_LLAMA3_ROPE, context=131072,
        ),
    ),
    "micro-qwen2": Recipe(
        family="qwen2", vocabulary="qwen2", seed=3,
        config=_shape(
            hidden=96, inter=224, layers=3, heads=6, kv_heads=2, head_dim=16, vocab=347, tied=True, eps=1e-6,
            rope={"rope_type": "default", "rope_theta": 1e6}, context=32768,
        ),
    ),
    "micro-qwen3": Recipe(
        family="qwen3", vocabulary="qwen2", seed=4,
        config=_shape(
            hidden=64, inter=224, layers=2, heads=15, kv_heads=3, head_dim=32, vocab=373, tied=False, eps=1e-6,
            rope={"rope_type": "default", "rope_theta": 1e6}, context=40960,
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
