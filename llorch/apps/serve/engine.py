"""The engine: one thread that owns a batch. Answers wait for a place in it, run together and deliver tokens.

The thread works in turns: remove cancelled answers, run calls, admit waiting answers, and step the batch. Other threads
call `submit`, `cancel` and `call`, which return at once. No request ends another one: an error of a job goes only to
that job, and an error of a step to all jobs that ran in it.
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
class NewToken:
    """A token of an answer, and the likeliest candidates for it; an answer's last NewToken has `token.finish`."""

    token: Token
    top: tuple[tuple[int, float], ...] = ()  # the likeliest (token id, log probability)


@dataclass(frozen=True)
class Failed:
    """Last event of an answer that failed."""

    error: Exception


Event = NewToken | Failed


@dataclass(eq=False)
class Work:
    """One requested answer: its job, and its times in seconds of the engine's clock."""

    job: Job
    answer: Answer
    deliver: Callable[[Event], None]  # called on the engine's thread, or see `give_up`; must not block
    submitted: float
    joined: float | None = None
    first: float | None = None  # time of the first token
    last: float | None = None  # time of the last token so far
    n_cached: int = 0  # prompt tokens from the prefix cache
    n_generated: int = 0  # generated tokens
    cancelled: bool = field(default=False)  # its request has ended, for example because the client left


class Busy(Exception):
    """The waiting list is full (status 429)."""


class Unavailable(Exception):
    """The server is stopping, or its engine has died (status 503)."""


_TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds


class Metrics:
    """Prometheus metrics of one server."""

    def __init__(self) -> None:
        """Start with all counts at zero."""
        self._registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_TIME_BUCKETS)
        self._requests = counter("llorch_requests", "Requests, by route and status.", ["route", "status"])
        self._running = gauge("llorch_answers_running", "Answers that run in the batch.")
        self._waiting = gauge("llorch_answers_waiting", "Answers that wait for a place in the batch.")
        self._prompt = counter("llorch_prompt_tokens", "Prompt tokens.")
        self._cached = counter("llorch_cached_tokens", "Prompt tokens from the cache.")
        self._generated = counter("llorch_answer_tokens", "Generated tokens.")
        self.cancelled = counter("llorch_answers_cancelled", "Answers cancelled because the client left.")
        self._to_first = histogram("llorch_first_token_seconds", "Time from a request to the first token.")
        self._per_token = histogram("llorch_token_seconds", "Time from one token to the next.")

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Read the numbers of running and waiting answers from these functions, at every scrape."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def count_request(self, route: str, status: int) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()

    def count_prompt(self, work: Work) -> None:
        """Count the tokens of a prompt after its prefill."""
        self._prompt.inc(len(work.job.ids))
        self._cached.inc(work.n_cached)

    def count_token(self, work: Work, previous_time: float | None) -> None:
        """Count a token that arrived at `work.last`; `previous_time` is None for the first token of an answer."""
        assert work.last is not None
        self._generated.inc()
        if previous_time is None:
            self._to_first.observe(work.last - work.submitted)
        else:
            self._per_token.observe(work.last - previous_time)

    def text(self) -> bytes:
        """Format all metrics for Prometheus."""
        return generate_latest(self._registry)


_LOG = logging.getLogger("llorch.apps.serve")
SLOW_STEP_SECONDS = 5.0  # /health reports a longer turn, and `stop` waits no longer for it
_POLL_SECONDS = 0.05  # pause if the batch admits no job although none runs, so that the thread does not spin


class Engine:
    """Thread that runs the answers of all requests in one batch."""

    def __init__(self, batch: GenerationBatch, *, n_jobs: int, n_waiting: int = 32, stuck_after: float = 600.0) -> None:
        """Prepare; `batch` runs at most `n_jobs`, `n_waiting` more may wait; a turn over `stuck_after` s is stuck."""
        self.metrics = Metrics()
        self.failure: BaseException | None = None  # the error that ended the thread; Unavailable after `stop`
        self.draining = False
        self._batch, self._limit, self._stuck_after = batch, n_jobs + n_waiting, stuck_after
        self._waiting: deque[Work] = deque()
        self._running: dict[int, Work] = {}
        self._calls: deque[Callable[[Exception | None], object]] = deque()
        self._n_reserved = 0  # places for answers whose prompts are still being prepared
        self._condition = threading.Condition()
        self._stopping = False
        self._turn_started: float | None = None
        self._thread = threading.Thread(target=self._run, name="llorch-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        """Number of answers that wait for a place in the batch."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Number of answers that are being computed."""
        return len(self._running)

    @property
    def unavailable_reason(self) -> str | None:
        """Sentence about why the engine does not work; None while it works."""
        if self.failure is not None or not (self._thread.is_alive() or self._thread.ident is None):
            return "the engine has died"
        seconds = self._turn_seconds()
        return f"the engine has been in one step for {seconds:.0f} s" if seconds > SLOW_STEP_SECONDS else None

    @property
    def is_stuck(self) -> bool:
        """True if a turn has taken over `stuck_after` s: it will probably never return."""
        return self._turn_seconds() > self._stuck_after

    def _turn_seconds(self) -> float:
        """Return the seconds since the running turn started; 0 between turns."""
        started = self._turn_started
        return 0.0 if started is None else time.monotonic() - started

    @contextmanager
    def reserve(self, n_answers: int) -> Iterator[None]:
        """Hold places while prompts are prepared, so that a full list refuses early; call `submit` after the block."""
        with self._condition:
            self._require_room(n_answers)
            self._n_reserved += n_answers
        try:
            yield
        finally:
            with self._condition:
                self._n_reserved -= n_answers

    def submit(self, works: Sequence[Work]) -> None:
        """Admit all answers of one request or none; raise Busy if the list is full, Unavailable if the server stops."""
        with self._condition:
            self._require_room(len(works))
            self._waiting.extend(works)
            self._condition.notify()

    def call(self, function: Callable[[Exception | None], object]) -> None:
        """Run a function on the engine's thread between two steps; raise Busy if too many wait.

        `function` must not raise; it gets None, or an error if the engine stopped. Calls and answers share one limit.
        """
        with self._condition:
            self._require_running()
            if len(self._calls) + len(self._waiting) >= self._limit:
                raise Busy(f"{self._limit} requests are running or waiting, which is the limit; try again later")
            self._calls.append(function)
            self._condition.notify()

    def cancel(self, work: Work) -> None:
        """Cancel an answer that no client waits for: it leaves the batch before the next step."""
        with self._condition:
            work.cancelled = True
            self._condition.notify()

    def drain(self) -> None:
        """Admit no new answers; the admitted ones still finish."""
        self.draining = True

    def stop(self) -> None:
        """End the thread, and fail all answers; wait at most SLOW_STEP_SECONDS for the running turn."""
        self.draining = True
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join(SLOW_STEP_SECONDS)

    def give_up(self, error: Exception) -> None:
        """Fail all answers and calls, admit no more; `server.watch_engine` calls it if a turn hangs."""
        self.failure = self.failure or error
        reason = Unavailable("the server is shutting down" if isinstance(error, Unavailable) else "the engine has died")
        for work in (*self._waiting, *self._running.values()):
            work.deliver(Failed(reason))
        while self._calls:
            self._calls.popleft()(reason)

    def _require_room(self, n_answers: int) -> None:
        """Raise Busy if the new answers exceed the limit; alone, a request of any size is admitted."""
        self._require_running()
        n_taken = len(self._waiting) + len(self._running) + self._n_reserved
        if n_taken and n_taken + n_answers > self._limit:
            raise Busy(f"{n_taken} answers are running or waiting, at most {self._limit} are allowed; try again later")

    def _require_running(self) -> None:
        if self.failure is not None or self.draining:
            raise Unavailable("the engine has died" if self.failure is not None else "the server is shutting down")

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_turn()
            self.give_up(Unavailable("the server is shutting down"))
        except BaseException as error:  # a thread has no caller to raise it to: `failure` has it
            self.give_up(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _wait_for_work(self) -> bool:
        """Wait for work; return False when the engine stops."""
        with self._condition:
            while not (self._waiting or self._running or self._calls or self._stopping):
                self._condition.wait()
            return not self._stopping

    def _run_turn(self) -> None:
        """Run one turn: remove cancelled jobs, run calls, admit waiting jobs, and step all jobs."""
        self._turn_started = time.monotonic()
        self._remove_cancelled()
        while self._calls:
            self._calls.popleft()(None)
        self._join()
        if self._running:
            self._step()
        self._turn_started = None
        if self._waiting and not self._running:
            with self._condition:
                self._condition.wait(_POLL_SECONDS)

    def _remove_cancelled(self) -> None:
        for ticket in [ticket for ticket, work in self._running.items() if work.cancelled]:
            self.metrics.cancelled.inc()
            self._leave(ticket)
        with self._condition:
            remaining = [work for work in self._waiting if not work.cancelled]
            self.metrics.cancelled.inc(len(self._waiting) - len(remaining))
            self._waiting = deque(remaining)

    def _join(self) -> None:
        """Admit waiting jobs to the batch while there is room; a job that can never join fails."""
        while self._waiting:
            work = self._waiting[0]
            try:
                ticket = self._batch.join(work.job)
            except Exception as error:  # it never fits, or the batch has a bug: only this job fails
                self._waiting.popleft()
                work.deliver(Failed(error))
                continue
            if ticket is None:
                return
            work.joined = time.monotonic()
            with self._condition:
                self._waiting.popleft()
                self._running[ticket] = work

    def _step(self) -> None:
        """Compute one token of each job; an exception of the batch fails all of them."""
        try:
            results = self._batch.step()
        except Exception as error:  # it belongs to no single job
            for ticket, work in list(self._running.items()):
                self._leave(ticket)
                work.deliver(Failed(error))
            return
        for ticket, sampled_or_error in results.items():
            self._deliver(ticket, sampled_or_error)

    def _deliver(self, ticket: int, outcome: Sampled | Exception) -> None:
        work = self._running[ticket]
        try:
            event = Failed(outcome) if isinstance(outcome, Exception) else self._take_token(ticket, outcome)
        except Exception as error:
            event = Failed(error)
        if isinstance(event, Failed) or event.token.finish is not None:
            self._leave(ticket)
        work.deliver(event)

    def _take_token(self, ticket: int, sampled: Sampled) -> NewToken:
        """Add a sampled token to its answer, and record the times for the metrics."""
        work = self._running[ticket]
        token = work.answer.take(sampled.id, sampled.logprob)
        previous_time, work.last = work.last, time.monotonic()
        if previous_time is None:
            work.first, work.n_cached = work.last, self._batch.n_cached(ticket)
            self.metrics.count_prompt(work)
        work.n_generated += 1
        self.metrics.count_token(work, previous_time)
        return NewToken(token, sampled.top)

    def _leave(self, ticket: int) -> None:
        self._batch.leave(ticket)
        with self._condition:
            del self._running[ticket]
