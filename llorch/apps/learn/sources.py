"""Which files of a learner's folder make a lesson: its own, and those that it imports, over any number of steps."""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from llorch.apps.learn.lessons import Lesson


def sources(folder: Path, lesson: Lesson) -> list[Path]:
    """List the files of a lesson, by name; none while the lesson's file is missing."""
    found: set[Path] = set()
    new = {folder / f"{lesson.module}.py"}
    while new := {path for path in new - found if path.is_file()}:
        found |= new
        new = {folder / f"{module}.py" for path in new for module in _imported(path)}
    return sorted(found)


def lesson_fingerprint(folder: Path, lesson: Lesson) -> str:
    """Hash the files of a lesson with SHA-256."""
    digest = hashlib.sha256()
    for path in sources(folder, lesson):
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _imported(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # it imports nothing
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
