"""What lies beside a lesson: the stub to fill, hints for every part, and its mistakes as people type them."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from runpy import run_path

from llorch.learn.exercise import Call
from llorch.learn.lessons import Lesson


def stub_of(lesson: Lesson) -> str:
    """Read the text of the file that a learner completes."""
    return (lesson.folder / "stub.py").read_text(encoding="utf-8")


@cache
def hints_of(lesson: Lesson) -> Mapping[str, Sequence[str]]:
    """Three hints for every part: a direction, the formula with shapes, the function itself."""
    found = tomllib.loads((lesson.folder / "hints.toml").read_text(encoding="utf-8"))
    return {name: table["steps"] for name, table in found.items()}


@cache
def typed_mistakes(lesson: Lesson) -> Mapping[str, Mapping[str, Call]]:
    """Part to the names of known mistakes to the functions that people write then."""
    return run_path(str(lesson.folder / "mistakes.py"))["WRONG"]
