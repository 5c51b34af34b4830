"""Mistakes of RoPE: which numbers are paired, the angle, the position."""

import numpy as np

from llorch.config import FactorScaling, Llama3Scaling, ModelConfig
from llorch.ops.rope import frequencies, rope, scale_frequencies
from llorch.stages import StageInputs, rope_input
from llorch.verify.mistakes.mistake import Mistake

ROTATED = ("q_rope", "k_rope")


def _heads(s: StageInputs, stage: str) -> np.ndarray:
    return s.heads(rope_input(stage[0], s.config))


def _inv_freq(s: StageInputs) -> np.ndarray:
    head_dim, theta = s.config.head_dim, s.config.rope_theta
    return scale_frequencies(frequencies(head_dim, theta), s.config.rope_scaling, head_dim=head_dim, theta=theta)


def _turned(s: StageInputs, x: np.ndarray, inv_freq: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
    angle = (s.positions if positions is None else positions)[:, None] * inv_freq  # (seq, half)
    return rope(x, np.cos(angle), np.sin(angle))


def missing(s: StageInputs, stage: str) -> np.ndarray:
    """The heads as they came."""
    return _heads(s, stage)


def interleaved_pairs(s: StageInputs, stage: str) -> np.ndarray:
    """Neighbours are turned against each other."""
    x = _heads(s, stage)
    halves = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = np.split(s.rope(halves), 2, axis=-1)
    return out


def sign_flipped(s: StageInputs, stage: str) -> np.ndarray:
    """Turned the other way round."""
    return _turned(s, _heads(s, stage), -_inv_freq(s))


def base_default(s: StageInputs, stage: str) -> np.ndarray:
    """The base of the first Llama."""
    return _turned(s, _heads(s, stage), frequencies(s.config.head_dim, 10_000.0))


def base_million(s: StageInputs, stage: str) -> np.ndarray:
    """The base of Qwen."""
    return _turned(s, _heads(s, stage), frequencies(s.config.head_dim, 1e6))


def position_plus_one(s: StageInputs, stage: str) -> np.ndarray:
    """Positions count from 1."""
    return _turned(s, _heads(s, stage), _inv_freq(s), s.positions + 1)


def position_frozen(s: StageInputs, stage: str) -> np.ndarray:
    """All tokens of the pass get the position of its first."""
    return _turned(s, _heads(s, stage), _inv_freq(s), np.full_like(s.positions, s.positions[0]))


def position_restarts(s: StageInputs, stage: str) -> np.ndarray:
    """Every pass counts from 0."""
    return _turned(s, _heads(s, stage), _inv_freq(s), s.positions - s.positions[0])


def position_counts_steps(s: StageInputs, stage: str) -> np.ndarray:
    """The pass after the prompt counts from 1."""
    return _turned(s, _heads(s, stage), _inv_freq(s), s.positions - s.positions[0] + 1)


def position_by_head(s: StageInputs, stage: str) -> np.ndarray:
    """The head's number is taken for the position."""
    by_head = _heads(s, stage).swapaxes(0, 1)  # (heads, seq, head_dim)
    return _turned(s, by_head, _inv_freq(s), np.arange(len(by_head))).swapaxes(0, 1)


def first_half_only(s: StageInputs, stage: str) -> np.ndarray:
    """Partial rotary embedding."""
    rotated, kept = np.split(_heads(s, stage), 2, axis=-1)
    inv_freq = frequencies(s.config.head_dim // 2, s.config.rope_theta)
    return np.concatenate([_turned(s, rotated, inv_freq), kept], axis=-1)


def exponent_halved(s: StageInputs, stage: str) -> np.ndarray:
    """The angle falls half as fast."""
    return _turned(s, _heads(s, stage), np.sqrt(frequencies(s.config.head_dim, s.config.rope_theta)))


def exponent_by_hidden_share(s: StageInputs, stage: str) -> np.ndarray:
    """The exponent of a model whose heads share its width."""
    even = np.arange(0, s.config.head_dim, 2)
    return _turned(s, _heads(s, stage), s.config.rope_theta ** (-even / (s.config.hidden_size // s.config.n_heads)))


def frequencies_in_bfloat16(s: StageInputs, stage: str) -> np.ndarray:
    """The table of frequencies rounded to 8 bits."""
    return _turned(s, _heads(s, stage), _to_bfloat16(_inv_freq(s)))


def tables_in_half(s: StageInputs, stage: str) -> np.ndarray:
    """Cosines and sines rounded to float16."""
    angle = s.positions[:, None] * _inv_freq(s)
    cos, sin = (table.astype(np.float16).astype(np.float64) for table in (np.cos(angle), np.sin(angle)))
    return rope(_heads(s, stage), cos, sin)


def scaling_missing(s: StageInputs, stage: str) -> np.ndarray:
    """Unscaled frequencies."""
    return _turned(s, _heads(s, stage), frequencies(s.config.head_dim, s.config.rope_theta))


def scaling_linear(s: StageInputs, stage: str) -> np.ndarray:
    """Every frequency divided by the factor of the longest waves."""
    unscaled = frequencies(s.config.head_dim, s.config.rope_theta)
    return _turned(s, _heads(s, stage), unscaled / (unscaled / _inv_freq(s)).max())


def scaling_inverted(s: StageInputs, stage: str) -> np.ndarray:
    """Multiplied by the factors."""
    unscaled = frequencies(s.config.head_dim, s.config.rope_theta)
    return _turned(s, _heads(s, stage), unscaled * (unscaled / _inv_freq(s)))


def norm_after_rope(s: StageInputs, stage: str) -> np.ndarray:
    """Rotated first, normalised then."""
    which = stage[0]
    return s.rms_norm(s.rope(s.heads(f"{which}_proj")), f"{which}_norm")


def values_rotated(s: StageInputs, stage: str) -> np.ndarray:
    """Values treated like keys."""
    return np.concatenate([s["past_v"], s.rope(s.heads("v_proj")).swapaxes(0, 1)], axis=1)


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)  # ties to even


def _has_factors(config: ModelConfig) -> bool:
    return isinstance(config.rope_scaling, FactorScaling | Llama3Scaling)


ROPE: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="rope-missing", stages=ROTATED, wrong=missing,
        diagnosis="Nothing was rotated (or every token as if at position 0); both queries and keys must be.",
    ),
    Mistake(
        name="rope-interleaved-pairs", stages=ROTATED, wrong=interleaved_pairs,
        diagnosis="Dims (0, 1), (2, 3) ... were turned against each other; these weights pair dim j with "
        "dim j + head_dim / 2.",
    ),
    Mistake(
        name="rope-sign-flipped", stages=ROTATED, wrong=sign_flipped,
        diagnosis="Pairs were turned by the negative angle; it is first * cos - second * sin, second * cos + first * "
        "sin.",
    ),
    Mistake(
        name="rope-base-1e4", stages=ROTATED, wrong=base_default,
        applies_to=lambda config: config.rope_theta != 10_000,
        diagnosis="The base was 10000, the default of old; this model's config has another rope_theta.",
    ),
    Mistake(
        name="rope-base-1e6", stages=ROTATED, wrong=base_million, applies_to=lambda config: config.rope_theta != 1e6,
        diagnosis="The base was 1000000, that of Qwen; this model's config has another rope_theta.",
    ),
    Mistake(
        name="rope-position-plus-one", stages=ROTATED, wrong=position_plus_one,
        diagnosis="Every position was one too high; the first token is at position 0. The scores cannot show it, "
        "a cache filled by another engine does.",
    ),
    Mistake(
        name="rope-position-frozen", stages=ROTATED, wrong=position_frozen, cases=("far",),
        diagnosis="All tokens of the pass got the position of its first token; each has its own.",
    ),
    Mistake(
        name="rope-position-restarts", stages=ROTATED, wrong=position_restarts, after_cached=True,
        diagnosis="Positions started at 0 again in this pass; they go on after the tokens in the cache.",
    ),
    Mistake(
        name="rope-position-counts-steps", stages=ROTATED, wrong=position_counts_steps, after_cached=True,
        diagnosis="The pass after the prompt was given position 1, a counter of passes; it is the number of tokens "
        "before it.",
    ),
    Mistake(
        name="rope-position-by-head", stages=ROTATED, wrong=position_by_head,
        diagnosis="The head's number was used as the position: the axes (seq, heads) were exchanged.",
    ),
    Mistake(
        name="rope-first-half-only", stages=ROTATED, wrong=first_half_only,
        diagnosis="Half of each head was rotated (partial rotary embedding); Llama and Qwen rotate all of head_dim.",
    ),
    Mistake(
        name="rope-exponent-halved", stages=ROTATED, wrong=exponent_halved,
        diagnosis="Frequencies fell as theta ** (-j / head_dim); it is theta ** (-2 * j / head_dim) for pair j.",
    ),
    Mistake(
        name="rope-exponent-by-hidden-over-heads", stages=ROTATED, wrong=exponent_by_hidden_share,
        applies_to=lambda config: config.rope_scaling is None and config.q_width != config.hidden_size,
        diagnosis="hidden_size / n_heads stood in the exponent of the frequencies; this model has a head_dim of its "
        "own.",
    ),
    Mistake(
        name="rope-frequencies-in-bfloat16", stages=ROTATED, wrong=frequencies_in_bfloat16,
        diagnosis="inv_freq was rounded to bfloat16, which turns far tokens by a wrong angle; keep it in float32.",
    ),
    Mistake(
        name="rope-tables-in-half", stages=ROTATED, wrong=tables_in_half, cases=("near",),
        diagnosis="cos and sin were rounded to float16; keep the tables in float32.",
    ),
    Mistake(
        name="rope-scaling-missing", stages=ROTATED, wrong=scaling_missing,
        applies_to=lambda config: config.rope_scaling is not None,
        diagnosis="The frequencies were not scaled; the config's rope_scaling (rope_freqs.weight in GGUF) counts at "
        "far positions, short texts hide it.",
    ),
    Mistake(
        name="rope-scaling-linear", stages=ROTATED, wrong=scaling_linear, applies_to=_has_factors,
        diagnosis="Every frequency was divided by the same factor; llama3 scaling keeps short waves and has a ramp.",
    ),
    Mistake(
        name="rope-scaling-inverted", stages=ROTATED, wrong=scaling_inverted, applies_to=_has_factors,
        diagnosis="Frequencies were multiplied by the scaling factors; they are divided by them.",
    ),
    Mistake(
        name="rope-before-norm", stages=ROTATED, wrong=norm_after_rope, reads=("q_proj", "k_proj"),
        applies_to=lambda config: config.qk_norm,
        diagnosis="Heads were rotated and then normalised; q_norm and k_norm come before RoPE.",
    ),
    Mistake(
        name="rope-on-values", stages=("v_cache",), wrong=values_rotated,
        diagnosis="The values were rotated too; RoPE turns queries and keys only.",
    ),
)  # fmt: skip
