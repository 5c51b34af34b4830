"""What the engine is asked for and what comes back: texts in progress, on their way between its thread and a request.

A request makes `Work`, one for each answer; the engine fills in what it measures, and hands over events.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from llorch.model.generate import Answer, Job, Token


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
