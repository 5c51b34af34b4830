"""Dump files as the hand-in, and as exhibits of the bug museum."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells, refuses

from llorch.apps.learn import answers as hand_in
from llorch.apps.learn.lessons import BY_NUMBER, PARTS, Lesson, typed_mistakes
from llorch.apps.learn.museum import Exhibit, compare, exhibit, exhibits, solution
from llorch.apps.learn.program import to_npz
from llorch.cli import main
from llorch.cli.outcome import DIFFERS, OK, USAGE

Made = Callable[[str, dict[str, Callable[..., Any]]], Path]


def of_manifest(node: Any, arrays: Any) -> Any:
    if isinstance(node, dict):
        return {name: of_manifest(each, arrays) for name, each in node.items()}
    return arrays[node] if isinstance(node, str) else node


RECORDED = cache(hand_in.RecordedCalls)  # of a lesson; a command for its inputs and one for its answers record the same


@pytest.fixture(autouse=True)
def calls_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_in, "RecordedCalls", RECORDED)


@pytest.fixture
def answers(tmp_path: Path) -> Made:
    """As a program would: all that is known of a call stands in the file."""

    def write_answers(number: str, functions: dict[str, Callable[..., Any]]) -> Path:
        calls, result = tmp_path / "calls.npz", {}
        assert invoke("learn", "inputs", number, "-o", str(calls)).exit_code == 0
        with ZipFile(calls) as archive:
            manifest = json.loads(archive.read("manifest.json"))
        with np.load(calls) as arrays:
            for call in manifest["calls"]:
                if function := functions.get(call["part"]):
                    returned = function(**of_manifest(call["arguments"], arrays))
                    values = returned if isinstance(returned, tuple) else (returned,)
                    result |= dict(zip(call["answers"].values(), values, strict=True))
        np.savez_compressed(tmp_path / "answers.npz", **result)
        return tmp_path / "answers.npz"

    return write_answers


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.write_bytes(to_npz(arrays))


def reference(lesson: Lesson) -> dict[str, Callable[..., Any]]:
    return {exercise.name: exercise.reference for exercise in lesson.parts}


@pytest.mark.nightly_cases("17")
@pytest.mark.parametrize(
    "number",
    ["03", "11", "17", pytest.param("01b", marks=pytest.mark.nightly), pytest.param("07", marks=pytest.mark.nightly)],
)
def test_right_answers_pass(answers: Made, number: str):
    path = answers(number, reference(BY_NUMBER[number]))
    result = invoke("learn", "check", number, "--answers", str(path))
    assert (result.exit_code, "PASS" in result.stdout) == (OK, True), result.stdout


def test_a_part_without_answers_is_borrowed(answers: Made):
    path = answers("06", {"swiglu": PARTS["swiglu"].reference})
    assert "BORROWED" in invoke("learn", "check", "06", "--answers", str(path)).stdout


@pytest.mark.parametrize(
    ("number", "part", "name"),
    [
        ("01", "rms_norm", "norm-is-layer-norm"),
        pytest.param("01b", "rope", "rope-interleaved-pairs", marks=pytest.mark.nightly),
    ],
)
def test_wrong_answers_fail_with_the_name_of_the_mistake(answers: Made, number: str, part: str, name: str):
    wrong = typed_mistakes(BY_NUMBER[number])[part]
    path = answers(number, reference(BY_NUMBER[number]) | {part: wrong[name]})
    result = invoke("learn", "check", number, "--answers", str(path))
    assert (result.exit_code, name in result.stdout) == (DIFFERS, True), result.stdout


def test_an_answer_of_another_shape_is_a_fault(answers: Made):
    path = answers("06", {"swiglu": lambda gate, up: gate[:1] * up[:1]})
    result = invoke("learn", "check", "06", "--answers", str(path))
    assert result.exit_code == DIFFERS
    assert_tells(result.stdout, "swiglu", "y", expected="(8, 128)", got="(1, 128)")


def test_files_that_are_no_answers_are_refused(tmp_path: Path):
    path = tmp_path / "answers.npz"
    how = ("learn", "check", "06", "--answers", str(path))
    path.write_bytes(b"PK")
    assert_cli_refuses(invoke(*how), USAGE, path, "Malformed", "npz")
    write(path, {"swiglu/9999/y": np.ones(2)})
    assert_cli_refuses(invoke(*how), USAGE, path, "Unexpected", "swiglu/9999/y", "feed_forward/0000/y")
    write(path, {"swiglu/0000/y": np.ones((12, 224), np.float32)})
    assert_tells(invoke(*how).stdout, "swiglu", "y", expected="(1, 2)", got="(12, 224)")
    assert_cli_refuses(invoke(*how[:2], "--answers", str(path)), USAGE, "--answers", "one", "--chain", "--impl")
    assert_cli_refuses(invoke("learn", "inputs", "12", "-o", str(tmp_path / "calls.npz")), USAGE, 12, "Python")


QUICK = {"onnx/onnx#7274", "ggml-org/llama.cpp#27016", "meta-llama/llama-models#241"}
BY_THREAD = {shown.thread: shown for shown in exhibits()}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, marks=() if each.thread in QUICK else pytest.mark.nightly, id=each.thread)
        for each in exhibits()
    ],
)
def test_every_dump_shows_its_cause_and_nothing_else(case: Exhibit):
    (found,) = case.findings
    named = {each.name for each in (*found.causes, *found.alternatives)}
    values = {each.value for each in found.causes}
    for name, _, value in (injected.partition("=") for injected in case.injected):
        assert name in named or (name, found.kind) == ("overflow", "not finite")
        assert not value or float(value) in {float(each) for each in values if each}
    assert all(compare(case, word).is_right for word in (*case.words, *(n.partition("=")[0] for n in case.injected)))
    assert case.link in solution(case)


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
def test_museum_answer_shows_the_cause_only_if_right(thread: str, answer: str, is_right: bool, facts: list[object]):
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
