"""Known mistakes in attention: scale, mask, softmax, grouped-query heads, joining of heads.

Mistakes of the scores also list the probabilities as a stage: some engines add the mask inside their softmax. Module
`mistake` explains the fields of the mistakes.
"""

import math

import numpy as np

from llorch.diagnosis.mistakes.in_stage import QUERY_AND_KEY
from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.planting import instead
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.families.layers import Layer
from llorch.model.blocks.positions import seen_from
from llorch.ops.attention import attention_probs

SCORES = ("attn_scores", "attn_probs")
# Values of `part`: functions that `wrong` replaces, see `in_stage`. Without `part`, `wrong` computes a stage from `s`.
SCORE_OP, SOFTMAX, CONTEXT = "attention_scores", "attention_probs", "attention_context"


def _tile(heads: np.ndarray, n: int) -> np.ndarray:
    return np.tile(heads, (n, 1, 1))


def _repeat(heads: np.ndarray, n: int) -> np.ndarray:
    return np.repeat(heads, n, axis=0)


def _attention_products(s: StageInputs) -> np.ndarray:
    """Compute queries @ keys, neither scaled nor masked."""
    return products(s.heads(QUERY_AND_KEY[0]), s["k_cache"])


def products(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Multiply queries by keys, neither scaled nor masked: (heads, seq, ctx)."""
    return q.swapaxes(0, 1) @ _repeat(k, q.shape[1] // len(k)).swapaxes(1, 2)


def causal(scores: np.ndarray, *, shift: int = 0) -> np.ndarray:
    """Mask the keys after each query, from `shift` diagonals later than right."""
    seq, ctx = scores.shape[1:]
    return np.where(np.triu(np.ones((seq, ctx), dtype=bool), k=ctx - seq + 1 + shift), -np.inf, scores)


def _by_root(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Multiply by 1 / sqrt(head_dim), with the head_dim of the queries."""
    return x * q.dtype.type(q.shape[-1] ** -0.5)


def _scale(s: StageInputs) -> float:
    return s.config.head_dim**-0.5


def hidden_in(s: StageInputs, kind: Layer | None = None, *, shift: int = 0) -> np.ndarray:
    """Return the mask (seq, ctx), True for keys after the query (for shift 0) or before the first visible key.

    `kind` (window, chunk) replaces the layer's kind.
    """
    seq, ctx = len(s.positions), s["k_cache"].shape[1]
    hidden = np.triu(np.ones((seq, ctx), dtype=bool), k=ctx - seq + 1 + shift)
    first = seen_from(kind or s.kind, s.positions, ctx)
    return hidden if first is None else hidden | (np.arange(ctx) < first[:, None])


def _finish(scores: np.ndarray, stage: str) -> np.ndarray:
    """Return the scores, or the probabilities from them."""
    return scores if stage == "attn_scores" else attention_probs(scores)


def with_mask(s: StageInputs, stage: str, hidden: np.ndarray, *, scale: float | None = None) -> np.ndarray:
    """Compute scores, or the probabilities from them, from right products with another mask or scale."""
    scores = _attention_products(s) * s.dtype(_scale(s) if scale is None else scale)
    return _finish(np.where(hidden, -np.inf, scores), stage)


def mask_ignores_cache(s: StageInputs, stage: str) -> np.ndarray:
    """Apply a square mask from the first key on, as if the cache were empty."""
    seq, ctx = hidden_in(s).shape
    return with_mask(s, stage, np.triu(np.ones((seq, ctx), dtype=bool), k=1))


def hides_itself_but_first(s: StageInputs, stage: str) -> np.ndarray:
    """Mask the key of each query's token, except for the first query of a text, which has no other key."""
    hidden = hidden_in(s, shift=-1)
    hidden[hidden.all(axis=1), 0] = False
    return with_mask(s, stage, hidden)


def groups_tiled(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Use key head h % n_kv_heads for query head h."""
    return causal(_by_root(q.swapaxes(0, 1) @ _tile(k, q.shape[1] // len(k)).swapaxes(1, 2), q))


def _in_half(x: np.ndarray) -> np.ndarray:
    """Round to float16 and return to the array's dtype."""
    with np.errstate(over="ignore"):  # products above 65504 overflow: this is the mistake
        return x.astype(np.float16).astype(x.dtype)


def scores_in_half(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Round products to float16, then scale them."""
    return causal(_by_root(_in_half(products(q, k)), q))


def scaled_scores_in_half(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Scale products, then round them to float16."""
    return causal(_in_half(_by_root(products(q, k), q)))


def softmax_over_heads(scores: np.ndarray) -> np.ndarray:
    """Normalise over heads; masked scores become NaN, because no head has a finite one."""
    with np.errstate(invalid="ignore"):  # -inf - (-inf) is part of the mistake
        weights = np.exp(scores - scores.max(axis=0, keepdims=True))
    return weights / weights.sum(axis=0, keepdims=True)


def softmax_over_all(scores: np.ndarray) -> np.ndarray:
    """Normalise over all heads and queries."""
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def softmax_not_divided(scores: np.ndarray) -> np.ndarray:
    """Return the exponentials without the division by their sum."""
    return np.exp(scores - scores.max(axis=-1, keepdims=True))


def _mix_values(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    return probs @ _repeat(v, len(probs) // len(v))  # (heads, seq, head_dim)


def _join_heads(mixed: np.ndarray) -> np.ndarray:
    return mixed.swapaxes(0, 1).reshape(mixed.shape[1], -1)


def values_tiled(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Mix value head h % n_kv_heads for query head h."""
    return _join_heads(probs @ _tile(v, len(probs) // len(v)))


def heads_joined_without_transpose(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Reshape (heads, seq, head_dim) without a transpose."""
    return _mix_values(probs, v).reshape(probs.shape[1], -1)


def heads_interleaved(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Join heads in the order (seq, head_dim, heads)."""
    return _mix_values(probs, v).transpose(1, 2, 0).reshape(probs.shape[1], -1)


ATTENTION: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="scores-not-scaled", stages=SCORES, part=SCORE_OP, reads=QUERY_AND_KEY,
        wrong=instead(lambda q, k: causal(products(q, k))),
        diagnosis="The products were not scaled; divide by sqrt(head_dim).",
    ),
    Mistake(
        name="scores-divided-by-head-dim", stages=SCORES, part=SCORE_OP, reads=QUERY_AND_KEY,
        wrong=instead(lambda q, k: causal(products(q, k) * q.dtype.type(1 / q.shape[-1]))),
        diagnosis="The products were divided by head_dim, or by its root twice; divide by sqrt(head_dim) once.",
    ),
    Mistake(
        name="scores-scaled-by-hidden", stages=SCORES, reads=QUERY_AND_KEY,
        wrong=lambda s, stage: with_mask(s, stage, hidden_in(s), scale=s.config.hidden_size**-0.5),
        diagnosis="The products were divided by sqrt(hidden_size); divide by sqrt(head_dim).",
    ),
    Mistake(
        name="scores-scaled-by-hidden-over-heads", stages=SCORES, reads=QUERY_AND_KEY,
        applies_to=lambda config: config.q_width != config.hidden_size,
        wrong=lambda s, stage: with_mask(
            s, stage, hidden_in(s), scale=(s.config.hidden_size // s.config.n_heads) ** -0.5
        ),
        diagnosis="The products were divided by sqrt(hidden_size / n_heads); this model's config sets head_dim.",
    ),
    Mistake(
        name="mask-missing", stages=SCORES, wrong=lambda s, stage: with_mask(s, stage, np.zeros_like(hidden_in(s))),
        reads=QUERY_AND_KEY,
        diagnosis="Every token saw all other tokens; hide the keys after the query.",
    ),
    Mistake(
        name="mask-shows-next", stages=SCORES, part=SCORE_OP,
        wrong=instead(lambda q, k: causal(_by_root(products(q, k), q), shift=1)), reads=QUERY_AND_KEY,
        diagnosis="Every token saw the next one: the mask starts one diagonal too late.",
    ),
    Mistake(
        name="mask-hides-itself", stages=("attn_scores",), part=SCORE_OP,
        wrong=instead(lambda q, k: causal(_by_root(products(q, k), q), shift=-1)),
        diagnosis="No token saw itself: the mask starts one diagonal too early.",
    ),
    Mistake(
        name="mask-hides-itself-but-first", stages=SCORES, wrong=hides_itself_but_first, reads=QUERY_AND_KEY,
        diagnosis="No token but the first saw itself: the mask starts one diagonal too early.",
    ),
    Mistake(
        name="mask-reversed", stages=SCORES, wrong=lambda s, stage: with_mask(s, stage, ~hidden_in(s, shift=-1)),
        reads=QUERY_AND_KEY,
        diagnosis="The mask hid the past and showed the future; a query may see the lower triangle.",
    ),
    Mistake(
        name="mask-ignores-cache", stages=SCORES, wrong=mask_ignores_cache, reads=QUERY_AND_KEY, after_cached=True,
        diagnosis="The mask started at the first key; after n cached tokens query t sees keys 0 to n + t.",
    ),
    Mistake(
        name="mask-minus-ten", stages=SCORES, reads=QUERY_AND_KEY,
        wrong=lambda s, stage: _finish(_attention_products(s) * s.dtype(_scale(s)) - s.dtype(10) * hidden_in(s), stage),
        diagnosis="Hidden scores were lowered by 10; they must be -inf, or a share of the future leaks through.",
    ),
    Mistake(
        name="groups-tiled-for-keys", stages=SCORES, part=SCORE_OP, wrong=instead(groups_tiled), reads=QUERY_AND_KEY,
        diagnosis="Query head h read key head h % n_kv_heads (tile); it reads h // group_size (repeat).",
    ),
    Mistake(
        name="scores-in-half", stages=SCORES, part=SCORE_OP, wrong=instead(scores_in_half),
        reads=QUERY_AND_KEY, rounds=True,
        diagnosis="Scores were kept in float16, which overflows on Qwen; multiply queries and keys in float32.",
    ),
    Mistake(
        name="scaled-scores-in-half", stages=SCORES, part=SCORE_OP, wrong=instead(scaled_scores_in_half),
        reads=QUERY_AND_KEY, rounds=True,
        applies_to=lambda config: math.log2(config.head_dim) % 2 != 0,  # else the scale is a power of two: no rounding
        diagnosis="Scaled scores were kept in float16, which rounds them at 5e-4; keep them in float32.",
    ),
    Mistake(
        name="mask-after-softmax", stages=("attn_probs",), reads=QUERY_AND_KEY,
        wrong=lambda s, _: np.where(hidden_in(s), 0, attention_probs(_attention_products(s) * s.dtype(_scale(s)))),
        diagnosis="The mask was applied after the softmax, so rows sum to less than one; mask the scores.",
    ),
    Mistake(
        name="softmax-over-queries", stages=("attn_probs",), part=SOFTMAX,
        wrong=lambda right: lambda scores: right(scores.swapaxes(1, 2)).swapaxes(1, 2),
        diagnosis="The softmax ran over the queries; for each query the probabilities of the keys sum to one.",
    ),
    Mistake(
        name="softmax-over-heads", stages=("attn_probs",), part=SOFTMAX, wrong=instead(softmax_over_heads),
        diagnosis="The softmax ran over the heads (axis 0); for each query the probabilities of the keys sum to one.",
    ),
    Mistake(
        name="softmax-over-all", stages=("attn_probs",), part=SOFTMAX, wrong=instead(softmax_over_all),
        diagnosis="One sum was taken over all heads and queries; for each query the probabilities of the keys sum to "
        "one.",
    ),
    Mistake(
        name="softmax-base-two", stages=("attn_probs",), part=SOFTMAX,
        wrong=lambda right: lambda scores: right(scores * scores.dtype.type(np.log(2))),
        diagnosis="exp2 was used without scaling the scores by log2(e); the softmax is exp(x) / sum(exp(x)).",
    ),
    Mistake(
        name="softmax-not-divided", stages=("attn_probs",), part=SOFTMAX, wrong=instead(softmax_not_divided),
        diagnosis="The exponentials were not divided by their sum; rows sum to one.",
    ),
    Mistake(
        name="groups-tiled-for-values", stages=("attn_context",), part=CONTEXT, wrong=instead(values_tiled),
        diagnosis="Query head h mixed value head h % n_kv_heads (tile); it mixes h // group_size (repeat).",
    ),
    Mistake(
        name="heads-joined-without-transpose", stages=("attn_context",), part=CONTEXT,
        wrong=instead(heads_joined_without_transpose),
        diagnosis="(heads, seq, head_dim) was reshaped untransposed; bring seq to the front, then join the heads.",
    ),
    Mistake(
        name="heads-joined-interleaved", stages=("attn_context",), part=CONTEXT, wrong=instead(heads_interleaved),
        diagnosis="Heads were joined as (head_dim, heads); one head comes after the other.",
    ),
    Mistake(
        name="context-mixes-keys", stages=("attn_context",), reads=("k_cache",),
        wrong=lambda s, _: _join_heads(_mix_values(s["attn_probs"], s["k_cache"])),
        diagnosis="The probabilities mixed the keys; they must mix the values.",
    ),
)  # fmt: skip
