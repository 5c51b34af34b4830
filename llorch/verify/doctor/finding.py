"""What a check of the doctor found."""

from dataclasses import dataclass
from typing import Literal

OK, WARNING, WRONG, NOT_RUN = "ok", "warning", "WRONG", "NOT RUN"


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    verdict: Literal["ok", "warning", "WRONG", "NOT RUN"]  # a warning: wrong in some programs only
    text: str  # the diagnosis, and the remedy if there is one
