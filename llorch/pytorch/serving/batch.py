"""Continuous batching in torch: jobs join and leave while others run; see `llorch.model.generate.GenerationBatch`.

A pass is a chunk of the prefill of one job, or a decode step of all jobs with a complete prefill. The two alternate, so
no decode step waits for more than one chunk. A page is a fixed number of cache slots. Full pages form a prefix cache:
later jobs with the same first tokens and the same adapter reuse them. Models with delta nets have no prefix cache,
because a state belongs to one position.

A job reserves pages for its prompt and its `max_tokens` when it joins. So a job that runs never waits for pages.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from llorch.model.generate import Job, Sampled
from llorch.pytorch.cache import PassPlacement
from llorch.pytorch.causal_lm import CausalLM, keep_nothing
from llorch.pytorch.memory import room_of_pages
from llorch.pytorch.model import TorchModel
from llorch.pytorch.serving.choosing import Sampler, next_tokens
from llorch.pytorch.serving.paged_cache import PagedCache, SequenceRow
from llorch.pytorch.serving.pages import PAGE, Lease, Pages, next_key
from llorch.runtime.errors import UserError


@dataclass
class ServedJob:
    """A running job with its pages, state and progress."""

    job: Job
    module: CausalLM  # module with the job's adapter, as it was when the job joined
    sampler: Sampler
    keys: list[bytes]  # keys of the prefix cache: key i stands for the first i full pages
    ids: list[int] = field(default_factory=list)  # prompt and answer
    lease: Lease = field(default_factory=Lease)
    state: int = -1  # row of its delta net states
    n_done: int = 0  # number of tokens in the cache
    n_cached: int = 0  # tokens that came from the prefix cache
    failed: bool = False

    def __post_init__(self) -> None:
        """Start with the tokens of the prompt."""
        self.extend(self.job.ids)

    @property
    def is_in_prefill(self) -> bool:
        """True if tokens of the prompt are still to be processed."""
        return not self.failed and self.n_done < len(self.job.ids)

    @property
    def is_decoding(self) -> bool:
        """True if the last token of the job is the input of the next decode step."""
        return not (self.failed or self.is_in_prefill) and len(self.ids) < len(self.job.ids) + self.job.max_tokens

    @property
    def row(self) -> SequenceRow:
        """Pages, state and length of the job, for the cache."""
        return SequenceRow(self.lease.pages, self.state, self.n_done)

    @property
    def prefixes(self) -> list[bytes]:
        """Keys of reusable prefix pages; at least one token of the prompt is always computed."""
        return self.keys[1 : (len(self.job.ids) - 1) // PAGE + 1]

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens, and the keys of the pages that they fill."""
        self.ids.extend(ids)
        for start in range((len(self.keys) - 1) * PAGE, len(self.ids) - PAGE + 1, PAGE):
            self.keys.append(next_key(self.keys[-1], self.ids[start : start + PAGE]))

    def count_cached(self) -> None:
        """Count all tokens of the leased pages, which came from the prefix cache, as processed."""
        self.n_cached += len(self.lease.pages) * PAGE - self.n_done
        self.n_done = len(self.lease.pages) * PAGE


Results = Mapping[int, Sampled | Exception]  # by ticket, the number of a job in the batch


class ContinuousBatch:
    """Jobs that share the exclusive use of one model; its adapters may change between two calls."""

    def __init__(self, model: TorchModel, *, n_jobs: int, n_tokens: int | None = None, chunk: int = 256) -> None:
        """Reserve the cache for at most `n_jobs` concurrent jobs; prefill runs in chunks of `chunk` tokens.

        The cache has room for `n_tokens` of all jobs, in pages of 64; None: see `room_of_pages`.
        Raises MemoryError if they do not fit, and UserError for a number below 1 or a compiled model.
        """
        if model.compiles:
            raise UserError(
                "batch: expected a model that is not compiled, got a compiled one; load it with compiled=False"
            )
        if min(n_jobs, chunk, 1 if n_tokens is None else n_tokens) < 1:
            raise UserError(f"batch: expected numbers of at least 1, got {n_jobs=}, {n_tokens=}, {chunk=}")
        self._model, self._chunk, self._device = model, chunk, model.target.device
        self._pages = Pages(room_of_pages(model.weights, model.target, n_jobs=n_jobs, page=PAGE, n_tokens=n_tokens))
        n_pages, storage = self._pages.n_pages, {"dtype": model.target.dtype, "device": self._device}
        n_positions = min(n_pages * PAGE, model.config.max_position_embeddings)
        self._cache = PagedCache(model.config, n_pages=n_pages, n_states=n_jobs, n_positions=n_positions, **storage)
        self._shares = not self._cache.states  # has a prefix cache
        self._runs: dict[int, ServedJob] = {}
        self._tickets, self._n_roots, self._free_states = count(), count(), list(range(n_jobs))
        self._prefill_is_next = True
        self._roots: WeakKeyDictionary[CausalLM, bytes] = WeakKeyDictionary()
        self._mixed: tuple[list[CausalLM], CausalLM] | None = None  # modules of the rows, and their combined module

    def join(self, job: Job) -> int | None:
        """See `llorch.model.generate.GenerationBatch.join`; raises UserError for an unknown adapter, too."""
        self._require_possible(job)
        module = self._model.module_for([job.adapter])
        if not self._free_states:
            return None
        run = ServedJob(job, module, Sampler(job, self._model.config.vocab_size, self._device), [self._root(module)])
        lease = self._pages.lease(-(-job.n_slots // PAGE), run.prefixes if self._shares else ())
        if lease is None:
            return None
        run.lease, run.state = lease, self._free_states.pop()
        run.count_cached()
        self._cache.forget_state(run.state)
        ticket = next(self._tickets)
        self._runs[ticket] = run
        return ticket

    def leave(self, ticket: int) -> None:
        """See `llorch.model.generate.GenerationBatch.leave`."""
        run = self._runs.pop(ticket)
        self._pages.release(run.lease)
        self._free_states.append(run.state)

    def n_cached(self, ticket: int) -> int:
        """See `llorch.model.generate.GenerationBatch.n_cached`; it may grow until the end of the prefill."""
        return self._runs[ticket].n_cached

    @torch.no_grad()
    def step(self) -> Results:
        """See `llorch.model.generate.GenerationBatch.step`; after an error all jobs must leave."""
        in_prefill = next(((ticket, run) for ticket, run in self._runs.items() if run.is_in_prefill), None)
        decoding = {ticket: run for ticket, run in self._runs.items() if run.is_decoding}
        if in_prefill is not None and (self._prefill_is_next or not decoding):
            self._prefill_is_next = False
            return self._prefill(*in_prefill)
        self._prefill_is_next = True
        return {ticket: sampled for group in self._group(decoding) for ticket, sampled in self._decode(group).items()}

    def _require_possible(self, job: Job) -> None:
        n_slots = self._cache.n_slots
        if job.max_tokens < 1 or not job.ids or job.n_slots > n_slots:
            raise UserError(
                f"batch: expected prompt and answer of at least 1 token each and {n_slots} in sum, got {len(job.ids)} "
                f"and {job.max_tokens}; ask for fewer tokens, or reserve a larger cache"
            )

    def _root(self, module: CausalLM) -> bytes:
        """Return the key of a module's empty prefix, one per module: an adapter's pages are invalid for another."""
        if module not in self._roots:
            self._roots[module] = next(self._n_roots).to_bytes(8)
        return self._roots[module]

    def _prefill(self, ticket: int, run: ServedJob) -> Results:
        """Process a chunk of a prompt; after the last chunk, sample the first token of the answer."""
        self._reuse_pages(run)
        stop = min(run.n_done + self._chunk, len(run.job.ids))
        ids = torch.tensor([run.ids[run.n_done : stop]], device=self._device)
        place = self._begin([run], ids.shape[1])
        if stop < len(run.job.ids):
            run.module.model(ids, place, self._cache, keep_nothing)
            self._advance(run, stop)
            return {}
        last_row = torch.tensor([ids.shape[1] - 1], device=self._device)
        logits = run.module(ids, place, self._cache, rows=last_row)[:, 0]
        self._advance(run, stop)
        return self._sample({ticket: run}, logits)

    def _reuse_pages(self, run: ServedJob) -> None:
        """Reuse pages of the prefix that another job has filled since this job joined."""
        while self._shares and run.n_done == len(run.lease.pages) * PAGE and len(run.lease.pages) < len(run.prefixes):
            if not self._pages.share(run.lease, run.prefixes[len(run.lease.pages)]):
                return
            run.count_cached()

    def _decode(self, jobs: Mapping[int, ServedJob]) -> Results:
        """Run a decode step: process the last token of each job and sample the next."""
        ids = torch.tensor([run.ids[-1:] for run in jobs.values()], device=self._device)
        place = self._begin([*jobs.values()], 1)
        logits = self._module_of([*jobs.values()])(ids, place, self._cache)[:, 0]
        for run in jobs.values():
            self._advance(run, run.n_done + 1)
        return self._sample(jobs, logits)

    def _begin(self, jobs: Sequence[ServedJob], n_new: int) -> PassPlacement:
        """Give the jobs pages for their next tokens, and return the placement of these tokens."""
        new_pages = []
        for run in jobs:
            while len(run.lease.pages) * PAGE < run.n_done + n_new:
                new_pages.append(self._pages.take(run.lease))
        if new_pages:
            self._cache.empty_pages(new_pages)
        return self._cache.begin([run.row for run in jobs], n_new)

    def _advance(self, run: ServedJob, n_done: int) -> None:
        """Update the number of cached tokens, and publish full pages to the prefix cache."""
        if self._shares:
            for index in range(run.n_done // PAGE, n_done // PAGE):
                self._pages.publish(run.lease.pages[index], run.keys[index + 1])
        run.n_done = n_done

    def _sample(self, jobs: Mapping[int, ServedJob], logits: Float[Tensor, "batch vocab"]) -> Results:
        """Sample the next token of each job; a job whose guide or logits fail gets its exception instead."""
        rows, step = [run.sampler for run in jobs.values()], 1 if self._model.mode == "reproducible" else len(jobs)
        starts = range(0, len(rows), step)
        tokens = [token for i in starts for token in next_tokens(rows[i : i + step], logits[i : i + step])]
        return {ticket: self._append(run, token) for (ticket, run), token in zip(jobs.items(), tokens, strict=True)}

    def _append(self, run: ServedJob, token: Sampled | Exception) -> Sampled | Exception:
        """Append a sampled token to a job, or mark the job as failed; a NaN log probability is a failure."""
        if isinstance(token, Sampled) and math.isnan(token.logprob):
            token = self._non_finite(run)
        if isinstance(token, Exception):
            run.failed = True
        else:
            run.extend([token.id])
        return token

    def _non_finite(self, run: ServedJob) -> Exception:
        """Run a job again to get the error that names the first stage that is not finite."""
        try:
            self._model.name_non_finite(run.ids, run.job.adapter)
        except Exception as error:
            return error

    def _group(self, jobs: Mapping[int, ServedJob]) -> Iterator[Mapping[int, ServedJob]]:
        """Group jobs that can share a pass; a job whose adapter was removed or replaced needs its old module."""
        groups: dict[CausalLM | None, dict[int, ServedJob]] = {}
        for ticket, run in jobs.items():
            groups.setdefault(None if self._is_current(run) else run.module, {})[ticket] = run
        return iter(groups.values())

    def _is_current(self, run: ServedJob) -> bool:
        """Tell if the adapter of a job is unchanged since the job joined."""
        name = run.job.adapter
        return name is None or (name in self._model.adapters and self._model.module_for([name]) is run.module)

    def _module_of(self, jobs: Sequence[ServedJob]) -> CausalLM:
        """Return the module of a decode step, combined (and cached) if the jobs have several adapters."""
        modules = [run.module for run in jobs]
        if len({*modules}) == 1:
            return modules[0]
        if self._mixed is None or self._mixed[0] != modules:
            self._mixed = modules, self._model.module_for([run.job.adapter for run in jobs])
        return self._mixed[1]
