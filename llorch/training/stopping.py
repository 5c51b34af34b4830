"""Ending a run on SIGTERM or SIGINT: after the step that is being computed, or at once when the signal comes again."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """A run that a signal ended; its state is saved."""

    def __init__(self, number: int, message: str) -> None:
        """Note the signal, and what became of the run."""
        super().__init__(message)
        self.exit_code = 128 + number


class StopRequest:
    """Listens for signals while a run is inside it; outside the main thread nobody can listen, so nothing happens."""

    def __init__(self, *, patient: bool = False) -> None:
        """Listen to nothing yet; a patient one does not leave at once when the signal comes again."""
        self._patient = patient
        self.number: int | None = None  # of the signal that came
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        try:
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        except ValueError:  # not the main thread
            self._before = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; end the process at once on the second, unless patient."""
        if self.number is not None and not self._patient:
            os._exit(128 + number)
        self.number = self.number or number
