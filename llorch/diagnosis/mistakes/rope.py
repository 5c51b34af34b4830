"""Known mistakes in RoPE: pairs of dimensions, angle, position; module `mistake` explains the fields."""

from collections.abc import Callable

import numpy as np

from llorch.diagnosis.mistakes.in_stage import ROTATED, rotate, rotated_heads, scaled_frequencies
from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.planting import Function, Replacement, instead
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.families.config import FactorScaling, Llama3Scaling, ModelConfig
from llorch.ops.rope import frequencies

# Values of `part`: functions that `wrong` replaces, see `in_stage`. Without `part`, `wrong` computes a stage from `s`.
FREQUENCIES, SCALING, TABLES, PART = "frequencies", "scale_frequencies", "rope_tables", "rope"


def interleaved_pairs(right: Function) -> Function:
    """Rotate neighbours as pairs."""

    def wrong(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        width, out = 2 * cos.shape[-1], x.copy()
        halves = np.concatenate([x[..., 0:width:2], x[..., 1:width:2]], axis=-1)
        out[..., 0:width:2], out[..., 1:width:2] = np.split(right(halves, cos, sin), 2, axis=-1)
        return out

    return wrong


def position_by_head(s: StageInputs, stage: str) -> np.ndarray:
    """Use the head's index as the position."""
    by_head = rotated_heads(s, stage).swapaxes(0, 1)  # (heads, seq, head_dim)
    return rotate(s, by_head, scaled_frequencies(s), np.arange(len(by_head))).swapaxes(0, 1)


def first_half_only(s: StageInputs, stage: str) -> np.ndarray:
    """Rotate only the first half of each head, as a partial rotary embedding does."""
    width = s.config.head_dim // 4 * 2  # even
    rotated, unrotated = np.split(rotated_heads(s, stage), [width], axis=-1)
    inv_freq = frequencies(width, s.config.rope_theta)
    return np.concatenate([rotate(s, rotated, inv_freq), unrotated], axis=-1)


def exponent_by_hidden_share(s: StageInputs, stage: str) -> np.ndarray:
    """Use the exponent of a model whose heads share the hidden size."""
    even = np.arange(0, s.config.rotated, 2)
    inv_freq = s.config.rope_theta ** (-even / (s.config.hidden_size // s.config.n_heads))
    return rotate(s, rotated_heads(s, stage), inv_freq)


def _tables_at(move: Callable[[np.ndarray], np.ndarray]) -> Replacement:
    """Make the replacement that computes the tables at other positions."""
    return lambda right: lambda positions, inv_freq: right(move(positions), inv_freq)


def tables_in_half(right: Function) -> Function:
    """Round cosines and sines to float16."""
    return lambda x, cos, sin: right(x, *(table.astype(np.float16).astype(np.float64) for table in (cos, sin)))


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)  # ties to even


def _has_factors(config: ModelConfig) -> bool:
    return isinstance(config.rope_scaling, FactorScaling | Llama3Scaling)


ROPE: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="rope-missing", stages=ROTATED, part=PART, wrong=instead(lambda x, cos, sin: x),
        diagnosis="Nothing was rotated (or every token as if at position 0); both queries and keys must be.",
    ),
    Mistake(
        name="rope-interleaved-pairs", stages=ROTATED, part=PART, wrong=interleaved_pairs,
        applies_to=lambda config: not config.interleaved_rope_hf,
        diagnosis="Dims (0, 1), (2, 3) ... were rotated as pairs; these weights pair dim j with dim j + head_dim / 2.",
    ),
    Mistake(
        name="rope-sign-flipped", stages=ROTATED, part=PART,
        wrong=lambda right: lambda x, cos, sin: right(x, cos, -sin),
        diagnosis="Pairs were rotated by the negative angle; use first * cos - second * sin and second * cos + first * "
        "sin.",
    ),
    Mistake(
        name="rope-cos-and-sin-exchanged", stages=ROTATED, part=PART,
        wrong=lambda right: lambda x, cos, sin: right(x, sin, cos),
        diagnosis="The tables of cosines and sines were exchanged; it is first * cos - second * sin. The scores alone "
        "look as if rotated by the negative angle.",
    ),
    Mistake(
        name="rope-base-1e4", stages=ROTATED, applies_to=lambda config: config.rope_theta != 10_000, part=FREQUENCIES,
        wrong=lambda right: lambda head_dim, theta: right(head_dim, 10_000.0),
        diagnosis="The base was 10000, the old default, and no scaling was applied; this model's config has another "
        "rope_theta.",
    ),
    Mistake(
        name="rope-base-1e6", stages=ROTATED, applies_to=lambda config: config.rope_theta != 1e6, part=FREQUENCIES,
        wrong=lambda right: lambda head_dim, theta: right(head_dim, 1e6),
        diagnosis="The base was 1000000, that of Qwen, and no scaling was applied; this model's config has another "
        "rope_theta.",
    ),
    Mistake(
        name="rope-position-plus-one", stages=ROTATED, part=TABLES, wrong=_tables_at(lambda positions: positions + 1),
        diagnosis="Every position was one too high; the first token is at position 0. The scores cannot show it, "
        "a cache filled by another engine does.",
    ),
    Mistake(
        name="rope-position-frozen", stages=ROTATED, cases=("far",), part=TABLES,
        wrong=_tables_at(lambda positions: np.full_like(positions, positions[0])),
        diagnosis="All tokens of the pass got the position of its first token; each has its own.",
    ),
    Mistake(
        name="rope-position-restarts", stages=ROTATED, after_cached=True, part=TABLES,
        wrong=_tables_at(lambda positions: positions - positions[0]),
        diagnosis="Positions started at 0 again in this pass; they go on after the tokens in the cache.",
    ),
    Mistake(
        name="rope-position-counts-steps", stages=ROTATED, after_cached=True, part=TABLES,
        wrong=_tables_at(lambda positions: positions - positions[0] + (positions[0] > 0)),
        diagnosis="The pass after the prompt was given position 1, a counter of passes; it is the number of tokens "
        "before it.",
    ),
    Mistake(
        name="rope-position-by-head", stages=ROTATED, wrong=position_by_head,
        diagnosis="The head's number was used as the position: the axes (seq, heads) were exchanged.",
    ),
    Mistake(
        name="rope-first-half-only", stages=ROTATED, wrong=first_half_only,
        applies_to=lambda config: config.rotated == config.head_dim,
        diagnosis="Half of each head was rotated (partial rotary embedding); Llama and Qwen rotate all of head_dim.",
    ),
    Mistake(
        name="rope-exponent-halved", stages=ROTATED, applies_to=lambda config: config.rotated == config.head_dim,
        part=FREQUENCIES, wrong=lambda right: lambda head_dim, theta: np.sqrt(right(head_dim, theta)),
        diagnosis="Frequencies fell as theta ** (-j / head_dim); it is theta ** (-2 * j / head_dim) for pair j.",
    ),
    Mistake(
        name="rope-exponent-by-hidden-over-heads", stages=ROTATED, wrong=exponent_by_hidden_share,
        applies_to=lambda config: config.rope_scaling is None
        and config.rotated != config.hidden_size // config.n_heads,
        diagnosis="hidden_size / n_heads stood in the exponent of the frequencies; this model's config sets head_dim.",
    ),
    Mistake(
        name="rope-frequencies-in-bfloat16", stages=ROTATED,
        wrong=lambda s, stage: rotate(s, rotated_heads(s, stage), _to_bfloat16(scaled_frequencies(s))),
        diagnosis="inv_freq was rounded to bfloat16, which rotates far tokens by a wrong angle; keep it in float32.",
    ),
    Mistake(
        name="rope-tables-in-half", stages=ROTATED, part=PART, wrong=tables_in_half, cases=("near",), rounds=True,
        diagnosis="cos and sin were rounded to float16; keep the tables in float32.",
    ),
    Mistake(
        name="rope-scaling-missing", stages=ROTATED, applies_to=lambda config: config.rope_scaling is not None,
        part=SCALING, wrong=instead(lambda inv_freq, factors: inv_freq),
        diagnosis="The frequencies were not scaled; the config's rope_scaling (rope_freqs.weight in GGUF) counts at "
        "far positions, short texts hide it.",
    ),
    Mistake(
        name="rope-scaling-linear", stages=ROTATED, applies_to=_has_factors, part=SCALING,
        wrong=instead(lambda inv_freq, factors: inv_freq / factors.max()),
        diagnosis="Every frequency was divided by the same factor; llama3 scaling keeps short waves and has a ramp.",
    ),
    Mistake(
        name="rope-scaling-inverted", stages=ROTATED, applies_to=_has_factors, part=SCALING,
        wrong=instead(lambda inv_freq, factors: inv_freq * factors),
        diagnosis="Frequencies were multiplied by the scaling factors; they are divided by them.",
    ),
    Mistake(
        name="rope-before-norm", stages=ROTATED, reads=("q_proj|q_gate_proj", "k_proj"),
        wrong=lambda s, stage: s.rms_norm(s.rope(s.heads(f"{stage[0]}_proj")), f"{stage[0]}_norm"),
        applies_to=lambda config: config.qk_norm,
        diagnosis="Heads were rotated and then normalised; q_norm and k_norm come before RoPE.",
    ),
    Mistake(
        name="rope-on-values", stages=("v_cache",),
        wrong=lambda s, _: np.concatenate([s["past_v"], s.rope(s.heads("v_proj")).swapaxes(0, 1)], axis=1),
        diagnosis="The values were rotated too; RoPE turns queries and keys only.",
    ),
)  # fmt: skip
