"""The loss of a model on data that it is not trained on, and the switches that make torch repeat itself."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.train.forward import hidden_states
from llorch.pytorch.train.loss import loss_sum
from llorch.train.batch import Batch
from llorch.train.resume import CUBLAS_WORKSPACE


def mean_loss(
    module: CausalLM,
    batches: Iterable[Batch],
    device: torch.device,
    *,
    chunk: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Mean loss over all trained tokens of some batches, without dropout and smoothing; None when `stop` gave up.

    The order of the batches is in its last bits. `chunk`: tokens whose logits exist at the same time.
    """
    module.eval()
    total, n_trained = torch.zeros((), dtype=torch.float64, device=device), 0
    with torch.no_grad(), deterministic():
        for batch in batches:
            if stop():
                return None
            hidden = hidden_states(module, batch, device)
            total += loss_sum(hidden, module.lm_head, torch.from_numpy(batch.labels), label_smoothing=0.0, chunk=chunk)
            n_trained += batch.n_trained
    return float(total) / n_trained


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
