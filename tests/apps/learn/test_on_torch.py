"""Lesson 14: what is said of functions of tensors, in which dtype they are seen, and a machine without torch."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.scripted_learner import pasted
from helpers.refusals import assert_tells

from llorch.apps.learn.check import check_functions
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, PARTS
from llorch.stages.comparison import FAIL, PASS

torch = pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
LESSON = BY_NUMBER["14"]
RIGHT = PARTS["torch_rms_norm"].reference
ALONE = "import sys; sys.modules['torch'] = None; from llorch.cli import main; main()"
STRICT = ("learn", "check", "--strict", "--impl", "mine")


def doubled_in_place(x: Any, weight: Any, eps: float) -> Any:
    x *= 2
    return RIGHT(x, weight, eps)


FAULTS = {
    "dtype": (lambda x, weight, eps: RIGHT(x, weight, eps).float(), ["y"],
              {"expected": "torch.bfloat16", "got": "torch.float32"}),
    "shape": (lambda x, weight, eps: RIGHT(x, weight, eps)[0], ["y"], {"expected": "(1, 8, 96)", "got": "(8, 96)"}),
    "array": (lambda x, weight, eps: x.float().numpy(), ["y"], {"expected": "tensor", "got": "ndarray"}),
    "device": (lambda x, weight, eps: x.to("meta"), ["y", "x.device"], {"expected": "cpu", "got": "meta"}),
    "error": (lambda x, weight, eps: x @ x, ["RuntimeError", "[1, 96]"], {}),
    "parameters": (lambda x, gain, eps: x, ["'gain'"], {"expected": "(x, weight, eps)", "got": "(x, gain, eps)"}),
    "doubled_in_place": (doubled_in_place, ["changed", "x"], {}),
}  # fmt: skip


@pytest.mark.parametrize(("function", "facts", "fields"), FAULTS.values(), ids=FAULTS)
def test_what_nothing_can_go_on_with_is_said(function: Callable[..., Any], facts: list[str], fields: dict[str, Any]):
    found = check_functions("14", torch_rms_norm=function)
    assert found.word == FAIL
    assert_tells(found.fault.splitlines()[0], "torch_rms_norm", *facts, **fields)


def test_numbers_that_are_none_are_noted():
    found = check_functions("14", torch_rms_norm=lambda x, weight, eps: RIGHT(x, weight, eps) * float("nan"))
    assert found.word == FAIL
    assert_tells(next(note for note in found.notes if "1152" in note), "torch_rms_norm: y", "1152 NaN of 1152")


def test_a_tensor_of_other_strides_is_as_good():
    def rope(x: Any, cos: Any, sin: Any) -> Any:
        return PARTS["torch_rope"].reference(x, cos, sin).transpose(1, 2).contiguous().transpose(1, 2)

    assert not check_functions("14", torch_rope=rope).wrong


def test_what_is_wrong_in_half_precision_alone_has_no_name_and_fails():
    def of_bfloat16(x: Any, weight: Any, eps: float) -> Any:
        return RIGHT(x, weight, eps) * (1 if x.dtype == torch.float32 else 1.1)

    found = check_functions("14", torch_rms_norm=of_bfloat16)
    assert (found.word, [*found.suspects]) == (FAIL, [])
    assert {each.comparison.backend for each in found.wrong} == {"learner-bfloat16"}


def test_the_parts_run_in_the_model_that_users_hold():
    from llorch.pytorch.causal_lm import RMSNorm

    seen: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        return lambda **given: seen.append(name) or PARTS[name].reference(**given)

    names = [exercise.name for exercise in LESSON.parts]
    with Implementation("noted", {name: noted(name) for name in names}).installed(LESSON.parts), torch.no_grad():
        RMSNorm(4, 1e-5)(torch.ones(1, 4))
    assert seen == ["torch_rms_norm"]


@pytest.mark.slow
def test_without_torch_it_is_not_run_and_all_others_are(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    for number in ("13", "14", "15"):
        lesson = BY_NUMBER[number]
        (tmp_path / "mine" / f"{lesson.module}.py").write_text(pasted(lesson), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *STRICT, "13", "14", "15"], cwd=tmp_path, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (3, "")
    assert [PASS in line for line in lines[:3]] == [True, False, True]
    assert_tells(lines[1], "NOT RUN", "torch", "pip install 'llorch[torch]'")
