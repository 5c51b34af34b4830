"""The engine: one thread that owns a batch. Requests wait for a place in it, run together and are told what is made.

Other threads call `submit`, `cancel` and `call`, which return at once. Nothing that one request does ends another: what
a job raises is told to that job alone, and what a step raises to those that ran in it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llorch.model.generate import Answer, GenerationBatch, Job, Sampled, Token


@dataclass(frozen=True)
class MadeToken:
    """A token of an answer, with the likeliest ones of its step; the last one says how the answer ended."""

    token: Token
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Failed:
    """Nothing more comes."""

    error: Exception


Event = MadeToken | Failed


@dataclass(eq=False)
class Work:
    """One answer that is wanted."""

    job: Job
    answer: Answer
    deliver: Callable[[Event], None]  # called on the engine's thread; must not block
    submitted: float  # seconds of the engine's clock, as the next three
    joined: float | None = None
    first: float | None = None
    last: float | None = None
    n_cached: int = 0  # tokens of the prompt that were not computed
    n_made: int = 0
    cancelled: bool = field(default=False)  # by whoever waited for it: nothing more is wanted


class Busy(Exception):
    """The waiting list is full; 429."""


class Unavailable(Exception):
    """The server stops, or its engine died; 503."""


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        """Start with all counts at zero."""
        self._registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_SECONDS)
        self._requests = counter("llorch_requests", "Requests, by route and status.", ["route", "status"])
        self._running = gauge("llorch_answers_running", "Answers that run in the batch.")
        self._waiting = gauge("llorch_answers_waiting", "Answers that wait for a place in the batch.")
        self._prompt = counter("llorch_prompt_tokens", "Prompt tokens.")
        self._cached = counter("llorch_cached_tokens", "Prompt tokens from the cache.")
        self._made = counter("llorch_answer_tokens", "Generated tokens.")
        self.cancelled = counter("llorch_answers_cancelled", "Answers cancelled because the client left.")
        self._to_first = histogram("llorch_first_token_seconds", "Time from a request to the first token.")
        self._per_token = histogram("llorch_token_seconds", "Time from one token to the next.")

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Ask these how many answers there are, whenever somebody looks."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def answered(self, route: str, status: int) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()

    def read(self, work: Work) -> None:
        """Count a prompt that was read."""
        self._prompt.inc(len(work.job.ids))
        self._cached.inc(work.n_cached)

    def made(self, work: Work, before: float | None) -> None:
        """Count a token, made now, the one before it at `before`."""
        assert work.last is not None
        self._made.inc()
        if before is None:
            self._to_first.observe(work.last - work.submitted)
        else:
            self._per_token.observe(work.last - before)

    def text(self) -> bytes:
        """Write all metrics as Prometheus reads them."""
        return generate_latest(self._registry)


_LOG = logging.getLogger("llorch.apps.serve")
SLOW = 5.0  # seconds of one step after which /health says so
_POLL = 0.05  # seconds between two tries to let a job in that found no room, while nothing runs


class Engine:
    """Runs answers of a batch."""

    def __init__(self, batch: GenerationBatch, *, n_jobs: int, n_waiting: int = 32, stuck_after: float = 600.0) -> None:
        """Prepare; `n_jobs` run at a time, and `n_waiting` more may wait. A step has ended after `stuck_after` s."""
        self.metrics = Metrics()
        self.failure: BaseException | None = None  # what the thread died of
        self.draining = False
        self._batch, self._limit, self._stuck_after = batch, n_jobs + n_waiting, stuck_after
        self._waiting: deque[Work] = deque()
        self._running: dict[int, Work] = {}
        self._calls: deque[Callable[[Exception | None], object]] = deque()
        self._n_kept = 0  # places of the list for answers whose prompts are not ready
        self._changed = threading.Condition()
        self._stopping = False
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="llorch-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        """Answers that have no place yet."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Number of answers that are being computed."""
        return len(self._running)

    @property
    def trouble(self) -> str | None:
        """Reason why the engine does not work; None while it works."""
        if self.failure is not None or not (self._thread.is_alive() or self._thread.ident is None):
            return "the engine has died"
        took = self._seconds_of_step()
        return f"the engine has been in one step for {took:.0f} s" if took > SLOW else None

    @property
    def is_stuck(self) -> bool:
        """True if it is in one step for so long that it will not come back."""
        return self._seconds_of_step() > self._stuck_after

    def _seconds_of_step(self) -> float:
        """Return how many seconds the step in progress has taken so far; 0 if none is in progress."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @contextmanager
    def place(self, n_answers: int) -> Iterator[None]:
        """Keep places for answers while their prompts are made ready, so that a full list refuses before that."""
        with self._changed:
            self._require_room(n_answers)
            self._n_kept += n_answers
        try:
            yield
        finally:
            with self._changed:
                self._n_kept -= n_answers

    def submit(self, works: Sequence[Work]) -> None:
        """Take the answers of one request in, all or none; Busy where the list is full, Unavailable at the end."""
        with self._changed:
            self._require_room(len(works))
            self._waiting.extend(works)
            self._changed.notify()

    def call(self, function: Callable[[Exception | None], object]) -> None:
        """Have something done on the thread between two steps; counts as an answer that waits.

        `function` must not raise; it gets an error instead of None where it is too late for what it does.
        """
        with self._changed:
            self._require_up()
            if len(self._calls) + len(self._waiting) >= self._limit:
                raise Busy(f"{self._limit} requests are running or waiting, which is the limit; try again later")
            self._calls.append(function)
            self._changed.notify()

    def cancel(self, work: Work) -> None:
        """Give up an answer that nobody waits for any more: it ends before the next step."""
        with self._changed:
            work.cancelled = True
            self._changed.notify()

    def drain(self) -> None:
        """Take nothing in any more; what is there is finished."""
        self.draining = True

    def stop(self) -> None:
        """End the thread; what is there is told so. Waits for the step that runs, if it ends within SLOW."""
        self.draining = True
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(SLOW)

    def give_up(self, error: Exception) -> None:
        """Give up a thread that will not come back: tell all that wait, and accept no more jobs."""
        self.failure = self.failure or error
        gone = Unavailable("the server is shutting down" if isinstance(error, Unavailable) else "the engine has died")
        for work in (*self._waiting, *self._running.values()):
            work.deliver(Failed(gone))
        while self._calls:
            self._calls.popleft()(gone)

    def _require_room(self, n_answers: int) -> None:
        """Raise Busy if so many answers exceed the limit; the first request is always admitted."""
        self._require_up()
        n_there = len(self._waiting) + len(self._running) + self._n_kept
        if n_there and n_there + n_answers > self._limit:
            raise Busy(f"{n_there} answers are running or waiting, at most {self._limit} are allowed; try again later")

    def _require_up(self) -> None:
        if self.failure is not None or self.draining:
            raise Unavailable("the engine has died" if self.failure is not None else "the server is shutting down")

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._turn()
            self.give_up(Unavailable("the server is shutting down"))
        except BaseException as error:  # told by `failure`; there is nobody to raise it to
            self.give_up(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False at the end."""
        with self._changed:
            while not (self._waiting or self._running or self._calls or self._stopping):
                self._changed.wait()
            return not self._stopping

    def _turn(self) -> None:
        """Run one turn: cancelled jobs leave, waiting jobs take their places, and all jobs make a step."""
        self._step_began = time.monotonic()
        self._leave_cancelled()
        while self._calls:
            self._calls.popleft()(None)
        self._join()
        if self._running:
            self._step()
        self._step_began = None
        if self._waiting and not self._running:
            with self._changed:
                self._changed.wait(_POLL)

    def _leave_cancelled(self) -> None:
        for ticket in [ticket for ticket, work in self._running.items() if work.cancelled]:
            self.metrics.cancelled.inc()
            self._leave(ticket)
        with self._changed:
            kept = [work for work in self._waiting if not work.cancelled]
            self.metrics.cancelled.inc(len(self._waiting) - len(kept))
            self._waiting = deque(kept)

    def _join(self) -> None:
        """Let waiting jobs join the batch as long as there is room; a job that can never join fails."""
        while self._waiting:
            work = self._waiting[0]
            try:
                ticket = self._batch.join(work.job)
            except Exception as error:  # it never fits, or the batch has a bug: either way this job's
                self._waiting.popleft()
                work.deliver(Failed(error))
                continue
            if ticket is None:
                return
            work.joined = time.monotonic()
            with self._changed:
                self._waiting.popleft()
                self._running[ticket] = work

    def _step(self) -> None:
        """Compute one token of each job; an exception of the batch fails all of them."""
        try:
            made = self._batch.step()
        except Exception as error:  # of nobody in particular
            for ticket, work in list(self._running.items()):
                self._leave(ticket)
                work.deliver(Failed(error))
            return
        for ticket, one in made.items():
            self._tell(ticket, one)

    def _tell(self, ticket: int, one: Sampled | Exception) -> None:
        work = self._running[ticket]
        try:
            event = Failed(one) if isinstance(one, Exception) else self._take_token(ticket, one)
        except Exception as error:
            event = Failed(error)
        if isinstance(event, Failed) or event.token.finish is not None:
            self._leave(ticket)
        work.deliver(event)

    def _take_token(self, ticket: int, sampled: Sampled) -> MadeToken:
        """Add a chosen token to its answer, and record the times for the metrics."""
        work = self._running[ticket]
        token = work.answer.take(sampled.id, sampled.logprob)
        before, work.last = work.last, time.monotonic()
        if before is None:
            work.first, work.n_cached = work.last, self._batch.n_cached(ticket)
            self.metrics.read(work)
        work.n_made += 1
        self.metrics.made(work, before)
        return MadeToken(token, sampled.top)

    def _leave(self, ticket: int) -> None:
        self._batch.leave(ticket)
        with self._changed:
            del self._running[ticket]
