"""Checks in a process of their own: a loop, a crash or a flood of a learner's code ends that process and no other.

The process is a copy of this one, with all that is imported and read by then, where libraries of linear algebra are
safe to copy (Linux); elsewhere a new one. It is asked for one lesson after the other; if it ends, that lesson has
failed and another process takes the rest. What runs in there is `_work` and below.
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

from llorch.apps.learn.calling import all_frames, is_own, named
from llorch.apps.learn.check import check
from llorch.apps.learn.choice import Implementation, opened
from llorch.apps.learn.exercise import Call
from llorch.apps.learn.fault_injection import FaultReport, inject_faults
from llorch.apps.learn.judging import Mode
from llorch.apps.learn.lessons import BY_NUMBER, Lesson
from llorch.apps.learn.verdict import LessonReport
from llorch.runtime.channel import Channel, own_channel, ready
from llorch.runtime.errors import LeftOut, MissingExtra, printable
from llorch.runtime.threads import limited
from llorch.runtime.worker import PIPE, Worker, limit_memory, python, signal_name
from llorch.stages.comparison import FAIL, NOT_RUN, PASS

SECONDS = 10.0  # that the code of a learner may take for a lesson
MEMORY = 4 << 30  # bytes
_GRACE = 1.0  # seconds that code has to end by an exception, which says where it was, before its process is killed
_EVER = 600.0  # the same of a check, whoever takes the time
_READS = 256  # of 64 KiB, before something else is looked at
_LINES, _COLUMNS = 20, 300  # of what is printed during one lesson; the rest is counted
_FRAME = re.compile(rb'  File "(.+)", line \d+ in ')  # of a crash, as Python prints it
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")  # faulthandler's, of characters beyond ASCII
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """Of a verdict what a process can hand over.

    Attributes:
        lesson: The number that was asked for; in chained mode the verdict may be that of an earlier one.
        label: Of the verdict.
        text: The verdict as a person reads it.
        record: The verdict as `--json` gives it.
        traceback: Of what the learner's code raised, all of it.
    """

    lesson: str
    label: str
    text: str
    record: Mapping[str, Any]
    traceback: str = ""


class TookTooLong(Exception):
    """Raised inside a learner's code."""


def outcomes(
    source: str,
    numbers: Sequence[str],
    mode: Mode = "isolated",
    *,
    seconds: float = SECONDS,
    with_faults: bool = False,
    progress: Progress,
) -> Iterator[Outcome]:
    """Check lessons one after the other, and yield what came of each.

    The code of `source` (see `choice`) may take `seconds` for each lesson; `progress` is told what it prints, line by
    line. `with_faults`: known mistakes are tried in what passes.

    Raises:
        FileNotFoundError: The folder or program is not there.
        ValueError: It is none.
    """
    rest = list(numbers)
    while rest:
        checker = _Checker(source, (mode, seconds, with_faults), progress)
        try:
            yield from checker.outcomes(rest)
        finally:
            checker.end()


def warm(lesson: Lesson) -> None:
    """Import modules and read files before processes are forked, by one check of llorch's own functions."""
    with suppress(MissingExtra, LeftOut), limited(1):
        check(lesson, Implementation("the reference", {exercise.name: exercise.reference for exercise in lesson.parts}))


class _Checker:
    """The process, from outside."""

    def __init__(self, source: str, how: tuple[Mode, float, bool], progress: Progress) -> None:
        self._say, self._seconds = progress, how[1]
        self._folder = tempfile.TemporaryDirectory(prefix="llorch-")
        self._clock = _clock(self._folder.name, "w+")  # when the learner's call that runs must have ended; 0: none runs
        start: Any = python("llorch.apps.learn.sandbox:_work_in_new_python", source, how, self._folder.name)
        if sys.platform == "linux":
            start = partial(_work, source, how, self._clock)
        self._worker = Worker(start, output=PIPE)

    def outcomes(self, rest: list[str]) -> Iterator[Outcome]:
        """Take lessons from `rest` and yield what came of each, as long as the process lives."""
        if isinstance(said := self.answer("import"), Exception):
            raise said
        if said is None:
            yield from (self.ended(number, " while your files were imported") for number in rest)
            rest.clear()
        is_up = True
        while rest and is_up:
            found = self.answer(number := rest.pop(0))
            is_up = found is not None
            yield found or self.ended(number)

    def answer(self, asked: str) -> Any:
        """Send a lesson's number or `import`; print output until the answer. None if the process ended or hangs."""
        channel, output = self._worker.channel, self._worker.output
        printed, answer, waiting = _Printed(asked, self._say), None, [channel, output]
        end, channel.seconds = time.monotonic() + _EVER, _EVER
        with suppress(OSError):
            channel.send_object(asked)
        while answer is None:
            found = ready(waiting, _GRACE / 4)
            if output in found and not self._read_output(printed):
                waiting.remove(output)
            if channel in found:
                with suppress(EOFError, OSError):
                    answer = channel.receive_object()
                break
            if self._is_late() or time.monotonic() > end or (not found and self._worker.status is not None):
                break
        self._read_output(printed)
        printed.close()
        return answer

    def _is_late(self) -> bool:
        """Tell if the learner's call is past its end and the process has not interrupted it."""
        return 0 < self._clock[0] < time.monotonic() - _GRACE

    def _read_output(self, printed: "_Printed") -> bool:
        """Read the printed output that is there, which may not end; False if nothing more can come."""
        for _ in range(_READS):
            if not ready([self._worker.output], 0):
                break
            if not (data := self._worker.output.read(1 << 16)):
                return False
            printed.write(data)
        return True

    def ended(self, number: str, when: str = "") -> Outcome:
        """Make the outcome of a lesson that the process did not survive."""
        if self._is_late():
            fault = (
                f"your code took over {self._seconds:g} s{when} and cannot be interrupted; check that each loop ends"
            )
        else:
            fault = f"your code ended the process that checks it{when} ({_status(self._worker.wait(_GRACE))})"
        return outcome_of(number, LessonReport(number, FAIL, fault=fault))

    def end(self) -> None:
        """End the process and whatever it has started."""
        self._worker.end()
        self._folder.cleanup()


class _Printed:
    """What a learner's code prints during a lesson: so many lines of it, labelled."""

    def __init__(self, number: str, progress: Progress) -> None:
        self._number, self._say, self._part, self._n = number, progress, b"", 0

    def write(self, data: bytes) -> None:
        *lines, self._part = (self._part + data).split(b"\n")
        self._part = self._part[: 4 * _COLUMNS]
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        """Report a line up to the limit of lines; leave out traceback lines of code that is not the learner's."""
        if (frame := _FRAME.match(line)) and not is_own(_unescaped(frame[1])):
            return
        self._n += 1
        if self._n <= _LINES:
            text = printable(line[: 4 * _COLUMNS].decode("utf-8", "replace"))
            self._say(f"{self._number} prints: {text[:_COLUMNS]}{'...' if len(text) > _COLUMNS else ''}")

    def close(self) -> None:
        if self._part:
            self._line(self._part)
        if self._n > _LINES:
            self._say(f"{self._number} prints: ({self._n - _LINES} more lines)")


def _unescaped(path: bytes) -> str:
    """Decode a path as a traceback of faulthandler has it."""
    return _ESCAPE.sub(lambda escape: chr(int(escape[0][2:], 16)), path.decode("utf-8", "replace"))


def _status(code: int | None) -> str:
    """Describe how a process ended: no answer in time, a signal or an exit status."""
    if code is None:
        return f"it gave no answer for {_EVER:g} s"
    return signal_name(code) or f"exit status {code}"


def outcome_of(number: str, verdict: LessonReport, tried: FaultReport | None = None) -> Outcome:
    """Make the outcome of a lesson from its verdict and the known mistakes that were tried on it."""
    text, record = str(verdict), verdict.record()
    if tried is not None:
        text, record = f"{text}\n{tried}", record | {"teeth": [asdict(each) for each in tried.faults]}
    return Outcome(number, verdict.label, text, record, verdict.traceback)


def _clock(folder: str, mode: Literal["r+", "w+"]) -> np.ndarray:
    """Open a number that both processes see."""
    return np.memmap(Path(folder, "clock"), np.float64, mode, shape=1)


def _work_in_new_python(source: str, how: tuple[Mode, float, bool], folder: str) -> None:
    _work(source, how, _clock(folder, "r+"), own_channel())


def _work(source: str, how: tuple[Mode, float, bool], clock: np.ndarray, channel: Channel) -> None:
    """Run the process from inside: answers go to the channel."""
    _stand_apart()
    mode, seconds, with_faults = how
    allowed = _Allowed(seconds, clock)
    with suppress(EOFError, OSError), limited(1):
        channel.receive_object()
        answer = implementation = _open_implementation(source, allowed)
        while True:
            with suppress(Exception):  # such as a stream that the learner's code has closed
                sys.stdout.flush()
            channel.send_object(answer if isinstance(answer, Exception | Outcome) else "imported")
            number = channel.receive_object()
            allowed.begin()
            assert isinstance(implementation, Implementation)
            answer = _check_in_sandbox(number, implementation, mode, with_faults)
    os._exit(0)  # threads of the learner's may go on for ever


def _open_implementation(source: str, allowed: "_Allowed") -> Implementation | Exception:
    try:
        return opened(source, allowed.timed)
    except (OSError, ValueError) as error:
        return error


def _check_in_sandbox(number: str, implementation: Implementation, mode: Mode, with_faults: bool) -> Outcome:
    """Check a lesson, and inject mistakes if it passes and they are wanted; any error becomes an outcome."""
    lesson = BY_NUMBER[number]
    try:
        verdict = check(lesson, implementation, mode)
        tried = inject_faults(lesson, implementation) if with_faults and verdict.label == PASS else None
        return outcome_of(number, verdict, tried)
    except (MissingExtra, LeftOut) as error:
        return outcome_of(number, LessonReport(number, NOT_RUN, reason=str(error)))
    except MemoryError as error:
        fault = f"your code needs more than {MEMORY >> 30} GiB of memory: {named(error)}"
        return outcome_of(number, LessonReport(number, FAIL, fault=fault, traceback=all_frames(error)))
    except BaseException as error:  # a bug of llorch, or of code that reaches into it
        fault = f"the check itself raised {named(error)}; --full shows where"
        return outcome_of(number, LessonReport(number, FAIL, fault=fault, traceback=all_frames(error)))


class _Allowed:
    """The time that a learner's code may still take, and no other: by an alarm, and by a clock that others watch."""

    def __init__(self, seconds: float, clock: np.ndarray) -> None:
        self.left, self._seconds, self._clock = seconds, seconds, clock
        self._n_returned, self._began = 0, 0.0
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._ring)

    def begin(self) -> None:
        """Allow another lesson its time."""
        self.left, self._n_returned = self._seconds, 0

    def _ring(self, *_signal: object) -> None:
        raise TookTooLong(f"took over {self._seconds:g} s of processor time; {self._advice()}")

    def _advice(self) -> str:
        """Tell slow calls, of which several returned, from one call that took most of the time."""
        if 2 * (time.monotonic() - self._began) > self._seconds:
            return "check that each loop ends"
        more = f"--seconds {6 * self._seconds:g}"
        return f"{self._n_returned} calls returned, so the code is slow; compute on arrays, or check with {more}"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block against the time that is left, and interrupt it when none is left.

        A block inside another one, such as a file that another file imports, has the time of that one.
        """
        if self._clock[0]:
            yield
            return
        self._began = time.monotonic()
        self._clock[0] = self._began + max(self.left, 0)
        self._set_alarm(max(self.left, 1e-3))
        try:
            yield
            self._n_returned += 1
        finally:
            self._set_alarm(0)
            self._clock[0] = 0
            self.left -= time.monotonic() - self._began

    def _set_alarm(self, seconds: float) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def timed(self, function: Call) -> Call:
        @wraps(function)
        def call(**given: object) -> Any:
            with self.running():
                made = function(**given)
            return self._stream(made) if isinstance(made, Iterator) else made

        return call

    def _stream(self, made: Iterator[Any]) -> Iterator[Any]:
        """Yield the items of a stream; time counts while the next item is computed."""
        end = object()
        while True:
            with self.running():
                each = next(made, end)
            if each is end:
                return
            yield each


def _stand_apart() -> None:
    """Read no input, print to streams that the learner's code can break, and bound the memory."""
    sys.dont_write_bytecode = True  # see `folder`
    faulthandler.enable(2)  # which says where a crash was
    sys.stdin = Path(os.devnull).open()
    sys.stdout = sys.stderr = io.TextIOWrapper(open(2, "wb", buffering=0), "utf-8", "replace", write_through=True)
    limit_memory(MEMORY, kind="RLIMIT_DATA")
