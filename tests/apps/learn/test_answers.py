"""Dump files as the hand-in."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells

from llorch.apps.learn import answers as hand_in
from llorch.apps.learn.lessons import BY_NUMBER, PARTS, Lesson, typed_mistakes
from llorch.apps.learn.program import to_npz
from llorch.cli.outcome import DIFFERS, OK, USAGE

Made = Callable[[str, dict[str, Callable[..., Any]]], Path]


def of_manifest(said: Any, arrays: Any) -> Any:
    if isinstance(said, dict):
        return {name: of_manifest(each, arrays) for name, each in said.items()}
    return arrays[said] if isinstance(said, str) else said


RECORDED = cache(hand_in.RecordedCalls)  # of a lesson; a command for its inputs and one for its answers record the same


@pytest.fixture(autouse=True)
def calls_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_in, "RecordedCalls", RECORDED)


@pytest.fixture
def answers(tmp_path: Path) -> Made:
    """As a program would: all that is known of a call stands in the file."""

    def made(number: str, functions: dict[str, Callable[..., Any]]) -> Path:
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

    return made


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
    assert_tells(invoke(*how).stdout, "swiglu", "y", expected="(8, 128)", got="(12, 224)")
    assert_cli_refuses(invoke(*how[:2], "--answers", str(path)), USAGE, "--answers", "one", "--chain", "--impl")
    assert_cli_refuses(invoke("learn", "inputs", "12", "-o", str(tmp_path / "calls.npz")), USAGE, 12, "Python")
