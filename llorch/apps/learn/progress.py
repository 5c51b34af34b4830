"""A learner's progress, in `.llorch/progress.json` next to their code: a local, readable file, easy to compare.

Read anew before every change, so that a loop in one window and a check in another do not undo each other. A file that
cannot be read is kept under another name. A certificate holds hashes of code and goldens, versions and verdicts;
whoever has the code and llorch computes it again.
"""

import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llorch.apps.learn.lessons import BY_NUMBER, Lesson, lesson_fingerprint, sources, stub_of
from llorch.apps.learn.sandbox import Outcome
from llorch.apps.learn.verdict import BORROWED, verdict_of
from llorch.files.new_file import new_file
from llorch.files.strict_json import read_json
from llorch.judging.goldens.store import SUFFIX
from llorch.runtime.builtin import goldens_folder
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields
from llorch.stages.comparison import FAIL, NOT_RUN, PASS

VERSION = 1
CHANGED = "CHANGED"  # since it was checked
LABELS = (PASS, FAIL, BORROWED, NOT_RUN)
_LARGEST = 1 << 20  # bytes
Progress = Callable[[str], None]


@dataclass
class Standing:
    """How it stands with a lesson.

    Attributes:
        status: The last verdict; empty before the first.
        attempts: How many different versions of the code were checked.
        hints: Steps taken, by part.
        solution: Whether it was shown.
        tried: Hash of the code that was checked last.
        passed: Hash of the code that passed last.
        wrong: The part that was wrong in the last check; empty where none was.
    """

    status: str = ""
    attempts: int = 0
    hints: dict[str, int] = field(default_factory=dict)
    solution: bool = False
    tried: str = ""
    passed: str = ""
    wrong: str = ""


class LearnerProgress:
    """Of one folder."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        """Read nothing yet; `progress` is told of a file that cannot be used."""
        self.folder, self._say = folder, progress
        self.path = folder / ".llorch" / "progress.json"

    def read(self) -> dict[str, Standing]:
        """Read the state of every lesson, by its number."""
        known = {number: Standing() for number in BY_NUMBER}
        if not self.path.exists():
            return known
        try:
            return known | _standings(read_json(self.path, limit=_LARGEST), self.path)
        except FormatError as error:
            kept = set_aside(self.path)
            self._say(f"{error}; the old file is now {kept.name}, and progress starts from zero")
            return known

    @contextmanager
    def changed(self, lesson: Lesson) -> Iterator[Standing]:
        """Give the record of a lesson, to be changed and then written."""
        known = self.read()
        before = asdict(known[lesson.number])
        yield known[lesson.number]
        if asdict(known[lesson.number]) == before:
            return
        self.path.parent.mkdir(exist_ok=True)
        lessons = {number: asdict(standing) for number, standing in known.items() if standing != Standing()}
        with new_file(self.path) as temporary:
            text = json.dumps({"version": VERSION, "lessons": lessons}, indent=1)
            temporary.write_text(text + "\n", encoding="utf-8")

    def note(self, outcome: Outcome) -> None:
        """Remember what came of a check."""
        lesson = BY_NUMBER[outcome.lesson]
        code = lesson_fingerprint(self.folder, lesson)
        with self.changed(lesson) as standing:
            standing.status = outcome.label
            standing.wrong = _wrong_part(outcome.record)
            if outcome.label in (PASS, FAIL):
                standing.attempts += code != standing.tried
                standing.tried = code
            if outcome.label == PASS:
                standing.passed = code

    def is_passed(self, lesson: Lesson, standing: Standing) -> bool:
        """Tell if the current code passed the lesson."""
        return self.label(lesson, standing) == PASS

    def label(self, lesson: Lesson, standing: Standing) -> str:
        """Return the last verdict if it is about the present code; else say that the code has changed."""
        is_old = standing.status in (PASS, FAIL) and standing.tried != lesson_fingerprint(self.folder, lesson)
        return CHANGED if is_old else standing.status


def _wrong_part(record: Mapping[str, Any]) -> str:
    """Return the part that a verdict calls wrong: `my_llama/l01b_rope.py:14 rope()`, or `rope() of cmd:PROGRAM`."""
    found = re.search(r"(\w+)\(\)( of |$)", str(record.get("where", "")))
    return found[1] if found else ""


def set_aside(path: Path) -> Path:
    """Rename a file to one that is not there yet, `x.bak`, `x.2.bak`, ...; returns its new name."""
    names = (path.with_name(f"{path.name}{'' if n == 1 else f'.{n}'}.bak") for n in range(1, 1000))
    kept = next(name for name in names if not name.exists())
    return path.rename(kept)


def _standings(values: Mapping[str, object], path: Path) -> dict[str, Standing]:
    fields = Fields(values, path)
    if fields.integer("version") != VERSION:
        raise fields.error("Unsupported", "version", str(VERSION), values["version"])
    lessons = values.get("lessons")
    if not isinstance(lessons, dict) or not lessons.keys() <= BY_NUMBER.keys():
        raise fields.error("Malformed", "lessons", "an object of lessons", lessons)
    return {number: _standing(each, path, number) for number, each in lessons.items()}


def _standing(values: object, path: Path, number: str) -> Standing:
    if not isinstance(values, dict) or values.keys() - asdict(Standing()).keys():
        raise FormatError("Malformed", f"lesson {number}: expected {', '.join(asdict(Standing()))}", path=path)
    fields = Fields(values, path)
    status, hints = fields.text("status", default=""), values.get("hints", {})
    if status not in ("", *LABELS):
        raise fields.error("Malformed", "status", ", ".join(LABELS), status)
    if not isinstance(hints, dict) or not all(type(n) is int and n >= 0 for n in hints.values()):
        raise fields.error("Malformed", "hints", "a number for each part", hints)
    return Standing(
        status, fields.integer("attempts", default=0, low=0), hints, fields.boolean("solution", default=False),
        fields.text("tried", default=""), fields.text("passed", default=""), fields.text("wrong", default=""),
    )  # fmt: skip


CERTIFICATE_VERSION = 2


def certificate(folder: Path, outcomes: Iterable[Outcome], version: str) -> dict[str, Any]:
    """Collect the verdicts, versions and hashes that a certificate records; `version` is that of llorch."""
    goldens = goldens_folder()
    files = sorted([*goldens.glob("*/*.json"), *goldens.glob(f"*/*{SUFFIX}")])
    lessons = {
        outcome.lesson: {"verdict": verdict_of(outcome.label), "comparisons": outcome.record["compared"]}
        for outcome in outcomes
    }
    code = {path for number in lessons for path in sources(folder, BY_NUMBER[number])}
    return {
        "version": CERTIFICATE_VERSION,
        "versions": {"llorch": version, "python": platform.python_version(), "numpy": np.__version__},
        "lessons": lessons,
        "code": {path.name: _hash(path) for path in sorted(code)},
        "goldens": {path.relative_to(goldens).as_posix(): _hash(path) for path in files},
    }


def with_untouched(folder: Path, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Call a stub BORROWED that nobody has changed: the stub of the first lesson is wrong on purpose."""
    for each in outcomes:
        lesson = BY_NUMBER[each.lesson]
        (file, *others) = sources(folder, lesson) or [folder]
        is_stub = not others and file.is_file() and file.read_text("utf-8", "replace") == stub_of(lesson)
        yield replace(each, label=BORROWED) if is_stub else each


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
