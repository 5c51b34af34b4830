"""A learner's progress, in `.llorch/progress.json` in the folder of their code, and the certificate.

The file is read again before every change, so that `watch` in one terminal and `check` in another do not overwrite each
other. An unreadable file is renamed, not deleted. A certificate holds hashes of code and goldens, versions and
verdicts. Everybody who has the code and llorch can compute the certificate again.
"""

import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llorch.apps.learn.lessons import BLOCKS, BY_NUMBER, Lesson, Step, lesson_fingerprint, sources, stub_of
from llorch.apps.learn.sandbox import Outcome
from llorch.apps.learn.verdict import BORROWED, to_verdict
from llorch.files.new_file import new_file
from llorch.files.strict_json import read_json
from llorch.judging.goldens.store import SUFFIX
from llorch.runtime.builtin import goldens_folder
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields
from llorch.stages.comparison import FAIL, NOT_RUN, PASS

VERSION = 1
CHANGED = "CHANGED"  # label of a lesson whose code changed after its check
LABELS = (PASS, FAIL, BORROWED, NOT_RUN)
_MAX_FILE_BYTES = 1 << 20
Progress = Callable[[str], None]  # gets messages for the user, not a learner's progress


@dataclass
class Standing:
    """A learner's state of one lesson.

    Attributes:
        status: Label of the last check; empty before the first check.
        attempts: Number of different versions of the code that were checked.
        hints: Number of hints read, by exercise.
        solution: True if the learner has seen the solution.
        tried: Hash of the code that was checked last.
        passed: Hash of the code that passed last.
        wrong: Name of the exercise that failed in the last check; empty if none failed or the name is unknown.
        unwritten: Names of the exercises that were not written in the last check.
        opened: True if the learner has opened the page.
    """

    status: str = ""
    attempts: int = 0
    hints: dict[str, int] = field(default_factory=dict)
    solution: bool = False
    tried: str = ""
    passed: str = ""
    wrong: str = ""
    unwritten: list[str] = field(default_factory=list)
    opened: bool = False


class LearnerProgress:
    """Progress in one learner's folder."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        """Read nothing yet; `progress` gets a message if the file is unusable."""
        self.folder, self._progress = folder, progress
        self.path = folder / ".llorch" / "progress.json"

    def read(self) -> dict[str, Standing]:
        """Read the state of every lesson, by its number."""
        standings = {number: Standing() for number in BY_NUMBER}
        if not self.path.exists():
            return standings
        try:
            return standings | _parse_standings(read_json(self.path, limit=_MAX_FILE_BYTES), self.path)
        except FormatError as error:
            old_file = set_aside(self.path)
            self._progress(f"{error}; the old file is now {old_file.name}, and progress starts from zero")
            return standings

    @contextmanager
    def changed(self, lesson: Lesson) -> Iterator[Standing]:
        """Read the state of a lesson for the `with` block to change, and write it at the end of the block."""
        standings = self.read()
        old_values = asdict(standings[lesson.number])
        yield standings[lesson.number]
        if asdict(standings[lesson.number]) == old_values:
            return
        self.path.parent.mkdir(exist_ok=True)
        lessons = {number: asdict(standing) for number, standing in standings.items() if standing != Standing()}
        with new_file(self.path) as temporary:
            text = json.dumps({"version": VERSION, "lessons": lessons}, indent=1)
            temporary.write_text(text + "\n", encoding="utf-8")

    def note(self, outcome: Outcome) -> None:
        """Store the outcome of a check, for the code that is in the folder now."""
        lesson = BY_NUMBER[outcome.lesson]
        fingerprint = lesson_fingerprint(self.folder, lesson)
        with self.changed(lesson) as standing:
            standing.status = outcome.label
            standing.wrong = _wrong_exercise(outcome.record)
            standing.unwritten = [*outcome.record.get("unwritten", ())]
            if outcome.label in (PASS, FAIL):
                standing.attempts += fingerprint != standing.tried
            if outcome.label != NOT_RUN:
                standing.tried = fingerprint
            if outcome.label == PASS:
                standing.passed = fingerprint

    def is_passed(self, lesson: Lesson, standing: Standing) -> bool:
        """Tell if the current code passed the lesson."""
        return self.label(lesson, standing) == PASS

    def label(self, lesson: Lesson, standing: Standing) -> str:
        """Return the last label if it belongs to the current code, else CHANGED."""
        is_old = standing.status in (PASS, FAIL) and standing.tried != lesson_fingerprint(self.folder, lesson)
        return CHANGED if is_old else standing.status

    def is_done(self, step: Step, standing: Standing) -> bool:
        """Tell if a step is done: the lesson or the step's parts pass, or the page of a step to read was opened."""
        if self.is_passed(step.lesson, standing):
            return True
        if not step.parts:
            return standing.opened
        is_current = standing.tried == lesson_fingerprint(self.folder, step.lesson)
        names = {exercise.name for exercise in step.parts}
        return standing.status == BORROWED and is_current and names.isdisjoint(standing.unwritten)


def _wrong_exercise(record: Mapping[str, Any]) -> str:
    """Return the exercise that a report calls wrong: `my_llama/l01b_rope.py:14 rope()`, or `rope() of cmd:PROGRAM`."""
    match = re.search(r"(\w+)\(\)( of |$)", str(record.get("where", "")))
    return match[1] if match else ""


def set_aside(path: Path) -> Path:
    """Rename a file to the first free name of `x.bak`, `x.2.bak`, ...; return the new path."""
    names = (path.with_name(f"{path.name}{'' if number == 1 else f'.{number}'}.bak") for number in range(1, 1000))
    new_path = next(name for name in names if not name.exists())
    return path.rename(new_path)


def _parse_standings(values: Mapping[str, object], path: Path) -> dict[str, Standing]:
    fields = Fields(values, path)
    if fields.integer("version") != VERSION:
        raise fields.error("Unsupported", "version", str(VERSION), values["version"])
    lessons = values.get("lessons")
    if not isinstance(lessons, dict) or not lessons.keys() <= BY_NUMBER.keys():
        raise fields.error("Malformed", "lessons", "an object of lessons", lessons)
    return {number: _parse_standing(standing, path, number) for number, standing in lessons.items()}


def _parse_standing(values: object, path: Path, number: str) -> Standing:
    if not isinstance(values, dict) or values.keys() - asdict(Standing()).keys():
        raise FormatError("Malformed", f"lesson {number}: expected {', '.join(asdict(Standing()))}", path=path)
    fields = Fields(values, path)
    status, hints, unwritten = fields.text("status", default=""), values.get("hints", {}), values.get("unwritten", [])
    if status not in ("", *LABELS):
        raise fields.error("Malformed", "status", ", ".join(LABELS), status)
    if not isinstance(hints, dict) or not all(type(n_steps) is int and n_steps >= 0 for n_steps in hints.values()):
        raise fields.error("Malformed", "hints", "a number for each part", hints)
    if not isinstance(unwritten, list) or not all(isinstance(name, str) for name in unwritten):
        raise fields.error("Malformed", "unwritten", "a list of names", unwritten)
    return Standing(
        status, fields.integer("attempts", default=0, low=0), hints, fields.boolean("solution", default=False),
        fields.text("tried", default=""), fields.text("passed", default=""), fields.text("wrong", default=""),
        unwritten, fields.boolean("opened", default=False),
    )  # fmt: skip


CERTIFICATE_VERSION = 3


def certificate(
    folder: Path, outcomes: Iterable[Outcome], version: str, *, text_models: Sequence[str] = ()
) -> dict[str, Any]:
    """Collect the verdicts, versions and hashes of a certificate; `version` is llorch's.

    `text_models` are the models whose text of both engines the learner's functions wrote, all chained.
    """
    goldens = goldens_folder()
    files = sorted([*goldens.glob("*/*.json"), *goldens.glob(f"*/*{SUFFIX}")])
    lessons = {
        outcome.lesson: {"verdict": to_verdict(outcome.label), "comparisons": outcome.record["compared"]}
        for outcome in outcomes
    }
    code = {path for number in lessons for path in sources(folder, BY_NUMBER[number])}
    return {
        "version": CERTIFICATE_VERSION,
        "versions": {"llorch": version, "python": platform.python_version(), "numpy": np.__version__},
        "reached": {"blocks": complete_blocks(lessons), "text": [*text_models]},
        "lessons": lessons,
        "code": {path.name: _hash(path) for path in sorted(code)},
        "goldens": {path.relative_to(goldens).as_posix(): _hash(path) for path in files},
    }


def complete_blocks(lessons: Mapping[str, Mapping[str, object]]) -> list[str]:
    """List the titles of the blocks whose lessons all pass; `lessons` are those of a certificate."""
    passed = {number for number, record in lessons.items() if record["verdict"] == PASS}
    return [title for title, block in BLOCKS.items() if passed.issuperset(lesson.number for lesson in block)]


def with_untouched(folder: Path, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Label outcomes of unchanged stubs BORROWED (not written): the stub of the first lesson fails on purpose."""
    for outcome in outcomes:
        lesson = BY_NUMBER[outcome.lesson]
        (file, *imported_files) = sources(folder, lesson) or [folder]
        is_stub = not imported_files and file.is_file() and file.read_text("utf-8", "replace") == stub_of(lesson)
        yield replace(outcome, label=BORROWED) if is_stub else outcome


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """List the entries in which two certificates differ, one line each; version 2 had no entry `reached`."""
    lines = []
    for key in (*(["reached"] if "reached" in expected else []), "lessons", "code", "goldens"):
        old, new = expected.get(key), actual[key]
        if not isinstance(old, Mapping):
            return [f"{key}: expected an object, got {old!r}"]
        lines += [
            f"{key}: {name}: expected {old.get(name, 'nothing')}, got {new.get(name, 'nothing')}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
    return lines


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
