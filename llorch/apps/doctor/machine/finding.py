"""Results of the examination of a machine."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "note", "broken"]


@dataclass(frozen=True)
class HealthCheck:
    """The state of one part of a machine.

    Attributes:
        part: The group of the part, such as `machine`.
        name: The name of the part.
        state: absent: nothing is wrong, but something more would run with it. note: works, but not as usual.
        text: The finding.
        repair: A command that installs what is absent or repairs what is broken; empty where there is none.
    """

    part: str
    name: str
    state: State
    text: str
    repair: str = ""
