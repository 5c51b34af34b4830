"""Training in bfloat16: what its tolerances are made from, what bounds them, and what is not judged."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted_training import half_judge_of, judge_of, training_golden_of, weights_of
from torch_targets import on

from llorch.builtin import builtin_path, goldens_folder
from llorch.stages import keys
from llorch.verify.compare import FACTOR, FLOORS
from llorch.verify.torch_verify_training import torch_rows, verify_training_torch
from llorch.verify.training import judge as verify_training
from llorch.verify.training.goldens import FILES, HALF_DTYPES, MODELS, PEFT
from llorch.verify.training.half import FROM_FLOAT32, HalfTrainingJudge, half_ceiling, shows
from llorch.verify.training.stages import BY_GROUP, TRAINING_STAGES, Key
from llorch.verify.training.torch_path import TorchPath
from llorch.verify.verifier import FAIL

MODEL = "micro-qwen3"
DTYPE = "bfloat16"
every_model = pytest.mark.parametrize("model", MODELS)


@every_model
def test_stored_tolerances_are_four_times_the_largest_stored_distance_or_the_floor(model: str):
    golden = training_golden_of(model)
    assert golden.half_tolerances.keys() == golden.half_errors.keys() == {*HALF_DTYPES}
    for mode, groups in golden.half_tolerances[DTYPE].items():
        for name, made in groups.items():
            larger = max(golden.half_errors[DTYPE][mode][name].values())
            top = half_ceiling(weights_of(model).config, mode, BY_GROUP[name], DTYPE).error
            assert made.error == pytest.approx(min(top, max(FLOORS[DTYPE], FACTOR * larger)), rel=0.01)


@every_model
def test_stored_tolerances_are_between_floor_and_ceiling(model: str):
    for mode, groups in training_golden_of(model).half_tolerances[DTYPE].items():
        for name, made in groups.items():
            assert made.error >= FLOORS[DTYPE] <= made.worst
            top = half_ceiling(weights_of(model).config, mode, BY_GROUP[name], DTYPE)
            assert made.at_most(top) == made
            assert made.error < 0.25  # nothing like a wrong sign passes


@every_model
def test_every_group_of_15_to_19_is_judged_in_half_precision(model: str):
    golden, judge = training_golden_of(model), half_judge_of(model)
    found = {Key.of(text).group.name for _, text, _, _ in judge._comparisons()}
    every = {stage.name for stage in TRAINING_STAGES} - {"adapter_file"}
    assert every - found == {"learning_rate", "merged_weight", "exported_logits", "norm_curve"}
    own = {(mode, name) for mode, groups in golden.half_tolerances[DTYPE].items() for name in groups}
    assert not own & {("isolated", name) for name in FROM_FLOAT32}


def test_parameters_after_a_chain_of_steps_are_not_judged_and_alone_they_are():
    moved, second = Key.of("step 1/l0.parameters.q_proj.lora_A"), Key.of("step 2/l0.first_moment.q_proj.lora_A")
    assert not shows("chained", moved)
    assert shows("isolated", moved)
    assert not shows("chained", second)
    assert shows("chained", replace(second, case="step 1"))
    assert not shows("chained", Key.of("curve/norm_curve"))
    assert shows("chained", Key.of("curve/loss_curve"))


def test_a_ceiling_is_the_root_of_the_roundings():
    config = weights_of(MODEL).config
    n = len(list(keys(config)))
    limit = {name: half_ceiling(config, "chained", BY_GROUP[name], DTYPE).error for name in BY_GROUP}
    assert limit["adapted_logits"] == pytest.approx(4 * 2.0**-8 * math.sqrt(n))
    assert limit["gradient"] == pytest.approx(limit["adapted_logits"] * math.sqrt(2))
    assert limit["second_moment"] == 2 * limit["first_moment"]
    assert half_ceiling(config, "isolated", BY_GROUP["lora_delta"], DTYPE).error == 16 * 2.0**-8


def test_peft_too_far_from_the_truth_is_refused():
    golden = training_golden_of(MODEL)
    key = "plain/l1.gradient.k_proj.lora_B"
    arrays = {**golden.arrays[PEFT], key: golden.arrays[PEFT][key] * np.float32(1.2)}
    judge = HalfTrainingJudge(MODEL, weights_of(MODEL), replace(golden, arrays={PEFT: arrays}), DTYPE)
    with pytest.raises(ValueError, match=f"peft chained {key}: error 2"):
        judge.refuse_far_witnesses()


def test_a_run_whose_adapter_is_in_half_precision_is_refused(monkeypatch: pytest.MonkeyPatch):
    judge = half_judge_of(MODEL)
    module = TorchPath._module

    def rounded(path: TorchPath, adapter: object) -> object:
        return module(path, adapter).to(path.target.dtype)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchPath, "_module", rounded)
    with pytest.raises(TypeError, match="BFloat16"):
        list(torch_rows(judge, on("torch-cpu-bfloat16")))


def test_an_array_that_is_not_made_fails_in_half_precision_too():
    judge = half_judge_of(MODEL)
    shown = judge.golden.arrays[PEFT]
    ours = {mode: {key: shown[key] for key in arrays if key in shown} for mode, arrays in judge.truth.items()}
    del ours["chained"]["curve/loss_curve"]
    red = [row for row in judge.rows("made-up", ours) if row.verdict == FAIL]
    assert [(row.stage, row.note) for row in red] == [("loss_curve", "got: expected an array, got nothing")]


@pytest.mark.parametrize("missing", [*FILES, "half_tolerances"])
def test_checkpoints_15_to_20_fail_in_bfloat16_without_a_golden(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / MODEL
    shutil.copytree(goldens_folder() / MODEL, folder)
    if missing in FILES:
        (folder / missing).unlink()
    else:
        record = json.loads((folder / FILES[1]).read_text())
        (folder / FILES[1]).write_text(json.dumps(record | {missing: {}}))
    monkeypatch.setattr(verify_training, "goldens_folder", lambda: tmp_path)
    with pytest.raises((FileNotFoundError, ValueError), match=r"missing.*run reference_outputs|is missing; make it"):
        list(verify_training_torch(MODEL, on("torch-cpu-bfloat16")))


def test_training_in_float16_is_not_judged():
    with pytest.raises(ValueError, match=r"training: judged in float32, float64, bfloat16, got torch-cpu-float16"):
        list(verify_training_torch(MODEL, on("torch-cpu-float16")))


@pytest.mark.live
def test_peft_keeps_the_adapter_in_float32_on_a_base_in_bfloat16():
    import torch

    from llorch.verify.witnesses.peft import Peft, trained

    golden = training_golden_of(MODEL)
    model = Peft(builtin_path(MODEL), n_threads=1, dtype=DTYPE).adapted(golden.adapter_for(weights_of(MODEL).config))
    assert {parameter.dtype for parameter in trained(model).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.live
def test_stored_errors_are_those_of_peft_running_now():
    from llorch.verify.witnesses.peft import Peft

    golden, weights = training_golden_of(MODEL), weights_of(MODEL)
    producer = Peft(weights.path, n_threads=1, dtype=DTYPE)
    shown = producer.gradients(golden.adapter_for(weights.config), golden.batches[0])
    arrays = {f"plain/{name}": array for name, array in shown.items() if Key.of(f"plain/{name}").in_table}
    truth = {"isolated": {}, "chained": judge_of(MODEL).truth["chained"]}
    judge = HalfTrainingJudge(MODEL, weights, replace(golden, arrays={PEFT: arrays}), DTYPE)
    judge.truth = truth
    (made,) = judge.errors()["chained"]["gradient"].values()
    assert made == pytest.approx(golden.half_errors[DTYPE]["chained"]["gradient"]["plain"], rel=0.25)
