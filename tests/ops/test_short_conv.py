"""Short convolution: rows by hand, then causality and its state, however a sequence is cut."""

import numpy as np
import pytest

from llorch.ops.short_conv import next_state, short_conv

pytestmark = pytest.mark.usefixtures("arithmetic")

WIDTH, TAPS = 5, 3


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.fixture
def conv_inputs(rng):
    return rng.normal(size=(9, WIDTH)), rng.normal(size=(WIDTH, TAPS + 1)), rng.normal(size=(TAPS, WIDTH))


def test_each_channel_has_its_own_kernel_with_the_newest_token_last():
    x, kernel = np.array([[1.0, 10.0], [2.0, 20.0]]), np.array([[3.0, 5.0], [0.0, -7.0]])
    actual = short_conv(x, kernel, np.array([[4.0, 40.0]]))
    np.testing.assert_allclose(actual, silu(np.array([[3 * 4 + 5 * 1, -70], [3 * 1 + 5 * 2, -140]])), rtol=1e-14)


@pytest.mark.parametrize("cut", range(1, 9))
def test_two_chunks_equal_one_pass(conv_inputs, cut):
    x, kernel, state = conv_inputs
    first, between = short_conv(x[:cut], kernel, state), next_state(state, x[:cut])
    second = short_conv(x[cut:], kernel, between)
    np.testing.assert_allclose(np.concatenate([first, second]), short_conv(x, kernel, state), rtol=1e-13)
    np.testing.assert_array_equal(next_state(between, x[cut:]), x[-TAPS:])


def test_the_state_of_a_short_pass_keeps_older_rows(conv_inputs):
    x, _, state = conv_inputs
    np.testing.assert_array_equal(next_state(state, x[:1]), np.concatenate([state[1:], x[:1]]))


def test_convolution_is_causal(conv_inputs):
    x, kernel, state = conv_inputs
    changed = np.concatenate([x[:4], -x[4:]])
    np.testing.assert_array_equal(short_conv(changed, kernel, state)[:4], short_conv(x, kernel, state)[:4])


def test_silu_of_very_negative_sums_is_zero_without_a_warning(dtype):
    actual = short_conv(np.full((1, 2), -1e4, dtype), np.ones((2, 1), dtype), np.empty((0, 2), dtype))
    np.testing.assert_array_equal(actual, np.zeros((1, 2), dtype), strict=True)
