"""RoPE: pairs, tables and frequency scaling by hand, then what must hold at every position."""

import numpy as np
import pytest

from llorch.families.config import FactorScaling, LinearScaling, Llama3Scaling, YarnScaling
from llorch.ops.rope import (
    frequencies,
    llama3_factors,
    rope,
    rope_adjacent,
    rope_tables,
    scale_frequencies,
    yarn_kept_share,
)

HEAD_DIM = 6
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=2000, attention_factor=1.25)


def tables(*positions: int, scaling=None):
    return rope_tables(np.array(positions), head_dim=HEAD_DIM, theta=100.0, scaling=scaling)


def test_rope_turns_half_split_pairs_as_worked_by_hand():
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = np.array([[0.0, -1.0]]), np.array([[1.0, 0.0]])  # a quarter turn of (1, 3), half a turn of (2, 4)
    np.testing.assert_array_equal(rope(x, cos, sin), [[[-3.0, -2.0, 1.0, -4.0]]])


def test_adjacent_pairs_are_turned_as_halves_are():
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = np.array([[0.0, -1.0]]), np.array([[1.0, 0.0]])  # a quarter turn of (1, 2), half a turn of (3, 4)
    np.testing.assert_array_equal(rope_adjacent(x, cos, sin), [[[-2.0, 1.0, -3.0, -4.0]]])


def test_rope_frequencies_match_powers_worked_by_hand():
    np.testing.assert_allclose(frequencies(8, 10_000.0), [1, 0.1, 0.01, 0.001], rtol=1e-14)


def test_rope_angle_is_position_times_frequency():
    cos, sin = rope_tables(np.array([3, 7]), head_dim=4, theta=100.0, scaling=None)
    angle = np.array([[3.0, 0.3], [7.0, 0.7]])
    np.testing.assert_allclose(cos, np.cos(angle), rtol=1e-14)
    np.testing.assert_allclose(sin, np.sin(angle), rtol=1e-14)


def test_rope_at_position_zero_is_identity(rng, dtype):
    x = rng.normal(size=(1, 3, HEAD_DIM)).astype(dtype)
    np.testing.assert_array_equal(rope(x, *tables(0)), x, strict=True)


def score(q, k) -> float:
    return float(np.sum(q * k))


@pytest.mark.parametrize("far", [0, 5, 4000, 131_000])
def test_rope_scores_depend_on_distance_only(rng, far):
    q, k = rng.normal(size=(2, 1, 1, HEAD_DIM))
    near = score(rope(q, *tables(11)), rope(k, *tables(4)))
    assert abs(score(rope(q, *tables(11 + far)), rope(k, *tables(4 + far))) - near) < 1e-9
    assert abs(score(rope(q, *tables(12 + far)), rope(k, *tables(4 + far))) - near) > 1e-3


def test_rope_turns_from_the_first_half_to_the_second():
    actual = rope(np.array([[[1.0, 0, 0, 0, 0, 0]]]), *tables(1))
    np.testing.assert_allclose(actual, [[[np.cos(1.0), 0, 0, np.sin(1.0), 0, 0]]], rtol=1e-15)


def test_rope_keeps_the_length_of_every_pair(rng):
    x = rng.normal(size=(4, 3, HEAD_DIM))
    actual = rope(x, *tables(1, 2, 30, 5000))
    np.testing.assert_allclose(
        actual[..., :3] ** 2 + actual[..., 3:] ** 2, x[..., :3] ** 2 + x[..., 3:] ** 2, rtol=1e-12
    )


def test_rope_turns_all_heads_of_a_token_alike(rng):
    x = rng.normal(size=(2, 5, HEAD_DIM))
    actual = rope(x, *tables(3, 9))
    for head in range(5):
        np.testing.assert_array_equal(actual[:, [head]], rope(x[:, [head]], *tables(3, 9)))


def test_rope_in_float32_is_the_float64_result_rounded_once_also_far_away(rng):
    x = rng.normal(size=(3, 2, HEAD_DIM)).astype(np.float32)
    far = tables(1, 4000, 131_071)
    np.testing.assert_array_equal(rope(x, *far), rope(x.astype(np.float64), *far).astype(np.float32), strict=True)


def test_rope_tables_are_float64_at_far_positions():
    cos, sin = tables(131_071)
    assert cos.dtype == sin.dtype == np.float64
    assert abs(cos[0, 0] - np.cos(131_071.0)) < 1e-15


def test_linear_scaling_divides_positions():
    for actual, expected in zip(tables(40, scaling=LinearScaling(factor=8.0)), tables(5), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-13)


def test_factor_scaling_divides_each_frequency_by_its_own_factor():
    actual = scale_frequencies(np.array([1.0, 0.5]), FactorScaling(factors=(4.0, 5.0)), head_dim=4, theta=4.0)
    np.testing.assert_array_equal(actual, [0.25, 0.1])


def test_llama3_factors_match_three_waves_worked_by_hand():
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    inv_freq = 2 * np.pi / np.array([4.0, 32.0, 256.0])  # 16, 2 and 1/4 turns in the old context
    # 16 > 4 turns: kept. 2 turns: a third of the way from 1 to 4, so 1/3 + 2/3 / 8 = 5/12. 1/4 < 1 turn: an eighth.
    np.testing.assert_allclose(llama3_factors(inv_freq, scaling), [1, 12 / 5, 8], rtol=1e-14)
    actual = scale_frequencies(inv_freq, scaling, head_dim=6, theta=100.0)
    np.testing.assert_allclose(actual, inv_freq * [1, 5 / 12, 1 / 8], rtol=1e-14)


def test_yarn_share_matches_a_ramp_worked_by_hand():
    # head_dim 8, theta 100: 32 turns in 2000 positions at pair 1.995, 1 turn at pair 5.006: ramp from 1 to 6
    np.testing.assert_allclose(yarn_kept_share(YARN, head_dim=8, theta=100.0), [1, 1, 0.8, 0.6], rtol=1e-14)
    actual = scale_frequencies(frequencies(8, 100.0), YARN, head_dim=8, theta=100.0)
    np.testing.assert_allclose(actual, frequencies(8, 100.0) * [1, 1, 0.85, 0.7], rtol=1e-14)


def test_yarn_multiplies_cos_and_sin_by_its_factor():
    cos, sin = rope_tables(np.array([0, 1]), head_dim=8, theta=100.0, scaling=YARN)
    np.testing.assert_array_equal(cos[0], np.full(4, 1.25))
    np.testing.assert_array_equal(sin[0], np.zeros(4))
    np.testing.assert_allclose(cos**2 + sin**2, 1.25**2, rtol=1e-14)


@pytest.mark.parametrize("scaling", [LinearScaling(factor=2.0), FactorScaling(factors=(1.0, 2.0, 3.0))])
def test_other_scalings_leave_the_length_of_cos_and_sin_alone(scaling):
    cos, sin = tables(3, 900, scaling=scaling)
    np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-14)


def test_scale_frequencies_does_not_change_its_input():
    inv_freq = frequencies(8, 100.0)
    for scaling in (LinearScaling(factor=2.0), FactorScaling(factors=(1.0, 2.0, 3.0, 4.0)), YARN):
        scale_frequencies(inv_freq, scaling, head_dim=8, theta=100.0)
        np.testing.assert_array_equal(inv_freq, frequencies(8, 100.0))
