"""One optimizer step on given batches: what a training repeats, and what `llorch verify` judges.

    loss of a step = sum over all trained tokens of its batches / their number

so accumulating over small batches gives the gradients of a large one, however ragged the rows are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.train.adamw import AdamW
from llorch.pytorch.train.evaluation import deterministic
from llorch.pytorch.train.forward import hidden_states
from llorch.pytorch.train.loss import loss_sum
from llorch.train.adamw import NonFiniteNorm
from llorch.train.batch import Batch, trained_tokens


class NonFiniteLoss(ValueError):
    """A loss or a gradient that is NaN or infinite; the step was not made."""


@dataclass(frozen=True)
class Stepper:
    """Makes steps of one model."""

    module: CausalLM  # with the adapter that is trained
    optimizer: AdamW  # of the adapter's parameters
    device: torch.device
    label_smoothing: float  # see `loss_sum`
    chunk: int | None  # see `loss_sum`
    max_norm: float  # of all gradients together; `math.inf` clips nothing

    def step(self, batches: Sequence[Batch], rate: float) -> tuple[float, float]:
        """Make one of all its batches: its mean loss and the norm of the gradients before they are clipped.

        Where one of both is not finite, nothing is updated.
        """
        with deterministic():
            loss = self.backward(batches)
            try:
                norm = self.optimizer.clip(self.max_norm)
                if not math.isfinite(loss):
                    raise NonFiniteLoss(f"loss {loss:g}")
            except NonFiniteNorm as error:
                raise NonFiniteLoss(f"loss {loss:g}; {error}") from None
            self.optimizer.step(rate)
        self.optimizer.zero_grad()
        return loss, norm

    def backward(self, batches: Sequence[Batch]) -> float:
        """Add the gradients of a step to those of the parameters, and give its loss."""
        n_trained = trained_tokens(batches)
        self.module.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in batches:
            hidden, labels = hidden_states(self.module, batch, self.device), torch.from_numpy(batch.labels)
            smoothing, chunk = self.label_smoothing, self.chunk
            loss = loss_sum(hidden, self.module.lm_head, labels, label_smoothing=smoothing, chunk=chunk)
            (loss / n_trained).backward()
            total += loss.detach()
        return float(total) / n_trained
