"""benchmarks/diagnosis: right engines are right, reports are re-enacted where they say, and the goals are reached."""

import re

import numpy as np
import pytest
from command_line import REPOSITORY

from benchmarks.diagnosis import arithmetic, catalogue, rivals
from benchmarks.diagnosis.cases import Case, truth_of
from benchmarks.diagnosis.honest import HONEST, Honest, Run
from benchmarks.diagnosis.reenacted import REPORTS, Report
from benchmarks.diagnosis.score import Answer, ask_all, chosen, marks, missed, table
from llorch.dumps.stage_dump import StageDump
from llorch.verify.mistakes import MISTAKES

SETTINGS = {"norm-eps", "rope-theta", "rope-scaling-factor"}


@pytest.mark.parametrize("variant", HONEST, ids=lambda variant: variant.name)
def test_a_right_engine_is_as_near_as_its_arithmetic_allows(variant: Honest):
    model = variant.models[0]
    run = variant.run(model)
    right = Honest("", arithmetic.wide, start=variant.start, passes=tuple(len(one.ids) for one in run.passes))
    wanted = {(one.n_pass, one.key): one.array for one in right.run(model).shown}
    assert run.shown
    for one in run.shown:
        want = wanted[one.n_pass, one.key][slice(None) if one.tokens is None else list(one.tokens)]
        np.testing.assert_array_equal(np.isneginf(one.array), np.isneginf(want), one.key)
        got, want = (np.where(np.isneginf(x), 0, x) for x in (one.array, want))
        assert np.linalg.norm(got - want) < 0.06 * np.linalg.norm(want), one.key


def test_a_row_of_a_batch_is_the_one_that_was_asked_for():
    batched = next(variant for variant in HONEST if variant.name == "last row of a batch of 3")
    assert batched.run("micro-llama").passes == Honest("alone").run("micro-llama").passes


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.bug.name)
def test_a_report_is_reenacted_where_it_says(report: Report):
    truth = truth_of(Case((report.bug,), report.bug.models[0], "all"), report.bug)
    (place,) = truth.shows
    assert place[0] == report.bug.first_pass
    assert place[1] in truth.made
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report.thread)
    assert set(report.names) <= MISTAKES.keys() | SETTINGS


def test_there_are_enough_of_them():
    assert len(HONEST) >= 32
    assert len({report.thread for report in REPORTS}) >= 20


@pytest.mark.parametrize(
    ("factor", "cause", "is_far"),
    [(1.01, "precision_ordering", False), (1.04, "missing_multiplier", False), (-1, "missing_algorithm", True)],
)
def test_the_rules_of_others_say_what_they_say(factor: float, cause: str, is_far: bool):
    clean = Honest("").run("micro-qwen2")
    arrays = {one.key: one.array for one in clean.shown} | {"l1.v_proj": _array(clean, "l1.v_proj") * factor}
    said = rivals.answers("micro-qwen2", StageDump.of_arrays(clean.passes, arrays))
    assert said["fixed"].place == said["skill"].place == (0, "l1.v_proj")
    assert said["skill"].cause == cause
    assert said["cosine"].place == ((0, "l1.v_proj") if is_far else None)
    assert all(answer.place is None for answer in rivals.answers("micro-qwen2", clean.in_memory()).values())


def _array(run: Run, key: str) -> np.ndarray:
    return next(one.array for one in run.shown if one.key == key)


def test_goals_that_are_missed_are_said():
    right, wrong = (
        Answer("a", "planted", {"place": is_right, "name": True}, "", "", 0.1, {"skill": {"place": False}})
        for is_right in (True, False)
    )
    assert missed([right]) == []
    assert missed([right, wrong]) == ["place: 1/2 50.0 %"]
    assert marks([right, wrong], "place", "skill") == [False, False]
    assert marks([right, wrong], "name", "skill") == []
    assert "goal missed: place: 1/2 50.0 %" in table([right, wrong])


def test_the_catalogue_has_a_row_for_each_of_its_engines_and_none_is_accused():
    page = (REPOSITORY / "checkpoints/honest_differences.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    assert rows[0][1:] == [*catalogue.PARTS]
    assert [row[0] for row in rows[2:]] == [*catalogue.ROWS]
    assert all(float(share) < 1 for share in re.findall(r"\((\d[\d.]*)\)", page))
    by_name = {variant.name: variant for variant in HONEST}
    assert [*catalogue.cells(by_name["joined products"])][3] == "0"


@pytest.mark.slow
def test_some_dumps_reach_the_goals():
    answers = ask_all(chosen(quick=True))
    assert {answer.group for answer in answers} >= {"planted", "blocks", "reports", "honest", "engines"}
    assert missed(answers) == [], table(answers)
