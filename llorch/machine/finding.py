"""What the examination of a machine finds."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "note", "broken"]


@dataclass(frozen=True)
class HealthCheck:
    """One thing.

    Attributes:
        part: What it belongs to.
        name: What it is.
        state: absent: nothing is wrong, but something more would run with it. note: works, but not as usual.
        text: What was found.
        repair: A command that installs what is absent or repairs what is broken; empty where there is none.
    """

    part: str
    name: str
    state: State
    text: str
    repair: str = ""
