"""One optimizer step on given batches, for training and for `llorch verify`.

    loss of a step = sum of the cross entropy over its tokens in the loss / their number

So accumulating over small batches, or distributing the rows of a batch over ranks, gives the gradients of a large
batch, for rows of any lengths.

`Alone` computes a step in one process with the complete model, `OnMesh` on the ranks of a mesh, each with its part and
its rows. Every rank knows all batches of a step, so the divisor of the loss needs no communication.
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
    """Worker of one process: it has the complete model and computes all rows."""

    def __init__(self, module: CausalLM) -> None:
        """Use a module with the adapter to train."""
        self.module = module

    def run(self, work: Work) -> Any:
        """Call `work` with the model; on a mesh, FSDP parameters are gathered meanwhile."""
        return work(self.module)

    def rows_of(self, batch: Batch) -> tuple[Batch, float]:
        """Return the rows of this process, and a factor of their loss: 0 on a rank that only helps to gather."""
        return batch, 1.0

    def own_rows(self, rows: Tensor) -> Tensor:
        """Return this process's rows of an array over all rows of a batch."""
        return rows

    def sum_gradients(self, *, now: bool) -> None:
        """Set if the next backward pass is the last of a step, which sums gradients over ranks; nothing here."""

    def summed(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks with other rows, in place."""
        return tensor


class OnMesh(Alone):
    """Worker of a rank of a mesh with the axes `dp` and `tp`; all ranks call the same methods in the same order."""

    def __init__(self, module: CausalLM, mesh: DeviceMesh) -> None:
        """Shard a module whose matrices were cut when they were loaded; for errors see `parallelize`."""
        from llorch.pytorch.distributed.parallel import Together, parallelize  # imports FSDP and DTensor, in a second

        super().__init__(parallelize(module, mesh))
        self.data_parallel, self.tensor_parallel = mesh["dp"], mesh["tp"]
        self._together = Together(module, self.data_parallel)

    def run(self, work: Work) -> Any:
        """See `Alone.run`."""
        return self._together(work)

    def rows_of(self, batch: Batch) -> tuple[Batch, float]:
        """Return every n-th row and 1.0; if there is none, a row of another rank and 0.0, so that it does not count."""
        own_arrays = {name: self.own_rows(array) for name, array in vars(batch).items()}
        return replace(batch, **own_arrays), float(self.data_parallel.get_local_rank() < len(batch.ids))

    def own_rows(self, rows: Any) -> Any:
        """See `Alone.own_rows`."""
        rank = self.data_parallel.get_local_rank()
        return rows[rank :: self.data_parallel.size()] if rank < len(rows) else rows[:1]

    def sum_gradients(self, *, now: bool) -> None:
        """See `Alone.sum_gradients`."""
        self._together.gather_gradients(now=now)

    def summed(self, tensor: Tensor) -> Tensor:
        """See `Alone.summed`."""
        return summed(tensor, self.data_parallel)


class NonFiniteLoss(UserError):
    """Error for a NaN or infinite loss or gradient; the step was not applied."""


@dataclass(frozen=True)
class Stepper:
    """Optimizer steps of one model."""

    worker: Alone  # this process, with its part of the model and the adapter to train
    optimizer: AdamW  # of the adapter's parameters
    device: torch.device
    label_smoothing: float  # see `loss_sum`
    chunk: int | None  # see `loss_sum`
    max_norm: float  # of all gradients; `math.inf` disables clipping
    seed: int = 0  # of dropout masks

    def step(self, batches: Sequence[Batch], rate: float, *, number: int = 0) -> tuple[float, float]:
        """Make one step at the learning rate `rate`; return the mean loss, and the gradient norm before clipping.

        Each step has a different `number`, which seeds its dropout masks. Raises NonFiniteLoss if the loss or the norm
        is not finite; then nothing is updated.
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
        """Accumulate the gradients of a step's batches in the parameters, and return its loss."""
        n_in_loss = trained_tokens(batches)
        self.worker.module.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for position, batch in enumerate(batches, start=1):
            rows, factor = self.worker.rows_of(batch)
            smoothing, chunk = self.label_smoothing, self.chunk
            with keyed(self.worker.module, token_keys(rows.samples, rows.ids.shape[1], seed=self.seed, step=number)):
                loss = factor * batch_loss(self.worker, rows, self.device, label_smoothing=smoothing, chunk=chunk)
                self.worker.sum_gradients(now=position == len(batches))
                (loss / n_in_loss).backward()
            total += loss.detach()
        return float(self.worker.summed(total)) / n_in_loss


def batch_loss(
    worker: Alone, rows: Batch, device: torch.device, *, label_smoothing: float, chunk: int | None
) -> Float[Tensor, ""]:
    """Sum the loss over the tokens in the loss of some rows; see `loss_sum`."""
    labels = torch.from_numpy(rows.labels)

    def work(module: CausalLM) -> Tensor:
        hidden = hidden_states(module, rows, device)
        return loss_sum(hidden, module.lm_head, labels, label_smoothing=label_smoothing, chunk=chunk)

    return worker.run(work)


def mean_loss(
    worker: Alone, batches: Iterable[Batch], device: torch.device, *, chunk: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:  # fmt: skip
    """Compute the mean loss over all tokens in the loss, without dropout and smoothing; None if `stop` returned True.

    The order of the batches can change the last bits. `chunk`: see `loss_sum`. Leaves the module in eval mode.
    """
    worker.module.eval()
    total, n_trained = torch.zeros((), dtype=torch.float64, device=device), 0
    with torch.no_grad(), deterministic():
        for batch in batches:
            if stop():
                return None
            rows, factor = worker.rows_of(batch)
            total += factor * batch_loss(worker, rows, device, label_smoothing=0.0, chunk=chunk)
            n_trained += batch.n_trained
    return float(worker.summed(total)) / n_trained


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch use deterministic algorithms, and restore its switches afterwards."""
    os.environ.setdefault(*CUBLAS_WORKSPACE)
    saved_mode = torch.get_deterministic_debug_mode()
    settings: Any = torch.utils.deterministic
    saved_fill = settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import a compiler
    settings.fill_uninitialized_memory = False  # filling only costs time
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(saved_mode)
        settings.fill_uninitialized_memory = saved_fill
