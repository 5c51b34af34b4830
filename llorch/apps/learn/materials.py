"""What lies beside a lesson: the stub to fill, hints for every part, and its mistakes as people type them."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from runpy import run_path

from llorch.apps.learn.exercise import Call
from llorch.apps.learn.lessons import Lesson
from llorch.apps.learn.typed_mistakes import make_typed_mistakes
from llorch.diagnosis.mistakes import MISTAKES


def stub_of(lesson: Lesson) -> str:
    """Read the text of the file that a learner completes."""
    return (lesson.folder / "stub.py").read_text(encoding="utf-8")


@cache
def hints_of(lesson: Lesson) -> Mapping[str, Sequence[str]]:
    """Return three hints for every part: a direction, the formula with shapes, the function itself."""
    found = tomllib.loads((lesson.folder / "hints.toml").read_text(encoding="utf-8"))
    return {name: table["steps"] for name, table in found.items()}


@cache
def typed_mistakes(lesson: Lesson) -> Mapping[str, Mapping[str, Call]]:
    """Map the lesson's parts to the names of known mistakes, and these to functions that people write then.

    Most are made from the library (`typed_mistakes`). The lesson's `mistakes.py` holds the ones that its page
    shows, and those that cannot be made.
    """
    by_hand = run_path(str(lesson.folder / "mistakes.py"))["WRONG"]
    wrong = {
        exercise.name: {**make_typed_mistakes(exercise), **by_hand.get(exercise.name, {})} for exercise in lesson.parts
    }
    in_order = {part: {name: found[name] for name in MISTAKES if name in found} for part, found in wrong.items()}
    return {part: found for part, found in in_order.items() if found}
