"""Where an error lies: in the token, head and channel in which it was made, whatever the order of axes."""

import numpy as np
import pytest

from llorch.diagnosis import profile as module
from llorch.diagnosis.profile import N_ULPS, profile
from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.runtime.builtin import builtin_path
from llorch.stages.table import BY_NAME

N_TOKENS = 5


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return open_weights(builtin_path("micro-qwen3")).config


def right(stage: str, config: ModelConfig) -> np.ndarray:
    shape = BY_NAME[stage].shape(config, seq=N_TOKENS, ctx=N_TOKENS)
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("at_once", [1, 2**22])
@pytest.mark.parametrize(
    ("stage", "index", "place"),
    [
        ("q_rope", (3, 1, 7), (3, 1, 7)), ("k_cache", (1, 3, 7), (3, 1, 7)), ("attn_probs", (1, 3, 2), (3, 1, 2)),
        ("ffn_gate", (3, 9), (3, None, 9)), ("logits", (3, 1), (3, None, 1)),
    ],
)  # fmt: skip
def test_an_error_is_found_where_it_was_made(
    stage: str, index: tuple, place: tuple, at_once: int, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    expected = right(stage, config)
    actual = expected.copy()
    actual[index] += 1
    found = profile(actual, expected, BY_NAME[stage], config)
    for shares, at in zip((found.tokens, found.heads, found.channels), place, strict=True):
        assert (None if shares is None else np.flatnonzero(shares).tolist()) == (None if at is None else [at])
    assert found.ulps.sum() == expected.size
    assert found.ulps[0] == expected.size - 1


def test_a_joined_projection_is_told_apart_by_head(config: ModelConfig):
    expected = right("q_proj", config)
    actual = expected.copy()
    actual[:, config.head_dim * 2 + 5] *= 2
    found = profile(actual, expected, BY_NAME["q_proj"], config)
    assert found.heads is not None
    assert (np.flatnonzero(found.heads), np.flatnonzero(found.channels)) == ([2], [5])
    assert found.heads.shape == (config.n_heads,)
    off = np.linalg.norm(actual[0] - expected[0]) / np.linalg.norm(expected[0])
    assert found.tokens[0] == pytest.approx(off)


@pytest.mark.parametrize(("ulps", "at"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (2**23, 24), (2**24, 25)])
def test_ulps_are_counted_in_steps_of_the_element(ulps: int, at: int, config: ModelConfig):
    expected = np.full((1, config.hidden_size), 1.5)
    found = profile(expected + ulps * 2.0**-23, expected, BY_NAME["embed"], config).ulps
    assert np.flatnonzero(found).tolist() == [at]
    assert len(found) == N_ULPS


def test_masks_that_agree_are_no_error_and_others_are_without_end(config: ModelConfig):
    expected = right("attn_scores", config)
    expected[:, ~np.tri(N_TOKENS, dtype=bool)] = -np.inf
    actual = expected.copy()
    actual[1, 0, 4], actual[2, 3, 0] = 0.0, -np.inf
    found = profile(actual, expected, BY_NAME["attn_scores"], config)
    assert found.heads is not None
    assert np.flatnonzero(found.tokens).tolist() == [0, 3]
    assert found.heads[1:3].tolist() == [np.inf, np.inf]
    assert found.heads[0] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_are_errors_without_end(bad: float, config: ModelConfig):
    expected = right("embed", config)
    actual = expected.copy()
    actual[2, 3] = bad
    found = profile(actual, expected, BY_NAME["embed"], config)
    assert found.tokens.tolist() == [0, 0, np.inf, 0, 0]
    assert found.ulps[-1] == 1


def test_a_vocabulary_is_cut_into_stretches(config: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_STRETCHES", 100)
    expected = right("logits", config)
    actual = expected.astype(np.float64)
    actual[:, -1] = 1e39  # beyond float32
    assert np.flatnonzero(profile(actual, expected, BY_NAME["logits"], config).channels).tolist() == [99]
    assert profile(expected, actual, BY_NAME["logits"], config).ulps[-1] == N_TOKENS
