"""Cache of continuous batching: keys and values of all jobs in one pool of pages (`PAGE` slots each).

Compiled CPU blocks read the pages in place. Other attention gets the contexts of a pass gathered page by page from the
pool. The table of a pass has one row of page numbers per sequence; the empty page, which no token sees, fills shorter
rows. A sequence that runs alone with adjacent pages is read in place, as in a cache of one row.

A delta net has one state per job, in a separate row. It cannot be shared, because it is the state of the last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from llorch.families.config import ModelConfig
from llorch.pytorch.cache import Cache, Context, PassPlacement, State
from llorch.pytorch.serving.pages import EMPTY_PAGE, PAGE


@dataclass(frozen=True)
class SequenceRow:
    """Pages, state and length of one sequence of a pass."""

    pages: Sequence[int]  # of its tokens, including the new tokens
    state: int  # row of its delta net states
    n_before: int  # tokens already in the cache


class PagedCache(Cache):
    """Keys and values of a layer, (1, kv_heads, slots of all pages, head_dim); delta net states, a row per job.

    In a pass of one sequence with adjacent pages, `keys` and `values` start at its first page.
    """

    def __init__(
        self, config: ModelConfig, *, n_pages: int, n_states: int, n_positions: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Allocate an empty cache; a sequence may have `n_positions` tokens."""
        self._sequence = torch.zeros(1, 1, dtype=torch.int64, device=device)  # the only row
        self._set_positions(config, 0, n_positions, dtype, device)
        self._reserve(config, 1, (n_pages + 1) * PAGE, n_states, dtype, device)
        self._pools = self.keys, self.values
        self._first = EMPTY_PAGE  # page at which the views `keys` and `values` start
        heads = torch.arange(config.n_kv_heads, device=device)
        self._heads = heads[:, None] * (n_pages + 1)  # first page of each head
        self._rows = torch.zeros(0, dtype=torch.int64, device=device)  # state rows of the current pass

    def begin(self, rows: Sequence[SequenceRow], n_new: int) -> PassPlacement:
        """Prepare a pass over the next `n_new` tokens of some sequences, and return their placement."""
        positions = np.array([np.arange(row.n_before, row.n_before + n_new) for row in rows])
        ctx = int(positions.max()) + 1
        table = np.full((len(rows), -(-ctx // PAGE)), EMPTY_PAGE)
        for row, pages in zip(rows, table, strict=True):
            row_pages = row.pages[: -(-(row.n_before + n_new) // PAGE)]
            pages[: len(row_pages)] = row_pages
        is_contiguous = len(rows) == 1 and bool((np.diff(table[0]) == 1).all())
        self._start_at(int(table[0, 0]) if is_contiguous else EMPTY_PAGE)
        table = table - self._first
        slots = np.take_along_axis(table, positions // PAGE, 1) * PAGE + positions % PAGE
        self.pages = None if is_contiguous else self._to_device(table)
        self._rows = self._to_device(np.array([row.state for row in rows]))
        is_causal = bool((positions[:, -1] == ctx - 1).all())
        return replace(self.place(self._to_device(positions), ctx=ctx, causal=is_causal), slots=self._to_device(slots))

    def context(self, layer: int, place: PassPlacement) -> tuple[Context, Context]:
        """Return the keys and values that attention reads, gathered unless their pages are adjacent."""
        if self.pages is None:
            return super().context(layer, place)
        head_pages = self._heads + self.pages[:, None]  # (batch, kv_heads, pages)
        keys, values = self.keys[layer], self.values[layer]
        return _gather(keys, head_pages, place.ctx), _gather(values, head_pages, place.ctx)

    def _start_at(self, page: int) -> None:
        """Make `keys` and `values` views that start at a page of the pool."""
        if page != self._first:
            self.keys, self.values = ([storage[:, :, page * PAGE :] for storage in pool] for pool in self._pools)
            self._first = page

    def state(self, layer: int) -> State | None:
        """Return the states of a layer's delta net for the sequences of the pass."""
        states = self.states[layer]
        return State(states.conv[self._rows], states.delta[self._rows])

    def remember(self, layer: int, new: State) -> None:
        """Write the states after a pass."""
        states = self.states[layer]
        states.conv.index_copy_(0, self._rows, new.conv)
        states.delta.index_copy_(0, self._rows, new.delta)

    def empty_pages(self, pages: Sequence[int]) -> None:
        """Zero pages for another job: invisible slots must be finite, because 0 times infinity would be NaN."""
        index = self._to_device(np.array(pages))
        for storage in (storage for pool in self._pools for storage in pool):
            if storage.numel():
                storage.view(storage.shape[1], -1, PAGE, storage.shape[3])[:, index] = 0

    def forget_state(self, row: int) -> None:
        """Zero the states of a row."""
        for tensor in self.state_tensors:
            tensor[row].zero_()

    def _to_device(self, numbers: np.ndarray) -> Int[Tensor, "..."]:
        return torch.from_numpy(numbers).to(self.cos.device)


def _gather(
    storage: Float[Tensor, "1 kv_heads slots head_dim"], pages: Int[Tensor, "batch kv_heads pages"], ctx: int
) -> Context:
    rows = storage.view(-1, PAGE * storage.shape[-1]).index_select(0, pages.flatten())
    return rows.view(*pages.shape[:2], -1, storage.shape[-1])[:, :, :ctx]
