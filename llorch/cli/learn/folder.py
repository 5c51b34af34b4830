"""Which folder is the learner's, and which lessons are meant; shared by the verbs of `llorch learn`."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.errors import suggestion

if TYPE_CHECKING:
    from llorch.learn.lessons import Lesson

impl_option = click.option(
    "--impl", envvar="LLORCH_IMPL",
    help="Your folder.  [default: LLORCH_IMPL, else impl below [tool.llorch] in a pyproject.toml here or above]",
)  # fmt: skip


def learners_folder(impl: str | None) -> Path:
    """The folder that is meant."""
    folder = Path(impl) if impl else _from_project(Path.cwd())
    if folder is None:
        raise click.UsageError("no folder of yours is known here; make one with: llorch learn init my_llama")
    if not folder.is_dir():
        raise click.UsageError(f"{folder} is no folder; make one with: llorch learn init {folder}")
    return folder


def _from_project(here: Path) -> Path | None:
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            try:
                said = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("llorch", {}).get("impl")
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{file}: {error}") from None
            return folder / said if isinstance(said, str) else None
    return None


def chosen_lessons(words: Sequence[str]) -> "list[Lesson]":
    """Lessons by number or name, in their order; all of them if none is named."""
    from llorch.learn.lessons import LESSONS

    wanted = [one_lesson(word) for word in words]
    return [lesson for lesson in LESSONS if not words or lesson in wanted]


def one_lesson(word: str) -> "Lesson":
    """A lesson by number or name."""
    from llorch.learn.lessons import LESSONS

    names = {name: lesson for lesson in LESSONS for name in (lesson.number, lesson.name, lesson.module)}
    if word not in names:
        raise click.UsageError(f"there is no lesson {word!r}{suggestion(word, names)}; llorch learn list has all")
    return names[word]


def near(path: Path) -> str:
    """A path as it is typed from here, if it lies below."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
