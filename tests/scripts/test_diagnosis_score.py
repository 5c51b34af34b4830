"""benchmarks/diagnosis: right engines are right, reports are re-enacted where they say, and the goals are reached."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.command_line import REPOSITORY
from helpers.refusals import assert_tells

from benchmarks.diagnosis import arithmetic, catalogue, rivals, score
from benchmarks.diagnosis.bugs import BUGS, together
from benchmarks.diagnosis.cases import Case, cases, correct_diagnosis_of
from benchmarks.diagnosis.controls import CONTROLS, Control, Run
from benchmarks.diagnosis.engine_runs import engine_runs
from benchmarks.diagnosis.reenacted import REPORTS, Report
from benchmarks.diagnosis.score import PAGE, Answer, extract_table, figures, marks, table
from llorch.diagnosis.mistakes import MISTAKES
from llorch.engines.dumps.stage_dump import StageDump

SETTINGS = {"norm-eps", "rope-theta", "rope-scaling-factor"}


@pytest.mark.parametrize("variant", CONTROLS, ids=lambda variant: variant.name)
def test_a_right_engine_is_as_near_as_its_arithmetic_allows(variant: Control):
    model = variant.models[0]
    run = variant.run(model)
    right = Control(
        "", arithmetic.float64_throughout, start=variant.start, passes=tuple(len(one.ids) for one in run.passes)
    )
    wanted = {(one.n_pass, one.key): one.array for one in right.run(model).stage_arrays}
    assert run.stage_arrays
    for one in run.stage_arrays:
        expected = wanted[one.n_pass, one.key][slice(None) if one.tokens is None else list(one.tokens)]
        np.testing.assert_array_equal(np.isneginf(one.array), np.isneginf(expected), one.key)
        actual, expected = (np.where(np.isneginf(x), 0, x) for x in (one.array, expected))
        assert np.linalg.norm(actual - expected) < 0.06 * np.linalg.norm(expected), one.key


def test_a_row_of_a_batch_is_the_one_that_was_asked_for():
    batched = next(variant for variant in CONTROLS if variant.name == "last row of a batch of 3")
    assert batched.run("micro-llama").passes == Control("alone").run("micro-llama").passes


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.bug.name)
def test_a_report_is_reenacted_where_it_says(report: Report):
    correct = correct_diagnosis_of(Case((report.bug,), report.bug.models[0], "all"), report.bug)
    (place,) = correct.shows
    assert place[0] == report.bug.first_pass
    assert place[1] in correct.starts_in
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report.thread)
    assert set(report.names) <= MISTAKES.keys() | SETTINGS


def test_there_are_enough_of_them():
    assert len(CONTROLS) >= 32
    assert len({report.thread for report in REPORTS}) >= 20


@pytest.mark.parametrize(
    ("factor", "cause", "is_far"),
    [(1.01, "precision_ordering", False), (1.04, "missing_multiplier", False), (-1, "missing_algorithm", True)],
)
def test_the_rules_of_others_say_what_they_say(factor: float, cause: str, is_far: bool):
    clean = Control("").run("micro-qwen2")
    arrays = {one.key: one.array for one in clean.stage_arrays} | {"l1.v_proj": _array(clean, "l1.v_proj") * factor}
    said = rivals.answers("micro-qwen2", StageDump.of_arrays(clean.passes, arrays))
    assert said["fixed"].place == said["skill"].place == (0, "l1.v_proj")
    assert said["skill"].cause == cause
    assert said["cosine"].place == ((0, "l1.v_proj") if is_far else None)
    assert all(answer.place is None for answer in rivals.answers("micro-qwen2", clean.in_memory()).values())


def _array(run: Run, key: str) -> np.ndarray:
    return next(one.array for one in run.stage_arrays if one.key == key)


def test_missed_goals_are_listed():
    right, wrong = (
        Answer("a", "planted", {"place": is_right, "name": True}, "", "", 0.1, {"skill": {"place": False}})
        for is_right in (True, False)
    )
    assert score.missed([right]) == []
    assert score.missed([right, wrong]) == ["place: 1/2 50.0 %"]
    assert marks([right, wrong], "place", "skill") == [False, False]
    assert marks([right, wrong], "name", "skill") == []
    assert "goal missed: place: 1/2 50.0 %" in table([right, wrong])


def test_the_table_of_the_readme_has_a_row_for_each_criterion_and_rules_only_where_they_read_the_dump():
    rivals_of = {"skill": {"place": False, "name": True}, "fixed": {"place": True}, "cosine": {"place": True}}
    answers = [
        Answer("a", "planted", {"place": True, "name": True}, "", "", 0.1, rivals_of),
        Answer("b", "reports", {"place": True, "unknown": False}, "", "", 0.1, rivals_of),
        Answer("c", "planted", {"place": False, "name": False, "second": True}, "", "", 0.1),  # refused
        Answer("d", "blocks", {"layer": True}, "", "", 0.1, {rule: {"layer": True} for rule in score.RULES}),
        Answer("e", "engines", {"silent": True}, "", "", 0.1),
        Answer("f", "training", {"place": False, "silent": False}, "", "", 0.1),
    ]
    cells = [line.split(" | ")[1:] for line in figures(answers).removesuffix(" |").split(" |\n")][1:]
    assert [[cell.partition(" (")[0] for cell in row] for row in cells] == [
        ["2 of 3", "0 of 2", "2 of 2", "2 of 2"],
        ["1 of 2", "1 of 1", "-", "-"],
        ["0 of 1", "-", "-", "-"],
        ["1 of 1", "-", "-", "-"],
        ["1 of 1", "1 of 1", "1 of 1", "1 of 1"],
        ["1 of 1", "-", "-", "-"],
    ]


CELL = re.compile(r"(\d+) of (\d+) \((\d+\.\d) %\)")


def of_page() -> dict[str, list[tuple[int, int] | None]]:
    """Right answers and all answers of the page by criterion, in llorch's column and in those of the rules."""
    titles = {title: criterion for criterion, title in score.SHOWN.items()}
    head, _, *rows = [line.strip("| ").split(" | ") for line in extract_table(PAGE.read_text()).splitlines()]
    assert head == [*score.COLUMNS.values()]
    found: dict[str, list[tuple[int, int] | None]] = {}
    for title, *cells in rows:
        matches = [CELL.fullmatch(cell) for cell in cells]
        assert all(match or cell == "-" for match, cell in zip(matches, cells, strict=True))
        assert all(f"{100 * int(match[1]) / int(match[2]):.1f}" == match[3] for match in matches if match)
        found[titles[title]] = [match and (int(match[1]), int(match[2])) for match in matches]
    return found


def more_wrong_than_shown(answers: list[Answer]) -> list[str]:
    """List criteria by which some answers have more mistakes than the page shows of all answers."""
    told = [answer for answer in answers if answer.group != "training"]
    n_wrong = {criterion: row[0][1] - row[0][0] for criterion, row in of_page().items() if row[0] is not None}
    return [criterion for criterion, n in n_wrong.items() if marks(told, criterion).count(False) > n]


@pytest.mark.parametrize(
    ("criterion", "group", "n_wrong", "criteria"),
    [
        ("silent", "control", 1, ["silent"]),
        ("place", "planted", 1, []),
        ("place", "planted", 2, ["place"]),
        ("place", "training", 2, []),
    ],
)
def test_a_part_of_the_answers_with_more_mistakes_than_the_readme_shows_is_seen(
    criterion: str, group: str, n_wrong: int, criteria: list[str]
):
    answers = [Answer(f"{at}", group, {criterion: at >= n_wrong}, "", "", 0.1) for at in range(9)]
    assert more_wrong_than_shown(answers) == criteria


def totals() -> dict[str, int]:
    """All answers of the page by criterion."""
    return {criterion: row[0][1] for criterion, row in of_page().items() if row[0] is not None}


N_RIGHT = sum(len(variant.models) for variant in CONTROLS) + sum(1 for _ in engine_runs())


def test_the_readme_shows_as_many_bugs_reports_and_right_engines_as_there_are():
    total, page = totals(), " ".join(PAGE.read_text().split())
    assert total["silent"] == N_RIGHT
    assert total["second"] == sum(1 for _ in together.pairs())
    n_wrong = total["place"] + total["layer"]
    assert total["name"] + total["unknown"] == n_wrong
    assert len(BUGS) + total["second"] + len(REPORTS) < n_wrong <= 2 * len(BUGS) + total["second"] + len(REPORTS)
    said = re.search(r"injects (\d+) bugs .{,60} repeats (\d+) bug reports, and runs (\d+) correct variants", page)
    assert said is not None
    assert [*map(int, said.groups())] == [len(BUGS), len(REPORTS), len(CONTROLS)]
    assert f"{n_wrong + N_RIGHT} dumps, " in page


@pytest.mark.slow
def test_the_readme_shows_as_many_answers_as_there_are_dumps():
    counts = Counter({"silent": N_RIGHT, "place": len(REPORTS)})
    counts.update("name" if report.names else "unknown" for report in REPORTS)
    for case in cases():
        named = correct_diagnosis_of(case, case.bugs[0]).names
        counts.update(["layer" if case.style == "blocks" else "place", "name" if named else "unknown"])
        counts["second"] += len(case.bugs) > 1
    assert totals() == {**counts}


@pytest.mark.parametrize(("n_right", "exit_code"), [(473, 0), (472, 1)])
def test_a_run_of_all_dumps_fails_where_the_readme_shows_other_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, n_right: int, exit_code: int
):
    answers = [Answer(f"{at}", "planted", {"place": at < 473}, "", "", 0.1) for at in range(474)]
    told = [Answer(f"{at}", "planted", {"place": at < n_right}, "", "", 0.1) for at in range(474)]
    (tmp_path / "diagnosis.md").write_text(f"<!-- diagnosis -->\n{figures(told)}\n<!-- end -->\n")
    monkeypatch.setattr(score, "PAGE", tmp_path / "diagnosis.md")
    monkeypatch.setattr(score, "ask_all", lambda *arguments: answers)
    monkeypatch.setattr(score, "chosen", lambda **options: [("planted", "0", lambda: answers[0])])
    monkeypatch.setattr(score, "engine_runs", list)
    done = CliRunner().invoke(score.main, [])
    assert done.exit_code == exit_code
    assert figures(answers) in done.stdout


def test_a_text_that_is_in_no_name_is_refused():
    done = CliRunner().invoke(score.main, ["--only", "no such dump"])
    assert done.exit_code == 2
    assert_tells(done.output, "--only", "no such dump")


def test_the_catalogue_has_a_row_for_each_of_its_engines_and_none_is_accused():
    page = (REPOSITORY / "checkpoints/honest_differences.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    assert rows[0][1:] == [*catalogue.PARTS]
    assert [row[0] for row in rows[2:]] == [*catalogue.ROWS]
    assert all(float(share) < 1 for share in re.findall(r"\((\d[\d.]*)\)", page))
    by_name = {variant.name: variant for variant in CONTROLS}
    assert [*catalogue.cells(by_name["joined products"])][3] == "0"


def test_rounding_of_float32_angles_is_the_number_on_the_page():
    page = (REPOSITORY / "checkpoints/honest_differences.md").read_text()
    line = page.partition("**float32 angles**")[2].partition("\n- ")[0]
    said = re.findall(r"(\S+) at position (\d+)", line)
    assert len(said) == 2
    for number, position in said:
        assert float(number) == pytest.approx(int(position) * 2**-24, rel=0.01)


@pytest.mark.nightly_cases(but=["folders"])
@pytest.mark.slow
@pytest.mark.parametrize("group", score.QUICK)
def test_some_dumps_reach_the_goals(group: str):
    answers = score.ask_all([job for job in score.chosen(quick=True) if job[0] == group])
    assert {answer.group for answer in answers} >= ({"planted", "blocks"} if group == "planted" else {group})
    assert score.missed(answers) == [], table(answers)
    assert more_wrong_than_shown(answers) == [], table(answers)
