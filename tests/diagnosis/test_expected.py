"""A right engine that adds 1,200 keys one by one passes; the tolerances of engines that llorch runs stay narrow."""

from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
from fakes.fresh_engine import FreshEngine, OneLane
from faults.wrong_dumps import float64_weights

from llorch.diagnosis.dump_checker import DumpChecker
from llorch.diagnosis.replay import Replay
from llorch.diagnosis.verdict import StageCheck
from llorch.engines.dumps.stage_dump import DumpedArray, Features, StageDump
from llorch.files import open_weights
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import FAIL
from llorch.stages.stage_ref import Tokens

MODEL, N_KEYS, N_TOKENS = "micro-llama", 1200, 24
IDS = Tokens(tuple(np.random.default_rng(1).integers(0, 400, N_TOKENS).tolist()), N_KEYS - N_TOKENS)
HIDDEN = ("attn_scores", "attn_probs")  # stages that fused attention hides


@cache
def trace(engine_type: type[FreshEngine] = OneLane) -> Mapping[str, np.ndarray]:
    """Run a chunk behind a cache of a text in which all tokens are alike, so that no key stands out."""
    weights = open_weights(builtin_path(MODEL))
    engine, rng = engine_type(weights), np.random.default_rng(0)
    shape = (weights.config.n_kv_heads, IDS.first_position, weights.config.head_dim)
    for layer in range(weights.config.n_layers):
        keys, values = rng.normal(0, 0.3, shape), rng.normal(1, 0.3, shape)
        engine.past[layer] = keys.astype(np.float32), values.astype(np.float32)
    engine.position = IDS.first_position
    return engine.run(IDS.ids)


def checks(arrays: Mapping[str, np.ndarray], engine: str = "") -> dict[str, StageCheck]:
    dumped = {(0, name): DumpedArray(name, "float32", lambda array=array: array) for name, array in arrays.items()}
    dump = StageDump("x", (IDS,), dumped, Features(engine=engine), n_before=IDS.first_position)
    return {check.key: check for check in DumpChecker(Replay(float64_weights(MODEL), dump)).results()}


def failing(arrays: Mapping[str, np.ndarray], engine: str = "") -> list[str]:
    return [name for name, check in checks(arrays, engine).items() if check.verdict == FAIL]


@pytest.mark.parametrize("hidden", [(), HIDDEN], ids=["", "fused"])
def test_keys_that_a_right_engine_adds_one_by_one_are_no_error(hidden: tuple[str, ...]):
    arrays = {name: array for name, array in trace().items() if not name.endswith(hidden or "-")}
    assert failing(arrays) == []
    assert failing(arrays, "transformers"), "the engine needs no tolerance of its own"


@pytest.mark.parametrize("engine", ["llorch", "llamacpp", "llama.cpp", "transformers"])
def test_only_attention_of_an_engine_that_llorch_does_not_run_gets_a_wider_tolerance(engine: str):
    limits, narrow = (checks(trace(FreshEngine), name) for name in ("mine", engine))
    ratios = {name: limits[name].isolated.tolerance.error / narrow[name].isolated.tolerance.error for name in narrow}
    wider = {name.rpartition(".")[2] for name, ratio in ratios.items() if ratio != 1}
    assert wider == {"attn_scores", "attn_probs", "attn_context"}
    assert max(ratios.values()) < 10


@pytest.mark.parametrize("stage", ["attn_scores", "attn_probs", "attn_context"])
def test_factor_of_a_percent_and_ten_times_the_narrow_tolerance_fail(stage: str):
    name, right = f"l1.{stage}", trace()
    narrow = checks(right, "transformers")[name].isolated.tolerance.error
    finite = np.where(np.isfinite(right[name]), right[name], 0)
    noise = np.random.default_rng(0).normal(size=finite.shape).astype(np.float32) * (right[name] != 0)
    noise *= np.float32(10 * narrow) * np.linalg.norm(finite) / np.linalg.norm(noise)
    for wrong in (right[name] * np.float32(1.01), right[name] + noise):
        assert failing({**right, name: wrong})[:1] == [name]
