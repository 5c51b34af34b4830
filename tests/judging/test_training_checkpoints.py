"""Checkpoints 15 to 20 against the goldens of PEFT, torch and llama.cpp, and what these goldens have to show."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.kept_suites import reuse_suites
from helpers.refusals import refuses
from helpers.stored_goldens import training_golden_of, training_weights_of
from helpers.training_rows import ON_CUDA, TARGETS, WIDE, backends, comparisons, require_all

from llorch.judging.expectations.adapter_files import EXPORTS
from llorch.judging.expectations.training import verify_training_stored
from llorch.judging.expectations.training_refs import LOADED_BY
from llorch.judging.goldens.training import FILES, MODELS
from llorch.judging.goldens.training_recipe import CURVE, LORA, OPTIMIZER, RSLORA, make_adapter
from llorch.judging.tolerances.training import ceiling
from llorch.runtime.builtin import builtin_path, goldens_folder
from llorch.training.batch import IGNORED

# A keyword with another number does not read this file, because it has these names.
NAMES = ("checkpoint_15", "checkpoint_16", "checkpoint_17", "checkpoint_18", "checkpoint_19", "checkpoint_20")
NUMBERS = tuple(name[-2:] for name in NAMES)
WITH_ONE_MODEL = ("torch-cpu-float32", "torch-cpu-bfloat16")  # here; `llorch verify --backend torch` takes all
SLOW_WITH_OTHERS = "torch-cpu-float64"  # of which float64 of NumPy shows the same with every model
each_model = pytest.mark.parametrize("model", MODELS)


def every(targets: tuple[str, ...] = TARGETS) -> pytest.MarkDecorator:
    """Each checkpoint on each backend with each model."""
    cases = [(n, backend, model) for model in MODELS for backend in backends(targets) for n in NUMBERS]
    cases = [case for case in cases if case[2] == MODELS[-1] or not case[1].startswith(WITH_ONE_MODEL)]
    return pytest.mark.parametrize(("number", "backend", "model"), [as_parameter(*case) for case in cases])


def as_parameter(number: str, backend: str, model: str) -> Any:
    slow = backend.startswith(SLOW_WITH_OTHERS) and model != MODELS[-1]
    name = f"{NAMES[NUMBERS.index(number)]}-{backend}-{model}"
    return pytest.param(number, backend, model, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.fixture(autouse=True, scope="module")
def limits_are_derived_once() -> Iterator[None]:
    with reuse_suites():
        yield


@pytest.mark.nightly_cases("*-torch-cpu-bfloat16-*", "*-torch-cpu-float64-*")
@every()
def test_checkpoint(number: str, backend: str, model: str):
    require_all(number, backend, model)


@pytest.mark.gpu
@every(ON_CUDA)
def test_checkpoint_on_cuda(number: str, backend: str, model: str):
    require_all(number, backend, model)


@each_model
def test_checkpoint_15_has_an_adapter_in_which_nothing_is_like_anything_else(model: str):
    config = training_weights_of(model).config
    adapter = training_golden_of(model).adapter_for(config)
    assert all(array.any() for array in adapter.flat().values())
    of_a_layer = [adapter.scaling(name) for name in adapter.targets if name.startswith("layers.0.")]
    assert len(of_a_layer) == 7
    assert len(set(of_a_layer)) == 7
    assert 1.0 not in of_a_layer
    assert {LORA.rank_of(target) for target in adapter.targets.values()} == {2, 3, 4}
    stable = training_golden_of(model).adapter_for(config, RSLORA)
    assert all(stable.scaling(name) != adapter.scaling(name) for name in adapter.targets)


@each_model
def test_checkpoint_15_has_the_adapter_of_the_recipe(model: str):
    config = training_weights_of(model).config
    made, stored = make_adapter(config).flat(), training_golden_of(model).adapter_for(config).flat()
    assert made.keys() == stored.keys()
    assert all(np.array_equal(made[name], stored[name]) for name in made)


@each_model
def test_checkpoint_15_covers_all_matrices_of_all_layers(model: str):
    stage_refs = [c.stage_ref for c in comparisons(model, "numpy")]
    found = {(stage_ref.layer, stage_ref.part) for stage_ref in stage_refs if stage_ref.stage == "lora_delta"}
    assert len(found) == 7 * training_weights_of(model).config.n_layers


@each_model
def test_checkpoint_16_has_batches_that_show_mistakes(model: str):
    golden = training_golden_of(model)
    first = golden.batches[0]
    assert len({len(row) for row in golden.stored_batches[0].ids}) == 2  # so there is padding
    assert all(prompt > 1 for prompt in golden.stored_batches[0].prompts)  # and there are prompts that are not learned
    assert len({*first.ids[first.documents >= 0].tolist()}) >= 8
    n_trained = [batch.n_trained for batch in golden.batches]
    assert len({*n_trained}) > 1  # so a mean of means is another number
    each = golden.arrays["peft/plain/token_losses"]
    assert len(each) == n_trained[0] == int((first.labels != IGNORED).sum())


@each_model
def test_checkpoint_16_golden_loss_is_the_mean_of_its_token_losses(model: str):
    arrays = training_golden_of(model).arrays
    for case in ("plain", "smoothed"):
        np.testing.assert_allclose(arrays[f"peft/{case}/loss"], arrays[f"peft/{case}/token_losses"].mean(), rtol=1e-6)
    assert arrays["peft/plain/loss"] != arrays["peft/smoothed/loss"]


@each_model
def test_checkpoint_17_golden_with_b_zero_has_no_gradient_for_a(model: str):
    arrays = training_golden_of(model).arrays
    found = {name: array for name, array in arrays.items() if name.startswith("peft/zero_b/")}
    assert len(found) == 14 * training_weights_of(model).config.n_layers
    assert all(bool(array.any()) == name.endswith("lora_B") for name, array in found.items())


@each_model
def test_checkpoint_17_grants_no_error_to_gradients_that_are_zero(model: str):
    in_run = [c for c in comparisons(model, "numpy") if c.stage_ref.run == "zero_b"]
    alike = [c for c in in_run if c.stage_ref.name.endswith("lora_A")]
    assert alike
    assert {(c.difference.error, c.reference_error, c.engine_error) for c in alike} == {(0.0, 0.0, 0.0)}


@each_model
def test_checkpoint_18_clips_in_every_step(model: str):
    arrays = training_golden_of(model).arrays
    assert all(arrays[f"peft/step {step}/grad_norm"] > OPTIMIZER.max_norm for step in (1, 2, 10))


@each_model
def test_checkpoint_18_never_grants_more_than_a_fifth_of_a_learning_rate(model: str):
    alike = [c for c in comparisons(model, "numpy") if c.stage_ref.name.startswith("parameters.")]
    assert max(c.tolerance.worst for c in alike) <= 0.2
    assert max(c.tolerance.error for c in alike) <= 0.02
    alone = [c for c in alike if c.mode == "isolated"]
    assert max(c.tolerance.worst for c in alone) <= 1e-3


@pytest.mark.parametrize("mode", ["isolated", "chained"])
def test_checkpoint_18_stored_tolerances_are_under_their_ceilings(mode: str):
    for model in MODELS:
        for stage, stored in training_golden_of(model).tolerances["float32"][mode].items():
            assert stored.at_most(ceiling(training_weights_of(model).config, stage, mode, "float32")) == stored


@each_model
def test_checkpoint_18_learning_rates_are_transformers_own_to_the_last_bits(model: str):
    alike = [c for c in comparisons(model, "numpy") if c.stage_ref.name == "learning_rate" and c.backend != WIDE]
    assert {c.stage_ref.run for c in alike} == {"constant", "linear", "cosine"}
    assert max(c.tolerance.error for c in alike) == 1e-15
    assert np.finfo(np.float64).eps < 1e-15


@each_model
def test_checkpoint_19_is_a_run_that_learns_and_clips_some_steps(model: str):
    curve = training_golden_of(model).arrays["peft/curve/loss_curve"]
    assert curve.shape == (CURVE.n_steps,)
    assert curve[-3:].mean() < 0.5 * curve[:3].mean()
    norms = training_golden_of(model).arrays["peft/curve/norm_curve"]
    assert (norms > CURVE.optimizer.max_norm).any()
    assert (norms < CURVE.optimizer.max_norm).any()


@each_model
def test_checkpoint_19_is_tight(model: str):
    alike = [c for c in comparisons(model, "numpy") if c.stage_ref.name == "loss_curve"]
    assert max(c.tolerance.error for c in alike) < 2e-6
    assert training_weights_of(model).config.n_layers > 1


@each_model
def test_checkpoint_20_compares_every_form_with_the_engine_that_loads_it(model: str):
    exported = [c for c in comparisons(model, "numpy") if c.stage_ref.stage == "exported_logits"]
    found = {(c.stage_ref.name, c.engine) for c in exported}
    assert found == {(f"exported_logits.{kind}", LOADED_BY[kind]) for kind in EXPORTS}


@each_model
def test_checkpoint_20_looks_at_every_tensor_of_adapter_files(model: str):
    golden = training_golden_of(model)
    n_tensors = len(golden.adapter_for(training_weights_of(model).config).flat())
    assert len(golden.files["peft_folder"]) == n_tensors
    assert len(golden.files["lora_gguf"]) == n_tensors + 1  # and its alpha
    assert golden.files["lora_gguf"]["adapter.lora.alpha"] == "none"  # scales differ, so they are in B


@each_model
def test_checkpoint_20_says_which_adapter_file_nobody_else_wrote(model: str):
    found = {c.stage_ref.name: c.engine for c in comparisons(model, "numpy") if c.mode == "exact"}
    assert found == {"adapter_file.peft_folder": "peft", "adapter_file.lora_gguf": "ours"}


def test_goldens_of_checkpoints_15_to_20_are_small():
    sizes = [(goldens_folder() / model / name).stat().st_size for model in MODELS for name in FILES]
    assert sum(sizes) < 9_000_000


@pytest.mark.parametrize("missing", FILES)
def test_checkpoints_15_to_20_fail_without_a_golden(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(goldens_folder() / MODELS[0], tmp_path / MODELS[0])
    (tmp_path / MODELS[0] / missing).unlink()
    monkeypatch.setattr("llorch.judging.expectations.training.goldens_folder", lambda: tmp_path)
    with refuses(FileNotFoundError, "reference_outputs/regenerate.py", where=tmp_path / MODELS[0] / missing):
        list(verify_training_stored(MODELS[0]))


def test_goldens_of_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(goldens_folder() / MODELS[0], tmp_path / MODELS[1])
    monkeypatch.setattr("llorch.judging.expectations.training.goldens_folder", lambda: tmp_path)
    with refuses(ValueError, "weights", "regenerate.py", where=(f"golden {MODELS[1]}", builtin_path(MODELS[1]))):
        list(verify_training_stored(MODELS[1]))
