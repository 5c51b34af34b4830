"""Generated parts of the index of the course: the short route, and the lessons of the path with number and hours."""

from collections.abc import Iterable, Sequence

from checkpoints.generated.tables import table
from llorch.apps.learn.lessons import BLOCKS, LESSONS, OPTIONAL, ROUTE, Lesson, lessons_folder
from llorch.stages.table import CHECKPOINTS

COLUMNS = ("no", "lesson", "idea", "what goes wrong", "min")


def lesson_tables() -> str:
    """List the lessons in the order of the path: a heading and a table for each block."""
    return "\n\n".join([_length(), *(_block(title, lessons) for title, lessons in BLOCKS.items())])


def route() -> str:
    """List the steps of the short route, with the functions to write and the minutes."""
    lines = []
    for n, step in enumerate(ROUTE, 1):
        names = ", ".join(f"`{exercise.name}`" for exercise in step.parts)
        work = f"write {names}" if names else "read the page"
        lines.append(f"{n}. {step.lesson.number} {_link(step.lesson)}: {work}, {step.minutes} minutes")
    return "\n".join(lines)


def lesson_page(lesson: Lesson) -> str:
    """Return the page of a lesson, relative to `checkpoints/`; the warm-up may be on the page of its checkpoint."""
    folder = lesson.folder if (lesson.folder / "README.md").is_file() else lesson.folder.parent
    return (folder / "README.md").relative_to(lessons_folder()).as_posix()


def lesson_pages(lessons: Iterable[Lesson] = LESSONS) -> list[str]:
    """List the pages of checkpoints in the order of the path, each once."""
    return [lesson_page(lesson) for lesson in lessons if lesson.number in CHECKPOINTS]


def _length() -> str:
    required = [lesson for lesson in LESSONS if lesson.number not in OPTIONAL]
    return (
        f"The path has {len(LESSONS)} lessons, which take {_hours(LESSONS)} hours. Without the blocks marked as "
        f"optional it has {len(required)} lessons, which take {_hours(required)} hours."
    )


def _hours(lessons: Iterable[Lesson]) -> str:
    return f"{sum(lesson.minutes for lesson in lessons) / 60:.1f}"


def _block(title: str, lessons: Sequence[Lesson]) -> str:
    rows = ([lesson.number, _link(lesson), lesson.idea, lesson.pitfall, str(lesson.minutes)] for lesson in lessons)
    return f"### {title}\n\n{table(COLUMNS, rows, right=1)}"


def _link(lesson: Lesson) -> str:
    return f"[{lesson.name.replace('_', ' ')}]({lesson_page(lesson)})"
