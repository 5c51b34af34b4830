"""Lessons 15 to 20: what a check of training shows that one of the forward pass does not."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.scripted_learner import TAUGHT, paste_hints
from helpers.refusals import assert_tells

from llorch.apps.learn.check import check, check_functions
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercises import training
from llorch.apps.learn.folder import read_folder
from llorch.apps.learn.lessons import BY_NUMBER, PARTS
from llorch.stages.comparison import FAIL, PASS
from llorch.stages.training import CHECKPOINTS, TRAINING_STAGES

Array = np.ndarray
CROSS_ENTROPY = PARTS["cross_entropy"].reference


def norm_in_float32(grads: Mapping[str, Array], max_norm: float) -> tuple[Array, Any]:
    flat = np.concatenate([grad.ravel() for grad in grads.values()])
    norm = np.linalg.norm(flat)
    return flat * min(np.float32(1), np.float32(max_norm) / norm), norm


def half(x: Array, lora_A: Array, lora_B: Array, scaling: float) -> Array:
    return training.our_lora_delta(x, lora_A, lora_B, scaling=scaling / 2)


def counted() -> Callable[..., Any]:
    calls = iter(range(1, 10**6))
    return lambda step, **arguments: training.adamw_step(step=next(calls), **arguments)


def one_head_of_a_group(grad: Array, q: Array, k: Array) -> tuple[Array, Array]:
    first = grad.reshape(len(k), -1, *grad.shape[1:]) * (np.arange(len(grad) // len(k)) == 0)[:, None, None]
    d_q, _ = training.our_scores_backward(grad, q, k)
    return d_q, training.our_scores_backward(first.reshape(grad.shape).astype(grad.dtype), q, k)[1]


def one_tensor(param: Array, **arguments: Any) -> tuple[Array, ...]:
    made, m, v = training.adamw_step(param, **arguments)
    if param.shape == (192, 2) and param[0, 0] < -0.2:
        made[3, 1] += 1
        made[4] += np.float32(2e-5)  # little for a number of 1, and much for a step of 1e-2
    return made, m, v


@pytest.mark.nightly_cases(but=["18-adamw_step-<lambda>-results-change", "20-merged-<lambda>-merge-without-scale"])
@pytest.mark.parametrize(
    ("number", "part", "function", "name"),
    [
        ("15", "lora_delta", half, "scaling-halved"),
        ("17", "attention_scores_backward", one_head_of_a_group, "gradient-keys-not-summed-over-group"),
        ("18", "adamw_step", counted(), "results-change"),
        ("20", "merged", lambda weight, lora_A, lora_B, scaling: weight + lora_B @ lora_A, "merge-without-scale"),
        ("20", "interleave", lambda rows, n_heads: rows.copy(), "export-b-rows-not-permuted"),
    ],
)
def test_mistake_is_named_if_it_makes_the_same_in_llorch(number: str, part: str, function: Any, name: str):
    found = check_functions(number, **{part: function})
    assert (found.label, found.failures[0][0]) == (FAIL, part)
    assert [each.name for each in found.causes][:1] == [name]
    assert all(cause.remaining < 1 for cause in found.causes)


@pytest.mark.nightly_cases(but=["15-lora_delta-half-lora_*", "16-cross_entropy-<lambda*"])
@pytest.mark.parametrize(
    ("number", "part", "function", "location"),
    [
        ("15", "lora_delta", half, "lora_delta.q_proj of layer 0 [token 0, out 0]"),
        ("16", "cross_entropy", lambda **arguments: (CROSS_ENTROPY(**arguments)[0], 99), "first wrong number   loss "),
        ("17", "attention_scores_backward", one_head_of_a_group, "gradient.k_proj.lora_A of layer 0 [rank 0, in "),
        ("18", "adamw_step", one_tensor, "parameters.q_proj.lora_B of layer 1 [out 3, rank 1]"),
        ("18", "adamw_step", one_tensor, "3 of 384 numbers"),
        ("19", "accumulated", lambda **args: (training.accumulated(**args)[0] * 2, args["grad_sums"][0]), "[step 0]"),
    ],
)
def test_first_wrong_number_is_located_by_its_axes(number: str, part: str, function: Any, location: str):
    found = str(check_functions(number, **{part: function}))
    assert location in found
    assert "pattern\n" not in found


def test_results_that_the_step_of_llorch_cannot_use_are_reported():
    found = check_functions("16", shifted=lambda labels: labels + 1000)
    assert (found.label, found.causes) == (FAIL, ())
    assert_tells(found.fault, "shifted", "cross entropy", "0 to 400", -100, got=(900, "row 0"))


def test_exercises_of_a_lesson_cover_every_stage_of_its_checkpoint():
    for number in CHECKPOINTS:
        stages = {stage.name for stage in TRAINING_STAGES if stage.checkpoint == number}
        assert {stage for exercise in BY_NUMBER[number].parts for stage in exercise.stages} == stages


def test_number_may_have_a_narrower_dtype():
    assert check_functions("18", clip_by_norm=norm_in_float32).fault == ""


@pytest.mark.parametrize("number", ["15", "16"])
def test_where_results_go_on_earlier_parts_are_in_the_step(number: str):
    def forgetful(x: Array, weight: Array, eps: float) -> Array:
        return PARTS["rms_norm"].reference(x, weight * 0 + 1, eps)

    parts = {exercise.name: exercise.reference for exercise in BY_NUMBER[number].parts}
    found = check(BY_NUMBER[number], Implementation("x", parts | {"rms_norm": forgetful}), "chained")
    assert (found.lesson, found.label) == ("01", FAIL)
    assert check(BY_NUMBER[number], Implementation("x", parts), "chained").label == PASS


@pytest.mark.slow
def test_complete_implementation_trains_as_peft_does(tmp_path: Path):
    for lesson in TAUGHT:
        (tmp_path / f"{lesson.module}.py").write_text(paste_hints(lesson), encoding="utf-8")
    everything = Implementation(str(tmp_path), read_folder(tmp_path))
    for number in ("15", "16", "17", "18", "19", "20"):
        found = check(BY_NUMBER[number], everything, "chained")
        assert (found.label, found.unwritten) == (PASS, []), str(found)


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
    "shape": (lambda x, weight, eps: RIGHT(x, weight, eps)[0], ["y"], {"expected": "(1, 2)", "got": "(2,)"}),
    "array": (lambda x, weight, eps: x.float().numpy(), ["y"], {"expected": "tensor", "got": "ndarray"}),
    "device": (lambda x, weight, eps: x.to("meta"), ["y", "x.device"], {"expected": "cpu", "got": "meta"}),
    "error": (lambda x, weight, eps: x @ x, ["RuntimeError", "1x2"], {}),
    "parameters": (lambda x, gain, eps: x, ["'gain'"], {"expected": "(x, weight, eps)", "got": "(x, gain, eps)"}),
    "doubled_in_place": (doubled_in_place, ["changed", "x"], {}),
}  # fmt: skip


@pytest.mark.parametrize(("function", "facts", "fields"), FAULTS.values(), ids=FAULTS)
def test_unusable_results_are_reported(function: Callable[..., Any], facts: list[str], fields: dict[str, Any]):
    found = check_functions("14", torch_rms_norm=function)
    assert found.label == FAIL
    assert_tells(found.fault.splitlines()[0], "torch_rms_norm", *facts, **fields)


def test_numbers_that_are_none_are_noted():
    found = check_functions("14", torch_rms_norm=lambda x, weight, eps: RIGHT(x, weight, eps) * float("nan"))
    assert found.label == FAIL
    assert_tells(next(note for note in found.notes if "1152" in note), "torch_rms_norm: y", "1152 NaN of 1152")


def test_a_tensor_of_other_strides_is_as_good():
    def rope(x: Any, cos: Any, sin: Any) -> Any:
        return PARTS["torch_rope"].reference(x, cos, sin).transpose(1, 2).contiguous().transpose(1, 2)

    assert not check_functions("14", torch_rope=rope).wrong


def test_what_is_wrong_in_half_precision_alone_has_no_name_and_fails():
    def of_bfloat16(x: Any, weight: Any, eps: float) -> Any:
        return RIGHT(x, weight, eps) * (1 if x.dtype == torch.float32 else 1.1)

    found = check_functions("14", torch_rms_norm=of_bfloat16)
    assert (found.label, [*found.causes]) == (FAIL, [])
    assert {each.backend for each in found.wrong} == {"learner-bfloat16"}


def test_the_parts_run_in_the_model_that_users_hold():
    from llorch.pytorch.causal_lm import RMSNorm

    seen: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        return lambda **arguments: seen.append(name) or PARTS[name].reference(**arguments)

    names = [exercise.name for exercise in LESSON.parts]
    with Implementation("noted", {name: noted(name) for name in names}).installed(LESSON.parts), torch.no_grad():
        RMSNorm(4, 1e-5)(torch.ones(1, 4))
    assert seen == ["torch_rms_norm"]


@pytest.mark.slow
def test_without_torch_it_is_not_run_and_all_others_are(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    for number in ("13", "14", "15"):
        lesson = BY_NUMBER[number]
        (tmp_path / "mine" / f"{lesson.module}.py").write_text(paste_hints(lesson), encoding="utf-8")
    command = [sys.executable, "-c", ALONE, *STRICT, "13", "14", "15"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (3, "")
    assert [PASS in line for line in lines[:3]] == [True, False, True]
    assert_tells(lines[1], "NOT RUN", "torch", "pip install 'llorch[torch]'")
