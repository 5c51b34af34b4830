"""What a terminal shows of a diagnosis: up to the first cause, then what was found, then what could not be shown."""

import io
from collections.abc import Callable

import pytest
from builders import diagnoses
from helpers.refusals import assert_tells

from llorch.cli.diagnose_table import print_diagnosis
from llorch.cli.tables import Stdout
from llorch.diagnosis.verdict import Diagnosis


def printed(made: Diagnosis, *, every: bool = False) -> list[str]:
    out = Stdout(file=io.StringIO(), markup=False, highlight=False, emoji=False, soft_wrap=True, width=200)
    print_diagnosis(out, made, every=every)
    return out.file.getvalue().splitlines()  # type: ignore[attr-defined]


def stages(lines: list[str]) -> list[str]:
    """The first column of the table."""
    start = next(at for at, line in enumerate(lines) if "error/tolerance" in line)
    return [line.split("  ")[0] for line in lines[start + 1 : lines.index("", start)]]


def test_the_table_ends_with_the_first_cause():
    lines = printed(diagnoses.two_bugs())
    assert stages(lines)[:2] == ["embed", "layer 0"]
    assert [name.split()[0] for name in stages(lines)[2:]] == [
        f"l1.{stage}" for stage in ("attn_norm", "q_proj", "k_proj", "v_proj", "q_rope")
    ]


def test_causes_come_before_honest_differences_and_then_what_was_not_shown():
    text = "\n".join(printed(diagnoses.two_bugs()))
    order = ("FAIL  l1.q_rope", "FAIL  l3.v_proj", "ROUNDING  l3.ffn_act", "cannot show", "2 causes in 79 stages")
    assert [text.index(each) for each in order] == sorted(text.index(each) for each in order)
    (line,) = [line for line in text.splitlines() if "rope-interleaved-pairs: " in line and "found: " in line]
    assert_tells(line, "99.98 %", "interleaved")
    assert "near miss: rope-theta: theta is 10000 here, the file says 500000; explains 61.00 %" in text
    assert "them: rope-sine-sign" in text
    assert "shows in layers 1-2: 2 stages" in text
    assert "12 tokens: mask-window" in text


def test_many_right_layers_are_one_line():
    assert stages(printed(diagnoses.hundred_layers()))[1].startswith("layers 0-89")


def test_a_right_dump_has_a_line_for_each_stage_of_the_table():
    lines = printed(diagnoses.right())
    assert len(stages(lines)) == 22
    assert lines[-1] == "PASS: nothing is wrong; 79 stages compared; --all shows every stage"


@pytest.mark.nightly_cases("every_layer", "logits_only", "two_passes")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=[pytest.mark.nightly] if make is diagnoses.hundred_layers else [])  # 1900 lines
        for make in diagnoses.ALL
    ],
)
def test_every_stage_is_shown_where_that_is_asked_for(make: Callable[[], Diagnosis]):
    made = make()
    lines = printed(made, every=True)
    if made.results:
        assert len(stages(lines)) == len(made.results)
        assert any("inherited" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_findings_without_end_are_counted():
    assert "and 47 more; --json and --html have all" in printed(diagnoses.every_layer())


def test_what_is_not_finite_is_said_in_its_place():
    (line,) = [line for line in printed(diagnoses.not_finite()) if line.startswith("l0.attn_scores")]
    assert line.split()[1:5] == ["non-finite", "4.8e-07", "without", "end"]
