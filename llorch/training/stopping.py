"""Stop a run on SIGTERM or SIGINT: after the current step, or at once on a second signal."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """Raised when a signal stopped the run, after its state was saved."""

    def __init__(self, number: int, message: str) -> None:
        """Store the message, and derive the exit code from the signal number."""
        super().__init__(message)
        self.exit_code = 128 + number


class StopRequest:
    """Context manager that records stop signals; outside the main thread it does nothing."""

    def __init__(self, *, patient: bool = False) -> None:
        """Prepare; with `patient`, a second signal does not end the process."""
        self._patient = patient
        self.number: int | None = None  # number of the received signal
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        try:
            self._old_handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        except ValueError:  # not the main thread
            self._old_handlers = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal; end the process at once on the second, unless patient."""
        if self.number is not None and not self._patient:
            os._exit(128 + number)
        self.number = self.number or number
