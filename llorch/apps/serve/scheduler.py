"""Jobs on the NumPy path take turns: each has a cache of its own, and one token after the other is computed."""

from collections.abc import Mapping
from itertools import count

import numpy as np
from jaxtyping import Float

from llorch.model.generate import Job, Sampled, log_probability
from llorch.model.model import PREFILL_CHUNK, Model
from llorch.ops.sampling import draw, probabilities


class Turns:
    """A `llorch.model.generate.GenerationBatch` of a NumPy model; what it answers is what `Model.generate` does."""

    def __init__(self, model: Model, *, n_jobs: int) -> None:
        """Start without jobs; at most `n_jobs` run."""
        self._model, self._n_jobs = model, n_jobs
        self._running: dict[int, _Running] = {}
        self._tickets = count()
        self._answers_next = True  # stretches of prompts and steps of answers alternate

    def join(self, job: Job) -> int | None:
        """Add a job and return its ticket, or None if the batch is full; ValueError for an unknown adapter."""
        if len(self._running) >= self._n_jobs:
            return None
        ticket = next(self._tickets)
        self._running[ticket] = _Running(self._model, job)
        return ticket

    def leave(self, ticket: int) -> None:
        """Forget a job."""
        del self._running[ticket]

    def n_cached(self, ticket: int) -> int:
        """Return 0: prompts share nothing here."""
        return 0

    def step(self) -> Mapping[int, Sampled | Exception]:
        """Run a stretch of the oldest prompt, or a token of every answer; one after the other where there are both."""
        prompts = [ticket for ticket, running in self._running.items() if running.in_prompt]
        answers = [ticket for ticket, running in self._running.items() if not running.in_prompt]
        wanted = answers if answers and (self._answers_next or not prompts) else prompts[:1]
        self._answers_next = wanted is not answers
        made = {ticket: self._running[ticket].step() for ticket in wanted}
        return {ticket: one for ticket, one in made.items() if one is not None}


class _Running:
    """A job, and how far it is."""

    def __init__(self, model: Model, job: Job) -> None:
        """Prepare a job before its first token."""
        self._job, self._step = job, model.step(job.adapter)
        self._rng = np.random.default_rng(job.settings.seed)
        self._history = list(job.ids)
        self._n_read = 0  # of the history

    @property
    def in_prompt(self) -> bool:
        """True if no token was made yet."""
        return self._n_read < len(self._job.ids)

    def step(self) -> Sampled | Exception | None:
        """Read on; the token that comes next, once all is read."""
        new = self._history[self._n_read : self._n_read + PREFILL_CHUNK]
        try:
            logits = self._step(new)
            self._n_read += len(new)
            return self._sampled(logits) if self._n_read == len(self._history) else None
        except Exception as error:  # whatever it is, others go on
            return error

    def _sampled(self, logits: Float[np.ndarray, " vocab"]) -> Sampled:
        """Choose the next token by the job's settings and its guide; the log probability ignores both."""
        job = self._job
        seen = logits if job.guide is None else np.where(job.guide.allowed(), logits, -np.inf).astype(logits.dtype)
        distribution = probabilities(seen, job.settings, self._history, n_prompt=len(job.ids))
        token_id = draw(distribution, float(self._rng.random()))
        if job.guide is not None:
            job.guide.take(token_id)
        self._history.append(token_id)
        return Sampled(token_id, log_probability(logits, token_id), likeliest(logits, job.n_top))


def likeliest(logits: Float[np.ndarray, " vocab"], n: int) -> tuple[tuple[int, float], ...]:
    """Rank the `n` likeliest tokens with their log probabilities; of equal ones, the lower id comes first."""
    if n == 0:
        return ()
    shifted = logits.astype(np.float64) - float(logits.max())
    log_sum = np.log(np.exp(shifted).sum())
    return tuple((one, float(shifted[one] - log_sum)) for one in np.argsort(-logits, kind="stable")[:n].tolist())
