"""`llorch learn watch`, which `llorch learn` runs by default: check a lesson whenever its file is saved; obey keys.

One thread watches the files, another reads the keys; both put events into a queue, which the main thread reads.
Results go to stdout (`click.echo`), messages to stderr (`say`).
"""

import os
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

from llorch.cli.learn.folder import FOLDER, full_option, impl_option, learners_folder, seconds_option
from llorch.cli.learn.hint import show_hint
from llorch.cli.learn.init import make_folder
from llorch.cli.learn.list import show_list
from llorch.cli.learn.next import describe_work, next_step, show_step, step_of
from llorch.cli.learn.open import show_page
from llorch.cli.learn.progress import format_progress
from llorch.cli.learn.reset import reset
from llorch.cli.learn.solution import show_solution
from llorch.cli.options import PATH, verb
from llorch.cli.outcome import error_line, exiting_on_sigterm
from llorch.cli.output import say

if TYPE_CHECKING:
    from llorch.apps.learn.lessons import Lesson, Step
    from llorch.apps.learn.sandbox import Outcome

SAVED = ""  # event of a saved file; the other events are keys, one character long
_PERIOD = 0.1  # seconds between scans of the files


@contextmanager
def events(folder: Path) -> Iterator["SimpleQueue[str]"]:
    """Yield a queue of keys, and of SAVED for changes of Python files; keys only if stdin is a terminal."""
    queue: SimpleQueue[str] = SimpleQueue()
    Thread(target=_watch, args=(folder, _scan_files(folder), queue), daemon=True).start()
    with _single_keys() as are_keys:
        if are_keys:
            Thread(target=_read_keys, args=(queue,), daemon=True).start()
        yield queue


def _watch(folder: Path, old_files: "dict[Path, tuple[int, int]]", queue: "SimpleQueue[str]") -> None:
    """Report changes since `old_files`, which was scanned earlier, so that no save during the start is lost."""
    for _ in _scan_times(folder):
        if (new_files := _scan_files(folder)) != old_files:
            queue.put(SAVED)
        old_files = new_files


def _scan_times(folder: Path) -> Iterator[object]:
    """Yield whenever a folder may have changed: on events of watchfiles and once a second, else every `_PERIOD`."""
    with suppress(ImportError, OSError):
        from watchfiles import PythonFilter, watch

        yield from watch(
            folder, watch_filter=PythonFilter(), recursive=False, debounce=100, step=20,
            rust_timeout=1000, yield_on_timeout=True,
        )  # fmt: skip
    while True:
        yield time.sleep(_PERIOD)


def _scan_files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Map each Python file of a folder to its modification time in ns and its size in bytes."""
    files = {}
    for path in folder.glob("*.py"):
        with suppress(OSError):  # it was deleted
            status = path.stat()
            files[path] = (status.st_mtime_ns, status.st_size)
    return files


@contextmanager
def _single_keys() -> Iterator[bool]:
    """Deliver keys at once and without echo; restore the terminal afterwards. Yield False without a terminal."""
    if find_spec("termios") is None or not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    old_settings = termios.tcgetattr(sys.stdin.fileno())
    tty.setcbreak(sys.stdin.fileno())
    try:
        yield True
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, old_settings)


def _read_keys(queue: "SimpleQueue[str]") -> None:
    """Put each key into the queue, and "q" when the terminal closes."""
    with suppress(OSError):
        # os.read: a lock that sys.stdin takes here would stay locked in a child that the sandbox forks for a check
        while key := os.read(sys.stdin.fileno(), 1):
            queue.put(key.decode("ascii", "replace"))
    queue.put("q")  # the terminal was closed


KEYS = "n next   o open page   h hint   l list   c check all   s solution   x reset   q quit"


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

    Without a folder, llorch shows the route of 90 minutes and, on a terminal, offers to make my_llama.
    Keys on a terminal: n next, o open page, h hint, l list, c check all, s solution, x reset, q quit.
    """
    from llorch.apps.learn.choice import chosen

    source = str(folder) if folder else impl  # FOLDER wins over --impl
    if chosen(source) is None and not FOLDER.is_dir() and not _offer_folder():
        return
    try:
        with exiting_on_sigterm():  # so that the terminal is restored
            _Loop(learners_folder(source), seconds=seconds, full=full).run()
    except KeyboardInterrupt:
        click.echo()


def _offer_folder() -> bool:
    """Show the route; on a terminal, make `FOLDER` if the learner agrees. Return True if it was made."""
    show_route()
    if not sys.stdin.isatty():
        click.echo(f"to start, type: llorch learn init {FOLDER} && cd {FOLDER} && llorch learn")
        return False
    if not click.confirm(f"make the folder {FOLDER} for your code?", default=True):
        return False
    make_folder(FOLDER)
    return True


def show_route() -> None:
    """Print the steps of the short route, and the command at its end."""
    from llorch.apps.learn.lessons import LESSONS, ROUTE

    click.echo(f"{sum(step.minutes for step in ROUTE)} minutes to text that your own functions write:")
    for step in ROUTE:
        lesson = step.lesson
        click.echo(f"  {lesson.number:<4} {lesson.name:<18} {step.minutes:>3} min  {describe_work(step)}")
    click.echo(f'then llorch run story "Once upon a time" --impl {FOLDER}, and {len(LESSONS)} lessons in all')


class _Loop:
    """Loop over events, with the current lesson and the fingerprints (hashes) of all lessons' code."""

    def __init__(self, folder: Path, *, seconds: float, full: bool) -> None:
        from llorch.apps.learn.lessons import LESSONS, STEPS

        self.folder, self.seconds, self.full = folder, seconds, full
        self.step: Step = next_step(folder) or STEPS[-1]
        self.fingerprints = self._compute_fingerprints()
        self.warmed_lessons: list[Lesson] = []
        self.actions: Mapping[str, Callable[[], None]] = {  # by event
            "n": self._show_next, "o": lambda: show_page(self.folder, self.lesson, os.environ.get("LLORCH_SITE")),
            "h": lambda: show_hint(self.folder, self.lesson), "l": lambda: show_list(self.folder),
            "c": lambda: self._check([*LESSONS]), "s": lambda: show_solution(self.folder, self.lesson),
            "x": lambda: reset(self.folder, self.lesson), SAVED: self._check_changed,
        }  # fmt: skip

    def run(self) -> None:
        """Check again after every change of the files, until q, the end of the terminal or Ctrl-C."""
        click.echo(f"{self.folder}: {format_progress(self.folder)}")
        show_step(self.folder, self.step)
        with events(self.folder) as queue:
            self._warm()
            say(f"llorch checks every save; {KEYS}" if sys.stdin.isatty() else "llorch checks every save; Ctrl-C quits")
            while (event := queue.get()) != "q":
                if event in self.actions:
                    self._run_action(self.actions[event])

    def _run_action(self, action: Callable[[], None]) -> None:
        """Run an action; print its error and continue."""
        try:
            action()
        except (OSError, ValueError) as error:
            say(error_line(error))

    @property
    def lesson(self) -> "Lesson":
        """The current lesson."""
        return self.step.lesson

    def _show_next(self) -> None:
        self.step = next_step(self.folder, self.step) or self.step
        show_step(self.folder, self.step)

    def _check_changed(self) -> None:
        """Check the lessons whose code changed, the current one first; if it did not change, switch to the first."""
        from llorch.apps.learn.lessons import LESSONS

        old_fingerprints, self.fingerprints = self.fingerprints, self._compute_fingerprints()
        changed = [lesson for lesson in LESSONS if self.fingerprints[lesson.number] != old_fingerprints[lesson.number]]
        if changed and self.lesson not in changed:
            self.step = step_of(self.folder, changed[0])
        self._check(sorted(changed, key=lambda lesson: lesson != self.lesson), begun_only=True)
        self._warm()

    def _warm(self) -> None:
        """Import ahead of time the modules that checks of the current lesson need, once for each lesson."""
        from llorch.apps.learn.sandbox import warm

        if self.lesson not in self.warmed_lessons:
            self.warmed_lessons.append(self.lesson)
            warm(self.lesson)

    def _check(self, lessons: "list[Lesson]", *, begun_only: bool = False) -> None:
        """Check lessons; record and print outcomes. `begun_only` hides lessons not begun, except the current lesson."""
        from llorch.apps.learn.progress import LearnerProgress
        from llorch.apps.learn.sandbox import outcomes
        from llorch.cli.learn.shown import counted, print_outcome

        progress, printed = LearnerProgress(self.folder, say), []
        numbers = [lesson.number for lesson in lessons]
        for outcome in outcomes(str(self.folder), numbers, seconds=self.seconds, progress=say):
            progress.note(outcome)
            if begun_only and outcome.lesson != self.lesson.number and _is_unbegun(outcome):
                continue  # it imports the saved file, but the learner has not begun it
            printed.append(outcome)
            print_outcome(outcome, full=self.full)
        if len(printed) > 1:
            click.echo(counted(printed))

    def _compute_fingerprints(self) -> dict[str, str]:
        from llorch.apps.learn.lessons import LESSONS, lesson_fingerprint

        return {lesson.number: lesson_fingerprint(self.folder, lesson) for lesson in LESSONS}


def _is_unbegun(outcome: "Outcome") -> bool:
    """Tell if no exercise of the lesson is written: nothing was compared, llorch's code ran instead (BORROWED)."""
    return outcome.label == "BORROWED" and not outcome.record["compared"]
