"""What programs read of a diagnosis: an object of plain values, and JUnit's XML."""

import json
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from builders import diagnoses

from llorch.cli.output import to_json
from llorch.diagnosis.report.record import VERSION, headline, junit, ranges, record, span, times, verdict
from llorch.diagnosis.verdict import Diagnosis, percent
from llorch.stages.comparison import FAIL

KEYS = {
    "version",
    "model",
    "source",
    "right",
    "findings",
    "stages",
    "could_not_show",
    "notes",
    "not_run",
    "n_unchecked",
}
every = pytest.mark.parametrize("make", diagnoses.ALL)


def refuse(constant: str) -> None:
    raise AssertionError(constant)


@every
def test_the_record_is_json_that_every_parser_takes(make: Callable[[], Diagnosis]):
    made = make()
    read = json.loads(to_json(record(made)), parse_constant=refuse)
    assert {*read} == KEYS
    assert (read["version"], read["right"]) == (VERSION, made.is_right)
    assert (read["model"], read["source"]) == (made.model, made.source)
    assert [(stage["n_pass"], stage["key"]) for stage in read["stages"]] == [(r.n_pass, r.key) for r in made.results]
    assert len(read["findings"]) == len(made.findings)


def test_the_record_has_what_was_measured_and_where():
    read = json.loads(to_json(record(diagnoses.one_bug())))
    (wrong,) = [stage for stage in read["stages"] if stage["verdict"] == FAIL]
    assert wrong["isolated"]["error"] > wrong["isolated"]["tolerance"]
    assert wrong["over"] > 1000
    assert (wrong["index"], wrong["actual"], wrong["expected"]) == ([3, 3, 3], 0.55, -0.82)
    assert len(wrong["profile"]["tokens"]) == diagnoses.N_TOKENS
    (found,) = read["findings"]
    assert (found["causes"][0]["value"], found["near_misses"][0]["remaining"]) == ("interleaved", 21000)


def test_what_is_not_finite_is_null_and_its_fault_is_said():
    read = json.loads(to_json(record(diagnoses.not_finite())))
    (wrong,) = [stage for stage in read["stages"] if stage["verdict"] == FAIL]
    assert (wrong["isolated"]["error"], wrong["over"]) == (None, None)
    assert wrong["fault"].startswith("non-finite: 3 of 4096")


@every
def test_junit_has_a_suite_for_each_pass_and_a_case_for_each_stage(make: Callable[[], Diagnosis]):
    made = make()
    top = ElementTree.fromstring(junit(made).encode())
    assert [suite.get("tests") for suite in top] == [
        str(sum(result.n_pass == number for result in made.results))
        for number in sorted({result.n_pass for result in made.results})
    ]
    roundings = {place for each in made.findings if each.kind == "rounding" for place in each.places}
    wrong = [r.key for r in made.results if r.verdict == FAIL and (r.n_pass, r.key) not in roundings]
    assert bool(wrong) != made.is_right
    assert [case.get("name") for case in top.iter("testcase") if case.find("failure") is not None] == wrong
    assert sum(int(suite.get("failures", "")) for suite in top) == len(wrong)
    told = [case.findtext("system-out") or "" for case in top.iter("testcase") if case.get("name") not in wrong]
    assert all("tolerance" in text for text in told)


def test_a_failure_says_what_was_found():
    (failure,) = ElementTree.fromstring(junit(diagnoses.one_bug())).iter("failure")
    assert failure.get("type") == "mistake"
    assert diagnoses.PAIRS in failure.get("message", "")
    assert "(tolerance 4.8e-07), 30000 x the tolerance" in (failure.text or "")


def test_what_was_not_run_is_skipped_and_no_pass():
    made = replace(diagnoses.right(), not_run={"no past": [(0, "l0.conv_out"), (0, "l0.delta_out")]})
    (suite,) = ElementTree.fromstring(junit(made)).iter("testsuite")
    names = [case.get("name") for case in suite.iter("testcase") if case.find("skipped") is not None]
    assert (suite.get("skipped"), names) == ("2", ["l0.conv_out", "l0.delta_out"])
    assert record(made)["not_run"] == {"no past": [{"pass": 0, "stage": name} for name in names]}
    assert "2 NOT RUN" in headline(made)


def test_control_characters_of_names_are_written_out():
    (failure,) = ElementTree.fromstring(junit(diagnoses.hostile()).encode()).iter("failure")
    assert r"<script>alert(1)</script>\x00\x1b[31m\u202eevil\ud800" in failure.get("message", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ranges([]), "outside the layers"),
        (ranges([3]), "layer 3"),
        (ranges([0, 1, 2, 3, 7]), "layers 0-3, 7"),
        (span(["a", "b", "c"]), "a, b, c"),
        (span(["a", "b", "c", "d"]), "4 stages, a to d"),
        (percent(0.99998), "99.99 %"),
        (percent(1.0), "100 %"),
        (percent(float("nan")), "-"),
        (times(0.4), "0.4 x"),
        (times(51234.0), "51000 x"),
        (times(float("inf")), "infinity"),
        (verdict(diagnoses.rounding()), "ROUNDING"),
        (verdict(diagnoses.undeclared()), "ROUNDING"),
        (verdict(diagnoses.nothing_seen()), "NOT RUN"),
    ],
)
def test_numbers_in_words(text: str, expected: str):
    assert text == expected
