"""The cache of jobs that come and go: keys and values of all of them in one pool of pages.

Blocks that run in one call on the CPU read the pages where they lie. Other attention is given the contexts of the
sequences of a pass side by side: they are gathered, page by page, from the pool. Slots for which a table has no page
come from a page that is always empty, and nobody sees them. A sequence that runs alone, its pages one behind the other,
is looked at where it lies, as in a cache of one row.

A delta net has one state for each job, in a row of its own, which cannot be shared: it is that of the last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from llorch.families.config import ModelConfig
from llorch.pytorch.cache import Cache, Context, PassPlacement, State
from llorch.pytorch.serving.pages import NOBODYS, PAGE


@dataclass(frozen=True)
class SequenceRow:
    """One sequence of a pass."""

    pages: Sequence[int]  # that hold its tokens, the new ones, too
    state: int  # the row of its states
    n_before: int  # tokens that the cache has of it


class PagedCache(Cache):
    """Keys and values of a layer, (1, kv_heads, slots of all pages, head_dim); states of nets, a row per job.

    During a pass of a sequence whose pages lie together `keys` and `values` begin with the first of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        n_pages: int,
        n_states: int,
        n_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Start empty; a sequence may have `n_positions` tokens."""
        self._sequence = torch.zeros(1, 1, dtype=torch.int64, device=device)  # the only row
        self._set_positions(config, 0, n_positions, dtype, device)
        self._reserve(config, 1, (n_pages + 1) * PAGE, n_states, dtype, device)
        self._pools = self.keys, self.values
        self._first = NOBODYS  # page with which keys and values begin
        heads = torch.arange(config.n_kv_heads, device=device)
        self._heads = heads[:, None] * (n_pages + 1)  # the first page of each head
        self._rows = torch.zeros(0, dtype=torch.int64, device=device)  # of the pass that runs

    def begin(self, rows: Sequence[SequenceRow], n_new: int) -> PassPlacement:
        """Make ready for a pass over the next `n_new` tokens of some sequences; gives their places."""
        positions = np.array([np.arange(row.n_before, row.n_before + n_new) for row in rows])
        ctx = int(positions.max()) + 1
        table = np.full((len(rows), -(-ctx // PAGE)), NOBODYS)
        for row, pages in zip(rows, table, strict=True):
            own = row.pages[: -(-(row.n_before + n_new) // PAGE)]
            pages[: len(own)] = own
        together = len(rows) == 1 and bool((np.diff(table[0]) == 1).all())
        self._look_from(int(table[0, 0]) if together else NOBODYS)
        table = table - self._first
        slots = np.take_along_axis(table, positions // PAGE, 1) * PAGE + positions % PAGE
        self.pages = None if together else self._here(table)
        self._rows = self._here(np.array([row.state for row in rows]))
        even = bool((positions[:, -1] == ctx - 1).all())
        return replace(self.place(self._here(positions), ctx=ctx, causal=even), slots=self._here(slots))

    def context(self, layer: int, place: PassPlacement) -> tuple[Context, Context]:
        """Return the keys and values that attention looks at, gathered unless all their pages are adjacent."""
        if self.pages is None:
            return super().context(layer, place)
        of_heads = self._heads + self.pages[:, None]  # (batch, kv_heads, pages)
        keys, values = self.keys[layer], self.values[layer]
        return _gathered(keys, of_heads, place.ctx), _gathered(values, of_heads, place.ctx)

    def _look_from(self, page: int) -> None:
        """Let `keys` and `values` begin at a page of the pool."""
        if page != self._first:
            self.keys, self.values = ([store[:, :, page * PAGE :] for store in pool] for pool in self._pools)
            self._first = page

    def state(self, layer: int) -> State | None:
        """Return the states of a layer's delta net for the sequences of the pass."""
        every = self.states[layer]
        return State(every.conv[self._rows], every.delta[self._rows])

    def remember(self, layer: int, new: State) -> None:
        """Write the states after a pass."""
        every = self.states[layer]
        every.conv.index_copy_(0, self._rows, new.conv)
        every.delta.index_copy_(0, self._rows, new.delta)

    def empty_pages(self, pages: Sequence[int]) -> None:
        """Wipe pages for another job: what nobody sees must be finite, too, as 0 times infinity would be NaN."""
        at = self._here(np.array(pages))
        for store in (store for pool in self._pools for store in pool):
            if store.numel():
                store.view(store.shape[1], -1, PAGE, store.shape[3])[:, at] = 0

    def forget_state(self, row: int) -> None:
        """Take the states of a row back to nothing."""
        for tensor in self.state_tensors:
            tensor[row].zero_()

    def _here(self, numbers: np.ndarray) -> Int[Tensor, "..."]:
        return torch.from_numpy(numbers).to(self.cos.device)


def _gathered(
    store: Float[Tensor, "1 kv_heads slots head_dim"], pages: Int[Tensor, "batch kv_heads pages"], ctx: int
) -> Context:
    found = store.view(-1, PAGE * store.shape[-1]).index_select(0, pages.flatten())
    return found.view(*pages.shape[:2], -1, store.shape[-1])[:, :, :ctx]
