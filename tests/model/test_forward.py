from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.random_adapters import random_adapter
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells, refuses
from safetensors.numpy import load_file, save_file

import llorch
from llorch.files import Weights, open_weights
from llorch.files.convert import convert
from llorch.judging.runners.numpy import run
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.model.forward import dense_only
from llorch.model.forward import forward as forward_of_dense_layers
from llorch.model.generate import raise_first_non_finite
from llorch.ops.numerics import GGML
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.builtin import BUILTIN, EVERY, builtin_path, installed_models
from llorch.runtime.errors import NonFiniteRun
from llorch.stages.stage_ref import Pass
from llorch.stages.table import keys

IDS = (5, 260, 17, 33, 2, 91, 144, 78, 300)


@pytest.fixture(scope="module", params=BUILTIN)
def weights(request: pytest.FixtureRequest) -> Weights:
    return open_weights(builtin_path(request.param))


@pytest.fixture(scope="module")
def float64_weights(weights: Weights) -> Weights:
    return weights.astype(np.float64)


@pytest.fixture(scope="module")
def one_pass_logits(float64_weights: Weights) -> np.ndarray:
    """The logits of one pass."""
    return run(float64_weights, Pass(IDS))["logits"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_stage_has_the_dtype_of_the_weights(weights: Weights, dtype: type[np.floating]):
    assert {array.dtype for array in run(weights.astype(dtype), Pass(IDS)).values()} == {np.dtype(dtype)}


def test_every_stage_is_recorded_in_table_order_with_its_stated_shape(weights: Weights):
    trace = run(weights, Pass(IDS))
    stated = {key: stage.shape(weights.config, seq=len(IDS), ctx=len(IDS)) for key, stage, _ in keys(weights.config)}
    assert {key: array.shape for key, array in trace.items()} == stated
    assert list(trace) == list(stated)


def test_recording_changes_no_number(weights: Weights):
    recorded = run(weights, Pass(IDS))["logits"]
    np.testing.assert_array_equal(recorded, forward(np.asarray(IDS), weights, KVCache(weights.config, weights.dtype)))


def test_a_second_run_after_a_warm_up_gives_the_same_bits(weights: Weights):
    first = run(weights, Pass(IDS))["logits"]
    run(weights, Pass(IDS[::-1]))
    np.testing.assert_array_equal(run(weights, Pass(IDS))["logits"], first)


@pytest.mark.parametrize("n_cached", range(1, len(IDS)))
def test_prefill_in_two_parts_equals_one(float64_weights: Weights, one_pass_logits: np.ndarray, n_cached: int):
    parts = run(float64_weights, Pass(IDS), n_cached=n_cached)["logits"]
    np.testing.assert_allclose(
        parts, one_pass_logits[n_cached:], rtol=0, atol=1e-12 * np.abs(one_pass_logits).max(), strict=True
    )


def test_token_by_token_equals_one_pass(float64_weights: Weights, one_pass_logits: np.ndarray):
    cache = KVCache(float64_weights.config, float64_weights.dtype)
    stepwise = [forward(np.asarray([token]), float64_weights, cache)[0] for token in IDS]
    np.testing.assert_allclose(
        np.stack(stepwise), one_pass_logits, rtol=0, atol=1e-12 * np.abs(one_pass_logits).max(), strict=True
    )


def test_last_only_gives_the_last_row(float64_weights: Weights, one_pass_logits: np.ndarray):
    last = forward(
        np.asarray(IDS), float64_weights, KVCache(float64_weights.config, float64_weights.dtype), last_only=True
    )
    np.testing.assert_allclose(last, one_pass_logits[-1:], rtol=1e-12, atol=1e-12, strict=True)


def test_a_token_cannot_see_those_after_it(weights: Weights):
    one, other = (run(weights, Pass(ids)) for ids in (IDS, (*IDS[:-1], IDS[-1] + 1)))
    for key, stage, _ in keys(weights.config):
        if stage.axes.startswith("seq"):
            np.testing.assert_array_equal(one[key][:-1], other[key][:-1], err_msg=key)


@pytest.mark.parametrize("name", installed_models(EVERY))
def test_forward_alone_on_a_built_in_model_is_right_or_refused(name: str):
    weights = open_weights(builtin_path(name))
    ids = np.asarray(IDS) % weights.config.vocab_size
    expected = forward(ids, weights, KVCache(weights.config, weights.dtype))
    if name in BUILTIN:
        logits = forward_of_dense_layers(ids, weights, KVCache(weights.config, weights.dtype))
        np.testing.assert_array_equal(logits, expected, strict=True)
        return
    with refuses(ValueError, "llorch.model.blocks.forward", "llorch.load", weights.config.family):
        forward_of_dense_layers(ids, weights, KVCache(weights.config, weights.dtype))


@pytest.mark.parametrize("feature", ["interleaved_rope_hf", "attention_gate"])
def test_dense_only_with_a_feature_of_the_whole_model_is_refused(feature: str):
    config = open_weights(builtin_path("micro-llama")).config
    assert dense_only(config, 1) == {}
    with refuses(ValueError, "llorch.model.blocks.forward", "layer 1"):
        dense_only(replace(config, **{feature: True}), 1)


GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
DRAWN = SamplingSettings(temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gate and up projections of layer 1 are finite and large; what SwiGLU makes of them is not."""
    made = tmp_path_factory.mktemp("large") / "model"
    convert(builtin_path("micro-llama"), made)
    tensors = load_file(made / "model.safetensors")
    tensors |= {name: tensors[name] * np.float32(1e30) for name in (GATE, UP)}
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.mark.parametrize("settings", [SamplingSettings(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "start",
    [
        lambda folder, settings: llorch.load(folder).generate([5, 6], settings=settings),
        lambda folder, settings: llorch.load(folder, numerics=GGML).generate([5, 6], settings=settings),
        lambda folder, settings: llorch.load_torch(folder).generate([5, 6], settings=settings),
        lambda folder, _: llorch.load_torch(folder).generate_batch([[5, 6], [7]], settings=[SamplingSettings(), DRAWN]),
    ],
    ids=["numpy", "ggml", "torch", "batch"],
)
def test_a_run_that_overflows_ends_at_once_and_names_the_stage(start: Any, settings: SamplingSettings, folder: Path):
    with refuses(NonFiniteRun, "l1.ffn_act", "float32", where=folder) as caught:
        next(start(folder, settings))
    assert caught.value.stage == "l1.ffn_act"


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_command_ends_with_one_line_and_no_token(backend: str, folder: Path):
    result = invoke("run", str(folder), "Once", "-n", "5", "--backend", backend)
    assert_cli_refuses(result, 2, "l1.ffn_act", where=folder)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_alpha_of_an_adapter_may_overflow_too(backend: str, tmp_path: Path):
    model = llorch.load("micro-llama")
    write_peft(random_adapter(model.config, lora_alpha=1e60), tmp_path / "adapter", base=identity_of(model.weights))
    how = ("--backend", backend, "--adapter", str(tmp_path / "adapter"))
    result = invoke("run", "micro-llama", "Once", "-n", "5", *how)
    assert (result.stdout, result.exit_code) == ("", 2)
    assert_tells(result.stderr.splitlines()[-1], "llorch:", "l0.q_proj", where=builtin_path("micro-llama"))


def test_the_stage_is_named_where_it_begins_after_some_tokens(monkeypatch: pytest.MonkeyPatch):
    tokens = llorch.load("micro-llama").generate([5, 6, 7], ignore_eos=True)
    next(tokens)
    monkeypatch.setattr("llorch.model.forward.swiglu", lambda gate, up: gate * np.float32(np.inf))
    with refuses(NonFiniteRun, "l0.ffn_act") as caught:
        next(tokens)
    assert caught.value.stage == "l0.ffn_act"


def test_hidden_scores_are_no_fault_and_a_second_pass_that_is_finite_blames_the_logits():
    def run(on_stage: Any) -> None:
        on_stage("l0.attn_scores", np.array([1.0, -np.inf]))

    with refuses(NonFiniteRun, "only", where=("x:", "logits")):
        raise_first_non_finite(run, where="x", dtype="float32")
    for wrong in (np.inf, np.nan):
        with refuses(NonFiniteRun, "1 of 2", where="l0.attn_scores"):
            raise_first_non_finite(
                lambda on_stage, wrong_number=wrong: on_stage("l0.attn_scores", np.array([1.0, wrong_number])),
                where="",
                dtype="",
            )
