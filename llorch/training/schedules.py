"""Learning rates as pure functions of the step: a run that is resumed has nothing to restore.

    warm-up   peak * step / warmup_steps                                                     while step < warmup_steps
    constant  peak
    linear    peak * (total_steps - step) / (total_steps - warmup_steps)
    cosine    peak * (1 + cos(pi * (step - warmup_steps) / (total_steps - warmup_steps))) / 2

Source: transformers/optimization.py, `get_{constant,linear,cosine}_schedule_with_warmup`. Steps are counted as there:
the first one is 0, so a run with warm-up begins with a rate of 0; linear and cosine reach 0 one step after the last.
"""

import math
from collections.abc import Callable

from llorch.runtime.errors import UserError

SCHEDULES: dict[str, Callable[[int, int], float]] = {  # steps done and steps in all, after warm-up -> share of the peak
    "constant": lambda done, span: 1.0,
    "linear": lambda done, span: max(0.0, (span - done) / max(1, span)),
    "cosine": lambda done, span: max(0.0, 0.5 * (1.0 + math.cos(math.pi * (done / max(1, span))))),
}


def learning_rate(step: int, *, schedule: str, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Compute the learning rate of one step; `step` counts the steps before it, from 0 on.

    `peak` is the rate after `warmup_steps`, over which it rises from 0; `total_steps` include them.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if step < warmup_steps:
        return peak * (step / warmup_steps)
    return peak * SCHEDULES[schedule](step - warmup_steps, total_steps - warmup_steps)
