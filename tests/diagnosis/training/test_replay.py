"""Replays of training steps, and diagnoses of dumps that few trainers write.

A replay ends at the quantity that is asked for, and what it remembers changes nothing. Dumps of experts and delta nets:
what was left out of a gradient is named, at the first tensor it spoils. Dumps of several ranks do so, too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.family_adapters import family_adapter
from faults.situations import training_models_of
from helpers.mesh_training import second_step
from helpers.refusals import assert_tells
from helpers.stored_goldens import training_weights_of
from helpers.training_runs import small_settings
from helpers.without_gaps import without_gaps

from benchmarks.diagnosis.training_cases import TrainingCase
from llorch.diagnosis.mistakes import TRAINING, Mistake
from llorch.diagnosis.mistakes.mistake import injected
from llorch.diagnosis.training.diagnose import diagnose_training
from llorch.diagnosis.training.hypotheses import MORE
from llorch.diagnosis.training.judge import TrainingJudge
from llorch.diagnosis.training.replay import FLOW, InjectedMistake, TrainingReplay
from llorch.diagnosis.training.score import Scorer
from llorch.diagnosis.verdict import Diagnosis, Finding
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.training_dump import training_dump
from llorch.files import open_weights
from llorch.judging.goldens.training_recipe import StoredBatch, make_adapter
from llorch.lora.initial import initial_adapter
from llorch.pytorch.distributed.launch import on_ranks
from llorch.runtime.builtin import builtin_path
from llorch.training import numpy_step
from llorch.training.numpy_step import loss_and_gradients


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> TrainingReplay:
    weights = open_weights(builtin_path("micro-qwen3")).astype(np.float64, keep=True)
    adapter, path = make_adapter(weights.config), tmp_path_factory.mktemp("dump")
    dump = training_dump(open_raw(TrainingCase(None, "micro-qwen3", "usual").write(Path(path))), adapter)
    return TrainingReplay(weights, adapter, dump)


@pytest.mark.parametrize(("group", "last"), [("loss", "gradient"), ("gradient", "gradient"), ("clipped", "parameters")])
def test_a_run_ends_at_the_quantity_that_is_asked_for(replay: TrainingReplay, group: str, last: str):
    whole, number = replay.run().arrays, replay.dump.steps[-1].number
    part = replay.run(until=(number, group, "")).arrays
    assert all(np.array_equal(array, whole[key], equal_nan=True) for key, array in part.items())
    missing = {(n, of) for n, of, _ in whole.keys() - part.keys()}
    assert missing == {(number, of) for of in FLOW[FLOW.index(last) + 1 :]}


@pytest.mark.parametrize("name", ["loss-mean-of-rows", "loss-divided-by-rows"])  # of parts of the step; of the whole
def test_a_mistake_around_a_step_is_that_without_remembered_passes(replay: TrainingReplay, name: str):
    mistake, step = next(one for one in MORE if one.name == name), replay.dump.steps[0]
    right, wrong = replay.run().arrays, replay.run((InjectedMistake(mistake),)).arrays
    given: Mapping[str, Any] = {
        "parameters": {tensor: array for (number, group, tensor), array in right.items()
                       if (number, group) == (step.number, "start")},
        "label_smoothing": replay.dump.settings.label_smoothing,
    }  # fmt: skip
    with injected(mistake):
        loss, grads = numpy_step.loss_and_gradients(replay.weights, replay.adapter, step.batches, **given)
    assert wrong[step.number, "loss", ""] == loss != right[step.number, "loss", ""]
    for tensor, grad in grads.items():
        np.testing.assert_array_equal(wrong[step.number, "gradient", tensor], grad)


def test_cause_that_changes_nothing_explains_no_error_of_parameters(replay: TrainingReplay):
    mistake = InjectedMistake(next(mistake for mistake in TRAINING if mistake.name == "adamw-eps-inside-root"))
    judge = TrainingJudge(replay.dump, replay.weights.config, replay.adapter.flat(), "float32")
    checks = [check for check in judge.checks(replay.run((mistake,))) if check.stage == "parameters"]
    first_step = [check for check in checks if check.n_pass == checks[0].n_pass]
    assert Scorer(replay, judge, first_step, (mistake,)).best_first([()]) == []


MODELS = ("micro-qwen2-moe", "micro-qwen3-moe", "micro-qwen3.5")
ROWS = StoredBatch([[3, 17, 8, 39, 0, 17, 52, 90, 4, 71, 33], [5, 6, 7, 8, 9, 10, 11]], [1, 3])
UNSHOWN = [mistake for mistake in TRAINING if not training_models_of(mistake)]
FIRST = {"micro-qwen2-moe": "l1.", "micro-qwen3-moe": "l1.", "micro-qwen3.5": "l0."}  # the last layer that has it


def able(mistake: Mistake[Any]) -> str:
    return next(model for model in MODELS if mistake.applies_to(training_weights_of(model).config))


def found_in(model: str, folder: Path, *mistakes: Mistake[Any]) -> list[Finding]:
    """Findings in a dump of one step, its ids, loss and gradients."""
    weights, batch = training_weights_of(model), ROWS.batch()
    adapter = family_adapter(weights.config)
    with injected(*mistakes):
        loss, grads = loss_and_gradients(weights.astype(np.float64, keep=True), adapter, [batch], label_smoothing=0.0)
    arrays = {f"step1.grad.{name}": grads[name].astype(np.float32) for name in adapter.flat()}
    tokens = {"input_ids": batch.ids, "labels": batch.labels, "attention_mask": (batch.positions >= 0).astype(int)}
    arrays |= {f"step1.{name}": array for name, array in tokens.items()} | {"step1.loss": np.asarray(loss)}
    path = folder / "dump.npz"
    np.savez(path, allow_pickle=False, **arrays)
    with without_gaps():
        return list(diagnose_training(weights, adapter, open_raw(path)).findings)


@pytest.mark.slow_cases(but=["micro-qwen3-moe"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_right_is_not_accused(model: str, tmp_path: Path):
    assert found_in(model, tmp_path) == []


@pytest.mark.slow
@pytest.mark.nightly_cases(but=["*-state-cut-*"])
@pytest.mark.parametrize("mistake", UNSHOWN, ids=lambda mistake: mistake.name)
def test_a_mistake_in_a_gradient_is_named(mistake: Mistake[Any], tmp_path: Path):
    (finding,) = found_in(able(mistake), tmp_path, mistake)
    assert [cause.name for cause in finding.causes] == [mistake.name]
    assert finding.key.startswith(FIRST[able(mistake)])


SLOW = pytest.mark.slow
MODEL = "micro-llama"


def diagnosed(folder: Path, axes: Mapping[str, int], fault: str) -> Diagnosis:
    settings = small_settings(folder, model=MODEL, dtype="float64", batch_size=8, max_grad_norm=0.5)
    arrays = on_ranks(axes["dp"] * axes["tp"], second_step, settings, axes, fault)
    path = folder / "dump.npz"
    np.savez(path, max_grad_norm=np.asarray(0.5), weight_decay=np.asarray(0.0), **arrays)
    weights = open_weights(builtin_path(MODEL))
    adapter = initial_adapter(settings.lora, weights, init="default", seed=settings.seed)
    with without_gaps():
        return diagnose_training(weights, adapter, open_raw(path))


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.nightly_cases(but=["counted twice-*"])
@pytest.mark.parametrize(
    ("fault", "axes", "name", "fact"),
    [
        pytest.param("attached late", {"dp": 2, "tp": 1}, "mesh-gradient-not-summed", "rank 0", marks=SLOW),
        pytest.param("unsummed factor", {"dp": 1, "tp": 2}, "mesh-replicated-factor-not-summed", "rank 0", marks=SLOW),
        pytest.param("averaged", {"dp": 2, "tp": 1}, "mesh-divided-by-world-size", "2 ranks", marks=SLOW),
        pytest.param("counted twice", {"dp": 2, "tp": 1}, "mesh-norm-counts-copies", "2 times", marks=SLOW),
        pytest.param("mean of means", {"dp": 2, "tp": 1}, "mesh-mean-of-rank-means", "2 ranks", marks=SLOW),
        pytest.param("mean of means", {"dp": 4, "tp": 1}, "mesh-mean-of-rank-means", "4 ranks", marks=SLOW),
    ],
)
def test_mistake_of_several_ranks_is_named(tmp_path: Path, fault: str, axes: Mapping[str, int], name: str, fact: str):
    finding, *others = diagnosed(tmp_path, axes, fault).findings
    assert finding.causes[0].name == name
    assert_tells(finding.sentence, fact)
    assert [one.key for one in others] == (  # ranks with gradients of their own clip by norms of their own
        ["l2.clipped.down_proj.lora_A"] if fault == "unsummed factor" else []
    )


@SLOW
@pytest.mark.usefixtures("warm_ranks")
def test_ranks_that_make_no_mistake_are_accused_of_nothing(tmp_path: Path):
    found = diagnosed(tmp_path, {"dp": 2, "tp": 2}, "")
    assert found.is_right
    assert found.findings == []
