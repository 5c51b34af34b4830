"""Training goldens made again: `--check` sees every kind of difference."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.stored_goldens import training_golden_of, training_weights_of

from llorch.judging.expectations.training_refs import Arrays
from llorch.judging.goldens.training import MODELS, Tolerances, TrainingGolden, golden_name
from llorch.judging.goldens.training_recipe import OPTIMIZER
from llorch.judging.runners import training_numpy as runner
from llorch.runtime.builtin import goldens_folder
from llorch.stages.comparison import FACTOR, Tolerance
from llorch.stages.stage_ref import StageRef

MODEL = "micro-qwen3"
Differences = Callable[[TrainingGolden, TrainingGolden], list[str]]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(goldens_folder()))
        yield importlib.import_module("make_training")


@pytest.fixture(scope="module")
def disturbed(script: ModuleType) -> ModuleType:
    return importlib.import_module("training_spread")


def against(script: ModuleType, spread: Mapping[StageRef, Tolerance]) -> Differences:
    config, reference = training_weights_of(MODEL).config, training_golden_of(MODEL).arrays
    return lambda new, stored_golden: script.differences(new, stored_golden, config, spread, reference)


@pytest.fixture(scope="module")
def differences(script: ModuleType) -> Differences:
    return against(script, {})


@pytest.fixture(scope="module")
def lenient(script: ModuleType, disturbed: ModuleType) -> Differences:
    """With what rounding can do to optimizer steps, which PEFT says."""
    weights = training_weights_of(MODEL)
    return against(script, disturbed.training_spread(weights.path, weights.config, training_golden_of(MODEL)))


@pytest.fixture
def golden() -> TrainingGolden:
    return training_golden_of(MODEL)


def changed(golden: TrainingGolden, name: str, change: Callable[[np.ndarray], np.ndarray]) -> TrainingGolden:
    return replace(golden, arrays={**golden.arrays, name: change(golden.arrays[name].copy())})


def one_number(array: np.ndarray) -> np.ndarray:
    array.flat[int(np.argmax(np.abs(array)))] *= 1.01
    return array


@pytest.mark.slow
def test_goldens_made_again_without_a_change_have_no_differences(differences: Differences, golden: TrainingGolden):
    assert differences(golden, golden) == []


def with_run(golden: TrainingGolden, run: Arrays) -> TrainingGolden:
    """The golden with arrays of llorch's float64 run in place of PEFT's."""
    named = {golden_name(stage_ref): array.astype(np.float32) for stage_ref, array in run.items()}
    return replace(golden, arrays=golden.arrays | {name: named[name] for name in named.keys() & golden.arrays.keys()})


@pytest.mark.live
def test_other_rounding_has_no_differences(disturbed: ModuleType, lenient: Differences, golden: TrainingGolden):
    from llorch.engines.transformers_capture import float64_everywhere

    with float64_everywhere():
        engine = disturbed.DisturbedPeft(training_weights_of(MODEL).path, dtype="float64")
        size = golden.tolerances["float32"]["chained"]["gradient"].error / FACTOR
        other = with_run(golden, engine.run(golden, size=size, seed=101))
    name = "peft/step 2/l0.given.v_proj.lora_A"
    assert not np.array_equal(other.arrays[name], golden.arrays[name])
    assert lenient(other, golden) == []


@pytest.mark.nightly_cases(but=["change1-step 1/l0.first_moment."])
@pytest.mark.live
@pytest.mark.parametrize(
    ("change", "array"),
    [
        ({"learning_rate": 1.02e-2}, "step 1/l0.parameters."),
        ({"betas": (0.901, 0.95)}, "step 1/l0.first_moment."),
        ({"betas": (0.9, 0.951)}, "step 1/l0.second_moment."),
        ({"eps": 1e-7}, "step 1/l0.parameters."),
        ({"weight_decay": 0.12}, "step 2/l0.parameters."),
        ({"max_norm": 0.0501}, "step 2/l0.second_moment."),
    ],
)
def test_an_optimizer_with_another_setting_is_a_difference(
    lenient: Differences, golden: TrainingGolden, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], array: str
):
    monkeypatch.setattr(runner, "STEPS_SHOWN", (1, 2))
    monkeypatch.setattr(runner, "OPTIMIZER", replace(OPTIMIZER, **change))
    run = dict(runner.NumpyTrainingRunner(training_weights_of(MODEL).astype(np.float64), golden)._steps())
    lines = lenient(with_run(golden, run), golden)
    assert any(line.startswith(f"training peft {array}") for line in lines)


@pytest.mark.nightly_cases(but=["step 1"])
@pytest.mark.live
@pytest.mark.parametrize("step", ["step 1", "step 10"])
def test_arrays_of_another_step_are_differences(lenient: Differences, golden: TrainingGolden, step: str):
    shown = [name for name in golden.arrays if name.startswith("peft/step 2/") and "given" not in name]
    moved = {name: golden.arrays[name.replace("step 2", step)] for name in shown}
    wrong = lenient(replace(golden, arrays={**golden.arrays, **moved}), golden)
    assert sorted(line.split(":")[0] for line in wrong) == [f"training {n.replace('/', ' ', 1)}" for n in sorted(moved)]


@pytest.mark.parametrize("factor", [9, 1 / 9])
@pytest.mark.parametrize("field", ["error", "worst"])
def test_every_stored_tolerance_has_to_follow_from_the_arrays(
    differences: Differences, golden: TrainingGolden, field: str, factor: float
):
    def moved(old: Tolerances) -> Tolerances:
        return {
            mode: {g: replace(t, **{field: factor * getattr(t, field)}) for g, t in old[mode].items()} for mode in old
        }

    every = {dtype: moved(made) for dtype, made in golden.tolerances.items()}
    lines = differences(golden, replace(golden, tolerances=every))
    wanted = {f"tolerance {d} training {m} {g} {field}" for d, t in every.items() for m in t for g in t[m]}
    assert {line.split(":")[0] for line in lines if line.startswith("tolerance")} == wanted


@pytest.mark.parametrize(
    ("mode", "key"),
    [
        ("isolated", "plain/l1.gradient.q_proj.lora_B"),
        ("isolated", "step 2/l0.parameters.v_proj.lora_A"),
        ("chained", "curve/norm_curve"),
        ("chained", "step 10/l1.parameters.k_proj.lora_B"),
        ("amplification", "step 10/l1.parameters.k_proj.lora_B"),
    ],
)
def test_reference_that_peft_does_not_reproduce_is_a_difference(
    differences: Differences, golden: TrainingGolden, mode: str, key: str
):
    part = 1.1 if mode == "amplification" else 1 + 1e-6
    lines = differences(golden, changed(golden, f"truth/{mode}/{key}", lambda array: part * array))
    assert f"training truth {mode} {key}" in {line.split(": ")[0] for line in lines}


@pytest.mark.slow_cases(but=["llamacpp/plain/exported_logits.lora_gguf", "peft/plain/l0.attn_norm"])
@pytest.mark.parametrize(
    "name",
    [
        "peft/plain/l0.attn_norm",
        "peft/plain/l1.lora_delta.up_proj",
        "peft/smoothed/loss",
        "peft/plain/l0.gradient.block_in",
        "peft/step 10/l1.second_moment.k_proj.lora_B",
        "peft/step 2/l0.parameters.v_proj.lora_A",
        "peft/cosine/learning_rate",
        "peft/curve/loss_curve",
        "peft/plain/l0.merged_weight.k_proj",
        "llamacpp/plain/exported_logits.lora_gguf",
    ],
)
def test_one_number_is_one_line_that_names_it(differences: Differences, golden: TrainingGolden, name: str):
    other = changed(golden, name, one_number)
    for new, stored in ((other, golden), (golden, other)):
        line, *more = differences(new, stored)
        assert line.startswith(f"training {name.replace('/', ' ', 1)}: error ")
        assert all(tolerance.startswith("tolerance float32 ") for tolerance in more)  # of what is stored now


def test_an_array_on_one_side_only_is_a_difference(differences: Differences, golden: TrainingGolden):
    less = {name: array for name, array in golden.arrays.items() if name != "peft/plain/loss"}
    other = replace(golden, arrays=less)
    assert differences(other, golden)[0].startswith("training peft plain/loss: ")
    with refuses(ValueError, 1, "missing", "peft/plain/loss"):
        differences(golden, other)


def test_another_adapter_other_rows_and_other_files_are_differences(differences: Differences, golden: TrainingGolden):
    name = "layers.0.q_proj.lora_A"
    other = changed(golden, f"adapter/{name}", lambda array: array * np.float32(1.0000002))
    assert differences(other, golden) == [f"training {name}: not as stored"]
    assert differences(replace(golden, stored_batches=golden.stored_batches[:2]), golden) == [
        "training rows: not as stored"
    ]
    files = {**golden.files, "lora_gguf": {}}
    assert differences(replace(golden, files=files), golden) == ["training files: not as stored"]


@pytest.mark.parametrize("model", MODELS)
def test_the_stored_rows_are_those_of_the_texts(script: ModuleType, model: str):
    assert script.rows_of(training_weights_of(model)) == training_golden_of(model).stored_batches


def test_texts_with_few_distinct_tokens_are_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "TEXTS", (((" a a a a a a", 4, 1),),))
    with refuses(ValueError, where="batch", expected=8, got="["):
        script.rows_of(training_weights_of(MODEL))


@pytest.mark.parametrize(("mode", "group", "field"), [("chained", "gradient", "error"), ("isolated", "loss", "worst")])
def test_a_tolerance_of_bfloat16_may_move_as_far_as_its_engines_pass(
    differences: Differences, golden: TrainingGolden, mode: str, group: str, field: str
):
    def moved(factor: float) -> TrainingGolden:
        made: dict[str, Any] = deepcopy(dict(golden.tolerances))
        old = made["bfloat16"][mode][group]
        made["bfloat16"][mode][group] = replace(old, **{field: factor * getattr(old, field)})
        return replace(golden, tolerances=made)

    assert differences(moved(3.9), golden) == []
    (line,) = differences(moved(4.1), golden)
    assert line.startswith(f"tolerance bfloat16 training {mode} {group} {field}: ")


def test_tolerances_of_bfloat16_on_one_side_only_are_differences(differences: Differences, golden: TrainingGolden):
    lines = differences(replace(golden, tolerances={"float32": golden.tolerances["float32"]}), golden)
    assert lines
    assert all(line.startswith("tolerance bfloat16 ") and line.endswith(": only on one side") for line in lines)
