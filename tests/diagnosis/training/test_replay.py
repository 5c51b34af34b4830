"""A replay of training steps ends at the quantity that is asked for, with the arrays of a whole replay."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.diagnosis.training_cases import TrainingCase
from llorch.builtin import builtin_path
from llorch.diagnosis.training.replay import FLOW, TrainingReplay
from llorch.dumps.index import open_raw
from llorch.dumps.training_dump import training_dump
from llorch.files import open_weights
from llorch.verify.training.recipe import make_adapter


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
