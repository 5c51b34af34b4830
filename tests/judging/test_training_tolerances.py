"""Tolerances of training: in bfloat16, from gradients to parameters, in torch's AdamW, and of other engines."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.refusals import refuses
from helpers.stored_goldens import training_golden_of, training_weights_of
from helpers.torch_targets import target_or_skip

from llorch.files import open_weights
from llorch.judging.expectations.training import make_expectations
from llorch.judging.expectations.training_refs import at
from llorch.judging.goldens.training import FILES, HALF_DTYPES, MODELS, golden_name
from llorch.judging.goldens.training_recipe import OPTIMIZER
from llorch.judging.runners.training_torch import TorchTrainingRunner, compare_torch, verify_training_torch
from llorch.judging.tolerances import training as limits
from llorch.judging.tolerances.training import (
    CEILINGS,
    FLOAT64_TOLERANCE,
    FROM_FLOAT32,
    NUMPY_ONLY,
    amplification,
    can_show_mistakes,
    ceiling,
    of_dump,
    of_parameters,
    tolerance_in_float64,
)
from llorch.runtime.builtin import builtin_path, goldens_folder
from llorch.stages.comparison import FACTOR, FLOORS, Tolerance
from llorch.stages.table import keys
from llorch.stages.training import BY_GROUP
from reference_outputs.training_tolerances import errors, refuse_far_engines

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
    assert BY_GROUP.keys() - found == {"adapter_file", "norm_curve", *NUMPY_ONLY}
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
    assert not can_show_mistakes(moved, "chained", DTYPE)
    assert can_show_mistakes(moved, "isolated", DTYPE)
    assert not can_show_mistakes(second, "chained", DTYPE)
    assert can_show_mistakes(replace(second, case="step 1"), "chained", DTYPE)
    assert not can_show_mistakes(at("norm_curve", case="curve"), "chained", DTYPE)
    assert can_show_mistakes(at("loss_curve", case="curve"), "chained", DTYPE)


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
        list(
            compare_torch(
                MODEL, training_weights_of(MODEL), training_golden_of(MODEL), target_or_skip("torch-cpu-bfloat16")
            )
        )


def test_goldens_without_tolerances_of_half_precision_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = shutil.copytree(goldens_folder() / MODEL, tmp_path / MODEL)
    record = json.loads((folder / FILES[1]).read_text())
    (folder / FILES[1]).write_text(json.dumps(record | {"half_tolerances": {}}))
    monkeypatch.setattr("llorch.judging.expectations.training.goldens_folder", lambda: tmp_path)
    with refuses(ValueError, "missing", "reference_outputs/regenerate.py"):
        list(verify_training_torch(MODEL, target_or_skip("torch-cpu-bfloat16")))


def test_verify_training_in_float16_is_refused():
    with refuses(ValueError, "float32", "float64", "bfloat16", got="torch-cpu-float16", where="training"):
        list(verify_training_torch(MODEL, target_or_skip("torch-cpu-float16")))


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


N, SIZE = 200, 1e-9


def test_a_first_step_is_as_sensitive_as_its_gradient_is_small():
    grad = np.array([1e-2, 1e-6])
    state = {"w": 0.1 * grad}, {"w": 0.05 * grad * grad}
    (found,) = amplification([({"w": grad}, *state)], [1e-3], OPTIMIZER)
    roots = np.array([1e-2 + 1e-8, 1e-6 + 1e-8])
    each = 1e-2 * (1 + grad / roots) / roots
    np.testing.assert_allclose(found["w"], [np.sqrt(np.square(each).mean()), each.max()], rtol=1e-12)


def test_float64_tolerance_has_a_minimum_and_grows_with_amplification():
    assert (tolerance_in_float64(None).error, tolerance_in_float64(None).worst) == (
        FLOAT64_TOLERANCE,
        FLOAT64_TOLERANCE,
    )
    tolerance = tolerance_in_float64(np.array([0.5, 30.0]))
    assert (tolerance.error, tolerance.worst) == (FLOAT64_TOLERANCE, pytest.approx(30 * FLOAT64_TOLERANCE))


@pytest.mark.parametrize("seed", range(3))
def test_parameters_move_no_further_than_the_bound_says(seed: int):
    rng = np.random.default_rng(seed)
    grads = [rng.normal(size=N) * 10.0 ** rng.uniform(-9, -2, N) for _ in range(6)]
    signs = [SIZE * np.abs(grad).max() * rng.choice([-1.0, 1.0], N) for grad in grads]
    straight, taken = steps(grads)
    disturbed, _ = steps([grad + off for grad, off in zip(grads, signs, strict=True)])
    found = amplification(taken, [OPTIMIZER.max_norm] * len(grads), OPTIMIZER)  # so that nothing is clipped
    for moved, other, bound in zip(straight, disturbed, found, strict=True):
        apart = np.abs(moved - other) / OPTIMIZER.learning_rate
        assert apart.max() <= 1.01 * SIZE * bound["w"][1]
        assert np.sqrt(np.square(apart).mean()) <= 1.01 * SIZE * bound["w"][0]


def steps(grads: list[np.ndarray]) -> tuple[list[np.ndarray], list[tuple[dict[str, np.ndarray], ...]]]:
    """Parameters after each step of torch's AdamW, and what `amplification` is made of."""
    w = torch.zeros(N, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([w], lr=OPTIMIZER.learning_rate, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    moved, taken = [], []
    for grad in grads:
        w.grad = torch.from_numpy(grad)
        optimizer.step()
        state = optimizer.state[w]
        moved.append(w.detach().numpy().copy())
        taken.append(({"w": grad}, *({"w": state[name].numpy().copy()} for name in ("exp_avg", "exp_avg_sq"))))
    return moved, taken


def test_dump_tolerance_grows_with_roundings_up_to_a_ceiling():
    config = open_weights(builtin_path("micro-qwen3")).config
    forward, back = (of_dump(config, stage, "chained", "float32", 10) for stage in ("adapted_logits", "gradient"))
    assert 1e-6 < forward.error < back.error < 1e-4
    assert of_dump(config, "gradient", "chained", "float32", 100_000).error == CEILINGS["chained"]
    assert of_dump(config, "first_moment", "isolated", "bfloat16", 10).error == CEILINGS["isolated"]


def test_parameter_tolerance_adds_ulps_divided_by_the_learning_rate():
    own = of_parameters(np.array([3.0, 4.0]), 1e-4, Tolerance(1e-4, 1e-3))
    assert own.worst == pytest.approx(1e-3 + 4 * 2.0**-23 / 1e-4)
