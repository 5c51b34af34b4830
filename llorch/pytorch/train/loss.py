"""Cross entropy of a causal model in torch, without all logits at once.

    loss = sum over tokens in the loss of (1 - e) * -log p(label) + e * mean over the vocabulary of -log p

with label smoothing e. A token is in the loss if its label is not IGNORED.

Only rows that predict a token in the loss are multiplied by the output matrix. With chunks, the forward pass computes
the gradient of each chunk's logits in the memory of the logits and multiplies it back at once. So it saves only tensors
of the size of the hidden states and of the trained tensors of the head.

Source: torch.nn.CrossEntropyLoss for the formula; the order of work is that of Liger's fused linear cross entropy
(arXiv:2410.10989).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, pad

from llorch.pytorch.causal_lm import Hidden, widened
from llorch.pytorch.lora.dropout import only
from llorch.training.batch import IGNORED

Rows = Float[Tensor, "rows hidden"]
PerRow = Int64[Tensor, " rows"]
Loss = Float[Tensor, ""]


def loss_sum(
    hidden: Hidden, lm_head: nn.Module, labels: Int64[Tensor, "batch seq"], *, label_smoothing: float, chunk: int | None
) -> Loss:
    """Sum the loss over the tokens in the loss of a batch; divide by their number in the whole optimizer step.

    The label of token t belongs to the logits of token t - 1. Labels should be on the CPU, where reading them does not
    wait. `chunk` is the number of rows with logits at a time; None computes all rows with torch's cross entropy.
    """
    rows, targets, tokens = _trained_rows(hidden, labels)
    if chunk is None:
        return _all_at_once(rows, lm_head, targets, tokens, smoothing=label_smoothing)
    if not torch.is_grad_enabled():
        chunks = zip(rows.split(chunk), targets.split(chunk), tokens.split(chunk), strict=True)
        return torch.stack([_all_at_once(x, lm_head, *ids, smoothing=label_smoothing) for x, *ids in chunks]).sum()
    trained = [parameter for parameter in lm_head.parameters() if parameter.requires_grad]
    return _ChunkedLoss.apply(rows, targets, tokens, lm_head, label_smoothing, chunk, *trained)  # type: ignore[return-value]


def _trained_rows(hidden: Hidden, labels: Int64[Tensor, "batch seq"]) -> tuple[Rows, PerRow, PerRow]:
    """Return the hidden states that predict a token in the loss, their labels, and their flat token indices."""
    next_labels = pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    index = (next_labels != IGNORED).nonzero()[:, 0]
    targets, tokens = next_labels[index].to(hidden.device), index.to(hidden.device)
    return hidden.flatten(0, 1)[tokens], targets, tokens


def _all_at_once(rows: Rows, lm_head: nn.Module, targets: PerRow, tokens: PerRow, *, smoothing: float) -> Loss:
    """Sum the loss of some rows with torch's cross entropy; autograd saves their logits."""
    with only(lm_head, tokens):
        logits = lm_head(rows)
    return cross_entropy(widened(logits), targets, reduction="sum", label_smoothing=smoothing)


class _ChunkedLoss(torch.autograd.Function):
    """Autograd function of `loss_sum` with chunks; the gradients exist after the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, targets: Tensor, tokens: Tensor, lm_head: nn.Module, smoothing: float, chunk: int,
        *trained: Tensor,
    ) -> Tensor:  # fmt: skip
        """Sum the loss chunk by chunk; gradients are computed here and stored for `backward`."""
        losses, d_rows = widened(rows.new_zeros(len(rows))), torch.zeros_like(rows)
        d_trained: list[Tensor | None] = [None] * len(trained)  # stays None for parameters that the head does not use
        for start in range(0, len(rows), chunk):
            rows_slice = slice(start, start + chunk)
            with only(lm_head, tokens[rows_slice]):
                gradients = _chunk_loss(rows[rows_slice], targets[rows_slice], lm_head, trained, smoothing=smoothing)
            losses[rows_slice], d_rows[rows_slice], d_chunk = gradients
            pairs = zip(d_trained, d_chunk, strict=True)
            d_trained = [new if old is None or new is None else old + new for old, new in pairs]
        ctx.save_for_backward(d_rows, *d_trained)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_losses: Tensor) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors
        d_rows, *d_trained = (d if d is None else (d_losses[0] * widened(d)).to(d.dtype) for d in saved)
        return d_rows, None, None, None, None, None, *d_trained


def _chunk_loss(
    rows: Rows, targets: PerRow, lm_head: nn.Module, trained: Sequence[Tensor], *, smoothing: float
) -> tuple[Float[Tensor, " rows"], Rows, Sequence[Tensor | None]]:
    """Compute the loss of every row, and the gradients of rows and trained tensors; logits are freed at the end."""
    x = rows.detach().requires_grad_()
    with torch.enable_grad():
        logits = lm_head(x)
    losses, d_logits = _token_losses(logits.detach(), targets, smoothing=smoothing)
    d_x, *d_trained = torch.autograd.grad(logits, [x, *trained], d_logits, allow_unused=True)
    return losses, d_x, d_trained


def _token_losses(
    logits: Float[Tensor, "rows vocab"], targets: PerRow, *, smoothing: float
) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows vocab"]]:
    """Compute the loss of every row, and its gradient with respect to the logits, which overwrites them."""
    row_index = torch.arange(len(logits), device=logits.device)
    scores = widened(logits)
    scores -= scores.amax(-1, keepdim=True)
    label_score = (1 - smoothing) * scores[row_index, targets]
    if smoothing:
        label_score += smoothing * scores.mean(-1)
    total = scores.exp_().sum(-1)
    scores /= total[:, None]  # probabilities
    if smoothing:
        scores -= smoothing / scores.shape[-1]
    scores[row_index, targets] -= 1 - smoothing
    return total.log() - label_score, logits.copy_(scores)
