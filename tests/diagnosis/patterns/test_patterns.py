"""Patterns of errors in arrays: injected ones are described in words, random ones are not."""

from collections.abc import Callable

import numpy as np
import pytest
from faults.wrong_dumps import float64_weights

from llorch.diagnosis.patterns import (
    describe_context_terms,
    describe_error,
    describe_kv_heads,
    describe_mask,
    describe_non_finite,
    describe_product_terms,
    describe_seen_keys,
    recover_probs,
)
from llorch.diagnosis.patterns.axes import Axis, axes_of, split_heads
from llorch.stages.table import BY_NAME

CONFIG = float64_weights("micro-qwen3").config  # 15 query heads, 3 key heads of 32 dims
SEQ, CTX, NOISE = 12, 20, 1e-7
Change = Callable[[np.ndarray], np.ndarray]


def arrays(stage: str, seq: int = SEQ) -> tuple[np.ndarray, list[Axis]]:
    """Draw a right array of a stage, for tokens from position 100 on behind a cache of 8; return it with its axes."""
    row = BY_NAME[stage]
    array = np.random.default_rng(0).standard_normal(row.shape(CONFIG, seq=seq, ctx=CTX))
    array = split_heads(array, row, CONFIG)
    return array, axes_of(row, array.shape, 100 + np.arange(seq), CTX - seq + np.arange(seq))


def replaced(index: object, values: object) -> Change:
    def change(array: np.ndarray) -> np.ndarray:
        array[index] = values  # type: ignore[index] (an index of NumPy)
        return array

    return change


def scaled(index: object, factor: object) -> Change:
    def change(array: np.ndarray) -> np.ndarray:
        array[index] *= factor  # type: ignore[index] (an index of NumPy)
        return array

    return change


def own_keys_zero(array: np.ndarray) -> np.ndarray:
    index = np.arange(array.shape[1])
    array[:, index, index + CTX - SEQ] = 0
    return array


def interleaved(array: np.ndarray) -> np.ndarray:
    return array.reshape(*array.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(array.shape)


def int8(array: np.ndarray) -> np.ndarray:
    step = np.abs(array).max(axis=-1, keepdims=True) / 127
    return np.round(array / step) * step


def growing(array: np.ndarray) -> np.ndarray:
    return array + 0.01 * np.arange(len(array))[:, None] * np.random.default_rng(1).standard_normal(array.shape)


INJECTED: dict[str, tuple[str, Change, str]] = {
    "zero heads": ("q_rope", replaced(np.s_[:, 10:12], 0), "heads 10 and 11 only: all 0"),
    "dims of every head": ("k_rope", scaled(np.s_[..., 4:8], 2), "dims 4 to 7 only: 2 times the right values"),
    "last dims": ("q_proj", scaled(np.s_[..., 16:], -1), "dims from 16 on only: -1 times the right values"),
    "odd positions": ("attn_norm", replaced(np.s_[5::2], 3), "odd positions from 105 on only: all 3"),
    "half of each block": (
        "ffn_norm", lambda array: (array.reshape(SEQ, 4, 16) * np.repeat([0.5, 1], 8)).reshape(SEQ, 64),
        "columns k with k % 16 < 8 only: 0.5 times the right values",
    ),
    "keys": ("attn_probs", replaced(np.s_[..., :8], 0), "keys 0 to 7 only: all 0"),
    "own key": ("attn_probs", own_keys_zero, "the query's own key only: all 0"),
    "repeated heads": ("q_rope", lambda array: array[:, np.arange(15) // 2], "right values of head i // 2"),
    "one head for all": ("k_rope", lambda array: array[:, [0, 0, 0]], "every head has the right values of head 0"),
    "exchanged heads": ("q_rope", lambda array: array[:, [1, 0, *range(2, 15)]], "heads 0 and 1 are exchanged"),
    "shifted positions": ("attn_norm", lambda array: array[[*range(1, SEQ), SEQ - 1]], "values of position i + 1"),
    "interleaved dims": ("q_rope", interleaved, "2 groups of 16 are interleaved"),
    "factors": ("k_rope", lambda array: array * [[2], [3], [4]], "each head times a factor of its own: 2, 3 and 4"),
    "row factors": (
        "attn_probs", lambda array: array * np.linspace(0.5, 0.9, 15 * SEQ).reshape(15, SEQ, 1),
        "each row times a factor of its own: 0.5 to 0.9",
    ),
    "bias": ("ffn_gate", lambda array: array + np.arange(array.shape[1]), "off by the same row at every position"),
    "clamped": ("ffn_up", lambda array: array.clip(-1, 1), "clamped to -1 to 1"),
    "int8": ("k_rope", int8, "rounded to int8 with one scale for each row"),
    "grid": ("k_rope", lambda array: np.round(array * 64) / 64, "rounded to multiples of 0.015625"),
    "halves of blocks": (
        "attn_norm", lambda array: array.reshape(SEQ, 2, 2, 16)[:, :, ::-1].reshape(SEQ, 64),
        "in each block of 32 columns: columns are rolled: column i has the right values of column (i + 16) % 32",
    ),
    "growing": ("attn_norm", growing, "the error grows with the position"),
}  # fmt: skip


@pytest.mark.parametrize("name", INJECTED)
def test_injected_pattern_is_described(name: str):
    stage, change, words = INJECTED[name]
    expected, axes = arrays(stage)
    noise = 1 + NOISE * np.random.default_rng(2).standard_normal(expected.shape)
    actual = change(expected.copy())
    actual = actual if name in ("clamped", "grid") else actual * noise
    assert words in describe_error(actual, expected, axes, tolerance=1e-6)


def test_heads_of_one_rank_have_their_numbers():
    (expected, _), row = arrays("q_rope"), BY_NAME["q_rope"]
    actual = scaled(np.s_[:, 1], 2)(expected[:, 10:].copy())
    axes = axes_of(row, actual.shape, np.arange(SEQ), np.arange(SEQ), first_head=10)
    assert describe_error(actual, expected[:, 10:], axes, tolerance=1e-6).startswith("head 11 only")


def test_copy_of_another_array_is_described_by_its_name():
    (expected, axes), other = arrays("q_rope"), np.random.default_rng(3).standard_normal((SEQ, 15, 32))
    actual = expected.copy()
    actual[..., 4:8] = other[..., 4:8]
    words = describe_error(actual, expected, axes, tolerance=1e-6, sources=[("q_norm of layer 1", other)])
    assert words == "dims 4 to 7 only: equal to q_norm of layer 1"


@pytest.mark.parametrize("seq", [1, 2, SEQ])
@pytest.mark.parametrize("stage", ["attn_norm", "q_rope", "k_cache", "attn_probs", "ffn_gate"])
def test_random_error_has_no_pattern(stage: str, seq: int):
    (expected, axes), random = arrays(stage, seq), np.random.default_rng(4)
    other = random.standard_normal(expected.shape)
    for _ in range(100):
        actual = expected + random.standard_normal(expected.shape) * 10 ** random.uniform(-5, 1)
        assert describe_error(actual, expected, axes, tolerance=1e-6, sources=[("another", other)]) == ""


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (np.arange(64) < 32, "input columns from 32 on are left out"),
        (np.arange(64) % 16 < 8, "input columns k with k % 16 >= 8 are left out"),
        (1 + (np.arange(64) == 5), "input column 5 is counted twice"),
        (np.where(np.arange(64) < 8, 0.5, 1), "input columns 0 to 7 are counted 0.5 times"),
        (np.arange(64) / 64, ""),
    ],
)
def test_input_columns_that_a_product_counts_wrongly_are_described(counts: np.ndarray, words: str):
    random = np.random.default_rng(6)
    x, matrix = random.standard_normal((SEQ, 64)), random.standard_normal((96, 64))
    assert describe_product_terms((x * (1 - counts)) @ matrix.T, x, matrix) == words
    assert describe_product_terms(random.standard_normal((SEQ, 96)), x, matrix) == ""


def test_keys_missing_in_a_context_are_described():
    random = np.random.default_rng(7)
    probs, values = random.random((15, SEQ, CTX)), random.standard_normal((3, CTX, 32))
    missing = np.arange(CTX) < 4
    error = np.einsum("htk,hkd->thd", probs * missing, np.repeat(values, 5, axis=0))
    assert describe_context_terms(error, probs, values) == "keys 0 to 3 are left out"
    assert describe_context_terms(random.standard_normal(error.shape), probs, values) == ""


def test_keys_that_attention_sees_are_recovered_from_contexts():
    random, (_, axes) = np.random.default_rng(8), arrays("attn_probs")
    distance = (CTX - SEQ + np.arange(SEQ))[:, None] - np.arange(CTX)
    weights, values = random.random((15, SEQ, CTX)), random.standard_normal((3, CTX, 32))
    right, window = (weights * mask for mask in (distance >= 0, (distance >= 0) & (distance < 4)))
    right, window = (probs / probs.sum(axis=-1, keepdims=True) for probs in (right, window))
    context = np.einsum("htk,hkd->thd", window, np.repeat(values, 5, axis=0))
    recovered = recover_probs(context, values)
    assert recovered is not None
    np.testing.assert_allclose(recovered, window, atol=1e-9)
    words = "masked though visible: keys 4 or more before the query only"
    assert describe_seen_keys(recovered, right, axes) == words
    assert describe_seen_keys(right, right, axes) == ""
    small, larger = right.copy(), right.copy()
    small[:, -1, 0], larger[:, -1, 0] = 0.9e-5 * right[:, -1].max(axis=-1), 0.9e-3 * right[:, -1].max(axis=-1)
    assert describe_seen_keys(larger, small, axes) == ""  # too small to decide
    assert recover_probs(random.standard_normal(context.shape), values) is None  # no probabilities give it
    assert recover_probs(context, random.standard_normal((3, 33, 32))) is None  # more keys than dimensions


def test_kv_heads_that_query_heads_read_are_described():
    random = np.random.default_rng(9)
    by_kv_head = random.standard_normal((3, 15, SEQ, CTX))
    heads = np.arange(15)
    right = 0.5 * by_kv_head[heads // 5, heads]
    tiled, mixed = (0.5 * by_kv_head[read, heads] for read in (heads % 3, np.r_[np.zeros(10, int), np.full(5, 2)]))
    assert describe_kv_heads(tiled, right, by_kv_head) == "query head i reads KV head i % 3, instead of i // 5"
    assert describe_kv_heads(mixed, right, by_kv_head).startswith("query heads read the KV heads [0, 0, ")
    assert describe_kv_heads(right, right, by_kv_head) == ""
    assert describe_kv_heads(right, 0 * right, 0 * by_kv_head) == ""
    assert describe_kv_heads(random.standard_normal(right.shape), right, by_kv_head) == ""


def test_mask_is_described_by_the_distance_of_keys():
    expected, axes = arrays("attn_scores")
    distance = (CTX - SEQ + np.arange(SEQ))[:, None] - np.arange(CTX)
    expected[:, distance < 0] = -np.inf
    window, open_ended = expected.copy(), np.where(np.isneginf(expected), 1.0, expected)
    window[:, distance >= 4] = -np.inf
    assert describe_mask(window, expected, axes) == "masked though visible: keys 4 or more before the query only"
    assert describe_mask(open_ended, expected, axes) == "visible though masked: keys after the query only"


def test_value_that_is_not_finite_is_described_by_the_exceeded_limit():
    expected, axes = arrays("attn_probs")
    scores = 20 * np.random.default_rng(5).standard_normal(expected.shape)
    scores[0, 3, 2], actual = 90, expected.copy()
    actual[scores.max(axis=-1) > 88.73] = np.nan
    words = describe_non_finite(actual, expected, {"attn_scores": scores}, axes)
    assert "only in rows whose largest value of attn_scores exceeds 88.7" in words
    expected, axes = arrays("ffn_norm")
    expected[2, 5], expected[4, 6] = 79000, -70000
    actual = np.where(np.abs(expected) > 65504, np.inf * np.sign(expected), expected)
    words = describe_non_finite(actual, expected, {}, axes)
    assert "infinity in 2 of" in words
    assert "the first at position 102, column 5, where the right value is 79,000" in words
    assert "exactly the values that exceed float16's 65,504; the smallest of them is 70,000" in words
