"""Run checks in a child process: endless loops, crashes and floods of output of a learner's code end only the child.

On Linux the child is forked, so that it has all imported modules and read files; linear algebra libraries survive a
fork there. Elsewhere the child is a new Python. A child checks one lesson after the other. If it ends, the current
lesson has failed, and a new child checks the remaining ones. `_work` and the functions it calls run in the child.
"""

import faulthandler
import io
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal

import numpy as np

from llorch.apps.learn.calling import all_frames, format_error, is_learner_file
from llorch.apps.learn.check import check
from llorch.apps.learn.choice import Implementation, opened
from llorch.apps.learn.exercise import Call
from llorch.apps.learn.fault_injection import FaultReport, inject_faults
from llorch.apps.learn.judging import Mode
from llorch.apps.learn.lessons import BY_NUMBER, Lesson
from llorch.apps.learn.verdict import LessonReport
from llorch.runtime.channel import Channel, ready, stdio_channel
from llorch.runtime.errors import MissingExtra, NotInWheel, printable
from llorch.runtime.threads import limit_threads
from llorch.runtime.worker import PIPE, Worker, limit_memory, python, signal_name
from llorch.stages.comparison import FAIL, NOT_RUN, PASS

SECONDS = 10.0  # time limit of a learner's code, per lesson
MEMORY = 4 << 30  # bytes of the child's data segment
_GRACE = 1.0  # seconds after the limit for an exception, which has a traceback, before the process is killed
_CHECK_SECONDS = 600.0  # time limit of a whole check, including llorch's code
_MAX_READS = 256  # reads of 64 KiB in a row, so that endless output cannot hold up the deadline
_MAX_LINES, _MAX_COLUMNS = 20, 300  # printed output shown per lesson; further lines are counted
_FRAME = re.compile(rb'  File "(.+)", line \d+ in ')  # frame of a crash, as faulthandler prints it
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")  # escaped characters in its paths
Progress = Callable[[str], None]  # gets lines for the user


@dataclass(frozen=True)
class Outcome:
    """Picklable part of a lesson's report.

    Attributes:
        lesson: Number of the requested lesson; in chained mode the report may be about an earlier lesson.
        label: Label of the report.
        text: Report as text.
        record: Report as JSON values.
        traceback: Complete traceback of the learner's error.
    """

    lesson: str
    label: str
    text: str
    record: Mapping[str, Any]
    traceback: str = ""


class TookTooLong(Exception):
    """Error raised in a learner's code when its time is over."""


def outcomes(
    source: str,
    numbers: Sequence[str],
    mode: Mode = "isolated",
    *,
    seconds: float = SECONDS,
    with_faults: bool = False,
    progress: Progress,
) -> Iterator[Outcome]:
    """Check lessons one after the other, and yield the outcome of each.

    The code of `source`, a folder or `cmd:` program, may take `seconds` for each lesson; `progress` gets its output.
    With `with_faults`, known mistakes are injected into solutions that pass, to test the check itself.

    Raises:
        FileNotFoundError: The folder or program does not exist.
        UserError: `source` is no implementation.
    """
    remaining = list(numbers)
    while remaining:
        checker = _CheckProcess(source, (mode, seconds, with_faults), progress)
        try:
            yield from checker.outcomes(remaining)
        finally:
            checker.end()


def warm(lesson: Lesson) -> None:
    """Import modules and read files before a process is forked, by one check of llorch's reference functions."""
    with suppress(MissingExtra, NotInWheel), limit_threads(1):
        check(lesson, Implementation("the reference", {exercise.name: exercise.reference for exercise in lesson.parts}))


class _CheckProcess:
    """Child process that checks lessons, as the parent sees it."""

    def __init__(self, source: str, settings: tuple[Mode, float, bool], progress: Progress) -> None:
        self._progress, self._seconds = progress, settings[1]
        self._folder = tempfile.TemporaryDirectory(prefix="llorch-")
        self._clock = _open_clock(self._folder.name, "w+")  # deadline of the learner's running call; 0: none runs
        start: Any = python("llorch.apps.learn.sandbox:_work_in_new_python", source, settings, self._folder.name)
        if sys.platform == "linux":
            start = partial(_work, source, settings, self._clock)
        self._worker = Worker(start, output=PIPE)

    def outcomes(self, remaining: list[str]) -> Iterator[Outcome]:
        """Take lessons from `remaining` and yield outcomes while the process lives; raise if `source` is unusable."""
        if isinstance(answer := self.ask("import"), Exception):
            raise answer
        if answer is None:
            yield from (self.crashed_outcome(number, " while your files were imported") for number in remaining)
            remaining.clear()
        is_alive = True
        while remaining and is_alive:
            outcome = self.ask(number := remaining.pop(0))
            is_alive = outcome is not None
            yield outcome or self.crashed_outcome(number)

    def ask(self, request: str) -> Any:
        """Send a lesson's number or `import`, report output, return the answer; None after a crash or timeout."""
        channel, output = self._worker.channel, self._worker.output
        printed, answer, waiting = _Printed(request, self._progress), None, [channel, output]
        end, channel.seconds = time.monotonic() + _CHECK_SECONDS, _CHECK_SECONDS
        with suppress(OSError):
            channel.send_object(request)
        while answer is None:
            readable = ready(waiting, _GRACE / 4)
            if output in readable and not self._read_output(printed):
                waiting.remove(output)
            if channel in readable:
                with suppress(EOFError, OSError):
                    answer = channel.receive_object()
                break
            if self._is_late() or time.monotonic() > end or (not readable and self._worker.status is not None):
                break
        self._read_output(printed)
        printed.close()
        return answer

    def _is_late(self) -> bool:
        """Tell if the learner's call is past its deadline by `_GRACE`: the alarm could not interrupt it."""
        return 0 < self._clock[0] < time.monotonic() - _GRACE

    def _read_output(self, printed: "_Printed") -> bool:
        """Read available output, at most `_MAX_READS` chunks; return False at the end of the stream."""
        for _ in range(_MAX_READS):
            if not ready([self._worker.output], 0):
                break
            if not (chunk := self._worker.output.read(1 << 16)):
                return False
            printed.write(chunk)
        return True

    def crashed_outcome(self, number: str, when: str = "") -> Outcome:
        """Make the outcome of a lesson during which the process ended or hung."""
        if self._is_late():
            fault = (
                f"your code took over {self._seconds:g} s{when} and cannot be interrupted; check that each loop ends"
            )
        else:
            fault = f"your code ended the process that checks it{when} ({_describe_exit(self._worker.wait(_GRACE))})"
        return outcome_of(number, LessonReport(number, FAIL, fault=fault))

    def end(self) -> None:
        """End the process and its children."""
        self._worker.end()
        self._folder.cleanup()


class _Printed:
    """Reporter of the lines that a learner's code prints during a lesson, with a limit of lines."""

    def __init__(self, number: str, progress: Progress) -> None:
        self._number, self._progress, self._unfinished_line, self._n_lines = number, progress, b"", 0

    def write(self, chunk: bytes) -> None:
        *lines, self._unfinished_line = (self._unfinished_line + chunk).split(b"\n")
        self._unfinished_line = self._unfinished_line[: 4 * _MAX_COLUMNS]
        for line in lines:
            self._report_line(line)

    def _report_line(self, line: bytes) -> None:
        """Report a line within the limit; skip faulthandler's frames of code that is not the learner's."""
        if (frame := _FRAME.match(line)) and not is_learner_file(_decode_path(frame[1])):
            return
        self._n_lines += 1
        if self._n_lines <= _MAX_LINES:
            text = printable(line[: 4 * _MAX_COLUMNS].decode("utf-8", "replace"))
            self._progress(f"{self._number} prints: {text[:_MAX_COLUMNS]}{'...' if len(text) > _MAX_COLUMNS else ''}")

    def close(self) -> None:
        if self._unfinished_line:
            self._report_line(self._unfinished_line)
        if self._n_lines > _MAX_LINES:
            self._progress(f"{self._number} prints: ({self._n_lines - _MAX_LINES} more lines)")


def _decode_path(path: bytes) -> str:
    """Decode a path of a faulthandler traceback."""
    return _ESCAPE.sub(lambda escape: chr(int(escape[0][2:], 16)), path.decode("utf-8", "replace"))


def _describe_exit(code: int | None) -> str:
    """Describe the end of a process: no answer in time, a signal or an exit status."""
    if code is None:
        return f"it gave no answer for {_CHECK_SECONDS:g} s"
    return signal_name(code) or f"exit status {code}"


def outcome_of(number: str, report: LessonReport, fault_report: FaultReport | None = None) -> Outcome:
    """Make the outcome of a lesson from its report and, if faults were injected, their report."""
    text, record = str(report), report.record()
    if fault_report is not None:
        text, record = f"{text}\n{fault_report}", record | {"teeth": [asdict(fault) for fault in fault_report.faults]}
    return Outcome(number, report.label, text, record, report.traceback)


def _open_clock(folder: str, mode: Literal["r+", "w+"]) -> np.ndarray:
    """Open the deadline that both processes share: a monotonic time, as a float64 in a mapped file."""
    return np.memmap(Path(folder, "clock"), np.float64, mode, shape=1)


def _work_in_new_python(source: str, settings: tuple[Mode, float, bool], folder: str) -> None:
    _work(source, settings, _open_clock(folder, "r+"), stdio_channel())


def _work(source: str, settings: tuple[Mode, float, bool], clock: np.ndarray, channel: Channel) -> None:
    """Answer requests of `_CheckProcess.ask` in the child: import the implementation, then check lessons."""
    _isolate_process()
    mode, seconds, with_faults = settings
    time_budget = _Allowed(seconds, clock)
    with suppress(EOFError, OSError), limit_threads(1):
        channel.receive_object()  # the request `import`
        answer = implementation = _open_implementation(source, time_budget)
        while True:
            with suppress(Exception):  # the learner's code may have closed the stream
                sys.stdout.flush()
            channel.send_object(answer if isinstance(answer, Exception | Outcome) else "imported")
            number = channel.receive_object()
            time_budget.restart()
            assert isinstance(implementation, Implementation)
            answer = _check_in_sandbox(number, implementation, mode, with_faults)
    os._exit(0)  # the learner's threads may never end


def _open_implementation(source: str, time_budget: "_Allowed") -> Implementation | Exception:
    try:
        return opened(source, time_budget.timed)
    except (OSError, ValueError) as error:
        return error


def _check_in_sandbox(number: str, implementation: Implementation, mode: Mode, with_faults: bool) -> Outcome:
    """Check a lesson; with `with_faults`, inject mistakes if it passes. Every error becomes an outcome."""
    lesson = BY_NUMBER[number]
    try:
        report = check(lesson, implementation, mode)
        fault_report = inject_faults(lesson, implementation) if with_faults and report.label == PASS else None
        return outcome_of(number, report, fault_report)
    except (MissingExtra, NotInWheel) as error:
        return outcome_of(number, LessonReport(number, NOT_RUN, reason=str(error)))
    except MemoryError as error:
        fault = f"your code needs more than {MEMORY >> 30} GiB of memory: {format_error(error)}"
        return outcome_of(number, LessonReport(number, FAIL, fault=fault, traceback=all_frames(error)))
    except BaseException as error:  # a bug of llorch, or learner code that changes llorch
        fault = f"the check itself raised {format_error(error)}; --full shows where"
        return outcome_of(number, LessonReport(number, FAIL, fault=fault, traceback=all_frames(error)))


class _Allowed:
    """Time that a learner's code may still take: an alarm interrupts it, and the parent watches the shared clock."""

    def __init__(self, seconds: float, clock: np.ndarray) -> None:
        self.remaining, self._seconds, self._clock = seconds, seconds, clock
        self._n_returned, self._started = 0, 0.0
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._ring)

    def restart(self) -> None:
        """Restart the budget for the next lesson."""
        self.remaining, self._n_returned = self._seconds, 0

    def _ring(self, *_signal: object) -> None:
        raise TookTooLong(f"took over {self._seconds:g} s of processor time; {self._advice()}")

    def _advice(self) -> str:
        """Return advice for one call that took most of the time, else for slow code."""
        if 2 * (time.monotonic() - self._started) > self._seconds:
            return "check that each loop ends"
        option = f"--seconds {6 * self._seconds:g}"
        return f"{self._n_returned} calls returned, so the code is slow; compute on arrays, or check with {option}"

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time of the `with` block against the budget, and interrupt the block when the budget is used up.

        Nested blocks, such as a file that another file imports, count as part of the outer block.
        """
        if self._clock[0]:
            yield
            return
        self._started = time.monotonic()
        self._clock[0] = self._started + max(self.remaining, 0)
        self._set_alarm(max(self.remaining, 1e-3))
        try:
            yield
            self._n_returned += 1
        finally:
            self._set_alarm(0)
            self._clock[0] = 0
            self.remaining -= time.monotonic() - self._started

    def _set_alarm(self, seconds: float) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def timed(self, function: Call) -> Call:
        @wraps(function)
        def call(**arguments: object) -> Any:
            with self.measure():
                returned = function(**arguments)
            return self._stream(returned) if isinstance(returned, Iterator) else returned

        return call

    def _stream(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the elements of a stream; only the computation of the next element counts."""
        end = object()
        while True:
            with self.measure():
                element = next(iterator, end)
            if element is end:
                return
            yield element


def _isolate_process() -> None:
    """Close stdin, write stdout and stderr unbuffered to the output pipe, and limit the memory."""
    sys.dont_write_bytecode = True  # see `folder._LessonLoader`
    faulthandler.enable(2)  # prints the frames of a crash
    sys.stdin = Path(os.devnull).open()
    sys.stdout = sys.stderr = io.TextIOWrapper(open(2, "wb", buffering=0), "utf-8", "replace", write_through=True)
    limit_memory(MEMORY, kind="RLIMIT_DATA")
