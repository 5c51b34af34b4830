"""Benchmarks: the arithmetic of their figures, and engines that do run what they say. No speed is asserted."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ggml_kernels import NEEDS_GGML
from helpers.refusals import assert_tells, refuses

from llorch.apps.bench import measure as bench
from llorch.apps.bench import torch as torch_bench
from llorch.apps.bench.measure import Load, NumpyEngine, measure, numpy_subject, report
from llorch.apps.bench.torch import TorchEngine, torch_subject
from llorch.families.config import ModelConfig
from llorch.families.real_shapes import SHAPES
from llorch.files.quant import GGMLType
from llorch.files.tensor_names import inventory
from llorch.judging.expectations.quantised_models import write_model
from llorch.model.model import load
from llorch.ops.compiled.ggml import ggml_kernels
from llorch.ops.numerics import GGML, GGML_KERNELS
from llorch.pytorch.device import target
from llorch.pytorch.kernels.kernel_selection import speed_up
from llorch.pytorch.kernels.packing import PACKERS, decode
from llorch.pytorch.random_weights import random_bytes, random_fields, random_model, weight_bytes

LOAD = Load(prompt=12, decode=3, batch=1, rounds=2)
FIGURES = {"tokens_per_s", "flop_per_s", "share_of_matmul"}


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.COPY_BYTES, "cpu", 1 << 12)
    monkeypatch.setitem(bench.PRODUCT_WIDTH, "cpu", 16)


@pytest.fixture
def small() -> ModelConfig:
    return ModelConfig(
        family="llama", hidden_size=256, intermediate_size=512, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64,
        vocab_size=96, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, max_position_embeddings=64,
        qkv_bias=False, o_bias=False, qk_norm=False, tie_word_embeddings=False,
    )  # fmt: skip


def require_sound(result: dict) -> None:
    assert result["prefill"].keys() == FIGURES
    assert result["decode"].keys() == FIGURES | {"bytes_per_step", "bytes_per_s", "share_of_copy"}
    for part in (result["prefill"], result["decode"]):
        spread = part["tokens_per_s"]
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert min(result["ceilings"].values()) > 0


def test_the_figures_follow_from_the_seconds():
    model = load("micro-llama")  # untied: a step reads one row of its embedding
    subject, config = numpy_subject(model), model.config
    n_read = sum(int(np.prod(model.weights.shape(name))) for name in model.weights if name != "embed_tokens")
    assert subject.weight_bytes == 4 * n_read
    wanted = Load(prompt=100, decode=20, batch=1, rounds=3)
    result = report(subject, wanted, [2.0, 1.0, 4.0], [10.0, 5.0, 20.0], copy=1e9, product=1e10)
    assert result["prefill"]["tokens_per_s"] == {"median": 50.0, "min": 25.0, "max": 100.0}
    assert result["decode"]["tokens_per_s"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    per_step = 4 * n_read + 2 * config.n_layers * config.kv_width * 110 * 4
    assert result["decode"]["bytes_per_step"] == per_step
    assert result["decode"]["bytes_per_s"] == 2 * per_step
    assert result["decode"]["share_of_copy"] == 2 * per_step / 1e9
    shapes = [model.weights.shape(name) for name in model.weights]
    matrices = n_read - sum(shape[0] for shape in shapes if len(shape) == 1)
    flop = 2 * matrices + 4 * config.n_layers * config.q_width * 110
    assert result["decode"]["flop_per_s"] == 2 * flop
    layers = matrices - config.hidden_size * config.vocab_size
    attention = 4 * config.n_layers * config.q_width * 50
    assert result["prefill"]["flop_per_s"] * 2 == 100 * (2 * layers + attention) + 2 * (matrices - layers)
    assert result["prefill"]["share_of_matmul"] == result["prefill"]["flop_per_s"] / 1e10


def test_the_threads_are_those_of_the_products(monkeypatch: pytest.MonkeyPatch):
    pools = [{"user_api": "openmp", "num_threads": 7}, {"user_api": "blas", "num_threads": 3}]
    monkeypatch.setattr("llorch.apps.bench.measure.threadpool_info", lambda: pools)
    assert numpy_subject(load("story")).threads == 3


def test_of_experts_those_that_are_chosen_count():
    model = load("micro-qwen3-moe")  # 3 of 7 experts, whose three matrices are 20 by 32, in two layers
    assert bench.token_flop(model.config, 0) == 2 * 2 * (40 * 32 + 2 * 20 * 32 + 32 * 40 + 7 * 32 + 3 * 3 * 20 * 32)
    everything = sum(4 * int(np.prod(model.weights.shape(name))) for name in model.weights if name != "embed_tokens")
    assert numpy_subject(model).weight_bytes == everything - 4 * 2 * 4 * 3 * 20 * 32  # four are not


@NEEDS_GGML
def test_ggml_s_kernels_are_named_and_read_the_bytes_of_the_file(tmp_path: Path):
    path = write_model("Q4_K_M", tmp_path)
    own, by_ggml = (numpy_subject(load(path, numerics=numerics)) for numerics in (GGML, GGML_KERNELS))
    assert by_ggml.versions == {**own.versions, "ggml": ggml_kernels().version}
    assert (own.weights, by_ggml.weights) == ("float32", "packed")
    assert by_ggml.weight_bytes < own.weight_bytes / 5


def test_a_batch_reads_the_weights_once_and_every_cache():
    subject = numpy_subject(load("story"))
    one, four = (
        report(subject, Load(64, 8, batch, 1), [1.0], [1.0], copy=1.0, product=1.0)["decode"] for batch in (1, 4)
    )
    cache = one["bytes_per_step"] - subject.weight_bytes
    assert four["bytes_per_step"] == subject.weight_bytes + 4 * cache
    assert four["tokens_per_s"]["median"] == 4 * one["tokens_per_s"]["median"]
    assert four["bytes_per_s"] / four["bytes_per_step"] == one["bytes_per_s"] / one["bytes_per_step"]


def test_numpy_is_measured():
    model, seen = load("micro-qwen2"), []
    engine = NumpyEngine(model, LOAD)
    result = measure(engine, numpy_subject(model), LOAD, seen.append)
    require_sound(result)
    assert seen[1:] == ["warm-up", "round 1 of 2", "round 2 of 2"]
    assert_tells(seen[0], "copy", "product")
    assert len(bench.describe(result)) == 6


def test_numpy_takes_no_batch():
    with refuses(ValueError, "NumPy", got="--batch 2", where="bench"):
        NumpyEngine(load("story"), Load(4, 2, 2, 1))


@pytest.mark.parametrize(
    ("dtype", "packed", "batch"),
    [
        ("float32", None, 1),
        ("bfloat16", None, 3),
        ("float32", "Q8_0", 1),
        ("bfloat16", "Q4_0", 1),
        ("float32", "Q4_K", 2),
        ("float32", "Q6_K", 1),
    ],
)
def test_torch_is_measured_on_random_weights(small: ModelConfig, dtype: str, packed: str | None, batch: int):
    at, kind = target("cpu", dtype), None if packed is None else GGMLType[packed]
    model = random_model(small, at, kind)
    speed_up(model, at, "sdpa", compiled=False)
    run = Load(12, 3, batch, 1)
    engine = TorchEngine(model, at, run)
    subject = torch_subject(model, at, "small", dtype)
    require_sound(measure(engine, subject, run))
    assert engine.tokens.shape == (batch, run.decode + 1)
    assert engine.logprobs.isfinite().all()
    assert subject.weight_bytes < random_bytes(small, at, kind)


def test_a_copy_counts_what_is_read_and_written_and_a_product_both_its_operations(
    small: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    for module in (bench, torch_bench):
        monkeypatch.setattr(module, "best_time", lambda action: (action(), 2.0)[1])  # seconds
    for engine in (NumpyEngine(load("story"), LOAD), TorchEngine(random_model(small, target()), target(), LOAD)):
        assert engine.copy_rate() == 1 << 12
        assert engine.product_rate() == 16**3


def test_packed_weights_are_as_many_bytes_as_their_blocks(small: ModelConfig):
    at = target("cpu", "bfloat16")
    dense, packed = weight_bytes(random_model(small, at)), weight_bytes(random_model(small, at, GGMLType.Q8_0))
    vectors = 2 * (2 * small.n_layers + 1) * small.hidden_size
    assert packed - vectors == (dense - vectors) * 34 // 64


def test_a_width_that_is_no_whole_number_of_blocks_is_refused():
    with refuses(ValueError, expected=256, got=896, where="Q4_K"):
        random_fields((4, 896), GGMLType.Q4_K, torch.device("cpu"))


def test_random_weights_are_about_as_large_as_real_ones():
    for kind in PACKERS:
        torch.manual_seed(0)
        values = decode(random_fields((8, 512), kind, torch.device("cpu")), kind)
        assert 0.001 < float(values.std()) < 0.1
        assert values.isfinite().all()


def test_prompts_of_a_batch_differ_and_fit_the_vocabulary(small: ModelConfig):
    rows = bench.prompts(Load(20, 1, 4, 1), small.vocab_size)
    assert rows.shape == (4, 20)
    assert rows.max() < small.vocab_size
    assert len({tuple(row) for row in rows}) == 4


def test_what_does_not_fit_the_context_is_refused(small: ModelConfig):
    Load(60, 4, 1, 1).require(small)
    with refuses(ValueError, 60, "5 decoded", "64 tokens", "--prompt", "--decode", where="bench"):
        Load(60, 5, 1, 1).require(small)


def test_the_shapes_have_the_parameters_of_their_models():
    counts = {
        name: round(sum(int(np.prod(w.shape)) for w in inventory(shape).values()) / 1e6)
        for name, shape in SHAPES.items()
    }
    assert counts == {"qwen2.5-0.5b": 494, "llama-3.2-1b": 1236, "llama-2-7b": 6738, "llama-3-8b": 8030}
