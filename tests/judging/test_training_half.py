"""Training in bfloat16: what its tolerances are made from, what bounds them, and what is not judged."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.stored_goldens import training_golden_of, training_weights_of
from helpers.torch_targets import on

from llorch.judging.expectations.training import errors, make_expectations, refuse_far_engines
from llorch.judging.expectations.training_places import at
from llorch.judging.goldens.training import FILES, HALF_DTYPES, MODELS, golden_name
from llorch.judging.runners.training_torch import TorchTrainingRunner, torch_rows, verify_training_torch
from llorch.judging.tolerances import training as limits
from llorch.judging.tolerances.training import FROM_FLOAT32, NUMPY_ALONE, ceiling, shows
from llorch.runtime.builtin import builtin_path, goldens_folder
from llorch.stages.comparison import FACTOR, FLOORS
from llorch.stages.table import keys
from llorch.stages.training import BY_GROUP

MODEL = "micro-qwen3"
DTYPE = "bfloat16"
CONFIG = training_weights_of(MODEL).config


@pytest.mark.parametrize("model", MODELS)
def test_stored_tolerances_are_four_times_the_largest_stored_distance_between_floor_and_ceiling(model: str):
    golden = training_golden_of(model)
    assert golden.half_errors.keys() == {*HALF_DTYPES}
    for mode, groups in golden.tolerances[DTYPE].items():
        for name, made in groups.items():
            larger = max(golden.half_errors[DTYPE][mode][name].values())
            top = ceiling(training_weights_of(model).config, name, mode, DTYPE)
            assert made.error == pytest.approx(min(top.error, max(FLOORS[DTYPE], FACTOR * larger)), rel=0.01)
            assert made.error >= FLOORS[DTYPE] <= made.worst
            assert made.at_most(top) == made
            assert made.error < 0.25  # nothing like a wrong sign passes


@pytest.mark.parametrize("model", MODELS)
def test_every_group_of_15_to_19_is_compared_in_half_precision(model: str):
    golden = training_golden_of(model)
    every = make_expectations(golden, training_weights_of(model).config, DTYPE)
    found = {expectation.stage_ref.stage for expectation in every}
    assert BY_GROUP.keys() - found == {"adapter_file", "norm_curve", *NUMPY_ALONE}
    own = {(mode, name) for mode, groups in golden.tolerances[DTYPE].items() for name in groups}
    assert not own & {("isolated", name) for name in FROM_FLOAT32}


def test_stage_keys_are_listed_once_for_all_expectations(monkeypatch):
    walks = []
    monkeypatch.setattr(limits, "keys", lambda config: walks.append(1) or keys(config))
    limits._stage_counts.cache_clear()
    assert len([*make_expectations(training_golden_of(MODEL), CONFIG, DTYPE)]) > 100
    assert len(walks) == 1


def test_parameters_are_compared_isolated_but_not_chained():
    moved = at("parameters", 0, "q_proj.lora_A", "step 1")
    second = at("first_moment", 0, "q_proj.lora_A", "step 2")
    assert not shows(moved, "chained", DTYPE)
    assert shows(moved, "isolated", DTYPE)
    assert not shows(second, "chained", DTYPE)
    assert shows(replace(second, case="step 1"), "chained", DTYPE)
    assert not shows(at("norm_curve", case="curve"), "chained", DTYPE)
    assert shows(at("loss_curve", case="curve"), "chained", DTYPE)


def test_a_ceiling_is_the_root_of_the_roundings():
    n = len(list(keys(CONFIG)))
    limit = {name: ceiling(CONFIG, name, "chained", DTYPE).error for name in BY_GROUP}
    assert limit["adapted_logits"] == pytest.approx(4 * 2.0**-8 * math.sqrt(n))
    assert limit["gradient"] == pytest.approx(limit["adapted_logits"] * math.sqrt(2))
    assert limit["second_moment"] == 2 * limit["first_moment"]
    assert ceiling(CONFIG, "lora_delta", "isolated", DTYPE).error == 16 * 2.0**-8


def test_peft_gradient_far_from_the_reference_is_refused():
    golden, name = training_golden_of(MODEL), "plain/l1.gradient.k_proj.lora_B"
    arrays = {**golden.arrays, f"peft/{name}": golden.arrays[f"peft/{name}"] * np.float32(1.2)}
    with refuses(ValueError, f"peft chained {name}", "error 2.0e-01"):
        refuse_far_engines(MODEL, replace(golden, arrays=arrays), CONFIG, DTYPE)


def test_a_run_whose_adapter_is_in_half_precision_is_refused(monkeypatch: pytest.MonkeyPatch):
    worker = TorchTrainingRunner._worker

    def rounded(runner: TorchTrainingRunner, adapter: Any) -> Any:
        made = worker(runner, adapter)
        made.module.to(runner.target.dtype)
        return made

    monkeypatch.setattr(TorchTrainingRunner, "_worker", rounded)
    with refuses(TypeError, "BFloat16"):
        list(torch_rows(MODEL, training_weights_of(MODEL), training_golden_of(MODEL), on("torch-cpu-bfloat16")))


def test_goldens_without_tolerances_of_half_precision_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = shutil.copytree(goldens_folder() / MODEL, tmp_path / MODEL)
    record = json.loads((folder / FILES[1]).read_text())
    (folder / FILES[1]).write_text(json.dumps(record | {"half_tolerances": {}}))
    monkeypatch.setattr("llorch.judging.expectations.training.goldens_folder", lambda: tmp_path)
    with refuses(ValueError, "missing", "reference_outputs/regenerate.py"):
        list(verify_training_torch(MODEL, on("torch-cpu-bfloat16")))


def test_verify_training_in_float16_is_refused():
    with refuses(ValueError, "float32", "float64", "bfloat16", got="torch-cpu-float16", where="training"):
        list(verify_training_torch(MODEL, on("torch-cpu-float16")))


@pytest.mark.live
def test_peft_keeps_the_adapter_in_float32_on_a_base_in_bfloat16():
    import torch

    from reference_outputs.peft_reference import Peft, trained

    golden = training_golden_of(MODEL)
    adapter = golden.adapter_for(training_weights_of(MODEL).config)
    model = Peft(builtin_path(MODEL), n_threads=1, dtype=DTYPE).adapted(adapter)
    assert {parameter.dtype for parameter in trained(model).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.live
def test_stored_errors_are_those_of_peft_running_now():
    from reference_outputs.peft_reference import Peft

    golden, weights = training_golden_of(MODEL), training_weights_of(MODEL)
    engine = Peft(weights.path, n_threads=1, dtype=DTYPE)
    shown = engine.gradients(golden.adapter_for(weights.config), golden.batches[0])
    now = replace(golden, arrays=golden.arrays | {golden_name(place): array for place, array in shown.items()})
    both = errors(now, CONFIG, DTYPE), golden.half_errors[DTYPE]
    made, stored = (distances["chained"]["gradient"]["plain"] for distances in both)
    assert made == pytest.approx(stored, rel=0.25)
