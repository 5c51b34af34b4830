"""Windows, layers without RoPE and temperature beside the classes of transformers themselves, in float64."""

import numpy as np
import pytest
from builders.by_position import FAMILIES, logits_of, random_model

from llorch.families.layers import Layer, Temperature
from llorch.model.blocks import forward
from llorch.model.blocks.positions import seen_from
from llorch.model.cache import KVCache

pytestmark = pytest.mark.live  # transformers makes the models


@pytest.fixture(params=FAMILIES)
def both(request):
    return random_model(request.param)


@pytest.mark.parametrize(("first", "parts"), [(0, [40]), (0, [13, 1, 26]), (301, [40])])
def test_every_family_is_that_of_transformers(both, first, parts):
    model, weights = both
    ids, cache = np.arange(40) * 7 % 104, KVCache(weights.config, np.float64, first_position=first)
    expected = logits_of(model, ids, first)
    actual = np.concatenate([forward(part, weights, cache) for part in np.split(ids, np.cumsum(parts)[:-1])])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_a_window_counts_the_token_itself_and_a_chunk_starts_at_its_multiple():
    positions = np.arange(14, 18)
    np.testing.assert_array_equal(Layer(window=3).seen_from(positions), [12, 13, 14, 15])
    np.testing.assert_array_equal(Layer(chunk=8).seen_from(positions), [8, 8, 16, 16])
    np.testing.assert_array_equal(seen_from(Layer(chunk=8), positions, ctx=6), [-4, -4, 4, 4])  # keys 12 to 17
    assert Layer().seen_from(positions) is None


def test_temperature_is_that_of_positions_worked_by_hand():
    positions = np.array([6, 7, 8, 15])
    llama4, ministral = (Temperature(scale=0.1, floor=8, offset=offset) for offset in (1, 0))
    np.testing.assert_allclose(llama4.of(positions), 1 + 0.1 * np.log([1, 2, 2, 3]), rtol=1e-15)
    np.testing.assert_allclose(ministral.of(positions), 1 + 0.1 * np.log([1, 1, 2, 2]), rtol=1e-15)
