"""Result of one health check, of this machine or of a LoRA adapter."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

REPORT_VERSION = 2  # of the JSON format


@dataclass(frozen=True)
class HealthCheck:
    """State of one part of a machine or of an adapter.

    Attributes:
        area: Group of the part, such as `packages`.
        name: Name of the part.
        state: `warning`: works, but not as usual or not everywhere. `absent`: not known to be wrong, but something is
            not installed or does not exist, so that the part does not run or is not checked.
        text: Description of the finding.
        repair: Command that installs an absent part or repairs a broken one; empty if there is none.
    """

    area: str
    name: str
    state: Literal["ok", "warning", "absent", "broken"]
    text: str
    repair: str = ""


def n_broken(checks: Sequence[HealthCheck]) -> int:
    """Count the broken parts."""
    return sum(check.state == "broken" for check in checks)


def report_values(checks: Sequence[HealthCheck]) -> dict[str, Any]:
    """Return a report of checks as JSON values."""
    findings = [asdict(check) for check in checks]
    return {"version": REPORT_VERSION, "broken": n_broken(checks), "findings": findings}
