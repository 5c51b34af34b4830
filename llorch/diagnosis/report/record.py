"""A diagnosis for programs: a JSON record and JUnit XML.

The functions from `numbers` on format text for both the terminal and the HTML page.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from xml.etree import ElementTree

import numpy as np

from llorch.diagnosis.verdict import Diagnosis, Finding, StageCheck, count, percent
from llorch.judging.types import Cause
from llorch.runtime.errors import printable
from llorch.stages.comparison import FAIL, NOT_RUN, PASS, ROUNDING

VERSION = 2  # version of the record; raise it with every incompatible change


def record(diagnosis: Diagnosis) -> dict[str, object]:
    """Convert a diagnosis to JSON types; numbers may be infinite or NaN, which JSON must write as null."""
    return {
        "version": VERSION,
        "model": diagnosis.model,
        "source": diagnosis.source,
        "right": diagnosis.is_right,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "stages": [_stage_record(check) for check in diagnosis.results],
        "could_not_show": {reason: list(names) for reason, names in diagnosis.could_not_show.items()},
        "notes": list(diagnosis.notes),
        "n_unchecked": diagnosis.n_unchecked,
        "not_run": {
            reason: [{"pass": n_pass, "stage": key} for n_pass, key in stage_refs]
            for reason, stage_refs in diagnosis.not_run.items()
        },
    }


def _stage_record(check: StageCheck) -> dict[str, object]:
    difference, profile = check.isolated.difference, check.profile
    return {
        "n_pass": check.n_pass,
        "key": check.key,
        "verdict": check.verdict,
        "engine_name": check.engine_name,
        "arithmetic": check.arithmetic,
        "ran_since": check.ran_since,
        "over": check.over,
        "isolated": check.isolated.record(),
        "chained": check.chained and check.chained.record(),
        "index": list(difference.index),
        "actual": difference.actual,
        "expected": difference.expected,
        "fault": difference.fault,
        "profile": profile and {field.name: _as_list(getattr(profile, field.name)) for field in fields(profile)},
    }


def _as_list(array: np.ndarray | None) -> list[float] | None:
    return None if array is None else array.tolist()


def junit(diagnosis: Diagnosis) -> str:
    """Write JUnit XML: one test suite for each pass, one test case for each stage.

    A wrong stage is a failure with its finding's sentence as the message.
    """
    top = ElementTree.Element("testsuites", name="llorch diagnose")
    sentences = by_place(diagnosis.findings)
    for n_pass, group in groupby(diagnosis.results, key=lambda check: check.n_pass):
        checks = list(group)
        failures = sum(check.verdict == FAIL for check in checks)
        skipped = [(reason, key) for reason, refs in diagnosis.not_run.items() for n, key in refs if n == n_pass]
        counts = {
            "tests": str(len(checks) + len(skipped)), "failures": str(failures), "errors": "0",
            "skipped": str(len(skipped)),
        }  # fmt: skip
        name = printable(f"{diagnosis.source}, pass {n_pass}")
        suite = ElementTree.SubElement(top, "testsuite", {"name": name} | counts)
        for check in checks:
            _add_case(suite, diagnosis.model, check, sentences.get((check.n_pass, check.key)))
        for reason, key in skipped:
            case = ElementTree.SubElement(suite, "testcase", classname=printable(diagnosis.model), name=key)
            ElementTree.SubElement(case, "skipped", message=printable(reason))
    for finding in diagnosis.findings:
        if not finding.places:
            _add_finding(top, diagnosis, finding)
    return ElementTree.tostring(top, encoding="unicode", xml_declaration=False) + "\n"


def _add_finding(top: ElementTree.Element, diagnosis: Diagnosis, finding: Finding) -> None:
    """Add a suite with one failure, for a finding that no dumped stage shows."""
    counts = {"tests": "1", "failures": "1", "errors": "0", "skipped": "0"}
    suite = ElementTree.SubElement(top, "testsuite", {"name": printable(f"{diagnosis.source}, weights")} | counts)
    case = ElementTree.SubElement(suite, "testcase", classname=printable(diagnosis.model), name=finding.key)
    ElementTree.SubElement(case, "failure", message=printable(finding.sentence), type=finding.kind)


def _add_case(suite: ElementTree.Element, model: str, check: StageCheck, finding: Finding | None) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=printable(model), name=check.key)
    measurement = printable(f"{check.engine_name}: {numbers(check)}")
    if check.verdict == FAIL:
        message = finding.sentence if finding else measurement
        failure = ElementTree.SubElement(
            case, "failure", message=printable(message), type=finding.kind if finding else ""
        )
        failure.text = measurement
    else:
        ElementTree.SubElement(case, "system-out").text = f"{check.verdict}: {measurement}"


def by_place(findings: Iterable[Finding]) -> Mapping[tuple[int, str], Finding]:
    """Map each pass and stage key to the finding that explains it."""
    return {stage_ref: finding for finding in findings for stage_ref in finding.places}


def numbers(check: StageCheck) -> str:
    """Format the errors of a stage with their tolerances."""
    local, total = check.isolated, check.chained
    if local.difference.fault is not None:
        return local.difference.fault
    error, tolerance = (total.difference.error, total.tolerance.error) if total else (math.nan, math.nan)
    return (
        f"local error {short(local.difference.error)} (tolerance {short(local.tolerance.error)}), {times(check.over)} "
        f"the tolerance; error from llorch's run {short(error)} (tolerance {short(tolerance)})"
    )


def short(number: float) -> str:
    """Format an error with two digits; `-` for NaN."""
    return "-" if math.isnan(number) else f"{number:.1e}" if number else "0"


def times(factor: float) -> str:
    """Format an error as a multiple of its tolerance."""
    if not math.isfinite(factor):
        return "NaN" if math.isnan(factor) else "infinity"
    return f"{float(f'{factor:.2g}'):g} x"


def explained(cause: Cause) -> str:
    """Format the explained share of the error, and the remaining error."""
    remaining = "within tolerance" if cause.remaining <= 1 else f"{times(cause.remaining)} the tolerance"
    return f"explains {percent(cause.explained_share)} of the error; the rest is {remaining}"


def ranges(layers: Sequence[int]) -> str:
    """Format layers in words: `layers 0-3, 7`."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])]
    spans = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'layer' if len(layers) == 1 else 'layers'} {spans}" if layers else "outside the layers"


def span(keys: Sequence[str]) -> str:
    """Format adjacent stages: up to three by name, more by the first and the last."""
    return ", ".join(keys) if len(keys) <= 3 else f"{len(keys)} stages, {keys[0]} to {keys[-1]}"


def verdict(diagnosis: Diagnosis) -> str:
    """Return the verdict on the dump: PASS, ROUNDING (rounding explains it), FAIL, or NOT RUN without comparisons."""
    if not diagnosis.is_right:
        return FAIL
    if not diagnosis.results:
        return NOT_RUN
    return ROUNDING if any(check.verdict == ROUNDING for check in diagnosis.results) else PASS


def headline(diagnosis: Diagnosis) -> str:
    """Summarise a diagnosis in one sentence: the first cause, or that nothing is wrong."""
    if failures := diagnosis.failures:
        return failures[0].sentence
    n_not_run = sum(map(len, diagnosis.not_run.values()))
    if not diagnosis.results:
        return "llorch cannot judge any stage of the dump" if n_not_run else "the dump has no stage"
    messages = {ROUNDING: "nothing is wrong: arithmetic explains every difference", PASS: "nothing is wrong"}
    not_run = f", {n_not_run} NOT RUN" if n_not_run else ""
    unchecked = f"; {diagnosis.unchecked_rows}" if diagnosis.unchecked_rows else ""
    return f"{messages[verdict(diagnosis)]}; {count(len(diagnosis.results), 'stage')} compared{not_run}{unchecked}"
