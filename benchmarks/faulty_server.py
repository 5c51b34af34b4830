"""`llorch` with a slow batch, and with faults that depend on the seed of a request.

    python -m benchmarks.faulty_server 0.05 serve story --port 0

Every step takes that many seconds longer. `FAULTS` lists the effects of the seeds.
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
    """Make a batch class slow and faulty."""
    join, leave, step = kind.join, kind.leave, kind.step
    seeds: dict[int, int] = {}  # seed of each job in the batch
    steps: dict[int, int] = {}

    def faulty_join(self: Any, job: Any) -> int | None:
        ticket = join(self, job)
        if ticket is not None:
            seeds[ticket], steps[ticket] = job.settings.seed, 0
        return ticket

    def faulty_leave(self: Any, ticket: int) -> None:
        del seeds[ticket]
        leave(self, ticket)

    def slow_step(self: Any) -> Mapping[int, object]:
        time.sleep(seconds)
        seeds_present = set(seeds.values())
        if 9003 in seeds_present:
            raise ArithmeticError("planted, of nobody")
        if 9004 in seeds_present:
            raise SystemExit("planted, the thread")
        if 9005 in seeds_present:
            threading.Event().wait()
        outputs = dict(step(self))
        for ticket in outputs:
            steps[ticket] += 1
            if seeds[ticket] == 9001 or (seeds[ticket] == 9002 and steps[ticket] == 4):
                outputs[ticket] = ArithmeticError("planted, of one job")
        return outputs

    kind.join, kind.leave, kind.step = faulty_join, faulty_leave, slow_step


if __name__ == "__main__":
    from llorch.apps.serve.scheduler import Turns
    from llorch.cli import main

    delay = float(sys.argv.pop(1))
    inject(Turns, delay)
    if "torch" in sys.argv:
        from llorch.pytorch.serving.batch import ContinuousBatch

        inject(ContinuousBatch, delay)
    main(prog_name="llorch")
