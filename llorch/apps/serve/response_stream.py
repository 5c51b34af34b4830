"""The answers of one request on their way from the engine's thread to the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from llorch.apps.serve.api_errors import ApiError
from llorch.apps.serve.engine import Busy, Engine, Event, Failed, MadeToken, Unavailable, Work
from llorch.model.generate import Answer, Job
from llorch.model.model import OpenModel

Result = TypeVar("Result")


class Answering:
    """Answers that run; `close` gives up those that have not ended."""

    def __init__(
        self, engine: Engine, model: OpenModel, jobs: Sequence[Job], stop: Sequence[str], timeout: float
    ) -> None:
        """Hand jobs to the engine; ApiError where it takes none. To be called in the event loop."""
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._deadline = self._loop.time() + timeout
        self._timeout = timeout
        submitted = time.monotonic()
        self.works = [
            Work(job, Answer(model.tokenizer, end_ids=job.end_ids, stop=stop, max_tokens=job.max_tokens),
                 self._deliverer(index), submitted)
            for index, job in enumerate(jobs)
        ]  # fmt: skip
        self.n_open = len(self.works)
        handed_over(engine.submit, self.works)

    async def some(self, patience: float | None = None) -> list[tuple[int, MadeToken]]:
        """Wait for new tokens, at least one; return none after `patience` seconds, or when all answers have ended.

        ApiError where an answer failed, or time is up.
        """
        if self.n_open == 0 or not await self._wait(patience):
            return []
        self._arrived.clear()
        found = []
        while self._events:
            index, event = self._events.popleft()
            if isinstance(event, Failed):
                raise of_failure(event.error)
            self.n_open -= event.token.finish is not None
            found.append((index, event))
        return found

    async def whole(self) -> list[list[MadeToken]]:
        """Wait for every token of every answer; ApiError as in `some`. Unfinished answers are then given up."""
        made: list[list[MadeToken]] = [[] for _ in self.works]
        try:
            while some := await self.some():
                for index, one in some:
                    made[index].append(one)
        finally:
            self.close()
        return made

    def close(self) -> None:
        """Leave the engine, because nobody waits for the answer any more."""
        for work in self.works if self.n_open else ():
            self._engine.cancel(work)

    async def _wait(self, patience: float | None) -> bool:
        """Wait for an event; False where none came. ApiError when time is up."""
        until = self._deadline if patience is None else min(self._deadline, self._loop.time() + patience)
        try:
            async with asyncio.timeout_at(until):
                await self._arrived.wait()
        except TimeoutError:
            if self._loop.time() >= self._deadline:
                raise _late(self._timeout) from None
            return False
        return True

    def _take(self, index: int, event: Event) -> None:
        self._events.append((index, event))
        self._arrived.set()

    def _deliverer(self, index: int) -> Callable[[Event], None]:
        """Return the function by which the engine's thread sends events of one answer to the event loop."""

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                self._loop.call_soon_threadsafe(self._take, index, event)

        return deliver


async def between_steps(engine: Engine, function: Callable[[], Result], timeout: float) -> Result:
    """Run a function on the engine's thread; ApiError if the engine takes none, the function raises, or time is up."""
    done: Future[Result] = Future()

    def run(error: Exception | None) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            if error is not None:
                raise error
            done.set_result(function())
        except Exception as raised:
            done.set_exception(raised)

    handed_over(engine.call, run)
    try:
        async with asyncio.timeout(timeout):
            return await asyncio.wrap_future(done)
    except TimeoutError:
        raise _late(timeout) from None
    except Exception as error:
        raise of_failure(error) from None


def _late(seconds: float) -> ApiError:
    return ApiError(504, f"the answer took over {seconds:g} s", code="timeout")


def handed_over(submit: Callable[[Result], object], wanted: Result) -> None:
    """Hand something to the engine; ApiError where it takes nothing."""
    try:
        submit(wanted)
    except (Busy, Unavailable) as error:
        raise of_failure(error) from None


def of_failure(error: Exception) -> ApiError:
    """Make the error of an answer that failed, without internals of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), code="unavailable")
    return ApiError(500, f"the answer failed: {type(error).__name__}", code="internal_error")
