"""Jobs that run together in torch, and come and go while others run; see `llorch.model.generate.GenerationBatch`.

A pass is either a stretch of one prompt or one token of every job whose prompt is read; they take turns, so that nobody
waits for more than one stretch. Pages that prompts and answers fill are found by later jobs that begin with the same
tokens and have the same adapter. If a model has delta nets, nothing is found again: a state is that of one token.

A job reserves pages for its prompt and its `max_tokens` when it joins: it waits for them, or it runs to its end.
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
from llorch.pytorch.serving.choosing import Choosing, next_tokens
from llorch.pytorch.serving.paged_cache import PagedCache, SequenceRow
from llorch.pytorch.serving.pages import PAGE, Lease, Pages, next_key
from llorch.runtime.errors import UserError


@dataclass
class ServedJob:
    """A job on its way."""

    job: Job
    module: CausalLM  # that of its adapter, as it was when the job joined
    choosing: Choosing
    keys: list[bytes]  # of its prefixes of so many whole pages, none to begin with
    ids: list[int] = field(default_factory=list)  # of prompt and answer
    lease: Lease = field(default_factory=Lease)
    state: int = -1  # the row of its states
    n_done: int = 0  # tokens that the cache has
    n_cached: int = 0
    failed: bool = False

    def __post_init__(self) -> None:
        """Begin with the prompt."""
        self.extend(self.job.ids)

    @property
    def is_reading(self) -> bool:
        """True if there is more of the prompt to read."""
        return not self.failed and self.n_done < len(self.job.ids)

    @property
    def goes_on(self) -> bool:
        """True if the last token of the job is to be fed."""
        return not (self.failed or self.is_reading) and len(self.ids) < len(self.job.ids) + self.job.max_tokens

    @property
    def row(self) -> SequenceRow:
        """The places of the job's tokens."""
        return SequenceRow(self.lease.pages, self.state, self.n_done)

    @property
    def sharable(self) -> list[bytes]:
        """Keys of pages that others may have computed: one token of the prompt at least is to be read."""
        return self.keys[1 : (len(self.job.ids) - 1) // PAGE + 1]

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens, and the keys of pages that they fill."""
        self.ids.extend(ids)
        for start in range((len(self.keys) - 1) * PAGE, len(self.ids) - PAGE + 1, PAGE):
            self.keys.append(next_key(self.keys[-1], self.ids[start : start + PAGE]))

    def skip(self) -> None:
        """Pass over tokens that the cache has already."""
        self.n_cached += len(self.lease.pages) * PAGE - self.n_done
        self.n_done = len(self.lease.pages) * PAGE


Results = Mapping[int, Sampled | Exception]


class ContinuousBatch:
    """The jobs of one model, which others must not use meanwhile; its adapters may change between two calls."""

    def __init__(self, model: TorchModel, *, n_jobs: int, n_tokens: int | None = None, chunk: int = 256) -> None:
        """Reserve the cache for at most `n_jobs` together; `chunk` tokens of a prompt are read per pass.

        The cache holds `n_tokens` of all jobs, in whole pages of 64, by default as many as half of the memory holds.
        MemoryError where they do not fit; UserError for a number below 1, or a compiled model, which each number of
        jobs would compile anew.
        """
        if model.compiles:
            raise UserError(
                "batch: expected a model that is not compiled, got a compiled one; load it with compiled=False"
            )
        if min(n_jobs, chunk, 1 if n_tokens is None else n_tokens) < 1:
            raise UserError(f"batch: expected numbers of at least 1, got {n_jobs=}, {n_tokens=}, {chunk=}")
        self._model, self._chunk, self._device = model, chunk, model.target.device
        self._pages = Pages(room_of_pages(model.weights, model.target, n_jobs=n_jobs, page=PAGE, n_tokens=n_tokens))
        n_pages, kind = self._pages.n_pages, {"dtype": model.target.dtype, "device": self._device}
        longest = min(n_pages * PAGE, model.config.max_position_embeddings)
        self._cache = PagedCache(model.config, n_pages=n_pages, n_states=n_jobs, n_positions=longest, **kind)
        self._shares = not self._cache.states
        self._runs: dict[int, ServedJob] = {}
        self._tickets, self._n_roots, self._free_states = count(), count(), list(range(n_jobs))
        self._reading_is_next = True
        self._roots: WeakKeyDictionary[CausalLM, bytes] = WeakKeyDictionary()
        self._mixed: tuple[list[CausalLM], CausalLM] | None = None  # modules of some rows, and the one for all of them

    def join(self, job: Job) -> int | None:
        """See `llorch.model.generate.GenerationBatch.join`; ValueError also where no adapter has the name."""
        self._require_possible(job)
        module = self._model.module_for([job.adapter])
        if not self._free_states:
            return None
        run = ServedJob(job, module, Choosing(job, self._model.config.vocab_size, self._device), [self._root(module)])
        lease = self._pages.lease(-(-job.n_slots // PAGE), run.sharable if self._shares else ())
        if lease is None:
            return None
        run.lease, run.state = lease, self._free_states.pop()
        run.skip()
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
        """See `llorch.model.generate.GenerationBatch.n_cached`; it may grow until the prompt is read."""
        return self._runs[ticket].n_cached

    @torch.no_grad()
    def step(self) -> Results:
        """See `llorch.model.generate.GenerationBatch.step`; an error concerns all jobs, which then have to leave."""
        reading = next(((ticket, run) for ticket, run in self._runs.items() if run.is_reading), None)
        going = {ticket: run for ticket, run in self._runs.items() if run.goes_on}
        if reading is not None and (self._reading_is_next or not going):
            self._reading_is_next = False
            return self._read(*reading)
        self._reading_is_next = True
        return {ticket: made for some in self._together(going) for ticket, made in self._go_on(some).items()}

    def _require_possible(self, job: Job) -> None:
        room = self._cache.n_slots
        if job.max_tokens < 1 or not job.ids or job.n_slots > room:
            raise UserError(
                f"batch: expected prompt and answer of at least 1 token each and {room} in sum, got {len(job.ids)} "
                f"and {job.max_tokens}; ask for fewer tokens, or reserve a larger cache"
            )

    def _root(self, module: CausalLM) -> bytes:
        """Return the start of the keys of prefixes, by module: pages of an adapter mean nothing to another adapter."""
        if module not in self._roots:
            self._roots[module] = next(self._n_roots).to_bytes(8)
        return self._roots[module]

    def _read(self, ticket: int, run: ServedJob) -> Results:
        """Read a stretch of a prompt, and choose the first token of the answer after the last one."""
        self._share_more(run)
        stop = min(run.n_done + self._chunk, len(run.job.ids))
        ids = torch.tensor([run.ids[run.n_done : stop]], device=self._device)
        place = self._begin([run], ids.shape[1])
        if stop < len(run.job.ids):
            run.module.model(ids, place, self._cache, keep_nothing)
            self._advance(run, stop)
            return {}
        last = torch.tensor([ids.shape[1] - 1], device=self._device)
        logits = run.module(ids, place, self._cache, rows=last)[:, 0]
        self._advance(run, stop)
        return self._chosen({ticket: run}, logits)

    def _share_more(self, run: ServedJob) -> None:
        """Skip pages that another job has filled since this one joined."""
        while self._shares and run.n_done == len(run.lease.pages) * PAGE and len(run.lease.pages) < len(run.sharable):
            if not self._pages.share(run.lease, run.sharable[len(run.lease.pages)]):
                return
            run.skip()

    def _go_on(self, runs: Mapping[int, ServedJob]) -> Results:
        """Feed the last token of each job, and choose the next."""
        ids = torch.tensor([run.ids[-1:] for run in runs.values()], device=self._device)
        place = self._begin([*runs.values()], 1)
        logits = self._module_of([*runs.values()])(ids, place, self._cache)[:, 0]
        for run in runs.values():
            self._advance(run, run.n_done + 1)
        return self._chosen(runs, logits)

    def _begin(self, runs: Sequence[ServedJob], n_new: int) -> PassPlacement:
        """Give jobs the pages for their next tokens; gives the places of these."""
        new = []
        for run in runs:
            while len(run.lease.pages) * PAGE < run.n_done + n_new:
                new.append(self._pages.take(run.lease))
        if new:
            self._cache.empty_pages(new)
        return self._cache.begin([run.row for run in runs], n_new)

    def _advance(self, run: ServedJob, n_done: int) -> None:
        """Count tokens that the cache has now; pages that are full can be found by others."""
        if self._shares:
            for at in range(run.n_done // PAGE, n_done // PAGE):
                self._pages.publish(run.lease.pages[at], run.keys[at + 1])
        run.n_done = n_done

    def _chosen(self, runs: Mapping[int, ServedJob], logits: Float[Tensor, "batch vocab"]) -> Results:
        """Choose the next token of each job; a job that fails alone gets its error instead."""
        rows, step = [run.choosing for run in runs.values()], 1 if self._model.mode == "reproducible" else len(runs)
        parts = range(0, len(rows), step)
        made = [one for at in parts for one in next_tokens(rows[at : at + step], logits[at : at + step])]
        return {ticket: self._append(run, one) for (ticket, run), one in zip(runs.items(), made, strict=True)}

    def _append(self, run: ServedJob, made: Sampled | Exception) -> Sampled | Exception:
        """Append a chosen token to the text of a job, or mark the job as failed; a NaN log-probability is a failure."""
        if isinstance(made, Sampled) and math.isnan(made.logprob):
            made = self._non_finite(run)
        if isinstance(made, Exception):
            run.failed = True
        else:
            run.extend([made.id])
        return made

    def _non_finite(self, run: ServedJob) -> Exception:
        try:
            self._model.name_non_finite(run.ids, run.job.adapter)
        except Exception as error:
            return error

    def _together(self, runs: Mapping[int, ServedJob]) -> Iterator[Mapping[int, ServedJob]]:
        """Group jobs that one pass can feed together; jobs of a removed adapter form their own group."""
        groups: dict[CausalLM | None, dict[int, ServedJob]] = {}
        for ticket, run in runs.items():
            groups.setdefault(None if self._is_current(run) else run.module, {})[ticket] = run
        return iter(groups.values())

    def _is_current(self, run: ServedJob) -> bool:
        """Tell if the adapter of a job is still the one that the job began with."""
        name = run.job.adapter
        return name is None or (name in self._model.adapters and self._model.module_for([name]) is run.module)

    def _module_of(self, runs: Sequence[ServedJob]) -> CausalLM:
        modules = [run.module for run in runs]
        if len({*modules}) == 1:
            return modules[0]
        if self._mixed is None or self._mixed[0] != modules:
            self._mixed = modules, self._model.module_for([run.job.adapter for run in runs])
        return self._mixed[1]
