"""A certificate: what a learner's code, the goldens and the versions were, by hashes, and what every lesson gave.

No word of a server: whoever has the code and llorch computes it again.
"""

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llorch.apps.learn import lessons as all_lessons
from llorch.apps.learn.materials import stub_of
from llorch.apps.learn.sandbox import Outcome
from llorch.apps.learn.sources import sources
from llorch.apps.learn.verdict import BORROWED
from llorch.judging.goldens.store import SUFFIX
from llorch.runtime.builtin import goldens_folder

VERSION = 1


def certificate(folder: Path, outcomes: Iterable[Outcome], version: str) -> dict[str, Any]:
    """Collect the verdicts, versions and hashes that a certificate records.

    Args:
        folder: Folder of the learner.
        outcomes: Outcomes of every lesson.
        version: Version of llorch.

    Returns:
        An object for JSON.
    """
    goldens = goldens_folder()
    files = sorted([*goldens.glob("*/*.json"), *goldens.glob(f"*/*{SUFFIX}")])
    lessons = {each.lesson: {"verdict": each.word, "comparisons": each.record["compared"]} for each in outcomes}
    code = {path for number in lessons for path in sources(folder, all_lessons.BY_NUMBER[number])}
    return {
        "version": VERSION,
        "versions": {"llorch": version, "python": platform.python_version(), "numpy": np.__version__},
        "lessons": lessons,
        "code": {path.name: _hash(path) for path in sorted(code)},
        "goldens": {path.relative_to(goldens).as_posix(): _hash(path) for path in files},
    }


def with_untouched(folder: Path, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Call a stub BORROWED that nobody has changed: the stub of the first lesson is wrong on purpose."""
    for each in outcomes:
        lesson = all_lessons.BY_NUMBER[each.lesson]
        (file, *others) = sources(folder, lesson) or [folder]
        is_stub = not others and file.is_file() and file.read_text("utf-8", "replace") == stub_of(lesson)
        yield replace(each, word=BORROWED) if is_stub else each


def differences(said: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return a line for each value in which two certificates differ."""
    lines = []
    for key in ("lessons", "code", "goldens"):
        theirs, ours = said.get(key), found[key]
        if not isinstance(theirs, Mapping):
            return [f"{key}: expected an object, got {theirs!r}"]
        lines += [
            f"{key}: {name}: expected {theirs.get(name, 'nothing')}, got {ours.get(name, 'nothing')}"
            for name in sorted({*theirs, *ours})
            if theirs.get(name) != ours.get(name)
        ]
    return lines


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
