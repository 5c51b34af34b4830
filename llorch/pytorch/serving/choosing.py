"""Sampling of the next token of several jobs, each with its own settings, random numbers and guide.

A guide restricts the next token, for answers that follow a grammar: `Job.guide`.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from llorch.model.generate import Job, Sampled
from llorch.pytorch.sampling import BatchSettings, Needs, choose, seen_tokens


class Sampler:
    """State of one job's sampling besides its logits."""

    def __init__(self, job: Job, vocab_size: int, device: torch.device) -> None:
        """Start before the first token."""
        self.job, self.needs = job, Needs.of([job.settings])
        self.seen = torch.from_numpy(seen_tokens([job.ids], vocab_size)).to(device)
        self.counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)  # token counts of the answer
        self._generator = np.random.default_rng(job.settings.seed)

    def draw(self) -> float:
        """Draw the next random number of the seed."""
        return float(self._generator.random())

    def allowed(self) -> Bool[np.ndarray, " vocab"] | None:
        """Mark the tokens that may come next, None for all; ValueError if a guide allows none, or the guide's error."""
        if self.job.guide is None:
            return None
        allowed, vocab_size = np.asarray(self.job.guide.allowed(), bool), self.seen.shape[1]
        if allowed.shape != (vocab_size,) or not allowed.any():
            raise ValueError(f"guide: expected {vocab_size} marks with at least one allowed token, got {allowed}")
        return allowed

    def take(self, token_id: int, logprob: float, logits: Float[Tensor, " vocab"]) -> Sampled:
        """Update the state after a token; raise the guide's errors."""
        if math.isnan(logprob):  # logits that are not finite: the caller makes this an error
            return Sampled(token_id, logprob)
        self.seen[0, token_id] = True
        if self.needs.repeats:
            self.counts[0, token_id] += 1
        if self.job.guide is not None:
            self.job.guide.take(token_id)
        return Sampled(token_id, logprob, top_of(logits, self.job.n_top) if self.job.n_top else ())


def next_tokens(rows: Sequence[Sampler], logits: Float[Tensor, "batch vocab"]) -> list[Sampled | Exception]:
    """Sample the next token of each row; a row whose guide raises gets the exception.

    The log probability is NaN if a logit of the row is not finite. Rows are computed in one batch, so the last bit of
    a row may depend on other rows. A single row has the bits of `generate`.
    """
    sampled: list[Sampled | Exception] = []
    masks = [_allowed_tokens(row) for row in rows]
    tokens, logprobs = (
        x[:, 0].tolist() for x in choose(logits, *_batch_settings(rows, logits.device), _stack_masks(masks, logits))
    )
    for row, mask, token_id, logprob, row_logits in zip(rows, masks, tokens, logprobs, logits, strict=True):
        try:
            sampled.append(mask if isinstance(mask, Exception) else row.take(token_id, logprob, row_logits))
        except Exception as error:  # raised by its guide
            sampled.append(error)
    return sampled


def _allowed_tokens(row: Sampler) -> Bool[np.ndarray, " vocab"] | Exception | None:
    """Return the guide's mask of allowed tokens, or the exception that the guide raises."""
    try:
        return row.allowed()
    except Exception as error:  # raised by its guide
        return error


def _batch_settings(
    rows: Sequence[Sampler], device: torch.device
) -> tuple[BatchSettings, Needs, Bool[Tensor, "batch vocab"], Tensor, Tensor]:
    """Return settings, needs, the tokens that penalties count, and random numbers, for `choose`."""
    settings = [row.job.settings for row in rows]
    needs, first = Needs.of(settings), rows[0]
    # without a penalty `choose` reads neither marks nor counts, so views of the first row's have the right shape
    marks = torch.cat([row.seen for row in rows]) if needs.penalty else first.seen.expand(len(rows), -1)
    counts = torch.cat([row.counts for row in rows]) if needs.repeats else first.counts.expand(len(rows), -1)
    u = torch.tensor([[row.draw()] for row in rows], dtype=torch.float64, device=device)
    return BatchSettings.of(settings, device), needs, marks, counts, u


def _stack_masks(
    masks: Sequence[Bool[np.ndarray, " vocab"] | Exception | None], logits: Float[Tensor, "batch vocab"]
) -> Bool[Tensor, "batch vocab"] | None:
    """Stack the masks of allowed tokens; None if no row has a guide."""
    if all(mask is None for mask in masks):
        return None
    all_tokens = np.ones(logits.shape[1], bool)
    return torch.from_numpy(np.stack([m if isinstance(m, np.ndarray) else all_tokens for m in masks])).to(logits.device)


def top_of(logits: Float[Tensor, " vocab"], n: int) -> tuple[tuple[int, float], ...]:
    """Return the most likely tokens and their log probabilities before any filter; ties by ascending id."""
    logprobs = logits.double().log_softmax(-1)
    threshold = logprobs.topk(min(n, len(logprobs))).values[-1]
    ids = (logprobs >= threshold).nonzero()[:, 0]
    sorted_logprobs, order = logprobs[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order][:n].tolist(), sorted_logprobs[:n].tolist(), strict=True))
