"""A batch whose jobs say what tests want, one id a step, and which tells what became of them."""

import threading
from collections.abc import Callable, Mapping
from itertools import count

from llorch.model.generate import Job, Sampled


class ScriptedBatch:
    """Answers a job with `text` for ever; `raising` jobs, told by the first id of their prompt, fail."""

    def __init__(self, *, n_jobs: int = 2, token_id: int = 5, raising: frozenset[int] = frozenset()) -> None:
        self.n_jobs, self.token_id, self.raising = n_jobs, token_id, raising
        self.running: dict[int, Job] = {}
        self.n_steps = 0
        self.left: list[int] = []  # first ids of the prompts of jobs that left
        self.step_with: Callable[[], object] = lambda: None  # what tests do in the middle of a step
        self.stepped = threading.Condition()
        self._tickets = count()

    def join(self, job: Job) -> int | None:
        if len(self.running) >= self.n_jobs:
            return None
        ticket = next(self._tickets)
        self.running[ticket] = job
        return ticket

    def leave(self, ticket: int) -> None:
        self.left.append(self.running.pop(ticket).ids[0])

    def n_cached(self, ticket: int) -> int:
        return 1

    def step(self) -> Mapping[int, Sampled | Exception]:
        self.step_with()
        with self.stepped:
            self.n_steps += 1
            self.stepped.notify_all()
        return {
            ticket: ArithmeticError("broken") if job.ids[0] in self.raising else Sampled(self.token_id, -1.0)
            for ticket, job in self.running.items()
        }

    def wait_for_steps(self, n: int) -> int:
        """Until so many more were run; how many that makes."""
        with self.stepped:
            wanted = self.n_steps + n
            assert self.stepped.wait_for(lambda: self.n_steps >= wanted, timeout=20)
            return self.n_steps
