"""One line of a diagnosis."""

from dataclasses import dataclass
from typing import Literal

OK, WARNING, WRONG, NOT_RUN = "ok", "warning", "WRONG", "NOT RUN"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: Name of the check.
        verdict: `WRONG` computes something else than the user thinks; a `warning` does so in some programs only.
        text: The diagnosis, and the remedy if there is one.
    """

    check: str
    verdict: Literal["ok", "warning", "WRONG", "NOT RUN"]
    text: str
