"""The engine's thread: who runs, who waits, who leaves when, and what becomes of failures."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from fakes.scripted_batch import ScriptedBatch
from helpers.refusals import assert_tells, refuses

from llorch.apps.serve.engine import Busy, Engine, Event, NewToken, Unavailable, Work
from llorch.model.generate import Answer, IdsOnly, Job
from llorch.ops.sampling import SamplingSettings

FOR_EVER = 1 << 40


@dataclass
class Asked:
    """An answer that was asked for, and what came of it."""

    work: Work
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def next(self) -> Event:
        return self.events.get(timeout=20)

    def failure(self) -> Exception:
        while isinstance(event := self.next(), NewToken):
            pass
        return event.error


def asked(first_id: int, max_tokens: int = FOR_EVER) -> Asked:
    job = Job([first_id], max_tokens, SamplingSettings(), frozenset())
    answer = Answer(IdsOnly(), end_ids=frozenset(), max_tokens=max_tokens)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    return Asked(Work(job, answer, events.put, time.monotonic()), events)


@contextmanager
def engine(batch: ScriptedBatch, n_waiting: int = 32, stuck_after: float = 600.0) -> Iterator[Engine]:
    running = Engine(batch, n_jobs=batch.n_jobs, n_waiting=n_waiting, stuck_after=stuck_after)
    running.start()
    try:
        yield running
    finally:
        batch.step_with = lambda: None
        running.stop()


def submit(running: Engine, *submissions: Asked) -> None:
    running.submit([one.work for one in submissions])


def test_an_answer_ends_with_its_last_token_and_gives_its_place_back():
    batch, one, two = ScriptedBatch(n_jobs=1), asked(1, 3), asked(2, 2)
    with engine(batch) as running:
        submit(running, one, two)
        finishes = [[asked.next().token.finish for _ in range(n)] for asked, n in ((one, 3), (two, 2))]  # type: ignore[union-attr]
    assert finishes == [[None, None, "length"], [None, "length"]]
    assert batch.left == [1, 2]
    assert one.work.n_generated == 3
    assert one.work.n_cached == 1


def test_cancelled_request_is_removed_before_the_next_step():
    batch, one, two = ScriptedBatch(), asked(1), asked(2)
    with engine(batch) as running:
        submit(running, one, two)
        one.next()
        batch.wait_for_steps(1)
        running.cancel(one.work)
        at = batch.wait_for_steps(1)
        assert batch.wait_for_steps(1) >= at + 1
        assert batch.left == [1]
        made = one.work.n_generated
        batch.wait_for_steps(5)
        assert one.work.n_generated == made
        assert running.n_running == 1


def test_request_cancelled_in_the_queue_never_runs():
    batch, one, waiting = ScriptedBatch(n_jobs=1), asked(1), asked(2)
    with engine(batch) as running:
        submit(running, one)
        submit(running, waiting)
        running.cancel(waiting.work)
        batch.wait_for_steps(2)
        assert running.n_waiting == 0
        running.cancel(one.work)
        next_one = asked(3, 1)
        submit(running, next_one)
        next_one.next()
    assert batch.left == [1, 3]


def test_queue_length_is_limited():
    batch = ScriptedBatch(n_jobs=1)
    with engine(batch, n_waiting=2) as running:
        first = [asked(1), asked(2), asked(3)]
        for one in first:
            submit(running, one)
        with refuses(Busy, 3):
            submit(running, asked(4))
        running.cancel(first[0].work)
        batch.wait_for_steps(2)
        submit(running, asked(5))
        with pytest.raises(Busy):
            submit(running, asked(6))


def test_prompts_that_are_made_ready_have_their_places_already():
    with engine(ScriptedBatch(n_jobs=1), n_waiting=2) as running:
        with running.reserve(2):
            with refuses(Busy, 2, 3), running.reserve(2):
                pass
            with pytest.raises(Busy):
                submit(running, asked(1), asked(2))
        submit(running, asked(1), asked(2))


def test_answers_of_one_request_come_in_together_or_not_at_all():
    batch = ScriptedBatch(n_jobs=1)
    with engine(batch, n_waiting=2) as running:
        submit(running, asked(1))
        with pytest.raises(Busy):
            submit(running, asked(2), asked(3), asked(4))
        assert running.n_waiting + running.n_running == 1


@pytest.mark.parametrize("n_asked", [1, 2])
def test_calls_and_answers_that_wait_have_the_places_of_the_engine_together(n_asked: int):
    batch, inside, go_on = ScriptedBatch(n_jobs=1), threading.Event(), threading.Event()
    batch.step_with = lambda: (inside.set(), go_on.wait(20))
    with engine(batch, n_waiting=2) as running:  # three places
        submit(running, asked(0))
        assert inside.wait(20)
        for first_id in range(1, n_asked):
            submit(running, asked(first_id))
        for _ in range(3 - (n_asked - 1)):
            running.call(lambda error: None)
        with refuses(Busy, 3):
            running.call(lambda error: None)
        go_on.set()


def test_error_of_one_job_reaches_only_that_job():
    batch, broken, other = ScriptedBatch(raising=frozenset({1})), asked(1), asked(2, 5)
    with engine(batch) as running:
        submit(running, broken, other)
        assert str(broken.failure()) == "broken"
        events = [other.next() for _ in range(5)]
        assert all(isinstance(event, NewToken) for event in events)
        assert running.unavailable_reason is None
    assert sorted(batch.left) == [1, 2]


def test_error_of_a_step_ends_only_the_jobs_in_it():
    batch, one, waiting = ScriptedBatch(n_jobs=1), asked(1), asked(2, 2)
    failing = threading.Event()

    def step() -> None:
        if not failing.is_set() and batch.n_steps == 3:
            failing.set()
            raise MemoryError("no room")

    batch.step_with = step
    with engine(batch) as running:
        submit(running, one)
        submit(running, waiting)
        assert isinstance(one.failure(), MemoryError)
        assert isinstance(waiting.next(), NewToken)
        assert running.unavailable_reason is None


def test_job_that_never_fits_gets_an_error():
    class Never(ScriptedBatch):
        def join(self, job: Job) -> int | None:
            if job.ids[0] == 1:
                raise ValueError("serve: too long")
            return super().join(job)

    one, other = asked(1), asked(2, 1)
    with engine(Never()) as running:
        submit(running, one, other)
        assert str(one.failure()) == "serve: too long"
        assert isinstance(other.next(), NewToken)


def test_dead_engine_thread_fails_all_jobs_and_accepts_none():
    class Dying(ScriptedBatch):
        def leave(self, ticket: int) -> None:
            raise SystemError("lost count")

    one, waiting = asked(1, 1), asked(2)
    with engine(Dying(n_jobs=1)) as running:
        submit(running, one, waiting)
        assert isinstance(one.failure(), Unavailable)
        assert isinstance(waiting.failure(), Unavailable)
        assert isinstance(running.failure, SystemError)
        assert_tells(str(running.unavailable_reason), "engine", "died")
        with refuses(Unavailable, "died"):
            submit(running, asked(3))


def test_a_step_that_does_not_end_shows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.apps.serve.engine.SLOW_STEP_SECONDS", 0.05)
    batch, goes_on = ScriptedBatch(), threading.Event()
    batch.step_with = lambda: goes_on.wait(20)
    with engine(batch, stuck_after=0.2) as running:
        one = asked(1)
        submit(running, one)
        until = time.monotonic() + 20
        while not running.is_stuck and time.monotonic() < until:
            threading.Event().wait(0.01)
        assert_tells(str(running.unavailable_reason), "engine", "step")
        running.give_up(RuntimeError("stuck"))
        assert isinstance(one.failure(), Unavailable)
        goes_on.set()


def test_a_draining_engine_finishes_what_it_has():
    batch, one, waiting = ScriptedBatch(n_jobs=1), asked(1, 50), asked(2, 2)
    with engine(batch) as running:
        submit(running, one, waiting)
        running.drain()
        with refuses(Unavailable, "server", "shutting"):
            submit(running, asked(3))
        assert [type(waiting.next()) for _ in range(2)] == [NewToken, NewToken]


def test_stopped_engine_tells_running_and_waiting_jobs():
    batch, one, waiting = ScriptedBatch(n_jobs=1), asked(1), asked(2)
    with engine(batch) as running:
        submit(running, one, waiting)
        one.next()
        running.stop()
        assert isinstance(one.failure(), Unavailable)
        assert isinstance(waiting.failure(), Unavailable)


def test_something_is_done_between_two_steps_on_the_thread_of_the_engine():
    batch, done = ScriptedBatch(), queue.SimpleQueue()
    with engine(batch) as running:
        submit(running, asked(1))
        running.call(lambda error: done.put((error, threading.current_thread().name)))
        assert done.get(timeout=20) == (None, "llorch-engine")
