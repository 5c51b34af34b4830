"""Shapes of published models, for models with random weights: speed and memory depend only on these numbers."""

from functools import partial

from llorch.families.config import ModelConfig

_shape = partial(
    ModelConfig, family="llama", qkv_bias=False, o_bias=False, qk_norm=False, rope_scaling=None, rms_norm_eps=1e-5
)
SHAPES: dict[str, ModelConfig] = {
    "qwen2.5-0.5b": _shape(
        family="qwen2", qkv_bias=True, hidden_size=896, intermediate_size=4864, n_layers=24, n_heads=14, n_kv_heads=2,
        head_dim=64, vocab_size=151936, rope_theta=1e6, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
    "llama-3.2-1b": _shape(
        hidden_size=2048, intermediate_size=8192, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64,
        vocab_size=128256, rope_theta=5e5, max_position_embeddings=131072, tie_word_embeddings=True,
    ),
    "llama-2-7b": _shape(
        hidden_size=4096, intermediate_size=11008, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128,
        vocab_size=32000, rope_theta=1e4, max_position_embeddings=4096, tie_word_embeddings=False,
    ),
    "llama-3-8b": _shape(
        hidden_size=4096, intermediate_size=14336, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128,
        vocab_size=128256, rope_theta=5e5, max_position_embeddings=8192, tie_word_embeddings=False,
    ),
}  # fmt: skip
