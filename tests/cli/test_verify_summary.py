"""Grouping and counting of verification rows."""

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from helpers.refusals import assert_tells

from llorch.cli import verify_summary
from llorch.cli.report import closing_line, failure_report, print_brief_end, print_line, print_model
from llorch.cli.tables import console
from llorch.cli.verify_plan import _exit_code
from llorch.cli.verify_summary import EXACT, ModelReport, checkpoints_of, first_failure, lines, summary
from llorch.files import open_weights
from llorch.judging.types import Comparison
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import NOT_RUN, Difference, Tolerance
from llorch.stages.stage_ref import StageRef


def comparison(
    stage: str = "attn_out", checkpoint: str = "05", layer: int | None = 0, case: str = "near", n_cached: int = 0,
    error: float = 1e-7, worst: float = 1e-7, tolerance: float = 1e-6, **changes: Any,
) -> Comparison:  # fmt: skip
    """Build a comparison that passes, with some fields changed."""
    fields: dict[str, Any] = {
        "model": "m", "stage_ref": StageRef(checkpoint, stage, layer, case, n_cached=n_cached), "mode": "chained",
        "engine": "llamacpp", "backend": "numpy", "difference": Difference(error, worst),
        "tolerance": Tolerance(tolerance, 1e-6), "verdict": "PASS", "engine_error": 2e-7, "reference_error": 1e-8,
    }  # fmt: skip
    return Comparison(**fields | changes)


def report(*rows: Comparison, **fields: Any) -> ModelReport:
    return ModelReport("m", list(rows), **fields)


def text_of(*rows: Comparison) -> str:
    return "\n".join(failure_report(report(*rows)))


def test_line_shows_closest_comparison_with_errors_of_both_engines():
    found = lines(
        report(
            comparison(error=9e-7, tolerance=1e-5),
            comparison(layer=1, error=8e-7, engine_error=3e-7),
            comparison(layer=1, engine="transformers", engine_error=4e-7),
        )
    )
    line = next(line for line in found if line.checkpoint == "05")
    assert line.n_rows == 3
    assert line.closest is not None
    assert line.closest.stage_ref.layer == 1
    assert line.engine_errors == {"llamacpp": 3e-7, "transformers": 4e-7}


@pytest.mark.parametrize("worst_layer", [0, 1, 2])
@pytest.mark.parametrize("worse", [{"error": 9e-7}, {"worst": 9e-7}, {"verdict": "TIE"}, {"verdict": "FAIL"}])
def test_a_line_shows_its_worst_row_wherever_that_stands(worse: dict[str, Any], worst_layer: int):
    comparisons = [comparison(layer=layer, **(worse if layer == worst_layer else {})) for layer in range(3)]
    line = next(line for line in lines(report(*comparisons)) if line.checkpoint == "05")
    assert line.closest == comparisons[worst_layer]
    assert line.verdict == comparisons[worst_layer].verdict


@pytest.mark.parametrize(
    ("failed", "not_run", "code"), [(0, [], 0), (0, ["no engine"], 3), (2, [], 1), (2, ["no engine"], 1)]
)
@pytest.mark.parametrize("checkpoints_not_run", [0, 1])
def test_failures_outweigh_what_was_not_run(failed: int, not_run: list[str], checkpoints_not_run: int, code: int):
    counts = {"failed": failed, "not_run": not_run, "checkpoints_not_run": checkpoints_not_run}
    counts |= {"strict": True, "ties": 0}
    assert _exit_code(counts) == (3 if checkpoints_not_run and code == 0 else code)


@pytest.mark.parametrize("not_run", [[], ["no engine"]])
def test_a_near_tie_fails_a_strict_run_alone(not_run: list[str]):
    comparisons = [comparison(checkpoint=number, verdict="TIE" if number == "10" else "PASS") for number in EXACT]
    for strict, code in ((True, 1), (False, 3 if not_run else 0)):
        counts = summary([report(*comparisons, not_run=not_run)], strict=strict)
        assert (counts["ties"], counts["failed"], counts["strict"]) == (1, 0, strict)
        assert _exit_code(counts) == code


def test_a_failure_is_shown_before_a_near_tie_and_both_before_any_pass():
    comparisons = [comparison(error=9e-7), comparison(layer=1, verdict="TIE"), comparison(layer=2, verdict="FAIL")]
    for n, verdict in ((1, "PASS"), (2, "TIE"), (3, "FAIL")):
        assert lines(report(*comparisons[:n]))[6].verdict == verdict


def test_every_checkpoint_of_the_arithmetic_has_a_line_also_without_a_row():
    for numbers in (EXACT, (*EXACT, "13")):
        found = lines(replace(report(comparison()), checkpoints=numbers))
        assert [line.checkpoint for line in found] == list(numbers)
        assert sum(line.verdict == NOT_RUN for line in found) == len(numbers) - 1


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"layer": 0, "stage": "attn_out"}, {"layer": 1, "stage": "attn_norm"}),
        ({"layer": 0, "stage": "q_proj"}, {"layer": 0, "stage": "ffn_gate"}),
        ({"mode": "isolated", "case": "far"}, {"mode": "chained"}),
        ({"layer": None, "stage": "embed"}, {"layer": 0, "stage": "attn_norm"}),
        ({"layer": 7, "stage": "block_out"}, {"layer": None, "stage": "final_norm"}),
        ({"layer": None, "stage": "logits"}, {"layer": None, "stage": "argmax", "checkpoint": "10"}),
        ({"layer": None, "stage": "tensors", "checkpoint": "00"}, {"layer": None, "stage": "embed"}),
        ({"stage": "argmax", "checkpoint": "10"}, {"stage": "generation", "checkpoint": "12"}),
    ],
)
def test_the_first_failure_is_the_first_in_the_forward_pass(first: dict[str, Any], later: dict[str, Any]):
    comparisons = [comparison(verdict="FAIL", **fields) for fields in (later, first)]
    assert first_failure(report(comparison(stage="embed", layer=None), *comparisons)) == comparisons[1]


def test_nothing_failed_means_no_failure():
    assert first_failure(report(comparison(), comparison(verdict="TIE"))) is None
    assert failure_report(report(comparison())) == []


def test_closer_to_reference_needs_all_engines_and_counts_only_chained():
    counts = verify_summary.closer_to_reference(
        [
            report(
                comparison(reference_error=1e-7, engine_error=1e-7),
                comparison(reference_error=1e-7, engine_error=2e-7, engine="transformers"),
                comparison(layer=1, reference_error=1e-7, engine_error=0.9e-7),
                comparison(layer=1, reference_error=1e-7, engine_error=2e-7, engine="transformers"),
                comparison(case="far", reference_error=1e-7),
                comparison(layer=2, mode="isolated", reference_error=9.0),
            ),
            report(comparison(reference_error=9.0), comparison(layer=3, backend="numpy-float32")),
        ],
        "numpy",
    )
    assert counts == {
        "near": {"comparisons": 3, "llorch": 1},
        "far": {"comparisons": 1, "llorch": 1},
        "all": {"comparisons": 4, "llorch": 2},
    }


def test_closing_line_without_reference_omits_closeness():
    line = closing_line(summary([report(comparison(reference_error=math.nan, engine_error=math.nan))]))
    assert "truth" not in line


def test_the_closing_line_rounds_down_and_counts_what_was_not_run():
    comparisons = [comparison(layer=n, reference_error=9.0 if n == 0 else 0.0) for n in range(300)]
    comparisons.append(comparison(backend="numpy-float32", reference_error=9.0))
    line = closing_line(summary([report(*comparisons, not_run=["transformers: absent"])]))
    assert line.startswith("1 model, 301 comparisons: 301 passed, 0 failed, 13 checkpoints not run; ")
    assert " 99 % (near 99 %) of 300 " in line
    assert line.endswith(" 0 % (near 0 %)")


def test_a_report_says_when_each_op_alone_is_right():
    text = text_of(comparison(verdict="FAIL", error=2e-6, note="shape: expected (2,), got (1,)"))
    assert "checkpoint 05 attention_output: attn_out, layer 0, near, chained, numpy against llamacpp" in text
    errors = "error 2.0e-06 (tolerance 1.0e-06), worst element 1.0e-07 (tolerance 1.0e-06)"
    assert f"{errors}: shape: expected (2,), got (1,)" in text
    assert "input: none" in text


def test_a_report_separates_the_cases_in_which_the_first_failing_stage_fails_from_those_in_which_it_passes():
    alone = comparison(stage="conv_state", mode="isolated")
    cached = partial(comparison, "conv_state", "03", verdict="FAIL")
    behind = [cached(n_cached=7, mode="decode"), cached(case="long", mode="in parts")]
    text = text_of(alone, *behind)
    assert "conv_state fails: near, 7 cached, decode; long, in parts" in text
    assert "conv_state passes: near, isolated" in text
    assert "llorch.ops.short_conv.next_state" in text
    assert "cached tokens" in text.splitlines()[-1]
    assert "cached tokens" not in text_of(alone, *behind, comparison(verdict="FAIL")).splitlines()[-1]


def test_a_report_of_wrong_choices_alone_does_not_blame_the_cache():
    wrong = comparison(verdict="FAIL", mode="exact", stage="argmax", checkpoint="10")
    assert "cached tokens" not in text_of(wrong)


def test_closing_line_with_a_failure_omits_closeness():
    assert closing_line(summary([report(comparison(verdict="FAIL"))])).endswith("13 checkpoints not run")


def test_a_detailed_line_is_of_a_stage_or_of_one_of_several_models():
    comparisons = [comparison(), comparison(stage="attn_context"), comparison(model="Q4_0")]
    comparisons += [comparison(model="Q8_0", layer=layer) for layer in (0, 1)]
    found = [line for line in lines(report(*comparisons), by_stage=True) if line.n_rows]
    counted = [(line.stage, line.n_rows) for line in found]
    assert counted == [("attn_out", 1), ("attn_context", 1), ("Q4_0", 1), ("Q8_0", 2)]


def test_summary_names_engines_only_where_several_are_expected():
    assert summary([report(comparison())])["engines"] == {"m": ["llamacpp"]}
    assert summary([report(comparison(), numerics="ggml")])["engines"] == {}


def test_summary_unsupported_engine_is_counted_but_not_as_missing():
    found = replace(
        report(comparison(), comparison(backend="numpy-float32"), checkpoints=["05"]),
        unsupported_reason={"llamacpp": "it reads no sliding_window"},
    )
    counts = summary([found])
    assert counts["unsupported"] == [{"model": "m", "engine": "llamacpp", "reason": "it reads no sliding_window"}]
    assert (counts["not_run"], counts["checkpoints_not_run"]) == ([], 0)
    assert "0 failed, 1 reference engine " in closing_line(counts)


def test_dense_model_has_no_checkpoints_of_experts():
    config = open_weights(builtin_path("micro-qwen3")).config
    assert checkpoints_of(config) == EXACT
    assert {*checkpoints_of(config, quantised=True)} - {*EXACT} == {"13"}
    assert not {"05b", "06b"} & {*EXACT}


@pytest.mark.parametrize(
    ("fields", "absent", "code"),
    [
        ({}, {}, 0),
        ({"not_run": ["llamacpp is not installed"]}, {}, 3),  # an engine or golden that was asked for
        ({"checkpoints": ("05", "06")}, {}, 3),
        ({}, {"torch-cuda-float32": "no CUDA device"}, 0),  # a backend that nobody asked for is listed
    ],
)
def test_a_line_that_did_not_run_counts_where_it_was_asked_for(fields: dict, absent: dict, code: int):
    counts = summary([report(comparison(), **({"checkpoints": ("05",)} | fields))], absent)
    assert _exit_code(counts) == code
    assert len(counts["backends_not_run"]) == len(absent)


EVERY_CHECKPOINT = tuple(comparison(checkpoint=number) for number in EXACT)


@pytest.mark.parametrize(
    ("model", "verdict", "exceptions"),
    [
        (report(*EVERY_CHECKPOINT), "PASS", ""),
        (report(*EVERY_CHECKPOINT, comparison(verdict="TIE")), "TIE", "1 TIE"),
        (report(*EVERY_CHECKPOINT, comparison(verdict="TIE"), comparison(verdict="FAIL")), "FAIL", "1 FAIL, 1 TIE"),
        (report(*EVERY_CHECKPOINT[1:], comparison(verdict="TIE")), "NOT RUN", "1 TIE, 1 NOT RUN"),
        (report(not_run=["no golden"], checkpoints=("00", "01")), "NOT RUN", "2 NOT RUN"),
        (report(*EVERY_CHECKPOINT, unsupported_reason={"llamacpp": "a window"}), "PASS", "1 NOT RUN"),
    ],
)
def test_line_of_a_model_has_its_verdict_and_counts_what_did_not_pass(
    model: ModelReport, verdict: str, exceptions: str, capsys: pytest.CaptureFixture[str]
):
    print_line(console(), replace(model, seconds=1.23), 4)
    line = capsys.readouterr().out.rstrip("\n")
    n_passed = sum(c.verdict == "PASS" for c in model.comparisons)
    assert re.match(rf"m +{verdict} +{n_passed} of {len(model.comparisons)} ", line)
    assert line.partition(" s")[0].endswith(" 1.2")
    assert line.rpartition(" s")[2].strip() == exceptions


def test_line_of_a_model_names_what_it_was_compared_with(capsys: pytest.CaptureFixture[str]):
    engines = ("peft-float64", "transformers", "peft", "llamacpp", "reader")
    print_line(console(), report(*(comparison(engine=name) for name in engines)), 4)
    assert " llama.cpp, transformers, PEFT, float64 " in capsys.readouterr().out


@pytest.mark.parametrize("strict", [False, True])
def test_near_tie_has_a_table_if_it_fails_the_run(strict: bool, capsys: pytest.CaptureFixture[str]):
    models = [report(*EVERY_CHECKPOINT, comparison(verdict="TIE", note="both"))]
    print_brief_end(console(), models, {}, summary(models, strict=strict))
    *table, last = capsys.readouterr().out.splitlines()
    assert any("TIE: attn_out" in line for line in table) == bool(table) == strict
    assert "1 TIE" in last


def test_last_line_has_few_words_also_if_nothing_is_right(capsys: pytest.CaptureFixture[str]):
    models = [report(comparison(verdict=verdict)) for verdict in ("PASS", "TIE", "FAIL")]
    print_brief_end(console(), models, {"torch-cuda": "no device"}, summary(models, {"torch-cuda": "no device"}))
    *_, absent, last = capsys.readouterr().out.splitlines()
    assert "torch-cuda" in absent
    assert len(last.split()) <= 25
    n_not_run = 3 * (len(EXACT) - 1) + 1
    assert_tells(last, "1 of 3", "1 FAIL", "1 TIE", f"{n_not_run} NOT RUN")


@pytest.mark.parametrize("is_users", [False, True])
def test_table_of_a_users_file_ends_with_what_it_cannot_show(is_users: bool, capsys: pytest.CaptureFixture[str]):
    print_model(console(), report(*EVERY_CHECKPOINT, is_users=is_users), detail=False)
    assert ("converted" in capsys.readouterr().out.splitlines()[-2]) == is_users
