"""What is a bug, what is not, and what the page says of both."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from builders.comparisons import atlas_comparison
from helpers.refusals import assert_tells

from benchmarks.atlas.inputs import AtlasInput, Style
from benchmarks.atlas.judging import EngineRunReport
from benchmarks.atlas.page import bugs, readme
from benchmarks.atlas.verdicts import EngineReport, confirmed, with_verdict
from benchmarks.atlas.write_report import report

FINE, HALF = EngineRunReport([atlas_comparison("logits", 3e-7)], "float32"), "bfloat16, as declared"
OFF = EngineRunReport(
    [atlas_comparison("logits", 0.2)], "float32", wrong=True, findings=["why"], mistake="eps 1e-6", key="logits"
)
FACTS = {"date": "2026-01-01", "processor": "one"}


def verdict(
    name: str, label: str, run: EngineRunReport | None = None, feature: str = "", style: Style = "new", why: str = ""
) -> EngineReport:
    outcome, verdict = ("done", label) if label.isupper() else (label, "")
    return EngineReport("engine", "", AtlasInput(name, feature, style), outcome, verdict, why, "1.0", 0.1, run)


@pytest.mark.parametrize(
    ("run_report", "label"),
    [
        (FINE, "PASS"),
        (EngineRunReport(FINE.comparisons, HALF), "ROUNDING"),
        (EngineRunReport(OFF.comparisons, "float32", wrong=False, findings=["flash attention"]), "ROUNDING"),
        (OFF, "FAIL"),
        (EngineRunReport([atlas_comparison("q_rope", 0.2), *FINE.comparisons], "float32", wrong=True), "unreadable"),
    ],
)
def test_words(run_report: EngineRunReport, label: str):
    assert with_verdict(verdict("llama", ""), run_report).label == label


def test_only_what_a_correction_made_agree_is_a_bug():
    made = list(confirmed([
        verdict("llama", "FAIL", OFF, "eps"), verdict("llama", "PASS", FINE),
        verdict("qwen3", "FAIL", OFF, "eps"), verdict("qwen3", "FAIL", OFF),
        verdict("qwen2", "FAIL", OFF, "eps"), verdict("qwen2", "refused"),
        verdict("mistral", "FAIL", OFF, "eps"),
    ]))  # fmt: skip
    assert [each.label for each in made] == ["FAIL, cause confirmed", "PASS", "FAIL", "FAIL", "FAIL", "refused", "FAIL"]
    assert made[0].confirmed_by == AtlasInput("llama")
    assert made[0].correction.endswith(" eps")
    assert made[0].agreed is FINE


def test_a_correction_of_the_same_meaning_comes_first():
    (bug, *_) = confirmed([
        verdict("llama", "FAIL", OFF, "theta"), verdict("llama", "PASS", FINE),
        verdict("llama", "PASS", FINE, "theta", "old"),
    ])  # fmt: skip
    assert bug.confirmed_by == AtlasInput("llama", "theta", "old")
    assert_tells(bug.correction, "rope", "config.json")


def test_two_corrections_at_once_confirm_nothing():
    (found, *_) = confirmed([verdict("llama", "FAIL", OFF, "theta"), verdict("llama", "PASS", FINE, "", "old")])
    assert found.label == "FAIL"


def test_bug_of_another_way_has_a_report_only_where_the_own_way_has_none():
    sdpa = replace(OFF, mistake="eps 2")
    own = [verdict("llama", "FAIL", OFF, "eps"), verdict("llama", "PASS", FINE), verdict("qwen2", "PASS", FINE)]
    made = [*own, *(replace(each, way="half", run_report=sdpa) for each in own[:1]), replace(own[1], way="half")]
    made += [replace(verdict("qwen2", "FAIL", OFF, "eps"), way="half"), replace(own[2], way="half")]
    found = dict(bugs(confirmed(made)))
    ways = [[(each.way, each.input.family) for each in of] for of in found.values()]
    assert ways == [[("half", "qwen2")], [("", "llama")]]
    assert "half on a CPU" in report(*next(iter(found.items())), None)
    assert "float32 on a CPU" in report(*list(found.items())[1], None)


def test_report_tells_what_the_maintainers_know():
    bug = replace(verdict("llama", "FAIL", OFF), engine="mlx-lm")
    (found, *_) = confirmed([bug, replace(bug, input=AtlasInput("llama", "", "old"), verdict="PASS", run_report=FINE)])
    assert_tells(report("title", [found], None), "rope_parameters", 953)


def test_another_engine_confirms_nothing():
    other = replace(verdict("llama", "PASS", FINE), engine="other")
    assert next(confirmed([verdict("llama", "FAIL", OFF, "eps"), other])).label == "FAIL"


def test_the_page_has_every_verdict():
    verdicts = list(confirmed([
        verdict("llama", "FAIL", OFF, "eps"), verdict("llama", "PASS", FINE),
        verdict("qwen3", "FAIL", OFF, why="why"),
        verdict("mistral", "refused", why="ValueError: no windows | here"), verdict("qwen2", "hung", why="no answer"),
        EngineReport("absent", "", AtlasInput(""), "", "NOT RUN", "no wheel for this processor"),
    ]))  # fmt: skip
    ((title, own),) = bugs(verdicts)
    page = readme(verdicts, FACTS, {title: "reports/x.md"})
    assert len(own) == 1
    for line in (
        "date 2026-01-01, processor one.",
        "| engine | 1.0 | 1 |  | 1 | 1 | 1 |  | 1 |  |  | 3e-07 |",
        "| [engine 1.0](reports/x.md) | `llama-eps` | logits | eps 1e-6 | 2e-01 | ", " eps: 3e-07 |",
        "| `llama-eps` | **FAIL, cause confirmed** 2e-01 |", "| `llama` | 3e-07 |", "| `qwen3` | **FAIL** 2e-01 |",
        "| `mistral` | refused |",
        "NOT RUN: absent: no wheel for this processor.",
        "- engine, refused: `mistral`: `ValueError: no windows | here`",
    ):  # fmt: skip
        assert line in page


def test_every_report_of_the_page_is_there_and_no_other():
    folder = Path(__file__).parents[3] / "benchmarks" / "atlas" / "results"
    linked = set(re.findall(r"\]\((reports/[^)]+)\)", (folder / "README.md").read_text(encoding="utf-8")))
    assert linked == {path.relative_to(folder).as_posix() for path in folder.glob("reports/**/*.md")}
    for name in linked:
        assert "```python" in (folder / name).read_text(encoding="utf-8")
