"""A learner who takes every lesson that has its files: stubs as they come, last hints pasted, mistakes typed."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

from llorch.apps.learn.check import FORWARD
from llorch.apps.learn.checks.forward import models_of
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.folder import read_folder
from llorch.apps.learn.lessons import LESSONS, Lesson, hints_of, stub_of, typed_mistakes
from llorch.apps.learn.verdict import LessonReport
from llorch.diagnosis.mistakes import MISTAKES, of_checkpoint
from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.runtime.builtin import BUILTIN, builtin_path
from llorch.stages.table import BY_NAME

TAUGHT = [
    lesson
    for lesson in LESSONS
    if (lesson.folder / "mistakes.py").is_file() and (find_spec("torch") or not lesson.on_torch)
]
ALIKE = {  # other names of the same numbers: a constant that has a name, and the setting that it is a value of
    "norm-eps-missing": {"norm-eps"},
    "norm-eps-1e-6-for-1e-5": {"norm-eps"},
    "norm-eps-1e-5-for-1e-6": {"norm-eps"},
    "adamw-step-counted-per-tensor": {"results-change"},
    "lora-dropout-at-evaluation": {"results-change"},
}


def paste_hints(lesson: Lesson) -> str:
    """The stub with the last hint in the place of every function."""
    text = stub_of(lesson)
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef) and node.name in hints_of(lesson):
            lines[node.lineno - 1 : node.end_lineno] = [hints_of(lesson)[node.name][-1].strip() + "\n"]
    return "".join(lines)


def write_implementation(folder: Path, lesson: Lesson, text: str) -> Implementation:
    """A learner's folder in which one lesson is being written."""
    for other in TAUGHT:
        (folder / f"{other.module}.py").write_text(stub_of(other), encoding="utf-8")
    (folder / f"{lesson.module}.py").write_text(text, encoding="utf-8")
    return Implementation(str(folder), read_folder(folder))


def all_typed_mistakes() -> Iterator[tuple[Lesson, str, str]]:
    """Every mistake that a lesson types: the lesson, the part, the name."""
    for lesson in TAUGHT:
        yield from ((lesson, part, name) for part, wrong in typed_mistakes(lesson).items() for name in wrong)


def handwritten_mistakes(lesson: Lesson) -> dict[str, dict[str, Any]]:
    """Mistakes that the lesson's own file types, by part and name."""
    return run_path(str(lesson.folder / "mistakes.py"))["WRONG"]


def untyped_mistakes(lesson: Lesson) -> dict[str, str]:
    """Mistakes of a lesson that cannot be typed in it, and why."""
    return run_path(str(lesson.folder / "mistakes.py")).get("UNTYPED", {})


def possible_mistakes(lesson: Lesson) -> list[str]:
    """Known mistakes of a checkpoint that a model of its lesson can have: dense ones have no gates and no states."""
    inside = lesson.number in FORWARD
    configs = [open_weights(builtin_path(model)).config for model in (models_of(lesson) if inside else BUILTIN)]

    def can_occur(mistake: Any, config: ModelConfig) -> bool:
        stages = [BY_NAME[s] for s in mistake.stages if s in BY_NAME and BY_NAME[s].checkpoint == lesson.number]
        return mistake.applies_to(config) and (not inside or any(stage.applies_to(config) for stage in stages))

    return [n for n in of_checkpoint(lesson.number) if any(can_occur(MISTAKES[n], config) for config in configs)]


def cause_names(report: LessonReport) -> set[str]:
    """What a verdict takes for the cause, with what it cannot tell from that."""
    return {each.name for each in report.causes if each.kind != "near miss"}
