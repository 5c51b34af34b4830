"""Mistakes of beginners in the forward pass: lessons 01 to 08 with 05b and 06b."""

from collections.abc import Mapping, Sequence

import numpy as np

from llorch.apps.learn.exercise import Call
from llorch.apps.learn.exercises import forward as right
from llorch.ops.attention import attention_scores as right_scores
from llorch.ops.delta_rule import log_decay as right_log_decay
from llorch.ops.routing import top_k as right_top_k
from llorch.ops.routing import topk_weights as right_topk_weights

Array = np.ndarray
Arrays = Mapping[str, Array]


def silu(x: Array) -> Array:
    """Compute x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def mean_over_tokens(x: Array, weight: Array, eps: float) -> Array:
    """The mean square was taken over axis 0, the tokens; every row has its own: axis=-1, keepdims=True."""
    return x / np.sqrt(np.square(x).mean(axis=0, keepdims=True) + eps) * weight


def standard_deviation_for_root_mean_square(x: Array, weight: Array, eps: float) -> Array:
    """The rows were divided by their standard deviation, which subtracts the mean; take the root of the mean square."""
    return x / np.sqrt(x.var(axis=-1, keepdims=True) + eps) * weight


def mean_subtracted(x: Array, weight: Array, eps: float) -> Array:
    """The mean of the row was subtracted; RMSNorm subtracts nothing."""
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * weight


def standard_deviation_plus_eps(x: Array, weight: Array, eps: float) -> Array:
    """The rows were divided by their standard deviation plus eps; take the root of the mean square plus eps."""
    return x / (x.std(axis=-1, keepdims=True) + eps) * weight


def variance_for_root(x: Array, weight: Array, eps: float) -> Array:
    """The rows were divided by their variance plus eps; take the root of the mean square plus eps."""
    return x / (x.var(axis=-1, keepdims=True) + eps) * weight


def mean_of_absolute_values(x: Array, weight: Array, eps: float) -> Array:
    """The rows were divided by the mean of absolute values; take squares, then the root of their mean."""
    return x / (np.abs(x).mean(axis=-1, keepdims=True) + eps) * weight


def square_of_the_mean(x: Array, weight: Array, eps: float) -> Array:
    """The mean was squared; take the mean of the squares."""
    return x / np.sqrt(np.square(x.mean(axis=-1, keepdims=True)) + eps) * weight


def largest_value_for_root_mean_square(x: Array, weight: Array, eps: float) -> Array:
    """The rows were divided by their largest absolute value; divide by the root of the mean square."""
    return x / (np.abs(x).max(axis=-1, keepdims=True) + eps) * weight


def multiplied_by_the_root(x: Array, weight: Array, eps: float) -> Array:
    """The rows were multiplied by the root of the mean square; divide by it."""
    return x * np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * weight


def sum_divided_by_tokens(x: Array, weight: Array, eps: float) -> Array:
    """The sum of squares was divided by len(x), the number of tokens; divide by the width, x.shape[-1]."""
    return x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) / len(x) + eps) * weight


def root_of_standard_deviation(x: Array, weight: Array, eps: float) -> Array:
    """The standard deviation stands under the root; take the root of the mean square."""
    return x / np.sqrt(x.std(axis=-1, keepdims=True) + eps) * weight


def eps_as_lower_bound(x: Array, weight: Array, eps: float) -> Array:
    """eps is a lower bound of the mean square here; add it to the mean square."""
    return x / np.sqrt(np.maximum(np.square(x).mean(axis=-1, keepdims=True), eps)) * weight


def gain_added(x: Array, weight: Array, eps: float) -> Array:
    """The gain was added; multiply by it."""
    return right.rms_norm(x, np.ones_like(weight), eps) + weight


def gain_before_the_mean(x: Array, weight: Array, eps: float) -> Array:
    """The mean square was taken of x times the gain; take it of x alone."""
    return right.rms_norm(x * weight, np.ones_like(weight), eps)


def eps_added_to_x(x: Array, weight: Array, eps: float) -> Array:
    """eps was added to every x; add it to the mean square."""
    return x / np.sqrt(np.square(x + eps).mean(axis=-1, keepdims=True)) * weight


def eps_times_width(x: Array, weight: Array, eps: float) -> Array:
    """eps was added before the sum was divided by the width; add it to the mean."""
    return x / np.sqrt((np.square(x).sum(axis=-1, keepdims=True) + eps) / x.shape[-1]) * weight


def growing_frequencies(head_dim: int, theta: float) -> Array:
    """The exponent has the wrong sign: frequencies fall from 1, so the exponent is -2 i / head_dim."""
    return theta ** (np.arange(0, head_dim, 2) / head_dim)


def frequencies_from_one(head_dim: int, theta: float) -> Array:
    """The pairs were counted from 1; the first frequency is 1, of pair 0."""
    return theta ** (-np.arange(2, head_dim + 2, 2) / head_dim)


def exponent_doubled(head_dim: int, theta: float) -> Array:
    """The exponent was 4 i / head_dim; pair i has -2 i / head_dim."""
    return theta ** (-np.arange(0, head_dim, 2) / (head_dim // 2))


def exponent_by_whole_numbers(head_dim: int, theta: float) -> Array:
    """The exponent was divided with //, which leaves 0 and -1; use /."""
    return theta ** (-np.arange(0, head_dim, 2) // head_dim).astype(np.float64)


def exponent_by_half_head(head_dim: int, theta: float) -> Array:
    """The exponent was divided by head_dim / 2 - 1, so that the last one is -1; divide 2 i by head_dim."""
    return theta ** (-np.arange(head_dim // 2) / max(1, head_dim // 2 - 1))


def base_divided(head_dim: int, theta: float) -> Array:
    """The base was divided, not raised to a power: theta ** (-2 i / head_dim)."""
    return 1 / (theta * np.maximum(np.arange(0, head_dim, 2) / head_dim, 1 / theta))


def one_factor_for_scaled_pairs(inv_freq: Array, factors: Array) -> Array:
    """Every scaled pair was divided by the largest factor; each pair has its own."""
    return np.where(factors > 1, inv_freq / factors.max(), inv_freq)


def mean_factor_for_all_pairs(inv_freq: Array, factors: Array) -> Array:
    """All pairs were divided by the mean of the factors; each pair has its own."""
    return inv_freq / factors.mean()


def angles_of_places(positions: Array, inv_freq: Array) -> tuple[Array, Array]:
    """The angles count from 0 in every pass; positions says where the tokens stand, behind those in the cache."""
    angles = np.arange(len(positions))[:, None] * inv_freq
    return np.cos(angles), np.sin(angles)


def angles_in_float32(positions: Array, inv_freq: Array) -> tuple[Array, Array]:
    """The angles were rounded to float32, which costs four digits at position 4,000; compute them in float64."""
    angles = positions[:, None].astype(np.float32) * inv_freq.astype(np.float32)
    return np.cos(angles).astype(np.float64), np.sin(angles).astype(np.float64)


def angles_in_degrees(positions: Array, inv_freq: Array) -> tuple[Array, Array]:
    """The angles were converted between radians and degrees; they are radians already."""
    angles = np.radians(positions[:, None] * inv_freq)
    return np.cos(angles), np.sin(angles)


def angles_squared(positions: Array, inv_freq: Array) -> tuple[Array, Array]:
    """Cos and sin were taken of an angle for every pair of positions; every position has one angle a pair."""
    angles = np.square(positions[:, None]) * inv_freq
    return np.cos(angles), np.sin(angles)


def angles_by_2_pi(positions: Array, inv_freq: Array) -> tuple[Array, Array]:
    """The angles were multiplied by 2 pi; a frequency of RoPE is radians a position already."""
    angles = 2 * np.pi * positions[:, None] * inv_freq
    return np.cos(angles), np.sin(angles)


def _halves(x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array, Array]:
    first, second = np.split(x, 2, axis=-1)
    return first, second, cos[:, None].astype(x.dtype), sin[:, None].astype(x.dtype)


def rope_reads_rotated_half(x: Array, cos: Array, sin: Array) -> Array:
    """The second half was computed from the first half after its rotation; use the first half as it was in x."""
    first, second, c, s = _halves(x, cos, sin)
    rotated = first * c - second * s
    return np.concatenate([rotated, second * c + rotated * s], axis=-1)


def rope_minus_in_both_halves(x: Array, cos: Array, sin: Array) -> Array:
    """Both halves subtract the sine's term; the second half adds it: x2 cos + x1 sin."""
    first, second, c, s = _halves(x, cos, sin)
    return np.concatenate([first * c - second * s, second * c - first * s], axis=-1)


def rope_plus_in_both_halves(x: Array, cos: Array, sin: Array) -> Array:
    """Both halves add the sine's term; the first half subtracts it: x1 cos - x2 sin."""
    first, second, c, s = _halves(x, cos, sin)
    return np.concatenate([first * c + second * s, second * c + first * s], axis=-1)


def rope_second_half_exchanged(x: Array, cos: Array, sin: Array) -> Array:
    """cos and sin are exchanged in the second half: it is x2 cos + x1 sin."""
    first, second, c, s = _halves(x, cos, sin)
    return np.concatenate([first * c - second * s, first * c + second * s], axis=-1)


def rope_first_half_exchanged(x: Array, cos: Array, sin: Array) -> Array:
    """cos and sin are exchanged in the first half: it is x1 cos - x2 sin."""
    first, second, c, s = _halves(x, cos, sin)
    return np.concatenate([second * c - first * s, second * c + first * s], axis=-1)


def rope_without_the_other_half(x: Array, cos: Array, sin: Array) -> Array:
    """Each half was multiplied by cos and sin of its own numbers; a rotation mixes the two halves."""
    first, second, c, s = _halves(x, cos, sin)
    return np.concatenate([first * c - first * s, second * c + second * s], axis=-1)


def rope_cos_and_sin_by_half(x: Array, cos: Array, sin: Array) -> Array:
    """The first half was multiplied by cos, the second by sin; each half needs both."""
    first, second, c, s = _halves(x, cos, sin)
    return np.concatenate([first * c, second * s], axis=-1)


def rope_halves_in_wrong_order(x: Array, cos: Array, sin: Array) -> Array:
    """The two rotated halves were joined in the wrong order; the first half comes first."""
    first, second, c, s = _halves(x, cos, sin)
    return np.concatenate([second * c + first * s, first * c - second * s], axis=-1)


def rope_partner_not_negated(x: Array, cos: Array, sin: Array) -> Array:
    """x cos + rotated sin needs rotated = (-x2, x1); here it was (x2, -x1) or a mirror of x."""
    _, _, c, s = _halves(x, cos, sin)
    return x * np.concatenate([c, c], axis=-1) + x[..., ::-1] * np.concatenate([s, s], axis=-1)


def rope_tables_interleaved(x: Array, cos: Array, sin: Array) -> Array:
    """The tables were repeated as c0 c0 c1 c1; halves need them one after the other: c0 c1 ... c0 c1 ..."""
    first, second, c, s = _halves(x, cos, sin)
    c, s = np.repeat(c, 2, axis=-1), np.repeat(s, 2, axis=-1)
    return x * c + np.concatenate([-second, first], axis=-1) * s


def rope_pairs_into_halves(x: Array, cos: Array, sin: Array) -> Array:
    """Neighbours (0, 1), (2, 3) were rotated as pairs, and written as halves; pair i is x[i] and x[i + head_dim/2]."""
    _, _, c, s = _halves(x, cos, sin)
    even, odd = x[..., ::2], x[..., 1::2]
    return np.concatenate([even * c - odd * s, odd * c + even * s], axis=-1)


def rope_twice(x: Array, cos: Array, sin: Array) -> Array:
    """The rotation was applied twice."""
    return right.our_rope(right.our_rope(x, cos, sin), cos, sin)


def rope_by_first_position(x: Array, cos: Array, sin: Array) -> Array:
    """Every token was rotated by the angles of the first one; token t has row t of the tables."""
    return right.our_rope(x, np.broadcast_to(cos[:1], cos.shape), np.broadcast_to(sin[:1], sin.shape))


def rope_by_last_position(x: Array, cos: Array, sin: Array) -> Array:
    """Every token was rotated by the angles of the last one; token t has row t of the tables."""
    return right.our_rope(x, np.broadcast_to(cos[-1:], cos.shape), np.broadcast_to(sin[-1:], sin.shape))


def _make_qkv(change: Call) -> Call:
    """Make a wrong `qkv`: `change` gets the right q, k, v and the arguments."""

    def wrong_qkv(**arguments: object) -> tuple[Array, Array, Array]:
        return change(*right.qkv(**arguments), arguments)  # type: ignore[arg-type]

    return wrong_qkv


def value_normalised(**arguments: object) -> tuple[Array, Array, Array]:
    """v was normalised as well; only queries and keys have a norm."""
    q, k, v = right.qkv(**arguments)  # type: ignore[arg-type]
    if (k_norm := arguments["k_norm"]) is None:
        return q, k, v
    return q, k, right.rms_norm(v, k_norm, arguments["eps"])  # type: ignore[arg-type]


def value_normalised_without_gain(**arguments: object) -> tuple[Array, Array, Array]:
    """v was normalised as well; only queries and keys have a norm."""
    q, k, v = right.qkv(**arguments)  # type: ignore[arg-type]
    if arguments["k_norm"] is None:
        return q, k, v
    return q, k, right.rms_norm(v, np.ones(v.shape[-1], v.dtype), arguments["eps"])  # type: ignore[arg-type]


def key_not_normalised(**arguments: object) -> tuple[Array, Array, Array]:
    """k was not normalised; Qwen3 normalises each head of q and of k."""
    q, _, v = right.qkv(**arguments)  # type: ignore[arg-type]
    return q, right.qkv(**{**arguments, "q_norm": None, "k_norm": None})[1], v  # type: ignore[arg-type]


def query_not_normalised(**arguments: object) -> tuple[Array, Array, Array]:
    """q was not normalised; Qwen3 normalises each head of q and of k."""
    _, k, v = right.qkv(**arguments)  # type: ignore[arg-type]
    return right.qkv(**{**arguments, "q_norm": None, "k_norm": None})[0], k, v  # type: ignore[arg-type]


def norms_ignored(**arguments: object) -> tuple[Array, Array, Array]:
    """q_norm and k_norm were not used; if they are given, each head of q and of k is normalised."""
    return right.qkv(**{**arguments, "q_norm": None, "k_norm": None})  # type: ignore[arg-type]


def one_gain_for_queries_and_keys(**arguments: object) -> tuple[Array, Array, Array]:
    """Queries and keys were normalised with the gain of queries; keys have their own, k_norm."""
    return right.qkv(**{**arguments, "k_norm": arguments["q_norm"]})  # type: ignore[arg-type]


def one_gain_for_keys_and_queries(**arguments: object) -> tuple[Array, Array, Array]:
    """Queries and keys were normalised with the gain of keys; queries have their own, q_norm."""
    return right.qkv(**{**arguments, "q_norm": arguments["k_norm"]})  # type: ignore[arg-type]


def bias_of_queries_only(**arguments: object) -> tuple[Array, Array, Array]:
    """Only q has a bias here; k and v have a bias, too."""
    return right.qkv(**arguments | dict.fromkeys(("k_bias", "v_bias")))  # type: ignore[arg-type]


def _resized(past: Array, new: Array) -> Array:
    grown = np.resize(past, (past.shape[0], past.shape[1] + len(new), past.shape[2]))
    grown[:, past.shape[1] :] = new.swapaxes(0, 1)
    return grown


def append_by_resize(past_k: Array, past_v: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """np.resize fills the larger array from flat memory, which moves the rows of all heads but the first."""
    return _resized(past_k, k), _resized(past_v, v)


def append_reversed(past_k: Array, past_v: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """The new tokens were appended in reverse order."""
    return right.append(past_k, past_v, k[::-1], v[::-1])


def _masked(scores: Array, hidden: float) -> Array:
    """Replace the -inf of masked entries."""
    return np.where(np.isneginf(scores), scores.dtype.type(hidden), scores)


def _unmasked(q: Array, k: Array) -> Array:
    """Compute scores without a mask."""
    keys = np.repeat(k, q.shape[1] // len(k), axis=0)
    return (q.swapaxes(0, 1).astype(np.float64) @ keys.swapaxes(1, 2) / q.shape[-1] ** 0.5).astype(q.dtype)


def _with_mask_of(scores: Array, like: Array) -> Array:
    return np.where(np.isneginf(like), scores.dtype.type(-np.inf), scores)


def _mask_filled(value: float, words: str) -> Call:
    def wrong(q: Array, k: Array) -> Array:
        return _masked(right_scores(q, k), value)

    wrong.__name__ = f"mask_of_{words.replace(' ', '_').replace('-', 'minus_')}"
    wrong.__doc__ = f"Hidden scores are {words}; they must be -inf, so that no later step can see them."
    return wrong


def _mask_added(value: float, words: str) -> Call:
    def wrong(q: Array, k: Array) -> Array:
        scores = _unmasked(q, k)
        return np.where(np.isneginf(right_scores(q, k)), (scores + np.float32(value)).astype(scores.dtype), scores)

    wrong.__name__ = f"mask_adds_{words.replace(' ', '_').replace('-', 'minus_')}"
    wrong.__doc__ = f"{words} was added to hidden scores; they must be -inf, so that no later step can see them."
    return wrong


def _words(value: float) -> str:
    return f"{value:g}".replace("e+0", "e").replace("e+", "e")


SMALLEST = ((float(np.finfo(np.float32).min), "the smallest float32"), (float(np.finfo(np.float16).min), "-65504"))
NUMBERS = (-1e2, -1e3, -1e4, -1e5, -1e6)  # usual numbers that do not swallow a score that they are added to
MASKS = (
    *(_mask_filled(value, _words(value)) for value in (*NUMBERS, -1e9, -1e10, -1e30, 0.0, np.nan, np.inf)),
    *(_mask_filled(value, words) for value, words in SMALLEST),
    *(_mask_added(value, _words(value)) for value in NUMBERS),
    _mask_added(*SMALLEST[1]),
)


def zero_times_infinity(q: Array, k: Array) -> Array:
    """The mask is a product with -inf, and 0 * -inf is NaN; choose with np.where."""
    is_hidden = np.isneginf(right_scores(q, k))
    return np.where(is_hidden, _unmasked(q, k) - np.inf, np.nan).astype(q.dtype)


def scores_multiplied_by_root(q: Array, k: Array) -> Array:
    """The scores were multiplied by sqrt(head_dim); divide by it."""
    return right_scores(q * q.dtype.type(q.shape[-1]), k)


def scores_scaled_by_context(q: Array, k: Array) -> Array:
    """The scores were divided by the root of the number of keys; divide by sqrt(head_dim)."""
    return right_scores((q * np.sqrt(q.shape[-1] / k.shape[1])).astype(q.dtype), k)


def scores_scaled_by_heads(q: Array, k: Array) -> Array:
    """The scores were divided by the root of the number of heads; divide by sqrt(head_dim)."""
    return right_scores((q * np.sqrt(q.shape[-1] / q.shape[1])).astype(q.dtype), k)


def scores_scaled_by_tokens(q: Array, k: Array) -> Array:
    """The scores were divided by the root of the number of tokens; divide by sqrt(head_dim)."""
    return right_scores((q * np.sqrt(q.shape[-1] / len(q))).astype(q.dtype), k)


def scores_scaled_by_width(q: Array, k: Array) -> Array:
    """The scores were divided by the root of the width of all heads; divide by sqrt(head_dim)."""
    return right_scores((q / np.sqrt(q.shape[1])).astype(q.dtype), k)


def scores_of_first_group(q: Array, k: Array) -> Array:
    """All query heads read the first key head; query head h reads key head h // group size."""
    return right_scores(q, np.broadcast_to(k[:1], k.shape))


def mask_hides_one_more_key(q: Array, k: Array) -> Array:
    """Each query sees one key too few: its own is hidden, but the first query sees its own."""
    scores = right_scores(q, k)
    rows = np.arange(len(q))
    scores[:, rows[1:], k.shape[1] - len(q) + rows[1:]] = -np.inf
    return scores


def probs_without_maximum(scores: Array) -> Array:
    """exp was taken of the scores themselves, which overflows; subtract the largest score of the row first."""
    weights = np.exp(scores)
    return weights / weights.sum(axis=-1, keepdims=True)


def probs_by_sigmoid(scores: Array) -> Array:
    """A sigmoid was taken of every score; softmax divides by the sum of the row."""
    return 1 / (1 + np.exp(-scores))


def scores_clipped(scores: Array) -> Array:
    """Large scores were limited and became equal; subtract the largest of the row, which changes no result."""
    return right.our_probs(np.where(np.isneginf(scores), scores, np.clip(scores, -80, 80)))


def _sum_over(axis: int, words: str) -> Call:
    def wrong(scores: Array) -> Array:
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=axis, keepdims=True)

    wrong.__name__ = f"weights_summed_over_{words}"
    wrong.__doc__ = f"The weights were divided by their sum over the {words}; sum over the keys, the last axis."
    return wrong


SUMS = (_sum_over(0, "heads"), _sum_over(1, "queries"))


def probs_with_unshifted_sum(scores: Array) -> Array:
    """The maximum was subtracted in the numerator only; the sum has the same exponentials."""
    return np.exp(scores - scores.max(axis=-1, keepdims=True)) / np.exp(scores).sum(axis=-1, keepdims=True)


def probs_with_one_maximum(scores: Array) -> Array:
    """One maximum was subtracted from all rows: rows far below it become 0 / 0. Each row has its own maximum."""
    weights = np.exp(scores - scores.max())
    return weights / weights.sum(axis=-1, keepdims=True)


def probs_by_length(scores: Array) -> Array:
    """The rows have length 1; they must have sum 1."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / np.linalg.norm(weights, axis=-1, keepdims=True)


def probs_of_shares(scores: Array) -> Array:
    """The scores were divided by their sum; softmax divides exponentials by their sum."""
    visible = np.where(np.isneginf(scores), 0, scores)
    return visible / visible.sum(axis=-1, keepdims=True)


def probs_of_positive_shares(scores: Array) -> Array:
    """The masked keys got a share: exp(0) = 1; they have probability 0."""
    visible = np.where(np.isneginf(scores), 0, scores)
    return right.our_probs(visible)


def probs_with_global_sum(scores: Array) -> Array:
    """The weights of each head were divided by one sum of all queries; each row has a sum of its own."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=(-2, -1), keepdims=True)


def context_of_mean_values(probs: Array, v: Array) -> Array:
    """The values were averaged without the probabilities."""
    return right.our_context(np.full_like(probs, 1 / probs.shape[-1]), v)


def context_of_first_group(probs: Array, v: Array) -> Array:
    """All heads mix the values of the first head; head h reads value head h // group size."""
    return right.our_context(probs, np.broadcast_to(v[:1], v.shape))


def context_of_all_groups(probs: Array, v: Array) -> Array:
    """Every head mixes the sum of all value heads; head h reads value head h // group size alone."""
    group = len(probs) // len(v)
    return right.our_context(probs, np.broadcast_to(group * v.sum(axis=0), v.shape).astype(v.dtype))


def context_divided_by_keys(probs: Array, v: Array) -> Array:
    """The weighted sum was divided by the number of keys; the probabilities have the sum 1 already."""
    return right.our_context((probs / probs.shape[-1]).astype(probs.dtype), v)


def gate_plus_up(gate: Array, up: Array) -> Array:
    """SiLU of the gate was added to up; multiply them."""
    return silu(gate) + up


def silu_of_sum(gate: Array, up: Array) -> Array:
    """SiLU was taken of gate + up; it is silu(gate) * up."""
    return silu(gate + up)


def gate_times_up(gate: Array, up: Array) -> Array:
    """gate was multiplied by up without SiLU: silu(gate) * up."""
    return gate * up


def silu_without_brackets(gate: Array, up: Array) -> Array:
    """Brackets are missing: gate / (1 + exp(-gate)), not gate / 1 + exp(-gate)."""
    return gate / 1 + np.exp(-gate) * up


def silu_without_brackets_of_gate(gate: Array, up: Array) -> Array:
    """Brackets are missing: gate / (1 + exp(-gate)), not gate / 1 + exp(-gate)."""
    return (gate / 1 + np.exp(-gate)) * up


def silu_with_negated_exponent(gate: Array, up: Array) -> Array:
    """The exponent has the wrong sign: silu(x) = x / (1 + exp(-x))."""
    return gate / (1 + np.exp(gate)) * up


def stable_sigmoid_with_wrong_branch(gate: Array, up: Array) -> Array:
    """A sign is wrong where the gate is negative: its sigmoid is exp(x) / (1 + exp(x))."""
    negative = np.exp(np.minimum(gate, 0)) / (1 + np.exp(-gate))
    return gate * np.where(gate < 0, negative, 1 / (1 + np.exp(-gate))).astype(gate.dtype) * up


def tanh_for_sigmoid(gate: Array, up: Array) -> Array:
    """The gate was multiplied by its tanh; SiLU multiplies by the sigmoid."""
    return gate * np.tanh(gate) * up


def tanh_for_silu(gate: Array, up: Array) -> Array:
    """tanh was taken of the gate; SiLU is x * sigmoid(x)."""
    return np.tanh(gate) * up


def softplus_for_silu(gate: Array, up: Array) -> Array:
    """softplus was taken of the gate; SiLU is x * sigmoid(x)."""
    return np.logaddexp(0, gate) * up


def squared_relu_for_silu(gate: Array, up: Array) -> Array:
    """The square of ReLU was taken of the gate; SiLU is x * sigmoid(x)."""
    return np.square(np.maximum(gate, 0)) * up


def leaky_relu_for_silu(gate: Array, up: Array) -> Array:
    """A leaky ReLU was taken of the gate; SiLU is x * sigmoid(x)."""
    return np.where(gate > 0, gate, 0.01 * gate).astype(gate.dtype) * up


def elu_for_silu(gate: Array, up: Array) -> Array:
    """ELU was taken of the gate; SiLU is x * sigmoid(x)."""
    return np.where(gate > 0, gate, np.expm1(np.minimum(gate, 0))) * up


def mish_for_silu(gate: Array, up: Array) -> Array:
    """Mish was taken of the gate; SiLU is x * sigmoid(x)."""
    return gate * np.tanh(np.logaddexp(0, gate)) * up


def _products(h: Array, gate_proj: Array, up_proj: Array) -> tuple[Array, Array]:
    return right.our_linear(h, gate_proj), right.our_linear(h, up_proj)


def _make_feed_forward(activation: Call) -> Call:
    def wrong(h: Array, gate_proj: Array, up_proj: Array, down_proj: Array) -> Array:
        return right.our_linear(activation(*_products(h, gate_proj, up_proj)).astype(h.dtype), down_proj)

    wrong.__name__, wrong.__doc__ = activation.__name__, activation.__doc__
    return wrong


def gelu_for_silu(gate: Array, up: Array) -> Array:
    """GELU was taken of the gate; SiLU is x * sigmoid(x)."""
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def relu_for_silu(gate: Array, up: Array) -> Array:
    """ReLU was taken of the gate; SiLU is x * sigmoid(x)."""
    return np.maximum(gate, 0) * up


def sigmoid_for_silu(gate: Array, up: Array) -> Array:
    """The sigmoid was taken of the gate; SiLU multiplies it by the gate."""
    return up / (1 + np.exp(-gate))


def silu_of_product(gate: Array, up: Array) -> Array:
    """SiLU was taken of gate * up; it is silu(gate) * up."""
    return silu(gate * up)


def silu_on_both(gate: Array, up: Array) -> Array:
    """SiLU was taken of both; only the gate has it."""
    return silu(gate) * silu(up)


def up_missing(gate: Array, up: Array) -> Array:
    """up was not multiplied: silu(gate) * up."""
    return silu(gate)


ACTIVATIONS = (
    gate_plus_up, silu_of_sum, gate_times_up, silu_with_negated_exponent, tanh_for_sigmoid, tanh_for_silu,
    softplus_for_silu, squared_relu_for_silu, leaky_relu_for_silu, elu_for_silu, mish_for_silu,
    silu_without_brackets, silu_without_brackets_of_gate,
    stable_sigmoid_with_wrong_branch,
)  # fmt: skip
OF_FEED_FORWARD = (gelu_for_silu, relu_for_silu, sigmoid_for_silu, silu_of_product, silu_on_both, up_missing)


def _attention_of(h: Array, w: Arrays, cos: Array, sin: Array, past: tuple[Array, Array], head_dim: int, eps: float):
    biases, norms = (w.get("q_bias"), w.get("k_bias"), w.get("v_bias")), (w.get("q_norm"), w.get("k_norm"))
    q, k, v = right.qkv(h, w["q_proj"], w["k_proj"], w["v_proj"], *biases, *norms, head_dim, eps)
    k, v = right.append(*past, right.our_rope(k, cos, sin), v)
    context = right.our_context(right.our_probs(right_scores(right.our_rope(q, cos, sin), k)), v)
    return right.attention_output(context, w["o_proj"], w.get("o_bias")), k, v


def _feed(h: Array, w: Arrays) -> Array:
    return right.feed_forward(h, w["gate_proj"], w["up_proj"], w["down_proj"])


def feed_forward_beside_attention(
    x: Array, w: Arrays, cos: Array, sin: Array, past_k: Array, past_v: Array, head_dim: int, eps: float
):
    """Both parts read the same input; the feed-forward part reads the sum of the input and attention's output."""
    out, k, v = _attention_of(right.rms_norm(x, w["attn_norm"], eps), w, cos, sin, (past_k, past_v), head_dim, eps)
    return x + out + _feed(right.rms_norm(x, w["ffn_norm"], eps), w), k, v


def norms_after_the_parts(
    x: Array, w: Arrays, cos: Array, sin: Array, past_k: Array, past_v: Array, head_dim: int, eps: float
):
    """Each norm was applied behind its part; it normalises the input of the part."""
    out, k, v = _attention_of(x, w, cos, sin, (past_k, past_v), head_dim, eps)
    x = x + right.rms_norm(out, w["attn_norm"], eps)
    return x + right.rms_norm(_feed(x, w), w["ffn_norm"], eps), k, v


def stream_normalised(
    x: Array, w: Arrays, cos: Array, sin: Array, past_k: Array, past_v: Array, head_dim: int, eps: float
):
    """The stream itself was normalised at both additions; only the input of each part is, and x is added as it was."""
    h = right.rms_norm(x, w["attn_norm"], eps)
    out, k, v = _attention_of(h, w, cos, sin, (past_k, past_v), head_dim, eps)
    h = right.rms_norm(h + out, w["ffn_norm"], eps)
    return h + _feed(h, w), k, v


def rotation_of_keys_only(
    x: Array, w: Arrays, cos: Array, sin: Array, past_k: Array, past_v: Array, head_dim: int, eps: float
):
    """The queries were not rotated; RoPE applies to queries and keys."""
    return _block_with_rotations(x, w, cos, sin, past_k, past_v, head_dim, eps, q=False, k=True)


def _block_with_rotations(
    x: Array, w: Arrays, cos: Array, sin: Array, past_k: Array, past_v: Array, head_dim: int, eps: float, *, q: bool,
    k: bool,
):  # fmt: skip
    biases, norms = (w.get("q_bias"), w.get("k_bias"), w.get("v_bias")), (w.get("q_norm"), w.get("k_norm"))
    h = right.rms_norm(x, w["attn_norm"], eps)
    queries, keys, values = right.qkv(h, w["q_proj"], w["k_proj"], w["v_proj"], *biases, *norms, head_dim, eps)
    queries = right.our_rope(queries, cos, sin) if q else queries
    keys, values = right.append(past_k, past_v, right.our_rope(keys, cos, sin) if k else keys, values)
    context = right.our_context(right.our_probs(right_scores(queries, keys)), values)
    x = x + right.attention_output(context, w["o_proj"], w.get("o_bias"))
    return x + _feed(right.rms_norm(x, w["ffn_norm"], eps), w), keys, values


def cache_ignored(x: Array, w: Arrays, cos: Array, sin: Array, past_k: Array, past_v: Array, head_dim: int, eps: float):
    """Attention read only the new keys and values; it reads those of the caches, too."""
    empty = past_k[:, :0], past_v[:, :0]
    out, k, v = right.block(x, w, cos, sin, *empty, head_dim, eps)
    return out, np.concatenate([past_k, k], axis=1), np.concatenate([past_v, v], axis=1)


def tied_logits_scaled(x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float) -> Array:
    """With tied embeddings the logits were divided by the root of the width, as in T5; nothing is scaled here."""
    logits = right.logits(x, final_norm, lm_head, embed_tokens, eps)
    return logits if lm_head is not None else (logits / np.sqrt(x.shape[-1])).astype(x.dtype)


def logits_scaled_by_width(
    x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float
) -> Array:
    """The logits were divided by the root of the width; nothing is scaled here."""
    return (right.logits(x, final_norm, lm_head, embed_tokens, eps) / np.sqrt(x.shape[-1])).astype(x.dtype)


def softplus_base_missing(a: Array, dt_bias: Array, decay: Array) -> Array:
    """exp was taken in place of softplus: softplus(x) = log(1 + exp(x))."""
    return decay * np.exp(a + dt_bias)


def softplus_without_exponential(a: Array, dt_bias: Array, decay: Array) -> Array:
    """exp is missing in softplus: softplus(x) = log(1 + exp(x))."""
    return decay * np.log1p(a + dt_bias)


def softplus_as_relu(a: Array, dt_bias: Array, decay: Array) -> Array:
    """The part above 0 was taken in place of softplus: softplus(x) = log(1 + exp(x))."""
    return decay * np.maximum(a + dt_bias, 0)


def softplus_of_negated_input(a: Array, dt_bias: Array, decay: Array) -> Array:
    """softplus was taken of -(a + dt_bias); it is softplus(a + dt_bias)."""
    return right_log_decay(-a, -dt_bias, decay)


def decay_negated_again(a: Array, dt_bias: Array, decay: Array) -> Array:
    """decay is -exp(A_log) already; it was negated and exponentiated again."""
    return right_log_decay(a, dt_bias, -np.exp(decay))


def conv_over_future(x: Array, kernel: Array, state: Array) -> Array:
    """SiLU was taken of the input, before the convolution; it is taken of the result."""
    return right.our_short_conv(silu(x).astype(x.dtype), kernel, state)


def unit_length_over_heads(x: Array) -> Array:
    """The sum of squares was taken over the heads; every head is divided by its own length: axis=-1."""
    return x / np.sqrt(np.square(x).sum(axis=1, keepdims=True) + 1e-6)


def unit_length_without_eps(x: Array) -> Array:
    """No eps was added to the sum of squares."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def equal_experts_with_highest_id_first(scores: Array, k: int) -> Array:
    """Among equal scores the highest id came first; the lowest does. A reversed sort reverses ties, too."""
    return np.argsort(scores, axis=-1, kind="stable")[..., ::-1][..., :k]


def experts_in_order_of_ids(scores: Array, k: int) -> Array:
    """The experts were sorted by id; the one with the largest score comes first."""
    return np.sort(right_top_k(scores, k), axis=-1)


def weights_softmaxed(probs: Array, ids: Array, normalised: bool) -> Array:
    """Softmax was taken of the selected probabilities; divide them by their sum if normalised."""
    weights = np.take_along_axis(probs, ids, axis=-1)
    return right.our_probs(weights[None])[0] if normalised else weights


def weights_divided_by_largest(probs: Array, ids: Array, normalised: bool) -> Array:
    """The weights were divided by the largest; divide by their sum if normalised."""
    weights = np.take_along_axis(probs, ids, axis=-1)
    return weights / weights.max(axis=-1, keepdims=True) if normalised else weights


def weights_normalised_over_tokens(probs: Array, ids: Array, normalised: bool) -> Array:
    """The weights were divided by their sum over the tokens; divide each token's weights by their own sum."""
    weights = right_topk_weights(probs, ids, normalised=False)
    return weights / weights.sum(axis=0, keepdims=True) if normalised else weights


def outputs_of_last_expert(h: Array, ids: Array, gate_proj: Array, up_proj: Array, down_proj: Array) -> Array:
    """All slots of a token hold the output of one expert: the one of the highest id was written to every slot."""
    outs = right.expert_outputs(h, ids, gate_proj, up_proj, down_proj)
    last = np.argmax(ids, axis=1)
    return np.broadcast_to(outs[np.arange(len(outs)), last][:, None], outs.shape).copy()


def outputs_of_first_expert(h: Array, ids: Array, gate_proj: Array, up_proj: Array, down_proj: Array) -> Array:
    """All slots of a token hold the output of its first expert."""
    return right.expert_outputs(h, np.broadcast_to(ids[:, :1], ids.shape), gate_proj, up_proj, down_proj)


def expert_activation_missing(h: Array, ids: Array, gate_proj: Array, up_proj: Array, down_proj: Array) -> Array:
    """gate was multiplied by up without SiLU: silu(gate) * up."""
    gate, up = right.our_linear_by_expert(h, ids, gate_proj), right.our_linear_by_expert(h, ids, up_proj)
    return right.our_linear_by_expert((gate * up).astype(h.dtype), ids, down_proj)


WRONG: Mapping[str, Sequence[Call]] = {
    "rms_norm": (
        mean_over_tokens, standard_deviation_for_root_mean_square, mean_subtracted, standard_deviation_plus_eps,
        variance_for_root,
        mean_of_absolute_values, square_of_the_mean, largest_value_for_root_mean_square, multiplied_by_the_root,
        sum_divided_by_tokens, root_of_standard_deviation, eps_as_lower_bound, gain_added, gain_before_the_mean,
        eps_added_to_x, eps_times_width,
    ),
    "frequencies": (
        growing_frequencies, frequencies_from_one, exponent_doubled,
        base_divided, exponent_by_whole_numbers, exponent_by_half_head,
    ),
    "scale_frequencies": (one_factor_for_scaled_pairs, mean_factor_for_all_pairs),
    "rope_tables": (
        angles_of_places, angles_in_float32, angles_in_degrees, angles_squared, angles_by_2_pi,
    ),
    "rope": (
        rope_reads_rotated_half, rope_minus_in_both_halves, rope_plus_in_both_halves, rope_without_the_other_half,
        rope_second_half_exchanged,
        rope_first_half_exchanged,
        rope_cos_and_sin_by_half, rope_halves_in_wrong_order, rope_partner_not_negated,
        rope_tables_interleaved, rope_pairs_into_halves, rope_twice, rope_by_first_position, rope_by_last_position,
    ),
    "qkv": (
        value_normalised, value_normalised_without_gain, key_not_normalised, query_not_normalised, norms_ignored,
        one_gain_for_queries_and_keys, one_gain_for_keys_and_queries, bias_of_queries_only,
    ),
    "append": (append_by_resize, append_reversed),
    "attention_scores": (
        *MASKS, zero_times_infinity, scores_multiplied_by_root, scores_scaled_by_context, scores_scaled_by_heads,
        scores_scaled_by_tokens, scores_scaled_by_width, scores_of_first_group, mask_hides_one_more_key,
    ),
    "attention_probs": (
        *SUMS, scores_clipped, probs_with_unshifted_sum, probs_with_one_maximum, probs_without_maximum,
        probs_by_sigmoid,
        probs_by_length, probs_of_shares,
        probs_of_positive_shares, probs_with_global_sum,
    ),
    "attention_context": (
        context_of_mean_values, context_of_first_group, context_of_all_groups, context_divided_by_keys,
    ),
    "swiglu": ACTIVATIONS,
    "feed_forward": (*map(_make_feed_forward, (*ACTIVATIONS, *OF_FEED_FORWARD)),),
    "block": (
        feed_forward_beside_attention, norms_after_the_parts, stream_normalised,
        rotation_of_keys_only, cache_ignored,
    ),
    "logits": (tied_logits_scaled, logits_scaled_by_width),
    "log_decay": (
        softplus_without_exponential, softplus_of_negated_input, softplus_base_missing, softplus_as_relu,
        decay_negated_again,
    ),
    "short_conv": (conv_over_future,),
    "l2_norm": (unit_length_over_heads, unit_length_without_eps),
    "top_k": (equal_experts_with_highest_id_first, experts_in_order_of_ids),
    "topk_weights": (weights_softmaxed, weights_divided_by_largest, weights_normalised_over_tokens),
    "expert_outputs": (expert_activation_missing, outputs_of_last_expert, outputs_of_first_expert),
}  # fmt: skip
