"""Pages of a pool: reserved, given to jobs as they grow, shared by jobs whose prompts begin alike.

A page that is full can be published under a key, which stands for the whole prefix that it ends. Whoever needs the same
tokens at the same place holds that page, too, and computes nothing. A published page that nobody holds any more is kept
until a page is wanted and none is free; the one that nobody has held for the longest goes first.

A job reserves at the start what it may come to need, so that none that runs can fail for lack of a page.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PAGE = 64  # slots; one block of keys in reproducible attention
NOBODYS = 0  # the page that stays empty, where a table ends before those of other jobs


@dataclass
class Lease:
    """The pages and the reservation that one job has of the pool."""

    pages: list[int] = field(default_factory=list)  # in the order of its tokens
    n_reserved: int = 0  # that it has not taken yet


class Pages:
    """The table of which job has which page; the contents lie elsewhere."""

    def __init__(self, n_pages: int) -> None:
        """Start with all pages free; the first one is number 1."""
        self.n_pages = n_pages
        self._free: dict[int, None] = dict.fromkeys(range(1, n_pages + 1))  # the longest unused first
        self._holders = dict.fromkeys(self._free, 0)
        self._kept: dict[int, None] = {}  # published and held by nobody, the longest unused first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._n_reserved = 0

    @property
    def n_available(self) -> int:
        """Pages that can still be promised."""
        return len(self._free) + len(self._kept) - self._n_reserved

    def lease(self, n_pages: int, keys: Sequence[bytes]) -> Lease | None:
        """Promise a job so many pages, those of its `keys` that are known among them; None while there are too few."""
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
        """Give a job the page that was published under a key as its next one, if there is one."""
        page = self._page_of.get(key)
        if page is None:
            return False
        self._hold(lease, page)
        return True

    def take(self, lease: Lease) -> int:
        """Give a job a page of its own as its next one, if it can be the one behind; it may have an older content."""
        assert lease.n_reserved > 0, "a job wants more pages than it has reserved"
        page = lease.pages[-1] + 1 if lease.pages else NOBODYS
        if page not in self._free:
            page = next(iter(self._free)) if self._free else self._forgotten()
        self._free.pop(page, None)
        self._hold(lease, page)
        return page

    def publish(self, page: int, key: bytes) -> None:
        """Let others find a page that is full; the first one that has a key keeps it."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def release(self, lease: Lease) -> None:
        """Take back all that a job has; of pages that are kept, those at the end of a prefix will go first."""
        self._n_reserved -= lease.n_reserved
        for page in lease.pages:
            self._holders[page] -= 1
        unheld = [page for page in lease.pages if self._holders[page] == 0]
        self._kept.update(dict.fromkeys(page for page in reversed(unheld) if page in self._key_of))
        self._free.update(dict.fromkeys(page for page in unheld if page not in self._key_of))
        lease.pages, lease.n_reserved = [], 0

    def _hold(self, lease: Lease, page: int) -> None:
        lease.pages.append(page)
        lease.n_reserved -= 1
        self._n_reserved -= 1
        self._holders[page] += 1
        self._kept.pop(page, None)

    def _forgotten(self) -> int:
        """Take the page that was kept longest, so that no job finds it by its key any more."""
        oldest = next(iter(self._kept))
        del self._kept[oldest], self._page_of[self._key_of.pop(oldest)]
        return oldest


def next_key(before: bytes, ids: Sequence[int]) -> bytes:
    """Return the key of a prefix that is one page longer than the prefix of the key `before`."""
    return hashlib.sha256(before + np.asarray(ids, np.int64).tobytes()).digest()
