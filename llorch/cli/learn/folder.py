"""Options and look-ups that the verbs of `llorch learn` share: the learner's folder, and lessons by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.options import SECONDS, group, page_option
from llorch.runtime.errors import suggestion

if TYPE_CHECKING:
    from llorch.apps.learn.lessons import Lesson

FOLDER = Path("my_llama")  # that `llorch learn` offers; taken from the parent folder, too
impl_option = group(
    "Input",
    page_option(
        "--impl",
        help="Your folder, or cmd:PROGRAM.  [default: LLORCH_IMPL, else impl of [tool.llorch] in pyproject.toml]",
    ),
)
full_option = group("Output", page_option("--full", is_flag=True, help="Whole traceback of an error in your code."))
seconds_option = group(
    "Check",
    page_option("--seconds", type=SECONDS, default=10.0, show_default=True, help="Seconds for your code per lesson."),
)


def find_source(impl: str | None) -> str | None:
    """Find the learner's folder or `cmd:PROGRAM`: in `impl`, LLORCH_IMPL, pyproject.toml or `FOLDER`."""
    from llorch.apps.learn.choice import chosen

    return chosen(impl) or (str(FOLDER) if FOLDER.is_dir() else None)


def learners_source(impl: str | None) -> str:
    """Return what `find_source` finds; UsageError if there is nothing."""
    if (source := find_source(impl)) is None:
        raise click.UsageError("--impl: expected a lesson folder, got none; make one with: llorch learn init my_llama")
    return source


def learners_folder(impl: str | None) -> Path:
    """Return the learner's folder, as `learners_source` does; UsageError if it is no folder."""
    folder = Path(source := learners_source(impl))
    if not folder.is_dir():
        raise click.UsageError(
            f"--impl: expected a lesson folder, got {source}; make one with: llorch learn init my_llama"
        )
    return folder


def chosen_lessons(words: Sequence[str]) -> "list[Lesson]":
    """Return the lessons by number or name, in their order; all of them if none is named."""
    from llorch.apps.learn.lessons import LESSONS

    selected = [one_lesson(word) for word in words]
    return [lesson for lesson in LESSONS if not words or lesson in selected]


def one_lesson(word: str) -> "Lesson":
    """Find a lesson by name, or by number without its first zero: 1 means 01."""
    from llorch.apps.learn.lessons import LESSONS

    names = {name: lesson for lesson in LESSONS for name in (lesson.number, lesson.name, lesson.module)}
    if f"0{word}" in names:
        return names[f"0{word}"]
    if word not in names:
        raise click.UsageError(f"there is no lesson {word!r} in llorch learn list{suggestion(word, names)}")
    return names[word]


def near(path: Path) -> str:
    """Shorten a path below the current folder to the form that a user types."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
