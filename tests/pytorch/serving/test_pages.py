"""Who has which page of a pool."""

import numpy as np
from helpers.refusals import refuses

from llorch.pytorch.serving.pages import PAGE, Lease, Pages, next_key


def leased(pages: Pages, n: int, *keys: bytes) -> Lease:
    lease = pages.lease(n, keys)
    assert lease is not None
    return lease


def filled(pages: Pages, *keys: bytes) -> Lease:
    """A job that has a page for each key and has published it."""
    lease = leased(pages, len(keys))
    for key in keys:
        pages.publish(pages.take(lease), key)
    return lease


def test_pages_are_given_once_and_come_back():
    pages = Pages(3)
    lease = leased(pages, 3)
    assert sorted(pages.take(lease) for _ in range(3)) == [1, 2, 3]
    assert pages.lease(1, []) is None
    pages.release(lease)
    assert (lease.pages, lease.n_reserved, pages.n_available) == ([], 0, 3)


def test_what_is_promised_is_not_promised_again_before_it_is_taken():
    pages = Pages(3)
    first = leased(pages, 2)
    assert pages.lease(2, []) is None
    assert pages.n_available == 1
    other = leased(pages, 1)
    assert len({pages.take(first), pages.take(other), pages.take(first)}) == 3
    with refuses(AssertionError, "pages", "reserved"):
        pages.take(first)


def test_a_published_page_is_shared_while_it_is_held_and_after():
    pages = Pages(4)
    first = filled(pages, b"a", b"ab")
    second = leased(pages, 3, b"a", b"ab", b"abc")
    assert second.pages == first.pages
    assert pages.n_available == 1  # two shared, one promised
    pages.release(first)
    assert pages.n_available == 1
    pages.release(second)
    assert pages.n_available == 4
    assert leased(pages, 2, b"a", b"x").pages == [1]


def test_a_prefix_ends_at_the_first_page_that_is_not_known():
    pages = Pages(4)
    pages.release(filled(pages, b"a", b"ab", b"abc"))
    pages.release(leased(pages, 1, b"x", b"ab"))
    assert leased(pages, 3, b"a", b"xb", b"abc").pages == [1]


def test_of_a_prefix_the_end_goes_first():
    pages = Pages(3)
    pages.release(filled(pages, b"a", b"ab", b"abc"))
    lease = leased(pages, 2)
    for left in ({b"a", b"ab"}, {b"a"}):
        pages.take(lease)
        assert pages._page_of.keys() == left


def test_the_page_that_nobody_has_held_for_the_longest_goes_first():
    pages = Pages(4)
    pages.release(filled(pages, b"a", b"ab"))
    pages.release(filled(pages, b"x"))
    pages.release(leased(pages, 1, b"a"))  # used again
    lease = leased(pages, 3)
    for gone in (b"", b"ab", b"x"):  # a free page first
        pages.take(lease)
        known = {key for key in (b"a", b"ab", b"x") if key in pages._page_of}
        assert gone not in known
        assert b"a" in known
    assert pages.n_available == 1


def test_pages_that_are_wanted_again_are_not_counted_as_room():
    pages = Pages(3)
    pages.release(filled(pages, b"a", b"ab"))
    assert pages.lease(4, [b"a", b"ab"]) is None
    assert pages.n_available == 3
    lease = leased(pages, 3, b"a", b"ab")
    assert (lease.pages, lease.n_reserved, pages.n_available) == ([1, 2], 1, 0)


def test_pages_of_a_job_lie_together_where_they_can():
    pages = Pages(6)
    first, second = leased(pages, 3), leased(pages, 3)
    assert [pages.take(lease) for lease in (first, second, first, first, second)] == [1, 2, 3, 4, 5]
    pages.release(first)
    assert [pages.take(leased(pages, 1)), pages.take(second)] == [6, 1]
    third = leased(pages, 2)
    assert [pages.take(third), pages.take(third)] == [3, 4]


def test_of_two_pages_with_one_key_the_first_is_found():
    pages = Pages(2)
    first, second = filled(pages, b"a"), filled(pages, b"a")
    pages.release(second)
    pages.release(first)
    assert leased(pages, 1, b"a").pages == [1]


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
        assert sorted([*pages._free, *pages._kept, *{*counted}]) == list(range(1, 21))
        assert pages._n_reserved == sum(one.n_reserved for one, _ in leases)
        assert pages.n_available >= 0
    assert n_refused > 20
    assert n_shared > 20
    for lease, _ in leases:
        pages.release(lease)
    assert pages.n_available == 20
    assert pages._key_of.keys() == {*pages._page_of.values()}


def test_a_key_stands_for_every_id_and_their_order_and_what_came_before():
    ids = list(range(PAGE))
    assert len({next_key(b"", ids), next_key(b"x", ids), next_key(b"", ids[::-1]), next_key(b"", [*ids[:-1], 0])}) == 4
    assert next_key(b"", ids) == next_key(b"", ids)
