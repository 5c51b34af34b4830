"""Training goldens on disk, and what their judge refuses."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from planted_training import judge_of, training_golden_of, weights_of, wide_judge_of

from llorch.builtin import goldens_folder
from llorch.verify.training.goldens import FILES, MODELS, PEFT, TrainingGolden, read, save
from llorch.verify.training.judge import TrainingJudge, WideTrainingJudge
from llorch.verify.training.stages import BY_GROUP, Key
from llorch.verify.verifier import FAIL

MODEL = "micro-qwen3"


@pytest.fixture
def golden() -> TrainingGolden:
    return training_golden_of(MODEL)


def changed(golden: TrainingGolden, key: str, change: Callable[[np.ndarray], np.ndarray]) -> TrainingGolden:
    arrays = dict(golden.arrays[PEFT])
    arrays[key] = change(arrays[key].copy())
    return replace(golden, arrays={**golden.arrays, PEFT: arrays})


def test_goldens_are_written_as_the_bytes_that_were_read(golden: TrainingGolden, tmp_path: Path):
    save(tmp_path, golden)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (goldens_folder() / MODEL / name).read_bytes()


@pytest.mark.parametrize("model", MODELS)
def test_stored_tolerances_follow_from_the_stored_arrays(model: str):
    stored, made = training_golden_of(model).tolerances, judge_of(model).tolerances()
    assert {mode: {*groups} for mode, groups in made.items()} == {mode: {*groups} for mode, groups in stored.items()}
    for mode, groups in made.items():
        for group, tolerance in groups.items():
            assert asdict(stored[mode][group]) == pytest.approx(asdict(tolerance), rel=1e-3), f"{mode} {group}"


def test_what_is_exactly_zero_is_listed_and_comes_back(golden: TrainingGolden):
    record = json.loads((goldens_folder() / MODEL / FILES[1]).read_text())
    names = {name for name in record["exactly_zero"] if name.startswith("peft/zero_b/")}
    assert len(names) == 14  # A of seven matrices in two layers
    assert all(golden.arrays[PEFT][name.removeprefix("peft/")].shape for name in names)


def test_a_golden_without_a_part_is_refused(golden: TrainingGolden, tmp_path: Path):
    save(tmp_path, replace(golden, arrays={PEFT: golden.arrays[PEFT]}))
    with pytest.raises(ValueError, match=r"missing: llamacpp; run reference_outputs/regenerate\.py"):
        read(tmp_path)


@pytest.mark.parametrize(
    "key", ["curve/loss_curve", "plain/merged_logits", "plain/l0.lora_delta.q_proj", "plain/l0.gradient.q_proj.lora_A"]
)
def test_a_single_array_that_is_missing_is_no_pass(golden: TrainingGolden, key: str):
    fewer = {name: array for name, array in golden.arrays[PEFT].items() if name != key}
    judge = TrainingJudge(MODEL, weights_of(MODEL), replace(golden, arrays={**golden.arrays, PEFT: fewer}))
    with pytest.raises(ValueError, match=rf"1 arrays missing: {key}; run reference_outputs/regenerate\.py"):
        list(judge.rows("numpy", judge.truth))


def test_a_part_of_the_truth_that_is_missing_is_no_pass(golden: TrainingGolden):
    chained = {key: array for key, array in golden.truth["chained"].items() if key != "curve/loss_curve"}
    judge = WideTrainingJudge(MODEL, weights_of(MODEL), replace(golden, truth={**golden.truth, "chained": chained}))
    with pytest.raises(ValueError, match="1 arrays missing: curve/loss_curve"):
        list(judge.rows("numpy-float64", judge.truth))


def test_every_array_of_the_table_has_a_key_that_is_taken_apart(golden: TrainingGolden):
    assert Key.of("step 2/l1.first_moment.q_proj.lora_A") == Key("step 2", 1, "first_moment.q_proj.lora_A")
    assert Key.of("linear/learning_rate") == Key("linear", None, "learning_rate")
    found = {Key.of(name).group.name for arrays in golden.arrays.values() for name in arrays if Key.of(name).in_table}
    assert found == BY_GROUP.keys() - {"adapter_file"}


@pytest.mark.parametrize("key", ["plain/l0.gradient.q_proj.lora_A", "step 1/l0.parameters.up_proj.lora_B"])
def test_a_witness_that_is_far_from_the_truth_is_refused(golden: TrainingGolden, key: str):
    far = changed(golden, key, lambda array: array * np.float32(1.1))
    judge = TrainingJudge(MODEL, weights_of(MODEL), far)
    with pytest.raises(ValueError, match=f"peft chained {key}: error"):
        judge.refuse_far_witnesses()


def test_an_array_that_nothing_is_compared_with_is_refused(golden: TrainingGolden):
    arrays = {**golden.arrays[PEFT], "plain/l9.gradient.q_proj.lora_A": np.ones(2, np.float32)}
    judge = TrainingJudge(MODEL, weights_of(MODEL), replace(golden, arrays={**golden.arrays, PEFT: arrays}))
    with pytest.raises(ValueError, match=r"l9\.gradient\.q_proj\.lora_A: compared with nothing"):
        judge.refuse_far_witnesses()


def test_an_array_that_a_backend_does_not_make_fails():
    judge = wide_judge_of(MODEL)
    ours = {mode: dict(arrays) for mode, arrays in judge.truth.items()}
    del ours["chained"]["plain/loss"]
    red = [row for row in judge.rows("made-up", ours) if row.verdict == FAIL]
    assert [(row.stage, row.mode, row.note) for row in red] == [
        ("loss", "chained", "got: expected an array, got nothing")
    ]
