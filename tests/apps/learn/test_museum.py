"""The bug museum: every dump shows its cause, answers are judged, the command writes what other commands read."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.refusals import assert_tells, refuses

from llorch.apps.learn.museum import Exhibit, compare, exhibit, exhibits, solution
from llorch.cli import main

QUICK = {"onnx/onnx#7274", "ggml-org/llama.cpp#27016", "meta-llama/llama-models#241"}
BY_THREAD = {shown.thread: shown for shown in exhibits()}


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(each, marks=() if each.thread in QUICK else pytest.mark.nightly, id=each.thread)
        for each in exhibits()
    ],
)
def test_every_dump_shows_its_cause_and_nothing_else(shown: Exhibit):
    (found,) = shown.findings
    named = {each.name for each in (*found.causes, *found.alternatives)}
    values = {each.value for each in found.causes}
    for name, _, value in (injected.partition("=") for injected in shown.injected):
        assert name in named or (name, found.kind) == ("overflow", "not finite")
        assert not value or float(value) in {float(each) for each in values if each}
    assert all(compare(shown, word).is_right for word in (*shown.words, *(n.partition("=")[0] for n in shown.injected)))
    assert shown.link in solution(shown)


ANSWERS = [
    ("sbryngelson/ANEForge#253", "the bias is missing", True, ["Yes", "biases"]),
    ("sbryngelson/ANEForge#253", "qkv-bias-twice", False, ["qkv-bias-twice", "same", "stage"]),
    ("sbryngelson/ANEForge#253", "v_proj", False, ["v_proj", "yes"]),
    ("sbryngelson/ANEForge#253", "attn_norm", False, ["attn_norm", "not"]),
    ("sbryngelson/ANEForge#253", "norm-twice", False, ["norm-twice", "attn_norm"]),
    ("sbryngelson/ANEForge#253", "bananas", False, ["No"]),
    ("nntile/nntile#347", "o_proj transposed", False, ["No"]),
    ("Blaizzy/mlx-vlm#1548", "1 + weight", True, ["Yes", 1]),
    ("Blaizzy/mlx-vlm#1548", "gain missing", False, ["No"]),
    ("ggml-org/llama.cpp#2373", "1e-6", True, ["Yes", "value"]),
    ("ggml-org/llama.cpp#2373", "1e-5", False, ["No"]),
]


@pytest.mark.nightly_cases("*-1 + weight", "*-1e-6", "*-o_proj transposed", "*-the bias is missing")
@pytest.mark.parametrize(
    ("thread", "answer", "is_right", "facts"), ANSWERS, ids=[f"{thread}-{answer}" for thread, answer, *_ in ANSWERS]
)
def test_museum_answer_shows_the_cause_only_if_it_is_right(
    thread: str, answer: str, is_right: bool, facts: list[object]
):
    found = compare(BY_THREAD[thread], answer)
    assert found.is_right == is_right
    assert (BY_THREAD[thread].cause in found.said) == is_right
    assert_tells(found.said, *facts)


def test_the_command_writes_a_dump_that_is_diagnosed(tmp_path: Path):
    number, runner = str(BY_THREAD["onnx/onnx#7274"].number), CliRunner()
    assert len(runner.invoke(main, ["learn", "museum"]).output.splitlines()) == len(exhibits())
    assert runner.invoke(main, ["learn", "museum", "open", number, str(tmp_path / "bug")]).exit_code == 0
    assert "tokens" in (tmp_path / "bug" / "README.md").read_text(encoding="utf-8")
    found = runner.invoke(main, ["diagnose", str(tmp_path / "bug"), "--model", "micro-llama"])
    assert (found.exit_code, "groups-tiled-for-values" in found.output) == (1, True)
    assert runner.invoke(main, ["learn", "museum", "answer", number, "norm-twice"]).exit_code == 1
    assert "1/sqrt" in solution(BY_THREAD["mlc-ai/mlc-llm#3426"])
    with refuses(ValueError, "museum", expected=("1", len(exhibits())), got=0):
        exhibit(0)
