"""The choice of the next tokens of some jobs, each by its own settings, numbers and guide."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from llorch.model.generate import Job, Sampled
from llorch.pytorch.sampling import BatchSettings, Needs, choose, seen_tokens


class Choosing:
    """The state on which the choices of one job depend, beside its logits."""

    def __init__(self, job: Job, vocab_size: int, device: torch.device) -> None:
        """Begin before the first token."""
        self.job, self.needs = job, Needs.of([job.settings])
        self.seen = torch.from_numpy(seen_tokens([job.ids], vocab_size)).to(device)
        self.counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)  # of the answer's tokens
        self._numbers = np.random.default_rng(job.settings.seed)

    def draw(self) -> float:
        """Draw the next number of the seed."""
        return float(self._numbers.random())

    def allowed(self) -> Bool[np.ndarray, " vocab"] | None:
        """Mark the tokens that may come next, None for all; ValueError for no token, and any error of the guide."""
        if self.job.guide is None:
            return None
        allowed, n = np.asarray(self.job.guide.allowed(), bool), self.seen.shape[1]
        if allowed.shape != (n,) or not allowed.any():
            raise ValueError(f"guide: expected {n} marks with at least one allowed token, got {allowed}")
        return allowed

    def take(self, token_id: int, logprob: float, logits: Float[Tensor, " vocab"]) -> Sampled:
        """Go on after a token; raises what the guide raises."""
        if math.isnan(logprob):
            return Sampled(token_id, logprob)
        self.seen[0, token_id] = True
        if self.needs.repeats:
            self.counts[0, token_id] += 1
        if self.job.guide is not None:
            self.job.guide.take(token_id)
        return Sampled(token_id, logprob, top_of(logits, self.job.n_top) if self.job.n_top else ())


def next_tokens(rows: Sequence[Choosing], logits: Float[Tensor, "batch vocab"]) -> list[Sampled | Exception]:
    """Choose the next token of each row; a row whose guide raises gets the exception.

    The log probability of a token is NaN where a logit of its row is not finite. Rows are computed together, so that a
    last bit of one row may depend on the others. One row alone has the bits of `generate`.
    """
    made: list[Sampled | Exception] = []
    masks = [_allowed_tokens(row) for row in rows]
    tokens, logprobs = (
        x[:, 0].tolist() for x in choose(logits, *_batch_settings(rows, logits.device), _stacked(masks, logits))
    )
    for row, mask, token_id, logprob, own in zip(rows, masks, tokens, logprobs, logits, strict=True):
        try:
            made.append(mask if isinstance(mask, Exception) else row.take(token_id, logprob, own))
        except Exception as error:  # of its guide
            made.append(error)
    return made


def _allowed_tokens(row: Choosing) -> Bool[np.ndarray, " vocab"] | Exception | None:
    """Ask the guide of a row which tokens it allows; return an exception that the guide raises."""
    try:
        return row.allowed()
    except Exception as error:  # of its guide
        return error


def _batch_settings(
    rows: Sequence[Choosing], device: torch.device
) -> tuple[BatchSettings, Needs, Bool[Tensor, "batch vocab"], Tensor, Tensor]:
    """Return settings, needs, the tokens that penalties look at, and random numbers, for `choose`."""
    settings = [row.job.settings for row in rows]
    needs, first = Needs.of(settings), rows[0]
    seen = torch.cat([row.seen for row in rows]) if needs.penalty else first.seen.expand(len(rows), -1)
    counts = torch.cat([row.counts for row in rows]) if needs.repeats else first.counts.expand(len(rows), -1)
    u = torch.tensor([[row.draw()] for row in rows], dtype=torch.float64, device=device)
    return BatchSettings.of(settings, device), needs, seen, counts, u


def _stacked(
    masks: Sequence[Bool[np.ndarray, " vocab"] | Exception | None], logits: Float[Tensor, "batch vocab"]
) -> Bool[Tensor, "batch vocab"] | None:
    """Stack the marks of the tokens that each row may have next; None where there are no guides."""
    if all(mask is None for mask in masks):
        return None
    every = np.ones(logits.shape[1], bool)
    return torch.from_numpy(np.stack([m if isinstance(m, np.ndarray) else every for m in masks])).to(logits.device)


def top_of(logits: Float[Tensor, " vocab"], n: int) -> tuple[tuple[int, float], ...]:
    """Return the likeliest tokens with their log probabilities before any filter; of equal ones the lowest id first."""
    logprobs = logits.double().log_softmax(-1)
    least = logprobs.topk(min(n, len(logprobs))).values[-1]
    ids = (logprobs >= least).nonzero()[:, 0]
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order][:n].tolist(), values[:n].tolist(), strict=True))
