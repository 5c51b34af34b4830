"""The result of one check of a doctor, of this machine or of an adapter."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

REPORT_VERSION = 2


@dataclass(frozen=True)
class HealthCheck:
    """The state of one part of a machine or of an adapter.

    Attributes:
        area: The group of the part, such as `packages`.
        name: The name of the part.
        state: warning: works, but not as usual or not everywhere. absent: nothing is wrong, but something is not
            installed or not there, so it does not run or is not checked.
        text: The finding.
        repair: A command that installs what is absent or repairs what is broken; empty where there is none.
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
    """Return the report of a doctor as values of JSON."""
    findings = [asdict(check) for check in checks]
    return {"version": REPORT_VERSION, "broken": n_broken(checks), "findings": findings}
