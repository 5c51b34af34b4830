"""Contexts that lie in pages, against the cache that keeps them in rows; and who has which page of a pool."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.refusals import refuses

from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.ops.compiled.library import library
from llorch.pytorch.cache import Cache, State
from llorch.pytorch.kernels.cpu.layer import CpuRotate
from llorch.pytorch.serving.paged_cache import PagedCache, SequenceRow
from llorch.pytorch.serving.pages import PAGE, Lease, Pages, next_key
from llorch.runtime.builtin import builtin_path

CPU = torch.device("cpu")
LAYER = 1


def model_config(name: str = "micro-qwen2") -> ModelConfig:
    return open_weights(builtin_path(name)).config


def make_paged_cache(config: ModelConfig, n_pages: int = 6, dtype: torch.dtype = torch.float32) -> PagedCache:
    return PagedCache(config, n_pages=n_pages, n_states=3, n_positions=3 * PAGE, dtype=dtype, device=CPU)


def new_rows(config: ModelConfig, batch: int, seq: int, seed: int) -> torch.Tensor:
    return torch.randn(batch, seq, config.n_kv_heads, config.head_dim, generator=torch.Generator().manual_seed(seed))


def append_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *stores: tuple[Any, Any], compiled: bool
) -> list[Any]:
    """Keys and values of caches at places, after these were appended by the page or the compiled kernel."""
    if not compiled:
        return [store.append(LAYER, k, v, place) for place, store in stores]
    if (made := library()) is None:
        pytest.skip("NOT RUN: no C compiler")
    return [CpuRotate(made)(q, k, v, LAYER, place, store, lambda _, x: x)[1:] for place, store in stores]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_context_equals_the_written_rows_for_any_page_order(dtype: torch.dtype, compiled: bool):
    config = model_config()
    cache, plain = (
        make_paged_cache(config, dtype=dtype),
        Cache(config, batch=2, n_slots=3 * PAGE, dtype=dtype, device=CPU),
    )
    filled = [PAGE + 7, 3]
    for at, (row, n) in enumerate(zip([SequenceRow([4, 2], 0, 0), SequenceRow([5], 1, 0)], filled, strict=True)):
        k, v = new_rows(config, 1, n, at), new_rows(config, 1, n, 9 + at)
        place = cache.begin([row], n)
        keys, values = cache.append(LAYER, k, v, place)
        plain.keys[LAYER][at, :, :n], plain.values[LAYER][at, :, :n] = k[0].transpose(0, 1), v[0].transpose(0, 1)
        assert torch.equal(keys[0], plain.keys[LAYER][at, :, :n])
        assert place.visible is None
    q, k, v = new_rows(config, 2, 1, 20), new_rows(config, 2, 1, 21), new_rows(config, 2, 1, 22)
    place = cache.begin([SequenceRow([4, 2], 0, filled[0]), SequenceRow([5], 1, filled[1])], 1)
    other = plain.place(torch.tensor([[n] for n in filled]), ctx=PAGE + 8)
    if compiled:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    given = append_rows(q, k, v, (place, cache), (other, plain), compiled=compiled)
    (keys, values), (want_keys, want_values) = given
    for name in ("cos", "sin", "visible"):
        assert torch.equal(getattr(place, name), getattr(other, name))
    assert place.visible is not None
    seen = place.visible[:, 0, 0]  # (batch, ctx)
    for actual, expected in ((keys, want_keys), (values, want_values)):
        assert actual.shape == expected.shape
        assert torch.equal(actual * seen[:, None, :, None], expected * seen[:, None, :, None])
        assert actual[1, :, 4:PAGE].eq(0).all()
        assert actual[1, :, PAGE:].eq(0).all()  # the page of nobody
    assert not cache.keys[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llorch", "torch"])
def test_single_sequence_attends_to_its_pages_in_place(dtype: torch.dtype, name: str):
    config = model_config()
    cache, plain = (
        make_paged_cache(config, dtype=dtype),
        Cache(config, batch=1, n_slots=3 * PAGE, dtype=dtype, device=CPU),
    )
    k, v = (new_rows(config, 1, PAGE + 9, seed).to(dtype) for seed in (1, 2))
    place = cache.begin([SequenceRow([3, 4], 0, 0)], PAGE + 9)
    other = plain.place(torch.arange(PAGE + 9)[None], ctx=PAGE + 9)
    given = append_rows(k, k, v, (place, cache), (other, plain), compiled=name == "llorch")
    assert cache.pages is None
    assert all(torch.equal(actual, expected) for actual, expected in zip(*given, strict=True))
    assert given[0][0].data_ptr() == cache._pools[0][LAYER][:, :, 3 * PAGE :].data_ptr()
    assert not cache._pools[0][LAYER][:, :, : 3 * PAGE].any()
    cache.begin([SequenceRow([3, 4], 0, PAGE + 9), SequenceRow([1, 2], 1, PAGE)], 1)
    assert cache.pages is not None
    assert torch.equal(cache.context(LAYER, place)[0][:1], given[0][0])
    cache.begin([SequenceRow([3, 5], 0, PAGE + 9)], 1)
    assert cache.pages is not None


def test_windows_chunks_and_temperatures_are_per_row():
    config = model_config("micro-llama4")
    cache, plain = make_paged_cache(config), Cache(config, batch=2, n_slots=3 * PAGE, dtype=torch.float32, device=CPU)
    actual = cache.begin([SequenceRow([1, 2], 0, 70), SequenceRow([3, 4, 5], 1, 130)], 1)
    expected = plain.place(torch.tensor([[70], [130]]), ctx=131)
    assert actual.slots.tolist() == [[2 * PAGE + 6], [5 * PAGE + 2]]
    assert actual.near.keys() == expected.near.keys()
    for one, other in (
        (actual.heat, expected.heat),
        *((actual.near[bound], expected.near[bound]) for bound in expected.near),
    ):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert actual.ctx == 131


def test_rows_of_equal_length_need_no_mask():
    cache = make_paged_cache(model_config())
    assert cache.begin([SequenceRow([1], 0, 5), SequenceRow([2], 1, 5)], 1).visible is None
    assert cache.begin([SequenceRow([1], 0, 5), SequenceRow([2], 1, 6)], 1).visible is not None


def test_only_pages_of_the_next_job_are_cleared():
    cache = make_paged_cache(model_config())
    for store in (*cache.keys, *cache.values):
        store.fill_(torch.nan)
    cache.empty_pages([2, 5])
    for store in (*cache.keys, *cache.values):
        wiped = store.eq(0).all(-1)[0].unflatten(1, (-1, PAGE)).all(-1)
        assert wiped.tolist() == [[page in (2, 5) for page in range(7)]] * len(wiped)


def test_states_follow_the_rows_of_the_pass():
    config = model_config("micro-qwen3-next")
    cache = make_paged_cache(config)
    layer = next(iter(cache.states))
    assert [config.layer(i).mixer == "delta_net" for i in range(config.n_layers)] == [not k.numel() for k in cache.keys]
    cache.begin([SequenceRow([1], 2, 0), SequenceRow([2], 0, 0)], 1)
    like = cache.state(layer)
    assert like is not None
    cache.remember(layer, State(torch.ones_like(like.conv), torch.stack([like.delta[0] + 5, like.delta[1] + 7])))
    assert [int(row.max()) for row in cache.states[layer].delta] == [7, 0, 5]
    cache.begin([SequenceRow([2], 0, 1)], 1)
    one = cache.state(layer)
    assert one is not None
    assert (float(one.delta.max()), len(one.conv)) == (7, 1)
    cache.forget_state(2)
    assert [int(row.max()) for row in cache.states[layer].delta] == [7, 0, 0]
    assert [int(row.max()) for row in cache.states[layer].conv] == [1, 0, 0]


def lease_pages(pages: Pages, n: int, *keys: bytes) -> Lease:
    lease = pages.lease(n, keys)
    assert lease is not None
    return lease


def fill_pages(pages: Pages, *keys: bytes) -> Lease:
    """A job that has a page for each key and has published it."""
    lease = lease_pages(pages, len(keys))
    for key in keys:
        pages.publish(pages.take(lease), key)
    return lease


def test_pages_are_leased_once_and_returned():
    pages = Pages(3)
    lease = lease_pages(pages, 3)
    assert sorted(pages.take(lease) for _ in range(3)) == [1, 2, 3]
    assert pages.lease(1, []) is None
    pages.release(lease)
    assert (lease.pages, lease.n_reserved, pages.n_available) == ([], 0, 3)


def test_reserved_pages_are_not_reserved_twice():
    pages = Pages(3)
    first = lease_pages(pages, 2)
    assert pages.lease(2, []) is None
    assert pages.n_available == 1
    other = lease_pages(pages, 1)
    assert len({pages.take(first), pages.take(other), pages.take(first)}) == 3
    with refuses(AssertionError, "pages", "reserved"):
        pages.take(first)


def test_published_page_is_shared_during_and_after_its_lease():
    pages = Pages(4)
    first = fill_pages(pages, b"a", b"ab")
    second = lease_pages(pages, 3, b"a", b"ab", b"abc")
    assert second.pages == first.pages
    assert pages.n_available == 1  # two shared, one promised
    pages.release(first)
    assert pages.n_available == 1
    pages.release(second)
    assert pages.n_available == 4
    assert lease_pages(pages, 2, b"a", b"x").pages == [1]


def test_prefix_ends_at_the_first_unknown_page():
    pages = Pages(4)
    pages.release(fill_pages(pages, b"a", b"ab", b"abc"))
    pages.release(lease_pages(pages, 1, b"x", b"ab"))
    assert lease_pages(pages, 3, b"a", b"xb", b"abc").pages == [1]


def test_last_page_of_a_prefix_is_evicted_first():
    pages = Pages(3)
    pages.release(fill_pages(pages, b"a", b"ab", b"abc"))
    lease = lease_pages(pages, 2)
    for left in ({b"a", b"ab"}, {b"a"}):
        pages.take(lease)
        assert pages._page_of.keys() == left


def test_least_recently_used_page_is_evicted_first():
    pages = Pages(4)
    pages.release(fill_pages(pages, b"a", b"ab"))
    pages.release(fill_pages(pages, b"x"))
    pages.release(lease_pages(pages, 1, b"a"))  # used again
    lease = lease_pages(pages, 3)
    for gone in (b"", b"ab", b"x"):  # a free page first
        pages.take(lease)
        known = {key for key in (b"a", b"ab", b"x") if key in pages._page_of}
        assert gone not in known
        assert b"a" in known
    assert pages.n_available == 1


def test_reused_pages_do_not_count_as_free():
    pages = Pages(3)
    pages.release(fill_pages(pages, b"a", b"ab"))
    assert pages.lease(4, [b"a", b"ab"]) is None
    assert pages.n_available == 3
    lease = lease_pages(pages, 3, b"a", b"ab")
    assert (lease.pages, lease.n_reserved, pages.n_available) == ([1, 2], 1, 0)


def test_pages_of_a_job_are_contiguous_if_possible():
    pages = Pages(6)
    first, second = lease_pages(pages, 3), lease_pages(pages, 3)
    assert [pages.take(lease) for lease in (first, second, first, first, second)] == [1, 2, 3, 4, 5]
    pages.release(first)
    assert [pages.take(lease_pages(pages, 1)), pages.take(second)] == [6, 1]
    third = lease_pages(pages, 2)
    assert [pages.take(third), pages.take(third)] == [3, 4]


def test_first_of_two_pages_with_one_key_is_used():
    pages = Pages(2)
    first, second = fill_pages(pages, b"a"), fill_pages(pages, b"a")
    pages.release(second)
    pages.release(first)
    assert lease_pages(pages, 1, b"a").pages == [1]


def test_nothing_leaks_in_a_thousand_random_jobs():
    rng, pages, leases = np.random.default_rng(0), Pages(20), list[tuple[Lease, list[bytes]]]()
    n_refused = n_shared = 0
    for _ in range(1000):
        keys = [bytes([*range(n), int(rng.integers(3))]) for n in range(int(rng.integers(1, 6)))]
        lease = pages.lease(len(keys), keys[:-1])
        if lease is None:
            n_refused += 1
        else:
            n_shared += len(lease.pages)
            leases.append((lease, keys))
        if leases and (lease is None or rng.random() < 0.4):
            pages.release(leases.pop(int(rng.integers(len(leases))))[0])
        if leases:
            some, its_keys = leases[int(rng.integers(len(leases)))]
            if some.n_reserved:
                pages.publish(pages.take(some), its_keys[len(some.pages) - 1])
        counted = [page for one, _ in leases for page in one.pages]
        assert {page: counted.count(page) for page in range(1, 21)} == pages._holders
        assert sorted([*pages._free, *pages._unheld, *{*counted}]) == list(range(1, 21))
        assert pages._n_reserved == sum(one.n_reserved for one, _ in leases)
        assert pages.n_available >= 0
    assert n_refused > 20
    assert n_shared > 20
    for lease, _ in leases:
        pages.release(lease)
    assert pages.n_available == 20
    assert pages._key_of.keys() == {*pages._page_of.values()}


def test_page_key_depends_on_ids_order_and_prefix():
    ids = list(range(PAGE))
    assert len({next_key(b"", ids), next_key(b"x", ids), next_key(b"", ids[::-1]), next_key(b"", [*ids[:-1], 0])}) == 4
    assert next_key(b"", ids) == next_key(b"", ids)
