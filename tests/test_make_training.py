"""Training goldens made again: `--check` sees every kind of difference."""

import importlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from planted_training import training_golden_of, weights_of

from llorch.builtin import goldens_folder
from llorch.training_goldens import LLAMACPP, MODELS, PEFT, TrainingGolden

MODEL = "micro-qwen3"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(goldens_folder()))
        yield importlib.import_module("make_training")


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


def test_goldens_made_again_without_a_change_have_no_differences(script: ModuleType, golden: TrainingGolden):
    assert script.differences(golden, golden) == []


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
def test_one_number_is_one_line_that_names_it(script: ModuleType, golden: TrainingGolden, producer: str, key: str):
    other = changed(golden, producer, key, one_number)
    for new, stored in ((other, golden), (golden, other)):
        (line,) = script.differences(new, stored)
        assert line.startswith(f"training {producer} {key}: error ")


def test_an_array_on_one_side_only_is_a_difference(script: ModuleType, golden: TrainingGolden):
    less = {key: array for key, array in golden.arrays[PEFT].items() if key != "plain/loss"}
    other = replace(golden, arrays={**golden.arrays, PEFT: less})
    for new, stored in ((other, golden), (golden, other)):
        (line,) = script.differences(new, stored)
        assert line.startswith("training peft plain/loss: ")


def test_another_adapter_other_rows_and_other_files_are_differences(script: ModuleType, golden: TrainingGolden):
    name = "layers.0.q_proj.lora_A"
    adapter = {**golden.adapter, name: golden.adapter[name] * np.float32(1.0000002)}
    assert script.differences(replace(golden, adapter=adapter), golden) == [f"training {name}: not as stored"]
    assert script.differences(replace(golden, rows=golden.rows[:2]), golden) == ["training rows: not as stored"]
    files = {**golden.files, "lora_gguf": {}}
    assert script.differences(replace(golden, files=files), golden) == ["training files: not as stored"]


@pytest.mark.parametrize("model", MODELS)
def test_the_stored_rows_are_those_of_the_texts(script: ModuleType, model: str):
    assert script.rows_of(weights_of(model)) == training_golden_of(model).rows


def test_texts_with_few_distinct_tokens_are_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "TEXTS", (((" a a a a a a", 4, 1),),))
    with pytest.raises(ValueError, match=r"regenerate: expected at least 8 distinct tokens in a batch, got \["):
        script.rows_of(weights_of(MODEL))


@pytest.mark.parametrize(("mode", "group", "what"), [("chained", "gradient", "error"), ("isolated", "loss", "worst")])
def test_a_tolerance_of_bfloat16_may_move_a_little(
    script: ModuleType, golden: TrainingGolden, mode: str, group: str, what: str
):
    def moved(factor: float) -> TrainingGolden:
        made: dict[str, Any] = deepcopy(dict(golden.half_tolerances))
        old = made["bfloat16"][mode][group]
        made["bfloat16"][mode][group] = replace(old, **{what: factor * getattr(old, what)})
        return replace(golden, half_tolerances=made)

    assert script.differences(moved(1.08), golden) == []
    (line,) = script.differences(moved(2.1), golden)
    assert line.startswith(f"tolerance bfloat16 training {mode} {group} {what}: ")


def test_tolerances_of_bfloat16_on_one_side_only_are_differences(script: ModuleType, golden: TrainingGolden):
    lines = script.differences(replace(golden, half_tolerances={}), golden)
    assert lines
    assert all(line.startswith("tolerance bfloat16 ") and line.endswith(": only on one side") for line in lines)
