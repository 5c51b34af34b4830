"""Training goldens made again: `--check` sees every kind of difference."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from planted_training import judge_of, training_golden_of, weights_of

from llorch.builtin import goldens_folder
from llorch.verify.compare import FACTOR, Tolerance
from llorch.verify.training import path as training_path
from llorch.verify.training.goldens import LLAMACPP, MODELS, PEFT, Tolerances, TrainingGolden
from llorch.verify.training.judge import TrainingJudge
from llorch.verify.training.recipe import OPTIMIZER

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


def against(script: ModuleType, spread: Mapping[str, Tolerance]) -> Differences:
    truth = training_golden_of(MODEL).truth
    return lambda new, stored: script.differences(new, TrainingJudge(MODEL, weights_of(MODEL), stored), spread, truth)


@pytest.fixture(scope="module")
def differences(script: ModuleType) -> Differences:
    return against(script, {})


@pytest.fixture(scope="module")
def lenient(script: ModuleType, disturbed: ModuleType) -> Differences:
    """With what rounding can do to optimizer steps, which PEFT says."""
    return against(script, disturbed.training_spread(judge_of(MODEL)))


@pytest.fixture
def golden() -> TrainingGolden:
    return training_golden_of(MODEL)


def changed(
    golden: TrainingGolden, producer: str, key: str, change: Callable[[np.ndarray], np.ndarray]
) -> TrainingGolden:
    arrays = {**golden.arrays[producer], key: change(golden.arrays[producer][key].copy())}
    return replace(golden, arrays={**golden.arrays, producer: arrays})


def one_number(array: np.ndarray) -> np.ndarray:
    array.flat[int(np.argmax(np.abs(array)))] *= 1.01
    return array


def test_goldens_made_again_without_a_change_have_no_differences(differences: Differences, golden: TrainingGolden):
    assert differences(golden, golden) == []


def with_run(golden: TrainingGolden, run: dict[str, np.ndarray]) -> TrainingGolden:
    """The golden with arrays of a float64 run of ours in place of PEFT's."""
    arrays = {key: run[key].astype(old.dtype) if key in run else old for key, old in golden.arrays[PEFT].items()}
    return replace(golden, arrays={**golden.arrays, PEFT: arrays})


@pytest.mark.live
def test_a_processor_that_rounds_otherwise_has_no_differences(
    disturbed: ModuleType, lenient: Differences, golden: TrainingGolden
):
    from llorch.verify.witnesses.float64_everywhere import float64_everywhere

    with float64_everywhere():
        producer = disturbed.DisturbedPeft(weights_of(MODEL).path, dtype="float64")
        size = golden.tolerances["chained"]["gradient"].error / FACTOR
        run = producer.run(judge_of(MODEL), size=size, seed=101)
    key = "step 2/l0.given.v_proj.lora_A"
    assert not np.array_equal(run[key].astype(np.float32), golden.arrays[PEFT][key])
    lines = lenient(with_run(golden, run), golden)
    assert lines == []


@pytest.mark.live
@pytest.mark.parametrize(
    ("change", "where"),
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
    lenient: Differences,
    golden: TrainingGolden,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    where: str,
):
    monkeypatch.setattr(training_path, "STEPS_SHOWN", (1, 2))
    monkeypatch.setattr(training_path, "OPTIMIZER", replace(OPTIMIZER, **change))
    run = dict(training_path.NumpyPath(weights_of(MODEL).astype(np.float64), golden)._steps())
    lines = lenient(with_run(golden, run), golden)
    assert any(line.startswith(f"training peft {where}") for line in lines)


@pytest.mark.live
@pytest.mark.parametrize("other", ["step 1", "step 10"])
def test_arrays_of_another_step_are_differences(lenient: Differences, golden: TrainingGolden, other: str):
    every = golden.arrays[PEFT]
    moved = {key: every[key.replace("step 2", other)] for key in every if "step 2" in key and "given" not in key}
    wrong = lenient(replace(golden, arrays={**golden.arrays, PEFT: {**every, **moved}}), golden)
    assert [line.split(":")[0] for line in wrong] == [f"training {PEFT} {key}" for key in sorted(moved)]


@pytest.mark.parametrize("factor", [9, 1 / 9])
@pytest.mark.parametrize("what", ["error", "worst"])
def test_every_stored_tolerance_has_to_follow_from_the_arrays(
    differences: Differences, golden: TrainingGolden, what: str, factor: float
):
    def moved(made: Tolerances) -> Tolerances:
        every = {
            mode: {g: replace(t, **{what: factor * getattr(t, what)}) for g, t in made[mode].items()} for mode in made
        }
        return every

    half = {dtype: moved(made) for dtype, made in golden.half_tolerances.items()}
    lines = differences(golden, replace(golden, tolerances=moved(golden.tolerances), half_tolerances=half))
    by_dtype = {"float32": golden.tolerances, **golden.half_tolerances}
    wanted = {f"tolerance {d} training {m} {g} {what}" for d, made in by_dtype.items() for m in made for g in made[m]}
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
def test_a_truth_that_peft_does_not_give_again_is_a_difference(
    differences: Differences, golden: TrainingGolden, mode: str, key: str
):
    part = 1.1 if mode == "amplification" else 1 + 1e-6
    truth = {**golden.truth, mode: {**golden.truth[mode], key: part * golden.truth[mode][key]}}
    lines = differences(golden, replace(golden, truth=truth))
    assert f"training truth {mode} {key}" in {line.split(": ")[0] for line in lines}


@pytest.mark.parametrize(
    ("producer", "key"),
    [
        (PEFT, "plain/l0.attn_norm"),
        (PEFT, "plain/l1.lora_delta.up_proj"),
        (PEFT, "smoothed/loss"),
        (PEFT, "plain/l0.gradient.block_in"),
        (PEFT, "step 10/l1.second_moment.k_proj.lora_B"),
        (PEFT, "step 2/l0.parameters.v_proj.lora_A"),
        (PEFT, "cosine/learning_rate"),
        (PEFT, "curve/loss_curve"),
        (PEFT, "plain/l0.merged_weight.k_proj"),
        (LLAMACPP, "plain/exported_logits.lora_gguf"),
    ],
)
def test_one_number_is_one_line_that_names_it(
    differences: Differences, golden: TrainingGolden, producer: str, key: str
):
    other = changed(golden, producer, key, one_number)
    for new, stored in ((other, golden), (golden, other)):
        line, *more = differences(new, stored)
        assert line.startswith(f"training {producer} {key}: error ")
        assert all(tolerance.startswith("tolerance float32 ") for tolerance in more)  # of what is stored now


def test_an_array_on_one_side_only_is_a_difference(differences: Differences, golden: TrainingGolden):
    less = {key: array for key, array in golden.arrays[PEFT].items() if key != "plain/loss"}
    other = replace(golden, arrays={**golden.arrays, PEFT: less})
    for new, stored in ((other, golden), (golden, other)):
        assert differences(new, stored)[0].startswith("training peft plain/loss: ")


def test_another_adapter_other_rows_and_other_files_are_differences(differences: Differences, golden: TrainingGolden):
    name = "layers.0.q_proj.lora_A"
    adapter = {**golden.adapter, name: golden.adapter[name] * np.float32(1.0000002)}
    assert differences(replace(golden, adapter=adapter), golden) == [f"training {name}: not as stored"]
    assert differences(replace(golden, rows=golden.rows[:2]), golden) == ["training rows: not as stored"]
    files = {**golden.files, "lora_gguf": {}}
    assert differences(replace(golden, files=files), golden) == ["training files: not as stored"]


@pytest.mark.parametrize("model", MODELS)
def test_the_stored_rows_are_those_of_the_texts(script: ModuleType, model: str):
    assert script.rows_of(weights_of(model)) == training_golden_of(model).rows


def test_texts_with_few_distinct_tokens_are_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "TEXTS", (((" a a a a a a", 4, 1),),))
    with pytest.raises(ValueError, match=r"regenerate: expected at least 8 distinct tokens in a batch, got \["):
        script.rows_of(weights_of(MODEL))


@pytest.mark.parametrize(("mode", "group", "what"), [("chained", "gradient", "error"), ("isolated", "loss", "worst")])
def test_a_tolerance_of_bfloat16_may_move_as_far_as_its_engines_pass(
    differences: Differences, golden: TrainingGolden, mode: str, group: str, what: str
):
    def moved(factor: float) -> TrainingGolden:
        made: dict[str, Any] = deepcopy(dict(golden.half_tolerances))
        old = made["bfloat16"][mode][group]
        made["bfloat16"][mode][group] = replace(old, **{what: factor * getattr(old, what)})
        return replace(golden, half_tolerances=made)

    assert differences(moved(3.9), golden) == []
    (line,) = differences(moved(4.1), golden)
    assert line.startswith(f"tolerance bfloat16 training {mode} {group} {what}: ")


def test_tolerances_of_bfloat16_on_one_side_only_are_differences(differences: Differences, golden: TrainingGolden):
    lines = differences(replace(golden, half_tolerances={}), golden)
    assert lines
    assert all(line.startswith("tolerance bfloat16 ") and line.endswith(": only on one side") for line in lines)
