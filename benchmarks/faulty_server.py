"""`llorch` with a batch that is slow, and that fails as the seed of a request says.

    python -m benchmarks.faulty_server 0.05 serve story --port 0

Every step takes so many seconds more. `FAULTS` lists the effects of the seeds.
"""

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

FAULTS = {
    9001: "its job raises at the first step",
    9002: "its job raises at the fourth step",
    9003: "a step raises for all that run in it",
    9004: "the engine's thread dies",
    9005: "a step does not return",
}


def inject(kind: type, seconds: float) -> None:
    """Make a class of batches slow and faulty."""
    join, leave, step = kind.join, kind.leave, kind.step
    seeds: dict[int, int] = {}  # of the jobs that are in it
    steps: dict[int, int] = {}

    def joined(self: Any, job: Any) -> int | None:
        ticket = join(self, job)
        if ticket is not None:
            seeds[ticket], steps[ticket] = job.settings.seed, 0
        return ticket

    def left(self: Any, ticket: int) -> None:
        del seeds[ticket]
        leave(self, ticket)

    def stepped(self: Any) -> Mapping[int, object]:
        time.sleep(seconds)
        there = set(seeds.values())
        if 9003 in there:
            raise ArithmeticError("planted, of nobody")
        if 9004 in there:
            raise SystemExit("planted, the thread")
        if 9005 in there:
            threading.Event().wait()
        made = dict(step(self))
        for ticket in made:
            steps[ticket] += 1
            if seeds[ticket] == 9001 or (seeds[ticket] == 9002 and steps[ticket] == 4):
                made[ticket] = ArithmeticError("planted, of one job")
        return made

    kind.join, kind.leave, kind.step = joined, left, stepped


if __name__ == "__main__":
    from llorch.apps.serve.scheduler import Turns
    from llorch.cli import main

    delay = float(sys.argv.pop(1))
    inject(Turns, delay)
    if "torch" in sys.argv:
        from llorch.pytorch.serving.batch import ContinuousBatch

        inject(ContinuousBatch, delay)
    main(prog_name="llorch")
