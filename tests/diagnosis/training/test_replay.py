"""A replay of training steps: it ends at the quantity that is asked for, and what it remembers changes nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.diagnosis.training_cases import TrainingCase
from llorch.diagnosis.mistakes.planting import injected
from llorch.diagnosis.training.hypotheses import MORE
from llorch.diagnosis.training.replay import FLOW, InjectedMistake, TrainingReplay
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.training_dump import training_dump
from llorch.files import open_weights
from llorch.judging.goldens.training_recipe import make_adapter
from llorch.runtime.builtin import builtin_path
from llorch.training import numpy_step


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
