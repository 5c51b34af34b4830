"""A diagnosis for programs: plain values for JSON, and JUnit's XML for whoever runs tests.

Below them is what the terminal and the page put into words alike.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from xml.etree import ElementTree

import numpy as np

from llorch.diagnosis.verdict import Diagnosis, Finding, StageCheck
from llorch.judging.types import Cause
from llorch.runtime.errors import printable
from llorch.stages.comparison import FAIL, NOT_RUN, PASS, ROUNDING

VERSION = 2  # of the record; a change that a reader would trip over makes it the next one


def record(diagnosis: Diagnosis) -> dict[str, object]:
    """Convert a diagnosis to plain values; numbers may be infinite or NaN, for which JSON has null."""
    return {
        "version": VERSION,
        "model": diagnosis.model,
        "source": diagnosis.source,
        "right": diagnosis.is_right,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "stages": [_stage_record(result) for result in diagnosis.results],
        "could_not_show": {reason: list(names) for reason, names in diagnosis.could_not_show.items()},
        "notes": list(diagnosis.notes),
        "not_run": {
            reason: [{"pass": n_pass, "stage": key} for n_pass, key in places]
            for reason, places in diagnosis.not_run.items()
        },
    }


def _stage_record(result: StageCheck) -> dict[str, object]:
    difference, profile = result.isolated.difference, result.profile
    return {
        "n_pass": result.n_pass,
        "key": result.key,
        "verdict": result.verdict,
        "engine_name": result.engine_name,
        "arithmetic": result.arithmetic,
        "ran_since": result.ran_since,
        "over": result.over,
        "isolated": result.isolated.record(),
        "chained": result.chained and result.chained.record(),
        "index": list(difference.index),
        "actual": difference.actual,
        "expected": difference.expected,
        "fault": difference.fault,
        "profile": profile and {each.name: _as_list(getattr(profile, each.name)) for each in fields(profile)},
    }


def _as_list(array: np.ndarray | None) -> list[float] | None:
    return None if array is None else array.tolist()


def junit(diagnosis: Diagnosis) -> str:
    """Write XML as JUnit does: a test suite for each pass, a test case for each stage.

    A wrong stage is a failure with the sentence of its finding.
    """
    top = ElementTree.Element("testsuites", name="llorch diagnose")
    sentences = by_place(diagnosis.findings)
    for number, group in groupby(diagnosis.results, key=lambda result: result.n_pass):
        results = list(group)
        failures = sum(result.verdict == FAIL for result in results)
        skipped = [(why, at) for why, places in diagnosis.not_run.items() for n, at in places if n == number]
        counts = {
            "tests": str(len(results) + len(skipped)), "failures": str(failures), "errors": "0",
            "skipped": str(len(skipped)),
        }  # fmt: skip
        name = printable(f"{diagnosis.source}, pass {number}")
        suite = ElementTree.SubElement(top, "testsuite", {"name": name} | counts)
        for result in results:
            _add_case(suite, diagnosis.model, result, sentences.get((result.n_pass, result.key)))
        for why, at in skipped:
            case = ElementTree.SubElement(suite, "testcase", classname=printable(diagnosis.model), name=at)
            ElementTree.SubElement(case, "skipped", message=printable(why))
    for finding in diagnosis.findings:
        if not finding.places:
            _add_finding(top, diagnosis, finding)
    return ElementTree.tostring(top, encoding="unicode", xml_declaration=False) + "\n"


def _add_finding(top: ElementTree.Element, diagnosis: Diagnosis, finding: Finding) -> None:
    """Add a suite of one failure that no stage of the dump shows."""
    counts = {"tests": "1", "failures": "1", "errors": "0", "skipped": "0"}
    suite = ElementTree.SubElement(top, "testsuite", {"name": printable(f"{diagnosis.source}, weights")} | counts)
    case = ElementTree.SubElement(suite, "testcase", classname=printable(diagnosis.model), name=finding.key)
    ElementTree.SubElement(case, "failure", message=printable(finding.sentence), type=finding.kind)


def _add_case(suite: ElementTree.Element, model: str, result: StageCheck, finding: Finding | None) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=printable(model), name=result.key)
    measured = printable(f"{result.engine_name}: {numbers(result)}")
    if result.verdict == FAIL:
        message = finding.sentence if finding else measured
        failure = ElementTree.SubElement(
            case, "failure", message=printable(message), type=finding.kind if finding else ""
        )
        failure.text = measured
    else:
        ElementTree.SubElement(case, "system-out").text = f"{result.verdict}: {measured}"


def by_place(findings: Iterable[Finding]) -> Mapping[tuple[int, str], Finding]:
    """Map each pass and stage key to the finding that explains its result."""
    return {place: finding for finding in findings for place in finding.places}


def numbers(result: StageCheck) -> str:
    """Format the errors of a stage with their tolerances."""
    local, total = result.isolated, result.chained
    if local.difference.fault is not None:
        return local.difference.fault
    error, limit = (total.difference.error, total.tolerance.error) if total else (math.nan, math.nan)
    return (
        f"local error {short(local.difference.error)} (tolerance {short(local.tolerance.error)}), {times(result.over)} "
        f"the tolerance; error from llorch's run {short(error)} (tolerance {short(limit)})"
    )


def short(number: float) -> str:
    """Format an error with two digits; `-` for NaN."""
    return "-" if math.isnan(number) else f"{number:.1e}" if number else "0"


def times(factor: float) -> str:
    """Format the factor by which a tolerance is exceeded, or the part of it that is used."""
    if not math.isfinite(factor):
        return "no number" if math.isnan(factor) else "without end"
    return f"{float(f'{factor:.2g}'):g} x"


def explained(cause: Cause) -> str:
    """Format how much of the error is explained, and how much is left."""
    over = "within tolerance" if cause.remaining <= 1 else f"{times(cause.remaining)} the tolerance"
    return f"explains {percent(cause.explained_share)} of the error; the rest is {over}"


def percent(share: float) -> str:
    """Format a share in percent; a share below 1 is never rounded up to 100 %."""
    return "100 %" if share >= 1 else f"{math.floor(share * 10_000) / 100:.2f} %" if math.isfinite(share) else "-"


def ranges(layers: Sequence[int]) -> str:
    """Format layers in words: `layers 0-3, 7`."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])]
    spans = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'layer' if len(layers) == 1 else 'layers'} {spans}" if layers else "outside the layers"


def span(keys: Sequence[str]) -> str:
    """Format adjacent stages: up to three by name, more by the first and the last."""
    return ", ".join(keys) if len(keys) <= 3 else f"{len(keys)} stages, {keys[0]} to {keys[-1]}"


def count(n: int, one: str, many: str = "") -> str:
    """Format a number with its noun, in the singular or the plural."""
    return f"{n} {one if n == 1 else many or f'{one}s'}"


def verdict(diagnosis: Diagnosis) -> str:
    """Judge the whole dump: PASS, ROUNDING (rounding explains it), FAIL, or NOT RUN if nothing was compared."""
    if not diagnosis.is_right:
        return FAIL
    if not diagnosis.results:
        return NOT_RUN
    return ROUNDING if any(result.verdict == ROUNDING for result in diagnosis.results) else PASS


def headline(diagnosis: Diagnosis) -> str:
    """Summarise a diagnosis in one sentence: the first cause, or that nothing is wrong."""
    if found := diagnosis.failures:
        return found[0].sentence
    left_out = sum(map(len, diagnosis.not_run.values()))
    if not diagnosis.results:
        return "llorch cannot judge any stage of the dump" if left_out else "the dump has no stage"
    said = {ROUNDING: "nothing is wrong: arithmetic explains every difference", PASS: "nothing is wrong"}
    not_run = f", {left_out} NOT RUN" if left_out else ""
    return f"{said[verdict(diagnosis)]}; {count(len(diagnosis.results), 'stage')} compared{not_run}"
