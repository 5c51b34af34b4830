import numpy as np
import pytest

from llorch.builtin import BUILTIN, builtin_path
from llorch.config import ModelConfig
from llorch.stages import BY_NAME, CHECKPOINTS, STAGES, in_forward_order, input_key, keys
from llorch.weights import open_weights


@pytest.fixture(scope="module", params=BUILTIN)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return open_weights(builtin_path(request.param)).config


def test_names_are_unique_and_checkpoints_exist():
    assert len(BY_NAME) == len(STAGES)
    assert {stage.checkpoint for stage in STAGES} <= CHECKPOINTS.keys()


def test_every_input_comes_before_the_stage_that_reads_it(config: ModelConfig):
    seen: set[str] = set()
    for key, stage, layer in keys(config):
        assert {input_key(name, layer, config) for name in stage.input_names(config)} <= seen
        seen.add(key)


def test_query_and_key_norms_belong_to_models_that_have_them(config: ModelConfig):
    assert ("l0.q_norm" in {key for key, _, _ in keys(config)}) == config.qk_norm


def test_a_shuffled_trace_is_put_back_in_order(config: ModelConfig):
    want = [key for key, _, _ in keys(config)]
    shuffled = {key: np.zeros(1) for key in [*sorted(want), "mine"]}
    assert list(in_forward_order(shuffled, config)) == [*want, "mine"]
