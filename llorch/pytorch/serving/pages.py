"""Page pool: jobs reserve pages, take them as they grow, and share pages of equal prefixes.

A full page can be published under a key that stands for its prefix: all tokens up to the end of the page. A job with
the same prefix reuses the page and skips its computation. A published page that no job holds stays until a page is
needed and none is free; the least recently used is evicted first.

A job reserves all pages that it may need when it joins, so a running job never fails for lack of a page.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PAGE = 64  # slots; one key block of reproducible attention
EMPTY_PAGE = 0  # page that stays empty, for the end of tables shorter than others


@dataclass
class Lease:
    """Pages and reservation of one job."""

    pages: list[int] = field(default_factory=list)  # in token order
    n_reserved: int = 0  # pages not taken yet


class Pages:
    """Assignment of pages to jobs; the contents are in `PagedCache`."""

    def __init__(self, n_pages: int) -> None:
        """Start with all pages free; they are numbered from 1."""
        self.n_pages = n_pages
        self._free: dict[int, None] = dict.fromkeys(range(1, n_pages + 1))  # least recently used first
        self._holders = dict.fromkeys(self._free, 0)
        self._unheld: dict[int, None] = {}  # published pages that no job holds; least recently used first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._n_reserved = 0

    @property
    def n_available(self) -> int:
        """Number of pages that can still be reserved."""
        return len(self._free) + len(self._unheld) - self._n_reserved

    def lease(self, n_pages: int, keys: Sequence[bytes]) -> Lease | None:
        """Reserve pages for a job, and give it the published pages of its `keys`; None if too few are available."""
        lease = Lease(n_reserved=n_pages)
        self._n_reserved += n_pages
        for key in keys:
            if not self.share(lease, key):
                break
        if self.n_available < 0:
            self.release(lease)
            return None
        return lease

    def share(self, lease: Lease, key: bytes) -> bool:
        """Add the page published under a key to a job; False if there is none."""
        page = self._page_of.get(key)
        if page is None:
            return False
        self._hold(lease, page)
        return True

    def take(self, lease: Lease) -> int:
        """Add an unshared page to a job, the adjacent page if it is free; it may have old contents."""
        assert lease.n_reserved > 0, "a job wants more pages than it has reserved"
        page = lease.pages[-1] + 1 if lease.pages else EMPTY_PAGE
        if page not in self._free:
            page = next(iter(self._free)) if self._free else self._evict()
        self._free.pop(page, None)
        self._hold(lease, page)
        return page

    def publish(self, page: int, key: bytes) -> None:
        """Make a full page available under a key; a key keeps its first page."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def release(self, lease: Lease) -> None:
        """Release all pages of a job; of its published pages, the last of the prefix will be evicted first."""
        self._n_reserved -= lease.n_reserved
        for page in lease.pages:
            self._holders[page] -= 1
        free_pages = [page for page in lease.pages if self._holders[page] == 0]
        self._unheld.update(dict.fromkeys(page for page in reversed(free_pages) if page in self._key_of))
        self._free.update(dict.fromkeys(page for page in free_pages if page not in self._key_of))
        lease.pages, lease.n_reserved = [], 0

    def _hold(self, lease: Lease, page: int) -> None:
        lease.pages.append(page)
        lease.n_reserved -= 1
        self._n_reserved -= 1
        self._holders[page] += 1
        self._unheld.pop(page, None)

    def _evict(self) -> int:
        """Evict the least recently used published page, so that no job finds it by its key."""
        oldest = next(iter(self._unheld))
        del self._unheld[oldest], self._page_of[self._key_of.pop(oldest)]
        return oldest


def next_key(previous: bytes, ids: Sequence[int]) -> bytes:
    """Return the key of a prefix that is one page longer than the prefix of the key `previous`."""
    return hashlib.sha256(previous + np.asarray(ids, np.int64).tobytes()).digest()
