"""Ask for a diagnosis of a dump: write it, read it as the command does, diagnose it, and mark the answer (`score`)."""

import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.diagnosis import rivals
from benchmarks.diagnosis.cases import Case, CorrectDiagnosis, correct_diagnosis_of, run_case
from benchmarks.diagnosis.controls import Control
from benchmarks.diagnosis.engine_runs import EngineRun, path_of
from benchmarks.diagnosis.folders import FolderCase, correct_diagnosis_of_folder, write_case
from benchmarks.diagnosis.port import model_path
from benchmarks.diagnosis.reenacted import Report
from benchmarks.diagnosis.styles import WrittenDump
from llorch.diagnosis.diagnose import diagnose
from llorch.diagnosis.guards import read_comparable
from llorch.diagnosis.verdict import Diagnosis, Finding
from llorch.engines.dumps.ids import FIRST_TOKEN_TWICE
from llorch.engines.dumps.stage_dump import StageDump
from llorch.files import Weights, open_weights


@dataclass(frozen=True)
class Answer:
    """Answer about one dump, and the criteria by which it is right.

    Attributes:
        name: Name of the case.
        group: `planted`, `reports`, `blocks` or `control`.
        right: By criterion, those that apply.
        said: The findings in short.
        expected: The correct diagnosis.
        seconds: Processor time, from opening the dump to the diagnosis.
        rivals: Rule to criterion to True if the rule is right.
    """

    name: str
    group: str
    right: Mapping[str, bool]
    said: str
    expected: str
    seconds: float
    rivals: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)


GUARDED = {
    "embedding-first-token-twice": FIRST_TOKEN_TWICE,
}  # reported by a guard, before any number is judged


@dataclass(frozen=True)
class DumpReading:
    """Result of reading a dump: refused, or diagnosed."""

    dump: StageDump | None
    diagnosis: Diagnosis | None
    refused: str
    seconds: float

    @property
    def wrong(self) -> list[Finding]:
        """Findings that are not rounding."""
        return [finding for finding in self.diagnosis.findings if finding.kind != "rounding"] if self.diagnosis else []

    def __str__(self) -> str:
        """Describe the refusal, the findings, or that nothing is wrong."""
        return self.refused or "; ".join(map(_short, self.wrong)) or "nothing is wrong"


def _short(finding: Finding) -> str:
    names = " + ".join(f"{cause.name} {cause.value}".strip() for cause in finding.causes)
    return f"pass {finding.n_pass} {finding.key} {finding.kind} {names}".strip()


@cache
def weights_of(model: str) -> Weights:
    """Open a model, see `model_path`, to compute in float64."""
    return open_weights(model_path(model)).astype(np.float64, keep=True)


def ask(model: str, file: WrittenDump) -> DumpReading:
    """Read a dump, guards included, and diagnose it, as the command does."""
    start, dump, diagnosis, refusal = time.process_time(), None, None, ""
    ids, first = (file.tokens.ids, file.tokens.first_position) if file.tokens else (None, None)
    try:
        weights = weights_of(model)
        dump = read_comparable(file.path, weights, mapping=file.mapping, ids=ids, first_position=first)
        diagnosis = diagnose(weights, dump, model=model)
    except Exception as error:  # a crash is a wrong answer; other dumps are still asked
        refusal = f"{type(error).__name__}: {error}"
    return DumpReading(dump, diagnosis, refusal, time.process_time() - start)


@contextmanager
def folder() -> Iterator[Path]:
    """Make a temporary folder for a dump."""
    with tempfile.TemporaryDirectory(prefix="llorch-score-") as name:
        yield Path(name)


def of_case(case: Case, group: str, correct: CorrectDiagnosis, value: str = "") -> Answer:
    """Write a dump with a bug, ask for a diagnosis, and mark the answer."""
    with folder() as path:
        reading = ask(case.model, run_case(case, path))
        rule_answers = rivals.answers(case.model, reading.dump) if reading.dump else {}
    first, blocks = reading.wrong[0] if reading.wrong else None, case.style == "blocks"
    is_guarded = any(name in GUARDED and GUARDED[name] in reading.refused for name in correct.names)
    right = {"layer" if blocks else "place": is_guarded or bool(first and in_place(first, correct, layer_only=blocks))}
    right["name" if correct.names else "unknown"] = is_guarded or bool(first and well_named(first, correct))
    if value:
        right["value"] = bool(first and first.causes and _same_value(first.causes[0].value, value))
    if len(case.bugs) > 1:
        second = correct_diagnosis_of(case, case.bugs[1])
        right["second"] = any(_is_second(finding, second) for finding in reading.wrong[1:])
    expected = (
        f"{correct.shows[:3]} made in {correct.starts_in[:2]}: "
        f"{', '.join(correct.names) or 'none of the known'} {value}"
    )
    rule_marks = {rule: _mark_rule(answer, correct, blocks) for rule, answer in rule_answers.items()}
    return Answer(case.name, "blocks" if blocks else group, right, str(reading), expected, reading.seconds, rule_marks)


def of_report(report: Report) -> Answer:
    """Re-enact a report, ask for a diagnosis, and mark the answer."""
    case = Case((report.bug,), report.bug.models[0], "all")
    return of_case(case, "reports", replace(correct_diagnosis_of(case, report.bug), names=report.names), report.value)


def of_control(variant: Control, model: str) -> Answer:
    """Write a dump of a right engine, and check that the diagnosis finds nothing."""
    with folder() as path:
        reading = ask(model, variant.run(model).write(path))
        rule_answers = rivals.answers(model, reading.dump) if reading.dump else {}
    right = {"silent": reading.diagnosis is not None and not reading.wrong}
    marks = {rule: {"silent": answer.place is None} for rule, answer in rule_answers.items()}
    return Answer(f"{variant.name}/{model}", "control", right, str(reading), "nothing is wrong", reading.seconds, marks)


def of_engine_run(engine_run: EngineRun) -> Answer:
    """Write a dump with a reference engine, and check that the diagnosis finds nothing."""
    with folder() as path:
        reading = ask(str(path_of(engine_run.model, path)), engine_run.write(path))
    right = {"silent": reading.diagnosis is not None and not reading.wrong}
    return Answer(
        f"{engine_run.name}/{engine_run.model}", "engines", right, str(reading), "nothing is wrong", reading.seconds
    )


def of_folder(case: FolderCase) -> Answer:
    """Write the dump of an engine that reads a quantised folder, ask for a diagnosis, and mark the answer."""
    with folder() as path:
        reading = ask(case.model, write_case(case, path))
    name, first = f"{case.name}/{case.folder}/{case.style}", reading.wrong[0] if reading.wrong else None
    if case.wrong is None:
        right = {"silent": reading.diagnosis is not None and not reading.wrong}
        return Answer(name, "folders", right, str(reading), "nothing is wrong", reading.seconds)
    correct = correct_diagnosis_of_folder(case)
    right = {"place": bool(first and in_place(first, correct))}
    right["name" if correct.names else "unknown"] = bool(first and well_named(first, correct))
    expected = f"{correct.shows[:3]} made in {correct.starts_in[:2]}: {', '.join(correct.names) or 'none of the known'}"
    return Answer(name, "folders", right, str(reading), expected, reading.seconds)


def in_place(finding: Finding, correct: CorrectDiagnosis, *, layer_only: bool = False) -> bool:
    """Return whether a finding is at the place of the bug."""
    if layer_only:
        return (finding.n_pass, _layer(finding.key)) in {(n, _layer(key)) for n, key in correct.shows}
    return (finding.n_pass, finding.key) in correct.shows and not set(finding.starts_in).isdisjoint(correct.starts_in)


def well_named(finding: Finding, correct: CorrectDiagnosis) -> bool:
    """Return whether a finding has the name of the bug, or no name if the bug is no known mistake."""
    if not correct.names:
        return finding.kind in ("unknown", "not finite") and not finding.causes
    return bool(finding.causes) and finding.causes[0].name in correct.names


def _is_second(finding: Finding, correct: CorrectDiagnosis) -> bool:
    return not set(finding.starts_in).isdisjoint(correct.starts_in) and well_named(finding, correct)


def _mark_rule(answer: rivals.Answer, correct: CorrectDiagnosis, blocks: bool) -> dict[str, bool]:
    shows = {(n, _layer(key)) if blocks else (n, key) for n, key in correct.shows}
    n_pass, key = answer.place or (-1, "")
    marks = {"layer" if blocks else "place": (n_pass, _layer(key) if blocks else key) in shows}
    return marks | ({"name": answer.cause in rivals.meant(correct.names)} if answer.cause else {})


def _layer(key: str) -> str:
    return key.rpartition(".")[0] or key


def _same_value(actual: str, expected: str) -> bool:
    try:
        return math.isclose(float(actual), float(expected), rel_tol=1e-3)
    except ValueError:
        return actual == expected
