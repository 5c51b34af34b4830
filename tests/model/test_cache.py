"""The KV cache: what was put in comes out, in order, at any size."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.refusals import refuses

from llorch.families.layers import DeltaNet, Layer
from llorch.model.cache import KVCache

KV_HEADS, HEAD_DIM, LAYERS = 2, 6, 3
NET = DeltaNet(conv_kernel=4, n_key_heads=2, n_value_heads=4, key_head_dim=3, value_head_dim=5)


def rows(rng, n: int, dtype: type[np.floating] = np.float64):
    return rng.normal(size=(2, n, KV_HEADS, HEAD_DIM)).astype(dtype)


@pytest.mark.parametrize("steps", [[5], [1, 1, 1, 1], [3, 1, 7, 2], [1, 13, 20]])
def test_keys_and_values_come_out_in_order_after_any_steps(config, rng, steps):
    cache = KVCache(config, np.float64)
    given = [[rows(rng, n) for n in steps] for _ in range(LAYERS)]
    for step in range(len(steps)):
        for layer in range(LAYERS):
            k, v = cache.append(layer, *given[layer][step])
            so_far = np.concatenate(given[layer][: step + 1], axis=1).swapaxes(1, 2)  # (2, kv_heads, ctx, head_dim)
            np.testing.assert_array_equal(k, so_far[0], strict=True)
            np.testing.assert_array_equal(v, so_far[1], strict=True)
        cache.advance(steps[step])
    assert cache.length == sum(steps)


def test_cache_discards_a_pass_that_was_not_completed(config, rng):
    hybrid = replace(config, layers=(Layer(mixer="delta_net"), Layer(), Layer(mixer="delta_net")), delta_net=NET)
    cache, first = KVCache(hybrid, np.float64), np.empty(0)
    for completed in (True, False):
        for layer in (0, 2):
            memory = cache.memory(layer)
            memory.conv, memory.delta = memory.conv + 1, memory.delta + layer
        k, _ = cache.memory(1)(*rows(rng, 4))
        if completed:
            cache.advance(4)
            first = k.copy()
    assert cache.length == 4
    np.testing.assert_array_equal(cache.memory(1)(*rows(rng, 1))[0][:, :4], first)
    for layer in (0, 2):
        held = cache.memory(layer)
        assert held.conv.shape == (3, NET.conv_width)
        assert held.delta.shape == (4, 3, 5)
        assert (held.conv == 1).all()
        assert (held.delta == layer).all()


def test_a_float16_cache_keeps_states_as_they_are(config):
    hybrid = replace(config, layers=(Layer(mixer="delta_net"), Layer(), Layer()), delta_net=NET)
    held = KVCache(hybrid, np.float16).memory(0)
    assert held.conv.dtype == held.delta.dtype == np.float32


def test_layers_do_not_see_each_other(config, rng):
    cache = KVCache(config, np.float64)
    first, _ = cache.append(0, *rows(rng, 2))
    second, _ = cache.append(1, *rows(rng, 2))
    assert not np.array_equal(first, second)
    assert not np.shares_memory(first, second)


def test_caches_of_two_sequences_share_nothing(config, rng):
    one, two = KVCache(config, np.float64), KVCache(config, np.float64)
    for layer in range(LAYERS):
        one.append(layer, *rows(rng, 3))
    one.advance(3)
    assert (one.length, two.length) == (3, 0)
    assert two.append(0, *rows(rng, 1))[0].shape == (KV_HEADS, 1, HEAD_DIM)


def test_the_cache_keeps_a_copy_of_what_it_was_given(config, rng):
    cache = KVCache(config, np.float64)
    k, v = rows(rng, 2)
    held, _ = cache.append(0, k, v)
    before = held.copy()
    k[:] = 0
    np.testing.assert_array_equal(held, before)


def test_the_cache_keeps_its_dtype(config, rng, dtype):
    cache = KVCache(config, dtype)
    for _ in range(3):
        k, v = cache.append(0, *rows(rng, 5, dtype))
        cache.advance(5)
        assert k.dtype == v.dtype == dtype


def test_storage_is_at_most_twice_what_was_needed(config, rng):
    cache = KVCache(config, np.float64)
    for step in range(1, 34):
        k, _ = [cache.append(layer, *rows(rng, 1)) for layer in range(LAYERS)][-1]
        cache.advance(1)
        assert k.base is not None
        assert step <= k.base.shape[1] < 2 * step + 1


def test_storage_grows_seldom_so_that_each_token_is_copied_a_few_times_only(config, rng):
    cache = KVCache(config, np.float64)
    stores = []
    for _ in range(64):
        k, _ = [cache.append(layer, *rows(rng, 1)) for layer in range(LAYERS)][-1]
        cache.advance(1)
        if not any(k.base is store for store in stores):
            stores.append(k.base)
    assert [store.shape[1] for store in stores] == [1, 2, 4, 8, 16, 32, 64]


def test_an_empty_cache_costs_nothing_whatever_the_context(config):
    cache = KVCache(replace(config, max_position_embeddings=2**27), np.float32)
    np.testing.assert_array_equal(cache.next_positions(3), [0, 1, 2])


def test_positions_go_on_where_the_cache_ends(config, rng):
    cache = KVCache(config, np.float64, first_position=30)
    np.testing.assert_array_equal(cache.next_positions(2), [30, 31])
    for layer in range(LAYERS):
        cache.append(layer, *rows(rng, 4))
    cache.advance(4)
    np.testing.assert_array_equal(cache.next_positions(2), [34, 35])
    np.testing.assert_array_equal(cache.next_positions(6), np.arange(34, 40))


@pytest.mark.parametrize(
    ("first_position", "n", "facts"),
    [
        (0, 0, ("token id", "none")),
        (0, 41, ("41 tokens", "position 0", "40 tokens")),
        (40, 1, ("1 tokens", "position 40", "40 tokens")),
        (-1, 1, ("1 tokens", "position -1", "40 tokens")),
    ],
    ids=["none", "41 tokens", "behind the end", "before the start"],
)
def test_what_does_not_fit_the_context_is_refused_with_the_numbers(config, first_position, n, facts):
    with refuses(ValueError, *facts, where="forward"):
        KVCache(config, np.float32, first_position=first_position).next_positions(n)


def test_the_whole_context_fits(config):
    assert KVCache(config, np.float32).next_positions(40)[-1] == 39
