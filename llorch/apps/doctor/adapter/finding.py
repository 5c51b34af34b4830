"""The result type of the doctor's checks."""

from dataclasses import dataclass
from typing import Literal

OK, WARNING, WRONG = "ok", "warning", "WRONG"


@dataclass(frozen=True)
class AdapterFinding:
    """The result of one check."""

    check: str
    verdict: Literal["ok", "warning", "WRONG", "NOT RUN"]  # a warning: wrong in some programs only
    text: str  # the diagnosis, and the remedy if there is one
