"""`llorch learn`: every save is checked; keys do what the verbs do. A thread each sees saved files and pressed keys."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

import click

from llorch.cli.learn.folder import full_option, impl_option, learners_folder, seconds_option
from llorch.cli.learn.hint import show_hint
from llorch.cli.learn.list import show_list
from llorch.cli.learn.next import next_lesson, show_lesson
from llorch.cli.learn.progress import summed_up
from llorch.cli.learn.reset import reset
from llorch.cli.learn.solution import show_solution
from llorch.cli.options import PATH, verb
from llorch.cli.output import say

if TYPE_CHECKING:
    from llorch.apps.learn.lessons import Lesson
    from llorch.apps.learn.sandbox import Outcome


SAVED = ""  # among keys, which are one character
_PERIOD = 0.1  # seconds between looks at the files


@contextmanager
def events(folder: Path) -> Iterator["SimpleQueue[str]"]:
    """Give a queue of keys, and of SAVED for changes of Python files; keys only where stdin is a terminal."""
    queue: SimpleQueue[str] = SimpleQueue()
    Thread(target=_watch, args=(folder, _seen(folder), queue), daemon=True).start()
    with _single_keys() as are_keys:
        if are_keys:
            Thread(target=_read_keys, args=(queue,), daemon=True).start()
        yield queue


def _watch(folder: Path, before: "dict[Path, tuple[int, int]]", queue: "SimpleQueue[str]") -> None:
    """Note what is other than before, so that a save is not lost that comes while the watching begins."""
    for _ in _times_to_look(folder):
        if (now := _seen(folder)) != before:
            queue.put(SAVED)
        before = now


def _times_to_look(folder: Path) -> Iterator[object]:
    """Yield whenever a folder may have changed: told by watchfiles, or by the clock where watchfiles cannot watch."""
    with suppress(ImportError, OSError):
        from watchfiles import PythonFilter, watch

        yield from watch(
            folder, watch_filter=PythonFilter(), recursive=False, debounce=100, step=20,
            rust_timeout=1000, yield_on_timeout=True,
        )  # fmt: skip
    while True:
        yield time.sleep(_PERIOD)


def _seen(folder: Path) -> dict[Path, tuple[int, int]]:
    """Map each Python file of a folder to its modification time in ns and its size in bytes."""
    seen = {}
    for path in folder.glob("*.py"):
        with suppress(OSError):  # it went away
            status = path.stat()
            seen[path] = (status.st_mtime_ns, status.st_size)
    return seen


@contextmanager
def _single_keys() -> Iterator[bool]:
    """Have keys come at once and unseen; what the terminal was is put back."""
    if find_spec("termios") is None or not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin.fileno())
    tty.setcbreak(sys.stdin.fileno())
    try:
        yield True
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


def _read_keys(queue: "SimpleQueue[str]") -> None:
    """Put each key that is pressed into the queue, and "q" when the terminal is gone."""
    with suppress(OSError):
        # not through sys.stdin, whose lock a copied process would wait for
        while key := os.read(sys.stdin.fileno(), 1):
            queue.put(key.decode("ascii", "replace"))
    queue.put("q")  # the terminal is gone


KEYS = "n next   h hint   l list   c check all   s solution   x reset   q quit"


@verb(
    "Check each file when you save it, until you quit.",
    "llorch learn",
    "llorch learn my_llama",
    "llorch learn watch my_llama --seconds 30",
)
@click.argument("folder", type=PATH, required=False)
@impl_option
@seconds_option
@full_option
def command(*, folder: Path | None, impl: str | None, full: bool, seconds: float) -> None:
    """Watch FOLDER and check a lesson whenever its file, or a file that it imports, is saved.

    Keys on a terminal: n next, h hint, l list, c check all, s solution, x reset, q quit.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the terminal is put back then, too
    try:
        _Loop(learners_folder(str(folder) if folder else impl), seconds=seconds, full=full).run()
    except KeyboardInterrupt:
        click.echo()


class _Loop:
    def __init__(self, folder: Path, *, seconds: float, full: bool) -> None:
        from llorch.apps.learn.lessons import LESSONS

        self.folder, self.seconds, self.full = folder, seconds, full
        self.lesson: Lesson = next_lesson(folder) or LESSONS[-1]
        self.seen, self.warm = self._fingerprints(), list[object]()
        self.keys: Mapping[str, Callable[[], None]] = {
            "n": self._next,
            "h": lambda: show_hint(self.folder, self.lesson),
            "l": lambda: show_list(self.folder),
            "c": lambda: self._check([*LESSONS]),
            "s": lambda: show_solution(self.folder, self.lesson),
            "x": lambda: reset(self.folder, self.lesson),
            SAVED: self._saved,
        }

    def run(self) -> None:
        """Check again after every change of the files, until q, the end of the terminal or Ctrl-C."""
        click.echo(f"{self.folder}: {summed_up(self.folder)}")
        show_lesson(self.folder, self.lesson)
        with events(self.folder) as queue:
            self._warm()
            say(f"llorch checks every save; {KEYS}" if sys.stdin.isatty() else "llorch checks every save; Ctrl-C quits")
            while (event := queue.get()) != "q":
                if event in self.keys:
                    self._do(self.keys[event])

    def _do(self, act: Callable[[], None]) -> None:
        """Run an action; print an error of it and go on."""
        try:
            act()
        except (OSError, ValueError) as error:
            from llorch.cli.outcome import error_line

            say(error_line(error))

    def _next(self) -> None:
        self.lesson = next_lesson(self.folder, self.lesson) or self.lesson
        show_lesson(self.folder, self.lesson)

    def _saved(self) -> None:
        """Check the lessons that are other code now, the one to go on with first."""
        from llorch.apps.learn.lessons import LESSONS

        before, self.seen = self.seen, self._fingerprints()
        changed = [lesson for lesson in LESSONS if self.seen[lesson.number] != before[lesson.number]]
        if changed and self.lesson not in changed:
            self.lesson = changed[0]
        self._check(sorted(changed, key=lambda lesson: lesson != self.lesson), begun_only=True)
        self._warm()

    def _warm(self) -> None:
        """Import ahead of time all that checks of the current lesson need, once for each lesson."""
        from llorch.apps.learn.sandbox import warm

        if self.lesson not in self.warm:
            self.warm.append(self.lesson)
            warm(self.lesson)

    def _check(self, lessons: "list[Lesson]", *, begun_only: bool = False) -> None:
        """Check the lessons, and record and print each outcome; `begun_only` hides other lessons that are not begun."""
        from llorch.apps.learn.progress import LearnerProgress
        from llorch.apps.learn.sandbox import outcomes
        from llorch.cli.learn.shown import counted, print_outcome

        progress, found = LearnerProgress(self.folder, say), []
        numbers = [lesson.number for lesson in lessons]
        for outcome in outcomes(str(self.folder), numbers, seconds=self.seconds, progress=say):
            progress.note(outcome)
            if begun_only and outcome.lesson != self.lesson.number and _is_untouched(outcome):
                continue  # it imports what was saved, and nothing of it is written
            found.append(outcome)
            print_outcome(outcome, full=self.full)
        if len(found) > 1:
            click.echo(counted(found))

    def _fingerprints(self) -> dict[str, str]:
        from llorch.apps.learn.lessons import LESSONS, lesson_fingerprint

        return {lesson.number: lesson_fingerprint(self.folder, lesson) for lesson in LESSONS}


def _is_untouched(outcome: "Outcome") -> bool:
    """Tell if the learner has written nothing of the lesson, so that nothing was compared."""
    return outcome.label == "BORROWED" and not outcome.record["compared"]
