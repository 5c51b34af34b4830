"""The ten tests that cost most processor time, and `--processor-limit SECONDS`: the run fails if one costs more.

Processor time is that of the test process and of the processes that it started and waited for. It does not depend on
what else runs on the machine, so a limit on it is safe where a limit on wall-clock time is not.
"""

import resource
from collections.abc import Generator
from typing import Any

import pytest

SHOWN = 10
START = pytest.StashKey[float]()


def spent() -> float:
    """Processor time in seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class ProcessorTime:
    """Measure every test where it runs, and report where the results come together."""

    def __init__(self, limit: float | None) -> None:
        """Fail the run if a test costs more than `limit` seconds; never if it is None."""
        self.limit = limit
        self.costs: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note the time before the fixtures of the test."""
        item.stash[START] = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Write the cost of the test into its last report, which a worker sends to the main process."""
        report = yield
        if report.when == "teardown":
            report.user_properties.append(("processor_time", spent() - item.stash.get(START, spent())))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the costs."""
        if report.when == "teardown":
            properties: dict[str, Any] = dict(report.user_properties)
            self.costs[report.nodeid] = properties.get("processor_time", 0.0)

    def too_slow(self) -> list[str]:
        """Tests above the limit."""
        return [name for name, cost in self.costs.items() if self.limit is not None and cost > self.limit]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a green run in which a test costs too much."""
        if self.too_slow() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the most expensive tests where a limit is given."""
        if self.limit is None:
            return
        dearest = sorted(self.costs.items(), key=lambda item: -item[1])[:SHOWN]
        terminalreporter.section(f"processor time of {sum(self.costs.values()):.0f} s, most expensive tests")
        for name, cost in dearest:
            terminalreporter.line(f"{cost:6.1f} s  {name}")
        for name in self.too_slow():
            terminalreporter.line(f"FAILED {name}: expected at most {self.limit:.0f} s of processor time", red=True)
