"""How the tokens of one job are chosen: by itself, so that no bit of it depends on its neighbours."""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from llorch.generate import Job, Sampled
from llorch.pytorch.sampling import BatchSettings, Needs, choose, seen_tokens

Logits = Float[Tensor, "1 vocab"]


class Choosing:
    """The settings of a job, its numbers to come, and what its penalties look at."""

    def __init__(self, job: Job, vocab_size: int, device: torch.device) -> None:
        """Begin before the first token."""
        self._job, self._device = job, device
        self._settings, self._needs = BatchSettings.of([job.settings], device), Needs.of([job.settings])
        self._numbers = np.random.default_rng(job.settings.seed)
        self._seen = torch.from_numpy(seen_tokens([job.ids], vocab_size)).to(device)
        self._counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)

    def next(self, logits: Logits) -> Sampled:
        """Choose the next token; its log probability is NaN where a logit is not finite. Raises what a guide raises."""
        u = torch.tensor([[self._numbers.random()]], dtype=torch.float64, device=self._device)
        how = self._settings, self._needs, self._seen, self._counts, u, self._allowed()
        token, logprob = choose(logits, *how)
        chosen, n_top = int(token), self._job.n_top
        if logprob.isnan():
            return Sampled(chosen, math.nan)
        self._seen[0, chosen] = True
        self._counts[0, chosen] += 1
        if self._job.guide is not None:
            self._job.guide.take(chosen)
        return Sampled(chosen, float(logprob), top_of(logits, n_top) if n_top else ())

    def _allowed(self) -> Tensor | None:
        if self._job.guide is None:
            return None
        allowed = np.asarray(self._job.guide.allowed(), bool)
        if not allowed.any():
            raise ValueError("guide: expected at least one token that may come next, got none")
        return torch.from_numpy(allowed)[None].to(self._device)


def top_of(logits: Logits, n: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens with their log probabilities before any filter; of equal ones the lowest id first."""
    logprobs = logits[0].double().log_softmax(-1)
    least = logprobs.topk(min(n, len(logprobs))).values[-1]
    ids = (logprobs >= least).nonzero()[:, 0]
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order][:n].tolist(), values[:n].tolist(), strict=True))
