"""Transfer of the answers of one request from the engine's thread to the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from llorch.apps.serve.api_errors import ApiError
from llorch.apps.serve.engine import Busy, Engine, Event, Failed, NewToken, Unavailable, Work
from llorch.model.generate import Answer, Job
from llorch.model.model import OpenModel
from llorch.runtime.errors import LearnerFault

Result = TypeVar("Result")


class AnswerStream:
    """Running answers of one request; `close` cancels those that have not ended."""

    def __init__(
        self, engine: Engine, model: OpenModel, jobs: Sequence[Job], stop: Sequence[str], timeout: float
    ) -> None:
        """Submit jobs to the engine, in the event loop; raise ApiError if it does not admit them."""
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._deadline = self._loop.time() + timeout
        self._timeout = timeout
        submitted = time.monotonic()
        self.works = [
            Work(job, Answer(model.tokenizer, end_ids=job.end_ids, stop=stop, max_tokens=job.max_tokens),
                 self._make_deliver(index), submitted)
            for index, job in enumerate(jobs)
        ]  # fmt: skip
        self.n_open = len(self.works)  # answers that have not ended
        hand_over(engine.submit, self.works)

    async def next_tokens(self, patience: float | None = None) -> list[tuple[int, NewToken]]:
        """Wait for new tokens; return an empty list after `patience` seconds, or when all answers have ended.

        Raises:
            ApiError: An answer failed, or its time is over.
        """
        if self.n_open == 0 or not await self._wait(patience):
            return []
        self._arrived.clear()
        tokens = []
        while self._events:
            index, event = self._events.popleft()
            if isinstance(event, Failed):
                raise to_api_error(event.error)
            self.n_open -= event.token.finish is not None
            tokens.append((index, event))
        return tokens

    async def collect(self) -> list[list[NewToken]]:
        """Wait for every token of every answer; on an ApiError of `next_tokens`, cancel unfinished answers."""
        answers: list[list[NewToken]] = [[] for _ in self.works]
        try:
            while tokens := await self.next_tokens():
                for index, token in tokens:
                    answers[index].append(token)
        finally:
            self.close()
        return answers

    def close(self) -> None:
        """Cancel the answers, unless all have ended."""
        for work in self.works if self.n_open else ():
            self._engine.cancel(work)

    async def _wait(self, patience: float | None) -> bool:
        """Wait for an event; return False after `patience` seconds, raise ApiError at the deadline."""
        deadline = self._deadline if patience is None else min(self._deadline, self._loop.time() + patience)
        try:
            async with asyncio.timeout_at(deadline):
                await self._arrived.wait()
        except TimeoutError:
            if self._loop.time() >= self._deadline:
                raise _timeout_error(self._timeout) from None
            return False
        return True

    def _add_event(self, index: int, event: Event) -> None:
        self._events.append((index, event))
        self._arrived.set()

    def _make_deliver(self, index: int) -> Callable[[Event], None]:
        """Make the function with which the engine's thread sends events of one answer to the event loop."""

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended: no request waits
                self._loop.call_soon_threadsafe(self._add_event, index, event)

        return deliver


async def run_between_steps(engine: Engine, function: Callable[[], Result], timeout: float) -> Result:
    """Run a function on the engine's thread; raise ApiError if it is refused, raises, or takes too long."""
    future: Future[Result] = Future()

    def run(error: Exception | None) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if error is not None:
                raise error
            future.set_result(function())
        except Exception as failure:
            future.set_exception(failure)

    hand_over(engine.call, run)
    try:
        async with asyncio.timeout(timeout):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise _timeout_error(timeout) from None
    except Exception as error:
        raise to_api_error(error) from None


def _timeout_error(seconds: float) -> ApiError:
    return ApiError(504, f"the answer took over {seconds:g} s", code="timeout")


def hand_over(submit: Callable[[Result], object], work: Result) -> None:
    """Submit work to the engine; raise ApiError if the engine does not admit it."""
    try:
        submit(work)
    except (Busy, Unavailable) as error:
        raise to_api_error(error) from None


def to_api_error(error: Exception) -> ApiError:
    """Make the ApiError of a failed answer, without internals of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), code="unavailable")
    if isinstance(error, LearnerFault):
        return ApiError(500, f"your function failed: {error}", code="learner_fault")
    return ApiError(500, f"the answer failed: {type(error).__name__}", code="internal_error")
