"""The processes that compute a step: one with the whole model, or the ranks of a mesh, each with its part and its rows.

Every rank knows all batches of a step, so what a loss is divided by needs no message, and does not depend on the mesh.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.distributed.launch import summed
from llorch.training.batch import Batch

Work = Callable[[CausalLM], Any]


class Alone:
    """One process, which has all of the model and takes all rows."""

    def __init__(self, module: CausalLM) -> None:
        """Work on a module, with the adapter that is trained."""
        self.module = module

    def run(self, work: Work) -> Any:
        """Call `work` with the model and return the result.

        The parameters of the model are whole meanwhile, except those that a rank has a part of.
        """
        return work(self.module)

    def rows_of(self, batch: Batch) -> tuple[Batch, float]:
        """Return the rows that are computed here, and the factor with which they count.

        The factor is 0 for a rank that computes only because the other ranks need it to communicate.
        """
        return batch, 1.0

    def own_rows(self, rows: Tensor) -> Tensor:
        """Return the part for the rows that are computed here, of something that all rows of a batch have."""
        return rows

    def sum_gradients(self, *, now: bool) -> None:
        """Set whether the backward pass to come is the last of a step, by whose end gradients are summed over ranks."""

    def summed(self, value: Tensor) -> Tensor:
        """Sum a value over all ranks that take other rows, in place."""
        return value


class OnMesh(Alone):
    """A rank of a mesh with the axes `dp` and `tp`; the other ranks call the same methods in the same order."""

    def __init__(self, module: CausalLM, mesh: DeviceMesh) -> None:
        """Share out a module whose matrices were cut when they were loaded; for the errors see `parallelize`."""
        from llorch.pytorch.distributed.parallel import Together, parallelize  # imports FSDP and DTensor, in a second

        super().__init__(parallelize(module, mesh))
        self.data_parallel, self.tensor_parallel = mesh["dp"], mesh["tp"]
        self._together = Together(module, self.data_parallel)

    def run(self, work: Work) -> Any:
        """See `Alone.run`."""
        return self._together(work)

    def rows_of(self, batch: Batch) -> tuple[Batch, float]:
        """Return every n-th row and 1.0; if there is none, a row of another rank and 0.0: it does not count."""
        mine = {name: self.own_rows(array) for name, array in vars(batch).items()}
        return replace(batch, **mine), float(self.data_parallel.get_local_rank() < len(batch.ids))

    def own_rows(self, rows: Any) -> Any:
        """See `Alone.own_rows`."""
        rank = self.data_parallel.get_local_rank()
        return rows[rank :: self.data_parallel.size()] if rank < len(rows) else rows[:1]

    def sum_gradients(self, *, now: bool) -> None:
        """See `Alone.sum_gradients`."""
        self._together.gather_gradients(now=now)

    def summed(self, value: Tensor) -> Tensor:
        """See `Alone.summed`."""
        return summed(value, self.data_parallel)
