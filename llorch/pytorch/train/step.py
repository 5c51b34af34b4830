"""One optimizer step on given batches: what a training repeats, and what `llorch verify` judges.

    loss of a step = sum over all trained tokens of its batches / their number

so accumulating over small batches, or sharing the rows of a batch out to ranks, gives the gradients of a large one,
however ragged the rows are.

`Alone` computes a step in one process with the whole model, `OnMesh` on the ranks of a mesh, each with its part and its
rows. Every rank knows all batches of a step, so the number that a loss is divided by needs no message.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.distributed.launch import summed
from llorch.pytorch.lora.dropout import keyed, token_keys
from llorch.pytorch.train.adamw import AdamW
from llorch.pytorch.train.forward import hidden_states
from llorch.pytorch.train.loss import loss_sum
from llorch.runtime.errors import UserError
from llorch.training.adamw import NonFiniteNorm
from llorch.training.batch import Batch, trained_tokens
from llorch.training.resume import CUBLAS_WORKSPACE

Work = Callable[[CausalLM], Any]


class Alone:
    """One process, which has all of the model and takes all rows."""

    def __init__(self, module: CausalLM) -> None:
        """Work on a module, with the adapter that is trained."""
        self.module = module

    def run(self, work: Work) -> Any:
        """Call `work` with the model; meanwhile its parameters are whole, but for those that a rank has a part of."""
        return work(self.module)

    def rows_of(self, batch: Batch) -> tuple[Batch, float]:
        """Return the rows of this process, and their factor; 0 on a rank that computes only to communicate."""
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


class NonFiniteLoss(UserError):
    """A loss or a gradient that is NaN or infinite; the step was not made."""


@dataclass(frozen=True)
class Stepper:
    """Makes steps of one model."""

    worker: Alone  # has the model, with the adapter that is trained
    optimizer: AdamW  # of the adapter's parameters
    device: torch.device
    label_smoothing: float  # see `loss_sum`
    chunk: int | None  # see `loss_sum`
    max_norm: float  # of all gradients together; `math.inf` clips nothing
    seed: int = 0  # of dropout

    def step(self, batches: Sequence[Batch], rate: float, *, number: int = 0) -> tuple[float, float]:
        """Make one step; return the mean loss of its batches and the norm of the gradients before they are clipped.

        Each step has another `number`, for its dropout. Raises NonFiniteLoss if the loss or the norm is not finite;
        nothing is updated then.
        """
        with deterministic():
            loss = self.backward(batches, number=number)
            try:
                norm = self.optimizer.clip(self.max_norm)
                if not math.isfinite(loss):
                    raise NonFiniteLoss(f"loss {loss:g}")
            except NonFiniteNorm as error:
                raise NonFiniteLoss(f"loss {loss:g}; {error}") from None
            self.optimizer.step(rate)
        self.optimizer.zero_grad()
        return loss, norm

    def backward(self, batches: Sequence[Batch], *, number: int = 0) -> float:
        """Add the gradients of a step to those of the parameters, and give its loss."""
        n_trained = trained_tokens(batches)
        self.worker.module.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for place, batch in enumerate(batches, start=1):
            rows, counts = self.worker.rows_of(batch)
            smoothing, chunk = self.label_smoothing, self.chunk
            with keyed(self.worker.module, token_keys(rows.samples, rows.ids.shape[1], seed=self.seed, step=number)):
                loss = counts * batch_loss(self.worker, rows, self.device, label_smoothing=smoothing, chunk=chunk)
                self.worker.sum_gradients(now=place == len(batches))
                (loss / n_trained).backward()
            total += loss.detach()
        return float(self.worker.summed(total)) / n_trained


def batch_loss(
    worker: Alone, rows: Batch, device: torch.device, *, label_smoothing: float, chunk: int | None
) -> Float[Tensor, ""]:
    """Sum the loss over the trained tokens of some rows; see `loss_sum`."""
    labels = torch.from_numpy(rows.labels)

    def work(module: CausalLM) -> Tensor:
        hidden = hidden_states(module, rows, device)
        return loss_sum(hidden, module.lm_head, labels, label_smoothing=label_smoothing, chunk=chunk)

    return worker.run(work)


def mean_loss(
    worker: Alone,
    batches: Iterable[Batch],
    device: torch.device,
    *,
    chunk: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Compute the mean loss over all trained tokens, without dropout and smoothing; None when `stop` gave up.

    The order of the batches can change the last bits. `chunk`: tokens whose logits exist at the same time.
    """
    worker.module.eval()
    total, n_trained = torch.zeros((), dtype=torch.float64, device=device), 0
    with torch.no_grad(), deterministic():
        for batch in batches:
            if stop():
                return None
            rows, counts = worker.rows_of(batch)
            total += counts * batch_loss(worker, rows, device, label_smoothing=0.0, chunk=chunk)
            n_trained += batch.n_trained
    return float(worker.summed(total)) / n_trained


@contextmanager
def deterministic() -> Iterator[None]:
    """Ask torch for the algorithms that give the same bits every time; its switches are put back afterwards."""
    os.environ.setdefault(*CUBLAS_WORKSPACE)
    before = torch.get_deterministic_debug_mode()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")  # the other way to say so imports a compiler
    memory.fill_uninitialized_memory = False  # it only takes time
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        memory.fill_uninitialized_memory = filling
