"""`llorch learn`: every save is checked; keys do what the verbs do."""

import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.learn.events import SAVED, events
from llorch.cli.learn.folder import full_option, impl_option, learners_folder, seconds_option
from llorch.cli.learn.hint import show_hint
from llorch.cli.learn.list import show_list
from llorch.cli.learn.next import next_lesson, show_lesson
from llorch.cli.learn.progress import summed_up
from llorch.cli.learn.reset import reset
from llorch.cli.learn.solution import show_solution
from llorch.cli.options import verb
from llorch.cli.output import say

if TYPE_CHECKING:
    from llorch.apps.learn.lessons import Lesson
    from llorch.apps.learn.sandbox import Outcome

KEYS = "n next   h hint   l list   c check all   s solution   x reset   q quit"


@verb(
    "Check each file when you save it, until you quit.",
    "llorch learn",
    "llorch learn my_llama",
    "llorch learn watch my_llama --seconds 30",
)
@click.argument("folder", type=click.Path(path_type=Path), required=False)
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
