"""Sums of attention that are added key by key: the derived variance is the size of the error, whatever the terms."""

import numpy as np
import pytest
from helpers.stored_goldens import golden_of, weights_of

from llorch.judging.tolerances.forward import variances
from llorch.judging.tolerances.one_lane import SCORES, context_variance, denominator_variance
from llorch.judging.tolerances.rounding import ISOLATED

N_ROWS, N_KEYS, HEAD_DIM = 200, 1200, 8
RNG = np.random.default_rng(0)
EXPONENTS = {  # of each row
    "alike": RNG.normal(0, 0.1, (N_ROWS, N_KEYS)),
    "unlike": RNG.normal(0, 3, (N_ROWS, N_KEYS)),
    "first key": np.where(np.arange(N_KEYS) == 0, 0, RNG.normal(-9, 1, (N_ROWS, N_KEYS))),
    "lost": np.where(np.arange(N_KEYS) == 0, 0, RNG.normal(-17.5, 0.3, (N_ROWS, N_KEYS))),  # below 2^-24 of the sum
}


def terms_of(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Exponentials in float32, and the exact probabilities."""
    exponentials = np.exp(EXPONENTS[kind] - EXPONENTS[kind].max(-1, keepdims=True)).astype(np.float32)
    exact = exponentials.astype(np.float64)
    return exponentials, exact / exact.sum(-1, keepdims=True)


def assert_size(errors: np.ndarray, variance: np.ndarray, kind: str) -> None:
    """Errors have the derived deviation or a little less, and none is beyond four. Lost terms may make it two."""
    assert 0.2 <= np.sqrt(np.square(errors).mean() / variance.mean()) <= (2 if kind == "lost" else 1)
    assert (np.abs(errors) <= 4 * np.sqrt(variance)).all()


@pytest.mark.parametrize("kind", EXPONENTS)
def test_denominator_added_key_by_key_has_the_derived_error(kind: str):
    exponentials, probs = terms_of(kind)
    total = np.cumsum(exponentials, -1)[:, -1:].astype(np.float64)
    assert_size(total / exponentials.sum(-1, keepdims=True, dtype=np.float64) - 1, denominator_variance(probs), kind)


@pytest.mark.parametrize("values", ["alike", "of random signs"])
@pytest.mark.parametrize("kind", EXPONENTS)
def test_context_added_key_by_key_has_the_derived_error(kind: str, values: str):
    probs = terms_of(kind)[1].astype(np.float32)
    v = RNG.normal(3.0 if values == "alike" else 0.0, 1, (N_KEYS, HEAD_DIM)).astype(np.float32)
    total = np.zeros((N_ROWS, HEAD_DIM), np.float32)
    for key in range(N_KEYS):
        total += probs[:, key, None] * v[key]
    expected = probs.astype(np.float64) @ v.astype(np.float64)
    assert_size(total - expected, context_variance(probs, v, expected) + np.square(2.0**-24 * expected), kind)


def test_context_of_hidden_probabilities_has_the_error_of_their_denominators():
    golden, probs, context = golden_of("micro-llama"), "l0.attn_probs", "l0.attn_context"
    trace = golden.engine_outputs["llamacpp"].traces["near"]
    visible, hidden = (
        dict(variances(weights_of("micro-llama"), golden.cases["near"], trace, hidden=names, one_lane=True))
        for names in ((), {probs})
    )
    errors = denominator_variance(trace[probs]).transpose(1, 0, 2)  # (seq, heads, 1)
    least = errors * np.square(trace[context].reshape(*errors.shape[:2], -1))
    added = hidden[context][ISOLATED] - visible[context][ISOLATED]
    assert (added >= 0.99 * least.reshape(added.shape)).all()


def test_masked_keys_and_one_key_add_no_error():
    probs = np.array([[0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0]], np.float32)
    assert np.array_equal(denominator_variance(probs) * 2.0**48, [[1], [1.25]])


def test_score_of_terms_of_one_sign_has_the_derived_error():
    terms = RNG.uniform(0.5, 1.5, (5000, 128)).astype(np.float32)
    expected = terms.sum(-1, dtype=np.float64)
    errors = np.cumsum(terms, -1)[:, -1] / expected - 1
    assert 0.4 <= np.sqrt(np.square(errors).mean() / (SCORES * 128)) <= 1
