"""Scheduler of the NumPy model: jobs take turns, each with its own KV cache. A step runs one job after the other."""

from collections.abc import Callable, Mapping
from itertools import count

import numpy as np
from jaxtyping import Float

from llorch.model.generate import Job, Sampled, log_probability
from llorch.model.model import PREFILL_CHUNK, Model
from llorch.ops.sampling import draw, probabilities
from llorch.runtime.errors import LearnerFault


class Turns:
    """A `llorch.model.generate.GenerationBatch` of a NumPy model; its answers equal those of `Model.generate`."""

    def __init__(
        self, model: Model, *, n_jobs: int, report_fault: Callable[[LearnerFault], None] = lambda fault: None
    ) -> None:
        """Start without jobs; at most `n_jobs` are in the batch. `report_fault` gets each fault of a learner's code."""
        self._model, self._n_jobs, self._report_fault = model, n_jobs, report_fault
        self._running: dict[int, _RunningJob] = {}
        self._tickets = count()
        self._decodes_next = True  # prefill chunks and decode steps alternate

    def join(self, job: Job) -> int | None:
        """Add a job and return its ticket, or None if the batch is full; raise ValueError for an unknown adapter."""
        if len(self._running) >= self._n_jobs:
            return None
        ticket = next(self._tickets)
        self._running[ticket] = _RunningJob(self._model, job)
        return ticket

    def leave(self, ticket: int) -> None:
        """Remove a job."""
        del self._running[ticket]

    def n_cached(self, ticket: int) -> int:
        """Return 0, because this batch has no prefix cache."""
        return 0

    def step(self) -> Mapping[int, Sampled | Exception]:
        """Run one prefill chunk of the oldest prompt, or a decode step of every answer; alternate if there are both."""
        prefilling = [ticket for ticket, job in self._running.items() if job.is_in_prompt]
        decoding = [ticket for ticket, job in self._running.items() if not job.is_in_prompt]
        tickets = decoding if decoding and (self._decodes_next or not prefilling) else prefilling[:1]
        self._decodes_next = tickets is not decoding
        sampled = {ticket: self._running[ticket].step() for ticket in tickets}
        for fault in sampled.values():
            if isinstance(fault, LearnerFault):
                self._report_fault(fault)
        return {ticket: token for ticket, token in sampled.items() if token is not None}


class _RunningJob:
    """A job with its cache and its progress."""

    def __init__(self, model: Model, job: Job) -> None:
        """Prepare a job with an empty cache."""
        self._job, self._step = job, model.step(job.adapter)
        self._rng = np.random.default_rng(job.settings.seed)
        self._history = list(job.ids)
        self._n_read = 0  # tokens of the history that are in the cache

    @property
    def is_in_prompt(self) -> bool:
        """True until the whole prompt is in the cache."""
        return self._n_read < len(self._job.ids)

    def step(self) -> Sampled | Exception | None:
        """Run the next chunk of the history; return the next token if the history is complete, else None."""
        new = self._history[self._n_read : self._n_read + PREFILL_CHUNK]
        try:
            logits = self._step(new)
            self._n_read += len(new)
            return self._sample(logits) if self._n_read == len(self._history) else None
        except Exception as error:  # of any class: other jobs must go on
            return error

    def _sample(self, logits: Float[np.ndarray, " vocab"]) -> Sampled:
        """Sample the next token with the job's settings and guide (grammar); the log probability ignores both."""
        job = self._job
        masked = logits if job.guide is None else np.where(job.guide.allowed(), logits, -np.inf).astype(logits.dtype)
        distribution = probabilities(masked, job.settings, self._history, n_prompt=len(job.ids))
        token_id = draw(distribution, float(self._rng.random()))
        if job.guide is not None:
            job.guide.take(token_id)
        self._history.append(token_id)
        return Sampled(token_id, log_probability(logits, token_id), likeliest(logits, job.n_top))


def likeliest(logits: Float[np.ndarray, " vocab"], n: int) -> tuple[tuple[int, float], ...]:
    """Rank the `n` likeliest tokens with their log probabilities; of equal logits the lower id comes first."""
    if n == 0:
        return ()
    shifted = logits.astype(np.float64) - float(logits.max())
    log_sum = np.log(np.exp(shifted).sum())
    return tuple((i, float(shifted[i] - log_sum)) for i in np.argsort(-logits, kind="stable")[:n].tolist())
